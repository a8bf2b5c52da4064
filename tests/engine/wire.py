"""A plain client of the ring server, and what a process holds: for tests on real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from engine import RingServer
from engine.binding import native
from tests.engine.world import Ask

TIMEOUT = 30  # s, of any one call of a client: reached only when something is forgotten


def ring_allowed() -> str:
    """Why io_uring cannot be used here; empty: it can."""
    ffi, lib = native()
    result = lib.rl_probe(ffi.new("rl_ring_info *"))
    return "" if result >= 0 else f"io_uring is not allowed here: {os.strerror(-result)}"


class Wire(AbstractContextManager["Wire"]):
    """One connection: asks, and reads exactly what it must get.

    :param rcvbuf: bytes of SO_RCVBUF, set before connecting; 0: the kernel's choice.
    """

    def __init__(self, server: RingServer, rcvbuf: int = 0) -> None:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if rcvbuf:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect(server.address)
        self.asked: list[Ask] = []
        self.read = 0
        self._left = b""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def ask(self, *asks: Ask) -> Wire:
        self.asked += asks
        self.socket.sendall(b"".join(ask.wire() for ask in asks))
        return self

    def check(self, count: int | None = None) -> None:
        """Reads the answers to the next ``count`` requests, all if None: every byte, in order."""
        last = len(self.asked) if count is None else self.read + count
        for number in range(self.read, last):
            expected = self.asked[number].answer(number)
            got = self.take(len(expected))
            assert len(got) == len(expected), f"answer {number}: {len(got)} of {len(expected)}"
            assert got == expected, f"answer {number} is wrong"
        self.read = last

    def take(self, size: int) -> bytes:
        """That many bytes; fewer when the stream ends before."""
        pieces, have = [self._left], len(self._left)
        while have < size and (piece := self.socket.recv(1 << 16)):
            pieces.append(piece)
            have += len(piece)
        got = b"".join(pieces)
        self._left = got[size:]
        return got[:size]

    def ended(self) -> bool:
        """The server has closed: end of stream or reset, and nothing before it."""
        try:
            return self.take(1) == b""
        except ConnectionError:
            return True


def until(holds: Callable[[], Any], seconds: float = TIMEOUT) -> bool:
    """Waits for something to hold, at most so long; whether it does."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def held() -> tuple[set[str], int]:
    """Threads of this process, by id, and how many descriptors it has."""
    threads = {path.name for path in Path("/proc/self/task").iterdir()}
    return threads, len(list(Path("/proc/self/fd").iterdir()))


class Change:
    """How much counters grew while the block ran."""

    def __init__(self, server: RingServer, seconds: float) -> None:
        before = server.counters()
        time.sleep(seconds)
        after = server.counters()
        self.seconds = (int(after["t_ns"]) - int(before["t_ns"])) / 1e9
        self._before, self._after = before, after

    def __getitem__(self, name: str) -> int:
        return int(self._after[name]) - int(self._before[name])

    def per_second(self, name: str) -> float:
        return self[name] / self.seconds

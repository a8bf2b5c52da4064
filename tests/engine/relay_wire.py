"""What the tests of the relay on real sockets share: a client, and a look at a relay at rest."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine import SpliceRelay
from lab import content
from lab.choreography import MIN_SPLICE
from lab.origin import Origin

WINDOW_S = 0.2
SPIN = 20_000  # waits a second; a quiet loop makes a handful, a spinning one more than 100,000
SMALL = 4096


def eventually(holds: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to hold in time"
        time.sleep(0.005)


class Browser:
    """A client with a small receive buffer, which reads what it is told to."""

    def __init__(self, relay: SpliceRelay, rcvbuf: int = SMALL) -> None:
        self.stream = content.StreamCheck()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.socket.settimeout(5)
        self.socket.connect(relay.address)
        self.asked = 0

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, *queries: str, size: int = 0) -> None:
        """GETs in one write; ``size`` of each body."""
        data = b""
        for query in queries:
            target = f"/object?size={size}&seq={self.asked}&{query}"
            data += f"GET {target} HTTP/1.1\r\nHost: t\r\n\r\n".encode()
            self.stream.expect(size)
            self.asked += 1
        self.socket.sendall(data)

    def read(self, size: int) -> int:
        """So many bytes of the stream, fewer only when it ends or falls silent."""
        got = 0
        while got < size and (count := self.read_some(size - got)):
            got += count
        return got

    def read_some(self, size: int = 65_536) -> int:
        try:
            data = self.socket.recv(min(size, 65_536))
        except TimeoutError:
            return 0
        self.stream.feed(data)
        return len(data)

    def read_all(self) -> bool:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # or it takes seconds
        while not self.stream.complete and self.stream.in_order:
            if not self.read_some():
                break
        return self.stream.complete and self.stream.in_order

    def rest(self) -> bytes:
        """Everything until the relay closes."""
        return b"".join(iter(lambda: self.socket.recv(65_536), b""))

    def raw(self, data: bytes) -> bytes:
        self.socket.sendall(data)
        return self.rest()


def relay_of(origin: Origin, policy: Any, **settings: Any) -> SpliceRelay:
    return SpliceRelay(origin.target, policy, so_sndbuf=16_384, origin_sndbuf=16_384, **settings)


class Window:
    """What the relay did while nobody moved."""

    def __init__(self, relay: SpliceRelay, seconds: float = WINDOW_S) -> None:
        before = relay.counters()
        time.sleep(seconds)
        after = relay.counters()
        self.changes = {
            name: int(value) - int(before[name])
            for name, value in after.items()
            if isinstance(value, int)
        }
        wall = self.changes["t_ns"]
        self.seconds = wall / 1e9
        self.on_queue = (self.changes["run_ns"] + self.changes["queue_ns"]) / wall

    def rate(self, name: str) -> float:
        return self.changes[name] / self.seconds

    def check(self, spins: bool) -> None:
        if spins:
            assert self.rate("waits") > SPIN
            assert self.rate("noop_dispatches") > SPIN
            assert self.on_queue > 0.3  # 1.0, but for what the host of this machine takes away
        else:
            assert self.changes["waits"] <= 5
            assert self.changes["noop_dispatches"] == 0
            assert self.changes["thread_cpu_ns"] < 0.05e9 * self.seconds


def come_to_rest(relay: SpliceRelay) -> None:
    """Nothing has moved for longer than a TCP timer of a tiny window takes, 0.2 s."""
    def moved() -> tuple[Any, ...]:
        counts = relay.counters()
        return tuple(value for name, value in counts.items() if name.startswith("bytes_"))

    last, since = moved(), time.monotonic()
    while time.monotonic() - since < 0.25:
        time.sleep(0.02)
        if (now := moved()) != last:
            last, since = now, time.monotonic()


def past_the_body(relay: SpliceRelay, client: Browser) -> None:
    """To where too little is left to forward for a splice, with data in the pipe.

    Bytes that come in dribs, as on a busy machine, fill the pipe in the middle of the body, where
    every policy sleeps.
    """
    come_to_rest(relay)
    for _ in range(32):
        response = relay.sessions()[0].response
        if not response.piped or response.scheduled or response.to_forward < MIN_SPLICE:
            return
        client.read(4096)
        come_to_rest(relay)


def unchunk(body: bytes) -> Iterator[bytes]:
    while True:
        line, _, body = body.partition(b"\r\n")
        size = int(line, 16)
        if size == 0:
            assert body == b"\r\n"
            return
        yield body[:size]
        assert body[size : size + 2] == b"\r\n"
        body = body[size + 2 :]

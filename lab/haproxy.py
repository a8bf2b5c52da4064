"""The HAProxy of this machine in the relay's place: the same clients, origin and windows.

Its configuration stands in a temporary folder and says what the relay does by itself: splice both
ways, one connection to the origin a request, the same socket buffers.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

from engine.errors import MachineError
from engine.handle import Handle
from lab import proc
from lab.scratch import scratch

NAME = "haproxy"
HARD_STOP_MS = 300
_START_S = 10.0
_END_S = 5.0

_CONFIG = """\
global
    maxconn 1024
    nbthread 1
    hard-stop-after {hard_stop}ms
    tune.sndbuf.client {sndbuf}
    tune.sndbuf.server {origin_sndbuf}
defaults
    mode http
    option http-server-close
    option splice-request
    option splice-response
    timeout connect 5s
    timeout client 600s
    timeout server 600s
listen relay
    bind {host}:{port}
    server origin {origin}
"""


@cache
def version() -> str | None:
    """The version that is installed, as ``2.6.12``; None: none."""
    program = shutil.which(NAME)
    if program is None:
        return None
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\d+(?:\.\d+)*(?:-dev\d+)?)", said)
    return found[1] if found else None


class Haproxy(Handle):
    """HAProxy in front of ``origin``; a context manager, and a :class:`lab.measure.Target`.

    Socket buffers in bytes; 0: the kernel's choice.
    """

    def __init__(self, origin: str, *, so_sndbuf: int = 0, origin_sndbuf: int = 0) -> None:
        self.host, self.port, self.pid = "127.0.0.1", 0, 0
        self._origin = origin
        self._buffers = {"sndbuf": so_sndbuf, "origin_sndbuf": origin_sndbuf}
        self._folder = scratch("ringlab-haproxy-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Haproxy:
        if version() is None:
            raise MachineError("HAProxy is not installed (Debian: apt-get install haproxy)")
        with socket.socket() as free:
            free.bind((self.host, 0))
            self.port = int(free.getsockname()[1])
        config = Path(self._folder.name) / "haproxy.cfg"
        config.write_text(_CONFIG.format(
            host=self.host, port=self.port, origin=self._origin, hard_stop=HARD_STOP_MS,
            **self._buffers), encoding="ascii")
        self._process = subprocess.Popen(
            [NAME, "-db", "-q", "-f", str(config)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self._wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def thread_ids(self) -> Sequence[int]:
        """All of its threads: one."""
        return proc.tasks(self.pid)

    def counters(self) -> None:
        """It exports none that tell a spin."""
        return

    def stops(self, seconds: float) -> bool:
        """Does it end, asked to with SIGUSR1, within so long? Its own limit is HARD_STOP_MS."""
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((self.host, self.port), 0.2).close()
                return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise MachineError("HAProxy did not start with the configuration of this case")
            time.sleep(0.02)

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

"""The bundled origin in a process of its own: its CPU is not the relay's, nor its descriptors.

The process ends when its pipe does: however the parent dies, nothing is left.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from engine.errors import MachineError
from engine.handle import Handle
from engine.parameters import SOCKET_BUFFER, whole
from lab.origin import Origin

_START_S = 20.0
_END_S = 5.0


class OriginProcess(Handle):
    """An origin elsewhere; a context manager. ``target`` is its ``HOST:PORT``, ``pid`` its process.

    :param rcvbuf: SO_RCVBUF of its connections in bytes; 0: the kernel's choice.
    """

    def __init__(self, *, rcvbuf: int = 0) -> None:
        self.target = ""
        self.pid = 0
        self._rcvbuf = whole("rcvbuf", rcvbuf, SOCKET_BUFFER)
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OriginProcess:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "lab.origin_process", str(self._rcvbuf)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            # A Ctrl-C in the terminal is the parent's to handle.
            start_new_session=True,
        )
        try:
            told = json.loads(self._line())
        except BaseException:
            self._end()
            raise
        self.target, self.pid = told["target"], self._child.pid
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def ended(self) -> bool:
        """Whether its process is there no more."""
        return self._child is None or self._child.poll() is not None

    def _line(self) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            line = self._child.stdout.readline() if selector.select(_START_S) else b""
        if not line:
            raise MachineError(f"the origin's process did not start (status {self._child.poll()})")
        return line

    def _end(self) -> None:
        if self._child is None:
            return
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Origin(rcvbuf=int(sys.argv[1])) as origin:
        print(json.dumps({"target": origin.target}), flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    _main()

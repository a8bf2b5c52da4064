"""Thousands of clients that ask and then stall, in a process of their own.

In the server's process they would share its file limit, its memory figures and its process clock;
apart, what is measured there is the server's alone. The process is told what to do through a pipe,
one JSON line a command, and ends when that pipe does: however the parent dies, nothing is left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import selectors
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.errors import MachineError, RinglabError, UsageError
from engine.handle import Handle
from lab.choreography import Ask, target_of
from lab.clients import ClientError, request
from lab.content import StreamCheck

MOST = 100_000
PATIENCE_S = 20.0
# Handshakes under way at once: within every usual listen backlog, so that none is dropped and
# retried a second later.
_CONNECTING = 128
_SPARE_FILES = 64
_CHUNK = 256 * 1024
_TELL_S = 0.5
# Longer than any command waits for its own sake, so that the child's own error comes first.
_GRACE_S = 10.0

Progress = Callable[[int, int], object]


class Crowd(Handle):
    """``count`` clients of one server, moved together; a context manager.

    Each method returns when all of them are done, and raises ClientError (a connection failed),
    MachineError (a limit of this machine) or UsageError. ``progress(done, count)`` is called about
    twice a second. ``rcvbuf`` is SO_RCVBUF in bytes, set before connecting.
    """

    def __init__(
        self,
        host: str,
        port: int,
        count: int,
        *,
        rcvbuf: int = 4096,
        patience: float = PATIENCE_S,
        progress: Progress | None = None,
    ) -> None:
        if not 1 <= count <= MOST:
            raise UsageError(f"a crowd of {count:,}: give 1 to {MOST:,}")
        self.count = count
        self._progress = progress
        self._patience = patience
        setup = {"host": host, "port": port, "count": count, "rcvbuf": rcvbuf, "patience": patience}
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "lab.crowd", json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Unbuffered, so that select() sees whatever readline() has not taken.
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            # A Ctrl-C in the terminal is the parent's to handle.
            start_new_session=True,
        )
        self.pid = self._child.pid

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def connect(self) -> dict[str, Any]:
        """Connect everybody; returns ``{"connected": N, "seconds": S}``."""
        return self._tell({"do": "connect"})

    def ask(
        self, route: str = "sync", size: int = 65536, ms: int | None = None, depth: int = 1
    ) -> dict[str, Any]:
        """Everybody sends ``depth`` requests and reads nothing; returns ``{"asked": N}``."""
        step = Ask(route, size, ms)
        return self._tell({"do": "ask", "target": target_of(step), "size": size, "depth": depth})

    def waiting(self) -> dict[str, Any]:
        """``{"bytes": N, "clients": M}``: unread in the receive buffers, and how many hold some."""
        return self._tell({"do": "waiting"})

    def read_all(self) -> dict[str, Any]:
        """Everybody reads and checks all that was asked for.

        Returns ``bytes``, ``expected``, ``in_order``, ``whole`` (clients that got everything right)
        and ``fault``: None, or what is wrong with the first that did not.
        """
        return self._tell({"do": "read_all"})

    def close(self) -> None:
        """Close every connection and end the process; harmless when repeated."""
        stdin, stdout = self._child.stdin, self._child.stdout
        for pipe in (stdin, stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        try:
            self._child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(command).encode() + b"\n")
        except (BrokenPipeError, ValueError):
            raise ClientError("the crowd's process has ended") from None
        while True:
            answer = json.loads(self._line())
            if "progress" in answer:
                if self._progress is not None:
                    self._progress(answer["progress"], self.count)
                continue
            if "error" in answer:
                raise _ERRORS[answer["kind"]](answer["error"])
            return dict(answer)

    def _line(self) -> bytes:
        """The child's next line; it writes at least one every half second while it works."""
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            if not selector.select(self._patience + _GRACE_S):
                raise ClientError(f"the crowd's process has said nothing for {self._patience:g} s")
        # A line is one write, so readline() does not block in the middle of it.
        line = self._child.stdout.readline()
        if not line:
            raise ClientError(f"the crowd's process has ended (status {self._child.poll()})")
        return line


_ERRORS: dict[str, type[RinglabError]] = {
    "ClientError": ClientError, "MachineError": MachineError, "UsageError": UsageError,
}


def need_files(count: int, what: str) -> None:
    """Raise the soft limit of open files to the hard one if ``count`` more need it.

    MachineError, with the remedy, where the hard limit is too low.
    """
    need = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise MachineError(
            f"{what} need {need:,} open files and the hard limit is {hard:,}; raise it "
            f"(LimitNOFILE= of systemd, /etc/security/limits.conf) or ask for fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _ParentGone(Exception):
    """The pipe has ended: whoever wanted this crowd is no more."""


class _Member:
    """One connection of the child: its socket and what it has read."""

    __slots__ = ("socket", "stream")

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self.stream = StreamCheck()


class _Child:
    """The crowd's own process: one selector for the pipe and all sockets."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._host, self._port = str(setup["host"]), int(setup["port"])
        self._count, self._rcvbuf = int(setup["count"]), int(setup["rcvbuf"])
        self._patience = float(setup["patience"])
        self._where = f"{self._host}:{self._port}"
        self._members: list[_Member] = []
        self._buffer = bytearray(_CHUNK)
        self._told = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> None:
        """Obey commands until the pipe ends."""
        for line in sys.stdin.buffer:
            command = json.loads(line)
            try:
                answer = getattr(self, "do_" + command.pop("do"))(**command)
            except RinglabError as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            _say(answer)

    def do_connect(self) -> dict[str, Any]:
        """Connect all, with few handshakes under way at a time."""
        need_files(self._count, f"{self._count:,} connections")
        family, _, _, _, address = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        )[0]
        begun = moved = time.monotonic()
        pending = 0
        while len(self._members) < self._count or pending:
            while pending < _CONNECTING and len(self._members) < self._count:
                self._begin(family, address)
                pending += 1
            done = self._wait(moved, len(self._members) - pending, "connected")
            for member in done:
                self._connected(member)
            pending -= len(done)
            moved = time.monotonic() if done else moved
        return {"connected": len(self._members), "seconds": time.monotonic() - begun}

    def do_ask(self, target: str, size: int, depth: int) -> dict[str, Any]:
        """Send everybody's requests; they are small, so a socket that refuses them is broken."""
        text = request(target, self._where) * depth
        for number, member in enumerate(self._members):
            member.stream.expect(size, depth)
            try:
                if member.socket.send(text) != len(text):
                    raise BlockingIOError(errno.EAGAIN, "its send buffer is full")
            except OSError as error:
                raise ClientError(f"client {number} could not ask: {error.strerror}") from None
            self._report(number)
        return {"asked": len(self._members) * depth}

    def do_waiting(self) -> dict[str, Any]:
        """SIOCINQ of all."""
        unread = [
            struct.unpack("i", fcntl.ioctl(member.socket, termios.FIONREAD, bytes(4)))[0]
            for member in self._members
        ]
        return {"bytes": sum(unread), "clients": sum(1 for count in unread if count)}

    def do_read_all(self) -> dict[str, Any]:
        """Read until everybody has everything, has lost the connection, or nothing comes."""
        reading = 0
        for member in self._members:
            if not member.stream.complete:
                # The stall is over: with its small buffer the rest would come in a thousand bits.
                member.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK)
                self._selector.register(member.socket, selectors.EVENT_READ, member)
                reading += 1
        moved = time.monotonic()
        while reading:
            try:
                ready = self._wait(moved, len(self._members) - reading, "done")
            except ClientError:
                break  # silence is a result: delivered() says what is missing
            reading -= sum(not self._read(member) for member in ready)
            moved = time.monotonic() if ready else moved
        for member in self._members:
            self._forget(member)
        return self._delivered()

    def _begin(self, family: int, address: Any) -> None:
        member = _Member(socket.socket(family, socket.SOCK_STREAM))
        self._members.append(member)
        member.socket.setblocking(False)
        member.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._rcvbuf)
        self._result(member.socket.connect_ex(address))
        self._selector.register(member.socket, selectors.EVENT_WRITE, member)

    def _connected(self, member: _Member) -> None:
        self._result(member.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self._forget(member)

    def _result(self, number: int) -> None:
        if number in (0, errno.EINPROGRESS):
            return
        made = len(self._members)
        if number == errno.EADDRNOTAVAIL:
            raise MachineError(
                f"no free local port for connection {made:,}; widen net.ipv4.ip_local_port_range"
            )
        raise ClientError(f"connection {made:,} to {self._where}: {os.strerror(number)}")

    def _wait(self, moved: float, done: int, what: str) -> list[_Member]:
        """Members that are ready; ClientError once nothing has moved for as long as is allowed."""
        ready = []
        for key, _ in self._selector.select(_TELL_S):
            if key.fd == 0:
                raise _ParentGone  # no command comes while one is obeyed: this is the end
            ready.append(key.data)
        if not ready and time.monotonic() - moved > self._patience:
            raise ClientError(
                f"{done:,} of {self._count:,} clients {what}, then nothing for {self._patience:g} s"
            )
        self._report(done)
        return ready

    def _read(self, member: _Member) -> bool:
        """Take what is there; False when this member is done, well or badly."""
        try:
            count = member.socket.recv_into(self._buffer)
        except BlockingIOError:
            return True
        except OSError:
            count = 0
        if count:
            member.stream.feed(self._buffer, count)
        if count and member.stream.in_order and not member.stream.complete:
            return True
        self._forget(member)
        return False

    def _forget(self, member: _Member) -> None:
        try:
            self._selector.unregister(member.socket)
        except KeyError:
            pass

    def _delivered(self) -> dict[str, Any]:
        streams = [member.stream for member in self._members]
        bad = [
            f"client {number}: {each.fault or f'{each.missing:,} bytes are missing'}"
            for number, each in enumerate(streams)
            if not (each.complete and each.in_order)
        ]
        return {
            "bytes": sum(each.received for each in streams),
            "expected": sum(each.expected for each in streams),
            "in_order": all(each.in_order for each in streams),
            "whole": len(streams) - len(bad),
            "fault": bad[0] if bad else None,
        }

    def _report(self, done: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            _say({"progress": done})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _main() -> None:
    try:
        _Child(json.loads(sys.argv[1])).serve()
    except (_ParentGone, BrokenPipeError):
        # The parent's end of the pipe is gone, so the interpreter's last flush would complain.
        os._exit(0)


if __name__ == "__main__":
    _main()

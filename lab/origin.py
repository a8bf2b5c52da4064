"""The bundled origin: a small HTTP/1.1 server that does what the request's query says, slowly or
not at all. One origin serves every scenario of the splice case.

``GET /object?size=100000&chunk=65000&last=3000&delay_ms=300&seq=1``, each field optional:

======== ==================================================================================
size     bytes of body
seq      the body is that of response number ``seq`` of the pattern (:mod:`lab.content`)
chunk    chunked, in chunks of so many bytes; 0: with Content-Length
until    1: neither length nor chunks, the body ends with the connection
last     the last so many bytes (and the end of the connection) come later,
delay_ms by so much
fin      0: the connection stays open after the response until the other side closes it
silent   1: the request is read, and not answered before ``GET /release``
noread   1: of the request nothing but its head is read before that
ticket   of a held request: ``GET /release?ticket=N`` lets it go, whichever of the two comes first
cut      the body breaks off after so many bytes and the connection is closed,
reset    1: by a reset
garbage  1: the answer is not HTTP
check    1: the request's body must be that of response ``seq`` too, or the answer is 422
======== ==================================================================================

``GET /release`` lets every request go on that is held by ``silent`` or ``noread`` at that moment.
Who cannot know that a request has come so far (another connection may always overtake it) gives it
a ticket, and releases that.

It is deliberately plain: a thread a connection, blocking calls, a bounded number of both.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import TracebackType
from urllib.parse import parse_qsl, urlsplit

from engine.errors import UsageError
from engine.handle import Handle
from engine.parameters import PORT, SOCKET_BUFFER, Range, check_host, whole
from engine.startup import bind_error
from lab.content import PERIOD, pattern, phase

MOST_CONNECTIONS = 256
_BACKLOG = 1024
_LOOK_MS = 20
_MOST_HEAD = 16 * 1024
_PIECE = 256 * 1024
_CUT = struct.pack("ii", 1, 0)
_MOST = {"size": 1 << 30, "seq": 1 << 32, "delay_ms": 600_000}
_MOST_DIGITS = 20
RELEASE = "/release"
MOST_TICKET = 1 << 30
_TICKETS_KEPT = 1024
_TICKET = Range(0, 0, MOST_TICKET, "(0: none)")
_DONE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
_WRONG = b"HTTP/1.1 422 Unprocessable Content\r\nContent-Length: 0\r\n\r\n"
_GARBAGE = b"\x16\x03\x01 this is no HTTP\r\n\r\n"


@dataclass(frozen=True)
class Object:
    """What a request asks for: the fields of its query, all whole numbers. See the module."""

    size: int = 1000
    seq: int = 0
    chunk: int = 0
    until: int = 0
    last: int = 0
    delay_ms: int = 0
    fin: int = 1
    silent: int = 0
    noread: int = 0
    ticket: int = 0
    cut: int = -1
    reset: int = 0
    garbage: int = 0
    check: int = 0

    @classmethod
    def of(cls, target: str) -> Object:
        """From a request target; UsageError for a field that is unknown or no number in range."""
        known = {field.name for field in fields(cls)}
        given: dict[str, int] = {}
        for name, value in parse_qsl(urlsplit(target).query, keep_blank_values=True):
            most = _MOST.get(name, 1 << 30)
            digits = value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
            if name not in known or not digits or int(value) > most:
                raise UsageError(f"{name}={value!r:.40} is not allowed; fields: {sorted(known)}")
            given[name] = int(value)
        return cls(**given)

    @property
    def target(self) -> str:
        """The request target that asks for this."""
        named = (f"{each.name}={getattr(self, each.name)}" for each in fields(self)
                 if getattr(self, each.name) != each.default)
        return "/object?" + "&".join(named)

    @property
    def early(self) -> int:
        """Bytes of body that come before the delay."""
        return max(0, self.size - self.last)

    def head(self) -> bytes:
        """The head of the response."""
        lines = ["HTTP/1.1 200 OK", "Content-Type: application/octet-stream"]
        if self.chunk:
            lines.append("Transfer-Encoding: chunked")
        elif not self.until:
            lines.append(f"Content-Length: {self.size}")
        return "\r\n".join([*lines, "", ""]).encode()

    def pieces(self, start: int, end: int) -> Iterator[bytes | memoryview]:
        """The body from ``start`` to ``end`` as it goes on the wire, its last chunk included."""
        while start < end:
            # Chunks end at their own multiples, wherever a delay or a piece of work may end.
            most = self.chunk - start % self.chunk if self.chunk else _PIECE
            size = min(most, end - start)
            data = _slice(self.seq, start, size)
            yield b"".join((b"%x\r\n" % size, data, b"\r\n")) if self.chunk else data
            start += size
        if self.chunk and end == self.size:
            yield b"0\r\n\r\n"


def _slice(seq: int, start: int, size: int) -> memoryview | bytes:
    at = (phase(seq) + start) % PERIOD
    if size <= PERIOD:
        return pattern()[at : at + size]
    return b"".join(_slice(seq, start + done, min(PERIOD, size - done))
                    for done in range(0, size, PERIOD))


class Origin(Handle):
    """The origin on a thread of its own; use it as a context manager.

    :param rcvbuf: SO_RCVBUF of its connections in bytes; 0: the kernel's choice.
    :param sndbuf: SO_SNDBUF, the same.

    ``requests`` counts what was asked since the start, ``connections`` those open now.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, rcvbuf: int = 0, sndbuf: int = 0
    ) -> None:
        self._host = check_host(host)
        self._asked_port = whole("port", port, PORT)
        self._buffers = {socket.SO_RCVBUF: whole("rcvbuf", rcvbuf, SOCKET_BUFFER),
                         socket.SO_SNDBUF: whole("sndbuf", sndbuf, SOCKET_BUFFER)}
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._ending = threading.Event()
        self._releases = 0
        self._released: dict[int, None] = {}  # tickets, oldest first
        self.requests = 0

    @property
    def address(self) -> tuple[str, int]:
        """``(host, port)``."""
        if self._listener is None:
            raise UsageError("the origin is not running; start it with start() or a with block")
        return self._host, int(self._listener.getsockname()[1])

    @property
    def target(self) -> str:
        """``HOST:PORT``, as a relay takes it."""
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._open)

    def release(self, ticket: int = 0) -> None:
        """Lets every request go on that is held; as ``GET /release`` does.

        With a ticket: those that have this one, also if they come only later.
        """
        ticket = whole("ticket", ticket, _TICKET)
        with self._lock:
            if not ticket:
                self._releases += 1
                return
            self._released[ticket] = None
            if len(self._released) > _TICKETS_KEPT:
                del self._released[next(iter(self._released))]

    def start(self) -> Origin:
        """Listens and serves; returns itself."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for option, value in self._buffers.items():
                if value:
                    listener.setsockopt(socket.SOL_SOCKET, option, value)
            listener.bind((self._host, self._asked_port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise bind_error(error.errno or errno.EIO, self._host, self._asked_port) from None
        self._ending.clear()
        self._listener = listener
        self._thread = threading.Thread(target=self._accept, args=(listener,), name="rl-origin")
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends every connection and thread; safe to call again."""
        if self._listener is None or self._thread is None:
            return
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._listener = None
        with self._lock:
            open_now = dict(self._open)
        for connection, thread in open_now.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def __enter__(self) -> Origin:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- serving --------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._ending.is_set():
            if not self._free.acquire(timeout=_LOOK_MS / 1e3):
                continue  # all that are allowed are open; it may be told to end meanwhile
            try:
                connection, _ = listener.accept()
            except OSError as error:
                self._free.release()
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(0.05)  # until somebody closes; at once would fail at once
                continue
            thread = threading.Thread(target=self._connection, args=(connection,), name="rl-origin")
            with self._lock:
                self._open[connection] = thread
            thread.start()

    def _connection(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._talk(connection)
        except OSError:
            pass  # the other side went away
        finally:
            with self._lock:
                del self._open[connection]
            self._free.release()

    def _talk(self, connection: socket.socket) -> None:
        rest = b""
        while True:
            head, rest = _read_head(connection, rest)
            if not head:
                return
            with self._lock:
                self.requests += 1
            try:
                method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
                wanted, path = Object.of(target), urlsplit(target).path
            except (UsageError, ValueError):  # a field, a request line, or an address that is none
                connection.sendall(_REFUSED)
                return
            if path == RELEASE:
                self.release(wanted.ticket)
                connection.sendall(_DONE)
                continue
            if wanted.noread and not self._held(connection, wanted.ticket):
                return
            right, rest = _read_body(connection, head, rest, wanted.seq)
            if wanted.check and not right:
                connection.sendall(_WRONG)
                return
            if wanted.silent and not self._held(connection, wanted.ticket):
                return
            if not self._answer(connection, wanted, method == "HEAD"):
                return

    def _answer(self, connection: socket.socket, wanted: Object, head_only: bool) -> bool:
        """Whether the connection goes on."""
        if wanted.garbage:
            connection.sendall(_GARBAGE)
            return False
        body_first = not head_only and (wanted.early or not wanted.last)
        connection.sendall(wanted.head(), socket.MSG_MORE if body_first else 0)
        if wanted.cut >= 0:
            _send(connection, wanted, 0, min(wanted.cut, max(0, wanted.size - 1)))
            if wanted.reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CUT)
            return False
        if body_first:
            _send(connection, wanted, 0, wanted.early)
        if wanted.delay_ms and self._ending.wait(wanted.delay_ms / 1e3):
            return False
        if not head_only and wanted.last:
            _send(connection, wanted, wanted.early, wanted.size)
        return not wanted.fin and not wanted.until

    def _held(self, connection: socket.socket, ticket: int) -> bool:
        """Waits, without a byte read, for a release; False: the other side has gone, or it ends."""
        poll, earlier = select.poll(), self._releases
        poll.register(connection, select.POLLRDHUP)
        while self._releases == earlier and ticket not in self._released:
            if self._ending.is_set() or poll.poll(_LOOK_MS):
                return False
        return True


def _send(connection: socket.socket, wanted: Object, start: int, end: int) -> None:
    for piece in wanted.pieces(start, end):
        connection.sendall(piece)


def _read_head(connection: socket.socket, known: bytes) -> tuple[bytes, bytes]:
    """The next head and what came behind it; nothing when there is none any more."""
    while (end := known.find(b"\r\n\r\n")) < 0:
        more = connection.recv(65_536) if len(known) < _MOST_HEAD else b""
        if not more:
            return b"", b""
        known += more
    return known[: end + 4], known[end + 4 :]


def _read_body(
    connection: socket.socket, head: bytes, rest: bytes, seq: int
) -> tuple[bool, bytes]:
    """Reads over the request's body: whether it was the one it should be, and what came behind.

    Of a chunked one only the end is looked for.
    """
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n")[1:])
    said = {name.strip(): value.strip() for name, _, value in lines}
    if said.get(b"transfer-encoding") == b"chunked":
        while b"0\r\n\r\n" not in rest[-5:]:
            more = connection.recv(65_536)
            if not more:
                return True, b""
            rest = (rest + more)[-5:]
        return True, b""
    size, at, right = int(said.get(b"content-length", b"0")), 0, True
    while at < size:
        taken = rest[: size - at] or connection.recv(65_536)
        if not taken:
            return False, b""
        part, rest = taken[: size - at], rest[len(taken) :] or taken[size - at :]
        right &= part == _slice(seq, at, len(part))
        at += len(part)
    return right, rest

"""One client connection whose socket state is under control: what it asks, and when it reads.

A stall is not a pause of the program: it is a receive buffer that is full and stays full. So the
size of that buffer is set before connecting (later the kernel no longer shrinks the window it
offered), and nothing here ever reads a byte that it was not told to read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from engine.errors import RinglabError, UsageError
from engine.handle import Handle
from lab.content import StreamCheck, body

PATIENCE_S = 10.0
MAX_DEPTH = 64
_CHUNK = 256 * 1024
# How long the rest of a broken stream may pause before it counts as over: its framing is lost, so
# nothing in it says where it ends.
_AFTER_FAULT_S = 0.3
_SEND_LOOK_S = 0.05


class ClientError(RinglabError):
    """A connection that did not do what the choreography asked of it: refused, reset, silent."""


class Client(Handle):
    """A blocking client of one server; every wait in it is bounded by ``patience`` seconds.

    ``rcvbuf`` is SO_RCVBUF in bytes (0: the kernel's choice; the kernel doubles what it is given).
    ``stream`` counts and checks what was read. ``ended`` says how the stream ended, in words, once
    it has: "closed by the server", "reset by the server".
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rcvbuf: int = 0,
        patience: float = PATIENCE_S,
        compare: bool = True,
    ) -> None:
        self.stream = StreamCheck(compare=compare)
        self.ended: str | None = None
        self._patience = patience
        self._sender: threading.Thread | None = None
        self._closed = threading.Event()
        self._where = f"{host}:{port}"
        self._buffer = bytearray(_CHUNK)
        self._socket = connect(host, port, rcvbuf, patience)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """The socket's file descriptor, for select()."""
        return self._socket.fileno()

    def ask(self, target: str, size: int | None = None, count: int = 1) -> None:
        """Send ``count`` GET requests for ``target`` in one write, each for ``size`` bytes of body.

        ``size`` None leaves the length to the server's answer.
        """
        if not 1 <= count <= MAX_DEPTH:
            raise UsageError(f"{count} requests in one write: give 1 to {MAX_DEPTH}")
        self.stream.expect(size, count)
        try:
            self._socket.sendall(request(target, self._where) * count)
        except OSError as error:
            self._lost(error)
            raise self._error(f"did not take {count} requests for {target}", error) from error

    def ask_for(self, targets: Sequence[tuple[str, int]], upload: int = 0) -> None:
        """Send requests of different targets in one write, each with the size of its body.

        With ``upload`` they are POSTs of so many bytes of the pattern. A body that nobody takes
        does not hold the caller up: it is sent beside whatever comes next.
        """
        first = self.stream.asked
        parts = []
        for number, (target, size) in enumerate(targets):
            self.stream.expect(size)
            parts.append(request(target, self._where, upload))
            if upload:
                parts.append(body(first + number, upload))
        data = b"".join(parts)
        if not upload:
            try:
                self._socket.sendall(data)
            except OSError as error:
                self._lost(error)
                raise self._error(f"did not take {len(targets)} requests", error) from error
            return
        self._stop_sending()
        self._closed.clear()
        self._sender = threading.Thread(
            target=self._send, args=(self._socket.dup(), data), name="client-sender"
        )
        self._sender.start()

    def _send(self, sending: socket.socket, data: bytes) -> None:
        with sending, contextlib.suppress(OSError):  # what is lost shows in what arrives
            left = memoryview(data)
            while left and not self._closed.is_set():
                if select.select([], [sending], [], _SEND_LOOK_S)[1]:
                    left = left[sending.send(left, socket.MSG_DONTWAIT) :]

    def read(self, size: int, rate: float = 0.0) -> int:
        """Read and check ``size`` bytes of the stream, at most ``rate`` bytes a second (0: free).

        Returns how many came: fewer once the server has closed, reset, or been silent for
        ``patience`` seconds.
        """
        got, begun = 0, time.monotonic()
        chunk = _CHUNK if not rate else max(1, min(_CHUNK, int(rate / 20)))
        while got < size:
            count = self._recv(min(chunk, size - got), self._patience)
            if not count:
                break
            got += count
            if rate:
                time.sleep(max(0.0, got / rate - (time.monotonic() - begun)))
        return got

    def read_until_silent(self, seconds: float) -> int:
        """Read and check whatever comes until nothing has for ``seconds``; returns how much."""
        got = 0
        while count := self._recv(_CHUNK, seconds):
            got += count
        return got

    def read_all(self, responses: int | None = None) -> bool:
        """Read until everything asked for has come; True when it is all there and in order.

        With ``responses``: until so many of them have, counted from the first. False when the
        server closed, reset or fell silent before that, or sent something else; ``stream`` and
        ``ended`` say which.
        """
        stream = self.stream

        def here() -> bool:
            return stream.complete or (responses is not None and stream.responses >= responses)

        while not here():
            patience = self._patience if stream.in_order else _AFTER_FAULT_S
            if not self._recv(_CHUNK, patience):
                break
        return here() and stream.in_order

    def gone(self, seconds: float) -> bool:
        """Has the server ended this connection, within so many seconds, without a byte read?

        Seen as a reset, or as the end of the stream with nothing before it in the receive buffer.
        """
        deadline = time.monotonic() + seconds
        while True:
            if self._reset_seen() or (self.waiting() == 0 and self._at_end()):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)

    def waiting(self) -> int:
        """SIOCINQ: bytes in the receive buffer that nobody has read."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4)))[0])
        except OSError:
            return 0

    def half_close(self) -> None:
        """Send FIN: this side writes no more, but still reads."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._lost(error)
            raise self._error("could not be half-closed", error) from error

    def reset(self) -> None:
        """Close with RST, as a crashed or impatient client does."""
        self._stop_sending()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            self._socket.close()

    def close(self) -> None:
        """Close the socket (RST when unread bytes are left, as TCP wants it)."""
        self._stop_sending()
        self._socket.close()

    def _stop_sending(self) -> None:
        self._closed.set()
        if self._sender is not None:
            self._sender.join()

    def _recv(self, size: int, patience: float) -> int:
        """One recv() into the checker: bytes, or 0 with the reason left in ``ended``."""
        self._socket.settimeout(patience)
        try:
            count = self._socket.recv_into(self._buffer, size)
        except TimeoutError:
            self.ended = f"silent for {patience:g} s"
            return 0
        except OSError as error:
            self._lost(error)
            return 0
        if count:
            self.ended = None
            self.stream.feed(self._buffer, count)
        else:
            self.ended = "closed by the server"
        return count

    def _reset_seen(self) -> bool:
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._lost(OSError(number, os.strerror(number)))
        return bool(number)

    def _at_end(self) -> bool:
        self._socket.settimeout(0)
        try:
            ended = not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lost(error)
            return True
        if ended:
            self.ended = "closed by the server"
        return ended

    def _lost(self, error: OSError) -> None:
        reset = error.errno in _RESET
        self.ended = "reset by the server" if reset else str(error.strerror or error)

    def _error(self, what: str, error: OSError) -> ClientError:
        return ClientError(f"the server at {self._where} {what}: {error.strerror or error}")


_RESET = (errno.ECONNRESET, errno.EPIPE)


def request(target: str, host: str, upload: int = 0) -> bytes:
    """The bytes of one GET request; of a POST's head, where there is a body to upload."""
    length = f"Content-Length: {upload}\r\n" if upload else ""
    return (f"{'POST' if upload else 'GET'} {target} HTTP/1.1\r\nHost: {host}\r\n{length}\r\n"
            ).encode("ascii")


def connect(host: str, port: int, rcvbuf: int, patience: float) -> socket.socket:
    """A connected socket with SO_RCVBUF set before the handshake offers a window."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ClientError(f"no connection to {host}:{port}: {error.strerror or error}") from error
    try:
        made.settimeout(patience)
        if rcvbuf:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        made.connect(address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        made.close()
        raise _not_connected(host, port, error, patience) from error
    except BaseException:
        made.close()
        raise
    return made


def _not_connected(host: str, port: int, error: OSError, patience: float) -> ClientError:
    if isinstance(error, TimeoutError):
        what = f"did not answer within {patience:g} s; is its listen queue full?"
    elif error.errno == errno.ECONNREFUSED:
        what = "refused the connection; is it running, and is the port right?"
    else:
        what = f"could not be connected to: {error.strerror or error}"
    return ClientError(f"the server at {host}:{port} {what}")

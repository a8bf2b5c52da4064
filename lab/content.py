"""Is what arrived what was sent: every byte, in order?

A loop that sleeps on live work looks as quiet as a healthy one, so no measurement of the lab counts
without this check. The bodies of the bundled servers are slices of one periodic pattern whose
16-byte records spell their own offset; a byte out of place therefore says where it came from.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from functools import cache

from engine.errors import RinglabError

PERIOD = 1 << 20
RECORD = 16
# The body of the next response begins so much further into the first PHASES bytes of the pattern
# (odd, so that no two of 65,536 responses of a connection begin alike).
STRIDE = 69061
PHASES = 1 << 16
MAX_HEAD = 64 * 1024
MAX_LINE = 4096
# A chunked body says only at its end how long it is.
_ENDLESS = 1 << 62

_RECORD = re.compile(rb"([0-9a-f]{15})\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


class ContentError(RinglabError):
    """A stream of responses was not what was asked for; the message says where and how."""


@cache
def pattern() -> memoryview:
    """Two periods of the pattern, so that any slice of up to one period is contiguous."""
    period = b"".join(b"%015x\n" % offset for offset in range(0, PERIOD, RECORD))
    return memoryview(period * 2)


def phase(response: int) -> int:
    """Where in the pattern the body of that response of a connection (from 0) begins."""
    return response * STRIDE % PHASES


def body(response: int, size: int, start: int = 0) -> bytes:
    """``size`` bytes of the body of that response, from its byte ``start`` on."""
    at = (phase(response) + start) % PERIOD
    periods = (at + size) // PERIOD + 1
    return bytes((pattern()[:PERIOD].tobytes() * periods)[at : at + size])


@dataclass(frozen=True)
class Fault:
    """The first byte that is wrong: its place, and in words what was found there."""

    response: int
    byte: int
    what: str

    def __str__(self) -> str:
        return f"byte {self.byte:,} of response {self.response} {self.what}"


class StreamCheck:
    """Checks the byte stream of one connection while it arrives; keeps counts, never the bytes.

    ``expect()`` names the responses asked for, in their order; ``feed()`` takes what a recv()
    returned, in pieces of any size. After the first fault the place of a byte means nothing any
    more: the rest is only counted, with each head not yet seen taken to be like the last one.
    Bodies have a Content-Length or are chunked; counts are of their bytes, never of the framing.

    ``compare=False`` checks framing and lengths alone, for a server whose bodies are its own.
    """

    def __init__(self, *, compare: bool = True) -> None:
        self.responses = 0  # complete and right
        self.raw = 0  # bytes of the stream, heads included
        self.fault: Fault | None = None
        self._compare = compare
        self._sizes: list[int | None] = []
        self._waiting: deque[int | None] = deque()
        self._head = bytearray()
        self._heads = 0
        self._head_bytes = 0
        self._bare_head = 0  # bytes of the last head, less the digits of its Content-Length
        self._size: int | None = None  # of the body now arriving; None between bodies
        self._at = 0  # its bytes so far
        self._stretch = 0  # its bytes up to the end of the chunk, or of the whole
        self._chunked = False
        self._awaited: str | None = None  # of a chunked body: the line that comes next
        self._line = bytearray()
        self._framing = 0  # bytes of such lines

    def expect(self, size: int | None, count: int = 1) -> None:
        """``count`` more responses were asked for; None leaves the size to the server's head."""
        self._sizes += [size] * count
        self._waiting.extend([size] * count)

    @property
    def asked(self) -> int:
        """Responses expected so far."""
        return len(self._sizes)

    @property
    def expected(self) -> int:
        """Bytes of body expected so far; what no request and no head has named counts as none."""
        return sum(size or 0 for size in self._sizes)

    @property
    def received(self) -> int:
        """Bytes of body that arrived, right or wrong."""
        if self.fault is None:
            return self.raw - self._head_bytes - len(self._head) - self._framing
        unseen = sum(self._bare_head + len(str(size or 0)) for size in self._sizes[self._heads :])
        return max(0, min(self.raw - self._head_bytes - self._framing - unseen, self.expected))

    @property
    def in_order(self) -> bool:
        """Nothing wrong so far; says nothing of bytes that have not arrived."""
        return self.fault is None

    @property
    def complete(self) -> bool:
        """Everything asked for has arrived; after a fault this goes by the count of bytes."""
        if self.fault is None:
            return self.responses == self.asked
        return self.received >= self.expected

    @property
    def missing(self) -> int:
        """Bytes of body still to come."""
        return max(0, self.expected - self.received)

    def require(self) -> None:
        """Raise ContentError unless everything arrived and was right."""
        if self.fault is not None:
            raise ContentError(str(self.fault))
        if not self.complete:
            raise ContentError(
                f"{self.responses} of {self.asked} responses arrived, "
                f"{self.received:,} of {self.expected:,} bytes"
            )

    def feed(self, data: bytes | bytearray, size: int | None = None) -> None:
        """Take the first ``size`` bytes of ``data`` (all by default) as the next of the stream."""
        end = len(data) if size is None else size
        self.raw += end
        at = 0
        while at < end and self.fault is None:
            if self._size is None:
                at = self._take_head(data, at, end)
            elif self._awaited is not None:
                at = self._take_line(data, at, end)
            else:
                at = self._body(data, at, end)

    def _take_head(self, data: bytes | bytearray, at: int, end: int) -> int:
        if not self._waiting:
            self._fail(self.responses, 0, f"was never asked for: {_show(data[at : at + 24])}")
            return end
        known = len(self._head)
        self._head += data[at : min(end, at + MAX_HEAD)]
        stop = self._head.find(b"\r\n\r\n", max(0, known - 3))
        if stop < 0:
            if not b"HTTP/1.".startswith(self._head[:7]):
                self._misplaced(bytes(self._head), 0, "begins no response head: it ")
            elif len(self._head) >= MAX_HEAD:
                self._fail(self.responses, 0, f"begins a head of more than {MAX_HEAD:,} bytes")
            return end
        head = bytes(self._head[: stop + 4])
        self._head.clear()
        self._begin_body(head)
        return at + len(head) - known

    def _begin_body(self, head: bytes) -> None:
        self._heads += 1
        self._head_bytes += len(head)
        status, length = _STATUS.match(head), _LENGTH.search(head)
        self._bare_head = len(head) - (len(length[1]) if length else 0)
        if status is None:
            return self._misplaced(head, 0, "begins no response head: it ")
        if status[1] != b"200":
            return self._fail(self.responses, 0, f"is an answer {status[1].decode()}, not 200")
        asked = self._waiting.popleft()
        if length is None:
            return self._begin_chunks(head, asked)
        size = int(length[1])
        if asked is not None and size != asked:
            what = f"belongs to a body of {size:,} bytes where {asked:,} were asked for"
            return self._fail(self.responses, 0, what)
        self._sizes[self.responses] = size
        self._size, self._at, self._stretch, self._chunked = size, 0, size, False
        return self._end_body()

    def _begin_chunks(self, head: bytes, asked: int | None) -> None:
        if not _CHUNKED.search(head):
            what = "belongs to a head with neither Content-Length nor chunks"
            return self._fail(self.responses, 0, what)
        self._size = _ENDLESS if asked is None else asked
        self._at, self._stretch, self._chunked, self._awaited = 0, 0, True, "size"
        return None

    def _take_line(self, data: bytes | bytearray, at: int, end: int) -> int:
        stop = data.find(b"\n", at, end) + 1 or end
        self._line += data[at : min(stop, at + MAX_LINE)]
        self._framing += stop - at
        if self._line.endswith(b"\n") or len(self._line) >= MAX_LINE:
            line = bytes(self._line)
            self._line.clear()
            self._line_came(line)
        return stop

    def _line_came(self, line: bytes) -> None:
        """The end of a chunk's data, a chunk's size, or the end of the last chunk's trailers."""
        assert self._size is not None
        size = _CHUNK.fullmatch(line) if self._awaited == "size" else None
        if size is not None:
            self._stretch = self._at + int(size[1], 16)
            self._awaited = None if self._stretch > self._at else "end"
            if self._stretch > self._size:
                what = f"belongs to chunks of more than the {self._size:,} bytes asked for"
                self._fail(self.responses, self._at, what)
        elif self._awaited == "end" and line == b"\r\n":
            if self._size not in (self._at, _ENDLESS):
                what = f"is missing: the last chunk came before the {self._size:,} bytes asked for"
                return self._fail(self.responses, self._at, what)
            self._sizes[self.responses] = self._size = self._at
            self._awaited = None
            self._end_body()
        elif self._awaited == "gap" and line == b"\r\n":
            self._awaited = "size"
        elif self._awaited != "end":
            self._fail(self.responses, self._at, f"has {_show(line[:24])} where a chunk's "
                       f"{'size' if self._awaited == 'size' else 'end'} was due")
        return None

    def _body(self, data: bytes | bytearray, at: int, end: int) -> int:
        assert self._size is not None
        while at < end and self._at < self._stretch:
            start = (phase(self.responses) + self._at) % PERIOD
            count = min(end - at, self._stretch - self._at, PERIOD)
            # startswith() with an offset compares in place, at the speed of memcmp.
            if self._compare and not data.startswith(pattern()[start : start + count], at):
                wrong = _first_difference(data, at, start, count)
                self._at += wrong
                self._misplaced(bytes(data[at + wrong : at + wrong + 2 * RECORD]), self._at, "")
                return end
            at += count
            self._at += count
        if not self._chunked:
            self._end_body()
        elif self._at == self._stretch:
            self._awaited = "gap"
        return at

    def _end_body(self) -> None:
        if self._at == self._size:
            self.responses += 1
            self._size = None

    def _fail(self, response: int, byte: int, what: str) -> None:
        self.fault = Fault(response, byte, what)

    def _misplaced(self, found: bytes, byte: int, before: str) -> None:
        """Say what stands in place of that byte of the present response, and where it belongs."""
        if found.startswith(b"HTTP/1."):
            what = "holds the head of another response"
        else:
            # Mostly the stream breaks inside a record; the next whole one tells as much.
            record = _RECORD.search(found)
            if record is None:
                what = f"holds {_show(found[:24])}, which is no part of the pattern"
            else:
                offset = (int(record[1], 16) - record.start()) % PERIOD
                what = f"holds record 0x{offset - offset % RECORD:x} of the pattern, which " + (
                    self._belongs(offset, byte)
                )
        self._fail(self.responses, byte, before + what)

    def _belongs(self, offset: int, byte: int) -> str:
        """Name the nearest place of that pattern offset: a body of over one period has several."""
        here = (offset - phase(self.responses) - byte + PERIOD // 2) % PERIOD - PERIOD // 2
        best, place = abs(here), f"belongs {abs(here):,} bytes " + (
            "further on: some are missing" if here > 0 else "further back: some came twice"
        )
        for response, size in enumerate(self._sizes):
            start = (offset - phase(response)) % PERIOD
            if response != self.responses and start < (size or PERIOD) and start < best:
                best, place = start, f"belongs to byte {start:,} of response {response}"
        return place


def _first_difference(data: bytes | bytearray, at: int, start: int, count: int) -> int:
    """Index of the first of ``count`` bytes that differs from the pattern; one of them does."""
    same = 0
    while count > 1:
        half = count // 2
        if data.startswith(pattern()[start + same : start + same + half], at + same):
            same += half
            count -= half
        else:
            count = half
    return same


def _show(data: bytes | bytearray) -> str:
    return repr(bytes(data))[1:]

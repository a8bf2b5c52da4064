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
PHASES = 1 << 16
MAX_HEAD = 64 * 1024

_RECORD = re.compile(rb"([0-9a-f]{15})\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
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
            return self.raw - self._head_bytes - len(self._head)
        unseen = sum(self._bare_head + len(str(size or 0)) for size in self._sizes[self._heads :])
        return max(0, min(self.raw - self._head_bytes - unseen, self.expected))

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
            at = self._take_head(data, at, end) if self._size is None else self._body(data, at, end)

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
        if length is None:
            return self._fail(self.responses, 0, "belongs to a head without Content-Length")
        size, asked = int(length[1]), self._waiting.popleft()
        if asked is not None and size != asked:
            what = f"belongs to a body of {size:,} bytes where {asked:,} were asked for"
            return self._fail(self.responses, 0, what)
        self._sizes[self.responses] = size
        self._size, self._at = size, 0
        return self._end_body()

    def _body(self, data: bytes | bytearray, at: int, end: int) -> int:
        assert self._size is not None
        while at < end and self._at < self._size:
            start = (phase(self.responses) + self._at) % PERIOD
            count = min(end - at, self._size - self._at, PERIOD)
            # startswith() with an offset compares in place, at the speed of memcmp.
            if self._compare and not data.startswith(pattern()[start : start + count], at):
                wrong = _first_difference(data, at, start, count)
                self._at += wrong
                self._misplaced(bytes(data[at + wrong : at + wrong + 2 * RECORD]), self._at, "")
                return end
            at += count
            self._at += count
        self._end_body()
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

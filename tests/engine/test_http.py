"""The request head parser and the body pattern, through the contract."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.binding import native, words

LIMIT = 8192


class Answer(NamedTuple):
    consumed: int
    status: int = 200
    route: str | None = None
    size: int = -1
    ms: int = -1
    close: bool = False


def parse(data: bytes, limit: int = LIMIT) -> Answer | int:
    """The parser's answer; only the number when it needs more, or refuses."""
    ffi, lib = native()
    out = ffi.new("rl_request *")
    result: int = lib.rl_http_parse(ffi.from_buffer("uint8_t[]", data), len(data), limit, out)
    if result <= 0:
        assert result == 0 or (out.status == -result and out.close == 1)
        return result
    route = None if out.route < 0 else words("rl_route")[out.route]
    return Answer(result, out.status, route, out.size, out.handler_ms, bool(out.close))


def head(target: str = "/", *fields: str, version: str = "1.1", method: str = "GET") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1")


GOOD: list[tuple[bytes, dict[str, Any]]] = [
    (head(), {}),
    (head("/", "Host: a"), {}),
    (head("/sync", "Host: a"), {"route": "sync"}),
    (head("/async"), {"route": "async"}),
    (head("/?"), {}),
    (head("/?size=0"), {"size": 0}),
    (head("/sync?size=1073741824&ms=60000"), {"route": "sync", "size": 2**30, "ms": 60_000}),
    (head("/async?ms=1&size=0000000007"), {"route": "async", "size": 7, "ms": 1}),
    (head("http://h/sync?size=3"), {"route": "sync", "size": 3}),
    (head("HTTP://h:80"), {}),
    (head("http://h?ms=2"), {"ms": 2}),
    (head(version="1.0"), {"close": True}),
    (head("/", "Connection: Keep-Alive", version="1.0"), {}),
    (head("/", "Connection: keep-alive, close", version="1.0"), {"close": True}),
    (head("/", "connection: upgrade ,\t CLOSE "), {"close": True}),
    (head("/", "Connection: closed"), {}),
    (head("/", "Connection: keep-alive"), {}),
    (head(version="1.9"), {}),
    (head("/", "Content-Length: 0"), {}),
    (head("/", "Content-Length:0 \t"), {}),
    (head("/", "X-Empty:", "X-Text: \xe9\xff", "X-Tab: a\tb"), {}),
    (head("/", "Accept: " + "text/html, " * 90), {}),
    (b"\r\n" + head(), {}),
    (b"\r\n" * 4 + head(), {}),
]

BAD: list[tuple[bytes, int]] = [
    (head(method="POST"), 405),
    (head(method="HEAD"), 405),
    (head(method="get"), 405),
    (head(method="GETS"), 405),
    (head("*", method="OPTIONS"), 405),
    (head("h:443", method="CONNECT"), 405),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    (head(version="2.0"), 505),
    (head(version="0.9"), 505),
    (head(version="3.0", method="POST"), 505),
    (head(version="1"), 400),
    (head(version="1.10"), 400),
    (head(version="11.1"), 400),
    (head(version="x.1"), 400),
    (b"GET / http/1.1\r\n\r\n", 400),
    (b"GET /\r\n\r\n", 400),
    (b"GET  / HTTP/1.1\r\n\r\n", 400),
    (b"GET /  HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1 \r\n\r\n", 400),
    (b" GET / HTTP/1.1\r\n\r\n", 400),
    (b"\tGET / HTTP/1.1\r\n\r\n", 400),
    (b"G@T / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\n\n", 400),
    (b"GET / HTTP/1.1\r\nA: b\n\r\n", 400),
    (b"GET / HTTP/1.1\r\r\n\r\n", 400),
    (b"\nGET / HTTP/1.1\r\n\r\n", 400),
    (b"\r\n" * 5 + head(), 400),
    (head("/", "A : b"), 400),
    (head("/", " A: b"), 400),
    (head("/", "A: b", " folded"), 400),
    (head("/", "A: b", "\tfolded"), 400),
    (head("/", ": b"), 400),
    (head("/", "no colon"), 400),
    (head("/", "A\x00: b"), 400),
    (head("/", "A: b\x00c"), 400),
    (head("/", "A: 12345678\x7f"), 400),
    (head("/", "A: b\rc"), 400),
    (head("/", "\xe9: b"), 400),
    (head("/", "Host: a", "hOST: a"), 400),
    (head("/", "Content-Length: 1"), 400),
    (head("/", "Content-Length: 0, 0"), 400),
    (head("/", "Content-Length: -0"), 400),
    (head("/", "Content-Length:"), 400),
    (head("/", "content-length: 0", "Content-Length: 7"), 400),
    (head("/", "Transfer-Encoding: chunked"), 400),
    (head("/", "transfer-encoding:"), 400),
    (head("/nowhere"), 404),
    (head("/sync/"), 404),
    (head("//sync"), 404),
    (head("/%73ync"), 404),
    (head("*"), 400),
    (head("sync"), 400),
    (head("/#part"), 400),
    (head('/"'), 400),
    (head("/\xe9"), 400),
    (head("http://"), 400),
    (head("http:///sync"), 400),
    (head("https://h/sync"), 400),
    (head("/?size"), 400),
    (head("/?size="), 400),
    (head("/?size=1073741825"), 400),
    (head("/?size=99999999999999999999"), 400),
    (head("/?size=-1"), 400),
    (head("/?size=+1"), 400),
    (head("/?size=1k"), 400),
    (head("/?ms=60001"), 400),
    (head("/?size=1&size=1"), 400),
    (head("/?size=1&&ms=1"), 400),
    (head("/?Size=1"), 400),
    (head("/?depth=1"), 400),
    (b"\x16\x03\x01", 400),
]


@pytest.mark.parametrize(("data", "fields"), GOOD, ids=lambda value: repr(value)[:50])
def test_accepts(data: bytes, fields: dict[str, Any]) -> None:
    assert parse(data) == Answer(len(data), **fields)
    assert parse(data + b"GET /next") == Answer(len(data), **fields)


@pytest.mark.parametrize(("data", "status"), BAD, ids=lambda value: repr(value)[:50])
def test_refuses(data: bytes, status: int) -> None:
    assert parse(data) == -status


@pytest.mark.parametrize("data", [data for data, _ in GOOD], ids=repr)
def test_needs_every_byte(data: bytes) -> None:
    assert [parse(data[:size]) for size in range(len(data))] == [0] * len(data)


def test_head_too_large() -> None:
    data = head("/", "A: " + "b" * 100)
    assert parse(data, len(data)) == Answer(len(data))
    assert parse(data, len(data) - 1) == -431
    # It is told as soon as it is sure, not when the rest has arrived.
    assert parse(data[:40], 41) == 0
    assert parse(data[:41], 41) == -431
    # What stands before the limit is judged first.
    assert parse(head("/nowhere", "A: " + "b" * 100), 64) == -404


PIECES = st.sampled_from(
    [
        b"GET ", b"/", b"sync", b"?size=1", b"&ms=2", b" HTTP/1.1", b" HTTP/2.0", b"\r\n", b"\n",
        b"\r", b"Host: a\r\n", b"Connection: close\r\n", b"Content-Length: 0\r\n", b":", b" ",
        b"http://h", b"\x00", b"\xff", b"POST ",
    ]
)  # fmt: skip
NEARLY_HTTP = st.lists(PIECES | st.binary(max_size=3), max_size=14).map(b"".join)
SOME_HTTP = st.sampled_from([data for data, _ in GOOD] + [data for data, _ in BAD])


@given(st.binary(max_size=300) | NEARLY_HTTP, st.sampled_from([LIMIT, 64, 16, 1, 0]))
@example(b"", LIMIT)
def test_any_bytes_stay_within_the_contract(data: bytes, limit: int) -> None:
    answer = parse(data, limit)
    if isinstance(answer, Answer):
        assert 0 < answer.consumed <= min(len(data), limit)
        assert answer.status == 200
        assert -1 <= answer.size <= 2**30
        assert -1 <= answer.ms <= 60_000
    else:
        assert answer in (0, -400, -404, -405, -431, -505)
        assert answer != 0 or len(data) < limit


@given(SOME_HTTP | NEARLY_HTTP, st.data())
def test_pieces_are_answered_like_the_whole(data: bytes, draw: st.DataObject) -> None:
    whole = parse(data)
    cuts = draw.draw(st.lists(st.integers(0, len(data)), max_size=6).map(sorted))
    early = [answer for cut in cuts if (answer := parse(data[:cut])) != 0]
    assert all(answer == whole for answer in early)


@given(st.lists(st.sampled_from([data for data, _ in GOOD]), min_size=1, max_size=5))
def test_pipelined_heads_come_one_by_one(heads: list[bytes]) -> None:
    stream = b"".join(heads)
    for expected in heads:
        answer = parse(stream)
        assert isinstance(answer, Answer)
        assert answer.consumed == len(expected)
        stream = stream[answer.consumed :]
    assert stream == b""


def test_pattern_spells_its_own_offsets() -> None:
    ffi, lib = native()
    period: int = lib.RL_PATTERN_PERIOD
    once = b"".join(b"%015x\n" % offset for offset in range(0, period, 16))
    assert bytes(ffi.buffer(lib.rl_pattern(), 2 * period)) == once + once


@given(st.integers(0, 2**64 - 1))
@example(0)
@example(1)
def test_pattern_phase(seq: int) -> None:
    _, lib = native()
    assert lib.rl_pattern_phase(seq) == seq * 69061 % 2**16

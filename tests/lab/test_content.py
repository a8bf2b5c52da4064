"""The checker of response streams: what it accepts, and what it says of each way to go wrong."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.binding import native
from lab import content
from lab.content import ContentError, StreamCheck, body, phase


def head(size: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size


def stream(*sizes: int) -> bytes:
    return b"".join(head(size) + body(number, size) for number, size in enumerate(sizes))


def checked(data: bytes, *sizes: int | None) -> StreamCheck:
    check = StreamCheck()
    for size in sizes:
        check.expect(size)
    check.feed(data)
    return check


def test_the_pattern_spells_its_own_offsets() -> None:
    text = content.pattern()
    assert bytes(text[:16]) == b"000000000000000\n"
    assert bytes(text[32 : 32 + 16]) == b"000000000000020\n"
    assert len(text) == 2 * content.PERIOD
    assert text[: content.PERIOD] == text[content.PERIOD :]


def test_the_engine_sends_the_same_pattern() -> None:
    ffi, lib = native()
    assert bytes(ffi.buffer(lib.rl_pattern(), len(content.pattern()))) == content.pattern()
    for response in (0, 1, 2, 1000, 65_535, 65_536, 10**9):
        assert lib.rl_pattern_phase(response) == phase(response)


def test_bodies_begin_at_their_phase_and_wrap() -> None:
    size = content.PERIOD + 1000
    whole = body(3, size)
    assert whole[:100] == bytes(content.pattern()[phase(3) : phase(3) + 100])
    assert whole[content.PERIOD :] == whole[:1000]
    assert body(3, 50, start=size - 50) == whole[-50:]


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 4000), min_size=1, max_size=50),
)
def test_any_cutting_of_a_right_stream_is_accepted(sizes: list[int], cuts: list[int]) -> None:
    data, check, at = stream(*sizes), StreamCheck(), 0
    for size in sizes:
        check.expect(size)
    for cut in cuts:
        check.feed(data[at : at + cut])
        at += cut
    check.feed(data[at:])
    check.require()
    assert (check.received, check.responses) == (sum(sizes), len(sizes))
    assert check.expected == sum(sizes)


def chunked(response: int, size: int, chunk: int) -> bytes:
    parts = [body(response, min(chunk, size - at), at) for at in range(0, size, chunk)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@given(
    size=st.integers(0, 3000), chunk=st.integers(1, 1000), named=st.booleans(),
    cuts=st.lists(st.integers(1, 700), min_size=1, max_size=30),
)
def test_a_chunked_body_is_read_however_it_is_cut(
    size: int, chunk: int, named: bool, cuts: list[int]
) -> None:
    data, check, at = chunked(0, size, chunk) + head(50) + body(1, 50), StreamCheck(), 0
    check.expect(size if named else None)
    check.expect(50)
    for cut in cuts:
        check.feed(data[at : at + cut])
        at += cut
    check.feed(data[at:])
    check.require()
    assert (check.received, check.expected, check.responses) == (size + 50, size + 50, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"xyz\r\n", "where a chunk's size was due"),
        (b"5\r\n00000zz", "where a chunk's end was due"),
        (b"ff\r\n", "chunks of more than the 20 bytes asked for"),
        (b"0\r\n\r\n", "the last chunk came before the 20 bytes asked for"),
        (b"1" * 5000, "where a chunk's size was due"),
    ],
)
def test_bad_chunks_are_faults(text: bytes, said: str) -> None:
    start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    check = checked(start + text + b"\r\n", 20)
    assert said in str(check.fault)
    assert not check.complete


@given(data=st.data())
def test_any_changed_byte_of_a_body_is_found_where_it_is(data: st.DataObject) -> None:
    size = 3000
    wrong = data.draw(st.integers(0, size - 1))
    cut = data.draw(st.integers(1, size))
    text = bytearray(stream(100, size))
    text[-size + wrong] ^= 1
    check = StreamCheck()
    check.expect(100)
    check.expect(size)
    check.feed(bytes(text[:cut]))
    check.feed(bytes(text[cut:]))
    assert check.fault is not None
    assert (check.fault.response, check.fault.byte) == (1, wrong)
    assert check.complete
    assert not check.in_order


def test_a_second_response_inside_the_first_is_named() -> None:
    first = body(0, 1 << 20)
    second = head(103) + body(1, 103)
    data = head(1 << 20) + first[:500_000] + second + first[500_000:]
    check = checked(data, 1 << 20, 103)
    assert str(check.fault) == "byte 500,000 of response 0 holds the head of another response"
    assert check.complete, "every byte is there, though not in its place"
    assert check.missing == 0


def test_a_record_of_another_response_is_named_with_its_place() -> None:
    first, second = body(0, 3 << 20), body(1, 50_000)
    data = head(3 << 20) + first[:1_876_992] + second[11:] + first[1_876_992:]
    check = checked(data, 3 << 20, 50_000)
    assert check.fault is not None
    found = re.fullmatch(
        r"holds record 0xdd0 of the pattern, which belongs to byte (\d+) of response 1",
        check.fault.what,
    )
    # Records share leading zeros, so the first bytes of the strangers may look right.
    assert found is not None
    assert check.fault.byte - 1_876_992 == int(found[1]) - 11 < content.RECORD


def test_lost_and_repeated_bytes_are_told_apart() -> None:
    first = body(0, 10_000)
    lost = checked(head(10_000) + first[:4000] + first[4160:], 10_000)
    assert "belongs 160 bytes further on: some are missing" in str(lost.fault)
    assert (lost.complete, lost.missing) == (False, 160)
    twice = checked(head(10_000) + first[:4000] + first[3200:], 10_000)
    assert "belongs 800 bytes further back: some came twice" in str(twice.fault)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "is an answer 404, not 200"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "belongs to a head with neither Content-Length nor chunks"),
        (head(7) + b"1234567", "a body of 7 bytes where 10 were asked for"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "begins no response head"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * content.MAX_HEAD, "a head of more than 65,536 bytes"),
        (head(10) + b"0000000000" + b"more", "was never asked for"),
        (head(10) + b"garbage !!", "holds 'garbage !!', which is no part of the pattern"),
    ],
)
def test_other_faults_are_said_in_words(data: bytes, says: str) -> None:
    assert says in str(checked(data, 10).fault)


def test_what_has_not_arrived_is_counted() -> None:
    check = checked(stream(1000, 1000)[:1500], 1000, 1000)
    assert check.in_order
    assert not check.complete
    with pytest.raises(ContentError, match=r"1 of 2 responses arrived, 1,\d\d\d of 2,000 bytes"):
        check.require()


def test_bodies_of_a_foreign_server_are_only_measured() -> None:
    check = StreamCheck(compare=False)
    check.expect(None)
    check.feed(head(5) + b"hello")
    check.require()
    assert check.expected == 5


def test_checking_keeps_up_with_loopback() -> None:
    check, piece = StreamCheck(), bytearray(256 * 1024)
    check.expect(1 << 28)
    check.feed(head(1 << 28))
    begun, at = time.perf_counter(), 0
    while at < 1 << 28:
        start = at % content.PERIOD
        piece[:] = content.pattern()[start : start + len(piece)]
        check.feed(piece)
        at += len(piece)
    check.require()
    # Ten times slower than a quiet core does it, so that a busy machine does not fail the test.
    assert (1 << 28) / (time.perf_counter() - begun) > 3e8

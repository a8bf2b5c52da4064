"""What the relay makes of heads, bodies and failures on either side, on the scripted backend."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from engine import RelayScript

MS = 1_000_000
REST = b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
STATUS = {
    400: b"HTTP/1.1 400 Bad Request" + REST,
    408: b"HTTP/1.1 408 Request Timeout" + REST,
    431: b"HTTP/1.1 431 Request Header Fields Too Large" + REST,
    501: b"HTTP/1.1 501 Not Implemented" + REST,
    502: b"HTTP/1.1 502 Bad Gateway" + REST,
    503: b"HTTP/1.1 503 Service Unavailable" + REST,
    504: b"HTTP/1.1 504 Gateway Timeout" + REST,
    505: b"HTTP/1.1 505 HTTP Version Not Supported" + REST,
}
GET = b"GET / HTTP/1.1\r\nHost: o\r\n\r\n"
PASSED_POST = b"POST / HTTP/1.1\r\nContent-Length: 30000\r\nConnection: close\r\n\r\n"
PASSED = b"GET / HTTP/1.1\r\nHost: o\r\nConnection: close\r\n\r\n"


class Talk:
    """A client and a relay; the client's is socket 0, the first origin's is socket 1.

    Time is virtual and passes whenever the relay sleeps to a deadline: timeouts are set when they
    are to be seen.
    """

    def __init__(self, policy: str = "after", **settings: Any) -> None:
        self.script = RelayScript(policy, **settings)
        self.client = self.script.accept()
        self.turns(3)

    def turns(self, count: int = 10) -> None:
        for _ in range(count):
            self.script.turn()

    def asks(self, data: bytes, piece: int = 0) -> None:
        self.answers(data, piece, self.client)

    def answers(self, data: bytes, piece: int = 0, socket: int = 1) -> None:
        for at in range(0, len(data), piece or len(data)):
            if self.script.socket(socket).closed:
                break
            self.script.input(socket, data[at : at + (piece or len(data))])
            self.turns(3)
        self.turns()

    def time_out(self, **timeouts: int) -> None:
        """These timeouts hold from now on, and time passes."""
        self.script.set(**timeouts)
        self.turns(60)

    def passes(self, ms: int, **timeouts: int) -> bool:
        """Time passes, and no more than that; whether the session outlives these timeouts."""
        self.script.advance(ms * MS)
        self.script.set(**timeouts)
        for phase in ("decide", "timers"):  # without the wait, which would sleep to the deadline
            self.script.phase(phase)
        self.script.set(**dict.fromkeys(timeouts, 0))
        session = self.script.session(0) if self.script.counters()["sessions"] else None
        return session is not None and not session.closing

    @property
    def got(self) -> bytes:
        return self.script.output(self.client)

    def looks_whole(self) -> bool:
        """Whether the client sees a FIN behind what it got, rather than a reset."""
        view = self.script.socket(self.client)
        assert view.finished is not view.broken_off
        return view.finished

    def closed(self) -> str:
        """The reason for which its session ended; the client closes too if need be."""
        if not self.script.socket(self.client).closed:
            assert self.script.socket(self.client).finished, "no FIN was sent"
            self.script.fin(self.client)
            self.turns()
        assert self.script.socket(self.client).closed
        counts = self.script.counters()
        assert counts["sessions"] == 0
        (reason,) = [n for n in counts if n.startswith("closes_") and counts[n]]
        return reason.removeprefix("closes_")


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [0, 1, 7])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\nHost: o\n\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost : o\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: o\r\nHost: p\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n fold\r\n\r\n", 400),
        (b"CONNECT o:80 HTTP/1.1\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nContent-Length: 5x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 501),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nConnection: " + b"a, " * 17 + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 9000, 431),
    ],
)
def test_a_head_that_is_none(head: bytes, status: int, piece: int) -> None:
    talk = Talk()
    talk.asks(head[:8192] if status == 431 else head, piece if status != 431 else piece * 200)
    assert talk.got == STATUS[status]
    assert talk.script.sockets == 1, "the origin never heard of it"
    assert talk.closed() == "bad_request"


@pytest.mark.parametrize("piece", [0, 1])
def test_what_belongs_to_one_connection_is_not_passed_on(piece: int) -> None:
    talk = Talk()
    talk.asks(
        b"\r\nGET /x HTTP/1.1\r\nHost: o\r\nConnection: keep-alive, X-Hop, Host\r\nX-Hop: 1\r\n"
        b"Keep-Alive: 5\r\nProxy-Connection: 1\r\nUpgrade: h2c\r\nX-End: 2\r\n\r\n",
        piece,
    )
    want = b"GET /x HTTP/1.1\r\nHost: o\r\nX-End: 2\r\nConnection: close\r\n\r\n"
    assert talk.script.output(1) == want
    talk.answers(b"HTTP/1.0 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", piece)
    assert talk.got == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    talk.asks(GET)
    assert talk.script.output(2) == PASSED


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: o\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ],
)
def test_the_last_response_says_so(head: bytes) -> None:
    talk = Talk()
    talk.asks(head + GET)
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    assert talk.got == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
    assert talk.script.sockets == 2, "what was pipelined behind it is not asked for"
    assert talk.closed() == "client"


@pytest.mark.parametrize("piece", [1, 5, 4096])
def test_a_body_of_chunks_with_trailers_passes_as_it_is(piece: int) -> None:
    body = b"4;ext=1\r\nwiki\r\nA\r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\n"
    talk = Talk()
    talk.asks(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + body + GET, piece)
    assert talk.script.output(1).endswith(b"\r\n\r\n" + body)
    talk.answers(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body, piece)
    talk.answers(b"HTTP/1.1 204 No Content\r\n\r\n", piece, socket=2)
    assert talk.got.endswith(body + b"HTTP/1.1 204 No Content\r\n\r\n")


@pytest.mark.parametrize("body", [b"x\r\n", b"-1\r\n", b"4\r\nwikiX", b"f" * 20 + b"\r\n", b"\r\n"])
def test_a_body_that_is_no_chunks(body: bytes) -> None:
    talk = Talk()
    talk.asks(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    assert talk.got == STATUS[400]
    assert talk.closed() == "bad_request"
    assert talk.script.socket(1).closed


def test_a_client_that_ends_inside_its_request() -> None:
    for sent in (GET[:-2], b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf"):
        talk = Talk()
        talk.asks(sent)
        talk.script.fin(talk.client)
        talk.turns()
        assert talk.closed() == "client_short"


def test_a_client_may_close_its_direction_and_still_get_its_answers() -> None:
    talk = Talk()
    talk.asks(GET + GET)
    talk.script.fin(talk.client)
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb", socket=2)
    assert talk.got.count(b"200 OK") == 2
    assert talk.closed() == "client"


# -- responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [0, 1])
@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01 this is no HTTP\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200OK\r\n\r\n",
        b"HTTP/1.1 099 Low\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 9000,
    ],
)
def test_an_origin_that_answers_garbage(head: bytes, piece: int) -> None:
    talk = Talk()
    talk.asks(GET)
    talk.answers(head, piece * 500 if len(head) > 9000 else piece)
    assert talk.got == STATUS[502]
    assert talk.script.socket(1).closed
    assert talk.closed() == "bad_response"


def test_interim_responses_pass() -> None:
    talk = Talk()
    talk.asks(b"POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    talk.answers(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert talk.got == b"HTTP/1.1 100 Continue\r\n\r\n"
    talk.asks(b"hi")
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert talk.got.endswith(b"200 OK\r\nContent-Length: 0\r\n\r\n")
    assert talk.script.counters()["responses"] == 1


def test_an_interim_response_is_not_the_response() -> None:
    talk = Talk()
    talk.asks(GET)
    talk.answers(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    talk.script.fin(1)
    talk.turns()
    assert talk.got == b"HTTP/1.1 103 Early Hints\r\n\r\n" + STATUS[502]
    assert talk.closed() == "origin_short"


def test_a_body_until_close() -> None:
    talk = Talk()
    talk.asks(GET + GET)
    talk.answers(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 50_000)
    assert talk.script.session(0).response.to_forward == -1
    talk.script.fin(1)
    talk.turns()
    assert talk.got == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 50_000
    assert talk.looks_whole()
    assert talk.closed() == "client"


GET10 = b"GET / HTTP/1.0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\nX-End: 2\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nX-End: 2\r\nConnection: close\r\n\r\n"


def in_chunks(*bodies: bytes) -> bytes:
    return b"".join(b"%x;ext=1\r\n%b\r\n" % (len(body), body) for body in bodies)


@pytest.mark.parametrize("policy", ["before", "after", "later", "no-splice"])
@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("piece", [0, 1, 999])
def test_a_client_of_http_1_0_gets_no_chunks(policy: str, piece: int, keep: bytes) -> None:
    talk = Talk(policy)
    talk.asks(GET10[:-2] + keep + b"\r\n")
    assert talk.script.output(1) == b"GET / HTTP/1.0\r\nConnection: close\r\n\r\n"
    bodies = b"wiki", b"y" * (90 if piece == 1 else 9000), b"\r\n0\r\n\r\n"
    talk.answers(CHUNKED + in_chunks(*bodies) + b"0\r\nX-Sum: 1\r\n\r\n", piece)
    assert talk.got == PLAIN + b"".join(bodies)
    assert talk.looks_whole()
    assert talk.closed() == "client"


@pytest.mark.parametrize("policy", ["before", "after", "later", "no-splice"])
@pytest.mark.parametrize(("rest", "reason"), [
    (b"", "origin_short"), (b"0\r\n", "origin_short"), (b"no size\r\n", "bad_response"),
])
def test_half_of_what_were_chunks_ends_in_a_reset(policy: str, rest: bytes, reason: str) -> None:
    talk = Talk(policy)
    talk.asks(GET10)
    talk.answers(CHUNKED + in_chunks(HALF) + rest)
    if reason != "bad_response":
        talk.script.fin(1)
        talk.turns()
    assert talk.got == PLAIN + HALF
    assert not talk.looks_whole()
    assert talk.closed() == reason


def test_a_client_of_http_1_0_gets_no_interim_response() -> None:
    talk = Talk()
    talk.asks(GET10)
    talk.answers(b"HTTP/1.1 103 Early\r\n\r\n" * 3)
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    assert talk.got == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


def test_a_head_that_answers_http_1_0_names_no_coding() -> None:
    talk = Talk()
    talk.asks(GET10.replace(b"GET", b"HEAD"))
    talk.answers(CHUNKED)
    assert talk.got == PLAIN
    assert talk.looks_whole()
    assert talk.closed() == "client"


def test_what_is_left_out_makes_room_for_more() -> None:
    """Nothing of it goes to the sink, whose moves would else let the reading go on."""
    talk = Talk(max_head=15_360)
    talk.asks(GET10)
    long = b"X: " + b"y" * 8000 + b"\r\n"
    talk.answers((b"HTTP/1.1 103 Early\r\n" + long + b"\r\n") * 4 + CHUNKED + in_chunks(b"wiki"))
    assert talk.got == PLAIN + b"wiki"
    talk.answers(b"0;" + b"e" * 200 + b"\r\n" + long + b"Z: " + b"z" * 7300 + b"\r\n\r\n")
    assert talk.looks_whole()
    assert talk.script.counters()["sink_full"] >= 2, "the buffer was full"


UNTIL = b"HTTP/1.1 200 OK\r\n\r\n"
HALF = b"x" * 30_000


@pytest.mark.parametrize("policy", ["before", "after", "later", "no-splice"])
@pytest.mark.parametrize("how", ["origin_reset", "server_timeout", "stopped"])
def test_half_a_body_until_close_ends_in_a_reset(policy: str, how: str) -> None:
    talk = Talk(policy, stop_grace_ms=0)
    talk.asks(GET)
    talk.answers(UNTIL + HALF)
    if how == "origin_reset":
        talk.script.reset(1)
    elif how == "stopped":
        talk.script.stop()
    else:
        assert not talk.passes(60, server_timeout_ms=50)
    talk.turns()
    assert talk.got == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + HALF, "all there was"
    assert not talk.looks_whole()
    assert talk.closed() == how


@pytest.mark.parametrize("policy", ["before", "after", "no-splice"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_client_that_is_timed_out_in_a_body_until_close_sees_a_reset(
    policy: str, ended: bool
) -> None:
    """Also if its origin has ended it: the rest is here, and the client has not taken it."""
    talk = Talk(policy, pipe_size=1 << 20)
    talk.asks(GET)
    talk.script.room(0, 5000)
    talk.answers(UNTIL + HALF)
    if ended:
        talk.script.fin(1)
        talk.turns()
    assert not talk.passes(60, client_timeout_ms=50)
    assert len(talk.got) == 5000
    assert not talk.looks_whole()
    assert talk.closed() == "client_timeout"


def test_half_a_body_of_known_length_ends_as_it_is() -> None:
    """Its framing tells the client, and a reset could cost it what is on its way."""
    for head in (b"Content-Length: 90000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n9999\r\n"):
        talk = Talk()
        talk.asks(GET)
        talk.answers(b"HTTP/1.1 200 OK\r\n" + head + HALF)
        talk.script.reset(1)
        talk.turns()
        assert talk.got == b"HTTP/1.1 200 OK\r\n" + head + HALF
        assert talk.looks_whole()
        assert talk.closed() == "origin_reset"


def test_a_reset_that_only_a_write_was_told_of_cuts_a_body_until_close() -> None:
    talk = reset_before_it_is_read("after", UNTIL + b"half")
    assert talk.got == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf"
    assert not talk.looks_whole()
    assert talk.closed() == "origin_reset"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sent", [0, 60, 30_000])
def test_an_origin_that_ends_too_early(sent: int, reset: bool) -> None:
    talk = Talk()
    talk.asks(GET)
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + b"x" * 90_000
    if sent:
        talk.answers(data[:sent])
    (talk.script.reset if reset else talk.script.fin)(1)
    talk.turns()
    assert talk.got == (data[:sent] if sent else STATUS[502])
    assert talk.closed() == ("origin_reset" if reset else "origin_short")


def test_an_answer_before_the_request_is_read_ends_the_session() -> None:
    talk = Talk()
    talk.asks(b"POST / HTTP/1.1\r\nContent-Length: 90000\r\n\r\n" + b"x" * 100)
    answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    talk.answers(answer)
    assert talk.got == answer
    assert talk.closed() == "early_response"


@pytest.mark.parametrize("policy", ["before", "after", "no-splice"])
def test_an_origin_that_takes_nothing_more_may_still_answer(policy: str) -> None:
    talk = Talk(policy)
    upload(talk)
    request = talk.script.session(0).request
    assert request.piped + request.scheduled >= 5000, "it waits for the origin to take it"
    assert request.write == "polled"
    assert talk.script.output(1) == PASSED_POST, "of the body nothing was taken"
    answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    talk.answers(answer)
    assert talk.got == answer
    assert talk.closed() == "early_response"
    assert talk.script.counters()["answers"] == 0, "no answer of the relay's own"


def reset_before_it_is_read(policy: str, answer: bytes) -> Talk:
    """An origin answers and resets; of the two the relay's next write finds the reset first."""
    talk = Talk(policy)
    talk.asks(b"POST / HTTP/1.1\r\nContent-Length: 30000\r\n\r\n" + b"x" * 5000)
    assert talk.script.output(1) == PASSED_POST + b"x" * 5000
    talk.script.input(1, answer)
    talk.script.reset(1)
    talk.script.input(0, b"x" * 6000)
    talk.script.report(0)
    talk.turns(1)
    session = talk.script.session(0)
    assert session.request.read == "off", "it failed, and nothing more of the request is wanted"
    assert talk.script.socket(1).unread == len(answer)
    talk.turns()
    assert talk.script.output(1) == PASSED_POST + b"x" * 5000
    return talk


@pytest.mark.parametrize("policy", ["before", "after", "no-splice"])
def test_an_answer_that_was_there_before_the_reset_is_passed_on(policy: str) -> None:
    answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    talk = reset_before_it_is_read(policy, answer)
    assert talk.got == answer
    assert talk.closed() == "early_response"
    assert talk.script.counters()["answers"] == 0


@pytest.mark.parametrize(("answer", "got"), [
    (b"", STATUS[502]),
    (b"HTTP/1.1 413 Too", STATUS[502]),
    (b"HTTP/1.1 413 Too Large\r\nContent-Length: 20\r\n\r\nbegun",
     b"HTTP/1.1 413 Too Large\r\nContent-Length: 20\r\n\r\nbegun"),
])  # fmt: skip
def test_a_reset_that_a_write_was_told_of_is_one_to_the_reader_too(
    answer: bytes, got: bytes
) -> None:
    """The kernel tells it once: the read that follows ends as if by a FIN."""
    talk = reset_before_it_is_read("after", answer)
    assert talk.got == got
    assert talk.closed() == "origin_reset"


# -- connections, limits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [(errno.ECONNREFUSED, 502), (errno.ENETUNREACH, 502), (errno.EMFILE, 503),
     (errno.EADDRNOTAVAIL, 503)],
)  # fmt: skip
def test_no_connection_to_be_had(error: int, status: int) -> None:
    talk = Talk()
    talk.script.refuse(connect=error)
    talk.asks(GET)
    assert talk.got == STATUS[status]
    assert talk.script.counters()["connect_failures"] == 1
    assert talk.closed() == "connect_failed"


def test_a_connection_that_is_refused_later() -> None:
    talk = Talk(auto_connect=False, connect_timeout_ms=0)
    talk.asks(GET)
    talk.script.connected(1, errno.ECONNREFUSED)
    talk.turns()
    assert talk.got == STATUS[502]
    assert talk.closed() == "connect_failed"


@pytest.mark.parametrize("policy", ["before", "after"])
def test_no_pipe_to_be_had_means_copying(policy: str) -> None:
    talk = Talk(policy)
    talk.script.refuse(pipe=errno.EMFILE)
    talk.asks(GET)
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + b"x" * 40_000)
    counts = talk.script.counters()
    assert counts["pipe_failures"] == 1, "asked for once, not at every read"
    assert counts["bytes_spliced_origin"] == 0
    talk.script.refuse()
    talk.script.advance(200 * MS)
    talk.answers(b"x" * 25_000)
    talk.answers(b"x" * 25_000)
    assert talk.got.endswith(b"x" * 90_000)
    assert int(talk.script.counters()["bytes_spliced_origin"]) > 0


def test_no_descriptor_to_accept_with() -> None:
    script = RelayScript("after")
    script.accept()
    script.refuse(accept=errno.EMFILE)
    for _ in range(12):
        script.turn()
    failures = int(script.counters()["accept_failures"])
    assert failures > 1
    assert script.loop().now_ns >= (failures - 1) * 100 * MS, "it waits before it tries again"
    script.refuse()
    for _ in range(5):
        script.turn()
    assert script.counters()["accepts"] == 1


def test_more_clients_than_sessions_wait_in_the_queue() -> None:
    script = RelayScript("after", max_sessions=1)
    first, second = script.accept(), script.accept()
    for _ in range(5):
        script.turn()
    assert (script.socket(first).slot, script.socket(second).slot) == (0, -1)
    assert script.turn() == "asleep"
    script.fin(first)
    for _ in range(6):
        script.turn()
    assert script.socket(first).closed
    assert script.socket(second).slot == 0
    assert script.counters()["full"] == 2


# -- time ------------------------------------------------------------------------------------------


def test_the_client_timeout() -> None:
    idle = Talk()
    idle.time_out(client_timeout_ms=50)
    assert (idle.got, idle.closed()) == (b"", "client_timeout")
    slow = Talk()
    slow.asks(GET[:9])
    slow.time_out(client_timeout_ms=50)
    assert (slow.got, slow.closed()) == (STATUS[408], "client_timeout")


@pytest.mark.parametrize("policy", ["after", "mirror", "no-splice"])
def test_a_stalled_client_is_timed_out(policy: str) -> None:
    talk = Talk(policy, pipe_size=1 << 20)
    stall(talk)
    talk.time_out(client_timeout_ms=50)
    assert talk.script.socket(0).closed
    assert talk.closed() == "client_timeout"


def test_a_stalled_client_is_timed_out_even_while_the_relay_spins() -> None:
    talk = Talk("before", pipe_size=1 << 20)
    stall(talk)
    talk.script.room(0, 100)  # the sink moves once more
    talk.turns()
    assert talk.script.turn() == "ready"
    assert talk.script.session(0).response.read == "active"
    talk.script.set(client_timeout_ms=50)
    talk.turns()
    assert not talk.script.socket(0).closed
    talk.script.advance(50 * MS)
    talk.turns()
    assert talk.closed() == "client_timeout"


def stall(talk: Talk) -> None:
    """The client takes nothing of a body of which less than the least splice is still to come."""
    talk.asks(GET)
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n")
    talk.script.room(0, 0)
    talk.answers(b"x" * 87_000, 5000)


@pytest.mark.parametrize("policy", ["before", "after", "no-splice"])
def test_what_a_stalled_client_sends_does_not_excuse_it(policy: str) -> None:
    talk = Talk(policy, pipe_size=1 << 20)
    stall(talk)
    for done in range(4):
        assert talk.passes(10, client_timeout_ms=50), done
        talk.asks(GET[done : done + 1])
    assert not talk.passes(10, client_timeout_ms=50)
    assert talk.closed() == "client_timeout"


@pytest.mark.parametrize("policy", ["before", "after", "no-splice"])
def test_a_client_that_takes_a_little_now_and_then_gets_everything(policy: str) -> None:
    talk = Talk(policy, pipe_size=1 << 20)
    stall(talk)
    talk.answers(b"x" * 3000)
    for _ in range(45):
        assert talk.passes(40, client_timeout_ms=50)
        talk.script.room(0, 2001)
        talk.turns()
    assert talk.got.endswith(b"\r\n\r\n" + b"x" * 90_000)


def test_an_upload_that_comes_slowly_is_not_timed_out() -> None:
    talk = Talk()
    talk.asks(b"POST / HTTP/1.1\r\nContent-Length: 30\r\n\r\n")
    for _ in range(30):
        assert talk.passes(40, client_timeout_ms=50, server_timeout_ms=50)
        talk.asks(b"x")
    assert talk.script.output(1).endswith(b"x" * 30)


@pytest.mark.parametrize("policy", ["before", "after", "no-splice"])
@pytest.mark.parametrize("says", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_what_an_origin_says_before_it_takes_its_request_does_not_excuse_it(
    policy: str, says: bytes
) -> None:
    talk = Talk(policy, pipe_size=1 << 20)
    upload(talk)
    for piece in (says, says, b"HTT", b"P"):
        assert talk.passes(10, server_timeout_ms=50)
        talk.answers(piece)
    assert not talk.passes(10, server_timeout_ms=50)
    talk.turns()
    assert talk.closed() == "server_timeout"


def test_an_origin_that_has_begun_to_answer_need_not_take_the_rest() -> None:
    talk = Talk()
    upload(talk)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n"
    talk.answers(answer)
    for _ in range(20):
        assert talk.passes(40, server_timeout_ms=50)
        talk.answers(b"y")
    assert talk.got == answer + b"y" * 20
    assert talk.closed() == "early_response"


def upload(talk: Talk) -> None:
    """The origin takes the head of a request, and nothing of its body."""
    talk.asks(b"POST / HTTP/1.1\r\nContent-Length: 30000\r\n\r\n")
    talk.script.room(1, 0)
    talk.asks(b"x" * 30_000, 5000)


def test_the_server_timeout() -> None:
    silent = Talk()
    silent.asks(GET)
    silent.time_out(server_timeout_ms=50)
    assert (silent.got, silent.closed()) == (STATUS[504], "server_timeout")
    broken = Talk()
    broken.asks(GET)
    broken.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    broken.time_out(server_timeout_ms=50)
    assert broken.got.endswith(b"half")
    assert broken.closed() == "server_timeout"


def test_the_server_is_not_blamed_for_a_client_that_does_not_send() -> None:
    talk = Talk()
    talk.asks(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf")
    talk.time_out(server_timeout_ms=50)
    assert talk.got == b""
    talk.time_out(client_timeout_ms=200)
    assert (talk.got, talk.closed()) == (STATUS[408], "client_timeout")


def test_the_connect_timeout() -> None:
    talk = Talk(auto_connect=False, connect_timeout_ms=0)
    talk.asks(GET)
    talk.time_out(connect_timeout_ms=50)
    assert (talk.got, talk.closed()) == (STATUS[504], "connect_timeout")


def test_a_client_that_never_closes_does_not_keep_its_session() -> None:
    script = RelayScript("after")
    client = script.accept()
    script.input(client, b"rubbish\r\n\r\n" + b"more" * 1000)
    while not script.socket(client).finished:
        script.turn()
    assert script.session(0).lingering
    script.input(client, b"and more")
    while not script.socket(client).closed:
        assert script.turn() != "asleep"
    assert script.loop().now_ns == 1000 * MS
    assert script.counters()["closes_bad_request"] == 1


def test_an_error_waits_behind_the_tail_of_the_last_response() -> None:
    talk = Talk(pipe_size=1 << 20)
    talk.asks(GET + b"rubbish\r\n\r\n")
    talk.script.room(0, 100)
    talk.answers(b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + b"x" * 90_000, 9000)
    for _ in range(60):
        talk.script.room(0, 3000)
        talk.turns(3)
    assert talk.got.endswith(b"x" * 90_000 + STATUS[400])
    assert talk.closed() == "bad_request"


def test_the_modelled_stop_lets_a_response_end() -> None:
    talk = Talk(stop_grace_ms=60_000)
    idle = talk.script.accept()
    talk.asks(GET)
    talk.script.stop()
    talk.script.input(2, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    talk.script.fin(idle)
    talk.script.turn()
    assert talk.script.socket(idle).finished
    talk.turns(3)
    assert talk.got == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
    talk.turns()
    assert talk.script.turn() == "left"
    counts = talk.script.counters()
    assert (counts["ended"], counts["closes_client"], counts["sessions"]) == (1, 1, 0)
    assert talk.script.loop().now_ns < 60_000 * MS


def test_the_modelled_stop_does_not_wait_for_ever() -> None:
    talk = Talk(stop_grace_ms=250)
    talk.asks(GET)
    talk.script.stop()
    talk.turns()
    assert talk.script.turn() == "left"
    assert talk.script.loop().now_ns == 250 * MS
    assert talk.closed() == "stopped"

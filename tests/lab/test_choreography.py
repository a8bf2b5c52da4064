"""Choreographies against a plain Python server: no engine, so what fails here is the client's."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from engine.errors import UsageError
from lab import choreography, content
from lab.choreography import (
    SEND_WAITS,
    Ask,
    Close,
    Connect,
    Counters,
    HalfClose,
    Pace,
    Player,
    Poke,
    Read,
    ReadAll,
    ReadResponses,
    ReadUntilSilent,
    ReadWhile,
    Reset,
    Settle,
    Stall,
    State,
    requests_seen,
)
from lab.clients import Client, ClientError

HEAD = "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n"


class PlainServer:
    """A thread per connection, blocking writes; ``spoil`` may change a response, or end it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.counted = {"requests": 0, "sending": 0, "closes": 0}
        self.ends: list[str] = []
        self.cut: int | None = None  # close after so many bytes of a response
        self.reset = False  # close with RST
        self.stumble = False  # swap two bytes in the middle of a body
        threading.Thread(target=self._accept, daemon=True).start()

    def counters(self) -> Counters:
        return dict(self.counted)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        asked, answered = b"", 0
        with closing(connection):
            try:
                while data := connection.recv(65536):
                    asked += data
                    while b"\r\n\r\n" in asked:
                        head, asked = asked.split(b"\r\n\r\n", 1)
                        self.counted["requests"] += 1
                        if not self._answer(connection, head, answered):
                            return
                        answered += 1
                self.ends.append("eof")
            except OSError as error:
                self.ends.append(type(error).__name__)

    def _answer(self, connection: socket.socket, head: bytes, number: int) -> bool:
        match = re.search(rb"size=(\d+)", head)
        size = int(match[1]) if match else 10
        answer = bytearray(HEAD.format(size).encode() + content.body(number, size))
        if self.stumble:
            answer[-40:] = answer[-39:] + b"!"
        self.counted["sending"] += 1
        connection.sendall(answer[: self.cut])
        self.counted["sending"] -= 1
        if self.reset:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return self.cut is None and not self.reset


@pytest.fixture
def server() -> Iterator[PlainServer]:
    plain = PlainServer()
    yield plain
    plain.listener.close()


def player(server: PlainServer, **options: object) -> Player:
    return Player("127.0.0.1", server.port, **options)  # type: ignore[arg-type]


SENDING = State("a response waits", lambda counters: counters["sending"] > 0, ("requests",))


def test_a_stalled_client_reads_everything_in_the_end(server: PlainServer) -> None:
    held: list[float | None] = []
    with player(server, watch=server.counters, hold=held.append) as play:
        play.play((Connect(rcvbuf=4096), Ask("async", size=8 << 20), Settle(SENDING), Stall(1.5)))
        assert server.counted["sending"] == 1, "the client's window is shut"
        assert play.client().waiting() > 0
        assert held == [1.5]
        play.play((ReadAll(),))
        assert play.delivered() == {
            "bytes": 8 << 20, "expected": 8 << 20, "in_order": True, "fault": None,
        }
        assert not play.troubles


def test_pipelined_requests_and_small_reads(server: PlainServer) -> None:
    with player(server) as play:
        play.play((Connect(), Ask(size=50_000, count=3), Read(1000), Pace(20_000, 400_000)))
        got = play.delivered()["bytes"]
        assert 20_900 < got < 21_000, "21,000 bytes of stream less one head"
        play.play((ReadUntilSilent(),))
        assert play.client().stream.complete
        play.play((ReadAll(), Close()))
        assert play.delivered()["bytes"] == 150_000, "a closed connection still counts"


def test_some_of_the_responses_are_read(server: PlainServer) -> None:
    with player(server) as play:
        play.play((Connect(), Ask(size=50_000, count=3), ReadResponses(2)))
        assert play.client().stream.responses >= 2
        play.play((ReadResponses(1), ReadResponses(9)))
        assert play.client().stream.responses == 3, "there are no more"


def test_reading_goes_on_while_a_state_lasts(server: PlainServer) -> None:
    looked: list[int] = []

    def counters() -> dict[str, int]:
        return {"requests": 0, "left": len(looked)}

    def few(counters: Counters) -> bool:
        looked.append(1)
        return bool(counters["left"] < 3)

    settled = State("at once", lambda counters: True, hold_s=0.0)
    with player(server, watch=counters) as play:
        play.play((Connect(), Ask(size=50_000), ReadWhile(State("few", few), settled, size=1000)))
        assert play.client().stream.raw == 3000
        for steps in (0, 2):  # a bound, and a server that exports nothing
            play.play((ReadWhile(settled, settled, size=10, times=steps),))
        assert play.client().stream.raw == 3020
        play.play((ReadAll(),))
    with player(server) as play:
        play.play((Connect(), Ask(size=500), ReadWhile(settled, settled, size=100)))
        assert play.client().stream.raw == 0


def test_pace_keeps_its_rate(server: PlainServer) -> None:
    with player(server) as play:
        play.play((Connect(), Ask(size=100_000)))
        begun = time.monotonic()
        play.play((Pace(50_000, 200_000),))
        assert time.monotonic() - begun >= 0.24


def test_pokes_are_timed_and_read(server: PlainServer) -> None:
    with player(server) as play:
        play.play((Connect(rcvbuf=4096), Ask(size=8 << 20), Poke(), Poke(size=1000)))
        assert len(play.poke_ms) == 2
        assert all(0 < ms < 2000 for ms in play.poke_ms)


def test_half_close_and_reset_reach_the_server(server: PlainServer) -> None:
    with player(server) as play:
        play.play((Connect(), Ask(size=100), HalfClose(), ReadAll(), Connect(client="other"),
                   Ask(size=8 << 20, client="other"), Read(10, client="other"),
                   Reset(client="other")))
        assert play.client().gone(2.0)
    deadline = time.monotonic() + 2
    while len(server.ends) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.ends[0] == "eof"
    assert server.ends[1] in {"ConnectionResetError", "BrokenPipeError"}


def test_a_connection_that_stays_is_not_gone(server: PlainServer) -> None:
    with player(server) as play:
        play.play((Connect(), Ask(size=100), ReadAll()))
        assert not play.client().gone(0.1)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"cut": 5000}, "of 10,000 bytes arrived, then the stream was closed by the server"),
        ({"reset": True, "cut": 50}, "then the stream was reset by the server"),
        ({"stumble": True}, "of response 0 holds"),
    ],
)
def test_a_broken_stream_is_an_error_that_says_how(
    server: PlainServer, spoil: dict[str, object], says: str
) -> None:
    for name, value in spoil.items():
        setattr(server, name, value)
    steps = (Connect(), Ask(size=10_000), ReadAll())
    with player(server) as strict, pytest.raises(ClientError, match=says):
        strict.play(steps)
    with player(server, strict=False) as lenient:
        lenient.play(steps)
        delivered = lenient.delivered()
    assert says in str(delivered["fault"])
    assert delivered["in_order"] == ("stumble" not in spoil)


def test_silence_is_bounded(server: PlainServer) -> None:
    server.counted["sending"] = 0
    with player(server, patience=0.2) as play:
        play.play((Connect(),))
        play.client().stream.expect(100)
        with pytest.raises(ClientError, match="0 of 100 bytes arrived, then the stream was silent"):
            play.play((ReadAll(),))


def test_a_state_that_does_not_come_is_noted(server: PlainServer) -> None:
    with player(server, watch=server.counters) as play:
        begun = time.monotonic()
        play.play((Connect(), Settle(SENDING, most=0.3)))
        assert 0.25 < time.monotonic() - begun < 2
        assert play.troubles == ["not reached within 0.3 s: a response waits"]


@pytest.mark.parametrize(("state", "late"), [
    (SEND_WAITS, {"requests": 7, "sends": 5}), (requests_seen(1), {"requests": 7}),
    (requests_seen(1, more=1), {"requests": 8}),
], ids=["send", "requests", "and more"])
def test_a_state_is_that_of_all_who_do_the_same_and_not_of_who_was_there_before(
    server: PlainServer, state: State, late: dict[str, int]
) -> None:
    # Somebody has a SEND that waits, and it is still there when two others have asked.
    server.counted |= {"requests": 5, "sends": 4, "sending": 1, "bytes_sent": 9, "direct_writes": 4}
    with player(server, watch=server.counters, clients=2) as play:
        for counted in ({}, {name: count - 1 for name, count in late.items()}):
            server.counted |= {"sending": 2, **counted}
            play.play((Settle(state, most=0.15),))
            assert len(play.troubles) == 1, f"not reached with {server.counted}"
            play.troubles.clear()
        server.counted |= late
        play.play((Settle(state),))
        assert play.troubles == []


def test_a_server_without_counters_gets_a_fixed_time(server: PlainServer) -> None:
    with player(server, watch=lambda: None) as play:
        begun = time.monotonic()
        play.play((Settle(SENDING, blind=0.1),))
        assert 0.09 < time.monotonic() - begun < 1.5
        assert not play.troubles


def test_refusal_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ClientError, match=f"127.0.0.1:{port} refused the connection; is it run"):
        Client("127.0.0.1", port)


def test_nonsense_is_refused(server: PlainServer) -> None:
    with player(server) as play:
        with pytest.raises(UsageError, match="no connection 'first' is open"):
            play.play((Ask(),))
        with pytest.raises(UsageError, match="needs a player with somebody to tell it"):
            play.play((Stall(),))
        play.play((Connect(),))
        with pytest.raises(UsageError, match="open already"):
            play.play((Connect(),))
        with pytest.raises(UsageError, match="give 1 to 64"):
            play.play((Ask(count=65),))
        with pytest.raises(UsageError, match="give at most"):
            play.play((Stall(0.0),) * (choreography.MAX_STEPS + 1))


def test_the_target_of_a_request() -> None:
    assert choreography.target_of(Ask()) == "/sync"
    assert choreography.target_of(Ask("async", size=5, ms=0)) == "/async?size=5&ms=0"

"""The bundled origin, spoken to directly: what it holds back, lets go, and checks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from engine.errors import UsageError
from lab.choreography import Connect, Get, Player, ReadAll, Release, Settle
from lab.clients import Client, ClientError
from lab.origin import MOST_CONNECTIONS, Object, Origin
from lab.origin_process import OriginProcess


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin() as origin:
        yield origin


def player_of(origin: Origin, patience: float = 10.0) -> Player:
    host, port = origin.address
    return Player(host, port, patience=patience)


@pytest.mark.parametrize("held", ["silent", "noread"])
def test_what_is_held_is_answered_after_a_release(origin: Origin, held: str) -> None:
    with player_of(origin) as player:
        player.play((Connect(), Get((Object(5000, fin=0, **{held: 1}),)), Settle(blind=0.2)))
        assert player.client().waiting() == 0
        player.play((Release(origin.target), ReadAll()))
        assert player.delivered()["bytes"] == 5000


def test_a_release_is_for_what_is_held_then(origin: Origin) -> None:
    origin.release()
    with player_of(origin, patience=0.3) as player:
        player.play((Connect(), Get((Object(50, silent=1),))))
        with pytest.raises(ClientError, match=r"0 of 50 bytes arrived, .* silent for 0\.3 s"):
            player.play((ReadAll(),))


@pytest.mark.parametrize("line", [
    b"GET", b"GET / x HTTP/1.1", b"GET /object?size=%C2%B2 HTTP/1.1", b"GET http://[/ HTTP/1.1",
    b"GET /object?size=" + b"9" * 5000 + b" HTTP/1.1",
])  # fmt: skip
def test_what_is_no_request_is_answered_400(origin: Origin, line: bytes) -> None:
    with socket.create_connection(origin.address, 5) as client:
        client.sendall(line + b"\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Origin(port=70_000), "port=70000 is not allowed: a whole number from 0 to 65535"),
    (lambda: Origin(port="x"), "port='x' is not allowed"),  # type: ignore[arg-type]
    (lambda: Origin(port=True), "port=True is not allowed"),
    (lambda: Origin(rcvbuf="a"), "rcvbuf='a' is not allowed"),  # type: ignore[arg-type]
    (lambda: Origin(rcvbuf=-1), "rcvbuf=-1 is not allowed: a whole number from 0 to 1073741824"),
    (lambda: Origin(sndbuf=2**40), "sndbuf=1099511627776 is not allowed"),
    (lambda: Origin(host="here"), "host='here' is not a numeric address"),
    (lambda: Origin().release("x"), "ticket='x' is not allowed"),  # type: ignore[arg-type]
    (lambda: OriginProcess(rcvbuf=-1), "rcvbuf=-1 is not allowed"),
])  # fmt: skip
def test_a_parameter_out_of_its_range_is_one_line(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_ends_with_all_the_connections_that_it_allows() -> None:
    with ExitStack() as opened, Origin() as origin:
        for _ in range(MOST_CONNECTIONS + 2):
            opened.enter_context(socket.create_connection(origin.address, 5))
        deadline = time.monotonic() + 10
        while origin.connections < MOST_CONNECTIONS and time.monotonic() < deadline:
            time.sleep(0.01)
        origin.close()
        assert origin.connections == 0


@pytest.mark.parametrize("held", ["silent", "noread"])
def test_a_release_that_overtakes_its_request_is_for_it(
    origin: Origin, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may send the release before the thread that uploads has sent a byte."""
    sends, late = Client._send, threading.Event()

    def send_late(self: Client, *what: Any) -> None:
        assert late.wait(10)
        sends(self, *what)

    monkeypatch.setattr(Client, "_send", send_late)
    with player_of(origin, patience=5.0) as player:
        asked = (Object(200, fin=0, **{held: 1}),)
        player.play((Connect(), Get(asked, upload=1000), Release(origin.target)))
        late.set()
        player.play((ReadAll(),))
        assert player.delivered()["bytes"] == 200
        player.play((Get((Object(50, silent=1),)), Settle(blind=0.1)))
        assert player.client().waiting() == 0, "what is asked after a release is held anew"


def test_a_release_is_refused_as_any_request_with_a_wrong_field(origin: Origin) -> None:
    with socket.create_connection(origin.address, 5) as client:
        client.sendall(b"GET /release?ticket=x HTTP/1.1\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_who_hangs_up_is_not_held_any_longer(origin: Origin) -> None:
    with player_of(origin) as player:
        player.play((Connect(), Get((Object(50, noread=1),)), Settle(blind=0.1)))
        assert origin.connections == 1
    until = time.monotonic() + 5
    while origin.connections and time.monotonic() < until:
        time.sleep(0.01)
    assert origin.connections == 0


def test_an_upload_is_sent_beside_what_comes_next_and_checked(origin: Origin) -> None:
    with player_of(origin) as player:
        begun = time.monotonic()
        player.play((Connect(rcvbuf=4096), Get((Object(200, noread=1),), upload=30_000_000)))
        assert time.monotonic() - begun < 5, "a body that nobody takes holds nobody up"
        player.play((Release(origin.target), ReadAll()))
        assert player.delivered()["in_order"]


def test_an_upload_that_was_changed_on_its_way_is_refused(origin: Origin) -> None:
    with socket.create_connection(origin.address, 5) as client:
        client.sendall(b"POST /object?check=1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
        assert client.recv(1000).startswith(b"HTTP/1.1 422 ")


def test_several_objects_are_numbered_as_their_responses(origin: Origin) -> None:
    with player_of(origin) as player:
        wanted = Object(70_000, chunk=999, fin=0)
        player.play((Connect(), Get((wanted, Object(10, fin=0))), Get((wanted,)), ReadAll()))
        assert player.client().stream.responses == 3


def test_a_client_closes_though_its_upload_is_under_way(origin: Origin) -> None:
    host, port = origin.address
    client = Client(host, port)
    client.ask_for([(Object(10, noread=1).target, 10)], upload=50_000_000)
    client.close()

"""The relay's scenarios on real sockets: who spins, who sleeps, and every byte afterwards."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from engine import SpliceRelay
from lab import content
from lab.origin import Origin
from tests.engine.relay_wire import (
    SMALL,
    SPIN,
    Browser,
    Window,
    come_to_rest,
    eventually,
    past_the_body,
    relay_of,
)

pytestmark = pytest.mark.usefixtures("relay_leaves_nothing")


@pytest.mark.parametrize(
    ("policy", "spins"),
    [("before", True), ("after", False), ("later", False), ("no-splice", False),
     ("skip-send", True), ("last-block", True)],
)  # fmt: skip
@pytest.mark.parametrize("silent", [False, True])
def test_a_the_tail_of_response_one_is_not_taken(
    origin: Origin, policy: str, spins: bool, silent: bool
) -> None:
    with relay_of(origin, policy) as relay, Browser(relay) as client:
        second = "silent=1" if silent else ""
        client.ask("", second, size=100_000)
        past_the_body(relay, client)
        window = Window(relay)
        window.check(spins)
        if spins:
            # Nothing but empty waits and handlers that do nothing; EAGAIN is never met.
            assert window.changes["waits_empty"] == pytest.approx(window.changes["waits"], abs=2)
            assert window.changes["recv_eagain_origin"] == 0
            assert window.changes["splice_in_eagain_origin"] == 0
        elif policy != "no-splice":
            (session,) = relay.sessions()
            assert session.response.piped > 0
            assert session.requests == 2, "response 2 is awaited or begun behind that pipe"
        client.socket.settimeout(0.4 if silent else 5)
        assert client.read_all() != silent
        assert client.stream.in_order
        assert client.stream.responses == (1 if silent else 2)


@pytest.mark.parametrize(
    ("policy", "spins"),
    [("before", True), ("after", False), ("no-splice", False), ("recv-allowed", False),
     ("last-block", False)],
)  # fmt: skip
def test_b_the_last_block_comes_late(origin: Origin, policy: str, spins: bool) -> None:
    with relay_of(origin, policy) as relay, Browser(relay, rcvbuf=8192) as client:
        client.ask("last=3000&delay_ms=300", size=1_000_000)
        assert client.read(910_000) == 910_000
        time.sleep(0.4)
        come_to_rest(relay)
        window = Window(relay)
        window.check(spins)
        if spins:  # each turn offers the pipe to the client, which does not take it
            tried = window.changes["splice_out_eagain_client"] / window.changes["noop_dispatches"]
            assert 0.99 < tried < 1.01
        assert client.read_all()
        eventually(lambda: relay.counters()["responses"] == 1)


@pytest.mark.parametrize(
    ("policy", "spins"),
    [("before", True), ("after", False), ("recv-allowed", False), ("no-splice", False),
     ("last-block", True)],
)  # fmt: skip
def test_d_the_end_of_a_chunk_is_not_taken(origin: Origin, policy: str, spins: bool) -> None:
    with relay_of(origin, policy) as relay, Browser(relay) as client:
        client.ask("chunk=65000", size=260_000)
        past_the_body(relay, client)
        Window(relay).check(spins)
        assert client.read_all()


@pytest.mark.parametrize(
    ("policy", "spins"),
    [("before", True), ("after", False), ("recv-allowed", False), ("no-splice", False),
     ("last-block", True), ("skip-send", True)],
)  # fmt: skip
def test_e_an_upload_that_the_origin_does_not_read(
    origin: Origin, policy: str, spins: bool
) -> None:
    """The other direction: the client is the source, the origin the side that takes nothing."""
    with relay_of(origin, policy) as relay, Browser(relay) as client:
        client.socket.settimeout(30)
        client.socket.sendall(
            b"POST /object?size=5&noread=1&check=1 HTTP/1.1\r\nConnection: close\r\n"
            b"Content-Length: 100000\r\n\r\n"
        )
        upload = threading.Thread(target=client.socket.sendall, args=(content.body(0, 100_000),))
        upload.start()
        try:
            come_to_rest(relay)
            Window(relay).check(spins)
        finally:
            origin.release()
            upload.join()
        # The origin has compared every byte of the body: 422 else.
        got = client.rest()
        assert got.startswith(b"HTTP/1.1 200 ")
        assert got.endswith(b"\r\n\r\n" + content.body(0, 5))


@pytest.mark.parametrize("engine", ["speculative", "level-triggered"])
@pytest.mark.parametrize("policy", ["before", "after", "no-splice", "mirror"])
def test_m_stalled_in_the_middle(origin: Origin, policy: str, engine: str) -> None:
    with relay_of(origin, policy, engine=engine) as relay, Browser(relay) as client:
        client.ask("", size=8_000_000)
        come_to_rest(relay)
        Window(relay).check(spins=False)
        client.socket.settimeout(0.5 if policy == "mirror" else 5)
        whole = client.read_all()
        assert client.stream.in_order
        # Every byte, in order; the mirror fault is as quiet, and never goes on.
        assert whole == (policy != "mirror")


def test_the_level_triggered_engine_spins_on_events(origin: Origin) -> None:
    with relay_of(origin, "before", engine="level-triggered") as relay, Browser(relay) as client:
        client.ask("", "", size=100_000)
        come_to_rest(relay)
        window = Window(relay)
        window.check(spins=True)
        assert window.changes["waits_zero"] == 0
        assert window.changes["events"] == pytest.approx(window.changes["waits"], abs=2)
        assert client.read_all()


def test_switched_while_it_spins(origin: Origin) -> None:
    with relay_of(origin, "before") as relay, Browser(relay) as client:
        client.ask("", "", size=100_000)
        come_to_rest(relay)
        Window(relay).check(spins=True)
        relay.set("after")
        time.sleep(0.05)
        Window(relay).check(spins=False)
        assert client.read_all()


@pytest.mark.parametrize("policy", ["before", "after"])
def test_the_client_timeout_ends_a_stall(origin: Origin, policy: str) -> None:
    with relay_of(origin, policy, client_timeout_ms=300) as relay, Browser(relay) as client:
        client.ask("", "", size=100_000)
        eventually(lambda: relay.counters()["closes_client_timeout"] == 1, seconds=3)
        assert relay.sessions() == []
        Window(relay).check(spins=False)
        counts = relay.counters()
        assert (counts["piped"], counts["pipes"], counts["sessions"]) == (0, 0, 0)


@pytest.mark.parametrize(("policy", "spins"), [("before", True), ("after", False)])
def test_a_client_that_sends_now_and_then_is_timed_out_for_what_it_does_not_take(
    origin: Origin, policy: str, spins: bool
) -> None:
    with relay_of(origin, policy) as relay, Browser(relay) as client:
        client.ask("", "", size=100_000)
        past_the_body(relay, client)
        Window(relay).check(spins)
        bytes_of_a_request = iter(b"GET /" + b"x" * 10_000)

        def ended() -> bool:
            with contextlib.suppress(OSError):
                client.socket.send(bytes([next(bytes_of_a_request)]))
            return relay.counters()["closes_client_timeout"] == 1

        eventually(lambda: ended() or int(relay.counters()["recv_client"]) > 20)
        relay.set(client_timeout_ms=300)
        eventually(ended)
        Window(relay).check(spins=False)


@pytest.mark.parametrize(("policy", "spins"), [("before", True), ("after", False)])
def test_a_client_that_trickles_into_a_stall_still_gets_every_byte(
    origin: Origin, policy: str, spins: bool
) -> None:
    with relay_of(origin, policy, client_timeout_ms=30_000) as relay, Browser(relay) as client:
        client.ask("", "", size=100_000)
        past_the_body(relay, client)
        client.socket.sendall(b"GET /object?size=7&se")
        come_to_rest(relay)
        Window(relay).check(spins)
        assert client.read_all()
        client.stream.expect(7)
        client.socket.sendall(b"q=2 HTTP/1.1\r\n\r\n")
        assert client.read_all()


@pytest.mark.parametrize(("policy", "spins"), [("before", True), ("after", False)])
def test_an_origin_that_speaks_and_takes_no_request_is_timed_out(policy: str, spins: bool) -> None:
    """Interim responses are no progress of a request which it does not take."""
    ended = threading.Event()

    def trickle(listener: socket.socket) -> None:
        with listener.accept()[0] as peer, contextlib.suppress(OSError):
            while not ended.wait(0.02):
                peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        serving = threading.Thread(target=trickle, args=(listener,))
        serving.start()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            with SpliceRelay(target, policy, origin_sndbuf=16_384) as relay, \
                    Browser(relay, rcvbuf=1 << 20) as client:
                client.socket.sendall(
                    b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
                eventually(lambda: relay.counters()["bytes_copied_client"]
                           + relay.counters()["bytes_spliced_client"] > 70_000)
                if spins:
                    eventually(lambda: Window(relay, 0.1).rate("noop_dispatches") > SPIN)
                relay.set(server_timeout_ms=300)
                eventually(lambda: relay.counters()["closes_server_timeout"] == 1)
                assert client.rest().startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        finally:
            ended.set()
            serving.join()

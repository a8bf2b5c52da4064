"""The ring server on the kernel's io_uring: states and counts, never seconds of CPU."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

import pytest

from engine import PRESETS, RingServer
from engine.errors import RinglabError
from tests.engine.wire import Change, Wire, ring_allowed, until
from tests.engine.world import Ask

pytestmark = pytest.mark.skipif(bool(ring_allowed()), reason=ring_allowed() or "allowed")

LARGE = 3 << 20
SMALL = 24
CAP_WAITS = 40  # a second, of an idle loop with the cap of 25 ms
WINDOW = 0.4  # s
# What the socket may take is set, so that a SEND has to wait. A full socket may still have room for
# a few bytes written directly: order is kept here, so that content can be checked under any policy.
STALL: dict[str, Any] = {"so_sndbuf": 16 * 1024, "sample_hz": 0, "direct_write": "behind-send"}
HONEST = sorted(set(PRESETS) - {"mirror"})


def stalled(server: RingServer, depth: int = 1) -> Wire:
    """A client that does not read; the rest of its response waits in a SEND."""
    client = Wire(server, rcvbuf=4096)
    client.ask(Ask("async", LARGE))
    assert until(lambda: any(conn.sending for conn in server.connections()))
    if depth > 1:
        client.ask(*[Ask("async", SMALL)] * (depth - 1))
        assert until(lambda: any(conn.write_buf for conn in server.connections()))
    return client


def poke(server: RingServer) -> None:
    """One small request of another client."""
    with Wire(server) as other:
        other.ask(Ask("sync", SMALL)).check()


def check_state(server: RingServer, state: str) -> None:
    """``parked``, ``spins``, ``quiet`` (an idle loop's waits) or ``asleep`` (no waits at all)."""
    time.sleep(0.1)
    change = Change(server, WINDOW)
    now = server.counters()
    if state == "parked":
        assert change["waits"] == 0
        assert (now["last_mode"], now["waiting"]) == ("untimed", 1)
    elif state == "spins":
        assert change["why_list"] > 0.99 * change["waits"]
        assert change["wasted"] > 0.99 * change["iterations"]
        assert change.per_second("waits") > 20 * CAP_WAITS
    elif state == "quiet":
        assert change.per_second("waits") <= CAP_WAITS + 5
        assert change["wasted"] <= 2
    else:
        assert change["waits"] <= 1
        assert now["last_mode"] == "timed"


# ---- ways to set it up --------------------------------------------------------------------------


@pytest.fixture(params=["none", "coop", "defer", "sqpoll"])
def setup(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    try:
        with RingServer(setup=name, sample_hz=0) as server:
            assert server.ring().setup == name
    except RinglabError as error:
        pytest.skip(f"this kernel does not take setup={name}: {error}")
    return name


@pytest.mark.parametrize("recv", ["buffer-ring", "plain"])
@pytest.mark.parametrize("policy", ["shipped", "fixed", "tickless"])
def test_serves_under_each_setup(setup: str, recv: str, policy: str) -> None:
    asks = [Ask(route, size) for size in (0, SMALL, 5000, 200_000) for route in ("sync", "async")]
    with RingServer(policy, setup=setup, recv=recv, direct_write="behind-send") as server:
        assert server.ring().buffer_ring == (recv == "buffer-ring")
        with Wire(server) as one, Wire(server) as other:
            for ask in asks:
                one.ask(ask).check()
            other.ask(*asks * 3).check()
        assert until(lambda: server.counters()["connections"] == 0)
        counters = server.counters()
        assert counters["requests"] == 4 * len(asks)
        assert counters["closes"] == counters["accepts"] == 2


def test_a_ring_of_one_entry_serves_many() -> None:
    asks = [Ask("async", 20_000), Ask("sync", SMALL)] * 20
    with RingServer("fixed", entries=1) as server:
        clients = [Wire(server) for _ in range(16)]
        for client in clients:
            client.ask(*asks)
        for client in clients:
            client.check()
            client.socket.close()
        assert server.counters()["sq_full"] != 0


@pytest.mark.parametrize("policy", ["fixed", "tickless"])
def test_two_workers_share_the_connections(policy: str) -> None:
    with RingServer(policy, workers=2) as server:
        assert len(set(server.thread_ids())) == 2
        clients = [Wire(server) for _ in range(64)]
        for client in clients:
            client.ask(Ask("sync", 1000), Ask("async", 1000))
        for client in clients:
            client.check()
        each = [int(server.counters(worker)["accepts"]) for worker in (0, 1)]
        assert sum(each) == 64
        assert min(each) > 0
        assert len(server.connections()) == 64
        for client in clients:
            client.socket.close()
        assert until(lambda: server.counters()["connections"] == 0)


def test_a_stall_on_one_worker_leaves_the_other_alone() -> None:
    with RingServer("shipped", workers=2, **STALL) as server, stalled(server, depth=2):
        time.sleep(0.1)
        before = [int(server.counters(worker)["wasted"]) for worker in (0, 1)]
        time.sleep(WINDOW)
        after = [int(server.counters(worker)["wasted"]) for worker in (0, 1)]
        wasted = sorted(new - old for new, old in zip(after, before, strict=True))
        assert wasted[0] <= 2
        assert wasted[1] > 1000


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with RingServer(host="::1", workers=2) as server, Wire(server) as client:
        client.ask(Ask("sync", 1000), Ask("async", 100_000)).check()


# ---- the states of a stall ----------------------------------------------------------------------

STATES = {
    # single, poked, pipelined
    "shipped": ("parked", "spins", "spins"),
    "order": ("parked", "spins", "spins"),
    "no-timer": ("parked", "spins", "spins"),
    "membership": ("parked", "quiet", "quiet"),
    "timeout": ("parked", "quiet", "quiet"),
    "timed-wait": ("spins", "spins", "spins"),
    "fixed": ("quiet", "quiet", "quiet"),
    "tickless": ("asleep", "asleep", "asleep"),
}


@pytest.mark.parametrize("policy", STATES)
def test_states_of_a_stall_and_every_byte_after_it(policy: str) -> None:
    single, poked, pipelined = STATES[policy]
    with RingServer(policy, **STALL) as server:
        with stalled(server) as client:
            check_state(server, single)
            poke(server)
            check_state(server, poked)
            client.check()
        assert until(lambda: server.counters()["connections"] == 0)
        with stalled(server, depth=2) as client:
            check_state(server, pipelined)
            client.check()


def test_as_shipped_a_direct_write_lands_inside_the_response_before() -> None:
    """celeris #751: nothing is lost, but the client cannot tell what belongs where."""
    asks = [Ask("async", LARGE), Ask("async", 200_000)]
    at_once = STALL | {"direct_write": "at-once"}
    with RingServer("shipped", **at_once) as server, stalled(server) as client:
        time.sleep(0.1)
        first = int(server.counters()["bytes_direct"])
        client.ask(asks[1])
        assert until(lambda: any(conn.write_buf for conn in server.connections()))
        check_state(server, "spins")
        passed_it = int(server.counters()["bytes_direct"]) > first
        expected = asks[0].answer(0) + asks[1].answer(1)
        got = client.take(len(expected))
        assert len(got) == len(expected)
        assert (got != expected) == passed_it


@pytest.mark.parametrize("policy", HONEST)
def test_an_idle_loop_is_quiet(policy: str) -> None:
    with RingServer(policy, **STALL) as server:
        poke(server)
        check_state(server, "asleep" if policy == "tickless" else "quiet")


def test_a_zero_timeout_without_a_timer_is_cheaper() -> None:
    """Iterations a second of the thread's own CPU time, the two ways by turns on one spin."""
    rates: dict[str, list[float]] = {"kernel": [], "poll": []}
    with RingServer("shipped", **STALL) as server, stalled(server, depth=2):
        for _ in range(3):
            for way, each in rates.items():
                server.set(expired=way)
                time.sleep(0.05)
                change = Change(server, 0.2)
                each.append(change["iterations"] / max(change["thread_cpu_ns"], 1))
    assert sorted(rates["poll"])[1] > 1.2 * sorted(rates["kernel"])[1]


# ---- switching while it serves ------------------------------------------------------------------


def test_switching_the_policy_ends_a_spin_at_once() -> None:
    with RingServer("shipped", **STALL) as server, stalled(server, depth=2) as client:
        check_state(server, "spins")
        server.set(membership="leave")
        check_state(server, "quiet")
        server.set("tickless")
        check_state(server, "asleep")
        client.check()


def test_switching_through_all_policies_under_load_loses_nothing() -> None:
    asks = [Ask("async", 60_000), Ask("sync", SMALL), Ask("async", SMALL), Ask("async", 5000, 1)]
    failed: list[BaseException] = []

    def load(server: RingServer, done: threading.Event) -> None:
        try:
            with Wire(server, rcvbuf=4096) as client:
                while not done.is_set():
                    client.ask(*asks).check()
        except BaseException as error:
            failed.append(error)

    with RingServer("shipped", direct_write="behind-send", so_sndbuf=16_384) as server:
        done = threading.Event()
        threads = [threading.Thread(target=load, args=(server, done)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            for policy in HONEST:
                server.set(policy, direct_write="behind-send")
                time.sleep(0.01)
        done.set()
        for thread in threads:
            thread.join()
        assert failed == []
        assert server.counters()["send_errors"] == 0


# ---- stop and deadlines -------------------------------------------------------------------------

HONOURS = {
    "shipped": False,
    "membership": False,
    "timeout": False,
    "timed-wait": True,
    "fixed": True,
    "tickless": True,
}


@pytest.mark.parametrize("policy", HONOURS)
def test_whether_a_stop_is_seen_while_stalled(policy: str) -> None:
    with RingServer(policy, **STALL) as server, stalled(server):
        time.sleep(0.1)
        server.request_stop()
        assert server.wait_stopped(10 if HONOURS[policy] else 1) == HONOURS[policy]


@pytest.mark.parametrize("policy", HONOURS)
def test_whether_a_write_timeout_is_seen_while_stalled(policy: str) -> None:
    with RingServer(policy, write_timeout_ms=300, **STALL) as server, stalled(server) as client:
        closed = until(lambda: server.counters()["write_timeouts"], 10 if HONOURS[policy] else 1)
        assert closed == HONOURS[policy]
        if closed:
            assert until(lambda: server.counters()["connections"] == 0)
            with contextlib.suppress(ConnectionError):
                assert len(client.take(LARGE)) < LARGE


def test_a_poke_lets_a_parked_worker_see_both() -> None:
    with RingServer("shipped", write_timeout_ms=100, **STALL) as server, stalled(server):
        time.sleep(0.3)
        assert server.counters()["write_timeouts"] == 0
        poke(server)
        assert until(lambda: server.counters()["write_timeouts"] == 1)
        server.request_stop()
        assert server.wait_stopped(10)


@pytest.mark.parametrize("policy", ["fixed", "tickless"])
def test_a_stop_lets_a_reading_client_have_its_response(policy: str) -> None:
    with RingServer(policy, stop_grace_ms=20_000, **STALL) as server:
        with stalled(server) as client:
            server.request_stop()
            client.check()
            assert client.ended()
        assert server.wait_stopped(10)


# ---- a handler that holds a completion ----------------------------------------------------------

HANDLER_MS = 1500


def held(server: RingServer, client: Wire) -> threading.Thread:
    """The client reads while a handler of its next request runs; the thread in which it does."""
    client.ask(Ask("async", SMALL, HANDLER_MS))
    assert until(lambda: any(conn.handler_running for conn in server.connections()))
    reader = threading.Thread(target=client.check)
    reader.start()
    assert until(lambda: server.counters()["held"])
    return reader


@pytest.mark.parametrize(
    ("policy", "waits"),
    [("shipped", True), ("held-listed", False), ("held-unlisted", False), ("tickless", False)],
)
def test_whether_others_wait_for_a_handler_that_is_not_theirs(policy: str, waits: bool) -> None:
    with RingServer(policy, **STALL) as server, stalled(server) as client, Wire(server) as other:
        reader = held(server, client)
        asked = time.monotonic()
        other.ask(Ask("sync", SMALL)).check()
        of_handler = (time.monotonic() - asked) / (HANDLER_MS / 1000)
        assert (of_handler > 0.5) == waits
        reader.join()
        assert client.read == 2


@pytest.mark.parametrize(
    ("policy", "state"),
    [("held-listed", "spins"), ("fixed", "quiet"), ("tickless", "asleep")],
)
def test_the_worker_while_a_completion_is_held(policy: str, state: str) -> None:
    with RingServer(policy, **STALL) as server, stalled(server) as client:
        reader = held(server, client)
        assert server.counters()["held_now"] == 1
        check_state(server, state)
        reader.join()
        assert server.counters()["held_now"] == 0


# ---- clients that go away, or never stop asking -------------------------------------------------


@pytest.mark.parametrize("policy", HONEST)
def test_a_reset_in_the_middle_of_a_response(policy: str) -> None:
    with RingServer(policy, **STALL) as server:
        client = stalled(server, depth=2)
        linger = struct.pack("ii", 1, 0)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.socket.close()
        assert until(lambda: server.counters()["connections"] == 0)
        assert server.counters()["resets"] != 0
        assert server.counters()["sending"] == server.counters()["list_length"] == 0
        poke(server)


@pytest.mark.parametrize("policy", HONEST)
def test_half_close_with_responses_pending(policy: str) -> None:
    asks = [Ask("async", 200_000), Ask("sync", SMALL), Ask("async", SMALL, 20)]
    with RingServer(policy, **STALL) as server:
        with Wire(server, rcvbuf=4096) as client:
            client.ask(*asks)
            client.socket.shutdown(socket.SHUT_WR)
            time.sleep(0.1)
            client.check()
            assert client.ended()
        assert until(lambda: server.counters()["connections"] == 0)


@pytest.mark.parametrize("route", ["sync", "async"])
@pytest.mark.parametrize(
    ("policy", "count", "size"),
    [("shipped", 5000, 5000), ("fixed", 5000, 5000), ("tickless", 5000, 5000),
     ("tickless", 20_000, 20)],
)
def test_thousands_of_requests_from_a_client_that_does_not_read(
    policy: str, route: str, count: int, size: int
) -> None:
    """Depth bounds what is taken on; the rest waits in the kernel and then in the client."""
    with RingServer(policy, **STALL) as server:
        with Wire(server, rcvbuf=4096) as client:
            asker = threading.Thread(target=client.ask, args=[Ask(route, size)] * count)
            asker.start()
            depth = int(server.settings["max_pipeline"])
            assert until(lambda: any(conn.paused for conn in server.connections()))
            time.sleep(0.2)
            (conn,) = server.connections()
            assert conn.outstanding <= depth
            assert conn.requests < count
            assert server.memory() < 3 << 20
            client.asked = [Ask(route, size)] * count
            client.check()
            asker.join()
        assert until(lambda: server.counters()["connections"] == 0)
        assert server.counters()["resets"] == 0


def test_connections_beyond_the_most_are_closed_and_the_others_served() -> None:
    with RingServer("tickless", max_connections=3) as server:
        clients = [Wire(server) for _ in range(3)]
        for client in clients:
            client.ask(Ask("sync", SMALL)).check()
        with contextlib.suppress(ConnectionResetError), Wire(server) as late:
            assert late.ended()
        assert server.counters()["refused"] == 1
        clients.pop().socket.close()
        assert until(lambda: server.counters()["connections"] == 2)
        poke(server)
        for client in clients:
            client.ask(Ask("async", SMALL)).check()


# ---- what is refused ----------------------------------------------------------------------------


def test_a_refusal_reaches_a_client_that_still_sends() -> None:
    body = bytes(1 << 20)
    with RingServer("tickless") as server, Wire(server) as client:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n"
        sender = threading.Thread(target=send_all, args=(client.socket, head + body))
        sender.start()
        assert client.take(12) == b"HTTP/1.1 405"
        sender.join()
        assert client.ended() or client.take(1 << 16)
        client.socket.close()
        assert until(lambda: server.counters()["connections"] == 0)


def test_the_last_response_arrives_whole_although_more_was_asked() -> None:
    """Requests after the one that ends the connection are dropped, not the response with them."""
    with RingServer("tickless") as server, Wire(server, rcvbuf=4096) as client:
        last = Ask("sync", 2 << 20, kind="close")
        client.ask(last)
        sender = threading.Thread(target=send_all, args=(client.socket, Ask().wire() * 20, 0.01))
        sender.start()
        time.sleep(0.3)
        client.check()
        sender.join()


def send_all(to: socket.socket, data: bytes, pause: float = 0) -> None:
    try:
        for at in range(0, len(data), 4096 if not pause else 100):
            to.sendall(data[at : at + (4096 if not pause else 100)])
            time.sleep(pause)
    except OSError:
        pass  # closed, as it should be

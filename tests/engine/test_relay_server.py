"""The relay on real sockets: the scenarios, every byte afterwards, failures, its life."""

from __future__ import annotations

import contextlib
import gc
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import RelayLoopView, RelayPolicy, SpliceRelay
from engine.errors import MachineError, PolicyError, UsageError
from engine.startup import need_descriptors
from lab import content
from lab.origin import Origin

WINDOW_S = 0.2
SPIN = 20_000  # waits a second; a quiet loop makes a handful, a spinning one more than 100,000
SMALL = 4096


def footprint() -> tuple[int, int]:
    """Threads and open files of this process."""
    tasks, files = (list(Path("/proc/self").joinpath(name).iterdir()) for name in ("task", "fd"))
    return len(tasks), len(files)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    need_descriptors(1, "max_sessions", 1024, 6)  # a start raises the limit: not ours to count
    gc.collect()
    before = footprint()
    yield
    gc.collect()
    eventually(lambda: footprint() == before)


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin(rcvbuf=SMALL) as running:
        yield running


def eventually(holds: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to hold in time"
        time.sleep(0.005)


class Browser:
    """A client with a small receive buffer, which reads what it is told to."""

    def __init__(self, relay: SpliceRelay, rcvbuf: int = SMALL) -> None:
        self.stream = content.StreamCheck()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.socket.settimeout(5)
        self.socket.connect(relay.address)
        self.asked = 0

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, *queries: str, size: int = 0) -> None:
        """GETs in one write; ``size`` of each body."""
        data = b""
        for query in queries:
            target = f"/object?size={size}&seq={self.asked}&{query}"
            data += f"GET {target} HTTP/1.1\r\nHost: t\r\n\r\n".encode()
            self.stream.expect(size)
            self.asked += 1
        self.socket.sendall(data)

    def read(self, size: int) -> int:
        """So many bytes of the stream, fewer only when it ends or falls silent."""
        got = 0
        while got < size and (count := self.read_some(size - got)):
            got += count
        return got

    def read_some(self, size: int = 65_536) -> int:
        try:
            data = self.socket.recv(min(size, 65_536))
        except TimeoutError:
            return 0
        self.stream.feed(data)
        return len(data)

    def read_all(self) -> bool:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # or it takes seconds
        while not self.stream.complete and self.stream.in_order:
            if not self.read_some():
                break
        return self.stream.complete and self.stream.in_order

    def rest(self) -> bytes:
        """Everything until the relay closes."""
        return b"".join(iter(lambda: self.socket.recv(65_536), b""))

    def raw(self, data: bytes) -> bytes:
        self.socket.sendall(data)
        return self.rest()


def relay_of(origin: Origin, policy: Any, **settings: Any) -> SpliceRelay:
    return SpliceRelay(origin.target, policy, so_sndbuf=16_384, origin_sndbuf=16_384, **settings)


class Window:
    """What the relay did while nobody moved."""

    def __init__(self, relay: SpliceRelay, seconds: float = WINDOW_S) -> None:
        before = relay.counters()
        time.sleep(seconds)
        after = relay.counters()
        self.changes = {
            name: int(value) - int(before[name])
            for name, value in after.items()
            if isinstance(value, int)
        }
        wall = self.changes["t_ns"]
        self.seconds = wall / 1e9
        self.on_queue = (self.changes["run_ns"] + self.changes["queue_ns"]) / wall

    def rate(self, name: str) -> float:
        return self.changes[name] / self.seconds

    def check(self, spins: bool) -> None:
        if spins:
            assert self.rate("waits") > SPIN
            assert self.rate("noop_dispatches") > SPIN
            assert self.on_queue > 0.3  # 1.0, but for what the host of this machine takes away
        else:
            assert self.changes["waits"] <= 5
            assert self.changes["noop_dispatches"] == 0
            assert self.changes["thread_cpu_ns"] < 0.05e9 * self.seconds


def come_to_rest(relay: SpliceRelay) -> None:
    """Nothing has moved for a while."""
    def moved() -> tuple[Any, ...]:
        counts = relay.counters()
        return tuple(value for name, value in counts.items() if name.startswith("bytes_"))

    last, since = moved(), time.monotonic()
    while time.monotonic() - since < 0.1:
        time.sleep(0.02)
        if (now := moved()) != last:
            last, since = now, time.monotonic()


# -- the scenarios ---------------------------------------------------------------------------------


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
        come_to_rest(relay)
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


# -- what passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["before", "after", "no-splice", "later"])
def test_chunked_until_close_and_bodies_of_requests(origin: Origin, policy: str) -> None:
    with relay_of(origin, policy) as relay:
        with Browser(relay) as client:
            head, _, body = client.raw(
                b"GET /?size=300000&chunk=65000 HTTP/1.1\r\nConnection: close\r\n\r\n"
            ).partition(b"\r\n\r\n")
            assert b"\r\nConnection: close" in head
            assert b"".join(unchunk(body)) == content.body(0, 300_000)
        with Browser(relay) as client:
            got = client.raw(b"GET /?size=300000&until=1 HTTP/1.1\r\n\r\n")
            assert got.partition(b"\r\n\r\n")[2] == content.body(0, 300_000)
        with Browser(relay) as client:
            sent = content.body(0, 200_000)
            got = client.raw(
                b"POST /?size=5 HTTP/1.1\r\nConnection: close\r\nContent-Length: 200000\r\n\r\n"
                + sent
            )
            assert got.endswith(b"\r\n\r\n" + content.body(0, 5))
        assert relay.counters()["responses"] == 3


def unchunk(body: bytes) -> Iterator[bytes]:
    while True:
        line, _, body = body.partition(b"\r\n")
        size = int(line, 16)
        if size == 0:
            assert body == b"\r\n"
            return
        yield body[:size]
        assert body[size : size + 2] == b"\r\n"
        body = body[size + 2 :]


def test_many_clients_at_once(origin: Origin) -> None:
    with SpliceRelay(origin.target, "later") as relay, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Browser(relay)) for _ in range(20)]
        for client in clients:
            client.ask("", "chunk=0", size=60_000)
        done: list[bool] = []
        threads = [
            threading.Thread(target=lambda c=client: done.append(c.read_all()))
            for client in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [True] * 20
        assert relay.counters()["responses"] == 40


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["speculative", "level-triggered"])
@pytest.mark.parametrize("policy", ["before", "after", "later", "recv-allowed"])
def test_urgent_data_is_no_end_of_the_data(policy: str, engine: str) -> None:
    """splice() stops before it with EAGAIN, while epoll goes on to report the source."""
    size = 500_000
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode()

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as peer:
            peer.recv(4096)
            peer.sendall(head)
            time.sleep(0.1)
            peer.send(b"!", socket.MSG_OOB)
            time.sleep(0.1)
            peer.sendall(b"x" * size)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=answer, args=(listener,))
        serving.start()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with SpliceRelay(target, policy, engine=engine) as relay, \
                socket.create_connection(relay.address, 5) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
            got = b""
            while len(got) < len(head) + size and (data := client.recv(65_536)):
                got += data
            assert got.endswith(b"x" * size)
            assert len(got) == len(head) + size
            serving.join()
            Window(relay).check(spins=False)


def test_an_origin_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
    with SpliceRelay(target) as relay, Browser(relay) as client:
        got = client.raw(b"GET / HTTP/1.1\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        eventually(lambda: relay.counters()["sessions"] == 1)  # it lingers for the client's FIN
        client.socket.close()
        eventually(lambda: relay.counters()["closes_connect_failed"] == 1)


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ("garbage=1", b"502", "bad_response"),
        ("size=50000&cut=0", b"200", "origin_short"),
        ("size=50000&cut=20000", b"200", "origin_short"),
        ("size=50000&cut=20000&reset=1", b"200", "origin_"),
    ],
)
def test_an_origin_that_fails(origin: Origin, query: str, status: bytes, reason: str) -> None:
    with relay_of(origin, "after") as relay, Browser(relay) as client:
        got = client.raw(f"GET /?{query} HTTP/1.1\r\n\r\n".encode())
        assert got.startswith(b"HTTP/1.1 " + status)
        assert len(got) < 50_000
        client.socket.close()

        def ended() -> bool:
            counts = relay.counters()
            return any(counts[n] for n in counts if n.startswith(f"closes_{reason}"))

        eventually(ended)
        Window(relay, 0.1).check(spins=False)


@pytest.mark.parametrize("policy", ["before", "after"])
def test_a_client_that_resets(origin: Origin, policy: str) -> None:
    with relay_of(origin, policy) as relay:
        with Browser(relay) as client:
            client.ask("", "", size=100_000)
            come_to_rest(relay)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: relay.counters()["closes_client_reset"] == 1)
        Window(relay, 0.1).check(spins=False)
        eventually(lambda: origin.connections == 0)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000, b"431"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
    ],
)
def test_a_head_that_is_none(origin: Origin, data: bytes, status: bytes) -> None:
    with relay_of(origin, "after") as relay, Browser(relay) as client:
        assert client.raw(data).startswith(b"HTTP/1.1 " + status)
        Window(relay, 0.1).check(spins=False)
        client.socket.close()
        eventually(lambda: relay.counters()["closes_bad_request"] == 1)


def test_a_silent_origin_is_timed_out(origin: Origin) -> None:
    with relay_of(origin, "after", server_timeout_ms=100) as relay, Browser(relay) as client:
        got = client.raw(b"GET /?silent=1 HTTP/1.1\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 504 Gateway Timeout\r\n")
        assert relay.counters()["last_why"] in ("deadline", "event")


def test_who_asks_a_silent_origin_and_hangs_up_keeps_no_session(origin: Origin) -> None:
    with relay_of(origin, "after", server_timeout_ms=100) as relay, Browser(relay) as client:
        client.socket.sendall(b"GET /?silent=1 HTTP/1.1\r\n\r\n")
        client.socket.shutdown(socket.SHUT_WR)
        eventually(lambda: relay.counters()["closes_server_timeout"] == 1)
        eventually(lambda: relay.counters()["sessions"] == 0)


def test_no_pipe_left_means_copying(origin: Origin) -> None:
    """The process may open nothing more but the sockets of one session."""
    with relay_of(origin, "after") as relay, Browser(relay) as client:
        client.ask("", size=1000)
        assert client.read_all()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(socket.socket())
            for spare in held[-2:]:  # for the relay's connection and the origin's end of it
                spare.close()
            client.ask("", size=500_000)
            done = client.read_all()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for one in held:
                one.close()
        assert done
        counts = relay.counters()
        assert int(counts["pipe_failures"]) > 0
        assert int(counts["bytes_copied_origin"]) > 500_000


# -- its life --------------------------------------------------------------------------------------


def test_what_it_says_of_itself(origin: Origin) -> None:
    with relay_of(origin, "after", sample_hz=200) as relay, Browser(relay) as client:
        client.ask("", size=5000)
        assert client.read_all()
        (thread,) = relay.thread_ids()
        comm = Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8")
        assert comm == "rl-relay\n"
        assert relay.origin == origin.address
        assert relay.loop().engine == "speculative"
        assert relay.settings["so_sndbuf"] == 16_384
        time.sleep(0.1)
        assert len(relay.samples()) > 3
        assert relay.dropped == 0
        assert "after" in repr(relay)
        relay.request_stop()
        assert relay.wait_stopped(5)
        assert relay.thread_ids() == []


def test_a_policy_of_ones_own_and_what_it_raises(origin: Origin) -> None:
    class Switch(RelayPolicy):
        base = "before"
        turns = 0

        def engine(self, loop: RelayLoopView) -> str:
            self.turns += 1
            if self.turns > 2000:
                raise LookupError("enough")
            return "level-triggered"

    policy = Switch()
    with relay_of(origin, policy) as relay, Browser(relay) as client:
        client.ask("", size=5000)
        assert client.read_all()
        assert relay.policy.asks == ["engine"]
        policy.turns = 3000
        relay.set(client_timeout_ms=10)  # wakes it
        with pytest.raises(PolicyError, match=r"Switch\.engine\(\) raised LookupError: enough"):
            relay.wait_stopped(5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"origin": "localhost:80"}, "origin='localhost' is not a numeric address"),
        ({"origin": "127.0.0.1"}, "origin='127.0.0.1' is not HOST:PORT, such as 127.0.0.1:8080"),
        ({"origin": "127.0.0.1:0"}, "is not HOST:PORT"),
        ({"max_head": 16_384}, "max_head=16384 is not allowed"),
        ({"policy": "fixed"}, "unknown policy 'fixed'"),
        ({"policy": {"splice": "no"}}, "unknown choice of splice 'no'"),
        ({"membership": "leave"}, "unknown parameter 'membership'"),
    ],
)
def test_bad_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        SpliceRelay(given.pop("origin", "127.0.0.1:80"), **given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_port_in_use(origin: Origin) -> None:
    with pytest.raises(MachineError, match="is in use; give another"):
        SpliceRelay(origin.target, port=origin.address[1]).start()

"""The relay on real sockets: what passes, failures, its life."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine import RelayLoopView, RelayPolicy, SpliceRelay
from engine.errors import MachineError, PolicyError, UsageError
from lab import content
from lab.origin import Origin
from tests.engine.relay_wire import (
    Browser,
    Window,
    come_to_rest,
    eventually,
    relay_of,
    unchunk,
)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("relay_leaves_nothing")


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


def cut_at_the_client(relay: SpliceRelay, query: str) -> tuple[bytes, bool]:
    """What a client gets, and whether it is told by a reset that this is not all."""
    with Browser(relay) as client:
        client.socket.sendall(f"GET /?{query} HTTP/1.1\r\n\r\n".encode())
        got = b""
        try:
            while data := client.socket.recv(65_536):
                got += data
        except ConnectionResetError:
            return got, True
        return got, False


@pytest.mark.parametrize("policy", ["before", "after", "later", "no-splice"])
@pytest.mark.parametrize(("query", "told", "reason"), [
    ("until=1", False, "client"),
    ("until=1&cut=200000&reset=1", True, "origin_reset"),
    ("cut=200000&reset=1", False, "origin_reset"),  # here the length tells
    ("chunk=5000&cut=200000&reset=1", False, "origin_reset"),
    ("cut=200000", False, "origin_short"),
    ("chunk=5000&cut=200000", False, "origin_short"),
])  # fmt: skip
def test_a_body_that_is_cut_does_not_look_whole(
    origin: Origin, policy: str, query: str, told: bool, reason: str
) -> None:
    with relay_of(origin, policy) as relay:
        got, reset = cut_at_the_client(relay, f"size=300000&{query}")
        assert reset is told
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        if reason == "client":
            assert body == content.body(0, 300_000)
        else:
            assert b"Content-Length: 300000" in head or b"chunked" in head or reset
            assert not body.endswith(b"\r\n0\r\n\r\n")
            assert len(body) < 300_000
        eventually(lambda: relay.counters()["sessions"] == 0)
        assert relay.counters()[f"closes_{reason}"] == 1


@pytest.mark.parametrize("policy", ["before", "after", "later", "no-splice"])
@pytest.mark.parametrize("cut", ["", "&cut=200000", "&cut=200000&reset=1"])
def test_a_client_of_http_1_0_gets_the_body_of_chunks_plain(
    origin: Origin, policy: str, cut: str
) -> None:
    with relay_of(origin, policy) as relay, Browser(relay) as client:
        client.socket.sendall(
            f"GET /?size=300000&chunk=65000{cut} HTTP/1.0\r\n\r\n".encode())
        if cut:
            with pytest.raises(ConnectionResetError):
                client.rest()
            return
        head, _, body = client.rest().partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == content.body(0, 300_000)
        assert int(relay.counters()["bytes_spliced_origin"]) > 100_000 or policy == "no-splice"


@pytest.mark.parametrize("policy", ["before", "after"])
def test_who_stalls_in_a_body_until_close_is_reset(origin: Origin, policy: str) -> None:
    """By its timeout, and by the relay's end: neither makes half of it a whole."""
    for ends in ("client_timeout", "stopped"):
        with relay_of(origin, policy, stop_grace_ms=50) as relay, Browser(relay) as client:
            client.socket.sendall(b"GET /?size=300000&until=1 HTTP/1.1\r\n\r\n")
            come_to_rest(relay)
            if ends == "stopped":
                relay.request_stop()
                assert relay.wait_stopped(5)
            else:
                relay.set(client_timeout_ms=100)
                eventually(lambda: relay.counters()["closes_client_timeout"] == 1)
            with pytest.raises(ConnectionResetError):
                client.rest()


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


SMALL_PIPES = """
import fcntl, os, resource, sys
from pathlib import Path
from lab.origin import Origin
from tests.engine import relay_wire, test_relay_server, test_relay_stalls as tests

soft = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())
held = []
while not held or fcntl.fcntl(held[-1][0], fcntl.F_GETPIPE_SZ) > 2 * resource.getpagesize():
    held.append(os.pipe())
    if len(held) > soft:
        sys.exit("the limit was not met")
with Origin(rcvbuf=relay_wire.SMALL) as origin:
    for policy in ("after", "later"):
        tests.test_m_stalled_in_the_middle(origin, policy, "speculative")
        tests.test_b_the_last_block_comes_late(origin, policy, False)
        tests.test_d_the_end_of_a_chunk_is_not_taken(origin, policy, False)
        tests.test_e_an_upload_that_the_origin_does_not_read(origin, policy, False)
    test_relay_server.test_chunked_until_close_and_bodies_of_requests(origin, "after")
"""


def test_pipes_of_two_pages_are_enough() -> None:
    """Past its soft limit a user's new pipes hold two pages: below every threshold of the relay.

    Who may raise resource limits is exempt, so that ability is given up first.
    """
    command = [sys.executable, "-c", SMALL_PIPES]
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("no setpriv to give up CAP_SYS_RESOURCE with (Debian: util-linux)")
        given_up = "-sys_resource,-sys_admin"
        command = [setpriv, "--bounding-set", given_up, "--inh-caps", given_up, *command]
    pages = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())
    if not 0 < pages <= 65_536:
        pytest.skip(f"fs.pipe-user-pages-soft is {pages}: no limit to be met here")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100,
                           check=False)
    assert ended.returncode == 0, ended.stderr


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

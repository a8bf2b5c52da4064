"""The server's life in a process that goes on: nothing of it stays behind, whatever way it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import ConnView, LoopView, Policy, RingServer, counters, flatten_array
from engine.binding import native
from engine.errors import PolicyError
from tests.engine.wire import held

pytestmark = pytest.mark.skipif(
    native()[1].rl_probe(native()[0].new("rl_ring_info *")) < 0,
    reason="io_uring is not allowed here",
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = held()
    yield
    gc.collect()
    eventually(lambda: held() == before)


def eventually(holds: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to hold in time"
        time.sleep(0.01)


def fetch(server: RingServer, target: str = "/?size=10") -> bytes:
    """A whole response, asked for with Connection: close."""
    with socket.create_connection(server.address, timeout=10) as client:
        request = f"GET {target} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
        client.sendall(request.encode())
        return b"".join(iter(lambda: client.recv(65_536), b""))


def stall(server: RingServer, stack: contextlib.ExitStack) -> socket.socket:
    """A client that asks for much and reads nothing."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(server.address)
    client.sendall(b"GET /async?size=9000000 HTTP/1.1\r\n\r\n")
    eventually(lambda: server.counters()["sending"] == 1)
    return client


@pytest.mark.parametrize("policy", ["shipped", "fixed", "tickless"])
def test_serves_and_ends(policy: str) -> None:
    with RingServer(policy) as server:
        for route in ("sync", "async"):
            response = fetch(server, f"/{route}?size=100000")
            head, _, body = response.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert len(body) == 100_000
            assert body.startswith(b"000000000000000\n000000000000010\n")
        assert server.counters()["requests"] == 2
        assert len(server.thread_ids()) == 1
        assert os.getpid() not in server.thread_ids()


def test_start_and_close_can_be_called_again() -> None:
    server = RingServer(sample_hz=0)
    assert server.start() is server.start()
    server.close()
    server.close()
    with server:
        assert fetch(server)
    server.close()


def test_ends_while_clients_stall_and_handlers_run() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RingServer("shipped"))
        stall(server, stack)
        late = stack.enter_context(socket.create_connection(server.address))
        late.sendall(b"GET /async?ms=60000 HTTP/1.1\r\n\r\n")
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 5


def test_a_forgotten_server_is_ended() -> None:
    server = RingServer().start()
    assert fetch(server)
    del server
    gc.collect()


def test_a_server_that_its_own_policy_refers_to_is_ended() -> None:
    class Mine(Policy):
        server: RingServer

        def idle(self, loop: LoopView) -> float:
            return 0.002

    policy = Mine()
    policy.server = RingServer(policy).start()
    assert fetch(policy.server)
    del policy
    gc.collect()


def test_a_server_whose_last_reference_a_policy_drops_is_ended() -> None:
    class Careless(Policy):
        def __init__(self) -> None:
            self.servers: list[RingServer] = []

        def idle(self, loop: LoopView) -> float:
            self.servers.clear()
            return 0.001

    policy = Careless()
    server = RingServer(policy).start()
    policy.servers.append(server)
    del server
    eventually(lambda: not policy.servers)


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import os, signal; os.kill(0, 2)"])
def test_an_interpreter_that_exits_ends_it(end: str) -> None:
    script = f"""
import engine, os, time
os.setpgrp()
class Mine(engine.Policy):
    def idle(self, loop): return 0.001
server = engine.RingServer(Mine()).start()
time.sleep(0.1)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=30, check=False
    )
    assert done.returncode in (0, -2), done.stderr


def test_a_child_of_fork_leaves_the_server_alone() -> None:
    script = """
import engine, os, sys
with engine.RingServer() as server:
    child = os.fork()
    if child == 0:
        try:
            server.counters()
        except engine.errors.UsageError:
            server.close()
            os._exit(7)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    server.counters()
sys.exit(code)
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 7


def test_settings_and_policy_change_while_it_serves() -> None:
    with RingServer("fixed", response_size=10) as server:
        assert fetch(server, "/").endswith(b"\r\n\r\n0000000000")
        server.set(response_size=20, route="async", wait_cap_ms=1.5, membership="listed")
        assert server.settings["wait_cap_ms"] == 1.5
        assert server.policy.name == "fixed+membership=listed"
        assert len(fetch(server, "/").partition(b"\r\n\r\n")[2]) == 20
        assert server.loop().cap_ns == 1_500_000
        assert server.counters()["direct_writes"] == 1


def test_decisions_that_two_threads_change_at_once_are_both_changed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    with RingServer("shipped") as server:
        switching, other = threading.Event(), threading.Event()
        switch = server._switch

        def slow_to_switch(*given: object) -> None:
            switching.set()
            other.wait(0.3)
            switch(*given)

        monkeypatch.setattr(server, "_switch", slow_to_switch)
        first = threading.Thread(target=lambda: server.set(handback="wake"))
        first.start()
        assert switching.wait(5)
        monkeypatch.undo()
        server.set(membership="leave")
        other.set()
        first.join()
        assert server.policy.choices["membership"] == "leave"
        assert server.policy.choices["handback"] == "wake"


def test_samples_come_by_themselves() -> None:
    with RingServer(workers=2, sample_hz=200) as server:
        taken: list[np.ndarray] = []
        eventually(lambda: taken.append(server.samples()) or sum(map(len, taken)) > 20)
        samples = np.concatenate(taken)
        assert samples.dtype == counters.sample_dtype()
        assert set(samples["worker"].tolist()) == {0, 1}
        assert (np.diff(flatten_array(samples)["t_ns"]) >= 0).all()
        server.sample_rate(0)
        assert server.dropped == 0
        assert set(server.counters()) < set(server.counters(0))


def test_memory_counts_the_requests_that_wait_for_a_handler() -> None:
    """And, once a SEND was made, the block that the kernel reads its pieces from."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RingServer("tickless", handlers=1))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        ask = b"GET /async?ms=%d&size=1 HTTP/1.1\r\nHost: x\r\n\r\n"
        told: list[int] = []
        for number in (1, 9):
            client.sendall(ask % 3000 * (number - len(told)))
            until = time.monotonic() + 10
            while server.counters()["requests"] < number:
                assert time.monotonic() < until
                time.sleep(0.001)
            told.append(server.memory())
        assert told[1] - told[0] >= 8 * 3 * 8  # each a pointer, its number and what it asks for


def test_views_of_a_stalled_connection() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RingServer("tickless", so_sndbuf=16_384))
        stall(server, stack)
        [conn] = server.connections()
        assert isinstance(conn, ConnView)
        assert conn.sending
        assert not conn.listed
        assert conn.send_buf > 8_000_000
        assert conn.outq > 0
        assert server.loop().sending == 1
        assert server.ring().sq_entries == 256
        assert 0 < server.memory() < 4096


@pytest.mark.parametrize(("policy", "honoured"), [("shipped", False), ("tickless", True)])
def test_the_modelled_stop(policy: str, honoured: bool) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RingServer(policy, so_sndbuf=16_384, stop_grace_ms=50))
        stall(server, stack)
        server.request_stop()
        # A parked worker does not look at the flag; close() ends it nevertheless.
        assert server.wait_stopped(5 if honoured else 0.5) is honoured
        assert server.running() == (0 if honoured else 1)


def test_many_threads_may_use_and_close_it() -> None:
    server = RingServer("tickless", sample_hz=500).start()
    stop = threading.Event()

    def use() -> None:
        with contextlib.suppress(ValueError):  # UsageError: it was closed
            while not stop.is_set():
                server.counters()
                server.connections()
                server.samples()
                server.set(policy="fixed")
                server.set(policy="tickless")

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    server.close()
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


class Broken(Policy):
    """Fails when it is first asked."""

    def idle(self, loop: LoopView) -> float:
        raise RuntimeError("boom")


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


class Endless(Policy):
    """Its first answer never comes."""

    def idle(self, loop: LoopView) -> float:
        while True:
            time.sleep(0.01)


def test_a_policy_that_never_answers_does_not_keep_its_server_from_closing() -> None:
    server = RingServer(Endless).start()
    time.sleep(0.2)
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < 12, "it was interrupted"


def test_closing_past_such_a_policy_can_itself_be_interrupted() -> None:
    script = (
        "import os, signal, threading, time\n"
        "from engine import Policy, RingServer\n"
        "class Stuck(Policy):\n"
        "    def idle(self, loop):\n"
        "        time.sleep(6)\n"
        "server = RingServer(Stuck).start()\n"
        "time.sleep(0.3)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    server.close()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "server.close()\n"
        "print('closed')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout.split() == ["interrupted", "closed"], done.stderr


def serve_broken(error: Exception) -> None:
    """A block that ends with that error once the policy has stopped the worker."""
    with RingServer(Broken) as server:
        port = server.port
        eventually(lambda: not accepts(port))
        raise error


def test_the_policys_error_is_told_even_when_the_client_in_the_block_fails_of_it() -> None:
    with pytest.raises(PolicyError, match="boom"):
        serve_broken(ConnectionResetError("the worker is gone"))


def test_an_error_of_the_block_itself_carries_the_policys_as_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        serve_broken(ZeroDivisionError("its own"))
    assert "boom" in caught.value.__notes__[0]

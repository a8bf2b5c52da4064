"""Whatever way a server ends, no thread, socket or ring is left; and what it does without files."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Policy, RingServer
from engine.errors import PolicyError
from engine.views import ConnView
from tests.engine.wire import Wire, held, ring_allowed, until
from tests.engine.world import Ask

pytestmark = pytest.mark.skipif(bool(ring_allowed()), reason=ring_allowed() or "allowed")

LARGE = 3 << 20
POLICIES = ["shipped", "timed-wait", "fixed", "tickless"]


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    with RingServer():
        pass  # what the first start loads stays
    threads, descriptors = held()
    yield
    assert until(lambda: held()[0] <= threads), "a thread is left"
    assert until(lambda: held()[1] <= descriptors), "a descriptor is left"


def busy(server: RingServer) -> list[Wire]:
    """One client that stalls, one that pipelines behind it, one whose handler runs, one idle."""
    clients = [Wire(server, rcvbuf=4096) for _ in range(4)]
    for client in clients:
        client.ask(Ask("sync", 24)).check()
    clients[0].ask(Ask("async", LARGE))
    assert until(lambda: server.counters()["sending"])
    clients[1].ask(Ask("sync", LARGE), Ask("async", LARGE), Ask("async", 24))
    clients[2].ask(Ask("async", 24, 10_000))
    return clients


def leave(clients: list[Wire]) -> None:
    for client in clients:
        client.socket.close()


@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("policy", POLICIES)
def test_close_while_clients_stall_and_handlers_run(policy: str) -> None:
    server = RingServer(policy, so_sndbuf=16_384, workers=2).start()
    clients = busy(server)
    server.close()
    server.close()
    leave(clients)


@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("policy", ["shipped", "tickless"])
def test_an_exception_leaves_the_block(policy: str, error: type[BaseException]) -> None:
    clients: list[Wire] = []

    def block() -> None:
        with RingServer(policy, so_sndbuf=16_384) as server:
            clients.extend(busy(server))
            raise error

    with pytest.raises(error):
        block()
    leave(clients)


@pytest.mark.usefixtures("_nothing_left")
def test_an_interrupt_while_python_waits() -> None:
    """As an interrupted cell: SIGINT reaches the main thread, never a worker."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))

    def cell() -> None:
        with RingServer("shipped", so_sndbuf=16_384) as server:
            leave(busy(server))
            timer.start()
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        cell()
    timer.join()


@pytest.mark.usefixtures("_nothing_left")
def test_fifty_servers_in_a_row() -> None:
    for number in range(50):
        policy = POLICIES[number % len(POLICIES)]
        with RingServer(policy, workers=1 + number % 2) as server, Wire(server) as client:
            client.ask(Ask("async", 5000), Ask("sync", 24)).check()


@pytest.mark.usefixtures("_nothing_left")
def test_a_server_that_nobody_keeps() -> None:
    server = RingServer().start()
    port = server.port
    del server
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


class Breaks(Policy):
    """Fails on its first request."""

    def direct_write(self, conn: ConnView) -> bool:
        raise ValueError("no idea")


@pytest.mark.usefixtures("_nothing_left")
def test_a_policy_that_fails() -> None:
    def cell() -> None:
        with RingServer(Breaks) as server, Wire(server) as client:
            client.ask(Ask("async", 24))
            until(lambda: server.check())

    with pytest.raises(PolicyError) as caught:
        cell()
    assert str(caught.value.__cause__) == "no idea"


@pytest.mark.parametrize("route", ["sync", "async"])
@pytest.mark.parametrize("policy", POLICIES)
def test_close_does_not_wait_for_a_handler(policy: str, route: str) -> None:
    with RingServer(policy) as server, Wire(server) as client:
        client.ask(Ask(route, 24, 30_000))
        assert until(lambda: server.counters()["requests"] == 1)
        time.sleep(0.1)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 15


# ---- in a process of its own --------------------------------------------------------------------

SERVES = """
import time
from engine import RingServer
server = RingServer("shipped", so_sndbuf=16384, workers=2).start()
print(server.port, flush=True)
time.sleep(60)
"""


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_ended_while_it_serves(project: Path, how: signal.Signals) -> None:
    """A kernel restart: the notebook's process is gone, and so is its listener."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVES], cwd=project, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:
        port = port_of(process)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(Ask("async", LARGE).wire())
            time.sleep(0.2)
            process.send_signal(how)
            process.wait(30)
        assert until(lambda: refused(port))


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


# Clients live in the test's process: only the server's runs out of descriptors, which is done by
# opening files. (An accept that is armed keeps the limit that was in force when it was.)
SHORT_OF_FILES = """
import resource, sys
from engine import RingServer
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
with RingServer(sys.argv[1], max_connections=64) as server:
    print(server.port, flush=True)
    files = []
    for line in sys.stdin:
        if line.strip() == "short":
            try:
                while True:
                    files.append(open("/dev/null"))
            except OSError:
                for _ in range(3):
                    files.pop().close()
        elif line.strip() == "enough":
            while files:
                files.pop().close()
        c = server.counters()
        print(c["accept_failures"], c["iterations"], c["connections"], c["t_ns"], flush=True)
"""


def told(process: subprocess.Popen[str], word: str) -> tuple[int, int, int, float]:
    """Accept failures, iterations, connections and seconds, after the process did as told."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()
    failures, iterations, connections, t_ns = map(int, process.stdout.readline().split())
    return failures, iterations, connections, t_ns / 1e9


@pytest.mark.parametrize("policy", POLICIES)
def test_out_of_descriptors_it_backs_off_and_recovers(project: Path, policy: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SHORT_OF_FILES, policy], cwd=project, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as process:
        port = port_of(process)
        told(process, "short")
        clients = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(10)]
        assert until(lambda: told(process, "")[0])
        before = told(process, "")
        time.sleep(1)
        after = told(process, "")
        seconds = after[3] - before[3]
        assert after[2] < 10
        assert 1 <= after[0] - before[0] <= 10 * seconds + 2  # one a back-off of 100 ms
        assert after[1] - before[1] <= 80 * seconds + 10  # an idle loop's, not a spin's
        told(process, "enough")
        for client in clients:
            client.settimeout(30)
            client.sendall(Ask("sync", 24).wire())
            expected = Ask("sync", 24).answer(0)
            assert client.recv(len(expected), socket.MSG_WAITALL) == expected
            client.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0

"""The veth pair between two namespaces: made without a name, gone without a trace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import MachineError
from engine.waits import Case, WayAbsent, measure, ping, ways
from lab import napi, napi_child, waits

HOLD = ("import sys, time\n"
        "from lab import napi\n"
        "with napi.connection() as made:\n"
        "    print(made.napi_id, flush=True)\n"
        "    time.sleep(60)\n")


@pytest.fixture
def made() -> Iterator[napi.Connection]:
    """A connection over a veth pair, where one can be had."""
    try:
        with napi.connection() as connection:
            yield connection
    except napi.NoNapi as reason:
        pytest.skip(str(reason))


def traces() -> set[str]:
    """What a pair that was not cleared away could leave: devices, named namespaces, processes."""
    devices = {path.name for path in Path("/sys/class/net").iterdir()}
    named = {str(path) for path in Path("/var/run/netns").glob("*")}
    running = {path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline")
               if b"lab.napi_child" in _read(path)}
    return devices | named | running


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_bytes_go_across_and_the_queue_has_a_number(made: napi.Connection) -> None:
    assert made.napi_id > 0
    made.client.sendall(b"ping")
    assert made.server.recv(4) == b"ping"


def test_nothing_is_seen_of_it_and_nothing_is_left() -> None:
    before = traces()
    try:
        with napi.connection():
            assert traces() == before
    except napi.NoNapi as reason:
        pytest.skip(str(reason))
    assert traces() == before


def test_two_at_once_do_not_clash(made: napi.Connection) -> None:
    with napi.connection() as other:
        for each in (made, other):
            each.client.sendall(b"x")
            assert each.server.recv(1) == b"x"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_one_that_was_interrupted(how: signal.Signals, project: Path) -> None:
    before = traces()
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=project, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("no veth pair here")
        child.send_signal(how)
    deadline = time.monotonic() + 5
    while traces() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert traces() == before


def test_one_that_is_interrupted_while_it_is_made_leaves_nothing(project: Path) -> None:
    before = traces()
    for delay in (0.05, 0.15, 0.25, 0.35):
        with subprocess.Popen([sys.executable, "-c", HOLD], cwd=project,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            time.sleep(delay)
            child.kill()
    deadline = time.monotonic() + 5
    while traces() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert traces() == before


def test_it_needs_no_rights(project: Path) -> None:
    """Without the rights over namespaces and networks, a user namespace has to do."""
    tool = shutil.which("setpriv")
    if os.geteuid() != 0 or tool is None:
        pytest.skip("needs root, to give its rights up with setpriv")
    code = HOLD.replace("time.sleep(60)", "sys.exit()").replace(
        "from lab import napi\n", "from lab import napi\nfrom engine.errors import MachineError\n")
    done = subprocess.run(
        [tool, "--bounding-set=-sys_admin,-net_admin",
         "--inh-caps=-sys_admin,-net_admin", sys.executable, "-c", code], cwd=project,
        capture_output=True, text=True, timeout=60, check=False,
    )
    if "user namespace is refused" in done.stderr:
        pytest.skip("unprivileged user namespaces are refused here")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    code = ("import shutil\n"
            "from lab import napi_child\n"
            "napi_child.shutil.which = lambda *_: None\n")
    done = subprocess.run(
        [sys.executable, "-c", code + "import socket\n"
         "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
         "print(napi_child.main(b.detach()), a.recv(500).decode())"],
        cwd=project, capture_output=True, text=True, timeout=30, check=False,
    )
    assert done.stdout.strip() == ("1 refused: the program 'ip' is not installed (package "
                                   "iproute2)")
    assert issubclass(napi.NoNapi, MachineError)
    assert napi_child.CLIENT[0] != napi_child.SERVER[0]


def test_a_wait_that_polls_still_ends_by_its_timeout_and_arms_a_timer(
    made: napi.Connection
) -> None:
    """It polls instead of sleeping: hardly a switch, where the plain wait has one each.

    A neighbour who wants the CPU ends the polling early, so the calmest of some tries tells.
    """
    name = "io_uring_wait_cqe_timeout"
    plain = measure(Case(name, 50_000), 0.02)
    tries = []
    for _ in range(10):
        try:
            tries.append(measure(Case(name, 50_000, "none", 1000, made.client.fileno()), 0.02))
        except WayAbsent as reason:
            pytest.skip(str(reason))
    assert {each.timed_out for each in tries} == {1.0}
    calmest = min(tries, key=lambda each: each.voluntary_switches)
    assert calmest.voluntary_switches < 0.5 * plain.voluntary_switches
    assert calmest.cpu_us > 2 * plain.cpu_us
    if (measure(Case(name, 0), 0.005).timer_starts or 0) > 0.9:  # a kernel of before the patch
        assert calmest.timer_starts is not None
        assert calmest.timer_starts > 0.9, "past its deadline, it arms a timer all the same"


@pytest.mark.parametrize("name", waits.NAPI_WAYS)
def test_every_way_that_enters_by_the_ring_can_poll(made: napi.Connection, name: str) -> None:
    way = ways()[name]
    for flags in ("none", "defer"):
        try:
            found = measure(Case(name, way.least_ns, flags, 20, made.client.fileno()), 0.002)
        except WayAbsent as reason:
            pytest.skip(str(reason))
        assert found.waits > 0
        assert found.us_p50 > 0


def test_ping_pong_counts_round_trips(made: napi.Connection) -> None:
    try:
        found = ping((made.client.fileno(), made.server.fileno()), 1000, 0.05)
    except WayAbsent as reason:
        pytest.skip(str(reason))
    assert found.pings > 10
    assert 0 < found.us_p50 <= found.us_p99
    assert found.napi_id == made.napi_id

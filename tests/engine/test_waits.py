"""The wait bench: what it measures, what it says of what it cannot, and that it counts honestly."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import waits
from engine.binding import native
from engine.errors import EngineError, MachineError, UsageError
from engine.waits import Case, Figures, WayAbsent, measure

RING_WAIT = "io_uring_wait_cqe_timeout"
SHORT_S = 0.005


def measured(case: Case, **options: object) -> Figures:
    """The figures, or a skip where this machine lacks the way or refuses rings."""
    try:
        return measure(case, SHORT_S, **options)  # type: ignore[arg-type]
    except (WayAbsent, MachineError) as reason:
        pytest.skip(str(reason))


def cases() -> Iterator[Case]:
    for way in waits.ways().values():
        for flags in waits.FLAGS if way.ring else waits.FLAGS[:1]:
            yield from (Case(way.name, ns, flags) for ns in (0, 50_000, 1_000_000)
                        if not way.refusal(ns))


@pytest.mark.parametrize(
    "case", list(cases()), ids=lambda case: f"{case.way}-{case.timeout_ns}-{case.flags}"
)
def test_every_way_is_measured_and_ends_by_its_timeout(case: Case) -> None:
    figures = measured(case, least=5)
    assert figures.waits >= 5
    assert 0 < figures.us_p50 <= figures.us_p99
    if "workaround" not in case.way:
        assert figures.timed_out == 1.0
        assert figures.us_p50 >= case.timeout_ns / 1e3
        assert figures.helper_cpu_us == 0.0
    else:
        assert figures.helper_cpu_us > 0.0


def test_the_names_are_those_of_the_calls() -> None:
    named = {"epoll_wait", "epoll_pwait2", "ppoll", RING_WAIT, "io_uring_submit_and_wait_timeout",
             "io_uring_submit_and_wait_min_timeout", "io_uring_get_events", "io_uring_peek_cqe",
             "timerfd", "expired_timeout_op", "eventfd_workaround", "ring_worker_kernel",
             "ring_worker_poll"}
    assert named <= set(waits.ways())
    assert all(way.what for way in waits.ways().values())


def test_a_cheap_wait_is_timed_in_blocks_and_a_dear_one_singly() -> None:
    assert measured(Case("io_uring_peek_cqe", 0)).block > 50
    assert measured(Case(RING_WAIT, 50_000)).block == 1


def test_the_bench_itself_is_hardly_seen_in_the_shortest_wait() -> None:
    """Under 2 % with the usual clock; the least of a few tries, since the rest is noise."""
    shares = [figures.own_us / figures.us_p50
              for figures in (measured(Case("io_uring_peek_cqe", 0)) for _ in range(5))]
    assert min(shares) < 0.02


def test_a_wait_that_sleeps_is_seen_to_switch_and_a_look_is_not() -> None:
    assert measured(Case(RING_WAIT, 1_000_000)).voluntary_switches > 0.8
    assert measured(Case("io_uring_get_events", 0)).voluntary_switches < 0.01
    assert measured(Case("epoll_wait", 0)).voluntary_switches < 0.01


def test_timer_starts_are_counted_or_the_reason_is_told() -> None:
    figures = measured(Case(RING_WAIT, 50_000), trace=True)
    if figures.timer_starts is None:
        assert "timer:hrtimer_start" in figures.untraced["timer_starts"]
    else:
        assert 0.9 < figures.timer_starts < 1.2
        assert measured(Case("epoll_wait", 0), trace=True).timer_starts == pytest.approx(0, abs=.1)


def test_what_was_not_asked_for_is_not_counted() -> None:
    figures = measured(Case("epoll_wait", 0), trace=False)
    assert figures.timer_starts is None
    assert set(figures.untraced) == set(waits.TRACES)


@pytest.mark.parametrize(("step", "number", "told"), [
    (1, errno.EPERM, "run as root"),
    (1, errno.ENODEV, "no tracefs"),
    (2, errno.ENOENT, "no such tracepoint"),
    (3, errno.EACCES, "perf_event_paranoid"),
])
def test_why_an_event_is_not_counted_names_event_and_remedy(
    step: int, number: int, told: str
) -> None:
    reason = waits.untraced("timer_starts", step, number)
    assert reason.startswith("timer:hrtimer_start")
    assert told in reason


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "told"), [
    (Case("io_uring_wait_cqe_timeot", 0), "io_uring_wait_cqe_timeout"),
    (Case("io_uring_get_events", 1000), "takes no timeout"),
    (Case("epoll_wait", 50_000), "steps of 1,000,000 ns"),
    (Case("eventfd_workaround", 50_000), "makes sense from 100,000 ns"),
    (Case(RING_WAIT, -1), "negative"),
    (Case(RING_WAIT, 0, "sqpoll"), "ring flags"),
    (Case(RING_WAIT, 0, napi_us=20), "connected socket"),
])
def test_a_case_that_makes_no_sense_is_refused_in_one_line(case: Case, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        measure(case, SHORT_S)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("number", "where", "told"), [
    (errno.EINTR, RING_WAIT, "signal"),
    (errno.EBADF, RING_WAIT, "closed while it waited"),
    (errno.EBADMSG, "epoll_wait", "nothing was there to reap"),
    (errno.ENOMEM, "io_uring_setup", "not enough memory"),
    (errno.EPERM, "io_uring_setup", "io_uring"),
    (errno.EIO, RING_WAIT, "only end by its timeout"),
])
def test_a_failed_wait_is_told_in_one_line_with_its_call(
    number: int, where: str, told: str
) -> None:
    line = str(waits.wait_error(number, where))
    assert told in line
    assert where in line or "io_uring" in line
    assert "\n" not in line


def test_what_a_kernel_lacks_is_absent_and_no_error() -> None:
    assert isinstance(waits.wait_error(errno.EOPNOTSUPP, "this kernel has no x"), WayAbsent)


# ---- what may only end by its timeout --------------------------------------------------------


def test_a_completion_that_nobody_expected_is_an_error() -> None:
    """Bytes arrive on the socket whose recv is posted: the wait succeeds, which it may not."""
    measured(Case(RING_WAIT, 0))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        with pytest.raises(EngineError, match=f"{RING_WAIT}.*nothing was there to reap"):
            measure(Case(RING_WAIT, 1_000_000, socket=ours.fileno()), SHORT_S)


def test_a_signal_with_a_handler_disturbs_nothing_and_is_heard_afterwards() -> None:
    measured(Case(RING_WAIT, 0))
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert measure(Case("epoll_wait", 1_000_000), 0.15).timed_out == 1.0
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_a_process_that_is_stopped_and_continued_says_so_or_measures_on() -> None:
    """Stopping ends a system call as a signal does; the kernel restarts some, and fails others."""
    measured(Case(RING_WAIT, 0))
    code = ("from engine.waits import *\n"
            "print('ready', flush=True)\n"
            "try: measure(Case('io_uring_wait_cqe_timeout', 1000000), 3.0, trace=False)\n"
            "except EngineError as error: print(error)\n"
            "else: print('measured')\n")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(20):
            time.sleep(0.03)
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.01)
            child.send_signal(signal.SIGCONT)
        lines = child.stdout.read().splitlines()
    assert len(lines) == 1
    assert lines[0] == "measured" or lines[0].startswith(f"{RING_WAIT}: ")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_open() -> None:
    measured(Case("eventfd_workaround", 200_000))
    before = (open_files(), threading.active_count())
    for case in {(case.way, case.flags): case for case in cases()}.values():
        try:
            measure(case, 0.001, least=1)
        except WayAbsent:
            pass
    with waits.tracing(), waits.tracing():
        pass
    assert (open_files(), threading.active_count()) == before


def test_the_contract_and_python_agree_on_flags_and_events() -> None:
    ffi, lib = native()
    numbers = {"none": lib.RL_WAIT_NONE, "coop": lib.RL_WAIT_COOP, "defer": lib.RL_WAIT_DEFER}
    assert numbers == {name: index for index, name in enumerate(waits.FLAGS, 1)}
    assert len(waits.TRACES) == lib.RL_TRACES == len(ffi.new("rl_wait_figures *").traced)
    assert lib.rl_way_at(len(waits.ways())) == ffi.NULL

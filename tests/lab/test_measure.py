import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from engine.errors import MachineError, UsageError
from lab import measure, proc
from lab.measure import Snapshot, ThreadFigures, Window, merge, window_between

CLOCK = measure.THREAD_CLOCK


class PythonLoop:
    """A target made of one Python thread that runs ``turn`` until it is told to stop."""

    def __init__(self, turn: Callable[[], object]) -> None:
        self.pid = os.getpid()
        self.waits = 0
        self._turn = turn
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn()
            self.waits += 1

    def thread_ids(self) -> Sequence[int]:
        assert self._thread.native_id is not None
        return [self._thread.native_id]

    def counters(self) -> Mapping[str, int] | None:
        return {"waits": self.waits, "iterations": self.waits}

    @contextmanager
    def running(self) -> Iterator["PythonLoop"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()


class OtherProcess:
    """A target that exports nothing: a process known by its pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def thread_ids(self) -> Sequence[int]:
        return proc.tasks(self.pid)

    def counters(self) -> Mapping[str, int] | None:
        return None


def figures(run: int = 0, wait: int = 0, voluntary: int = 0, source: str = CLOCK) -> ThreadFigures:
    return ThreadFigures(run, wait, voluntary, 0, source)


def snapshot(at: int, threads: dict[int, ThreadFigures], **counters: int) -> Snapshot:
    return Snapshot(at, threads, at // 2, counters or None)


def test_a_spinning_thread_is_on_queue_and_a_sleeping_one_is_not() -> None:
    with PythonLoop(lambda: None).running() as spin:
        spinning = measure.measure(spin, "stall", 0.4)
    with PythonLoop(lambda: time.sleep(0.02)).running() as sleepy:
        sleeping = measure.measure(sleepy, "idle", 0.4)
    assert spinning.on_queue_fraction > 0.9
    assert sleeping.on_queue_fraction < 0.3
    assert sleeping.waits_per_s is not None
    assert spinning.waits_per_s is not None
    assert spinning.waits_per_s > 10 * sleeping.waits_per_s
    assert spinning.cpu_ms_per_s > 10 * sleeping.cpu_ms_per_s
    # Asleep 50 times a second at most, and once for each time round at least.
    assert sleeping.voluntary_switches_per_s >= 0.9 * sleeping.waits_per_s
    assert spinning.wasted_per_s is None
    assert spinning.cpu_source == CLOCK


def test_another_process_is_measured_through_schedstat_and_its_clock() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        window = measure.measure(OtherProcess(child.pid), "stall", 0.5)
    finally:
        child.kill()
        child.wait()
    assert window.on_queue_fraction > 0.8
    assert window.waits_per_s is None
    assert window.cpu_source == measure.SCHEDSTAT
    assert window.process_cpu_ms_per_s > 0
    with pytest.raises(MachineError, match=str(child.pid)):
        measure.measure(OtherProcess(child.pid), "stall", 0.1)


def test_a_process_that_ends_during_the_window_is_an_error_not_a_sleeper() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def end(_seconds: float) -> None:
        child.kill()
        # Dead but not yet waited for: the process still has its files, and they look asleep.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    try:
        with pytest.raises(MachineError):
            measure.measure(OtherProcess(child.pid), "stall", 0.1, sleep=end)
    finally:
        child.kill()
        child.wait()


def test_without_scheduler_statistics_the_clock_that_is_left_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proc, "schedstat", lambda pid, tid: proc.SchedStat(0, 0, 0))
    pid = os.getpid()
    own = measure.thread_figures(pid, threading.get_native_id())
    assert own is not None
    assert own.source == measure.THREAD_CLOCK
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other = measure.thread_figures(child.pid, child.pid)
    finally:
        child.kill()
        child.wait()
    assert other is not None
    assert other.source == measure.PROCESS_CLOCK


def test_rates_between_two_snapshots() -> None:
    before = snapshot(0, {1: figures(100, 50, 7), 2: figures()}, waits=10, wasted=5)
    after = snapshot(
        2 * 10**9,
        {1: figures(100 + 10**9, 50 + 4 * 10**8, 87), 2: figures(10**8, 0, 20)},
        waits=110, wasted=25,
    )
    window = window_between("stall", before, after)
    assert window.seconds == 2
    assert window.waits_per_s == 50
    assert window.wasted_per_s == 10
    assert window.iterations_per_s is None
    assert window.cpu_ms_per_s == pytest.approx(550)
    assert window.process_cpu_ms_per_s == pytest.approx(500)
    assert window.on_queue_fraction == pytest.approx(0.7)
    assert window.run_queue_wait_fraction == pytest.approx(0.2)
    assert window.voluntary_switches_per_s == 50


def test_threads_that_come_and_go() -> None:
    second = 10**9
    before = snapshot(0, {1: figures(5), 2: figures(900)})
    # 2 ended; 3 is new with a long past; 1's id now belongs to a thread that has run for less.
    after = snapshot(second, {1: figures(3), 3: figures(50 * second, 50 * second)})
    window = window_between("stall", before, after)
    assert window.on_queue_fraction == 1
    assert window.cpu_ms_per_s == pytest.approx(1000, rel=1e-3)


def test_an_empty_window_is_refused() -> None:
    now = snapshot(5, {1: figures()})
    with pytest.raises(UsageError):
        window_between("stall", now, now)
    with pytest.raises(UsageError):
        measure.measure(OtherProcess(os.getpid()), "stall", 0)
    with pytest.raises(UsageError):
        merge([])


def test_merge_weighs_by_time_and_keeps_the_coarsest_source() -> None:
    short = Window("stall", 1, 100, None, 4, 10, 10, 0.5, 0, 10, 0, CLOCK)
    long = Window("stall", 3, 20, 3, 8, 2, 2, 0.1, 0, 30, 0, measure.TICKS, 2)
    both = merge([short, long])
    assert both.seconds == 4
    assert both.waits_per_s == 40
    assert both.wasted_per_s is None
    assert both.on_queue_fraction == pytest.approx(0.2)
    assert both.cpu_source == measure.TICKS
    assert both.repetitions == 3


def test_a_window_survives_json() -> None:
    window = Window("stall", 1.5, 100, None, 4, 10, 10, 0.5, 0, 10, 0)
    figures_read = json.loads(json.dumps(window.to_dict()))
    assert "name" not in figures_read
    assert Window.from_dict("stall", figures_read | {"of_a_later_version": 1}) == window
    with pytest.raises(UsageError, match="on_queue_fraction"):
        Window.from_dict("stall", {"seconds": 1})

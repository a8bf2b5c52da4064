"""What a loop did during a window: two snapshots, and the rates between them.

All figures are cumulative counts read before and after, so a window costs the measured process
nothing while it lasts. CPU comes from nanosecond clocks; where a kernel offers none the window says
so in ``cpu_source``, because a tick clock can miss a paced spin completely.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from engine.errors import MachineError, UsageError
from lab import proc

# What a thread's CPU time was read from, best first.
THREAD_CLOCK = "thread clock"
SCHEDSTAT = "schedstat"
PROCESS_CLOCK = "process clock"
TICKS = "ticks"
_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")
# How the kernel packs a pid into a clock id: CPUCLOCK_SCHED, and the flag that means one thread.
_CPUCLOCK_SCHED = 2
_CPUCLOCK_PERTHREAD = 4


class Target(Protocol):
    """What a window measures: an engine in this process, in another, or somebody else's server."""

    @property
    def pid(self) -> int:
        """The process that runs the loop."""
        ...

    def thread_ids(self) -> Sequence[int]:
        """Kernel ids of the threads of the loop, with those that its ring runs on its behalf."""
        ...

    def counters(self) -> Mapping[str, int] | None:
        """Cumulative ``waits`` (times round the wait), ``wasted`` and ``iterations``.

        None where the loop exports none, as with a foreign server.
        """
        ...


@dataclass(frozen=True)
class ThreadFigures:
    """Cumulative figures of one thread; ``wait_ns`` is time spent runnable without a CPU."""

    run_ns: int
    wait_ns: int
    voluntary: int
    involuntary: int
    source: str


@dataclass(frozen=True)
class Snapshot:
    """The cumulative figures of a target at one instant of the monotonic clock."""

    taken_ns: int
    threads: Mapping[int, ThreadFigures]
    process_cpu_ns: int
    counters: Mapping[str, int] | None

    @classmethod
    def take(cls, target: Target) -> Snapshot:
        """Read a target now.

        Raises MachineError when its process, or every thread of its loop, has ended: figures of a
        loop that is gone would look like those of a loop that sleeps.
        """
        taken = time.monotonic_ns()
        read = {tid: thread_figures(target.pid, tid) for tid in target.thread_ids()}
        threads = {tid: figures for tid, figures in read.items() if figures is not None}
        if not threads:
            raise MachineError(f"process {target.pid} runs no thread of the measured loop any more")
        return cls(taken, threads, process_cpu_ns(target.pid), target.counters())


@dataclass(frozen=True)
class Window:
    """Rates over a measured stretch of time, for the whole loop (the sum of its threads).

    ``on_queue_fraction`` and ``run_queue_wait_fraction`` (0 to 1) are those of the thread that was
    on a run queue the most: a sum would call three sleepy threads a spin, and a mean would hide one
    spinning thread among many. The second is the part of the first spent waiting for a CPU, so it
    says how much neighbours disturbed the window.

    CPU is in ms per second of wall time; a thread's figure may trail by one scheduler tick at each
    end of the window when the thread belongs to another process.
    """

    name: str
    seconds: float
    waits_per_s: float | None
    wasted_per_s: float | None
    iterations_per_s: float | None
    cpu_ms_per_s: float
    process_cpu_ms_per_s: float
    on_queue_fraction: float
    run_queue_wait_fraction: float
    voluntary_switches_per_s: float
    involuntary_switches_per_s: float
    cpu_source: str = SCHEDSTAT
    repetitions: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON, under their field names; the name is left for the caller's key."""
        figures = asdict(self)
        del figures["name"]
        return figures

    @classmethod
    def from_dict(cls, name: str, figures: Mapping[str, Any]) -> Window:
        """A window back from a run; figures that this version does not know are passed over."""
        known = {field.name for field in fields(cls)} - {"name"}
        try:
            return cls(name, **{key: figures[key] for key in known & figures.keys()})
        except TypeError as error:
            raise UsageError(f"window '{name}' lacks figures: {error}") from None


def measure(
    target: Target, name: str, seconds: float, sleep: Callable[[float], object] = time.sleep
) -> Window:
    """One window of ``seconds``, from now. ``sleep`` may do the waiting in the caller's own way."""
    if not seconds > 0:
        raise UsageError(f"window '{name}' of {seconds} s: give more than 0 s")
    before = Snapshot.take(target)
    sleep(seconds)
    return window_between(name, before, Snapshot.take(target))


def window_between(name: str, before: Snapshot, after: Snapshot) -> Window:
    """The rates between two snapshots of one target.

    A thread that started in between counts from zero; one that ended in between is left out, so its
    share is missing and the figures are lower bounds.
    """
    elapsed_ns = after.taken_ns - before.taken_ns
    if elapsed_ns <= 0:
        raise UsageError(f"window '{name}' is empty: its snapshots are in the wrong order")
    seconds = elapsed_ns / 1e9
    deltas = [_delta(before.threads.get(tid), now, elapsed_ns)
              for tid, now in after.threads.items()]
    busiest = max(deltas, key=lambda delta: delta.run_ns + delta.wait_ns)
    on_queue = min(1.0, (busiest.run_ns + busiest.wait_ns) / elapsed_ns)
    process_ns = max(0, after.process_cpu_ns - before.process_cpu_ns)
    return Window(
        name=name,
        seconds=seconds,
        waits_per_s=_counted("waits", before, after, seconds),
        wasted_per_s=_counted("wasted", before, after, seconds),
        iterations_per_s=_counted("iterations", before, after, seconds),
        cpu_ms_per_s=sum(delta.run_ns for delta in deltas) / 1e6 / seconds,
        process_cpu_ms_per_s=process_ns / 1e6 / seconds,
        on_queue_fraction=on_queue,
        run_queue_wait_fraction=min(on_queue, busiest.wait_ns / elapsed_ns),
        voluntary_switches_per_s=sum(delta.voluntary for delta in deltas) / seconds,
        involuntary_switches_per_s=sum(delta.involuntary for delta in deltas) / seconds,
        cpu_source=_worst_source(figures.source for figures in after.threads.values()),
    )


def merge(windows: Sequence[Window]) -> Window:
    """Repetitions of one window as one: each rate is the mean weighted by the windows' lengths.

    A counter that any repetition lacks is None in the whole.
    """
    if not windows:
        raise UsageError("no windows to merge")
    seconds = sum(window.seconds for window in windows)
    kept = {"name", "seconds", "cpu_source", "repetitions"}
    rates: dict[str, Any] = {}
    for rate in (field.name for field in fields(Window) if field.name not in kept):
        values = [getattr(window, rate) for window in windows]
        missing = any(value is None for value in values)
        rates[rate] = None if missing else sum(
            value * window.seconds for value, window in zip(values, windows, strict=True)
        ) / seconds
    return Window(
        name=windows[0].name,
        seconds=seconds,
        cpu_source=_worst_source(window.cpu_source for window in windows),
        repetitions=sum(window.repetitions for window in windows),
        **rates,
    )


def thread_figures(pid: int, tid: int) -> ThreadFigures | None:
    """The cumulative figures of one thread, or None if it has ended.

    ``source`` names what the CPU time came from. A kernel without scheduler statistics reports no
    run-queue wait; ``wait_ns`` is 0 there and an on-queue fraction becomes a lower bound.
    """
    # The clock goes first: reading it makes the kernel bring the thread's statistics up to now,
    # which it otherwise does at the next tick.
    clock_ns = thread_clock_ns(pid, tid)
    status = proc.status(pid, tid)
    scheduled = proc.schedstat(pid, tid)
    # A process that nobody has waited for yet keeps its files; it sleeps for ever, but is no loop.
    if status is None or status.state in proc.ENDED:
        return None
    wait_ns = scheduled.wait_ns if scheduled else 0
    if clock_ns is not None:
        run_ns, source = clock_ns, THREAD_CLOCK
    elif scheduled and scheduled.slices:
        run_ns, source = scheduled.run_ns, SCHEDSTAT
    else:
        fallback = _coarse_run_ns(pid, tid)
        if fallback is None:
            return None
        run_ns, source = fallback
    return ThreadFigures(run_ns, wait_ns, status.voluntary, status.involuntary, source)


def thread_clock_ns(pid: int, tid: int) -> int | None:
    """CPU time of a thread of this process; None for one of another, whose clocks are closed."""
    if pid != os.getpid():
        return None
    try:
        return time.clock_gettime_ns((~tid << 3) | _CPUCLOCK_PERTHREAD | _CPUCLOCK_SCHED)
    except OSError:
        return None


def process_cpu_ns(pid: int) -> int:
    """CPU time of a process, user and system, from its nanosecond clock."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        raise MachineError(f"process {pid} has ended, or is not visible from here") from None


def _coarse_run_ns(pid: int, tid: int) -> tuple[int, str] | None:
    # The clock of a process with one thread is that thread's; among several, only ticks are left.
    stat = proc.stat(pid, tid)
    if stat is None:
        return None
    if stat.threads == 1:
        return process_cpu_ns(pid), PROCESS_CLOCK
    return (stat.user_ticks + stat.system_ticks) * _NS_PER_TICK, TICKS


def _delta(before: ThreadFigures | None, now: ThreadFigures, elapsed_ns: int) -> ThreadFigures:
    # An id seen for the first time may be an old thread that has only now joined the loop (or a
    # reused id): whatever it did before, it cannot have run for longer than the window.
    if before is None or now.run_ns < before.run_ns or now.source != before.source:
        run_ns = min(now.run_ns, elapsed_ns)
        return ThreadFigures(run_ns, min(now.wait_ns, elapsed_ns - run_ns), now.voluntary,
                             now.involuntary, now.source)
    return ThreadFigures(
        now.run_ns - before.run_ns,
        max(0, now.wait_ns - before.wait_ns),
        now.voluntary - before.voluntary,
        now.involuntary - before.involuntary,
        now.source,
    )


def _counted(key: str, before: Snapshot, after: Snapshot, seconds: float) -> float | None:
    if before.counters is None or after.counters is None:
        return None
    if key not in before.counters or key not in after.counters:
        return None
    return (after.counters[key] - before.counters[key]) / seconds


def _worst_source(sources: Iterable[str]) -> str:
    order = (THREAD_CLOCK, SCHEDSTAT, PROCESS_CLOCK, TICKS)
    return max(sources, key=order.index)

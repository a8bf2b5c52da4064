"""What /proc says about a process and its threads.

The parsers are pure functions of a file's text, so that they are tested on strings from any kernel.
The readers are thin, and give None for a thread that ended between being listed and being read:
that is the normal life of a thread, not an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
# The kernel threads that a ring starts on the application's behalf, by the start of their name.
RING_HELPERS = ("iou-sqp-", "iou-wrk-")
# State letters of a task that will never run again.
ENDED = ("Z", "X", "x")


class SchedStat(NamedTuple):
    """Scheduler times of one thread, cumulative."""

    run_ns: int
    wait_ns: int
    slices: int


class Status(NamedTuple):
    """Name, state letter and context switches of one thread; the switches are cumulative."""

    name: str
    state: str
    voluntary: int
    involuntary: int


class TaskStat(NamedTuple):
    """The part of a ``stat`` file that the lab uses; ticks are those of ``SC_CLK_TCK``."""

    tid: int
    name: str
    state: str
    user_ticks: int
    system_ticks: int
    threads: int
    start_ticks: int


class LoadAverage(NamedTuple):
    """Mean number of runnable tasks over 1, 5 and 15 minutes, and the tasks now."""

    one: float
    five: float
    fifteen: float
    runnable: int
    total: int


class CpuTimes(NamedTuple):
    """Ticks of all CPUs since boot; guest time is left out, for user time already holds it."""

    total: int
    idle: int
    steal: int

    @property
    def steal_fraction(self) -> float:
        """Share of time that the hypervisor gave to somebody else (0 where there is none)."""
        return self.steal / self.total if self.total else 0.0


def parse_schedstat(text: str) -> SchedStat:
    """``/proc/PID/task/TID/schedstat``: ns on a CPU, ns waiting for one, number of turns."""
    run, wait, slices = text.split()[:3]
    return SchedStat(int(run), int(wait), int(slices))


def parse_status(text: str) -> Status:
    """``/proc/PID/task/TID/status``; a field that the kernel leaves out counts as zero."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return Status(
        name=fields.get("Name", "").strip(),
        state=fields.get("State", "").strip()[:1],
        voluntary=int(fields.get("voluntary_ctxt_switches", "0")),
        involuntary=int(fields.get("nonvoluntary_ctxt_switches", "0")),
    )


def parse_stat(text: str) -> TaskStat:
    """``/proc/PID/task/TID/stat``; a name may hold spaces and brackets: the last one ends it."""
    tid, rest = text.split(" (", 1)
    name, rest = rest.rsplit(") ", 1)
    fields = rest.split()
    return TaskStat(
        tid=int(tid),
        name=name,
        state=fields[0],
        user_ticks=int(fields[11]),
        system_ticks=int(fields[12]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes (the few fields that are counts stay counts)."""
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        sizes[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return sizes


def parse_loadavg(text: str) -> LoadAverage:
    """``/proc/loadavg``."""
    one, five, fifteen, tasks_now, *_ = text.split()
    runnable, total = tasks_now.split("/")
    return LoadAverage(float(one), float(five), float(fifteen), int(runnable), int(total))


def parse_cpu_times(text: str) -> CpuTimes:
    """The first line of ``/proc/stat``; kernels before 2.6.11 have no steal column."""
    label, *columns = text.split("\n", 1)[0].split()
    if label != "cpu":
        raise ValueError(f"not the text of /proc/stat: starts with '{label}'")
    ticks = [int(column) for column in columns[:8]]
    return CpuTimes(total=sum(ticks), idle=ticks[3], steal=ticks[7] if len(ticks) > 7 else 0)


def read_text(path: str | Path) -> str | None:
    """A file of /proc or /sys, or None where it is missing, unreadable or its task has ended."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def tasks(pid: int) -> list[int]:
    """The ids of all threads of a process, ascending; empty when it has ended."""
    try:
        return sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


def schedstat(pid: int, tid: int) -> SchedStat | None:
    """Scheduler times of a thread; None if it ended, or the kernel keeps none."""
    text = _task_file(pid, tid, "schedstat")
    return parse_schedstat(text) if text else None


def status(pid: int, tid: int) -> Status | None:
    """Name and context switches of a thread; None if it ended."""
    text = _task_file(pid, tid, "status")
    return parse_status(text) if text else None


def stat(pid: int, tid: int) -> TaskStat | None:
    """State and tick times of a thread; None if it ended."""
    text = _task_file(pid, tid, "stat")
    return parse_stat(text) if text else None


def ring_helpers(pid: int) -> list[int]:
    """The threads that io_uring runs for a process (SQPOLL and worker threads).

    They burn CPU in the application's name but never pass through its code, so a measurement of
    the application's own threads misses them.
    """
    return [tid for tid in tasks(pid) if _name(pid, tid).startswith(RING_HELPERS)]


def _name(pid: int, tid: int) -> str:
    return (_task_file(pid, tid, "comm") or "").strip()


def _task_file(pid: int, tid: int, name: str) -> str | None:
    return read_text(PROC / str(pid) / "task" / str(tid) / name)

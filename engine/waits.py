"""The wait bench: what one way to wait costs, measured natively with no Python in the loop."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.binding import native, text
from engine.errors import EngineError, MachineError, RinglabError, UsageError, unknown
from engine.startup import memory_error, ring_error

FLAGS = ("none", "coop", "defer")
FLAG_NAMES = {"none": "no flags", "coop": "COOP_TASKRUN", "defer": "SINGLE_ISSUER|DEFER_TASKRUN"}
TRACES = ("timer_starts", "timer_interrupts", "traced_switches")
EVENTS = {
    "timer_starts": "timer:hrtimer_start",
    "timer_interrupts": "irq_vectors:local_timer_entry",
    "traced_switches": "sched:sched_switch",
}
# Timer interrupts that hit other programs while the thread slept, per wait: more than these, and
# its own cannot be told from theirs.
STRAYS = 0.2
_STRAYS = ("irq_vectors:local_timer_entry: other programs held the CPU while this thread slept, so "
           "its timer's interrupts cannot be told from theirs; measure on a quiet machine")
_WHERE_BYTES = 96
_NOT_ASKED, _TRACEFS, _EVENT, _PERF = range(4)


class WayAbsent(MachineError):
    """This kernel or this build of liburing lacks a way to wait, its ring flags, or NAPI."""


@dataclass(frozen=True)
class Way:
    """A way to wait, named after its call.

    ``ring`` is whether a ring takes part, so that ring flags may matter; ``untimed`` ways take no
    timeout, so they are measured for zero only. ``step_ns`` is the finest timeout that the call
    takes, ``least_ns`` the shortest that it makes sense for.
    """

    index: int
    name: str
    what: str
    ring: bool
    untimed: bool
    step_ns: int
    least_ns: int

    def refusal(self, timeout_ns: int) -> str:
        """Why this timeout is not measured; empty if it is."""
        if timeout_ns and self.untimed:
            return "takes no timeout"
        if timeout_ns % self.step_ns:
            return f"counts in steps of {self.step_ns:,} ns"
        if timeout_ns < self.least_ns:
            return f"makes sense from {self.least_ns:,} ns on"
        return ""


@dataclass(frozen=True)
class Case:
    """What to measure: a way, under ring flags of ``FLAGS``, with a timeout and NAPI polling.

    ``napi_us`` is the busy_poll_to registered on the ring, 0 for none; with it goes ``socket``, the
    descriptor of a connected TCP socket on which a recv is kept posted.
    """

    way: str
    timeout_ns: int
    flags: str = "none"
    napi_us: int = 0
    socket: int = -1


@dataclass(frozen=True)
class Figures:
    """What a wait cost; all per wait, times in microseconds.

    ``us_p50`` and ``us_p99`` are percentiles over blocks of ``block`` waits (1 unless the clock
    would show). ``timed_out`` is the fraction that ended by the timeout, ``own_us`` the bench's own
    share, ``helper_cpu_us`` the CPU time of the thread that signals before the deadline. A trace
    event that could not be counted is None, and ``untraced`` says why.
    """

    waits: int
    block: int
    us_p50: float
    us_p99: float
    us_mean: float
    cpu_us: float
    voluntary_switches: float
    involuntary_switches: float
    timed_out: float
    helper_cpu_us: float
    own_us: float
    timer_starts: float | None
    timer_interrupts: float | None
    traced_switches: float | None
    untraced: Mapping[str, str]


@cache
def ways() -> dict[str, Way]:
    """Every way to wait by its name, in the order of the table in C."""
    _, lib = native()
    found: dict[str, Way] = {}
    while told := lib.rl_way_at(len(found)):
        name = text(told.name)
        found[name] = Way(len(found), name, text(told.what), bool(told.ring), bool(told.untimed),
                          told.step_ns, told.least_ns)
    return found


def way(name: str) -> Way:
    """The way of that name; UsageError lists them, nearest first."""
    if name not in ways():
        raise unknown("way to wait", name, ways())
    return ways()[name]


def measure(
    case: Case, run_s: float = 0.02, *, least: int = 20, trace: bool = True
) -> Figures:
    """Measures one case for about ``run_s`` seconds, and ``least`` waits or blocks at least.

    Raises WayAbsent where this kernel lacks it, MachineError where it is refused, and EngineError
    for a wait that ended otherwise than by its timeout. Ctrl-C is heard when the measurement ends.
    """
    ffi, lib = native()
    found = way(case.way)
    if not 0 < run_s <= 3600:  # also refuses NaN
        raise UsageError(f"run_s={run_s} is not allowed: give over 0 to 3,600 s")
    if case.flags not in FLAGS:
        raise unknown("ring flags", case.flags, FLAGS)
    why = "must not be negative" if case.timeout_ns < 0 else found.refusal(case.timeout_ns)
    if why:
        raise UsageError(f"{case.way} with a timeout of {case.timeout_ns} ns: {why}")
    if case.napi_us and case.socket < 0:
        raise UsageError(f"{case.way} with NAPI needs a connected socket")
    asked = ffi.new("rl_wait_case *", {
        "way": found.index, "setup": FLAGS.index(case.flags) + 1, "timeout_ns": case.timeout_ns,
        "napi_us": case.napi_us, "socket": case.socket, "run_ns": int(run_s * 1e9),
        "least": least, "trace": trace,
    })
    out = ffi.new("rl_wait_figures *")
    where = ffi.new("char[]", _WHERE_BYTES)
    result = lib.rl_wait_measure(asked, out, where, _WHERE_BYTES)
    if result < 0:
        raise wait_error(-result, text(where) or case.way)
    return _figures(out)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """For many measurements: tracepoints stay attached meanwhile, which saves 0.1 s each."""
    _, lib = native()
    lib.rl_trace_hold()
    try:
        yield
    finally:
        lib.rl_trace_release()


@dataclass(frozen=True)
class PingFigures:
    """Round trips of one byte over a TCP connection, in microseconds; CPU of the pinging thread."""

    pings: int
    us_p50: float
    us_p99: float
    cpu_us: float
    napi_id: int


def ping(
    sockets: tuple[int, int], napi_us: int, run_s: float = 0.2, *, flags: str = "none",
    prefer: bool = False,
) -> PingFigures:
    """Ping-pong between two connected sockets; this end waits on a ring, the other one blocks.

    The first socket is shut down for writing at the end. Raises as :func:`measure`.
    """
    ffi, lib = native()
    asked = ffi.new("rl_ping_case *", {
        "sockets": list(sockets), "setup": FLAGS.index(flags) + 1, "napi_us": napi_us,
        "prefer": prefer, "run_ns": int(run_s * 1e9),
    })
    out = ffi.new("rl_ping_figures *")
    where = ffi.new("char[]", _WHERE_BYTES)
    result = lib.rl_ping_measure(asked, out, where, _WHERE_BYTES)
    if result < 0:
        raise wait_error(-result, text(where))
    return PingFigures(out.pings, out.ns_p50 / 1e3, out.ns_p99 / 1e3, out.cpu_ns / 1e3,
                       out.napi_id)


def wait_error(number: int, where: str) -> RinglabError:
    """The error for a wait that did not end as it should, or a set-up that failed, in one line."""
    if number == errno.EOPNOTSUPP:
        return WayAbsent(where)
    if where == "io_uring_setup":
        return ring_error(number)
    if number == errno.ENOMEM:
        return memory_error(where)
    means = {
        errno.EINTR: "interrupted by a signal (the process was stopped, or is being traced); "
                     "measure again",
        errno.EBADMSG: "reported success though nothing was there to reap",
        errno.EBADF: "the ring or its descriptor was closed while it waited",
        errno.ECANCELED: "the ring was torn down while it waited",
        errno.EMFILE: "the limit of open files is reached; raise it (ulimit -n)",
    }
    reason = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
    told = means.get(number, "a wait with nothing to reap may only end by its timeout")
    return EngineError(number, f"{where}: {reason}: {told}")


def _figures(out: Any) -> Figures:
    reasons = {}
    for index, name in enumerate(TRACES):
        if out.trace_step[index] == _NOT_ASKED or out.trace_error[index]:
            reasons[name] = untraced(name, out.trace_step[index], -out.trace_error[index])
    if out.voluntary > 0.5 and out.strays > STRAYS:
        reasons.setdefault("timer_interrupts", _STRAYS)
    traced = {name: None if name in reasons else out.traced[index]
              for index, name in enumerate(TRACES)}
    return Figures(
        waits=out.waits, block=out.block,
        us_p50=out.ns_p50 / 1e3, us_p99=out.ns_p99 / 1e3, us_mean=out.ns_mean / 1e3,
        cpu_us=out.cpu_ns / 1e3, voluntary_switches=out.voluntary,
        involuntary_switches=out.involuntary, timed_out=out.timed_out,
        helper_cpu_us=out.helper_cpu_ns / 1e3, own_us=out.own_ns / 1e3, untraced=reasons, **traced,
    )


def traceable() -> dict[str, str]:
    """Which trace events cannot be counted here, with the reason and a remedy after ``;``.

    Found out by counting a few, of a wait that needs no ring.
    """
    reasons = measure(Case("timerfd", 0), 0.001, least=1).untraced
    return {name: reason for name, reason in reasons.items() if reason != _STRAYS}


def untraced(name: str, step: int, number: int) -> str:
    """Why a trace event was not counted, with what would change it."""
    event = EVENTS[name]
    if step == _NOT_ASKED:
        return f"{event} was not asked for"
    if step == _TRACEFS and number in (errno.EPERM, errno.EACCES):
        return (f"{event}: tracefs is closed to this user; run as root, or have it mounted at "
                "/sys/kernel/tracing and readable")
    if step == _TRACEFS or number in (errno.ENODEV, errno.ENOSYS):
        return f"{event}: this kernel has no tracefs or no perf events ({os.strerror(number)})"
    if step == _EVENT and number == errno.ENOENT:
        return f"{event}: this kernel or architecture has no such tracepoint"
    if number in (errno.EPERM, errno.EACCES):
        return (f"{event}: perf_event_open is refused; run as root, or set "
                "sysctl kernel.perf_event_paranoid=-1")
    return f"{event}: {os.strerror(number)}"

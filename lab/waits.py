"""What each way to wait costs on this machine: which cases, in rounds, and what they say together.

The cases are interleaved: each round measures all of them once, every second one backwards, so that
a machine that slows down does not slow one way alone. A row is that of its quietest round, the one
with the lowest p50: what disturbs a wait (above all a neighbour on the other half of its core) only
adds to it. The scatter of the rounds goes along. The measuring is native.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import UsageError, quoted
from engine.waits import FLAGS, TRACES, Case, Figures, Way, WayAbsent, measure, tracing, way, ways
from lab.progress import Progress, choose, shown

BASE = Case("epoll_wait", 0)
RING_WAIT = "io_uring_wait_cqe_timeout"
CURE = "io_uring_get_events"
TIMEOUTS = (0, 1, 1_000, 10_000, 50_000, 200_000, 1_000_000)
# What enters the kernel by the ring's own call: the kernel polls a ring's NAPI queue nowhere else,
# so epoll, poll and a look at the CQ cost what they cost without it.
NAPI_WAYS = (RING_WAIT, "io_uring_submit_and_wait_timeout",
             "io_uring_submit_and_wait_min_timeout", CURE, "expired_timeout_op",
             "eventfd_workaround", "eventfd_workaround_spin", "ring_worker_kernel",
             "ring_worker_poll")
# More than this between the lowest and the highest round makes a figure no measurement.
SPREAD = 0.10
OWN_SHARE = 0.02
# Of its own waits a second, those after which a neighbour was given the CPU.
PREEMPTED_PER_S = 30.0
# A zero-timeout ring wait this many times a get_events: dearer sleeps, cheaper looks at the clock.
DEAR, CHEAP = 5.0, 3.0
_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)")


@dataclass(frozen=True)
class Plan:
    """What to measure: every way named, with every timeout, under all flags and NAPI settings.

    Empty ``ways`` means all. ``napi_us`` holds values of busy_poll_to; 0 stands for none.
    """

    ways: Sequence[str] = ()
    timeouts_ns: Sequence[int] = TIMEOUTS
    flags: Sequence[str] = FLAGS
    napi_us: Sequence[int] = (0,)
    rounds: int = 3
    run_s: float = 0.02
    trace: bool = True

    def cases(self, socket: int = -1) -> list[Case]:
        """The cases, each once, with the one that ratios refer to in front.

        UsageError where all that was asked for is left out, with the reasons.
        """
        found = [BASE]
        for flags in self.flags:
            for each in self._chosen():
                for napi in self.napi_us:
                    if flags != FLAGS[0] and not each.ring:
                        continue
                    if napi and (each.name not in NAPI_WAYS or socket < 0):
                        continue
                    found += [Case(each.name, timeout, flags, napi, socket if napi else -1)
                              for timeout in self.timeouts_ns if not each.refusal(timeout)]
        if len(found) == 1:
            raise nothing_left(self.left_out())
        return list(dict.fromkeys(found))

    def left_out(self) -> list[dict[str, Any]]:
        """What is asked for and makes no case: ``way``, ``timeouts_ns``, ``flags``, ``reason``.

        ``whole`` is whether nothing of that way is left.
        """
        found = []
        for each in self._chosen():
            if not each.ring and FLAGS[0] not in self.flags:
                found.append({"way": each.name, "timeouts_ns": list(self.timeouts_ns),
                              "flags": list(self.flags), "whole": True,
                              "reason": "no ring takes part, so it is measured without ring flags "
                                        "only"})
                continue
            refused: dict[str, list[int]] = {}
            for timeout in self.timeouts_ns:
                if reason := each.refusal(timeout):
                    refused.setdefault(reason, []).append(timeout)
            whole = sum(map(len, refused.values())) == len(self.timeouts_ns)
            found += [{"way": each.name, "timeouts_ns": timeouts, "flags": list(self.flags),
                       "whole": whole, "reason": reason} for reason, timeouts in refused.items()]
        return found

    def _chosen(self) -> list[Way]:
        return [way(name) for name in dict.fromkeys(self.ways)] or list(ways().values())


def nothing_left(left_out: Iterable[Mapping[str, Any]]) -> UsageError:
    """The error for a plan of which every way is left out."""
    return UsageError("nothing is left to measure: " + "; ".join(map(left_out_told, left_out)))


def left_out_told(left: Mapping[str, Any]) -> str:
    """What a plan leaves out, in words: the way, the timeouts and the reason."""
    timeouts = ", ".join(map(label, left["timeouts_ns"]))
    return f"{left['way']} with timeout {timeouts} ({left['reason']})"


@dataclass
class Result:
    """The rows, as ``ringlab waits --json`` prints them, and what they say.

    ``absent`` lists what this machine lacks, each with the reason; ``untraced`` why a trace event
    was not counted; ``warnings`` what makes the figures doubtful, with cause and remedy. ``cut`` is
    what ended it before its time: the rows are those of the ``rounds`` that were finished or, where
    none was, of what the first one had measured by then.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    absent: list[dict[str, Any]] = field(default_factory=list)
    untraced: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    rounds: int = 0
    cut: KeyboardInterrupt | Exception | None = None

    def told(self, rounds: int) -> str:
        """How far it came of so many rounds, as the end of a sentence."""
        return f"after {self.rounds} of {rounds} rounds"

    def row(
        self, name: str, timeout_ns: int, flags: str = "none", napi_us: int = 0
    ) -> dict[str, Any] | None:
        """One row, or None."""
        return find(self.rows, name, timeout_ns, flags, napi_us)


def run(
    plan: Plan, *, socket: int = -1, progress: Progress | None = None,
) -> Result:
    """Measures a plan. ``socket``: a connected socket over a NAPI device, for busy polling.

    Ctrl-C, or an error, keeps what was measured, and the result says so; where not even the base of
    the ratios was, it is raised. Without ``progress`` it is shown as fits where this runs.
    """
    cases = plan.cases(socket)
    taken: dict[Case, list[Figures]] = {case: [] for case in cases}
    absent: dict[Case, str] = {}
    result = Result()
    try:
        with (shown(progress or choose(), len(cases) * plan.rounds, "waits") as telling,
              tracing() if plan.trace else contextlib.nullcontext()):
            for number in range(plan.rounds):
                _round(cases if number % 2 == 0 else cases[::-1], plan, taken, absent, telling)
                result.rounds += 1
    except (KeyboardInterrupt, Exception) as cut:
        if not taken[BASE]:
            raise
        result.cut = cut
    _fill(result, {case: each[:result.rounds or 1] for case, each in taken.items()}, absent)
    return result


def _fill(
    result: Result, taken: Mapping[Case, Sequence[Figures]], absent: Mapping[Case, str]
) -> None:
    base = min(figures.us_p50 for figures in taken[BASE])
    for case, rounds in taken.items():
        if rounds and case not in absent:
            result.rows.append(_row(case, rounds, base))
            lacking = [name for name in TRACES if result.rows[-1][name] is None]
            result.untraced |= {name: rounds[0].untraced[name] for name in lacking}
    result.absent = _absent(absent)
    result.warnings = warnings_of(result)


def _round(
    cases: Iterable[Case], plan: Plan, taken: Mapping[Case, list[Figures]],
    absent: dict[Case, str], telling: Progress,
) -> None:
    for case in cases:
        telling.step(f"{case.way}, {label(case.timeout_ns)}", 0)
        if case not in absent:
            try:
                taken[case].append(measure(case, plan.run_s, trace=plan.trace))
            except WayAbsent as reason:
                absent[case] = str(reason)
        telling.step(f"{case.way}, {label(case.timeout_ns)}")


def find(
    rows: Iterable[Mapping[str, Any]], name: str, timeout_ns: int, flags: str = "none",
    napi_us: int = 0,
) -> dict[str, Any] | None:
    """The row of that way, timeout, flags and NAPI setting, or None."""
    wanted = (name, timeout_ns, flags, napi_us)
    for row in rows:
        if (row["way"], row["timeout_ns"], row["flags"], row["napi_us"]) == wanted:
            return dict(row)
    return None


def _row(case: Case, rounds: Sequence[Figures], base: float) -> dict[str, Any]:
    quietest = min(rounds, key=lambda figures: figures.us_p50)
    row: dict[str, Any] = {
        "way": case.way, "timeout_ns": case.timeout_ns, "flags": case.flags,
        "napi_us": case.napi_us, "us_p50": quietest.us_p50, "us_p99": quietest.us_p99,
        "overrun_us_p50": quietest.us_p50 - case.timeout_ns / 1e3, "cpu_us": quietest.cpu_us,
        "voluntary_switches": quietest.voluntary_switches,
        "involuntary_switches": quietest.involuntary_switches,
    }
    for name in TRACES:
        known = [value for figures in rounds if (value := getattr(figures, name)) is not None]
        row[name] = min(known, default=None)
    return row | {
        "ratio_to_epoll_wait_0": quietest.us_p50 / base,
        "us_lowest": quietest.us_p50, "us_highest": max(figures.us_p50 for figures in rounds),
        "timed_out": quietest.timed_out, "helper_cpu_us": quietest.helper_cpu_us,
        "waits": sum(figures.waits for figures in rounds),
        "preempted": sum(figures.involuntary_switches * figures.waits for figures in rounds),
        "seconds": sum(figures.waits * figures.us_mean for figures in rounds) / 1e6,
        "us_mean": quietest.us_mean, "block": quietest.block, "own_us": quietest.own_us,
    }


def _absent(absent: Mapping[Case, str]) -> list[dict[str, Any]]:
    """One entry a way, flags and reason, whatever its timeouts."""
    found: dict[tuple[str, str, int, str], None] = {}
    for case, reason in absent.items():
        found[(case.way, case.flags, case.napi_us, reason)] = None
    return [dict(zip(("way", "flags", "napi_us", "reason"), key, strict=True)) for key in found]


# ---- what the rows say --------------------------------------------------------------------------


def kernel_check(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether this kernel looks at the clock before it sleeps, told by the figures themselves.

    ``has_check`` is True, False or None where the figures do not tell; ``sleeps`` whether an
    expired wait really slept (a voluntary switch each) or only armed its timer. Timers tell by
    themselves; where they could not be counted, the cost of the cure has to be known too.
    """
    row = find(rows, RING_WAIT, 0)
    cure = find(rows, CURE, 0)
    starts = row["timer_starts"] if row else None
    if row is None or (cure is None and starts is None):
        return {"has_check": None, "sleeps": None, "ratio_to_get_events": None,
                "text": f"{RING_WAIT} and {CURE} with timeout 0 were not both measured."}
    ratio = row["us_p50"] / cure["us_p50"] if cure else None
    has: bool | None = None
    if starts is not None:
        has = True if starts < 0.1 else False if starts > 0.9 else None
        evidence = f"{starts:.2f} timers started per wait"
    elif ratio is not None:
        has = True if ratio < CHEAP else False if ratio > DEAR else None
        evidence = "timer starts could not be counted"
    switches = row["voluntary_switches"]
    sleeps = None if has is None or has else switches > 0.5
    manner = {
        None: "", True: " and then sleeps: a voluntary switch each",
        False: " but never sleeps: the timer's interrupt comes before schedule()",
    }[sleeps]
    told = {
        True: "This kernel looks at the clock before it sleeps: an expired wait returns at once",
        False: f"This kernel does not look: an expired wait arms a timer{manner}",
        None: "These figures do not tell whether this kernel looks at the clock before it sleeps",
    }[has]
    against = "" if ratio is None else f", {ratio:.0f} times {CURE}"
    return {"has_check": has, "sleeps": sleeps, "ratio_to_get_events": ratio,
            "text": f"{told} ({evidence}, {switches:.3f} voluntary switches{against})."}


def warnings_of(result: Result) -> list[str]:
    """What makes the figures doubtful: cause and remedy in one line each."""
    found = []
    cheap = [row for row in result.rows if row["timeout_ns"] == 0 and not row["napi_us"]]
    noisy = [row for row in cheap if row["us_highest"] > row["us_lowest"] * (1 + SPREAD)]
    if result.rounds > 1 and len(noisy) * 4 > len(cheap):
        worst = max(noisy, key=lambda row: float(row["us_highest"] / row["us_lowest"]))
        found.append(
            f"{len(noisy)} of {len(cheap)} zero-timeout rows differ by more than {SPREAD:.0%} "
            f"between rounds ({worst['way']}: {worst['us_lowest']:.3g} to "
            f"{worst['us_highest']:.3g} us): other programs or a changing CPU clock; compare "
            "ratios, not times, or end the others and measure again with more rounds")
    seconds = sum(row["seconds"] for row in result.rows)
    preempted = sum(row["preempted"] for row in result.rows)
    if seconds and preempted / seconds > PREEMPTED_PER_S:
        found.append(
            f"other programs took the CPU {preempted / seconds:,.0f} times a second (load "
            f"{os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs), so p99 and overrun "
            "are theirs as well: end them, or give this one a CPU of its own (isolcpus, taskset)")
    own = [row for row in result.rows if row["own_us"] > OWN_SHARE * row["us_p50"]]
    if own:
        found.append(
            f"the bench's own cost is over {OWN_SHARE:.0%} of {own[0]['way']} "
            f"({own[0]['own_us'] * 1e3:.2f} of {own[0]['us_p50'] * 1e3:.1f} ns): its clock is slow "
            "(see the clocksource of ringlab doctor); read that row as an upper bound")
    return found


def cpu_percent(row: Mapping[str, Any]) -> float:
    """The share of a wait that its thread spends on a CPU, 0 to 100.

    Of the usual wait: one during which a neighbour was given the CPU is long, and costs no more.
    """
    return min(100.0, 100 * float(row["cpu_us"]) / float(row["us_p50"]))


def quietest(rounds: int) -> str:
    """Of how many rounds the rows are the quietest."""
    return f"quietest of {rounds} rounds" if rounds else "of one round that was not finished"


# ---- words --------------------------------------------------------------------------------------


def label(timeout_ns: int) -> str:
    """A timeout as a person writes it: ``0``, ``1 ns``, ``50 us``, ``1 ms``."""
    for unit in ("s", "ms", "us", "ns"):
        if timeout_ns and timeout_ns % _UNITS[unit] == 0:
            return f"{timeout_ns // _UNITS[unit]} {unit}"
    return "0"


def parse_timeout(text: str) -> int:
    """``50us``, ``1ms`` or ``0`` in nanoseconds; UsageError otherwise."""
    stripped = text.strip()
    if stripped == "0":
        return 0
    match = _TIMEOUT.fullmatch(stripped)
    value = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if value != int(value) or not 0 <= value <= 10**10:
        raise UsageError(f"{quoted(text)} is no timeout: give 0 to 10s with a unit, as 50us or 1ms")
    return int(value)


def parse_timeouts(text: str) -> tuple[int, ...]:
    """A list of timeouts with commas between."""
    return tuple(dict.fromkeys(parse_timeout(part) for part in text.split(",") if part.strip()))

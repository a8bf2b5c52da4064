"""A run that nobody measured, for tests of what is made from runs; and one quick real report."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.progress import Progress
from lab.report import Report, make_report
from lab.runs import Run, RunStore, read_run

HZ = 100
WHYS = ("ready", "list", "overdue", "owed", "send", "idle", "deadline", "event")
COUNTERS = (
    "iterations", "waits", "waits_timed", *(f"why_{why}" for why in WHYS), "wasted",
    "thread_cpu_ns", "process_cpu_ns", "run_ns", "queue_ns", "bytes_sent", "bytes_direct",
)
# State by arm and policy; what each state waits per second while stalled.
STATES = {
    ("async", "shipped"): "parked", ("async", "membership"): "parked",
    ("async", "timed-wait"): "spins", ("async", "fixed"): "quiet", ("async", "both"): "quiet",
    ("async+pipelined", "shipped"): "spins", ("async+pipelined", "membership"): "quiet",
    ("async+pipelined", "timed-wait"): "spins", ("async+pipelined", "fixed"): "quiet",
    ("async+pipelined", "both"): "quiet",
    ("held-completion", "shipped"): "parked", ("held-completion", "held-listed"): "spins",
}
RATES = {"parked": 0, "spins": 100_000, "quiet": 40}
CELLS = {
    "shipped": ("stays listed", "no timeout"), "membership": ("leaves the list", "no timeout"),
    "timed-wait": ("stays listed", "timed"), "both": ("leaves the list", "timed"),
}
# Seconds; the drain is shorter than a bin of the series.
LENGTHS = {"idle": 0.5, "": 0.1, "stall": 1.0, "drain": 0.03}
BODY = 3_000_000


def made_up_run(root: Path, **changes: Any) -> Run:
    """Stored like any other; ``changes`` replace entries of its ``run.json``."""
    rows = [_row(arm, policy) for arm, policy in STATES]
    cells = [
        {"arm": arm, "policy": policy, "membership": CELLS[policy][0], "wait": CELLS[policy][1]}
        for arm, policy in STATES if policy in CELLS and not arm.startswith("held")
    ]
    data = {
        "experiment": "dirty-list", "parameters": {"response_size": BODY, "seconds": 1.0},
        "machine": {"kernel": "6.1.0-made-up", "architecture": "x86_64", "cpu": "a <fine> CPU",
                    "cpus": 2, "virtualisation": "kvm", "congestion_control": "cubic"},
        "arms": rows, "two_by_two": {"cells": cells},
        "open_question": {"question": "why so little?", "answer": "It sleeps."},
        **changes,
    }
    return read_run(RunStore(root).write(data, _samples()))


def _row(arm: str, policy: str) -> dict[str, Any]:
    state = STATES[arm, policy]
    name = "held" if arm.startswith("held") else "stall"
    torn = (arm, policy) == ("async+pipelined", "shipped")
    return {
        "arm": arm, "policy": policy, "decisions": {}, "state": state,
        "windows": {"idle": _window(40), name: _window(RATES[state]), "drain": _window(900, 0.03)},
        "reason": f"it {state} & that is <that>",
        "delivered": {"bytes": BODY, "expected": BODY, "in_order": not torn,
                      "fault": "byte 7 is not its own" if torn else None},
        "honours_stop": state != "parked", "honours_write_timeout": None,
        "send_in_flight": True, "outq": 374_784, "others_wait_ms": 0.2,
        "wait_mode_while_stalled": "untimed" if state == "parked" else "timed",
        "why_while_stalled": {"list": 99, "ready": 1} if state == "spins" else {"send": 1},
    }


def _window(rate: float, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "seconds": 2 * seconds, "repetitions": 2, "waits_per_s": rate, "iterations_per_s": rate,
        "wasted_per_s": rate if rate > 1000 else 0, "cpu_ms_per_s": rate / 105,
        "process_cpu_ms_per_s": rate / 100, "on_queue_fraction": min(1.0, rate / 1e5),
        "voluntary_switches_per_s": 0 if rate > 1000 else rate,
    }


def _samples() -> np.ndarray[Any, Any]:
    layout = [("arm", "U20"), ("policy", "U20"), ("repetition", "i4"), ("window", "U8"),
              ("t_s", "f8"), *((name, "u8") for name in COUNTERS),
              ("list_length", "u8"), ("sending", "u8")]
    rows = [row for (arm, policy), state in STATES.items() for repetition in range(2)
            for row in _repetition(arm, policy, repetition, RATES[state])]
    return np.array(rows, dtype=layout)


def _repetition(arm: str, policy: str, repetition: int, rate: int) -> Iterator[tuple[Any, ...]]:
    count = dict.fromkeys(COUNTERS, 0.0)
    t_s = 0.0
    for window, seconds in LENGTHS.items():
        per_s = {"idle": 40, "": 200, "stall": rate, "drain": 900}[window]
        why = "list" if per_s > 1000 else "idle" if per_s == 40 else "ready"
        for _ in range(round(seconds * HZ)):
            t_s += 1 / HZ
            for name in ("iterations", "waits", "waits_timed", f"why_{why}"):
                count[name] += per_s / HZ
            count["wasted"] += per_s / HZ if per_s > 1000 else 0
            count["thread_cpu_ns"] += min(1.0, per_s / 1e5) * 1e9 / HZ
            count["run_ns"] += min(1.0, per_s / 1e5) * 1e9 / HZ
            count["bytes_direct"] += 40_000 if window == "" else 0
            count["bytes_sent"] += 866_666 if window == "drain" else 0
            yield (arm, policy, repetition, window, t_s, *count.values(),
                   window == "stall", window == "stall")


@functools.cache
def quick_report() -> tuple[Report, Sequence[str]]:
    """A real report, of as little as has something to show; made once for all tests of a process.

    With it, what its progress was told.
    """
    folder = Path(tempfile.mkdtemp(prefix="ringlab-report-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    heard = Heard()
    earlier = os.environ.get("RINGLAB_RUNS")
    os.environ["RINGLAB_RUNS"] = str(folder / "runs")
    try:
        report = make_report(
            "dirty-list", {"seconds": 0.3, "repetitions": 1}, folder / "out",
            arms=["async", "async+pipelined"], policies=["shipped", "fixed"], progress=heard,
        )
    finally:
        if earlier is None:
            del os.environ["RINGLAB_RUNS"]
        else:
            os.environ["RINGLAB_RUNS"] = earlier
    return report, heard.lines


class Heard(Progress):
    """A progress that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, total: int, what: str) -> None:
        self.lines.append(f"begin {total} {what}")

    def step(self, done: str, count: int = 1) -> None:
        self.lines.append(done)

    def end(self) -> None:
        self.lines.append("end")

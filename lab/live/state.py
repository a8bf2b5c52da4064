"""The state of a running worker in a word, by the same rules as the verdict of a measured run.

A measured run has an idle window taken just before, in the dark, and tests stop and write timeout;
the strip of a live panel has the last second of samples. So the idle window here is the newest
stretch without a stall under the same policy (or, where there was none yet, what that policy's idle
wait makes), and whether stop would be honoured is read from the wait that the loop is in. How a
wait is read and how often an idle loop makes one, each engine's :class:`lab.live.case.Rules` say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab import palette
from lab.live.case import Rules
from lab.measure import Window
from lab.verdict import PERIODS, judge

LOOK_S = 1.0
"""The stretch that is judged, at least."""
LONGEST_S = 15.0
SETTLING_S = 0.4
IDLE = "idle"
IDLE_LOOK = palette.Look(IDLE, palette.GREEN, "circle", "○", "no client stalls")


@dataclass(frozen=True)
class Now:
    """What the newest samples say: the word, its reason, and the wait the loop is in."""

    state: str
    reason: str
    mode: str
    why: str
    timeout: str

    @property
    def look(self) -> palette.Look:
        """Its colour and mark."""
        return IDLE_LOOK if self.state == IDLE else palette.state(self.state)


UNKNOWN = Now("undecided", "no samples yet", "", "", "")


class LiveJudge:
    """Judges stretches of samples; remembers the idle window of each policy and cap."""

    def __init__(self, rules: Rules, one: str = "worker") -> None:
        self._rules, self._one = rules, one
        self._idle: dict[tuple[Any, ...], Window] = {}
        self.changed_ns = 0

    def changed(self, now_ns: int) -> None:
        """A control was moved or a client acted: what came before says nothing any more."""
        self.changed_ns = now_ns

    def look_s(self, cap_ms: float) -> float:
        """How many seconds of samples are wanted: ten idle periods, within reason."""
        return min(LONGEST_S, max(LOOK_S, 1.05 * PERIODS * cap_ms / 1e3))

    def judge(
        self, flat: NDArray[np.void], choices: Mapping[str, str], cap_ms: float, stalled: bool,
        by_design: bool = False, moves: bool = False,
    ) -> Now:
        """The state now. ``flat`` the newest samples of one loop, ``stalled`` whether a client
        is owed something that it does not read, ``moves`` whether it reads, slowly."""
        if len(flat) < 2:
            return UNKNOWN
        last = flat[-1]
        seen = self._rules.wait(last)
        wait = (seen.mode, seen.why, seen.timeout)
        stretch = flat[flat["t_ns"] > self.changed_ns]
        if len(stretch) < 2 or _seconds(stretch) < SETTLING_S:
            return Now("undecided", "something was changed just now: it settles", *wait)
        window = window_of("stall" if stalled else IDLE, stretch)
        key = (tuple(sorted(choices.items())), cap_ms)
        if not stalled:
            return Now(*self._when_idle(key, window, choices, cap_ms), *wait)
        idle = self._idle.get(key) or self._expected(choices, cap_ms, window)
        heard = not seen.deaf
        verdict = judge(idle, window, honours_stop=heard, honours_write_timeout=heard,
                        polls_by_design=by_design, moves=moves)
        return Now(verdict.state, verdict.reason, *wait)

    def _when_idle(
        self, key: tuple[Any, ...], window: Window, choices: Mapping[str, str], cap_ms: float
    ) -> tuple[str, str]:
        expected = self._expected(choices, cap_ms, window)
        verdict = judge(expected, window, honours_stop=True, honours_write_timeout=True)
        if verdict.state != "quiet":
            return verdict.state, verdict.reason
        if window.seconds >= LOOK_S / 2:
            self._idle[key] = window
        rate = window.waits_per_s or 0.0
        return IDLE, (f"no client stalls; {rate:,.0f} waits/s, {self._one} CPU "
                      f"{window.cpu_ms_per_s:,.1f} ms/s")

    def _expected(self, choices: Mapping[str, str], cap_ms: float, like: Window) -> Window:
        return expected_idle(self._rules.idle_per_s(choices, cap_ms), cap_ms, like)


def window_of(name: str, flat: NDArray[np.void]) -> Window:
    """A stretch of one loop's samples as the verdict wants it."""
    a, b = flat[0], flat[-1]
    elapsed = max(1, int(b["t_ns"] - a["t_ns"]))
    seconds = elapsed / 1e9

    def rate(field: str) -> float:
        return float(b[field] - a[field]) / seconds

    queued, run = int(b["queue_ns"] - a["queue_ns"]), int(b["run_ns"] - a["run_ns"])
    on_queue = min(1.0, (queued + run) / elapsed)
    return Window(
        name=name,
        seconds=seconds,
        waits_per_s=rate("waits"),
        wasted_per_s=rate("wasted"),
        iterations_per_s=rate("iterations"),
        cpu_ms_per_s=rate("thread_cpu_ns") / 1e6,
        process_cpu_ms_per_s=rate("process_cpu_ns") / 1e6,
        on_queue_fraction=on_queue,
        run_queue_wait_fraction=min(on_queue, queued / elapsed),
        voluntary_switches_per_s=rate("voluntary_switches"),
        involuntary_switches_per_s=rate("involuntary_switches"),
    )


def expected_idle(rate: float, cap_ms: float, like: Window) -> Window:
    """What an idle loop does by its own rule: ``rate`` waits a second."""
    return Window(
        name=IDLE, seconds=max(like.seconds, 1.1 * PERIODS * cap_ms / 1e3), waits_per_s=rate,
        wasted_per_s=0.0, iterations_per_s=rate, cpu_ms_per_s=0.0, process_cpu_ms_per_s=0.0,
        on_queue_fraction=0.0, run_queue_wait_fraction=0.0, voluntary_switches_per_s=rate,
        involuntary_switches_per_s=0.0,
    )


def timeout_text(sample: Any) -> str:
    """The timeout of the newest wait in words: none, 0, 25 ms."""
    ns = int(sample["last_timeout_ns"])
    if ns < 0:
        return "none"
    return "0" if ns == 0 else f"{ns / 1e6:,.6g} ms"


def _seconds(flat: NDArray[np.void]) -> float:
    return float(flat["t_ns"][-1] - flat["t_ns"][0]) / 1e9

"""What a stalled loop did, in one word and one sentence, and whether it kept to its budget.

The verdict never looks at CPU time. A neighbour that takes the core hides a spin from it, and a
parked loop, which no longer hears a stop request, costs less of it than a healthy one. It looks at
how often the loop woke, how long its busiest thread was on a run queue, and whether stop and
deadlines still worked, each against an idle window of the same loop on the same machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from lab.measure import Window

State = Literal["quiet", "parked", "spins", "intended", "undecided"]
STATES: tuple[State, ...] = ("quiet", "parked", "spins", "intended", "undecided")

# Below this length a scheduler tick or one stray wake-up is a large part of a window.
SHORTEST_S = 0.2
# Of a periodic idle loop a window must hold this many periods before their absence means anything.
PERIODS = 10
# A loop that wakes less often than this when idle has no period: it sleeps until it is called.
TICKLESS_PER_S = 2.0
# The idle window is no baseline when the loop was as busy as this in it.
NOISY_ON_QUEUE = 0.3
NOISY_WAKES_PER_S = 2000.0
# More wakes than idle: within the slack is quiet; from the spin limit on nothing else explains it.
SLACK_PER_S, SLACK_OF_IDLE = 10.0, 0.25
SPIN_PER_S, SPIN_OF_IDLE = 500.0, 4.0
# A loop that sleeps still shows some time on queue; one that never sleeps shows nearly all of it.
FULL_ON_QUEUE = 0.9
BUSY_ON_QUEUE = 0.3
# Of the wakes above idle, the share that must have been fruitless or a sleep for a spin.
FRUITLESS = 0.5
# Stalled wakes below this share of idle: the periodic wake-up is gone.
ASLEEP_OF_IDLE = 0.25


@dataclass(frozen=True)
class Verdict:
    """One of ``STATES``, and the reason for it: one sentence with the figures."""

    state: State
    reason: str


def judge(
    idle: Window,
    stalled: Window,
    *,
    honours_stop: bool | None,
    honours_write_timeout: bool | None,
    polls_by_design: bool = False,
    moves: bool = False,
) -> Verdict:
    """The state of a loop while a client stalls, against the same loop when idle.

    ``honours_stop`` and ``honours_write_timeout`` say what a test of the stalled loop found, None
    where none was made. Without one of them, a loop that went from waking to sound sleep stays
    undecided: the figures of a parked loop and of a tickless one are the same.
    ``polls_by_design`` is for targets that burn CPU on purpose (SQPOLL, busy polling): their time
    on queue is no evidence then, though turns of the wait far above idle still are. ``moves`` is
    for a window in which bytes move, slowly: to wake for them is no fault, to wake for nothing is.
    """
    pair = _Pair(idle, stalled)
    if moves:
        verdict = _too_short(pair) or _noisy(pair) or _moving(pair)
        return Verdict(verdict.state, f"{verdict.reason} ({pair.figures()})")
    verdict = (
        _too_short(pair)
        or _rate_spin(pair, polls_by_design)
        or _by_design(pair, polls_by_design)
        or _sleepless(pair)
        or _noisy(pair)
        or _queue_spin(pair)
        or _between(pair)
        or _sleeper(pair, honours_stop, honours_write_timeout)
    )
    return Verdict(verdict.state, f"{verdict.reason} ({pair.figures()})")


@dataclass(frozen=True)
class _Pair:
    """The two windows, and the comparisons that several rules make."""

    idle: Window
    stalled: Window

    @property
    def counted(self) -> bool:
        """Whether both windows carry the loop's own count of waits."""
        return self.idle.waits_per_s is not None and self.stalled.waits_per_s is not None

    def wakes(self, window: Window) -> float:
        """Turns of the wait per second; of a loop that counts none, its voluntary switches."""
        if self.counted and window.waits_per_s is not None:
            return window.waits_per_s
        return window.voluntary_switches_per_s

    @property
    def more_wakes(self) -> float:
        return self.wakes(self.stalled) - self.wakes(self.idle)

    @property
    def more_switches(self) -> float:
        return self.stalled.voluntary_switches_per_s - self.idle.voluntary_switches_per_s

    @property
    def more_wasted(self) -> float | None:
        if self.idle.wasted_per_s is None or self.stalled.wasted_per_s is None:
            return None
        return self.stalled.wasted_per_s - self.idle.wasted_per_s

    @property
    def more_on_queue(self) -> float:
        return self.stalled.on_queue_fraction - self.idle.on_queue_fraction

    @property
    def running(self) -> float:
        """Share of the stalled window that the busiest thread really ran."""
        return self.stalled.on_queue_fraction - self.stalled.run_queue_wait_fraction

    def figures(self) -> str:
        """What both windows measured, stalled against idle, with units."""
        idle, stalled = self.idle, self.stalled
        parts = []
        if self.counted:
            parts.append(f"{self.wakes(stalled):,.0f} waits/s against {self.wakes(idle):,.0f} idle")
        if stalled.wasted_per_s is not None:
            parts.append(f"{stalled.wasted_per_s:,.0f} wasted/s")
        parts.append(
            f"{stalled.voluntary_switches_per_s:,.0f} voluntary switches/s against "
            f"{idle.voluntary_switches_per_s:,.0f}"
        )
        parts.append(
            f"on queue {stalled.on_queue_fraction:.0%} of {stalled.seconds:.2f} s against "
            f"{idle.on_queue_fraction:.0%}"
        )
        if stalled.run_queue_wait_fraction >= 0.1:
            parts.append(f"{stalled.run_queue_wait_fraction:.0%} waiting for a CPU")
        return ", ".join(parts)


def _too_short(pair: _Pair) -> Verdict | None:
    shortest = min(pair.idle, pair.stalled, key=lambda window: window.seconds)
    if shortest.seconds >= SHORTEST_S:
        return None
    return Verdict("undecided", f"the window '{shortest.name}' of {shortest.seconds:.2f} s is too "
                                f"short; measure for {SHORTEST_S} s or more")


def _moving(pair: _Pair) -> Verdict:
    """Bytes move in the window, slowly: only turns for nothing are held against the loop."""
    if pair.more_wasted is not None:
        if pair.more_wasted >= SPIN_PER_S:
            return Verdict("spins", "between the bytes it goes round its wait without end")
    elif pair.more_on_queue >= BUSY_ON_QUEUE:
        return Verdict("undecided", "it was on a run queue for long, and counts no turns that "
                                    "would tell what for")
    return Verdict("quiet", "it wakes for what moves and sleeps in between")


def _spin_limit(idle_rate: float) -> float:
    return max(SPIN_PER_S, SPIN_OF_IDLE * idle_rate)


def _rate_spin(pair: _Pair, by_design: bool) -> Verdict | None:
    """A loop that wakes far more often than idle, whether or not it fills a core."""
    many_waits = pair.more_wakes >= _spin_limit(pair.wakes(pair.idle))
    many_switches = pair.more_switches >= _spin_limit(pair.idle.voluntary_switches_per_s)
    if by_design:
        # The switches may be those of the polling thread, so only the loop's own count convicts.
        many_switches, many_waits = False, many_waits and pair.counted
    if not many_waits:
        if not many_switches:
            return None
        return Verdict("spins", "its threads wake each other without end")
    if pair.more_wasted is None or pair.more_wasted >= FRUITLESS * pair.more_wakes:
        return Verdict("spins", "it goes round its wait without end")
    if pair.more_switches >= FRUITLESS * pair.more_wakes:
        return Verdict("spins", "it sleeps and wakes without end: its waits are too short")
    return Verdict("undecided", "it went round its wait often but neither slept nor wasted those "
                                "turns: something moved, so the stall was none")


def _by_design(pair: _Pair, by_design: bool) -> Verdict | None:
    busiest = max(pair.idle.on_queue_fraction, pair.stalled.on_queue_fraction)
    if by_design and (busiest >= BUSY_ON_QUEUE or not _calm(pair)):
        return Verdict("intended", "it polls by design, when idle or stalled")
    return None


def _sleepless(pair: _Pair) -> Verdict | None:
    """A loop that goes round for nothing and never sleeps, however often it wakes when idle."""
    stalled = pair.stalled
    if pair.more_wasted is None or not pair.counted:
        return None
    fruitless = pair.more_wasted >= max(SPIN_PER_S, FRUITLESS * pair.wakes(stalled))
    sleeps = not _sleeps_less(pair)
    if not fruitless or sleeps or stalled.on_queue_fraction < FULL_ON_QUEUE:
        return None
    return Verdict("spins", "nearly every turn of its wait is for nothing, and it never sleeps")


def _noisy(pair: _Pair) -> Verdict | None:
    if _calm(pair) and pair.idle.on_queue_fraction < NOISY_ON_QUEUE:
        return None
    return Verdict("undecided", "the idle window was busy itself, so it is no baseline; measure it "
                                "again with no client and quiet neighbours")


def _calm(pair: _Pair) -> bool:
    busiest = max(pair.wakes(pair.idle), pair.idle.voluntary_switches_per_s)
    return busiest < NOISY_WAKES_PER_S


def _queue_spin(pair: _Pair) -> Verdict | None:
    """A loop that fills its thread's time without more wakes that could be counted.

    So does a spin of waits that never block in a server which counts nothing, and a turn that never
    gets back to its wait. A mere sleeper on a crowded machine also stands in the run queue, but
    hardly runs, and still sleeps as often as when idle.
    """
    if pair.more_on_queue < BUSY_ON_QUEUE:
        return None
    stalled = pair.stalled
    if stalled.on_queue_fraction >= FULL_ON_QUEUE and (
        _sleeps_less(pair) or pair.running >= BUSY_ON_QUEUE
    ):
        return Verdict("spins", "it never leaves the run queue, though nothing can move")
    crowded = stalled.run_queue_wait_fraction >= 0.5 * stalled.on_queue_fraction
    why = "neighbours held the CPU" if crowded else "it worked for part of the time"
    return Verdict("undecided", f"it was on a run queue for longer than idle without waking more "
                                f"often: {why}; measure again with quiet neighbours")


def _sleeps_less(pair: _Pair) -> bool:
    """Whether a loop goes to sleep at most half as often as when idle."""
    return pair.stalled.voluntary_switches_per_s <= max(
        TICKLESS_PER_S, 0.5 * pair.idle.voluntary_switches_per_s)


def _between(pair: _Pair) -> Verdict | None:
    for more, idle_rate in (
        (pair.more_wakes, pair.wakes(pair.idle)),
        (pair.more_switches, pair.idle.voluntary_switches_per_s),
    ):
        if more > max(SLACK_PER_S, SLACK_OF_IDLE * idle_rate):
            return Verdict("undecided", "it wakes more often than idle, but too seldom for a spin; "
                                        "measure a longer window")
    return None


def _sleeper(pair: _Pair, stop: bool | None, write_timeout: bool | None) -> Verdict:
    """Quiet or parked: the loop sleeps, and what tells them apart is whether it can be reached."""
    broken = [name for name, honoured in (("stop", stop), ("write timeout", write_timeout))
              if honoured is False]
    ignored = " and ".join(broken)
    idle_rate = pair.wakes(pair.idle)
    periodic = idle_rate >= TICKLESS_PER_S
    asleep_below = ASLEEP_OF_IDLE * idle_rate if periodic else TICKLESS_PER_S
    asleep = pair.wakes(pair.stalled) <= asleep_below
    seconds = min(pair.idle.seconds, pair.stalled.seconds)
    if periodic and seconds * idle_rate < PERIODS:
        return Verdict("undecided", f"{seconds:.2f} s hold fewer than {PERIODS} of its idle "
                                    f"wake-ups; measure for {PERIODS / idle_rate:.1f} s or more")
    if asleep and broken:
        return Verdict("parked", f"it sleeps on, whatever is due: {ignored} not honoured")
    if broken:
        return Verdict("undecided", f"it wakes as when idle, yet {ignored} not honoured")
    if asleep and stop is None and write_timeout is None:
        return Verdict("undecided", "it sleeps, but it may be parked: whether it honours stop and "
                                    "write timeout was not tested")
    if asleep:
        return Verdict("quiet", "it sleeps and can still be reached")
    return Verdict("quiet", "it wakes no more often than idle")


@dataclass(frozen=True)
class Budget:
    """The most that a window may cost; a limit of None is not asked for.

    ``waits_over_idle`` counts turns of the wait per second above the idle window, or voluntary
    switches where the loop exports no waits; a spin that never sleeps makes none of those, so a
    budget for a foreign server needs ``on_queue`` as well.
    """

    waits_over_idle: float | None = None
    on_queue: float | None = None
    cpu_ms_per_s: float | None = None

    def broken_by(self, idle: Window, window: Window) -> list[str]:
        """One line for each limit that ``window`` exceeds; an empty list is within budget."""
        pair = _Pair(idle, window)
        what = "waits/s" if pair.counted else "voluntary switches/s"
        checks = (
            (f"{what} over idle", pair.more_wakes, self.waits_over_idle),
            ("of the time on queue", window.on_queue_fraction, self.on_queue),
            ("CPU ms/s", window.cpu_ms_per_s, self.cpu_ms_per_s),
        )
        return [
            f"{value:,.2f} {figure}, of {allowed:,.2f} allowed"
            for figure, value, allowed in checks
            if allowed is not None and value > allowed
        ]

    def to_dict(self) -> dict[str, float | None]:
        """The limits for JSON, under their field names."""
        return asdict(self)

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.measure import Window
from lab.verdict import STATES, Budget, judge


def window(
    waits: float | None = 40,
    on_queue: float = 0.005,
    switches: float | None = None,
    wasted: float | None = 0,
    seconds: float = 1,
    queued: float = 0,
    cpu: float = 5,
) -> Window:
    """A window of one second that wakes as an idle loop of 40 waits a second does."""
    if waits is None:
        wasted = None
    if switches is None:
        switches = waits or 0
    return Window("window", seconds, waits, wasted, waits, cpu, cpu, on_queue, queued, switches, 0)


IDLE = window()
TICKLESS = window(waits=0, on_queue=0)
FOREIGN = window(waits=None, switches=40)
YES = {"honours_stop": True, "honours_write_timeout": True}
NOT_TESTED: dict[str, Any] = {"honours_stop": None, "honours_write_timeout": None}
NO_STOP = {"honours_stop": False, "honours_write_timeout": True}
NO_DEADLINE = {"honours_stop": True, "honours_write_timeout": False}
POLLS = YES | {"polls_by_design": True}
SPIN = window(waits=120_000, wasted=119_990, on_queue=0.99, switches=2)

EXAMPLES = {
    "full spin": (IDLE, SPIN, YES, "spins"),
    "full spin that was tested for nothing": (IDLE, SPIN, NOT_TESTED, "spins"),
    "full spin that switches each time": (IDLE, replace(SPIN, voluntary_switches_per_s=9e4), YES,
                                          "spins"),
    "full spin of a tickless loop": (TICKLESS, SPIN, YES, "spins"),
    "spin with nine tenths of the core gone": (
        IDLE, window(8_000, 1.0, switches=1, wasted=8_000, queued=0.9), YES, "spins"),
    "slow spin over a long list": (IDLE, window(600, 0.99, switches=0, wasted=600), YES, "spins"),
    "paced spin": (IDLE, window(14_000, 0.33, wasted=0), YES, "spins"),
    "paced spin of a foreign server": (FOREIGN, window(None, 0.33, switches=14_000), NOT_TESTED,
                                       "spins"),
    "threads that wake each other": (IDLE, window(40, 0.4, switches=30_000), YES, "spins"),
    "handler that never returns to its wait": (IDLE, window(0, 1.0), YES, "spins"),
    "foreign server, full spin": (FOREIGN, window(None, 0.99, switches=0), NOT_TESTED, "spins"),
    "foreign server, full spin, crowded": (
        FOREIGN, window(None, 0.99, switches=0, queued=0.9), NOT_TESTED, "spins"),
    "foreign tickless server, full spin": (
        window(None, 0, switches=0), window(None, 0.97, switches=0), NOT_TESTED, "spins"),
    "full spin of a loop that idles at 10,000 a second": (
        window(10_000, 0.3, wasted=10_000), window(40_703, 1.0, switches=0, wasted=40_703), YES,
        "spins"),
    "idles at 10,000 a second, and still sleeps": (
        window(10_000, 0.3, wasted=10_000), window(10_000, 0.95, wasted=10_000, queued=0.7), YES,
        "undecided"),
    "idles at 40 a second": (IDLE, IDLE, YES, "quiet"),
    "idles at 40 a second, not tested": (IDLE, IDLE, NOT_TESTED, "quiet"),
    "idles at 1,000 a second": (window(1000, 0.05), window(1010, 0.05), YES, "quiet"),
    "a few stray wakes": (IDLE, window(45), YES, "quiet"),
    "foreign server, as when idle": (FOREIGN, FOREIGN, NOT_TESTED, "quiet"),
    "disturbed sleeper": (IDLE, window(38, 0.2, queued=0.19), YES, "quiet"),
    "tickless": (TICKLESS, TICKLESS, YES, "quiet"),
    "periodic when idle, tickless while stalled": (IDLE, window(0, 0), YES, "quiet"),
    "parked, no stop": (IDLE, window(0, 0), NO_STOP, "parked"),
    "parked, no write timeout": (IDLE, window(0, 0), NO_DEADLINE, "parked"),
    "parked but for one poke": (IDLE, window(1, 0), NO_STOP, "parked"),
    "tickless and deaf": (TICKLESS, TICKLESS, NO_STOP, "parked"),
    "worker held by a lock": (IDLE, window(0, 0, switches=1), NO_STOP, "parked"),
    "foreign server, parked": (FOREIGN, window(None, 0, switches=0), NO_STOP, "parked"),
    "asleep, not tested": (IDLE, window(0, 0), NOT_TESTED, "undecided"),
    "tickless, not tested": (TICKLESS, TICKLESS, NOT_TESTED, "undecided"),
    "wakes as when idle but deaf": (IDLE, IDLE, NO_STOP, "undecided"),
    "idle window itself spins": (SPIN, SPIN, YES, "undecided"),
    "idle window itself busy": (window(40, 0.6), window(40, 0.6), YES, "undecided"),
    "window too short": (IDLE, replace(SPIN, seconds=0.1), YES, "undecided"),
    "fewer than ten idle periods": (window(5), window(0, 0), NO_STOP, "undecided"),
    "sleeper on a crowded machine": (IDLE, window(35, 0.93, queued=0.92), YES, "undecided"),
    "works half of the time": (IDLE, window(40, 0.5), YES, "undecided"),
    "a little more than idle": (IDLE, window(150, 0.01), YES, "undecided"),
    "it moved": (IDLE, window(50_000, 0.95, switches=10, wasted=100), YES, "undecided"),
    "SQPOLL thread": (window(40, 1.0), window(40, 1.0), POLLS, "intended"),
    "SQPOLL thread that wakes for the stall": (IDLE, window(40, 1.0), POLLS, "intended"),
    "polling reactor": (SPIN, SPIN, POLLS, "intended"),
    "polling foreign server": (FOREIGN, window(None, 1.0, switches=0), POLLS, "intended"),
    "SQPOLL asleep": (IDLE, IDLE, POLLS, "quiet"),
    "SQPOLL, and the worker spins beside it": (window(40, 1.0), SPIN, POLLS, "spins"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    idle, stalled, tested, state = EXAMPLES[name]
    verdict = judge(idle, stalled, **tested)
    assert verdict.state == state, verdict.reason
    assert "\n" not in verdict.reason
    assert f"{stalled.on_queue_fraction:.0%}" in verdict.reason


@pytest.mark.parametrize(
    ("moving", "state"),
    [
        (window(300, 0.02, wasted=20), "quiet"),
        (window(370_000, 0.19, wasted=369_000), "spins"),
        (window(None, 0.02, switches=130), "quiet"),
        (window(None, 0.9, switches=5), "undecided"),
        (window(300, 0.02, wasted=0, seconds=0.1), "undecided"),
    ],
)
def test_where_bytes_move_only_turns_for_nothing_count(moving: Window, state: str) -> None:
    idle = replace(TICKLESS, waits_per_s=moving.waits_per_s and 0,
                   wasted_per_s=None if moving.waits_per_s is None else 0)
    verdict = judge(idle, moving, **NOT_TESTED, moves=True)
    assert verdict.state == state, verdict.reason


def test_reason_carries_the_figures() -> None:
    reason = judge(IDLE, SPIN, **YES).reason
    for figure in ("120,000 waits/s against 40 idle", "119,990 wasted/s", "2 voluntary switches/s",
                   "on queue 99% of 1.00 s against 0%"):
        assert figure in reason
    assert "waits/s" not in judge(FOREIGN, FOREIGN, **YES).reason


rates = st.one_of(st.just(0.0), st.floats(0, 2e5))
fractions = st.floats(0, 1)


@st.composite
def windows(draw: st.DrawFn, seconds: st.SearchStrategy[float] | None = None) -> Window:
    on_queue = draw(fractions)
    return window(
        draw(st.one_of(st.none(), rates)), on_queue, draw(rates), draw(st.one_of(st.none(), rates)),
        draw(seconds or st.floats(0.01, 10)), draw(fractions) * on_queue, draw(st.floats(0, 1000)),
    )


tested = st.fixed_dictionaries(
    {
        "honours_stop": st.sampled_from([True, False, None]),
        "honours_write_timeout": st.sampled_from([True, False, None]),
        "polls_by_design": st.booleans(),
    }
)


@given(windows(), windows(), tested)
def test_always_one_of_the_states_in_one_line(
    idle: Window, stalled: Window, facts: dict[str, Any]
) -> None:
    verdict = judge(idle, stalled, **facts)
    assert verdict.state in STATES
    assert "\n" not in verdict.reason


@given(windows(), windows(), tested, st.floats(0, 1000))
def test_cpu_time_never_matters(
    idle: Window, stalled: Window, facts: dict[str, Any], cpu: float
) -> None:
    other = replace(stalled, cpu_ms_per_s=cpu, process_cpu_ms_per_s=cpu)
    assert judge(idle, other, **facts) == judge(idle, stalled, **facts)


@given(windows(), windows(), tested)
def test_a_loop_that_ignores_stop_is_never_quiet(
    idle: Window, stalled: Window, facts: dict[str, Any]
) -> None:
    assert judge(idle, stalled, **facts | {"honours_stop": False}).state != "quiet"


@given(windows(), windows(), tested)
def test_intended_and_parked_need_their_cause(
    idle: Window, stalled: Window, facts: dict[str, Any]
) -> None:
    state = judge(idle, stalled, **facts).state
    if state == "intended":
        assert facts["polls_by_design"]
    if state == "parked":
        assert False in (facts["honours_stop"], facts["honours_write_timeout"])


@given(st.floats(0, 100), st.floats(10_000, 1e6), st.floats(0, 0.99), st.floats(0.2, 10))
def test_a_spin_is_seen_at_any_machine_load(
    idle_rate: float, rate: float, neighbours: float, seconds: float
) -> None:
    # The neighbours take CPU from the loop: fewer turns, but always runnable.
    turns = rate * (1 - neighbours) + 5 * idle_rate + 500
    stalled = window(turns, 1.0, switches=0, wasted=turns, seconds=seconds, queued=neighbours)
    assert judge(window(idle_rate), stalled, **YES).state == "spins"
    foreign = window(None, 1.0, switches=0, seconds=seconds, queued=neighbours)
    assert judge(window(None, switches=idle_rate), foreign, **YES).state == "spins"


@given(st.floats(20, 1000), st.floats(0, 0.29), st.floats(1, 10))
def test_the_idle_window_beside_itself_is_quiet(
    rate: float, on_queue: float, seconds: float
) -> None:
    idle = window(rate, on_queue, seconds=seconds)
    assert judge(idle, idle, **YES).state == "quiet"


def test_budget_names_each_limit_that_is_broken() -> None:
    budget = Budget(waits_over_idle=5, on_queue=0.05, cpu_ms_per_s=10)
    assert budget.broken_by(IDLE, replace(IDLE, waits_per_s=45)) == []
    broken = budget.broken_by(IDLE, replace(SPIN, cpu_ms_per_s=374))
    assert broken == [
        "119,960.00 waits/s over idle, of 5.00 allowed",
        "0.99 of the time on queue, of 0.05 allowed",
        "374.00 CPU ms/s, of 10.00 allowed",
    ]
    assert Budget().broken_by(IDLE, SPIN) == []
    assert budget.to_dict() == {"waits_over_idle": 5, "on_queue": 0.05, "cpu_ms_per_s": 10}


def test_budget_of_a_loop_that_counts_nothing_uses_its_switches() -> None:
    (line,) = Budget(waits_over_idle=5).broken_by(FOREIGN, replace(
        FOREIGN, voluntary_switches_per_s=60))
    assert line.startswith("20.00 voluntary switches/s")

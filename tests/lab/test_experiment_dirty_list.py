"""The case dirty-list on a real ring: states, ratios and delivered bytes, never CPU seconds.

The same promises are held against every policy; ``shipped`` must break them, or they test nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine import LoopView, Policy
from engine.binding import native
from lab import dirty_list
from lab.experiment import Interrupted, Outcome, load
from lab.progress import Progress
from lab.runs import RunStore, read_run

SHORT = {"seconds": 0.5, "repetitions": 1}
STALLS = ("sync", "async", "async+pipelined", "async+poked")


@pytest.fixture(scope="module", autouse=True)
def _ring_allowed() -> None:
    ffi, lib = native()
    if lib.rl_probe(ffi.new("rl_ring_info *")) < 0:
        pytest.skip("io_uring is not allowed here")


def measured(tmp_path: Path, arms: tuple[str, ...], policy: str, **given: object) -> Outcome:
    return load("dirty-list").run(
        {**SHORT, **given}, arms=arms, policies=[policy], store=RunStore(tmp_path)
    )


def stalled(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(row["windows"].get("stall") or row["windows"]["held"])


def idle_waits(row: Mapping[str, Any]) -> float:
    return float(row["windows"]["idle"]["waits_per_s"])


def check_healthy(row: Mapping[str, Any], most_over_idle: float) -> None:
    """Quiet and complete: the promises that a policy with a budget makes."""
    assert row["send_in_flight"] is True, row["reason"]
    assert row["state"] == "quiet", row["reason"]
    assert stalled(row)["waits_per_s"] - idle_waits(row) <= most_over_idle, row["reason"]
    assert row["delivered"]["bytes"] == row["delivered"]["expected"]
    assert row["delivered"]["in_order"], row["delivered"]["fault"]
    assert row["honours_stop"] is True
    assert row["honours_write_timeout"] is not False
    assert row["others_wait_ms"] is not None
    assert row["others_wait_ms"] < dirty_list.LATE_MS


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "most_over_idle"), [("fixed", 5.0), ("tickless", 2.0)])
def test_every_arm_is_quiet_and_complete_when_fixed(
    tmp_path: Path, policy: str, most_over_idle: float
) -> None:
    outcome = measured(tmp_path, (), policy)
    assert [row["arm"] for row in outcome.arms] == [arm.name for arm in dirty_list.ARMS]
    for row in outcome.arms:
        check_healthy(row, most_over_idle)
        assert row["within_budget"] is True
        if policy == "tickless":
            assert stalled(row)["waits_per_s"] < 2
    assert outcome.broken == []


@pytest.mark.parametrize("arm", [*STALLS, "held-completion"])
def test_the_same_promises_are_broken_as_shipped(tmp_path: Path, arm: str) -> None:
    row = measured(tmp_path, (arm,), "shipped").row(arm, "shipped")
    with pytest.raises(AssertionError):
        check_healthy(row, 5.0)


def test_shipped_spins_when_pipelined_and_when_poked(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("async+pipelined", "async+poked"), "shipped")
    for row in outcome.arms:
        assert row["state"] == "spins", row["reason"]
        assert stalled(row)["waits_per_s"] > 10_000
        assert stalled(row)["on_queue_fraction"] > 0.9
        assert stalled(row)["wasted_per_s"] > 0.9 * stalled(row)["waits_per_s"]
        assert max(row["why_while_stalled"], key=row["why_while_stalled"].__getitem__) == "list"
        assert row["delivered"]["bytes"] == row["delivered"]["expected"]


def test_shipped_parks_when_single_and_the_open_question_is_answered(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("sync", "async"), "shipped")
    for row in outcome.arms:
        assert row["state"] == "parked", row["reason"]
        assert row["wait_mode_while_stalled"] == "untimed"
        assert (row["honours_stop"], row["honours_write_timeout"]) == (False, False)
        assert stalled(row)["waits_per_s"] == 0
        assert row["connection"]["sending"]
    assert outcome.row("async", "shipped")["connection"]["listed"]
    found = outcome.data["open_question"]
    assert found["send_in_flight"] is True
    assert 0 < found["outq"] < found["response_size"]
    assert "sleeps in a wait without a timeout" in found["answer"]


@pytest.mark.slow
def test_each_fix_alone_leaves_a_fault(tmp_path: Path) -> None:
    membership = measured(tmp_path, ("async", "async+pipelined"), "membership")
    assert [row["state"] for row in membership.arms] == ["parked", "quiet"]
    timed = measured(tmp_path, ("async", "async+pipelined"), "timed-wait")
    assert [row["state"] for row in timed.arms] == ["spins", "spins"]


@pytest.mark.slow
def test_a_held_completion_parks_spins_or_waits_its_turn(tmp_path: Path) -> None:
    states = {}
    for policy in ("shipped", "held-listed", "held-unlisted"):
        row = measured(tmp_path, ("held-completion",), policy).arms[0]
        states[policy] = row["state"]
        if policy == "shipped":
            assert row["others_wait_ms"] > 500, "others wait for the handler"
            assert "another connection waited" in row["reason"]
        else:
            assert row["others_wait_ms"] < dirty_list.LATE_MS
        assert row["delivered"]["bytes"] == row["delivered"]["expected"]
    assert states == {"shipped": "parked", "held-listed": "spins", "held-unlisted": "quiet"}


@pytest.mark.slow
def test_an_arm_without_a_send_says_so(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("async",), "shipped", response_size=1000)
    row = outcome.row("async", "shipped")
    assert row["send_in_flight"] is False
    assert "no SEND was in flight" in row["reason"]
    assert "The socket took the whole response" in outcome.data["open_question"]["answer"]


def test_a_small_ring_still_delivers(tmp_path: Path) -> None:
    row = measured(tmp_path, ("async+pipelined",), "fixed", entries=2, depth=8).arms[0]
    check_healthy(row, 5.0)


def test_the_run_holds_what_was_promised(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("async",), "fixed")
    assert outcome.path is not None
    run = read_run(outcome.path)
    assert run.data["experiment"] == "dirty-list"
    assert run.data["interrupted"] is None
    row = run.arms[0]
    assert row["decisions"]["membership"] == "leave"
    assert set(row["windows"]) == {"idle", "stall", "drain"}
    for window in row["windows"].values():
        assert {"seconds", "waits_per_s", "wasted_per_s", "cpu_ms_per_s", "process_cpu_ms_per_s",
                "on_queue_fraction", "voluntary_switches_per_s"} <= set(window)
    assert run.machine["engine"]["setup"] in {"none", "coop", "defer"}
    samples = run.df_samples()
    assert {"arm", "policy", "repetition", "window", "t_s", "waits", "why_list"} <= set(samples)
    assert {"", "idle", "stall"} <= set(samples["window"])
    assert samples["t_s"].is_monotonic_increasing


class Stopper(Progress):
    """Ctrl-C after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def step(self, done: str, count: int = 1) -> None:
        self.left -= count
        if self.left == 0 and count:
            raise KeyboardInterrupt


def test_an_interruption_keeps_what_was_finished(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="after 1 of 2 repetitions; they are kept") as caught:
        load("dirty-list").run(
            SHORT, arms=["sync", "async"], policies=["tickless"], store=RunStore(tmp_path),
            progress=Stopper(1),
        )
    kept = caught.value.outcome
    assert kept is not None
    assert kept.path is not None
    run = read_run(kept.path)
    assert [row["arm"] for row in run.arms] == ["sync"]
    assert "interrupted by hand after 1 of 2" in run.data["interrupted"]


def test_repetitions_are_interleaved() -> None:
    experiment = load("dirty-list")
    values = experiment.parameters.defaults()
    order = [
        (each.repetition, each.arm.name)
        for each in experiment.settings(values, ["sync", "async"], ["fixed"], 2)
    ]
    assert order == [(0, "sync"), (0, "async"), (1, "sync"), (1, "async")]


def test_a_rule_of_ones_own_is_a_policy_like_any_other(tmp_path: Path) -> None:
    class Mine(Policy):
        base = "shipped"

        def timeout(self, loop: LoopView) -> bool:
            return loop.movable > 0

    outcome = load("dirty-list").run(
        {"seconds": 0.4}, arms=["async+pipelined"], policies=[Mine], store=RunStore(tmp_path)
    )
    row = outcome.row("async+pipelined", "Mine")
    assert row["state"] == "quiet", row["reason"]
    assert row["decisions"]["timeout"] == "own"

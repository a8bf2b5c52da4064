"""The running of experiments, with one that measures nothing: order, merging, what is kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import MachineError, UsageError
from lab import experiment as experiments
from lab import splice_findings
from lab.clients import ClientError
from lab.experiment import Arm, Experiment, NotStored, Repetition, Setting
from lab.measure import Window
from lab.parameters import Parameter, Parameters
from lab.progress import LineProgress, NotebookProgress, Progress, shown
from lab.runs import RunStore, read_run
from lab.verdict import Budget

QUIET, SPIN = 40.0, 150_000.0


def window(name: str, waits: float, seconds: float = 1.0) -> Window:
    busy = waits > 1000
    return Window(name, seconds, waits, waits if busy else 0.0, waits, 1.0, 1.0,
                  1.0 if busy else 0.01, 0.0, 0.0 if busy else waits, 0.0)


def measure_nothing(setting: Setting) -> Repetition:
    """``fixed`` is quiet, anything else spins; the second repetition of ``odd`` loses a byte."""
    waits = QUIET if setting.policy == "fixed" else SPIN
    lost = setting.arm.name == "odd" and setting.repetition == 1
    if setting.arm.name == "broken" and setting.repetition == 1:
        raise ClientError("the client fell over")
    samples = np.zeros(3, dtype=[("arm", "U8"), ("t_s", "f8")])
    samples["arm"] = setting.arm.name
    return Repetition(
        setting,
        {"idle": window("idle", QUIET), "stall": window("stall", waits + setting.repetition)},
        {"bytes": 99 if lost else 100, "expected": 100, "in_order": True,
         "fault": "one is missing" if lost else None},
        {"membership": "leave"},
        honours_stop=True,
        honours_write_timeout=None,
        send_in_flight=True,
        samples=samples,
    )


def no_evidence(group: Sequence[Repetition]) -> dict[str, Any]:
    return {"remarks": [f"seen {len(group)} times"]}


def conclude(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"finding": {"text": f"{len(rows)} rows"}, "nothing": None}


NOTHING = Experiment(
    name="nothing", title="Nothing", source="nowhere",
    parameters=Parameters([Parameter("repetitions", int, 2, low=1, high=9)]),
    arms=(Arm("even", "e", ("shipped", "fixed")), Arm("odd", "o", ("fixed",)),
          Arm("broken", "b", ("shipped",))),
    budgets={"fixed": Budget(waits_over_idle=5.0)},
    repetition=measure_nothing, evidence=no_evidence, conclude=conclude,
)


def test_repetitions_are_merged_judged_and_kept(tmp_path: Path) -> None:
    outcome = NOTHING.run(arms=["even", "odd"], store=RunStore(tmp_path))
    assert [(row["arm"], row["policy"], row["state"]) for row in outcome.arms] == [
        ("even", "shipped", "spins"), ("even", "fixed", "quiet"), ("odd", "fixed", "quiet"),
    ]
    row = outcome.row("even", "fixed")
    assert row["windows"]["stall"]["waits_per_s"] == QUIET + 0.5
    assert row["windows"]["stall"]["repetitions"] == row["repetitions"] == len(row["each"]) == 2
    assert row["delivered"] == {"bytes": 200, "expected": 200, "in_order": True, "fault": None}
    assert (row["honours_stop"], row["honours_write_timeout"]) == (True, None)
    assert row["reason"].endswith("; seen 2 times")
    assert outcome.row("even", "shipped")["within_budget"] is None
    assert outcome.remarks == ["3 rows"]
    assert outcome.path is not None
    stored = read_run(outcome.path)
    assert stored.data["parameters"] == {"repetitions": 2}
    assert len(stored.df_samples()) == 3 * 6


def test_quiet_without_every_byte_breaks_the_promise(tmp_path: Path) -> None:
    outcome = NOTHING.run(arms=["odd"], store=RunStore(tmp_path))
    assert outcome.arms[0]["within_budget"] is False
    assert outcome.broken == ["odd under fixed: one is missing"]


def test_what_was_not_shown_is_told_for_every_policy(tmp_path: Path) -> None:
    """Also where there is no budget, as under ``shipped``."""
    def troubled(group: Sequence[Repetition]) -> dict[str, Any]:
        odd = group[0].setting.arm.name == "odd"
        return {"troubles": ["not reached within 3 s: it waits"] * 2 if odd else []}

    outcome = replace(NOTHING, evidence=troubled).run(
        arms=["even", "odd"], store=RunStore(tmp_path))
    assert outcome.not_shown == ["odd under fixed: not reached within 3 s: it waits"]
    concluded = replace(NOTHING, conclude=lambda rows: {"a": {"text": "t", "not_shown": ["why"]},
                                                        "b": None})
    assert concluded.run(arms=["even"], store=RunStore(tmp_path)).not_shown == ["why"]
    short = replace(
        NOTHING, evidence=lambda group: {}, repetition=lambda setting: replace(
            measure_nothing(setting), windows={"idle": window("idle", QUIET, 0.1),
                                               "stall": window("stall", QUIET, 0.1)}))
    (line,) = short.run(arms=["even"], policies=["shipped"], store=RunStore(tmp_path)).not_shown
    assert line.startswith("even under shipped: undecided: ")


def test_an_error_keeps_what_was_finished(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    with pytest.raises(ClientError, match="fell over"):
        NOTHING.run(arms=["even", "broken"], policies=["shipped"], store=store)
    kept = store.latest("nothing")
    assert [row["repetitions"] for row in kept.arms] == [2, 1]
    assert kept.data["interrupted"] == "ended by an error: the client fell over"


def test_a_fault_of_our_own_keeps_it_too_and_says_where(tmp_path: Path) -> None:
    def fails(values: Mapping[str, Any], context: Any) -> dict[str, Any]:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError) as caught:
        replace(NOTHING, further=fails).run(arms=["odd"], store=RunStore(tmp_path))
    kept = RunStore(tmp_path).latest("nothing")
    assert kept.data["interrupted"] == "ended by an error: a bug"
    assert str(kept.path) in caught.value.__notes__[0]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no file any more."""
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lab.runs._write_durably", refuse)


@pytest.mark.usefixtures("full")
def test_an_error_and_a_store_that_refuses_are_both_told(tmp_path: Path) -> None:
    with pytest.raises(NotStored) as caught:
        NOTHING.run(arms=["even", "broken"], policies=["shipped"], store=RunStore(tmp_path))
    assert caught.value.outcome.arms[0]["arm"] == "even"
    assert caught.value.__notes__ == ["the run was ended by an error: the client fell over"]


@pytest.mark.usefixtures("full")
def test_a_store_that_refuses_hands_the_result_back(tmp_path: Path) -> None:
    with pytest.raises(NotStored, match="cannot store the run") as caught:
        NOTHING.run(arms=["odd"], store=RunStore(tmp_path))
    assert caught.value.outcome.arms[0]["arm"] == "odd"
    assert caught.value.outcome.path is None


def test_a_store_that_cannot_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    measured: list[Setting] = []

    def watch(setting: Setting) -> Repetition:
        measured.append(setting)
        return measure_nothing(setting)

    watched = replace(NOTHING, repetition=watch)
    with pytest.raises(MachineError, match="Not a directory; give a folder that can"):
        watched.run(arms=["odd"], store=RunStore(tmp_path / "file" / "runs"))
    assert not measured


def test_a_result_that_the_store_does_not_take_is_handed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: a figure of a kind that no run may have, or a fault of its own."""
    odd = replace(NOTHING, evidence=lambda group: {"windows": {"stall": {"waits_per_s": "many"}}})
    with pytest.raises(NotStored, match="'waits_per_s' of arm 'odd' is no number") as caught:
        odd.run(arms=["odd"], store=RunStore(tmp_path))
    assert caught.value.outcome.arms[0]["arm"] == "odd"
    monkeypatch.setattr("lab.runs._parquet", lambda samples: 1 / 0)
    with pytest.raises(NotStored, match="division") as caught:
        NOTHING.run(arms=["odd"], store=RunStore(tmp_path))
    assert caught.value.outcome.arms[0]["arm"] == "odd"


def test_who_names_an_arm_and_a_policy_has_that_pair() -> None:
    """Also where only another arm lists the policy; without an arm named, those that list it."""
    def pairs(arms: list[str], policies: list[str]) -> list[tuple[str, str]]:
        return [(one.arm.name, one.policy) for one in NOTHING.settings({}, arms, policies)]

    assert pairs(["odd"], ["shipped"]) == [("odd", "shipped")]
    assert pairs(["odd", "even"], ["shipped"]) == [("even", "shipped")]
    assert pairs([], ["shipped"]) == [("even", "shipped"), ("broken", "shipped")]
    assert pairs([], ["tickless"]) == [(name, "tickless") for name in ("even", "odd", "broken")]


def test_names_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown arm 'evne'; choose from: even"):
        NOTHING.run(arms=["evne"], store=RunStore(tmp_path))
    with pytest.raises(UsageError, match="unknown experiment 'x'"):
        experiments.load("x")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_of_no_arms_list_is_taken_for_all() -> None:
    mixed = "shipped+membership=leave+idle=tickless+send-wait=timed+handback=wake"
    chosen = NOTHING.settings({}, ["even", "odd"], [mixed])
    assert len({each.policy for each in chosen}) == 1
    assert [each.arm.name for each in chosen] == ["even", "odd"]


def test_progress_in_a_log_is_seldom_and_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("lab.progress.time.monotonic", lambda: now[0])
    with shown(LineProgress(), 10, "work") as progress:
        for number in range(10):
            now[0] += 5.0
            progress.step(f"part {number}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "work: 2 of 10, 40 s left (part 1)"
    assert len(err.splitlines()) == 5


class Logged(LineProgress):
    """Keeps what a log would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def _show(self, line: str) -> None:
        self.lines.append(line)


class Noted(Logged, NotebookProgress):
    """Keeps what a cell would show."""

    def _show(self, line: str) -> None:
        super()._show(line)
        self._handle = self


@pytest.mark.parametrize(("kind", "least"), [(Noted, 4), (Logged, 3)])
def test_what_is_measured_is_said_as_it_begins(
    monkeypatch: pytest.MonkeyPatch, kind: type[Logged], least: int
) -> None:
    now = [0.0]
    monkeypatch.setattr("lab.progress.time.monotonic", lambda: now[0])
    heard = kind()
    with shown(heard, 2, "work") as progress:
        progress.step("the first", 0)
        assert heard.lines == ["work: 0 of 2 (the first)"]
        now[0] += 30.0
        progress.step("the first")
        progress.step("the second", 0)
        assert heard.lines[1] == "work: 1 of 2, 30 s left (the first)"
        if kind is Noted:
            assert heard.lines[2] == "work: 1 of 2, 30 s left (the second)"
        now[0] += 30.0
        progress.step("the second")
    assert len(heard.lines) >= least


def test_many_quick_steps_are_not_each_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lab.progress.time.monotonic", lambda: now[0])
    for heard, most in ((Noted(), 5), (Logged(), 1)):
        with shown(heard, 100, "work") as progress:
            for number in range(100):
                progress.step(f"{number}", 0)
                now[0] += 0.015
                progress.step(f"{number}")
        assert len(heard.lines) <= most


def test_without_one_a_run_takes_the_progress_that_fits_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Logged()
    monkeypatch.setattr(experiments, "choose", lambda: heard)
    NOTHING.run(arms=["odd"], store=RunStore(tmp_path))
    assert heard.lines == ["nothing: 0 of 2 (odd under fixed)"]
    monkeypatch.undo()
    NOTHING.run(arms=["odd"], store=RunStore(tmp_path))
    assert capsys.readouterr() == ("", ""), "nobody looks at what is piped"


def test_a_fix_that_did_not_come_to_its_state_is_not_shown() -> None:
    row = {"arm": "d", "policy": "after", "reached": False, "in_state": False}
    found = splice_findings.reached([row])
    assert found is not None
    assert [line.partition(":")[0] for line in found["not_shown"]] == ["d under after"]
    there = splice_findings.reached([row | {"reached": True, "in_state": True}])
    assert there is not None
    assert there["not_shown"] == []


def test_silence_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(Progress(), 1, "work") as progress:
        progress.step("it")
    assert capsys.readouterr() == ("", "")

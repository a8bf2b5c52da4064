"""An experiment: what is varied, what is measured, what it may cost; and the running of it.

An :class:`Experiment` is plain data. It measures one arm under one policy once, through its
``repetition`` function, and leaves the rest to :meth:`Experiment.run`: the order (arms interleaved,
so that a machine that slows down does not slow one arm alone), the merging of repetitions, the
verdicts, the budgets, the run folder, and that an interruption loses nothing that was finished.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import MachineError, UsageError, unknown
from lab import console, dark, machine
from lab.measure import Window, merge
from lab.parameters import Parameters, Value
from lab.progress import Progress, choose, shown
from lab.runs import SCHEMA, RunStore
from lab.verdict import Budget, Verdict, judge

if TYPE_CHECKING:
    import numpy as np

    from engine.decisions import ResolvedPolicy

IDLE = "idle"
_NO_SEND = "no SEND was in flight, so this arm did not show what it is for"

# Where the experiments live. Imported when asked for: a listing must not load the engine.
_HOMES = {
    "dirty-list": "lab.dirty_list",
    "splice": "lab.splice",
    "expired-wait": "lab.expired_wait",
}


@dataclass(frozen=True)
class Arm:
    """One variation: its name, a sentence, the policies that matter for it, its stalled window.

    ``setup`` is for the experiment's own use: how this arm brings its stall about. Where ``moves``
    is set the window is no stall: bytes move in it, and the question is what else the loop does.
    """

    name: str
    what: str
    policies: tuple[str, ...]
    window: str = "stall"
    setup: Any = None
    moves: bool = False


@dataclass(frozen=True)
class Setting:
    """What one repetition is to measure."""

    arm: Arm
    policy: str
    repetition: int
    values: Mapping[str, Value]
    rule: Any = None  # a policy of the caller's own, whose name policy is
    context: Any = None  # what the experiment's context gave for the whole run

    @property
    def served(self) -> Any:
        """What an engine is started with."""
        return self.policy if self.rule is None else self.rule


@dataclass(frozen=True)
class Repetition:
    """What it measured.

    ``windows`` by name, with IDLE and the arm's own among them; ``delivered`` as
    ``Player.delivered()``; ``honours_*`` None where it was not tested; ``evidence`` for the
    experiment's own ``conclude``; ``samples`` a structured array or None.
    """

    setting: Setting
    windows: Mapping[str, Window]
    delivered: Mapping[str, Any]
    decisions: Mapping[str, str]
    honours_stop: bool | None = None
    honours_write_timeout: bool | None = None
    send_in_flight: bool | None = None
    polls_by_design: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    samples: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished run: ``data`` as in its ``run.json``, its samples, and the folder it went to."""

    data: dict[str, Any]
    samples: np.ndarray[Any, Any] | None
    path: Path | None

    @property
    def arms(self) -> list[dict[str, Any]]:
        """The results, one an arm and policy."""
        return list(self.data["arms"])

    def row(self, arm: str, policy: str) -> dict[str, Any]:
        """The result of one arm under one policy."""
        for row in self.arms:
            if (row["arm"], row["policy"]) == (arm, policy):
                return row
        have = [f"{row['arm']}/{row['policy']}" for row in self.arms]
        raise unknown("result", f"{arm}/{policy}", have)

    @property
    def remarks(self) -> list[str]:
        """What the experiment concluded, in sentences."""
        concluded = (self.data.get(name) for name in self.data.get("conclusions", ()))
        return [each.get("answer") or each["text"] for each in concluded if each]

    @property
    def broken(self) -> list[str]:
        """One line for each promise that a policy with a budget did not keep."""
        return [
            f"{row['arm']} under {row['policy']}: {line}"
            for row in self.arms
            for line in row["broken"]
        ]

    @property
    def not_shown(self) -> list[str]:
        """One line for each arm that did not come to its state, or whose state stayed undecided.

        Also what a case without arms to judge could not decide.
        """
        return not_shown(self.data)


def not_shown(data: Mapping[str, Any]) -> list[str]:
    """The same of a run's data."""
    return [
        f"{row['arm']} under {row['policy']}: {line}"
        for row in data["arms"]
        for line in row.get("not_shown", ())
    ] + list(data.get("not_shown", ()))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; ``outcome`` holds what was finished (None: nothing was)."""

    def __init__(self, outcome: Outcome | None, told: str) -> None:
        kept = f"they are kept in {outcome.path}" if outcome else "nothing was kept"
        super().__init__(f"interrupted {told}; {kept}")
        self.outcome = outcome


class NotStored(MachineError):
    """A run was measured but could not be written; ``outcome`` still holds it."""

    def __init__(self, reason: str, outcome: Outcome) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass
class Work:
    """How far a run has come: ``done`` of ``total``, and what it is at beyond these, in words."""

    total: int
    what: str
    done: int = 0
    at: str = ""

    @property
    def told(self) -> str:
        """As the end of a sentence."""
        return f"after {self.done} of {self.total} {self.what}" + (self.at and f", {self.at}")


@contextmanager
def keeping(work: Work, finish: Callable[[str], Outcome | None]) -> Iterator[None]:
    """Whatever ends the block before its time: what was finished until then is stored first.

    ``finish`` stores it, with the reason, and returns None where nothing was finished. Ctrl-C
    becomes Interrupted. An error stays what it is, with a note of where the rest is kept.
    """
    try:
        yield
    except KeyboardInterrupt:
        outcome = _finished(finish, f"interrupted by hand {work.told}")
        raise Interrupted(outcome, work.told) from None
    except Exception as error:
        # A fault of this program, too, is no reason to lose what took minutes to measure.
        kept = _finished(finish, f"ended by an error: {error}")
        if kept is not None:
            error.add_note(f"what was finished before is kept in {kept.path}")
        raise


def _finished(finish: Callable[[str], Outcome | None], reason: str) -> Outcome | None:
    try:
        return finish(reason)
    except NotStored as refused:
        refused.add_note(f"the run was {reason}")
        raise


def stored(
    store: RunStore, data: dict[str, Any], samples: np.ndarray[Any, Any] | None = None
) -> Outcome:
    """The outcome of a run that is finished, written; NotStored, with it, if that fails."""
    try:
        path = store.write(data, samples)
    except Exception as error:  # the disk's refusal or our own fault: the result is not to be lost
        raise NotStored(str(error), Outcome({**data, "run": None}, samples, None)) from error
    return Outcome({**data, "run": path.name}, samples, path)


class Case(Protocol):
    """What the command line, the report and the run store ask of a case, whatever it measures."""

    @property
    def name(self) -> str:
        """The case's name."""
        ...

    @property
    def title(self) -> str:
        """What it is about, in a few words."""
        ...

    @property
    def parameters(self) -> Parameters:
        """Everything that can be set."""
        ...

    def settings(
        self, values: Mapping[str, Value], arms: Iterable[str] = (),
        policies: Iterable[str] = (), repeat: int = 1,
    ) -> Sequence[object]:
        """What would be measured; UsageError for arms, policies or values that there are not."""
        ...

    def run(
        self, parameters: Mapping[str, object] | None = None, *, arms: Iterable[str] = (),
        policies: Iterable[str] = (), repeat: int | None = None,
        progress: Progress | None = None, store: RunStore | None = None,
    ) -> Outcome:
        """Measure and store, as :meth:`Experiment.run` does."""
        ...

    def table(self, outcome: Outcome) -> str:
        """The results for a terminal."""
        ...


@dataclass(frozen=True)
class Experiment:
    """A case with a loop that stalls: plain data, and :meth:`run`.

    ``budgets`` maps a policy to what a stalled window may cost under it; a policy without one is
    there to show its fault. ``evidence`` merges the evidence of the repetitions of one arm; its
    ``remarks`` are added to the reason of the verdict, and where it says ``shown``, the arm has
    shown its fault though it did not come to its state. ``conclude`` turns all results into further
    entries of the run, each None or a mapping with a sentence under ``answer`` or ``text``, and
    with lines under ``not_shown`` where an arm did not come to what it is for.

    ``context`` opens what all repetitions share (an origin, say), ``further`` measures, last, what
    belongs to no arm: entries as those of ``conclude``. ``policies`` makes a policy of what was
    asked for; None: the ring's.
    """

    name: str
    title: str
    source: str
    parameters: Parameters
    arms: tuple[Arm, ...]
    budgets: Mapping[str, Budget]
    repetition: Callable[[Setting], Repetition]
    evidence: Callable[[Sequence[Repetition]], dict[str, Any]]
    conclude: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    context: Callable[[Mapping[str, Value]], AbstractContextManager[Any]] = lambda _: nullcontext()
    further: Callable[[Mapping[str, Value], Any], dict[str, Any]] = lambda values, context: {}
    policies: Callable[[Any], ResolvedPolicy] | None = None

    def arm(self, name: str) -> Arm:
        """The arm of that name; UsageError lists them, nearest first."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise unknown("arm", name, [arm.name for arm in self.arms])

    def settings(
        self,
        values: Mapping[str, Value],
        arms: Iterable[str] = (),
        policies: Iterable[Any] = (),
        repeat: int = 1,
    ) -> list[Setting]:
        """Every repetition to make, in its order: each round does all arms once.

        ``policies`` selects among those of each arm; one that none of these arms lists (such as
        ``shipped+membership=leave``, or a Policy class of your own) is taken for all of them: who
        names an arm and a policy has that pair.
        """
        chosen = [self.arm(name) for name in dict.fromkeys(arms)] or list(self.arms)
        asked = list(dict.fromkeys(policies))
        listed = {policy for arm in chosen for policy in arm.policies}
        pairs = [(arm, each) for arm in chosen for each in self._policies(arm, asked, listed)]
        return [
            Setting(arm, policy, number, values, rule)
            for number in range(repeat)
            for arm, (policy, rule) in pairs
        ]

    def run(
        self,
        parameters: Mapping[str, object] | None = None,
        *,
        arms: Iterable[str] = (),
        policies: Iterable[Any] = (),
        repeat: int | None = None,
        progress: Progress | None = None,
        store: RunStore | None = None,
    ) -> Outcome:
        """Measure, judge and store; returns the outcome, whose ``path`` is the run's folder.

        ``repeat`` goes before the parameter ``repetitions``. ``store`` None is the default store,
        ``progress`` None the one that fits where this runs (in a notebook, in a terminal, or none).
        Raises Interrupted on Ctrl-C and NotStored when the disk refuses, both with what was
        measured; any other error first stores what was finished.
        """
        values = self.parameters.resolve(
            {**(parameters or {}), **({} if repeat is None else {"repetitions": repeat})}
        )
        settings = self.settings(values, arms, policies, int(values["repetitions"]))
        work, done = Work(len(settings), "repetitions"), list[Repetition]()
        keep = store or RunStore()
        keep.ready()

        def finish(reason: str | None, further: Mapping[str, Any] | None = None) -> Outcome | None:
            return self._finish(done, values, keep, reason, further) if done else None

        with (
            keeping(work, finish),
            shown(progress or choose(), len(settings), self.name) as telling,
            self.context(values) as context,
            dark.window(),
        ):
            for setting in settings:
                telling.step(f"{setting.arm.name} under {setting.policy}", 0)
                done.append(self.repetition(replace(setting, context=context)))
                work.done += 1
                telling.step(f"{setting.arm.name} under {setting.policy}")
            work.at = "before what belongs to no arm was measured"
            further = self.further(values, context)
        return self._finish(done, values, keep, None, further)

    def table(self, outcome: Outcome) -> str:
        """The arms for a terminal, with what its abbreviations mean."""
        return (f"{console.arms_table(outcome.arms)}\nw/s: waits per second. Complete: every byte, "
                "in order (ORDER: all there, but not)."
                + ("\n! in front of a state: see below." if outcome.not_shown else ""))

    def _policies(
        self, arm: Arm, asked: Sequence[Any], listed: Collection[str]
    ) -> list[tuple[str, Any]]:
        """Name and, for one of the caller's own, the policy itself."""
        if not asked:
            return [(policy, None) for policy in arm.policies]
        from engine import resolve as of_the_ring

        resolve = self.policies or of_the_ring
        found = [resolve(policy) for policy in asked]
        return [
            (each.name, each if each.custom is not None else None)
            for each in found
            if each.name in arm.policies or each.name not in listed
        ]

    def _finish(
        self,
        done: Sequence[Repetition],
        values: Mapping[str, Value],
        store: RunStore,
        interrupted: str | None,
        further: Mapping[str, Any] | None = None,
    ) -> Outcome:
        rows = self._rows(done)
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "experiment": self.name,
            "title": self.title,
            "source": self.source,
            "parameters": dict(values),
            "machine": machine.describe(done[-1].engine),
            "interrupted": interrupted,
            "arms": rows,
        }
        concluded = {**self.conclude(rows), **(further or {})}
        data |= {**concluded, "conclusions": list(concluded)}
        data["not_shown"] = [line for each in concluded.values() if each
                             for line in each.get("not_shown", ())]
        samples = _joined(done)
        return stored(store, data, samples)

    def _rows(self, done: Sequence[Repetition]) -> list[dict[str, Any]]:
        groups: dict[tuple[str, str], list[Repetition]] = {}
        for one in done:
            groups.setdefault((one.setting.arm.name, one.setting.policy), []).append(one)
        return [self._row(group) for group in groups.values()]

    def _row(self, group: Sequence[Repetition]) -> dict[str, Any]:
        """The repetitions of one arm under one policy, as one entry of ``arms``."""
        arm, policy = group[0].setting.arm, group[0].setting.policy
        names = [name for name in group[0].windows if all(name in one.windows for one in group)]
        windows = {name: merge([one.windows[name] for one in group]) for name in names}
        promises = {
            "honours_stop": _all([one.honours_stop for one in group]),
            "honours_write_timeout": _all([one.honours_write_timeout for one in group]),
        }
        verdict = judge(
            windows[IDLE],
            windows[arm.window],
            honours_stop=promises["honours_stop"],
            honours_write_timeout=promises["honours_write_timeout"],
            polls_by_design=any(one.polls_by_design for one in group),
            moves=arm.moves,
        )
        # What moves costs something; a budget is for a stall.
        budget = None if arm.moves else self.budgets.get(policy)
        over = budget.broken_by(windows[IDLE], windows[arm.window]) if budget else []
        delivered = _delivered(group)
        broken = _broken(over, delivered, promises) if budget else []
        in_flight = _all([one.send_in_flight for one in group])
        evidence = self.evidence(group)
        remarks = [verdict.reason, *evidence.get("remarks", ())]
        if in_flight is False:
            remarks.append(_NO_SEND)
        return {
            "arm": arm.name,
            "policy": policy,
            "window": arm.window,
            "decisions": dict(group[0].decisions),
            "windows": {name: window.to_dict() for name, window in windows.items()},
            "state": verdict.state,
            "reason": "; ".join(remarks),
            "delivered": delivered,
            **promises,
            "send_in_flight": in_flight,
            "budget": budget.to_dict() if budget else None,
            "within_budget": not broken if budget else None,
            "broken": broken,
            "not_shown": ([] if evidence.get("shown") else
                          _not_shown(verdict, in_flight, evidence.get("troubles", ()))),
            "repetitions": len(group),
            "each": [_brief(one) for one in group],
            **evidence,
        }


def names() -> list[str]:
    """The experiments there are."""
    return list(_HOMES)


def case(name: str) -> Case:
    """The case of that name; UsageError lists them, nearest first."""
    if name not in _HOMES:
        raise unknown("experiment", name, _HOMES)
    found: Case = importlib.import_module(_HOMES[name]).EXPERIMENT
    return found


def load(name: str) -> Experiment:
    """The case of that name, where it is one of a loop that stalls."""
    found = case(name)
    if not isinstance(found, Experiment):
        raise UsageError(f"'{name}' has no loop that stalls; run it with: ringlab run {name}")
    return found


def _all(answers: Sequence[bool | None]) -> bool | None:
    """False if it ever failed, None if it was never tested."""
    known = [answer for answer in answers if answer is not None]
    return all(known) if known else None


def _delivered(group: Sequence[Repetition]) -> dict[str, Any]:
    faults = [one.delivered.get("fault") for one in group if one.delivered.get("fault")]
    return {
        "bytes": sum(one.delivered["bytes"] for one in group),
        "expected": sum(one.delivered["expected"] for one in group),
        "in_order": all(one.delivered["in_order"] for one in group),
        "fault": faults[0] if faults else None,
    }


def _not_shown(
    verdict: Verdict, in_flight: bool | None, troubles: Iterable[str]
) -> list[str]:
    """Why these figures are not those of the state that the arm is for; empty if they are."""
    lines = list(dict.fromkeys(troubles))
    if in_flight is False:
        lines.append(_NO_SEND)
    if verdict.state == "undecided":
        lines.append(f"undecided: {verdict.reason}")
    return lines


def _broken(
    over: Sequence[str], delivered: Mapping[str, Any], promises: Mapping[str, bool | None]
) -> list[str]:
    """Quiet is half of it: what sleeps must also deliver, stop and keep its deadlines."""
    lines = list(over)
    if not delivered["in_order"] or delivered["bytes"] != delivered["expected"]:
        lines.append(delivered["fault"] or "not every byte was delivered")
    lines += [
        f"{name.removeprefix('honours_').replace('_', ' ')} not honoured"
        for name, kept in promises.items()
        if kept is False
    ]
    return lines


def _brief(one: Repetition) -> dict[str, Any]:
    """One repetition in a line, so that a reader sees the scatter."""
    stalled = one.windows[one.setting.arm.window]
    return {
        "repetition": one.setting.repetition,
        "idle_waits_per_s": one.windows[IDLE].waits_per_s,
        "waits_per_s": stalled.waits_per_s,
        "cpu_ms_per_s": stalled.cpu_ms_per_s,
        "on_queue_fraction": stalled.on_queue_fraction,
        "run_queue_wait_fraction": stalled.run_queue_wait_fraction,
        "honours_stop": one.honours_stop,
        "honours_write_timeout": one.honours_write_timeout,
    }


def _joined(done: Sequence[Repetition]) -> np.ndarray[Any, Any] | None:
    import numpy as np

    parts = [one.samples for one in done if one.samples is not None and len(one.samples)]
    return np.concatenate(parts) if parts else None

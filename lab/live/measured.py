"""Measure this: the present settings as a real run, and the table of those that were made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.decisions import OWN, ResolvedPolicy
from engine.errors import UsageError
from lab.experiment import Experiment
from lab.live.case import LiveCase
from lab.live.controls import as_parameters, command_line
from lab.parameters import Value
from lab.progress import Progress
from lab.runs import Run, RunStore, read_run
from lab.tables import NONE, Cell, Column, Table, figure, is_complete, machine_line

COLUMNS = (
    Column("arm", words=True), Column("policy", words=True), Column("state", words=True),
    Column("waits", "1/s, idle"), Column("waits", "1/s, stalled"), Column("CPU", "ms/s, stalled"),
    Column("on queue", "fraction"), Column("delivered", "bytes"), Column("in order", words=True),
    Column("stop", "heard", words=True), Column("write timeout", "kept", words=True),
    Column("good?", words=True),
)
_MORE = 7  # before what was delivered


@dataclass(frozen=True)
class Plan:
    """A run to make: the arm, the policy and every parameter; ``notes`` what it leaves out."""

    experiment: Experiment
    arm: str
    policy: str
    parameters: Mapping[str, Value]
    notes: str = ""

    @property
    def command(self) -> str:
        """The line that repeats it."""
        return command_line(self.experiment.name, self.arm, self.policy, self.parameters,
                            self.experiment.parameters.defaults())

    def as_text(self) -> str:
        """What "copy as parameters" gives: the papermill cell's values and the command line."""
        lines = [f"{name} = {value!r}" for name, value in self.parameters.items()]
        lines += [f"arms = [{self.arm!r}]", f"policies = [{self.policy!r}]"]
        return "\n".join([*lines, "", f"# {self.command}"])


def plan(
    case: LiveCase, values: Mapping[str, Value], policy: ResolvedPolicy, poked: bool, chosen: str,
    seconds: float,
) -> Plan:
    """The run that the panel's settings mean, with windows of ``seconds``; UsageError where the
    case has no such arm."""
    experiment = case.experiment
    arm = case.arm_of(values, poked, chosen)
    if not arm:
        raise UsageError(case.no_arm)
    if OWN in policy.choices.values():
        raise UsageError(f"policy {policy.name} is written in Python, which a run's parameters "
                         "cannot name: choose a named one to measure")
    passed_over = case.left_out(values, arm)
    given = as_parameters({name: value for name, value in values.items()
                           if name not in passed_over}, experiment.parameters)
    # All of them, so that what is copied repeats the run whatever stands where it is pasted.
    parameters = experiment.parameters.resolve(
        {**given, **case.fixed, "seconds": seconds, "repetitions": 1})
    # An arm that is not run under this policy says so now, not once it is to be measured.
    experiment.settings(parameters, [arm], [policy.name])
    left = [words for words in passed_over.values() if words]
    notes = "not part of this arm: " + ", ".join(left) if left else ""
    return Plan(experiment, arm, policy.name, parameters, notes)


def measure(wanted: Plan, store: RunStore | None, step: Callable[[str], object]) -> Run:
    """Makes the run (idle window, stalled window, drain, probes) and reads it back."""
    outcome = wanted.experiment.run(
        wanted.parameters, arms=[wanted.arm], policies=[wanted.policy],
        progress=_Telling(step), store=store,
    )
    if outcome.path is None:
        raise UsageError("the run was measured but not stored")
    return read_run(Path(outcome.path))


class _Telling(Progress):
    def __init__(self, step: Callable[[str], object]) -> None:
        self._tell = step

    def step(self, done: str, count: int = 1) -> None:
        self._tell(done)


def runs_table(
    runs: Sequence[Run], notes: Sequence[str], more: Sequence[tuple[Column, str]] = ()
) -> Table:
    """One row a run, the newest last; ``more`` are columns with the name of their figure."""
    rows = [_row(run, [name for _, name in more]) for run in runs]
    words = "; ".join(dict.fromkeys(note for note in notes if note))
    machine = machine_line(runs[-1].machine) if runs else ""
    seconds = sorted({round(float(run.parameters["seconds"]), 3) for run in runs})
    length = f"Idle and stalled windows of {', '.join(map(str, seconds))} s, 1 repetition. "
    newest = f" Newest run: {runs[-1].name}." if runs else ""
    columns = (*COLUMNS[:_MORE], *(column for column, _ in more), *COLUMNS[_MORE:])
    return Table("Measured runs: quiet and complete, shown together", columns, rows,
                 length + machine + newest + (f" {words}." if words else ""))


def _row(run: Run, more: Sequence[str]) -> list[Cell]:
    arm = run.arms[0]
    windows = arm["windows"]
    stalled = windows[arm["window"]]
    delivered = arm.get("delivered") or {}
    whole = is_complete(arm)
    good = arm["state"] == "quiet" and whole and False not in (
        arm.get("honours_stop"), arm.get("honours_write_timeout"))
    fraction = stalled.get("on_queue_fraction")
    return [
        Cell(arm["arm"]), Cell(arm["policy"]), Cell(arm["state"], "state"),
        Cell(figure(windows["idle"].get("waits_per_s"))), Cell(figure(stalled.get("waits_per_s"))),
        Cell(figure(stalled.get("cpu_ms_per_s"))),
        Cell(NONE if fraction is None else f"{fraction:.3f}"),
        *(Cell(figure(arm.get(name))) for name in more),
        Cell(f"{delivered.get('bytes', 0):,}"), _kept(whole),
        _kept(arm.get("honours_stop")), _kept(arm.get("honours_write_timeout")),
        Cell("quiet and complete") if good else Cell("no", "bad"),
    ]


def _kept(answer: bool | None) -> Cell:
    if answer is None:
        return Cell(NONE)
    return Cell("yes") if answer else Cell("no", "bad")

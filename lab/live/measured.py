"""Measure this: the present settings as a real run, and the table of those that were made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UsageError
from engine.policy import OWN, ResolvedPolicy
from lab.experiment import Experiment
from lab.live.controls import as_parameters, command_line
from lab.live.presets import arm_of
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


@dataclass(frozen=True)
class Plan:
    """A run to make: the arm, the policy and the parameters; ``notes`` what it leaves out."""

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
    experiment: Experiment, values: Mapping[str, Value], policy: ResolvedPolicy,
    poked: bool, held: bool,
) -> Plan:
    """The run that the panel's settings mean; UsageError where the case has no such arm."""
    arm = arm_of(str(values["route"]), int(values["depth"]), poked, held)
    if arm is None:
        raise UsageError("the case has no arm for these settings (route sync, pipelined or poked): "
                         "choose route async, or depth 1 and stall again")
    if OWN in policy.choices.values():
        raise UsageError(f"policy {policy.name} is written in Python, which a run's parameters "
                         "cannot name: choose a named one to measure")
    parameters = as_parameters(values, experiment.parameters)
    if arm != "held-completion":
        parameters.pop("handler_ms", None)
    parameters["repetitions"] = 1
    left = [words for words, on in (
        (f"{values['clients']} clients (the run has one)", int(values["clients"]) > 1),
        (f"handler time of {values['handler_ms']} ms", arm != "held-completion"
         and int(values["handler_ms"]) > 0),
    ) if on]
    notes = "not part of this arm: " + ", ".join(left) if left else ""
    return Plan(experiment, arm, policy.name, parameters, notes)


def measure(
    wanted: Plan, seconds: float, store: RunStore | None, step: Callable[[str], object]
) -> Run:
    """Makes the run (idle window, stalled window, drain, probes) and reads it back."""
    outcome = wanted.experiment.run(
        {**wanted.parameters, "seconds": seconds}, arms=[wanted.arm], policies=[wanted.policy],
        repeat=1, progress=_Telling(step), store=store,
    )
    if outcome.path is None:
        raise UsageError("the run was measured but not stored")
    return read_run(Path(outcome.path))


class _Telling(Progress):
    def __init__(self, step: Callable[[str], object]) -> None:
        self._tell = step

    def step(self, done: str, count: int = 1) -> None:
        self._tell(done)


def runs_table(runs: Sequence[Run], notes: Sequence[str]) -> Table:
    """One row a run, the newest last."""
    rows = [_row(run) for run in runs]
    words = "; ".join(dict.fromkeys(note for note in notes if note))
    machine = machine_line(runs[-1].machine) if runs else ""
    seconds = sorted({round(float(run.parameters["seconds"]), 3) for run in runs})
    length = f"Idle and stalled windows of {', '.join(map(str, seconds))} s, 1 repetition. "
    newest = f" Newest run: {runs[-1].name}." if runs else ""
    return Table("Measured runs: quiet and complete, shown together", COLUMNS, rows,
                 length + machine + newest + (f" {words}." if words else ""))


def _row(run: Run) -> list[Cell]:
    arm = run.arms[0]
    windows = arm["windows"]
    stalled = windows.get("stall") or windows.get("held") or {}
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
        Cell(f"{delivered.get('bytes', 0):,}"), _kept(whole),
        _kept(arm.get("honours_stop")), _kept(arm.get("honours_write_timeout")),
        Cell("quiet and complete") if good else Cell("no", "bad"),
    ]


def _kept(answer: bool | None) -> Cell:
    if answer is None:
        return Cell(NONE)
    return Cell("yes") if answer else Cell("no", "bad")

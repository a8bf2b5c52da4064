"""What the live panel has to be told about a case: one description an engine, and where they are.

The panel, its threads, its page and its pictures know no engine. Everything that differs (what the
clients do, which settings a control reaches, what a row of the picture and of the strip holds, what
is to be watched) stands in a :class:`LiveCase`: data, and a few functions without a state.
``lab.live.dirty_list`` and ``lab.live.splice`` are the two there are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from engine.base import Engine
from engine.decisions import AnyPolicy, Decisions, method_name
from engine.errors import UsageError, unknown
from lab import experiment as experiments
from lab.choreography import Choreography, ReadAll
from lab.experiment import Experiment
from lab.live.controls import Control
from lab.live.series import Shape
from lab.parameters import Parameters, Value
from lab.tables import Column

# Imported when asked for: a panel of one engine does not load the other.
_HOMES = {"dirty-list": "lab.live.dirty_list", "splice": "lab.live.splice"}
DEFAULT = "dirty-list"


# ---- what the clients do ------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """What every client of the panel does: ``steps`` bring it about, ``drain`` is "read all".

    ``meanwhile`` is then played over and over beside everything else, until a button is pressed.
    ``after`` is played once the clients were put away. ``does``: what one client, and what several
    of them do then, in words.
    """

    steps: Choreography
    drain: Choreography = (ReadAll(),)
    meanwhile: Choreography = ()
    after: Choreography = ()
    does: tuple[str, str] = ("asked and does not read", "asked and do not read")


@dataclass(frozen=True)
class Preset:
    """What one arm sets (what is not named keeps its value), and a sentence on what to watch."""

    watch: str
    sets: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Button:
    """One of the panel's actions as this case offers it."""

    action: str
    what: str
    label: str = ""
    """What stands on it, where that is not the action's own name."""


# ---- what is drawn ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line of a plot: a column of the rows, how it looks, and its words at the pointer."""

    column: str
    label: str
    colour: str
    shape: str = "line"
    width: float = 2.0
    tip: str = ""
    format: str = "0,0"
    right: bool = False
    """On the axis at the right."""


@dataclass(frozen=True)
class Plotted:
    """One plot of the panel, drawn from the first line to the last.

    ``log``: its rates on a logarithmic axis, and on a linear one when that is asked for. ``top``:
    where the axis ends unless something goes higher; 0: it follows, and shows ``least`` at least.
    """

    name: str
    title: str
    lines: tuple[Line, ...]
    unit: str
    right: str = ""
    height: int = 118
    log: bool = False
    top: float = 0.0
    least: float = 1.0
    right_least: float = 2.0
    room: float = 0.12
    also: tuple[tuple[str, str], ...] = ()
    """Further words at the pointer, without a line: what, and Bokeh's template."""
    time_axis: bool = False


# ---- what the strip shows -----------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """One column of the strip. ``most`` is set where a bar shows how full something is."""

    name: str
    label: str
    what: str = ""
    most: int = 0


@dataclass(frozen=True)
class Look:
    """The engine as it is now: a row for each connection or direction, and what they mean.

    ``count``: connections; ``more``: those without a row. ``stalled``: somebody is owed something.
    ``wait``: further words on the wait, name and value.
    """

    rows: Sequence[Mapping[str, Any]]
    stalled: bool
    count: int = 0
    more: int = 0
    wait: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Waiting:
    """The wait that a loop is in: ``mode`` empty where there is one only; ``deaf`` to a stop."""

    mode: str
    why: str
    timeout: str
    deaf: bool


@dataclass(frozen=True)
class Rules:
    """How the newest samples of an engine are judged."""

    wait: Callable[[Any], Waiting]
    idle_per_s: Callable[[Mapping[str, str], float], float]
    """Waits a second of an idle loop, by its decisions and the longest sleep in ms."""
    cap: str = ""
    """The control that bounds a sleep, in ms; empty: none does."""


# ---- the whole ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """What the page calls things."""

    one: str
    """What has the loop: worker, relay."""
    settings: str
    """The box with the controls."""
    rows: str
    """What the strip's rows are, when there are none."""
    no_stall: str
    """What to ask oneself when a stall did not come about."""
    deaf: str
    """Why a stop was not heard."""
    head: str = ""
    """Over the names of the strip's rows."""


@dataclass(frozen=True)
class LiveCase:
    """One case for the live panel."""

    name: str
    """Of the experiment: its parameters, arms and measured runs are the panel's."""
    engine: type[Engine]
    decisions: Decisions
    questions: Mapping[str, str]
    """What each decision is about, in few words."""
    policy: str
    """Of an engine of the panel's own."""
    words: Words
    buttons: tuple[Button, ...]
    presets: Mapping[str, Preset]
    shape: Shape
    plots: tuple[Plotted, ...]
    strip: tuple[Shown, ...]
    """Up to seven columns stand beside the controls; more stand above them."""
    rules: Rules
    controls: Callable[[Parameters], dict[str, Control]]
    reaches: Mapping[str, str]
    """Controls that are settings of the engine, by its names for them."""
    settings: Callable[[Mapping[str, Value], str], dict[str, Value]]
    """All settings of the engine that the controls' values mean in an arm."""
    serve: Callable[[AnyPolicy, Mapping[str, Value], Any], Engine]
    """A new engine with such settings; the last is what ``needs`` gave."""
    look: Callable[[Any], Look]
    scene: Callable[[str, Mapping[str, Value], Any], Scene]
    """What the clients of an engine do in an arm, with the controls' values."""
    arm_of: Callable[[Mapping[str, Value], bool, str], str]
    """The arm that values, a poke and the chosen arm come to; empty: the case has none such."""
    connected: str = "connections"
    """The gauge of the engine that counts whoever is connected."""
    arm: str = ""
    """The arm that is chosen at first."""
    unchosen_by: tuple[str, ...] = ()
    """Controls that say by themselves which arm it is."""
    quick: tuple[str, ...] = ()
    """Policies with a button of their own, which plays the arm anew under them."""
    needs: Callable[[Mapping[str, Value]], AbstractContextManager[Any]] = lambda _: nullcontext()
    """What an engine of the panel's own needs around it."""
    lost: Callable[[Any], str] = lambda needed: ""
    """Of what ``needs`` gave: what has ended of it by itself, in words; empty: nothing."""
    lacks: Callable[[Any], str] = lambda engine: ""
    """Why an engine cannot bring about a stall, looked at once one did not come; empty: it can."""
    release: Callable[[Any], Choreography] = lambda engine: ()
    """What lets go whatever the other side holds back; nothing where nobody holds."""
    span: tuple[tuple[str, str], ...] = ()
    """Counters that a selected span is told in besides the common ones, and their words."""
    measured: tuple[tuple[Column, str], ...] = ()
    """Further columns of the measured runs, and where a result has them."""
    fixed: Mapping[str, Value] = field(default_factory=dict)
    """Parameters of a measured run that are no controls."""
    left_out: Callable[[Mapping[str, Value], str], Mapping[str, str]] = lambda values, arm: {}
    """Controls that a measured run of the arm passes over, and their words ("" to say nothing)."""
    no_arm: str = "the case has no arm for these settings"
    by_hand: Callable[[AnyPolicy], Any] | None = None
    """What is offered in a panel's place where the machine allows none."""

    @property
    def experiment(self) -> Experiment:
        """The experiment itself."""
        return experiments.load(self.name)

    def span_text(self, found: Mapping[str, float]) -> str:
        """What ``lab.live.series.span_figures`` found in a selected span, in words."""
        more = "".join(f"{found[name]:,.0f} {words}, " for name, words in self.span)
        return (f"({found['samples']:,.0f} samples): {found['waits']:,.0f} waits/s, "
                f"{found['wasted']:,.0f} wasted/s, {more}{self.words.one} CPU "
                f"{found['cpu']:,.1f} ms/s, on queue {found['on_queue']:.3f} of the time")

    def decision_names(self) -> list[str]:
        """The decisions as Python spells them."""
        return [method_name(decision) for decision in self.decisions.table()]

    def first_values(self, controls: Mapping[str, Control], engine: Engine | None) -> dict[
            str, Value]:
        """The controls' defaults; what the owner of an engine has set on it stands before them."""
        values = {name: control.parameter.default for name, control in controls.items()}
        if engine is None:
            return values
        for name, setting in self.reaches.items():
            given = engine.settings[setting]
            if name in controls and given != engine.default(setting):
                try:
                    values[name] = controls[name].parameter.check(given)
                except UsageError:
                    pass  # beyond what the panel offers: it stays as it is until it is moved
        return values


def names() -> list[str]:
    """The cases that have a live panel."""
    return list(_HOMES)


def case(name: object) -> LiveCase:
    """The description of that name; UsageError lists them, nearest first."""
    if not isinstance(name, str) or name not in _HOMES:
        raise unknown("case with a live panel", str(name), _HOMES)
    found: LiveCase = importlib.import_module(_HOMES[name]).LIVE
    return found


def case_for(engine: object, name: str | None = None) -> LiveCase:
    """The description of an engine; of the case called ``name`` where that is given."""
    if isinstance(engine, str):
        raise UsageError(f"a panel is given an engine; for one of its own: lab.live('{engine}')")
    if name is not None:
        found = case(name)
        if engine is not None and not isinstance(engine, found.engine):
            raise UsageError(f"the case {name} has a {found.engine.__name__}, not a "
                             f"{type(engine).__name__}")
        return found
    if engine is None:
        return case(DEFAULT)
    for each in map(case, _HOMES):
        if isinstance(engine, each.engine):
            return each
    raise UsageError(f"a panel shows an engine (RingServer, SpliceRelay), not a "
                     f"{type(engine).__name__}")

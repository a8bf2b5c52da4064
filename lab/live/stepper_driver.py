"""What a stepper needs to know of an engine: its phases, what can happen to it, what is to be seen.

One :class:`Driver` an engine; everything else (what was done, back and forward, the page) is the
same for all and is in :mod:`lab.live.stepper`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine.decisions import AnyPolicy
from engine.errors import RinglabError, UsageError, unknown
from lab.automaton import Drawing

if TYPE_CHECKING:
    from lab.live.stepper import Stepper


@dataclass(frozen=True)
class Action:
    """One thing that was done: its name and its arguments."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    words: str = ""
    """The name in words; empty: the name says it."""

    def __str__(self) -> str:
        said = ", ".join(f"{key} {_number(key, value)}" for key, value in self.options)
        return (self.words or self.name) + (f" ({said})" if said else "")


def _number(key: str, value: Any) -> str:
    plain = not isinstance(value, int) or isinstance(value, bool) or key in ("slot", "socket")
    return f"{value}" if plain else f"{value:,}"


@dataclass(frozen=True)
class Seen:
    """The state after an action. What else there is to see depends on the engine."""

    action: Action | None
    next: str
    """The phase that comes next."""
    ended: str
    """How the last wait ended: ``ready``, ``timeout``, ``asleep``, ``left``; empty: not made."""
    condition: str
    """The state of the automaton that is lit."""

    @property
    def timeout(self) -> str:
        """The timeout in words, with its reason."""
        raise NotImplementedError


Page = dict[str, Any]
Verb = Callable[..., Action]


def verb(method: Verb) -> Verb:
    """Marks a method of a driver that the stepper offers under its name: it checks what it is given
    and returns the action to do."""
    method.__dict__["is_verb"] = True
    return method


def phase_work(name: str) -> Callable[[Any, dict[str, Any]], object]:
    """The work of a phase: the driver's ``_phase`` of that name."""
    return lambda driver, given: driver._phase(name)


def _spelled(action: str) -> str:
    """As the method of that action is."""
    return action.replace(" ", "_").replace("-", "_")


def _bare(driver: Driver, name: str) -> Verb:
    """An action that takes nothing, as the phases do."""
    return lambda: driver.action(name)


class Driver:
    """An engine's script as a stepper drives it.

    ``make`` gives a fresh script, with a policy or (None) the one that it was made with. A subclass
    has ``work``: what each action does, by name; the phases are among them.
    """

    case: ClassVar[str]
    phases: ClassVar[Mapping[str, str]]
    """In their order, each with what it is called on a button."""
    fixtures: ClassVar[Mapping[str, str]]
    """Each with what it brings about."""
    begins: ClassVar[str]
    """What the first state is called."""
    drawing: ClassVar[Drawing]
    asks: ClassVar[Mapping[str, Mapping[str, type]]]
    """What a page may ask for beyond the phases, with the types of what comes along."""
    work: ClassVar[Mapping[str, Callable[[Any, dict[str, Any]], object]]]

    def __init__(self, make: Callable[[AnyPolicy | None], Any]) -> None:
        self._make = make
        self.script: Any = None

    # -- what a stepper calls -------------------------------------------------------------------

    def begin(self, policy: AnyPolicy | None) -> None:
        """A fresh script."""
        self.script = self._make(policy)

    def action(self, name: str, **options: Any) -> Action:
        """The action of that name; UsageError for a name that is none."""
        if name not in self.work:
            raise unknown("action", name, self.work)
        return Action(name, tuple(options.items()), self.phases.get(name, ""))

    def asked(self, name: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> Action:
        """The action that a stepper's caller means: a phase, ``set``, or what a verb makes of
        ``given`` and ``options``. UsageError for what it does not take, and where one is missing.
        """
        named = {_spelled(each): each for each in self.work}.get(_spelled(f"{name}"))
        if named is None:
            raise unknown("action", f"{name}", self.work)
        if named == "set" and not given:
            return self.action(named, **options)  # the script knows what can be set
        is_verb = _spelled(named) in self.verbs()
        made: Verb = getattr(self, _spelled(named)) if is_verb else _bare(self, named)
        try:
            inspect.signature(made).bind(*given, **options)
        except TypeError as error:
            takes = ", ".join(inspect.signature(made).parameters) or "nothing"
            raise UsageError(f"{name}: {error}; it takes {takes}") from None
        return made(*given, **options)

    def apply(self, action: Action) -> None:
        """Does it; RinglabError when it does not fit."""
        self.work[action.name](self, dict(action.options))

    def look(self, action: Action | None) -> Seen:
        """The present state, which ``action`` led to."""
        raise NotImplementedError

    def play(self, stepper: Stepper, name: str) -> None:
        """Does what a fixture consists of, on a fresh script."""
        raise NotImplementedError

    def line(self, now: Any, which: int = 0) -> str:
        """The state in one line."""
        raise NotImplementedError

    @classmethod
    def verbs(cls) -> list[str]:
        """The methods that the stepper offers as its own."""
        return [name for name in dir(cls) if getattr(getattr(cls, name), "is_verb", False)]

    # -- what a page shows ----------------------------------------------------------------------

    def policy_specs(self) -> list[dict[str, Any]]:
        """The choice of a preset, and of every single decision."""
        raise NotImplementedError

    def state_html(self, now: Any) -> str:
        """The state as HTML."""
        raise NotImplementedError

    def said(self, seen: Any) -> str:
        """What came of an action, in a few words beside it."""
        raise NotImplementedError

    def controls(self) -> list[Page]:
        """The rows of buttons beyond the phases: see :func:`press` and those after it."""
        raise NotImplementedError

    def options(self, now: Any) -> dict[str, list[list[str]]]:
        """What the page's selections offer now: value and label, by the selection's name."""
        raise NotImplementedError

    def phase_words(self, now: Any) -> dict[str, str]:
        """What the buttons of the phases are called now."""
        return dict(self.phases)


# -- the rows of buttons, as the page makes them ---------------------------------------------------


def group(label: str, *items: Page) -> Page:
    """A row."""
    return {"label": label, "items": list(items)}


def press(text: str, help: str, action: str, **send: str) -> Page:
    """A button that asks for ``action`` with options taken from fields: option=name of the field,
    or ``="value"``."""
    return {"press": text, "help": help, "action": action, "send": send}


def number(name: str, label: str, value: int | None = None, empty: str = "") -> Page:
    """A field for a number, under a name of its own; what it means when it is ``empty``."""
    return {"number": name, "label": label, "empty": empty,
            "value": "" if value is None else str(value)}


def choice(name: str, label: str, values: Sequence[str] = ()) -> Page:
    """A selection: of ``values``, or of what :meth:`Driver.options` offers."""
    return {"choice": name, "label": label, "values": list(values)}


def unit(text: str) -> Page:
    """A word beside a field."""
    return {"unit": text}


def still_open(look: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
    """What can be seen of those that are there: others are not accepted yet, or closed."""
    out = []
    for each in numbers:
        try:
            out.append(look(each))
        except RinglabError:
            continue
    return out

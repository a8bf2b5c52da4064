"""A loop by hand: one phase at a time, what happens next chosen by whoever learns.

Runs an engine's own state machine on its scripted backend: no kernel, no clock, no io_uring. What
was done is a list of actions; going back replays all but the last of them on a fresh script, which
gives the same state, because nothing in there happens by chance. What differs from engine to engine
is in its driver: :mod:`lab.live.stepper_ring`, :mod:`lab.live.stepper_relay`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from engine import PRESETS, RelayScript, Script
from engine.decisions import AnyPolicy, Policy, ResolvedPolicy
from engine.errors import UsageError, unknown
from engine.parameters import NUMBER, Range, whole
from engine.relay_policy import PRESETS as RELAY_PRESETS
from engine.relay_policy import RELAY, RelayPolicy
from lab.live.stepper_driver import Action, Driver, Seen
from lab.live.stepper_relay import RelayDriver
from lab.live.stepper_ring import COMPLETIONS, FIXTURES, PHASE_WORDS, PHASES, RingDriver

__all__ = ["COMPLETIONS", "FIXTURES", "PHASES", "PHASE_WORDS", "Action", "Seen", "Stepper"]

_DRIVERS: dict[str, type[RingDriver | RelayDriver]] = {
    each.case: each for each in (RingDriver, RelayDriver)
}


_ACTIONS = Range(1, 0, 2**31 - 1, "actions")


def _of_relay(policy: object) -> bool:
    if isinstance(policy, ResolvedPolicy):
        return set(policy.choices) == set(RELAY.table())
    if isinstance(policy, str):
        return policy.partition("+")[0] in RELAY_PRESETS
    return isinstance(policy, RelayPolicy) or (
        isinstance(policy, type) and issubclass(policy, RelayPolicy))


def _driver(what: Any, policy: AnyPolicy | None, options: dict[str, Any]) -> Driver:
    """The driver of a case, of a script, or of the engine that a policy belongs to."""
    if isinstance(what, Script | RelayScript):
        if options:
            raise UsageError(f"{', '.join(options)}: give it to the script, which has its own")
        made = what.fresh(policy)
        return (RingDriver if isinstance(what, Script) else RelayDriver)(made.fresh)
    if isinstance(what, str) and what in _DRIVERS:
        return _DRIVERS[what].named(policy, options)
    if policy is not None:
        raise unknown("case", f"{what}", _DRIVERS)
    if isinstance(what, str) and what.partition("+")[0] not in {*PRESETS, *RELAY_PRESETS}:
        raise unknown("case or policy", what, [*_DRIVERS, *PRESETS, *RELAY_PRESETS])
    is_policy = isinstance(what, str | dict | Policy | type | ResolvedPolicy)
    if not is_policy:
        raise UsageError("a stepper is of a case (dirty-list, splice), a policy, or a script, not "
                         f"{type(what).__name__}")
    return (RelayDriver if _of_relay(what) else RingDriver).named(what, options)


class Stepper:
    """A loop on the scripted backend, stepped by hand.

    :param what: ``"dirty-list"`` (the ring's worker) or ``"splice"`` (the relay); a policy, which
        says by itself whose it is; or a :class:`engine.Script` or :class:`engine.RelayScript`: a
        fresh one that is made like it is stepped.
    :param policy: a preset's name, a mapping, or a policy class; single decisions as keywords, as
        are settings of the script (``response_size``, ``pipe_size`` in bytes, ...).

    ``step()`` runs the next phase of the loop, which can also be called by its name; what else can
    happen depends on the engine. Of the ring: ``connect``, ``request``, ``handler``, ``complete``,
    ``poke`` and others; of the relay: ``connect``, ``request``, ``respond``, ``returns``,
    ``report``, ``takes`` and others (``dir()`` has them all). ``back`` and ``forward`` go through
    what was done. Shows itself in a notebook: with buttons where somebody is there to press them,
    else as a picture of its present state.
    """

    def __init__(self, what: str | Script | RelayScript | AnyPolicy | None = None,
                 policy: AnyPolicy | None = None, **options: Any) -> None:
        if what is None:
            what = "splice" if _of_relay(policy) else "dirty-list"
        self._driver = _driver(what, policy, options)
        self._done: list[Action] = []
        self._undone: list[Action] = []
        self._seen: list[Seen] = []
        self._view: Any = None
        self._from: AnyPolicy | None = None
        self._begin()

    # -- the loop -------------------------------------------------------------------------------

    def step(self) -> Seen:
        """Runs the phase that comes next."""
        return self.do(self.now.next)

    def iterate(self) -> Seen:
        """Steps to the end of the iteration: until a timeout has been decided."""
        seen = self.step()
        while seen.next != "wait" and seen.ended not in ("asleep", "left"):
            seen = self.step()
        return seen

    def set(self, **choices: Any) -> Seen:
        """Switches the policy (``policy="fixed"``) or single decisions, in the middle."""
        return self.do("set", **choices)

    def __getattr__(self, name: str) -> Callable[..., Seen]:
        """The phases and what else can happen, as the engine's driver has it."""
        driver = self.__dict__.get("_driver")
        phase = name.replace("_", " ")
        if driver is None or name.startswith("_"):
            raise AttributeError(name)
        if phase in driver.phases:
            return lambda *given, **options: self._act(driver.asked(phase, given, options))
        if name not in driver.verbs():
            raise AttributeError(f"the stepper of {driver.case} has no '{name}'; it has: "
                                 f"{', '.join(self._named())}")
        method = getattr(driver, name)

        @functools.wraps(method)
        def act(*given: Any, **options: Any) -> Seen:
            return self._act(driver.asked(name, given, options))

        return act

    def _named(self) -> list[str]:
        return [*(name.replace(" ", "_") for name in self._driver.phases), *self._driver.verbs()]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._named()]

    # -- back and forward -----------------------------------------------------------------------

    def do(self, name: str, **options: Any) -> Seen:
        """Does one thing by name; what had been undone is forgotten. RinglabError if it does not
        fit (no such slot, no SEND in flight): then nothing was changed."""
        return self._act(self._driver.asked(name, (), options))

    def _act(self, action: Action) -> Seen:
        try:
            self._apply(action)
        except BaseException:
            self._replay(self._done)
            raise
        self._done.append(action)
        self._undone.clear()
        self._show()
        return self._seen[-1]

    def back(self, steps: int = 1) -> Seen:
        """Undoes the last ``steps`` actions, as far as there are any."""
        steps = whole("steps", steps, _ACTIONS)
        for _ in range(min(steps, len(self._done))):
            self._undone.append(self._done.pop())
        self._replay(self._done)
        self._show()
        return self._seen[-1]

    def forward(self, steps: int = 1) -> Seen:
        """Does again the ``steps`` actions that were undone last, as far as there are any."""
        steps = whole("steps", steps, _ACTIONS)
        for _ in range(min(steps, len(self._undone))):
            action = self._undone.pop()
            self._apply(action)
            self._done.append(action)
        self._show()
        return self._seen[-1]

    def go_to(self, number: int) -> Seen:
        """Goes to the state after the first ``number`` actions of all that are known, or the last
        one if there are fewer."""
        here, number = len(self._done), whole("number", number, _ACTIONS)
        return self.back(here - number) if number <= here else self.forward(number - here)

    def clear(self, policy: AnyPolicy | None = None) -> Seen:
        """Begins again with an idle loop that nobody is connected to, under ``policy`` or (None)
        the one that this stepper was made with."""
        before = self._from
        self._done, self._undone, self._from = [], [], policy
        try:
            self._begin()
        except BaseException:
            self._from = before
            self._begin()
            raise
        self._show()
        return self._seen[-1]

    def fixture(self, name: str = "", policy: AnyPolicy | None = None) -> Seen:
        """Brings about a state that matters, from the beginning, under ``policy`` as of
        :meth:`clear`: of the ring, ``single`` (which none means) and ``pipelined``, the founding
        report's; of the relay, the experiment's arms ``a``, ``a2``, ``b``, ``d``, ``e``, ``m``."""
        known = self._driver.fixtures
        name = name or next(iter(known))
        if name not in known:
            raise unknown("fixture", f"{name}", known)
        self.clear(policy)
        self._driver.play(self, name)
        return self._seen[-1]

    # -- what can be seen -----------------------------------------------------------------------

    @property
    def now(self) -> Any:
        """The present state: a :class:`Seen` with what else the engine shows."""
        return self._seen[-1]

    @property
    def seen(self) -> list[Seen]:
        """Every state so far, the first being that of an idle loop."""
        return list(self._seen)

    @property
    def script(self) -> Any:
        """The engine beneath. What is done to it directly is not remembered."""
        return self._driver.script

    @property
    def driver(self) -> Driver:
        """What it knows of its engine."""
        return self._driver

    @property
    def undone(self) -> list[Action]:
        """What ``forward`` would do, next first."""
        return self._undone[::-1]

    @property
    def policy(self) -> str:
        """The name of the policy in force."""
        return str(self.script.policy.name)

    def line(self, slot: int = 0) -> str:
        """The state in one line; of the ring as the founding report's fixture prints it."""
        return self._driver.line(self.now, whole("slot", slot, NUMBER))

    def _begin(self) -> None:
        self._driver.begin(self._from)
        self._seen = [self._driver.look(None)]

    def _replay(self, actions: list[Action]) -> None:
        self._begin()
        for action in actions:
            self._apply(action)

    def _apply(self, action: Action) -> None:
        self._driver.apply(action)
        self._seen.append(self._driver.look(action))

    # -- in a notebook --------------------------------------------------------------------------

    def _show(self) -> None:
        if self._view is not None:
            self._view.tell()

    def to_html(self) -> str:
        """The present state as HTML that needs nothing else."""
        from lab.live import stepper_page

        return stepper_page.static_html(self)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        from lab.mode import is_batch

        if is_batch():
            return {"text/html": self.to_html(), "text/plain": repr(self)}
        if self._view is None:
            from lab.live.stepper_page import Page

            self._view = Page(self)
        return self._view.bundle(**options)

    def __repr__(self) -> str:
        return f"<Stepper {self.policy}, {len(self._done)} actions, {self.now.condition}>"

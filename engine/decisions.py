"""The decisions of an engine as Python sees them: their table, presets, and whole policies.

One :class:`Decisions` an engine. The choices are those of the engine's own table in C; what stands
in Python are the presets, the combinations that make no sense, and the class that users subclass.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engine.binding import native, text, words
from engine.errors import UsageError, unknown

OWN = "own"


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of one decision, as the engine's table has it."""

    decision: str
    name: str
    what: str
    shipped: bool
    index: int


@dataclass(frozen=True, slots=True)
class Preset:
    """A named combination: what it changes of the shipped behaviour, and what it is for."""

    name: str
    what: str
    changes: Mapping[str, str]
    of: Callable[[], Decisions] = field(repr=False, compare=False)

    @property
    def choices(self) -> dict[str, str]:
        """The whole combination: one choice for every decision."""
        return self.of().shipped() | dict(self.changes)


class Policy:
    """What a user's own policy of any engine has: see the subclass of the engine.

    Only the methods that a subclass defines are asked; every other decision is that of ``base``, a
    preset's name or a mapping of decisions to choices. They run on the engine's threads and hold
    the GIL: keep them short, and do not call the engine from them. What they raise stops the loop
    and becomes a PolicyError.
    """

    base: str | Mapping[str, str]

    @classmethod
    def family(cls) -> Decisions:
        """Whose decisions they are; the subclass of the engine says so."""
        raise NotImplementedError

    def decisions(self) -> list[str]:
        """The decisions that this policy takes itself."""
        of = self.family()
        return [
            decision
            for decision in words(of.enum)
            if method_name(decision) in vars(self)
            or getattr(type(self), method_name(decision))
            is not getattr(of.policy, method_name(decision))
        ]


def method_name(decision: str) -> str:
    """The Python spelling of a decision: ``send-wait`` is the method ``send_wait``."""
    return decision.replace("-", "_")


@dataclass(frozen=True, slots=True)
class ResolvedPolicy:
    """A policy that was found to make sense."""

    name: str
    """Of the preset, or as in ``shipped+membership=leave``, or of the class of ``custom``."""
    choices: dict[str, str]
    """One choice for every decision; ``"own"`` where ``custom`` decides."""
    custom: Policy | None = None

    @property
    def asks(self) -> list[str]:
        """The decisions that ``custom`` takes."""
        return [] if self.custom is None else self.custom.decisions()


AnyPolicy = str | Mapping[str, str] | Policy | type[Policy] | ResolvedPolicy

Senseless = tuple[tuple[str, str], tuple[str, str], str]
"""Two choices that cannot both be meant, and why."""


# ---- answers of a user's own policy ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class YesNo:
    """True or False, or the two words that are 0 and 1 to the engine; without words: no, yes."""

    names: tuple[str, ...] = ()
    yes: int = 1
    """What True means to the engine."""

    def number(self, value: Any) -> int | None:
        """The engine's number for an answer, or None when it is not allowed."""
        if isinstance(value, bool):
            return self.yes if value else 1 - self.yes
        return self.names.index(value) if value in self.names else None

    def __str__(self) -> str:
        return ", ".join(["True", "False", *map(repr, self.names)])


@dataclass(frozen=True, slots=True)
class Word:
    """One of some words, which to the engine are 0, 1, ..."""

    names: tuple[str, ...]

    def number(self, value: Any) -> int | None:
        """The engine's number for an answer, or None when it is not allowed."""
        return self.names.index(value) if value in self.names else None

    def __str__(self) -> str:
        return ", ".join(map(repr, self.names))


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time, which the engine takes in ns; None is -1: for ever."""

    most: float = 86_400.0

    def number(self, value: Any) -> int | None:
        """The engine's number for an answer, or None when it is not allowed."""
        if value is None:
            return -1
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return round(value * 1e9) if is_number and 0 <= value <= self.most else None

    def __str__(self) -> str:
        return f"seconds from 0 to {self.most:g}, or None for no timeout"


Answer = YesNo | Word | Seconds


# ---- the decisions of one engine ---------------------------------------------------------------


@dataclass(frozen=True)
class Decisions:
    """Everything about the decisions of one engine but their rules, which are in C."""

    enum: str
    """The C enum of the decisions."""
    choice_at: str
    """The call that reads the engine's table."""
    callback: str
    """The C function by which the engine asks Python."""
    presets: Mapping[str, Preset]
    policy: type[Policy]
    """What users subclass."""
    answers: Mapping[str, Answer]
    of_loop: Collection[str]
    """Decisions that are about the loop; the others are about one connection or session."""
    show: Callable[[Any], Any]
    """Makes the view of one connection or session of the C one."""
    show_loop: Callable[[Any], Any]
    senseless: tuple[Senseless, ...] = ()

    @cached_property
    def _table(self) -> dict[str, dict[str, Choice]]:
        ffi, lib = native()
        choice_at = getattr(lib, self.choice_at)
        out: dict[str, dict[str, Choice]] = {}
        for number, decision in enumerate(words(self.enum)):
            out[decision] = {}
            while (c := choice_at(number, len(out[decision]))) != ffi.NULL:
                choice = Choice(
                    text(c.decision), text(c.name), text(c.what), bool(c.shipped),
                    len(out[decision]),
                )
                out[decision][choice.name] = choice
        return out

    def table(self) -> dict[str, dict[str, Choice]]:
        """decision -> choice name -> :class:`Choice`, in the engine's order."""
        return self._table

    def methods(self) -> list[str]:
        """The decisions as Python spells them."""
        return [method_name(decision) for decision in self._table]

    def shipped(self) -> dict[str, str]:
        """Decision -> the choice that the real system shipped."""
        return {
            decision: next(choice.name for choice in choices.values() if choice.shipped)
            for decision, choices in self._table.items()
        }

    def resolve(self, policy: AnyPolicy, **choices: str) -> ResolvedPolicy:
        """The whole policy that ``policy`` means, with ``choices`` in place of some of its own.

        ``policy`` is a preset's name, a name such as ``shipped+membership=leave``, a mapping from
        decisions to choices (the others as shipped), or an object or subclass of the engine's
        policy class. Decisions may be spelled ``send-wait`` or ``send_wait``. Raises UsageError for
        a name that is not known, and for a combination that makes no sense, with the reason.
        """
        asked = dict(self._choice(decision, choice) for decision, choice in choices.items())
        if isinstance(policy, ResolvedPolicy):
            kept = {decision: name for decision, name in policy.choices.items() if name != OWN}
            asked = kept | asked
            policy = policy.custom or policy.choices
        if isinstance(policy, type) and issubclass(policy, Policy):
            policy = policy()
        if isinstance(policy, Policy):
            return self._resolve_own(policy, asked)
        whole = self._whole(policy) | asked
        self._refuse_senseless(whole)
        return ResolvedPolicy(self._name(whole), whole)

    def _resolve_own(self, policy: Policy, asked: dict[str, str]) -> ResolvedPolicy:
        who = type(policy).__name__
        if not isinstance(policy, self.policy):
            raise UsageError(f"policy {who} is of another engine; subclass {self.policy.__name__}")
        own = policy.decisions()
        self._refuse_misspelt(policy)
        if not own:
            raise UsageError(
                f"policy {who} takes no decision; define at least one method of: "
                + ", ".join(self.methods())
            )
        for decision in own:
            if not callable(getattr(policy, method_name(decision))):
                raise UsageError(f"policy {who}: {method_name(decision)} is not a method")
            if decision in asked:
                raise UsageError(f"policy {who} decides '{decision}'; it cannot be chosen as well")
        whole = self._whole(policy.base) | asked | dict.fromkeys(own, OWN)
        self._refuse_senseless(whole)
        return ResolvedPolicy(who, whole, policy)

    def _refuse_misspelt(self, policy: Policy) -> None:
        """A method that nobody would ask, under a name much like one that would be asked."""
        methods = self.methods()
        for name in dir(policy):
            if name.startswith("_") or hasattr(self.policy, name):
                continue
            like = difflib.get_close_matches(name, methods, 1, 0.8)
            if like and callable(getattr(policy, name)):
                raise UsageError(
                    f"policy {type(policy).__name__}: nobody asks {name}(); did you mean "
                    f"{like[0]}()? A method of your own needs another name, or a leading _"
                )

    def _choice(self, decision: str, choice: object) -> tuple[str, str]:
        """The engine's spelling of both, or UsageError with what is allowed."""
        known = self._table
        name = str(decision).replace("_", "-")
        if name not in known:
            raise unknown("decision", str(decision), known)
        value = str(choice).replace("_", "-")
        if value not in known[name]:
            raise unknown(f"choice of {name}", str(choice), known[name])
        return name, value

    def _whole(self, policy: object) -> dict[str, str]:
        if isinstance(policy, Mapping):
            return self.shipped() | dict(self._choice(d, choice) for d, choice in policy.items())
        if not isinstance(policy, str):
            raise UsageError(
                f"a policy is a preset's name, a mapping or a Policy, not {type(policy).__name__}"
            )
        preset, *changes = policy.split("+")
        if preset not in self.presets:
            raise unknown("policy", preset, self.presets)
        whole = self.presets[preset].choices
        for change in changes:
            decision, _, choice = change.partition("=")
            whole.update([self._choice(decision, choice)])
        return whole

    def _refuse_senseless(self, whole: Mapping[str, str]) -> None:
        for (one, its), (other, others), reason in self.senseless:
            if whole[one] == its and whole[other] == others:
                raise UsageError(
                    f"{one}={its} and {other}={others} make no sense together: {reason}"
                )

    def _name(self, whole: Mapping[str, str]) -> str:
        """The name of a combination: its preset's, or the nearest one's and what differs."""
        differ = {
            name: [f"{d}={whole[d]}" for d, choice in preset.choices.items() if whole[d] != choice]
            for name, preset in self.presets.items()
        }
        name = min(differ, key=lambda preset: len(differ[preset]))
        return "+".join([name, *differ[name]])

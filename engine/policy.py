"""Policies: which rule a loop follows for each of its decisions.

The decisions and their choices are those of the engine's own table (``rl_choice_at``); what stands
here are the presets, the combinations that make no sense, and the policy that users write
themselves. How the engine asks that one is in :mod:`engine.own_policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.binding import native, text, words
from engine.errors import UsageError, unknown
from engine.views import ConnView, LoopView


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

    @property
    def choices(self) -> dict[str, str]:
        """The whole combination: one choice for every decision."""
        return shipped() | dict(self.changes)


_FIXED = {
    "membership": "leave",
    "send-wait": "timed",
    "direct-write": "behind-send",
    "held": "unlisted",
}
_TICKLESS = _FIXED | {"handback": "wake", "idle": "tickless", "expired": "poll"}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("shipped", "what the real system shipped, faults included", {}),
        Preset(
            "order",
            "shipped, but a handler's bytes go behind a SEND in flight: order restored, spin kept",
            {"direct-write": "behind-send"},
        ),
        Preset(
            "membership",
            "shipped, but a connection leaves the list while only its SEND can move it: the"
            " pipelined arm is cured, the single one stays parked",
            {"membership": "leave"},
        ),
        Preset(
            "timeout",
            "shipped, but only members that the worker can move forbid it to sleep",
            {"timeout": "movable"},
        ),
        Preset(
            "timed-wait",
            "shipped, but no wait is without a timeout: what was parked now spins",
            {"send-wait": "timed"},
        ),
        Preset(
            "no-timer",
            "shipped, but a zero timeout polls instead of arming a timer: the spin, made cheaper",
            {"expired": "poll"},
        ),
        Preset(
            "held-listed",
            "shipped, but a held completion keeps its place on the list: spins while the handler"
            " runs",
            {"held": "listed"},
        ),
        Preset(
            "held-unlisted",
            "shipped, but a held completion gives up its place until its handler hands back",
            {"held": "unlisted"},
        ),
        Preset(
            "fixed",
            "leaves the list, waits with a timeout, keeps the order, holds unlisted: quiet at the"
            " cost of an idle loop",
            _FIXED,
        ),
        Preset(
            "tickless",
            "fixed, and asleep until a real deadline or an event: no wake-ups at all while nothing"
            " can move",
            _TICKLESS,
        ),
        Preset(
            "mirror",
            "fixed too eagerly: leaves the list even while it owes work, so work is forgotten",
            _FIXED | {"membership": "eager"},
        ),
    )
}

# Pairs that cannot both be meant, and why.
_SENSELESS = (
    (("idle", "tickless"), ("handback", "no-wake"),
     "a tickless loop never looks at the detach queue unasked, so a hand-over must wake it"),
    (("idle", "tickless"), ("send-wait", "untimed"),
     "a tickless loop sleeps to its next deadline, which a wait without a timeout would ignore"),
)


@cache
def table() -> dict[str, dict[str, Choice]]:
    """The engine's table: decision -> choice name -> :class:`Choice`, in the engine's order."""
    ffi, lib = native()
    out: dict[str, dict[str, Choice]] = {}
    for number, decision in enumerate(words("rl_decision")):
        out[decision] = {}
        while (c := lib.rl_choice_at(number, len(out[decision]))) != ffi.NULL:
            choice = Choice(
                text(c.decision), text(c.name), text(c.what), bool(c.shipped), len(out[decision])
            )
            out[decision][choice.name] = choice
    return out


def shipped() -> dict[str, str]:
    """Decision -> the choice that the real system shipped."""
    return {
        decision: next(choice.name for choice in choices.values() if choice.shipped)
        for decision, choices in table().items()
    }


class Policy:
    """A policy of your own: subclass it and define the decisions that you want to take.

    Only the methods that a subclass defines are asked; every other decision is that of ``base``, a
    preset's name or a mapping of decisions to choices. They run on the worker's thread (those of
    ``direct_write`` and ``handback`` on a handler's) and hold the GIL: keep them short, and do not
    call the server from them. What they raise stops the worker and becomes a PolicyError.

    Answers are ``True``/``False`` or the choice's name where one is given below.
    """

    base: str | Mapping[str, str] = "fixed"

    def membership(self, conn: ConnView) -> bool | str:
        """Does this connection stay listed (``"listed"``, True) or not (``"leave"``)?

        Asked of members that still owe something. To let one go that no completion will bring back
        (``owes_recv``, or ``sending`` false) is the mirror fault: it is forgotten.
        """
        raise NotImplementedError

    def timeout(self, loop: LoopView) -> bool:
        """Does the list, as it is now, forbid the next wait to sleep?"""
        raise NotImplementedError

    def send_wait(self, loop: LoopView) -> bool | str:
        """Is the wait after preparing a SEND ``"untimed"`` (True) or ``"timed"``?"""
        raise NotImplementedError

    def direct_write(self, conn: ConnView) -> bool | str:
        """May a handler write now (``"at-once"``), or ``"behind-send"``?"""
        raise NotImplementedError

    def held(self, conn: ConnView) -> str:
        """A SEND completed while the handler holds the lock: ``"park"``, ``"listed"``,
        ``"unlisted"``."""
        raise NotImplementedError

    def handback(self, conn: ConnView) -> bool | str:
        """Does this hand-over ``"wake"`` the worker, or ``"no-wake"``?"""
        raise NotImplementedError

    def idle(self, loop: LoopView) -> float | None:
        """Seconds to sleep when nothing is to be done; None: until an event."""
        raise NotImplementedError

    def expired(self, loop: LoopView) -> str:
        """How a wait with timeout zero is made: ``"kernel"`` or ``"poll"``."""
        raise NotImplementedError

    def decisions(self) -> list[str]:
        """The decisions that this policy takes itself."""
        return [
            decision
            for decision in words("rl_decision")
            if method_name(decision) in vars(self)
            or getattr(type(self), method_name(decision)) is not _base_method(decision)
        ]


def method_name(decision: str) -> str:
    """The Python spelling of a decision: ``send-wait`` is the method ``send_wait``."""
    return decision.replace("-", "_")


def _base_method(decision: str) -> Any:
    return getattr(Policy, method_name(decision))


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


OWN = "own"


def resolve(
    policy: str | Mapping[str, str] | Policy | type[Policy] | ResolvedPolicy = "tickless",
    **choices: str,
) -> ResolvedPolicy:
    """The whole policy that ``policy`` means, with ``choices`` in place of some of its own.

    ``policy`` is a preset's name, a name such as ``shipped+membership=leave``, a mapping from
    decisions to choices (the others as shipped), or a :class:`Policy` (an object or the class).
    Decisions may be spelled ``send-wait`` or ``send_wait``. Raises UsageError for a name that is
    not known, and for a combination that makes no sense, with the reason.
    """
    asked = dict(_choice(decision, choice) for decision, choice in choices.items())
    if isinstance(policy, ResolvedPolicy):
        kept = {decision: name for decision, name in policy.choices.items() if name != OWN}
        asked = kept | asked
        policy = policy.custom or policy.choices
    if isinstance(policy, type) and issubclass(policy, Policy):
        policy = policy()
    if isinstance(policy, Policy):
        return _resolve_own(policy, asked)
    whole = _whole(policy) | asked
    _refuse_senseless(whole)
    return ResolvedPolicy(_name(whole), whole)


def _resolve_own(policy: Policy, asked: dict[str, str]) -> ResolvedPolicy:
    who = type(policy).__name__
    own = policy.decisions()
    if not own:
        names = ", ".join(map(method_name, table()))
        raise UsageError(f"policy {who} takes no decision; define at least one method of: {names}")
    for decision in own:
        if not callable(getattr(policy, method_name(decision))):
            raise UsageError(f"policy {who}: {method_name(decision)} is not a method")
        if decision in asked:
            raise UsageError(f"policy {who} decides '{decision}'; it cannot be chosen as well")
    whole = _whole(policy.base) | asked | dict.fromkeys(own, OWN)
    _refuse_senseless(whole)
    return ResolvedPolicy(who, whole, policy)


def _choice(decision: str, choice: object) -> tuple[str, str]:
    """The engine's spelling of both, or UsageError with what is allowed."""
    known = table()
    name = str(decision).replace("_", "-")
    if name not in known:
        raise unknown("decision", str(decision), known)
    value = str(choice).replace("_", "-")
    if value not in known[name]:
        raise unknown(f"choice of {name}", str(choice), known[name])
    return name, value


def _whole(policy: object) -> dict[str, str]:
    if isinstance(policy, Mapping):
        return shipped() | dict(_choice(decision, choice) for decision, choice in policy.items())
    if not isinstance(policy, str):
        raise UsageError(
            f"a policy is a preset's name, a mapping or a Policy, not {type(policy).__name__}"
        )
    preset, *changes = policy.split("+")
    if preset not in PRESETS:
        raise unknown("policy", preset, PRESETS)
    whole = PRESETS[preset].choices
    for change in changes:
        decision, _, choice = change.partition("=")
        whole.update([_choice(decision, choice)])
    return whole


def _refuse_senseless(whole: Mapping[str, str]) -> None:
    for (one, its), (other, others), reason in _SENSELESS:
        if whole[one] == its and whole[other] == others:
            raise UsageError(f"{one}={its} and {other}={others} make no sense together: {reason}")


def _name(whole: Mapping[str, str]) -> str:
    """The name of a combination: its preset's, or the nearest one's and what differs."""
    differ = {
        name: [f"{d}={whole[d]}" for d, choice in preset.choices.items() if whole[d] != choice]
        for name, preset in PRESETS.items()
    }
    nearest = min(differ, key=lambda name: len(differ[name]))
    return "+".join([nearest, *differ[nearest]])

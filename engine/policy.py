"""The ring server's policies: its presets, and the class of those that users write themselves.

How the engine asks such a one is in :mod:`engine.own_policy`; what holds for the decisions of any
engine in :mod:`engine.decisions`.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine import decisions
from engine.decisions import (
    OWN,
    AnyPolicy,
    Choice,
    Decisions,
    Preset,
    ResolvedPolicy,
    Seconds,
    Word,
    YesNo,
    method_name,
)
from engine.views import ConnView, LoopView, conn_view, loop_view

__all__ = [
    "OWN", "PRESETS", "RING", "AnyPolicy", "Choice", "Policy", "Preset", "ResolvedPolicy",
    "method_name", "resolve", "shipped", "table",
]

_FIXED = {
    "membership": "leave",
    "send-wait": "timed",
    "direct-write": "behind-send",
    "held": "unlisted",
}
_TICKLESS = _FIXED | {"handback": "wake", "idle": "tickless", "expired": "poll"}

PRESETS: dict[str, Preset] = {
    name: Preset(name, what, changes, of=lambda: RING)
    for name, what, changes in (
        ("shipped", "what the real system shipped, faults included", {}),
        (
            "order",
            "shipped, but a handler's bytes go behind a SEND in flight: order restored, spin kept",
            {"direct-write": "behind-send"},
        ),
        (
            "membership",
            "shipped, but a connection leaves the list while only its SEND can move it: the"
            " pipelined arm is cured, the single one stays parked",
            {"membership": "leave"},
        ),
        (
            "timeout",
            "shipped, but only members that the worker can move forbid it to sleep",
            {"timeout": "movable"},
        ),
        (
            "timed-wait",
            "shipped, but no wait is without a timeout: what was parked now spins",
            {"send-wait": "timed"},
        ),
        (
            "both",
            "shipped with the fixes of membership and of timed-wait, and no other change: quiet,"
            " though a response may still land inside another",
            {"membership": "leave", "send-wait": "timed"},
        ),
        (
            "no-timer",
            "shipped, but a zero timeout polls instead of arming a timer: the spin, made cheaper",
            {"expired": "poll"},
        ),
        (
            "held-listed",
            "shipped, but a held completion keeps its place on the list: spins while the handler"
            " runs",
            {"held": "listed"},
        ),
        (
            "held-unlisted",
            "shipped, but a held completion gives up its place until its handler hands back",
            {"held": "unlisted"},
        ),
        (
            "fixed",
            "leaves the list, waits with a timeout, keeps the order, holds unlisted: quiet at the"
            " cost of an idle loop",
            _FIXED,
        ),
        (
            "tickless",
            "fixed, and asleep until a real deadline or an event: no wake-ups at all while nothing"
            " can move",
            _TICKLESS,
        ),
        (
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


class Policy(decisions.Policy):
    """A policy of your own: subclass it and define the decisions that you want to take.

    Only the methods that a subclass defines are asked; every other decision is that of ``base``, a
    preset's name or a mapping of decisions to choices. They run on the worker's thread (those of
    ``direct_write`` and ``handback`` on a handler's) and hold the GIL: keep them short, and do not
    call the server from them. What they raise stops the worker and becomes a PolicyError.

    Answers are ``True``/``False`` or the choice's name where one is given below.
    """

    base: str | Mapping[str, str] = "fixed"

    @classmethod
    def family(cls) -> Decisions:
        """Those of the ring server."""
        return RING

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


RING: Decisions = Decisions(
    enum="rl_decision",
    choice_at="rl_choice_at",
    callback="rl_python_decide",
    presets=PRESETS,
    policy=Policy,
    answers={
        "membership": YesNo(("leave", "listed")),
        "timeout": YesNo(),
        "send-wait": YesNo(("timed", "untimed")),
        "direct-write": YesNo(("behind-send", "at-once")),
        "held": Word(("park", "listed", "unlisted")),
        "handback": YesNo(("no-wake", "wake")),
        "idle": Seconds(),
        "expired": Word(("kernel", "poll")),
    },
    of_loop=("timeout", "send-wait", "idle", "expired"),
    show=conn_view,
    show_loop=loop_view,
    senseless=_SENSELESS,
)


def table() -> dict[str, dict[str, Choice]]:
    """The ring server's table: see :meth:`engine.decisions.Decisions.table`."""
    return RING.table()


def shipped() -> dict[str, str]:
    """Decision -> the choice that the real system shipped."""
    return RING.shipped()


def resolve(policy: AnyPolicy = "tickless", **choices: str) -> ResolvedPolicy:
    """The whole policy of a ring server: see :meth:`engine.decisions.Decisions.resolve`."""
    return RING.resolve(policy, **choices)

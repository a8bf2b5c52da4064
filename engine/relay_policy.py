"""The relay's policies: its presets, and the class of those that users write themselves."""

from __future__ import annotations

from collections.abc import Mapping

from engine import decisions
from engine.decisions import AnyPolicy, Decisions, Preset, ResolvedPolicy, Word, YesNo
from engine.relay_views import RelayLoopView, SessionView, relay_loop_view, session_view

_RECV = {"recv-behind": "allowed"}
_FULL = {"early-leave": "sink-full"}
_LAST = {"last-block": "spliced"}
_SKIP = {"send-after-read": "skipped"}
_FIX = _RECV | _FULL

PRESETS: dict[str, Preset] = {
    name: Preset(name, what, changes, of=lambda: RELAY)
    for name, what, changes in (
        ("before", "the real system before its fix, fault included", {}),
        ("after", "the fix: recv behind the pipe, and an early leave counts as a full sink", _FIX),
        (
            "recv-allowed",
            "before, but what splice does not take, recv does: the cure, at more copying",
            _RECV,
        ),
        (
            "sink-full",
            "before, but an early leave counts as a full sink: the other half, no cure alone",
            _FULL,
        ),
        (
            "last-block",
            "before, but a last block is spliced while the pipe is in use: closes one way in",
            _LAST,
        ),
        (
            "skip-send",
            "before, but no send while write readiness is awaited: a faster spin with no EAGAIN",
            _SKIP,
        ),
        ("later", "the fix and both later improvements", _FIX | _LAST | _SKIP),
        ("no-splice", "before, with recv and send only", {"splice": "off"}),
        (
            "mirror",
            "the fix, but an EAGAIN of a full pipe clears the source's readiness: sleeps on live"
            " work",
            _FIX | {"readiness": "cleared"},
        ),
    )
}


class RelayPolicy(decisions.Policy):
    """A policy of your own: subclass it and define the decisions that you want to take.

    Only the methods that a subclass defines are asked; every other decision is that of ``base``, a
    preset's name or a mapping of decisions to choices. They run on the relay's thread and hold the
    GIL: keep them short, and do not call the relay from them. What they raise stops the relay and
    becomes a PolicyError.

    ``session.channel`` is the channel asked about. Answers are ``True``/``False`` or the choice's
    name.
    """

    base: str | Mapping[str, str] = "after"

    @classmethod
    def family(cls) -> Decisions:
        """Those of the relay."""
        return RELAY

    def recv_behind(self, session: SessionView) -> bool | str:
        """May recv run while the pipe holds data: ``"allowed"`` (True) or ``"forbidden"``?"""
        raise NotImplementedError

    def early_leave(self, session: SessionView) -> bool | str:
        """The splice loop was left early: ``"sink-full"`` (True), or ``"no-mark"``?"""
        raise NotImplementedError

    def last_block(self, session: SessionView) -> bool | str:
        """Less than the least size is left, the pipe in use: ``"spliced"`` (True), ``"copied"``?"""
        raise NotImplementedError

    def send_after_read(self, session: SessionView) -> bool | str:
        """Bytes are in the pipe, write readiness is awaited: send ``"at-once"`` (True), or
        ``"skipped"``?"""
        raise NotImplementedError

    def engine(self, loop: RelayLoopView) -> str:
        """Is this turn ``"speculative"`` or ``"level-triggered"``?"""
        raise NotImplementedError

    def splice(self, session: SessionView) -> bool | str:
        """Splice this body (``"on"``, True), or recv and send it (``"off"``)?"""
        raise NotImplementedError

    def readiness(self, session: SessionView) -> str:
        """EAGAIN with data in the pipe: the source's readiness is ``"kept"`` or ``"cleared"``?"""
        raise NotImplementedError


RELAY: Decisions = Decisions(
    enum="rl_relay_rule",
    choice_at="rl_relay_choice_at",
    callback="rl_python_relay_decide",
    presets=PRESETS,
    policy=RelayPolicy,
    answers={
        "recv-behind": YesNo(("forbidden", "allowed")),
        "early-leave": YesNo(("no-mark", "sink-full")),
        "last-block": YesNo(("copied", "spliced")),
        "send-after-read": YesNo(("at-once", "skipped"), yes=0),
        "engine": Word(("speculative", "level-triggered")),
        "splice": YesNo(("on", "off"), yes=0),
        "readiness": Word(("kept", "cleared")),
    },
    of_loop=("engine",),
    show=session_view,
    show_loop=relay_loop_view,
)


def resolve(policy: AnyPolicy = "after", **choices: str) -> ResolvedPolicy:
    """The whole policy of a relay: see :meth:`engine.decisions.Decisions.resolve`."""
    return RELAY.resolve(policy, **choices)

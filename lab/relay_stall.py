"""One repetition on the relay, or on HAProxy in its place: idle, stall, drain; then the probes.

The order and the reasons are those of :mod:`lab.ring_stall`: figures first and in the dark, then
the probes, each with a stall of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from engine import SpliceRelay
from engine.counters import flatten_array
from engine.errors import EngineError
from engine.relay_views import ChannelView, SessionView
from lab.choreography import (
    HELD_BACK,
    HELD_BRIEFLY,
    Choreography,
    Counters,
    Player,
    ReadAll,
    Settle,
    State,
    wait_for,
)
from lab.clients import ClientError
from lab.experiment import IDLE
from lab.measure import Snapshot, Target, Window, measure, window_between
from lab.ring_stall import DRAIN, HONOURED_WITHIN_S, SAMPLE_HZ, Clock

WARM_UP_S = 0.05
TIMEOUT_MS = 200
STOP_GRACE_MS = 100
# Its time begins anew with every byte that the stalled side still takes, as window probes make it.
CLOSED_WITHIN_S = 2.0
# A stream that has not moved for so long will not move any more.
PATIENCE_S = 2.0
# Least to_forward for which splice is tried, RL_RELAY_MIN_SPLICE.
MIN_SPLICE = 4096
_MB = 1e6
# Reasons of a wait that can block.
BLOCKING = ("event", "deadline")

# The thread is there, and has come to its first wait.
RUNS = State("the loop waits", lambda counters: bool(counters["waiting"]))
NOBODY = State("no session is left", lambda counters: bool(counters["sessions"] == 0))


@dataclass(frozen=True)
class RelayStall:
    """How an arm brings its stall about: ``steps``; what ends it: ``drain``.

    ``meanwhile`` is played during the window, where that is no stall. ``timeout`` names the timeout
    that a stalled session must be closed by: ``client`` or ``server``; None: not asked.
    """

    steps: Choreography
    drain: Choreography = (ReadAll(),)
    meanwhile: Choreography = ()
    timeout: str | None = "client"

    @property
    def quick(self) -> Choreography:
        """The same stall for a probe, whose figures nobody reads: it may still settle."""
        return tuple(
            replace(step, state=HELD_BRIEFLY)
            if isinstance(step, Settle) and step.state is HELD_BACK else step
            for step in self.steps
        )


@dataclass
class RelayTarget:
    """A relay in this process, as a window measures it."""

    relay: SpliceRelay
    pid: int = field(default_factory=os.getpid)

    def thread_ids(self) -> Sequence[int]:
        """Its one thread."""
        return self.relay.thread_ids()

    def counters(self) -> Mapping[str, Any]:
        """Its flat counters."""
        return self.relay.counters()


class Served(Protocol):
    """What the windows are measured on, and where its clients connect."""

    @property
    def host(self) -> str:
        """A numeric address."""
        ...

    @property
    def port(self) -> int:
        """The port it listens on."""
        ...


@dataclass(frozen=True)
class Seen:
    """The windows of a repetition, what was seen in the stalled one, and what came of it."""

    windows: Mapping[str, Window]
    before: Counters | None
    after: Counters | None
    sessions: Sequence[SessionView]
    delivered: Mapping[str, Any]
    troubles: Sequence[str]


def measure_relay(
    stall: RelayStall, arm: str, window: str, policy: Any, repetition: int,
    seconds: float, origin: str, options: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything of a :class:`lab.experiment.Repetition` but its setting, as keywords for it."""
    with SpliceRelay(
        origin, policy, sample_hz=SAMPLE_HZ, stop_grace_ms=STOP_GRACE_MS, **options
    ) as relay:
        clock, target = Clock(), RelayTarget(relay)
        time.sleep(WARM_UP_S)
        wait_for(RUNS, relay.counters, HONOURED_WITHIN_S)
        seen = watch(stall, target, relay, window, seconds, clock)
        samples = clock.label(
            flatten_array(relay.samples()), arm, relay.policy.name, repetition
        )
        _empty(relay)
        # Where the stall was not reached there is nothing to probe, and it would take long.
        probed = not seen.troubles
        asked = probed and stall.timeout is not None
        return {
            "windows": seen.windows,
            "delivered": seen.delivered,
            "decisions": relay.policy.choices,
            "honours_write_timeout": honours_timeout(relay, stall) if asked else None,
            "evidence": evidence(seen, seen.windows[window].seconds),
            "samples": samples,
            # The last probe: it ends the relay.
            "honours_stop": honours_stop(relay, stall.quick) if probed else None,
        }


def watch(
    stall: RelayStall, target: Target, served: Served, window: str, seconds: float,
    clock: Clock | None = None,
) -> Seen:
    """The three windows, on anything that clients can connect to."""
    marks = clock or Clock()
    relay = target.relay if isinstance(target, RelayTarget) else None
    windows: dict[str, Window] = {}
    with marks.window(IDLE):
        windows[IDLE] = measure(target, IDLE, seconds)
    with _player(served, relay) as player:
        player.play(stall.steps)
        before = target.counters()
        with marks.window(window):
            windows[window] = _measured(stall, target, window, seconds, player)
        after = target.counters()
        sessions = relay.sessions() if relay is not None else []
        with marks.window(DRAIN):
            begun = Snapshot.take(target)
            player.play(stall.drain)
            windows[DRAIN] = window_between(DRAIN, begun, Snapshot.take(target))
        return Seen(windows, before, after, sessions, player.delivered(), player.troubles)


def _measured(
    stall: RelayStall, target: Target, window: str, seconds: float, player: Player
) -> Window:
    if not stall.meanwhile:
        return measure(target, window, seconds)
    return measure(target, window, seconds, sleep=lambda _: player.play(stall.meanwhile))


# ---- what a window showed -----------------------------------------------------------------------


def evidence(seen: Seen, seconds: float) -> dict[str, Any]:
    """Counts of the stalled window and the session as it was at its end, for ``evidence``."""
    troubles = list(seen.troubles)
    if seen.before is None or seen.after is None:
        return {"troubles": troubles}
    counts = {
        name: seen.after[name] - seen.before[name]
        for name in seen.after
        if name in seen.before and isinstance(seen.after[name], int)
    }
    stuck = max(seen.sessions, key=_held, default=None)
    channel = None if stuck is None else max((stuck.request, stuck.response), key=_in_channel)
    return {
        "seconds": seconds,
        "counts": {name: counts[name] for name in COUNTED},
        # It may have woken: now and then the kernel probes the shut window, and a little moves.
        "asleep": bool(seen.after["waiting"]) and not counts["noop_dispatches"]
        and seen.after["last_why"] in BLOCKING,
        "last_why": str(seen.after["last_why"]),
        "why": {name[4:]: counts[name] for name in counts if name.startswith("why_")
                and counts[name]} or {str(seen.after["last_why"]): 0},
        "channel": None if channel is None else asdict(channel),
        "session": None if stuck is None else {
            "requests": stuck.requests, "responses": stuck.responses, "outq": stuck.outq,
            "held_in": "request" if channel == stuck.request else "response"},
        "in_state": channel is not None and in_state(channel),
        "troubles": troubles,
    }


_SIDED = ("recv", "recv_eagain", "send", "send_eagain", "splice_in", "splice_in_eagain",
          "splice_out", "splice_out_eagain", "bytes_spliced", "bytes_copied")
COUNTED = (
    "iterations", "waits", "waits_zero", "waits_empty", "events", "wasted", "dispatches",
    "noop_dispatches", "sink_full", *(f"{name}_{side}" for name in _SIDED
                                      for side in ("client", "origin")),
)


def in_state(channel: ChannelView) -> bool:
    """Has this channel come to where the fault is?

    Its pipe holds data while too little may be forwarded for a splice; or, beyond that point,
    recv has put something behind the pipe.
    """
    little = 0 <= channel.to_forward < MIN_SPLICE
    return channel.piped > 0 and (little or channel.scheduled + channel.awaiting > 0)


def _in_channel(channel: ChannelView) -> int:
    return channel.piped + channel.scheduled + channel.awaiting


def _held(session: SessionView) -> int:
    return _in_channel(session.request) + _in_channel(session.response)


def rates(counts: Mapping[str, int], seconds: float) -> dict[str, float]:
    """The counts that tell the fault, per second: no-op dispatches, empty waits, EAGAINs."""
    eagain = {
        side: sum(counts[f"{call}_eagain_{side}"]
                  for call in ("recv", "send", "splice_in", "splice_out"))
        for side in ("client", "origin")
    }
    return {
        "noop_per_s": counts["noop_dispatches"] / seconds,
        "waits_zero_per_s": counts["waits_zero"] / seconds,
        "events_per_s": counts["events"] / seconds,
        "eagain_client_per_s": eagain["client"] / seconds,
        "eagain_origin_per_s": eagain["origin"] / seconds,
    }


def per_mb(counts: Mapping[str, int]) -> Mapping[str, float | None]:
    """Waits, splice and recv calls for each MB (10^6 bytes) that came, and the share spliced."""
    spliced = counts["bytes_spliced_client"] + counts["bytes_spliced_origin"]
    total = spliced + counts["bytes_copied_client"] + counts["bytes_copied_origin"]
    if not total:
        return dict.fromkeys(("waits_per_mb", "splice_per_mb", "recv_per_mb", "spliced_share"))
    calls = {
        "waits_per_mb": counts["waits"],
        "splice_per_mb": sum(counts[f"splice_{way}_{side}"]
                             for way in ("in", "out") for side in ("client", "origin")),
        "recv_per_mb": counts["recv_client"] + counts["recv_origin"],
    }
    each = {name: count / (total / _MB) for name, count in calls.items()}
    return each | {"spliced_share": spliced / total}


# ---- probes -------------------------------------------------------------------------------------


def honours_timeout(relay: SpliceRelay, stall: RelayStall) -> bool:
    """Is a stalled session closed by its timeout of TIMEOUT_MS, soon after it?"""
    counter = f"closes_{stall.timeout}_timeout"
    limit: dict[str, Any] = {f"{stall.timeout}_timeout_ms": TIMEOUT_MS}
    earlier = relay.counters()[counter]
    ended = State("closed by its timeout", lambda now: bool(now[counter] > earlier))
    try:
        with _player(relay, relay) as player:
            player.play(stall.quick)
            relay.set(**limit)
            return wait_for(ended, relay.counters, TIMEOUT_MS / 1e3 + CLOSED_WITHIN_S)
    except ClientError:
        return False
    finally:
        limit = dict.fromkeys(limit, 0)
        relay.set(**limit)
        _empty(relay)


def honours_stop(relay: SpliceRelay, steps: Choreography) -> bool:
    """Does a stalled loop leave within HONOURED_WITHIN_S once it was asked to stop?"""
    with _player(relay, relay) as player:
        player.play(steps)
        relay.request_stop()
        return relay.wait_stopped(HONOURED_WITHIN_S)


def _player(served: Served, relay: SpliceRelay | None) -> Player:
    return Player(
        served.host, served.port, watch=None if relay is None else relay.counters,
        patience=PATIENCE_S, strict=False,
    )


def _empty(relay: SpliceRelay) -> None:
    """Wait until the last stall is over, so that it does not colour the next probe."""
    try:
        wait_for(NOBODY, relay.counters, HONOURED_WITHIN_S)
    except EngineError:
        pass  # the loop has ended; the next call says why


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The counts of several repetitions together."""
    each = list(counts)
    return {name: sum(one[name] for one in each) for name in COUNTED} if each else {}

"""One repetition of a stall on the relay, or on HAProxy in its place: see :mod:`lab.stall`.

After the figures, two probes: the timeout of the side that stalls, and stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine import SpliceRelay
from engine.relay_views import ChannelView, SessionView
from lab.choreography import (
    HELD_BACK,
    HELD_BRIEFLY,
    MIN_SPLICE,
    Choreography,
    ReadWhile,
    Settle,
    State,
    Step,
    wait_for,
)
from lab.stall import (
    HONOURED_WITHIN_S,
    SAMPLE_HZ,
    Clock,
    EngineTarget,
    Probes,
    Seen,
    Stall,
    Timeout,
    Watch,
)

WARM_UP_S = 0.05
_TIMEOUT_MS = 200
# Its time begins anew with every byte that the stalled side still takes, as window probes make it.
_CLOSED_WITHIN_S = 2.0
STOP_GRACE_MS = 100
# A stream that has not moved for so long will not move any more.
PATIENCE_S = 2.0
_MB = 1e6
# Reasons of a wait that can block.
BLOCKING = ("event", "deadline")

# The thread is there, and has come to its first wait.
RUNS = State("the loop waits", lambda counters: bool(counters["waiting"]))
NOBODY = State("no session is left", lambda counters: bool(counters["sessions"] == 0))


@dataclass(frozen=True, kw_only=True)
class RelayStall(Stall):
    """A stall; ``timeout`` names the timeout that must close it: ``client`` or ``server``; None:
    not asked."""

    timeout: str | None = "client"

    @property
    def limit(self) -> Timeout:
        """For the probe."""
        return Timeout(f"{self.timeout}_timeout_ms", f"closes_{self.timeout}_timeout", _TIMEOUT_MS,
                       _CLOSED_WITHIN_S, first=False)

    @property
    def quick(self) -> Choreography:
        """The same stall for a probe, whose figures nobody reads: it may still settle."""
        return tuple(map(_briefly, self.steps))


def _briefly(step: Step) -> Step:
    match step:
        case Settle(state=state) if state is HELD_BACK:
            return replace(step, state=HELD_BRIEFLY)
        case ReadWhile(settled=settled) if settled is HELD_BACK:
            return replace(step, settled=HELD_BRIEFLY)
    return step


def measure_relay(
    stall: RelayStall, arm: str, window: str, policy: Any, repetition: int,
    seconds: float, origin: str, options: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything of a :class:`lab.experiment.Repetition` but its setting, as keywords for it."""
    with SpliceRelay(
        origin, policy, sample_hz=SAMPLE_HZ, stop_grace_ms=STOP_GRACE_MS, **options
    ) as relay:
        clock, probes = Clock(), Probes(relay, NOBODY, PATIENCE_S)
        time.sleep(WARM_UP_S)
        wait_for(RUNS, relay.counters, HONOURED_WITHIN_S)
        watch = Watch(EngineTarget(relay), clock, relay.sessions)
        seen = watch.repetition(stall, probes.player(), window, seconds)
        samples = clock.label(relay, arm, repetition)
        probes.empty()
        # Where the stall was not reached there is nothing to probe, and it would take long.
        probed = not seen.troubles
        asked = probed and stall.timeout is not None
        return {
            "windows": seen.windows,
            "delivered": seen.delivered,
            "decisions": relay.policy.choices,
            "honours_write_timeout":
                probes.honours_timeout(stall.quick, stall.limit) if asked else None,
            "evidence": evidence(seen, seen.windows[window].seconds),
            "samples": samples,
            "honours_stop": probes.honours_stop(stall.quick) if probed else None,
        }


# ---- what a window showed -----------------------------------------------------------------------


def evidence(seen: Seen, seconds: float) -> dict[str, Any]:
    """Counts of the stalled window and the session as it was at its end, for ``evidence``."""
    troubles = list(seen.troubles)
    before, after = seen.stalled.before, seen.stalled.after
    if before is None or after is None:
        return {"troubles": troubles}
    counts = {
        name: after[name] - before[name]
        for name in after
        if name in before and isinstance(after[name], int)
    }
    stuck = max(seen.stalled.views, key=_held, default=None)
    channel = None if stuck is None else max((stuck.request, stuck.response), key=_in_channel)
    return {
        "seconds": seconds,
        "counts": {name: counts[name] for name in COUNTED},
        # It may have woken: now and then the kernel probes the shut window, and a little moves.
        "asleep": bool(after["waiting"]) and not counts["noop_dispatches"]
        and after["last_why"] in BLOCKING,
        "last_why": str(after["last_why"]),
        "why": {name[4:]: counts[name] for name in counts if name.startswith("why_")
                and counts[name]} or {str(after["last_why"]): 0},
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


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The counts of several repetitions together."""
    each = list(counts)
    return {name: sum(one[name] for one in each) for name in COUNTED} if each else {}

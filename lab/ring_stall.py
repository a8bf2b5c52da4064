"""One repetition of a stall on the bundled ring server: see :mod:`lab.stall`.

After the figures, three probes: write timeout, what others wait, stop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine import RingServer, facts
from lab import proc
from lab.choreography import Choreography, Poke, Settle, State
from lab.clients import ClientError
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

# The periodic wait of a fresh loop grows to its cap in the first moments; idle is what follows.
WARM_UP_S = 0.15
# Write timeouts are looked for every few iterations, not at their instant.
_HOUSEKEEPING_S = 0.3
WRITE_TIMEOUT = Timeout("write_timeout_ms", "write_timeouts", 300,
                        HONOURED_WITHIN_S + _HOUSEKEEPING_S, first=True)
STOP_GRACE_MS = 200
# What did not come when the figures were taken is not waited for as long again.
_BRIEFLY_S = 0.2
# A stream that has not moved for so long will not move any more.
PATIENCE_S = 5.0

NOBODY = State("no connection is left", lambda counters: bool(counters["connections"] == 0))


@dataclass(frozen=True, kw_only=True)
class RingStall(Stall):
    """A stall, and what may be asked of it.

    ``longer`` make one that outlasts the probe of stop (where a handler's time ends the stall by
    itself).
    """

    longer: Choreography
    write_timeout: bool = True

    def again(self, seen: Seen) -> RingStall:
        """The same for a probe, after what was seen of the first."""
        if not seen.troubles:
            return self
        return replace(self, steps=_briefly(self.steps), longer=_briefly(self.longer))


def _briefly(steps: Choreography) -> Choreography:
    return tuple(replace(step, most=min(step.most, _BRIEFLY_S)) if isinstance(step, Settle)
                 else step for step in steps)


class RingTarget(EngineTarget):
    """A ring server in this process, as a window measures it."""

    def thread_ids(self) -> Sequence[int]:
        """The workers, and the kernel's threads that serve their rings."""
        return [*self.engine.thread_ids(), *proc.ring_helpers(self.pid)]


def evidence(seen: Seen) -> dict[str, Any]:
    """For the experiment's ``evidence``: how the loop waited, why, and what was in flight."""
    before, after = seen.stalled.before or {}, seen.stalled.after or {}
    modes, whys = _changes(before, after, "waits_"), _changes(before, after, "why_")
    # A loop that sleeps through the whole window counts no wait in it: its last one still runs,
    # unless it is not in a wait at all but stands before a lock.
    slept = not any(modes.values())
    last = after["last_mode"] if after["waiting"] else "none"
    stuck = max(seen.stalled.views, key=lambda one: (one.sending, one.outq), default=None)
    return {
        "wait_mode": last if slept else max(modes, key=lambda mode: modes[mode]),
        "why": {why: count for why, count in whys.items() if count} or {after["last_why"]: 0},
        "connection": asdict(stuck) if stuck is not None else None,
        "outq": stuck.outq if stuck is not None and stuck.outq >= 0 else None,
        "list_length": after["list_length"],
        "sends": after["sends"],
        "held": after["held"],
        "troubles": list(seen.troubles),
    }


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> dict[str, int]:
    """How much each counter ``prefix*`` grew, under its name without the prefix."""
    return {
        name[len(prefix):]: after[name] - before[name]
        for name in after
        if name.startswith(prefix) and name in before
    }


def measure_ring(
    stall: RingStall, arm: str, window: str, policy: Any, repetition: int,
    seconds: float, options: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything of a :class:`lab.experiment.Repetition` but its setting, as keywords for it.

    A fresh server for each: what one stall leaves behind must not be part of the next.
    """
    with RingServer(
        policy, sample_hz=SAMPLE_HZ, stop_grace_ms=STOP_GRACE_MS, **options
    ) as server:
        clock, probes = Clock(), Probes(server, NOBODY, PATIENCE_S)
        time.sleep(WARM_UP_S)
        watch = Watch(RingTarget(server), clock, server.connections)
        seen = watch.repetition(stall, probes.player(), window, seconds)
        samples = clock.label(server, arm, repetition)
        found = evidence(seen)
        waits = any(one.sending or one.held for one in seen.stalled.views)
        again = stall.again(seen)
        honoured = None  # without a SEND that waits there is nothing to time out
        if again.write_timeout and waits:
            honoured = probes.honours_timeout(again.steps, WRITE_TIMEOUT)
        found["others_wait_ms"] = others_wait_ms(probes, again.steps)
        return {
            "windows": seen.windows,
            "delivered": seen.delivered,
            "decisions": server.policy.choices,
            "honours_write_timeout": honoured,
            "send_in_flight": waits,
            "polls_by_design": server.ring().setup == "sqpoll",
            "evidence": found,
            "engine": facts.of_ring(server.ring()),
            "samples": samples,
            "honours_stop": probes.honours_stop(again.longer),
        }


def others_wait_ms(probes: Probes, steps: Choreography) -> float | None:
    """How long a small request on another connection takes while one stalls; None: no answer."""
    try:
        with probes.player() as player:
            try:
                player.play(steps)
                return player.poke(Poke(patience=PATIENCE_S))
            except ClientError:
                return None
    finally:
        probes.empty()


def median(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


"""One repetition on the bundled ring server: idle, stall, drain; then what a stalled loop ignores.

The figures are taken first and in the dark. The three probes come after, each with a stall of its
own, because each of them wakes the loop and so ends the state that was to be measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from engine import RingServer
from engine.counters import flatten_array
from engine.errors import EngineError
from lab import proc
from lab.choreography import Choreography, Counters, Player, Poke, ReadAll, State, wait_for
from lab.clients import ClientError
from lab.experiment import IDLE
from lab.measure import Snapshot, Window, measure, window_between

if TYPE_CHECKING:
    import numpy as np

SAMPLE_HZ = 100
DRAIN = "drain"
# The periodic wait of a fresh loop grows to its cap in the first moments; idle is what follows.
WARM_UP_S = 0.15
WRITE_TIMEOUT_MS = 300
HONOURED_WITHIN_S = 1.0
# Write timeouts are looked for every few iterations, not at their instant.
HOUSEKEEPING_S = 0.3
STOP_GRACE_MS = 200
# A stream that has not moved for so long will not move any more.
PATIENCE_S = 5.0

NOBODY = State("no connection is left", lambda counters: bool(counters["connections"] == 0))


@dataclass(frozen=True)
class Stall:
    """How an arm brings its stall about, and what may be asked of it.

    ``steps`` make it; ``longer`` make one that outlasts the probe of stop (where a handler's time
    ends the stall by itself). ``seconds`` bounds the stalled window by what the stall lasts:
    seconds from the newest request, None for as long as is liked.
    """

    steps: Choreography
    longer: Choreography
    seconds: float | None = None
    write_timeout: bool = True


@dataclass
class RingTarget:
    """A ring server in this process, as a window measures it."""

    server: RingServer
    pid: int = field(default_factory=os.getpid)

    def thread_ids(self) -> Sequence[int]:
        """The workers, and the kernel's threads that serve their rings."""
        return [*self.server.thread_ids(), *proc.ring_helpers(self.pid)]

    def counters(self) -> Mapping[str, Any]:
        """The flat counters of all workers."""
        return self.server.counters()


class Clock:
    """Which window was when, so that samples can be labelled afterwards."""

    def __init__(self) -> None:
        self.zero_ns = time.monotonic_ns()
        self._marks: list[tuple[str, int, int]] = []

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """The block is the window; a very short one waits at its end for a sample to fall in it.

        What is measured of it is measured within the block, so the wait is in no figure.
        """
        begun = time.monotonic_ns()
        try:
            yield
            time.sleep(max(0.0, 2 / SAMPLE_HZ - (time.monotonic_ns() - begun) / 1e9))
        finally:
            self._marks.append((name, begun, time.monotonic_ns()))

    def label(
        self, samples: np.ndarray[Any, Any], arm: str, policy: str, repetition: int
    ) -> np.ndarray[Any, Any]:
        """The flat samples with arm, policy, repetition, window (empty between two) and t_s."""
        import numpy as np

        t_ns = samples["t_ns"]
        window = np.full(len(samples), "", dtype="U16")
        for name, begun, ended in self._marks:
            window[(t_ns >= begun) & (t_ns <= ended)] = name
        added = {
            "arm": np.full(len(samples), arm),
            "policy": np.full(len(samples), policy),
            "repetition": np.full(len(samples), repetition, dtype="i4"),
            "window": window,
            "t_s": (t_ns - self.zero_ns) / 1e9,
        }
        names = samples.dtype.names or ()
        layout = [(name, column.dtype) for name, column in added.items()]
        layout += [(name, samples.dtype[name]) for name in names]
        out = np.empty(len(samples), dtype=layout)
        for name in names:
            out[name] = samples[name]
        for name, column in added.items():
            out[name] = column
        return out


@dataclass(frozen=True)
class Stalled:
    """What was seen of a stalled loop: counters before and after its window, and connections."""

    before: Counters
    after: Counters
    connections: Sequence[Any]
    troubles: Sequence[str]

    def changes(self, prefix: str) -> dict[str, int]:
        """How much each counter ``prefix_*`` grew, under its name without the prefix."""
        start = len(prefix) + 1
        return {
            name[start:]: self.after[name] - self.before[name]
            for name in self.after
            if name.startswith(prefix + "_") and name in self.before
        }

    def evidence(self) -> dict[str, Any]:
        """For the experiment's ``evidence``: how the loop waited, why, and what was in flight."""
        modes, whys = self.changes("waits"), self.changes("why")
        # A loop that sleeps through the whole window counts no wait in it: its last one still runs,
        # unless it is not in a wait at all but stands before a lock.
        slept = not any(modes.values())
        last = self.after["last_mode"] if self.after["waiting"] else "none"
        stuck = max(self.connections, key=lambda one: (one.sending, one.outq), default=None)
        return {
            "wait_mode": last if slept else max(modes, key=lambda mode: modes[mode]),
            "why": {why: count for why, count in whys.items() if count}
            or {self.after["last_why"]: 0},
            "connection": asdict(stuck) if stuck is not None else None,
            "outq": stuck.outq if stuck is not None and stuck.outq >= 0 else None,
            "list_length": self.after["list_length"],
            "sends": self.after["sends"],
            "held": self.after["held"],
            "troubles": list(self.troubles),
        }


def measure_ring(
    stall: Stall, arm: str, window: str, policy: Any, repetition: int,
    seconds: float, options: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything of a :class:`lab.experiment.Repetition` but its setting, as keywords for it.

    A fresh server for each: what one stall leaves behind must not be part of the next.
    """
    with RingServer(
        policy, sample_hz=SAMPLE_HZ, stop_grace_ms=STOP_GRACE_MS, **options
    ) as server:
        target, clock = RingTarget(server), Clock()
        time.sleep(WARM_UP_S)
        windows: dict[str, Window] = {}
        with clock.window(IDLE):
            windows[IDLE] = measure(target, IDLE, seconds)
        with _player(server) as player:
            player.play(stall.steps)
            seen = _stalled(target, clock, windows, window, _length(stall, player, seconds), player)
            with clock.window(DRAIN):
                before = Snapshot.take(target)
                player.play((ReadAll(),))
                windows[DRAIN] = window_between(DRAIN, before, Snapshot.take(target))
            delivered = player.delivered()
        samples = clock.label(
            flatten_array(server.samples()), arm, server.policy.name, repetition
        )
        evidence = seen.evidence()
        waits = any(one.sending or one.held for one in seen.connections)
        honoured = None  # without a SEND that waits there is nothing to time out
        if stall.write_timeout and waits:
            honoured = honours_write_timeout(server, stall.steps)
        evidence["others_wait_ms"] = others_wait_ms(server, stall.steps)
        return {
            "windows": windows,
            "delivered": delivered,
            "decisions": server.policy.choices,
            "honours_write_timeout": honoured,
            "send_in_flight": waits,
            "polls_by_design": server.ring().setup == "sqpoll",
            "evidence": evidence,
            "engine": engine_facts(server),
            "samples": samples,
            # The last probe: it ends the server.
            "honours_stop": honours_stop(server, stall.longer),
        }


def engine_facts(server: RingServer) -> dict[str, Any]:
    """What the kernel gave the first worker, for the description of the machine."""
    from engine.binding import native, text

    return {"liburing": text(native()[1].rl_liburing_version()), **asdict(server.ring())}


def honours_write_timeout(server: RingServer, steps: Choreography) -> bool:
    """Is a stalled connection ended by a write timeout of WRITE_TIMEOUT_MS, soon after it?

    The timeout is set before the stall, as any server has it.
    """
    server.set(write_timeout_ms=WRITE_TIMEOUT_MS)
    earlier = server.counters()["write_timeouts"]
    ended = State("ended by its timeout", lambda now: bool(now["write_timeouts"] > earlier))
    try:
        with _player(server) as player:
            try:
                player.play(steps)
            except ClientError:
                pass  # the timeout was faster than the choreography
            within = WRITE_TIMEOUT_MS / 1e3 + HONOURED_WITHIN_S + HOUSEKEEPING_S
            return wait_for(ended, server.counters, within)
    finally:
        server.set(write_timeout_ms=0)
        _empty(server)


def others_wait_ms(server: RingServer, steps: Choreography) -> float | None:
    """How long a small request on another connection takes while one stalls; None: no answer."""
    try:
        with _player(server) as player:
            try:
                player.play(steps)
                return player.poke(Poke(patience=PATIENCE_S))
            except ClientError:
                return None
    finally:
        _empty(server)


def honours_stop(server: RingServer, steps: Choreography) -> bool:
    """Does a stalled loop leave within HONOURED_WITHIN_S once it was asked to stop?"""
    with _player(server) as player:
        player.play(steps)
        server.request_stop()
        return server.wait_stopped(HONOURED_WITHIN_S)


def _stalled(
    target: RingTarget, clock: Clock, windows: dict[str, Window], name: str, seconds: float,
    player: Player,
) -> Stalled:
    before = target.counters()
    with clock.window(name):
        windows[name] = measure(target, name, seconds)
    after = target.counters()
    return Stalled(before, after, target.server.connections(), player.troubles)


def _length(stall: Stall, player: Player, seconds: float) -> float:
    if stall.seconds is None:
        return seconds
    left = stall.seconds - (time.monotonic() - player.asked_at)
    return max(0.05, min(seconds, left))


def _player(server: RingServer) -> Player:
    return Player(
        server.host, server.port, watch=server.counters, patience=PATIENCE_S, strict=False
    )


def _empty(server: RingServer) -> None:
    """Wait until the last stall is over, so that it does not colour the next probe."""
    try:
        wait_for(NOBODY, server.counters, HONOURED_WITHIN_S)
    except EngineError:
        pass  # the loop has ended; the next call says why


def median(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


"""One repetition of a stall, on any engine: idle, the stall, what drains it; then the probes.

The figures are taken first and in the dark. The probes come after, each with a stall of its own,
because each of them wakes the loop and so ends the state that was to be measured. What differs
from engine to engine (how a stall is brought about, what was seen in it, when it is over) is handed
in by :mod:`lab.ring_stall` and :mod:`lab.relay_stall`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.base import Engine
from engine.counters import flatten_array
from engine.errors import EngineError
from lab.choreography import Choreography, Counters, Player, ReadAll, State, wait_for
from lab.clients import ClientError
from lab.experiment import IDLE
from lab.measure import Snapshot, Target, Window, measure, window_between

if TYPE_CHECKING:
    import numpy as np

SAMPLE_HZ = 100
DRAIN = "drain"
HONOURED_WITHIN_S = 1.0


@dataclass
class EngineTarget:
    """An engine in this process, as a window measures it."""

    engine: Engine
    pid: int = field(default_factory=os.getpid)

    def thread_ids(self) -> Sequence[int]:
        """Its loops."""
        return self.engine.thread_ids()

    def counters(self) -> Mapping[str, Any]:
        """The flat counters of all its loops."""
        return self.engine.counters()


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

    def label(self, engine: Engine, arm: str, repetition: int) -> np.ndarray[Any, Any]:
        """The engine's flat samples with arm, policy, repetition, window (empty between two) and
        t_s."""
        import numpy as np

        samples = flatten_array(engine.samples())
        t_ns = samples["t_ns"]
        window = np.full(len(samples), "", dtype="U16")
        for name, begun, ended in self._marks:
            window[(t_ns >= begun) & (t_ns <= ended)] = name
        added = {
            "arm": np.full(len(samples), arm),
            "policy": np.full(len(samples), engine.policy.name),
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
class Stall:
    """How an arm brings its stall about: ``steps``; what ends it: ``drain``.

    ``meanwhile`` is played during the window, where that is no stall. ``seconds`` bounds the
    stalled window by what the stall lasts: seconds from the newest request, None for as long as is
    liked.
    """

    steps: Choreography
    drain: Choreography = (ReadAll(),)
    meanwhile: Choreography = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Stalled:
    """What was seen of a stalled loop: counters before and after its window, and its views.

    Counters are None of a foreign server, and it has no views.
    """

    before: Counters | None
    after: Counters | None
    views: Sequence[Any]


@dataclass(frozen=True)
class Seen:
    """The windows of a repetition, what was seen in the stalled one, and what came of it."""

    windows: Mapping[str, Window]
    stalled: Stalled
    delivered: Mapping[str, Any]
    troubles: Sequence[str]


class Watch:
    """Measures the windows of one repetition, on anything that clients can connect to.

    ``views`` tells what there is to see of the connections of a stalled loop.
    """

    def __init__(
        self, target: Target, clock: Clock | None = None,
        views: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        self._target = target
        self._clock = clock or Clock()
        self._views = views
        self._windows: dict[str, Window] = {}

    def repetition(self, stall: Stall, player: Player, name: str, seconds: float) -> Seen:
        """All three windows; the stalled one is ``name``."""
        self._measured(IDLE, seconds)
        with player:
            player.play(stall.steps)
            stalled = self._stalled(stall, player, name, seconds)
            with self._clock.window(DRAIN):
                begun = Snapshot.take(self._target)
                player.play(stall.drain)
                self._windows[DRAIN] = window_between(DRAIN, begun, Snapshot.take(self._target))
            return Seen(self._windows, stalled, player.delivered(), player.troubles)

    def _stalled(self, stall: Stall, player: Player, name: str, seconds: float) -> Stalled:
        if stall.seconds is not None:
            left = stall.seconds - (time.monotonic() - player.asked_at)
            seconds = max(0.05, min(seconds, left))
        before = self._target.counters()
        self._measured(name, seconds, stall.meanwhile, player)
        return Stalled(before, self._target.counters(), self._views())

    def _measured(
        self, name: str, seconds: float, meanwhile: Choreography = (), player: Player | None = None
    ) -> None:
        with self._clock.window(name):
            self._windows[name] = (
                measure(self._target, name, seconds, sleep=lambda _: player.play(meanwhile))
                if player is not None and meanwhile else measure(self._target, name, seconds)
            )


# ---- probes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeout:
    """The timeout that a stall must be ended by: its setting, the counter that tells of it.

    ``within_s`` is how long after it the loop may take. ``first``: it is set before the stall, as
    any server has it; else it would end the steps that make the stall, and is set after them.
    """

    setting: str
    counter: str
    ms: int
    within_s: float
    first: bool


class Probes:
    """What a stalled loop may ignore. ``nobody`` is the state in which the last stall is over."""

    def __init__(self, engine: Engine, nobody: State, patience: float) -> None:
        self._engine = engine
        self._nobody = nobody
        self._patience = patience

    def player(self) -> Player:
        """A client of the engine that stops waiting where it stalls."""
        engine = self._engine
        return Player(
            engine.host, engine.port, watch=engine.counters, patience=self._patience, strict=False
        )

    def empty(self) -> None:
        """Wait until the last stall is over, so that it does not colour the next probe."""
        try:
            wait_for(self._nobody, self._engine.counters, HONOURED_WITHIN_S)
        except EngineError:
            pass  # the loop has ended; the next call says why

    def honours_timeout(self, steps: Choreography, limit: Timeout) -> bool:
        """Is a stalled connection ended by its timeout, soon after it?"""
        engine = self._engine
        earlier = engine.counters()[limit.counter]
        ended = State("ended by its timeout", lambda now: bool(now[limit.counter] > earlier))
        try:
            with self.player() as player:
                if limit.first:
                    engine.set(None, **{limit.setting: limit.ms})
                try:
                    player.play(steps)
                except ClientError:
                    if not limit.first:
                        return False
                    # The timeout was faster than the choreography.
                if not limit.first:
                    engine.set(None, **{limit.setting: limit.ms})
                return wait_for(ended, engine.counters, limit.ms / 1e3 + limit.within_s)
        finally:
            engine.set(None, **{limit.setting: 0})
            self.empty()

    def honours_stop(self, steps: Choreography) -> bool:
        """Does a stalled loop leave within HONOURED_WITHIN_S once it was asked to stop?

        The last probe: it ends the engine.
        """
        with self.player() as player:
            player.play(steps)
            self._engine.request_stop()
            return self._engine.wait_stopped(HONOURED_WITHIN_S)

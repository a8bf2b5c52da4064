"""From the native sampler's samples to the rows of the live picture, and what is kept of both.

The picture is decimated, the samples are not: every one that the engine took is kept for a while,
and a span that somebody selects is worked out from them, never from the picture. What a row holds
besides the CPU is said by each engine's :class:`Shape`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.counters import Layout, flatten_array

Rows = NDArray[np.float64]

CLOCKS = ("cpu", "process_cpu", "queued")
"""What every engine's row has after ``t``: ms per s of its thread, of the whole process, and on a
run queue, running or waiting."""
# A difference smaller than this cannot be seen in the picture: a count more or less in a row of
# 0.1 s (an idle loop of 40 waits a second makes 3 to 5), a percent of a core.
_SAME_COUNTS = 2.0
_SAME_CLOCKS = {"cpu": 12.0, "process_cpu": 60.0, "queued": 60.0}


@dataclass(frozen=True)
class Rowed:
    """One column of a row: counters by their flat names, added up, times ``scale``.

    ``how``: ``rate`` a count per second, and drawn on the logarithmic axis too; ``flow`` an amount
    per second; ``gauge`` as it is at the end of the row; ``asked`` what the engine was asked for.
    ``same``: a difference up to this is no change that the eye sees (a rate has its own rule).
    """

    name: str
    counters: tuple[str, ...] = ()
    how: Literal["rate", "flow", "gauge", "asked"] = "rate"
    scale: float = 1.0
    same: float = 0.0


@dataclass(frozen=True)
class Shape:
    """What the rows of one engine hold; ``ask`` is for what no counter has, once a look."""

    layout: Layout
    columns: tuple[Rowed, ...]
    ask: Callable[[Any], float] = lambda engine: 0.0
    present: str = ""
    """The gauge of those who are connected: while it is 0 nobody is asked."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All columns: ``t`` in s since the series began (end of the row), the clocks, the rest."""
        return ("t", *CLOCKS, *(each.name for each in self.columns))

    @cached_property
    def at(self) -> dict[str, int]:
        """Where each column stands."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def rates(self) -> tuple[str, ...]:
        """The counts per second."""
        return self.having("rate")

    def having(self, how: str) -> tuple[str, ...]:
        """The names of the columns that are made so."""
        return tuple(each.name for each in self.columns if each.how == how)

    def empty(self) -> Rows:
        """No rows."""
        return np.zeros((0, len(self.names)))

    def asked(self, engine: Any, newest: Any) -> float:
        """What ``ask`` says, if anybody is there."""
        if self.present and not int(newest["c"][self.present]):
            return 0.0
        return self.ask(engine)

    @cached_property
    def weights(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What makes rows of samples: of the changes per second, and of what is as it is.

        Each of shape (fields of a sample, columns of a row). One product instead of a look at
        each counter: this is done for every row of the picture.
        """
        size = (self.layout.sample_dtype.itemsize // 8, len(self.names))
        changes, states = np.zeros(size), np.zeros(size)
        clocks = (Rowed("cpu", ("thread_cpu_ns",), "flow", 1e-6),
                  Rowed("process_cpu", ("process_cpu_ns",), "flow", 1e-6),
                  Rowed("queued", ("run_ns", "queue_ns"), "flow", 1e-6))
        for column in (*clocks, *self.columns):
            into = states if column.how == "gauge" else changes
            for name in column.counters:
                into[self.layout.places(name), self.at[column.name]] += column.scale
        return changes, states


class Samples:
    """The newest samples of one server, oldest first, up to ``seconds`` of them.

    Kept as the engine made them: to lay them out flat costs more than to keep them, and few are
    ever asked for.
    """

    def __init__(self, layout: Layout, seconds: float = 120.0) -> None:
        self.seen = 0
        """Samples added since the beginning."""
        self._chunks: deque[NDArray[np.void]] = deque()
        self._layout, self._seconds = layout, seconds

    def add(self, samples: NDArray[np.void]) -> NDArray[np.void]:
        """Keeps native samples, and returns them."""
        if len(samples):
            self.seen += len(samples)
            self._chunks.append(samples)
            oldest = int(samples["t_ns"][-1]) - int(self._seconds * 1e9)
            while len(self._chunks) > 1 and int(self._chunks[0]["t_ns"][-1]) < oldest:
                self._chunks.popleft()
        return samples

    def since(self, t_ns: int, until_ns: int | None = None) -> NDArray[np.void]:
        """Those from ``t_ns`` (of CLOCK_MONOTONIC) on, as one flat array."""
        chunks = [chunk for chunk in list(self._chunks) if int(chunk["t_ns"][-1]) >= t_ns]
        if not chunks:
            return flatten_array(self._layout.empty(0))
        joined = np.concatenate(chunks)
        keep = joined["t_ns"] >= t_ns
        if until_ns is not None:
            keep &= joined["t_ns"] <= until_ns
        return flatten_array(joined[keep])

    def ends(self, t_ns: int, worker: int = 0) -> NDArray[np.void]:
        """The first and the newest of one worker's from ``t_ns`` on, flat: two, or fewer.

        A rate needs no more, and to lay out a second's worth costs a hundred times as much.
        """
        time_at, = self._layout.places("t_ns")
        worker_at, = self._layout.places("worker")
        found: list[NDArray[np.int64]] = []
        for chunk in list(self._chunks):
            if int(chunk["t_ns"][-1]) >= t_ns:
                rows = self._layout.matrix(chunk)
                rows = rows[(rows[:, worker_at] == worker) & (rows[:, time_at] >= t_ns)]
                found += [rows] if len(rows) else []
        if not found:
            return flatten_array(self._layout.empty(0))
        pair = np.concatenate([found[0][:1], found[-1][-1:]])
        alone = pair[0, time_at] == pair[1, time_at]
        return flatten_array(self._layout.from_matrix(pair[:1] if alone else pair))

    def clear(self) -> None:
        """Forgets them: another server's counters start from zero."""
        self._chunks.clear()


class Decimator:
    """Cuts the stream of samples into rows of about ``step`` seconds.

    The last row of a batch ends at the newest sample, so that the picture is not one step late; a
    backlog comes out in rows of one step each, so that nothing is averaged away.
    """

    def __init__(self, shape: Shape, zero_ns: int, step: float) -> None:
        self.shape = shape
        self.zero_ns = zero_ns
        self.step = step
        # Numbers rather than records: to join records costs more than all the rest.
        self._last: dict[int, NDArray[np.int64]] = {}
        self._time, = shape.layout.places("t_ns")
        self._worker, = shape.layout.places("worker")

    def restart(self) -> None:
        """The next sample is a first one: the counters began anew."""
        self._last.clear()

    def rows(self, samples: NDArray[np.void], asked: float) -> Rows:
        """The rows that native ``samples`` complete, shape (n, len(shape.names))."""
        numbers = self.shape.layout.matrix(samples)
        workers = np.unique(numbers[:, self._worker])
        per_worker = [
            self._worker_rows(int(worker), numbers[numbers[:, self._worker] == worker])
            for worker in workers
        ]
        rows = _together([rows for rows in per_worker if len(rows)], self.shape)
        if len(rows):
            for name in self.shape.having("asked"):
                rows[:, self.shape.at[name]] = asked
        return rows

    def _worker_rows(self, worker: int, flat: NDArray[np.int64]) -> Rows:
        last = self._last.get(worker)
        if last is None:
            self._last[worker] = flat[-1:].copy()
            return self.shape.empty()
        step_ns = int(self.step * 1e9)
        begun = int(last[0, self._time])
        times = flat[:, self._time]
        if int(times[-1]) - begun < step_ns // 2:
            return self.shape.empty()
        wanted = np.arange(begun + step_ns, int(times[-1]), step_ns)
        at = np.searchsorted(times, wanted)
        if len(at) and int(times[-1]) - int(times[at[-1]]) < step_ns // 2:
            at = at[:-1]
        cuts = np.unique(np.append(at, len(flat) - 1))
        chosen = np.concatenate([last, flat[cuts]])
        self._last[worker] = flat[-1:].copy()
        return self._between(chosen)

    def _between(self, numbers: NDArray[np.int64]) -> Rows:
        shape, t_ns = self.shape, self._time
        changes, states = shape.weights
        change = np.diff(numbers, axis=0)
        iterations, = shape.layout.places("iterations")
        seconds = np.maximum(change[:, t_ns] / 1e9, 1e-6)
        rows = (change @ changes) / seconds[:, None] + numbers[1:] @ states
        rows[:, shape.at["t"]] = (numbers[1:, t_ns] - self.zero_ns) / 1e9
        queued = shape.at["queued"]
        rows[:, queued] = np.clip(rows[:, queued], 0, 1000)
        # A server that was started again counts from zero: no row may show that as a rate.
        return np.asarray(rows[change[:, iterations] >= 0])


def _together(per_worker: list[Rows], shape: Shape) -> Rows:
    """Rows of several workers as one: amounts added up, the busiest one's time on queue."""
    if len(per_worker) <= 1:
        return per_worker[0] if per_worker else shape.empty()
    count = min(map(len, per_worker))
    stacked = np.stack([rows[-count:] for rows in per_worker])
    rows = stacked.sum(axis=0)
    for name in ("t", "process_cpu", "queued"):
        rows[:, shape.at[name]] = stacked[:, :, shape.at[name]].max(axis=0)
    return np.asarray(rows)


def differs(shape: Shape, row: Rows, other: Rows | None, step: float) -> bool:
    """Whether somebody who looks at the picture could tell ``row`` from ``other``."""
    if other is None:
        return True
    gap = np.abs(row - other)
    rates = [shape.at[name] for name in shape.rates]
    near = np.maximum(row, other)[rates] * 0.03
    return bool(
        np.any((row[rates] == 0) != (other[rates] == 0))  # to fall asleep is always a change
        or np.any(gap[rates] > np.maximum(_SAME_COUNTS / step, near))
        or any(gap[shape.at[name]] > same for name, same in _SAME_CLOCKS.items())
        or any(gap[shape.at[each.name]] > each.same
               for each in shape.columns if each.how != "rate")
    )


def pack(rows: Rows) -> bytes:
    """Rows as one buffer: column after column of little-endian float64."""
    return np.ascontiguousarray(rows.T, dtype="<f8").tobytes()


def span_figures(flat: NDArray[np.void]) -> Mapping[str, float] | None:
    """Means over a span of samples (two at least), worked out from the samples themselves.

    ``seconds``, ``samples``, every counter per s under its own name (``waits``, ``wasted``, ...),
    ``cpu`` ms per s, ``on_queue`` 0 to 1.
    """
    workers = [flat[flat["worker"] == worker] for worker in np.unique(flat["worker"])]
    pairs = [(part[0], part[-1]) for part in workers if len(part) > 1]
    if not pairs:
        return None
    seconds = max(float(b["t_ns"] - a["t_ns"]) for a, b in pairs) / 1e9
    if seconds <= 0:
        return None

    def change(*names: str) -> Iterable[float]:
        return (sum(float(b[name] - a[name]) for name in names) for a, b in pairs)

    counted = [name for name in flat.dtype.names or () if flat.dtype[name].kind == "i"]
    return {name: sum(change(name)) / seconds for name in counted} | {
        "seconds": seconds,
        "samples": float(len(flat)),
        "cpu": sum(change("thread_cpu_ns")) / 1e6 / seconds,
        "on_queue": min(1.0, max(change("run_ns", "queue_ns")) / 1e9 / seconds),
    }

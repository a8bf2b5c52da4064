"""From the native sampler's samples to the rows of the live picture, and what is kept of both.

The picture is decimated, the samples are not: every one that the engine took is kept for a while,
and a span that somebody selects is worked out from them, never from the picture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.binding import words
from engine.counters import flatten_array, sample_dtype

Rows = NDArray[np.float64]

WHYS = ("ready", "list", "overdue", "owed", "send", "idle", "deadline", "event")
RATES = ("iterations", "wasted", *(f"why_{why}" for why in WHYS))
"""Counts that a row has per second."""
COLUMNS = (
    "t", *RATES, "cpu", "process_cpu", "queued", "list_length", "sending", "held_now",
    "out_mib", "outq_kib",
)
"""Of a row: ``t`` in s since the series began (end of the row); rates per s; CPU in ms per s;
``queued`` ms per s on a run queue, running or waiting; gauges as they were at ``t``;
``out_mib`` MiB per s that the sockets took; ``outq_kib`` KiB that wait in the sockets."""
_AT = {name: number for number, name in enumerate(COLUMNS)}
_WHY_AT = {f"why_{why}": number for number, why in enumerate(words("rl_why"))}
# A difference smaller than this cannot be seen in the picture: a count more or less in a row of
# 0.1 s (an idle loop of 40 waits a second makes 3 to 5), a percent of a core.
_SAME_COUNTS = 2.0
_SAME_CPU = 12.0
_SAME_PROCESS_CPU = 60.0
_SAME_QUEUED = 60.0
_SAME_KIB = 1.0


class Samples:
    """The newest samples of one server, oldest first, up to ``seconds`` of them.

    Kept as the engine made them: to lay them out flat costs more than to keep them, and few are
    ever asked for.
    """

    def __init__(self, seconds: float = 120.0) -> None:
        self.seen = 0
        """Samples added since the beginning."""
        self._chunks: deque[NDArray[np.void]] = deque()
        self._seconds = seconds

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
            return flatten_array(np.zeros(0, dtype=sample_dtype()))
        joined = np.concatenate(chunks)
        keep = joined["t_ns"] >= t_ns
        if until_ns is not None:
            keep &= joined["t_ns"] <= until_ns
        return flatten_array(joined[keep])

    def clear(self) -> None:
        """Forgets them: another server's counters start from zero."""
        self._chunks.clear()


def _field(samples: NDArray[np.void], name: str) -> NDArray[np.int64]:
    """A column of native samples by its flat name, signed so that differences cannot wrap."""
    if name in (samples.dtype.names or ()):
        found = samples[name]
    elif name.startswith("why_"):
        found = samples["c"]["why"][:, _WHY_AT[name]]
    else:
        found = samples["c"][name]
    return found.astype(np.int64)


class Decimator:
    """Cuts the stream of samples into rows of about ``step`` seconds.

    The last row of a batch ends at the newest sample, so that the picture is not one step late; a
    backlog comes out in rows of one step each, so that nothing is averaged away.
    """

    def __init__(self, zero_ns: int, step: float) -> None:
        self.zero_ns = zero_ns
        self.step = step
        self._last: dict[int, NDArray[np.void]] = {}

    def restart(self) -> None:
        """The next sample is a first one: the counters began anew."""
        self._last.clear()

    def rows(self, samples: NDArray[np.void], outq_kib: float) -> Rows:
        """The rows that native ``samples`` complete, shape (n, len(COLUMNS))."""
        per_worker = [
            self._worker_rows(int(worker), samples[samples["worker"] == worker])
            for worker in np.unique(samples["worker"])
        ]
        rows = _together([rows for rows in per_worker if len(rows)])
        if len(rows):
            rows[:, _AT["outq_kib"]] = outq_kib
        return rows

    def _worker_rows(self, worker: int, flat: NDArray[np.void]) -> Rows:
        last = self._last.get(worker)
        if last is None:
            self._last[worker] = flat[-1:]
            return np.zeros((0, len(COLUMNS)))
        step_ns = int(self.step * 1e9)
        begun = int(last["t_ns"][0])
        times = flat["t_ns"].astype(np.int64)
        if int(times[-1]) - begun < step_ns // 2:
            return np.zeros((0, len(COLUMNS)))
        wanted = np.arange(begun + step_ns, int(times[-1]), step_ns)
        at = np.searchsorted(times, wanted)
        if len(at) and int(times[-1]) - int(times[at[-1]]) < step_ns // 2:
            at = at[:-1]
        cuts = np.unique(np.append(at, len(flat) - 1))
        chosen = np.concatenate([last, flat[cuts]])
        self._last[worker] = flat[-1:]
        return self._between(chosen)

    def _between(self, chosen: NDArray[np.void]) -> Rows:
        rows = np.zeros((len(chosen) - 1, len(COLUMNS)))
        seconds = np.maximum(np.diff(_field(chosen, "t_ns")) / 1e9, 1e-6)
        rows[:, _AT["t"]] = (_field(chosen, "t_ns")[1:] - self.zero_ns) / 1e9
        for name in RATES:
            rows[:, _AT[name]] = np.diff(_field(chosen, name)) / seconds
        rows[:, _AT["cpu"]] = np.diff(_field(chosen, "thread_cpu_ns")) / 1e6 / seconds
        rows[:, _AT["process_cpu"]] = np.diff(_field(chosen, "process_cpu_ns")) / 1e6 / seconds
        queued = np.diff(_field(chosen, "run_ns")) + np.diff(_field(chosen, "queue_ns"))
        rows[:, _AT["queued"]] = np.clip(queued / 1e6 / seconds, 0, 1000)
        for name in ("list_length", "sending", "held_now"):
            rows[:, _AT[name]] = _field(chosen, name)[1:]
        out = np.diff(_field(chosen, "bytes_sent")) + np.diff(_field(chosen, "bytes_direct"))
        rows[:, _AT["out_mib"]] = out / 2**20 / seconds
        # A server that was started again counts from zero: no row may show that as a rate.
        return np.asarray(rows[np.diff(_field(chosen, "iterations")) >= 0])


def _together(per_worker: list[Rows]) -> Rows:
    """Rows of several workers as one: amounts added up, the busiest one's time on queue."""
    if len(per_worker) <= 1:
        return per_worker[0] if per_worker else np.zeros((0, len(COLUMNS)))
    count = min(map(len, per_worker))
    stacked = np.stack([rows[-count:] for rows in per_worker])
    rows = stacked.sum(axis=0)
    for name in ("t", "process_cpu", "queued"):
        rows[:, _AT[name]] = stacked[:, :, _AT[name]].max(axis=0)
    return np.asarray(rows)


def differs(row: Rows, other: Rows | None, step: float) -> bool:
    """Whether somebody who looks at the picture could tell ``row`` from ``other``."""
    if other is None:
        return True
    gap = np.abs(row - other)
    counts = gap[[_AT[name] for name in RATES]]
    near = np.maximum(row, other)[[_AT[name] for name in RATES]] * 0.03
    rates = slice(_AT[RATES[0]], _AT[RATES[-1]] + 1)
    return bool(
        np.any((row[rates] == 0) != (other[rates] == 0))  # to fall asleep is always a change
        or np.any(counts > np.maximum(_SAME_COUNTS / step, near))
        or gap[_AT["cpu"]] > _SAME_CPU
        or gap[_AT["process_cpu"]] > _SAME_PROCESS_CPU
        or gap[_AT["queued"]] > _SAME_QUEUED
        or np.any(gap[[_AT[name] for name in ("list_length", "sending", "held_now")]] > 0)
        or gap[_AT["out_mib"]] > 0.01
        or gap[_AT["outq_kib"]] > _SAME_KIB
    )


def pack(rows: Rows) -> bytes:
    """Rows as one buffer: column after column of little-endian float64."""
    return np.ascontiguousarray(rows.T, dtype="<f8").tobytes()


def span_figures(flat: NDArray[np.void]) -> Mapping[str, float] | None:
    """Means over a span of samples (two at least), worked out from the samples themselves.

    ``seconds``, ``samples``, ``waits``/``wasted`` per s, ``cpu`` ms per s, ``on_queue`` 0 to 1.
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

    return {
        "seconds": seconds,
        "samples": float(len(flat)),
        "waits": sum(change("waits")) / seconds,
        "wasted": sum(change("wasted")) / seconds,
        "cpu": sum(change("thread_cpu_ns")) / 1e6 / seconds,
        "on_queue": min(1.0, max(change("run_ns", "queue_ns")) / 1e9 / seconds),
    }


def column(rows: Rows, name: str) -> Any:
    """One column of rows, by name."""
    return rows[:, _AT[name]]

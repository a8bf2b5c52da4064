"""The feeding thread: takes every sample out of the native ring, and sends what can be seen."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from engine.base import Engine
from engine.errors import RinglabError
from lab import dark
from lab.live.series import Decimator, Rows, Samples, Shape, differs, pack
from lab.live.stream import View, Watch
from lab.measure import thread_clock_ns
from lab.parameters import Parameter

RATE_HZ = 10.0
MOST_HZ = 20.0
KEPT_ROWS = 600
KEPT_MARKS = 40
# The share of a core that the panel may cost; above it the rate is halved.
BUDGET = 0.03
SLOWEST_HZ = 2.0
RATE = Parameter("rate", float, RATE_HZ, "frames a second", SLOWEST_HZ, MOST_HZ)
# While nothing is sent, the ring is emptied this often; it holds much more than that.
_RESTING_S = 0.5
_LONGEST_DARK_S = 45.0
_COST_S = 5.0
_ONE_MOVE_S = 1.5
_SETTLE_S = 0.5
# A change goes out with the first row that shows its effect.
_EFFECT_S = 0.04
_ACCOUNT_S = 0.5

Mark = dict[str, Any]


class Feed:
    """Streams one server to one view until it is closed, in rows of ``shape``.

    ``tick`` is called after each look at the samples, on the feeding thread, with whether there is
    a new row; ``failed`` once with the error that ended the server.
    """

    def __init__(
        self, server: Engine, view: View, watch: Watch, shape: Shape, hz: float = RATE_HZ, *,
        tick: Callable[[bool], object] = lambda new: None,
        failed: Callable[[RinglabError], object] = lambda error: None,
    ) -> None:
        hz = float(RATE.check(hz))
        self.samples = Samples(shape.layout)
        self.lost = 0
        self.hz = self._wanted_hz = hz
        self.zero_ns = time.monotonic_ns()
        self.cost = 0.0
        """Share of a core: this thread, and the kernel's thread that sends."""
        self.frames = 0
        self._server, self._view, self._watch = server, view, watch
        self._tick, self._failed = tick, failed
        self._shape = shape
        self._cut = Decimator(shape, self.zero_ns, 1 / hz)
        self._history: deque[Rows] = deque(maxlen=KEPT_ROWS)
        self._marks: deque[Mark] = deque(maxlen=KEPT_MARKS)
        self._mark_number = 0
        self._unsent = 0
        self._new_marks: list[Mark] = []
        self._shown: Rows | None = None
        self._settle_at: float | None = None
        self._paused = False
        self._dark = 0
        self._dark_since = 0.0
        self._broken = False
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._look_at = math.inf  # sooner than the next turn
        self._costs: deque[tuple[float, int]] = deque(maxlen=256)
        self._cost_from = time.monotonic() + _COST_S / 2
        self._io_tid = _io_thread()
        self._thread = threading.Thread(target=self._run, name="ringlab-feed", daemon=True)
        dark.register(self)
        self._thread.start()

    # -- what others may ask of it ---------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether the picture was told to stand still."""
        return self._paused

    def pause(self, on: bool) -> None:
        """Stops the picture, or lets it catch up; samples are taken all the same."""
        self._paused = on
        self.wake()

    @property
    def is_dark(self) -> bool:
        """Whether a dark window is open."""
        return self._dark > 0

    @contextmanager
    def dark(self) -> Iterator[None]:
        """Nothing is streamed inside the block; samples wait in the native ring."""
        with self._lock:
            self._dark += 1
            self._dark_since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._dark -= 1
            self.wake()

    def mark(self, text: str, key: str = "") -> None:
        """Puts a mark with a name at this moment.

        Marks with one ``key`` shortly after another become one, with the newest text: a slider
        that is dragged was moved once.
        """
        at = (time.monotonic_ns() - self.zero_ns) / 1e9
        with self._lock:
            last = self._marks[-1] if self._marks else None
            if last and key and last["key"] == key and at - last["seen"] < _ONE_MOVE_S:
                last.update(text=text, seen=at)
                mark = last
            else:
                self._mark_number += 1
                mark = {"id": self._mark_number, "t": at, "text": text, "key": key, "seen": at}
                self._marks.append(mark)
            self._new_marks.append(mark)
        # With the first row that shows what it did: a page needs its time for each of two frames.
        self.wake(_EFFECT_S)

    def wake(self, seconds: float = 0.0) -> None:
        """Looks at the samples in so many seconds rather than at the next turn."""
        with self._lock:
            self._look_at = min(self._look_at, time.monotonic() + seconds)
        self._wake.set()

    def restart(self, server: Engine) -> None:
        """The server was started again, or replaced: its counters began anew, and it answers."""
        with self._lock:
            self._server = server
            self._cut.restart()
            self.samples.clear()
            self._broken = False
        self.wake()

    def send_history(self) -> None:
        """Everything that is kept, for a page that was opened (again)."""
        with self._lock:
            rows = np.array(self._history) if self._history else self._shape.empty()
            self._unsent, self._new_marks = 0, []
            self._shown = rows[-1] if len(rows) else None
            self._post(rows, list(self._marks), reset=True)
            self._cost_from = time.monotonic() + _COST_S / 2

    def close(self, seconds: float = 5.0) -> bool:
        """Ends the thread; whether it has ended."""
        self._stop.set()
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the thread -----------------------------------------------------------------------------

    @property
    def streaming(self) -> bool:
        """Whether frames go out when something changes."""
        return self._watch.watched and not (self._paused or self._dark or self._broken)

    def _pause(self) -> float:
        """Seconds from one look to the next."""
        return 1 / self.hz if self.streaming else _RESTING_S

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            due = max(due + self._pause(), time.monotonic())
            while (left := min(due, self._look_at) - time.monotonic()) > 0:
                self._wake.wait(left)
                self._wake.clear()
            with self._lock:
                if self._look_at < due:
                    due = time.monotonic()
                self._look_at = math.inf
            if self._stop.is_set():
                return
            try:
                self.look()
            except RinglabError as error:
                if not self._broken:
                    self._broken = True
                    self._failed(error)
            except Exception as error:  # a fault of ours must not end the thread silently
                if not self._broken:
                    self._broken = True
                    self._failed(RinglabError(f"the live picture stopped: {error!r}"))

    def look(self) -> None:
        """One turn: take, cut, send if there is somebody to see a change."""
        with self._lock:
            if self._dark and time.monotonic() - self._dark_since < _LONGEST_DARK_S:
                self._read_clock()
                return
            new = False if self._broken else self._take()
            if self.streaming and (self._unsent or self._new_marks):
                newest = self._history[-1] if self._history else None
                moved = newest is not None and differs(
                    self._shape, newest, self._shown, 1 / self.hz)
                settled = self._settle_at is not None and time.monotonic() >= self._settle_at
                if moved or self._new_marks or settled:
                    self._send()
                    # What follows a change looks the same soon; the picture ends on that.
                    self._settle_at = None if settled else time.monotonic() + _SETTLE_S
            self._account()
        self._tick(new)

    def _read_clock(self) -> None:
        """Reads the figures and leaves the samples where they are.

        What the process used while the loop slept is a straight line from reading to reading, and
        would be one over the whole of a dark window.
        """
        with suppress(RinglabError):  # told when the window is over
            self._server.counters()

    def _take(self) -> bool:
        native = self._server.samples()
        self.lost = self._server.dropped
        if not len(native):
            self._server.check()
            return False
        self.samples.add(native)
        rows = self._cut.rows(native, self._shape.asked(self._server, native[-1]))
        self._history.extend(rows)
        self._unsent = min(KEPT_ROWS, self._unsent + len(rows))
        return len(rows) > 0

    def _send(self) -> None:
        count = self._unsent
        rows = np.array([self._history[i] for i in range(-count, 0)]) if count else \
            self._shape.empty()
        marks, self._unsent, self._new_marks = self._new_marks, 0, []
        if len(rows):
            self._shown = rows[-1]
        self._post(rows, marks, reset=False)

    def _post(self, rows: Rows, marks: list[Mark], *, reset: bool) -> None:
        self.frames += 1
        self._watch.sent()
        self._view.post(
            {"kind": "rows", "seq": self.frames, "count": len(rows), "reset": reset,
             "marks": [{name: mark[name] for name in ("id", "t", "text")} for mark in marks],
             "kept": KEPT_ROWS},
            pack(rows),
        )

    def _account(self) -> None:
        """Works out the own cost; halves the rate when it is above the budget."""
        now = time.monotonic()
        if self._costs and now - self._costs[-1][0] < _ACCOUNT_S:
            return
        spent = time.thread_time_ns()
        if now < self._cost_from:  # what a page needs once is no running cost
            self._costs.clear()
            return
        if self._io_tid is not None:
            spent += thread_clock_ns(os.getpid(), self._io_tid) or 0
        self._costs.append((now, spent))
        while len(self._costs) > 2 and now - self._costs[0][0] > _COST_S:
            self._costs.popleft()
        seconds = now - self._costs[0][0]
        if seconds < 1.0:
            return
        self.cost = (spent - self._costs[0][1]) / 1e9 / seconds
        if seconds > _COST_S / 2:
            self._keep_to_budget()

    def _keep_to_budget(self) -> None:
        slower = self.cost > BUDGET and self.hz > SLOWEST_HZ
        if slower or (self.cost < 0.45 * BUDGET and self.hz < self._wanted_hz):
            self.hz = max(SLOWEST_HZ, self.hz / 2) if slower else min(self._wanted_hz, self.hz * 2)
            self._cut.step = 1 / self.hz
            self._costs.clear()


def _io_thread() -> int | None:
    """The thread of the kernel that sends messages; None outside a kernel."""
    for thread in threading.enumerate():
        if thread.name == "IOPub":
            return thread.native_id
    return None


"""A thread that does what it is given, one thing after the other, and ends when it is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], object]


class Lane:
    """One worker thread. What a piece of work raises goes to ``failed``, never to the log.

    Handlers of a widget run now on one thread, now on another, and must not block: they put their
    work here and return.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], object]) -> None:
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[str, Work] | None] = queue.SimpleQueue()
        self._pending: dict[str, int] = {}
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work, key: str = "") -> bool:
        """Do ``work`` after what is there already; False when the lane is closed.

        Of several pieces with the same ``key`` that are still waiting only the newest is done: a
        slider that is dragged asks for one reconnect, not for thirty.
        """
        with self._lock:
            if not self._open:
                return False
            if key:
                self._pending[key] = self._pending.get(key, 0) + 1
            self._queue.put((key, work))
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing waits in the queue."""
        return self._queue.empty()

    @property
    def native_id(self) -> int | None:
        """The kernel's id of the thread."""
        return self._thread.native_id

    def close(self, seconds: float = 5.0) -> bool:
        """Drops what waits, ends after what is being done; whether the thread has ended by then."""
        with self._lock:
            self._open = False
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            key, work = item
            if key:
                with self._lock:
                    self._pending[key] -= 1
                    outdated = self._pending[key] > 0
                if outdated:
                    continue
            try:
                work()
            except BaseException as error:
                self._failed(error)
            del work, item

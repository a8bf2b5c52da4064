"""A native engine's handle: who may use it when, and that it is ended exactly once."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.binding import native, text
from engine.errors import MachineError, PolicyError, UsageError, check
from engine.own_policy import Caller, inside, refuse_inside
from engine.startup import start_error

_WHERE_BYTES = 64
# How long a method of a policy may go on when its engine is closed, and until that is given up.
GRACE_S = 1.0
PATIENCE_S = 15.0


@dataclass(frozen=True)
class Calls:
    """The native calls of one kind of engine: ``calls("start")`` is ``rl_server_start``."""

    handle: str
    """The C type of its handle, with which the names of its calls begin."""
    policy: str
    """The C type of its policy."""
    named: dict[str, str] = field(default_factory=dict)
    """Calls whose name would be that of a type."""

    def __call__(self, name: str) -> Any:
        return getattr(native()[1], f"{self.handle}_{self.named.get(name, name)}")


class NativeServer:
    """Owns one native engine. Knows nothing of the Python object that uses it, so that it can
    outlive that one in a finalizer.

    One lock is held around every call: no call can meet a handle that another thread has freed.
    """

    def __init__(self, calls: Calls) -> None:
        ffi, _ = native()
        self._calls = calls
        self._lock = threading.RLock()
        self._pid = os.getpid()
        # The engine writes the handle into memory that we hold already: an interrupt that arrives
        # while it starts finds it here.
        self._out = ffi.new(f"{calls.handle} **")
        # Weak: a policy may refer to its engine, which a finalizer that held the policy would
        # then keep alive for ever.
        self._callers: list[weakref.ref[Caller]] = []
        self.told = False

    def start(self, config: Any) -> None:
        """Starts the engine; raises MachineError, UsageError or EngineError, all of one line."""
        ffi, _ = native()
        where = ffi.new("char[]", _WHERE_BYTES)
        with self._lock:
            result = self._calls("start")(config, self._out, where, _WHERE_BYTES)
        if result < 0:
            raise start_error(-result, text(where), config)

    def watch(self, caller: Caller) -> None:
        """From now on :meth:`check` tells what fails in this one; the owner keeps it alive."""
        self._callers.append(weakref.ref(caller))

    @property
    def open(self) -> bool:
        """Whether there is an engine to call. A child of fork() has none: threads do not follow."""
        return bool(self._out[0]) and os.getpid() == self._pid

    @contextlib.contextmanager
    def use(self, *, check_first: bool = True) -> Iterator[Any]:
        """The native handle, for the length of the block."""
        refuse_inside()
        with self._lock:
            if not self.open:
                raise UsageError("the server is not running; start it with start() or a with block")
            if check_first:
                self.check()
            yield self._out[0]

    def check(self) -> None:
        """Raises the PolicyError or EngineError that stopped the engine, if one did."""
        with self._lock:
            failed = self._calls("failed")(self._out[0]) if self.open else 0
            try:
                self._raise_policy_error(failed)
            except PolicyError:
                self.told = True
                raise
        if failed < 0:
            check(failed, "a worker's wait failed and it was stopped")

    def _raise_policy_error(self, failed: int) -> None:
        for reference in self._callers:
            if caller := reference():
                caller.raise_error()
        if failed == 1:
            raise PolicyError("a policy failed; the worker was stopped")

    def release(self) -> None:
        """Waits until no policy of the user's own runs; from then on none is asked.

        The wait is in Python, so that an interrupt ends it. A method that runs for longer than
        GRACE_S is interrupted; one that is stuck outside Python (in a long sleep, say) for longer
        than PATIENCE_S is a MachineError, since the engine's thread cannot be ended under it.
        """
        callers = [caller for reference in self._callers if (caller := reference())]
        for caller in callers:
            caller.end()
        begun = interrupted = time.monotonic()
        while busy := [caller for caller in callers if caller.busy]:
            now = time.monotonic()
            if now - begun > PATIENCE_S:
                raise MachineError(
                    f"policy {type(busy[0].policy).__name__} does not return, so its server cannot "
                    "be closed; call close() again later, or restart the process"
                )
            if now - interrupted > GRACE_S:
                interrupted = now
                for caller in busy:
                    caller.interrupt()
            time.sleep(0.005)

    def close(self) -> None:
        """Ends every thread and frees everything. Safe twice, and from any thread."""
        if inside():
            # A finalizer may run wherever Python collects, even on a worker in a policy's method,
            # and the engine would wait for that worker. Until it has ended it may ask again.
            asked = [reference() for reference in self._callers]
            threading.Thread(target=self._close, args=(asked,), name="ringlab-close").start()
        else:
            self._close()

    def _close(self, _alive: object = None) -> None:
        with self._lock:
            server = self._out[0]
            if not self.open:
                return
            self.release()
            # An interrupt is delivered when a call returns, so not between these two but after the
            # first: the handle is forgotten exactly when it was freed.
            try:
                self._calls("close")(server)
            finally:
                self._out[0] = native()[0].NULL



"""What every engine that runs in this process has: its life, settings, policy, samples and stop."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from engine import counters as counting
from engine import own_policy
from engine.binding import native
from engine.configured import Configured
from engine.decisions import AnyPolicy, ResolvedPolicy
from engine.errors import EngineError, PolicyError, UsageError, check
from engine.native_server import NativeServer
from engine.parameters import Range, Setting, enum_value
from engine.startup import need_descriptors

_TAKE = 256  # samples that one native call takes: room that malloc reuses, not maps anew
_POLL_SECONDS = 0.01
# The sample ring is sized for this rate at least, where that is allowed: sample_rate() may raise
# the rate later.
_LEAST_HZ = 100
_MOST_SAMPLES = 2_000_000  # about 1 GiB
_SECONDS = Range(0, 0, float("inf"), "s", real=True)
_NOT_IN_CONFIG = "sample_seconds"


class Engine(Configured):
    """An engine on native threads of this process.

    A subclass names its native calls, tables and layout, and says how a start is configured. Use it
    as a context manager, or with :meth:`start` and :meth:`close`; whatever way a block is left, no
    thread or descriptor stays behind.

    Every method raises UsageError while the engine does not run, and the PolicyError or EngineError
    that stopped it, if one did.
    """

    _layout: ClassVar[counting.Layout]
    _holds: ClassVar[tuple[str, int]]
    """The parameter that says how many a loop may hold, and the files that each of them takes."""

    def __init__(
        self,
        policy: AnyPolicy,
        host: str,
        settings: dict[str, Setting],
        start: dict[str, Setting],
        choices: dict[str, Any],
    ) -> None:
        super().__init__(policy, settings, choices)
        self._start = start
        self._host = host
        self._engine = NativeServer(self._calls)
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._life = threading.Lock()

    # -- what an engine says of itself ------------------------------------------------------------

    @property
    def workers(self) -> int:
        """How many loops it has, each on a thread of its own."""
        return 1

    def _config(self, keep: list[Any]) -> Any:
        """A new C configuration without what :meth:`_fill` adds.

        What it points to goes to ``keep``, which lives as long as the start takes.
        """
        raise NotImplementedError

    def _thread_id(self, server: Any, worker: int) -> int:
        """The kernel's thread id of a loop; 0 when it has ended."""
        raise NotImplementedError

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Starts the engine, unless it runs already; returns it."""
        own_policy.refuse_inside()
        with self._life:
            if not self._engine.open:
                self._launch()
        return self

    def _launch(self) -> None:
        name, each = self._holds
        self._capacity()  # what is too much is refused before anything is opened
        need_descriptors(self.workers, name, int(self._start[name]), each)
        self._engine = NativeServer(self._calls)
        self._callers = []
        # Registered first, so that an interrupt during the start leaves nothing behind. It runs at
        # exit too, while the interpreter still answers the workers.
        self._finalizer = weakref.finalize(self, self._engine.close)
        keep: list[Any] = []
        try:
            self._engine.start(self._fill(self._config(keep)))
        except BaseException:
            self._finalizer()
            raise

    def _fill(self, config: Any) -> Any:
        for name, value in self._start.items():
            if name != _NOT_IN_CONFIG:
                setattr(config, name, enum_value(self._tables.start[name], value))
        config.sample_capacity = self._capacity()
        self._tables.fill(config.settings, self._settings)
        self._keep(own_policy.fill(self._decisions, config.policy, self._policy))
        return config

    def _capacity(self) -> int:
        """The samples to have room for; UsageError for more than may be."""
        hz, seconds = int(self._start["sample_hz"]), int(self._start[_NOT_IN_CONFIG])
        kept = hz * seconds * self.workers
        if kept > _MOST_SAMPLES:
            where = f" on {self.workers} workers" if self.workers > 1 else ""
            raise UsageError(
                f"{_NOT_IN_CONFIG}={seconds} at sample_hz={hz}{where} would keep {kept:,} samples,"
                f" of {_MOST_SAMPLES:,} allowed; give {_NOT_IN_CONFIG}="
                f"{_MOST_SAMPLES // (hz * self.workers)} or less, or a lower sample_hz"
            )
        return max(kept, min(_LEAST_HZ * seconds * self.workers, _MOST_SAMPLES))

    def close(self) -> None:
        """Ends the engine and frees everything; safe to call again.

        Raises the PolicyError that stopped it, when no call has raised it yet.
        """
        own_policy.refuse_inside()
        with self._life:
            try:
                if not self._engine.told:
                    self._engine.check()
            except EngineError:
                pass  # an engine that failed is closed like any other
            finally:
                if self._finalizer is not None:
                    # Before the finalizer, which runs once: this may be interrupted, and repeated.
                    self._engine.release()
                    self._finalizer()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except PolicyError as failed:
            # A broken connection in the block is what the stopped worker led to, not the cause.
            if error is None or isinstance(error, OSError):
                raise
            error.add_note(str(failed))

    def __repr__(self) -> str:
        what = f"{type(self).__name__} {self._policy.name}"
        if not self._engine.open:
            return f"<{what}, not running>"
        return f"<{what} on {self.host} port {self.port}>"

    def _keep(self, caller: own_policy.Caller | None) -> None:
        super()._keep(caller)
        if caller is not None:
            self._engine.watch(caller)

    # -- where it is ----------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """The address that was asked for."""
        return self._host

    @property
    def port(self) -> int:
        """The port it listens on."""
        with self._engine.use(check_first=False) as server:
            return check(self._calls("port")(server), "port of the server")

    @property
    def address(self) -> tuple[str, int]:
        """``(host, port)``, as ``socket.create_connection`` takes it."""
        return self.host, self.port

    # -- settings and policy --------------------------------------------------------------------

    def default(self, setting: str) -> Setting:
        """What a live setting is unless somebody asks for something else."""
        return self._tables.defaults()[setting]

    def set(self, policy: AnyPolicy | None = None, **changes: Any) -> None:
        """Changes settings, the policy, or single decisions of it, while the engine runs.

        A policy acts on the next turn of the loop. Everything is checked first: when a UsageError
        is raised, nothing was changed.
        """
        own_policy.refuse_inside()
        with self._engine.use() as server:
            # Inside: a decision changes the policy that is in force, and so may another thread.
            checked, resolved = self._check_changes(policy, changes)
            for name, value in checked.items():
                key, number = self._tables.to_native(name, value)
                check(self._calls("set")(server, key, number), f"set {name}={value}")
                self._settings[name] = value
            if resolved is not None:
                self._switch(server, resolved)

    def _switch(self, server: Any, resolved: ResolvedPolicy) -> None:
        ffi, _ = native()
        c_policy = ffi.new(f"{self._calls.policy} *")
        self._keep(own_policy.fill(self._decisions, c_policy, resolved))
        check(self._calls("policy")(server, c_policy), f"set policy {resolved.name}")
        self._policy = resolved

    # -- what it does ---------------------------------------------------------------------------

    def sample(self, worker: int = 0) -> Any:
        """One loop's counters and clocks now: a record of its layout's ``sample_dtype``."""
        out = self._layout.empty(1)
        with self._engine.use() as server:
            index = self._worker(worker)
            check(self._calls("sample")(server, index, self._layout.pointer(out)), "sample")
        return out[0]

    def counters(self, worker: int | None = None) -> dict[str, int | str]:
        """The flat counters of one loop, or of all together (see :func:`counters.total`).

        :func:`engine.meanings.meanings` says what each one counts.
        """
        which = range(self.workers) if worker is None else [worker]
        return counting.total(self.sample(index) for index in which)

    def samples(self) -> NDArray[np.void]:
        """The samples since the last call, up to now, oldest first, shape (n,).

        A loop takes its own at each tick, natively; one that sleeps has none to take, and its
        figures are repeated for the ticks it slept through. So sampling wakes no thread. Nobody
        else reads the process's CPU meanwhile: between two readings, which every :meth:`sample`,
        :meth:`counters` and :meth:`samples` is, it is a straight line.

        Of the layout's ``sample_dtype``; ``counters.flatten_array`` makes the flat table.
        """
        return self._layout.of_memory(np.concatenate(list(self._take())))

    def _take(self) -> Iterator[NDArray[np.uint8]]:
        taken = _TAKE
        while taken == _TAKE:
            out = self._layout.memory(_TAKE)
            with self._engine.use() as server:
                to = self._layout.pointer(out)
                taken = check(self._calls("take")(server, to, _TAKE), "samples")
            yield out[: taken * self._layout.sample_dtype.itemsize]

    @property
    def dropped(self) -> int:
        """Samples that were overwritten before they were taken."""
        with self._engine.use() as server:
            return int(self._calls("dropped")(server))

    def sample_rate(self, hz: int) -> None:
        """Sets the samples a second, 0 to 1000; at another rate another stretch is kept."""
        self._tables.check_start({"sample_hz": hz})
        with self._engine.use() as server:
            check(self._calls("sample_rate")(server, hz), f"set the sample rate to {hz} Hz")

    def thread_ids(self) -> list[int]:
        """The kernel's thread id of every loop that still runs."""
        with self._engine.use(check_first=False) as server:
            ids = [self._thread_id(server, worker) for worker in range(self.workers)]
        return [thread for thread in ids if thread]

    def _worker(self, worker: int) -> int:
        index = Range(0, 0, self.workers - 1, "")
        return int(index.check("worker", worker))

    # -- the modelled stop ----------------------------------------------------------------------

    def request_stop(self) -> None:
        """The modelled stop: sets a flag that a loop sees when it next looks.

        A parked one does not; :meth:`wait_stopped` tells. :meth:`close` ends any.
        """
        with self._engine.use() as server:
            check(self._calls("stop")(server), "stop")

    def running(self) -> int:
        """Loops that were not left."""
        with self._engine.use() as server:
            return check(self._calls("running")(server), "running")

    def wait_stopped(self, seconds: float) -> bool:
        """Waits for every loop to be left, at most so long; whether they were."""
        until = time.monotonic() + _SECONDS.check("seconds", seconds)
        while self.running():
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_POLL_SECONDS, left))
        return True

    def check(self) -> None:
        """Raises the PolicyError (its cause: what was raised) or EngineError that stopped it.

        Does nothing when nothing did, or when the engine does not run.
        """
        self._engine.check()

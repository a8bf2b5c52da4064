"""The ring server: an io_uring HTTP worker whose decisions can be switched while it serves."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import counters as counting
from engine import own_policy, parameters
from engine.binding import native
from engine.errors import EngineError, PolicyError, check
from engine.native_server import NativeServer
from engine.parameters import Setting
from engine.policy import Policy, ResolvedPolicy, method_name, resolve, table
from engine.startup import need_descriptors
from engine.views import ConnView, LoopView, RingInfo, conn_view, loop_view, ring_info

AnyPolicy = str | Mapping[str, str] | Policy | type[Policy] | ResolvedPolicy

_TAKE = 4096  # samples that one native call takes
_POLL_SECONDS = 0.01
# The sample ring is sized for at least this rate: sample_rate() may raise it later.
_LEAST_HZ = 100
_MOST_SAMPLES = 2_000_000  # about 1 GiB


class RingServer:
    """An HTTP/1.1 server on 1..N io_uring workers, in this process, on native threads.

    ``GET /``, ``/sync`` and ``/async``, each with ``?size=BYTES`` and ``&ms=HANDLER_MS``; the body
    is a slice of the engine's pattern. Use it as a context manager, or with :meth:`start` and
    :meth:`close`; whatever way a block is left, no thread, socket or ring stays behind.

    :param policy: see :func:`engine.policy.resolve`; single decisions can be given as keywords
        (``send_wait="timed"``).
    :param response_size: bytes of a body for which the request names no size.
    :param handler_ms: ms that a handler takes where the request names none.
    :param route: ``sync`` or ``async``: what ``/`` means.
    :param so_sndbuf: bytes; 0: the kernel's choice.
    :param write_timeout_ms: ms without progress of a SEND until the connection ends; 0: none.
    :param wait_cap_ms: ms, the longest periodic sleep.
    :param max_pipeline: requests outstanding per connection before its input is not read.
    :param host: a numeric address; the default is loopback.
    :param port: 0: any free one.
    :param entries: SQ entries of each worker's ring.
    :param setup: ``auto``, ``none``, ``coop``, ``defer`` or ``sqpoll``.
    :param recv: ``auto``, ``buffer-ring`` or ``plain``.
    :param sq_idle_ms: with ``sqpoll``: ms until its thread sleeps.
    :param max_connections: per worker.
    :param max_header: bytes of a request head.
    :param stop_grace_ms: ms for responses under way after :meth:`request_stop`.
    :param sample_hz: samples a second and worker; 0: no sampler.
    :param sample_seconds: s of samples that are kept at that rate; the oldest give way.

    Every method raises UsageError while the server does not run, and the PolicyError or EngineError
    that stopped it, if one did.
    """

    def __init__(
        self,
        policy: AnyPolicy = "tickless",
        *,
        response_size: int = 3 * parameters.MIB,
        handler_ms: int = 0,
        route: str = "sync",
        so_sndbuf: int = 0,
        write_timeout_ms: int = 0,
        wait_cap_ms: float = 25,
        max_pipeline: int = 64,
        host: str = "127.0.0.1",
        port: int = 0,
        workers: int = 1,
        entries: int = 256,
        setup: str = "auto",
        recv: str = "auto",
        sq_idle_ms: int = 100,
        handlers: int = 4,
        max_connections: int = 1024,
        max_header: int = 8192,
        stop_grace_ms: int = 250,
        sample_hz: int = 100,
        sample_seconds: int = 120,
        **choices: str,
    ) -> None:
        self._settings = parameters.check_live(
            {
                "response_size": response_size,
                "handler_ms": handler_ms,
                "route": route,
                "so_sndbuf": so_sndbuf,
                "write_timeout_ms": write_timeout_ms,
                "wait_cap_ms": wait_cap_ms,
                "max_pipeline": max_pipeline,
            }
        )
        self._start = parameters.check_start(
            {
                "port": port,
                "workers": workers,
                "entries": entries,
                "setup": setup,
                "recv": recv,
                "sq_idle_ms": sq_idle_ms,
                "handlers": handlers,
                "max_connections": max_connections,
                "max_header": max_header,
                "stop_grace_ms": stop_grace_ms,
                "sample_hz": sample_hz,
                "sample_seconds": sample_seconds,
            }
        )
        self._host = parameters.check_host(host)
        self._policy = resolve(policy, **parameters.check_keywords(choices, decision_methods()))
        self._engine = NativeServer()
        self._finalizer: weakref.finalize[..., Any] | None = None
        # Every caller that the engine was given: it may be in one that was just replaced. They
        # outlive the finalizer, which Python runs before it takes this object apart.
        self._callers: list[own_policy.Caller] = []
        self._life = threading.Lock()

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> RingServer:
        """Starts the server, unless it runs already; returns it."""
        own_policy.refuse_inside()
        with self._life:
            if not self._engine.open:
                self._launch()
        return self

    def _launch(self) -> None:
        ffi, _ = native()
        need_descriptors(int(self._start["workers"]), int(self._start["max_connections"]))
        self._engine = NativeServer()
        self._callers = []
        # Registered first, so that an interrupt during the start leaves nothing behind. It runs at
        # exit too, while the interpreter still answers the workers.
        self._finalizer = weakref.finalize(self, self._engine.close)
        host = ffi.new("char[]", self._host.encode())
        try:
            self._engine.start(self._config(host))
        except BaseException:
            self._finalizer()
            raise

    def close(self) -> None:
        """Ends the server and frees everything; safe to call again.

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
                    self._finalizer()

    def __enter__(self) -> RingServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except PolicyError:
            if error is None:
                raise

    def __repr__(self) -> str:
        if not self._engine.open:
            return f"<RingServer {self._policy.name}, not running>"
        return f"<RingServer {self._policy.name} on {self.host} port {self.port}>"

    def _config(self, host: Any) -> Any:
        """The ``rl_config``; it points to ``host``, which must live as long."""
        ffi, _ = native()
        config = ffi.new("rl_config *")
        config.host = host
        for name, value in self._start.items():
            if name != "sample_seconds":
                setattr(config, name, parameters.enum_value(parameters.START[name], value))
        hz = max(int(self._start["sample_hz"]), _LEAST_HZ)
        kept = hz * int(self._start["sample_seconds"]) * self.workers
        config.sample_capacity = min(kept, _MOST_SAMPLES)
        parameters.fill(config.settings, self._settings)
        self._keep(own_policy.fill(config.policy, self._policy))
        return config

    def _keep(self, caller: own_policy.Caller | None) -> None:
        if caller is not None:
            self._callers.append(caller)
            self._engine.watch(caller)

    # -- where it is ----------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """The address that was asked for."""
        return self._host

    @property
    def port(self) -> int:
        """The port it listens on."""
        _, lib = native()
        with self._engine.use(check_first=False) as server:
            return check(lib.rl_server_port(server), "port of the server")

    @property
    def address(self) -> tuple[str, int]:
        """``(host, port)``, as ``socket.create_connection`` takes it."""
        return self.host, self.port

    # -- settings and policy --------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Setting]:
        """The live settings, by name."""
        return dict(self._settings)

    @property
    def policy(self) -> ResolvedPolicy:
        """The policy in force."""
        return self._policy

    def set(self, policy: AnyPolicy | None = None, **changes: Any) -> None:
        """Changes settings, the policy, or single decisions of it, while the server runs.

        Policy, write timeout and cap act on the next iteration; response size, handler time, route
        and depth on the next request; ``so_sndbuf`` on the next connection. Everything is checked
        first: when a UsageError is raised, nothing was changed.
        """
        own_policy.refuse_inside()
        known = decision_methods()
        choices = {name: changes.pop(name) for name in list(changes) if method_name(name) in known}
        checked = parameters.check_live(changes)
        resolved = None
        if policy is not None or choices:
            resolved = resolve(self._policy if policy is None else policy, **choices)
        _, lib = native()
        with self._engine.use() as server:
            for name, value in checked.items():
                key, number = parameters.to_native(name, value)
                check(lib.rl_server_set(server, key, number), f"set {name}={value}")
                self._settings[name] = value
            if resolved is not None:
                self._switch(server, resolved)

    def _switch(self, server: Any, resolved: ResolvedPolicy) -> None:
        ffi, lib = native()
        c_policy = ffi.new("rl_policy *")
        self._keep(own_policy.fill(c_policy, resolved))
        check(lib.rl_server_policy(server, c_policy), f"set policy {resolved.name}")
        self._policy = resolved

    # -- what it does ---------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """How many workers it has."""
        return int(self._start["workers"])

    def sample(self, worker: int = 0) -> Any:
        """One worker's counters and clocks now: a record of ``counters.sample_dtype()``."""
        _, lib = native()
        out = counting.empty(1)
        with self._engine.use() as server:
            index = self._worker(worker)
            check(lib.rl_server_sample(server, index, counting.pointer(out)), "sample")
        return out[0]

    def counters(self, worker: int | None = None) -> dict[str, int | str]:
        """The flat counters of one worker, or of all together (see :func:`counters.total`)."""
        which = range(self.workers) if worker is None else [worker]
        return counting.total(self.sample(index) for index in which)

    def samples(self) -> NDArray[np.void]:
        """The native sampler's samples since the last call, oldest first, shape (n,).

        Of ``counters.sample_dtype()``; ``counters.flatten_array`` makes the flat table.
        """
        return np.concatenate([*self._take(), counting.empty(0)])

    def _take(self) -> Iterator[NDArray[np.void]]:
        _, lib = native()
        taken = _TAKE
        while taken == _TAKE:
            out = counting.empty(_TAKE)
            with self._engine.use() as server:
                taken = check(lib.rl_server_take(server, counting.pointer(out), _TAKE), "samples")
            yield out[:taken]

    @property
    def dropped(self) -> int:
        """Samples that were overwritten before they were taken."""
        _, lib = native()
        with self._engine.use() as server:
            return int(lib.rl_server_dropped(server))

    def sample_rate(self, hz: int) -> None:
        """Sets the samples a second, 0 to 1000; at another rate another stretch is kept."""
        parameters.check_start({"sample_hz": hz})
        _, lib = native()
        with self._engine.use() as server:
            check(lib.rl_server_sample_rate(server, hz), f"set the sample rate to {hz} Hz")

    def connections(self) -> list[ConnView]:
        """Every connection of every worker, as it is now."""
        ffi, lib = native()
        most = self.workers * int(self._start["max_connections"])
        out = ffi.new("rl_conn_view[]", most)
        with self._engine.use() as server:
            count = check(lib.rl_server_connections(server, out, most), "connections")
        return [conn_view(out[index]) for index in range(count)]

    def loop(self, worker: int = 0) -> LoopView:
        """A worker's loop, as it is now."""
        ffi, lib = native()
        out = ffi.new("rl_loop_view *")
        with self._engine.use() as server:
            check(lib.rl_server_loop(server, self._worker(worker), out), "loop")
        return loop_view(out)

    def ring(self, worker: int = 0) -> RingInfo:
        """What the kernel gave a worker."""
        with self._engine.use() as server:
            return self._ring(server, self._worker(worker))

    def _ring(self, server: Any, worker: int) -> RingInfo:
        ffi, lib = native()
        out = ffi.new("rl_ring_info *")
        check(lib.rl_server_ring(server, worker, out), "ring")
        return ring_info(out)

    def thread_ids(self) -> list[int]:
        """The kernel's thread id of every worker that still runs."""
        with self._engine.use(check_first=False) as server:
            rings = [self._ring(server, worker) for worker in range(self.workers)]
        return [ring.thread_id for ring in rings if ring.thread_id]

    def memory(self) -> int:
        """Bytes of the engine's own memory that connections hold, beyond the kernel's."""
        ffi, lib = native()
        out = ffi.new("uint64_t *")
        with self._engine.use() as server:
            check(lib.rl_server_memory(server, out), "memory")
        return int(out[0])

    def _worker(self, worker: int) -> int:
        index = parameters.Range(0, 0, self.workers - 1, "")
        return int(index.check("worker", worker))

    # -- the modelled stop ----------------------------------------------------------------------

    def request_stop(self) -> None:
        """The modelled stop: sets a flag that a worker sees when its loop next looks.

        A parked worker does not; :meth:`wait_stopped` tells. :meth:`close` ends any.
        """
        _, lib = native()
        with self._engine.use() as server:
            check(lib.rl_server_stop(server), "stop")

    def running(self) -> int:
        """Workers that have not left their loop."""
        _, lib = native()
        with self._engine.use() as server:
            return check(lib.rl_server_running(server), "running")

    def wait_stopped(self, seconds: float) -> bool:
        """Waits for every worker to leave its loop, at most so long; whether they did."""
        until = time.monotonic() + seconds
        while self.running():
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_POLL_SECONDS, left))
        return True

    def check(self) -> None:
        """Raises the PolicyError (its cause: what was raised) or EngineError that stopped it.

        Does nothing when nothing did, or when the server does not run.
        """
        self._engine.check()


def decision_methods() -> list[str]:
    """The decisions as Python spells them."""
    return [method_name(decision) for decision in table()]

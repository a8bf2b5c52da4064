"""The ring server: an io_uring HTTP worker whose decisions can be switched while it serves."""

from __future__ import annotations

from typing import Any

from engine import counters, parameters
from engine.base import Engine
from engine.binding import native
from engine.decisions import AnyPolicy
from engine.errors import check
from engine.native_server import Calls
from engine.policy import RING
from engine.views import ConnView, LoopView, RingInfo, conn_view, loop_view, ring_info

__all__ = ["AnyPolicy", "RingServer", "decision_methods"]


class RingServer(Engine):
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
    :param max_handler_ms: ms that a request may ask for; one that asks for more gets a 400.
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

    :meth:`set` acts on the next iteration for policy, write timeout and cap; on the next request
    for response size, handler time, route and depth; on the next connection for ``so_sndbuf``.

    Every method raises UsageError while the server does not run, and the PolicyError or EngineError
    that stopped it, if one did.
    """

    _calls = Calls("rl_server", policy="rl_policy")
    _decisions = RING
    _tables = parameters.RING
    _layout = counters.RING
    _holds = ("max_connections", 1)

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
        max_handler_ms: int = 60_000,
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
        **choices: Any,
    ) -> None:
        settings = parameters.RING.check_live(
            {
                "response_size": response_size,
                "handler_ms": handler_ms,
                "route": route,
                "so_sndbuf": so_sndbuf,
                "write_timeout_ms": write_timeout_ms,
                "wait_cap_ms": wait_cap_ms,
                "max_pipeline": max_pipeline,
                "max_handler_ms": max_handler_ms,
            }
        )
        start = parameters.RING.check_start(
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
        super().__init__(policy, parameters.check_host(host), settings, start, choices)

    @property
    def workers(self) -> int:
        """How many workers it has."""
        return int(self._start["workers"])

    def _config(self, keep: list[Any]) -> Any:
        ffi, _ = native()
        config = ffi.new("rl_config *")
        keep.append(ffi.new("char[]", self._host.encode()))
        config.host = keep[-1]
        return config

    def _thread_id(self, server: Any, worker: int) -> int:
        return self._ring(server, worker).thread_id

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

    def memory(self) -> int:
        """Bytes of the engine's own memory that connections hold, beyond the kernel's."""
        ffi, lib = native()
        out = ffi.new("uint64_t *")
        with self._engine.use() as server:
            check(lib.rl_server_memory(server, out), "memory")
        return int(out[0])


def decision_methods() -> list[str]:
    """The decisions as Python spells them."""
    return RING.methods()

"""The relay: an epoll HTTP/1.1 proxy with splice; its decisions can be switched while it serves."""

from __future__ import annotations

from typing import Any

from engine import counters, parameters
from engine.base import Engine
from engine.binding import native
from engine.decisions import AnyPolicy
from engine.errors import UsageError, check
from engine.native_server import Calls
from engine.relay_policy import RELAY
from engine.relay_views import RelayLoopView, SessionView, relay_loop_view, session_view


class SpliceRelay(Engine):
    """An HTTP/1.1 relay in front of one origin, in this process, on one native thread.

    Clients may pipeline; each request goes to the origin on a connection of its own, and the next
    starts as soon as the response has been read, though its tail may still be on its way. Bodies go
    through a pipe with splice() where they may. It models a receive path of HAProxy 1.5-dev
    (commit 61d39a0e2, 2013, and those before and after it); its faults are policies.

    :param origin: ``HOST:PORT``, with a numeric host (``[::1]:8080`` for IPv6).
    :param policy: a preset's name (:data:`engine.relay_policy.PRESETS`), a mapping, or a
        :class:`engine.RelayPolicy`; single decisions can be given as keywords
        (``recv_behind="forbidden"``).
    :param so_sndbuf: SO_SNDBUF towards clients in bytes; 0: the kernel's choice; for new sessions.
    :param origin_sndbuf: the same towards the origin, for new requests.
    :param client_timeout_ms: ms that the client may not do what is awaited of it (send a request,
        take bytes); 0: no limit.
    :param server_timeout_ms: the same of the origin.
    :param connect_timeout_ms: ms for a connection to the origin; 0: no limit but the kernel's.
    :param host: a numeric address to listen on; the default is loopback.
    :param port: 0: any free one.
    :param max_sessions: clients at a time; more wait in the kernel's queue.
    :param max_head: bytes of a request's or a response's head.
    :param stop_grace_ms: ms for responses under way after :meth:`request_stop`.
    :param sample_hz: samples a second; 0: no sampler.
    :param sample_seconds: s of samples that are kept at that rate; the oldest give way.

    Every method raises UsageError while the relay does not run, and the PolicyError or EngineError
    that stopped it, if one did.
    """

    _calls = Calls(
        "rl_relay", policy="rl_relay_policy", named={"policy": "set_policy", "sample": "sample_now"}
    )
    _decisions = RELAY
    _tables = parameters.RELAY
    _layout = counters.RELAY
    _holds = ("max_sessions", 6)  # descriptors: two sockets and a pipe each way

    def __init__(
        self,
        origin: str,
        policy: AnyPolicy = "after",
        *,
        so_sndbuf: int = 0,
        origin_sndbuf: int = 0,
        client_timeout_ms: int = 0,
        server_timeout_ms: int = 0,
        connect_timeout_ms: int = 5_000,
        host: str = "127.0.0.1",
        port: int = 0,
        max_sessions: int = 1024,
        max_head: int = 8192,
        stop_grace_ms: int = 250,
        sample_hz: int = 100,
        sample_seconds: int = 120,
        **choices: Any,
    ) -> None:
        settings = parameters.RELAY.check_live(
            {
                "client_timeout_ms": client_timeout_ms,
                "server_timeout_ms": server_timeout_ms,
                "connect_timeout_ms": connect_timeout_ms,
                "so_sndbuf": so_sndbuf,
                "origin_sndbuf": origin_sndbuf,
            }
        )
        start = parameters.RELAY.check_start(
            {
                "port": port,
                "max_sessions": max_sessions,
                "max_head": max_head,
                "stop_grace_ms": stop_grace_ms,
                "sample_hz": sample_hz,
                "sample_seconds": sample_seconds,
            }
        )
        self._origin = check_origin(origin)
        super().__init__(policy, parameters.check_host(host), settings, start, choices)

    @property
    def origin(self) -> tuple[str, int]:
        """``(host, port)`` of the origin."""
        return self._origin

    def _config(self, keep: list[Any]) -> Any:
        ffi, _ = native()
        config = ffi.new("rl_relay_config *")
        keep += [ffi.new("char[]", text.encode()) for text in (self._host, self._origin[0])]
        config.host, config.origin_host = keep
        config.origin_port = self._origin[1]
        return config

    def _thread_id(self, server: Any, worker: int) -> int:
        return check(native()[1].rl_relay_thread_id(server, worker), "thread id")

    def sessions(self) -> list[SessionView]:
        """Every session, as it is now."""
        ffi, lib = native()
        most = int(self._start["max_sessions"])
        out = ffi.new("rl_relay_view[]", most)
        with self._engine.use() as relay:
            count = check(lib.rl_relay_sessions(relay, out, most), "sessions")
        return [session_view(out[index]) for index in range(count)]

    def loop(self, worker: int = 0) -> RelayLoopView:
        """The loop, as it is now."""
        ffi, lib = native()
        out = ffi.new("rl_relay_loop_view *")
        with self._engine.use() as relay:
            check(lib.rl_relay_loop(relay, self._worker(worker), out), "loop")
        return relay_loop_view(out)


def check_origin(origin: Any) -> tuple[str, int]:
    """``(host, port)`` of ``HOST:PORT``; UsageError when it is not that, or the host has a name."""
    host, colon, port = str(origin).rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise UsageError(f"origin={str(origin)!r:.60} is not HOST:PORT, such as 127.0.0.1:8080")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if bracketed != (":" in bare):
        raise UsageError(
            f"origin={str(origin)!r:.60} is not HOST:PORT: an IPv6 host stands in brackets, as in "
            "[::1]:8080, and no other does"
        )
    return parameters.check_host(bare, "origin"), int(port)

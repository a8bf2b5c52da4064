"""The scripted engine: the server's own state machine with no kernel beneath it, in virtual time.

What the kernel, the clients and the handler threads would do, the script does, one call each; what
the worker makes of it can be looked at after every phase. It needs no io_uring.
"""

from __future__ import annotations

import errno
from typing import Any

from engine import counters as counting
from engine import parameters
from engine.binding import native, words
from engine.errors import check, unknown
from engine.native_server import Calls
from engine.parameters import BYTES, NUMBER, PASSING, Range, octets, whole
from engine.policy import RING, AnyPolicy
from engine.scripted import Scripted
from engine.views import ConnView, LoopView, Wait, conn_view, loop_view, wait_view

_RESULT = Range(0, -4095, 2**31 - 1, "bytes, or a negative errno")


def _slot(number: Any) -> int:
    return whole("slot", number, NUMBER)


class Script(Scripted):
    """One worker on the scripted backend.

    :param policy: see :func:`engine.policy.resolve`; single decisions can be given as keywords.
    :param sq_entries: preparations that the SQ holds between two waits.
    :param multishot_recv: False: each recv is armed anew.
    :param settings: live settings of the server (``response_size`` in bytes, ``write_timeout_ms``,
        ...) and decisions.

    Slots number connections from 0. Every method raises the PolicyError that stopped the worker, if
    one did, UsageError for a number out of its range, and EngineError for a slot that is not open
    (ENOENT) or a call that does not fit.
    """

    _calls = Calls("rl_script", policy="rl_policy")
    _decisions = RING
    _tables = parameters.RING

    def __init__(
        self,
        policy: AnyPolicy = "shipped",
        *,
        sq_entries: int = 64,
        max_connections: int = 64,
        max_header: int = 8192,
        multishot_recv: bool = True,
        stop_grace_ms: int = 250,
        **settings: Any,
    ) -> None:
        start = parameters.RING.check_start(
            {
                "entries": sq_entries,
                "max_connections": max_connections,
                "max_header": max_header,
                "stop_grace_ms": stop_grace_ms,
            }
        )
        entries = start.pop("entries")
        made: dict[str, int | bool] = {name: int(value) for name, value in start.items()}
        made |= {"sq_entries": int(entries), "multishot_recv": bool(multishot_recv)}
        super().__init__(policy, made, settings)

    # -- what clients do ------------------------------------------------------------------------

    def accept(self) -> int:
        """A client connects; the slot that its connection has after the next reap."""
        return self._call("accept")

    def get(
        self, slot: int, *, size: int | None = None, route: str | None = None, ms: int | None = None
    ) -> bytes:
        """A client sends one GET; returns the request that was posted.

        ``size`` in bytes of body, ``route`` sync or async, ``ms`` of handler time; what is not
        given is the script's setting.
        """
        query = "&".join(f"{k}={v}" for k, v in (("size", size), ("ms", ms)) if v is not None)
        target = f"/{route or ''}" + (f"?{query}" if query else "")
        request = f"GET {target} HTTP/1.1\r\nHost: script\r\n\r\n".encode()
        self.input(slot, request)
        return request

    def input(self, slot: int, data: bytes) -> None:
        """A client sends bytes."""
        data = octets("data", data)
        self._call("input", _slot(slot), data, len(data))

    def eof(self, slot: int) -> None:
        """The client half-closes."""
        self._call("eof", _slot(slot))

    def reset(self, slot: int) -> None:
        """The client resets the connection."""
        self._call("reset", _slot(slot))

    # -- what the kernel does -------------------------------------------------------------------

    def room(self, slot: int, size: int) -> None:
        """Sets how many bytes the socket takes from direct writes."""
        self._call("room", _slot(slot), whole("size", size, BYTES))

    def send_done(self, slot: int, result: int) -> None:
        """The SEND in flight completes with ``result`` bytes, or a negative errno."""
        self._call("send_done", _slot(slot), whole("result", result, _RESULT))

    def lose_recv(self, slot: int) -> None:
        """The recv ends for want of a buffer (ENOBUFS)."""
        self._call("lose_recv", _slot(slot))

    def poke(self) -> None:
        """A completion of nobody's."""
        self._call("poke")

    def advance(self, ns: int) -> int:
        """Virtual time passes; returns what it is now, in ns."""
        return self._call("advance", whole("ns", ns, PASSING))

    # -- what a handler thread does -------------------------------------------------------------

    def handler_begin(self, slot: int) -> bool:
        """The slot's handler takes its lock; False: it has no request to handle."""
        return bool(self._call("handler_begin", _slot(slot)))

    def handler_end(self, slot: int) -> None:
        """It answers, unlocks and hands the connection back."""
        self._call("handler_end", _slot(slot))

    # -- what the worker does -------------------------------------------------------------------

    def stop(self) -> None:
        """The modelled stop: a flag that the worker sees at the top of an iteration."""
        self._call("stop")

    def phase(self, name: str) -> Wait | None:
        """Runs one phase: ``reap``, ``drain``, ``dirty``, ``house``, ``decide`` (which returns the
        wait that it decided)."""
        ffi, _ = native()
        phases = words("rl_phase")
        if name not in phases:
            raise unknown("phase", str(name), phases)
        out = ffi.new("rl_wait *")
        index = phases.index(name)
        self._call("phase", index, out)
        return wait_view(out) if name == "decide" else None

    def iterate(self) -> Wait | None:
        """Reap to decide; the next wait, or None when the worker has left its loop."""
        ffi, _ = native()
        out = ffi.new("rl_wait *")
        left = self._call("iterate", out)
        return None if left else wait_view(out)

    def wait(self) -> str:
        """Makes the wait that was decided last: submits; time passes to its timeout if need be.

        ``ready``: there are completions; ``timeout``: it passed; ``asleep``: nothing inside this
        script will ever end it.
        """
        ffi, lib = native()
        result = lib.rl_script_wait(self._script, ffi.new("rl_wait *"))
        ends = {0: "ready", -errno.ETIME: "timeout", -errno.EAGAIN: "asleep"}
        if result not in ends:
            self.check()
        return ends[result] if result in ends else str(check(result, "wait"))

    def turn(self) -> str:
        """:meth:`iterate`, then :meth:`wait`; ``left`` when the worker has left its loop."""
        return "left" if self.iterate() is None else self.wait()

    # -- what can be seen -----------------------------------------------------------------------

    def conn(self, slot: int) -> ConnView:
        """A connection, as it is now."""
        ffi, _ = native()
        out = ffi.new("rl_conn_view *")
        self._call("conn", _slot(slot), out)
        return conn_view(out)

    def loop(self) -> LoopView:
        """The loop, as it is now."""
        ffi, _ = native()
        out = ffi.new("rl_loop_view *")
        self._call("loop", out)
        return loop_view(out)

    def counters(self) -> dict[str, int | str]:
        """The flat counters; clocks and scheduler figures are zero here."""
        ffi, _ = native()
        sample = counting.empty(1)
        inner = ffi.addressof(counting.pointer(sample)[0], "c")
        self._call("counters", inner)
        return counting.flatten(sample[0])

    def pending(self, slot: int) -> tuple[bool, int | None]:
        """Whether a recv is armed, and the bytes of the armed SEND (None: there is none)."""
        ffi, _ = native()
        size = ffi.new("int64_t *")
        bits = self._call("pending", _slot(slot), size)
        return bool(bits & 1), int(size[0]) if bits & 2 else None

    def output(self, slot: int) -> bytes:
        """Everything that the connection's socket has taken since accept."""
        return self._output(_slot(slot))

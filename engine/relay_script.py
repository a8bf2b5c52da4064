"""The scripted relay: the same state machine with no kernel beneath it, in virtual time.

What clients, the origin and the kernel would do, the script does, one call each; what the relay
makes of it can be looked at after every handler. It needs nothing of the machine.
"""

from __future__ import annotations

import errno
from typing import Any

from engine import parameters
from engine.binding import native, words
from engine.counters import RELAY as LAYOUT
from engine.counters import flatten
from engine.decisions import AnyPolicy
from engine.errors import UsageError, check, unknown
from engine.native_server import Calls
from engine.parameters import (
    BYTES,
    ERRNO,
    NUMBER,
    PASSING,
    TIMES,
    Range,
    octets,
    whole,
)
from engine.relay_policy import RELAY
from engine.relay_views import (
    HandlerRun,
    RelayLoopView,
    RelayWait,
    SessionView,
    SocketView,
    handler_run,
    relay_loop_view,
    relay_wait,
    session_view,
    socket_view,
)
from engine.scripted import Scripted

_OUTCOMES = ("full", "short", "eagain")
_ENDS = {-errno.ETIME: "timeout", -errno.EAGAIN: "asleep"}
ROOM = 1 << 40
_SHORT = Range(1, 1, 2**40, "bytes")
_PIPE = Range(65_536, 1, 2**30, "bytes")


class RelayScript(Scripted):
    """One relay on the scripted backend.

    :param policy: a preset's name, a mapping, or a :class:`engine.RelayPolicy`; single decisions
        can be given as keywords.
    :param pipe_size: bytes that a pipe holds.
    :param auto_connect: False: a connect waits for :meth:`connected`.
    :param room: bytes that a new socket takes before EAGAIN.
    :param settings: live settings of the relay (``client_timeout_ms``, ...) and decisions.

    Sockets are numbered from 0 in the order in which they came to be, clients and origins alike.
    Every method raises the PolicyError that stopped the relay, if one did, UsageError for a number
    out of its range, and EngineError for a call that does not fit.
    """

    _calls = Calls("rl_relay_script", policy="rl_relay_policy")
    _decisions = RELAY
    _tables = parameters.RELAY

    def __init__(
        self,
        policy: AnyPolicy = "before",
        *,
        max_sessions: int = 64,
        max_head: int = 8192,
        stop_grace_ms: int = 250,
        pipe_size: int = 65_536,
        auto_connect: bool = True,
        room: int = ROOM,
        **settings: Any,
    ) -> None:
        start = parameters.RELAY.check_start(
            {"max_sessions": max_sessions, "max_head": max_head, "stop_grace_ms": stop_grace_ms}
        )
        made: dict[str, int | bool] = {name: int(value) for name, value in start.items()}
        made |= {"pipe_size": whole("pipe_size", pipe_size, _PIPE),
                 "auto_connect": bool(auto_connect), "room": whole("room", room, BYTES)}
        super().__init__(policy, made, settings)
        self.wait_decided: RelayWait | None = None

    def _at(self, socket: Any) -> int:
        """The number of a socket that there is, or was; UsageError for another."""
        number, count = whole("socket", socket, NUMBER), self.sockets
        if number >= count:
            there = f"a whole number from 0 to {count - 1}" if count else "nobody has connected yet"
            raise UsageError(f"socket={number} is not allowed: {there}")
        return number

    @property
    def pipe_size(self) -> int:
        """Bytes that a pipe holds."""
        return int(self._made["pipe_size"])

    # -- what happens outside -------------------------------------------------------------------

    def accept(self) -> int:
        """A client connects; the number of its socket."""
        return self._call("accept")

    def input(self, socket: int, data: bytes) -> None:
        """Bytes arrive on a socket, from its client or origin."""
        data = octets("data", data)
        self._call("input", self._at(socket), data, len(data))

    def fin(self, socket: int) -> None:
        """The other end closes its direction."""
        self._call("fin", self._at(socket))

    def reset(self, socket: int) -> None:
        """The other end resets: what has arrived may still be read, as on Linux; the next call
        after that, or the next write before it, fails."""
        self._call("reset", self._at(socket))

    def room(self, socket: int, size: int) -> None:
        """Sets how many bytes a socket takes from now on before it says EAGAIN."""
        self._call("room", self._at(socket), whole("size", size, BYTES))

    def grain(self, socket: int, size: int) -> None:
        """At most so many bytes pass in a call on that socket; 0: no limit."""
        self._call("grain", self._at(socket), whole("size", size, BYTES))

    def again(self, socket: int, reads: int = 0, writes: int = 0) -> None:
        """The next so many calls of either direction say EAGAIN, whatever there is."""
        counts = whole("reads", reads, TIMES), whole("writes", writes, TIMES)
        self._call("again", self._at(socket), *counts)

    def next_call(self, socket: int, direction: str, outcome: str, short: int = 1) -> None:
        """Chooses what the next call of one direction (``read``: recv or splice into a pipe,
        ``write``: send or splice out of one) on that socket comes to.

        ``full``: all that it asks for (a read: of what has arrived), whatever the room;
        ``short``: ``short`` bytes less, but one at least; ``eagain``: nothing.
        """
        if direction not in ("read", "write"):
            raise unknown("direction", str(direction), ("read", "write"))
        if outcome not in _OUTCOMES:
            raise unknown("outcome", str(outcome), _OUTCOMES)
        less = whole("short", short, _SHORT)
        self._call("next", self._at(socket), direction == "write", _OUTCOMES.index(outcome), less)

    def report(self, socket: int) -> None:
        """The next wait reports this socket alone; what else is ready, a later one. A client that
        is not accepted yet stands for the listener. EngineError (EAGAIN) when it is not ready."""
        self._call("report", self._at(socket))

    def connected(self, socket: int, error: int = 0) -> None:
        """An origin's connect ends: well, or with that errno."""
        self._call("connected", self._at(socket), -whole("error", error, ERRNO))

    def refuse(self, *, connect: int = 0, accept: int = 0, pipe: int = 0) -> None:
        """The errno that each of these calls fails with from now on; 0: none."""
        given = {"connect": connect, "accept": accept, "pipe": pipe}
        self._call("refuse", *(whole(name, value, ERRNO) for name, value in given.items()))

    def advance(self, ns: int) -> int:
        """Virtual time passes; returns what it is now, in ns."""
        return self._call("advance", whole("ns", ns, PASSING))

    def stop(self) -> None:
        """The modelled stop: a flag that the loop sees at the top of a turn."""
        self._call("stop")

    # -- what the relay does --------------------------------------------------------------------

    def phase(self, name: str) -> str:
        """Runs one phase: ``decide``, ``wait``, ``dispatch``, ``http`` or ``timers``.

        ``decide`` returns ``left`` when the loop was left, else why it may sleep or not;
        ``wait`` returns ``ready``, ``timeout``, or ``asleep``: nothing in this script will ever end
        it; the others return an empty string.
        """
        ffi, lib = native()
        phases = words("rl_relay_phase")
        if name not in phases:
            raise unknown("phase", str(name), phases)
        out = ffi.new("rl_relay_wait *")
        result = lib.rl_relay_script_phase(self._script, phases.index(name), out)
        self.check()
        if name == "wait":
            return _ENDS[result] if result in _ENDS else "ready" * (check(result, name) >= 0)
        check(result, f"phase {name}")
        if name != "decide":
            return ""
        self.wait_decided = None if result else relay_wait(out)
        return "left" if self.wait_decided is None else self.wait_decided.why

    def handler(self) -> HandlerRun | None:
        """Runs the next handler that is due in this turn; None: there is none."""
        ffi, _ = native()
        out = ffi.new("rl_relay_step *")
        return handler_run(out) if self._call("handler", out) else None

    def due(self) -> HandlerRun | None:
        """The handler that :meth:`handler` would run next, not run yet; None: there is none."""
        out = native()[0].new("rl_relay_step *")
        return handler_run(out) if self._call("due", out) else None

    def turn(self) -> str:
        """All phases, from a decision on; how its wait ended, or ``left``."""
        if self.phase("decide") == "left":
            return "left"
        ended = self.phase("wait")
        for name in ("dispatch", "http", "timers"):
            self.phase(name)
        return ended

    # -- what can be seen -----------------------------------------------------------------------

    @property
    def sockets(self) -> int:
        """How many sockets there have been."""
        return self._call("sockets")

    def socket(self, number: int) -> SocketView:
        """A socket, as it is now."""
        out = native()[0].new("rl_relay_socket *")
        self._call("socket", self._at(number), out)
        return socket_view(out)

    def session(self, slot: int = 0) -> SessionView:
        """A session, as it is now; EngineError (ENOTCONN) when there is none."""
        out = native()[0].new("rl_relay_view *")
        self._call("session", whole("slot", slot, NUMBER), out)
        return session_view(out)

    def loop(self) -> RelayLoopView:
        """The loop, as it is now."""
        out = native()[0].new("rl_relay_loop_view *")
        self._call("loop", out)
        return relay_loop_view(out)

    def counters(self) -> dict[str, int | str]:
        """The flat counters; clocks and scheduler figures are zero here."""
        ffi, _ = native()
        sample = LAYOUT.empty(1)
        self._call("counters", ffi.addressof(LAYOUT.pointer(sample)[0], "c"))
        return flatten(sample[0])

    def output(self, socket: int) -> bytes:
        """Everything that the relay has sent to a socket."""
        return self._output(self._at(socket))

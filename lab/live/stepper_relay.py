"""The relay as a stepper drives it: the case splice.

What a spin is here is DESIGN's: the next wait cannot block, and the last turn made no progress. The
state that the case is about, bytes in a pipe and too little to forward for a splice, is told from
the views, so that the fixed relay can be seen to have come to it as well.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine import RelayScript
from engine.decisions import AnyPolicy
from engine.errors import EngineError, UsageError, unknown
from engine.parameters import Range, whole
from engine.relay_views import (
    ChannelView,
    HandlerRun,
    RelayLoopView,
    RelayWait,
    SessionView,
    SocketView,
)
from lab import content
from lab.automaton import Drawing
from lab.automaton_splice import SPLICE
from lab.live import stepper_relay_page as page
from lab.live.stepper_driver import Action, Driver, Page, Seen, phase_work, still_open, verb

if TYPE_CHECKING:
    from lab.live.stepper import Stepper

PHASE_WORDS = {
    "decide": "decide the timeout", "wait": "make the wait", "read handler": "read handler",
    "write handler": "write handler", "http": "HTTP layer", "timers": "timers",
}
OUTCOMES = ("full", "short", "EAGAIN", "FIN", "reset")
CALLS = ("read", "write")
SIDES = ("client", "origin")
FIXTURES = {
    "a": "two pipelined GETs: the head of response 2 behind the tail of response 1",
    "a2": "the same, and the origin stays silent on the second",
    "b": "the last 3,000 bytes and FIN come while the client stalls",
    "d": "a chunk ends while its data is in the pipe",
    "e": "a POST, its tail in the pipe before an origin that does not read",
    "m": "a control: stalled in the middle of an object",
}
# Sizes that reach each state in few turns: a first recv takes 15,360 bytes and passes them on, one
# splice takes all that is left, and a socket takes ROOM before its other end stalls.
ROOM, OBJECT, CHUNK, UPLOAD, LAST = 20_000, 60_000, 60_000, 60_000, 3_000
LARGE = 200_000
_BODY = Range(OBJECT, 0, 2**24, "bytes")
_PART = Range(1, 1, 2**24, "bytes")
_COUNT = Range(1, 1, 64, "requests")
_MS = Range(1, 0, 3_600_000, "ms")
WHY_WORDS = {
    "active": "a direction is ACTIVE", "overdue": "a deadline has passed",
    "deadline": "sleeps to the next deadline", "event": "sleeps until an event",
}


@dataclass(frozen=True)
class SocketSeen:
    """A socket of the script, open or not, and how the stream that it gets compares."""

    number: int
    view: SocketView
    owed: int
    """Bytes that its other end has still to send."""
    due: int
    """Bytes that a client will have got once all that its origins have sent is through."""
    in_order: bool
    """What it got is the beginning of what it should get."""


@dataclass(frozen=True)
class RelaySeen(Seen):
    """The state of the relay after an action."""

    wait: RelayWait | None
    """The wait that was decided last; None before the first."""
    events: int
    """Sockets that the last wait reported."""
    loop: RelayLoopView
    sessions: tuple[SessionView, ...]
    sockets: tuple[SocketSeen, ...]
    ran: HandlerRun | None
    """The handler that ran last."""
    due: HandlerRun | None
    """The handler that runs next; None: none is due in this turn."""
    noops: int
    """Handler runs in a row that did nothing."""
    wasted: int
    """Turns in a row that could not sleep, or were woken, and made no progress."""
    closes: tuple[str, ...]
    """Why sessions have ended."""
    pipe_size: int

    @property
    def timeout(self) -> str:
        """The timeout in words, with its reason."""
        if self.wait is None:
            return "nothing decided yet"
        ns = self.wait.timeout_ns
        length = "none" if ns < 0 else "0" if ns == 0 else f"{ns / 1e6:g} ms"
        return f"{length}: {WHY_WORDS[self.wait.why]}"

    @property
    def noop(self) -> bool:
        """Whether the handler that ran last made no call on its socket and changed nothing."""
        return self.ran is not None and self.ran.noop


class RelayDriver(Driver):
    """See the module."""

    case: ClassVar[str] = "splice"
    phases: ClassVar[Mapping[str, str]] = PHASE_WORDS
    fixtures: ClassVar[Mapping[str, str]] = FIXTURES
    begins: ClassVar[str] = "an idle relay"
    drawing: ClassVar[Drawing] = SPLICE
    asks: ClassVar[Mapping[str, Mapping[str, type]]] = page.ASKS

    @classmethod
    def named(cls, policy: AnyPolicy | None, options: dict[str, Any]) -> RelayDriver:
        """One with a script of its own; ``options`` as of RelayScript."""
        given = {"room": ROOM, **options}
        first = "before" if policy is None else policy
        return cls(lambda other: RelayScript(first if other is None else other, **given))

    # -- client and origin ----------------------------------------------------------------------

    @verb
    def connect(self) -> Action:
        """A client connects."""
        return self.action("connect")

    @verb
    def request(self, count: int = 1, post: int = 0, sent: int | None = None,
                socket: int | None = None) -> Action:
        """A client asks ``count`` times, in one write; with ``post`` bytes of body, of which
        ``sent`` (None: all) go at once."""
        more: dict[str, Any] = {"post": whole("post", post, _BODY)} if post else {}
        if post and sent is not None:
            more["sent"] = whole("sent", sent, Range(0, 0, post, "bytes"))
        return self.action("request", socket=self._at("client", socket),
                           count=whole("count", count, _COUNT), **more)

    @verb
    def respond(self, size: int = OBJECT, sent: int | None = None, chunk: int = 0,
                socket: int | None = None) -> Action:
        """An origin answers with ``size`` bytes of body, in chunks of ``chunk`` (0: with a
        Content-Length); ``sent`` bytes (None: all) behind the head go at once."""
        more: dict[str, Any] = {} if sent is None else {"sent": whole("sent", sent, _BODY)}
        if chunk:
            more["chunk"] = whole("chunk", chunk, _PART)
        return self.action("respond", socket=self._at("origin", socket),
                           size=whole("size", size, _BODY), **more)

    @verb
    def send(self, size: int | None = None, side: str = "origin", socket: int | None = None
             ) -> Action:
        """``size`` bytes more (None: all) of what the other end of a socket has yet to send."""
        more = {} if size is None else {"size": whole("size", size, _PART)}
        return self.action("send", socket=self._at(side, socket), **more)

    @verb
    def takes(self, size: int = ROOM, side: str = "client", socket: int | None = None) -> Action:
        """The other end reads: the socket takes ``size`` bytes more before EAGAIN."""
        return self.action("takes", socket=self._at(side, socket), size=whole("size", size, _PART))

    @verb
    def fin(self, side: str = "origin", socket: int | None = None) -> Action:
        """The other end closes its direction."""
        return self.action("fin", socket=self._at(side, socket))

    @verb
    def reset(self, side: str = "client", socket: int | None = None) -> Action:
        """The other end resets; what has arrived may still be read."""
        return self.action("reset", socket=self._at(side, socket))

    # -- the kernel -----------------------------------------------------------------------------

    @verb
    def returns(self, how: str = "full", call: str = "read", side: str = "origin",
                socket: int | None = None, short: int = 1) -> Action:
        """Chooses what the next call on a socket returns: a ``read`` (recv, or splice into the
        pipe) or a ``write`` (send, or splice out of it).

        ``full``: all that is asked for, of a read all that has arrived; ``short``: ``short`` bytes
        less; ``EAGAIN``; ``FIN`` (a read's 0) and ``reset``, both of a read only where nothing
        waits before them.
        """
        if how not in OUTCOMES:
            raise unknown("outcome", f"{how}", OUTCOMES)
        if call not in CALLS:
            raise unknown("call", f"{call}", CALLS)
        more = {"short": whole("short", short, _PART)} if how == "short" else {}
        return self.action("returns", socket=self._at(side, socket), call=call, how=how, **more)

    @verb
    def report(self, socket: int | None = None) -> Action:
        """Chooses the one socket that the next wait reports, of those that are ready (None: the
        newest): others stay so. A client that is not accepted yet stands for the listener."""
        if socket is None:
            views = [self.script.socket(number) for number in range(self.script.sockets)]
            ready = [at for at, view in enumerate(views) if view.ready_read or view.ready_write]
            if not ready:
                raise UsageError("epoll has nothing to report now")
            socket = ready[-1]
        return self.action("report", socket=self._one(socket))

    @verb
    def advance(self, ms: int) -> Action:
        """Time passes."""
        return self.action("advance", ms=whole("ms", ms, _MS))

    @verb
    def stop(self) -> Action:
        """The modelled stop: a flag that the loop sees at the top of a turn."""
        return self.action("stop")

    # -- fixtures -------------------------------------------------------------------------------

    def play(self, stepper: Stepper, name: str) -> None:
        """The experiment's arm of that name."""
        stepper.connect()
        _turns(stepper, 2)
        if name == "e":
            stepper.request(post=UPLOAD, sent=0)
            _turns(stepper, 3)
            stepper.send(side="client")
            _turns(stepper, 5)
            return
        stepper.request(count=2 if name in ("a", "a2") else 1)
        _turns(stepper, 3)
        if name in ("a", "a2"):
            stepper.respond()
        elif name == "b":
            stepper.respond(sent=OBJECT - LAST)
        elif name == "d":
            stepper.respond(size=2 * CHUNK, chunk=CHUNK, sent=CHUNK + 8)
        else:
            stepper.respond(size=LARGE)
        _turns(stepper, 5)
        if name == "a" and len(stepper.now.sockets) == 3:  # no second origin until it is read
            stepper.respond(sent=0)
            _turns(stepper, 3)
        elif name == "b":
            stepper.send()
            stepper.fin()
            _turns(stepper, 3)

    # -- the script -----------------------------------------------------------------------------

    def begin(self, policy: AnyPolicy | None) -> None:
        """A fresh script."""
        super().begin(policy)
        self._next, self._ended, self._condition = "decide", "", "WAITING"
        self._wait: RelayWait | None = None
        self._events = self._noops = self._wasted = self._requests = 0
        self._noop_turn = False
        self._entered: set[tuple[int, str]] = set()
        self._ran: HandlerRun | None = None
        self._clients: list[int] = []
        self._owed: dict[int, bytes] = {}  # what the other end of a socket has yet to send
        self._asked: dict[int, int] = {}  # which client's socket a request came from
        self._answers: dict[int, bytes] = {}  # what was sent in answer to a request, by its number

    def look(self, action: Action | None) -> RelaySeen:
        """The present state."""
        script = self.script
        counters = script.counters()
        closes = [name.removeprefix("closes_").replace("_", "-") for name, count in counters.items()
                  if name.startswith("closes_") and count]
        return RelaySeen(
            action, self._next, self._ended, self._condition, self._wait, self._events,
            script.loop(), tuple(still_open(script.session, range(len(self._clients)))),
            tuple(self._socket(number) for number in range(script.sockets)), self._ran,
            script.due(), self._noops, self._wasted, tuple(closes), script.pipe_size,
        )

    def _socket(self, number: int) -> SocketSeen:
        view = self.script.socket(number)
        owed = len(self._owed.get(number, b""))
        if number not in self._clients:
            return SocketSeen(number, view, owed, 0, True)
        whole_stream = b"".join(self._answers.get(request, b"")
                                for request, client in self._asked.items() if client == number)
        got = self.script.output(number)
        return SocketSeen(number, view, owed, len(whole_stream), whole_stream.startswith(got))

    def line(self, now: RelaySeen, which: int = 0) -> str:
        """The channel that matters, its source's interest, and the timeout."""
        if which >= len(now.sessions):
            raise UsageError(f"there is no session {which}")
        session = now.sessions[which]
        up = gap(session.request) or session.request.piped > 0
        ch = session.request if up else session.response
        return (f"{'client' if up else 'origin'} read {ch.read.upper()}, pipe {ch.piped:,}, "
                f"buffer {ch.scheduled + ch.awaiting:,}, to_forward {ch.to_forward:,}, "
                f"timeout {now.timeout}")

    def _at(self, side: str, socket: int | None) -> int:
        """The socket that is meant: the newest open one of that side."""
        if side not in SIDES:
            raise unknown("side", f"{side}", SIDES)
        if socket is not None:
            return self._one(socket)
        for number in range(self.script.sockets - 1, -1, -1):
            view = self.script.socket(number)
            if view.side == side and not view.closed:
                return number
        raise UsageError("no client is connected: connect one first" if side == "client" else
                         "the relay is not connected to an origin: a request must get there first")

    def _one(self, socket: int) -> int:
        """A socket that there is; UsageError for another."""
        self.script.socket(socket)
        return socket

    # -- phases ---------------------------------------------------------------------------------

    def _phase(self, name: str) -> None:
        if name != self._next:
            raise UsageError(f"it is not the turn of '{name}': '{self._next}' comes next")
        if name == "decide":
            self._decide()
        elif name == "wait":
            self._make_wait()
        elif name.endswith("handler"):
            self._run_handler()
        else:
            wasted = self.script.counters()["wasted"]
            self.script.phase(name)
            self._next = "timers" if name == "http" else "decide"
            if name == "timers":
                grown = self.script.counters()["wasted"] > wasted
                self._wasted = self._wasted + 1 if grown else 0
        self._note_entered()

    def _decide(self) -> None:
        left = self.script.phase("decide") == "left"
        self._wait = self.script.wait_decided
        self._ended = "left" if left else ""
        self._next = "decide" if left else "wait"
        self._condition = self._judge()

    def _make_wait(self) -> None:
        before = self.script.counters()["events"]
        self._ended = self.script.phase("wait")
        self._events = self.script.counters()["events"] - before
        if self._ended == "asleep":
            self._condition = self._judge()
            return
        self._noop_turn = False
        if self._events and self._condition != "SPIN":
            self._condition = "WORKING"
        self._after_handlers()

    def _run_handler(self) -> None:
        self._ran = self.script.handler()
        noop = self._ran is not None and self._ran.noop
        self._noops = self._noops + 1 if noop else 0
        self._noop_turn = self._noop_turn or noop
        self._after_handlers()

    def _after_handlers(self) -> None:
        due = self.script.due()
        self._next = f"{due.direction} handler" if due else "http"

    def _judge(self) -> str:
        """The condition of the automaton, once a timeout is decided."""
        wait = self._wait
        if wait is None:
            return "WAITING"
        views = [self.script.socket(number) for number in range(self.script.sockets)]
        if not wait.can_block or any(view.ready_read or view.ready_write for view in views):
            # One turn without progress may be an EAGAIN that ends a direction's activity.
            again = self._wasted >= 1 and (self._noop_turn or self._wasted >= 3)
            return "SPIN" if again else "WORKING"
        sessions = still_open(self.script.session, range(len(self._clients)))
        if any(lost(each, views) for each in sessions):
            return "LOST"
        asked = any((slot, of) in self._entered and
                    (ch.read == "polled" or ch.scheduled + ch.awaiting)
                    for slot, of, ch in self._channels())
        return "FIXED" if asked else "WAITING"

    def _channels(self) -> list[tuple[int, str, ChannelView]]:
        sessions = still_open(self.script.session, range(len(self._clients)))
        return [(each.slot, of, getattr(each, of)) for each in sessions
                for of in ("request", "response")]

    def _note_entered(self) -> None:
        """A channel is in the state from when it gets there until its pipe is empty."""
        now = {(slot, of): ch for slot, of, ch in self._channels()}
        self._entered = {key for key, ch in now.items()
                         if ch.piped and (key in self._entered or gap(ch))}

    # -- what happens outside -------------------------------------------------------------------

    def _connect(self) -> None:
        self._clients.append(self.script.accept())

    def _request(self, given: Mapping[str, Any]) -> None:
        socket, post = given["socket"], given.get("post", 0)
        heads = b""
        for _ in range(given["count"]):
            number, self._requests = self._requests, self._requests + 1
            self._asked[number] = socket
            method, length = ("POST", f"Content-Length: {post}\r\n") if post else ("GET", "")
            heads += f"{method} /{number} HTTP/1.1\r\nHost: script\r\n{length}\r\n".encode()
            body = content.body(number, post)
            sent = given.get("sent", post)
            heads += body[:sent]
            self._owed[socket] = body[sent:]
        self.script.input(socket, heads)

    def _respond(self, given: Mapping[str, Any]) -> None:
        socket, size, chunk = given["socket"], given["size"], given.get("chunk", 0)
        head = self.script.output(socket)
        try:
            number = int(head.split(b" ", 2)[1][1:])
        except (IndexError, ValueError):
            raise UsageError(f"socket {socket} is no origin that has got a request") from None
        if number in self._answers:
            raise UsageError(f"the origin of socket {socket} has answered already: send more of it")
        body = content.body(number, size)
        framing = "Transfer-Encoding: chunked" if chunk else f"Content-Length: {size}"
        if chunk:
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (
                body[at:at + chunk] for at in range(0, size, chunk))) + b"0\r\n\r\n"
        sent = given.get("sent", len(body))
        begun = f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode()
        self._answers[number] = begun + body
        self._owed[socket] = body[sent:]
        self.script.input(socket, begun + body[:sent])

    def _send(self, given: Mapping[str, Any]) -> None:
        socket = given["socket"]
        rest = self._owed.get(socket, b"")
        if not rest:
            raise UsageError(f"the other end of socket {socket} has nothing more to send")
        size = given.get("size", len(rest))
        self.script.input(socket, rest[:size])
        self._owed[socket] = rest[size:]

    def _takes(self, given: Mapping[str, Any]) -> None:
        socket = given["socket"]
        self.script.room(socket, self.script.socket(socket).room + given["size"])

    def _returns(self, given: Mapping[str, Any]) -> None:
        socket, call, how = given["socket"], given["call"], given["how"]
        unread = self.script.socket(socket).unread
        if how == "FIN" and call == "write":
            raise UsageError("a write does not return FIN; 'reset' is how it fails")
        if how in ("FIN", "reset") and call == "read" and unread:
            raise UsageError(f"{unread:,} bytes come before a {how} on socket {socket}: the next "
                             "read takes those")
        if how == "reset":
            self.script.reset(socket)
        elif how == "FIN":
            self.script.fin(socket)
        else:
            self.script.next_call(socket, call, how.lower(), given.get("short", 1))

    def _report(self, given: Mapping[str, Any]) -> None:
        try:
            self.script.report(given["socket"])
        except EngineError as error:
            if error.errno != errno.EAGAIN:
                raise
            raise UsageError(f"epoll has nothing to report of socket {given['socket']} now") \
                from None

    work: ClassVar[Mapping[str, Callable[[Any, dict[str, Any]], object]]] = {
        **{name: phase_work(name) for name in PHASE_WORDS},
        "connect": lambda s, given: s._connect(),
        "request": _request, "respond": _respond, "send": _send, "takes": _takes,
        "returns": _returns, "report": _report,
        "fin": lambda s, given: s.script.fin(given["socket"]),
        "reset": lambda s, given: s.script.reset(given["socket"]),
        "advance": lambda s, given: s.script.advance(given["ms"] * 1_000_000),
        "stop": lambda s, given: s.script.stop(),
        "set": lambda s, given: s.script.set(**given),
    }

    # -- what a page shows ----------------------------------------------------------------------

    def policy_specs(self) -> list[dict[str, Any]]:
        """The choice of a preset, and of every single decision."""
        return page.policy_specs(self.script.policy)

    def state_html(self, now: RelaySeen) -> str:
        """The wait, the handler, the sockets and the channels."""
        return page.state_html(now)

    def said(self, seen: RelaySeen) -> str:
        """What came of a decision, a wait or a handler."""
        return page.said(seen)

    def controls(self) -> list[Page]:
        """Clients, origins, the kernel."""
        return page.controls()

    def options(self, now: RelaySeen) -> dict[str, list[list[str]]]:
        """The sockets that there are."""
        return page.options(now)

    def phase_words(self, now: RelaySeen) -> dict[str, str]:
        """A handler's button says whose socket it is for."""
        words = dict(PHASE_WORDS)
        if now.due is not None:
            whose = "listener" if now.due.slot < 0 else now.due.side
            words[f"{now.due.direction} handler"] += f": {whose}"
        return words


def gap(ch: ChannelView) -> bool:
    """The state that the case is about: bytes in the pipe, and too little to forward for splice."""
    return bool(ch.piped) and 0 <= ch.to_forward < page.MIN_SPLICE


def lost(session: SessionView, sockets: list[SocketView]) -> bool:
    """Bytes have arrived that the loop waits for, nothing is before them, and epoll will not say
    so. To be asked only where nothing is ready."""
    for ch, fd in ((session.request, session.client_fd), (session.response, session.origin_fd)):
        waits = fd >= 0 and ch.read == "polled" and not ch.piped and not ch.scheduled
        if waits and sockets[fd].unread:
            return True
    return False


def _turns(stepper: Stepper, most: int) -> None:
    """Whole turns, until it sleeps."""
    for _ in range(most):
        if stepper.iterate().ended == "asleep":
            return

"""The ring's worker as a stepper drives it: the case dirty-list."""

from __future__ import annotations

import errno
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from engine import ConnView, LoopView, Script, Wait
from engine.decisions import AnyPolicy
from engine.errors import EngineError, UsageError, unknown
from engine.parameters import BYTES, LIVE, NUMBER, PASSING, Range, whole
from lab.automaton import DIRTY_LIST, Drawing
from lab.live.stepper_driver import (
    Action,
    Driver,
    Page,
    Seen,
    choice,
    group,
    number,
    phase_work,
    press,
    still_open,
    unit,
    verb,
)

if TYPE_CHECKING:
    from lab.live.stepper import Stepper

PHASE_WORDS = {
    "reap": "reap completions", "drain": "drain the detach queue", "dirty": "dirty pass",
    "decide": "decide the timeout", "wait": "make the wait",
}
PHASES = tuple(PHASE_WORDS)
COMPLETIONS = ("full", "short", "error", "not yet")
# The founding report's fixture: what the socket takes of 3 MiB, and a response of 103 bytes.
RESPONSE, TAKEN, SMALL = 3 << 20, 100_000, 24
FIXTURES = ("single", "pipelined")
ROUTES = ("async", "sync")
_SIZE = cast(Range, LIVE["response_size"])
_NS = 1_000_000  # of a ms
_MS = Range(0, 0, PASSING.high // _NS, "ms")
_REPORTED = "The founding report's fixture, up to its state"
_ERRORS = {"ECONNRESET": errno.ECONNRESET, "EPIPE": errno.EPIPE}
WHY_WORDS = {
    "ready": "completions are ready", "list": "the dirty list is not empty",
    "overdue": "a deadline has passed", "owed": "a re-arm is owed",
    "send": "a SEND was just prepared", "idle": "nothing to do, the periodic sleep",
    "deadline": "sleeps to the next deadline", "event": "sleeps until an event",
}
_FIELDS = ("sending", "listed", "write_buf", "send_buf")
# What is seldom so, named where it is.
_FLAGS = {"promoted": "promoted", "owes_recv": "owes a recv", "held": "held completion",
          "queued": "on the detach queue", "handler_running": "handler runs",
          "paused": "input paused", "eof": "half-closed", "closing": "closing"}
_ENDS = {"ready": "it ended at once: completions are ready", "timeout": "it ended by its timeout",
         "asleep": "the worker sleeps; nothing inside will wake it: post a completion",
         "left": "the worker has left its loop"}


@dataclass(frozen=True)
class RingSeen(Seen):
    """The state of the worker after an action."""

    wait: Wait | None
    """The wait that was decided last; None before the first."""
    loop: LoopView
    connections: tuple[ConnView, ...]
    sends: tuple[int | None, ...]
    """Bytes of the SEND in flight of each connection; None: there is none."""

    @property
    def timeout(self) -> str:
        """The timeout in words, with its reason."""
        if self.wait is None:
            return "nothing decided yet"
        if self.wait.mode in ("submit", "skip"):
            return f"no sleep at all: {WHY_WORDS[self.wait.why]}"
        ns = self.wait.timeout_ns
        length = "none" if ns < 0 else "0" if ns == 0 else f"{ns / 1e6:g} ms"
        return f"{length}: {WHY_WORDS[self.wait.why]}"


class RingDriver(Driver):
    """See the module."""

    case: ClassVar[str] = "dirty-list"
    phases: ClassVar[Mapping[str, str]] = PHASE_WORDS
    fixtures: ClassVar[Mapping[str, str]] = dict.fromkeys(FIXTURES, _REPORTED)
    begins: ClassVar[str] = "an idle worker"
    drawing: ClassVar[Drawing] = DIRTY_LIST
    asks: ClassVar[Mapping[str, Mapping[str, type]]] = {
        "connect": {}, "request": {"slot": int, "size": int, "route": str},
        "handler": {"slot": int, "room": int}, "handler begins": {"slot": int},
        "handler ends": {"slot": int, "room": int},
        "complete": {"slot": int, "how": str, "size": int, "error": str}, "poke": {},
        "half-close": {"slot": int}, "reset": {"slot": int}, "stop": {}, "advance": {"ms": int},
    }

    @classmethod
    def named(cls, policy: AnyPolicy | None, options: dict[str, Any]) -> RingDriver:
        """One with a script of its own; ``options`` as of Script."""
        given = {"response_size": RESPONSE, **options}
        first = "shipped" if policy is None else policy
        return cls(lambda other: Script(first if other is None else other, **given))

    # -- clients, threads, the kernel -----------------------------------------------------------

    @verb
    def connect(self) -> Action:
        """A client connects; its slot counts from 0."""
        return self.action("connect")

    @verb
    def request(self, slot: int = 0, size: int | None = None, route: str = "async") -> Action:
        """A client asks for ``size`` bytes of body (None: the setting)."""
        more = {} if size is None else {"size": size}
        return self.action("request", slot=slot, route=route, **more)

    @verb
    def handler(self, slot: int = 0, room: int = TAKEN) -> Action:
        """A handler thread runs to its end; the socket takes ``room`` bytes of what it writes."""
        return self.action("handler", slot=slot, room=room)

    @verb
    def handler_begins(self, slot: int = 0) -> Action:
        """A handler takes its connection's lock, and goes on running."""
        return self.action("handler begins", slot=slot)

    @verb
    def handler_ends(self, slot: int = 0, room: int = 0) -> Action:
        """That handler answers, unlocks and hands the connection back."""
        return self.action("handler ends", slot=slot, room=room)

    @verb
    def complete(self, how: str = "full", slot: int = 0, size: int = 1, error: str = "ECONNRESET"
                 ) -> Action:
        """The SEND in flight completes ``full``, ``short`` (with ``size`` bytes), with ``error``,
        or ``not yet``: then nothing happens, and time is all that passes."""
        extra: dict[str, Any] = {"size": size} if how == "short" else {}
        if how == "error":
            extra = {"error": error}
        return self.action("complete", slot=slot, how=how, **extra)

    @verb
    def poke(self) -> Action:
        """A completion of nobody's: what any other connection, or a signal, would make."""
        return self.action("poke")

    @verb
    def half_close(self, slot: int = 0) -> Action:
        """The client half-closes."""
        return self.action("half-close", slot=slot)

    @verb
    def reset(self, slot: int = 0) -> Action:
        """The client resets its connection."""
        return self.action("reset", slot=slot)

    @verb
    def advance(self, ms: int) -> Action:
        """Time passes."""
        return self.action("advance", ms=ms)

    @verb
    def stop(self) -> Action:
        """The modelled stop: a flag that the worker sees at the top of an iteration."""
        return self.action("stop")

    def play(self, stepper: Stepper, name: str) -> None:
        """One stalled response, or a second one behind it."""
        stepper.connect()
        _turn(stepper)
        stepper.request()
        _turn(stepper)
        stepper.handler()
        stepper.iterate()
        if name == "pipelined":
            stepper.wait()
            stepper.request(size=SMALL)
            _turn(stepper)
            stepper.handler(room=0)
            stepper.iterate()

    # -- the script -----------------------------------------------------------------------------

    def begin(self, policy: AnyPolicy | None) -> None:
        """A fresh script."""
        super().begin(policy)
        self._slots: set[int] = set()  # that ever had a connection
        self._next = "reap"
        self._wait: Wait | None = None
        self._ended = ""

    def look(self, action: Action | None) -> RingSeen:
        """The present state."""
        found = still_open(lambda slot: (self.script.conn(slot), self.script.pending(slot)[1]),
                           sorted(self._slots))
        return RingSeen(action, self._next, self._ended, self._condition(), self._wait,
                        self.script.loop(), tuple(conn for conn, _ in found),
                        tuple(size for _, size in found))

    def line(self, now: RingSeen, which: int = 0) -> str:
        """As the founding report's fixture prints it: sending, write_buf, listed, and the timeout
        that the newest wait was given (the fixture knows no other than zero)."""
        open_ones = {conn.slot: conn for conn in now.connections}
        if which not in list(open_ones):
            raise UsageError(_none_such(which, list(open_ones)))
        conn, wait = open_ones[which], now.wait
        zero = wait is not None and wait.timeout_ns == 0
        timeout = "0" if zero else "none (mode 3a)" if wait and wait.timeout_ns < 0 else "sleeps"
        return (f"sending {conn.sending}, write_buf {conn.write_buf}, listed {conn.listed}, "
                f"timeout {timeout}")

    def _condition(self) -> str:
        wait = self._wait
        if wait is None:
            return "IDLE"
        if wait.mode == "untimed":
            return "PARKED"
        if wait.mode == "timed" and not wait.can_block:
            return "SPIN"
        return "IDLE" if wait.mode == "timed" else "WORKING"

    def _phase(self, name: str) -> None:
        if name == "wait":
            if self._wait is None:
                raise UsageError("no wait has been decided: run the phases up to decide first")
            self._ended = self.script.wait()
            self._next = "wait" if self._ended == "asleep" else "reap"
            return
        self._ended = ""
        if name == "decide":
            self.script.phase("house")
        wait = self.script.phase(name)
        self._wait = wait if wait is not None else self._wait
        self._next = PHASES[PHASES.index(name) + 1]

    # What comes from a person is checked here, where every way to do something meets.

    def _slot(self, given: Mapping[str, Any]) -> int:
        """The slot of a connection that there is, though its accept may wait to be reaped."""
        slot = whole("slot", given["slot"], NUMBER)
        if slot not in self._slots:
            raise UsageError(_none_such(slot, sorted(self._slots)))
        return slot

    def _open(self, given: Mapping[str, Any]) -> tuple[int, ConnView]:
        """One that the worker has, and how it is."""
        slot = self._slot(given)
        try:
            return slot, self.script.conn(slot)
        except EngineError:
            raise UsageError(f"connection {slot} is not open: its accept was not reaped yet, or it "
                             "was closed") from None

    def _request(self, given: Mapping[str, Any]) -> None:
        slot, route, size = self._slot(given), given["route"], given.get("size")
        if route not in ROUTES:
            raise unknown("route", str(route), ROUTES)
        if size is not None:
            size = whole("size", size, _SIZE)
        self.script.get(slot, size=size, route=route)

    def _client(self, given: Mapping[str, Any], act: str) -> None:
        getattr(self.script, act)(self._slot(given))

    def _handler(self, given: Mapping[str, Any], begins: bool, ends: bool) -> None:
        slot, conn = self._open(given)
        room = whole("room", given.get("room", 0), BYTES)
        if begins and conn.handler_running:
            raise UsageError(f"the handler of connection {slot} runs already: let it end first")
        if ends and not begins and not conn.handler_running:
            raise UsageError(f"no handler of connection {slot} runs: let one begin first")
        if begins and not self.script.handler_begin(slot):
            raise UsageError(f"connection {slot} has no request for a handler: send one on route "
                             "async, and reap it")
        if ends:
            self.script.room(slot, room)
            self.script.handler_end(slot)

    def _complete(self, given: Mapping[str, Any]) -> None:
        slot, how = self._slot(given), given["how"]
        if how not in COMPLETIONS:
            raise unknown("completion", str(how), COMPLETIONS)
        if how == "not yet":
            return
        self._open(given)
        size = self.script.pending(slot)[1]
        if size is None:
            raise UsageError(f"connection {slot} has no SEND in flight that could complete: one is "
                             "submitted by the wait after the dirty pass")
        if how == "error":
            if given["error"] not in _ERRORS:
                raise unknown("error", str(given["error"]), _ERRORS)
            self.script.send_done(slot, -_ERRORS[given["error"]])
            return
        part = size if how == "full" else whole("size", given["size"], BYTES)
        if how == "short" and not 1 <= part < size:
            raise UsageError(f"a short completion has 1 to {size - 1:,} bytes here, not {part:,}")
        self.script.send_done(slot, part)

    def _connect(self) -> None:
        self._slots.add(self.script.accept())

    work: ClassVar[Mapping[str, Callable[[Any, dict[str, Any]], object]]] = {
        **{name: phase_work(name) for name in PHASES},
        "connect": lambda s, given: s._connect(),
        "request": _request,
        "handler": lambda s, given: s._handler(given, True, True),
        "handler begins": lambda s, given: s._handler(given, True, False),
        "handler ends": lambda s, given: s._handler(given, False, True),
        "complete": _complete,
        "poke": lambda s, given: s.script.poke(),
        "half-close": lambda s, given: s._client(given, "eof"),
        "reset": lambda s, given: s._client(given, "reset"),
        "advance": lambda s, given: s.script.advance(whole("ms", given["ms"], _MS) * _NS),
        "stop": lambda s, given: s.script.stop(),
        "set": lambda s, given: s.script.set(**given),
    }

    # -- what a page shows ----------------------------------------------------------------------

    def policy_specs(self) -> list[dict[str, Any]]:
        """The choice of a preset, and of every single decision."""
        from lab.live.controls import policy_specs

        policy = self.script.policy
        return policy_specs(policy.choices, policy.name)

    def state_html(self, now: RingSeen) -> str:
        """The loop's wait and every connection's fields, as a table."""
        return state_html(now)

    def said(self, seen: RingSeen) -> str:
        """What came of a decision or of a wait."""
        name = seen.action.name if seen.action else ""
        return f"timeout {seen.timeout}" if name == "decide" else (
            seen.ended if name == "wait" else "")

    def controls(self) -> list[Page]:
        """Clients, handler threads, the kernel."""
        slot = {"slot": "slot"}
        return [
            group("Client", press("connect", "A client connects", "connect"),
                  unit("connection"), choice("slot", "connection"),
                  press("request", "It sends one GET", "request", slot="slot", size="size",
                        route="route"),
                  choice("route", "route", ROUTES),
                  number("size", "bytes of the response", RESPONSE), unit("bytes"),
                  press("half-close", "It sends FIN", "half-close", **slot),
                  press("reset", "It sends RST", "reset", **slot)),
            group("Handler", press("runs", "A handler thread runs to its end", "handler",
                                   slot="slot", room="room"),
                  press("begins", "It takes the lock", "handler begins", **slot),
                  press("ends", "It answers and hands back", "handler ends", slot="slot",
                        room="room"),
                  unit("the socket takes"),
                  number("room", "bytes that the socket takes of the handler's write", TAKEN),
                  unit("bytes")),
            group("Kernel", unit("the SEND completes"),
                  choice("how", "how the SEND completes", COMPLETIONS),
                  number("part", "bytes of a short completion", 1), unit("bytes"),
                  press("complete", "Post that completion", "complete", slot="slot", how="how",
                        size="part"),
                  press("poke", "A completion of nobody's", "poke"),
                  press("stop flag", "The modelled stop", "stop")),
        ]

    def options(self, now: RingSeen) -> dict[str, list[list[str]]]:
        """The connections that there are."""
        return {"slot": [[str(conn.slot), str(conn.slot)] for conn in now.connections]}


def _none_such(which: object, there: list[int]) -> str:
    known = ", ".join(map(str, there))
    return f"there is no connection {which!r:.60}: " + (
        f"choose from: {known}" if there else "connect a client, and reap it")


def _turn(stepper: Stepper) -> None:
    stepper.iterate()
    if stepper.now.next == "wait":
        stepper.wait()


def state_html(now: RingSeen) -> str:
    """The loop's wait and every connection's fields, as a table."""
    wait = now.wait
    mode = {"submit": "1 (submit)", "skip": "2 (no system call)",
            "untimed": "3a (until a completion)", "timed": "3b (with a timeout)"}.get(
        wait.mode, "") if wait else ""
    ended = f" {_ENDS.get(now.ended, '')}." if now.ended else ""
    decided = f"mode {mode}, timeout {now.timeout}." if wait else f"{now.timeout}."
    parts = [f"<p><strong>The wait:</strong> {html.escape(decided + ended)} "
             f"<strong>List:</strong> {now.loop.list_length} listed, {now.loop.movable} of them "
             f"can be moved by the worker itself.</p>"]
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>'
                    for name in ("", *_FIELDS, "SEND in flight", "also"))
    rows = "".join(_row(conn, size) for conn, size in zip(now.connections, now.sends, strict=True))
    rows = rows or f'<tr><td colspan="{len(_FIELDS) + 3}">nobody is connected</td></tr>'
    parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
    return "".join(parts)


def _row(conn: ConnView, size: int | None) -> str:
    cells = []
    for name in _FIELDS:
        value = getattr(conn, name)
        shown = ("yes" if value else "·") if isinstance(value, bool) else f"{value:,}"
        strong = value and name in ("sending", "listed", "write_buf")
        cells.append(f"<td>{'<strong>' if strong else ''}{shown}{'</strong>' if strong else ''}"
                     "</td>")
    cells.append(f"<td>{'·' if size is None else f'{size:,} bytes'}</td>")
    also = ", ".join(words for name, words in _FLAGS.items() if getattr(conn, name))
    cells.append(f"<td>{also or '·'}</td>")
    return f'<tr><th scope="row">connection {conn.slot}</th>{"".join(cells)}</tr>'

"""The worker's loop by hand: one phase at a time, the next completion chosen by whoever learns.

Runs the server's own state machine on the scripted backend: no kernel, no clock, no io_uring. What
was done is a list of actions; going back replays all but the last of them on a fresh script, which
gives the same state, because nothing in there happens by chance.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine import ConnView, LoopView, Script, Wait
from engine.errors import RinglabError, UsageError, unknown
from engine.server import AnyPolicy

PHASES = ("reap", "drain", "dirty", "decide", "wait")
PHASE_WORDS = {
    "reap": "reap completions", "drain": "drain the detach queue", "dirty": "dirty pass",
    "decide": "decide the timeout", "wait": "make the wait",
}
COMPLETIONS = ("full", "short", "error", "not yet")
# The founding report's fixture: what the socket takes of 3 MiB, and a response of 103 bytes.
RESPONSE, TAKEN, SMALL = 3 << 20, 100_000, 24
FIXTURES = ("single", "pipelined")
_ERRORS = {"ECONNRESET": errno.ECONNRESET, "EPIPE": errno.EPIPE}


@dataclass(frozen=True)
class Action:
    """One thing that was done: its name and its arguments."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        words = ", ".join(f"{key} {value:,}" if isinstance(value, int) and key != "slot"
                          else f"{key} {value}" for key, value in self.options)
        return PHASE_WORDS.get(self.name, self.name) + (f" ({words})" if words else "")


@dataclass(frozen=True)
class Seen:
    """The state after an action."""

    action: Action | None
    next: str
    """The phase that comes next."""
    wait: Wait | None
    """The wait that was decided last; None before the first."""
    ended: str
    """How the last wait ended: ``ready``, ``timeout``, ``asleep``, ``left``; empty: not made."""
    loop: LoopView
    connections: tuple[ConnView, ...]
    sends: tuple[int | None, ...]
    """Bytes of the SEND in flight of each connection; None: there is none."""
    condition: str

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


WHY_WORDS = {
    "ready": "completions are ready", "list": "the dirty list is not empty",
    "overdue": "a deadline has passed", "owed": "a re-arm is owed",
    "send": "a SEND was just prepared", "idle": "nothing to do, the periodic sleep",
    "deadline": "sleeps to the next deadline", "event": "sleeps until an event",
}


class Stepper:
    """A worker on the scripted backend, stepped by hand.

    :param policy: see :func:`engine.policy.resolve`; single decisions as keywords, as are settings
        of the script (``response_size`` in bytes, ...).

    ``step()`` runs the next phase of the loop; ``connect``, ``request``, ``handler``, ``complete``,
    ``poke`` and the others do what clients, threads and the kernel would. ``back`` and ``forward``
    go through what was done. Shows itself in a notebook: with buttons where somebody is there to
    press them, else as a picture of its present state.
    """

    def __init__(self, policy: AnyPolicy = "shipped", **options: Any) -> None:
        self._policy, self._options = policy, {"response_size": RESPONSE, **options}
        self._done: list[Action] = []
        self._undone: list[Action] = []
        self._seen: list[Seen] = []
        self._view: Any = None
        self._begin()

    # -- the loop -------------------------------------------------------------------------------

    def step(self) -> Seen:
        """Runs the phase that comes next."""
        return self.do(self.now.next)

    def iterate(self) -> Seen:
        """Steps to the end of the iteration: until a timeout has been decided."""
        seen = self.step()
        while seen.next != "wait" and seen.ended != "asleep":
            seen = self.step()
        return seen

    def reap(self) -> Seen:
        """Reaps every completion."""
        return self.do("reap")

    def drain(self) -> Seen:
        """Drains the detach queue: each connection in it is listed."""
        return self.do("drain")

    def dirty(self) -> Seen:
        """The dirty pass over the list."""
        return self.do("dirty")

    def decide(self) -> Seen:
        """Housekeeping, then the decision of the next timeout."""
        return self.do("decide")

    def wait(self) -> Seen:
        """Makes the wait that was decided: submits, and time passes if need be."""
        return self.do("wait")

    # -- clients, threads, the kernel -----------------------------------------------------------

    def connect(self) -> Seen:
        """A client connects; its slot counts from 0."""
        return self.do("connect")

    def request(self, slot: int = 0, size: int | None = None, route: str = "async") -> Seen:
        """A client asks for ``size`` bytes of body (None: the setting)."""
        return self.do("request", slot=slot, route=route,
                       **({} if size is None else {"size": size}))

    def handler(self, slot: int = 0, room: int = TAKEN) -> Seen:
        """A handler thread runs to its end; the socket takes ``room`` bytes of what it writes."""
        return self.do("handler", slot=slot, room=room)

    def handler_begins(self, slot: int = 0) -> Seen:
        """A handler takes its connection's lock, and goes on running."""
        return self.do("handler begins", slot=slot)

    def handler_ends(self, slot: int = 0, room: int = 0) -> Seen:
        """That handler answers, unlocks and hands the connection back."""
        return self.do("handler ends", slot=slot, room=room)

    def complete(self, how: str = "full", slot: int = 0, size: int = 1, error: str = "ECONNRESET"
                 ) -> Seen:
        """The SEND in flight completes ``full``, ``short`` (with ``size`` bytes), with ``error``,
        or ``not yet``: then nothing happens, and time is all that passes."""
        if how not in COMPLETIONS:
            raise unknown("completion", how, COMPLETIONS)
        extra: dict[str, Any] = {"size": size} if how == "short" else {}
        if how == "error":
            extra = {"error": error}
        return self.do("complete", slot=slot, how=how, **extra)

    def poke(self) -> Seen:
        """A completion of nobody's: what any other connection, or a signal, would make."""
        return self.do("poke")

    def half_close(self, slot: int = 0) -> Seen:
        """The client half-closes."""
        return self.do("half-close", slot=slot)

    def reset(self, slot: int = 0) -> Seen:
        """The client resets its connection."""
        return self.do("reset", slot=slot)

    def stop(self) -> Seen:
        """The modelled stop: a flag that the worker sees at the top of an iteration."""
        return self.do("stop")

    def set(self, **choices: Any) -> Seen:
        """Switches the policy (``policy="fixed"``) or single decisions, in the middle."""
        return self.do("set", **choices)

    # -- back and forward -----------------------------------------------------------------------

    def do(self, name: str, **options: Any) -> Seen:
        """Does one thing by name; what had been undone is forgotten. RinglabError if it does not
        fit (no such slot, no SEND in flight): then nothing was changed."""
        if name not in _WORK:
            raise unknown("action", name, _WORK)
        action = Action(name, tuple(options.items()))
        try:
            self._apply(action)
        except BaseException:
            self._replay(self._done)
            raise
        self._done.append(action)
        self._undone.clear()
        self._show()
        return self.now

    def back(self, steps: int = 1) -> Seen:
        """Undoes the last ``steps`` actions, as far as there are any."""
        for _ in range(min(steps, len(self._done))):
            self._undone.append(self._done.pop())
        self._replay(self._done)
        self._show()
        return self.now

    def forward(self, steps: int = 1) -> Seen:
        """Does again what was undone last."""
        for _ in range(min(steps, len(self._undone))):
            action = self._undone.pop()
            self._apply(action)
            self._done.append(action)
        self._show()
        return self.now

    def go_to(self, number: int) -> Seen:
        """Goes to the state after the first ``number`` actions of all that are known."""
        here = len(self._done)
        return self.back(here - number) if number <= here else self.forward(number - here)

    def clear(self) -> Seen:
        """Begins again with an idle worker that nobody is connected to."""
        self._done, self._undone = [], []
        self._begin()
        self._show()
        return self.now

    def fixture(self, name: str = "single") -> Seen:
        """Plays the founding report's fixture: one stalled response, or a second one behind it."""
        if name not in FIXTURES:
            raise unknown("fixture", name, FIXTURES)
        self.clear()
        self.connect()
        self._turn()
        self.request()
        self._turn()
        self.handler()
        self.iterate()
        if name == "pipelined":
            self.wait()
            self.request(size=SMALL)
            self._turn()
            self.handler(room=0)
            self.iterate()
        return self.now

    def _turn(self) -> None:
        self.iterate()
        if self.now.next == "wait":
            self.wait()

    # -- what can be seen -----------------------------------------------------------------------

    @property
    def now(self) -> Seen:
        """The present state."""
        return self._seen[-1]

    @property
    def seen(self) -> list[Seen]:
        """Every state so far, the first being that of an idle worker."""
        return list(self._seen)

    @property
    def script(self) -> Script:
        """The engine beneath. What is done to it directly is not remembered."""
        return self._script

    @property
    def undone(self) -> list[Action]:
        """What ``forward`` would do, next first."""
        return self._undone[::-1]

    @property
    def policy(self) -> str:
        """The name of the policy in force."""
        return self._script.policy.name

    def line(self, slot: int = 0) -> str:
        """The state as the founding report's fixture prints it: sending, write_buf, listed, and
        the timeout that a list of this length means."""
        conn, wait = self.now.connections[slot], self.now.wait
        zero = wait is not None and wait.timeout_ns == 0
        timeout = "0" if zero else "none (mode 3a)" if wait and wait.timeout_ns < 0 else "sleeps"
        return (f"sending {conn.sending}, write_buf {conn.write_buf}, listed {conn.listed}, "
                f"timeout {timeout}")

    def _begin(self) -> None:
        self._script = Script(self._policy, **self._options)
        self._slots = 0
        self._next = "reap"
        self._wait: Wait | None = None
        self._ended = ""
        self._seen = [self._look(None)]

    def _replay(self, actions: list[Action]) -> None:
        self._begin()
        for action in actions:
            self._apply(action)

    def _apply(self, action: Action) -> None:
        _WORK[action.name](self, dict(action.options))
        self._seen.append(self._look(action))

    def _look(self, action: Action | None) -> Seen:
        connections, sends = [], []
        for slot in range(self._slots):
            try:
                connections.append(self._script.conn(slot))
                sends.append(self._script.pending(slot)[1])
            except RinglabError:
                continue  # not accepted yet, or closed
        return Seen(action, self._next, self._wait, self._ended, self._script.loop(),
                    tuple(connections), tuple(sends), self._condition())

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
            self._ended = self._script.wait()
            self._next = "wait" if self._ended == "asleep" else "reap"
            return
        self._ended = ""
        if name == "decide":
            self._script.phase("house")
        wait = self._script.phase(name)
        self._wait = wait if wait is not None else self._wait
        self._next = PHASES[PHASES.index(name) + 1]

    def _request(self, given: Mapping[str, Any]) -> None:
        self._script.get(given["slot"], size=given.get("size"), route=given["route"])

    def _handler(self, given: Mapping[str, Any], begins: bool, ends: bool) -> None:
        slot = given["slot"]
        if begins and not self._script.handler_begin(slot):
            raise UsageError(f"connection {slot} has no request for a handler: send one on route "
                             "async, and reap it")
        if ends:
            self._script.room(slot, given.get("room", 0))
            self._script.handler_end(slot)

    def _complete(self, given: Mapping[str, Any]) -> None:
        slot, how = given["slot"], given["how"]
        if how == "not yet":
            return
        size = self._script.pending(slot)[1]
        if size is None:
            raise UsageError(f"connection {slot} has no SEND in flight that could complete: one is "
                             "submitted by the wait after the dirty pass")
        if how == "error":
            if given["error"] not in _ERRORS:
                raise unknown("error", given["error"], _ERRORS)
            self._script.send_done(slot, -_ERRORS[given["error"]])
            return
        if how == "short" and not 1 <= given["size"] < size:
            raise UsageError(f"a short completion has 1 to {size - 1:,} bytes here, not "
                             f"{given['size']:,}")
        self._script.send_done(slot, size if how == "full" else given["size"])

    def _connect(self) -> None:
        self._script.accept()
        self._slots += 1

    # -- in a notebook --------------------------------------------------------------------------

    def _show(self) -> None:
        if self._view is not None:
            self._view.tell()

    def to_html(self) -> str:
        """The present state as HTML that needs nothing else."""
        from lab.live import stepper_page

        return stepper_page.static_html(self)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        from lab.mode import is_batch

        if is_batch():
            return {"text/html": self.to_html(), "text/plain": repr(self)}
        if self._view is None:
            from lab.live.stepper_page import Page

            self._view = Page(self)
        return self._view.bundle(**options)

    def __repr__(self) -> str:
        return f"<Stepper {self.policy}, {len(self._done)} actions, {self.now.condition}>"


def _phase_work(name: str) -> Callable[[Stepper, dict[str, Any]], object]:
    return lambda stepper, given: stepper._phase(name)


_WORK: dict[str, Callable[[Stepper, dict[str, Any]], object]] = {
    **{name: _phase_work(name) for name in PHASES},
    "connect": lambda s, given: s._connect(),
    "request": Stepper._request,
    "handler": lambda s, given: s._handler(given, True, True),
    "handler begins": lambda s, given: s._handler(given, True, False),
    "handler ends": lambda s, given: s._handler(given, False, True),
    "complete": Stepper._complete,
    "poke": lambda s, given: s._script.poke(),
    "half-close": lambda s, given: s._script.eof(given["slot"]),
    "reset": lambda s, given: s._script.reset(given["slot"]),
    "advance": lambda s, given: s._script.advance(int(given["ms"]) * 1_000_000),
    "stop": lambda s, given: s._script.stop(),
    "set": lambda s, given: s._script.set(**given),
}

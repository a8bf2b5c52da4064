"""A scripted worker among its clients, kernel and handlers, with the invariants of the loop.

The World does what the outside does, one call each, runs the worker phase by phase, and after every
step compares what can be seen with a model of its own: which bytes each client must have, who may
be closed and why, what each counter may say.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import ConnView, Script, Wait
from engine.binding import native
from engine.errors import EngineError
from lab import content

MS = 1_000_000
PHASES = ["wait", "reap", "drain", "dirty", "house", "decide"]
ALL_ROOM = 1 << 40
GRACE = 60_000 * MS

# Counters that only progress changes, and those that change with or without it.
MOVES = [
    "accepts", "closes", "sends", "bytes_in", "bytes_sent", "handovers", "write_timeouts",
    "requests",
]
ENDINGS = ["send_errors", "resets"]
SEEN = [*MOVES, *ENDINGS, "completions", "bytes_direct"]
GAUGES = ["sending", "held_now", "list_length", "movable"]
COUNTERS = [
    *SEEN, *GAUGES, "connections", "wasted", "refused", "pass_members", "sends_short", "ended",
]

PHRASES = {200: "200 OK", 400: "400 Bad Request", 405: "405 Method Not Allowed"}


def response(number: int, size: int, *, status: int = 200, close: bool = False) -> bytes:
    """The response number ``number`` of a connection, made without the engine."""
    lines = [f"HTTP/1.1 {PHRASES[status]}"]
    if status == 405:
        lines.append("Allow: GET")
    lines.append("Content-Type: application/octet-stream")
    lines.append(f"Content-Length: {size}")
    if close:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + content.body(number, size)


@dataclass(frozen=True)
class Ask:
    """One request of a client."""

    route: str = "sync"
    size: int = 0
    ms: int = 0
    kind: str = "get"  # or "close", "post", "garbage": all three end the connection

    def wire(self) -> bytes:
        if self.kind == "garbage":
            return b"\x00\x01 is no request\r\n\r\n"
        method = "POST" if self.kind == "post" else "GET"
        last = "Connection: close\r\n" if self.kind == "close" else ""
        target = f"/{self.route}?size={self.size}&ms={self.ms}"
        return f"{method} {target} HTTP/1.1\r\nHost: world\r\n{last}\r\n".encode()

    def answer(self, number: int) -> bytes:
        status = {"post": 405, "garbage": 400}.get(self.kind, 200)
        size = self.size if status == 200 else 0
        return response(number, size, status=status, close=self.kind != "get")


@dataclass(repr=False)
class Client:
    """A client, and what it may expect."""

    slot: int
    to_send: bytearray = field(default_factory=bytearray)
    sent: int = 0
    ends: list[int] = field(default_factory=list)
    """Where each request ends in the bytes that it sends."""
    answers: list[int] = field(default_factory=list)
    """Where each answer ends in ``answers_as_one``."""
    answers_as_one: bytearray = field(default_factory=bytearray)
    got: int = 0
    """Bytes of them that it was sent."""
    last: bool = False
    """It has asked for the end of the connection, or sent what is refused."""
    refused: bool = False
    last_begins: int = 0
    """Where the last of its requests begins in the bytes that it sends."""
    eof: bool = False
    reset: bool = False
    broken: bool = False
    """A SEND of its failed."""
    timed_out: bool = False
    disordered: bool = False
    """A direct write passed a SEND: only the number of its bytes can be checked."""
    seen: bool = False
    gone: bool = False

    def asked(self) -> int:
        """Requests that were sent whole."""
        return sum(end <= self.sent for end in self.ends)

    def may_ask(self) -> int:
        """Requests that the server may have answered: it refuses a bad one before its end."""
        begun = self.refused and self.sent > self.last_begins
        return len(self.answers) if begun else self.asked()

    def due(self, requests: int | None = None) -> int:
        """Bytes of answers to the first so many requests; all that were sent whole if None."""
        requests = self.asked() if requests is None else requests
        return self.answers[requests - 1] if requests else 0

    def ended(self) -> bool:
        """It has sent a request after which the connection ends, or the end of its stream."""
        return self.eof or (self.last and self.may_ask() == len(self.answers))

    def boundaries(self) -> set[int]:
        """The lengths of its stream at which no response is cut."""
        return {0, *self.answers[: self.may_ask()]}

    def cut_off(self) -> bool:
        """It cannot expect to get everything."""
        return self.reset or self.broken or self.timed_out


def quiet_by_design(choices: Mapping[str, str]) -> bool:
    """Whether a loop with these choices may never spin on a connection that only waits."""
    if choices["timeout"] == "movable":
        return True
    return choices["membership"] != "listed" and choices["held"] != "listed"


class World:
    """See the module. ``settings`` go to the Script."""

    def __init__(self, policy: Any = "shipped", **settings: Any) -> None:
        self.script = Script(policy, **{"stop_grace_ms": GRACE // MS} | settings)
        self.clients: list[Client] = []
        self.next_phase = 1
        self.waited: Wait | None = None
        """The wait of this iteration; None in the first."""
        self.result = "ready"
        self.stopping = False
        self.stop_asked_ns = 0
        self.cut_short = False
        """It left with connections that had not ended when the time for that was over."""
        self.left = False
        self.in_force = self.choices
        """What was chosen last comes into force when the detach queue is drained."""
        self.eager = self.choices["membership"] == "eager"
        """That rule was in force at some time: work may be forgotten."""
        self.depth = int(self.script.settings["max_pipeline"])
        self.buffer = native()[0].new("uint8_t[]", 1 << 20)
        self.raw = native()[0].new("rl_counters *")
        self.counts = self.read()
        self.views: dict[int, ConnView] = {}
        self.then_counts, self.then_views = self.counts, self.views
        """As of the last decision."""
        self.stop_seen = False

    @property
    def choices(self) -> dict[str, str]:
        return self.script.policy.choices

    # -- what the outside does ------------------------------------------------------------------

    def connect(self) -> Client | None:
        try:
            client = Client(self.script.accept())
        except EngineError as error:
            if error.errno != errno.ECONNREFUSED:
                raise
            assert self.stopping
            return None
        self.clients.append(client)
        return client

    def ask(self, client: Client, *asks: Ask) -> None:
        """It has these requests to send; none after the one that ends the connection."""
        for ask in asks:
            if client.last or client.eof:
                return
            client.last_begins = client.sent + len(client.to_send)
            client.to_send += ask.wire()
            client.ends.append(client.sent + len(client.to_send))
            client.answers_as_one += ask.answer(len(client.answers))
            client.answers.append(len(client.answers_as_one))
            client.last = ask.kind != "get"
            client.refused = ask.kind in ("post", "garbage")

    def send(self, client: Client, size: int | None = None) -> None:
        """It sends that many of the bytes it has to send, all if None."""
        part = bytes(client.to_send[:size])
        if not part or client.eof or client.reset:
            return
        try:
            self.script.input(client.slot, part)
        except EngineError as error:  # closed by the server
            if error.errno != errno.EPIPE:
                raise
            client.to_send.clear()
            return
        del client.to_send[: len(part)]
        client.sent += len(part)

    def request(self, client: Client, *asks: Ask) -> None:
        self.ask(client, *asks)
        self.send(client)

    def half_close(self, client: Client) -> None:
        client.eof = True
        self.script.eof(client.slot)

    def reset(self, client: Client) -> None:
        client.reset = True
        self.script.reset(client.slot)

    def in_flight(self, client: Client) -> int | None:
        """Bytes of its SEND that the kernel holds."""
        return self.script.pending(client.slot)[1]

    def complete(self, client: Client, result: int | None = None) -> bool:
        """Its SEND completes, whole if None; False: there is none, or it is shorter than that."""
        asked = self.in_flight(client)
        if asked is None or (result is not None and result > asked):
            return False
        self.script.send_done(client.slot, asked if result is None else result)
        if result in (-errno.EPIPE, -errno.ECONNRESET):
            client.broken = True
        self.check_bytes(client)
        return True

    def begin(self, client: Client) -> bool:
        """Its handler takes a request; False: there is none, or it is busy already."""
        return self.script.handler_begin(client.slot)

    def end(self, client: Client) -> bool:
        view = self.view(client)
        if view is None or not view.handler_running:
            return False
        before = self.read()["bytes_direct"]
        self.script.handler_end(client.slot)
        self.counts = self.read()
        self.mark_disorder(client, view, before)
        self.check_bytes(client)
        return True

    def handle(self, client: Client) -> bool:
        return self.begin(client) and self.end(client)

    def mark_disorder(self, client: Client, before: ConnView, bytes_direct: int) -> None:
        wrote = self.counts["bytes_direct"] > bytes_direct
        if wrote and (before.sending or before.send_buf):
            rules = (self.in_force["direct-write"], self.choices["direct-write"])
            assert "at-once" in rules, "a write passed a SEND"
            client.disordered = True

    def lose_recv(self, client: Client) -> bool:
        if self.view(client) is None or not self.script.pending(client.slot)[0]:
            return False
        self.script.lose_recv(client.slot)
        return True

    def stop(self) -> None:
        if not self.stopping:
            self.stop_asked_ns = self.script.loop().now_ns
        self.stopping = True
        self.script.stop()

    def set(self, policy: Any = None, **changes: Any) -> None:
        self.script.set(policy, **changes)
        self.eager = self.eager or self.choices["membership"] == "eager"
        self.depth = max(self.depth, int(self.script.settings["max_pipeline"]))

    # -- what the worker does -------------------------------------------------------------------

    def step(self) -> None:
        """The next phase. In a wait that nothing has ended yet it stays."""
        name = PHASES[self.next_phase]
        if self.left:
            self.result = "left"
        elif name == "wait":
            self.result = self.script.wait()
            self.next_phase = 0 if self.result == "asleep" else 1
        else:
            self.run(lambda: self.script.phase(name), decides=name == "decide")
            if name == "drain":
                self.in_force = self.choices
            self.next_phase = (self.next_phase + 1) % len(PHASES)

    def turn(self) -> str:
        """The end of the wait it is in, if it ends; an iteration; and the next wait, if it ends.

        How that ended: ``ready``, ``timeout``, ``asleep``, ``left``.
        """
        if self.next_phase == 0:
            self.step()
            if self.result == "asleep":
                return self.result
        self.to_the_wait()
        self.step()
        return self.result

    def to_the_wait(self) -> None:
        """Up to a wait that was decided, and whose time has not passed yet."""
        while self.next_phase != 0 and not self.left:
            if self.next_phase == 1:
                self.run(self.script.iterate, decides=True)
                self.in_force = self.choices
                self.next_phase = 0
            else:
                self.step()

    def run(self, worker: Callable[[], Wait | None], *, decides: bool) -> None:
        """One phase or all of them, and everything that must hold afterwards."""
        before, counts = self.look(), self.read()
        wait = worker()
        self.views, self.counts = self.look(), self.read()
        for client in self.clients:
            view = before.get(client.slot)
            if view and view.handler_running and not self.running(client):
                self.mark_disorder(client, view, counts["bytes_direct"])  # the worker awaited it
            if self.counts["write_timeouts"] > counts["write_timeouts"]:
                self.check_timeout(client, view)
        self.check_gauges()
        for client in self.clients:
            self.check_bytes(client)
            self.check_end(client)
        if decides:
            self.check_wasted()
            self.waited, self.left = wait, bool(self.counts["ended"])
            now = self.script.loop().now_ns
            self.cut_short = self.cut_short or (self.left and now >= self.stop_asked_ns + GRACE)
            self.then_views, self.then_counts = self.views, self.counts

    # -- what can be seen -----------------------------------------------------------------------

    def view(self, client: Client) -> ConnView | None:
        """None: not accepted yet, refused, or gone."""
        try:
            return self.script.conn(client.slot)
        except EngineError as error:
            if error.errno != errno.ENOTCONN:
                raise
            return None

    def look(self) -> dict[int, ConnView]:
        views = {client.slot: self.view(client) for client in self.clients if not client.gone}
        return {slot: view for slot, view in views.items() if view is not None}

    def running(self, client: Client) -> bool:
        view = self.views.get(client.slot)
        return view is not None and view.handler_running

    def read(self) -> dict[str, int]:
        """The counters that are looked at here: many times as fast as all of them."""
        _, lib = native()
        lib.rl_script_counters(self.script._script, self.raw)
        return {name: getattr(self.raw, name) for name in COUNTERS}

    # -- what must hold -------------------------------------------------------------------------

    def check_bytes(self, client: Client) -> None:
        """What it was sent since the last look is what it may expect next."""
        new = self.output(client)
        if not new:
            return
        end = client.got + len(new)
        assert end <= client.due(client.may_ask()), f"client {client.slot} got too much"
        if not client.disordered:
            due = client.answers_as_one[client.got : end]
            assert new == due, f"client {client.slot}: wrong bytes in {client.got}..{end}"
        client.got = end

    def output(self, client: Client) -> bytes:
        ffi, lib = native()
        size = lib.rl_script_output(
            self.script._script, client.slot, self.buffer, client.got, len(self.buffer)
        )
        assert size < len(self.buffer)
        return bytes(ffi.buffer(self.buffer, size))

    def check_end(self, client: Client) -> None:
        """When its connection is gone there was a reason, and all that was due was sent."""
        open_now = client.slot in self.views
        client.seen = client.seen or open_now
        if open_now or client.gone or not client.seen:
            return
        client.gone = True
        if client.cut_off() or self.left:
            return
        assert client.ended() or self.stopping, f"client {client.slot} was closed for no reason"
        if not self.stopping:
            assert client.got in (client.due(), client.due(client.may_ask())), (
                f"client {client.slot} was closed too early"
            )
        assert client.got in client.boundaries()

    def check_timeout(self, client: Client, before: ConnView | None) -> None:
        """It is one of those whose SEND has been too long without progress, or was not closed."""
        view = self.views.get(client.slot)
        if before is None or before.closing or not before.sending or client.cut_off():
            return
        if view is not None and not view.closing:
            return
        limit = int(self.script.settings["write_timeout_ms"]) * MS
        assert limit > 0
        assert before.send_age_ns >= limit, "closed before its write timeout"
        client.timed_out = True

    def check_gauges(self) -> None:
        views = self.views.values()
        hidden = self.counts["connections"] - len(views)  # accepted, and its first recv not armed
        assert 0 <= self.counts["list_length"] - sum(view.listed for view in views) <= hidden
        assert self.counts["sending"] == sum(view.sending for view in views)
        assert self.counts["held_now"] == sum(view.held for view in views)
        assert self.counts["movable"] <= self.counts["pass_members"]
        assert all(view.outstanding <= self.depth for view in views)
        assert self.counts["sends_short"] <= self.counts["sends"]

    def check_wasted(self) -> None:
        """Wasted: exactly the iterations that could not block and moved nothing."""
        if self.waited is None or (self.stopping and not self.stop_seen):
            self.stop_seen = self.stopping
            return
        wasted = self.counts["wasted"] - self.then_counts["wasted"]
        moved = any(self.counts[name] > self.then_counts[name] for name in MOVES)
        assert wasted in (0, 1)
        if wasted:
            assert not self.waited.can_block
            assert not moved
        elif not self.waited.can_block and not moved:
            assert self.moved_quietly(), "wasted, and not counted as such"

    def moved_quietly(self) -> bool:
        """Progress that no counter shows: an end of stream, a recv armed again, reading resumed."""
        ended = any(self.counts[name] > self.then_counts[name] for name in ENDINGS)
        pairs = [(self.then_views.get(slot), view) for slot, view in self.views.items()]
        return ended or any(
            before is None
            or before.eof != view.eof
            or before.owes_recv != view.owes_recv
            or before.paused != view.paused
            for before, view in pairs
        )

    # -- stretches ------------------------------------------------------------------------------

    def freeze(self, turns: int = 60) -> None:
        """Nothing outside happens. A loop that is quiet by design soon waits for the outside."""
        limit = int(self.script.settings["write_timeout_ms"]) * MS
        bound = 20 + 4 * len(self.clients)
        row = 0
        started = self.script.loop().now_ns
        for _ in range(turns):
            if self.turn() in ("asleep", "left"):
                break
            row = 0 if self.waited is None or self.waited.can_block else row + 1
            if quiet_by_design(self.in_force):
                assert row <= bound, "it spins"
        passed = self.script.loop().now_ns - started
        timed = self.in_force["send-wait"] == "timed"
        if limit and timed and quiet_by_design(self.in_force) and not self.left:
            late = 5 * self.script.loop().cap_ns
            views = [view for view in self.look().values() if not view.held]
            oldest = max((view.send_age_ns for view in views), default=-1)
            assert oldest < limit + late, f"write timeout not honoured ({passed} ns passed)"

    def let_through(self) -> bool:
        """Every client reads, every handler ends, all input is sent; whether anything was due."""
        acted = False
        for client in self.clients:
            acted |= bool(client.to_send)
            self.send(client)
            client.to_send.clear()
            self.script.room(client.slot, ALL_ROOM)
            acted |= self.complete(client)
            view = self.view(client)
            if view and view.closing and not client.eof and not client.reset:
                self.half_close(client)  # it has read the end of the stream, and closes
            acted |= self.end(client) or self.handle(client)
        return acted

    def finish(self) -> None:
        """The outside lets everything through: then everybody has everything, and it is quiet."""
        still = 0
        for _ in range(3000):
            acted = self.let_through()
            before = self.counts
            result = self.turn()
            if result == "left":
                break
            same = all(self.counts[name] == before[name] for name in SEEN)
            still = still + 1 if same and not acted else 0
            if still == 12 or (still == 2 and result == "asleep"):
                break
        else:
            raise AssertionError("it comes to no end")
        if not self.eager:
            self.check_complete()

    def check_complete(self) -> None:
        assert self.left or not self.stopping, "it was asked to stop and did not"
        refused = 0
        for client in self.clients:
            refused += not client.seen
            if client.cut_off() or not client.seen:
                continue
            if self.stopping:
                assert self.cut_short or client.got in client.boundaries()
                continue
            assert client.got in (client.due(), client.due(client.may_ask())), (
                f"client {client.slot} was forgotten"
            )
            assert client.gone == client.ended(), f"client {client.slot}: open or closed wrongly"
        if self.left:
            return
        assert refused == self.counts["refused"]
        assert self.waited is None or self.waited.can_block, "all is done, and it does not sleep"
        for gauge in GAUGES:
            assert self.counts[gauge] == 0, gauge

"""A scripted relay between clients and origins, with a model of what each must get.

The World does what the outside does, one call each, and after every step compares what can be seen
with what it knows: which bytes each client and origin may have, who may be closed and why, what the
gauges must say.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field
from typing import Any

from engine import RelayScript, SessionView
from engine.errors import EngineError
from lab import content

MS = 1_000_000
CLOSE = "Connection: close\r\n"
ANSWER = re.compile(
    rb"HTTP/1\.1 (400|408|431|501|502|503|504|505) [A-Za-z ]+\r\n"
    rb"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


class ForgottenError(AssertionError):
    """Everybody takes and sends all that there is, and the relay sleeps on work that it has."""


@dataclass(frozen=True)
class Exchange:
    """One request and its response."""

    method: str = "GET"
    post: int = 0
    """Bytes of the request's body."""
    post_chunk: int = 0
    """Sent in chunks of so many bytes; 0: with Content-Length."""
    kind: str = "length"  # or "chunked", "until", "none"
    size: int = 1000
    chunk: int = 300
    interim: bool = False
    """A 100 comes before the response."""
    trailer: bool = False
    last: bool = False
    """The client asks for the end of the connection."""
    old: bool = False
    """The client speaks HTTP/1.0, and its origin answers with chunks and interims all the same."""

    def request(self, number: int, *, passed_on: bool = False) -> bytes:
        """What the client sends, or what its origin gets."""
        lines = f"{self.method} /{number} HTTP/1.{0 if self.old else 1}\r\nHost: world\r\n"
        if self.last and not passed_on:
            lines += CLOSE + "Keep-Alive: timeout=5\r\n"
        if self.post_chunk:
            lines += "Transfer-Encoding: chunked\r\n"
        elif self.post:
            lines += f"Content-Length: {self.post}\r\n"
        head = lines + (CLOSE if passed_on else "") + "\r\n"
        body = content.body(number, self.post)
        return head.encode() + (chunked(body, self.post_chunk) if self.post_chunk else body)

    def response(self, number: int, *, passed_on: bool = False) -> bytes:
        """What the origin sends, or what the client gets."""
        plain = self.old and passed_on
        interim = b"HTTP/1.1 100 Continue\r\nX-Way: on\r\n\r\n" * (self.interim and not plain)
        status = "204 No Content" if self.kind == "none" else "200 OK"
        lines = f"HTTP/1.1 {status}\r\n"
        if self.kind == "length":
            lines += f"Content-Length: {self.size}\r\n"
        if self.kind == "chunked" and not plain:
            lines += "Transfer-Encoding: chunked\r\n"
        if self.ends() or not passed_on:
            lines += CLOSE
        return interim + (lines + "\r\n").encode() + self.payload(number, passed_on=passed_on)

    def payload(self, number: int, *, passed_on: bool = False) -> bytes:
        if self.method == "HEAD" or self.kind == "none":
            return b""
        body = content.body(number, self.size)
        if self.kind != "chunked" or (self.old and passed_on):
            return body
        return chunked(body, self.chunk, b"X-Sum: 1\r\n" if self.trailer else b"")

    def by_close(self) -> bool:
        """The client sees the end of its body by the end of its connection."""
        known = self.kind == "length" or (self.kind == "chunked" and not self.old)
        return not known and self.kind != "none" and self.method != "HEAD"

    def ends(self) -> bool:
        """The session ends after it."""
        return self.last or self.old or self.by_close()


def chunked(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n" + trailer + b"\r\n"


@dataclass
class Client:
    """A client, its exchanges, and what was done to it."""

    socket: int
    exchanges: list[tuple[int, Exchange]] = field(default_factory=list)
    to_send: bytearray = field(default_factory=bytearray)
    fin: bool = False
    short: bool = False
    """It half-closed inside a request."""
    reset: bool = False
    broken: bool = False
    """Something outside cut it off: it cannot expect to get everything."""
    cut: dict[int, int] = field(default_factory=dict)
    """Exchanges whose body ends with the connection, and where their origin ended it in order, in
    bytes: nobody can tell that there was to be more."""

    def expected(self) -> tuple[bytes, list[int]]:
        """The stream that it gets when nothing goes wrong, and where responses end in it."""
        out, ends = b"", [0]
        for number, exchange in self.exchanges:
            out += exchange.response(number, passed_on=True)
            ends.append(len(out))
            if exchange.ends():
                break
        return out, ends


@dataclass
class Origin:
    """One connection to the origin."""

    socket: int
    number: int = -1
    to_send: bytearray | None = None
    """None: its request was not recognised yet."""
    fin: bool = False
    done_for: bool = False


class World:
    """See the module. ``settings`` go to the RelayScript."""

    def __init__(self, policy: Any = "before", **settings: Any) -> None:
        self.script = RelayScript(policy, **settings)
        self.clients: list[Client] = []
        self.origins: dict[int, Origin] = {}
        self.asked: dict[int, tuple[Client, Exchange]] = {}
        self.timeouts = any(
            settings.get(f"{who}_timeout_ms") for who in ("client", "server")
        )
        self.pipe_refused = False
        self.stopped = False

    # -- what the outside does --------------------------------------------------------------------

    def connect(self) -> Client | None:
        try:
            client = Client(self.script.accept())
        except EngineError as error:
            if error.errno != errno.ECONNREFUSED:
                raise
            return None
        client.broken = self.timeouts  # time passes in waits too: it may be timed out at any time
        self.clients.append(client)
        return client

    def ask(self, client: Client, *exchanges: Exchange) -> None:
        """It has these requests to send."""
        if client.fin or client.reset or any(e.ends() for _, e in client.exchanges):
            return
        for exchange in exchanges:
            number = len(self.asked)
            self.asked[number] = (client, exchange)
            client.exchanges.append((number, exchange))
            client.to_send += exchange.request(number)
            if exchange.ends():
                return

    def send(self, client: Client, size: int | None = None) -> bool:
        """It sends that many of the bytes that it has to send, all if None."""
        part = bytes(client.to_send[:size])
        if not part or client.fin or client.reset or self.script.socket(client.socket).closed:
            client.to_send = bytearray() if part else client.to_send
            return False
        self.script.input(client.socket, part)
        del client.to_send[: len(part)]
        return True

    def half_close(self, client: Client) -> None:
        if client.fin or client.reset:
            return
        client.short = client.broken = client.broken or bool(client.to_send)
        client.fin = True
        client.to_send.clear()
        self.script.fin(client.socket)

    def reset_client(self, client: Client) -> None:
        if not client.reset:
            client.reset = client.broken = True
            client.to_send.clear()
            self.script.reset(client.socket)

    def look_for_origins(self) -> list[Origin]:
        """Those that are open; a new one tells by its request what it must answer."""
        out = []
        for number in range(self.script.sockets):
            view = self.script.socket(number)
            if view.side != "origin":
                continue
            origin = self.origins.setdefault(number, Origin(number))
            if origin.to_send is None and view.delivered:
                self.recognise(origin)
            if not view.closed:
                out.append(origin)
        return out

    def recognise(self, origin: Origin) -> None:
        head = self.script.output(origin.socket)
        found = re.match(rb"[A-Z]+ /(\d+) ", head)
        if found:
            origin.number = int(found[1])
            origin.to_send = bytearray(self.asked[origin.number][1].response(origin.number))

    def has_request(self, origin: Origin) -> bool:
        """It has got the whole of its request."""
        whole = self.asked[origin.number][1].request(origin.number, passed_on=True)
        return self.script.socket(origin.socket).delivered == len(whole)

    def respond(self, origin: Origin, size: int | None = None, *, early: bool = False) -> bool:
        """It sends that many of its response's bytes; early: even before it has its request."""
        part = bytes((origin.to_send or b"")[:size])
        if part and not self.has_request(origin):
            if not early:
                return False
            self.asked[origin.number][0].broken = True  # what follows may not be read any more
        if not part or origin.fin or origin.done_for or self.script.socket(origin.socket).closed:
            return False
        self.script.input(origin.socket, part)
        assert origin.to_send is not None
        del origin.to_send[: len(part)]
        return True

    def end_origin(self, origin: Origin, *, reset: bool = False) -> bool:
        """It closes; before its response is out that breaks the client's session."""
        if origin.fin or origin.done_for or self.script.socket(origin.socket).closed:
            return False
        if origin.number >= 0 and (origin.to_send or reset):
            client, exchange = self.asked[origin.number]
            client.broken = True
            if not reset and exchange.kind == "until" and origin.to_send is not None:
                body = len(exchange.payload(origin.number))
                client.cut[origin.number] = body - len(origin.to_send)
        if origin.number < 0:
            for client in self.clients:
                client.broken = True  # whose request it was to be is not known yet
        origin.fin = True
        origin.done_for = reset
        (self.script.reset if reset else self.script.fin)(origin.socket)
        return True

    def connected(self, origin: Origin, error: int = 0) -> None:
        """Its connect ends, if it has not yet."""
        try:
            self.script.connected(origin.socket, error)
        except EngineError as failed:
            if failed.errno != errno.EINVAL:
                raise
            return
        if error:
            for client in self.clients:
                client.broken = True

    def time(self, ms: int) -> None:
        self.script.advance(ms * MS)

    def refuse_pipes(self, refuse: bool) -> None:
        self.pipe_refused = refuse
        self.script.refuse(pipe=errno.EMFILE if refuse else 0)

    def set(self, policy: Any) -> None:
        self.script.set(policy)

    # -- what the relay does ----------------------------------------------------------------------

    def turn(self) -> str:
        ended = self.script.turn()
        self.check()
        return ended

    def freeze(self, rounds: int = 120) -> None:
        """Nothing outside happens: a relay that is quiet by design comes to rest."""
        row = wasted = 0
        for _ in range(rounds):
            noops, wasted = self.count("noop_dispatches"), self.count("wasted")
            if self.turn() in ("asleep", "left"):
                return
            row = row + 1 if self.count("noop_dispatches") > noops else 0
            if self.quiet_by_design():
                assert row <= 2, f"no-op dispatches in {row} turns on end"
        if self.quiet_by_design() and not self.timeouts:
            last = self.script.wait_decided
            assert last is not None
            # With a hundred bytes a call it may take longer than that to fill a buffer, rightly.
            moves = self.count("wasted") == wasted
            assert last.can_block or moves, "it still does not sleep, and moves nothing"

    def quiet_by_design(self) -> bool:
        choices = self.script.policy.choices
        never_spliced = choices["splice"] == "off" and self.count("bytes_spliced_origin") == 0
        never_spliced = never_spliced and self.count("bytes_spliced_client") == 0
        return choices["recv-behind"] == "allowed" or never_spliced

    def count(self, name: str) -> int:
        return int(self.script.counters()[name])

    # -- what must hold ---------------------------------------------------------------------------

    def sessions(self) -> list[SessionView]:
        views = []
        for slot in range(len(self.clients)):
            try:
                views.append(self.script.session(slot))
            except EngineError as error:
                if error.errno != errno.ENOTCONN:
                    raise
        return views

    def check(self) -> None:
        self.check_gauges()
        for client in self.clients:
            self.check_client(client)
        self.look_for_origins()
        for origin in self.origins.values():
            self.check_origin(origin)

    def check_client(self, client: Client) -> None:
        """What it got is the beginning of what it may expect, or an error answer ends it."""
        got = self.script.output(client.socket)
        expected, ends = client.expected()
        if expected.startswith(got):
            self.check_end(client, len(got))
            return
        same = next((at for at in ends[::-1] if got[:at] == expected[:at]), 0)
        rest = got[same:]
        # An interim response may precede an error answer.
        rest = re.sub(rb"^HTTP/1\.1 100 Continue\r\nX-Way: on\r\n\r\n", b"", rest)
        cut = ANSWER.match(rest)
        assert cut or any(a.startswith(rest) for a in self.answers()), (
            f"client {client.socket}: bytes {same}.. are wrong: {rest[:60]!r}"
        )
        assert not cut or cut.end() == len(rest), "bytes behind an error answer"
        assert client.broken or self.stopped, f"an answer of the relay's own: {rest[:40]!r}"

    def check_end(self, client: Client, got: int) -> None:
        """Where the end of its connection tells the end of a body, half of one ends by a reset."""
        view, (_, ends) = self.script.socket(client.socket), client.expected()
        whole = sum(end <= got for end in ends[1:])
        if not (view.closed or view.finished) or client.reset:
            return
        assert client.broken or self.stopped or not view.broken_off, "it did get everything"
        if whole < len(ends) - 1:
            number, exchange = client.exchanges[whole]
            body = got - ends[whole + 1] + len(exchange.payload(number, passed_on=True))
            cut = body == client.cut.get(number)
            assert view.broken_off or body < 0 or cut or not exchange.by_close(), (
                f"client {client.socket} takes {body} bytes for the whole of a body")

    @staticmethod
    def answers() -> list[bytes]:
        phrases = ["400 Bad Request", "408 Request Timeout", "502 Bad Gateway",
                   "503 Service Unavailable", "504 Gateway Timeout"]
        rest = "\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        return [f"HTTP/1.1 {phrase}{rest}".encode() for phrase in phrases]

    def check_origin(self, origin: Origin) -> None:
        """What it got is the beginning of one request, as that is passed on."""
        if origin.number < 0:
            return
        got = self.script.output(origin.socket)
        whole = self.asked[origin.number][1].request(origin.number, passed_on=True)
        assert whole.startswith(got), f"origin {origin.socket}: wrong bytes of request"

    def check_gauges(self) -> None:
        counts, views = self.script.counters(), self.sessions()
        channels = [channel for view in views for channel in (view.request, view.response)]
        assert counts["piped"] == sum(channel.piped for channel in channels)
        assert counts["buffered"] == sum(c.scheduled + c.awaiting for c in channels)
        assert counts["to_forward"] == sum(max(0, c.to_forward) for c in channels)
        assert counts["pipes"] == sum(channel.has_pipe for channel in channels)
        for side, of in (("client", "request"), ("origin", "response")):
            for interest in ("active", "polled"):
                reads = sum(getattr(view, of).read == interest for view in views)
                writes = sum(getattr(view, "response" if side == "client" else "request").write
                             == interest for view in views)
                assert counts[f"read_{interest}_{side}"] == reads
                assert counts[f"write_{interest}_{side}"] == writes
        for channel in channels:
            assert channel.awaiting == 0 or channel.to_forward == 0
            assert not (channel.sink_full and channel.read != "off")
            assert channel.has_pipe or channel.piped == 0

    # -- the end ----------------------------------------------------------------------------------

    def let_through(self) -> bool:
        """Everybody takes and sends all that there is; whether anything was due."""
        acted = False
        for number in range(self.script.sockets):
            self.script.room(number, 1 << 40)
            self.script.again(number)
        for client in self.clients:
            acted |= self.send(client)
        for origin in self.look_for_origins():
            self.connected(origin)
            acted |= self.respond(origin)
            if origin.to_send is not None and not origin.to_send:
                acted |= self.end_origin(origin)
        return acted

    def finish(self) -> None:
        """The outside lets everything through: then everybody has everything, or was closed."""
        self.refuse_pipes(False)
        for client in self.clients:  # in the order in which they are accepted, maybe one by one
            self.settle()
            self.check_got_all(client)
            self.half_close(client)
        self.settle()
        if self.count("sessions"):
            raise ForgottenError("a session is left")
        closes = sum(self.count(n) for n in self.script.counters() if n.startswith("closes_"))
        assert closes == self.count("accepts")
        for gauge in ("piped", "buffered", "to_forward", "pipes", "read_polled_client"):
            assert self.count(gauge) == 0

    def check_got_all(self, client: Client) -> None:
        if self.stopped:
            return
        got, (expected, _) = self.script.output(client.socket), client.expected()
        view = self.script.socket(client.socket)
        ended = view.closed or view.finished or client.reset
        if got != expected and not ended:
            raise ForgottenError(f"client {client.socket}: {len(got)} of {len(expected)} bytes")
        assert client.broken or got == expected, f"client {client.socket} was cut off"

    def settle(self) -> None:
        still = 0
        for _ in range(4000):
            acted = self.let_through()
            ended = self.turn()
            if ended == "left":
                return
            still = still + 1 if ended in ("asleep", "timeout") and not acted else 0
            if still >= 4:
                return
            if self.spinning_by_design() and not acted:
                still += 1
        raise AssertionError("it does not come to rest")

    def spinning_by_design(self) -> bool:
        return not self.quiet_by_design()

"""What the clients do, as data: a tuple of steps, each a change of a socket's state.

The same choreography drives a bundled engine, a server in another process and somebody else's
server, because it speaks of sockets only. The one step that may look at the server is ``Settle``:
where there are counters it waits for the state that the next step needs, else for a fixed time.

    Connect(rcvbuf=4096), Ask("async", size=3 << 20), Settle(SEND_WAITS), Stall(1.0), ReadAll()
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from engine.errors import UsageError, quoted
from engine.handle import Handle
from lab.clients import PATIENCE_S, Client, ClientError
from lab.origin import MOST_TICKET, RELEASE, Object

FIRST = "first"
MAX_CLIENTS = 64
MAX_STEPS = 1000
# Least to_forward for which a relay tries to splice, RL_RELAY_MIN_SPLICE.
MIN_SPLICE = 4096
# A state counts as reached once it has not changed for this long.
STEADY_S = 0.06
_LOOK_S = 0.005
# Counters that a player's states see counted from its begin.
_SINCE = ("requests", "sends")

Counters = Mapping[str, Any]
Watch = Callable[[], Counters | None]


@dataclass(frozen=True)
class Connect:
    """Open a connection; ``rcvbuf`` is SO_RCVBUF in bytes, set before (0: the kernel's choice)."""

    rcvbuf: int = 0
    client: str = FIRST


@dataclass(frozen=True)
class Ask:
    """Send ``count`` requests in one write: route, body bytes (None: server's), handler ms."""

    route: str = "sync"
    size: int | None = None
    ms: int | None = None
    count: int = 1
    client: str = FIRST


@dataclass(frozen=True)
class Get:
    """Ask the bundled origin for objects in one write, each numbered as its response will be.

    With ``upload`` they are POSTs, with bodies of so many bytes that the origin checks.
    """

    objects: tuple[Object, ...]
    upload: int = 0
    client: str = FIRST


@dataclass(frozen=True)
class Release:
    """Tell the bundled origin at ``HOST:PORT`` to go on with the requests that it holds.

    Those of this player, and also those that have yet to reach it: what is told on a connection of
    its own may overtake them.
    """

    origin: str


@dataclass(frozen=True)
class State:
    """A state of the server: a test of its counters, which must then hold still to count.

    ``steady`` names the counters that must not change for ``hold_s`` seconds. A player hands the
    test what came about since it began (see :class:`Player`): what an earlier client has left
    behind is not what this one waits for.
    """

    what: str
    test: Callable[[Counters], bool]
    steady: tuple[str, ...] = ()
    hold_s: float = STEADY_S


@dataclass(frozen=True)
class Settle:
    """Wait until ``state`` is reached, for ``most`` seconds at most.

    A server without counters gets ``blind`` seconds instead. When the state does not come, that is
    a finding, not an error: the player notes it in ``troubles`` and goes on.
    """

    state: State | None = None
    most: float = 2.0
    blind: float = 0.5


@dataclass(frozen=True)
class Stall:
    """Do nothing, with whatever the server has sent left unread. None: until the player is told."""

    seconds: float | None = None


@dataclass(frozen=True)
class Read:
    """Read and check so many bytes of the stream, heads included."""

    size: int
    client: str = FIRST


@dataclass(frozen=True)
class ReadWhile:
    """Read ``size`` bytes and let the server settle, again and again while it is in ``state``.

    At most ``times``; not at all where it is in another state, or exports no counters. What a
    server comes to depends on the sizes in which bytes happened to arrive: this leads it on.
    """

    state: State
    settled: State
    size: int = 4096
    times: int = 32
    client: str = FIRST


@dataclass(frozen=True)
class ReadResponses:
    """Read until so many of the responses have come whole, counted from the first."""

    count: int
    client: str = FIRST


@dataclass(frozen=True)
class Pace:
    """Read so many bytes at a rate, as a slow client does."""

    size: int
    bytes_per_s: float
    client: str = FIRST


@dataclass(frozen=True)
class ReadUntilSilent:
    """Read until nothing has come for ``seconds``: all that the server can send as things are."""

    seconds: float = 0.05
    client: str = FIRST


@dataclass(frozen=True)
class ReadAll:
    """Read until all that was asked for has come; content and order are checked."""

    client: str = FIRST


@dataclass(frozen=True)
class HalfClose:
    """Send FIN and go on reading."""

    client: str = FIRST


@dataclass(frozen=True)
class Reset:
    """Close with RST."""

    client: str = FIRST


@dataclass(frozen=True)
class Close:
    """Close as programs do: FIN, or RST when bytes are left unread."""

    client: str = FIRST


@dataclass(frozen=True)
class Poke:
    """One small request on a connection of its own, read fully; how long it took is kept."""

    route: str = "sync"
    size: int = 64
    patience: float = PATIENCE_S


Step = (
    Connect | Ask | Get | Release | Settle | Stall | Read | ReadWhile | ReadResponses | Pace
    | ReadUntilSilent | ReadAll | HalfClose | Reset | Close | Poke
)
Choreography = tuple[Step, ...]


def _send_waits(counters: Counters) -> bool:
    return bool(min(counters["sending"], counters["sends"]) >= 1
                and counters["requests"] >= counters["clients"])


# The kernel holds a SEND that it cannot complete: the client's window is shut. Of several clients
# one may do, for it may park the worker before the others' have begun.
SEND_WAITS = State(
    "a SEND is in flight and waits",
    _send_waits,
    steady=("sends", "bytes_sent", "direct_writes", "requests"),
)
# A relay holds bytes that its client, or its origin, does not take. It is looked at for longer than
# the kernel takes to probe a window that was shut: at the first probe some more often goes through.
HELD_BACK = State(
    "a relay holds bytes that nobody takes",
    lambda counters: bool(counters["requests"] >= counters["clients"]
                          and counters["piped"] + counters["buffered"]),
    steady=("requests", "responses", "connects", "bytes_spliced_client", "bytes_spliced_origin",
            "bytes_copied_client", "bytes_copied_origin", "piped", "buffered"),
    hold_s=0.25,
)
HELD_BRIEFLY = replace(HELD_BACK, hold_s=STEADY_S)
# Its pipe is full, or was taken for full, with so much to forward that it may be spliced: bytes
# that come in dribs fill a pipe earlier than those that come at once. What stands in buffers is a
# request that waits its turn; more would be a body that recv has put behind the pipe.
MID_BODY = State(
    "a pipe holds data in the middle of a body",
    lambda counters: bool(
        counters["piped"]
        and counters["to_forward"] >= MIN_SPLICE * counters["sessions"] > counters["buffered"]
    ),
)
# Used where no SEND may come at all: the traffic, whatever it was, is over.
AT_REST = State(
    "no bytes move",
    lambda counters: True,
    steady=("sends", "bytes_sent", "direct_writes", "requests", "accepts", "closes"),
)


def requests_seen(count: int, more: int = 0) -> State:
    """The server has parsed ``count`` requests of every client since the player began, and
    ``more`` of others, and is done with them."""
    return State(
        f"{count + more} requests parsed",
        lambda counters: bool(counters["requests"] >= count * counters["clients"] + more),
        steady=("sends", "bytes_sent", "direct_writes"),
    )


def requests_forwarded(count: int) -> State:
    """A relay has forwarded ``count`` requests of every client since the player began, and no bytes
    move."""
    return State(
        f"{count} requests forwarded",
        lambda counters: bool(counters["requests"] >= count * counters["clients"]),
        steady=HELD_BACK.steady,
    )


class Player(Handle):
    """Plays choreographies against one server; holds the connections between one and the next.

    ``watch`` returns the server's counters, or None (or is None) where it exports none; a state
    sees their ``requests`` and ``sends`` counted from here on, and ``clients``: how many players,
    this one among them, do the same beside one another. ``hold`` does the waiting of ``Stall``:
    seconds, or None for "until told". With ``strict``, a stream that breaks off, falls silent or is
    wrong raises; otherwise ``delivered()`` and ``troubles`` report it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        watch: Watch | None = None,
        hold: Callable[[float | None], object] | None = None,
        patience: float = PATIENCE_S,
        strict: bool = True,
        compare: bool = True,
        clients: int = 1,
    ) -> None:
        self.troubles: list[str] = []
        self.poke_ms: list[float] = []
        self.asked_at = 0.0  # of the newest request, in seconds of the monotonic clock
        self._host = host
        self._port = port
        self._watch = watch
        self._hold = hold or _sleep
        self._patience = patience
        self._strict = strict
        self._compare = compare
        self._clients: dict[str, Client] = {}
        self._dropped: list[Client] = []
        self._ticket = _new_ticket()
        self._alike = clients
        self._before = (watch() if watch else None) or {}

    def __enter__(self) -> Player:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def play(self, steps: Iterable[Step]) -> None:
        """Do the steps in turn; returns after the last."""
        listed = tuple(steps)
        if len(listed) > MAX_STEPS:
            raise UsageError(f"a choreography of {len(listed)} steps: give at most {MAX_STEPS}")
        for step in listed:
            self._step(step)

    def client(self, name: str = FIRST) -> Client:
        """The connection of that name."""
        try:
            return self._clients[name]
        except KeyError:
            known = ", ".join(self._clients) or "none"
            raise UsageError(f"no connection {quoted(name)} is open (open: {known})") from None

    def delivered(self) -> dict[str, Any]:
        """What all connections got together: body ``bytes``, ``expected``, ``in_order``, ``fault``.

        ``fault`` is None, or words: the first wrong byte, or how the first broken stream ended.
        """
        streams = [*self._dropped, *self._clients.values()]
        faults = [words for words in map(_fault, streams) if words]
        return {
            "bytes": sum(each.stream.received for each in streams),
            "expected": sum(each.stream.expected for each in streams),
            "in_order": all(each.stream.in_order for each in streams),
            "fault": faults[0] if faults else None,
        }

    def close(self) -> None:
        """Close every connection; harmless when repeated."""
        for each in self._clients.values():
            each.close()
        self._dropped += self._clients.values()
        self._clients.clear()

    def _step(self, step: Step) -> None:
        match step:
            case Connect():
                self._connect(step)
            case Ask():
                self.asked_at = time.monotonic()
                self.client(step.client).ask(target_of(step), step.size, step.count)
            case Get():
                self._get(step)
            case Release():
                self._release(step)
            case Settle():
                self._settle(step)
            case Stall():
                self._hold(step.seconds)
            case Read():
                self._read(step.client, step.size, 0.0)
            case ReadWhile():
                self._read_while(step)
            case ReadResponses():
                self._read_responses(step.client, step.count)
            case Pace():
                self._read(step.client, step.size, step.bytes_per_s)
            case ReadUntilSilent():
                self.client(step.client).read_until_silent(step.seconds)
            case ReadAll():
                self._read_responses(step.client, None)
            case HalfClose():
                self.client(step.client).half_close()
            case Reset():
                self._drop(step.client).reset()
            case Close():
                self._drop(step.client).close()
            case Poke():
                self._poke(step)

    def _get(self, step: Get) -> None:
        asking = self.client(step.client)
        self.asked_at = time.monotonic()
        first = asking.stream.asked
        objects = [
            replace(each, seq=first + number, check=int(step.upload > 0),
                    ticket=self._ticket if each.silent or each.noread else 0)
            for number, each in enumerate(step.objects)
        ]
        asking.ask_for([(each.target, each.size) for each in objects], step.upload)

    def _release(self, step: Release) -> None:
        host, _, port = step.origin.rpartition(":")
        with Client(host.strip("[]"), int(port), patience=self._patience) as other:
            other.ask(f"{RELEASE}?ticket={self._ticket}", 0)
            self._ticket = _new_ticket()  # what is asked for from here on is held anew
            if not other.read_all():
                raise ClientError(f"the origin at {step.origin} did not let go: {_fault(other)}")

    def poke(self, step: Poke | None = None) -> float:
        """One small request on a connection of its own; ms from the request to its last byte."""
        poke = step or Poke()
        with Client(
            self._host, self._port, patience=poke.patience, compare=self._compare
        ) as other:
            begun = time.monotonic()
            other.ask(target_of(Ask(poke.route, poke.size)), poke.size)
            if not other.read_all():
                raise ClientError(
                    f"another connection's request got no whole answer: {_fault(other)}"
                )
            return (time.monotonic() - begun) * 1e3

    def _poke(self, step: Poke) -> None:
        try:
            self.poke_ms.append(self.poke(step))
        except ClientError as error:
            if self._strict:
                raise
            self.troubles.append(str(error))

    def _connect(self, step: Connect) -> None:
        if step.client in self._clients:
            raise UsageError(f"connection '{step.client}' is open already")
        if len(self._clients) >= MAX_CLIENTS:
            raise UsageError(f"more than {MAX_CLIENTS} connections: use lab.crowd")
        self._clients[step.client] = Client(
            self._host,
            self._port,
            rcvbuf=step.rcvbuf,
            patience=self._patience,
            compare=self._compare,
        )

    def _drop(self, name: str) -> Client:
        dropped = self.client(name)
        del self._clients[name]
        self._dropped.append(dropped)
        return dropped

    def _settle(self, step: Settle) -> None:
        if step.state is None or self._counters() is None:
            time.sleep(step.blind)
        elif not wait_for(step.state, self._counters, step.most):
            self.troubles.append(f"not reached within {step.most:g} s: {step.state.what}")

    def _counters(self) -> Counters | None:
        counters = self._watch() if self._watch else None
        if counters is None:
            return None
        since = {name: counters[name] - self._before.get(name, 0)
                 for name in _SINCE if name in counters}
        return {**counters, **since, "clients": self._alike}

    def _read(self, name: str, size: int, rate: float) -> None:
        reader = self.client(name)
        if reader.read(size, rate) < size and self._strict:
            raise ClientError(f"{size:,} bytes were to be read: {_fault(reader)}")
        self._check(reader)

    def _read_while(self, step: ReadWhile) -> None:
        reader = self.client(step.client)
        for _ in range(step.times):
            counters = self._counters()
            if counters is None or not step.state.test(counters):
                break
            if reader.read(step.size) < step.size:
                break  # it holds bytes, and sends none: whoever looks at the stream is told
            self._settle(Settle(step.settled))
        self._check(reader)

    def _read_responses(self, name: str, count: int | None) -> None:
        reader = self.client(name)
        if not reader.read_all(count) and self._strict:
            raise ClientError(f"the responses did not all arrive: {_fault(reader)}")
        self._check(reader)

    def _check(self, reader: Client) -> None:
        if self._strict and not reader.stream.in_order:
            reader.stream.require()


def wait_for(state: State, watch: Watch | None, most: float) -> bool:
    """Wait until the counters show ``state`` and hold still; False after ``most`` seconds."""
    deadline = time.monotonic() + most
    seen: tuple[int, ...] = ()
    since = time.monotonic()
    while True:
        counters = watch() if watch else None
        if counters is None:
            return False
        now = time.monotonic()
        values = tuple(counters[name] for name in state.steady)
        if not state.test(counters) or values != seen:
            seen, since = values, now
        elif now - since >= state.hold_s:
            return True
        if now >= deadline:
            return False
        time.sleep(_LOOK_S)


def target_of(step: Ask) -> str:
    """The request target of a step: ``/async?size=3145728&ms=20``."""
    named = (("size", step.size), ("ms", step.ms))
    query = "&".join(f"{name}={value}" for name, value in named if value is not None)
    return f"/{step.route}" + (f"?{query}" if query else "")


def _fault(reader: Client) -> str | None:
    """In words, why a stream is not whole; None when it is."""
    stream = reader.stream
    if stream.fault is not None:
        return str(stream.fault)
    if stream.complete:
        return None
    return (
        f"{stream.received:,} of {stream.expected:,} bytes arrived, "
        f"then the stream was {reader.ended or 'left unread'}"
    )


def _new_ticket() -> int:
    """Of nobody else's, in whatever process he is, who asks the same origin."""
    return 1 + secrets.randbelow(MOST_TICKET)


def _sleep(seconds: float | None) -> None:
    if seconds is None:
        raise UsageError("Stall() without seconds needs a player with somebody to tell it: hold=")
    time.sleep(seconds)

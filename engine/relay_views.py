"""What can be seen of a relay: its sessions, their channels, its loop, a wait, a handler's run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from engine.binding import words


@dataclass(frozen=True, slots=True)
class ChannelView:
    """One direction of a session (``rl_channel_view``). Sizes in bytes."""

    message: str
    """Where it is in its message: ``head``, ``length``, ``chunk-size``, ``chunk-data``,
    ``chunk-end``, ``trailers``, ``until-close`` or ``done``."""
    read: str
    """Interest in reading its source: ``off``, ``active`` or ``polled``."""
    write: str
    """Interest in writing to its sink."""
    sink_full: bool
    """Reading has stopped until the sink moves."""
    has_pipe: bool
    eof: bool
    """Its source has ended."""
    splices: bool
    """False: splice was refused for this source."""
    to_forward: int
    """Bytes that may pass without the HTTP layer looking; -1: all until the source ends."""
    scheduled: int
    """In the buffer, for the sink."""
    awaiting: int
    """In the buffer, for the HTTP layer."""
    piped: int
    spliced: int
    """Bytes that came through the pipe, since accept."""
    copied: int
    """Bytes that came through the buffer, since accept."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """A client, its origin, and what is between them (``rl_relay_view``). Times in ns."""

    slot: int
    generation: int
    client_fd: int
    """The socket's number on the scripted backend; -1: none."""
    origin_fd: int
    """The same; -1: not connected."""
    busy: bool
    """A request is under way."""
    connecting: bool
    closing: bool
    """No request is taken any more; it ends once everything is sent."""
    lingering: bool
    """All is sent, FIN too; what still arrives is thrown away."""
    answer: int
    """A status that the relay answers itself and that is not in the buffer yet; 0: none."""
    asked: str
    """In a policy: the source (``client`` or ``origin``) of the channel that is asked about."""
    requests: int
    responses: int
    client_wait_ns: int
    """Since the client last did what is awaited of it; -1: nothing is."""
    origin_wait_ns: int
    outq: int
    """Bytes in the client's socket that it has not acknowledged (SIOCOUTQ); -1: unknown."""
    request: ChannelView
    response: ChannelView

    @property
    def channel(self) -> ChannelView:
        """In a policy: the channel that is asked about."""
        return self.request if self.asked == "client" else self.response


@dataclass(frozen=True, slots=True)
class RelayLoopView:
    """A relay's loop (``rl_relay_loop_view``). Times in ns of the engine's clock."""

    now_ns: int
    iterations: int
    sessions: int
    active: int
    """Sockets with an active direction: their handlers run every turn."""
    pipes: int
    deadline_ns: int
    """The earliest deadline; -1: none."""
    engine: str
    """``speculative`` or ``level-triggered``."""


@dataclass(frozen=True, slots=True)
class RelayWait:
    """A wait as it was decided."""

    why: str
    """``active`` or ``overdue`` (these cannot block), ``deadline`` or ``event``."""
    can_block: bool
    timeout_ns: int
    """-1: none."""


@dataclass(frozen=True, slots=True)
class HandlerRun:
    """One run of a handler, as the scripted relay tells it."""

    slot: int
    """Of the session; -1: the listener."""
    side: str
    """Whose socket: ``client`` or ``origin``."""
    direction: str
    """``read`` or ``write``."""
    calls: int
    """System calls that it made on its socket."""
    before: str
    """The interest before it ran."""
    after: str
    noop: bool
    """No system call on its socket, and the interest unchanged."""


@dataclass(frozen=True, slots=True)
class SocketView:
    """A socket of the scripted relay."""

    side: str
    slot: int
    """Of its session; -1: not accepted yet, or closed."""
    closed: bool
    """By the relay."""
    finished: bool
    """The relay has sent FIN."""
    broken_off: bool
    """The relay has reset it: what its other end has got is not whole."""
    watched_read: bool
    """As epoll was told."""
    watched_write: bool
    unread: int
    """Bytes that have arrived and that the relay has not taken."""
    delivered: int
    """Bytes that the relay has sent."""
    room: int
    """Bytes that it takes before EAGAIN."""
    ready_read: bool
    """What a wait would report of it now."""
    ready_write: bool
    next_read: str
    """What was chosen for its next call: ``full``, ``short`` or ``eagain``; empty: nothing."""
    next_write: str


ENGINES = ("speculative", "level-triggered")


def _plain(kind: type[Any], c: Any, **given: Any) -> Any:
    """A view of a C struct: numbers as they are, flags as bools, ``given`` in their place."""
    values = {}
    for field in fields(kind):
        if field.name in given:
            values[field.name] = given[field.name]
        else:
            value = getattr(c, field.name)
            values[field.name] = bool(value) if field.type in ("bool", bool) else value
    return kind(**values)


def channel_view(c: Any) -> ChannelView:
    """From a ``rl_channel_view``; nothing of it is kept, as in all that follow."""
    interests = words("rl_interest")
    view: ChannelView = _plain(
        ChannelView, c, message=words("rl_message")[c.message], read=interests[c.read],
        write=interests[c.write],
    )
    return view


def session_view(c: Any) -> SessionView:
    """From a ``rl_relay_view``."""
    view: SessionView = _plain(
        SessionView, c, asked=words("rl_side")[c.asked] if c.asked >= 0 else "",
        request=channel_view(c.request), response=channel_view(c.response),
    )
    return view


def relay_loop_view(c: Any) -> RelayLoopView:
    """From a ``rl_relay_loop_view``."""
    view: RelayLoopView = _plain(RelayLoopView, c, engine=ENGINES[c.engine])
    return view


def relay_wait(c: Any) -> RelayWait:
    """From a ``rl_relay_wait``."""
    wait: RelayWait = _plain(RelayWait, c, why=words("rl_relay_why")[c.why])
    return wait


def handler_run(c: Any) -> HandlerRun:
    """From a ``rl_relay_step``."""
    interests = words("rl_interest")
    run: HandlerRun = _plain(
        HandlerRun, c, side=words("rl_side")[c.side], direction="write" if c.write else "read",
        before=interests[c.before], after=interests[c.after],
    )
    return run


def socket_view(c: Any) -> SocketView:
    """From a ``rl_relay_socket``."""
    outcomes = words("rl_relay_outcome")
    view: SocketView = _plain(
        SocketView, c, side=words("rl_side")[c.side],
        next_read=outcomes[c.next_read] if c.next_read >= 0 else "",
        next_write=outcomes[c.next_write] if c.next_write >= 0 else "",
    )
    return view

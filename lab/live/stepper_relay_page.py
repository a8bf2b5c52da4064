"""The relay's state as HTML, and the buttons of its stepper."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.decisions import OWN, ResolvedPolicy, method_name
from engine.relay_policy import RELAY
from lab.live.stepper_driver import Page, choice, group, number, press, unit

if TYPE_CHECKING:
    from engine.relay_views import ChannelView, SessionView
    from lab.live.stepper_relay import RelaySeen, SocketSeen

ASKS: Mapping[str, Mapping[str, type]] = {
    "connect": {}, "request": {"socket": int, "count": int, "post": int, "sent": int},
    "respond": {"socket": int, "size": int, "sent": int, "chunk": int},
    "send": {"socket": int, "side": str, "size": int},
    "takes": {"socket": int, "side": str, "size": int},
    "fin": {"socket": int, "side": str}, "reset": {"socket": int, "side": str},
    "returns": {"socket": int, "call": str, "how": str, "short": int},
    "report": {"socket": int}, "advance": {"ms": int}, "stop": {},
}
MIN_SPLICE = 4_096
_QUESTIONS = {
    "recv-behind": "may recv run while the pipe holds data?",
    "early-leave": "the splice loop was left early",
    "last-block": "less than the least size is left, the pipe in use",
    "send-after-read": "bytes were read, write readiness is awaited already",
    "engine": "who says that a direction is ready?",
    "splice": "bodies go through a pipe?",
    "readiness": "EAGAIN, with data in the pipe",
}
_ENDS = {
    "timeout": "it ended by its timeout",
    "asleep": "the loop sleeps; nothing inside will wake it: let somebody outside act",
    "left": "the relay has left its loop",
}


def policy_specs(policy: ResolvedPolicy) -> list[dict[str, Any]]:
    """The choice of a preset, and of every single decision, what the real system had marked."""
    presets = [{"value": preset.name, "label": preset.name, "what": preset.what}
               for preset in RELAY.presets.values()]
    specs: list[dict[str, Any]] = [{
        "name": "policy", "label": "policy", "value": policy.name, "choices": presets,
        "help": "a named combination of the decisions below",
    }]
    for decision, known in RELAY.table().items():
        options = [{"value": each.name, "what": each.what,
                    "label": each.name + (" (before)" if each.shipped else "")}
                   for each in known.values()]
        if policy.choices[decision] == OWN:
            options.append({"value": OWN, "label": "own (Python)", "what": "decided in Python"})
        specs.append({"name": method_name(decision), "label": decision, "choices": options,
                      "value": policy.choices[decision], "help": _QUESTIONS[decision]})
    return specs


# -- buttons ---------------------------------------------------------------------------------------


def controls() -> list[Page]:
    """Clients, origins, the kernel."""
    client, origin = {"socket": "client"}, {"socket": "origin"}
    return [
        group("Client", press("connect", "A client connects", "connect"),
              choice("client", "client's socket"),
              press("GET", "It sends a request", "request", **client),
              press("POST", "It sends a request with a body", "request", post="post", **client),
              number("post", "bytes of the POST's body", 60_000), unit("bytes"),
              press("reads", "It reads: its socket takes so much more", "takes", size="reads",
                    **client),
              number("reads", "bytes that the client reads", 600), unit("bytes"),
              press("FIN", "It closes its direction", "fin", **client),
              press("RST", "It resets", "reset", **client)),
        group("Origin", choice("origin", "origin's socket"),
              press("responds", "It sends a head, and so much of the body", "respond", size="size",
                    sent="sent", chunk="chunk", **origin),
              number("size", "bytes of the body", 60_000), unit("at once"),
              number("sent", "bytes of the body that go at once; empty: all", empty="all"),
              unit("chunks"), number("chunk", "bytes of a chunk; 0: Content-Length", 0),
              press("sends", "So much more of the body arrives", "send", size="more", **origin),
              press("reads", "It reads: its socket takes so much more", "takes", size="more",
                    **origin),
              number("more", "bytes that the origin sends or reads", 3_000), unit("bytes"),
              press("FIN", "It closes", "fin", **origin),
              press("RST", "It resets", "reset", **origin)),
        group("Kernel", unit("next"), choice("call", "which call", ["read", "write"]),
              unit("on"), choice("on", "on which socket"), unit("returns"),
              choice("how", "what it returns", ["full", "short", "EAGAIN", "FIN", "reset"]),
              unit("short by"), number("short", "bytes that a short call lacks", 100),
              press("choose", "The next call of that kind returns this", "returns", socket="on",
                    call="call", how="how", short="short"),
              unit("epoll"), choice("ready", "the socket that epoll reports"),
              press("first", "The next wait reports that one alone", "report", socket="ready")),
        group("Time", number("ms", "milliseconds that pass", 1_000), unit("ms"),
              press("pass", "Time passes", "advance", ms="ms"),
              press("stop flag", "The modelled stop", "stop")),
    ]


def options(now: RelaySeen) -> dict[str, list[list[str]]]:
    """The sockets that there are, newest first."""
    there = [each for each in reversed(now.sockets) if not each.view.closed]
    named = {side: [[str(each.number), _name(each)] for each in there if each.view.side == side]
             for side in ("client", "origin")}
    ready = [[str(each.number), _name(each)] for each in there
             if each.view.ready_read or each.view.ready_write]
    return {**named, "on": named["origin"] + named["client"], "ready": ready}


def _name(socket: SocketSeen) -> str:
    return f"{socket.view.side} {socket.number}"


# -- words -----------------------------------------------------------------------------------------


def said(seen: RelaySeen) -> str:
    """What came of a decision, a wait or a handler."""
    name = seen.action.name if seen.action else ""
    if name == "decide":
        return f"timeout {seen.timeout}"
    if name == "wait":
        return seen.ended if seen.ended != "ready" else _count(seen.events, "event")
    if name.endswith("handler") and seen.ran is not None:
        return f"{seen.ran.side}: {_effect(seen)}"
    return ""


def _effect(seen: RelaySeen) -> str:
    ran = seen.ran
    if ran is None:
        return ""
    if ran.noop:
        return "a no-op"
    return f"{_count(ran.calls, 'call')}, {ran.before.upper()} to {ran.after.upper()}"


def _count(value: int, what: str) -> str:
    return f"{value:,} {what}{'s' * (value != 1)}" if value else f"no {what}"


# -- the state -------------------------------------------------------------------------------------


def state_html(now: RelaySeen) -> str:
    """The wait and the handler in words, the sockets and the channels as tables."""
    parts = [f"<p><strong>The wait:</strong> {html.escape(_wait(now))} "
             f"<strong>The last handler:</strong> {_handler(now)}</p>"]
    parts.append(_table(("", "read", "write", "unread", "room", "delivered", "also"),
                        [_socket(now, each) for each in now.sockets if not each.view.closed],
                        "nobody is connected"))
    parts.append(_table(("", "message", "to_forward", "pipe", "buffer, to send",
                         "buffer, for HTTP", "also"),
                        [row for each in now.sessions for row in _channels(now, each)],
                        "no session, so no channel"))
    if now.closes:
        parts.append(f"<p>Sessions ended: {html.escape(', '.join(now.closes))}.</p>")
    return "".join(parts)


def _wait(now: RelaySeen) -> str:
    ended = _ENDS.get(now.ended, "")
    if now.ended == "ready":
        ended = f"it returned at once with {_count(now.events, 'event')}"
    decided = f"timeout {now.timeout}" if now.wait else now.timeout
    wasted = f" {now.wasted:,} turns in a row without progress." if now.wasted > 1 else ""
    return f"{decided}. {ended[:1].upper()}{ended[1:]}{'.' if ended else ''}{wasted}"


def _handler(now: RelaySeen) -> str:
    ran = now.ran
    if ran is None:
        return "none ran yet."
    whose = "the listener" if ran.slot < 0 else f"the {ran.side}"
    text = f"the {ran.direction} handler of {whose}: "
    if ran.noop:
        row = f"{now.noops:,} in a row: " if now.noops > 1 else ""
        return (f"{text}<strong>a no-op</strong> ({row}no system call on its socket, and still "
                f"{ran.after.upper()}).")
    return f"{text}{html.escape(_effect(now))}."


def _table(heads: tuple[str, ...], rows: list[str], nothing: str) -> str:
    also = ' class="rl-also"'
    top = "".join(f'<th scope="col"{also if head == "also" else ""}>{html.escape(head)}</th>'
                  for head in heads)
    body = "".join(rows) or f'<tr><td colspan="{len(heads)}">{nothing}</td></tr>'
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cells(name: str, cells: list[str], also: list[str]) -> str:
    return (f'<tr><th scope="row">{html.escape(name)}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + f'<td class="rl-also">{"; ".join(also) or "·"}</td></tr>')


def _socket(now: RelaySeen, socket: SocketSeen) -> str:
    view = socket.view
    reads, writes = "OFF", "OFF"
    for session in now.sessions:
        if socket.number == session.client_fd:
            reads, writes = session.request.read.upper(), session.response.write.upper()
        elif socket.number == session.origin_fd:
            reads, writes = session.response.read.upper(), session.request.write.upper()
    return _cells(f"{view.side} {socket.number}", [
        _interest(reads), _interest(writes), f"{view.unread:,}",
        f"{view.room:,}" if view.room < 1 << 38 else "no end", f"{view.delivered:,}",
    ], _also(socket))


def _also(socket: SocketSeen) -> list[str]:
    """What of a socket is not always so."""
    view, out = socket.view, []
    ready = " ".join(word for word, is_so in (("IN", view.ready_read), ("OUT", view.ready_write))
                     if is_so)
    if ready:
        out.append(f"epoll says {ready}")
    for call, chosen in (("read", view.next_read), ("write", view.next_write)):
        if chosen:
            out.append(f"next {call}: {'EAGAIN' if chosen == 'eagain' else chosen}")
    if not socket.in_order:
        out.append("<strong>bytes out of order</strong>")
    elif socket.due:
        whole = view.delivered == socket.due
        out.append("every byte, in order" if whole else f"in order, of {socket.due:,}")
    if socket.owed:
        out.append(f"{socket.owed:,} bytes yet to be sent to the relay")
    return out


def _interest(word: str) -> str:
    return f"<strong>{word}</strong>" if word == "ACTIVE" else word


def _channels(now: RelaySeen, session: SessionView) -> list[str]:
    more = f" {session.slot}" if len(now.sessions) > 1 else ""
    return [_channel(now, f"{name}{more}", ch) for name, ch in (
        ("request", session.request), ("response", session.response))]


def _channel(now: RelaySeen, name: str, ch: ChannelView) -> str:
    flags = [word for word, is_so in (
        ("sink full: reading has stopped", ch.sink_full), ("source ended", ch.eof),
        ("splice refused", not ch.splices),
        ("pipe held", ch.has_pipe and not ch.piped),
    ) if is_so]
    low = ch.piped and 0 <= ch.to_forward < MIN_SPLICE
    forward = "no end" if ch.to_forward < 0 else f"{ch.to_forward:,}"
    full = " (full)" if ch.piped >= now.pipe_size else ""
    return _cells(name, [
        {"head": "awaits a head", "length": "body", "done": "read whole"}.get(
            ch.message, ch.message.replace("-", " ")),
        f"<strong>{forward}</strong>" if low else forward,
        f"<strong>{ch.piped:,}</strong>{full}" if ch.piped else "0",
        f"{ch.scheduled:,}", f"{ch.awaiting:,}",
    ], flags)

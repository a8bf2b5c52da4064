"""The case splice for the live panel: the relay between its clients and its origin."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from engine import SpliceRelay, counters
from engine.decisions import AnyPolicy
from engine.relay_policy import RELAY
from engine.relay_views import ChannelView, SessionView
from lab import palette
from lab import splice as splice_case
from lab.choreography import MAX_CLIENTS, Choreography, Connect, Get, Pace, Release
from lab.live.case import (
    Button,
    Line,
    LiveCase,
    Look,
    Plotted,
    Preset,
    Rules,
    Scene,
    Shown,
    Waiting,
    Words,
)
from lab.live.controls import CONNECTION, REQUEST, Control
from lab.live.series import Rowed, Shape
from lab.live.state import timeout_text
from lab.origin import Object
from lab.origin_process import OriginProcess
from lab.parameters import Parameter, Parameters, Value
from lab.relay_stall import in_state
from lab.tables import Column

MOST_SESSIONS = 4
PACED, UPLOAD = "paced", "e"
# More than the pipe of a stalled session holds on loopback, whose pages are large.
_FULL_PIPE = 256 * 1024
# Requests of one write must fit what sockets take while the relay is busy with the first.
_MOST_AHEAD = 64
_KNOCK_S = 1.0

# ---- what can be set ----------------------------------------------------------------------------

_AT_ONCE = "at once"
_STALLS = ("a", "a2", "b", "d", "e", "m")
_DOWN = ("a", "a2", "b", "d", "m")  # towards the client
# For each control: its name in the experiment, its label, when it is taken up, its arms.
_FROM_EXPERIMENT = (
    ("object_size", "object size", REQUEST, ("a", "a2", "m")),
    ("large_size", "large object", REQUEST, ("b", "m", PACED)),
    ("stop_before", "stops before the end", REQUEST, ("b",)),
    ("last", "origin: last block", REQUEST, ("b",)),
    ("delay_ms", "origin: later by", REQUEST, ("b",)),
    ("chunk", "origin: chunk size", REQUEST, ("d",)),
    ("upload", "upload", REQUEST, (UPLOAD,)),
    ("pace", "pace", REQUEST, (PACED,)),
    ("rcvbuf", "client SO_RCVBUF", CONNECTION, _STALLS),
    ("paced_rcvbuf", "client SO_RCVBUF", CONNECTION, (PACED,)),
    ("sndbuf", "relay SO_SNDBUF", CONNECTION, _DOWN),
    ("paced_sndbuf", "relay SO_SNDBUF", CONNECTION, (PACED,)),
    ("origin_sndbuf", "relay SO_SNDBUF", REQUEST, (UPLOAD,)),
)
_REACHES = {"sndbuf": "so_sndbuf", "origin_sndbuf": "origin_sndbuf",
            "client_timeout_ms": "client_timeout_ms", "server_timeout_ms": "server_timeout_ms"}


def controls(parameters: Parameters) -> dict[str, Control]:
    """The controls, by name; those that mean nothing in an arm are not shown in it."""
    clients = Parameter("clients", int, 1, "clients", 1, MAX_CLIENTS,
                        help="sessions, each with a client that does the same")
    timeouts = [
        Parameter(f"{side}_timeout_ms", int, 0, "ms", 0, 60_000,
                  help=f"how long the {side} may not do what is awaited of it; 0: for ever")
        for side in ("client", "server")
    ]
    return {
        **{name: Control(parameters[name], label, effect, arms)
           for name, label, effect, arms in _FROM_EXPERIMENT},
        "clients": Control(clients, "clients", CONNECTION),
        **{one.name: Control(one, one.name[:6] + " timeout", _AT_ONCE, _STALLS)
           for one in timeouts},
    }


def settings(values: Mapping[str, Value], arm: str) -> dict[str, Value]:
    """The relay's settings; a paced client has buffers of its own, and no deadline."""
    if arm != PACED:
        return {setting: values[name] for name, setting in _REACHES.items()}
    return {"so_sndbuf": values["paced_sndbuf"], "origin_sndbuf": values["origin_sndbuf"],
            "client_timeout_ms": 0, "server_timeout_ms": 0}


@contextmanager
def origin(_: Mapping[str, Value]) -> Iterator[OriginProcess]:
    """An origin in a process of its own.

    One serves every arm: that it takes little matters to what is uploaded only.
    """
    narrow = int(splice_case.PARAMETERS["origin_rcvbuf"].default)
    with OriginProcess(rcvbuf=narrow) as process:
        yield process


def lost(process: OriginProcess) -> str:
    """An origin that was ended from outside, or crashed."""
    return f"the origin (process {process.pid}) has ended" if process.ended else ""


def lacks(relay: SpliceRelay) -> str:
    """An origin of the caller's that takes no connection."""
    try:
        socket.create_connection(relay.origin, _KNOCK_S).close()
    except OSError as error:
        return (f"The origin at {target_of(relay)} takes no connection "
                f"({error.strerror or error}): start it, then press stall.")
    return ""


def serve(
    policy: AnyPolicy, given: Mapping[str, Value], process: OriginProcess
) -> SpliceRelay:
    """A relay of the panel's own, in front of that origin."""
    options: dict[str, Any] = {"max_sessions": 256, "stop_grace_ms": 200, **given}
    return SpliceRelay(process.target, policy, **options)


# ---- what the clients do ------------------------------------------------------------------------

PRESETS = {
    "a": Preset(
        "Under before the dispatches jump by orders of magnitude, nearly all for nothing: the head "
        "of response 2 is awaited (to_forward 0) behind the tail of response 1 in the pipe. Set "
        "recv-behind to allowed, and it sleeps."),
    "a2": Preset(
        "The origin is silent on the second request, so nothing can be read, and under before it "
        "spins all the same. Set engine to level-triggered: it sleeps here, but not in a."),
    "b": Preset(
        "It sleeps until the last block and FIN come, then spins under before; each turn also "
        "offers the pipe to the client in vain. Under last-block this one way in is closed."),
    "d": Preset(
        "The end of a chunk is awaited (message chunk-end, to_forward 0) behind the chunk's data "
        "in the pipe: under before it spins, under after recv takes it and stops."),
    "e": Preset(
        "The same the other way round: the upload's tail sits in the pipe of client → origin. "
        "Press release origin: it reads, the pipe empties, the spin is over."),
    "m": Preset(
        "The control: stalled in the middle of an object, the pipe full, reading off. It sleeps "
        "under every policy: a full pipe does answer EAGAIN."),
    "paced": Preset(
        "Nobody stalls: under before the relay goes round between the bytes; under after it "
        "sleeps and splices. Under recv-allowed look at the bytes copied, under no-splice at the "
        "CPU."),
}


def target_of(relay: SpliceRelay) -> str:
    """``HOST:PORT`` of the origin of a relay."""
    host, port = relay.origin
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def scene(arm: str, values: Mapping[str, Value], relay: SpliceRelay) -> Scene:
    """The arm's own choreography; a paced client goes on for as long as it is let."""
    if arm == PACED:
        return _pace(values)
    stall = splice_case.stall_of(arm, values, target_of(relay))
    if arm == UPLOAD:
        # A client that goes leaves the origin with the rest of its upload, which nobody would end.
        return Scene(stall.steps, stall.drain, after=release(relay), does=(
            "uploads to an origin that does not read", "upload to an origin that does not read"))
    return Scene(stall.steps, stall.drain)


def _pace(values: Mapping[str, Value]) -> Scene:
    wanted, rate = Object(int(values["large_size"])), 1e6 * float(values["pace"])
    # About a second's worth is asked for at a time, one object ahead of what is read.
    count = min(_MOST_AHEAD, max(1, math.ceil(rate / wanted.size)))
    return Scene(
        (Connect(rcvbuf=int(values["paced_rcvbuf"])), Get((wanted,) * (count + 1))),
        meanwhile=(Pace(count * wanted.size, rate), Get((wanted,) * count)),
        does=(f"reads {float(values['pace']):g} MB/s", f"read {float(values['pace']):g} MB/s each"),
    )


def release(relay: SpliceRelay) -> Choreography:
    """Tells the origin to go on."""
    return (Release(target_of(relay)),)


def left_out(values: Mapping[str, Value], arm: str) -> dict[str, str]:
    """A measured run has one client, and tries timeouts by itself."""
    out = {}
    if int(values["clients"]) > 1:
        out["clients"] = f"{values['clients']} clients (the run has one)"
    for name in ("client_timeout_ms", "server_timeout_ms"):
        if values[name] and arm != PACED:
            out[name] = f"{name[:6]} timeout of {values[name]:,} ms (the run tries one of its own)"
    return out


# ---- what is drawn and shown --------------------------------------------------------------------

_KIB, _MIB = 2.0**-10, 2.0**-20
WHYS = ("active", "overdue", "deadline", "event")
_WHY_WORDS = {"active": "a direction is active: 0", "overdue": "overdue: 0",
              "deadline": "to a deadline", "event": "until an event: none"}
_BOTH = ("client", "origin")


def in_sockets(relay: SpliceRelay) -> float:
    """KiB that wait in the sockets towards clients."""
    return sum(max(0, session.outq) for session in relay.sessions()) * _KIB


SHAPE = Shape(
    counters.RELAY,
    (
        Rowed("dispatches", ("dispatches",)), Rowed("noops", ("noop_dispatches",)),
        Rowed("waits", ("waits",)), Rowed("events", ("events",)), Rowed("wasted", ("wasted",)),
        *(Rowed(f"why_{why}", (f"why_{why}",)) for why in WHYS),
        Rowed("sessions", ("sessions",), "gauge"),
        Rowed("piped_kib", ("piped",), "gauge", _KIB, same=1.0),
        Rowed("buffered_kib", ("buffered",), "gauge", _KIB, same=0.1),
        Rowed("spliced_mib", tuple(f"bytes_spliced_{side}" for side in _BOTH), "flow", _MIB,
              same=0.01),
        Rowed("copied_mib", tuple(f"bytes_copied_{side}" for side in _BOTH), "flow", _MIB,
              same=0.01),
        Rowed("outq_kib", (), "asked", same=1.0),
    ),
    ask=in_sockets, present="sessions",
)
PLOTS = (
    Plotted("rates", "Handlers dispatched, and those of them for nothing", (
        Line("dispatches", "dispatches", palette.BLACK, width=2.4, tip="dispatches/s"),
        Line("noops", "no-op dispatches: no system call, interest unchanged", palette.VERMILION,
             "dashed", 1.8, "no-op dispatches/s"),
    ), "per second", height=124, log=True, top=1e7),
    Plotted("waits", "epoll_wait, by reason and timeout", (
        *(Line(f"why_{why}", _WHY_WORDS[why], palette.WHYS[why],
               "dashed" if why in ("event", "overdue") else "line", 1.8, f"{why}/s")
          for why in reversed(WHYS)),
    ), "per second", height=124, log=True, top=1e7,
        also=(("events/s", "@events{0,0}"), ("wasted/s", "@wasted{0,0}"))),
    Plotted("fill", "What the relay holds", (
        Line("sessions", "sessions (right)", palette.BLACK, "dashed", 1.4, "sessions", right=True),
        Line("outq_kib", "in the client's socket", palette.GREY, width=1.6, tip="in the socket"),
        Line("buffered_kib", "in buffers", palette.PURPLE, width=1.8, tip="in buffers",
             format="0,0.0"),
        Line("piped_kib", "in pipes", palette.BLUE, width=2.2, tip="in pipes", format="0,0.0"),
    ), "KiB", "sessions", least=64),
    Plotted("bytes", "Bytes by the way they took", (
        Line("copied_mib", "copied: recv and send", palette.ORANGE, "dashed", 2.0, "copied",
             "0.00"),
        Line("spliced_mib", "spliced: through the pipe", palette.GREEN, width=1.8, tip="spliced",
             format="0.00"),
    ), "MiB/s", height=134, time_axis=True),
)
STRIP = (
    Shown("message", "message", "Where the channel is in its message"),
    Shown("source", "reads from", "Interest in reading the source: active means that it is taken "
                                  "as ready, so that the wait cannot block"),
    Shown("sink", "writes to", "Interest in writing to the sink"),
    Shown("to_forward", "to_forward", "Bytes that may pass without a look; under 4,096 splice is "
                                      "not tried"),
    Shown("piped", "in the pipe", most=_FULL_PIPE),
    Shown("buffered", "in the buffer"),
    Shown("outq", "in the socket", "Bytes that the client has not acknowledged"),
    Shown("flags", "flags", "In the gap: the pipe is in use and too little is left to splice"),
)


def look(relay: SpliceRelay) -> Look:
    """Two rows a session: client to origin, and back; those whose client has gone come last."""
    sessions = sorted(relay.sessions(), key=lambda session: session.request.eof)
    rows = [row for session in sessions[:MOST_SESSIONS] for row in _session_rows(session)]
    loop = relay.loop()
    wait = (("sockets taken as ready", f"{loop.active}"),)
    more = max(0, len(sessions) - MOST_SESSIONS)
    return Look(rows, any(map(_owed, sessions)), len(sessions), more, wait)


def _session_rows(session: SessionView) -> Iterator[dict[str, Any]]:
    yield {"name": f"{session.slot}: client → origin", "outq": -1,
           **_channel_row(session.request, "client", "origin", _flags(session))}
    yield {"name": f"{session.slot}: origin → client", "outq": session.outq,
           **_channel_row(session.response, "origin", "client", [])}


def _channel_row(
    channel: ChannelView, source: str, sink: str, flags: list[str]
) -> dict[str, Any]:
    flags = [*flags, *(words for words, on in (
        ("in the gap", in_state(channel)), ("sink full", channel.sink_full),
        ("source ended", channel.eof), ("no splice", not channel.splices)) if on)]
    return {
        "message": channel.message, "source": f"{source}: {channel.read}",
        "sink": f"{sink}: {channel.write}",
        "to_forward": "no end" if channel.to_forward < 0 else channel.to_forward,
        "piped": channel.piped, "buffered": channel.scheduled + channel.awaiting,
        "flags": ", ".join(flags) or "·",
    }


def _flags(session: SessionView) -> list[str]:
    flags = [name for name in ("connecting", "closing", "lingering") if getattr(session, name)]
    return flags + ([f"answers {session.answer}"] if session.answer else [])


def _owed(session: SessionView) -> bool:
    """Something is under way in it, or held in it."""
    return session.busy or any(channel.piped + channel.scheduled + channel.awaiting > 0
                               for channel in (session.request, session.response))


# ---- how it is judged ---------------------------------------------------------------------------


def wait_of(sample: Any) -> Waiting:
    """The newest wait; each of them hears a stop, which wakes the loop."""
    return Waiting("", str(sample["last_why"]), timeout_text(sample), deaf=False)


def _stepper(policy: AnyPolicy) -> Any:
    from lab.live.stepper import Stepper

    return Stepper("splice", policy)


LIVE = LiveCase(
    name="splice",
    engine=SpliceRelay,
    decisions=RELAY,
    questions={
        "recv-behind": "recv while the pipe holds data",
        "early-leave": "the splice loop was left early",
        "last-block": "less than 4,096 bytes to forward, the pipe in use",
        "send-after-read": "a send after a read, write readiness awaited",
        "engine": "what is taken to be ready",
        "splice": "whether bodies go through a pipe",
        "readiness": "EAGAIN while the pipe holds data",
    },
    policy="before",
    words=Words(
        one="relay", settings="Clients, relay and origin", rows="session",
        no_stall="Is the object larger than what the sockets take (client SO_RCVBUF, relay "
                 "SO_SNDBUF), and the origin the bundled one?",
        deaf="it did not come round to look at the flag",
        head="session",
    ),
    buttons=(
        Button("stall", "Connect anew, ask as the arm does, and read nothing"),
        Button("read", "Read this many bytes"),
        Button("read all", "Read everything that was asked for, and check it; the origin goes on"),
        Button("release", "The origin goes on with what it holds back (a2: silent, e: not reading)",
               "release origin"),
        Button("poke", "One small request on another connection"),
        Button("half-close", "Send FIN, keep reading"),
        Button("reset", "Close with RST"),
        Button("reconnect", "Close, connect with the present settings, ask again"),
        Button("stop", "Ask the relay to stop: responses under way have a short time left"),
        Button("start again", "A fresh relay and origin under the present policy"),
    ),
    presets=PRESETS,
    shape=SHAPE,
    plots=PLOTS,
    strip=STRIP,
    connected="sessions",
    # It sleeps until an event, however long that takes.
    rules=Rules(wait_of, lambda choices, cap_ms: 0.0),
    controls=controls,
    reaches=_REACHES,
    settings=settings,
    serve=serve,
    look=look,
    scene=scene,
    arm_of=lambda values, poked, chosen: chosen,
    arm="a",
    quick=splice_case.PRESETS,
    needs=origin,
    lost=lost,
    lacks=lacks,
    release=release,
    span=(("noop_dispatches", "no-op dispatches/s"),),
    measured=((Column("no-ops", "1/s, stalled"), "noop_per_s"),),
    # Which sizes spin is another question, and a long one.
    fixed={"sizes": ""},
    left_out=left_out,
    by_hand=_stepper,
)

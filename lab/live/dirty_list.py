"""The case dirty-list for the live panel: the ring server, its clients and what to watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import RingServer, counters
from engine.decisions import AnyPolicy
from engine.policy import RING
from lab import palette
from lab.choreography import (
    MAX_CLIENTS,
    SEND_WAITS,
    Ask,
    Choreography,
    Connect,
    Settle,
    requests_seen,
)
from lab.dirty_list import SMALL, stall_of
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
from lab.live.controls import CONNECTION, ITERATION, REQUEST, RING_QUESTIONS, Control
from lab.live.series import Rowed, Shape
from lab.live.state import timeout_text
from lab.parameters import Parameter, Parameters, Value

MOST_ROWS = 8

# ---- what can be set ----------------------------------------------------------------------------

# For each control: its name in the experiment, its label, when the engine takes it up.
_FROM_EXPERIMENT = (
    ("rcvbuf", "client SO_RCVBUF", CONNECTION),
    ("response_size", "response size", REQUEST),
    ("depth", "pipelining depth", REQUEST),
    ("sndbuf", "server SO_SNDBUF", CONNECTION),
    ("handler_ms", "handler time", REQUEST),
    ("wait_cap_ms", "longest sleep (wait cap)", ITERATION),
)
# The server's name for a control that is one of its settings.
_REACHES = {"sndbuf": "so_sndbuf", "handler_ms": "handler_ms", "wait_cap_ms": "wait_cap_ms",
            "response_size": "response_size", "route": "route"}
_HELD = "held-completion"


def controls(parameters: Parameters) -> dict[str, Control]:
    """The controls, by name.

    A single request is a depth of one, and a handler may take no time: the ranges of the arms
    are wider here at their low end.
    """
    own: dict[str, dict[str, Any]] = {
        "depth": {"low": 1, "default": 1, "help": "requests outstanding; the further ones are sent "
                                                  "once the first SEND waits"},
        "handler_ms": {"low": 0, "default": 0, "help": "how long a handler runs"},
    }
    clients = Parameter("clients", int, 1, "clients", 1, MAX_CLIENTS,
                        help="connections that ask and then do not read")
    route = Parameter("route", str, "async", choices=("sync", "async"),
                      help="sync: the handler runs on the worker; async: on a thread of its own")
    return {
        "route": Control(route, "route", REQUEST),
        **{name: Control(replace(parameters[name], **own.get(name, {})), label, effect)
           for name, label, effect in _FROM_EXPERIMENT},
        "clients": Control(clients, "stalled clients", CONNECTION),
    }


def settings(values: Mapping[str, Value], arm: str) -> dict[str, Value]:
    """The server's settings; in the held arm the second request alone names a handler's time."""
    found = {setting: values[name] for name, setting in _REACHES.items()}
    return found | ({"handler_ms": 0} if arm == _HELD else {})


def serve(policy: AnyPolicy, given: Mapping[str, Value], _: object) -> RingServer:
    """A server of the panel's own."""
    options: dict[str, Any] = {"max_connections": 256, "stop_grace_ms": 200, **given}
    return RingServer(policy, **options)


# ---- what the clients do ------------------------------------------------------------------------

PRESETS = {
    "sync": Preset(
        "Under shipped the worker parks: iterations fall to nothing, the list shows one member "
        "and the wait has no timeout. Not healthy: press poke, and it spins.",
        {"route": "sync", "depth": 1, "handler_ms": 0}),
    "async": Preset(
        "Under shipped the same parked worker: a SEND in flight, a listed connection, no CPU. "
        "It looks quiet, but stop is not heard. Press poke, and it spins.",
        {"route": "async", "depth": 1, "handler_ms": 0}),
    "async+pipelined": Preset(
        "Under shipped the iterations jump by a factor of a thousand and the reason "
        "of every wait is the list. Set membership to leave, and it sleeps.",
        {"route": "async", "depth": 2, "handler_ms": 0}),
    "async+poked": Preset(
        "One small request of somebody else wakes the parked worker, and from then on "
        "it spins. Press read all: it comes to rest.",
        {"route": "async", "depth": 1, "handler_ms": 0}),
    _HELD: Preset(
        "For a second a handler holds its connection while its earlier SEND "
        "completes. Under held-listed the worker spins for that second; under "
        "shipped it is blocked, and others wait.",
        {"route": "async", "depth": 1, "handler_ms": 1000}),
}


def arm_of(values: Mapping[str, Value], poked: bool, chosen: str) -> str:
    """The arm that such settings are; empty where the case has none."""
    if chosen == _HELD:
        return _HELD
    depth = int(values["depth"])
    if values["route"] == "sync":
        return "sync" if depth == 1 and not poked else ""
    if depth > 1:
        return "async+pipelined"
    return "async+poked" if poked else "async"


def scene(arm: str, values: Mapping[str, Value], _: object) -> Scene:
    """The arm's own choreography, or one like it for what is no arm."""
    return Scene(stall_of(arm, values).steps if arm else _no_arm(values))


def _no_arm(values: Mapping[str, Value]) -> Choreography:
    depth, route = int(values["depth"]), str(values["route"])
    steps: Choreography = (
        Connect(rcvbuf=int(values["rcvbuf"])),
        Ask(route, int(values["response_size"])),
        Settle(SEND_WAITS),
    )
    if depth > 1:
        steps += (Ask(route, SMALL, count=depth - 1), Settle(requests_seen(depth)))
    return steps


def left_out(values: Mapping[str, Value], arm: str) -> dict[str, str]:
    """A measured run has one client, and handlers that take time in the held arm only."""
    out = {}
    if int(values["clients"]) > 1:
        out["clients"] = f"{values['clients']} clients (the run has one)"
    if arm != _HELD:
        ms = int(values["handler_ms"])
        out["handler_ms"] = f"handler time of {ms} ms" if ms else ""
    if int(values["depth"]) == 1:  # what no arm but the pipelined one looks at
        out["depth"] = ""
    return out


# ---- what is drawn and shown --------------------------------------------------------------------

WHYS = ("ready", "list", "overdue", "owed", "send", "idle", "deadline", "event")
# The reasons of a wait in few words, with the timeout that each means.
_WHY_WORDS = {
    "ready": "ready: 0", "list": "list: 0", "overdue": "overdue: 0", "owed": "owed: 0",
    "send": "SEND prepared: none", "idle": "idle: periodic", "deadline": "deadline",
    "event": "event: none",
}
_DASHED = ("ready", "send", "event", "owed")
_KIB, _MIB = 2.0**-10, 2.0**-20


def in_sockets(server: RingServer) -> float:
    """KiB that wait in the sockets."""
    return sum(max(0, conn.outq) for conn in server.connections()) * _KIB


SHAPE = Shape(
    counters.RING,
    (
        Rowed("iterations", ("iterations",)), Rowed("wasted", ("wasted",)),
        *(Rowed(f"why_{why}", (f"why_{why}",)) for why in WHYS),
        Rowed("list_length", ("list_length",), "gauge"),
        Rowed("sending", ("sending",), "gauge"),
        Rowed("held_now", ("held_now",), "gauge"),
        Rowed("out_mib", ("bytes_sent", "bytes_direct"), "flow", _MIB, same=0.01),
        Rowed("outq_kib", (), "asked", same=1.0),
    ),
    ask=in_sockets, present="connections",
)
PLOTS = (
    Plotted("rates", "Iterations, and waits by reason and timeout", (
        *(Line(f"why_{why}", _WHY_WORDS[why], palette.WHYS[why],
               "dashed" if why in _DASHED else "line", 1.8, f"{why}/s")
          for why in reversed(WHYS)),
        Line("iterations", "iterations", palette.BLACK, width=1.1, tip="iterations/s"),
    ), "per second", height=150, log=True, top=1e6, also=(("wasted/s", "@wasted{0,0}"),)),
    Plotted("list", "The dirty list, and SENDs in flight", (
        Line("held_now", "held completions", palette.PURPLE, width=2.2, tip="held"),
        Line("sending", "sending", palette.BLUE, "dashed", 2.2),
        Line("list_length", "listed", palette.VERMILION, width=2.2),
    ), "connections", height=96, least=2, room=0.25),
    Plotted("bytes", "Bytes out, and bytes that wait", (
        Line("outq_kib", "waiting in the sockets, KiB (right)", palette.BLUE, "dashed",
             tip="waiting", right=True),
        Line("out_mib", "taken by the sockets, MiB/s (left)", palette.GREEN, width=1.8,
             tip="out", format="0.00"),
    ), "MiB/s", "KiB", height=134, right_least=64, time_axis=True),
)
STRIP = (
    Shown("sending", "sending"), Shown("write_buf", "write_buf"), Shown("send_buf", "send_buf"),
    Shown("listed", "listed"), Shown("owes_recv", "owes recv"), Shown("held", "held"),
    Shown("outq", "in the socket"),
)


def look(server: RingServer) -> Look:
    """A row per connection."""
    connections = server.connections()
    rows = [{"name": f"connection {conn.slot}",
             **{column.name: getattr(conn, column.name) for column in STRIP}}
            for conn in connections[:MOST_ROWS]]
    stalled = any(c.sending or c.write_buf or c.send_buf or c.outstanding or c.handler_running
                  for c in connections)
    return Look(rows, stalled, len(connections), max(0, len(connections) - MOST_ROWS))


# ---- how it is judged ---------------------------------------------------------------------------

_MODES = {
    "submit": "submit, returns at once (1)", "skip": "no system call (2)",
    "untimed": "until a completion (3a)", "timed": "with a timeout (3b)",
}


def wait_of(sample: Any) -> Waiting:
    """The newest wait; one without a timeout does not hear a stop while it lasts, and a worker
    that is held up by a handler hears nothing."""
    if sample["blocked"]:
        return Waiting("not in a wait: held up by a handler", str(sample["last_why"]),
                       "does not wait", deaf=True)
    mode = str(sample["last_mode"])
    timeout = "does not wait" if mode in ("submit", "skip") else timeout_text(sample)
    return Waiting(_MODES.get(mode, mode), str(sample["last_why"]), timeout,
                   deaf=bool(sample["waiting"]) and mode == "untimed")


def idle_per_s(choices: Mapping[str, str], cap_ms: float) -> float:
    """A wait each ``cap_ms``, or none at all."""
    return 0.0 if choices.get("idle") == "tickless" else 1e3 / cap_ms


def _stepper(policy: AnyPolicy) -> Any:
    from lab.live.stepper import Stepper

    return Stepper(policy if isinstance(policy, str) else "shipped")


LIVE = LiveCase(
    name="dirty-list",
    engine=RingServer,
    decisions=RING,
    questions=RING_QUESTIONS,
    policy="shipped",
    words=Words(
        one="worker", settings="Clients and server", rows="connection",
        no_stall="Is the response larger than what the sockets take (client SO_RCVBUF, server "
                 "SO_SNDBUF)?",
        deaf="the worker sleeps where it does not look at the flag: in a wait without a timeout, "
             "or until a handler is done",
    ),
    buttons=(
        Button("stall", "Connect anew, ask, and read nothing"),
        Button("read", "Read this many bytes"),
        Button("read all", "Read everything that was asked for, and check it"),
        Button("poke", "One small request on another connection"),
        Button("half-close", "Send FIN, keep reading"),
        Button("reset", "Close with RST"),
        Button("reconnect", "Close, connect with the present settings, ask again"),
        Button("stop", "Ask the worker to stop as the real system does: a flag that it looks at "
                       "when it wakes"),
        Button("start again", "A fresh worker under the present policy"),
    ),
    presets=PRESETS,
    shape=SHAPE,
    plots=PLOTS,
    strip=STRIP,
    rules=Rules(wait_of, idle_per_s, cap="wait_cap_ms"),
    controls=controls,
    reaches=_REACHES,
    settings=settings,
    serve=serve,
    look=look,
    scene=scene,
    arm_of=arm_of,
    unchosen_by=("route", "depth"),
    left_out=left_out,
    no_arm="the case has no arm for these settings (route sync, pipelined or poked): choose route "
           "async, or depth 1 and stall again",
    by_hand=_stepper,
)

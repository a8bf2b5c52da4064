"""The case splice: a relay that goes round for an event which nobody may take.

HAProxy 1.5-dev forwarded bodies with splice() through a pipe. Where the pipe held data and little
was left to forward, splice was not tried and recv was not allowed, so the read handler neither
consumed anything, nor met EAGAIN, nor stopped: it ran for ever. Each arm below is one way into that
state (``m`` is a control, ``paced`` a client that reads slowly), each policy one combination of the
decisions that lead there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.decisions import ResolvedPolicy
from engine.errors import UsageError
from engine.relay_policy import RELAY
from lab import haproxy, splice_findings, splice_sizes
from lab.choreography import (
    HELD_BACK,
    MID_BODY,
    Choreography,
    Connect,
    Get,
    Pace,
    Player,
    Read,
    ReadAll,
    ReadResponses,
    ReadWhile,
    Release,
    Settle,
    Stall,
    requests_forwarded,
)
from lab.experiment import Arm, Experiment, Repetition, Setting
from lab.origin import Object
from lab.origin_process import OriginProcess
from lab.parameters import Parameter, Parameters, Value
from lab.relay_stall import PATIENCE_S, RelayStall, measure_relay, per_mb, rates, summed
from lab.stall import HONOURED_WITHIN_S, Watch
from lab.verdict import BUSY_ON_QUEUE, Budget

SOURCE = (
    'HAProxy commit 61d39a0e2 (2013) "BUG/MEDIUM: splicing: fix abnormal CPU usage with splicing", '
    "introduced by 96199b10, followed by 5007d2aa3 and fa8e2bc68"
)
LEVEL = "+engine=level-triggered"
PRESETS = ("before", "after", "recv-allowed", "sink-full", "last-block", "skip-send", "later",
           "no-splice", "mirror")
_REAL = (haproxy.NAME,) if haproxy.version() else ()
_ENGINES = (f"before{LEVEL}", f"after{LEVEL}")
# An answer to an upload; of no other importance.
_ANSWER = 1000

PARAMETERS = Parameters((
    Parameter("object_size", int, 100_000, "bytes", 1, 1 << 28,
              help="objects of a and a2; must exceed what sockets take, by less than a pipe holds"),
    Parameter("large_size", int, 1_000_000, "bytes", 200_000, 1 << 28,
              help="object of b; m asks for four times as much; objects of paced"),
    Parameter("chunk", int, 65_000, "bytes", 1, 1 << 24, help="chunks of d, which has four"),
    Parameter("last", int, 3_000, "bytes", 1, 100_000, help="last block of b, with FIN"),
    Parameter("delay_ms", int, 300, "ms", 0, 10_000, help="how much later the last block of b is"),
    Parameter("stop_before", int, 90_000, "bytes", 0, 1 << 28,
              help="how long before the end the client of b stops reading"),
    Parameter("upload", int, 250_000, "bytes", 1, 1 << 28, help="body of the POST of e"),
    Parameter("rcvbuf", int, 4096, "bytes", 1024, 1 << 26,
              help="SO_RCVBUF of a stalled client, set before it connects"),
    Parameter("sndbuf", int, 16_384, "bytes", 0, 1 << 28,
              help="SO_SNDBUF of the relay towards it; 0: the kernel's choice"),
    Parameter("paced_rcvbuf", int, 65_536, "bytes", 1024, 1 << 26,
              help="SO_RCVBUF of the paced client"),
    Parameter("paced_sndbuf", int, 65_536, "bytes", 0, 1 << 28, help="SO_SNDBUF towards it"),
    Parameter("origin_rcvbuf", int, 32_768, "bytes", 0, 1 << 26, help="SO_RCVBUF of the origin"),
    Parameter("origin_sndbuf", int, 65_536, "bytes", 0, 1 << 28,
              help="SO_SNDBUF of the relay towards the origin"),
    Parameter("pace", float, 10.0, "MB/s", 0.1, 1000.0, help="what the paced client reads"),
    Parameter("paced_seconds", float, 1.0, "s", 0.2, 60.0, help="for so long"),
    Parameter("engine", str, "speculative", "", choices=("speculative", "level-triggered"),
              help="of every policy that does not name one"),
    Parameter("sizes", str, "20k,40k,60k,100k,150k,200k,250k,300k,400k,600k",
              help="object sizes, tried under the policy before with a short look; empty: none"),
    Parameter("trials", int, 3, "", 1, 100, help="of each size"),
    Parameter("seconds", float, 0.3, "s", 0.2, 600.0,
              help="length of the idle and of the stalled window"),
    Parameter("repetitions", int, 1, "", 1, 1000, help="rounds; each does all arms once"),
))

# Quiet and complete in every arm, with either engine.
HEALTHY = ("after", "later", "recv-allowed", "no-splice")
BUDGETS = dict.fromkeys(
    (*HEALTHY, *(f"{policy}{LEVEL}" for policy in HEALTHY)),
    Budget(waits_over_idle=20.0, on_queue=BUSY_ON_QUEUE),
)


# ---- arms ---------------------------------------------------------------------------------------


def stall_of(arm: str, values: Mapping[str, Value], origin: str) -> RelayStall:
    """The choreography of an arm; ``origin`` is the address of the origin itself."""
    return _STALLS[arm]({name: values[name] for name in values}, origin)


# The client reads nothing, unless the relay has stopped in the middle of a body: there it sleeps
# under every policy, for that the bytes came in dribs.
_PAST_THE_BODY = (Settle(HELD_BACK), ReadWhile(MID_BODY, settled=HELD_BACK))


def _asked(values: Mapping[str, Value], *objects: Object, upload: int = 0) -> Choreography:
    return (Connect(rcvbuf=int(values["rcvbuf"])), Get(objects, upload))


def _pipelined(values: Mapping[str, Value], origin: str) -> RelayStall:
    wanted = Object(int(values["object_size"]))
    return RelayStall((*_asked(values, wanted, wanted), *_PAST_THE_BODY))


def _silent(values: Mapping[str, Value], origin: str) -> RelayStall:
    size = int(values["object_size"])
    return RelayStall(
        (*_asked(values, Object(size), Object(size, silent=1)), *_PAST_THE_BODY),
        # Where the second request waits for the first response, only reading lets it through.
        drain=(ReadResponses(1), Settle(requests_forwarded(2)), Release(origin), ReadAll()),
    )


def _last_block(values: Mapping[str, Value], origin: str) -> RelayStall:
    size, delay_ms = int(values["large_size"]), int(values["delay_ms"])
    wanted = Object(size, last=int(values["last"]), delay_ms=delay_ms)
    return RelayStall((
        *_asked(values, wanted),
        Read(max(0, size - int(values["stop_before"]))),
        Settle(HELD_BACK),
        Stall(delay_ms / 1e3 + 0.05),
    ))


def _chunks(values: Mapping[str, Value], origin: str) -> RelayStall:
    chunk = int(values["chunk"])
    return RelayStall((*_asked(values, Object(4 * chunk, chunk=chunk)), *_PAST_THE_BODY))


def _upload(values: Mapping[str, Value], origin: str) -> RelayStall:
    asked = _asked(values, Object(_ANSWER, noread=1), upload=int(values["upload"]))
    return RelayStall((*asked, Settle(HELD_BACK)), drain=(Release(origin), ReadAll()),
                      timeout="server")


def _middle(values: Mapping[str, Value], origin: str) -> RelayStall:
    asked = _asked(values, Object(4 * int(values["large_size"])))
    return RelayStall((*asked, Read(int(values["object_size"])), Settle(HELD_BACK)))


def _paced(values: Mapping[str, Value], origin: str) -> RelayStall:
    size, rate = int(values["large_size"]), 1e6 * float(values["pace"])
    amount = max(1, int(rate * float(values["paced_seconds"])))
    objects = (Object(size),) * (math.ceil(amount / size) + 1)
    return RelayStall(
        (Connect(rcvbuf=int(values["paced_rcvbuf"])), Get(objects)),
        meanwhile=(Pace(amount, rate),), timeout=None,
    )


_STALLS: dict[str, Callable[[Mapping[str, Value], str], RelayStall]] = {
    "a": _pipelined, "a2": _silent, "b": _last_block, "d": _chunks, "e": _upload, "m": _middle,
    "paced": _paced,
}
# What a run measures unless it is told; any other combination of decisions may be asked for.
_ALL = (*PRESETS, *_ENGINES, *_REAL)
ARMS = (
    Arm("a", "two pipelined GETs; the head of response 2 comes behind the tail of response 1",
        _ALL),
    Arm("a2", "the same, and the origin is silent on the second", _ALL),
    Arm("b", "the last block and FIN come late, to a client that stopped reading", _ALL),
    Arm("d", "chunks: the end of a chunk in the pipe", _ALL),
    Arm("e", "a POST to an origin that does not read", _ALL),
    Arm("m", "a control: stalled in the middle of an object", _ALL),
    Arm("paced", "large objects, pipelined, read at a steady pace", _ALL, window="paced",
        moves=True),
)


# ---- running ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origins:
    """The origins of a run, elsewhere: one that takes what it is sent, one that takes little."""

    plain: str
    narrow: str


@contextmanager
def origins(values: Mapping[str, Value]) -> Iterator[Origins]:
    """Both, for the length of a run."""
    with OriginProcess() as plain, OriginProcess(rcvbuf=int(values["origin_rcvbuf"])) as narrow:
        yield Origins(plain.target, narrow.target)


def policy_of(policy: Any) -> ResolvedPolicy:
    """A policy of the relay; ``haproxy`` is the real one in its place."""
    if policy != haproxy.NAME:
        return RELAY.resolve(policy)
    if not _REAL:
        raise UsageError("HAProxy is not installed here (Debian: apt-get install haproxy)")
    return ResolvedPolicy(haproxy.NAME, {})


def repetition(setting: Setting) -> Repetition:
    """Measure one arm under one policy once."""
    values, arm = setting.values, setting.arm
    origin = setting.context.narrow if arm.name == "e" else setting.context.plain
    stall = stall_of(arm.name, values, origin)
    buffers = {
        "so_sndbuf": int(values["paced_sndbuf" if arm.moves else "sndbuf"]),
        "origin_sndbuf": int(values["origin_sndbuf"]) if arm.name == "e" else 0,
    }
    if setting.policy == haproxy.NAME:
        return _real(setting, stall, origin, buffers)
    named = "engine=" in setting.policy or setting.rule is not None
    engine = {} if named else {"engine": str(values["engine"])}
    measured = measure_relay(
        stall, arm.name, arm.window, setting.served, setting.repetition,
        float(values["seconds"]), origin, {**buffers, **engine},
    )
    return Repetition(setting, **measured)


def _real(
    setting: Setting, stall: RelayStall, origin: str, buffers: Mapping[str, int]
) -> Repetition:
    # It wakes about once a second by itself: a shorter window would take that for a rhythm.
    seconds = max(1.0, float(setting.values["seconds"]))
    with haproxy.Haproxy(origin, **buffers) as target:
        player = Player(target.host, target.port, patience=PATIENCE_S, strict=False)
        seen = Watch(target).repetition(stall, player, setting.arm.window, seconds)
        return Repetition(
            setting, windows=seen.windows, delivered=seen.delivered, decisions={},
            honours_stop=target.stops(HONOURED_WITHIN_S),
            evidence={"troubles": list(seen.troubles)},
        )


def evidence(group: Sequence[Repetition]) -> dict[str, Any]:
    """The evidence of one arm's repetitions: sums of counts as rates, all troubles."""
    seen = [one.evidence for one in group]
    troubles = [trouble for one in seen for trouble in one["troubles"]]
    moved = [one.windows[one.setting.arm.window] for one in group]
    found: dict[str, Any] = {"remarks": list(dict.fromkeys(troubles)), "troubles": troubles}
    whole = all(one.delivered["bytes"] == one.delivered["expected"] for one in group)
    # Who forgets its source may never fill the pipe: then the bytes that it owes are the finding.
    found["shown"] = not whole and splice_findings.forgets(group[0].decisions)
    if group[0].setting.arm.moves and whole:  # else it is not known how much the window moved
        cpu_ms = sum(window.cpu_ms_per_s * window.seconds for window in moved)
        amount = sum(float(one.setting.values["pace"]) * float(one.setting.values["paced_seconds"])
                     for one in group)
        found["cpu_ms_per_mb"] = cpu_ms / amount
    if not all("counts" in one for one in seen):
        return found
    counts, seconds = summed(one["counts"] for one in seen), sum(one["seconds"] for one in seen)
    whys: Counter[str] = Counter()
    for one in seen:
        whys.update(one["why"])
    return found | rates(counts, seconds) | dict(per_mb(counts)) | {
        "counts": counts,
        "why_while_stalled": dict(whys),
        # Came to where the fault is, every time; and slept there, every time.
        "in_state": all(one["in_state"] for one in seen),
        "reached": all(one["in_state"] and one["asleep"] for one in seen),
        "last_why": seen[0]["last_why"],
        "channel": seen[0]["channel"],
        "session": seen[0]["session"],
        "spinning": sum(_spins(one) for one in seen),
    }


def _spins(seen: Mapping[str, Any]) -> bool:
    return bool(seen["counts"]["noop_dispatches"] / seen["seconds"] >= splice_sizes.SPIN_PER_S)


def further(values: Mapping[str, Value], origin: Origins) -> dict[str, Any]:
    """Which sizes spin, and which do not."""
    return {"sizes": splice_sizes.measure_sizes(values, origin.plain)}


EXPERIMENT = Experiment(
    name="splice",
    title="A relay's read handler that may neither splice nor recv",
    source=SOURCE,
    parameters=PARAMETERS,
    arms=ARMS,
    budgets=BUDGETS,
    repetition=repetition,
    evidence=evidence,
    conclude=splice_findings.conclude,
    context=origins,
    further=further,
    policies=policy_of,
)

"""The case dirty-list: a connection on a worker's list while its SEND waits for a slow client.

The real system (an io_uring HTTP worker, goceleris/celeris) let a non-empty list mean a zero wait
timeout, and kept a connection listed from the submission of its SEND to its completion. So a
client that stalls makes the worker spin; or park, where the wait happens to have no timeout. Each
arm below is one way into that state, each policy one combination of the decisions that lead there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lab.choreography import (
    SEND_WAITS,
    Ask,
    Choreography,
    Connect,
    Poke,
    ReadUntilSilent,
    Settle,
    requests_seen,
)
from lab.experiment import Arm, Experiment, Repetition, Setting
from lab.parameters import Parameter, Parameters, Value
from lab.ring_stall import RingStall, measure_ring, median
from lab.verdict import BUSY_ON_QUEUE, Budget

SOURCE = (
    'the report "io_uring: an async conn stays on the dirty list while its ring SEND waits for a '
    'slow client" in goceleris/celeris, with its correction (2026), and its neighbours #750, #751, '
    "#800, #801"
)
STALL_POLICIES = (
    "shipped", "membership", "timeout", "timed-wait", "both", "fixed", "tickless",
)
HELD_POLICIES = ("shipped", "held-listed", "held-unlisted", "fixed", "tickless")
# Two changes and nothing else, alone and together: membership, wait after a SEND.
TWO_BY_TWO = {
    "shipped": ("stays listed", "no timeout"),
    "membership": ("leaves the list", "no timeout"),
    "timed-wait": ("stays listed", "timed"),
    "both": ("leaves the list", "timed"),
}
# A second response of about the size of the founding document's (103 bytes with its head).
SMALL = 64
# A handler that runs for longer than a loop may take to stop.
LONG_MS = 2500
# A small answer on loopback that takes longer than this, even on a busy machine, had to wait.
LATE_MS = 200.0

PARAMETERS = Parameters((
    Parameter("response_size", int, 3 << 20, "bytes", 1, 1 << 30,
              help="body of the response that stalls; must exceed what the socket takes"),
    Parameter("rcvbuf", int, 4096, "bytes", 1024, 1 << 26,
              help="SO_RCVBUF of the stalled client, set before it connects"),
    Parameter("sndbuf", int, 256 << 10, "bytes", 0, 1 << 28,
              help="SO_SNDBUF of the server; 0 leaves it to the kernel, which may take 2.8 MB"),
    Parameter("depth", int, 2, "requests", 2, 64,
              help="pipelining depth of the arm async+pipelined"),
    Parameter("handler_ms", int, 1000, "ms", 600, 60_000,
              help="how long the handler of the arm held-completion runs"),
    Parameter("seconds", float, 1.0, "s", 0.2, 600.0,
              help="length of the idle and of the stalled window"),
    Parameter("repetitions", int, 1, "", 1, 1000, help="rounds; each does all arms once"),
    Parameter("entries", int, 256, "SQ entries", 1, 32_768, help="size of the worker's ring"),
    Parameter("setup", str, "auto", "", choices=("auto", "none", "coop", "defer", "sqpoll"),
              help="ring setup flags; auto takes the best that the kernel has without polling"),
    Parameter("wait_cap_ms", float, 25.0, "ms", 0.1, 60_000.0,
              help="longest periodic sleep of an idle loop"),
))

BUDGETS = {
    "fixed": Budget(waits_over_idle=5.0, on_queue=BUSY_ON_QUEUE),
    "tickless": Budget(waits_over_idle=2.0, on_queue=BUSY_ON_QUEUE),
}


def stall_of(arm: str, values: Mapping[str, Value]) -> RingStall:
    """The choreography of an arm."""
    if arm == "held-completion":
        return _held(values)
    steps = {
        "sync": _single("sync", values),
        "async": _single("async", values),
        # Asked only once the first response's SEND is seen to wait: before, it would be answered
        # together with the first, and nothing would be left over.
        "async+pipelined": (
            *_single("async", values),
            Ask("async", SMALL, count=int(values["depth"]) - 1),
            Settle(requests_seen(int(values["depth"]))),
        ),
        "async+poked": (*_single("async", values), Poke(), Settle(requests_seen(1, more=1))),
    }[arm]
    return RingStall(steps, longer=steps)


def _single(route: str, values: Mapping[str, Value]) -> Choreography:
    return (
        Connect(rcvbuf=int(values["rcvbuf"])),
        Ask(route, int(values["response_size"])),
        Settle(SEND_WAITS),
    )


def _held(values: Mapping[str, Value]) -> RingStall:
    """A handler runs while the SEND of its connection's earlier response completes."""

    def steps(handler_ms: int) -> Choreography:
        return (
            *_single("async", values),
            Ask("async", SMALL, ms=handler_ms),
            Settle(requests_seen(2)),
            # Room for the client's bytes completes the SEND; the handler holds the lock that its
            # completion needs, so what is left of the response has to wait for the handler.
            ReadUntilSilent(),
        )

    handler_ms = int(values["handler_ms"])
    return RingStall(
        steps(handler_ms),
        longer=steps(max(handler_ms, LONG_MS)),
        # What is left for the window ends a little before the handler does.
        seconds=0.95 * handler_ms / 1e3,
        # The client reads: no write is late.
        write_timeout=False,
    )


ARMS = (
    Arm("sync", "the handler runs on the worker; the response goes out as one ring SEND",
        STALL_POLICIES),
    Arm("async", "a handler thread writes what the socket takes; the rest becomes a ring SEND",
        STALL_POLICIES),
    Arm("async+pipelined", "a further request arrives while that SEND waits for the client",
        STALL_POLICIES),
    Arm("async+poked", "another connection makes one small request while that SEND waits",
        STALL_POLICIES),
    Arm("held-completion", "the SEND completes while a handler of its connection still runs",
        HELD_POLICIES, window="held"),
)


def repetition(setting: Setting) -> Repetition:
    """Measure one arm under one policy once."""
    values, arm = setting.values, setting.arm
    options = {
        "response_size": int(values["response_size"]),
        "so_sndbuf": int(values["sndbuf"]),
        "entries": int(values["entries"]),
        "setup": str(values["setup"]),
        "wait_cap_ms": float(values["wait_cap_ms"]),
        "max_connections": 64,
    }
    measured = measure_ring(
        stall_of(arm.name, values), arm.name, arm.window, setting.served, setting.repetition,
        float(values["seconds"]), options,
    )
    return Repetition(setting, **measured)


def evidence(group: Sequence[Repetition]) -> dict[str, Any]:
    """The evidence of one arm's repetitions, merged: medians, sums of counts, all troubles."""
    seen = [one.evidence for one in group]
    whys: Counter[str] = Counter()
    for one in seen:
        whys.update(one["why"])
    modes = Counter(one["wait_mode"] for one in seen)
    outq = median([one["outq"] for one in seen])
    others = median([one["others_wait_ms"] for one in seen])
    remarks = []
    if others is None:
        remarks.append("another connection's request got no answer meanwhile")
    elif others > LATE_MS:
        remarks.append(f"another connection waited {others:,.0f} ms for its answer meanwhile")
    return {
        "remarks": remarks,
        "outq": None if outq is None else round(outq),
        "wait_mode_while_stalled": modes.most_common(1)[0][0],
        "why_while_stalled": dict(whys),
        "others_wait_ms": others,
        "sends": max(one["sends"] for one in seen),
        "held": max(one["held"] for one in seen),
        "list_length": max(one["list_length"] for one in seen),
        "connection": seen[0]["connection"],
        "troubles": [trouble for one in seen for trouble in one["troubles"]],
    }


def conclude(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the arms say together."""
    return {"open_question": open_question(rows), "two_by_two": two_by_two(rows)}


def open_question(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Why did the single-request async arm measure no CPU? Answered from this run's figures.

    The founding document's candidate was that the socket took the whole response, so that there was
    no SEND to wait for. None when the arm was not run as shipped.
    """
    row = _find(rows, "async", "shipped")
    if row is None:
        return None
    idle, stalled = row["windows"]["idle"], row["windows"]["stall"]
    in_flight, outq = row["send_in_flight"], row["outq"]
    size = row["delivered"]["expected"] // row["repetitions"]
    listed = bool(row["list_length"])
    parts = [
        f"Of a response of {size:,} bytes the socket held {outq:,} unacknowledged (SIOCOUTQ)"
        if outq is not None else f"Of a response of {size:,} bytes SIOCOUTQ was not to be had",
        f"{row['sends']} ring SEND was submitted and "
        + ("was still in flight" if in_flight else "none was in flight any more"),
        f"the connection was {'listed' if listed else 'not listed'}",
        f"the newest wait was '{row['wait_mode_while_stalled']}' because of "
        f"'{_commonest(row['why_while_stalled'])}'",
        f"{stalled['waits_per_s']:,.1f} waits/s while stalled against {idle['waits_per_s']:,.1f} "
        f"idle, {stalled['cpu_ms_per_s']:.2f} ms of CPU a second against "
        f"{idle['cpu_ms_per_s']:.2f}",
    ]
    return {
        "question": "why does a single stalled async request cost no CPU, though its connection "
                    "stays on the dirty list?",
        "answer": _answer(row, bool(in_flight), listed) + " " + "; ".join(parts) + ".",
        "send_in_flight": in_flight,
        "listed": listed,
        "outq": outq,
        "response_size": size,
        "wait_mode": row["wait_mode_while_stalled"],
        "state": row["state"],
    }


def _answer(row: Mapping[str, Any], in_flight: bool, listed: bool) -> str:
    if not in_flight:
        return ("The socket took the whole response, so no SEND was waiting: this run shows the "
                "founding document's candidate answer and not the fault. Lower sndbuf or raise "
                "response_size.")
    if listed and row["wait_mode_while_stalled"] == "untimed":
        return ("Because the worker sleeps in a wait without a timeout. The SEND is in flight and "
                "the connection is listed, as in the arm that spins, but the wait that follows a "
                "submission takes no timeout, so the list is not looked at until some completion "
                "comes: the loop is parked, not healthy.")
    return ("This run does not show the parked wait: a SEND was in flight, but the loop waited "
            "otherwise.")


def two_by_two(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The two fixes alone and together, for every arm that was run under all four.

    None when no arm was.
    """
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        found = {policy: _find(rows, arm, policy) for policy in TWO_BY_TWO}
        for policy, row in found.items():
            if row is None or None in found.values():
                continue
            membership, wait = TWO_BY_TWO[policy]
            delivered = row["delivered"]
            stalled = row["windows"].get("stall") or row["windows"]["held"]
            cells.append({
                "arm": arm, "policy": policy, "membership": membership, "wait": wait,
                "state": row["state"], "waits_per_s": stalled["waits_per_s"],
                "complete": delivered["in_order"] and delivered["bytes"] == delivered["expected"],
            })
    if not cells:
        return None
    quiet = [policy for policy in TWO_BY_TWO if all(
        cell["state"] == "quiet" for cell in cells if cell["policy"] == policy)]
    disordered = [policy for policy in quiet if not all(
        cell["complete"] for cell in cells if cell["policy"] == policy)]
    text = f"Quiet in every arm: {', '.join(quiet) or 'none of the four'}."
    if disordered:
        text += (f" Under {', '.join(disordered)} bytes still arrive out of order: writing behind "
                 "the SEND is a change of its own.")
    return {"cells": cells, "quiet_everywhere": quiet, "text": text}


def _find(
    rows: Sequence[Mapping[str, Any]], arm: str, policy: str
) -> Mapping[str, Any] | None:
    return next((row for row in rows if (row["arm"], row["policy"]) == (arm, policy)), None)


def _commonest(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda name: counts[name])


EXPERIMENT = Experiment(
    name="dirty-list",
    title="A listed connection whose SEND waits for a slow client",
    source=SOURCE,
    parameters=PARAMETERS,
    arms=ARMS,
    budgets=BUDGETS,
    repetition=repetition,
    evidence=evidence,
    conclude=conclude,
)

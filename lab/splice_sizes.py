"""Why the spin of the case splice looks random: it depends on the size of the object.

Too small, and the sockets take all; too large, and the pipe fills, which happens to end in an
EAGAIN that stops the reading. Between the two the tail of the object waits in the pipe alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine import SpliceRelay
from engine.errors import UsageError
from lab.choreography import HELD_BRIEFLY, Connect, Get, Player, Settle
from lab.origin import Object
from lab.parameters import Parameter, Value

POLICY = "before"
# A handler that runs so often for nothing is not on its way anywhere.
SPIN_PER_S = 1000.0
_LOOK_S = 0.05
_SETTLE_S = 0.3
_SIZE = Parameter("size", int, 1, "bytes", 1, 1 << 28)
_MOST = 64


def parse_sizes(text: str) -> list[int]:
    """``60k,100k`` as bytes; UsageError for what is no size."""
    sizes = [int(_SIZE.check(part)) for part in text.split(",") if part.strip()]
    if len(sizes) > _MOST:
        raise UsageError(f"sizes names {len(sizes)} sizes: give {_MOST} at most")
    return list(dict.fromkeys(sizes))


def measure_sizes(values: Mapping[str, Value], origin: str) -> dict[str, Any] | None:
    """The choreography of the arm ``a`` with objects of each size; None: no sizes.

    A row a size: ``spinning`` of ``trials``, and of the newest trial the bytes in the pipe and
    whether the pipe's EAGAIN had stopped the reading (``stopped``).
    """
    sizes = parse_sizes(str(values["sizes"]))
    if not sizes:
        return None
    rows = []
    for size in sizes:
        tries = [_try(size, values, origin) for _ in range(int(values["trials"]))]
        rows.append({
            "size": size, "trials": len(tries), "spinning": sum(one["spins"] for one in tries),
            "piped": tries[-1]["piped"], "stopped": tries[-1]["stopped"],
        })
    return {"policy": POLICY, "rows": rows, "text": _told(rows)}


def _try(size: int, values: Mapping[str, Value], origin: str) -> dict[str, Any]:
    steps = (
        Connect(rcvbuf=int(values["rcvbuf"])), Get((Object(size), Object(size))),
        Settle(HELD_BRIEFLY, most=_SETTLE_S),
    )
    with SpliceRelay(
        origin, POLICY, engine=str(values["engine"]), so_sndbuf=int(values["sndbuf"]), sample_hz=0
    ) as relay, Player(relay.host, relay.port, watch=relay.counters, strict=False) as player:
        player.play(steps)
        before, begun = relay.counters(), time.monotonic()
        time.sleep(_LOOK_S)
        after, seconds = relay.counters(), time.monotonic() - begun
        noops = int(after["noop_dispatches"]) - int(before["noop_dispatches"])
        channel = max((one.response for one in relay.sessions()), key=lambda one: one.piped,
                      default=None)
        return {
            "spins": noops / seconds >= SPIN_PER_S,
            "piped": 0 if channel is None else channel.piped,
            "stopped": channel is not None and channel.sink_full,
        }


def _told(rows: Sequence[Mapping[str, Any]]) -> str:
    spinning = [row["size"] for row in rows if row["spinning"]]
    if not spinning:
        return "No size made it spin: the socket buffers take all of them, or none fits the pipe."
    small = [row for row in rows if row["size"] < min(spinning)]
    large = [row for row in rows if row["size"] > max(spinning)]
    some = [row["size"] for row in rows if 0 < row["spinning"] < row["trials"]]
    parts = [f"Objects of {min(spinning):,} to {max(spinning):,} bytes made it spin"]
    if small:
        parts.append(f"up to {small[-1]['size']:,} the sockets took all (the pipe held "
                     f"{small[-1]['piped']:,} bytes)")
    if large:
        how = ("its EAGAIN had stopped the reading" if large[0]["stopped"]
               else "reading had not been stopped")
        parts.append(f"from {large[0]['size']:,} on the pipe was full ({large[0]['piped']:,} "
                     f"bytes) and {how}")
    if some:
        parts.append("in some trials only: " + ", ".join(f"{size:,}" for size in some))
    return "; ".join(parts) + "."

"""What the command line prints: aligned tables, JSON, one line for an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lab.beside import STALLED

NOTHING = "-"
# In place of a state's mark: the arm did not come to where it was to be looked at.
NOT_SHOWN = "!"
_MARKS = {"quiet": "o", "parked": "=", "spins": "*", "intended": "+", "undecided": "?"}


def table(rows: Sequence[Sequence[str]], heads: Sequence[str], right: str = "") -> str:
    """Rows under their heads; ``right`` names the columns, one letter each, as ``l`` or ``r``."""
    sides = right or "l" * len(heads)
    widths = [
        max(len(head), *(len(row[column]) for row in rows)) if rows else len(head)
        for column, head in enumerate(heads)
    ]
    lines = [_line(heads, widths, sides), _line(["-" * width for width in widths], widths, sides)]
    lines += [_line(row, widths, sides) for row in rows]
    return "\n".join(lines)


def arms_table(arms: Sequence[Mapping[str, Any]]) -> str:
    """The results of a run: how each arm slept and woke, and whether it still kept its word."""
    heads = ("arm", "policy", "state", "idle w/s", "waits/s", "wasted/s", "CPU ms/s", "on queue",
             "complete", "stop", "write t/o", "budget")
    rows = []
    for arm in arms:
        windows = arm["windows"]
        idle = windows["idle"]
        stalled: Mapping[str, Any] = next(
            (windows[name] for name in STALLED if name in windows), {})
        delivered = arm["delivered"]
        whole = delivered["bytes"] == delivered["expected"]
        rows.append((
            arm["arm"], arm["policy"],
            f"{NOT_SHOWN if arm.get('not_shown') else _MARKS[arm['state']]} {arm['state']}",
            number(idle.get("waits_per_s")), number(stalled.get("waits_per_s")),
            number(stalled.get("wasted_per_s")), number(stalled.get("cpu_ms_per_s")),
            number(stalled.get("on_queue_fraction"), 2),
            "yes" if whole and delivered["in_order"] else "BYTES" if not whole else "ORDER",
            yes(arm["honours_stop"]), yes(arm["honours_write_timeout"]),
            {None: NOTHING, True: "kept", False: "BROKEN"}[arm["within_budget"]],
        ))
    return table(rows, heads, "lllrrrrrllll")


def number(value: float | None, digits: int = 1) -> str:
    """A figure for people: no decimals from a hundred on, thousands separated."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"


def yes(value: bool | None) -> str:
    """``yes``, ``NO`` (it stands out) or that it was not tested."""
    return {None: NOTHING, True: "yes", False: "NO"}[value]


def to_json(data: Any) -> str:
    """One document, for a program."""
    return json.dumps(data, indent=1, default=str)


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print("ringlab: " + " ".join(message.split()), file=sys.stderr, flush=True)


def _line(cells: Sequence[str], widths: Sequence[int], sides: str) -> str:
    padded = (
        cell.rjust(width) if side == "r" else cell.ljust(width)
        for cell, width, side in zip(cells, widths, sides, strict=True)
    )
    return "  ".join(padded).rstrip()


def described(case: Any) -> dict[str, Any]:
    """What can be asked of a case: its arms with their policies, its parameters."""
    arms = [{"arm": arm.name, "what": arm.what, "policies": list(arm.policies)}
            for arm in getattr(case, "arms", ())]
    return {"experiment": case.name, "title": case.title, "arms": arms,
            "parameters": case.parameters.as_table()}


def description(case: Any) -> str:
    """The same for a terminal."""
    facts = described(case)
    lines = [f"{case.name}: {case.title}"]
    for arm in facts["arms"]:
        lines += ["", f"arm {arm['arm']}: {arm['what']}",
                  f"  policies: {', '.join(arm['policies'])}"]
    lines += ["", "parameters (-p NAME=VALUE)"]
    rows = [(each.name, str(each.default), each.allowed, each.help) for each in case.parameters]
    return "\n".join([*lines, table(rows, ("name", "default", "allowed", "what"))])

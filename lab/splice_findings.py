"""What the arms of the case splice say together, in figures and in sentences made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab import haproxy, reference
from lab.choreography import MIN_SPLICE

Row = Mapping[str, Any]

STALLS = ("a", "a2", "b", "d", "e", "m")
CONTROL = "m"
# A build of data/reference as the policy that decides as it does.
POLICY_OF_BUILD = {
    "before": "before", "after": "after", "splice-off": "no-splice",
    "recv-allowed": "recv-allowed", "sink-full": "sink-full",
    "last-block-spliced": "last-block", "send-skipped": "skip-send", "HAProxy 2.6": haproxy.NAME,
}
INGREDIENTS = ("recv-allowed", "sink-full", "last-block", "skip-send")
_LEVEL = "before+engine=level-triggered"
PER_MB = ("waits_per_mb", "splice_per_mb", "recv_per_mb")


def conclude(rows: Sequence[Row]) -> dict[str, Any]:
    """Entries of the run, each None where its arms were not run."""
    return {
        "pattern": pattern(rows), "cure": cure(rows), "sign": sign(rows), "reached": reached(rows),
        "engines": engines(rows), "mirror": mirror(rows), "paced": paced(rows),
    }


def find(rows: Iterable[Row], arm: str, policy: str) -> Row | None:
    """The row of one arm under one policy."""
    return next((row for row in rows if (row["arm"], row["policy"]) == (arm, policy)), None)


def complete(row: Row) -> bool:
    """Every byte, in order."""
    delivered = row["delivered"]
    return bool(delivered["in_order"]) and delivered["bytes"] == delivered["expected"]


# ---- the pattern --------------------------------------------------------------------------------


def known() -> dict[tuple[str, str], tuple[int, int | None]]:
    """Of the real builds: (arm, policy) -> spinning trials, and how many (None: not recorded)."""
    return {
        (row["arm"], POLICY_OF_BUILD[row["build"]]): (int(row["value"]), row["trials"])
        for row in reference.splice()
        if row["quantity"] == "spinning_trials" and row["build"] in POLICY_OF_BUILD
    }


def pattern(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Which arm spins under which policy, here and in the real builds."""
    elsewhere, cells = known(), []
    for row in rows:
        if row["arm"] not in STALLS:
            continue
        # The real builds were speculative, as a run's parameter may have it otherwise.
        same_engine = row["decisions"].get("engine") != "level-triggered"
        real = elsewhere.get((row["arm"], row["policy"])) if same_engine else None
        as_there = real is not None and row["state"] == ("spins" if real[0] else "quiet")
        cells.append({
            "arm": row["arm"], "policy": row["policy"], "state": row["state"],
            "spinning": row.get("spinning"), "repetitions": row["repetitions"],
            "noop_per_s": row.get("noop_per_s"),
            "real_spinning": None if real is None else real[0],
            "real_trials": None if real is None else real[1],
            "agrees": None if real is None else as_there,
        })
    if not cells:
        return None
    compared = [cell for cell in cells if cell["agrees"] is not None]
    differ = [f"{cell['arm']} under {cell['policy']} ({cell['state']} here, spinning in "
              f"{cell['real_spinning']} of {cell['real_trials'] or 'some'} trials there)"
              for cell in compared if not cell["agrees"]]
    text = (f"Of {len(compared)} stalls that were also tried with real builds, "
            f"{len(compared) - len(differ)} spin or sleep here as they did there")
    return {"cells": cells, "compared": len(compared), "agree": len(compared) - len(differ),
            "text": text + (f"; not so: {'; '.join(differ)}." if differ else ".")}


def cure(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Which of the ingredients, alone, stops every spin that there was before."""
    spun = [row["arm"] for row in rows if row["policy"] == "before" and row["state"] == "spins"
            and row["arm"] in STALLS]
    found: dict[str, list[str]] = {}
    for policy in INGREDIENTS:
        tried = [row for arm in spun if (row := find(rows, arm, policy)) is not None]
        if tried:
            found[policy] = [row["arm"] for row in tried
                             if row["state"] != "quiet" or not complete(row)]
    if not found:
        return None
    cures = [policy for policy, left in found.items() if not left]
    parts = []
    for policy, left in found.items():
        if left:
            closed = [arm for arm in spun if arm not in left and find(rows, arm, policy)]
            parts.append(f"{policy} leaves {', '.join(left)}"
                         + (f" and closes {', '.join(closed)}" if closed else ""))
    return {"ingredients": found, "cures": cures, "text":
            f"The arms that spin before the fix are {', '.join(spun)}. Quiet and complete in all "
            f"of them with one change alone: {', '.join(cures) or 'none'}."
            + (f" Not enough: {'; '.join(parts)}." if parts else "")}


# ---- the sign, the proof, the engines -----------------------------------------------------------


def sign(rows: Sequence[Row]) -> dict[str, Any] | None:
    """What counts the fault, and what does not."""
    spun = [row for row in rows if row["policy"] == "before" and row["state"] == "spins"
            and row["arm"] in STALLS]
    if not spun:
        return None
    shown = "; ".join(
        f"{row['arm']}: {row['noop_per_s']:,.0f} no-op dispatches/s, "
        f"{_source_eagain(row):,.0f} EAGAINs/s on the side that is read, "
        f"{_sink_eagain(row):,.0f} on the other" for row in spun)
    return {"arms": [row["arm"] for row in spun], "text":
            f"The handler makes no system call on the socket that it reads, so no EAGAIN is "
            f"counted there. {shown}."}


def _source_eagain(row: Row) -> float:
    return float(row["eagain_client_per_s" if _uploads(row) else "eagain_origin_per_s"])


def _sink_eagain(row: Row) -> float:
    return float(row["eagain_origin_per_s" if _uploads(row) else "eagain_client_per_s"])


def _uploads(row: Row) -> bool:
    return bool((row.get("session") or {}).get("held_in") == "request")


def reached(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Did the fixed relay come to where the other spins, and sleep there?"""
    tried = [row for row in rows if row["policy"] == "after" and row["arm"] in STALLS
             and row["arm"] != CONTROL and "reached" in row]
    if not tried:
        return None
    there = [row for row in tried if row["reached"]]
    text = (f"The fixed relay came to the state and slept there in {len(there)} of {len(tried)} "
            f"arms ({', '.join(row['arm'] for row in there) or 'none'}): the pipe holds data, and "
            f"less than {MIN_SPLICE:,} bytes may be forwarded, or recv has put bytes behind it.")
    head = find(rows, "a", "after")
    if head is not None and head["reached"] and head["session"]["requests"] > 1:
        channel = head["channel"]
        held = channel["scheduled"] + channel["awaiting"]
        text += (f" In a, {held:,} bytes, the head of response 2 first, stand in the buffer behind "
                 f"{channel['piped']:,} bytes in the pipe, and the newest wait is "
                 f"'{head['last_why']}', which blocks.")
    return {"arms": [row["arm"] for row in there], "tried": [row["arm"] for row in tried],
            "text": text, "not_shown": [
                f"{row['arm']} under after: it did not come to where the fault is (its pipe holds "
                "nothing, or enough may be forwarded): other sizes or buffers are needed"
                for row in tried if not row["in_state"]]}


def engines(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The same fault under the two engines."""
    pairs = [(one, two) for arm in STALLS if arm != CONTROL
             if (one := find(rows, arm, "before")) is not None
             and (two := find(rows, arm, _LEVEL)) is not None]
    if not pairs:
        return None
    told = "; ".join(
        f"{one['arm']}: {one['state']} with {_per_turn(one)} when speculative, {two['state']}"
        + (f" with {_per_turn(two)}" if two["state"] == "spins" else "") + " when level-triggered"
        for one, two in pairs)
    return {"arms": [one["arm"] for one, _ in pairs], "text":
            f"The speculative engine spins on its own belief, the level-triggered one only once "
            f"something has arrived. {told}."}


def _per_turn(row: Row) -> str:
    counts = row["counts"]
    if not counts["waits"]:
        return "no waits"
    share = counts["waits_zero"] / counts["waits"]
    return (f"{counts['events'] / counts['waits']:.2f} events a wait, {100 * share:.0f} % of the "
            f"waits with timeout 0")


def mirror(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Was the fault that every fix risks found by the check of the bytes?"""
    tried = [row for row in rows if forgets(row["decisions"])]
    if not tried:
        return None
    caught = [row for row in tried if not complete(row)]
    told = "; ".join(f"{row['arm']}"
                     + ("" if row["policy"] == "mirror" else f" under {row['policy']}")
                     + f": {row['delivered']['fault']}" for row in caught)
    others = [f"{row['arm']} under {row['policy']}" for row in rows
              if not forgets(row["decisions"]) and not complete(row)]
    arms = list(dict.fromkeys(row["arm"] for row in caught))
    return {"caught": arms, "others": others, "text":
            f"The mirror fault sleeps on live work, and the check of the bytes finds it in "
            f"{', '.join(arms) or 'no arm of this run'}"
            + (f" ({told})" if told else "") + ". Under every other policy "
            + (f"all arrived, in order, but for {', '.join(others)}." if others
               else "every byte arrived, in order.")}


def forgets(decisions: Mapping[str, str]) -> bool:
    """Whether these have the mirror fault, whatever the others are."""
    return decisions.get("readiness") == "cleared" and decisions.get("splice") == "on"


# ---- paced --------------------------------------------------------------------------------------


def paced(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The cost of a MB at the client's pace, beside the real builds' and HAProxy's of this run."""
    own = [row for row in rows if row["arm"] == "paced"]
    if not own:
        return None
    real = find(rows, "paced", haproxy.NAME)
    theirs = None if real is None else real.get("cpu_ms_per_mb")
    cells = [{
        "policy": row["policy"], "state": row["state"], "cpu_ms_per_mb": row.get("cpu_ms_per_mb"),
        "cpu_percent": row["windows"]["paced"]["cpu_ms_per_s"] / 10,
        "over_haproxy": _ratio(row.get("cpu_ms_per_mb"), theirs),
        **{name: row.get(name) for name in (*PER_MB, "spliced_share")},
    } for row in own]
    parts = []
    for policy in ("before", "after"):
        row = find(rows, "paced", policy)
        if row is not None and "cpu_ms_per_mb" in row:
            parts.append(f"{policy}: {row['waits_per_mb']:,.0f} waits, {row['splice_per_mb']:,.0f} "
                         f"splice and {row['recv_per_mb']:.1f} recv calls and "
                         f"{row['cpu_ms_per_mb']:.2f} ms of CPU a MB")
    fixed = find(rows, "paced", "after")
    if fixed is not None and theirs and "cpu_ms_per_mb" in fixed:
        parts.append(f"the fixed relay takes {fixed['cpu_ms_per_mb'] / theirs:.2f} times the CPU "
                     f"of HAProxy {haproxy.version()} in the same run ({theirs:.2f} ms a MB)")
    return {"rows": cells, "haproxy": haproxy.version() if real else None,
            "text": "At the client's pace, " + "; ".join(parts) + "." if parts else
            "Neither before nor after the fix was the paced client given everything in this run."}


def _ratio(own: float | None, theirs: float | None) -> float | None:
    return own / theirs if own is not None and theirs else None


def commits_own() -> list[dict[str, Any]]:
    """The figures of the commit message itself: CPU in per cent, on a machine that is not named."""
    return [row for row in reference.splice()
            if row["quantity"] == "cpu_fraction" and not row["trials"]]


def paced_elsewhere() -> dict[str, dict[str, float]]:
    """Of the real builds: policy -> quantity -> figure (CPU in per cent of a CPU)."""
    found: dict[str, dict[str, float]] = {}
    for row in reference.splice():
        policy = POLICY_OF_BUILD.get(row["build"])
        if row["arm"] == "paced" and policy and row["trials"]:
            found.setdefault(policy, {})[row["quantity"]] = float(row["value"])
    return found

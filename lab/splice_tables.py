"""Tables of the case splice: from a stored run, beside what real builds did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab import haproxy
from lab.runs import Run
from lab.splice_findings import STALLS, commits_own, known, paced_elsewhere
from lab.tables import NONE, Cell, Column, Note, Table, figure, machine_line, windows_line

HEADS = {
    "pattern": "The pattern",
    "cure": "Which ingredient is the cure?",
    "sign": "Why did the EAGAIN counter not see it?",
    "reached": "Did the fixed relay come to the same state?",
    "engines": "Two engines, one fault",
    "sizes": "Why is it random?",
    "mirror": "The mirror fault",
    "paced": "What it costs at a client's pace",
}
_LABELS = {haproxy.NAME: "HAProxy"}
_BUILDS = "HAProxy builds around commit 61d39a0e2, x86-64 VM, 2 CPUs, kernel 6.18"


def note(run: Run, name: str) -> Note:
    """What the run concluded under that name, or that it could not."""
    found = run.data.get(name)
    return Note(HEADS[name], found["text"] if found else
                "This run has not measured the arms and policies that would tell.")


def pattern_table(run: Run) -> Table:
    """Policies as rows, arms as columns; in each cell the state, and under it the real builds'."""
    cells = {(cell["arm"], cell["policy"]): cell for cell in (run.data["pattern"] or {}).get(
        "cells", ())}
    arms = [arm for arm in STALLS if any(one == arm for one, _ in cells)]
    columns = [Column("policy", words=True), Column("measured", words=True),
               *(Column(arm, words=True) for arm in arms)]
    rows = []
    for policy in dict.fromkeys(policy for _, policy in cells):
        name = _LABELS.get(policy, policy)
        here = [cells.get((arm, policy)) for arm in arms]
        rows.append([Cell(name), Cell("here"), *(_state(cell) for cell in here)])
        if any(cell and cell["real_spinning"] is not None for cell in here):
            rows.append([Cell(name), Cell("real builds"), *(_real(cell) for cell in here)])
    return Table(
        "Which stall spins under which policy", columns, rows,
        f"{windows_line(run, ['idle', 'stall'])} {machine_line(run.machine)} Real builds: spinning "
        f"trials of all trials ({_BUILDS}); {NONE}: not tried. A policy of this lab stands beside "
        f"the build that decides as it does.")


def _state(cell: Mapping[str, Any] | None) -> Cell:
    return Cell(NONE) if cell is None else Cell(cell["state"], "state")


def _real(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None or cell["real_spinning"] is None:
        return Cell(NONE)
    count = cell["real_spinning"]
    return Cell(f"{count} of {cell['real_trials']}" if cell["real_trials"] else f"{count}")


def sign_table(run: Run, policies: Sequence[str] = ("before", "skip-send", "after")) -> Table:
    """No-op dispatches beside everything that one would have looked at."""
    columns = [
        Column("arm", words=True), Column("policy", words=True), Column("state", words=True),
        Column("no-op", "dispatches/s"), Column("waits", "1/s"), Column("timeout 0", "1/s"),
        Column("events", "1/s"), Column("EAGAIN", "origin, 1/s"), Column("EAGAIN", "client, 1/s"),
        Column("pipe", "bytes"), Column("to_forward", "bytes"), Column("reading", words=True),
    ]
    rows = []
    for row in run.arms:
        if row["arm"] not in STALLS or row["policy"] not in policies or "noop_per_s" not in row:
            continue
        channel = row["channel"] or {}
        rows.append([
            Cell(row["arm"]), Cell(row["policy"]), Cell(row["state"], "state"),
            Cell(figure(row["noop_per_s"])), Cell(figure(row["windows"]["stall"]["waits_per_s"])),
            Cell(figure(row["waits_zero_per_s"])), Cell(figure(row["events_per_s"])),
            Cell(figure(row["eagain_origin_per_s"])), Cell(figure(row["eagain_client_per_s"])),
            Cell(_bytes(channel.get("piped"))), Cell(_bytes(channel.get("to_forward"))),
            Cell(_reading(channel)),
        ])
    return Table(
        "No-op dispatches count the fault; EAGAINs do not", columns, rows,
        f"{windows_line(run, ['stall'])} A no-op dispatch: the handler ran, made no system call on "
        f"the socket that it is for, and left its interest unchanged. Pipe, to_forward and reading "
        f"are those of the channel that is stuck, at the end of the window.")


def _reading(channel: Mapping[str, Any]) -> str:
    if not channel:
        return NONE
    return "sink full" if channel["sink_full"] else str(channel["read"])


def _bytes(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def sizes_table(run: Run) -> Table:
    """Objects of many sizes under the policy before: which spin, and how much the pipe holds."""
    found = run.data.get("sizes") or {"rows": []}
    columns = [Column("object", "", words=True), Column("bytes", "of each object", words=True),
               Column("spinning", "trials", words=True), Column("pipe holds", "bytes"),
               Column("reading", words=True)]
    rows = [[
        Cell("before"), Cell(f"{row['size']:,}"),
        Cell(f"{row['spinning']} of {row['trials']}", "bad" if row["spinning"] else ""),
        Cell(f"{row['piped']:,}"),
        Cell("stopped: pipe full" if row["stopped"] else "nothing left in the pipe"
             if not row["piped"] else "goes on"),
    ] for row in found["rows"]]
    return Table(
        "Two pipelined objects of one size, and a client that reads nothing", columns, rows,
        f"SO_SNDBUF {run.parameters['sndbuf']:,} bytes towards a client with SO_RCVBUF "
        f"{run.parameters['rcvbuf']:,}. {machine_line(run.machine)}")


def paced_table(run: Run) -> Table:
    """The cost of a MB at the client's pace, beside the real builds'."""
    found, elsewhere = run.data.get("paced") or {"rows": []}, paced_elsewhere()
    columns = [
        Column("policy", words=True), Column("measured", words=True), Column("state", words=True),
        Column("CPU", "% of a CPU"), Column("CPU", "ms/MB"), Column("HAProxy here", "ratio of CPU"),
        Column("waits", "per MB"), Column("splice", "per MB"), Column("recv", "per MB"),
        Column("spliced", "% of bytes"),
    ]
    rows = []
    for row in found["rows"]:
        name = row["policy"]
        shown = f"HAProxy {found['haproxy']}" if name == haproxy.NAME else name
        share = row["spliced_share"]
        rows.append([
            Cell(shown), Cell("here"), Cell(row["state"], "state"),
            Cell(figure(row["cpu_percent"])), Cell(figure(row["cpu_ms_per_mb"])),
            Cell(figure(row["over_haproxy"])), Cell(figure(row["waits_per_mb"])),
            Cell(figure(row["splice_per_mb"])), Cell(figure(row["recv_per_mb"])),
            Cell(NONE if share is None else f"{100 * share:.0f}"),
        ])
        real = elsewhere.get(name)
        if real:
            rows.append([
                Cell(shown), Cell("real builds"), Cell(NONE), Cell(figure(real["cpu_fraction"])),
                Cell(NONE), Cell(NONE), Cell(figure(real["waits_per_mb"])),
                Cell(figure(real["splice_per_mb"])), Cell(figure(real["recv_per_mb"])), Cell(NONE),
            ])
    pace = run.parameters["pace"]
    own = ", ".join(f"{row['value']:g} % {row['build']}" for row in commits_own())
    return Table(
        f"Objects of {run.parameters['large_size']:,} bytes, pipelined, read at {pace:g} MB/s",
        columns, rows,
        f"{windows_line(run, ['paced'])} {machine_line(run.machine)} MB: 10^6 bytes. The same "
        f"clients, origin and buffers for all; real builds: medians of ten trials ({_BUILDS}), so "
        f"compare orders of magnitude and ratios. The commit's own figures: {own}, on a small "
        f"machine. HAProxy exports no counts of its calls.")


def trials(arm: str, policy: str) -> tuple[int, int | None] | None:
    """What the real builds did: spinning trials, and of how many."""
    return known().get((arm, policy))

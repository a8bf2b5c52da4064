"""Tables of the case expired-wait: from a stored run, beside what was measured elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from engine.waits import FLAG_NAMES, ways
from lab import reference, waits
from lab.kernel import EXPERIMENT as OTHER_KERNELS
from lab.runs import Run, RunStore
from lab.tables import NONE, Cell, Column, Note, Table, machine_line
from lab.wait_commands import figure

# What each way gives up, or costs elsewhere: the founding document's cures among them.
GIVEN_UP = {
    "io_uring_get_events": "One system call a turn, no timer. The loop must know that its timeout "
                           "is zero and call this instead of a wait; an older liburing lacks it.",
    "io_uring_peek_cqe": "No system call, so completions that the kernel holds back for this task "
                         "(COOP_TASKRUN, DEFER_TASKRUN) are never seen: a lost wake-up.",
    "epoll_wait": "Another set to keep, a second call to reap, and deadlines in whole ms.",
    "ring_worker_poll": "The worker's own get_events: its spin turns faster, not rarer. It takes "
                        "the cost out of one wait, not the fault out of the loop.",
    "eventfd_workaround": "A second thread, woken once a wait; it misses deadlines when the "
                          "machine is busy, and the wait then times out after all.",
    "eventfd_workaround_spin": "A whole CPU for the thread that watches the deadline.",
}
_ICOUNT = "QEMU icount"
_RING = "io_uring_wait_cqe_timeout"
# A few instructions more or less in a wait of thousands, as the look at the clock itself.
_SAME = 0.02


def notes(run: Run) -> str:
    """Rounds and machine; no figure goes without them."""
    rounds = waits.quietest(int(run.data["rounds"]))
    return f"{rounds[:1].upper()}{rounds[1:]}, per wait. {machine_line(run.machine)}"


def check_note(run: Run) -> Note:
    """Whether this kernel looks before it sleeps, whether it sleeps, and the evidence."""
    return Note("This kernel", str(run.data["kernel_check"]["text"]))


def quality_note(run: Run) -> Note:
    """What makes the figures doubtful, what could not be counted, and what this machine lacks."""
    lines = [f"{line[:1].upper()}{line[1:]}." for line in run.data["warnings"]]
    lines += [f"Not counted: {reason}." for reason in run.data["untraced"].values()]
    lines += [f"Absent: {one['way']}: {one['reason']}." for one in run.data["absent"]]
    whole = [one for one in run.data.get("left_out", ()) if one["whole"]]
    lines += [f"Left out: {waits.left_out_told(one)}." for one in whole]
    if run.data.get("interrupted"):
        lines.append(f"Not whole: {run.data['interrupted']}.")
    return Note("How far to trust these figures", " ".join(lines) or
                "The rounds agree within 10 %, no other program took the CPU often, and every way "
                "to wait was there.")


def zero_table(run: Run) -> Table:
    """Every way with timeout zero, cheapest first, without ring flags or NAPI."""
    rows = [row for row in run.data["rows"]
            if row["timeout_ns"] == 0 and row["flags"] == "none" and not row["napi_us"]]
    columns = [
        Column("", words=True), Column("way to wait", words=True), Column("p50", "us"),
        Column("p99", "us"), Column("times", "epoll_wait(0)"), Column("timers", "started"),
        Column("timer", "interrupts"), Column("switches", "voluntary"),
        Column("elsewhere", "us", words=True),
    ]
    elsewhere = _elsewhere()
    cells = []
    for row in sorted(rows, key=lambda row: float(row["us_p50"])):
        armed = row["timer_starts"] is not None and row["timer_starts"] > 0.5
        kind = ("arms a timer" if armed else "no timer") if row["timer_starts"] is not None else ""
        cells.append([
            Cell(kind), Cell(row["way"]), Cell(figure(row["us_p50"])), Cell(figure(row["us_p99"])),
            Cell(figure(row["ratio_to_epoll_wait_0"])), _count(row["timer_starts"]),
            _count(row["timer_interrupts"]), _count(row["voluntary_switches"]),
            Cell(elsewhere.get(row["way"], NONE)),
        ])
    cells.sort(key=lambda row: row[0].text == "arms a timer")
    return Table("What a wait that may not sleep costs", columns, cells,
                 f"{notes(run)} Timers, interrupts and switches per wait. Elsewhere: other "
                 "machines (data/reference); compare orders of magnitude.")


def flags_table(run: Run) -> Table:
    """The same waits under each set of ring flags."""
    flags = [name for name in FLAG_NAMES
             if any(row["flags"] == name for row in run.data["rows"])]
    columns = [Column("", words=True), Column("way to wait", words=True),
               *(Column(FLAG_NAMES[name].replace("|", "|\u200b"), "us, timeout 0")
                 for name in flags)]
    rows = []
    for name in dict.fromkeys(row["way"] for row in run.data["rows"] if ways()[row["way"]].ring):
        found = [waits.find(run.data["rows"], name, 0, one) for one in flags]
        if any(found):
            rows.append([Cell(""), Cell(name),
                         *(Cell(figure(one["us_p50"]) if one else NONE) for one in found)])
    return Table("Ring flags hardly matter to a wait with nothing to reap", columns, rows,
                 notes(run))


def napi_table(run: Run) -> Table:
    """Busy polling against the timeout: when the wait ends, what it burns, the timer it arms."""
    columns = [Column("timeout", words=True), Column("busy_poll_to", words=True),
               Column("wait", "us p50"), Column("past the deadline", "us"),
               Column("CPU", "% of the time"), Column("timers", "started"),
               Column("switches", "voluntary")]
    rows = []
    found = [row for row in run.data["rows"] if row["way"] == _RING and row["flags"] == "none"]
    polled = {row["timeout_ns"] for row in found if row["napi_us"]}
    for row in sorted(found, key=lambda row: (row["timeout_ns"], row["napi_us"])):
        if row["timeout_ns"] not in polled:
            continue
        rows.append([
            Cell(waits.label(row["timeout_ns"])),
            Cell(f"{row['napi_us']:,} us" if row["napi_us"] else "none"),
            Cell(figure(row["us_p50"])), Cell(figure(row["overrun_us_p50"])),
            Cell(f"{waits.cpu_percent(row):.0f}"), _count(row["timer_starts"]),
            _count(row["voluntary_switches"]),
        ])
    lacking = [one["reason"] for one in run.data["absent"] if one.get("napi_us")]
    remark = f"Not measured: {lacking[0]}." if lacking and not rows else ""
    return Table(f"{_RING} with NAPI busy polling over a veth pair", columns, rows,
                 f"{remark} {notes(run)}".strip())


def napi_ways_table(run: Run) -> Table:
    """Every other way that polls, with its shortest timeout: how long it takes, and its CPU."""
    rows = [row for row in run.data["rows"] if row["flags"] == "none" and row["way"] != _RING]
    settings = sorted({row["napi_us"] for row in rows})
    columns = [Column("way to wait", words=True), Column("timeout", words=True)]
    for name, unit in (("wait", "us p50"), ("CPU", "% of the time")):
        columns += [Column(f"{name}, {f'{us:,} us' if us else 'no NAPI'}", unit)
                    for us in settings]
    cells = []
    for way in dict.fromkeys(row["way"] for row in rows if row["napi_us"]):
        least = min(row["timeout_ns"] for row in rows if row["way"] == way)
        found = [waits.find(rows, way, least, "none", us) for us in settings]
        cells.append([
            Cell(way), Cell(waits.label(least)),
            *(Cell(figure(one["us_p50"]) if one else NONE) for one in found),
            *(Cell(f"{waits.cpu_percent(one):.0f}" if one else NONE) for one in found),
        ])
    return Table("The other ways to enter the ring, with NAPI busy polling", columns, cells,
                 f"Each with its shortest timeout. {notes(run)}")


def ping_note(run: Run) -> Note:
    """What busy polling is for."""
    found = run.data.get("ping_pong")
    return Note("What busy polling buys", str(found["text"]) if found else
                "The round trip was not measured: it needs a veth pair and a kernel with "
                "IORING_REGISTER_NAPI.")


def spin_table(run: Run) -> Table:
    """The bound that the cost of a wait puts on the spin of dirty-list, and the measured rate."""
    columns = [Column("expired", words=True), Column("policy", words=True),
               Column("its wait", "us of CPU"), Column("at most", "turns per CPU second"),
               Column("the spin made", "turns per CPU second"), Column("of the bound", "%"),
               Column("a turn", "us of CPU"), Column("turns", "1/s")]
    rows = [
        [Cell(one["expired"]), Cell(one["policy"]), Cell(figure(one["wait_us"])),
         Cell(f"{one['bound_per_cpu_s']:,.0f}"), Cell(f"{one['waits_per_cpu_s']:,.0f}"),
         _of_bound(one),
         Cell(figure(one["us_per_iteration"])), Cell(f"{one['waits_per_s']:,.0f}")]
        for one in (run.data.get("spin") or {}).get("rows", ())
    ]
    return Table("The spin of dirty-list is a loop of these waits", columns, rows,
                 "Arm async+pipelined, one stalled client, measured in this run under "
                 "SINGLE_ISSUER|DEFER_TASKRUN. More than the bound, beyond the "
                 f"{waits.SPREAD:.0%} by which rounds may differ, would mean that the wait was "
                 "measured too dear. What a turn costs beyond its wait is the loop's own "
                 f"look at its list. {machine_line(run.machine)}")


def _of_bound(row: Mapping[str, Any]) -> Cell:
    """The share, and whether the spin turned faster than its waits allow."""
    share = row["waits_per_cpu_s"] / row["bound_per_cpu_s"]
    over = row.get("exceeds_bound", share > 1 + waits.SPREAD)
    return Cell(f"{100 * share:.0f}" + (" EXCEEDS IT" if over else ""), "bad" if over else "")


def cures_table(run: Run) -> Table:
    """What may be called instead, what it costs, and what it gives up."""
    columns = [Column("", words=True), Column("instead", words=True), Column("us", "p50"),
               Column("timed out", "%"), Column("helper", "CPU us"),
               Column("gives up", words=True, wrap=True)]
    rows = []
    for name, given_up in GIVEN_UP.items():
        found = [row for row in run.data["rows"]
                 if row["way"] == name and row["flags"] == "none" and not row["napi_us"]]
        if not found:
            continue
        row = min(found, key=lambda row: int(row["timeout_ns"]))
        helper = row.get("helper_cpu_us") or 0.0
        timeout = waits.label(row["timeout_ns"])
        rows.append([Cell("at 0" if timeout == "0" else f"before {timeout}"), Cell(name),
                     Cell(figure(row["us_p50"])), Cell(f"{100 * row['timed_out']:.0f}"),
                     Cell(figure(helper) if helper else NONE), Cell(given_up)])
    return Table("The cures, and what they give up", columns, rows, notes(run))


def kernels_table(store: RunStore | None = None) -> Table:
    """A zero-timeout ring wait in other kernels: from data/reference, and from ringlab kernel."""
    columns = [Column("measured", words=True), Column("kernel", words=True),
               Column("the check", words=True), Column("us", "per wait"),
               Column("switches", "voluntary"), Column("timers", "per wait")]
    rows = _known_kernels() + _own_kernels(store or RunStore())
    return Table(f"{_RING} with timeout 0 in other kernels", columns, rows,
                 "Under QEMU with icount one instruction is one virtual nanosecond: these compare "
                 "kernels and are not times. Run ringlab kernel --image BZIMAGE to add yours "
                 "(docs/kernels.md).")


def _known_kernels() -> list[list[Cell]]:
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in [*reference.expired_wait(), *reference.kernel_pair()]:
        if row["machine"].startswith(_ICOUNT) and row["arm"] == f"{_RING} 0":
            by = "by the lab" if row["source"] == reference.BY_THE_LAB else "for this project"
            figures = found.setdefault((by, row["machine"], row["build"]), {})
            figures[row["quantity"]] = row["value"]
    return [
        [Cell(by), Cell(machine.removeprefix(f"{_ICOUNT}, ")), Cell(build),
         Cell(figure(figures.get("us_per_wait"))),
         _count(figures.get("voluntary_switches_per_wait")),
         _count(figures.get("timer_starts_per_wait", figures.get("timer_interrupts_per_wait")))]
        for (by, machine, build), figures in found.items()
    ]


def _own_kernels(store: RunStore) -> list[list[Cell]]:
    try:
        run = store.latest(OTHER_KERNELS)
    except UsageError:
        return []
    rows = []
    for one in run.data["kernels"]:
        row = waits.find(one["rows"], _RING, 0)
        if row:
            has = one["kernel_check"]["has_check"]
            # With the file's name: a kernel and its patched build have one release.
            rows.append([Cell("here"), Cell(f"{one['release']} ({Path(one['image']).name})"),
                         Cell({True: "with the check", False: "before"}.get(has, "?")),
                         Cell(figure(row["us_p50"])), _count(row["voluntary_switches"]),
                         _count(row["timer_starts"])])
    return rows


def pair_table() -> Table:
    """Every wait in two kernels that differ by the check only, from data/reference."""
    columns = [Column("", words=True), Column("way to wait", words=True),
               Column("timeout", words=True), Column("before", "us"),
               Column("with the check", "us"), Column("ratio", "with / before"),
               Column("switches", "before"), Column("switches", "with"),
               Column("timers", "before"), Column("timers", "with")]
    found: dict[str, dict[tuple[str, str], float]] = {}
    rows = reference.kernel_pair()
    for row in rows:
        found.setdefault(row["arm"], {})[row["build"], row["quantity"]] = row["value"]
    cells = []
    for arm, figures in found.items():
        name, _, timeout = arm.partition(" ")
        us, switches, timers = ([figures.get((build, f"{quantity}_per_wait"))
                                 for build in ("before", "with the check")]
                                for quantity in ("us", "voluntary_switches", "timer_starts"))
        ratio = us[1] / us[0] if us[0] and us[1] is not None else None
        cells.append([Cell(_change(ratio)), Cell(name), Cell(timeout),
                      *(Cell(figure(value)) for value in us),
                      Cell(NONE if ratio is None else f"{ratio:.3f}"),
                      *(_count(value) for value in [*switches, *timers])])
    machine = rows[0]["machine"] if rows else _ICOUNT
    return Table("One kernel without and with the check, way by way", columns, cells,
                 f"{machine}; {rows[0]['trials'] if rows else 0} comparisons that agree to the "
                 "digit. Per wait; thousands of instructions, not real time. Voluntary switches, "
                 "and hrtimers started. docs/kernels.md says how to build the pair.")


def _change(ratio: float | None) -> str:
    if ratio is None or abs(ratio - 1) < _SAME:
        return "same"
    return "cheaper" if ratio < 1 else "dearer"


def _elsewhere() -> dict[str, str]:
    """What was measured on other machines with timeout zero, by way, with the machine."""
    names = {f"{_RING} 0": _RING, "epoll_wait 0": "epoll_wait",
             "io_uring_get_events + peek": "io_uring_get_events", "peek": "io_uring_peek_cqe"}
    found: dict[str, list[str]] = {}
    for row in reference.expired_wait():
        if (row["arm"] in names and row["quantity"] == "us_per_wait"
                and not row["machine"].startswith(_ICOUNT)):
            found.setdefault(names[row["arm"]], []).append(f"{_range(row)} ({_short(row)})")
    return {way: ", ".join(dict.fromkeys(texts)) for way, texts in found.items()}


def _range(row: Mapping[str, Any]) -> str:
    if row["value"] is not None:
        return f"{row['value']:g}"
    return f"{row['low']:g} to {row['high']:g}"


def _short(row: Mapping[str, Any]) -> str:
    return "Zen 5, founding" if "Zen" in row["machine"] else "VM, 6.18"


def _count(value: float | None) -> Cell:
    return Cell(NONE if value is None else f"{value:.3f}")


def summary(run: Run) -> Sequence[str]:
    """The run's conclusions, in sentences."""
    told = (run.data.get(name) for name in run.data["conclusions"])
    return [str(each["text"]) for each in told if each]

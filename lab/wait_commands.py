"""``ringlab waits`` and ``ringlab kernel``: what each way to wait costs, here and under QEMU."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import unknown
from lab import console

if TYPE_CHECKING:
    from lab.kernel import Comparison
    from lab.waits import Plan, Result

Left = Sequence[Mapping[str, Any]]

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_ways = click.option("--way", "ways", multiple=True, metavar="WAY",
                     help="Only this way to wait, such as io_uring_wait_cqe_timeout.")
_timeouts = click.option("--timeout", "timeouts", multiple=True, metavar="TIME",
                         help="Only this timeout: 0, 50us, 1ms.")
_flags = click.option("--flags", multiple=True, metavar="FLAGS",
                      help="Only these ring flags: none, coop, defer.")


def register(group: click.Group) -> None:
    """Adds the commands of this module."""
    group.add_command(waits)
    group.add_command(kernel)


@click.command()
@_ways
@_timeouts
@_flags
@click.option("--napi", "napi", multiple=True, type=click.IntRange(0, 1_000_000), metavar="US",
              help="Also with NAPI busy polling for so many us, over a veth pair of its own.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True,
              help="Each measures every row once; the quietest counts.")
@click.option("--run-ms", type=click.FloatRange(1, 10_000), default=20.0, show_default=True,
              help="How long a row is measured in a round.")
@click.option("--no-trace", is_flag=True, help="Do not count timer starts and interrupts.")
@_json
def waits(
    ways: Sequence[str], timeouts: Sequence[str], flags: Sequence[str], napi: Sequence[int],
    rounds: int, run_ms: float, no_trace: bool, as_json: bool,
) -> int:
    """What each way to wait costs on this machine, with nothing to wait for.

    Times are of one wait, in its quietest round; the ratio is to epoll_wait with timeout 0.
    """
    from engine import facts
    from engine.waits import FLAGS
    from lab import machine
    from lab import waits as bench
    from lab.napi import if_needed as connection
    from lab.progress import for_command

    given = [bench.parse_timeout(text) for text in timeouts]
    plan = bench.Plan(
        ways=ways, timeouts_ns=given or bench.TIMEOUTS, flags=_known(flags, FLAGS),
        napi_us=(0, *napi), rounds=rounds, run_s=run_ms / 1e3, trace=not no_trace,
    )
    plan.cases()  # an unknown way is told before anything is measured
    told = machine.describe(facts.of_kernel())
    with connection(plan.napi_us) as (socket, lacking):
        result = bench.run(plan, socket=socket, progress=for_command())
    result.absent += lacking
    if as_json:
        click.echo(console.to_json(as_data(result, plan, told)))
    else:
        _print(result, plan.left_out(), told)
    if isinstance(result.cut, KeyboardInterrupt):
        raise KeyboardInterrupt(f"interrupted {result.told(rounds)}")
    if result.cut is not None:
        result.cut.add_note(f"ended {result.told(rounds)}; what was measured is printed")
        raise result.cut
    return 0


def _known(asked: Sequence[str], allowed: Sequence[str]) -> Sequence[str]:
    for word in asked:
        if word not in allowed:
            raise unknown("ring flags", word, allowed)
    return tuple(dict.fromkeys(asked)) or allowed


def as_data(result: Result, plan: Plan, told: Mapping[str, Any]) -> dict[str, Any]:
    """The document of ``ringlab waits --json``."""
    from lab.waits import kernel_check

    return {
        "machine": dict(told), "rows": result.rows, "absent": result.absent,
        "untraced": result.untraced, "warnings": result.warnings,
        "kernel_check": kernel_check(result.rows), "rounds": result.rounds,
        "left_out": plan.left_out(),
        "interrupted": None if result.cut is None else _cut(result, plan.rounds),
    }


def _cut(result: Result, rounds: int) -> str:
    how = ("interrupted by hand" if isinstance(result.cut, KeyboardInterrupt)
           else f"ended by an error ({result.cut})")
    return f"{how} {result.told(rounds)}"


HEADS = ("way", "timeout", "flags", "NAPI us", "us p50", "us p99", "over us", "CPU us", "vol.",
         "invol.", "timers", "timer irqs", "x epoll 0")
SIDES = "lllrrrrrrrrrr"
# What a way costs that has a thread of its own to end the wait before its deadline.
HELPER_HEADS = ("helper us", "timed out")


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of a result as a terminal shows them, grouped by way.

    With the cells of HELPER_HEADS at the end where any of the ways has a helper.
    """
    from lab.waits import label

    order = list(dict.fromkeys(row["way"] for row in rows))
    helped = has_helper(rows)
    found = []
    for row in sorted(rows, key=lambda row: (order.index(row["way"]), row["napi_us"])):
        more = (figure(row["helper_cpu_us"] or None), f"{row['timed_out']:.1%}") if helped else ()
        found.append((
            row["way"], label(row["timeout_ns"]), row["flags"], str(row["napi_us"] or "-"),
            *(figure(row[name]) for name in ("us_p50", "us_p99", "overrun_us_p50", "cpu_us")),
            *(count(row[name]) for name in ("voluntary_switches", "involuntary_switches",
                                            "timer_starts", "timer_interrupts")),
            figure(row["ratio_to_epoll_wait_0"]), *more,
        ))
    return found


def has_helper(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any of the ways has a thread beside the one that waits."""
    return any(row["helper_cpu_us"] for row in rows)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for a terminal, with what its abbreviations mean."""
    helped = has_helper(rows)
    heads, sides = (HEADS + HELPER_HEADS, SIDES + "rr") if helped else (HEADS, SIDES)
    words = ("Per wait. over: past the deadline; vol., invol.: context switches; timers: hrtimers "
             "started;\ntimer irqs: timer interrupts; x epoll 0: times an epoll_wait with timeout "
             "0.")
    if helped:
        words += ("\nhelper us: CPU of the thread that ends the wait before its deadline, beside "
                  "CPU us; timed out:\nwaits that it did not end, and whose timeout did.")
    return f"{console.table(table_rows(rows), heads, sides)}\n{words}"


def figure(value: float | None) -> str:
    """Three digits that matter: 0.009, 0.131, 4.31, 54.2, 1,005."""
    if value is None:
        return console.NOTHING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """Events per wait."""
    return console.NOTHING if value is None else f"{value:.3f}"


def _print(result: Result, left_out: Left, told: Mapping[str, Any]) -> None:
    from lab.waits import kernel_check, quietest

    click.echo(rows_table(result.rows))
    _say(kernel_check(result.rows)["text"])
    for one in result.absent:
        _say(f"absent: {one['way']} (flags {one['flags']}): {one['reason']}")
    if left_out:
        _say(left_out_line(left_out))
    for reason in result.untraced.values():
        _say(f"not counted: {reason}")
    for line in result.warnings:
        _say(f"warning: {line}")
    _say(f"{told['cpu']}, {told['cpus']} CPUs, {told['virtualisation']}, Linux {told['kernel']}, "
         f"liburing {told['engine']['liburing']}; "
         f"{quietest(result.rounds)}")


def left_out_line(left_out: Left) -> str:
    """What was asked for and cannot be measured, with the reasons, in one paragraph."""
    from lab.waits import left_out_told

    return "left out: " + "; ".join(map(left_out_told, left_out))


def _say(line: str) -> None:
    click.echo("\n" + textwrap.fill(line, 100, subsequent_indent="  "))


@click.command()
@click.option("--image", required=True, type=click.Path(path_type=Path), metavar="BZIMAGE",
              help="The kernel to boot: a bzImage, as in /boot/vmlinuz-VERSION.")
@click.option("--against", type=click.Path(path_type=Path), metavar="BZIMAGE2",
              help="A second kernel; the table shows both and their ratio.")
@_ways
@_timeouts
@_flags
@click.option("--limit", type=click.FloatRange(5, 3600), default=120.0, show_default=True,
              metavar="S", help="The longest that one kernel may take.")
@_json
def kernel(
    image: Path, against: Path | None, ways: Sequence[str], timeouts: Sequence[str],
    flags: Sequence[str], limit: float, as_json: bool,
) -> int:
    """The same bench in another kernel, booted under QEMU with counted instructions.

    Needs no root and no KVM. One instruction is one virtual nanosecond, so two runs of one image
    give the same figures; they compare kernels and are not times.
    """
    from engine.waits import FLAGS, way
    from lab import kernel as other
    from lab import waits as bench
    from lab.progress import for_command
    from lab.runs import RunStore

    plan = bench.Plan(
        ways=[way(name).name for name in ways], flags=_known(flags, FLAGS) if flags else ("none",),
        timeouts_ns=[bench.parse_timeout(text) for text in timeouts] or bench.TIMEOUTS,
    )
    images = [image] if against is None else [image, against]
    keep = RunStore()
    compared = other.compare(images, plan, limit_s=limit, progress=for_command())
    stored: Path | None = None
    refused: Exception | None = None
    try:
        stored = other.store(compared, limit, keep)
    except Exception as error:  # whatever it was, what was measured is printed first
        refused = error
    if as_json:
        click.echo(console.to_json({**compared.to_dict(), "run": stored and str(stored)}))
    else:
        _print_kernels(compared, stored)
    cut = refused or compared.cut
    if cut is not None:
        raise cut
    return 0


def _print_kernels(compared: Comparison, stored: Path | None) -> None:
    for number, one in enumerate(compared.kernels):
        mark = "ab"[number]
        click.echo(f"{mark}: {one.image}, Linux {one.release}")
        click.echo(textwrap.indent(textwrap.fill(one.check["text"], 96), "   "))
    heads = ["way", "timeout", "flags", "us a", "vol. a", "timers a"]
    rows = [[*_names(row), *_kernel_cells(row["a"])] for row in compared.rows]
    if len(compared.kernels) > 1:
        heads += ["us b", "vol. b", "timers b", "b / a"]
        rows = [[*cells, *_kernel_cells(row["b"]), figure(row["ratio"])]
                for cells, row in zip(rows, compared.rows, strict=True)]
    click.echo(console.table(rows, heads, "lll" + "r" * (len(heads) - 3)))
    click.echo("us: thousands of instructions per wait (-icount shift=0), not real time. vol.: "
               "voluntary switches,\ntimers: hrtimers started, per wait.")
    for lack in compared.absent:
        click.echo(f"absent in {lack['kernel']}: {lack['way']}: {lack['reason']}")
    if compared.left_out:
        _say(left_out_line(compared.left_out))
    if stored is not None:
        click.echo(f"\nrun {stored}")


def _names(row: Mapping[str, Any]) -> tuple[str, str, str]:
    from lab.waits import label

    return row["way"], label(row["timeout_ns"]), row["flags"]


def _kernel_cells(row: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return (console.NOTHING,) * 3
    return figure(row["us_p50"]), count(row["voluntary_switches"]), count(row["timer_starts"])

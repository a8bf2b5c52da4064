"""What this machine can do for the lab, what it cannot, and what to change.

Every check is a small function that returns rows and never raises: a doctor that dies of what it
was to find is of no use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import RinglabError
from engine.startup import MEMCG_COUNTS_RINGS, kernel_release
from lab import machine, proc

OK, WARN, FAIL = "ok", "warn", "fail"
# What 10,000 stalled connections need in each of the two processes.
CROWD_FILES = 10_200
CROWD_PORTS = 12_000
NEWEST_NEEDED = (6, 1)
_NO_TRACING = "nothing but another kernel; its column in ringlab waits stays empty"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""Chromium by the names that systems have for it; tools/bootstrap.sh looks for the same."""
_FREE_BYTES = 500 << 20


@dataclass(frozen=True)
class Row:
    """One finding: ``what`` was looked at, its state, what was found, and the remedy if any.

    ``fail`` means that the main job cannot run; ``warn`` that some part of the lab cannot.
    """

    what: str
    state: str
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The row for JSON."""
        return asdict(self)


def examine() -> list[Row]:
    """All rows, in an order to be read."""
    rows: list[Row] = []
    for check in CHECKS:
        try:
            rows += check()
        except (OSError, ValueError, RinglabError) as error:
            rows.append(Row(check.__name__.strip("_"), WARN, f"could not be looked at: {error}",
                            "see the rows above"))
    return rows


def _kernel() -> list[Row]:
    found = f"Linux {platform.release()}, {platform.machine()}"
    if kernel_release() >= NEWEST_NEEDED:
        return [Row("kernel", OK, found)]
    return [Row("kernel", WARN, found, "6.1 or newer has every ring setup that is compared here")]


def _cpus() -> list[Row]:
    have, told = len(os.sched_getaffinity(0)), machine.describe(packages=())
    where = f"{have} usable, {told['cpu']}, virtualisation: {told['virtualisation']}"
    rows = [Row("CPUs", OK, where) if have > 1 else Row(
        "CPUs", WARN, where, "with one CPU a spin starves its own client; give two or more")]
    steal = told["steal_fraction"]
    if steal is not None:
        state = WARN if steal > 0.05 else OK
        remedy = "the hypervisor is busy: repeat runs, and trust on-queue fractions over CPU time"
        rows.append(Row("steal", state, f"{steal:.1%} since boot", remedy if state == WARN else ""))
    return rows


def _engine() -> list[Row]:
    from engine import facts

    try:
        rows = [Row("engine", OK, f"built, liburing {facts.liburing()}")]
    except RinglabError as error:
        return [Row("engine", FAIL, str(error), "make setup")]
    try:
        features = facts.probe().features
    except RinglabError as error:
        found, _, remedy = str(error).partition("; ")
        return [*rows, Row("io_uring", FAIL, found, remedy)]
    newest = f", newest {features[-1]}" if features else ""
    return [*rows, Row("io_uring", OK, f"allowed, {len(features)} features{newest}")]


def _limits() -> list[Row]:
    rows = [_limit("open files", resource.RLIMIT_NOFILE, CROWD_FILES, "10,000 connections",
                   "ulimit -Hn, or LimitNOFILE= of the service")]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB"
    counts = kernel_release() < MEMCG_COUNTS_RINGS
    small = counts and soft != resource.RLIM_INFINITY and soft < 64 << 10
    remedy = "this kernel counts rings against it; large ones need more: ulimit -l" if small else ""
    rows.append(Row("memlock", WARN if small else OK, shown, remedy))
    text = proc.read_text("/proc/sys/net/ipv4/ip_local_port_range")
    if text:
        low, high = (int(word) for word in text.split())
        few = high - low < CROWD_PORTS
        rows.append(Row(
            "local ports", WARN if few else OK, f"{low:,} to {high:,}",
            "sysctl net.ipv4.ip_local_port_range='20000 60999' for 10,000 clients" if few else "",
        ))
    return rows


def _limit(what: str, which: int, need: int, purpose: str, remedy: str) -> Row:
    soft, hard = resource.getrlimit(which)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else f"{soft:,}, hard {hard:,}"
    if hard == resource.RLIM_INFINITY or hard >= need:
        return Row(what, OK, shown)
    return Row(what, WARN, shown, f"{purpose} need {need:,}: {remedy}")


def _network() -> list[Row]:
    told = machine.describe(packages=())
    buffers = f"tcp_wmem {told['tcp_wmem']}, tcp_rmem {told['tcp_rmem']}"
    return [Row("TCP", OK, f"{told['congestion_control']}; {buffers}")]


def _clocks() -> list[Row]:
    own = proc.schedstat(os.getpid(), os.getpid())
    rows = [Row("clock source", OK, str(machine.describe(packages=())["clocksource"]))]
    if own is not None and own.slices:
        return [*rows, Row("schedstat", OK, "per-thread run and queue times")]
    return [*rows, Row("schedstat", WARN, "not kept by this kernel",
                       "a kernel with CONFIG_SCHED_INFO; without it on-queue is a lower bound")]


def _tracing() -> list[Row]:
    """As the wait bench finds it, which needs no mount of tracefs: it counts, and is asked."""
    from engine.waits import EVENTS, traceable

    reasons = traceable()
    counted = [EVENTS[name] for name in EVENTS if name not in reasons]
    rows = [Row("tracepoints", OK, f"{', '.join(counted)} can be counted")] if counted else []
    for reason in reasons.values():
        found, _, remedy = reason.partition("; ")
        rows.append(Row("tracepoints", WARN, found, remedy or _NO_TRACING))
    return rows


def browser_path() -> str | None:
    """The Chromium that the browser tests drive."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def _programs() -> list[Row]:
    rows = []
    lacking = [name for name in ("jupyterlab", "papermill", "bokeh", "ipywidgets")
               if importlib.util.find_spec(name) is None]
    rows.append(Row("notebook packages", WARN, f"missing: {', '.join(lacking)}", "make setup")
                if lacking else Row("notebook packages", OK, "installed"))
    browser = browser_path()
    rows.append(Row("browser", OK, browser) if browser else
                Row("browser", WARN, "no Chromium", "tests/browser need it: apt install chromium"))
    emulator = _program("qemu-system-x86_64")
    rows.append(Row("QEMU", OK, emulator) if emulator else
                Row("QEMU", WARN, "not installed", "ringlab kernel needs it: apt install "
                    "--no-install-recommends qemu-system-x86"))
    absent = [name for name in ("nginx", "wrk") if not _program(name)]
    rows.append(Row("benchmarks", WARN, f"missing: {', '.join(absent)}",
                    f"make bench needs them: apt install {' '.join(absent)}")
                if absent else Row("benchmarks", OK, "nginx and wrk"))
    return rows


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def _store() -> list[Row]:
    from lab.runs import ROOT_VARIABLE, default_root

    try:
        root = default_root()
    except RinglabError as error:
        found, _, remedy = str(error).partition("; ")
        return [Row("runs", FAIL, found, remedy)]
    elsewhere = f"set {ROOT_VARIABLE} to a folder that can be written"
    try:
        folder = _nearest(root)
        # Rights alone do not tell: a file system may be read-only, or take no folders at all.
        tempfile.TemporaryDirectory(prefix=".ringlab-doctor-", dir=folder).cleanup()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [Row("runs", FAIL, f"{root} cannot be written: {error.strerror}", elsewhere)]
    found = f"{root}, {free >> 20:,} MiB free"
    if free < _FREE_BYTES:
        return [Row("runs", WARN, found, f"make room, or set {ROOT_VARIABLE} to another folder")]
    return [Row("runs", OK, found)]


def _nearest(root: Path) -> Path:
    """The folder itself, or the one above it that is there; what is no folder is refused later."""
    for path in (root, *root.parents):
        try:
            path.lstat()
        except FileNotFoundError:
            continue
        return path
    return root


CHECKS: tuple[Callable[[], list[Row]], ...] = (
    _kernel, _cpus, _engine, _limits, _network, _clocks, _tracing, _programs, _store,
)


def summary(rows: list[Row]) -> dict[str, Any]:
    """For ``--json``: the rows, and how many of each state."""
    return {
        "rows": [row.to_dict() for row in rows],
        "counts": {state: sum(row.state == state for row in rows) for state in (OK, WARN, FAIL)},
    }

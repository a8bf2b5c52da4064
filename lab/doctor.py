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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import RinglabError
from lab import machine, proc

OK, WARN, FAIL = "ok", "warn", "fail"
# What 10,000 stalled connections need in each of the two processes.
CROWD_FILES = 10_200
CROWD_PORTS = 12_000
NEWEST_NEEDED = (6, 1)
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
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
        except (OSError, ValueError) as error:
            rows.append(Row(check.__name__.strip("_"), WARN, f"could not be looked at: {error}"))
    return rows


def _kernel() -> list[Row]:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    found = f"Linux {release}, {platform.machine()}"
    if numbers >= NEWEST_NEEDED:
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
    from engine.binding import native, text
    from engine.startup import ring_error
    from engine.views import ring_info

    try:
        ffi, lib = native()
    except RinglabError as error:
        return [Row("engine", FAIL, str(error), "make setup")]
    rows = [Row("engine", OK, f"built, liburing {text(lib.rl_liburing_version())}")]
    ring = ffi.new("rl_ring_info *")
    result = lib.rl_probe(ring)
    if result < 0:
        found, _, remedy = str(ring_error(-result)).partition("; ")
        return [*rows, Row("io_uring", FAIL, found, remedy)]
    features = ring_info(ring).features
    newest = f", newest {features[-1]}" if features else ""
    return [*rows, Row("io_uring", OK, f"allowed, {len(features)} features{newest}")]


def _limits() -> list[Row]:
    rows = [_limit("open files", resource.RLIMIT_NOFILE, CROWD_FILES, "10,000 connections",
                   "ulimit -Hn, or LimitNOFILE= of the service")]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB"
    small = soft != resource.RLIM_INFINITY and soft < 64 << 10
    remedy = "rings of many entries need more before Linux 5.12: ulimit -l" if small else ""
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
    rows = []
    folder = next((path for path in _TRACING if os.access(path / "events", os.R_OK)), None)
    if folder is None:
        rows.append(Row("tracepoints", WARN, "tracefs is not readable",
                        "as root: mount -t tracefs nodev /sys/kernel/tracing"))
    else:
        some = (folder / "events" / "io_uring").is_dir()
        rows.append(Row("tracepoints", OK, f"{folder}" + ("" if some else ", none of io_uring")))
    text = proc.read_text("/proc/sys/kernel/perf_event_paranoid")
    if text is not None:
        level = int(text)
        free = level <= 1 or os.geteuid() == 0
        rows.append(Row("perf events", OK if free else WARN, f"perf_event_paranoid {level}",
                        "" if free else "sysctl kernel.perf_event_paranoid=1"))
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

    root = default_root()
    folder = next(path for path in (root, *root.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    found = f"{root}, {free >> 20:,} MiB free"
    if not os.access(folder, os.W_OK):
        return [Row("runs", FAIL, f"{folder} is not writable", f"set {ROOT_VARIABLE} to a folder")]
    if free < _FREE_BYTES:
        return [Row("runs", WARN, found, f"make room, or set {ROOT_VARIABLE} to another folder")]
    return [Row("runs", OK, found)]


CHECKS: tuple[Callable[[], list[Row]], ...] = (
    _kernel, _cpus, _engine, _limits, _network, _clocks, _tracing, _programs, _store,
)


def summary(rows: list[Row]) -> dict[str, Any]:
    """For ``--json``: the rows, and how many of each state."""
    return {
        "rows": [row.to_dict() for row in rows],
        "counts": {state: sum(row.state == state for row in rows) for state in (OK, WARN, FAIL)},
    }

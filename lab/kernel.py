"""The wait bench in another kernel: QEMU boots the image, with the bench as its only program.

QEMU counts instructions instead of time (``-icount``): one is one virtual nanosecond. Neither a
busy host nor the caches change a figure then, so two runs of one image agree to the digit, and what
is left between two images is what their kernels do. They are not times: an instruction that waits
for memory, or leaves to a hypervisor, counts as much as one that does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import MachineError, RinglabError, UsageError
from engine.views import FEATURES, bit_names
from engine.waits import TRACES, Case, wait_error
from lab import machine, waits
from lab.progress import Progress, choose, shown
from lab.runs import RunStore, shown_path
from lab.scratch import scratch

EXPERIMENT = "expired-wait-kernel"
NATIVE = Path(__file__).resolve().parent.parent / "engine" / "native"
SOURCES = ("main_waits.c", "waits.c", "waits_helper.c", "waits_measure.c", "waits_napi.c",
           "waits_trace.c", "ring_wait.c")
QEMU = "qemu-system-x86_64"
# Timers of a kernel that has just booted run at the tick, until it trusts its clock.
SETTLE_S = 3
RUN_US = 2000
# MOST of main_waits.c.
MOST_TIMEOUTS = 16
TRAILER = "TRAILER!!!"
# What would make two boots differ: addresses, stacks and seeds drawn by chance, the time of day.
_SAME = "nokaslr norandmaps randomize_kstack_offset=off random.trust_cpu=off tsc=reliable"
# A tenth of a boot goes by while the kernel finds out that the emulated interrupts work.
_QUICK = "no_timer_check"
COMMAND_LINE = f"console=ttyS0 quiet panic=-1 {_SAME} {_QUICK}"
_ROW, _ABSENT, _KERNEL = "ringlab row ", "ringlab absent ", "ringlab kernel "
_DONE, _FAILED = "ringlab done", "ringlab failed"
_LAST_LINES = 6
_LOOK_S = 0.2
_VERSION_S = 10
# Booting takes about as long as measuring so many rows.
_BOOT_STEPS = 60
# Ways whose second thread would share the machine's one CPU: their figures mean nothing there.
_TWO_CPUS = ("eventfd_workaround", "eventfd_workaround_spin")


@dataclass(frozen=True)
class KernelFigures:
    """What one image measured: rows as those of ``ringlab waits``, and its release."""

    image: Path
    release: str
    rows: list[dict[str, Any]]
    absent: list[dict[str, Any]]
    seconds: float
    engine: Mapping[str, Any] = field(default_factory=dict)
    """liburing of the guest's program, and the features of the guest's rings."""

    @property
    def check(self) -> dict[str, Any]:
        """Whether this kernel looks at the clock before it sleeps."""
        return waits.kernel_check(self.rows)


@dataclass(frozen=True)
class Comparison:
    """One or two kernels, row by row; ``ratio`` is the second to the first.

    ``cut`` is what kept one of two from being measured; the figures are the other's then.
    """

    kernels: list[KernelFigures]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    cut: KeyboardInterrupt | Exception | None = None

    @property
    def absent(self) -> list[dict[str, Any]]:
        """What any of the kernels lacks, each way once."""
        return [{"kernel": one.release, **lack} for one in self.kernels for lack in one.absent]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "interrupted": None if self.cut is None else str(self.cut) or "by hand",
            "left_out": self.left_out,
            "kernels": [{"image": str(one.image), "release": one.release, "rows": one.rows,
                         "absent": one.absent, "kernel_check": one.check,
                         "seconds": one.seconds, "engine": dict(one.engine)}
                        for one in self.kernels],
            "rows": self.rows,
        }


def compare(
    images: Sequence[Path], plan: waits.Plan, *, limit_s: float = 120.0,
    progress: Progress | None = None,
) -> Comparison:
    """Measures the images, at the same time where there are CPUs for it: it changes no figure.

    UsageError for a plan of which a guest can measure nothing. MachineError, in one line, when a
    program or an image is missing, the guest dies (with its last console lines), or an image takes
    longer than ``limit_s`` seconds. Where the other of two images was measured all the same, it is
    returned, and the error is its ``cut``; Ctrl-C too.
    """
    cases = plan_cases(plan)
    require(images)
    with _workplace() as folder:
        archive = folder / "initramfs"
        archive.write_bytes(initramfs(program()))
        total = len(images) * (len(cases) + _BOOT_STEPS)
        with shown(progress or choose(), total, "kernel") as telling:
            measured, cut = _all_at_once(images, archive, plan, limit_s, _Shared(telling))
    if cut is not None and not measured:
        raise cut
    return Comparison(measured, side_by_side(measured), left_out(plan), cut)


def _all_at_once(
    images: Sequence[Path], archive: Path, plan: waits.Plan, limit_s: float, progress: Progress
) -> tuple[list[KernelFigures], KeyboardInterrupt | Exception | None]:
    """What was measured, and the first error. An image that dies does not end the other's guest."""
    stop = threading.Event()
    measured: list[KernelFigures] = []
    cut: KeyboardInterrupt | Exception | None = None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "ringlab-guest") as pool:
        jobs = [pool.submit(measure, image, archive, plan, limit_s, progress, stop)
                for image in images]
        try:
            wait(jobs)
        except KeyboardInterrupt as interrupt:
            cut = interrupt
        finally:
            stop.set()
    for job in jobs:
        try:
            measured.append(job.result())
        except Exception as error:
            cut = cut or error
    return measured, cut


class _Shared(Progress):
    """A progress that several threads may tell."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, threading.Lock()

    def step(self, done: str, count: int = 1) -> None:
        with self._lock:
            self._progress.step(done, count)


def store(compared: Comparison, limit_s: float, keep: RunStore | None = None) -> Path:
    """Keeps a comparison as a run of ``expired-wait-kernel``; returns its folder."""
    arms = [{"arm": row["way"], "policy": row["flags"], "windows": {}} for row in compared.rows]
    return (keep or RunStore()).write({
        "experiment": EXPERIMENT, "title": "Ways to wait in other kernels, under QEMU with icount",
        "parameters": {"images": [str(one.image.name) for one in compared.kernels],
                       "limit_s": limit_s, "run_us": RUN_US},
        # What rings can do is each guest's own; the one program is the same.
        "machine": machine.describe({"qemu": qemu_version(),
                                     "liburing": compared.kernels[0].engine.get("liburing")}),
        "arms": [dict(arm) for arm in arms],
        **compared.to_dict(),
    })


def qemu_version() -> str | None:
    """What QEMU says of itself; None where it says nothing."""
    try:
        done = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=False,
                              stdin=subprocess.DEVNULL, timeout=_VERSION_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None)


def side_by_side(kernels: Sequence[KernelFigures]) -> list[dict[str, Any]]:
    """The rows of either kernel by way, timeout and flags, as ``a``, ``b`` and their ratio."""
    keys = dict.fromkeys((row["way"], row["timeout_ns"], row["flags"])
                         for one in kernels for row in one.rows)
    rows = []
    for way, timeout_ns, flags in keys:
        row: dict[str, Any] = {"way": way, "timeout_ns": timeout_ns, "flags": flags,
                               "a": None, "b": None, "ratio": None}
        for mark, one in zip("ab", kernels, strict=False):
            row[mark] = waits.find(one.rows, way, timeout_ns, flags)
        if row["a"] and row["b"]:
            row["ratio"] = row["b"]["us_p50"] / row["a"]["us_p50"]
        rows.append(row)
    return rows


def require(images: Sequence[Path]) -> None:
    """Raises MachineError or UsageError for what is missing, before anything is built."""
    if shutil.which(QEMU) is None:
        raise MachineError(f"{QEMU} is not installed (apt-get install --no-install-recommends "
                           "qemu-system-x86; dnf install qemu-system-x86-core)")
    for image in images:
        shown = shown_path(image)
        try:
            with image.open("rb") as file:
                file.seek(0x202)
                magic = file.read(4)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise UsageError(f"there is no kernel image {shown}; give a bzImage, such as "
                             "arch/x86/boot/bzImage of a build or /boot/vmlinuz-VERSION") from None
        except OSError as error:
            raise MachineError(f"cannot read {shown}: {error.strerror}") from None
        if magic != b"HdrS":
            raise UsageError(f"{shown} is no bzImage (an uncompressed vmlinux will not do)")


# ---- the guest's one program -----------------------------------------------------------------


@functools.cache
def program() -> bytes:
    """The program, built once a process."""
    with _workplace() as folder:
        return build(folder / "init").read_bytes()


@contextlib.contextmanager
def _workplace() -> Iterator[Path]:
    """A folder for what a guest needs; MachineError, in one line, where the disk refuses."""
    try:
        with scratch("ringlab-guest-") as name:
            yield Path(name)
    except OSError as error:
        if isinstance(error, RinglabError):
            raise
        raise MachineError("cannot prepare the guest among the temporary files: "
                           f"{error.strerror}; make room, or set TMPDIR to another folder"
                           ) from None


def build(target: Path) -> Path:
    """The wait bench as a static program; MachineError names what the build lacks."""
    from engine import build_native

    compiler = build_native.compiler()
    if not compiler:
        raise MachineError(f"no C compiler{build_native.asked_for()}: install or name one "
                           f"({build_native.PACKAGES_HINT})")
    words = [*compiler, "-std=gnu11", "-O2", "-static", f"-I{NATIVE}",
             *(f"-I{folder}" for folder in build_native.prefix_dirs("include")),
             *build_native.pkg_config("--cflags"),
             *(str(NATIVE / name) for name in SOURCES), "-o", str(target),
             *(f"-L{folder}" for folder in build_native.prefix_dirs("lib")),
             *(build_native.pkg_config("--static", "--libs") or ["-luring"]), "-lpthread"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MachineError(f"the C compiler {compiler[0]} does not run: {error.strerror}") from None
    if done.returncode:
        raise MachineError(_build_failure(done.stderr))
    return target


def _build_failure(told: str) -> str:
    lacking = {"-lc": "the static C library (apt: libc6-dev, dnf: glibc-static)",
               "-luring": "a static liburing (apt: liburing-dev; conda has none)",
               "-lpthread": "the static C library (apt: libc6-dev, dnf: glibc-static)"}
    for library, package in lacking.items():
        if f"cannot find {library}" in told or f"unable to find library {library}" in told:
            return f"the guest's program cannot be linked without {package}"
    lines = [line for line in told.splitlines() if "error" in line] or told.splitlines() or ["?"]
    return f"the guest's program does not build: {lines[0]}"


def initramfs(init: bytes) -> bytes:
    """A cpio archive (newc) that holds a program as ``/init``, and a console for it to speak."""
    entries = [
        _entry("dev", 0o040755), _entry("proc", 0o040755), _entry("sys", 0o040755),
        _entry("dev/console", 0o020600, device=(5, 1)),
        _entry("init", 0o100755, init), _entry(TRAILER, 0),
    ]
    return b"".join(entries)


def _entry(name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return _padded(head) + _padded(content)


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)


# ---- the guest -------------------------------------------------------------------------------


def plan_cases(plan: waits.Plan) -> list[Case]:
    """What a guest measures of a plan: all but what needs a network or a second CPU.

    UsageError where nothing of it is left, and for more timeouts than the guest's program takes.
    """
    if len(plan.timeouts_ns) > MOST_TIMEOUTS:
        raise UsageError(f"{len(plan.timeouts_ns)} timeouts are too many: give up to "
                         f"{MOST_TIMEOUTS}")
    wanted = [case for case in plan.cases() if case.way not in _TWO_CPUS and not case.napi_us
              and case.timeout_ns in plan.timeouts_ns]
    if not any(not plan.ways or case.way in plan.ways for case in wanted):
        raise waits.nothing_left(left_out(plan))
    return wanted


def left_out(plan: waits.Plan) -> list[dict[str, Any]]:
    """What a guest measures nothing of, with the reasons, as :meth:`waits.Plan.left_out`."""
    lacking = [{"way": name, "timeouts_ns": list(plan.timeouts_ns), "flags": list(plan.flags),
                "whole": True, "reason": "its second thread would share the guest's one CPU"}
               for name in _TWO_CPUS if not plan.ways or name in plan.ways]
    return [one for one in plan.left_out() if one["way"] not in _TWO_CPUS] + lacking


def command(image: Path, archive: Path, plan: waits.Plan) -> list[str]:
    """The QEMU command line that boots an image."""
    cases = plan_cases(plan)
    arguments = [
        f"ways={','.join(dict.fromkeys(case.way for case in cases))}",
        f"timeouts={','.join(str(one) for one in plan.timeouts_ns)}",
        f"setups={','.join(plan.flags)}", f"run_us={RUN_US}", f"settle_s={SETTLE_S}",
    ]
    return [
        QEMU, "-machine", "q35", "-accel", "tcg", "-cpu", "qemu64", "-smp", "1", "-m", "256",
        "-icount", "shift=0,sleep=off", "-rtc", "base=2026-01-01,clock=vm", "-nodefaults",
        "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none", "-net", "none",
        "-serial", "stdio", "-kernel", str(image), "-initrd", str(archive),
        "-append", f"{COMMAND_LINE} -- {' '.join(arguments)}",
    ]


def measure(
    image: Path, archive: Path, plan: waits.Plan, limit_s: float, progress: Progress,
    stop: threading.Event | None = None,
) -> KernelFigures:
    """Boots one image and reads what it measures; gives up when ``stop`` is set."""
    progress.step(f"{image.name}: booting", 0)
    begun = time.monotonic()
    lines: list[str] = []

    def read(line: str) -> bool:
        lines.append(line)
        if line.startswith(_KERNEL):
            progress.step(f"{image.name}: letting it settle", _BOOT_STEPS)
        elif line.startswith((_ROW, _ABSENT)):
            row = json.loads(line.partition("{")[1] + line.partition("{")[2])
            progress.step(f"{image.name}: {row['way']}, {waits.label(row['timeout_ns'])}")
        return line in (_DONE, _FAILED)

    with _guest(command(image, archive, plan)) as process:
        ended = _console(process, read, begun + limit_s, stop or threading.Event())
    seconds = time.monotonic() - begun
    if _DONE not in lines:
        raise MachineError(_death(image, lines, ended, limit_s))
    told: dict[str, Any] = next(
        (json.loads(line[len(_KERNEL):]) for line in lines if line.startswith(_KERNEL)), {})
    rows = [json.loads(line[len(_ROW):]) for line in lines if line.startswith(_ROW)]
    absent = [json.loads(line[len(_ABSENT):]) for line in lines if line.startswith(_ABSENT)]
    return KernelFigures(image, told.get("release", "?"), _rows(rows), _absent(absent), seconds,
                         _engine(told))


def _engine(told: Mapping[str, Any]) -> dict[str, Any]:
    bits = told.get("features")
    features = None if bits is None else bit_names(int(bits), FEATURES)
    return {"liburing": told.get("liburing"), "features": features}


@contextlib.contextmanager
def _guest(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
    except OSError as error:
        raise MachineError(f"{QEMU} does not start: {error.strerror}") from None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def _console(
    process: subprocess.Popen[bytes], read: Callable[[str], bool], until: float,
    stop: threading.Event,
) -> bool:
    """Hands on the console's lines until ``read`` has its last one, or to their end.

    False when the time was up before that. A kernel without ACPI cannot switch the machine off, so
    the end may never come.
    """
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        while True:
            if stop.is_set() or time.monotonic() > until:
                return False
            if not ready.select(_LOOK_S):
                continue
            got = os.read(descriptor, 65536)
            *whole, rest = (rest + got).split(b"\n")
            for line in whole if got else [*whole, rest]:
                if read(line.decode(errors="replace").strip("\r\0 ")):
                    return True
            if not got:
                return True


def _death(image: Path, lines: Sequence[str], ended: bool, limit_s: float) -> str:
    failed = [json.loads(line[len(_ABSENT):]) for line in lines if line.startswith(_ABSENT)]
    failed = [one for one in failed if one["error"] != -95]
    if _FAILED in lines and failed:
        error = wait_error(-failed[0]["error"], failed[0]["where"])
        return f"{image.name}: a measurement failed in the guest: {error}"
    what = "the guest died" if ended else f"not done after {limit_s:.0f} s (see --limit)"
    what = "the guest's program failed" if _FAILED in lines else what
    told = [line for line in lines if line and not line.startswith("ringlab ")][-_LAST_LINES:]
    last = " | ".join(told) or "it printed nothing: no serial console (CONFIG_SERIAL_8250_CONSOLE)"
    return f"{image.name}: {what}; its console ends: {last}"


def _rows(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The guest's rows in the form of ``ringlab waits``, with ratios to its own epoll_wait."""
    base = next((row["ns_p50"] for row in told
                 if (row["way"], row["timeout_ns"]) == (waits.BASE.way, 0)), None)
    return [{
        "way": row["way"], "timeout_ns": row["timeout_ns"], "flags": row["flags"], "napi_us": 0,
        "us_p50": row["ns_p50"] / 1e3, "us_p99": row["ns_p99"] / 1e3,
        "overrun_us_p50": (row["ns_p50"] - row["timeout_ns"]) / 1e3, "cpu_us": row["cpu_ns"] / 1e3,
        "voluntary_switches": row["voluntary"], "involuntary_switches": row["involuntary"],
        **{name: row[name] for name in TRACES},
        "ratio_to_epoll_wait_0": row["ns_p50"] / base if base else None,
        "waits": row["waits"],
    } for row in told]


def _absent(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = {(one["way"], one["flags"], one["where"]): None for one in told}
    return [{"way": way, "flags": flags, "napi_us": 0, "reason": reason}
            for way, flags, reason in found]

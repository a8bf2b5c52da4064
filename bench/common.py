"""What the benchmarks share: pinned processes, CPU of a process, interleaved rounds, ratios."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab import proc

SERVER_CPU, LOAD_CPU = 0, 1


class Missing(Exception):
    """A tool or a machine that this benchmark needs is not there; the message says which."""


def need(*tools: str) -> None:
    """Raise Missing unless every program is on the path."""
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        raise Missing(f"needs {', '.join(absent)} (Debian: apt-get install {' '.join(absent)})")
    if len(os.sched_getaffinity(0)) < 2:
        raise Missing("needs two CPUs, one for the server and one for the load")


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process that are alive, from schedstat (ns clocks)."""
    figures = [proc.schedstat(pid, tid) for tid in proc.tasks(pid)]
    return sum(f.run_ns for f in figures if f) / 1e9


@contextmanager
def running(command: Sequence[str | Path], cpu: int, ready: Callable[[], bool]) -> Iterator[int]:
    """Run a command pinned to one CPU until the block ends; yields its pid once it is ready."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
    )
    try:
        limit = time.monotonic() + 15
        while not ready():
            if process.poll() is not None or time.monotonic() > limit:
                raise Missing(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ringlab() -> str:
    """The command line of the environment that runs the benchmark."""
    return str(Path(sys.executable).parent / "ringlab")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median [min to max]`` of some ratios."""
    return (
        f"{statistics.median(values):.{digits}f} "
        f"[{min(values):.{digits}f} to {max(values):.{digits}f}]"
    )

"""Runs all tests: those that only compute beside all the rest, those of the pages two at a time.

    python -m tests.run [PYTEST ARGUMENT ...]

What only computes (marker ``computes``) gets the CPU time that nobody else asks for, SCHED_IDLE,
so that the rest still measures what it means to. What drives a browser (``browser``) mostly waits
for it, and waits patiently. All else looks at a clock or a loop, and has nothing else that does so
beside it. With arguments it is pytest with these.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

PYTEST = (sys.executable, "-m", "pytest")
# What waits until others leave it a CPU takes longer, and that says nothing.
COMPUTES = ("-m", "computes", "--timeout=900")
# About half of the time that all pages take.
PANEL = "tests/browser/test_live.py"
PAINTED = "tests/test_bench.py"
HALF = ("-m", "browser", PANEL, PAINTED)
PAGES = ("-m", "browser", f"--ignore={PANEL}", f"--ignore={PAINTED}")
REST = ("-m", "not computes and not browser")


def idle() -> None:
    """Makes this process one that runs when no other wants to."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def wanted(pid: int) -> None:
    """Ends that, where it is allowed."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


class Beside:
    """A pytest whose output is kept for its end."""

    def __init__(self, output: IO[bytes], name: str, *arguments: str, when_idle: bool) -> None:
        self._output, self._name = output, name
        self._process = subprocess.Popen(
            [*PYTEST, "-o", f"cache_dir=.pytest_cache/{name}", *arguments], stdout=output,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            preexec_fn=idle if when_idle else None)

    def end(self) -> int:
        """Waits for it and prints what it said; its exit code."""
        wanted(self._process.pid)
        code = self._process.wait()
        self._output.seek(0)
        print(f"\nBeside them, {self._name}:\n", flush=True)
        sys.stdout.buffer.write(self._output.read())
        sys.stdout.flush()
        return code

    def stop(self) -> None:
        """It is not waited for any more."""
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def beside(name: str, *arguments: str, when_idle: bool = False) -> Iterator[Beside]:
    """Another pytest while this one goes on; it does not outlive the block."""
    with tempfile.TemporaryFile() as output:
        other = Beside(output, name, *arguments, when_idle=when_idle)
        try:
            yield other
        finally:
            other.stop()


def main(arguments: list[str]) -> int:
    """The exit code of pytest; of several, the first that is not 0."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    with beside("computes", *COMPUTES, when_idle=True) as computing:
        with beside("pages", *PAGES) as pages:
            codes = [subprocess.call([*PYTEST, *HALF]), pages.end()]
        codes.append(subprocess.call([*PYTEST, *REST]))
        codes.append(computing.end())
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

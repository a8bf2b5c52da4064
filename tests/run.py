"""Runs all tests: those that look at a clock or a loop; and beside them those that only compute.

    python -m tests.run [PYTEST ARGUMENT ...]

The second kind (marker ``computes``) gets the CPU time that nobody else asks for, SCHED_IDLE, so
that the first kind still measures what it means to. With arguments it is pytest with these.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

PYTEST = (sys.executable, "-m", "pytest")
MARKER = "computes"
# What waits until others leave it a CPU takes longer, and that says nothing.
PATIENT = ("--timeout=900", "-o", "cache_dir=.pytest_cache/beside")


def idle() -> None:
    """Makes this process one that runs when no other wants to."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def wanted(pid: int) -> None:
    """Ends that, where it is allowed."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


def main(arguments: list[str]) -> int:
    """The exit code of pytest; of two, the first that is not 0."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen([*PYTEST, "-m", MARKER, *PATIENT], stdout=output,
                                  stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  preexec_fn=idle)
        try:
            code = subprocess.call([*PYTEST, "-m", f"not {MARKER}"])
            wanted(beside.pid)
            other = beside.wait()
        finally:
            beside.terminate()
            beside.wait()
        output.seek(0)
        print(f"\nBeside them, those marked {MARKER}:\n", flush=True)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return code or other


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

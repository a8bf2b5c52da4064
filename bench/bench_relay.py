"""The relay beside Debian's HAProxy: rate, and CPU per MB or per request, as ratios.

One thread each, on the same CPU; the origin (a ring server) and wrk on the other; rounds
interleaved, so that a machine that changes its speed meanwhile changes both. Origin or wrk is often
the limit: the figure to read is the CPU. Both open a connection to the origin for each request, and
both splice. Counters, policies and the 100 Hz sampler of the relay are on.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.bench_http import answers, free_port, load, measure
from bench.common import LOAD_CPU, SERVER_CPU, need, ringlab, running, spread
from lab.haproxy import Haproxy, version

CONNECTIONS = 64
SMALL, LARGE = 100, 1_000_000
POLICIES = ("after", "later", "no-splice")


@dataclass(frozen=True)
class Case:
    """One load: its name, its size, and the unit in which CPU is told, in requests."""

    name: str
    size: int
    unit: str
    per: float


CASES = (
    Case("1 MB", LARGE, "MB", LARGE / 1e6),
    Case("small", SMALL, "request", 1.0),
)


def rounds(case: Case, ports: Sequence[tuple[str, int, int]], n: int, seconds: int) -> None:
    """Measure one load on HAProxy and every policy in turn, and print their rows."""
    path, nothing = f"/sync?size={case.size}", Path()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in ports}
    for _ in range(n):
        for name, pid, port in ports:
            run = partial(load, port, path, 1, seconds, nothing)
            found[name].append(measure(pid, run, seconds))
    theirs = found["haproxy"]
    for name, mine in found.items():
        cpu = [own[1] / other[1] for own, other in zip(mine, theirs, strict=True)]
        rate = [own[0] / other[0] for own, other in zip(mine, theirs, strict=True)]
        print(f"{case.name:8} {name:12} {spread(cpu):24} {spread(rate):24} "
              f"{statistics.median(one[0] for one in mine):>9,.0f} "
              f"{statistics.median(one[1] for one in mine) / case.per:>9.1f} us/{case.unit}",
              flush=True)


def main(n: int = 5, seconds: int = 2) -> None:
    """Print the table."""
    need("haproxy", "wrk", "taskset")
    with ExitStack() as stack:
        origin = free_port()
        stack.enter_context(running([ringlab(), "serve", "--port", str(origin)], LOAD_CPU,
                                    lambda: answers(origin)))
        real = stack.enter_context(Haproxy(f"127.0.0.1:{origin}"))
        with suppress(ProcessLookupError):
            os.sched_setaffinity(real.pid, {SERVER_CPU})
        ports = [("haproxy", real.pid, real.port)]
        for policy in POLICIES:
            port = free_port()
            command = [ringlab(), "relay", "--origin", f"127.0.0.1:{origin}", "--port", str(port),
                       "--preset", policy]
            pid = stack.enter_context(running(command, SERVER_CPU, partial(answers, port)))
            ports.append((policy, pid, port))
        print(f"{CONNECTIONS} connections, {n} interleaved rounds of {seconds} s; ratios are to "
              f"HAProxy {version()}, median [min to max]; aim: 1.0 or better")
        print(f"{'load':8} {'policy':12} {'times its CPU':24} {'times its rate':24} "
              f"{'req/s':>9} {'CPU':>9}")
        for case in CASES:
            rounds(case, ports, n, seconds)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

"""What sampling at 100 Hz costs: server CPU per request with it and without, interleaved.

Beside the sampler's own share of a core stands what a thread costs here that wakes as often and
does nothing else: on a virtual machine the wake-up alone may cost more than the aim.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.bench_http import PIPELINE, answers, free_port, load, measure
from bench.common import SERVER_CPU, Missing, need, ringlab, running, spread
from engine import RingServer
from lab import proc

HZ = 100


def share_of(pid: int, name: str, seconds: float) -> float:
    """Per cent of a core that a thread of that name takes."""
    found = [t for t in proc.tasks(pid)
             if Path(f"/proc/{pid}/task/{t}/comm").read_text().strip() == name]
    if not found:
        raise Missing(f"process {pid} has no thread {name}")
    before = proc.schedstat(pid, found[0])
    time.sleep(seconds)
    after = proc.schedstat(pid, found[0])
    if before is None or after is None:
        raise Missing(f"thread {name} ended")
    return (after.run_ns - before.run_ns) / 1e7 / seconds


def bare_wakes(seconds: float) -> float:
    """Per cent of a core of an idle loop that wakes HZ times a second and finds nothing."""
    with RingServer("fixed", wait_cap_ms=1000 / HZ, sample_hz=0) as server:
        time.sleep(0.3)
        before = server.counters()["thread_cpu_ns"]
        time.sleep(seconds)
        return (server.counters()["thread_cpu_ns"] - before) / 1e7 / seconds


def main(n: int = 6, seconds: int = 1) -> None:
    """Print the ratio, and both shares."""
    need("wrk", "taskset")
    ports = {hz: free_port() for hz in (0, HZ)}
    ratios = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        script = Path(name) / "pipeline.lua"
        script.write_text(PIPELINE)
        pids = {
            hz: stack.enter_context(running(
                [ringlab(), "serve", "--port", str(port), "--response-size", "24",
                 "--sample-hz", str(hz)], SERVER_CPU, lambda port=port: answers(port)))
            for hz, port in ports.items()
        }
        for _ in range(n):
            cost = {
                hz: measure(pids[hz], lambda port=ports[hz]: load(port, "/", 1, seconds, script),
                            seconds)[1]
                for hz in (0, HZ)
            }
            ratios.append(cost[HZ] / cost[0])
        own = share_of(pids[HZ], "rl-sampler", 2.0)
    print(f"CPU per request with sampling at {HZ} Hz to without, median [min to max] of {n}: "
          f"{spread(ratios, 3)} (aim: under 1.01)")
    print(f"the sampler's own share of a core, server idle: {own:.2f} % (aim: under 0.1); a loop "
          f"that wakes {HZ} times a second for nothing: {bare_wakes(2.0):.2f} %")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

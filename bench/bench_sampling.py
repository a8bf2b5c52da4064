"""What sampling at 100 Hz costs: server CPU per request with it and without, interleaved.

And the CPU of an idle worker that is sampled, with what reading it ten times a second takes. Beside
it stands what a thread would cost here that wakes as often and does nothing else.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.bench_http import PIPELINE, answers, free_port, load, measure
from bench.common import SERVER_CPU, need, ringlab, running, spread
from engine import RingServer

HZ = 100


def shares(seconds: float) -> tuple[float, float]:
    """Per cent of a core of an idle worker that is sampled, and of a thread that reads it."""
    with RingServer(sample_hz=HZ) as server:
        time.sleep(0.3)
        before = server.counters()["thread_cpu_ns"]
        reading, until, samples = 0, time.monotonic() + seconds, 0
        while time.monotonic() < until:
            time.sleep(0.1)
            begun = time.thread_time_ns()
            samples += len(server.samples())
            reading += time.thread_time_ns() - begun
        assert samples >= seconds * HZ, samples
        worker = server.counters()["thread_cpu_ns"] - before
        return worker / 1e7 / seconds, reading / 1e7 / seconds


def bare_wakes(seconds: float) -> float:
    """Per cent of a core of an idle loop that wakes HZ times a second and finds nothing."""
    with RingServer("fixed", wait_cap_ms=1000 / HZ, sample_hz=0) as server:
        time.sleep(0.3)
        before = server.counters()["thread_cpu_ns"]
        time.sleep(seconds)
        return (server.counters()["thread_cpu_ns"] - before) / 1e7 / seconds


def main(n: int = 12, seconds: int = 1) -> None:
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
    print(f"CPU per request with sampling at {HZ} Hz to without, median [min to max] of {n}: "
          f"{spread(ratios, 3)} (aim: under 1.01)")
    worker, reader = shares(2.0)
    print(f"% of a core, an idle worker sampled at {HZ} Hz: {worker:.3f} (aim: under 0.1); reading "
          f"the samples from Python 10 times a second: {reader:.2f}; a thread that wakes {HZ} "
          f"times a second for nothing: {bare_wakes(2.0):.2f}")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

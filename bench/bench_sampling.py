"""What sampling at 100 Hz costs: throughput with and without it, in one run, interleaved."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from bench.bench_http import PIPELINE, load
from bench.common import need, spread
from engine import RingServer


def main(n: int = 8, seconds: int = 1) -> None:
    """Print the ratio of the rates."""
    need("wrk", "taskset")
    ratios = []
    with tempfile.TemporaryDirectory() as name, RingServer(response_size=24) as server:
        script = Path(name) / "pipeline.lua"
        script.write_text(PIPELINE)
        for _ in range(n):
            rates = []
            for hz in (0, 100):
                server.sample_rate(hz)
                rates.append(load(server.port, "/", 1, seconds, script))
            ratios.append(rates[1] / rates[0])
    print(f"rate with sampling at 100 Hz to without, median [min to max] of {n}: "
          f"{spread(ratios, 3)} (aim: over 0.99); {threading.active_count()} Python thread")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

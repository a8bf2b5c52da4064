"""What the live panel does to the worker, what it costs, and how fast a control gets through.

The worker's figures are counters read before and after, so they cost it nothing. Open and closed
stretches alternate in one run, because a shared machine drifts. There is no browser here, which is
another process: the widget's Python half runs with a page that reports what it sees.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

from bench.common import Missing, spread
from engine import RingServer
from engine.errors import MachineError
from lab.live.panel import LivePanel
from lab.measure import process_cpu_ns

SECONDS = 2.0
# What opening costs is over, and the panel has begun to add up what it costs to run.
SETTLED = 4.0
AIM_CORE, AIM_ENGINE_MS, AIM_FRAME_MS = 3.0, 50.0, 300.0


def main(rounds: int = 6) -> None:
    """Print the ratios and the latencies."""
    try:
        server = RingServer("shipped", max_connections=64).start()
    except MachineError as reason:
        raise Missing(str(reason)) from None
    with server:
        waits(server, rounds)
        latency(server)


def waits(server: RingServer, rounds: int) -> None:
    """Waits per second with the panel open against closed, idle; and the panel's own CPU."""
    ratios, costs, whole = [], [], []
    for _ in range(rounds):
        closed = rate(server)
        with opened(server) as panel:
            see(panel, SETTLED)
            begun = time.monotonic(), process_cpu_ns(os.getpid()), worker_ns(server)
            before = server.counters()["waits"]
            see(panel, SECONDS)
            seconds = time.monotonic() - begun[0]
            after = server.counters()["waits"]
            assert panel.feed.cost > 0, "it has not worked out its cost yet"
            costs.append(panel.feed.cost * 100)
            spent = process_cpu_ns(os.getpid()) - begun[1] - (worker_ns(server) - begun[2])
            whole.append(spent / 1e7 / seconds)
        ratios.append((after - before) / seconds / closed)
    print(f"waits/s of an idle worker, panel open to closed, median [min to max] of {rounds} "
          f"rounds of {SECONDS:g} s: {spread(ratios, 3)}")
    print(f"feeding and sending threads, % of a core: {spread(costs)} (aim: under {AIM_CORE:g})")
    print(f"the process besides the worker, % of a core: {spread(whole)}")


def latency(server: RingServer, tries: int = 40) -> None:
    """From a page's message to the engine, and to the frame that shows it (sent, not painted)."""
    engine, frame = [], []
    with opened(server) as panel:
        frames: list[float] = []
        post = panel.view.post

        def spy(message: dict[str, object], buffer: bytes | None = None) -> bool:
            if message["kind"] == "rows":
                frames.append(time.monotonic())
            return post(message, buffer)

        panel.view.post = spy  # type: ignore[method-assign,assignment]
        see(panel, 1.0)
        for number in range(tries):
            cap = 2.0 if number % 2 == 0 else 25.0
            begun = time.monotonic()
            panel._received({"kind": "set", "name": "wait_cap_ms", "value": cap})
            while server.settings["wait_cap_ms"] != cap:
                time.sleep(0.0002)
            engine.append((time.monotonic() - begun) * 1e3)
            # The change's mark goes out with the first row that was cut after it.
            see(panel, 0.3)
            frame.append((next(at for at in frames if at > begun + 0.02) - begun) * 1e3)
    print(f"control to engine, ms, median [min to max] of {tries}: {spread(engine)} "
          f"(aim: under {AIM_ENGINE_MS:g})")
    slow = statistics.quantiles(frame, n=10)[-1]
    print(f"control to the frame that shows it, ms: {spread(frame)}, p90 {slow:.0f} "
          f"(aim: under {AIM_FRAME_MS:g} with painting)")


def opened(server: RingServer) -> LivePanel:
    """A panel on the server, with a view that is there."""
    panel = LivePanel(server)
    panel.watch.hello("bench")
    return panel


def see(panel: LivePanel, seconds: float) -> None:
    """Time passes; the view reports what it sees, as a page does."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        panel.watch.report("seen", "bench")


def rate(server: RingServer) -> float:
    """Waits per second of the worker over a stretch without a panel."""
    before, begun = int(server.counters()["waits"]), time.monotonic()
    time.sleep(SECONDS)
    return (int(server.counters()["waits"]) - before) / (time.monotonic() - begun)


def worker_ns(server: RingServer) -> int:
    """CPU of the worker's thread so far."""
    return int(server.sample()["thread_cpu_ns"])


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

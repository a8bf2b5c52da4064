"""What the live panel does to a loop, what it costs, and how fast a control gets through.

Worker and relay, each idle, and in a spin. The loop's figures are counters read before and after,
so they cost it nothing. Open and closed stretches alternate in one run, because a shared machine
drifts; waits per second of the loop's CPU leave out what neighbours take of a spin's core. There is
no browser here, which is another process: the widget's Python half runs with a page that reports
what it sees.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import closing

from bench.common import Missing, spread
from engine import RingServer, SpliceRelay
from engine.base import Engine
from engine.errors import MachineError
from lab.live.case import case_for
from lab.live.panel import LivePanel
from lab.live.party import Party
from lab.measure import process_cpu_ns
from lab.origin_process import OriginProcess

SECONDS = 2.0
# What opening costs is over, and the panel has begun to add up what it costs to run.
SETTLED = 4.0
ASLEEP = 5.0  # waits a second below which a ratio says nothing
AIM_CORE, AIM_ENGINE_MS, AIM_FRAME_MS = 3.0, 50.0, 300.0


def main(rounds: int = 6) -> None:
    """Print the ratios and the latencies."""
    try:
        server = RingServer("shipped", max_connections=64).start()
    except MachineError as reason:
        raise Missing(str(reason)) from None
    with server:
        waits(server, "an idle worker", rounds)
        stalled(server, "async+pipelined", "a worker that spins", rounds)
        latency(server)
    with OriginProcess() as origin, SpliceRelay(origin.target, "before") as relay:
        waits(relay, "an idle relay", rounds)
        stalled(relay, "a", "a relay that spins", rounds)


def stalled(engine: Engine, arm: str, what: str, rounds: int) -> None:
    """The same while a client stalls as an arm of the engine's case does."""
    case = case_for(engine)
    values = case.first_values(case.controls(case.experiment.parameters), None)
    values |= case.presets[arm].sets
    engine.set(None, **case.settings(values, arm))
    with closing(Party(engine, case.connected)) as party:
        if troubles := party.play(case.scene(arm, values, engine), 1):
            raise Missing(f"{what} did not come about: {'; '.join(troubles)}")
        waits(engine, what, rounds)


def waits(engine: Engine, what: str, rounds: int) -> None:
    """Waits per second with the panel open against closed; and the panel's own CPU."""
    ratios, dearer, costs, whole, woken = [], [], [], [], [0, 0]
    for _ in range(rounds):
        closed = Stretch(engine)
        time.sleep(SECONDS)
        closed.end()
        with opened(engine) as panel:
            see(panel, SETTLED)
            spent, open_ = process_cpu_ns(os.getpid()), Stretch(engine)
            see(panel, SECONDS)
            open_.end()
            spent = process_cpu_ns(os.getpid()) - spent - open_.cpu_ns
            assert panel.feed.cost > 0, "it has not worked out its cost yet"
            costs.append(panel.feed.cost * 100)
            whole.append(spent / 1e7 / open_.seconds)
        if closed.per_s > ASLEEP:
            ratios.append(open_.per_s / closed.per_s)
            dearer.append(open_.per_cpu / closed.per_cpu)
        woken = [woken[0] + closed.waits, woken[1] + open_.waits]
    print(f"{what}, panel open to closed, median [min to max] of {rounds} rounds of {SECONDS:g} s:")
    if ratios:
        print(f"  waits/s: {spread(ratios, 3)}; waits per CPU second: {spread(dearer, 3)}")
    else:
        print(f"  waits in all, of a loop that sleeps: {woken[0]} closed, {woken[1]} open")
    print(f"  feeding and sending threads, % of a core: {spread(costs)} (aim: under {AIM_CORE:g})")
    print(f"  the process besides the loop, % of a core: {spread(whole)}", flush=True)


class Stretch:
    """What a loop does from now until :meth:`end`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.waits, self.cpu_ns, self.seconds = self._now()

    def end(self) -> None:
        """Makes what was read the difference to now."""
        waits, cpu_ns, seconds = self._now()
        self.waits, self.cpu_ns = waits - self.waits, cpu_ns - self.cpu_ns
        self.seconds = seconds - self.seconds

    @property
    def per_s(self) -> float:
        """Waits a second."""
        return self.waits / self.seconds

    @property
    def per_cpu(self) -> float:
        """Waits a second of the loop's own CPU."""
        return self.waits * 1e9 / max(1, self.cpu_ns)

    def _now(self) -> tuple[int, int, float]:
        waits = int(self._engine.counters()["waits"])
        return waits, int(self._engine.sample()["thread_cpu_ns"]), time.monotonic()


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


def opened(engine: Engine) -> LivePanel:
    """A panel on the engine, with a view that is there."""
    panel = LivePanel(engine)
    panel.watch.hello("bench")
    return panel


def see(panel: LivePanel, seconds: float) -> None:
    """Time passes; the view reports what it sees, as a page does."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        panel.watch.report("seen", "bench")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

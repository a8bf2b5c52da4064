"""How far two runs of the wait bench agree, and its own cost in the shortest wait."""

from __future__ import annotations

import sys

from bench.common import Missing, spread
from engine.errors import MachineError
from engine.waits import Case, measure
from lab import waits

SHOWN = ("epoll_wait", "io_uring_get_events", "io_uring_peek_cqe", "io_uring_wait_cqe_timeout",
         "ring_worker_kernel", "ring_worker_poll")


def main(rounds: int = 5, run_ms: int = 20) -> None:
    """Print, for the zero-timeout rows, the second run to the first; then the bench's share."""
    try:
        measure(Case(waits.RING_WAIT, 0), 0.001)
    except MachineError as reason:
        raise Missing(str(reason)) from None
    plan = waits.Plan(ways=SHOWN, timeouts_ns=(0, 50_000), flags=("none",), rounds=rounds,
                      run_s=run_ms / 1e3, trace=False)
    first, second = waits.run(plan), waits.run(plan)
    times, ratios, own = [], [], []
    for row in first.rows:
        again = second.row(row["way"], row["timeout_ns"])
        assert again is not None
        times.append(again["us_p50"] / row["us_p50"])
        ratios.append(again["ratio_to_epoll_wait_0"] / row["ratio_to_epoll_wait_0"])
        own.append(row["own_us"] / row["us_p50"])
        print(f"{row['way']:28} {waits.label(row['timeout_ns']):>6}  {row['us_p50']:9.3f} us, "
              f"then {again['us_p50']:9.3f} us: {times[-1]:.3f} of it; between rounds "
              f"{row['us_highest'] / row['us_lowest']:.2f}; own cost {own[-1]:.2%}")
    print(f"second run to first, time of a wait, median [min to max] of {len(times)} rows: "
          f"{spread(times, 3)} (aim on a quiet machine: 0.90 to 1.10)")
    print(f"the same, of the ratios to epoll_wait(0): {spread(ratios, 3)}")
    print(f"own cost, worst row: {max(own):.2%} (aim: under 2%)")
    for line in {*first.warnings, *second.warnings}:
        print(f"warning: {line}")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

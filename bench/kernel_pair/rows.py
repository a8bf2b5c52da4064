"""The figures of a pair of kernels as rows of ``data/reference``, from comparisons that agree.

    ringlab kernel --image before.bzImage --against after.bzImage --json > 1.json
    ... and again, into 2.json
    python bench/kernel_pair/rows.py 1.json 2.json > data/reference/expired_wait_pair.csv
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lab import reference, waits

QUANTITIES = {"us_p50": ("us_per_wait", "us"),
              "voluntary_switches": ("voluntary_switches_per_wait", "1/wait"),
              "timer_starts": ("timer_starts_per_wait", "1/wait")}
BUILDS = {"a": "before", "b": "with the check"}
NOTE = "an instruction count, not a real time"


def rows(comparisons: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """One row a figure; ValueError where the comparisons differ, or are not of such a pair."""
    first = comparisons[0]
    for one in comparisons[1:]:
        if one["rows"] != first["rows"]:
            raise ValueError("the comparisons differ; they should agree to the digit")
    checks = [one["kernel_check"]["has_check"] for one in first["kernels"]]
    if checks != [False, True]:
        raise ValueError("the first kernel is to be without the check, the second with it")
    release = first["kernels"][0]["release"]
    for row in first["rows"]:
        for mark, build in BUILDS.items():
            for name, (quantity, unit) in QUANTITIES.items():
                yield {
                    "case": "expired-wait", "source": reference.BY_THE_LAB,
                    "machine": f"QEMU icount, minimal kernel {release}", "build": build,
                    "arm": f"{row['way']} {waits.label(row['timeout_ns'])}", "window": "wait",
                    "quantity": quantity, "unit": unit, "value": round(row[mark][name], 6),
                    "trials": len(comparisons), "note": NOTE if unit == "us" else "",
                }


def write(comparisons: Sequence[Mapping[str, Any]], out: TextIO) -> None:
    """The whole file."""
    table = csv.DictWriter(out, reference.COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows(comparisons))


if __name__ == "__main__":
    write([json.loads(Path(name).read_text()) for name in sys.argv[1:]], sys.stdout)

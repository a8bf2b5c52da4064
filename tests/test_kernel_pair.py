"""The pair of kernels that differ by the check: what builds it, what is told of it, its figures."""

from __future__ import annotations

import copy
import csv
import io
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.kernel_pair import rows
from lab import reference, waits

RING = f"{waits.RING_WAIT} 0"


def of(arm: str, quantity: str) -> tuple[float, float]:
    """A figure of data/reference before and with the check."""
    found = {row["build"]: row["value"] for row in reference.kernel_pair()
             if (row["arm"], row["quantity"]) == (arm, quantity)}
    return found["before"], found["with the check"]


def comparison() -> dict[str, Any]:
    """As ``ringlab kernel --json`` prints one, with one row."""
    def side(us: float, each: float) -> dict[str, Any]:
        return {"us_p50": us, "voluntary_switches": each, "timer_starts": each}

    return {"kernels": [{"release": "6.12.1", "kernel_check": {"has_check": has}}
                        for has in (False, True)],
            "rows": [{"way": waits.RING_WAIT, "timeout_ns": 0, "flags": "none", "ratio": 0.2,
                      "a": side(5.0, 1.0), "b": side(1.0, 0.0)}]}


def test_the_check_takes_timer_and_switch_away_and_leaves_the_other_waits_alone() -> None:
    """What data/reference holds of the pair, to be seen by whoever builds it again."""
    for arm in (RING, "io_uring_submit_and_wait_timeout 0", "ring_worker_kernel 0"):
        before, after = of(arm, "us_per_wait")
        assert after < before / 3
        for quantity in ("voluntary_switches_per_wait", "timer_starts_per_wait"):
            # The kernel's own tick is a timer too, and may fall among the waits.
            assert of(arm, quantity) == pytest.approx((1.0, 0.0), abs=0.02)
    arms = {row["arm"] for row in reference.kernel_pair()}
    for arm in arms:
        before, after = of(arm, "us_per_wait")
        if not arm.endswith(" 0") or arm.split()[0] in ("epoll_wait", "ppoll", waits.CURE):
            assert after == pytest.approx(before, rel=0.02), arm


def test_the_walk_through_shows_the_change_that_is_built(project: Path) -> None:
    added = (project / "bench/kernel_pair/expired_wait.c").read_text().strip().splitlines()
    told = (project / "docs/kernels.md").read_text()
    assert added
    assert all(line in told for line in added)


def test_rows_are_made_of_comparisons_that_agree() -> None:
    out = io.StringIO()
    rows.write([comparison(), comparison()], out)
    found = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert list(found[0]) == list(reference.COLUMNS)
    assert [(row["build"], row["quantity"], row["value"], row["trials"]) for row in found] == [
        ("before", "us_per_wait", "5.0", "2"),
        ("before", "voluntary_switches_per_wait", "1.0", "2"),
        ("before", "timer_starts_per_wait", "1.0", "2"),
        ("with the check", "us_per_wait", "1.0", "2"),
        ("with the check", "voluntary_switches_per_wait", "0.0", "2"),
        ("with the check", "timer_starts_per_wait", "0.0", "2")]
    other = copy.deepcopy(comparison())
    other["rows"][0]["b"]["us_p50"] = 1.001
    with pytest.raises(ValueError, match="differ"):
        list(rows.rows([comparison(), other]))
    other = comparison()
    other["kernels"].reverse()
    with pytest.raises(ValueError, match="without the check"):
        list(rows.rows([other]))


def test_a_build_without_a_source_says_how_it_is_called(project: Path, tmp_path: Path) -> None:
    script = project / "bench/kernel_pair/build.sh"
    done = subprocess.run([script, tmp_path / "none.tar.xz", tmp_path / "out"], check=False,
                          capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2
    assert done.stderr == "kernel pair: usage: build.sh SOURCE.tar.xz FOLDER\n"
    assert not (tmp_path / "out").exists()

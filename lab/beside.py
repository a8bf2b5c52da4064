"""Which figures of the founding document and of the real celeris belong beside which arm.

:mod:`lab.reference` holds the figures under their own builds' names; this module says which build
behaves like which policy of the lab.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lab import reference

FOUNDING, CELERIS = "founding", "celeris"
LABELS = {
    FOUNDING: "founding report, arm64, 4 CPUs",
    CELERIS: "celeris v1.5.8, x86-64, 2 CPUs",
}
# A build of the founding document, as the policy that does the same. Builds that are not here
# (the head of #751, which changed nothing in these figures) stand in no row of their own.
_POLICY_OF_BUILD = {
    "main dfd044f": "shipped",
    "2e575b4": "held-listed",
    "f8f51fd": "held-unlisted",
}
# What a real system counted under another name; one wait of the worker is one enter.
_QUANTITY = {"enters_per_s": "waits_per_s"}
STALLED = ("stall", "held", "paced")


@dataclass(frozen=True)
class Known:
    """One figure measured elsewhere, for one arm under one policy; a single value is a range of
    itself."""

    source: str
    arm: str
    policy: str
    quantity: str
    low: float
    high: float

    @property
    def shown(self) -> str:
        """The figure as a table prints it: ``0.4`` or ``389 to 847``."""
        low, high = _figure(self.low), _figure(self.high)
        return low if low == high else f"{low} to {high}"


def known(experiment: str = "dirty-list") -> list[Known]:
    """Every reference figure of a stalled or held window that has a place beside an arm."""
    if experiment != "dirty-list":
        return []
    found = []
    tagged = [*((FOUNDING, row) for row in reference.founding()),
              *((CELERIS, row) for row in reference.celeris())]
    for source, row in tagged:
        policy = _POLICY_OF_BUILD.get(row["build"]) if source == FOUNDING else row["build"]
        if policy is None or row["window"] not in STALLED or not row["arm"]:
            continue
        low, high = _range(row)
        if low is not None and high is not None:
            quantity = _QUANTITY.get(row["quantity"], row["quantity"])
            found.append(Known(source, row["arm"], policy, quantity, low, high))
    return found


def find(
    figures: Iterable[Known], source: str, arm: str, policy: str, quantity: str
) -> Known | None:
    """The figure for one cell of a table, or None."""
    wanted = (source, arm, policy, quantity)
    return next((figure for figure in figures
                 if (figure.source, figure.arm, figure.policy, figure.quantity) == wanted), None)


def _range(row: dict[str, Any]) -> tuple[float | None, float | None]:
    value = row["value"]
    low = row["low"] if row["low"] is not None else value
    high = row["high"] if row["high"] is not None else value
    return low, high


def _figure(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:g}"

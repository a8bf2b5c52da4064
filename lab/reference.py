"""Figures of real systems, to set beside the lab's own, and the public reports by class of fault.

The data are the files below ``data/reference`` and ``data/cases`` of the checkout; the README files
there say how they were measured. Every row carries source and machine, and is shown with them.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import MachineError, unknown

if TYPE_CHECKING:
    import pandas as pd

DATA = Path(__file__).resolve().parent.parent / "data"
# The files of each case, in the order in which a report shows them.
FILES = {
    "dirty-list": ("dirty_list_founding.csv", "dirty_list_celeris.csv"),
    "splice": ("splice_builds.csv",),
    "expired-wait": ("expired_wait.csv", "expired_wait_pair.csv"),
}
COLUMNS = ("case", "source", "machine", "build", "arm", "window", "quantity", "unit",
           "low", "value", "high", "trials", "note")
# The source of the only rows that the lab measured itself.
BY_THE_LAB = "ringlab kernel, on the pair of kernels that bench/kernel_pair builds"
CLASSES = {
    "A1": "paused input stays registered",
    "A2": "write interest kept with nothing to write",
    "A3": "hang-up or half-close not consumed",
    "A4": "stale registration",
    "A5": "wake-up fd not drained",
    "A6": "TLS state and socket state disagree",
    "B": "list membership means zero timeout",
    "C": "deadline arithmetic",
    "D": "exhaustion re-armed without back-off",
    "E": "self-wake",
    "F": "a wait that does not wait",
    "G": "two-ended transfer waits on the wrong end",
    "H": "polling by design",
    "I": "cost of the wake-up itself",
    "J": "mirror fault: lost wake-up",
}
_NUMBERS = ("low", "value", "high")


def founding() -> list[dict[str, Any]]:
    """The dirty-list figures of the founding report (celeris, linux/arm64)."""
    return _figures("dirty_list_founding.csv")


def celeris() -> list[dict[str, Any]]:
    """The dirty-list figures of celeris v1.5.8, measured for this project."""
    return _figures("dirty_list_celeris.csv")


def splice() -> list[dict[str, Any]]:
    """The figures of HAProxy builds before, at and after the splicing fix of 2013."""
    return _figures("splice_builds.csv")


def expired_wait() -> list[dict[str, Any]]:
    """The cost of waits, from the founding patch and measured for this project."""
    return _figures("expired_wait.csv")


def kernel_pair() -> list[dict[str, Any]]:
    """The cost of waits in two kernels that differ by the check only, measured by the lab."""
    return _figures("expired_wait_pair.csv")


def figures(case: str) -> list[dict[str, Any]]:
    """All figures of a case, one a row.

    ``low``, ``value`` and ``high`` are numbers in ``unit``, and ``trials`` a count; None where the
    source gives none. The other columns are text.
    """
    if case not in FILES:
        raise unknown("case", case, FILES)
    return [row for name in FILES[case] for row in _figures(name)]


def df_reference(case: str) -> pd.DataFrame:
    """:func:`figures` as a frame, with the same columns."""
    import pandas as pd

    return pd.DataFrame(figures(case))


def reports(fault: str | None = None) -> list[dict[str, Any]]:
    """The public reports of a class of fault (``A`` takes in ``A1`` to ``A6``), or all of them.

    ``links`` is a list of addresses; ``class_name`` puts the class in words.
    """
    if fault is not None and fault != "A" and fault not in CLASSES:
        raise unknown("class of fault", fault, ["A", *CLASSES])
    rows: list[dict[str, Any]] = []
    for row in _rows(DATA / "cases" / "catalogue.csv"):
        if fault is None or row["class"].startswith(fault):
            rows.append(row | {"links": row["links"].split(), "class_name": CLASSES[row["class"]]})
    return rows


def df_reports(fault: str | None = None) -> pd.DataFrame:
    """:func:`reports` as a frame, with the same columns."""
    import pandas as pd

    return pd.DataFrame(reports(fault))


def _figures(name: str) -> list[dict[str, Any]]:
    rows = []
    for text in _rows(DATA / "reference" / name):
        row: dict[str, Any] = dict(text)
        for column in _NUMBERS:
            row[column] = float(row[column]) if row[column] else None
        row["trials"] = int(row["trials"]) if row["trials"] else None
        rows.append(row)
    return rows


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        # The data belong to the checkout, not to the installed packages.
        raise MachineError(
            f"cannot read {path}: {error.strerror}; run from a checkout of ringlab"
        ) from None

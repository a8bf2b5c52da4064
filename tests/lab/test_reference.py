from pathlib import Path

import pytest

from engine.errors import MachineError, UsageError
from lab import reference

COLUMNS = list(reference.COLUMNS)


def only(rows: list[dict[str, object]], **wanted: object) -> dict[str, object]:
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


@pytest.mark.parametrize("case", reference.FILES)
def test_every_figure_has_source_machine_and_bounds_in_order(case: str) -> None:
    rows = reference.figures(case)
    assert rows
    for row in rows:
        assert list(row) == COLUMNS
        assert row["case"] == case
        assert row["source"]
        assert row["machine"]
        assert row["quantity"]
        bounds = [row[key] for key in ("low", "value", "high") if row[key] is not None]
        assert bounds
        assert bounds == sorted(bounds)
    frame = reference.df_reference(case)
    assert list(frame.columns) == COLUMNS
    assert len(frame) == len(rows)


def test_no_figure_stands_twice() -> None:
    rows = [row for case in reference.FILES for row in reference.figures(case)]
    keys = [tuple(row[key] for key in COLUMNS[:7]) for row in rows]
    assert len(set(keys)) == len(keys)


def test_figures_of_each_source() -> None:
    report = only(reference.founding(), build="main dfd044f", arm="async+pipelined",
                  quantity="cpu_ms_per_s")
    assert (report["low"], report["value"], report["high"]) == (368.1, 374.0, 374.4)
    here = only(reference.celeris(), build="shipped", arm="async+pipelined", window="stall",
                quantity="enters_per_s")
    assert (here["low"], here["high"], here["value"]) == (77_000, 176_000, None)
    relay = only(reference.splice(), build="sink-full", arm="a", quantity="spinning_trials")
    assert (relay["value"], relay["trials"]) == (2, 5)
    wait = only(reference.expired_wait(), machine="Zen 5 desktop", quantity="us_per_wait")
    assert wait["value"] == 11


def test_reports_by_class() -> None:
    rows = reference.reports()
    assert len(rows) == 123
    assert {row["class"] for row in rows} == set(reference.CLASSES)
    for row in rows:
        assert all(link.startswith("https://") for link in row["links"])
        assert all(row[key] for key in ("project", "trigger", "mechanism", "observable", "remedy"))
        assert row["on_one_machine"] in ("yes", "likely", "partly", "hard", "no")
    assert {row["class"] for row in reference.reports("A")} == {f"A{n}" for n in range(1, 7)}
    assert len(reference.df_reports("B")) == len(reference.reports("B"))


def test_unknown_names_and_missing_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'splize'; choose from: splice"):
        reference.figures("splize")
    with pytest.raises(UsageError, match="class of fault"):
        reference.reports("Z")
    monkeypatch.setattr(reference, "DATA", tmp_path)
    with pytest.raises(MachineError, match="from a checkout"):
        reference.founding()

"""The page in front of the reports: told from runs, opens offline, survives what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import cli, report_index
from lab.runs import RunStore
from lab.tables import RUN_TYPE
from tests.lab.test_report import Loads

ARM = {
    "arm": "a", "policy": "before", "state": "spins", "windows": {}, "broken": [], "reason": "",
    "repetitions": 1,
}


def stored(folder: Path, **more: object) -> Path:
    data = {
        "schema": 1, "experiment": "splice", "title": "A relay", "source": "", "parameters": {},
        "machine": {"kernel": "6.1", "cpus": 2}, "interrupted": None, "arms": [ARM],
        "pattern": {"text": "All agree & <more>."}, "cure": None,
        "conclusions": ["pattern", "cure"], **more,
    }
    return RunStore(folder).write(data)


def report_of(folder: Path, run: Path | None, name: str = "splice") -> None:
    outputs = [] if run is None else [
        {"output_type": "display_data", "metadata": {},
         "data": {RUN_TYPE: {"path": str(run)}, "text/plain": ""}}]
    cell = {"cell_type": "code", "execution_count": 1, "id": "x", "metadata": {}, "source": "",
            "outputs": outputs}
    text = json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    (folder / f"{name}.ipynb").write_text(text)
    (folder / f"{name}.html").write_text("<p>report</p>")


def test_the_page_tells_what_the_run_found_and_fetches_nothing(tmp_path: Path) -> None:
    run = stored(tmp_path / "runs")
    report_of(tmp_path, run)
    page = report_index.write_index(tmp_path).read_text(encoding="utf-8")
    assert "All agree &amp; &lt;more&gt;." in page
    assert '<a href="splice.html">splice</a>' in page
    assert "1 spins" in page
    assert "before 1" in page
    assert run.name in page
    loads = Loads()
    loads.feed(page)
    assert loads.fetched == []
    assert not list(tmp_path.glob(".index*"))


def test_a_run_that_was_cut_short_says_so(tmp_path: Path) -> None:
    report_of(tmp_path, stored(tmp_path / "runs", interrupted="interrupted by hand"))
    assert "Not whole: interrupted by hand." in report_index.write_index(tmp_path).read_text()


@pytest.mark.parametrize("run", [None, Path("/nowhere/run")])
def test_a_report_without_its_run_keeps_its_row(tmp_path: Path, run: Path | None) -> None:
    report_of(tmp_path, run)
    page = report_index.write_index(tmp_path).read_text()
    assert "The run cannot be read" in page
    assert '<a href="splice.html">' in page


def test_without_reports_the_page_says_how_to_make_them(tmp_path: Path) -> None:
    assert "ringlab report --all" in report_index.write_index(tmp_path).read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "give one experiment, or --all"), (["splice", "--all"], "give one experiment, or --all"),
     (["--all", "-p", "seconds=1"], "--all takes no parameters")],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["report", *words]) == cli.ERROR
    assert said in capsys.readouterr().err


def test_what_a_run_did_not_show_is_said(tmp_path: Path) -> None:
    arm = ARM | {"not_shown": ["no SEND was in flight"]}
    report_of(tmp_path, stored(tmp_path / "runs", arms=[arm], not_shown=["d under after: no"]))
    page = report_index.write_index(tmp_path).read_text()
    assert "Not shown: a under before: no SEND was in flight." in page
    assert "Not shown: d under after: no." in page

"""The notebooks in git: clean, readable, and of one mind with the experiments they tell."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from lab import experiment

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.rglob("*.ipynb"))
CELL_LINES = 25


def cells_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"])


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("name", experiment.names())
def test_the_parameters_cell_is_the_experiment_s(name: str) -> None:
    cells = cells_of(FOLDER / f"{name.replace('-', '_')}.ipynb")
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    assert [source(cell) for cell in tagged] == [experiment.case(name).parameters.as_cell()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_and_no_traces_of_a_run(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_and_define_nothing_that_a_test_could_not_import(path: Path) -> None:
    for cell in cells_of(path):
        if cell["cell_type"] != "code" or source(cell).startswith("%"):
            continue
        assert len(source(cell).splitlines()) <= CELL_LINES
        tree = ast.parse(source(cell))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert not [node for node in tree.body if isinstance(node, kinds)], source(cell)

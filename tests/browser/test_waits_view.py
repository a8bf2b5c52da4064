"""The live view of one way to wait in a real JupyterLab, chosen from as a person chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import MachineError
from engine.waits import Case, measure
from tests.browser.conftest import Lab, leave, run_all

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

VIEW = ".rl-page-waits"
CELL = "from lab.live import waits_view\nwaits_view.show()"


def figure(page: Any, name: str) -> float:
    """A figure of the view by the words above it."""
    found = page.locator(f"{VIEW} .rl-wait-figures div", has_text=name)
    text = found.locator("strong").inner_text()
    return float(text.split()[0].replace(",", ""))


def measured(page: Any, way: str, more: int = 3) -> None:
    """Waits until some measurements of that way were drawn."""
    page.wait_for_function(
        "([view, way, more]) => {"
        " const root = document.querySelector(view);"
        " return root?.textContent.includes(`of ${way} with`) &&"
        " root.querySelector('polyline').points.numberOfItems >= more; }",
        arg=[VIEW, way, more], timeout=90_000)


def test_a_way_and_a_timeout_are_chosen_and_its_cost_moves(
    open_notebook: Any, jupyterlab: Lab, pictures: Path
) -> None:
    try:
        measure(Case("io_uring_wait_cqe_timeout", 0), 0.001)
    except MachineError as reason:
        pytest.skip(str(reason))
    (jupyterlab.root / "waits.ipynb").write_text(json.dumps({
        "cells": [{"cell_type": "code", "id": "waits", "metadata": {}, "outputs": [],
                   "execution_count": None, "source": CELL}],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3",
                                    "language": "python"}},
        "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    page = open_notebook("waits.ipynb")
    run_all(page)
    measured(page, "io_uring_wait_cqe_timeout")
    page.select_option(f"{VIEW} [data-name=way]", "io_uring_get_events")
    measured(page, "io_uring_get_events")
    looked = figure(page, "one wait")
    page.select_option(f"{VIEW} [data-name=way]", "io_uring_wait_cqe_timeout")
    measured(page, "io_uring_wait_cqe_timeout")
    page.select_option(f"{VIEW} [data-name=timeout_ns]", "200000")
    page.wait_for_function("(view) => document.querySelector(view).textContent.includes("
                           "'with timeout 200 us')", arg=VIEW, timeout=60_000)
    measured(page, "io_uring_wait_cqe_timeout")
    slept = figure(page, "one wait")
    assert slept > 200 > looked
    assert figure(page, "switches") > 0.5
    page.screenshot(path=pictures / "waits.png")
    assert page.errors == []
    leave(page)

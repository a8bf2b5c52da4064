"""What a page says of a kernel that has died or cannot be reached: it does not look live."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Lab, leave, opened_in, run_all, running_lab, scroll_to
from tests.browser.driver import PANEL, Driver, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

STEPPER = ".rl-page-stepper"
CELLS = ["import lab\nlab.live()", "lab.Stepper()", "import os\nprint('pid', os.getpid())"]
SAYS = "([root, words]) => document.querySelector(`${root} .rl-cut`)?.textContent.includes(words)"
PRESSABLE = "(root) => [...document.querySelectorAll(`${root} :is(button, input, select)`)]" \
            ".filter(e => !e.disabled).length"


@pytest.fixture
def panel(open_notebook: Any, jupyterlab: Lab, pictures: Path) -> Driver:
    write_notebook(jupyterlab.root / "lost.ipynb", CELLS)
    page = open_notebook("lost.ipynb")
    run_all(page)
    panel = Driver(page, pictures).ready()
    panel.press(arm="async+pipelined")
    panel.state("spins")
    return panel


def kernel_pid(page: Any) -> int:
    scroll_to(page, "os.getpid")
    text = page.locator(".jp-OutputArea-output:has-text('pid ')").last.inner_text()
    scroll_to(page, "lab.live")
    return int(text.split()[1])


def says(panel: Driver, words: str, root: str = PANEL) -> None:
    panel.page.wait_for_function(SAYS, arg=[root, words], timeout=60_000)


def test_a_kernel_that_is_killed_is_said_to_have_gone(panel: Driver) -> None:
    os.kill(kernel_pid(panel.page), signal.SIGKILL)
    says(panel, "run the cell again")
    panel.picture("killed-1280x800")
    assert panel.page.evaluate(PRESSABLE, PANEL) == 0
    assert "run the cell again" in panel.page.get_attribute(PANEL, "data-status")
    says(panel, "run the cell again", STEPPER)
    assert panel.page.evaluate(PRESSABLE, STEPPER) == 0
    assert panel.page.errors == []
    leave(panel.page)


def test_a_kernel_that_hangs_is_said_to_be_silent_until_it_goes_on(panel: Driver) -> None:
    pid, page = kernel_pid(panel.page), panel.page
    os.kill(pid, signal.SIGSTOP)
    try:
        says(panel, "no word from the kernel since ")
        panel.picture("silent-1280x800")
        assert page.evaluate(PRESSABLE, PANEL) == 0
        assert page.inner_text(f"{PANEL} .rl-chip") == "no word"
        stood = panel.newest("t")
    finally:
        os.kill(pid, signal.SIGCONT)
    page.wait_for_function(
        f"() => document.querySelector('{PANEL} .rl-cut').textContent === ''", timeout=60_000)
    panel.plot_shows("t", lambda t: t > stood + 1)
    assert page.evaluate(PRESSABLE, PANEL) > 20
    panel.press(arm="async")
    panel.state("parked")
    # Shown and unchanged for longer than a page waits: it asks, is answered, and says nothing.
    page.wait_for_timeout(15_000)
    assert page.inner_text(f"{PANEL} .rl-chip") == "live"
    assert page.errors == []
    leave(page)


def test_a_server_that_is_gone_leaves_no_page_that_looks_live(
    chromium: Any, tmp_path: Path, pictures: Path
) -> None:
    root = tmp_path / "notebooks"
    root.mkdir()
    write_notebook(root / "lost.ipynb", CELLS)
    with running_lab(tmp_path, root) as lab, opened_in(chromium, lab) as opened:
        page = opened("lost.ipynb")
        run_all(page)
        panel = Driver(page, pictures).ready()
        panel.press(arm="async+pipelined")
        panel.state("spins")
        os.kill(lab.pid, signal.SIGTERM)
        says(panel, "the kernel")
        assert page.evaluate(PRESSABLE, PANEL) == 0
        panel.picture("unreachable-1280x800")

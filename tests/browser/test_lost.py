"""What a page says of a kernel that has died or cannot be reached: it does not look live.

One page goes through it all: its kernel hangs, goes on, is killed, is started again; then its
server goes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Lab, kernel_idle, opened_in, run_all, running_lab, scroll_to
from tests.browser.driver import PANEL, Driver, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

STEPPER = ".rl-page-stepper"
CELLS = ["import lab\nlab.live()", "lab.Stepper()", "import os\nprint('pid', os.getpid())"]
SAYS = "([root, words]) => document.querySelector(`${root} .rl-cut`)?.textContent.includes(words)"
PRESSABLE = "(root) => [...document.querySelectorAll(`${root} :is(button, input, select)`)]" \
            ".filter(e => !e.disabled).length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab of their own, which the last of them ends."""
    home = tmp_path_factory.mktemp("lost")
    root = home / "notebooks"
    root.mkdir()
    write_notebook(root / "lost.ipynb", CELLS)
    with running_lab(home, root) as lab:
        yield lab


@pytest.fixture(scope="module")
def panel(chromium: Any, server: Lab, pictures: Path) -> Iterator[Driver]:
    with opened_in(chromium, server) as opened:
        page = opened("lost.ipynb")
        yield spinning(Driver(page, pictures))


def spinning(panel: Driver) -> Driver:
    run_all(panel.page)
    panel.ready()
    panel.page.wait_for_selector(f'{PANEL}[data-status="live"]', timeout=90_000)
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


def test_a_kernel_that_is_killed_is_said_to_have_gone_and_what_it_says_helps(
    panel: Driver
) -> None:
    page = panel.page
    os.kill(kernel_pid(page), signal.SIGKILL)
    says(panel, "run the cell again")
    panel.picture("killed-1280x800")
    assert page.evaluate(PRESSABLE, PANEL) == 0
    assert "run the cell again" in page.get_attribute(PANEL, "data-status")
    says(panel, "run the cell again", STEPPER)
    assert page.evaluate(PRESSABLE, STEPPER) == 0
    page.click(".jp-Dialog .jp-mod-accept")  # JupyterLab's own word of it
    kernel_idle(page)
    spinning(panel)
    assert page.errors == []


def test_a_server_that_is_gone_leaves_no_page_that_looks_live(
    panel: Driver, server: Lab
) -> None:
    panel.press(arm="async")
    panel.state("parked")
    os.kill(server.pid, signal.SIGTERM)
    says(panel, "the kernel")
    assert panel.page.evaluate(PRESSABLE, PANEL) == 0
    panel.picture("unreachable-1280x800")

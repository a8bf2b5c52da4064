"""The live panel on the relay, in a real JupyterLab: the notebook of the case, by mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Lab, leave, run_all, theme
from tests.browser.driver import CUT_OFF, NAMELESS, PANEL, Driver, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400),
              pytest.mark.usefixtures("no_exception_in_the_log")]

SPLICE = "splice.ipynb"
# One arm, two policies and short windows: the panel is what is looked at here.
SHORTER = (
    ("arms, policies = [], []", "arms, policies = ['a'], ['before', 'after']"),
    ("'20k,40k,60k,100k,150k,200k,250k,300k,400k,600k'", "''"),
)
ROW = f"{PANEL} .rl-strip tr:has(th:has-text('origin → client'))"


def test_the_notebook_s_panel_shows_the_spin_its_cure_and_measures_it(
    open_notebook: Any, jupyterlab: Lab, project: Path, pictures: Path
) -> None:
    text = (project / "notebooks" / SPLICE).read_text(encoding="utf-8")
    for long, short in SHORTER:
        assert long in text
        text = text.replace(long, short)
    (jupyterlab.root / SPLICE).write_text(text, encoding="utf-8")
    page = open_notebook(SPLICE)
    run_all(page)
    panel = Driver(page, pictures).ready()
    panel.state("idle")
    panel.press(arm="a")
    panel.state("spins")
    spin = panel.plot_shows("noops", lambda rate: rate > 2000)
    panel.plot_shows("piped_kib", lambda kib: kib > 1)
    assert panel.newest("sessions") == 1
    row = page.inner_text(ROW)
    assert "origin: active" in row
    assert "client: polled" in row
    panel.picture("relay-spins-1280x800")
    panel.choice("recv_behind").select_option("allowed")
    panel.state("quiet")
    panel.plot_shows("noops", lambda rate: rate < 200 < spin)
    # The arm anew under another policy, by one click; controls are those of the arm.
    panel.press(quick="sink-full")
    panel.state("spins")
    assert page.get_attribute(f'{PANEL} [data-quick="sink-full"]', "aria-pressed") == "true"
    assert panel.field("object_size").is_visible()
    assert not panel.field("upload").is_visible()
    panel.press(arm="e")
    page.wait_for_selector(f"{PANEL} .rl-strip td:text-is('client: active')")
    assert panel.field("upload").is_visible()
    assert not panel.field("object_size").is_visible()
    panel.press(action="release")
    panel.says("the origin goes on")
    panel.plot_shows("piped_kib", lambda kib: kib == 0)
    panel.press(arm="a")
    panel.press(quick="after")
    panel.state("quiet")
    panel.measures("a under after", "quiet")
    assert "no-ops" in page.inner_text(f"{PANEL} .rl-table")
    page.locator(f"{PANEL} .rl-table").scroll_into_view_if_needed()
    panel.picture("relay-measured-1280x800")
    assert page.errors == []
    leave(page)


@pytest.fixture(scope="module")
def panel(open_notebook: Any, jupyterlab: Lab, pictures: Path) -> Iterator[Driver]:
    """One page with a panel on the relay."""
    write_notebook(jupyterlab.root / "relay.ipynb", ["import lab\nlab.live('splice')"])
    page = open_notebook("relay.ipynb")
    run_all(page)
    yield Driver(page, pictures).ready()
    leave(page)


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 800, True), (1920, 1080, False)])
def test_nothing_of_the_relay_is_cut_off_and_everything_has_a_name(
    panel: Driver, width: int, height: int, dark: bool
) -> None:
    name = f"{width}x{height}{'-dark' if dark else ''}"
    page = panel.page
    page.set_viewport_size({"width": width, "height": height})
    theme(page, "JupyterLab Dark" if dark else "JupyterLab Light")
    panel.ready()
    panel.press(arm="paced")
    panel.plot_shows("spliced_mib", lambda rate: rate > 1)
    panel.picture(f"relay-paced-{name}")
    panel.press(arm="a2")
    panel.state("spins")
    panel.says("does not read")
    page.wait_for_timeout(1500)
    panel.picture(f"relay-{name}")
    page.locator(f"{PANEL} .rl-bytes").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    panel.picture(f"relay-below-{name}")
    assert page.evaluate(CUT_OFF, PANEL) == []
    assert page.evaluate(NAMELESS, PANEL) == []
    assert page.errors == []

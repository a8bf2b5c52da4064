"""The live panel and the stepper in a real JupyterLab, driven as a person drives them.

Assertions look into the page: at the data of the plots there, the words there, the pixels there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import RingServer
from engine.errors import MachineError
from tests.browser.conftest import Lab, leave, restart, run_all, scroll_to, theme
from tests.browser.driver import CUT_OFF, NAMELESS, PANEL, Driver, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400),
              pytest.mark.usefixtures("no_exception_in_the_log")]

START = "start_here.ipynb"
SMALL_NOTEBOOK = ["import lab\npanel = lab.live(seconds=0.4)\npanel", "lab.Stepper()"]


@pytest.fixture(scope="module", autouse=True)
def ring() -> None:
    try:
        RingServer(max_connections=8).start().close()
    except MachineError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def panel(open_notebook: Any, jupyterlab: Lab, pictures: Path) -> Driver:
    """One page with a panel and a stepper, which several tests go on with."""
    write_notebook(jupyterlab.root / "live.ipynb", SMALL_NOTEBOOK)
    page = open_notebook("live.ipynb")
    run_all(page)
    return Driver(page, pictures).ready()


def test_start_here_by_mouse_measured_restarted_and_run_again(
    open_notebook: Any, jupyterlab: Lab, project: Path, pictures: Path
) -> None:
    text = (project / "notebooks" / START).read_text(encoding="utf-8")
    short = text.replace("seconds: float = 1.0", "seconds: float = 0.4")
    assert short != text
    (jupyterlab.root / START).write_text(short, encoding="utf-8")
    page = open_notebook(START)
    run_all(page)
    panel = Driver(page, pictures).ready()
    panel.state("idle")
    panel.press(arm="async+pipelined")
    panel.state("spins")
    spin = panel.plot_shows("why_list", lambda rate: rate > 2000)
    assert panel.newest("list_length") == 1
    panel.picture("spins-1280x800")
    panel.choice("membership").select_option("leave")
    panel.state("quiet")
    panel.plot_shows("iterations", lambda rate: rate < 200 < spin)
    panel.press(action="measure")
    panel.says("measured async+pipelined under membership: quiet", 30)
    assert "membership" in panel.page.inner_text(f"{PANEL} .rl-table")
    panel.page.locator(f"{PANEL} .rl-table").scroll_into_view_if_needed()
    panel.picture("measured-1280x800")
    assert panel.page.errors == []
    restart(panel.page)
    panel.page.wait_for_function(
        f"() => document.querySelector('{PANEL}').dataset.status?.includes('run the cell again')")
    run_all(panel.page)
    panel.ready()
    panel.page.wait_for_selector(f'{PANEL}[data-status="live"]', timeout=90_000)
    panel.state("idle")
    panel.press(arm="async")
    panel.state("parked")
    assert panel.page.errors == []
    leave(page)


def test_controls_by_mouse_and_by_keyboard_change_the_plot(panel: Driver) -> None:
    keys = panel.page.keyboard
    panel.press(arm="async+pipelined")
    panel.state("spins")
    # By mouse: a drag along the slider of SO_RCVBUF; the client connects anew.
    waiting = panel.newest("outq_kib")
    box = panel.slider("rcvbuf").bounding_box()
    panel.page.mouse.move(box["x"] + box["width"] * 0.13, box["y"] + box["height"] / 2)
    panel.page.mouse.down()
    panel.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2, steps=8)
    panel.page.mouse.up()
    assert int(panel.field("rcvbuf").input_value()) > 60_000
    panel.plot_shows("outq_kib", lambda kib: abs(kib - waiting) > 1)
    # By keyboard: arrows on sliders, a number typed, a word chosen by its letter.
    panel.slider("response_size").focus()
    before = int(panel.field("response_size").input_value())
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    assert int(panel.field("response_size").input_value()) > before
    panel.state("spins")
    panel.slider("depth").focus()
    keys.press("ArrowLeft")
    panel.state("parked")
    panel.plot_shows("iterations", lambda rate: rate < 5)
    panel.field("depth").focus()
    panel.field("depth").fill("3")
    keys.press("Enter")
    panel.state("spins")
    panel.choice("policy").focus()
    keys.type("fixed")
    panel.state("quiet")
    panel.plot_shows("why_idle", lambda rate: rate > 5)
    # Later than a browser takes letters to be one word.
    panel.page.wait_for_timeout(1200)
    panel.choice("policy").focus()
    keys.type("tickless")
    panel.plot_shows("iterations", lambda rate: rate < 2)
    assert panel.page.errors == []


def test_a_wrong_value_is_refused_and_the_picture_pauses_and_tells_a_span(panel: Driver) -> None:
    panel.choice("policy").select_option("shipped")
    panel.field("rcvbuf").fill("7")
    panel.field("rcvbuf").press("Enter")
    panel.page.wait_for_selector(f'{PANEL} .rl-refused:has-text("1,024 to 67,108,864 bytes")')
    assert panel.field("rcvbuf").get_attribute("aria-invalid") == "true"
    panel.field("rcvbuf").fill("64KiB")
    panel.field("rcvbuf").press("Enter")
    panel.page.wait_for_function(
        f"() => [...document.querySelectorAll('{PANEL} .rl-refused')].every(e => !e.textContent)")
    assert panel.field("rcvbuf").input_value() == "65536"
    # Pausing: the picture stands, then catches up.
    panel.press(arm="async+pipelined")
    panel.state("spins")
    panel.page.click(f"{PANEL} button:has-text('pause')")
    panel.page.wait_for_selector(f'{PANEL}[data-status^="paused"]')
    panel.page.wait_for_timeout(300)
    stood = panel.newest("t")
    panel.page.wait_for_timeout(1200)
    assert panel.newest("t") == stood
    panel.page.click(f"{PANEL} button:has-text('go on')")
    panel.plot_shows("t", lambda t: t > stood + 1)
    # A span, selected by dragging over a plot.
    plot = panel.page.locator(f"{PANEL} .rl-cpu .rl-plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    panel.page.mouse.move(box["x"] + 70, box["y"] + 40)
    panel.page.mouse.down()
    panel.page.mouse.move(box["x"] + 220, box["y"] + 50, steps=5)
    panel.page.mouse.up()
    panel.page.wait_for_selector(f'{PANEL} .rl-span:has-text("waits/s")')


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 800, True), (1920, 1080, False)])
def test_nothing_is_cut_off_and_everything_has_a_name(
    panel: Driver, width: int, height: int, dark: bool
) -> None:
    panel.page.set_viewport_size({"width": width, "height": height})
    theme(panel.page, "JupyterLab Dark" if dark else "JupyterLab Light")
    panel.ready()
    panel.choice("policy").select_option("shipped")
    panel.press(arm="async+pipelined")
    panel.state("spins")
    panel.says("does not read")
    name = f"{width}x{height}{'-dark' if dark else ''}"
    panel.picture(f"panel-{name}")
    panel.page.click("button:has-text('fixture: pipelined')")
    panel.page.wait_for_selector('.rl-page-stepper[data-condition="SPIN"]')
    panel.page.locator(".rl-page-stepper").evaluate("e => e.scrollIntoView()")
    panel.page.wait_for_timeout(300)
    panel.picture(f"stepper-{name}")
    for root in (PANEL, ".rl-page-stepper"):
        assert panel.page.evaluate(CUT_OFF, root) == []
        assert panel.page.evaluate(NAMELESS, root) == []


def test_the_stepper_by_keyboard_and_a_page_that_is_opened_again(panel: Driver) -> None:
    page = panel.page
    page.set_viewport_size({"width": 1280, "height": 800})
    scroll_to(page, "Stepper")
    page.wait_for_selector(".rl-page-stepper[data-ready]")
    page.focus('.rl-page-stepper [data-step="single"]')
    page.keyboard.press("Enter")
    page.wait_for_selector('.rl-page-stepper[data-condition="PARKED"]')
    def at() -> int:
        return int(page.get_attribute(".rl-page-stepper", "data-at"))

    def moves(by: int, act: Callable[[], Any]) -> None:
        wanted = at() + by
        act()
        page.wait_for_selector(f'.rl-page-stepper[data-at="{wanted}"]')

    def step() -> None:
        page.focus(".rl-page-stepper .rl-primary")
        moves(1, lambda: page.keyboard.press("Enter"))

    step()
    page.wait_for_selector('.rl-page-stepper p:has-text("the worker sleeps")')
    moves(1, lambda: page.click(".rl-page-stepper button:text-is('poke')"))
    for _ in range(5):
        step()
    page.wait_for_selector('.rl-page-stepper[data-condition="SPIN"]')
    for _ in range(3):
        moves(-1, lambda: page.click('.rl-page-stepper [data-step="back"]'))
    page.wait_for_selector('.rl-page-stepper[data-condition="PARKED"]')
    # A page that is opened again has the history, and the panel goes on.
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_timeout(1500)
    seen, view = panel.newest("t"), page.get_attribute(PANEL, "data-view")
    page.goto(page.address)
    panel.ready()
    assert page.get_attribute(PANEL, "data-view") != view, "it is not the one that said goodbye"
    page.wait_for_function(
        f"() => Number(document.querySelector('{PANEL} .rl-plots').dataset.rows) > 5")
    panel.press(arm="async+pipelined")
    panel.state("spins")
    panel.plot_shows("t", lambda t: t > seen)
    assert page.errors == []
    leave(page)


def test_the_read_handler_of_the_relay_by_mouse(
    open_notebook: Any, jupyterlab: Lab, pictures: Path
) -> None:
    write_notebook(jupyterlab.root / "relay.ipynb",
                   ['import lab\nstepper = lab.Stepper("splice", "before")\nstepper'])
    page = open_notebook("relay.ipynb")
    run_all(page)
    root = ".rl-page-stepper"
    page.wait_for_selector(f"{root}[data-ready]")
    page.click(f'{root} [data-step="a"]')
    page.wait_for_selector(f'{root}[data-condition="SPIN"]')
    for step in ("wait", "read handler", "http", "timers", "decide"):
        page.click(f'{root} [data-step="{step}"].rl-primary')
    page.wait_for_selector(f'{root} .rl-strip strong:text-is("a no-op")')
    page.locator(root).evaluate("e => e.scrollIntoView()")
    page.wait_for_timeout(300)
    page.screenshot(path=pictures / "stepper-relay.png")
    assert page.evaluate(CUT_OFF, root) == []
    assert page.evaluate(NAMELESS, root) == []
    page.select_option(f"{root} select[data-name=policy]", "after")
    page.click(f'{root} [data-step="iterate"]')
    page.click(f'{root} [data-step="iterate"]')
    page.wait_for_selector(f'{root}[data-condition="FIXED"]')
    page.fill(f'{root} [data-field="reads"]', "200,000")
    page.click(f'{root} [data-action="takes"] >> nth=0')
    page.click(f'{root} [data-step="iterate"]')
    page.wait_for_selector(f'{root}[data-condition="WORKING"]')
    theme(page, "JupyterLab Dark")
    page.wait_for_timeout(800)
    page.screenshot(path=pictures / "stepper-relay-dark.png")
    assert page.errors == []
    leave(page)


def test_two_panels_and_a_cell_run_again_leave_nothing_behind(
    open_notebook: Any, jupyterlab: Lab, pictures: Path
) -> None:
    count = ("import threading, lab.live.panel as p; print('left', len(p.open_panels()), "
             "sum(t.name.startswith('ringlab') for t in threading.enumerate()))")
    write_notebook(jupyterlab.root / "two.ipynb",
                   ["import lab\nlab.live()", "import lab\nlab.live()", count])
    page = open_notebook("two.ipynb")
    for _ in range(2):
        run_all(page)
        page.wait_for_selector(f"{PANEL}[data-ready]", timeout=90_000)
        page.wait_for_timeout(2500)
        scroll_to(page, "print(")
    text = page.locator(".jp-OutputArea-output:has-text('left')").last.inner_text()
    assert text.split() == ["left", "2", "6"]
    assert page.errors == []
    leave(page)

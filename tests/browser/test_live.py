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
RANGE = """
() => {
  const doc = window.Bokeh.documents.find(doc => doc.get_model_by_name('rows') !== null &&
    doc.views_manager.roots.some(view => view.el.isConnected));
  const {start, end} = doc.get_model_by_name('time');
  return [start, end];
}
"""
SMALL_NOTEBOOK = ["import lab\npanel = lab.live(seconds=0.4)\npanel", "lab.Stepper()"]
# A kernel that takes its time over every control.
SLOW_NOTEBOOK = ["""import time
import lab
panel = lab.live(policy="shipped")
set_at_once = panel._set
def set_late(name, value):
    time.sleep(0.7)
    set_at_once(name, value)
panel._set = set_late
panel"""]
# Where controls are, whenever the page is drawn, each place once.
PLACES = """
(root) => {
  const find = name => document.querySelector(`${root} :is(input[type=range], select)` +
    `[data-name="${name}"]`);
  window.places = [];
  const look = () => {
    const now = ['rcvbuf', 'membership'].map(name => find(name).value).join(' ');
    if (window.places.at(-1) !== now) {
      window.places.push(now);
    }
    requestAnimationFrame(look);
  };
  look();
}
"""


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
    panel.measures("async+pipelined under membership", "quiet")
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


def moved_by_mouse(panel: Driver, name: str, to: float) -> None:
    """A drag of a slider to a part of its way."""
    box, mouse = panel.at_rest(panel.slider(name)), panel.page.mouse
    thumb = 8
    way = box["width"] - 2 * thumb
    now = panel.slider(name).evaluate("e => (e.value - e.min) / (e.max - e.min)")
    middle = box["y"] + box["height"] / 2
    mouse.move(box["x"] + thumb + way * now, middle)
    mouse.down()
    mouse.move(box["x"] + thumb + way * to, middle, steps=8)
    mouse.up()
    there = panel.slider(name).evaluate("e => (e.value - e.min) / (e.max - e.min)")
    assert abs(there - to) < 0.1, f"{name} was not taken hold of"


def moved_by_keys(panel: Driver, name: str, to: float) -> None:
    """The same by arrows, and by the keys for the ends."""
    keys, slider = panel.page.keyboard, panel.slider(name)
    slider.focus()
    stops = int(slider.get_attribute("max"))
    wanted = round(stops * to)
    keys.press("End" if wanted > stops / 2 else "Home")
    for _ in range(min(wanted, stops - wanted)):
        keys.press("ArrowLeft" if wanted > stops / 2 else "ArrowRight")
    assert int(slider.input_value()) == wanted


def chosen_by_mouse(panel: Driver, name: str, word: str) -> None:
    """The list of a selection is the browser's, outside of the page: this is what a click in it
    does there."""
    panel.choice(name).click()
    panel.page.keyboard.press("Escape")
    panel.choice(name).select_option(word)


def chosen_by_keys(panel: Driver, name: str, word: str) -> None:
    # Later than a browser takes letters to be one word.
    panel.page.wait_for_timeout(1200)
    panel.choice(name).focus()
    panel.page.keyboard.type(word)


@pytest.mark.parametrize(("moved", "chosen"), [
    (moved_by_mouse, chosen_by_mouse), (moved_by_keys, chosen_by_keys),
], ids=["mouse", "keyboard"])
def test_every_kind_of_control_changes_what_is_plotted(
    panel: Driver, moved: Callable[..., None], chosen: Callable[..., None]
) -> None:
    chosen(panel, "policy", "shipped")
    panel.press(arm="async+pipelined")
    moved(panel, "rcvbuf", 0.0)
    panel.state("spins")
    panel.plot_shows("iterations", lambda rate: rate > 2000)
    # A wider window takes more from the server, and more waits in its socket.
    narrow = panel.plot_settles("outq_kib")
    moved(panel, "rcvbuf", 0.5)
    assert int(panel.field("rcvbuf").input_value()) > 60_000
    panel.plot_shows("outq_kib", lambda kib: kib > narrow + 20)
    assert panel.plot_settles("outq_kib") > narrow + 20
    # A response that the sockets take whole leaves no SEND in flight and nobody listed.
    assert panel.newest("sending") == panel.newest("list_length") == 1
    moved(panel, "response_size", 0.4)
    size = int(panel.field("response_size").input_value())
    assert size < 200_000
    panel.plot_shows("sending", lambda sends: sends == 0)
    panel.plot_shows("outq_kib", lambda kib: kib <= size / 1024)
    panel.plot_shows("iterations", lambda rate: 0 < rate < 200)
    assert panel.plot_settles("list_length") == 0
    moved(panel, "response_size", 0.8)
    panel.plot_shows("sending", lambda sends: sends == 1)
    panel.plot_shows("iterations", lambda rate: rate > 2000)
    # One request alone parks the worker, another behind it makes it spin.
    moved(panel, "depth", 0.0)
    assert panel.field("depth").input_value() == "1"
    panel.plot_shows("iterations", lambda rate: rate < 5)
    assert panel.newest("sending") == 1
    moved(panel, "depth", 0.34)
    assert int(panel.field("depth").input_value()) > 1
    panel.plot_shows("why_list", lambda rate: rate > 2000)
    chosen(panel, "membership", "leave")
    panel.plot_shows("why_list", lambda rate: rate == 0)
    panel.plot_shows("why_idle", lambda rate: 5 < rate < 200)
    chosen(panel, "policy", "tickless")
    panel.plot_shows("iterations", lambda rate: rate < 2)
    assert panel.page.errors == []


def test_a_late_kernel_moves_no_control_back(
    open_notebook: Any, jupyterlab: Lab, pictures: Path
) -> None:
    write_notebook(jupyterlab.root / "slow.ipynb", SLOW_NOTEBOOK)
    page = open_notebook("slow.ipynb")
    run_all(page)
    panel = Driver(page, pictures).ready()
    moved_by_keys(panel, "rcvbuf", 0.0)
    page.wait_for_timeout(2500)
    page.evaluate(PLACES, PANEL)
    panel.slider("rcvbuf").focus()
    for pause in (100, 100, 900, 100):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(pause)
    panel.choice("membership").select_option("leave")
    page.wait_for_timeout(200)
    panel.choice("membership").select_option("eager")
    page.wait_for_timeout(3500)
    assert page.evaluate("window.places") == [
        "0 listed", "1 listed", "2 listed", "3 listed", "4 listed", "4 leave", "4 eager"]
    # What is refused is put back, as soon as it is known to be.
    panel.choice("idle").select_option("tickless")
    page.wait_for_selector(f'{PANEL} .rl-refused:has-text("no sense together")')
    assert panel.choice("idle").input_value() != "tickless"
    # Words that are not finished stay while others are told.
    panel.field("response_size").fill("12")
    panel.slider("rcvbuf").evaluate("e => { e.value = 0; e.dispatchEvent(new Event('input')); }")
    page.wait_for_timeout(1500)
    assert panel.field("response_size").input_value() == "12"
    assert page.errors == []
    leave(page)


def test_numbers_are_typed_too(panel: Driver) -> None:
    panel.choice("policy").select_option("shipped")
    panel.press(arm="async")
    panel.state("parked")
    panel.field("depth").focus()
    panel.field("depth").fill("3")
    panel.page.keyboard.press("Enter")
    panel.plot_shows("why_list", lambda rate: rate > 2000)
    panel.field("response_size").focus()
    panel.field("response_size").fill("64KiB")
    panel.page.keyboard.press("Enter")
    panel.plot_shows("sending", lambda sends: sends == 0)
    panel.field("response_size").fill("3MiB")
    panel.page.keyboard.press("Enter")
    panel.plot_shows("sending", lambda sends: sends == 1)


def test_spans_and_marks_by_keyboard(panel: Driver) -> None:
    page, keys = panel.page, panel.page.keyboard
    panel.choice("policy").select_option("shipped")
    panel.press(arm="async")
    panel.state("parked")
    panel.press(action="poke")
    panel.state("spins")
    # The marks in full, one after the other; each selects what followed it.
    page.focus(f"{PANEL} .rl-marks summary")
    keys.press("Enter")
    listed = page.locator(f"{PANEL} .rl-marks li button")
    shown = listed.all_inner_texts()
    assert shown[-1].endswith("s: poke")
    assert any(text.endswith("s: arm async") for text in shown)
    page.evaluate("root => document.querySelector(`${root} .rl-marks li:last-child button`)"
                  ".scrollIntoView()", PANEL)
    keys.press("Tab")
    assert page.evaluate("() => document.activeElement.matches('.rl-marks li button')")
    listed.nth(len(shown) - 2).focus()
    keys.press("Enter")
    page.wait_for_selector(f'{PANEL} .rl-span:has-text("waits/s")')
    begun = page.input_value(f'{PANEL} [data-span="from"]')
    assert shown[-2].startswith(f"{begun} s")
    page.locator(f"{PANEL} .rl-marks").scroll_into_view_if_needed()
    panel.picture("marks-and-span")
    keys.press("Shift+Tab")
    # Two times, typed.
    page.focus(f'{PANEL} [data-span="from"]')
    keys.press("Control+A")
    keys.type("0.5")
    keys.press("Tab")
    keys.press("Control+A")
    keys.type("0.2")
    keys.press("Enter")
    page.wait_for_selector(f'{PANEL} .rl-refused:has-text("the earlier one first")')
    assert page.get_attribute(f'{PANEL} [data-span="to"]', "aria-invalid") == "true"
    keys.press("Control+A")
    keys.type("2.5")
    keys.press("Enter")
    page.wait_for_selector(f'{PANEL} .rl-span:has-text("0.5 to 2.5 s (")')
    assert page.get_attribute(f'{PANEL} [data-span="to"]', "aria-invalid") == "false"
    page.focus(f"{PANEL} button:has-text('zoom to span')")
    keys.press("Enter")
    assert page.evaluate(RANGE) == [0.5, 2.5]
    panel.picture("zoomed-span")
    page.click(f"{PANEL} button:has-text('follow')")
    assert page.errors == []


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


def test_a_value_a_placeholder_and_a_title_are_no_name(chromium: Any) -> None:
    page = chromium.new_page()
    page.set_content("""<div id="root">
      <select class="bad"><option>words</option></select>
      <input class="bad" placeholder="bytes" title="bytes"> <button class="bad"> </button>
      <label><select class="bad"><option>words</option></select></label>
      <button class="bad" tabindex="-1">out of reach</button>
      <input class="bad" aria-labelledby="nobody"> <label for="empty"></label>
      <input class="bad" id="empty">
      <label for="a">A</label><input id="a"> <label>B <select><option>b</option></select></label>
      <input aria-label="C"> <span id="d">D</span><select aria-labelledby="d"></select>
      <button>E</button> <input style="display: none"></div>""")
    found = page.evaluate(NAMELESS, "#root")
    assert len(found) == 7
    assert all("bad" in each for each in found)
    page.close()


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

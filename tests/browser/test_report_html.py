"""The report in a real browser without a network: drawn, quiet on the console, nothing cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.binding import native
from lab import plots, static, tables
from lab.automaton import Automaton
from lab.doctor import browser_path
from tests.lab.made_up import made_up_run, quick_report

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = browser_path()
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
# Screenshots, for people; reports/ is not in git.
ARTEFACTS = Path(__file__).resolve().parent.parent.parent / "reports" / "screenshots"

pytestmark = [
    pytest.mark.browser, pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH"),
]

# How many canvases of each drawing hold anything but one colour; canvases live in shadow roots.
DRAWN = """
() => [...document.querySelectorAll('figure.ringlab')].map(figure => {
  const canvases = [];
  const walk = node => {
    if (node.tagName === 'CANVAS') { canvases.push(node); }
    if (node.shadowRoot) { walk(node.shadowRoot); }
    for (const child of node.children ?? []) { walk(child); }
  };
  walk(figure);
  const painted = canvases.filter(canvas => {
    if (canvas.width < 50 || canvas.height < 50) { return false; }
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    const seen = new Set();
    for (let i = 0; i < pixels.length && seen.size < 8; i += 4) {
      seen.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
    }
    return seen.size >= 3;
  });
  return {title: figure.getAttribute('aria-label'), painted: painted.length,
          width: figure.getBoundingClientRect().width};
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Page:
    """A page opened offline, with whatever it complained of or asked the network for."""

    def __init__(self, browser: sync_api.Browser, file: Path, width: int, height: int) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height})
        self.context.set_offline(True)
        self.complaints: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(file.as_uri())

    def _console(self, message: sync_api.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _request(self, request: sync_api.Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"asks for {request.url}")

    def figures(self, expected: int) -> list[dict[str, object]]:
        """What was drawn, once every place is filled and painted."""
        places = "document.querySelectorAll('figure.ringlab [data-drawn]').length"
        self.page.wait_for_function(f"{places} === {expected}", timeout=20_000)
        self.page.wait_for_timeout(1000)
        return list(self.page.evaluate(DRAWN))

    def too_wide(self) -> list[str]:
        """Figures and tables whose content does not fit the page."""
        script = """() => [...document.querySelectorAll('figure.ringlab, main, body')]
          .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className || e.tagName)"""
        return list(self.page.evaluate(script))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080)])
def test_the_report_opens_without_a_network(
    browser: sync_api.Browser, width: int, height: int
) -> None:
    ffi, lib = native()
    if lib.rl_probe(ffi.new("rl_ring_info *")) < 0:
        pytest.skip("io_uring is not allowed here")
    made, _ = quick_report()
    opened = Page(browser, made.html, width, height)
    figures = opened.figures(3)
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    opened.page.screenshot(path=ARTEFACTS / f"report-{width}x{height}.png", full_page=True)
    painted = {str(figure["title"]).partition(":")[0]: figure["painted"] for figure in figures}
    assert painted["async"] == painted["async+pipelined"] == 2 * 4
    assert painted["A spin is far to the right of its own idle mark"] == 2
    assert opened.too_wide() == []
    assert opened.complaints == []
    assert opened.page.locator("table caption").count() == 5
    assert not opened.page.locator(".jp-InputArea").filter(has_text="load_bokeh").count()


def test_every_picture_of_a_whole_run_is_drawn(
    browser: sync_api.Browser, tmp_path: Path
) -> None:
    run = made_up_run(tmp_path / "runs")
    pictures = [plots.plot_arms(run), plots.plot_two_by_two(run), plots.plot_series(run, "async")]
    shown = [*pictures, Automaton(run), tables.arms_table(run), tables.both_tests_table(run)]
    page = tmp_path / "page.html"
    body = "".join(one.to_html() for one in shown)
    # BokehJS last: a page may draw its outputs in any order.
    page.write_text(f'<!doctype html><meta charset="utf-8"><body>{body}{static.bokehjs()}',
                    encoding="utf-8")
    opened = Page(browser, page, 1280, 800)
    assert [figure["painted"] for figure in opened.figures(3)] == [2, 2, 12]
    assert opened.complaints == []
    assert opened.too_wide() == []


def test_a_picture_without_bokehjs_says_what_is_missing(
    browser: sync_api.Browser, tmp_path: Path
) -> None:
    run = made_up_run(tmp_path / "runs")
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><body>{plots.plot_arms(run).to_html()}", encoding="utf-8")
    opened = Page(browser, page, 800, 600)
    opened.page.wait_for_selector("text=waits for BokehJS", timeout=20_000)
    opened.page.add_script_tag(content=static.bokehjs().removeprefix("<script>")
                               .removesuffix("</script>"))
    assert opened.figures(1)[0]["painted"] == 2

"""How long after a control was moved the live panel's plot shows it, painted, in a real browser.

Chromium drives JupyterLab; the clock runs in the page, from the control's own event to the first
task after the animation frame in which Bokeh has drawn the plot's new data: that frame is on the
screen then. Headless Chromium draws without a graphics card, a tenth of a second a frame here.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import Missing, spread
from lab.doctor import browser_path

AIM_MS = 300.0
# The wait cap of an idle worker under the shipped policy: iterations per second follow at once.
MEASURE = """
async ([root, value, above]) => {
  const task = (ms) => new Promise(done => setTimeout(done, ms));
  // The data is set in one frame; Bokeh draws in the next, before this callback, and then it shows.
  const drawn = () => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  const model = window.Bokeh.documents.map(d => d.get_model_by_name('rows')).find(m => m !== null);
  const marks = window.Bokeh.documents.map(d => d.get_model_by_name('marks')).find(m => m !== null);
  const field = document.querySelector(`${root} input[type="text"][data-name="wait_cap_ms"]`);
  const marked = marks.data.id.length, begun = performance.now();
  field.value = value;
  field.dispatchEvent(new Event('change', {bubbles: true}));
  let mark = null;
  for (;;) {
    await task(1);
    if (mark === null && marks.data.id.length > marked) {
      await drawn();
      mark = performance.now() - begun;
    }
    const rate = model.data.iterations[model.data.iterations.length - 1];
    if (above ? rate > 150 : rate < 100) {
      await drawn();
      return [mark ?? performance.now() - begun, performance.now() - begun];
    }
    if (performance.now() - begun > 20000) {
      throw new Error(`the plot stays at ${rate} iterations/s`);
    }
  }
}
"""


def main(tries: int = 30) -> None:
    """Print both latencies: the change's mark in the plot, and the curve that follows it."""
    chromium = browser_path()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise Missing("needs Playwright: make setup") from None
    if chromium is None:
        raise Missing("needs Chromium (Debian: apt-get install chromium)")
    from tests.browser import conftest as browser
    from tests.browser.driver import PANEL, write_notebook

    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "notebooks"
        root.mkdir()
        write_notebook(root / "live.ipynb", ["import lab\n\nlab.live()"])
        with browser.running_lab(Path(name), root) as lab, sync_playwright() as playwright:
            opened = playwright.chromium.launch(executable_path=chromium, args=browser.CHROMIUM)
            page = opened.new_page(viewport={"width": 1280, "height": 800})
            page.goto(f"{lab.url}/lab/tree/live.ipynb?token={browser.TOKEN}&reset")
            browser.kernel_idle(page)
            browser.run_all(page)
            found = measured(page, PANEL, tries)
            browser.leave(page)
            opened.close()
    for what, times in zip(("its mark", "the curve"), zip(*found, strict=True), strict=True):
        slow = statistics.quantiles(times, n=10)[-1]
        print(f"control to {what} painted, ms, median [min to max] of {tries}: "
              f"{spread(list(times))}, p90 {slow:.0f} (aim: under {AIM_MS:g})")


def measured(page: Any, panel: str, tries: int) -> list[tuple[float, float]]:
    """Milliseconds to the mark and to the curve, of each change."""
    page.wait_for_selector(f"{panel}[data-ready]", timeout=60_000)
    page.locator(panel).evaluate("e => e.scrollIntoView()")
    page.wait_for_timeout(4000)
    found = []
    for number in range(tries):
        above = number % 2 == 0
        found.append(tuple(page.evaluate(MEASURE, [panel, "2" if above else "25", above])))
        page.wait_for_timeout(700 + 37 * (number % 7))  # at no fixed phase of the frames
    return found


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))

"""Makes docs/panel.png: the live panel in a real JupyterLab, from a real run, in headless Chromium.

    .venv/bin/python docs/make_panel_picture.py [FILE]

The worker spins under the shipped policy, is switched to one that lets it sleep, and is measured.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.doctor import browser_path  # noqa: E402  (the checkout must be on the path)
from tests.browser import conftest as browser  # noqa: E402
from tests.browser.driver import PANEL, write_notebook  # noqa: E402

CELLS = ["import lab\n\nlab.live()"]
SIZE = {"width": 1360, "height": 1250}


def main(target: Path) -> int:
    """Writes the picture; 2 where there is no Chromium or no Playwright."""
    chromium = browser_path()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("needs Playwright: make setup", file=sys.stderr)
        return 2
    if chromium is None:
        print("needs Chromium (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        root = home / "notebooks"
        root.mkdir()
        write_notebook(root / "live.ipynb", CELLS)
        with browser.running_lab(home, root) as lab, sync_playwright() as playwright:
            opened = playwright.chromium.launch(executable_path=chromium, args=browser.CHROMIUM)
            page = opened.new_page(viewport=SIZE)
            page.goto(f"{lab.url}/lab/tree/live.ipynb?token={browser.TOKEN}&reset")
            act(page)
            page.locator(PANEL).screenshot(path=target)
            browser.leave(page)
            opened.close()
    print(target)
    return 0


def act(page: Any) -> None:
    """What a person would do, with time to see it."""
    browser.kernel_idle(page)
    page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
    browser.run_all(page)
    page.wait_for_selector(f"{PANEL}[data-ready]", timeout=40_000)
    page.wait_for_timeout(4000)
    page.click(f'{PANEL} [data-arm="async"]')
    page.wait_for_selector(f'{PANEL} [data-state="parked"]')
    page.wait_for_timeout(4000)
    page.click(f'{PANEL} [data-action="poke"]')
    page.wait_for_selector(f'{PANEL} [data-state="spins"]')
    page.wait_for_timeout(5000)
    page.click(f'{PANEL} [data-arm="async+pipelined"]')
    page.wait_for_timeout(5000)
    page.select_option(f'{PANEL} select[data-name="policy"]', "fixed")
    page.wait_for_timeout(4000)
    page.select_option(f'{PANEL} select[data-name="policy"]', "shipped")
    page.click(f'{PANEL} [data-arm="async+pipelined"]')
    page.wait_for_selector(f'{PANEL} [data-state="spins"]')
    page.wait_for_timeout(4000)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "panel.png"))

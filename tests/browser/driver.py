"""What drives the live panel of a page as a person does, and looks into the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.browser.conftest import scroll_to

PANEL = ".rl-page-panel"

# The newest value of a column of the panel's plots, as the page has it.
NEWEST = """
(name) => {
  for (const doc of window.Bokeh.documents) {
    const rows = doc.get_model_by_name('rows');
    if (rows !== null && doc.views_manager.roots.some(view => view.el.isConnected)) {
      const column = rows.data[name];
      return column.length > 0 ? column[column.length - 1] : null;
    }
  }
  return null;
}
"""
# Elements that are cut off at the right of the panel, or whose text does not fit them.
CUT_OFF = """
(root) => {
  const panel = document.querySelector(root);
  const edge = panel.getBoundingClientRect().right + 1;
  return [...panel.querySelectorAll('button, select, input, label, h4, th, td, p, li')]
    .filter(e => e.offsetParent !== null && !e.closest('.rl-history'))
    .filter(e => e.getBoundingClientRect().right > edge ||
      (e.tagName !== 'P' && e.tagName !== 'INPUT' && e.scrollWidth > e.clientWidth + 2 &&
       getComputedStyle(e).display !== 'inline'))
    .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`);
}
"""
# Controls without a name that a screen reader reads, or that the keyboard cannot reach. What is
# in a field or a selection is its value, and a placeholder or a title no name: only a label is one,
# or the words on a button.
NAMELESS = """
(root) => {
  const words = e => (e?.textContent ?? '').trim();
  const named = e => {
    const by = (e.getAttribute('aria-labelledby') ?? '').split(/\\s+/).filter(Boolean);
    return by.map(id => words(document.getElementById(id))).join(' ').trim()
      || (e.getAttribute('aria-label') ?? '').trim()
      || [...(e.labels ?? [])].map(label => [...label.childNodes]
        .filter(node => !(node instanceof Element && node.matches('input, select, textarea')))
        .map(words).join(' ')).join(' ').trim()
      || (e.matches('button, summary, a') ? words(e) : '');
  };
  return [...document.querySelectorAll(
      `${root} :is(button, input, select, textarea, summary, a[href], [tabindex])`)]
    .filter(e => e.checkVisibility())
    .filter(e => e.tabIndex < 0 || !named(e))
    .map(e => e.outerHTML.slice(0, 80));
}
"""


def write_notebook(path: Path, cells: list[str]) -> None:
    path.write_text(json.dumps({
        "cells": [{"cell_type": "code", "id": f"cell-{number}", "metadata": {}, "outputs": [],
                   "execution_count": None, "source": source}
                  for number, source in enumerate(cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3",
                                    "language": "python"}},
        "nbformat": 4, "nbformat_minor": 5,
    }), encoding="utf-8")


class Driver:
    """What a person does with the panel of one page."""

    def __init__(self, page: Any, pictures: Path) -> None:
        self.page = page
        self.pictures = pictures

    def ready(self) -> Driver:
        scroll_to(self.page, "lab.live")
        self.page.wait_for_selector(f"{PANEL}[data-ready]", timeout=90_000)
        self.page.locator(PANEL).evaluate("e => e.scrollIntoView()")
        return self

    def picture(self, name: str) -> None:
        self.page.screenshot(path=self.pictures / f"live-{name}.png")

    def press(self, **data: str) -> None:
        name, value = next(iter(data.items()))
        self.page.click(f'{PANEL} [data-{name}="{value}"]')

    def state(self, word: str) -> None:
        shown = self.page.locator(f"{PANEL} .rl-state")
        for _ in range(450):
            if shown.get_attribute("data-state") == word:
                return
            self.page.wait_for_timeout(100)
        top = self.page.inner_text(f"{PANEL} .rl-top")
        said = self.page.inner_text(f"{PANEL} .rl-message")
        raise AssertionError(f"the state is not {word} but: {top!r}; said: {said!r}")

    def at_rest(self, control: Any) -> Any:
        """Where a control is, once what is above it has its words and moves it no more."""
        box = None
        while box != (box := control.bounding_box()):
            self.page.wait_for_timeout(200)
        return box

    def says(self, words: str, seconds: float = 60) -> None:
        from playwright.sync_api import TimeoutError as TooLong

        try:
            self.page.wait_for_function(
                "([root, words]) => document.querySelector(`${root} .rl-message`)"
                ".textContent.includes(words)", arg=[PANEL, words], timeout=seconds * 1e3)
        except TooLong:
            said = self.page.inner_text(f"{PANEL} .rl-message")
            raise AssertionError(f"not told {words!r} in {seconds:.0f} s but {said!r}") from None

    def measures(self, pair: str, state: str, seconds: float = 60) -> None:
        """Presses "measure"; again, as an undecided run asks for, while neighbours are too loud."""
        said = ""
        for _ in range(3):
            self.press(action="measure")
            if said:  # of the run before; this one says first that it measures
                self.page.wait_for_function(
                    "([root, words]) => document.querySelector(`${root} .rl-message`)"
                    ".textContent !== words", arg=[PANEL, said])
            self.says(f"measured {pair}: ", seconds)
            said = self.page.inner_text(f"{PANEL} .rl-message")
            if f"measured {pair}: undecided" not in said:
                break
        assert f"measured {pair}: {state}" in said

    def newest(self, column: str) -> float:
        return float(self.page.evaluate(NEWEST, column) or 0)

    def plot_shows(self, column: str, test: Callable[[float], bool], seconds: float = 40) -> float:
        for _ in range(int(seconds * 20)):
            value = self.newest(column)
            if test(value):
                return value
            self.page.wait_for_timeout(50)
        raise AssertionError(f"the plot's {column} stays at {self.newest(column)}")

    def plot_settles(self, column: str, looks: int = 5) -> float:
        """What a column of the plot comes to show, and goes on showing."""
        seen = [self.newest(column)]
        for _ in range(200):
            self.page.wait_for_timeout(200)
            seen = [*seen[-looks + 1:], self.newest(column)]
            if len(seen) == looks and max(seen) - min(seen) < 1:
                return seen[-1]
        raise AssertionError(f"the plot's {column} does not settle: {seen}")

    def field(self, name: str) -> Any:
        return self.page.locator(f'{PANEL} input[type="text"][data-name="{name}"]')

    def slider(self, name: str) -> Any:
        return self.page.locator(f'{PANEL} input[type="range"][data-name="{name}"]')

    def choice(self, name: str) -> Any:
        return self.page.locator(f'{PANEL} select[data-name="{name}"]')

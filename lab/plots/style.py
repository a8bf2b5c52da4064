"""What all plots share: axes, a log scale that has room for zero, the caption that goes along."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    FixedTicker,
    HoverTool,
    Range1d,
    ResetTool,
    SaveTool,
    Tool,
)
from bokeh.plotting import figure

from lab import palette
from lab.runs import Run
from lab.static import Key
from lab.tables import machine_line, windows_line

FONT = "system-ui, Helvetica Neue, Arial, sans-serif"
# A glyph would take a bare font name for the name of a column.
GLYPH_FONT = value(FONT)
# Bokeh's own types know neither the axes that one assignment styles together nor the visuals of a
# glyph, so a figure is anything to the type checker.
Plot = Any
# A rate of zero has no place on a log axis, yet "no waits at all" is a finding: everything below
# the floor is drawn on it, and the axis says so.
FLOOR = 0.1
_SHORT = {0: "1", 1: "10", 2: "100", 3: "1k", 4: "10k", 5: "100k", 6: "1M", 7: "10M",
          8: "100M"}


def new_figure(**options: Any) -> Plot:
    """An empty figure in the project's style; ``options`` are Bokeh's."""
    options.setdefault("tools", "")
    options.setdefault("toolbar_location", None)
    plot: Plot = figure(
        sizing_mode=options.pop("sizing_mode", "stretch_width"),
        background_fill_color=palette.CARD,
        border_fill_color=palette.CARD,
        outline_line_color=palette.GRID,
        output_backend="canvas",
        **options,
    )
    plot.grid.grid_line_color = palette.GRID
    dress(plot.axis)
    plot.title.text_font = FONT
    plot.title.text_font_size = "12px"
    plot.title.text_color = palette.INK
    return plot


def dress(axis: Any) -> None:
    """The project's look for an axis, or for all axes of a figure at once."""
    axis.minor_tick_line_color = None
    axis.axis_line_color = palette.FAINT_INK
    axis.major_tick_line_color = palette.FAINT_INK
    axis.major_tick_in = 0
    axis.major_tick_out = 4
    axis.major_label_text_color = palette.INK
    axis.major_label_text_font = FONT
    axis.major_label_text_font_size = "11px"
    axis.axis_label_text_color = palette.INK
    axis.axis_label_text_font = FONT
    axis.axis_label_text_font_style = "normal"
    axis.axis_label_text_font_size = "11px"


def tools(hover: HoverTool | None = None) -> list[Tool]:
    """Zoom by box, reset, save as PNG. No wheel zoom: the wheel belongs to the page."""
    return [BoxZoomTool(), ResetTool(), SaveTool(), *([hover] if hover else [])]


def floored(values: Iterable[float | None]) -> np.ndarray[Any, Any]:
    """Values for a log axis: anything below ``FLOOR`` stands on it; None becomes a gap."""
    numbers = np.array([math.nan if value is None else value for value in values], dtype=float)
    return np.where(numbers < FLOOR, FLOOR, numbers)


def log_range(highest: float, headroom: float = 2.0) -> Range1d:
    """From just under the floor to ``highest`` times ``headroom``, ten at least."""
    top = max(10.0, highest if math.isfinite(highest) else 10.0)
    return Range1d(start=FLOOR * 0.6, end=top * headroom)


def name_decades(axis: Any, highest: float, every: int = 1) -> None:
    """Ticks at the floor and at whole decades up to ``highest``, named 1, 10, ... 10k, ... 1M."""
    top = max(1, math.ceil(math.log10(max(highest, 1.0))))
    decades = list(range(0, min(top, max(_SHORT)) + 1, every))
    axis.ticker = FixedTicker(ticks=[FLOOR, *(10.0**power for power in decades)])
    axis.major_label_overrides = {
        FLOOR: f"≤{FLOOR}", **{10.0**power: _SHORT[power] for power in decades}
    }


def plain_numbers() -> BasicTickFormatter:
    """Tick labels without exponents."""
    return BasicTickFormatter(use_scientific=False)


def short(value: float | None) -> str:
    """A rate in few characters: 0, 0.4, 40, 3,700, 141k, 1.2M."""
    if value is None or not math.isfinite(value):
        return "not measured"
    if value >= 999_500:
        return f"{value / 1e6:.1f}M"
    if value >= 9_999.5:
        return f"{value / 1e3:.0f}k"
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.05 else ("0" if value == 0 else "<0.1")


def state_keys(states: Iterable[str]) -> list[Key]:
    """Legend entries of the states that occur, in the palette's order, each with its meaning."""
    there = set(states)
    looks = [look for word, look in palette.STATES.items() if word in there]
    return [Key(f"{look.word}: {look.meaning}", look.colour, look.marker) for look in looks]


def caption_of(run: Run, windows: Sequence[str] = ()) -> str:
    """How long, how often and on what the figures were taken; no picture goes without it."""
    return f"{windows_line(run, windows)} {machine_line(run.machine)} Run {run.name}."

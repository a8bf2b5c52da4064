"""The two fixes, alone and together: who stays listed, and how the wait after a SEND is made."""

from __future__ import annotations

from typing import Any

import pandas as pd
from bokeh.layouts import gridplot
from bokeh.models import ColumnDataSource, HoverTool

from lab import palette
from lab.plots import style
from lab.plots.arms import df_arms
from lab.runs import Run
from lab.static import Picture

_SIDE = 215


def df_two_by_two(run: Run) -> pd.DataFrame:
    """One row per arm and cell of the table: arm, policy, membership, wait, state,
    stalled_waits_per_s, idle_waits_per_s, stalled_cpu_ms_per_s, complete, delivery, reason.

    The run says which cell a policy stands in, and leaves out arms that were not run under all
    four: a table with a hole shows nothing.
    """
    found = run.data.get("two_by_two") or {"cells": []}
    columns = ["arm", "policy", "membership", "wait"]
    cells = pd.DataFrame(found["cells"], columns=columns)
    return cells.merge(df_arms(run), on=["arm", "policy"], how="left")[[
        *columns, "state", "stalled_waits_per_s", "idle_waits_per_s", "stalled_cpu_ms_per_s",
        "complete", "delivery", "reason"]]


def plot_two_by_two(run: Run) -> Picture:
    """One square of four per arm, coloured by state, with the waits per second in words."""
    frame = df_two_by_two(run)
    if frame.empty:
        return Picture(None, "No arm was run under all four combinations of the two fixes")
    arms = list(dict.fromkeys(frame["arm"]))
    squares = [
        _square(arm, frame[frame["arm"] == arm], number == 0) for number, arm in enumerate(arms)
    ]
    grid = gridplot([squares], toolbar_location=None, sizing_mode="stretch_width")
    return Picture(grid, _title(frame), style.state_keys(frame["state"]),
                   style.caption_of(run, ["idle", "stall"]), _SIDE + 60)


def _title(frame: pd.DataFrame) -> str:
    """Which cells are quiet in every arm; that is what the picture is for."""
    everywhere = frame.assign(good=frame["state"] == "quiet").groupby("policy")["good"].all()
    good = [policy for policy in dict.fromkeys(frame["policy"]) if everywhere[policy]]
    if good == ["both"]:
        return "Neither change alone is quiet in every arm; both together are"
    return "Quiet in every arm: " + (", ".join(good) or "no combination")


def _square(arm: str, cells: pd.DataFrame, first: bool) -> style.Plot:
    hover = HoverTool(tooltips=[("", "@policy: @state"), ("why", "@reason")])
    plot = style.new_figure(
        x_range=list(dict.fromkeys(cells["wait"])),
        y_range=list(dict.fromkeys(cells["membership"]))[::-1], height=_SIDE + 60, title=arm,
        tools=[hover], min_width=170, x_axis_location="below",
    )
    plot.title.text_font_size = "13px"
    plot.grid.grid_line_color = None
    plot.axis.major_tick_line_color = None
    plot.axis.axis_line_color = None
    plot.outline_line_color = None
    plot.xaxis.axis_label = "wait after a SEND"
    plot.yaxis.axis_label = "connection whose SEND is in flight" if first else ""
    plot.yaxis.visible = first
    plot.yaxis.major_label_orientation = "vertical"
    source = ColumnDataSource(_cells(cells))
    hover.renderers = [plot.rect("wait", "membership", 0.96, 0.96, source=source,
                                 fill_color="colour", line_color=None)]
    for text, offset, size in (("word", -13, "14px"), ("waits", 6, "12px"), ("whole", 23, "11px")):
        plot.text("wait", "membership", text, source=source, y_offset=offset, text_align="center",
                  text_baseline="middle", text_color="ink", text_font=style.GLYPH_FONT,
                  text_font_size=size, text_font_style="bold" if text == "word" else "normal")
    return plot


def _cells(cells: pd.DataFrame) -> dict[str, Any]:
    looks = [palette.state(word) for word in cells["state"]]
    return {
        **{name: list(cells[name]) for name in ("wait", "membership", "policy", "state", "reason")},
        "colour": [look.colour for look in looks],
        "ink": [palette.ink_on(look.colour) for look in looks],
        "word": [f"{look.mark} {look.word}" for look in looks],
        "waits": [f"{style.short(value)} waits/s" for value in cells["stalled_waits_per_s"]],
        "whole": list(cells["delivery"]),
    }

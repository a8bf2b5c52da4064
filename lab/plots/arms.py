"""Every arm under every policy: how often it woke and what that cost, idle and stalled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from bokeh.layouts import gridplot
from bokeh.models import ColumnDataSource, FactorRange, HoverTool

from lab import beside, palette
from lab.plots import style
from lab.runs import Run
from lab.static import Key, Picture
from lab.tables import delivery, is_complete

ROW = 25  # pixels
# Reference figures stand just above and below the mark of the row that they belong to.
_OFFSET = 0.3
_FIGURES = ("waits_per_s", "wasted_per_s", "cpu_ms_per_s", "process_cpu_ms_per_s",
            "on_queue_fraction", "voluntary_switches_per_s")


def df_arms(run: Run) -> pd.DataFrame:
    """One row per arm and policy.

    Columns: arm, policy, state, reason, window (the one that counts: ``stall`` or ``held``),
    seconds, repetitions, each figure as ``idle_NAME`` and ``stalled_NAME`` (rates per second, CPU
    in ms per second, fractions 0 to 1), and complete, delivery (in words), honours_stop,
    honours_write_timeout.
    """
    rows = []
    for arm in run.arms:
        windows = arm["windows"]
        name = next((name for name in beside.STALLED if name in windows), "")
        stalled, idle = windows.get(name, {}), windows.get("idle", {})
        row = {
            "arm": arm["arm"], "policy": arm["policy"], "state": arm["state"],
            "reason": arm["reason"], "window": name, "seconds": stalled.get("seconds"),
            "repetitions": stalled.get("repetitions"),
            "complete": is_complete(arm), "delivery": delivery(arm),
            "honours_stop": arm.get("honours_stop"),
            "honours_write_timeout": arm.get("honours_write_timeout"),
        }
        row |= {f"idle_{figure}": idle.get(figure) for figure in _FIGURES}
        row |= {f"stalled_{figure}": stalled.get(figure) for figure in _FIGURES}
        rows.append(row)
    return pd.DataFrame(rows)


def plot_arms(run: Run) -> Picture:
    """Waits per second and CPU while stalled, each against its own idle window, log axes."""
    frame = df_arms(run)
    rows = list(zip(frame["arm"], frame["policy"], strict=True))
    both = FactorRange(factors=rows[::-1], group_padding=0.7, subgroup_padding=0.0,
                       range_padding=0.6, range_padding_units="absolute")
    known = [figure for figure in beside.known(run.experiment)
             if (figure.arm, figure.policy) in rows]
    waits = _panel(frame, both, "waits_per_s", "waits per second while stalled", True)
    cpu = _panel(frame, both, "cpu_ms_per_s", "worker CPU while stalled, ms per second", False)
    keys = [*style.state_keys(frame["state"]),
            Key("idle, just before", palette.FAINT_INK, "circle_open")]
    for panel, quantity in ((waits, "waits_per_s"), (cpu, "cpu_ms_per_s")):
        keys += [key for key in _references(panel, known, quantity) if key not in keys]
    height = int(ROW * (len(rows) + 0.7 * frame["arm"].nunique()) + 75)
    for panel in (waits, cpu):
        panel.height = height
    grid = gridplot([[waits, cpu]], sizing_mode="stretch_width", toolbar_location="right",
                    toolbar_options={"logo": None})
    return Picture(grid, _title(frame), keys, style.caption_of(run, ["idle", *beside.STALLED]),
                   height)


def _title(frame: pd.DataFrame) -> str:
    spins = frame[frame["state"] == "spins"]
    if spins.empty:
        return "No arm spins: every mark stays near the idle window of its own row"
    worst = spins.sort_values("stalled_waits_per_s").iloc[-1]
    return (f"A spin is far to the right of its own idle mark: {worst['arm']} under "
            f"{worst['policy']} waits {style.short(worst['stalled_waits_per_s'])} times a second "
            f"with nothing to do")


def _panel(
    frame: pd.DataFrame, rows: FactorRange, quantity: str, label: str, names: bool
) -> style.Plot:
    """One quantity over all rows: a line from idle to stalled, a mark by state, the value."""
    stalled, idle = frame[f"stalled_{quantity}"], frame[f"idle_{quantity}"]
    highest = float(max(stalled.max(), idle.max()))
    hover = HoverTool(tooltips=[("", "@arm, @policy"), ("state", "@state"), ("stalled", "@shown"),
                                ("idle", "@idle_shown"), ("why", "@reason")])
    plot = style.new_figure(
        y_range=rows, x_axis_type="log", x_range=style.log_range(highest, 2000 if names else 25),
        tools=style.tools(hover), min_width=420 if names else 240,
    )
    style.name_decades(plot.xaxis[0], highest)
    plot.xaxis.axis_label = label
    _rows_axis(plot, names)
    low, rest = style.floored(stalled), style.floored(idle)
    source = ColumnDataSource({
        "row": list(zip(frame["arm"], frame["policy"], strict=True)),
        "x": low, "idle": rest,
        **{name: list(frame[name]) for name in ("arm", "policy", "state", "reason")},
        "colour": [palette.state(word).colour for word in frame["state"]],
        "marker": [palette.state(word).marker for word in frame["state"]],
        "shown": [style.short(value) for value in stalled],
        "idle_shown": [style.short(value) for value in idle],
        # Beside the mark, or beside the idle ring where that stands close to the right of it.
        "text_x": np.where((low < rest) & (rest < 6 * low), rest, low),
        "text": [_value_text(*pair, names) for pair in zip(frame["state"], stalled, strict=True)],
    })
    plot.segment("idle", "row", "x", "row", source=source, line_color=palette.GREY, line_width=1)
    plot.scatter("idle", "row", source=source, marker="circle", size=7, fill_color=palette.CARD,
                 line_color=palette.FAINT_INK, line_width=1.5)
    marks = plot.scatter("x", "row", source=source, marker="marker", size=11, fill_color="colour",
                         line_color=palette.INK, line_width=0.7)
    hover.renderers = [marks]
    plot.text("text_x", "row", "text", source=source, x_offset=10, text_baseline="middle",
              text_font=style.GLYPH_FONT, text_font_size="11px", text_color=palette.INK,
              background_fill_color=palette.CARD, padding=1)
    return plot


def _value_text(state: str, value: float | None, with_state: bool) -> str:
    shown = style.short(value)
    return f"{shown}  {palette.state(state).word}" if with_state else shown


def _rows_axis(plot: style.Plot, names: bool) -> None:
    plot.ygrid.grid_line_color = None
    plot.yaxis.major_tick_line_color = None
    plot.yaxis.group_text_font = style.FONT
    plot.yaxis.group_text_font_size = "12px"
    plot.yaxis.group_text_color = palette.INK
    plot.yaxis.group_label_orientation = "horizontal"
    plot.yaxis.separator_line_color = palette.GREY
    plot.yaxis.visible = names


def _references(plot: style.Plot, known: Sequence[beside.Known], quantity: str) -> Sequence[Key]:
    """Ranges measured elsewhere, as thin bars beside the row of the same arm and policy."""
    keys = []
    looks = ((beside.FOUNDING, palette.ORANGE, -_OFFSET), (beside.CELERIS, palette.GREEN, _OFFSET))
    for name, colour, offset in looks:
        part = [figure for figure in known if (figure.source, figure.quantity) == (name, quantity)]
        if not part:
            continue
        data: dict[str, Any] = {
            "row": [(figure.arm, figure.policy, offset) for figure in part],
            "low": style.floored(figure.low for figure in part),
            "high": style.floored(figure.high for figure in part),
        }
        source = ColumnDataSource(data)
        plot.segment("low", "row", "high", "row", source=source, line_color=colour, line_width=3)
        for end in ("low", "high"):
            plot.scatter(end, "row", source=source, marker="dash", angle=1.5708, size=8,
                         line_color=colour, line_width=2)
        keys.append(Key(beside.LABELS[name], colour, "range"))
    return keys

"""The sign of the case splice: dispatches for nothing, by arm and policy."""

from __future__ import annotations

import pandas as pd
from bokeh.models import ColumnDataSource, FactorRange, HoverTool

from lab import palette
from lab.plots import style
from lab.runs import Run
from lab.splice_findings import STALLS
from lab.static import Key, Picture

_ROW = 17
_COLUMNS = ("arm", "policy", "state", "noop_per_s", "eagain_per_s", "reached")


def df_noops(run: Run) -> pd.DataFrame:
    """One row per stalled arm and policy of the relay.

    Columns: arm, policy, state, noop_per_s (dispatches for nothing), eagain_per_s (of both sides),
    reached (came to where the fault is, and slept there).
    """
    rows = [
        (row["arm"], row["policy"], row["state"], row["noop_per_s"],
         row["eagain_client_per_s"] + row["eagain_origin_per_s"], row["reached"])
        for row in run.arms if row["arm"] in STALLS and "noop_per_s" in row
    ]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def plot_noops(run: Run) -> Picture:
    """No-op dispatches per second while stalled, a mark an arm and policy, EAGAINs as rings."""
    frame = df_noops(run)
    if frame.empty:
        return Picture(None, "This run stalled no relay")
    highest = float(max(frame["noop_per_s"].max(), frame["eagain_per_s"].max()))
    rows = list(zip(frame["arm"], frame["policy"], strict=True))
    hover = HoverTool(tooltips=[
        ("", "@arm, @policy"), ("state", "@state"), ("no-op dispatches/s", "@shown"),
        ("EAGAINs/s", "@eagains"), ("reached the state and slept", "@reached"),
    ])
    plot = style.new_figure(
        y_range=FactorRange(factors=rows[::-1], group_padding=0.7, subgroup_padding=0.0,
                            range_padding=0.6, range_padding_units="absolute"),
        x_axis_type="log", x_range=style.log_range(highest, 400), tools=style.tools(hover),
        toolbar_location="right", height=int(_ROW * (len(rows) + frame["arm"].nunique()) + 75),
    )
    style.name_decades(plot.xaxis[0], highest)
    plot.xaxis.axis_label = "no-op dispatches per second while stalled"
    plot.ygrid.grid_line_color = None
    plot.yaxis.major_tick_line_color = None
    plot.yaxis.group_text_font, plot.yaxis.group_text_color = style.FONT, palette.INK
    plot.yaxis.group_label_orientation = "horizontal"
    plot.yaxis.separator_line_color = palette.GREY
    source = ColumnDataSource({
        "row": rows, "x": style.floored(frame["noop_per_s"]),
        "eagain": style.floored(frame["eagain_per_s"]),
        **{name: list(frame[name]) for name in ("arm", "policy", "state")},
        "reached": ["yes" if yes else "no" for yes in frame["reached"]],
        "colour": [palette.state(word).colour for word in frame["state"]],
        "marker": [palette.state(word).marker for word in frame["state"]],
        "shown": [style.short(value) for value in frame["noop_per_s"]],
        "eagains": [style.short(value) for value in frame["eagain_per_s"]],
        "text": [f"{style.short(value)}  {palette.state(state).word}"
                 for value, state in zip(frame["noop_per_s"], frame["state"], strict=True)],
    })
    plot.scatter("eagain", "row", source=source, marker="circle", size=7, line_width=1.5,
                 fill_color=palette.CARD, line_color=palette.FAINT_INK)
    hover.renderers = [plot.scatter("x", "row", source=source, marker="marker", size=10,
                                    fill_color="colour", line_color=palette.INK, line_width=0.7)]
    plot.text("x", "row", "text", source=source, x_offset=10, text_baseline="middle",
              text_font=style.GLYPH_FONT, text_font_size="11px", text_color=palette.INK)
    keys = [*style.state_keys(frame["state"]),
            Key("EAGAINs of both sides", palette.FAINT_INK, "circle_open")]
    return Picture(plot, _title(frame), keys, style.caption_of(run, ["stall"]), plot.height)


def _title(frame: pd.DataFrame) -> str:
    spins = frame[frame["state"] == "spins"]
    if spins.empty:
        return "No dispatch was for nothing: no arm of this run spins"
    blind = spins[spins["eagain_per_s"] < 1000]
    return (f"Where it spins the handler runs for nothing, up to "
            f"{style.short(float(spins['noop_per_s'].max()))} times a second; in "
            f"{len(blind)} of {len(spins)} of these spins no EAGAIN tells")

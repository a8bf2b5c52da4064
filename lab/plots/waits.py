"""The cost of a wait against its timeout, one line a way, and of a wait that may not sleep."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from bokeh.layouts import gridplot
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d

from engine.errors import UsageError
from lab import palette
from lab.plots import style
from lab.runs import Run
from lab.static import Key, Picture
from lab.wait_commands import figure
from lab.wait_tables import notes
from lab.waits import label

# One look a way: ways that are one wait underneath share a colour and differ by mark and dash.
LOOKS = {
    "io_uring_wait_cqe_timeout": (palette.VERMILION, "triangle", "solid"),
    "io_uring_submit_and_wait_timeout": (palette.ORANGE, "diamond", "dashed"),
    "io_uring_submit_and_wait_min_timeout": (palette.YELLOW, "square", "solid"),
    "ring_worker_kernel": (palette.PURPLE, "circle", "dotted"),
    "timerfd": (palette.GREY, "x", "solid"),
    "epoll_pwait2": (palette.BLUE, "circle", "solid"),
    "ppoll": (palette.SKY, "diamond", "dashed"),
    "epoll_wait": (palette.BLACK, "square", "solid"),
    "io_uring_get_events": (palette.GREEN, "triangle", "solid"),
    "ring_worker_poll": (palette.GREEN, "diamond", "solid"),
    "io_uring_peek_cqe": (palette.GREEN, "circle", "solid"),
    "expired_timeout_op": (palette.VERMILION, "x", "solid"),
    "eventfd_workaround": (palette.PURPLE, "square", "dashed"),
    "eventfd_workaround_spin": (palette.PURPLE, "x", "dotted"),
}
# A log axis has no zero; the timeout of zero stands a decade left of the shortest one.
ZERO_US = 1e-4
ZERO_HEIGHT_ROW = 27


def df_waits(run: Run) -> pd.DataFrame:
    """The rows of a run: way, timeout_ns, flags, napi_us, and the figures per wait.

    Times end in ``_us`` or begin with ``us_`` and are microseconds; switches and timer events are
    numbers per wait.
    """
    return pd.DataFrame(run.data["rows"])


def plot_timeouts(run: Run, flags: str = "none") -> Picture:
    """Duration of a wait, and how far past its deadline it ends, against the timeout; log axes."""
    frame = df_waits(run)
    frame = frame[(frame["flags"] == flags) & (frame["napi_us"] == 0)]
    if frame.empty:
        raise UsageError(f"run {run.name} has no rows under ring flags '{flags}'")
    frame = frame.assign(x=[max(ns / 1e3, ZERO_US) for ns in frame["timeout_ns"]])
    timeouts = sorted(set(frame["timeout_ns"]))
    left = _panel(frame, timeouts, "us_p50", "one wait takes, us (p50)")
    right = _panel(frame, timeouts, "overrun_us_p50", "ends past its deadline by, us (p50)")
    own = [max(ns / 1e3, ZERO_US) for ns in timeouts if ns]
    left.line(own, own, line_color=palette.FAINT_INK, line_dash="dotted", line_width=1)
    grid = gridplot([[left, right]], sizing_mode="stretch_width", toolbar_location="right",
                    toolbar_options={"logo": None})
    there = [way for way in LOOKS if way in set(frame["way"])]
    keys = [Key(way, LOOKS[way][0], _shape(way)) for way in there]
    keys.append(Key("the timeout itself", palette.FAINT_INK, "dashed"))
    return Picture(grid, _title(frame), keys, f"{notes(run)} Run {run.name}.", 420)


def plot_zero(run: Run, flags: str = "none") -> Picture:
    """A wait with timeout zero, by way, against epoll_wait: log axis, with the round's scatter."""
    frame = df_waits(run)
    frame = frame[(frame["flags"] == flags) & (frame["napi_us"] == 0) & (frame["timeout_ns"] == 0)]
    frame = frame.sort_values("us_p50", ascending=False)
    if frame.empty:
        raise UsageError(f"run {run.name} measured no timeout of zero under '{flags}'")
    frame = frame.assign(
        colour=[_armed_colour(value) for value in frame["timer_starts"]],
        mark=["triangle" if _arms(value) else "circle" for value in frame["timer_starts"]],
        text=[f"{figure(us)} us, {figure(ratio)} x" for us, ratio in
              zip(frame["us_p50"], frame["ratio_to_epoll_wait_0"], strict=True)],
    )
    source = ColumnDataSource(frame[["way", "us_p50", "us_lowest", "us_highest", "us_p99", "colour",
                                     "mark", "text"]])
    hover = HoverTool(tooltips=[("", "@way"), ("p50", "@us_p50{0.000} us"),
                                ("rounds", "@us_lowest{0.000} to @us_highest{0.000} us"),
                                ("p99", "@us_p99{0.000} us")])
    lowest, highest = float(frame["us_lowest"].min()), float(frame["us_highest"].max())
    height = ZERO_HEIGHT_ROW * len(frame) + 60
    plot = style.new_figure(
        y_range=list(frame["way"]), x_axis_type="log", height=height, tools=style.tools(hover),
        toolbar_location="right", x_range=Range1d(start=lowest / 2, end=highest * 60),
        x_axis_label="one wait takes, us (p50; the line spans the rounds)",
    )
    plot.segment("us_lowest", "way", "us_highest", "way", source=source,
                 line_color=palette.FAINT_INK, line_width=2)
    marks = plot.scatter("us_p50", "way", source=source, marker="mark", size=11,
                         fill_color="colour", line_color=palette.INK, line_width=0.7)
    hover.renderers = [marks]
    plot.text("us_highest", "way", "text", source=source, x_offset=10, text_baseline="middle",
              text_font=style.GLYPH_FONT, text_font_size="11px", text_color=palette.INK)
    plot.ygrid.grid_line_color = None
    _decades(plot, lowest, highest)
    keys = [Key("arms a timer", palette.VERMILION, "triangle"),
            Key("arms none", palette.BLUE, "circle")]
    if frame["timer_starts"].isna().any():
        keys.append(Key("timers not counted", palette.GREY, "circle"))
    return Picture(plot, "With a timeout of zero, whoever arms a timer pays for it", keys,
                   f"{notes(run)} x: times an epoll_wait(0). Run {run.name}.", height)


def _panel(frame: pd.DataFrame, timeouts: Sequence[int], quantity: str, axis: str) -> style.Plot:
    hover = HoverTool(tooltips=[("", "@way, timeout @shown"), ("p50", "@us_p50{0.000} us"),
                                ("past the deadline", "@overrun_us_p50{0.000} us")])
    values = [value for value in frame[quantity] if value > 0]
    plot = style.new_figure(
        height=420, x_axis_type="log", y_axis_type="log", tools=style.tools(hover),
        x_range=Range1d(start=ZERO_US / 2.5, end=max(timeouts) / 1e3 * 3 or 1),
        y_range=Range1d(start=min(values) / 2, end=max(values) * 2),
        x_axis_label="timeout asked for", y_axis_label=axis, min_width=330,
    )
    at = {max(ns / 1e3, ZERO_US): label(ns) for ns in timeouts}
    plot.xaxis.ticker = FixedTicker(ticks=list(at))
    plot.xaxis.major_label_overrides = at
    plot.xaxis.major_label_orientation = 0.7
    drawn = []
    for way, (colour, marker, dash) in LOOKS.items():
        part = frame[(frame["way"] == way) & (frame[quantity] > 0)].sort_values("x")
        if part.empty:
            continue
        source = ColumnDataSource({
            **{name: list(part[name]) for name in ("x", "way", "us_p50", "overrun_us_p50")},
            "y": list(part[quantity]), "shown": [label(ns) for ns in part["timeout_ns"]],
        })
        if len(part) > 2:  # between two points a line would claim what nobody measured
            plot.line("x", "y", source=source, line_color=colour, line_dash=dash, line_width=2)
        drawn.append(plot.scatter("x", "y", source=source, marker=marker, size=8,
                                  fill_color=colour, line_color=palette.INK, line_width=0.6))
    hover.renderers = drawn
    _name_us(plot.yaxis[0], min(values), max(values))
    return plot


def _title(frame: pd.DataFrame) -> str:
    zero = frame[(frame["way"] == "io_uring_wait_cqe_timeout") & (frame["timeout_ns"] == 0)]
    if zero.empty:
        return "Cost of a wait against its timeout"
    us = float(zero["us_p50"].iloc[0])
    if _arms(zero["timer_starts"].iloc[0]) or us > 1:
        return (f"A ring wait never costs less than its timer: {figure(us)} us even for a timeout "
                "of zero")
    return f"A ring wait with a timeout of zero returns at once: {figure(us)} us"


def _arms(starts: float | None) -> bool:
    return starts is not None and starts > 0.5


def _armed_colour(starts: float | None) -> str:
    if starts is None or starts != starts:
        return palette.GREY
    return palette.VERMILION if _arms(starts) else palette.BLUE


def _shape(way: str) -> str:
    marker = LOOKS[way][1]
    return marker if marker in ("circle", "square", "triangle", "diamond", "x") else "line"


def _decades(plot: style.Plot, lowest: float, highest: float) -> None:
    _name_us(plot.xaxis[0], lowest, highest * 12)


def _name_us(axis: style.Plot, lowest: float, highest: float) -> None:
    """Ticks at whole decades, named without exponents."""
    ticks = [10.0**power for power in range(-4, 7) if lowest / 3 <= 10.0**power <= highest * 3]
    axis.ticker = FixedTicker(ticks=ticks)
    axis.major_label_overrides = {tick: f"{tick:,.10g}" for tick in ticks}

"""The Bokeh documents of the live picture: small figures that share one source and one time axis.

Each figure is a root of its own, so that the page can set its title and its legend in HTML between
them: a legend inside a plot makes a frame half as dear again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bokeh.document import Document
from bokeh.embed.util import standalone_docs_json_and_render_items
from bokeh.models import (
    BasicTicker,
    BoxSelectTool,
    ColumnDataSource,
    DataRange1d,
    HoverTool,
    LinearAxis,
    Range1d,
    SaveTool,
)

from lab import palette
from lab.live.case import Line, LiveCase, Plotted
from lab.live.stream import legend
from lab.plots import style
from lab.static import Key

ROWS, MARKS = "rows", "marks"
SECONDS = 40.0
_LANES = 4
_LOG_ROOM = 0.02
_BEYOND = 1e3  # decades above the top have names too
_CPU = Plotted(
    "cpu", "CPU time", (
        Line("process_cpu", "the whole kernel process", palette.GREY, width=2.6,
             tip="kernel process"),
        Line("queued", "{one}: on a run queue, running or not", palette.ORANGE, "dashed", 2.2,
             "on a run queue"),
        Line("cpu", "{one}: running", palette.BLACK, width=1.4, tip="{one} runs", format="0.0"),
    ),
    "ms/s", top=1000,  # one core; a process may take more
)


@dataclass(frozen=True)
class Plot:
    """One root of the document with what the page writes around it."""

    name: str
    title: str
    keys: tuple[Key, ...]
    figure: Any


def layout(case: LiveCase) -> tuple[Document, list[Plot]]:
    """The document and its plots, top to bottom. The sources are named ``rows`` and ``marks``."""
    shape = case.shape
    rows = ColumnDataSource({name: [] for name in (*shape.names, *map(log_name, shape.rates))},
                            name=ROWS)
    marks = ColumnDataSource({"t": [], "name": [], "text": [], "lane": []}, name=MARKS)
    span = Range1d(start=-SECONDS, end=0.0, name="time")
    plots = [_events(marks, span)]
    for spec in all_plots(case):
        scales = ("log", "linear") if spec.log else ("",)
        plots += [_plot(spec, rows, span, scale) for scale in scales]
    for plot in plots[1:]:
        plot.figure.vspan(x="t", source=marks, line_color=palette.FAINT_INK, line_width=1,
                          line_dash="dotted", level="underlay")
    document = Document()
    for plot in plots:
        for renderer in plot.figure.renderers:
            # A selected span is shaded; what lies outside of it need not fade.
            renderer.nonselection_glyph = None
        document.add_root(plot.figure)
    return document, plots


def for_page(case: LiveCase) -> dict[str, Any]:
    """The plots as the page gets them once, with what it needs to fill and to label them."""
    _, plots = layout(case)
    docs, items = standalone_docs_json_and_render_items([plot.figure for plot in plots])
    return {
        "docs": docs, "docid": items[0].docid,
        "plots": [{"id": plot.figure.id, "name": plot.name, "title": plot.title,
                   "legend": legend(plot.keys)} for plot in plots],
        "columns": list(case.shape.names), "logs": list(case.shape.rates),
        "seconds": SECONDS, "floor": style.FLOOR,
    }


def all_plots(case: LiveCase) -> list[Plotted]:
    """Those of the case, with the CPU, which every engine has, behind the rates."""
    lines = tuple(replace(line, label=line.label.format(one=case.words.one),
                          tip=line.tip.format(one=case.words.one)) for line in _CPU.lines)
    rates = [spec for spec in case.plots if spec.log]
    return [*rates, replace(_CPU, lines=lines), *(spec for spec in case.plots if not spec.log)]


def log_name(name: str) -> str:
    """The column that stands on the log axis for ``name``: nothing below the floor."""
    return f"{name}_log"


def _figure(span: Range1d, hover: HoverTool | None = None, **options: Any) -> Any:
    tools = [
        BoxSelectTool(dimensions="width", persistent=True), SaveTool(),
    ]
    plot = style.new_figure(x_range=span, tools=[*tools, *([hover] if hover else [])],
                            min_border_left=58, min_border_right=52, min_border_top=6,
                            min_border_bottom=6, **options)
    plot.toolbar.active_drag = tools[0]
    plot.xgrid.grid_line_color = None
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=6, num_minor_ticks=0)
    plot.xaxis.formatter = style.plain_numbers()
    plot.xaxis.visible = False
    plot.xaxis.axis_label = "seconds since the panel was opened"
    return plot


def _events(marks: ColumnDataSource, span: Range1d) -> Plot:
    hover = HoverTool(tooltips=[("@t{0.0} s", "@name")], description="What was done")
    plot = _figure(span, height=60, y_range=Range1d(start=-0.6, end=_LANES - 0.4))
    plot.yaxis.visible = False
    plot.ygrid.grid_line_color = None
    plot.toolbar.tools = [hover]
    hover.renderers = [plot.scatter("t", "lane", source=marks, marker="inverted_triangle", size=7,
                 fill_color=palette.INK, line_color=None)]
    plot.text("t", "lane", "text", source=marks, x_offset=6, text_baseline="middle",
              text_font=style.GLYPH_FONT, text_font_size="10px", text_color=palette.INK)
    return Plot("events", "What was done", (), plot)


def _plot(spec: Plotted, rows: ColumnDataSource, span: Range1d, scale: str) -> Plot:
    hover = _hover(spec)
    plot = _figure(span, hover, height=spec.height, **_limits(spec, scale))
    plot.yaxis.axis_label = spec.unit
    _scale(plot, spec, scale)
    plot.xaxis.visible = spec.time_axis
    if spec.top and scale != "linear":
        _show_up_to(plot, spec.top)
    drawn = {line: _step(plot, rows, line, scale) for line in spec.lines if not line.right}
    if spec.right:
        drawn |= _on_the_right(plot, rows, spec)
        plot.y_range.renderers = [glyph for line, glyph in drawn.items() if not line.right]
    hover.renderers = [drawn[[line for line in spec.lines if not line.right][-1]]]
    # The line on top is named first.
    keys = tuple(Key(line.label, line.colour, line.shape) for line in reversed(spec.lines))
    return Plot(f"{spec.name}-{scale}" if scale else spec.name, spec.title, keys, plot)


def _limits(spec: Plotted, scale: str) -> dict[str, Any]:
    # Every axis follows what is drawn: nothing is cut off, however fast a loop goes round.
    if scale == "log":
        return {"y_axis_type": "log", "y_range": DataRange1d(
            start=style.log_range(spec.top).start, range_padding=_LOG_ROOM)}
    if spec.top and not scale:
        return {"y_range": DataRange1d(start=0, range_padding=spec.room)}
    return {"y_range": DataRange1d(start=0, range_padding=spec.room,
                                   min_interval=50 if scale else spec.least)}


def _scale(plot: Any, spec: Plotted, scale: str) -> None:
    if scale == "log":
        style.name_decades(plot.yaxis[0], spec.top * _BEYOND, every=2)
        return
    plot.yaxis.formatter = style.plain_numbers()
    ticker: Any = BasicTicker(desired_num_ticks=4 if scale else 3, num_minor_ticks=0)
    if spec.least > 1 and not scale:
        ticker.min_interval = 1
    plot.yaxis.ticker = ticker
    plot.visible = not scale


def _show_up_to(plot: Any, top: float) -> None:
    """So high at least: a point that is not seen, which keeps the axis from closing in."""
    plot.scatter("t", "top", source=ColumnDataSource({"t": [0.0], "top": [top]}), size=1,
                 fill_alpha=0, line_alpha=0, level="underlay")


def _on_the_right(plot: Any, rows: ColumnDataSource, spec: Plotted) -> dict[Line, Any]:
    lines = [line for line in spec.lines if line.right]
    plot.extra_y_ranges = {"right": DataRange1d(start=0, range_padding=spec.room,
                                                min_interval=spec.right_least)}
    drawn = {line: _step(plot, rows, line, "", y_range_name="right") for line in lines}
    plot.extra_y_ranges["right"].renderers = list(drawn.values())
    ticker: Any = BasicTicker(desired_num_ticks=3, num_minor_ticks=0)
    right = LinearAxis(y_range_name="right", axis_label=spec.right, ticker=ticker)
    right.formatter = style.plain_numbers()
    plot.add_layout(right, "right")
    style.dress(right)
    return drawn


def _step(plot: Any, source: ColumnDataSource, line: Line, scale: str, **options: Any) -> Any:
    # A row's figures hold for the time before it, so the line drops at the end of the row.
    name = log_name(line.column) if scale == "log" else line.column
    return plot.step("t", name, source=source, mode="before", line_color=line.colour,
                     line_width=line.width, line_dash="dashed" if line.shape == "dashed"
                     else "solid", **options)


def _hover(spec: Plotted) -> HoverTool:
    told = [(line.tip or line.label, f"@{line.column}{{{line.format}}} "
             + (spec.right if line.right else spec.unit)) for line in reversed(spec.lines)]
    return HoverTool(mode="vline", tooltips=[("at", "@t{0.0} s"), *told, *spec.also],
                     point_policy="follow_mouse", description="Figures at the pointer")

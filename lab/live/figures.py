"""The Bokeh documents of the live picture: small figures that share one source and one time axis.

Each figure is a root of its own, so that the page can set its title and its legend in HTML between
them: a legend inside a plot makes a frame half as dear again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bokeh.document import Document
from bokeh.models import (
    BasicTicker,
    BoxSelectTool,
    ColumnDataSource,
    DataRange1d,
    FixedTicker,
    HoverTool,
    LinearAxis,
    Range1d,
    SaveTool,
)

from lab import palette
from lab.live.series import COLUMNS, RATES, WHYS
from lab.plots import style
from lab.plots.series import WHYS as WHY_LOOKS
from lab.static import Key

ROWS, MARKS = "rows", "marks"
SECONDS = 40.0
_HEIGHT = 118
_LANES = 4
# The reasons of a wait in few words, with the timeout that each means.
_WHY_WORDS = {
    "ready": "ready: 0", "list": "list: 0", "overdue": "overdue: 0", "owed": "owed: 0",
    "send": "SEND prepared: none", "idle": "idle: periodic", "deadline": "deadline",
    "event": "event: none",
}
_DASHED = ("ready", "send", "event", "owed")
_HIGHEST = 1e6


@dataclass(frozen=True)
class Plot:
    """One root of the document with what the page writes around it."""

    name: str
    title: str
    keys: tuple[Key, ...]
    figure: Any
    unit: str = ""


def layout() -> tuple[Document, list[Plot]]:
    """The document and its plots, top to bottom. The sources are named ``rows`` and ``marks``."""
    rows = ColumnDataSource({name: [] for name in (*COLUMNS, *map(log_name, RATES))}, name=ROWS)
    marks = ColumnDataSource({"t": [], "name": [], "text": [], "lane": []}, name=MARKS)
    span = Range1d(start=-SECONDS, end=0.0, name="time")
    plots = [
        _events(marks, span), _rates(rows, span, "log"), _rates(rows, span, "linear"),
        _cpu(rows, span), _list(rows, span), _bytes(rows, span),
    ]
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


def log_name(name: str) -> str:
    """The column that stands on the log axis for ``name``: nothing below the floor."""
    return f"{name}_log"


def _figure(span: Range1d, hover: HoverTool | None = None, **options: Any) -> Any:
    options.setdefault("height", _HEIGHT)
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


def _hover(*lines: tuple[str, str]) -> HoverTool:
    return HoverTool(mode="vline", tooltips=[("at", "@t{0.0} s"), *lines],
                     point_policy="follow_mouse", description="Figures at the pointer")


def _step(plot: Any, source: ColumnDataSource, y: str, key: Key, width: float = 1.8) -> Any:
    # A row's figures hold for the time before it, so the line drops at the end of the row.
    dash = "dashed" if key.shape == "dashed" else "solid"
    return plot.step("t", y, source=source, mode="before", line_color=key.colour,
                     line_width=width, line_dash=dash)


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


def _rates(rows: ColumnDataSource, span: Range1d, scale: str) -> Plot:
    keys = [Key("iterations", palette.BLACK)]
    keys += [Key(_WHY_WORDS[why], WHY_LOOKS[why][1], "dashed" if why in _DASHED else "line")
             for why in WHYS]
    hover = _hover(("iterations/s", "@iterations{0,0}"), ("wasted/s", "@wasted{0,0}"),
                   *((f"{why}/s", f"@why_{why}{{0,0}}") for why in WHYS))
    log = scale == "log"
    limits: dict[str, Any] = (
        {"y_axis_type": "log", "y_range": style.log_range(_HIGHEST, 1.2)} if log
        else {"y_range": DataRange1d(start=0, range_padding=0.1, min_interval=50)}
    )
    plot = _figure(span, hover, height=150, **limits)
    plot.yaxis.axis_label = "per second"
    if log:
        style.name_decades(plot.yaxis[0], _HIGHEST, every=2)
    else:
        plot.yaxis.formatter = style.plain_numbers()
        plot.yaxis.ticker = BasicTicker(desired_num_ticks=4, num_minor_ticks=0)
        plot.visible = False
    lines = []
    for why, key in reversed(list(zip(WHYS, keys[1:], strict=True))):
        name = f"why_{why}"
        lines.append(_step(plot, rows, log_name(name) if log else name, key))
    top = _step(plot, rows, log_name("iterations") if log else "iterations", keys[0], 1.1)
    hover.renderers = [top]
    title = "Iterations, and waits by reason and timeout"
    return Plot(f"rates-{scale}", title, tuple(keys), plot, "1/s")


def _cpu(rows: ColumnDataSource, span: Range1d) -> Plot:
    keys = (Key("worker thread: running", palette.BLACK),
            Key("worker thread: on a run queue, running or not", palette.ORANGE, "dashed"),
            Key("the whole kernel process", palette.GREY))
    hover = _hover(("worker runs", "@cpu{0.0} ms/s"), ("on a run queue", "@queued{0} ms/s"),
                   ("kernel process", "@process_cpu{0.0} ms/s"))
    plot = _figure(span, hover, y_range=Range1d(start=0, end=1080))
    plot.yaxis.axis_label = "ms per second"
    plot.yaxis.ticker = FixedTicker(ticks=[0, 500, 1000])
    _step(plot, rows, "process_cpu", keys[2], 2.6)
    _step(plot, rows, "queued", keys[1], 2.2)
    hover.renderers = [_step(plot, rows, "cpu", keys[0], 1.4)]
    return Plot("cpu", "CPU time", keys, plot, "ms/s")


def _list(rows: ColumnDataSource, span: Range1d) -> Plot:
    keys = (Key("listed", palette.VERMILION), Key("sending", palette.BLUE, "dashed"),
            Key("held completions", palette.PURPLE))
    hover = _hover(("listed", "@list_length{0}"), ("sending", "@sending{0}"),
                   ("held", "@held_now{0}"))
    plot = _figure(span, hover, height=96, y_range=DataRange1d(start=0, range_padding=0.25,
                                                              min_interval=2))
    plot.yaxis.axis_label = "connections"
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=3, num_minor_ticks=0, min_interval=1)
    lines = [_step(plot, rows, name, key, 2.2)
             for name, key in zip(("list_length", "sending", "held_now"), keys, strict=True)]
    hover.renderers = lines[:1]
    return Plot("list", "The dirty list, and SENDs in flight", keys, plot, "connections")


def _bytes(rows: ColumnDataSource, span: Range1d) -> Plot:
    keys = (Key("taken by the sockets, MiB/s (left)", palette.GREEN),
            Key("waiting in the sockets, KiB (right)", palette.BLUE, "dashed"))
    hover = _hover(("out", "@out_mib{0.00} MiB/s"), ("waiting", "@outq_kib{0,0} KiB"))
    plot = _figure(span, hover, height=134, y_range=DataRange1d(start=0, range_padding=0.12,
                                                               min_interval=1))
    plot.yaxis.axis_label = "MiB/s"
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=3, num_minor_ticks=0)
    plot.xaxis.visible = True
    return _with_right(plot, rows, keys, hover)


def _with_right(
    plot: Any, rows: ColumnDataSource, keys: tuple[Key, Key], hover: HoverTool
) -> Plot:
    plot.extra_y_ranges = {"kib": DataRange1d(start=0, range_padding=0.12, min_interval=64)}
    waiting = plot.step("t", "outq_kib", source=rows, mode="before", y_range_name="kib",
                        line_color=keys[1].colour, line_width=2, line_dash="dashed")
    plot.extra_y_ranges["kib"].renderers = [waiting]
    ticker: Any = BasicTicker(desired_num_ticks=3, num_minor_ticks=0)
    right = LinearAxis(y_range_name="kib", axis_label="KiB", ticker=ticker)
    right.formatter = style.plain_numbers()
    plot.add_layout(right, "right")
    style.dress(right)
    out = _step(plot, rows, "out_mib", keys[0])
    plot.y_range.renderers = [out]
    hover.renderers = [out]
    return Plot("bytes", "Bytes out, and bytes that wait", keys, plot, "MiB/s, KiB")

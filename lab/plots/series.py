"""What one arm did over time, policies side by side, with the windows shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from bokeh.layouts import gridplot
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FixedTicker,
    HoverTool,
    LinearAxis,
    Range1d,
)
from bokeh.models.annotations import BoxAnnotation, Label

from engine.errors import UsageError
from lab import palette
from lab.plots import style
from lab.runs import Run
from lab.static import Key, Picture

BIN_S = 0.05
_HEIGHTS = (165, 165, 150, 130)


@dataclass(frozen=True)
class Shape:
    """What the samples of an engine are, as a picture over time shows them.

    ``whys`` are the reasons of its waits, in words; ``taken`` the columns whose sum is the bytes of
    the last picture, with its words; ``gauges`` are told by pointing at the first one. ``noops`` is
    a count of handlers that ran for nothing, drawn beside the iterations; ``shipped`` and ``cures``
    the policies that tell the most.
    """

    whys: Mapping[str, str]
    taken: tuple[str, ...]
    taken_words: str
    gauges: tuple[str, ...]
    shipped: str
    cures: tuple[str, ...]
    noops: str = ""

    @property
    def rates(self) -> tuple[str, ...]:
        """Counts that a bin has per second."""
        return ("iterations", "waits", "wasted", *(f"why_{why}" for why in self.whys),
                *((self.noops,) if self.noops else ()))


RING = Shape(
    whys={
        "list": "list not empty: zero timeout",
        "overdue": "deadline passed: zero timeout",
        "owed": "owes a re-arm: zero timeout",
        "ready": "completions were ready",
        "send": "SEND just prepared: no timeout",
        "idle": "idle: periodic timeout",
        "deadline": "sleeps to a deadline",
        "event": "sleeps until an event",
    },
    taken=("bytes_sent", "bytes_direct"), taken_words="taken by the socket",
    gauges=("list_length", "sending"),
    shipped="shipped", cures=("fixed", "held-unlisted", "tickless"),
)
RELAY = Shape(
    whys={
        "active": "a direction is active: zero timeout",
        "overdue": "deadline passed: zero timeout",
        "deadline": "sleeps to a deadline",
        "event": "sleeps until an event",
    },
    taken=("bytes_spliced_client", "bytes_copied_client",
           "bytes_spliced_origin", "bytes_copied_origin"),
    taken_words="taken from either side",
    gauges=("sessions", "piped"),
    shipped="before", cures=("after", "recv-allowed", "later"), noops="noop_dispatches",
)


def shape_of(columns: Sequence[str]) -> Shape:
    """Whose samples have these columns."""
    return RELAY if "why_active" in columns else RING


def df_series(
    run: Run, arm: str, policy: str, repetition: int | None = None, bin_s: float = BIN_S
) -> pd.DataFrame:
    """One row per ``bin_s`` seconds of one repetition (the first unless asked otherwise).

    Windows begin and end with a bin, so that no bin mixes a stall with what follows it.

    Columns: t_s (middle of the bin, seconds since the repetition began), from_s and to_s (its
    edges), window (empty between windows), ``NAME_per_s`` for iterations, waits, wasted, every
    why_* and the relay's noop_dispatches, cpu_ms_per_s of the loop's thread, on_queue_fraction
    (0 to 1), taken_mib (bytes since the repetition began: of responses, that the socket has taken;
    of the relay, that it has taken from either side), and as they were at the end of the bin
    list_length and sending, or the relay's sessions and piped. ``attrs["windows"]`` holds name,
    start and end of each window; ``attrs["taken"]`` every sample's time and taken_mib;
    ``attrs["shape"]`` whose samples they are.
    """
    samples = run.df_samples()
    rows = samples[(samples["arm"] == arm) & (samples["policy"] == policy)]
    if rows.empty:
        raise UsageError(f"run {run.name} holds no samples of {arm} under {policy}")
    repetition = int(rows["repetition"].min()) if repetition is None else repetition
    rows = rows[rows["repetition"] == repetition].sort_values("t_s")
    if len(rows) < 2:
        raise UsageError(f"{arm} under {policy} has no repetition {repetition} with two samples")
    shape = shape_of(list(rows.columns))
    windows, times = spans(rows), rows["t_s"].to_numpy(dtype=float)
    at = _edges(times, bin_s, [edge for _, start, end in windows for edge in (start, end)])
    cut = rows.iloc[at]
    seconds = np.diff(times[at])
    change = {name: np.diff(cut[name].to_numpy(dtype=float)) for name in cut.columns
              if name in shape.rates or name in ("thread_cpu_ns", "run_ns", "queue_ns")}
    frame = pd.DataFrame({"t_s": times[at][1:] - seconds / 2,
                          "from_s": times[at][:-1], "to_s": times[at][1:]})
    frame["window"] = rows["window"].fillna("").to_numpy()[(at[1:] + at[:-1] + 1) // 2]
    for name in shape.rates:
        frame[f"{name}_per_s"] = change[name] / seconds
    frame["cpu_ms_per_s"] = change["thread_cpu_ns"] / 1e6 / seconds
    on_queue = (change["run_ns"] + change["queue_ns"]) / 1e9 / seconds
    frame["on_queue_fraction"] = np.clip(on_queue, 0.0, 1.0)
    taken = rows[list(shape.taken)].sum(axis=1).to_numpy(dtype=float)
    taken = (taken - taken[0]) / 2**20
    frame["taken_mib"] = taken[at][1:]
    for gauge in shape.gauges:
        frame[gauge] = cut[gauge].to_numpy()[1:]
    frame.insert(0, "repetition", repetition)
    frame.attrs |= {"windows": windows, "taken": (times, taken), "shape": shape}
    return frame


def plot_series(
    run: Run, arm: str, policies: Sequence[str] | None = None, repetition: int | None = None
) -> Picture:
    """Iterations, waits by reason, CPU and bytes taken; one column per policy, at most three.

    Without ``policies`` (or with none that the run has) the three that tell the most are chosen.
    """
    samples = run.df_samples()
    sampled = set(samples.loc[samples["arm"] == arm, "policy"])  # not those of a foreign server
    arms = {row["policy"]: row for row in run.arms
            if row["arm"] == arm and row["policy"] in sampled}
    if not arms:
        raise UsageError(f"run {run.name} has no arm '{arm}'")
    chosen = [name for name in policies or () if name in arms][:3] or telling(
        arms, shape_of(list(samples.columns)))
    frames = {name: df_series(run, arm, name, repetition) for name in chosen}
    highest = max(float(frame["iterations_per_s"].max()) for frame in frames.values())
    last = max(float(frame["to_s"].max()) for frame in frames.values())
    shared = {
        "x": Range1d(start=0, end=last),
        "rate": style.log_range(highest, 12), "cpu": Range1d(start=0, end=1080),
        "bytes": DataRange1d(start=0, range_padding=0.15),
    }
    columns = [
        _column(frames[name], arms[name], shared, highest, number == 0, name == chosen[-1])
        for number, name in enumerate(chosen)
    ]
    grid = gridplot([list(row) for row in zip(*columns, strict=True)], toolbar_location="right",
                    sizing_mode="stretch_width", toolbar_options={"logo": None})
    shown = 1 + int(next(iter(frames.values()))["repetition"].iloc[0])
    caption = (f"Repetition {shown}, in steps of {BIN_S * 1000:.0f} ms. "
               f"{style.caption_of(run, list(_windows_of(arms)))}")
    title = f"{arm}: " + ", ".join(f"{arms[name]['state']} under {name}" for name in chosen)
    return Picture(grid, title, _keys(list(frames.values())), caption, sum(_HEIGHTS))


def telling(arms: Mapping[str, Mapping[str, Any]], shape: Shape) -> list[str]:
    """Up to three policies of one arm: as shipped, one that spins, one that cures it."""
    wanted = [shape.shipped] if shape.shipped in arms else []
    if not any(arms[name]["state"] == "spins" for name in wanted):
        wanted += [name for name, row in arms.items() if row["state"] == "spins"][:1]
    wanted += [name for name in shape.cures if name in arms]
    return [*dict.fromkeys([*wanted, *arms])][:3]


def _windows_of(arms: dict[str, dict[str, Any]]) -> dict[str, None]:
    return {name: None for row in arms.values() for name in row["windows"]}


def _keys(frames: Sequence[pd.DataFrame]) -> list[Key]:
    """Legend of the reasons that occurred, and of the two lines of the CPU panel."""
    shape: Shape = frames[0].attrs["shape"]
    noops = [Key("handlers run for nothing", palette.ORANGE, "dotted")] if shape.noops else []
    reasons = [
        Key(f"wait: {words}", palette.WHYS[why]) for why, words in shape.whys.items()
        if any(bool((frame[f"why_{why}_per_s"] > 0).any()) for frame in frames)
    ]
    return [*noops, *reasons, Key("CPU", palette.BLACK),
            Key("on queue: running or waiting for a CPU", palette.ORANGE, "dashed")]


def _edges(
    t_s: np.ndarray[Any, Any], bin_s: float, fixed: Sequence[float]
) -> np.ndarray[Any, Any]:
    """Indices of the samples nearest to the edges of the bins, each once; ``fixed`` are edges."""
    regular = np.arange(t_s[0], t_s[-1] + bin_s / 2, bin_s)
    far = [edge for edge in regular if all(abs(edge - kept) >= bin_s / 2 for kept in fixed)]
    wanted = np.unique([t_s[0], *far, *(edge for edge in fixed if t_s[0] <= edge <= t_s[-1])])
    right = np.clip(np.searchsorted(t_s, wanted), 1, len(t_s) - 1)
    nearer_left = wanted - t_s[right - 1] < t_s[right] - wanted
    edges = np.unique(right - nearer_left)
    # The last moments count too: in a bin of their own when they are half a bin long, else added.
    inner = edges[(edges == 0) | (t_s[-1] - t_s[edges] >= bin_s / 2)]
    return np.append(inner, len(t_s) - 1)


def _column(
    frame: pd.DataFrame, row: dict[str, Any], shared: dict[str, Any], highest: float,
    first: bool, last: bool,
) -> list[style.Plot]:
    shape: Shape = frame.attrs["shape"]
    columns: dict[str, Any] = (
        {name: _drawn(frame[name].to_numpy(dtype=np.float32)) for name in frame.columns
         if name not in ("repetition", "window", "from_s")}
        | {"window": [*frame["window"], frame["window"].iloc[-1]],
           "from_s": np.append(frame["from_s"], frame["to_s"].iloc[-1]).astype(np.float32)}
        | {f"{name}_log": _drawn(style.floored(frame[f"{name}_per_s"]).astype(np.float32))
           for name in shape.rates}
    )
    source = ColumnDataSource(columns)
    panels = [
        _iterations(source, shape, shared, highest), _reasons(source, frame, shared, highest),
        _cpu(source, shared), _bytes(frame, shared),
    ]
    look = palette.state(row["state"])
    panels[0].title.text = f"{look.mark} {row['policy']}: {look.word}"
    for number, panel in enumerate(panels):
        panel.height = _HEIGHTS[number]
        panel.x_range = shared["x"]
        panel.xaxis.visible = number == len(panels) - 1
        _shade(panel, frame, named=number == 0)
        # All columns share their scales: the outermost axes serve them all.
        panel.left[0].visible = first
        for axis in panel.right:
            axis.visible = last
    panels[-1].xaxis.axis_label = "seconds since the repetition began"
    return panels


def _drawn(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A step is drawn from each point to the next: the last one needs a point to end at."""
    return np.append(values, values[-1])


def _panel(y_range: Any, label: str, hover: HoverTool, **options: Any) -> style.Plot:
    plot = style.new_figure(y_range=y_range, tools=style.tools(hover), min_width=220,
                            min_border_right=12, **options)
    plot.yaxis.axis_label = label
    plot.xgrid.grid_line_color = None
    return plot


def _iterations(
    source: ColumnDataSource, shape: Shape, shared: dict[str, Any], highest: float
) -> style.Plot:
    hover = HoverTool(mode="vline", tooltips=[
        ("at", "@t_s{0.00} s, @window"), ("iterations/s", "@iterations_per_s{0,0.0}"),
        ("wasted/s", "@wasted_per_s{0,0.0}"),
        *(((f"{shape.noops}/s", f"@{shape.noops}_per_s{{0,0.0}}"),) if shape.noops else ()),
        *((gauge, f"@{gauge}{{0,0}}") for gauge in shape.gauges),
    ])
    plot = _panel(shared["rate"], "iterations/s", hover, y_axis_type="log")
    style.name_decades(plot.yaxis[0], highest)
    line = plot.step("from_s", "iterations_log", source=source, mode="after",
                     line_color=palette.BLACK, line_width=1.6)
    if shape.noops:
        plot.step("from_s", f"{shape.noops}_log", source=source, mode="after",
                  line_color=palette.ORANGE, line_width=2.4, line_dash=[2, 3])
    hover.renderers = [line]
    return plot


def _reasons(
    source: ColumnDataSource, frame: pd.DataFrame, shared: dict[str, Any], highest: float
) -> style.Plot:
    whys = frame.attrs["shape"].whys
    seen = [why for why in whys if bool((frame[f"why_{why}_per_s"] > 0).any())]
    hover = HoverTool(mode="vline", tooltips=[
        ("at", "@t_s{0.00} s, @window"),
        *((f"{why}/s", f"@why_{why}_per_s{{0,0.0}}") for why in seen),
    ])
    plot = _panel(shared["rate"], "waits/s by reason", hover, y_axis_type="log")
    style.name_decades(plot.yaxis[0], highest)
    lines = [
        plot.step("from_s", f"why_{why}_log", source=source, mode="after", line_width=2,
                  line_color=palette.WHYS[why])
        for why in reversed(seen)
    ]
    hover.renderers = lines[:1] or "auto"
    return plot


def _cpu(source: ColumnDataSource, shared: dict[str, Any]) -> style.Plot:
    hover = HoverTool(mode="vline", tooltips=[
        ("at", "@t_s{0.00} s, @window"), ("CPU", "@cpu_ms_per_s{0.0} ms/s"),
        ("on queue", "@on_queue_fraction{0.000}"),
    ])
    plot = _panel(shared["cpu"], "loop's CPU, ms/s", hover)
    plot.yaxis[0].ticker = FixedTicker(ticks=[0, 250, 500, 750, 1000])
    # The same scale twice: the gap between the lines is time spent waiting for a CPU.
    plot.extra_y_ranges = {"fraction": Range1d(start=0, end=1.08)}
    ticker: Any = FixedTicker(ticks=[0, 0.25, 0.5, 0.75, 1])
    right = LinearAxis(y_range_name="fraction", axis_label="on-queue fraction", ticker=ticker)
    plot.add_layout(right, "right")
    style.dress(right)
    plot.step("from_s", "on_queue_fraction", source=source, mode="after", y_range_name="fraction",
              line_color=palette.ORANGE, line_width=2.2, line_dash=[6, 3])
    line = plot.step("from_s", "cpu_ms_per_s", source=source, mode="after",
                     line_color=palette.BLACK, line_width=1.6)
    hover.renderers = [line]
    return plot


def _bytes(frame: pd.DataFrame, shared: dict[str, Any]) -> style.Plot:
    times, taken = frame.attrs["taken"]
    source = ColumnDataSource({
        "from_s": times.astype(np.float32), "t_s": times.astype(np.float32),
        "taken_mib": taken.astype(np.float32),
    })
    hover = HoverTool(mode="vline", tooltips=[
        ("at", "@t_s{0.00} s"), (frame.attrs["shape"].taken_words, "@taken_mib{0.00} MiB"),
    ])
    plot = _panel(shared["bytes"], "taken, MiB", hover)
    line = plot.step("from_s", "taken_mib", source=source, mode="after",
                     line_color=palette.GREEN, line_width=2)
    hover.renderers = [line]
    return plot


def _shade(plot: style.Plot, frame: pd.DataFrame, named: bool) -> None:
    """Shade the windows; their names stand at the top of the first panel only."""
    before = 0.0
    for name, start, end in frame.attrs["windows"]:
        plot.add_layout(BoxAnnotation(left=start, right=end, fill_color=palette.window(name),
                                      fill_alpha=1.0, line_color=None, level="image"))
        if named:
            # The name of a short window ends where the window does: beside the name of the window
            # before it, or below that one where it has no room.
            whole = plot.x_range.end
            short, below = end - start < 0.12 * whole, before < 0.38 * whole
            before = end - start
            plot.add_layout(Label(
                x=end if short else start, y=plot.y_range.end, text=name,
                x_offset=0 if short else 3, y_offset=-15 if short and below else -2,
                text_align="right" if short else "left", text_baseline="top",
                text_font=style.FONT, text_font_size="11px", text_color=palette.INK))


def spans(samples: pd.DataFrame) -> list[tuple[str, float, float]]:
    """Name, start and end of each window among samples in order of time, in seconds."""
    block = (samples["window"] != samples["window"].shift()).cumsum()
    return [
        (str(part["window"].iloc[0]), float(part["t_s"].iloc[0]), float(part["t_s"].iloc[-1]))
        for _, part in samples.groupby(block) if part["window"].iloc[0]
    ]

"""What is drawn is what was measured, and says how, where and how often."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from engine.errors import UsageError
from lab import palette, plots
from lab.plots import series, style
from lab.runs import Run
from lab.static import Key, Picture
from tests.lab.made_up import BODY, STATES, made_up_run

pytestmark = pytest.mark.computes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made_up_run(tmp_path_factory.mktemp("runs"))


def row_of(frame: pd.DataFrame, arm: str, policy: str) -> pd.Series:
    return frame[(frame["arm"] == arm) & (frame["policy"] == policy)].iloc[0]


# ---- frames -------------------------------------------------------------------------------------


def test_arms_has_one_row_for_each_arm_and_policy(run: Run) -> None:
    frame = plots.df_arms(run)
    assert list(zip(frame["arm"], frame["policy"], strict=True)) == list(STATES)
    spin = row_of(frame, "async+pipelined", "shipped")
    assert (spin["state"], spin["stalled_waits_per_s"], spin["idle_waits_per_s"]) == (
        "spins", 100_000, 40)
    assert (spin["complete"], spin["delivery"]) == (False, "out of order")
    assert row_of(frame, "held-completion", "shipped")["window"] == "held"


def test_series_adds_up_to_the_counters(run: Run) -> None:
    frame = plots.df_series(run, "async+pipelined", "shipped")
    samples = run.df_samples().query("arm == 'async+pipelined' and policy == 'shipped'")
    samples = samples[samples["repetition"] == 0]
    seconds = np.diff(np.append(0.01, frame["t_s"] + 0.5 * widths(frame)))
    grown = samples["iterations"].iloc[-1] - samples["iterations"].iloc[0]
    assert (frame["iterations_per_s"] * seconds).sum() == pytest.approx(grown, rel=1e-6)
    assert frame["taken_mib"].iloc[-1] == pytest.approx(BODY / 2**20, rel=0.02)


def widths(frame: pd.DataFrame) -> np.ndarray:
    """Of the bins, whose middles are known: the first begins with the first sample."""
    found, edge = [], 0.01
    for middle in frame["t_s"]:
        found.append(2 * (middle - edge))
        edge = middle + found[-1] / 2
    return np.array(found)


def test_series_shows_the_rates_of_each_window(run: Run) -> None:
    frame = plots.df_series(run, "async+pipelined", "shipped")
    inside = frame[(frame["t_s"] > 0.7) & (frame["t_s"] < 1.5)]
    assert set(inside["window"]) == {"stall"}
    assert inside["why_list_per_s"].to_numpy() == pytest.approx(100_000, rel=1e-6)
    assert inside["cpu_ms_per_s"].to_numpy() == pytest.approx(1000, rel=1e-6)
    assert inside["on_queue_fraction"].max() <= 1.0
    idle = frame[frame["t_s"] < 0.45]
    assert idle["why_idle_per_s"].to_numpy() == pytest.approx(40, abs=20)


def test_a_window_shorter_than_a_bin_is_not_lost(run: Run) -> None:
    windows = plots.df_series(run, "async", "fixed").attrs["windows"]
    assert [name for name, _, _ in windows] == ["idle", "stall", "drain"]
    _, start, end = windows[-1]
    assert end - start < series.BIN_S


def test_series_refuses_what_the_run_does_not_hold(run: Run) -> None:
    with pytest.raises(UsageError, match="no samples of async under nonsense"):
        plots.df_series(run, "async", "nonsense")
    with pytest.raises(UsageError, match="no repetition 9"):
        plots.df_series(run, "async", "fixed", repetition=9)
    with pytest.raises(UsageError, match="no arm 'nonsense'"):
        plots.plot_series(run, "nonsense")


def test_two_by_two_has_four_cells_for_each_arm(run: Run) -> None:
    frame = plots.df_two_by_two(run)
    assert len(frame) == 8
    cured = row_of(frame, "async+pipelined", "membership")
    assert (cured["membership"], cured["wait"], cured["state"]) == (
        "leaves the list", "no timeout", "quiet")


@pytest.mark.parametrize(("states", "expected"), [
    ({"shipped": "parked", "timed-wait": "spins", "fixed": "quiet", "tickless": "quiet"},
     ["shipped", "timed-wait", "fixed"]),
    ({"tickless": "quiet", "shipped": "spins", "fixed": "quiet"}, ["shipped", "fixed", "tickless"]),
    ({"shipped": "parked", "held-listed": "spins", "held-unlisted": "quiet", "x": "quiet"},
     ["shipped", "held-listed", "held-unlisted"]),
    ({"own": "undecided"}, ["own"]),
])
def test_the_policies_that_tell_most_are_drawn(
    states: dict[str, str], expected: list[str]
) -> None:
    arms = {name: {"state": state} for name, state in states.items()}
    assert series.telling(arms, series.RING) == expected


# ---- pictures -----------------------------------------------------------------------------------


def pictures(run: Run) -> list[Picture]:
    return [plots.plot_arms(run), plots.plot_two_by_two(run), plots.plot_series(run, "async"),
            plots.plot_series(run, "held-completion", ["held-listed"])]


def test_every_picture_says_how_long_how_often_and_where(run: Run) -> None:
    for picture in pictures(run):
        assert "idle 1 s" in picture.caption
        assert "2 repetitions" in picture.caption
        assert "6.1.0-made-up" in picture.caption
        assert run.name in picture.caption
        assert picture.title


def test_pictures_carry_their_data_and_fetch_nothing(run: Run) -> None:
    for picture in pictures(run):
        html = picture.to_html()
        assert "embed_item" in html
        assert '"root_id"' in html
        assert not re.search(r"""(?:src|href)\s*=|@import|url\(""", html)


def test_titles_name_what_the_run_shows(run: Run) -> None:
    assert "100k times a second" in plots.plot_arms(run).title
    assert plots.plot_series(run, "async").title == (
        "async: parked under shipped, spins under timed-wait, quiet under fixed")
    assert plots.plot_two_by_two(run).title.endswith("both together are")


def test_a_state_never_goes_by_colour_alone(run: Run) -> None:
    keys = plots.plot_arms(run).keys
    for word in ("quiet", "parked", "spins"):
        key = next(key for key in keys if key.label.startswith(word))
        assert (key.colour, key.shape) == (palette.state(word).colour, palette.state(word).marker)
    looks = palette.STATES.values()
    assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == 5


def test_words_on_a_state_s_colour_can_be_read() -> None:
    for look in palette.STATES.values():
        ink, ground = (palette.luminance(c) for c in (palette.ink_on(look.colour), look.colour))
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, look.word


def test_a_run_without_the_table_says_so(tmp_path: Path) -> None:
    picture = plots.plot_two_by_two(made_up_run(tmp_path, two_by_two=None))
    assert picture.layout is None
    assert "No arm was run" in picture.to_html()
    assert "<script" not in picture.to_html()


def test_nothing_in_a_picture_ends_its_script(run: Run) -> None:
    evil = "</script><script>alert(1)</script><!--"
    drawn = plots.plot_series(run, "async")
    html = Picture(drawn.layout, evil, [Key(evil, "#000000")], evil).to_html()
    assert html.count("<script") == html.count("</script>") == 1
    item = json.loads(re.search(r"const item = (\{.*\});", html)[1])
    assert item["root_id"]


# ---- numbers ------------------------------------------------------------------------------------


def test_zero_has_a_place_on_a_log_axis() -> None:
    floored = style.floored([0, 0.01, 40, None])
    assert floored[:3].tolist() == [style.FLOOR, style.FLOOR, 40]
    assert np.isnan(floored[3])


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (0.01, "<0.1"), (0.44, "0.4"), (9.97, "10"), (40, "40"), (3712.4, "3,712"),
    (99_999, "100k"), (141_234, "141k"), (999_900, "1.0M"), (None, "not measured"),
])
def test_rates_are_short(value: float | None, text: str) -> None:
    assert style.short(value) == text


def test_a_picture_over_time_goes_on_to_the_last_moment(run: Run) -> None:
    """A last bin that is longer than the others is not cut off, nor what it holds."""
    ends = [series.df_series(run, "async", name)["to_s"].max()
            for name in ("shipped", "timed-wait", "fixed")]
    grid = series.plot_series(run, "async", ["shipped", "timed-wait", "fixed"]).layout
    assert {plot.x_range.end for plot, _, _ in grid.children} == {max(ends)}

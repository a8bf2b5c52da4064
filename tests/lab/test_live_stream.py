"""The protocol of frames: rows from samples, what is sent when, and that no sample is lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine import RingServer
from engine.counters import sample_dtype
from engine.errors import MachineError, UsageError
from lab.live.dirty_list import SHAPE
from lab.live.feed import Feed
from lab.live.series import Decimator, Rows, Samples, differs, pack, span_figures
from lab.live.stream import GONE_S, RELOAD_S, SEEN_S, View, Watch

MS = 1_000_000
FAST = 20.0


class FakeView:
    """A view that keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], bytes]] = []

    def post(self, message: dict[str, Any], buffer: bytes | None = None) -> bool:
        self.sent.append((message, buffer or b""))
        return True

    def rows(self) -> np.ndarray[Any, Any]:
        """Every row of every frame, as the page would take them apart."""
        parts = [
            np.frombuffer(buffer, dtype="<f8").reshape(len(SHAPE.names), message["count"]).T
            for message, buffer in self.sent if message["kind"] == "rows"
        ]
        return np.concatenate(parts) if parts else np.zeros((0, len(SHAPE.names)))

    def marks(self) -> list[str]:
        return [mark["text"] for message, _ in self.sent for mark in message.get("marks", [])]


def column(rows: Rows, name: str) -> Any:
    """One column of rows, by name."""
    return rows[:, SHAPE.at[name]]


def test_a_page_that_asks_is_answered_and_one_that_does_not_costs_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = View("stepper", lambda message: None)
    sent: list[Any] = []
    monkeypatch.setattr(view, "post", lambda message, buffer=None: sent.append(message))
    view._received(None, {"kind": "here", "ask": False}, None)
    view._received(None, {"kind": "hidden"}, None)
    assert sent == []
    view._received(None, {"kind": "here", "ask": True}, None)
    assert sent == [{"kind": "word"}]
    view.shut()
    view._received(None, {"kind": "here", "ask": True}, None)
    assert len(sent) == 1, "nobody is there to answer any more"


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made_up(count: int, *, each_ms: int = 10, waits: int = 1, begun_ms: int = 0) -> Any:
    """``count`` native samples of a worker that makes ``waits`` timed waits a sample."""
    samples = np.zeros(count, dtype=sample_dtype())
    at = np.arange(count)
    samples["t_ns"] = (begun_ms + at * each_ms) * MS
    counters = samples["c"]
    counters["iterations"] = at * waits
    counters["waits"][:, 3] = at * waits
    counters["why"][:, 5] = at * waits
    samples["thread_cpu_ns"] = at * MS
    samples["run_ns"] = at * 2 * MS
    return samples


@pytest.fixture
def server() -> Iterator[RingServer]:
    try:
        with RingServer("shipped", max_connections=64) as made:
            yield made
    except MachineError as reason:
        pytest.skip(str(reason))


# ---- rows ---------------------------------------------------------------------------------------


def test_rows_are_the_rates_between_their_ends() -> None:
    flat = Samples(SHAPE.layout).add(made_up(101))
    cut = Decimator(SHAPE, 0, 0.1)
    assert len(cut.rows(flat[:1], 0.0)) == 0
    rows = cut.rows(flat[1:], 7.0)
    assert len(rows) == 10
    assert np.allclose(column(rows, "iterations"), 100)
    assert np.allclose(column(rows, "why_idle"), 100)
    assert np.allclose(column(rows, "cpu"), 100)  # ms per s
    assert np.allclose(column(rows, "queued"), 200)
    assert np.allclose(column(rows, "outq_kib"), 7)
    assert np.allclose(column(rows, "t"), np.arange(1, 11) / 10)


def test_every_count_is_in_exactly_one_row_however_the_samples_come() -> None:
    flat = Samples(SHAPE.layout).add(made_up(400, waits=3))
    cut = Decimator(SHAPE, 0, 0.1)
    rng = np.random.default_rng(7)
    edges = [0, *sorted(rng.integers(1, 399, 25).tolist()), 400]
    rows = [cut.rows(flat[a:b], 0.0) for a, b in itertools.pairwise(edges) if b > a]
    t = np.concatenate([column(part, "t") for part in rows])
    rates = np.concatenate([column(part, "iterations") for part in rows])
    counted = np.sum(rates * np.diff(np.concatenate([[0.0], t])))
    # All but what came after the newest row.
    assert counted == pytest.approx(3 * round(t[-1] * 100))
    assert t[-1] >= 3.9


def test_a_server_that_was_started_again_makes_no_row_with_a_huge_rate() -> None:
    cut = Decimator(SHAPE, 0, 0.1)
    samples = Samples(SHAPE.layout)
    cut.rows(samples.add(made_up(50, waits=9)), 0.0)
    rows = cut.rows(samples.add(made_up(50, begun_ms=600)), 0.0)
    assert np.all(np.abs(rows) < 1e4)
    assert np.all(column(rows, "iterations") >= 0)


def test_a_buffer_is_columns_of_little_endian_float64() -> None:
    rows = np.arange(2.0 * len(SHAPE.names)).reshape(2, len(SHAPE.names))
    back = np.frombuffer(pack(rows), dtype="<f8").reshape(len(SHAPE.names), 2).T
    assert np.array_equal(rows, back)


def test_an_idle_loop_s_jitter_is_no_change_but_a_spin_is() -> None:
    row = np.zeros(len(SHAPE.names))
    at = {name: number for number, name in enumerate(SHAPE.names)}
    row[at["iterations"]] = 40
    near, spin, listed = row.copy(), row.copy(), row.copy()
    near[at["iterations"]] = 50
    spin[at["iterations"]] = 40_000
    listed[at["list_length"]] = 1
    assert differs(SHAPE, row, None, 0.1)
    assert not differs(SHAPE, near, row, 0.1)
    assert differs(SHAPE, spin, row, 0.1)
    assert differs(SHAPE, listed, row, 0.1)


def test_the_figures_of_a_span_come_from_its_samples() -> None:
    samples = Samples(SHAPE.layout)
    samples.add(made_up(101, waits=2))
    found = span_figures(samples.since(200 * MS, 700 * MS))
    assert found is not None
    assert found["samples"] == 51
    assert found["waits"] == pytest.approx(200)
    assert span_figures(samples.since(2_000 * MS)) is None


def test_old_samples_give_way() -> None:
    samples = Samples(SHAPE.layout, seconds=1.0)
    for begun in range(0, 5000, 100):
        samples.add(made_up(10, begun_ms=begun))
    kept = samples.since(0)
    assert samples.seen == 500
    assert 100 <= len(kept) <= 120


# ---- who watches --------------------------------------------------------------------------------


def test_frames_go_out_only_while_a_view_sees_them() -> None:
    clock = Clock()
    watch = Watch(clock)
    assert not watch.watched
    watch.hello("a")
    assert watch.watched
    watch.sent()
    clock.now += SEEN_S + 0.1
    assert not watch.watched, "a frame that nobody reported as seen"
    watch.report("seen", "a")
    assert watch.watched
    watch.report("hidden", "a")
    assert not watch.watched
    watch.hello("a")
    assert watch.watched


def test_messages_that_arrive_in_another_order_do_not_blind_it() -> None:
    watch = Watch(Clock())
    watch.hello("a", 1)
    watch.hello("a", 3)
    watch.report("hidden", "a", 2)
    assert watch.watched, "it was hidden before it came into sight"
    watch.report("hidden", "a", 4)
    assert not watch.watched
    assert not watch.report("here", "a", 5, False)
    assert watch.report("here", "a", 6, True), "it missed rows, and gets the history"
    assert watch.watched
    assert not watch.report("here", "a", 7, True)


def test_one_of_two_views_may_go() -> None:
    watch = Watch(Clock())
    watch.hello("a")
    watch.hello("b")
    watch.report("bye", "a")
    assert watch.watched
    assert not watch.gone


def test_a_page_that_said_goodbye_is_gone_soon_and_a_silent_one_later() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.hello("a")
    watch.report("bye", "a")
    assert not watch.gone, "it may be a reload"
    clock.now += RELOAD_S + 1
    assert watch.gone
    watch.hello("b")
    assert not watch.gone
    clock.now += GONE_S - 1
    watch.report("here", "b")
    clock.now += 2
    assert not watch.gone
    clock.now += GONE_S
    assert watch.gone


# ---- the feeding thread -------------------------------------------------------------------------


def feeding(server: RingServer, watched: bool = True) -> tuple[Feed, FakeView, Watch]:
    view, watch = FakeView(), Watch()
    if watched:
        watch.hello("test")
    return Feed(server, view, watch, SHAPE, FAST), view, watch  # type: ignore[arg-type]


def complete(feed: Feed) -> None:
    """The samples kept are gapless: the sampler's own period, and none dropped."""
    kept = feed.samples.since(0)
    assert len(kept) > 20
    assert feed.lost == 0
    assert np.all(np.diff(kept["t_ns"]) > 0)
    assert len(kept) == feed.samples.seen


def test_no_sample_is_lost_while_it_streams(server: RingServer) -> None:
    feed, view, _ = feeding(server)
    try:
        time.sleep(0.4)
        server.set(wait_cap_ms=2)
        time.sleep(0.8)
    finally:
        assert feed.close()
    complete(feed)
    rows = view.rows()
    assert len(rows) >= 2
    assert np.all(np.diff(column(rows, "t")) > 0)


def test_paused_nothing_is_sent_and_everything_is_kept(server: RingServer) -> None:
    feed, view, _ = feeding(server)
    try:
        time.sleep(0.3)
        feed.pause(True)
        time.sleep(0.1)
        sent = len(view.sent)
        server.set(wait_cap_ms=2)
        time.sleep(1.2)
        assert len(view.sent) == sent
        feed.pause(False)
        time.sleep(0.3)
        assert len(view.sent) > sent
    finally:
        assert feed.close()
    complete(feed)
    t = column(view.rows(), "t")
    assert np.max(np.diff(t)) < 0.35, "the picture caught up without a gap"


def test_a_dark_window_streams_nothing_and_catches_up(server: RingServer) -> None:
    feed, view, _ = feeding(server)
    try:
        time.sleep(0.3)
        with feed.dark():
            sent, seen = len(view.sent), feed.samples.seen
            server.set(wait_cap_ms=2)
            time.sleep(0.8)
            assert len(view.sent) == sent
            assert feed.samples.seen == seen, "samples wait in the native ring"
        time.sleep(0.3)
        assert len(view.sent) > sent
    finally:
        assert feed.close()
    complete(feed)


def test_the_process_in_a_dark_window_is_read_as_it_goes() -> None:
    """What it used while the loop slept is not one straight line over the whole window."""
    try:
        server = RingServer("tickless", max_connections=64).start()
    except MachineError as reason:
        pytest.skip(str(reason))
    with server:
        feed, _, _ = feeding(server)
        try:
            with feed.dark():
                time.sleep(1.5)
                busy = time.monotonic_ns()
                while time.monotonic_ns() - busy < 1_500 * MS:
                    pass
                time.sleep(1.5)
            time.sleep(0.3)
        finally:
            assert feed.close()

    def used(from_ms: int, to_ms: int) -> int:
        samples = feed.samples.since(busy + from_ms * MS, busy + to_ms * MS)
        return int(samples["process_cpu_ns"][-1]) - int(samples["process_cpu_ns"][0])

    before, burning, after = used(-1_400, -600), used(600, 1_400), used(2_100, 2_900)
    assert max(before, after) < burning / 2, (before, burning, after)


def test_nothing_is_sent_when_nothing_changes_or_nobody_looks() -> None:
    try:
        server = RingServer("tickless", max_connections=64).start()
    except MachineError as reason:
        pytest.skip(str(reason))
    with server:
        feed, view, watch = feeding(server)
        try:
            time.sleep(0.8)
            sent = len(view.sent)
            time.sleep(0.8)
            assert len(view.sent) - sent <= 1, "a tickless loop is at rest"
            watch.report("hidden", "test")
            server.set("shipped")
            time.sleep(0.8)
            assert len(view.sent) - sent <= 1, "nobody looks"
        finally:
            assert feed.close()
        assert feed.lost == 0


def test_a_page_that_opens_gets_the_history(server: RingServer) -> None:
    feed, view, watch = feeding(server, watched=False)
    try:
        feed.mark("before anybody looked")
        time.sleep(1.2)
        assert view.sent == []
        watch.hello("late")
        feed.send_history()
        assert view.sent[0][0]["reset"]
        assert view.sent[0][0]["count"] >= 8
        assert view.marks() == ["before anybody looked"]
    finally:
        assert feed.close()


def test_a_dragged_slider_leaves_one_mark(server: RingServer) -> None:
    feed, view, _ = feeding(server)
    try:
        for value in range(5):
            feed.mark(f"cap {value}", "cap")
        feed.mark("poke")
        time.sleep(0.3)
        feed.send_history()
        last = view.sent[-1][0]["marks"]
        assert [mark["text"] for mark in last] == ["cap 4", "poke"]
    finally:
        assert feed.close()


def test_a_rate_out_of_range_is_refused(server: RingServer) -> None:
    with pytest.raises(UsageError, match=r"2\.0 to 20\.0 frames a second"):
        Feed(server, FakeView(), Watch(), SHAPE, 60.0)  # type: ignore[arg-type]

"""The panel on the relay: its arms, both sides of a session, what a run says of the same settings.

What the panel does whatever it shows is in test_live_panel.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from engine import RelayPolicy, SpliceRelay, counters
from engine.errors import MachineError, UsageError
from engine.relay_policy import RELAY
from engine.relay_views import SessionView
from lab import experiment, mode
from lab.live import case, measured
from lab.live import panel as opened
from lab.live.feed import Feed
from lab.live.panel import LivePanel
from lab.live.splice import LIVE, PLOTS, SHAPE
from lab.live.stream import Watch
from lab.origin import Origin
from lab.origin_process import OriginProcess
from lab.runs import RunStore
from tests.lab.test_live_panel import done, ours, repeated, state_is, wait_until

CASE = experiment.load("splice")
ARMS = ("a", "a2", "b", "d", "e", "m", "paced")


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[LivePanel]:
    with LivePanel(experiment="splice", rate=20, store=RunStore(tmp_path), seconds=0.3) as made:
        made.watch.hello("test")
        yield made


@pytest.fixture
def relay() -> Iterator[SpliceRelay]:
    with Origin() as origin, SpliceRelay(origin.target, "after", max_sessions=64) as made:
        yield made


def rows_of(panel: LivePanel) -> dict[str, dict[str, Any]]:
    """The strip's rows by direction."""
    return {row["name"].split(": ")[1]: row for row in panel.board["strip"]["rows"]}


def children() -> set[str]:
    """The processes that this one has started and that still run."""
    lists = (path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {pid for text in lists for pid in text.split()}


def entries(of: str) -> int:
    """How many descriptors (``fd``) or threads (``task``) this process has."""
    return len(list(Path("/proc/self", of).iterdir()))


def newest(panel: LivePanel, name: str) -> float:
    history = panel.feed._history
    return float(history[-1][SHAPE.at[name]]) if history else 0.0


def shows(panel: LivePanel, name: str, test: Callable[[float], bool]) -> bool:
    """Whether the picture's newest row comes to pass a test."""
    return wait_until(lambda: test(newest(panel, name)))


# ---- what it offers -----------------------------------------------------------------------------


def test_every_arm_has_a_preset_with_a_sentence() -> None:
    assert tuple(LIVE.presets) == ARMS == tuple(arm.name for arm in CASE.arms)
    assert all(preset.watch.endswith(".") for preset in LIVE.presets.values())
    assert set(LIVE.quick) == set(RELAY.presets)


def test_controls_are_the_experiment_s_parameters_and_mean_something_in_their_arms() -> None:
    made = LIVE.controls(CASE.parameters)
    for name, control in made.items():
        if name in CASE.parameters:
            assert control.parameter == CASE.parameters[name]
        assert set(control.arms) <= set(ARMS)
    values = {name: control.parameter.default for name, control in made.items()}
    for arm in ARMS:
        shown = {name for name, each in made.items() if not each.arms or arm in each.arms}
        others = {name: value if name in shown else None for name, value in values.items()}
        with Origin() as origin, SpliceRelay(origin.target, max_sessions=8) as relay:
            assert LIVE.scene(arm, others, relay).steps  # type: ignore[arg-type]


def test_every_decision_is_offered_with_the_shipped_choice_marked(panel: LivePanel) -> None:
    specs = {spec["name"]: spec for spec in panel.board["policy"]["specs"]}
    for decision, known in RELAY.table().items():
        spec = specs[decision.replace("-", "_")]
        marked = [option["value"] for option in spec["choices"] if "(shipped)" in option["label"]]
        assert marked == [choice.name for choice in known.values() if choice.shipped]
        assert spec["help"]
    assert panel.board["policy"]["name"] == "before"


def test_every_line_of_a_plot_is_a_column_of_the_rows() -> None:
    for plot in PLOTS:
        for line in plot.lines:
            assert line.column in SHAPE.names
            assert not plot.log or line.column in SHAPE.rates
    flat = SHAPE.layout.flat_dtype.names or ()
    assert all(name in flat for column in SHAPE.columns for name in column.counters)


# ---- states and both sides ----------------------------------------------------------------------


def test_the_spin_is_named_with_both_sides_and_the_gap_and_a_decision_ends_it(
    panel: LivePanel,
) -> None:
    assert state_is(panel, "idle"), panel.board["strip"]
    assert "does not read" in done(panel, "preset", arm="a")
    assert state_is(panel, "spins"), panel.board["strip"]
    strip = panel.board["strip"]
    assert (strip["why"], strip["timeout"]) == ("active", "0")
    assert ("sockets taken as ready", "1") in strip["wait"]
    back = rows_of(panel)["origin → client"]
    assert (back["message"], back["source"], back["sink"]) == (
        "head", "origin: active", "client: polled")
    assert back["to_forward"] == 0
    assert back["piped"] > 0
    assert "in the gap" in back["flags"]
    assert rows_of(panel)["client → origin"]["source"].startswith("client: ")
    assert shows(panel, "noops", lambda rate: rate > 2000)
    assert newest(panel, "piped_kib") > 1
    panel.set(recv_behind="allowed")
    assert state_is(panel, "quiet"), panel.board["strip"]
    assert shows(panel, "noops", lambda rate: rate == 0)
    assert rows_of(panel)["origin → client"]["piped"] > 0, "it came to the gap, and sleeps in it"
    assert "every byte in order" in done(panel, "read all")
    assert state_is(panel, "idle"), panel.board["strip"]


@pytest.mark.parametrize(("arm", "policy", "word"), [
    ("a2", "before", "spins"), ("a2", "before+engine=level-triggered", "quiet"),
    ("b", "last-block", "quiet"), ("d", "before", "spins"), ("d", "after", "quiet"),
    ("m", "before", "quiet"),
])
def test_the_arms_come_to_the_state_that_a_run_gives_them(
    panel: LivePanel, arm: str, policy: str, word: str
) -> None:
    done(panel, "preset", arm=arm, policy=policy)
    assert panel.server.policy.name == policy
    assert state_is(panel, word), panel.board["strip"]
    assert "every byte in order" in done(panel, "read all")


def test_an_upload_spins_in_the_other_direction_until_the_origin_is_let_go(
    panel: LivePanel,
) -> None:
    assert "uploads" in done(panel, "preset", arm="e")
    assert state_is(panel, "spins"), panel.board["strip"]
    there = rows_of(panel)["client → origin"]
    assert there["source"] == "client: active"
    assert there["piped"] > 0
    assert "goes on" in done(panel, "release")
    assert wait_until(lambda: panel.server.counters()["piped"] == 0)
    assert "every byte in order" in done(panel, "read all")
    done(panel, "preset", arm="e")
    assert "never ended" not in done(panel, "preset", arm="a"), "the origin was let go"


def test_a_paced_client_goes_on_until_a_button_is_pressed(panel: LivePanel) -> None:
    assert "reads 10 MB/s" in done(panel, "preset", arm="paced", policy="after")
    assert shows(panel, "spliced_mib", lambda rate: rate > 1)
    enough = panel.server.counters()["responses"] + 12
    assert wait_until(lambda: panel.server.counters()["responses"] > enough), "it asks for more"
    assert state_is(panel, "quiet"), panel.board["strip"]
    done(panel, "preset", arm="paced", policy="no-splice")
    assert shows(panel, "copied_mib", lambda rate: rate > 1)
    assert "every byte in order" in done(panel, "read all")
    assert not panel.party.reads


def test_the_mirror_fault_is_as_quiet_and_its_bytes_are_missing(panel: LivePanel) -> None:
    done(panel, "preset", arm="m", policy="mirror")
    assert state_is(panel, "quiet"), panel.board["strip"]
    assert "incomplete" in done(panel, "read all")
    assert "of earlier clients never ended" in done(panel, "preset", arm="a")


def test_clients_poke_half_close_reset_and_stop(panel: LivePanel) -> None:
    panel.set(clients=3)
    assert "3 clients" in done(panel, "stall")
    assert len(panel.server.sessions()) == 3
    assert "poke answered" in done(panel, "poke")
    assert "read 196,608 bytes" in done(panel, "read", size=65536)
    assert "FIN" in done(panel, "half-close")
    assert "reset 3" in done(panel, "reset")
    assert "stop honoured" in done(panel, "stop")
    assert state_is(panel, "stopped"), panel.board["strip"]
    assert "a fresh relay runs under before" in done(panel, "start again")
    assert state_is(panel, "idle")


def test_a_deadline_ends_a_spin(panel: LivePanel) -> None:
    done(panel, "preset", arm="a")
    assert state_is(panel, "spins")
    closed = panel.server.counters()["closes_client_timeout"]
    panel._received({"kind": "set", "name": "client_timeout_ms", "value": 200})
    assert wait_until(lambda: panel.server.counters()["closes_client_timeout"] > closed)
    assert state_is(panel, "idle"), panel.board["strip"]


def test_what_the_sockets_take_whole_is_said_to_be_no_stall(panel: LivePanel) -> None:
    panel.set(object_size=100)
    assert "Is the object larger" in done(panel, "stall")


# ---- measuring ----------------------------------------------------------------------------------


def test_a_measured_run_says_what_the_strip_says(panel: LivePanel) -> None:
    done(panel, "preset", arm="d")
    assert state_is(panel, "spins")
    text = done(panel, "measure")
    assert "measured d under before: spins" in text
    row = panel.runs[0].arms[0]
    assert row["noop_per_s"] > 2000
    assert panel.runs[0].data["sizes"] is None, "which sizes spin is another question"
    assert "no-ops" in panel.board["table"]
    assert panel.party.size == 1, "the panel's own stall is back"
    assert state_is(panel, "spins")


def test_copied_parameters_repeat_the_measurement() -> None:
    values = {name: control.parameter.default
              for name, control in LIVE.controls(CASE.parameters).items()}
    plan = measured.plan(LIVE, {**values, "object_size": 120_000, "clients": 2},
                         RELAY.resolve("before", engine="level-triggered"), False, "a", 0.3)
    assert "-p object_size=120000" in plan.command
    assert "--policy 'before+engine=level-triggered'" in plan.command
    assert "2 clients" in plan.notes
    namespace: dict[str, Any] = {}
    exec(plan.as_text(), namespace)
    assert namespace["arms"] == ["a"]
    assert CASE.parameters.resolve(plan.parameters)["sizes"] == ""


@pytest.mark.parametrize("arm", [arm.name for arm in CASE.arms])
def test_what_the_panel_offers_for_an_arm_can_be_measured(arm: str) -> None:
    values = {name: control.parameter.default
              for name, control in LIVE.controls(CASE.parameters).items()}
    for preset in LIVE.quick:
        for engine in ("speculative", "level-triggered"):
            policy = RELAY.resolve(preset, engine=engine)
            assert measured.plan(LIVE, values, policy, False, arm, 1.0).policy == policy.name


def test_what_is_copied_is_what_was_measured(tmp_path: Path, project: Path) -> None:
    with LivePanel(experiment="splice", rate=20, store=RunStore(tmp_path)) as panel:
        panel.watch.hello("test")
        done(panel, "preset", arm="a", policy="before")
        panel.set(object_size=120_000, engine="level-triggered")
        assert wait_until(lambda: panel.board["busy"] == "" and panel.hands.idle)
        done(panel, "measure")
        copied, measured_so = repeated(panel, project)
    assert measured_so["seconds"] == 1.0 != CASE.parameters["seconds"].default
    assert measured_so["policies"] == ["before+engine=level-triggered"]
    assert copied == [measured_so, measured_so]


class Forbids(RelayPolicy):
    """The fault, written in Python."""

    base = "before"

    def recv_behind(self, session: SessionView) -> bool:
        return False


def test_what_no_run_measures_is_one_clear_line() -> None:
    values = {name: control.parameter.default
              for name, control in LIVE.controls(CASE.parameters).items()}
    with pytest.raises(UsageError, match="written in Python"):
        measured.plan(LIVE, values, RELAY.resolve(Forbids), False, "a", 1.0)


def test_a_policy_in_python_decides_live(panel: LivePanel) -> None:
    panel.set(policy=Forbids)
    done(panel, "stall")
    assert state_is(panel, "spins"), panel.board["strip"]
    assert panel.board["policy"]["name"] == "Forbids"


# ---- opening and ending -------------------------------------------------------------------------


def test_one_line_opens_it_and_a_wrong_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mode.BATCH, "1")
    assert lab.live("splice") is None
    monkeypatch.setenv(mode.BATCH, "0")
    with lab.live("splice", object_size="120k") as made:
        assert isinstance(made.server, SpliceRelay)
        assert made.values["object_size"] == 120_000
    with pytest.raises(UsageError, match=r"case with a live panel 'splise'.*splice"):
        lab.live("splise")
    with pytest.raises(UsageError, match=r"lab.live\('splice'\)"):
        LivePanel("splice")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a dict"):
        LivePanel({})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown control 'rcvbuff'"):
        lab.live("splice", rcvbuff=4096)
    assert wait_until(lambda: ours() == [])


def test_a_relay_of_the_caller_s_shows_its_settings_and_stays_his(relay: SpliceRelay) -> None:
    relay.set(so_sndbuf=32_768)
    with LivePanel(relay, rate=20) as made:
        assert made.case.name == "splice"
        assert made.values["sndbuf"] == 32_768
        made.watch.hello("test")
        assert "does not read" in done(made, "preset", arm="a", policy="before")
        assert relay.settings["so_sndbuf"] == 32_768
        assert state_is(made, "spins"), made.board["strip"]
    assert relay.running() == 1
    with pytest.raises(UsageError, match="dirty-list has a RingServer, not a SpliceRelay"):
        LivePanel(relay, experiment="dirty-list")
    with pytest.raises(UsageError, match="set it on yours"):
        LivePanel(relay, policy="after")


def test_closing_leaves_no_thread_process_or_socket() -> None:
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    earlier = children()
    made = LivePanel(experiment="splice")
    assert len(children() - earlier) == 1, "the origin"
    made.watch.hello("test")
    done(made, "preset", arm="paced")
    made.close()
    assert wait_until(lambda: ours() == [])
    after = {path.name for path in Path("/proc/self/fd").iterdir()}
    assert len(after - before) <= 1  # the listing itself
    assert children() == earlier


def test_a_panel_that_rests_ends_its_origin_and_wakes_with_another() -> None:
    made = LivePanel(experiment="splice", rate=20)
    try:
        made.watch.hello("test")
        first = made.server.origin  # type: ignore[attr-defined]
        made.rest()
        assert made.state == "resting"
        assert ours() == []
        made._received({"kind": "hello", "view": "again", "bokeh": True})
        assert wait_until(lambda: made.state == "open")
        assert made.server.origin != first  # type: ignore[attr-defined]
        assert "does not read" in done(made, "preset", arm="a")
        assert state_is(made, "spins"), made.board["strip"]
    finally:
        made.close()


def test_an_origin_that_dies_is_told_in_one_line_and_start_again_brings_another(
    panel: LivePanel,
) -> None:
    assert state_is(panel, "idle")
    first = panel._needed.pid
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: panel.board["message"] is not None), "told before anything is pressed"
    line = f"the origin (process {first}) has ended: press start again, which brings another"
    assert panel.board["message"]["text"] == line
    assert panel.board["message"]["error"]
    assert panel.board["running"] is False, "so that start again is the button to press"
    assert wait_until(lambda: "has ended" in panel.board["status"])
    for action in ("stall", "poke", "release", "read all"):
        assert done(panel, action) == line
    assert "a fresh relay runs" in done(panel, "start again")
    assert panel._needed.pid != first
    assert panel.board["running"]
    assert "does not read" in done(panel, "preset", arm="a")
    assert state_is(panel, "spins"), panel.board["strip"]
    assert panel.board["status"] == "live"
    # With bytes of it still to be read: what was done is told, and what it was done without.
    os.kill(panel._needed.pid, signal.SIGKILL)
    assert wait_until(lambda: panel._needed.ended)
    assert "has ended: press start again" in done(panel, "read all")


def test_an_origin_of_the_caller_s_that_is_not_there_is_named() -> None:
    with OriginProcess() as origin, SpliceRelay(origin.target, max_sessions=8) as relay, \
            LivePanel(relay, rate=20) as panel:
        target = origin.target
        origin._end()
        text = done(panel, "stall")
        assert f"The origin at {target} takes no connection (Connection refused)" in text
        assert "Is the object larger" not in text


class TooLate(Exception):
    """Something that breaks once all else is up."""


@pytest.mark.parametrize("where", ["View", "Watch", "Board", "this_cell", "Party", "Lane", "Feed"])
@pytest.mark.parametrize("owned", [True, False])
def test_what_breaks_while_a_panel_opens_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch, where: str, owned: bool
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise TooLate

    relay = None if owned else SpliceRelay("127.0.0.1:9", max_sessions=8)
    descriptors, tasks, earlier = entries("fd"), entries("task"), children()
    monkeypatch.setattr(opened, where, breaks)
    with pytest.raises(TooLate):
        LivePanel(relay, experiment="splice")
    assert ours() == []
    assert children() == earlier
    assert wait_until(lambda: entries("task") <= tasks), "native threads too"
    assert entries("fd") <= descriptors
    assert opened.open_panels() == []


@pytest.mark.parametrize(("wrong", "words"), [
    ({"rate": "fast"}, "rate=fast is not allowed: give 2.0 to 20.0 frames a second"),
    ({"rate": None}, "rate=None is not allowed: give 2.0 to 20.0 frames a second"),
    ({"rate": 21}, "rate=21 is not allowed"),
    ({"seconds": "long"}, "seconds=long is not allowed"),
    ({"policy": "befor"}, "unknown policy 'befor'"),
    ({"store": "/tmp"}, "store is a RunStore, not a str"),
    ({"object_size": -1}, "object_size=-1 is not allowed"),
    ({"experiment": 3}, "unknown case with a live panel '3'"),
])
def test_a_wrong_argument_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], words: str
) -> None:
    started: list[object] = []
    monkeypatch.setattr(SpliceRelay, "start", started.append)
    monkeypatch.setattr(OriginProcess, "__enter__", started.append)
    with pytest.raises(UsageError) as refused:
        LivePanel(**{"experiment": "splice", **wrong})  # type: ignore[arg-type]
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert started == []


def test_no_sample_of_a_relay_is_lost_while_it_streams(relay: SpliceRelay) -> None:
    class FakeView:
        def post(self, message: dict[str, Any], buffer: bytes | None = None) -> bool:
            return True

    feed = Feed(relay, FakeView(), Watch(), SHAPE, 20.0)  # type: ignore[arg-type]
    try:
        assert wait_until(lambda: feed.samples.seen > 40)
    finally:
        assert feed.close()
    assert feed.lost == 0
    kept = feed.samples.since(0)
    assert kept.dtype == counters.RELAY.flat_dtype
    ends = feed.samples.ends(0)
    assert (ends["t_ns"] == [kept["t_ns"][0], kept["t_ns"][-1]]).all()
    assert len(feed.samples.ends(int(kept["t_ns"][-1]))) == 1


def test_a_third_engine_is_an_entry_and_a_description() -> None:
    assert case.names() == ["dirty-list", "splice"]
    for name in case.names():
        described = case.case(name)
        assert described.name == name
        assert {"stall", "read", "read all", "stop", "start again"} <= {
            button.action for button in described.buttons}
        known = described.controls(described.experiment.parameters)
        assert set(described.reaches) <= set(known)


def test_where_no_relay_starts_its_stepper_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: SpliceRelay) -> SpliceRelay:
        raise MachineError("epoll_create1: too many open files")

    monkeypatch.setenv(mode.BATCH, "0")
    monkeypatch.setattr(SpliceRelay, "start", refuse)
    offered = lab.live("splice", policy="before")
    assert isinstance(offered, lab.Stepper)
    assert offered.read_handler
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "too many open files" in said

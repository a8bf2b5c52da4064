"""The panel without a browser: its controls, its clients, its words, and what it leaves behind."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bokeh.models import DataRange1d

import lab
from engine import Policy, RingServer
from engine.errors import MachineError, UsageError
from engine.policy import table
from engine.views import LoopView
from lab import experiment, mode
from lab.clients import Client, ClientError
from lab.live import case, figures, measured, opening
from lab.live.dirty_list import LIVE
from lab.live.opening import replaced
from lab.live.panel import _OPTIONS, ACTIONS, LivePanel, close_all, open_panels
from lab.live.party import brief
from lab.runs import RunStore

CASE = experiment.load("dirty-list")


def panel_of(**options: Any) -> LivePanel:
    try:
        made = LivePanel(rate=20, **options)
    except MachineError as reason:
        pytest.skip(str(reason))
    made.watch.hello("test")
    return made


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[LivePanel]:
    with panel_of(store=RunStore(tmp_path), seconds=0.4) as made:
        yield made


def wait_until(test: Callable[[], bool], seconds: float = 8.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if test():
            return True
        time.sleep(0.02)
    return False


def state_is(panel: LivePanel, word: str) -> bool:
    def test() -> bool:
        panel.watch.report("seen", "test")
        strip = panel.board["strip"]
        return bool(strip and strip["state"] == word)

    return wait_until(test)


def done(panel: LivePanel, action: str, **options: Any) -> str:
    """Presses a button and waits for what the panel says."""
    before = panel.board["message"]
    panel.do(action, **options)
    assert wait_until(lambda: panel.board["message"] not in (None, before)
                      and panel.board["busy"] == "", 20.0)
    return str(panel.board["message"]["text"])


def cap_is(panel: LivePanel, cap: float) -> bool:
    return panel.server.settings["wait_cap_ms"] == cap


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ringlab")]


# ---- controls -----------------------------------------------------------------------------------


def test_controls_are_the_experiment_s_parameters() -> None:
    made = LIVE.controls(CASE.parameters)
    for name, control in made.items():
        spec = control.spec(control.parameter.default)
        assert spec["label"]
        assert spec["effect"]
        assert "choices" in spec or spec["stops"] == sorted(spec["stops"])
        if name in CASE.parameters and name not in ("depth", "handler_ms"):
            assert control.parameter == CASE.parameters[name]
    assert {"rcvbuf", "response_size", "depth", "sndbuf", "handler_ms", "wait_cap_ms",
            "clients"} <= set(made)


def test_every_decision_is_offered_with_the_shipped_choice_marked(panel: LivePanel) -> None:
    specs = {spec["name"]: spec for spec in panel.board["policy"]["specs"]}
    for decision, known in table().items():
        spec = specs[decision.replace("-", "_")]
        marked = [option["value"] for option in spec["choices"] if "(shipped)" in option["label"]]
        assert marked == [choice.name for choice in known.values() if choice.shipped]
        assert all(option["what"] for option in spec["choices"])


def test_what_is_set_while_an_arm_is_being_applied_is_not_lost(
    panel: LivePanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    applying, asked = threading.Event(), threading.Event()
    give = panel._give

    def slow_to_give(*given: Any, **options: Any) -> None:
        give(*given, **options)
        if options.get("all_of"):
            applying.set()
            asked.wait(0.5)

    monkeypatch.setattr(panel, "_give", slow_to_give)
    panel.do("preset", arm="async+pipelined")
    assert applying.wait(5)
    panel.set(rcvbuf=2048, policy="fixed")
    asked.set()
    assert wait_until(lambda: panel.hands.idle and panel.board["busy"] == "")
    assert panel.values["rcvbuf"] == panel.board["values"]["rcvbuf"] == 2048
    assert panel.values["depth"] == 2
    assert panel.server.policy.name == panel.board["policy"]["name"] == "fixed"


def test_what_is_wished_for_after_an_arm_holds_though_the_clients_are_busy(
    panel: LivePanel
) -> None:
    free = threading.Event()
    panel.hands.put(lambda: free.wait(5))
    panel._received({"kind": "set", "name": "handler_ms", "value": "3", "view": "test"})
    panel._received({"kind": "do", "action": "preset", "arm": "async", "policy": "fixed"})
    panel._received({"kind": "set", "name": "depth", "value": "3", "view": "test"})
    panel._received({"kind": "set", "name": "policy", "value": "timeout", "view": "test"})
    assert wait_until(lambda: panel.values["depth"] == 3
                      and panel.server.policy.name == "timeout")
    free.set()
    assert wait_until(lambda: panel.party.size == 1 and panel.board["busy"] == "")
    # What was set before the arm is the arm's, what was set after it is not.
    assert panel.values["handler_ms"] == LIVE.presets["async"].sets["handler_ms"] != 3
    assert panel.values["depth"] == 3
    assert panel.server.policy.name == "timeout"
    assert panel.plan().arm == "async+pipelined"


@pytest.mark.parametrize("name", case.names())
def test_no_axis_of_a_plot_cuts_off_what_goes_beyond_its_end(name: str) -> None:
    _, plots = figures.layout(case.case(name))
    drawn = {plot.name: plot.figure for plot in plots if plot.name != "events"}
    assert {"cpu", "rates-log", "rates-linear"} <= set(drawn)
    for figure in drawn.values():
        assert isinstance(figure.y_range, DataRange1d)
        assert figure.y_range.end is None or figure.y_range.end != figure.y_range.end
    # What it shows at least: a whole core, which the kernel's process may go beyond.
    kept = [renderer.data_source.data["top"] for renderer in drawn["cpu"].renderers
            if "top" in renderer.data_source.data]
    assert kept == [[1000]]


def test_every_arm_has_a_preset_with_a_sentence() -> None:
    assert list(LIVE.presets) == [arm.name for arm in CASE.arms]
    assert all(preset.watch.endswith(".") for preset in LIVE.presets.values())


@pytest.mark.parametrize(("name", "value", "words"), [
    ("rcvbuf", 1, "1,024 to 67,108,864 bytes"),
    ("response_size", "99GiB", "1 to 1,073,741,824 bytes"),
    ("wait_cap_ms", "soon", "0.1 to 60,000.0 ms"),
    ("clients", 0, "1 to 64 clients"),
    ("membership", "perhaps", "choose from: "),
    ("idle", "tickless", "make no sense together"),
    ("colour", "red", "unknown control 'colour'"),
])
def test_a_wrong_value_is_refused_and_changes_nothing(
    panel: LivePanel, name: str, value: Any, words: str
) -> None:
    before, policy = dict(panel.values), panel.server.policy
    with pytest.raises(UsageError, match=words):
        panel.set(**{name: value})
    panel._received({"kind": "set", "name": name, "value": value})
    assert wait_until(lambda: words in (panel.board["refused"] or {}).get(name, ""))
    assert panel.values == before
    assert panel.server.policy == policy


@pytest.mark.parametrize("value", [6.0, "soon"])
def test_a_page_is_told_which_of_its_wishes_is_known(panel: LivePanel, value: Any) -> None:
    panel._received({"kind": "set", "name": "wait_cap_ms", "value": value, "view": "v", "count": 7})
    assert wait_until(lambda: panel.board["heard"] == {"view": "v", "count": 7})
    assert (panel.values["wait_cap_ms"] == value) or panel.board["refused"]["wait_cap_ms"]
    panel._received({"kind": "hello", "view": "w", "count": 2, "setup": False})
    assert wait_until(lambda: panel.board["heard"] == {"view": "w", "count": 2})


def test_a_control_reaches_the_engine_at_once(panel: LivePanel) -> None:
    slowest = 0.0
    for cap in (5.0, 10.0, 20.0, 25.0):
        begun = time.monotonic()
        panel._received({"kind": "set", "name": "wait_cap_ms", "value": cap})
        assert wait_until(partial(cap_is, panel, cap))
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 1.0, "a sanity bound; the benchmark measures it"


# ---- clients and states -------------------------------------------------------------------------


def test_the_strip_says_what_a_measured_run_says(panel: LivePanel) -> None:
    assert state_is(panel, "idle")
    done(panel, "preset", arm="async+pipelined")
    assert state_is(panel, "spins"), panel.board["strip"]
    row = panel.board["strip"]["rows"][0]
    assert row["sending"]
    assert row["listed"]
    assert (panel.board["strip"]["why"], panel.board["strip"]["timeout"]) == ("list", "0")
    panel.set(membership="leave")
    assert state_is(panel, "quiet"), panel.board["strip"]
    text = done(panel, "measure")
    assert panel.runs[0].arms[0]["state"] == "quiet", text
    assert panel.runs[0].arms[0]["policy"] == "membership"
    assert "async+pipelined" in panel.board["table"]
    assert panel.party.size == 1, "the panel's own stall is back"


def test_a_parked_worker_is_told_from_a_quiet_one_and_a_poke_makes_it_spin(
    panel: LivePanel,
) -> None:
    done(panel, "preset", arm="async")
    assert state_is(panel, "parked"), panel.board["strip"]
    assert panel.board["strip"]["mode"] == "until a completion (3a)"
    assert "poke answered" in done(panel, "poke")
    assert state_is(panel, "spins"), panel.board["strip"]
    assert "every byte in order" in done(panel, "read all")
    assert state_is(panel, "idle"), panel.board["strip"]


def test_stop_is_not_heard_by_a_parked_worker_and_start_again_helps(panel: LivePanel) -> None:
    done(panel, "preset", arm="async")
    assert "not honoured" in done(panel, "stop")
    done(panel, "poke")
    assert state_is(panel, "stopped"), panel.board["strip"]
    assert "fresh worker" in done(panel, "start again")
    assert state_is(panel, "idle")
    assert panel.board["running"]


def test_a_new_receive_buffer_reconnects_a_stalled_client(panel: LivePanel) -> None:
    done(panel, "preset", arm="async")
    accepted = panel.server.counters()["accepts"]
    panel._received({"kind": "set", "name": "rcvbuf", "value": "64KiB"})
    assert wait_until(lambda: panel.server.counters()["accepts"] == accepted + 1)
    panel._received({"kind": "auto", "on": False})
    panel._received({"kind": "set", "name": "rcvbuf", "value": 4096})
    time.sleep(0.4)
    assert panel.server.counters()["accepts"] == accepted + 1
    assert panel.values["rcvbuf"] == 4096


def test_an_arm_comes_about_again_though_the_worker_is_held_up_meanwhile(panel: LivePanel) -> None:
    # Whoever stalls has a SEND that waits. The worker does not see him go for a while, as when the
    # machine is busy; who took that SEND for his own would ask for everything at once.
    done(panel, "preset", arm="async+pipelined")
    assert state_is(panel, "spins"), panel.board["strip"]
    with Client(panel.server.host, panel.server.port) as other:
        other.ask("/sync?size=64&ms=900", 64)
        assert wait_until(lambda: panel.server.counters()["blocked"])
        done(panel, "preset", arm="async+pipelined")
        assert panel.server.counters()["list_length"] == 1
        assert state_is(panel, "spins"), panel.board["strip"]


def test_every_one_of_several_clients_comes_to_the_stall_before_more_is_asked(
    panel: LivePanel,
) -> None:
    panel.set(clients=8)
    for _ in range(3):
        assert "8 clients" in done(panel, "preset", arm="async+pipelined")
        assert [each.listed and each.sending for each in panel.server.connections()] == [True] * 8


def test_several_clients_read_half_close_and_reset(panel: LivePanel) -> None:
    panel.set(clients=3)
    assert "3 clients" in done(panel, "stall")
    assert len(panel.server.connections()) == 3
    assert "read 196,608 bytes" in done(panel, "read", size=65536)
    assert "FIN" in done(panel, "half-close")
    assert "reset 3 connections" in done(panel, "reset")
    assert "no client is connected" in done(panel, "read all")


def test_a_response_that_the_sockets_take_whole_is_said_to_be_no_stall(panel: LivePanel) -> None:
    panel.set(response_size=1000)
    assert "Is the response larger" in done(panel, "stall")


def test_a_server_of_the_caller_s_stays_his() -> None:
    try:
        server = RingServer("shipped", max_connections=64).start()
    except MachineError as reason:
        pytest.skip(str(reason))
    with server, Client(server.host, server.port) as client:
        made = LivePanel(server)
        made.close()
        client.ask("/sync?size=64", 64)
        assert client.read_all()


# ---- errors -------------------------------------------------------------------------------------


class Divides(Policy):
    """A policy with a fault."""

    def timeout(self, loop: LoopView) -> bool:
        return loop.list_length / 0 > 1


def test_an_exception_in_a_python_policy_shows_with_its_line_and_ends_the_worker(
    panel: LivePanel,
) -> None:
    panel.set(policy=Divides)
    panel.do("stall")
    assert wait_until(lambda: "ZeroDivisionError" in str(panel.board["message"]))
    text = panel.board["message"]["text"]
    line = Divides.timeout.__code__.co_firstlineno + 1
    assert f"line {line}" in text
    assert "\n" not in text
    assert panel.board["message"]["error"]
    assert wait_until(lambda: panel.board["running"] is False)
    assert "fresh worker" in done(panel, "start again")
    assert panel.server.policy.name == "shipped"
    assert state_is(panel, "idle")


class ParsesJson(Policy):
    """A policy that fails in what it calls."""

    def timeout(self, loop: LoopView) -> bool:
        return bool(self.parsed("no JSON"))

    @staticmethod
    def parsed(text: str) -> object:
        return json.loads(text)


class AsksTheLab(Policy):
    """A policy that calls the lab, and wrongly."""

    def timeout(self, loop: LoopView) -> bool:
        return bool(CASE.parameters.parse(["no assignment"]))


@pytest.mark.parametrize(("policy", "where"), [
    (ParsesJson, ParsesJson.parsed), (AsksTheLab, AsksTheLab.timeout),
])
def test_the_line_that_is_named_is_the_user_s_own(
    panel: LivePanel, policy: type[Policy], where: Any
) -> None:
    panel.set(policy=policy)
    panel.do("stall")
    assert wait_until(lambda: "raised" in str(panel.board["message"]))
    line = where.__code__.co_firstlineno + (2 if where is ParsesJson.parsed else 1)
    assert panel.board["message"]["text"].endswith(f"(line {line} of {where.__name__}())")


def test_an_error_of_the_lab_s_own_names_no_line_of_its_insides() -> None:
    with pytest.raises(ClientError) as refused:
        Client("127.0.0.1", 9)
    assert refused.value.__cause__ is not None
    assert brief(refused.value) == str(refused.value)


def test_a_server_that_is_closed_under_the_panel_is_one_clear_line() -> None:
    try:
        server = RingServer("shipped", max_connections=64).start()
    except MachineError as reason:
        pytest.skip(str(reason))
    with server, LivePanel(server) as made:
        made.watch.hello("test")
        server.close()
        assert wait_until(lambda: made.board["message"] is not None)
        assert made.board["message"]["error"]
        text = done(made, "stall")
        assert "\n" not in text
        assert "Traceback" not in text


def test_without_io_uring_the_stepper_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: RingServer) -> RingServer:
        raise MachineError("io_uring is disabled on this machine")

    monkeypatch.setenv(mode.BATCH, "0")
    monkeypatch.setattr(RingServer, "start", refuse)
    offered = lab.live()
    assert isinstance(offered, lab.Stepper)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "io_uring is disabled" in said
    assert open_panels() == []


def test_brief_is_one_line() -> None:
    assert brief(ValueError("a\nb")) == "ValueError: a b"
    assert brief(UsageError("plain")) == "plain"


# ---- what is left behind ------------------------------------------------------------------------


def test_closing_leaves_no_thread_client_or_socket() -> None:
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    panels = [panel_of(), panel_of()]
    for made in panels:
        done(made, "preset", arm="async+pipelined")
    close_all()
    assert [made.state for made in panels] == ["closed", "closed"]
    assert wait_until(lambda: ours() == [])
    assert open_panels() == []
    after = {path.name for path in Path("/proc/self/fd").iterdir()}
    assert len(after - before) <= 1  # the listing itself
    panels[0].close()


def test_a_panel_that_nobody_looks_at_rests_and_wakes_for_a_page() -> None:
    made = panel_of()
    try:
        done(made, "preset", arm="async+pipelined")
        made.rest()
        assert made.state == "resting"
        assert ours() == []
        made._received({"kind": "hello", "view": "again", "bokeh": True})
        assert wait_until(lambda: made.state == "open")
        assert state_is(made, "idle")
        assert made.values["depth"] == 2, "the controls are as they were"
    finally:
        made.close()
    assert wait_until(lambda: ours() == [])


def test_a_cell_that_is_run_again_replaces_its_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replaced(("cell", "run 1"), ("cell", "run 2"))
    assert not replaced(("cell", "run 1"), ("cell", "run 1")), "two panels in one cell"
    assert not replaced(("cell", "run 1"), ("other", "run 2"))
    assert not replaced(None, ("cell", "run 2"))
    assert opening.this_cell() is None


def test_in_a_batch_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mode.BATCH, "1")
    assert lab.live() is None
    assert lab.live("splice") is None
    assert ours() == []
    with pytest.raises(UsageError, match="splise"):
        lab.live("splise")
    with pytest.raises(UsageError, match="not a int"):
        lab.live(3)  # type: ignore[arg-type]


# ---- what is copied -----------------------------------------------------------------------------


def test_copied_parameters_repeat_the_measurement() -> None:
    values = {name: control.parameter.default
              for name, control in LIVE.controls(CASE.parameters).items()}
    from engine import resolve

    plan = measured.plan(LIVE, {**values, "rcvbuf": 8192, "depth": 3},
                         resolve("shipped", membership="leave"), False, "", 1.0)
    assert plan.arm == "async+pipelined"
    assert "-p rcvbuf=8192" in plan.command
    assert "-p depth=3" in plan.command
    assert CASE.parameters.resolve(plan.parameters)
    namespace: dict[str, Any] = {}
    exec(plan.as_text(), namespace)
    assert namespace["rcvbuf"] == 8192
    assert namespace["arms"] == ["async+pipelined"]
    json.dumps(plan.as_text())


def repeated(panel: LivePanel, project: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a run's parameters, arms and policies are when what the panel copies is given to the
    case's notebook and to the command line; and what its newest measured run had."""
    text, case = panel.board["command"], panel.experiment
    notebook = json.loads((project / "notebooks" / f"{case.name.replace('-', '_')}.ipynb")
                          .read_text(encoding="utf-8"))
    cell, = ("".join(cell["source"]) for cell in notebook["cells"]
             if "parameters" in cell["metadata"].get("tags", ()))
    pasted: dict[str, Any] = {}
    exec(cell, pasted)
    exec(text, pasted)
    by_notebook = case.parameters.resolve({name: pasted[name] for name in case.parameters.names()})
    words = shlex.split(text.splitlines()[-1].removeprefix("# "))
    assert words[:3] == ["ringlab", "run", case.name]
    options = list(zip(words[3::2], words[4::2], strict=True))
    by_command = case.parameters.resolve(
        case.parameters.parse([value for name, value in options if name == "-p"]))
    asked = dict(options)
    run = panel.runs[-1]
    row, = run.arms
    return [
        {**by_notebook, "arms": pasted["arms"], "policies": pasted["policies"]},
        {**by_command, "arms": [asked["--arm"]], "policies": [asked["--policy"]]},
    ], {**run.parameters, "arms": [row["arm"]], "policies": [row["policy"]]}


def test_what_is_copied_is_what_was_measured(panel: LivePanel, project: Path) -> None:
    panel._received({"kind": "auto", "on": False})
    done(panel, "preset", arm="async+pipelined")
    # Nothing is pressed after these: what is copied follows a control by itself.
    panel._received({"kind": "set", "name": "wait_cap_ms", "value": 12.5})
    panel._received({"kind": "set", "name": "response_size", "value": "2MiB"})
    panel._received({"kind": "set", "name": "membership", "value": "leave"})
    assert wait_until(lambda: panel.server.policy.name == "membership")
    assert wait_until(lambda: "membership" in panel.board["command"])
    assert "-p response_size=2097152" in panel.board["command"]
    done(panel, "measure")
    copied, measured_so = repeated(panel, project)
    assert measured_so["seconds"] == 0.4 != CASE.parameters["seconds"].default
    assert copied == [measured_so, measured_so]


def test_what_the_run_would_not_take_is_not_measured_as_something_else() -> None:
    """The panel's range is the engine's; a run that took its default instead would be another."""
    values = {name: control.parameter.default
              for name, control in LIVE.controls(CASE.parameters).items()}
    from engine import resolve

    held = resolve("held-listed")
    with pytest.raises(UsageError, match="handler_ms=300 is not allowed: give 600 to 60,000 ms"):
        measured.plan(LIVE, {**values, "handler_ms": 300}, held, False, "held-completion", 1.0)
    plan = measured.plan(LIVE, {**values, "handler_ms": 700}, held, False, "held-completion", 1.0)
    assert plan.parameters["handler_ms"] == 700
    plan = measured.plan(LIVE, {**values, "handler_ms": 300}, resolve("fixed"), False, "async", 1.0)
    assert "handler time of 300 ms" in plan.notes
    with pytest.raises(UsageError, match="response_size=0 is not allowed"):
        measured.plan(LIVE, {**values, "response_size": 0}, held, False, "", 1.0)


def test_what_is_no_arm_of_the_case_is_not_measured_as_one() -> None:
    values = {name: control.parameter.default
              for name, control in LIVE.controls(CASE.parameters).items()}
    from engine import resolve

    with pytest.raises(UsageError, match="no arm for these settings"):
        measured.plan(LIVE, {**values, "route": "sync", "depth": 2}, resolve("shipped"),
                      False, "", 1.0)
    with pytest.raises(UsageError, match="written in Python"):
        measured.plan(LIVE, values, resolve(Divides), False, "", 1.0)


@pytest.mark.parametrize(("action", "options", "words"), [
    ("reed", {}, "unknown action 'reed'"),
    (3, {}, "unknown action '3'"),
    ("read", {"size": -5}, "size=-5 is not allowed: give 1 to 1,073,741,824 bytes"),
    ("read", {"size": "much"}, "size=much is not allowed"),
    ("read", {"size": None}, "size=None is not allowed"),
    ("read", {"bytes": 5}, "read has no option 'bytes'; it takes: size"),
    ("stall", {"size": 5}, "stall has no option 'size'; it takes: none"),
    ("preset", {}, "unknown arm 'None'; choose from: "),
    ("preset", {"arm": "asink"}, "unknown arm 'asink'; choose from: async, "),
    ("preset", {"arm": ["async"]}, "unknown arm"),
    ("preset", {"arm": "async", "policy": "fixt"}, "unknown policy 'fixt'; choose from: fixed"),
])
def test_what_no_button_does_is_one_clear_line_and_nothing_is_done(
    panel: LivePanel, action: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        panel.do(action, **options)
    assert words in str(refused.value)
    assert panel.hands.idle
    assert panel.party.size == 0
    assert set(_OPTIONS) < set(ACTIONS)


def test_a_size_from_the_page_is_refused_beside_its_field_and_may_be_written_as_people_do(
    panel: LivePanel,
) -> None:
    done(panel, "stall")
    panel._received({"kind": "do", "action": "read", "size": "-5"})
    assert wait_until(lambda: "size" in panel.board["refused"])
    assert "size=-5 is not allowed" in panel.board["refused"]["size"]
    assert panel.board["message"]["text"] == panel.board["refused"]["size"]
    assert "read 2,048 bytes" in done(panel, "read", size="2KiB")
    panel._received({"kind": "do", "action": "read", "size": "100"})
    assert wait_until(lambda: panel.board["refused"] == {})

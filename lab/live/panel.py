"""The live panel: one running ring server, its clients, its controls and its picture."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numpy.typing import NDArray

from engine import RingServer
from engine.errors import RinglabError, UsageError, unknown
from engine.policy import OWN, method_name, table
from engine.server import AnyPolicy
from lab import experiment as experiments
from lab.live import controls as controlling
from lab.live import measured
from lab.live.board import Board, strip
from lab.live.controls import CONNECTION, POLICY, REQUEST
from lab.live.feed import RATE_HZ, Feed
from lab.live.lane import Lane
from lab.live.opening import this_cell
from lab.live.party import Party, brief, steps_of
from lab.live.presets import arm_of, presets
from lab.live.series import COLUMNS, RATES, span_figures
from lab.live.state import LiveJudge, Now
from lab.live.stream import View, Watch
from lab.parameters import Value
from lab.runs import Run, RunStore

STOP_S = 1.0
# The strip is told often while something has just been done, seldom while it stays so.
_STRIP_S, _STRIP_LATER_S, _JUST_NS = 0.25, 0.7, 3_000_000_000
_COST_S = 2.0
_ENDED = Now("stopped", "the worker has left its loop; press start again", "", "", "")


class LivePanel:
    """Controls, presets, a state strip and streaming plots for one ring server.

    :param server: a running server, which stays the caller's; None: one of the panel's own, in
        this process, with the settings of the controls.
    :param experiment: whose parameters, arms and choreographies the panel offers.
    :param policy: of the own server, see :func:`engine.policy.resolve`.
    :param rate: frames a second, 2 to 20.
    :param seconds: length of the windows of "measure this", s.
    :param values: first values of controls, by name.

    Shows itself as the last value of a cell. ``close()`` ends its threads and clients, and the
    server if it is its own; so does leaving a ``with`` block, running the cell again, and the end
    of the kernel. Raises MachineError where io_uring is not allowed, UsageError for a wrong value.
    """

    def __init__(
        self, server: RingServer | None = None, *, experiment: str = "dirty-list",
        policy: AnyPolicy = "shipped", rate: float = RATE_HZ, seconds: float = 1.0,
        store: RunStore | None = None, **values: Value,
    ) -> None:
        self.experiment = experiments.load(experiment)
        controlling.refuse_other(self.experiment.name, self.experiment.parameters)
        self.controls = controlling.panel_controls(self.experiment.parameters)
        self.values: dict[str, Value] = {
            name: control.parameter.default for name, control in self.controls.items()
        }
        for name, value in values.items():
            self.values[name] = self._control(name).parameter.check(value)
        self.seconds = float(self.experiment.parameters["seconds"].check(seconds))
        self._rate, self._store = rate, store
        self._own = server is None
        self._held, self._auto = False, True
        self.server = server if server is not None else self._new_server(policy)
        self.server.start()
        self.runs: list[Run] = []
        self._notes: list[str] = []
        self.state = "opening"
        self._busy = self._measuring = False
        self._life = threading.RLock()
        self.view = View("panel", self._received)
        self.watch = Watch()
        self.board = Board(self.view)
        self.cell = this_cell()
        for other in open_panels():
            if replaced(other.cell, self.cell):
                other.close()
        self._begin()
        _open.add(self)

    # -- life -----------------------------------------------------------------------------------

    def _new_server(self, policy: AnyPolicy) -> RingServer:
        settings = {name: value for each, number in self.values.items()
                    if (pair := controlling.server_value(each, number)) for name, value in [pair]}
        settings["handler_ms"] = 0 if self._held else settings["handler_ms"]
        options: dict[str, Any] = {"max_connections": 256, "stop_grace_ms": 200, **settings}
        return RingServer(policy, **options)

    def _begin(self) -> None:
        self.judge = LiveJudge()
        self.party = Party(self.server)
        self.desk = Lane("ringlab-desk", self._failed)
        self.hands = Lane("ringlab-clients", self._failed)
        self._strip_at = self._cost_at = 0.0
        try:
            self.feed = Feed(self.server, self.view, self.watch, self._rate,
                             tick=self._tick, failed=self._ended)
        except BaseException:
            self.desk.close()
            self.hands.close()
            raise
        self.state = "open"
        self.board.tell(
            values=dict(self.values), policy=self._policy_facts(), auto=self._auto, refused={},
            paused=False, busy="", message=None, table="", span="", running=True,
            watch="Choose an arm above, or set the controls and press stall.", arm="",
            life="open", status="", command="",
        )

    def rest(self) -> None:
        """Ends threads, clients and the own server; a page that opens again brings it back."""
        with self._life:
            if self.state == "open":
                self._end("resting")

    def close(self) -> None:
        """Ends everything, for good; harmless when repeated, and from any thread."""
        with self._life:
            if self.state == "open":
                self._end("closed")
            if self.state != "closed" or self.view.comm is not None:
                self.state = "closed"
                self.board.tell(life="closed", status="closed; run the cell again")
                self.view.shut()
        _open.discard(self)

    def _end(self, state: str) -> None:
        self.state = state
        self.board.tell(life=state, status="resting: nobody looks" if state == "resting" else "",
                        busy="")
        # First the feed, which reads the server; then the clients; then the server.
        self.feed.close()
        self.desk.close()
        self.party.close()  # what a client waits for ends with its socket
        self.hands.close()
        self.party.close()
        if self._own:
            try:
                self.server.close()
            except RinglabError:
                pass  # it was told when it happened

    def _resume(self) -> None:
        with self._life:
            if self.state != "resting":
                return
            try:
                if self._own:
                    self.server = self._new_server(_named(self.server))
                self.server.start()
            except RinglabError as error:
                self.board.say(brief(error), error=True)
                return
            self._begin()
            self.desk.put(lambda: self._introduce(True))

    def __enter__(self) -> LivePanel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LivePanel {self.experiment.name}, {self.state}, {self.server!r}>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.view._repr_mimebundle_(**options)

    # -- what a notebook may ask ----------------------------------------------------------------

    def dark(self) -> AbstractContextManager[None]:
        """A dark window: nothing is streamed inside the block, and the picture catches up after."""
        return self.feed.dark()

    def pause(self, on: bool = True) -> None:
        """Stops the picture, or lets it go on; no sample is lost."""
        self.feed.pause(on)
        self.board.tell(paused=on, status=self._status())

    def samples(self, seconds: float = 120.0) -> NDArray[Any]:
        """The native sampler's samples of the last ``seconds``, flat (``counters.flat_dtype``)."""
        return self.feed.samples.since(time.monotonic_ns() - int(seconds * 1e9))

    def set(self, **changes: Any) -> None:
        """Sets controls, decisions or ``policy``; returns when the server has them.

        UsageError for what is not allowed. What needs a new request or connection gets one, if a
        stall is up and "apply at once" is on.
        """
        for name, value in changes.items():
            self._set(name, value)

    def do(self, action: str, **options: Any) -> None:
        """Presses a button: one of ``ACTIONS``; the panel's client thread does it."""
        if action not in ACTIONS:
            raise unknown("action", action, ACTIONS)
        work = ACTIONS[action]
        self.hands.put(lambda: self._doing(action, lambda: work(self, **options)))

    def plan(self) -> measured.Plan:
        """The run that the present settings mean."""
        return measured.plan(self.experiment, self.values, self.server.policy,
                             self.party.poked, self._held)

    # -- messages from the page: tiny, any thread ------------------------------------------------

    def _received(self, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "hello":
            self._hello(message)
        elif kind in ("seen", "here", "hidden", "bye"):
            if self.watch.report(str(kind), str(message.get("view")),
                                 int(message.get("count", 0)), bool(message.get("sight"))):
                self.desk.put(lambda: self._introduce(False))
        elif self.state != "open":
            return
        elif kind == "set":
            name, value = str(message.get("name")), message.get("value")
            self.desk.put(lambda: self._set_from_page(name, value), key=f"set {name}")
        elif kind == "do" and message.get("action") in ACTIONS:
            options = {key: message[key] for key in ("size", "arm") if key in message}
            self.do(str(message["action"]), **options)
        elif kind == "pause":
            self.desk.put(lambda: self.pause(bool(message.get("on"))))
        elif kind == "auto":
            self._auto = bool(message.get("on"))
            self.board.tell(auto=self._auto)
        elif kind == "span":
            begun, ended = message.get("from"), message.get("to")
            self.desk.put(lambda: self._span(begun, ended), key="span")

    def _hello(self, message: dict[str, Any]) -> None:
        self.watch.hello(str(message.get("view")), int(message.get("count", 0)))
        setup = bool(message.get("setup", True))
        if self.state == "resting":
            threading.Thread(target=self._resume, name="ringlab-resume", daemon=True).start()
        if self.state == "open":
            self.desk.put(lambda: self._introduce(setup))

    def _introduce(self, setup: bool) -> None:
        if setup:
            self._post_setup()
        self.board.tell_all()
        self.feed.send_history()

    def _post_setup(self) -> None:
        self.view.post({"kind": "setup", **_setup(), "controls": [
            control.spec(self.values[name]) for name, control in self.controls.items()],
            "presets": [vars(preset) for preset in presets(self.experiment)],
            "case": self.experiment.title})

    # -- controls -------------------------------------------------------------------------------

    def _control(self, name: str) -> controlling.Control:
        if name not in self.controls:
            raise unknown("control", name, [*self.controls, POLICY, *map(method_name, table())])
        return self.controls[name]

    def _set_from_page(self, name: str, value: object) -> None:
        refused = dict(self.board["refused"] or {})
        refused.pop(name, None)
        try:
            self._set(name, value)
        except RinglabError as error:
            refused[name] = brief(error)
        self.board.tell(refused=refused, values=dict(self.values), policy=self._policy_facts())

    def _set(self, name: str, value: Any) -> None:
        if name == POLICY or name in map(method_name, table()):
            self._set_policy(name, value)
            return
        control = self._control(name)
        checked = control.parameter.check(value)
        if checked == self.values[name]:
            return
        pair = controlling.server_value(name, checked)
        if pair is not None and not (self._held and name == "handler_ms"):
            self.server.set(None, **{pair[0]: pair[1]})
        self.values[name] = checked
        shown = f"{checked:,}" if isinstance(checked, (int, float)) else str(checked)
        self._changed(f"{control.label} {shown}", f"set {name}")
        self.board.tell(values=dict(self.values))
        if name in ("route", "depth"):
            self._held = False
        if control.effect in (REQUEST, CONNECTION) and self._auto and self.party.size:
            self.hands.put(lambda: self._doing("reconnect", self._restall), key="stall")

    def _set_policy(self, name: str, value: Any) -> None:
        if name == POLICY:
            self.server.set(policy=value)
            text = f"policy {self.server.policy.name}"
        else:
            self.server.set(**{name: value})
            text = f"{name} {value}"
        self._changed(text, f"set {name}")
        self.board.tell(policy=self._policy_facts())

    def _policy_facts(self) -> dict[str, Any]:
        policy = self.server.policy
        return {"name": policy.name,
                "specs": controlling.policy_specs(policy.choices, policy.name)}

    def _changed(self, text: str, key: str = "") -> None:
        self.judge.changed(time.monotonic_ns())
        self.feed.mark(text, key)

    # -- buttons: on the client thread -----------------------------------------------------------

    def _doing(self, action: str, work: Callable[[], str | None]) -> None:
        self.board.tell(busy=action)
        try:
            text = work()
            if text:
                self.board.say(text)
        finally:
            self.board.tell(busy="", running=self._running(), command=self._command())

    def _stall(self) -> str:
        count = int(self.values["clients"])
        self.feed.mark("stall" if count == 1 else f"stall, {count} clients")
        return self._restall()

    def _restall(self) -> str:
        arm = arm_of(str(self.values["route"]), int(self.values["depth"]), False, self._held)
        return self._play(steps_of(arm, self.values))

    def _play(self, steps: Any) -> str:
        count = int(self.values["clients"])
        self.judge.changed(time.monotonic_ns())
        troubles = self.party.stall(steps, count)
        self.judge.changed(time.monotonic_ns())
        if troubles:
            return (f"{'; '.join(troubles)}. Is the response larger than what the sockets take "
                    "(client SO_RCVBUF, server SO_SNDBUF)?")
        return "a client asked and does not read" if count == 1 else \
            f"{count} clients asked and do not read"

    def _preset(self, arm: str) -> str:
        chosen = {preset.arm: preset for preset in presets(self.experiment)}
        if arm not in chosen:
            raise unknown("arm", arm, chosen)
        preset = chosen[arm]
        self._held = arm == "held-completion"
        for name, value in preset.sets.items():
            self.values[name] = value
            pair = controlling.server_value(name, value)
            if pair is not None:
                self.server.set(None, **{pair[0]: 0 if name == "handler_ms" else pair[1]})
        self.feed.mark(f"arm {arm}")
        self.board.tell(values=dict(self.values), watch=preset.watch, arm=arm, refused={})
        return self._play(steps_of(arm, self.values))

    def _act(self, name: str, work: Callable[[], str]) -> str:
        self._changed(name)
        text = work()
        self.judge.changed(time.monotonic_ns())
        return text

    def _stop(self) -> str:
        self._changed("stop asked")
        begun = time.monotonic()
        self.server.request_stop()
        if self.server.wait_stopped(STOP_S):
            return f"stop honoured after {(time.monotonic() - begun) * 1e3:,.0f} ms"
        return (f"stop not honoured within {STOP_S:g} s: the worker sleeps in a wait without a "
                "timeout and does not look at the flag")

    def _again(self) -> str:
        self.party.close()
        policy = _named(self.server)
        try:
            self.server.close()
        except RinglabError:
            pass  # it was told when it happened
        if self._own:
            self.server = self._new_server(policy)
        self.server.start()
        self.party = Party(self.server)
        self.feed.restart(self.server)
        self._changed("started again")
        self.board.tell(policy=self._policy_facts(), running=True)
        return f"a fresh worker runs under {self.server.policy.name}"

    def _measure(self) -> str:
        wanted = self.plan()
        stalled, steps_arm = self.party.size > 0, wanted.arm
        self._measuring = True
        try:
            with self.feed.dark():
                # Two spinning workers would share the cores: the panel's own comes to rest first.
                self.party.close()
                self.board.tell(status="dark: measuring", arm=steps_arm)
                run = measured.measure(wanted, self.seconds, self._store, lambda what:
                                       self.board.tell(busy=f"measuring: {what}"))
        finally:
            self._measuring = False
        self.runs.append(run)
        self._notes.append(wanted.notes)
        self.board.tell(table=measured.runs_table(self.runs, self._notes).to_html())
        self.feed.mark("measured")
        if stalled and self.state == "open":
            self._play(steps_of(steps_arm, self.values))
        row = run.arms[0]
        return f"measured {row['arm']} under {row['policy']}: {row['state']}; {row['reason']}"

    def _span(self, begun: Any, ended: Any) -> None:
        if not isinstance(begun, (int, float)) or not isinstance(ended, (int, float)):
            self.board.tell(span="")
            return
        zero = self.feed.zero_ns
        found = span_figures(self.feed.samples.since(zero + int(begun * 1e9),
                                                     zero + int(ended * 1e9)))
        if found is None:
            self.board.tell(span="the selected span holds fewer than two samples")
            return
        self.board.tell(span=(
            f"{begun:.1f} to {ended:.1f} s ({found['samples']:,.0f} samples): "
            f"{found['waits']:,.0f} waits/s, {found['wasted']:,.0f} wasted/s, worker CPU "
            f"{found['cpu']:,.1f} ms/s, on queue {found['on_queue']:.3f} of the time"))

    def _command(self) -> str:
        try:
            return self.plan().as_text()
        except RinglabError as error:
            return f"# {brief(error)}"

    # -- the feeding thread ---------------------------------------------------------------------

    def _tick(self, new: bool) -> None:
        now = time.monotonic()
        if self.watch.gone and self.state == "open":
            threading.Thread(target=self.rest, name="ringlab-rest", daemon=True).start()
        if not self.watch.watched or self._measuring:
            return
        just = time.monotonic_ns() - self.judge.changed_ns < _JUST_NS
        if now - self._strip_at >= (_STRIP_S if just else _STRIP_LATER_S) and not self.feed.paused:
            self._strip_at = now
            self.board.tell(strip=self._strip(), status=self._status())
        if now - self._cost_at >= _COST_S:
            self._cost_at = now
            self.board.tell(cost=f"{self.feed.cost * 100:.1f}", hz=self.feed.hz,
                            lost=self.feed.lost)

    def _strip(self) -> dict[str, Any]:
        cap = float(self.values["wait_cap_ms"])
        look_ns = int(self.judge.look_s(cap) * 1e9)
        flat = self.feed.samples.since(time.monotonic_ns() - look_ns)
        flat = flat[flat["worker"] == 0]
        if len(flat) and flat["ended"][-1]:
            return strip(_ENDED, [])
        connections = self.server.connections()
        stalled = any(c.sending or c.write_buf or c.send_buf or c.outstanding or c.handler_running
                      for c in connections)
        now = self.judge.judge(flat, self.server.policy.choices, cap, stalled)
        return strip(now, connections)

    def _status(self) -> str:
        if self.feed.paused:
            return "paused"
        if self.feed.is_dark:
            return "dark"
        return "live"

    def _running(self) -> bool:
        try:
            return self.server.running() > 0
        except RinglabError:
            return False

    def _ended(self, error: RinglabError) -> None:
        self.board.tell(running=False, strip=strip(_ENDED, []), status="server stopped")
        self.board.say(brief(error), error=True)

    def _failed(self, error: BaseException) -> None:
        try:
            self.server.check()  # what ended the server is the reason of whatever failed after it
        except RinglabError as reason:
            error = reason
        if self.state == "open":
            self.board.say(brief(error), error=True)


def _setup() -> dict[str, Any]:
    from bokeh.embed.util import standalone_docs_json_and_render_items

    from lab.live import figures
    from lab.live.stream import legend
    from lab.plots.style import FLOOR

    _, plots = figures.layout()
    docs, items = standalone_docs_json_and_render_items([plot.figure for plot in plots])
    return {
        "docs": docs, "docid": items[0].docid,
        "plots": [{"id": plot.figure.id, "name": plot.name, "title": plot.title,
                   "legend": legend(plot.keys)} for plot in plots],
        "columns": list(COLUMNS), "logs": list(RATES), "seconds": figures.SECONDS, "floor": FLOOR,
    }


def _named(server: RingServer) -> AnyPolicy:
    """The server's policy, or the shipped one where it was written in Python (and may fail)."""
    choices = server.policy.choices
    return "shipped" if OWN in choices.values() else dict(choices)


ACTIONS: dict[str, Callable[..., str | None]] = {
    "stall": lambda panel: panel._stall(),
    "reconnect": lambda panel: panel._stall(),
    "preset": lambda panel, arm: panel._preset(arm),
    "read": lambda panel, size=65536: panel._act(
        f"read {size:,} bytes", lambda: panel.party.read(size)),
    "read all": lambda panel: panel._act("read all", panel.party.read_all),
    "poke": lambda panel: panel._act("poke", panel.party.poke),
    "half-close": lambda panel: panel._act("half-close", panel.party.half_close),
    "reset": lambda panel: panel._act("reset", panel.party.reset),
    "stop": lambda panel: panel._stop(),
    "start again": lambda panel: panel._again(),
    "measure": lambda panel: panel._measure(),
}
"""What the buttons do, by name; each runs on the panel's client thread."""

def replaced(other: tuple[str, str] | None, cell: tuple[str, str] | None) -> bool:
    """Whether ``cell`` is a later run of the cell that ``other`` was."""
    return other is not None and cell is not None and other[0] == cell[0] and other[1] != cell[1]


_open: set[LivePanel] = set()


def open_panels() -> list[LivePanel]:
    """The panels that were opened and not closed."""
    return list(_open)


def close_all() -> None:
    """Closes every panel."""
    for panel in open_panels():
        panel.close()


@atexit.register
def _at_exit() -> None:
    """No native thread outlives the interpreter; and no page is told, for it knows already."""
    for panel in open_panels():
        panel.view.mute()
        panel.close()


__all__ = ["ACTIONS", "LivePanel", "UsageError", "close_all", "open_panels"]

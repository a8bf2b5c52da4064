"""The live panel: one running engine, its clients, its controls and its picture.

It knows no engine: what differs from one to the other, a :class:`lab.live.case.LiveCase` says.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

from numpy.typing import NDArray

from engine.base import Engine
from engine.decisions import OWN, AnyPolicy
from engine.errors import MachineError, RinglabError, UsageError, quoted, unknown
from lab.live import controls as controlling
from lab.live import measured
from lab.live.board import Board, strip
from lab.live.case import LiveCase, Look, case_for
from lab.live.controls import CONNECTION, POLICY, REQUEST
from lab.live.feed import RATE, RATE_HZ, Feed
from lab.live.lane import Lane
from lab.live.opening import replaced, this_cell
from lab.live.party import Party, brief
from lab.live.series import span_figures
from lab.live.state import LiveJudge, Now
from lab.live.stream import View, Watch, heard
from lab.parameters import Parameter, Value
from lab.runs import Run, RunStore

STOP_S = 1.0
# The strip is told often while something has just been done, seldom while it stays so.
_STRIP_S, _STRIP_LATER_S, _JUST_NS = 0.25, 0.7, 3_000_000_000
_COST_S = 2.0
_ENDING_S = 0.5
_NOBODY = Look([], False)
_WIDE = 7  # columns of the strip that find room beside the controls


class LivePanel:
    """Controls, presets, a state strip and streaming plots for one engine.

    :param server: a RingServer or SpliceRelay, which stays the caller's; None: one of the panel's
        own, in this process, with the settings of the controls.
    :param experiment: whose parameters, arms and choreographies the panel offers; None: those of
        the engine's case (of dirty-list without one).
    :param policy: of the own engine, see :func:`engine.policy.resolve`; None: the faulty one that
        the case begins with.
    :param rate: frames a second, 2 to 20.
    :param seconds: length of the windows of "measure this", s.
    :param values: first values of controls, by name.

    Shows itself as the last value of a cell. ``close()`` ends its threads and clients, and the
    engine if it is its own; so does leaving a ``with`` block, running the cell again, and the end
    of the kernel. Raises MachineError where io_uring is needed and not allowed, UsageError for a
    wrong value.
    """

    def __init__(
        self, server: Engine | None = None, *, experiment: str | None = None,
        policy: AnyPolicy | None = None, rate: float = RATE_HZ, seconds: float = 1.0,
        store: RunStore | None = None, **values: Value,
    ) -> None:
        self.case: LiveCase = case_for(server, experiment)
        self.experiment = self.case.experiment
        first = self._first_policy(server, policy)
        if store is not None and not isinstance(store, RunStore):
            raise UsageError(f"store is a RunStore, not a {type(store).__name__}")
        self.controls = self.case.controls(self.experiment.parameters)
        self.values = self.case.first_values(self.controls, server)
        for name, value in values.items():
            self.values[name] = self._control(name).parameter.check(value)
        self.seconds = float(self.experiment.parameters["seconds"].check(seconds))
        self._rate, self._store = float(RATE.check(rate)), store
        self._own = server is None
        self._arm, self._auto = self.case.arm, True
        # The page, a cell and the client thread change what is chosen, each with what it was.
        self._changing = threading.RLock()
        self._wishes, self._wished = itertools.count(1), dict[str, int]()
        self._around = ExitStack()
        self._needed: Any = None
        self._lost_told = False
        self.runs: list[Run] = []
        self._notes: list[str] = []
        self.state = "opening"
        self._measuring = False
        self._life = threading.RLock()
        # Only what was checked comes so far; what breaks off from here on takes all with it.
        with ExitStack() as begun:
            self.server = self._serve(first, begun) if server is None else _started(server, begun)
            self.view = View("panel", self._received)
            begun.callback(self.view.shut)
            self.watch = Watch()
            self.board = Board(self.view)
            self.cell = this_cell()
            for other in open_panels():
                if replaced(other.cell, self.cell):
                    other.close()
            self._begin()
            _open.add(self)
            begun.pop_all()

    def _first_policy(self, server: Engine | None, policy: AnyPolicy | None) -> AnyPolicy:
        """The policy of an engine of the panel's own, checked."""
        if server is not None and policy is not None:
            raise UsageError("policy is that of an engine of the panel's own: set it on yours, "
                             "with set(policy=...)")
        return self.case.decisions.resolve(self.case.policy if policy is None else policy)

    # -- life -----------------------------------------------------------------------------------

    def _serve(self, policy: AnyPolicy, begun: ExitStack | None = None) -> Engine:
        """A server of the panel's own, with what it needs around it, which ends with it."""
        with ExitStack() as around:
            self._needed = around.enter_context(self.case.needs(self.values))
            made = self.case.serve(policy, self._settings(), self._needed)
            around.callback(_close_quietly, made)
            made.start()
            self._around, self._lost_told = around.pop_all(), False
        if begun is not None:
            begun.callback(self._around.close)
        return made

    def _settings(self) -> dict[str, Value]:
        return self.case.settings(self.values, self._arm)

    def _begin(self) -> None:
        """Its threads; where one does not start, none stays."""
        self.judge = LiveJudge(self.case.rules, self.case.words.one)
        self.party = self._new_party()
        self._strip_at = self._cost_at = 0.0
        with ExitStack() as begun:
            self.desk = Lane("ringlab-desk", self._failed)
            begun.callback(self.desk.close)
            self.hands = Lane("ringlab-clients", self._failed)
            begun.callback(self.hands.close)
            self.feed = Feed(self.server, self.view, self.watch, self.case.shape, self._rate,
                             tick=self._tick, failed=self._ended)
            begun.callback(self.feed.close)
            self.board.tell(
                values=dict(self.values), policy=self._policy_facts(), auto=self._auto,
                refused={}, paused=False, busy="", message=None, table="", span="", running=True,
                watch="Choose an arm above, or set the controls and press stall.",
                arm=self._arm, life="open", status="", command="",
            )
            self.state = "open"
            begun.pop_all()

    def _new_party(self) -> Party:
        return Party(self.server, self.case.connected,
                     lambda text: self.board.say(text, error=True))

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
        self._around.close()

    def _resume(self) -> None:
        with self._life:
            if self.state != "resting":
                return
            try:
                with ExitStack() as begun:
                    if self._own:
                        self.server = self._serve(self._named(), begun)
                    else:
                        self.server.start()
                    self._begin()
                    begun.pop_all()
            except RinglabError as error:
                self.board.say(brief(error), error=True)
                return
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
        """Presses a button: one of ``actions()``; the panel's client thread does it.

        ``size`` is the bytes of "read"; ``arm``, and if it is to change ``policy``, are those of
        "preset". UsageError for what is not allowed: then nothing is done.
        """
        if action not in self.actions():
            raise unknown("action", str(action), self.actions())
        work, given = ACTIONS[action], self._options(action, options)
        if action == "preset":
            given["asked"] = next(self._wishes)
        self.hands.put(lambda: self._doing(action, lambda: work(self, **given)))

    def _options(self, action: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """What came with an action, checked."""
        takes = _OPTIONS.get(action, ())
        for name in given:
            if name not in takes:
                words = ", ".join(takes) or "none"
                raise UsageError(f"{action} has no option {quoted(name)}; it takes: {words}")
        checked = dict(given)
        if action == "read":
            checked["size"] = READ.check(given.get("size", READ.default))
        if action == "preset":
            arm = given.get("arm")
            if not isinstance(arm, str) or arm not in self.case.presets:
                raise unknown("arm", str(arm), self.case.presets)
            if given.get("policy"):
                self.case.decisions.resolve(given["policy"])
        return checked

    def actions(self) -> list[str]:
        """What :meth:`do` takes: the case's buttons, a preset, and "measure"."""
        return [*(button.action for button in self.case.buttons), "preset", "measure"]

    def plan(self) -> measured.Plan:
        """The run that the present settings mean."""
        with self._changing:
            return measured.plan(self.case, dict(self.values), self.server.policy,
                                 self.party.poked, self._arm, self.seconds)

    # -- messages from the page: tiny, any thread ------------------------------------------------

    def _received(self, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "hello":
            self._hello(message)
        elif kind in ("seen", "here", "hidden", "bye"):
            if self.watch.report(str(kind), str(message.get("view")),
                                 int(message.get("count", 0)), bool(message.get("sight"))):
                self.desk.put(lambda: self._introduce(False, message))
        elif self.state != "open":
            return
        elif kind == "set":
            self.desk.put(lambda: self._set_from_page(message),
                          key=f"set {message.get('name')} {message.get('view')}")
        elif kind == "do" and message.get("action") in self.actions():
            # Behind what was set before it.
            self.desk.put(lambda: self._do_from_page(str(message["action"]), message))
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
            self.desk.put(lambda: self._introduce(setup, message))

    def _introduce(self, setup: bool, asked_by: Mapping[str, Any] | None = None) -> None:
        if setup:
            self._post_setup()
        if asked_by is not None:
            self.board.tell(heard=heard(asked_by))
        self.board.tell_all()
        self.feed.send_history()

    def _post_setup(self) -> None:
        from lab.live import figures  # Bokeh: not before somebody looks

        case = self.case
        presets = [{"arm": arm.name, "what": arm.what} for arm in self.experiment.arms
                   if arm.name in case.presets]
        self.view.post({
            "kind": "setup", **figures.for_page(case), "presets": presets,
            "controls": [control.spec(self.values[name])
                         for name, control in self.controls.items()],
            "buttons": [vars(button) for button in case.buttons],
            "quick": [{"name": name, "what": case.decisions.presets[name].what}
                      for name in case.quick],
            "words": {"settings": case.words.settings, "rows": case.words.rows,
                      "head": case.words.head},
            "size": READ.default, "wide": len(case.strip) > _WIDE,
            "case": self.experiment.title,
        })

    # -- controls -------------------------------------------------------------------------------

    def _control(self, name: str) -> controlling.Control:
        if name not in self.controls:
            raise unknown("control", name,
                          [*self.controls, POLICY, *self.case.decision_names()])
        return self.controls[name]

    def _set_from_page(self, message: Mapping[str, Any]) -> None:
        name = str(message.get("name"))
        refused = dict(self.board["refused"] or {})
        refused.pop(name, None)
        try:
            self._set(name, message.get("value"))
        except RinglabError as error:
            refused[name] = brief(error)
        self.board.tell(refused=refused, values=dict(self.values), policy=self._policy_facts(),
                        heard=heard(message))

    def _do_from_page(self, action: str, message: Mapping[str, Any]) -> None:
        refused = {name: text for name, text in (self.board["refused"] or {}).items()
                   if name not in _OPTIONS.get(action, ())}
        try:
            self.do(action, **{name: message[name] for name in _OPTIONS.get(action, ())
                               if name in message})
        except RinglabError as error:
            self.board.say(brief(error), error=True)
            refused |= {"size": brief(error)} if action == "read" else {}
        self.board.tell(refused=refused)

    def _set(self, name: str, value: Any) -> None:
        with self._changing:
            if name == POLICY or name in self.case.decision_names():
                self._set_policy(name, value)
            else:
                self._set_value(self._control(name), value)
            self._wished[name] = next(self._wishes)

    def _set_value(self, control: controlling.Control, value: Any) -> None:
        name, checked = control.parameter.name, control.parameter.check(value)
        if checked == self.values[name]:
            return
        self._give({**self.values, name: checked}, self._arm)
        self.values[name] = checked
        shown = f"{checked:,}" if isinstance(checked, (int, float)) else str(checked)
        self._changed(f"{control.label} {shown}", f"set {name}")
        if name in self.case.unchosen_by:
            self._arm = self.case.arm
        self.board.tell(values=dict(self.values), command=self._command())
        if control.effect in (REQUEST, CONNECTION) and self._auto and self.party.size:
            self.hands.put(lambda: self._doing("reconnect", self._restall), key="stall")

    def _give(self, values: Mapping[str, Value], arm: str, all_of: bool = False) -> None:
        """Sets what other values, or another arm, change of the server's settings."""
        wanted, before = self.case.settings(values, arm), self._settings()
        changed = {name: value for name, value in wanted.items()
                   if value != (self.server.settings[name] if all_of else before[name])}
        if changed:
            self.server.set(None, **changed)

    def _set_policy(self, name: str, value: Any) -> None:
        if name == POLICY:
            self.server.set(policy=value)
            text = f"policy {self.server.policy.name}"
        else:
            self.server.set(**{name: value})
            text = f"{name} {value}"
        self._changed(text, f"set {name}")
        self.board.tell(policy=self._policy_facts(), command=self._command())

    def _policy_facts(self) -> dict[str, Any]:
        policy = self.server.policy
        return {"name": policy.name,
                "specs": controlling.policy_specs(policy.choices, policy.name,
                                                  self.case.decisions, self.case.questions)}

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
        return self._play(self.case.arm_of(self.values, False, self._arm))

    def _play(self, arm: str) -> str:
        self._need_all()
        with self._changing:
            count = int(self.values["clients"])
            scene = self.case.scene(arm, dict(self.values), self.server)
        self.judge.changed(time.monotonic_ns())
        troubles = self.party.play(scene, count)
        self.judge.changed(time.monotonic_ns())
        self._need_all()
        if troubles:
            why = self.case.lacks(self.server) or self.case.words.no_stall
            return f"{'; '.join(troubles)}. {why}"
        one, several = scene.does
        text = f"a client {one}" if count == 1 else f"{count} clients {several}"
        # Others may be connected to somebody else's engine.
        left = self._left_over(count) if self._own else 0
        if left <= 0:
            return text
        what = self.case.words.rows + ("s" if left > 1 else "")
        return f"{text}; {left} {what} of earlier clients never ended (start again ends them)"

    def _left_over(self, count: int) -> int:
        """Connections beyond the panel's own, once those that are ending have had time to."""
        until = time.monotonic() + _ENDING_S
        while (left := self.case.look(self.server).count - count) > 0:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return left

    def _preset(self, arm: str, asked: int, policy: str = "") -> str:
        with self._changing:
            self._choose(arm, asked, policy)
        return self._play(arm)

    def _choose(self, arm: str, asked: int, policy: str) -> None:
        """What the arm sets, but for what was wished for after it (the clients were busy)."""
        preset = self.case.presets[arm]
        later = {name for name, at in self._wished.items() if at > asked}
        if policy and not later & {POLICY, *self.case.decision_names()}:
            self.server.set(policy=policy)
            self.board.tell(policy=self._policy_facts())
        values = self.values | {name: value for name, value in preset.sets.items()
                                if name not in later}
        # What the panel shows is what the arm is played with, whatever was set on the server.
        self._give(values, arm, all_of=True)
        self.values = values
        self._arm = self.case.arm if later & set(self.case.unchosen_by) else arm
        self.feed.mark(f"arm {arm}" + (f" under {policy}" if policy else ""))
        self.board.tell(values=dict(values), watch=preset.watch, arm=arm, refused={})

    def _release(self) -> str:
        self._need_all()
        return self.party.release(self.case.release(self.server))

    def _act(self, name: str, work: Callable[[], str]) -> str:
        self._changed(name)
        text = work()
        self.judge.changed(time.monotonic_ns())
        lost = self._lost()
        return f"{text}; {lost}" if lost else text

    def _stop(self) -> str:
        self._changed("stop asked")
        begun = time.monotonic()
        self.server.request_stop()
        if self.server.wait_stopped(STOP_S):
            return f"stop honoured after {(time.monotonic() - begun) * 1e3:,.0f} ms"
        return f"stop not honoured within {STOP_S:g} s: {self.case.words.deaf}"

    def _again(self) -> str:
        self.party.close()
        policy = self._named()
        # Nobody looks at a server that is being replaced, or sets anything of it.
        with self._changing, self.feed.dark():
            if self._own:
                self._around.close()
                self.server = self._serve(policy)
            else:
                _close_quietly(self.server)
                self.server.start()
            self.party = self._new_party()
            self.feed.restart(self.server)
        self._changed("started again")
        self.board.tell(policy=self._policy_facts(), running=True)
        return f"a fresh {self.case.words.one} runs under {self.server.policy.name}"

    def _measure(self) -> str:
        wanted = self.plan()
        stalled = self.party.size > 0
        self._measuring = True
        try:
            with self.feed.dark():
                # Two spinning workers would share the cores: the panel's own comes to rest first.
                self.party.close()
                self.board.tell(status="dark: measuring", arm=wanted.arm)
                run = measured.measure(wanted, self._store, lambda what:
                                       self.board.tell(busy=f"measuring: {what}"))
        finally:
            self._measuring = False
        self.runs.append(run)
        self._notes.append(wanted.notes)
        self.board.tell(table=measured.runs_table(
            self.runs, self._notes, self.case.measured).to_html())
        self.feed.mark("measured")
        if stalled and self.state == "open" and not self._lost():
            self._play(wanted.arm)
        row = run.arms[0]
        return f"measured {row['arm']} under {row['policy']}: {row['state']}; {row['reason']}"

    def _span(self, begun: Any, ended: Any) -> None:
        if not isinstance(begun, (int, float)) or not isinstance(ended, (int, float)):
            self.board.tell(span="")
            return
        zero = self.feed.zero_ns
        found = span_figures(self.feed.samples.since(zero + int(begun * 1e9),
                                                     zero + int(ended * 1e9)))
        told = "the selected span holds fewer than two samples" if found is None else \
            f"{begun:.1f} to {ended:.1f} s {self.case.span_text(found)}"
        self.board.tell(span=told)

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
        lost = self._lost()
        if lost and not self._lost_told:
            self._lost_told = True
            self.board.tell(running=False)
            self.board.say(lost, error=True)
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
        rules = self.case.rules
        cap = float(self.values[rules.cap]) if rules.cap else 0.0
        begun = time.monotonic_ns() - int(self.judge.look_s(cap) * 1e9)
        flat = self.feed.samples.ends(max(begun, self.judge.changed_ns + 1))
        if len(flat) < 2:
            flat = self.feed.samples.ends(begun)
        if len(flat) and flat["ended"][-1]:
            return self._stopped()
        look = self.case.look(self.server)
        reads = self.party.reads
        now = self.judge.judge(flat, self.server.policy.choices, cap, look.stalled or reads,
                               moves=reads)
        return strip(now, look, self.case.strip)

    def _stopped(self) -> dict[str, Any]:
        reason = f"the {self.case.words.one} has left its loop; press start again"
        return strip(Now("stopped", reason, "", "", ""), _NOBODY, self.case.strip)

    def _lost(self) -> str:
        """What the engine needs and has lost, with what to do; empty: nothing."""
        what = self.case.lost(self._needed) if self._needed is not None else ""
        return what and f"{what}: press start again, which brings another"

    def _need_all(self) -> None:
        """MachineError where nothing can come about, because what it takes is gone."""
        if lost := self._lost():
            raise MachineError(lost)

    def _status(self) -> str:
        if self._needed is not None and (lost := self.case.lost(self._needed)):
            return lost
        if self.feed.paused:
            return "paused"
        if self.feed.is_dark:
            return "dark"
        return "live"

    def _running(self) -> bool:
        try:
            return self.server.running() > 0 and not self._lost()
        except RinglabError:
            return False

    def _ended(self, error: RinglabError) -> None:
        self.board.tell(running=False, strip=self._stopped(),
                        status=f"{self.case.words.one} stopped")
        self.board.say(brief(error), error=True)

    def _failed(self, error: BaseException) -> None:
        try:
            # What ended the server, or what it needs, is the reason of whatever failed after it.
            self.server.check()
            self._need_all()
        except RinglabError as reason:
            error = reason
        if self.state == "open":
            self.board.say(brief(error), error=True)

    def _named(self) -> AnyPolicy:
        """The policy, or the first one where it was written in Python (and may fail)."""
        choices = self.server.policy.choices
        return self.case.policy if OWN in choices.values() else dict(choices)


ACTIONS: dict[str, Callable[..., str | None]] = {
    "stall": lambda panel: panel._stall(),
    "reconnect": lambda panel: panel._stall(),
    "preset": lambda panel, **given: panel._preset(**given),
    "read": lambda panel, size: panel._act(
        f"read {size:,} bytes", lambda: panel.party.read(size)),
    "read all": lambda panel: panel._act("read all", panel.party.read_all),
    "release": lambda panel: panel._act("release", panel._release),
    "poke": lambda panel: panel._act("poke", panel.party.poke),
    "half-close": lambda panel: panel._act("half-close", panel.party.half_close),
    "reset": lambda panel: panel._act("reset", panel.party.reset),
    "stop": lambda panel: panel._stop(),
    "start again": lambda panel: panel._again(),
    "measure": lambda panel: panel._measure(),
}
"""What the buttons do, by name; each runs on the panel's client thread."""
_OPTIONS = {"read": ("size",), "preset": ("arm", "policy")}
READ = Parameter("size", int, 65536, "bytes", 1, 2**30)


def _close_quietly(server: Engine) -> None:
    """Ends it; what had ended it before was told when it happened."""
    with suppress(RinglabError):
        server.close()


def _started(server: Engine, begun: ExitStack) -> Engine:
    """The caller's, running; one that did not run before is ended with ``begun``."""
    try:
        server.running()
    except RinglabError:
        begun.callback(_close_quietly, server)
    return server.start()


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

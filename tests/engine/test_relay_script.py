"""The relay's state machine, scenario by scenario, on the scripted backend.

Each scenario is brought to the state that the case is about and then left alone: it spins, or it
sleeps until the outside moves. The fixed relay must be seen to have reached the state as well.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import RelayPolicy, RelayScript, SessionView
from engine.errors import EngineError, PolicyError, UsageError
from engine.relay_policy import PRESETS, RELAY, resolve
from engine.relay_views import ChannelView
from lab import content

PIPE = 1 << 20
"""Wide enough that no scenario but the stalled one fills it."""
LINK = 14_480
"""What arrives at a time: ten segments."""
ENGINES = ["speculative", "level-triggered"]


def get(number: int) -> bytes:
    return f"GET /{number} HTTP/1.1\r\nHost: o\r\n\r\n".encode()


def response(number: int, size: int) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + content.body(number, size)


class Scene:
    """One client, and what it does to a relay; the channel that matters."""

    def __init__(self, policy: object, pipe: int = PIPE, **choices: str) -> None:
        self.script = RelayScript(policy, pipe_size=pipe, **choices)  # type: ignore[arg-type]
        self.client = self.script.accept()
        self.sent = b""
        self.upstream = False

    def turns(self, count: int = 12) -> None:
        for _ in range(count):
            self.script.turn()

    def ask(self, data: bytes, room: int) -> None:
        self.script.input(self.client, data)
        self.script.room(self.client, room)
        self.turns()

    def arrive(self, socket: int, data: bytes, sink: int, step: int) -> None:
        """Data comes piece by piece, and the sink takes a little each time."""
        for at in range(0, len(data), LINK):
            self.script.input(socket, data[at : at + LINK])
            self.turns(3)
            self.script.room(sink, step)
            self.turns(3)
        for _ in range(6):  # the sink still moves, as a kernel's buffers do, and then no more
            self.script.room(sink, step)
            self.turns(3)

    @property
    def view(self) -> ChannelView:
        session = self.script.session(0)
        return session.request if self.upstream else session.response

    def counts(self, turns: int = 0) -> dict[str, int]:
        """Every counter, or what it grows by in so many turns."""
        before = self.script.counters()
        self.turns(turns)
        after = self.script.counters()
        return {
            name: int(value) - (int(before[name]) if turns else 0)
            for name, value in after.items()
            if isinstance(value, int)
        }

    def spins(self) -> bool:
        """Whether it never sleeps while nothing happens outside."""
        return all(self.script.turn() != "asleep" for _ in range(60))


def pipelined(policy: object, silent: bool = False, **choices: str) -> Scene:
    """a, a2: the head of response 2 (or nothing) behind the tail of response 1."""
    scene = Scene(policy, **choices)
    scene.ask(get(0) + get(1), room=20_000)
    scene.sent = response(0, 100_000)
    scene.arrive(1, scene.sent, scene.client, 600)
    if not silent:
        scene.sent += response(1, 100_000)
        answer_second(scene)
    return scene


def answer_second(scene: Scene) -> None:
    """Once the second request has come; with no pipe that takes until the client reads."""
    if scene.script.sockets == 3 and not scene.script.socket(2).unread:
        scene.script.input(2, response(1, 100_000))
    scene.turns()


def late_block(policy: object, **choices: str) -> Scene:
    """b: the last 3,000 bytes and FIN come once the client has stopped."""
    scene = Scene(policy, **choices)
    scene.ask(get(0), room=0)
    scene.sent = response(0, 1_000_000)
    scene.script.room(scene.client, 905_000)
    scene.arrive(1, scene.sent[:-3000], scene.client, 600)
    scene.script.input(1, scene.sent[-3000:])
    scene.script.fin(1)
    scene.turns()
    return scene


def chunks(policy: object, **choices: str) -> Scene:
    """d: a chunk ends while the pipe holds data."""
    scene = Scene(policy, **choices)
    scene.ask(get(0), room=20_000)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = content.body(0, 130_000)
    parts = [b"%x\r\n%b\r\n" % (65_000, body[at : at + 65_000]) for at in (0, 65_000)]
    scene.sent = head + b"".join(parts) + b"0\r\n\r\n"
    scene.arrive(1, scene.sent, scene.client, 600)
    return scene


def post(policy: object, **choices: str) -> Scene:
    """e: a request's body in the pipe, before an origin that does not read."""
    scene = Scene(policy, **choices)
    scene.upstream = True
    head = b"POST / HTTP/1.1\r\nHost: o\r\nContent-Length: 250000\r\n"
    scene.ask(head + b"\r\n", room=1 << 40)
    scene.script.room(1, 20_000)
    body = content.body(0, 250_000)
    scene.sent = head + b"Connection: close\r\n\r\n" + body
    scene.arrive(scene.client, body, 1, 600)
    return scene


def mid_object(policy: object, **choices: str) -> Scene:
    """m: stalled in the middle of a large object."""
    scene = Scene(policy, pipe=65_536, **choices)
    scene.ask(get(0), room=20_000)
    scene.sent = response(0, 1_000_000)
    scene.script.input(1, scene.sent)
    scene.turns()
    return scene


SCENES: dict[str, Callable[..., Scene]] = {
    "a": pipelined,
    "a2": lambda policy, **choices: pipelined(policy, silent=True, **choices),
    "b": late_block,
    "d": chunks,
    "e": post,
    "m": mid_object,
}
# What the real builds did (data/reference/splice_builds.csv): every trial, none, or some of them.
ALWAYS = {
    "before": "a a2 b d e", "after": "", "recv-allowed": "", "sink-full": "a a2 b d e",
    "last-block": "a a2 d e", "skip-send": "a a2 b d e", "later": "", "no-splice": "",
}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("preset", ALWAYS)
def test_the_pattern_of_the_real_builds(preset: str, name: str) -> None:
    assert SCENES[name](preset).spins() == (name in ALWAYS[preset].split())


@pytest.mark.parametrize("name", ["a", "a2", "b", "d", "e"])
def test_the_sign_of_the_spin_is_a_handler_that_does_nothing(name: str) -> None:
    scene = SCENES[name]("before")
    grown = scene.counts(turns=50)
    assert grown["noop_dispatches"] == grown["dispatches"] == grown["iterations"] == 50
    assert grown["waits_zero"] == grown["waits_empty"] == grown["wasted"] == 50
    assert grown["why_active"] == 50
    side = "client" if name == "e" else "origin"
    for call in ("recv", "splice_in"):
        assert grown[f"{call}_{side}"] == grown[f"{call}_eagain_{side}"] == 0
    # Only where bytes came since the HTTP layer last looked is the pipe offered to the sink.
    assert grown["splice_out_eagain_client"] == (50 if name == "b" else 0)


@pytest.mark.parametrize("name", ["a", "b", "d", "e"])
def test_the_level_triggered_engine_spins_on_an_event_a_turn(name: str) -> None:
    scene = SCENES[name]("before", engine="level-triggered")
    grown = scene.counts(turns=50)
    assert grown["noop_dispatches"] == grown["events"] == grown["wasted"] == 50
    assert grown["waits_zero"] == grown["waits_empty"] == 0


def test_the_level_triggered_engine_is_quiet_while_nothing_has_arrived() -> None:
    scene = pipelined("before", silent=True, engine="level-triggered")
    assert not scene.spins()
    scene.script.input(2, b"H")
    assert scene.spins()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("preset", ["after", "later", "recv-allowed"])
def test_the_fixed_relay_reaches_the_state_and_sleeps_in_it(preset: str, engine: str) -> None:
    scene = pipelined(preset, silent=True, engine=engine)
    scene.script.input(2, b"HTTP/1.1 200 OK\r\nContent-Len")
    assert not scene.spins()
    view = scene.view
    assert view.piped > 0
    assert (view.message, view.to_forward, view.read) == ("head", 0, "polled")
    assert view.awaiting == 28, "the head of response 2 is in the buffer, behind the pipe"
    wait = scene.script.wait_decided
    assert wait is not None
    assert (wait.can_block, wait.timeout_ns) == (True, -1)


@pytest.mark.parametrize("preset", [*PRESETS])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCENES)
def test_every_byte_arrives_once_the_sink_moves_again(name: str, engine: str, preset: str) -> None:
    scene = SCENES[name](preset, engine=engine)
    sink = 1 if name == "e" else scene.client
    scene.script.room(sink, 1 << 40)
    scene.turns(150)
    if name == "a" and preset == "no-splice":
        answer_second(scene)
        scene.turns(150)
    got = scene.script.output(sink)
    if name == "e":
        got = b"POST" + got.split(b"POST", 1)[1]
        assert got == scene.sent
    elif preset == "mirror" and name == "m":
        assert scene.sent.startswith(got)
        assert len(got) < len(scene.sent), "the mirror fault forgets what is left"
        assert not scene.spins()
    else:
        assert got == scene.sent


def test_the_mirror_fault_waits_for_an_edge_that_never_comes() -> None:
    scene = mid_object("mirror")
    assert not scene.spins()
    assert (scene.view.read, scene.view.sink_full) == ("polled", False)
    scene.script.room(scene.client, 1 << 40)
    scene.turns(100)
    got = len(scene.script.output(scene.client))
    assert scene.script.socket(1).unread == len(scene.sent) - got > 0
    assert scene.view.piped == 0
    scene.script.fin(1)  # something arrives: it goes on, to the next full pipe
    scene.turns(100)
    assert len(scene.script.output(scene.client)) > got


def test_a_full_pipe_is_why_it_is_random() -> None:
    """A splice loop that ends in EAGAIN with data in the pipe is taken for a full pipe."""
    scene = Scene("before")
    scene.ask(get(0), room=1 << 40)
    data = response(0, 8000)
    scene.script.input(1, data[:-8000])
    scene.turns()
    scene.script.room(scene.client, 0)
    scene.script.input(1, data[-8000:-4000])  # one small read, then EAGAIN
    scene.turns()
    assert scene.view.sink_full
    assert scene.view.to_forward < 4096
    assert not scene.spins()
    scene.script.room(scene.client, 500)  # the sink moves: reading is wanted, and nothing reads
    assert scene.spins()


@pytest.mark.parametrize("name", SCENES)
def test_one_handler_at_a_time(name: str) -> None:
    """The stepper's way through a turn is the same as a turn."""
    whole, stepped = SCENES[name]("before"), SCENES[name]("before")
    for _ in range(3):
        whole.script.turn()
        stepped.script.phase("decide")
        stepped.script.phase("wait")
        while run := stepped.script.handler():
            assert run.noop == (run.calls == 0 and run.before == run.after)
        stepped.script.phase("http")
        stepped.script.phase("timers")
    assert whole.script.counters() == stepped.script.counters()
    assert whole.view == stepped.view


# -- policies --------------------------------------------------------------------------------------


def test_the_table_has_every_decision_with_its_shipped_choice_first() -> None:
    assert list(RELAY.table()) == [
        "recv-behind", "early-leave", "last-block", "send-after-read", "engine", "splice",
        "readiness",
    ]  # fmt: skip
    for choices in RELAY.table().values():
        assert [choice.shipped for choice in choices.values()] == [True, False]
        assert all(choice.what for choice in choices.values())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_resolve_to_themselves(name: str) -> None:
    resolved = resolve(name)
    assert resolved.name == name
    assert resolve(resolved.choices).name == name
    assert "\n" not in PRESETS[name].what


def test_switched_while_it_runs() -> None:
    scene = pipelined("before", silent=True)
    assert scene.spins()
    scene.script.set("after")
    assert not scene.spins()
    scene.script.set("before")
    scene.script.room(scene.client, 100)  # its source is polled until something happens
    scene.script.set(engine="level-triggered")
    assert not scene.spins()


class Cure(RelayPolicy):
    """The fix, in Python; notes what it was asked."""

    base = "before"

    def __init__(self) -> None:
        self.seen: list[SessionView] = []

    def recv_behind(self, session: SessionView) -> bool:
        self.seen.append(session)
        return session.channel.to_forward < 4096


def test_a_policy_of_ones_own() -> None:
    policy = Cure()
    scene = pipelined(policy, silent=True)
    assert not scene.spins()
    assert scene.script.policy.asks == ["recv-behind"]
    last = policy.seen[-1]
    assert last.asked == "origin"
    assert last.channel is last.response
    assert last.channel.piped > 0


@pytest.mark.parametrize(
    ("method", "value", "allowed"),
    [
        ("recv_behind", "maybe", "True, False, 'forbidden', 'allowed'"),
        ("splice", 1, "True, False, 'on', 'off'"),
        ("engine", True, "'speculative', 'level-triggered'"),
        ("readiness", None, "'kept', 'cleared'"),
    ],
)
def test_a_wrong_answer_is_named(method: str, value: object, allowed: str) -> None:
    wrong = type("Wrong", (RelayPolicy,), {method: lambda self, view: value})
    with pytest.raises(PolicyError) as caught:
        late_block(wrong)
    assert f"policy Wrong.{method}() returned {value!r}; allowed: {allowed}" in str(caught.value)


@pytest.mark.parametrize("answer", [True, "on"])
def test_yes_to_splice_is_on(answer: bool | str) -> None:
    own = type("Own", (RelayPolicy,), {"splice": lambda self, session: answer})
    assert mid_object(own).counts()["bytes_spliced_origin"] > 0
    off = type("Off", (RelayPolicy,), {"splice": lambda self, session: "off"})
    assert mid_object(off).counts()["bytes_spliced_origin"] == 0


def test_refused() -> None:
    for given, said in [
        ({"policy": "afta"}, "unknown policy 'afta'; choose from: after"),
        ({"recv_behind": "yes"}, "unknown choice of recv-behind 'yes'"),
        ({"max_head": 20_000}, "max_head=20000 is not allowed: a whole number from 64 to 15360"),
        ({"pipe_size": 0}, "pipe_size=0 is not allowed"),
        ({"clients": 3}, "unknown parameter 'clients'"),
    ]:
        with pytest.raises(UsageError) as caught:
            RelayScript(**given)  # type: ignore[arg-type]
        assert said in str(caught.value)


# -- what whoever steps through it chooses ---------------------------------------------------------


def asked(policy: str = "before", room: int = 1 << 40) -> Scene:
    """A client whose request has reached its origin, which is socket 1."""
    scene = Scene(policy)
    scene.ask(get(0), room)
    return scene


@pytest.mark.parametrize(("outcome", "short", "read"), [
    ("full", 1, 8000), ("short", 500, 7500), ("short", 9000, 1), ("eagain", 1, 0),
])  # fmt: skip
def test_what_the_next_call_reads_is_chosen_and_the_one_after_is_itself(
    outcome: str, short: int, read: int
) -> None:
    scene = asked()
    scene.script.grain(1, 100 if outcome == "full" else 0)
    scene.script.input(1, response(0, 20_000)[:8000])
    scene.script.next_call(1, "read", outcome, short)
    assert scene.script.socket(1).next_read == outcome
    scene.script.turn()
    assert scene.script.socket(1).unread == 8000 - read
    assert scene.script.socket(1).next_read == ""
    scene.script.grain(1, 0)
    scene.turns()
    assert scene.script.socket(1).unread == 0


@pytest.mark.parametrize(("outcome", "calls", "room"), [
    ("full", 1, 0), ("short", 2, 1 << 40), ("eagain", 1, 1 << 40),
])  # fmt: skip
def test_what_the_next_call_sends_is_chosen(outcome: str, calls: int, room: int) -> None:
    scene = asked(room=room)
    whole = response(0, 5000)
    scene.script.input(1, whole)
    scene.script.next_call(scene.client, "write", outcome, 1000)
    assert scene.script.socket(scene.client).next_write == outcome
    while not scene.script.counters()["send_client"]:
        scene.script.turn()
    sent = scene.script.output(scene.client)
    assert sent == (b"" if outcome == "eagain" else whole)
    assert scene.script.counters()["send_client"] == calls


def test_which_event_is_reported_next_is_chosen_and_the_others_stay_ready() -> None:
    script = RelayScript("before", engine="level-triggered")
    clients = [script.accept(), script.accept()]
    script.turn()
    for client in clients:
        script.input(client, get(client))
    script.phase("decide")
    script.report(clients[1])
    assert [script.socket(client).ready_read for client in clients] == [True, True]
    assert script.phase("wait") == "ready"
    due = script.due()
    assert due is not None
    assert (due.slot, due.side, due.direction) == (1, "client", "read")
    run = script.handler()
    assert run is not None
    assert (run.slot, run.side, run.direction) == (due.slot, due.side, due.direction)
    assert script.due() is None
    for phase in ("http", "timers", "decide"):
        script.phase(phase)
    assert script.phase("wait") == "ready"
    due = script.due()
    assert due is not None
    assert due.slot == 0


def test_an_event_that_is_not_there_cannot_be_chosen() -> None:
    script = RelayScript("before")
    client = script.accept()
    for _ in range(3):
        script.turn()
    script.phase("decide")
    with pytest.raises(EngineError):
        script.report(client)
    waiting = script.accept()
    script.report(waiting)  # it stands for the listener
    script.input(client, get(0))
    assert script.phase("wait") == "ready"
    due = script.due()
    assert due is not None
    assert due.slot == -1


@pytest.mark.parametrize("name", SCENES)
def test_the_handler_that_is_due_is_the_one_that_runs(name: str) -> None:
    scene = SCENES[name]("after")
    scene.script.room(1 if name == "e" else scene.client, 1 << 40)
    for _ in range(20):
        scene.script.phase("decide")
        scene.script.phase("wait")
        while due := scene.script.due():
            run = scene.script.handler()
            assert run is not None
            assert (run.slot, run.side, run.direction, run.before) == (
                due.slot, due.side, due.direction, due.before)
        assert scene.script.handler() is None
        scene.script.phase("http")
        scene.script.phase("timers")


def test_a_fresh_script_begins_as_the_old_one_was_made() -> None:
    script = RelayScript("before", pipe_size=5000, room=7, client_timeout_ms=9)
    script.accept()
    script.set("after", client_timeout_ms=11)
    fresh = script.fresh()
    assert (fresh.sockets, fresh.pipe_size, fresh.policy.name) == (0, 5000, "after")
    assert fresh.settings == script.settings
    assert fresh.socket(fresh.accept()).room == 7
    assert script.fresh("mirror").policy.name == "mirror"


@pytest.mark.parametrize("do", [
    lambda s: s.room(0, 2**70), lambda s: s.room(-1, 5), lambda s: s.room(0, "many"),
    lambda s: s.grain(0, 1.5), lambda s: s.again(0, 2**40), lambda s: s.advance(-1),
    lambda s: s.socket(2**40), lambda s: s.session(-1), lambda s: s.output("x"),
    lambda s: s.input(0, "text"), lambda s: s.connected(0, 10**9), lambda s: s.refuse(pipe=-1),
    lambda s: s.next_call(0, "read", "short", 0), lambda s: s.next_call(0, "up", "full"),
    lambda s: s.next_call(0, "read", "half"), lambda s: s.report(None),
])  # fmt: skip
def test_a_number_out_of_its_range_is_refused_in_one_line(do: Callable[..., object]) -> None:
    script = RelayScript("before")
    script.accept()
    with pytest.raises(UsageError, match=r"not allowed|choose from") as caught:
        do(script)
    assert "\n" not in str(caught.value)

"""The relay by hand: the arms of the splice case, what is chosen, the automaton, wrong moves."""

from __future__ import annotations

from typing import Any

import pytest

from engine import RelayPolicy, RelayScript, Script, SessionView
from engine.errors import RinglabError, UsageError
from engine.relay_policy import PRESETS
from lab import mode
from lab.live.stepper import Stepper
from lab.live.stepper_page import static_html
from lab.live.stepper_relay import FIXTURES, OUTCOMES, PHASE_WORDS, RelaySeen
from tests.lab.pages import opened

pytestmark = pytest.mark.computes

# What each arm comes to, by policy: as the real builds did, and the mirror is as quiet as the fix.
SPINS = {
    "before": "a a2 b d e", "after": "", "recv-allowed": "", "sink-full": "a a2 b d e",
    "last-block": "a a2 d e", "skip-send": "a a2 b d e", "later": "", "no-splice": "",
    "mirror": "",
}  # fmt: skip


@pytest.fixture
def stepper() -> Stepper:
    return Stepper("splice")


def rest(stepper: Stepper, most: int = 40) -> RelaySeen:
    """Turns until it sleeps."""
    for _ in range(most):
        if stepper.iterate().ended == "asleep":
            break
    return stepper.now  # type: ignore[no-any-return]


def client(now: RelaySeen) -> Any:
    return next(each for each in now.sockets if each.view.side == "client")


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("policy", PRESETS)
def test_each_arm_spins_or_sleeps_as_the_real_builds_did(policy: str, name: str) -> None:
    now = Stepper("splice", policy).fixture(name)
    spins = name in SPINS[policy].split()
    assert (now.condition == "SPIN") is spins
    assert now.wait.can_block is not spins  # type: ignore[attr-defined]
    assert (now.ended == "asleep") is not spins


def test_before_the_handler_runs_again_and_again_without_progress(stepper: Stepper) -> None:
    stepper.fixture("a")
    channel = stepper.now.sessions[0].response
    for _ in range(20):
        assert (stepper.now.wait.timeout_ns, stepper.now.wait.why) == (0, "active")
        assert stepper.wait().next == "read handler"
        assert stepper.now.events == 0
        seen = stepper.read_handler()
        assert stepper.now.noop
        assert (stepper.now.ran.calls, stepper.now.ran.side) == (0, "origin")
        assert (stepper.now.ran.before, stepper.now.ran.after) == ("active", "active")
        assert seen.next == "http"
        stepper.iterate()
        assert stepper.now.condition == "SPIN"
    assert stepper.now.sessions[0].response == channel
    assert (channel.piped, channel.to_forward, channel.message) == (40_042, 0, "head")
    assert stepper.now.noops >= 20
    assert stepper.now.wasted >= 20


def test_after_the_same_steps_end_in_a_sleeping_wait() -> None:
    stepper = Stepper("splice", "after")
    stepper.fixture("a")
    now = stepper.now
    assert now.condition == "FIXED"
    assert (now.wait.timeout_ns, now.wait.why, now.ended) == (-1, "event", "asleep")
    channel = now.sessions[0].response
    assert channel.piped > 0, "it came to the state"
    assert channel.read == "polled"
    assert channel.scheduled == 42, "the head of response 2 is in the buffer, behind the pipe"


@pytest.mark.parametrize("policy", ["after", "recv-allowed", "later"])
def test_a_policy_switched_in_the_middle_ends_the_spin(stepper: Stepper, policy: str) -> None:
    stepper.fixture("a")
    assert stepper.set(policy=policy).condition == "SPIN"
    assert rest(stepper).condition == "FIXED"
    assert stepper.policy == policy
    stepper.back(len(stepper.seen))
    assert stepper.policy == "before"


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("name", ["a", "d", "m"])
def test_quiet_is_one_half_and_complete_is_the_other(policy: str, name: str) -> None:
    stepper = Stepper("splice", policy)
    stepper.fixture(name)
    stepper.takes(1 << 20)
    rest(stepper)
    if name == "d":
        stepper.send()
        rest(stepper)
    elif name == "a":
        if len(stepper.now.sockets) == 2:
            rest(stepper)
        if len(stepper.now.sockets) == 3 and not stepper.now.sockets[2].owed:
            stepper.respond(sent=0)
        stepper.send()
        rest(stepper)
    got = client(stepper.now)
    assert got.in_order
    if policy == "mirror" and name == "m":
        assert stepper.now.condition == "LOST"
        assert got.view.delivered < got.due
        assert stepper.now.sockets[1].view.unread > 0
        assert not stepper.now.sockets[1].view.ready_read
    else:
        assert stepper.now.condition != "LOST"
        assert got.view.delivered == got.due


def test_the_mirror_fault_goes_on_only_when_more_arrives() -> None:
    stepper = Stepper("splice", "mirror")
    stepper.fixture("m")
    assert stepper.now.condition == "WAITING", "as quiet as a good one"
    stepper.takes(1 << 20)
    lost = client(rest(stepper))
    assert stepper.now.condition == "LOST"
    stepper.fin()
    assert client(rest(stepper)).view.delivered > lost.view.delivered


def reached(policy: str = "before", **options: Any) -> Stepper:
    """An origin, socket 1, has the request, and waits to be read."""
    stepper = Stepper("splice", policy, **options)
    stepper.connect()
    stepper.iterate()
    stepper.request()
    rest(stepper)
    while not stepper.now.sockets[1].view.delivered:
        stepper.iterate()
    return stepper


@pytest.mark.parametrize("how", OUTCOMES)
def test_what_the_next_read_returns_is_chosen(how: str) -> None:
    stepper = reached()
    if how not in ("FIN", "reset"):
        stepper.respond(size=5000)
    arrived = stepper.now.sockets[1].view.unread
    stepper.returns(how, short=1000)
    stepper.iterate()
    stepper.iterate()
    origin = stepper.now.sockets[1].view
    states: list[Any] = list(stepper.seen)
    all_seen = [seen for seen in states if len(seen.sockets) > 1]
    if how == "full":
        assert origin.unread == 0
    elif how == "short":
        assert 1000 in [seen.sockets[1].view.unread for seen in all_seen]
    elif how == "EAGAIN":
        assert "polled" in [seen.ran.after for seen in all_seen if seen.ran]
    else:
        assert arrived == 0
        rest(stepper)
        assert stepper.now.closes == ("origin-reset" if how == "reset" else "origin-short",)
        assert stepper.script.output(0).startswith(b"HTTP/1.1 502")


def test_a_write_that_is_chosen_to_say_eagain_is_polled() -> None:
    stepper = reached(room=1 << 20)
    stepper.respond(size=5000)
    stepper.returns("EAGAIN", "write", side="client")
    assert client(stepper.now).view.next_write == "eagain"
    while client(stepper.now).view.next_write:
        stepper.step()
    assert client(stepper.now).view.delivered == 0
    rest(stepper)
    assert client(stepper.now).view.delivered == client(stepper.now).due


def test_which_event_epoll_reports_next_is_chosen() -> None:
    stepper = Stepper("splice", engine="level-triggered")
    for _ in range(2):
        stepper.connect()
    rest(stepper)
    for socket in (0, 1):
        stepper.request(socket=socket)
    stepper.report(1)
    stepper.wait()
    assert (stepper.now.events, stepper.now.due.slot) == (1, 1)
    rest(stepper, 2)
    assert stepper.now.sessions[0].requests == 1, "the other one came with the wait after it"


def test_phases_come_in_their_order_a_handler_at_a_time(stepper: Stepper) -> None:
    names = []
    stepper.connect()
    for _ in range(6):
        names.append(stepper.step().action.name)  # type: ignore[union-attr]
    assert names == ["decide", "wait", "read handler", "http", "timers", "decide"]
    assert stepper.now.ran.slot == -1, "the listener's"
    with pytest.raises(UsageError, match="'wait' comes next"):
        stepper.http()


def test_back_and_forward_meet_the_same_states(stepper: Stepper) -> None:
    stepper.fixture("b")
    stepper.set(policy="after")
    rest(stepper)
    states = stepper.seen
    for number in range(len(states) - 1, -1, -7):
        assert stepper.go_to(number) == states[number]
    assert stepper.forward(1000) == states[-1]
    assert stepper.seen == states
    stepper.back(2)
    assert len(stepper.undone) == 2
    stepper.takes(1)
    assert stepper.undone == []


@pytest.mark.parametrize(("do", "words"), [
    (lambda s: s.respond(), "not connected to an origin"),
    (lambda s: s.returns("half"), "unknown outcome"),
    (lambda s: s.returns("full", "jump"), "unknown call"),
    (lambda s: s.takes(5, side="middle"), "unknown side"),
    (lambda s: s.takes(-5), "size=-5 is not allowed: a whole number from 1 to .* bytes"),
    (lambda s: s.takes("many"), "is not allowed"),
    (lambda s: s.request(count=10**9), "is not allowed: a whole number from 1 to 64 requests"),
    (lambda s: s.report(0), "nothing to report of socket 0"),
    (lambda s: s.report(77), "socket=77 is not allowed: a whole number from 0 to 0"),
    (lambda s: s.takes(socket=77), "socket=77 is not allowed"),
    (lambda s: s.reset(socket="x"), "socket='x' is not allowed"),
    (lambda s: s.respond(socket=1), "socket=1 is not allowed"),
    (lambda s: s.takes(5, side=5), "unknown side '5'"),
    (lambda s: s.returns(None), "unknown outcome 'None'"),
    (lambda s: s.line(-1), "slot=-1 is not allowed"),
    (lambda s: s.do("takes", soket=0), "takes: .*'soket'; it takes size, side, socket"),
    (lambda s: s.takes(1, "client", 0, 5), "takes: too many positional arguments"),
    (lambda s: s.advance(), "advance: missing a required argument: 'ms'; it takes ms"),
    (lambda s: s.do("read handler", slot=1), "read handler: .*'slot'; it takes nothing"),
    (lambda s: s.returns("FIN", "write", side="client"), "a write does not return FIN"),
    (lambda s: s.send(side="client"), "nothing more to send"),
    (lambda s: s.write_handler(), "comes next"),
    (lambda s: s.set(recv_behind="perhaps"), "choose from"),
    (lambda s: s.fixture("c"), "unknown fixture"),
    (lambda s: s.do("jump"), "unknown action"),
])
def test_a_move_that_does_not_fit_is_refused_and_changes_nothing(do: Any, words: str) -> None:
    stepper = Stepper("splice")
    stepper.connect()
    rest(stepper)
    before = stepper.seen
    with pytest.raises(RinglabError, match=words) as caught:
        do(stepper)
    assert stepper.seen == before
    assert "\n" not in str(caught.value)


def test_an_end_has_its_place_behind_what_has_arrived() -> None:
    stepper = reached()
    stepper.respond(size=5000)
    for end in ("FIN", "reset"):
        with pytest.raises(UsageError, match=f"bytes come before a {end}"):
            stepper.returns(end)
    with pytest.raises(UsageError, match="has answered already"):
        stepper.respond()


def test_a_client_timeout_closes_the_session_that_spins() -> None:
    stepper = Stepper("splice", client_timeout_ms=1000)
    stepper.fixture("a2")
    assert stepper.now.condition == "SPIN"
    stepper.advance(2000)
    stepper.iterate()
    stepper.iterate()
    assert stepper.now.closes == ("client-timeout",)
    assert stepper.now.sessions == ()


class Mine(RelayPolicy):
    base = "before"

    def recv_behind(self, session: SessionView) -> bool:
        return session.channel.piped > 0


def test_a_stepper_is_of_a_case_a_policy_or_a_script() -> None:
    assert Stepper("after").driver.case == "splice"
    assert Stepper("fixed").driver.case == Stepper().driver.case == "dirty-list"
    assert Stepper(policy="fixed").policy == "fixed"
    assert Stepper(Mine).policy == "Mine"
    assert Stepper("splice", Mine).fixture("a").condition == "FIXED"
    assert Stepper("splice", "before", recv_behind="allowed").policy == "recv-allowed"
    script = RelayScript("after", pipe_size=5000)
    script.accept()
    of_script = Stepper(script)
    assert (of_script.policy, of_script.now.pipe_size, of_script.now.sockets) == ("after", 5000, ())
    assert Stepper(script, "mirror").policy == "mirror"
    assert Stepper(Script("fixed")).policy == "fixed"
    for wrong, words in (
        (lambda: Stepper("splise"), "choose from: splice"),
        (lambda: Stepper("splice", "shipped"), "unknown policy"),
        (lambda: Stepper("before", "after"), "unknown case"),
        (lambda: Stepper(script, pipe_size=3), "give it to the script"),
        (lambda: Stepper(5), "not int"),  # type: ignore[arg-type]
        (lambda: Stepper("splice", pipe_size=0), "pipe_size=0 is not allowed"),
    ):
        with pytest.raises(RinglabError, match=words):
            wrong()
    with pytest.raises(AttributeError, match=r"no 'poke'; it has: .*read_handler"):
        Stepper("splice").poke()
    assert {"read_handler", "returns", "back"} <= set(dir(Stepper("splice")))


# -- in a notebook -------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "name", "lit"), [
    ("before", "a", "SPIN"), ("after", "a", "FIXED"), ("before", "m", "WAITING"),
])
def test_the_picture_lights_the_present_state(policy: str, name: str, lit: str) -> None:
    stepper = Stepper("splice", policy)
    stepper.fixture(name)
    page = static_html(stepper)
    assert page.count("data-lit") == 1
    assert f'data-lit="{lit}"' in page
    assert "<script" not in page
    assert ("<strong>a no-op</strong>" in page) is (lit == "SPIN")


def test_every_condition_has_its_place_in_the_picture(stepper: Stepper) -> None:
    places = {place.name for place in stepper.driver.drawing.places}
    assert places == {"WAITING", "WORKING", "SPIN", "FIXED", "LOST"}
    stepper.fixture("a")
    assert {seen.condition for seen in stepper.seen} <= places


def test_in_a_batch_it_shows_its_state_without_a_widget(
    monkeypatch: pytest.MonkeyPatch, stepper: Stepper
) -> None:
    monkeypatch.setenv(mode.BATCH, "1")
    assert set(stepper._repr_mimebundle_()) == {"text/html", "text/plain"}


@pytest.mark.parametrize("case", ["splice", "dirty-list"])
def test_every_button_asks_for_something_that_its_engine_knows(case: str) -> None:
    page, told = opened(Stepper(case))
    page._received({"kind": "hello"})
    facts = told[-1]
    items = [item for row in facts["controls"] for item in row["items"]]
    fields = {item.get("number", item.get("choice")) for item in items} - {None}
    driver = page._stepper.driver
    for item in items:
        if "press" in item:
            assert item["help"]
            assert set(item["send"]) <= set(driver.asks[item["action"]])
            assert set(item["send"].values()) <= fields
    assert set(facts["options"]) <= fields
    assert {item["choice"] for item in items if item.get("choice") and not item["values"]} == set(
        facts["options"])


def test_the_page_does_what_its_buttons_say_and_refuses_in_one_line(stepper: Stepper) -> None:
    page, told = opened(stepper)
    for message in (
        {"kind": "hello"}, {"kind": "do", "action": "connect"}, {"kind": "do", "action": "iterate"},
        {"kind": "do", "action": "wait"}, {"kind": "do", "action": "read handler"},
        {"kind": "do", "action": "iterate"}, {"kind": "do", "action": "request", "socket": "0"},
        {"kind": "do", "action": "returns", "socket": "0", "call": "read", "how": "short",
         "short": "10"},
        {"kind": "set", "name": "policy", "value": "after"}, {"kind": "do", "action": "a"},
    ):
        page._received(message)
        assert told[-1]["message"] == "", message
    assert told[-1]["condition"] == "FIXED", "a fixture keeps the policy that is chosen"
    assert told[-1]["policy"]["name"] == "after"
    assert dict(told[-1]["phases"]) == PHASE_WORDS
    assert [label for _, label in told[-1]["options"]["on"]] == ["origin 2", "client 0"]
    at = told[-1]["at"]
    for wrong in (
        {"kind": "do", "action": "takes", "socket": "0", "size": "many"},
        {"kind": "do", "action": "report", "socket": ""},
        {"kind": "do", "action": "read handler"},
        {"kind": "set", "name": "recv_behind", "value": "perhaps"}, {"kind": "go"},
    ):
        page._received(wrong)
        assert told[-1]["message"], wrong
        assert "\n" not in told[-1]["message"]
        assert told[-1]["at"] == at


def test_the_handler_s_button_says_whose_it_is(stepper: Stepper) -> None:
    page, told = opened(stepper)
    stepper.fixture("a")
    stepper.wait()
    page.tell()
    assert dict(told[-1]["phases"])["read handler"] == "read handler: origin"
    assert told[-1]["next"] == "read handler"

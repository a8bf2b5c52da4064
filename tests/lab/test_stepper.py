"""The loop by hand: the founding fixture, the automaton, back and forward, wrong moves."""

from __future__ import annotations

import re
from typing import Any

import pytest

import lab
from engine.errors import RinglabError, UsageError
from lab import mode
from lab.live.stepper import COMPLETIONS, PHASES, Stepper
from lab.live.stepper_page import static_html
from tests.lab.pages import opened


@pytest.fixture
def stepper() -> Stepper:
    return Stepper()


@pytest.mark.parametrize(("name", "line"), [
    ("single", "sending True, write_buf 0, listed True, timeout none (mode 3a)"),
    ("pipelined", "sending True, write_buf 103, listed True, timeout 0"),
])
def test_the_founding_fixture_s_lines(stepper: Stepper, name: str, line: str) -> None:
    stepper.fixture(name)
    assert stepper.line() == line


def test_a_poke_makes_the_single_fixture_read_as_in_the_report(stepper: Stepper) -> None:
    stepper.fixture("single")
    assert stepper.now.condition == "PARKED"
    assert stepper.wait().ended == "asleep"
    stepper.poke()
    stepper.wait()
    stepper.iterate()
    assert stepper.line() == "sending True, write_buf 0, listed True, timeout 0"
    assert stepper.now.condition == "SPIN"


def test_phases_come_in_their_order(stepper: Stepper) -> None:
    assert [stepper.step().action.name for _ in PHASES] == list(PHASES)  # type: ignore[union-attr]
    assert stepper.now.ended == "timeout"
    assert stepper.now.next == "reap"
    assert stepper.reap().next == "drain"


@pytest.mark.parametrize("how", COMPLETIONS)
def test_the_next_completion_is_chosen(how: str) -> None:
    stepper = Stepper("fixed")
    stepper.fixture("single")
    stepper.wait()
    before = stepper.now.sends[0]
    assert before is not None
    stepper.complete(how, size=1000)
    stepper.wait()
    stepper.iterate()
    if how == "full":
        assert stepper.now.sends == (None,)
        assert stepper.now.connections[0].send_buf == 0
    elif how == "short":
        stepper.wait()  # submits the remainder
        assert stepper.now.sends == (before - 1000,)
    elif how == "error":
        assert stepper.now.connections[0].closing
    else:
        assert stepper.now.sends == (before,)


def test_a_policy_switched_in_the_middle_ends_the_spin(stepper: Stepper) -> None:
    stepper.fixture("pipelined")
    for _ in range(3):
        stepper.wait()
        stepper.iterate()
        assert stepper.now.condition == "SPIN"
    stepper.set(membership="leave")
    stepper.wait()
    stepper.iterate()
    assert stepper.now.condition == "IDLE"
    assert stepper.now.loop.list_length == 0
    assert stepper.policy == "membership"


def test_back_and_forward_meet_the_same_states(stepper: Stepper) -> None:
    stepper.fixture("pipelined")
    stepper.set(membership="leave")
    stepper.iterate()
    states = stepper.seen
    for number in range(len(states) - 1, -1, -1):
        assert stepper.go_to(number) == states[number]
    assert stepper.forward(1000) == states[-1]
    assert stepper.seen == states
    stepper.back(3)
    assert len(stepper.undone) == 3
    stepper.poke()
    assert stepper.undone == []


@pytest.mark.parametrize(("do", "words"), [
    (lambda s: s.complete(), "no SEND in flight"),
    (lambda s: s.complete("short", size=10**9), "no SEND in flight"),
    (lambda s: s.complete("half"), "unknown completion"),
    (lambda s: s.handler(), "no request for a handler"),
    (lambda s: s.wait(), "no wait has been decided"),
    (lambda s: s.set(membership="perhaps"), "choose from"),
    (lambda s: s.fixture("double"), "unknown fixture"),
    (lambda s: s.do("jump"), "unknown action"),
    (lambda s: s.do(5), "unknown action '5'"),
    (lambda s: s.do("connect", foo=1), "connect: .*'foo'; it takes nothing"),
    (lambda s: s.do("wait", foo=1), "wait: .*'foo'; it takes nothing"),
    (lambda s: s.connect(1), "connect: too many positional arguments; it takes nothing"),
    (lambda s: s.wait(1), "wait: too many positional arguments; it takes nothing"),
    (lambda s: s.do("handler begins", room=1), "handler begins: .*'room'; it takes slot"),
    (lambda s: s.advance(), "advance: missing a required argument: 'ms'; it takes ms"),
    (lambda s: s.set(foo=1), "unknown"),
    (lambda s: s.back("x"), "steps='x' is not allowed: a whole number from 0"),
    (lambda s: s.back(-1), "steps=-1 is not allowed"),
    (lambda s: s.forward(1.5), "steps=1.5 is not allowed"),
    (lambda s: s.go_to("a"), "number='a' is not allowed"),
    (lambda s: s.go_to(-1), "number=-1 is not allowed"),
    (lambda s: s.go_to(True), "number=True is not allowed"),
    (lambda s: s.fixture(5), "unknown fixture '5'"),
    (lambda s: s.line("x"), "slot='x' is not allowed"),
])
def test_a_move_that_does_not_fit_is_refused_and_changes_nothing(do: Any, words: str) -> None:
    stepper = Stepper()
    stepper.connect()
    stepper.reap()
    before = stepper.seen
    with pytest.raises(RinglabError, match=words):
        do(stepper)
    assert stepper.seen == before


def test_what_is_done_by_name_is_what_the_method_does() -> None:
    by_name, by_method = Stepper(), Stepper()
    for each in (by_name, by_method):
        each.do("connect")
        each.iterate()
        each.do("request", size=5000)
        each.do("wait")
        each.iterate()
    by_name.do("handler-begins")
    by_name.do("handler ends", room=100)
    by_method.handler_begins()
    by_method.handler_ends(room=100)
    assert by_name.seen == by_method.seen


EARLY = "there is no connection 0: connect a client, and reap it"


@pytest.mark.parametrize(("do", "early", "later"), [
    (lambda s: s.request(), EARLY, ""),
    (lambda s: s.request(size=-5), EARLY, "size=-5 is not allowed: a whole number from 0 to"),
    (lambda s: s.request(size=1 << 50), EARLY, "size=1125899906842624 is not allowed"),
    (lambda s: s.request(size="x"), EARLY, "size='x' is not allowed"),
    (lambda s: s.request(route="asink"), EARLY, "unknown route 'asink'; choose from: async, sync"),
    (lambda s: s.request(slot=7), "there is no connection 7", "choose from: 0"),
    (lambda s: s.request(slot="a"), "slot='a' is not allowed", "slot='a' is not allowed"),
    (lambda s: s.handler(), EARLY, "has no request for a handler"),
    (lambda s: s.handler(room=-1), EARLY, "room=-1 is not allowed"),
    (lambda s: s.handler_begins(), EARLY, "has no request for a handler"),
    (lambda s: s.handler_ends(), EARLY, "no handler of connection 0 runs: let one begin first"),
    (lambda s: s.complete(), EARLY, "no SEND in flight"),
    (lambda s: s.complete("not yet"), EARLY, ""),
    (lambda s: s.complete(3), EARLY, "unknown completion '3'"),
    (lambda s: s.do("complete", slot=0, how="ful", size=1), EARLY, "unknown completion 'ful'"),
    (lambda s: s.half_close(), EARLY, ""),
    (lambda s: s.reset(), EARLY, ""),
    (lambda s: s.advance("x"), "ms='x' is not allowed", "ms='x' is not allowed"),
    (lambda s: s.advance(1.5), "ms=1.5 is not allowed: a whole number", "ms=1.5 is not allowed"),
    (lambda s: s.advance(-1), "ms=-1 is not allowed", "ms=-1 is not allowed"),
    (lambda s: s.line(), EARLY, ""),
    (lambda s: s.line(5), "there is no connection 5", "there is no connection 5: choose from: 0"),
    (lambda s: s.line("a"), "slot='a' is not allowed", "slot='a' is not allowed"),
])
def test_what_is_given_to_the_ring_s_loop_is_checked_whenever_it_is_given(
    do: Any, early: str, later: str
) -> None:
    stepper = Stepper("dirty-list")

    def refused(words: str) -> None:
        before = stepper.now
        with pytest.raises(UsageError, match=re.escape(words)) as told:
            do(stepper)
        assert "\n" not in str(told.value)
        assert stepper.now == before

    refused(early)
    stepper.connect()
    stepper.reap()
    if later:
        refused(later)
    else:
        do(stepper)


def test_a_handler_that_runs_does_not_begin_again_and_a_closed_connection_has_none() -> None:
    stepper = Stepper("dirty-list")
    stepper.connect()
    with pytest.raises(UsageError, match="connection 0 is not open: its accept was not reaped yet"):
        stepper.handler()
    stepper.iterate()
    stepper.wait()
    stepper.request()
    stepper.iterate()
    stepper.handler_begins()
    with pytest.raises(UsageError, match="the handler of connection 0 runs already"):
        stepper.handler_begins()
    stepper.handler_ends()


def test_an_unknown_slot_is_refused(stepper: Stepper) -> None:
    before = stepper.seen
    with pytest.raises(RinglabError):
        stepper.request(slot=5)
    assert stepper.seen == before


def test_the_picture_lights_the_present_state(stepper: Stepper) -> None:
    for name, lit in (("single", "PARKED"), ("pipelined", "SPIN")):
        stepper.fixture(name)
        html = static_html(stepper)
        assert html.count("data-lit") == 1
        assert f'data-lit="{lit}"' in html
        assert "<script" not in html


def test_in_a_batch_it_shows_its_state_without_a_widget(
    monkeypatch: pytest.MonkeyPatch, stepper: Stepper
) -> None:
    monkeypatch.setenv(mode.BATCH, "1")
    bundle = stepper._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert lab.Stepper is Stepper


def test_the_page_does_what_its_buttons_say_and_refuses_in_one_line(stepper: Stepper) -> None:
    page, told = opened(stepper)
    for message in (
        {"kind": "hello"}, {"kind": "do", "action": "connect"}, {"kind": "do", "action": "iterate"},
        {"kind": "do", "action": "wait"}, {"kind": "set", "name": "policy", "value": "fixed"},
        {"kind": "do", "action": "request", "slot": "0", "size": "3145728", "route": "async"},
        {"kind": "go", "number": 3},
    ):
        page._received(message)
        assert told[-1]["message"] == ""
    assert told[-1]["at"] == 3
    for wrong in (
        {"kind": "do", "action": "complete", "slot": "0", "how": "full"},
        {"kind": "do", "action": "request", "slot": "0", "size": "many", "route": "async"},
        {"kind": "set", "name": "membership", "value": "perhaps"},
        {"kind": "go"},
    ):
        page._received({**wrong, "view": "v", "count": 9})
        assert told[-1]["message"], wrong
        assert told[-1]["heard"] == {"view": "v", "count": 9}
        assert "\n" not in told[-1]["message"]
        assert told[-1]["at"] == 3


def test_a_page_without_a_connection_says_so(stepper: Stepper) -> None:
    assert "nobody is connected" in static_html(stepper)
    with pytest.raises(UsageError):
        stepper.complete("later")

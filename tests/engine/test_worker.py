"""Single facts of the ring worker, on the scripted backend: deadlines, hand-overs, stop, limits."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from engine import PRESETS, Policy, Script
from engine.errors import EngineError
from tests.engine.world import MS, Ask, Client, World

LARGE = 300_000
QUIET = ["fixed", "tickless"]


def connected(world: World) -> Client:
    client = world.connect()
    assert client is not None
    for _ in range(3):
        world.turn()
    return client


# ---- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", QUIET)
@pytest.mark.parametrize("own", [True, False], ids=["its own", "another's"])
def test_a_handler_on_the_worker_does_not_use_up_a_write_timeout(policy: str, own: bool) -> None:
    """The time in which the worker itself was busy is not the client's."""
    world = World(policy, write_timeout_ms=1000)
    first, second = connected(world), connected(world)
    if own:
        world.request(first, Ask("sync", LARGE, ms=2000))
    else:
        world.request(first, Ask("sync", LARGE))
        world.request(second, Ask("sync", LARGE, ms=2000))
    for _ in range(5):
        world.turn()
        if world.in_flight(first):
            break
    assert world.read()["write_timeouts"] == 0
    assert world.in_flight(first)
    world.finish()


def test_a_send_that_completed_while_a_handler_ran_has_not_timed_out() -> None:
    world = World("fixed", write_timeout_ms=1000)
    first, second = connected(world), connected(world)
    world.request(first, Ask("sync", LARGE))
    world.turn()
    world.request(second, Ask("sync", 24, ms=5000))
    for _ in range(3):
        world.step()  # the handler runs in the reap; meanwhile the first client reads
        if world.script.loop().now_ns > 5000 * MS:
            break
    world.complete(first)
    for _ in range(6):
        world.turn()
    assert world.read()["write_timeouts"] == 0
    world.finish()


@pytest.mark.parametrize("policy", QUIET)
def test_progress_of_a_send_renews_its_write_timeout(policy: str) -> None:
    world = World(policy, write_timeout_ms=100)
    client = connected(world)
    world.request(client, Ask("sync", LARGE))
    world.turn()
    for _ in range(20):
        before = world.script.loop().now_ns
        world.complete(client, 1000)
        while world.script.loop().now_ns < before + 60 * MS:
            world.script.advance(60 * MS)
            world.turn()
    assert not client.gone
    world.finish()


@pytest.mark.parametrize("policy", QUIET)
def test_the_one_that_has_waited_longest_is_closed_first(policy: str) -> None:
    world = World(policy, write_timeout_ms=100)
    clients = [connected(world) for _ in range(3)]
    for client in clients:
        world.request(client, Ask("sync", LARGE))
        world.turn()
        world.script.advance(30 * MS)
    gone: list[int] = []
    for _ in range(60):
        world.turn()
        gone += [c.slot for c in clients if c.gone and c.slot not in gone]
    assert gone == [0, 1, 2]


def test_tickless_sleeps_to_the_very_deadline() -> None:
    world = World("tickless", write_timeout_ms=1234)
    client = connected(world)
    world.request(client, Ask("sync", LARGE))
    world.to_the_wait()
    world.turn()
    prepared = world.script.loop().now_ns
    waits = int(world.script.counters()["waits"])
    while not client.gone:
        world.turn()
    assert world.script.loop().now_ns - prepared <= 1234 * MS
    assert int(world.script.counters()["waits"]) - waits <= 3


@pytest.mark.parametrize("policy", QUIET)
def test_a_client_that_does_not_close_after_its_last_response_is_closed_in_time(
    policy: str,
) -> None:
    """Until then what it still sends is dropped: to close at once could cost it the response."""
    world = World(policy)
    client = connected(world)
    world.request(client, Ask("sync", 24, kind="close"))
    world.turn()
    world.complete(client)
    world.step()
    world.to_the_wait()
    ended = world.script.loop().now_ns
    world.script.input(client.slot, Ask("sync", 24).wire())
    for _ in range(300):
        if world.turn() == "asleep" or client.gone:
            break
    assert client.gone
    assert client.got == client.due()
    assert 4900 * MS < world.script.loop().now_ns - ended < 5200 * MS


# ---- changes while it sleeps --------------------------------------------------------------------


def test_a_tickless_worker_is_woken_for_a_new_deadline() -> None:
    world = World("tickless")
    client = connected(world)
    world.request(client, Ask("sync", LARGE))
    world.turn()
    assert world.turn() == "asleep"
    world.set(write_timeout_ms=50)
    for _ in range(4):
        world.turn()
    assert client.timed_out


def test_a_handover_under_the_older_policy_is_not_missed_by_the_newer() -> None:
    """Left without a wake-up, after the queue was drained, and then nothing is timed any more."""
    world = World("fixed")
    client = connected(world)
    world.request(client, Ask("async", LARGE))
    world.turn()
    assert world.next_phase == 1
    for _ in range(2):
        world.step()  # reap, drain
    world.set("tickless")
    assert world.handle(client)
    for _ in range(4):
        world.turn()
    assert world.in_flight(client)
    world.finish()


def test_a_completion_held_in_its_place_is_told_of_the_end_of_the_handler() -> None:
    """Still listed, but not movable: with nothing timed only the hand-back can tell."""
    world = World("tickless", held="listed", timeout="movable", direct_write="at-once")
    client = connected(world)
    world.request(client, Ask("async", LARGE))
    world.turn()
    assert world.handle(client)
    world.turn()
    world.request(client, Ask("async", 24))
    world.turn()
    assert world.begin(client)
    world.complete(client, LARGE)
    assert world.turn() == "asleep"
    assert world.views[client.slot].held
    world.script.room(client.slot, 1 << 20)
    world.end(client)
    world.turn()
    assert not world.views[client.slot].held
    world.finish()


class UntilAnEvent(Policy):
    """Sleeps without end."""

    base = "fixed+handback=wake"

    def idle(self, loop: Any) -> float | None:
        return None


def test_a_policy_of_ones_own_that_sleeps_without_end_sees_stop_and_settings() -> None:
    world = World(UntilAnEvent)
    connected(world)
    assert world.turn() == "asleep"
    world.stop()
    for _ in range(3):
        world.turn()
    assert world.left


# ---- stop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", QUIET)
def test_whoever_is_accepted_as_the_stop_begins_does_not_hold_it_up(policy: str) -> None:
    world = World(policy)
    for _ in range(3):
        world.turn()
    world.stop()
    world.connect()
    asked = world.script.loop().now_ns
    for _ in range(6):
        world.turn()
    assert world.left
    assert world.script.loop().now_ns - asked < 200 * MS


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_a_stop_lets_responses_under_way_end(policy: str) -> None:
    world = World(policy)
    reading, idle = connected(world), connected(world)
    world.request(reading, Ask("sync", LARGE))
    world.turn()
    world.stop()
    world.script.poke()
    world.turn()
    assert world.turn() != "left"
    assert idle.gone
    world.finish()
    assert world.left
    assert reading.got == reading.due()


def test_after_the_grace_it_leaves_whoever_still_stalls() -> None:
    world = World("tickless", stop_grace_ms=250)
    client = connected(world)
    world.request(client, Ask("sync", LARGE))
    world.turn()
    world.stop()
    asked = world.script.loop().now_ns
    for _ in range(6):
        world.turn()
    assert world.left
    assert world.script.loop().now_ns - asked == 250 * MS


def test_it_listens_no_more_once_it_stops() -> None:
    script = Script("tickless")
    script.turn()
    script.stop()
    script.turn()
    script.turn()
    with pytest.raises(EngineError) as refused:
        script.accept()
    assert refused.value.errno == errno.ECONNREFUSED


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(set(PRESETS) - {"mirror"}))
@pytest.mark.parametrize("route", ["sync", "async"])
def test_depth_bounds_what_is_taken_on_and_loses_nothing(policy: str, route: str) -> None:
    world = World(policy, max_pipeline=3)
    client = connected(world)
    world.request(client, *[Ask(route, 5000)] * 40)
    for _ in range(10):
        world.turn()
    view = world.view(client)
    assert view is not None
    assert view.paused
    # At most as many as the depth in the buffers, and as many more in the SEND before them.
    assert view.requests <= 6
    assert not world.script.pending(client.slot)[0]  # nothing more is read
    world.finish()
    assert client.got == client.due()


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_one_too_many_is_closed_at_once_and_the_others_are_served(policy: str) -> None:
    world = World(policy, max_connections=2)
    clients = [connected(world) for _ in range(3)]
    assert world.read()["refused"] == 1
    for client in clients[:2]:
        world.request(client, Ask("sync", 500))
    world.finish()


def test_a_send_of_many_pieces_is_not_short_when_it_took_all_it_was_given() -> None:
    """A SEND takes a few pieces at a time; what it was not given it did not refuse."""
    world = World("fixed")
    client = connected(world)
    world.request(client, *[Ask("sync", 20_000)] * 30)
    world.finish()
    assert world.read()["sends"] > 2
    assert world.read()["sends_short"] == 0


def test_a_new_script_has_wasted_nothing() -> None:
    script = Script()
    script.turn()
    assert script.counters()["wasted"] == 0


@pytest.mark.parametrize("route", ["sync", "async"])
def test_a_request_for_too_long_a_handler_is_refused_in_words(route: str) -> None:
    script = Script("tickless", max_handler_ms=100)
    client = script.accept()
    script.turn()
    for ms in (100, 101):
        script.get(client, size=1, route=route, ms=ms)
    script.room(client, 1 << 20)
    while not script.output(client).endswith(b"Connection: close\r\n\r\n"):
        script.turn()
        while script.handler_begin(client):
            script.handler_end(client)
        if (size := script.pending(client)[1]) is not None:
            script.send_done(client, size)
    answers = script.output(client)
    assert (script.counters()["requests"], script.counters()["bad_requests"]) == (2, 1)
    assert script.loop().now_ns < 300 * MS, "nobody has waited for the second"
    assert answers.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answers.count(b"HTTP/1.1 400 Bad Request: ms Is Over The Limit\r\n") == 1
    assert answers.endswith(b"Content-Length: 0\r\nConnection: close\r\n\r\n")
    script.set(max_handler_ms=200)
    assert script.settings["max_handler_ms"] == 200

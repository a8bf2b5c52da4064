"""Each fix against its fault: the same scenario fails without the fix and holds with it.

A scenario asserts both halves: quiet (nothing outside happens, and the worker sleeps) and complete
(the outside lets everything through, and everybody has every byte in order).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.world import MS, Ask, Client, World

LARGE = 300_000
SMALL = 24
SECOND = 1000 * MS


# ---- what the scenarios are made of -------------------------------------------------------------


def connected(world: World) -> Client:
    client = world.connect()
    assert client is not None
    world.turn()
    world.turn()
    return client


def stalled(world: World, room: int = 1000) -> Client:
    """An async response of which the socket took a part; the rest waits in a SEND."""
    client = connected(world)
    world.request(client, Ask("async", LARGE))
    world.turn()
    world.script.room(client.slot, room)
    assert world.handle(client)
    for _ in range(2):
        if world.in_flight(client) is None:
            world.turn()
    assert world.in_flight(client) is not None, "not complete: nobody sends the rest"
    return client


def pipeline(world: World, client: Client) -> None:
    """A second request while that SEND waits, answered into the buffer behind it."""
    world.request(client, Ask("async", SMALL))
    world.turn()
    world.script.room(client.slot, 0)
    assert world.handle(client)
    world.turn()


def check_quiet(world: World, turns: int = 100) -> None:
    before = world.read()["wasted"]
    for _ in range(turns):
        if world.turn() == "asleep":
            break
    assert world.read()["wasted"] - before <= 3, "not quiet"


def check_complete(world: World) -> None:
    world.eager = False  # forgotten work is what is looked for
    world.finish()


# ---- the scenarios ------------------------------------------------------------------------------


def a_pipelined_stall(policy: Any) -> None:
    """celeris: the arm async+pipelined."""
    world = World(policy)
    pipeline(world, stalled(world))
    check_quiet(world)
    check_complete(world)


def a_poked_stall(policy: Any) -> None:
    """The arm async, poked by a completion of nobody's."""
    world = World(policy)
    stalled(world)
    world.script.poke()
    check_quiet(world)
    check_complete(world)


def a_deadline_in_a_stall(policy: Any) -> None:
    """While the only request is stalled its write timeout comes."""
    world = World(policy, write_timeout_ms=500)
    client = stalled(world)
    check_quiet(world, turns=10)
    for _ in range(60):
        if world.turn() == "asleep":
            break
    assert client.timed_out, "the write timeout is not honoured"
    check_complete(world)


def a_stop_in_a_stall(policy: Any) -> None:
    """While the only request is stalled the worker is asked to stop, and has a second."""
    world = World(policy, stop_grace_ms=250)
    stalled(world)
    check_quiet(world, turns=10)
    asked = world.script.loop().now_ns
    world.stop()
    for _ in range(200):
        if world.turn() in ("asleep", "left"):
            break
    assert world.left, "the stop is not honoured"
    assert world.script.loop().now_ns - asked < SECOND


def a_write_past_a_send(policy: Any) -> None:
    """celeris #751: the socket has room again while the rest of response 1 waits in its SEND."""
    world = World(policy)
    client = stalled(world)
    world.complete(client, 1000)
    world.turn()
    world.request(client, Ask("async", SMALL))
    world.turn()
    world.script.room(client.slot, 1 << 20)
    assert world.begin(client)
    world.script.handler_end(client.slot)
    world.check_bytes(client)  # the model knows no disorder here
    check_quiet(world)
    check_complete(world)


def held(world: World, client: Client) -> None:
    """A handler of ten seconds runs; meanwhile the client reads, and the first SEND completes."""
    world.request(client, Ask("async", SMALL, ms=10_000))
    world.turn()
    assert world.begin(client)
    world.complete(client)
    world.turn()


def a_handler_that_holds_a_completion(policy: Any) -> None:
    """Nothing else happens while it runs."""
    world = World(policy)
    client = stalled(world)
    held(world, client)
    check_quiet(world)
    check_complete(world)


def others_while_a_handler_holds_a_completion(policy: Any) -> None:
    """Another client asks meanwhile, and must not wait for a handler that is not its own."""
    world = World(policy)
    client, other = stalled(world), connected(world)
    asked = world.script.loop().now_ns
    held(world, client)
    world.request(other, Ask("sync", SMALL))
    world.turn()
    world.turn()
    assert world.complete(other)
    assert world.script.loop().now_ns - asked < SECOND, "others wait for its handler"
    check_complete(world)


def a_handover_to_a_sleeping_worker(policy: Any) -> None:
    """While the worker waits on the SEND of one client a handler leaves it another."""
    world = World(policy)
    second = connected(world)
    world.request(second, Ask("async", LARGE, ms=0))
    world.turn()
    first = connected(world)
    world.request(first, Ask("sync", LARGE))
    world.turn()
    assert world.in_flight(first) is not None
    for _ in range(3):
        world.turn()
    world.to_the_wait()  # of 25 ms, where it is a timed one
    now = world.script.loop().now_ns
    assert world.handle(second)
    for _ in range(2):
        world.turn()
        if world.in_flight(second) is not None:
            break
    assert world.in_flight(second) is not None, "not complete: nobody takes the hand-over"
    assert world.script.loop().now_ns - now <= 1 * MS, "the hand-over waits for a timed wake"
    check_quiet(world)
    check_complete(world)


def ten_idle_seconds(policy: Any) -> None:
    """Nothing to do at all, then a request: how often did it look?"""
    world = World(policy)
    client = connected(world)
    for _ in range(5):
        world.turn()
    began, looked = world.script.loop().now_ns, world.script.loop().iterations
    while world.script.loop().now_ns - began < 10 * SECOND:
        if world.turn() == "asleep":
            world.script.advance(10 * SECOND)
    assert world.script.loop().iterations - looked <= 2, "it wakes up for nothing"
    world.request(client, Ask("async", LARGE))
    check_complete(world)


def a_zero_timeout(policy: Any) -> None:
    """A wait that may not sleep arms no timer for it."""
    world = World(policy, sq_entries=1)
    clients = [connected(world) for _ in range(2)]
    for client in clients:
        world.request(client, Ask("async", LARGE))
    world.turn()
    for client in clients:
        assert world.handle(client)
    world.turn()  # the SQ takes one SEND: the list holds the other, so this wait may not sleep
    assert world.waited is not None
    assert not world.waited.can_block
    assert world.waited.mode == "timed"
    assert world.waited.way == "poll", "it arms a timer that has expired already"
    check_quiet(world)
    check_complete(world)


def a_spin(policy: Any) -> None:
    """A spin is none the less one, only a cheaper one, when its waits arm no timer."""
    world = World(policy)
    pipeline(world, stalled(world))
    world.turn()
    assert world.waited is not None
    assert not world.waited.can_block
    assert world.waited.way == "poll", "it arms a timer that has expired already"
    check_complete(world)


def a_full_queue(policy: Any) -> None:
    """Two hand-overs and one SQ entry: the second must stay listed until there is another."""
    world = World(policy, sq_entries=1)
    for _ in range(3):
        world.turn()  # what the loop itself keeps armed comes first
    clients = [connected(world) for _ in range(2)]
    for client in clients:
        world.request(client, Ask("async", LARGE))
        world.turn()
        world.turn()
    for client in clients:
        assert world.handle(client)
    check_quiet(world)
    check_complete(world)


def a_newcomer_at_a_full_queue(policy: Any) -> None:
    """The next SEND of a stalled client takes the SQ's only entry; a client that connects in the
    same moment owes its recv, and must not wait for the one that stalls."""
    world = World(policy, sq_entries=1)
    for _ in range(3):
        world.turn()
    client = stalled(world)
    assert world.complete(client, 1000)
    other = world.connect()
    assert other is not None
    world.request(other, Ask("sync", SMALL))
    for _ in range(10):
        if world.turn() == "asleep":
            break
    assert world.in_flight(client) is not None, "the stall is over"
    assert world.complete(other), "others wait for the client that stalls"
    check_quiet(world)
    check_complete(world)


CURED: list[tuple[Callable[[Any], None], list[str]]] = [
    (a_pipelined_stall, ["membership", "timeout", "fixed", "tickless"]),
    (a_poked_stall, ["membership", "timeout", "fixed", "tickless"]),
    (
        a_deadline_in_a_stall,
        ["membership+send-wait=timed", "timeout+send-wait=timed", "fixed", "tickless"],
    ),
    (
        a_stop_in_a_stall,
        ["membership+send-wait=timed", "timeout+send-wait=timed", "fixed", "tickless"],
    ),
    (a_write_past_a_send, ["order+membership=leave", "fixed", "tickless"]),
    (a_handler_that_holds_a_completion, ["held-unlisted", "fixed", "tickless"]),
    (
        others_while_a_handler_holds_a_completion,
        ["held-listed", "held-unlisted", "fixed", "tickless"],
    ),
    (a_handover_to_a_sleeping_worker, ["shipped+handback=wake", "fixed+handback=wake", "tickless"]),
    (ten_idle_seconds, ["tickless"]),
    (a_zero_timeout, ["fixed+expired=poll", "tickless"]),
    (a_spin, ["no-timer", "timed-wait+expired=poll"]),
    (a_full_queue, ["shipped", "membership", "timeout", "fixed", "tickless"]),
    (a_newcomer_at_a_full_queue, ["membership", "timeout", "both", "fixed", "tickless"]),
]

FAULTY: list[tuple[Callable[[Any], None], str, str]] = [
    (a_pipelined_stall, "shipped", "not quiet"),
    (a_pipelined_stall, "timed-wait", "not quiet"),
    (a_pipelined_stall, "order", "not quiet"),
    (a_pipelined_stall, "no-timer", "not quiet"),
    (a_poked_stall, "shipped", "not quiet"),
    (a_deadline_in_a_stall, "shipped", "the write timeout is not honoured"),
    (a_deadline_in_a_stall, "membership", "the write timeout is not honoured"),
    (a_deadline_in_a_stall, "timeout", "the write timeout is not honoured"),
    (a_deadline_in_a_stall, "timed-wait", "not quiet"),
    (a_stop_in_a_stall, "shipped", "the stop is not honoured"),
    (a_stop_in_a_stall, "membership", "the stop is not honoured"),
    (a_stop_in_a_stall, "timeout", "the stop is not honoured"),
    (a_stop_in_a_stall, "timed-wait", "not quiet"),
    (a_write_past_a_send, "shipped", "wrong bytes"),
    (a_write_past_a_send, "membership", "wrong bytes"),
    (a_handler_that_holds_a_completion, "held-listed", "not quiet"),
    (others_while_a_handler_holds_a_completion, "shipped", "others wait for its handler"),
    (a_handover_to_a_sleeping_worker, "shipped", "nobody takes the hand-over"),
    (a_handover_to_a_sleeping_worker, "fixed", "waits for a timed wake"),
    (ten_idle_seconds, "shipped", "it wakes up for nothing"),
    (ten_idle_seconds, "fixed", "it wakes up for nothing"),
    (a_spin, "shipped", "it arms a timer"),
    (a_spin, "timed-wait", "it arms a timer"),
    (a_zero_timeout, "fixed", "it arms a timer"),
    (a_newcomer_at_a_full_queue, "shipped", "not quiet"),
    (a_full_queue, "mirror", "was forgotten"),
    (a_full_queue, "shipped+membership=eager", "was forgotten"),
]

CASES = [(scenario, policy, None) for scenario, policies in CURED for policy in policies] + FAULTY


@pytest.mark.parametrize(
    ("scenario", "policy", "fails"),
    CASES,
    ids=[f"{scenario.__name__}-{policy}-{fails or 'holds'}" for scenario, policy, fails in CASES],
)
def test_fails_without_the_fix_and_holds_with_it(
    scenario: Callable[[Any], None], policy: str, fails: str | None
) -> None:
    if fails is None:
        scenario(policy)
        return
    with pytest.raises(AssertionError, match=fails):
        scenario(policy)

"""The scripted worker under every policy and any outside: nothing lost, nothing forgotten, no spin.

A Hypothesis state machine drives a :class:`World` (which holds the invariants). Clients, kernel and
handlers act between any two phases of the worker, in any order.
"""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine import PRESETS
from engine.policy import table
from tests.engine.outside import run
from tests.engine.world import MS, Ask, Client, World

pytestmark = pytest.mark.computes

MOST_CLIENTS = 4
SIZES = st.sampled_from([0, 1, 24, 500, 4096, 4097, 20_000, 70_000])
ASKS = st.builds(
    Ask,
    route=st.sampled_from(["sync", "async"]),
    size=SIZES,
    ms=st.sampled_from([0, 0, 0, 3]),
    kind=st.sampled_from(["get"] * 12 + ["close", "post", "garbage"]),
)
SEND_RESULTS = st.one_of(
    st.none(),
    st.integers(1, 80_000),
    st.sampled_from([-errno.EAGAIN, -errno.EINTR]),
    st.sampled_from([-errno.EPIPE, -errno.ECONNRESET]),
)
WHO = st.integers(0, MOST_CLIENTS - 1)


@st.composite
def combinations(draw: st.DrawFn) -> dict[str, str]:
    """One choice for every decision; those that make no sense together are brought to make it."""
    known = {decision: sorted(choices) for decision, choices in table().items()}
    choices = {decision: draw(st.sampled_from(names)) for decision, names in known.items()}
    if choices["idle"] == "tickless":
        choices |= {"handback": "wake", "send-wait": "timed"}
    return choices


POLICIES = st.one_of(st.sampled_from(sorted(PRESETS)), combinations())


class Outside(RuleBasedStateMachine):
    """What may happen to a worker."""

    policies: st.SearchStrategy[Any] = POLICIES
    switches = True
    world: World

    @initialize(
        data=st.data(),
        entries=st.sampled_from([1, 2, 3, 4, 64]),
        multishot=st.booleans(),
        room=st.sampled_from([2, 4]),
        depth=st.sampled_from([1, 2, 5, 64]),
    )
    def begin(self, data: Any, entries: int, multishot: bool, room: int, depth: int) -> None:
        self.world = World(
            data.draw(self.policies, label="policy"),
            sq_entries=entries,
            multishot_recv=multishot,
            max_connections=room,
            max_pipeline=depth,
        )
        self.world.connect()

    def client(self, who: int) -> Client | None:
        clients = self.world.clients
        return clients[who % len(clients)] if clients else None

    # -- clients

    @precondition(lambda self: len(self.world.clients) < MOST_CLIENTS)
    @rule()
    def connect(self) -> None:
        self.world.connect()

    @rule(who=WHO, asks=st.lists(ASKS, min_size=1, max_size=8))
    def request(self, who: int, asks: list[Ask]) -> None:
        if client := self.client(who):
            self.world.request(client, *asks)

    @rule(who=WHO, asks=st.lists(ASKS, max_size=3), size=st.integers(1, 200))
    def request_in_pieces(self, who: int, asks: list[Ask], size: int) -> None:
        if client := self.client(who):
            self.world.ask(client, *asks)
            self.world.send(client, size)

    @precondition(lambda self: self.rare())
    @rule(who=WHO)
    def half_close(self, who: int) -> None:
        if client := self.client(who):
            self.world.half_close(client)

    @precondition(lambda self: self.rare())
    @rule(who=WHO)
    def reset(self, who: int) -> None:
        if client := self.client(who):
            self.world.reset(client)

    def rare(self) -> bool:
        """Only once something is under way: what ends a connection at once shows little."""
        return int(self.world.script.loop().iterations) > 6

    # -- kernel

    @rule(who=WHO, result=SEND_RESULTS)
    def send_completes(self, who: int, result: int | None) -> None:
        if client := self.client(who):
            self.world.complete(client, result)

    @rule(who=WHO, size=st.sampled_from([0, 1, 300, 5000, 1 << 30]))
    def room(self, who: int, size: int) -> None:
        if client := self.client(who):
            self.world.script.room(client.slot, size)

    @rule(who=WHO)
    def lose_recv(self, who: int) -> None:
        if client := self.client(who):
            self.world.lose_recv(client)

    @rule()
    def poke(self) -> None:
        self.world.script.poke()

    @rule(ms=st.sampled_from([1, 10, 100]))
    def advance(self, ms: int) -> None:
        self.world.script.advance(ms * MS)

    # -- handlers

    @rule(who=WHO)
    def handler_begins(self, who: int) -> None:
        if client := self.client(who):
            self.world.begin(client)

    @rule(who=WHO)
    def handler_ends(self, who: int) -> None:
        if client := self.client(who):
            self.world.end(client)

    @rule(who=WHO)
    def handler_runs(self, who: int) -> None:
        if client := self.client(who):
            self.world.handle(client)

    # -- the worker and whoever sets it

    @rule(phases=st.integers(1, 6))
    def step(self, phases: int) -> None:
        for _ in range(phases):
            self.world.step()

    @rule(turns=st.integers(1, 3))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()

    @rule()
    def nothing_happens(self) -> None:
        self.world.freeze()

    @rule(timeout=st.sampled_from([0, 0, 5, 60]))
    def set_write_timeout(self, timeout: int) -> None:
        self.world.set(write_timeout_ms=timeout)

    @rule(depth=st.sampled_from([1, 2, 5, 64]))
    def set_depth(self, depth: int) -> None:
        self.world.set(max_pipeline=depth)

    @precondition(lambda self: self.switches)
    @rule(policy=POLICIES)
    def switch(self, policy: Any) -> None:
        self.world.set(policy)

    @precondition(lambda self: self.rare())
    @rule()
    def stop(self) -> None:
        self.world.stop()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


STEPS = 50


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_under_every_preset(preset: str) -> None:
    chosen = {"policies": st.just(preset), "switches": False}
    run(type(f"Under_{preset}", (Outside,), chosen), 25, STEPS)


def test_under_any_combination_of_choices() -> None:
    run(type("Combined", (Outside,), {"policies": combinations(), "switches": False}), 80, STEPS)


def test_while_the_policy_is_switched() -> None:
    run(Outside, 60, STEPS)

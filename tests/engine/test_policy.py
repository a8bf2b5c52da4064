"""Presets, combinations, and policies written in Python (on the scripted engine)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import PRESETS, ConnView, LoopView, Policy, Script, resolve
from engine.errors import PolicyError, RinglabError, UsageError
from engine.own_policy import inside
from engine.policy import table

DECISIONS = [
    "membership", "timeout", "send-wait", "direct-write", "held", "handback", "idle", "expired",
]  # fmt: skip


def test_the_table_has_every_decision_with_one_shipped_choice() -> None:
    assert list(table()) == DECISIONS
    for decision, choices in table().items():
        assert [choice.shipped for choice in choices.values()].count(True) == 1
        assert all(choice.what and choice.decision == decision for choice in choices.values())
        assert [choice.index for choice in choices.values()] == list(range(len(choices)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_resolve_to_themselves(name: str) -> None:
    resolved = resolve(name)
    assert resolved.name == name
    assert resolved.choices == PRESETS[name].choices
    assert resolve(resolved.choices).name == name
    assert resolve(resolved) == resolved
    assert "\n" not in PRESETS[name].what


def test_presets_are_different() -> None:
    whole = [tuple(preset.choices.items()) for preset in PRESETS.values()]
    assert len(set(whole)) == len(whole)


def test_single_choices() -> None:
    assert resolve("shipped", membership="leave").name == "membership"
    assert resolve("shipped", send_wait="timed", membership="leave").choices["send-wait"] == "timed"
    assert resolve({"send_wait": "timed"}).name == "timed-wait"
    assert resolve("shipped", **{"direct-write": "behind_send"}).name == "order"
    assert resolve("fixed", membership="eager").name == "mirror"
    assert resolve("fixed", handback="wake").name == "fixed+handback=wake"


@given(st.fixed_dictionaries({d: st.sampled_from(sorted(c)) for d, c in table().items()}))
def test_every_combination_has_a_name_that_means_it_or_a_reason(whole: dict[str, str]) -> None:
    if whole["idle"] == "tickless" and (
        whole["handback"] == "no-wake" or whole["send-wait"] == "untimed"
    ):
        with pytest.raises(UsageError, match="make no sense"):
            resolve(whole)
        return
    resolved = resolve(whole)
    assert resolved.choices == whole
    assert resolve(resolved.name).choices == whole


@pytest.mark.parametrize(
    ("policy", "choices", "said"),
    [
        ("fixt", {}, "unknown policy 'fixt'; choose from: fixed,"),
        ("shipped", {"membership": "leaves"}, "unknown choice of membership 'leaves'; choose"),
        ("shipped", {"member": "leave"}, "unknown decision 'member'; choose from: membership,"),
        ("shipped+held", {}, "unknown choice of held ''"),
        ("fixed", {"idle": "tickless"}, "idle=tickless and handback=no-wake make no sense"),
        ("tickless", {"send_wait": "untimed"}, "a wait without a timeout would ignore"),
        (3, {}, "not int"),
    ],
)
def test_refused(policy: str, choices: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(policy, **choices)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# -- policies in Python -------------------------------------------------------------------------


class Patient(Policy):
    """The fixed membership, and a count of what it was asked."""

    base = "shipped"

    def __init__(self) -> None:
        self.seen: list[ConnView] = []

    def membership(self, conn: ConnView) -> bool:
        assert inside()
        self.seen.append(conn)
        return conn.owes_recv or not conn.sending


def stalled(script: Script) -> int:
    """One connection whose SEND waits for its client; its slot."""
    slot = script.accept()
    script.turn()
    script.get(slot, size=4000, route="async")
    script.turn()
    script.room(slot, 1000)
    assert script.handler_begin(slot)
    script.handler_end(slot)
    return slot


def stalled_and_on(script: Script) -> None:
    stalled(script)
    script.turn()


def test_a_policy_of_ones_own_decides() -> None:
    policy = Patient()
    script = Script(policy)
    slot = stalled(script)
    script.iterate()
    assert script.policy.name == "Patient"
    assert script.policy.asks == ["membership"]
    assert script.policy.choices["membership"] == "own"
    assert policy.seen
    assert policy.seen[-1].slot == slot
    assert not script.conn(slot).listed
    assert not inside()


def test_a_class_will_do_and_single_choices_mix_in() -> None:
    resolved = resolve(Patient, held="listed")
    assert resolved.choices["held"] == "listed"
    assert resolve(resolved, send_wait="timed").choices["held"] == "listed"


def test_what_a_policy_raises_reaches_the_user_once_per_call() -> None:
    class Broken(Policy):
        def idle(self, loop: LoopView) -> float:
            raise KeyError("no\nidea")

    script = Script(Broken())
    for _ in range(2):
        with pytest.raises(PolicyError) as caught:
            script.turn()
        assert str(caught.value) == (
            "policy Broken.idle() raised KeyError: 'no\\nidea'; the worker was stopped"
        )
        assert isinstance(caught.value.__cause__, KeyError)


WRONG = [
    ("idle", "soon", "seconds from 0 to 86400, or None"),
    ("idle", -1, "seconds from 0 to 86400"),
    ("idle", float("nan"), "seconds from 0 to 86400"),
    ("idle", True, "seconds from 0 to 86400"),
    ("timeout", 1, "True, False"),
    ("timeout", None, "True, False"),
    ("send_wait", "maybe", "True, False, 'timed', 'untimed'"),
]


@pytest.mark.parametrize(("method", "value", "allowed"), WRONG)
def test_a_wrong_answer_is_named(method: str, value: object, allowed: str) -> None:
    wrong = type("Wrong", (Policy,), {method: lambda self, view: value})
    with pytest.raises(PolicyError) as caught:
        stalled_and_on(Script(wrong()))
    assert str(caught.value).startswith(f"policy Wrong.{method}() returned {value!r}; allowed: ")
    assert allowed in str(caught.value)


ANSWERS = {
    "membership": [True, False, "listed", "leave"],
    "timeout": [True, False],
    "send_wait": [True, False, "untimed", "timed"],
    "direct_write": [True, False, "at-once", "behind-send"],
    "held": ["park", "listed", "unlisted"],
    "handback": [True, False, "wake", "no-wake"],
    "idle": [None, 0, 0.001, 1],
    "expired": ["kernel", "poll"],
}


@pytest.mark.parametrize(
    ("method", "value"), [(m, v) for m, values in ANSWERS.items() for v in values]
)
def test_every_right_answer_is_taken(method: str, value: object) -> None:
    own = type("Own", (Policy,), {method: lambda self, view: value})
    script = Script(own())
    stalled(script)
    for _ in range(3):
        script.turn()
    script.check()


def test_policies_that_cannot_be_meant() -> None:
    class Misspelt(Policy):
        def timeout(self, loop: LoopView) -> bool:
            return False

        def membershp(self, conn: ConnView) -> bool:
            return False

    class Idle(Policy):
        pass

    class NotCallable(Policy):
        idle = 3  # type: ignore[assignment]

    for policy, choices, said in [
        (Idle(), {}, "policy Idle takes no decision"),
        (Misspelt(), {}, r"nobody asks membershp\(\); did you mean membership\(\)"),
        (NotCallable(), {}, "policy NotCallable: idle is not a method"),
        (Patient(), {"membership": "leave"}, "policy Patient decides 'membership'"),
    ]:
        with pytest.raises(UsageError, match=said):
            resolve(policy, **choices)


def test_views_mirror_the_contract() -> None:
    from dataclasses import fields

    from engine.binding import native

    ffi, _ = native()
    for view, struct in ((ConnView, "rl_conn_view"), (LoopView, "rl_loop_view")):
        declared = [name for name, _ in ffi.typeof(struct).fields]
        assert [field.name for field in fields(view)] == declared


# -- the founding fixture -----------------------------------------------------------------------


def test_the_founding_fixture() -> None:
    script = Script("order")
    slot = stalled(script)
    first = script.iterate()
    conn = script.conn(slot)
    assert (conn.sending, conn.write_buf, conn.listed) == (True, 0, True)
    assert first is not None
    assert (first.mode, first.why, first.timeout_ns) == ("untimed", "send", -1)
    assert script.wait() == "asleep"
    script.get(slot, size=24, route="async")
    assert script.turn() == "timeout"
    script.handler_begin(slot)
    script.handler_end(slot)
    spin = script.iterate()
    conn = script.conn(slot)
    assert (conn.sending, conn.listed, conn.write_buf > 24) == (True, True, True)
    assert spin is not None
    assert (spin.mode, spin.why, spin.timeout_ns) == ("timed", "list", 0)


@pytest.mark.parametrize("preset", ["membership", "fixed", "tickless"])
def test_membership_ends_the_spin_and_keeps_every_byte(preset: str) -> None:
    script = Script(preset)
    slot = stalled(script)
    for _ in range(3):
        wait = script.iterate()
        assert wait is not None
        assert wait.can_block
        script.wait()
    whole = len(script.output(slot))
    for _ in itertools.count():
        _, armed = script.pending(slot)
        if armed is None:
            break
        script.send_done(slot, min(armed, 700))
        script.turn()
        whole += min(armed, 700)
    assert not script.conn(slot).sending
    assert len(script.output(slot)) == whole > 4000


def test_errors_are_of_ringlab() -> None:
    script = Script()
    with pytest.raises(RinglabError):
        script.conn(7)
    with pytest.raises(UsageError, match="unknown phase 'nap'"):
        script.phase("nap")
    with pytest.raises(UsageError, match="unknown parameter 'sq_entires'"):
        Script(sq_entires=3)

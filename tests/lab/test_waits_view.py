"""The live view of one way to wait, without a browser: what may be chosen, what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from engine.errors import MachineError, UsageError
from engine.waits import Case, measure
from lab.live import waits_view
from lab.live.waits_view import WaitsView


@pytest.fixture
def view() -> Iterator[WaitsView]:
    """A view that nobody looks at yet."""
    made = WaitsView()
    yield made
    made.close()


def test_a_choice_changes_what_is_measured_and_begins_anew(view: WaitsView) -> None:
    try:
        measure(Case("io_uring_wait_cqe_timeout", 0), 0.001)
    except MachineError as reason:
        pytest.skip(str(reason))
    view.measure()
    facts = view.facts()
    assert len(facts["us"]) == len(facts["switches"]) == 1
    assert facts["us"][0] > 0
    assert ["one wait", "us p50"] in [[name, unit] for name, _, unit in facts["figures"]]
    view.set("timeout_ns", "50000")
    view.set("flags", "defer")
    assert view.case == Case("io_uring_wait_cqe_timeout", 50_000, "defer")
    assert view.facts()["us"] == []


def test_a_timeout_that_a_way_does_not_take_gives_way(view: WaitsView) -> None:
    view.set("timeout_ns", "50000")
    view.set("way", "io_uring_get_events")
    assert view.case.timeout_ns == 0
    view.set("way", "eventfd_workaround")
    assert view.case.timeout_ns == 200_000
    view.set("flags", "coop")
    view.set("way", "timerfd")
    assert view.case.flags == "none"


def test_only_what_fits_the_way_is_offered(view: WaitsView) -> None:
    view.set("way", "epoll_wait")
    controls = {spec["name"]: spec for spec in view.facts()["controls"]}
    assert [choice["label"] for choice in controls["timeout_ns"]["choices"]] == ["0", "1 ms"]
    view.set("way", "timerfd")
    controls = {spec["name"]: spec for spec in view.facts()["controls"]}
    assert [choice["value"] for choice in controls["flags"]["choices"]] == ["none"]


@pytest.mark.parametrize(("name", "value"), [
    ("way", "epol"), ("timeout_ns", "-5"), ("timeout_ns", "x"), ("flags", "sqpoll"), ("cpu", "1"),
])
def test_what_there_is_not_is_refused_and_told(view: WaitsView, name: str, value: str) -> None:
    before = view.case
    with pytest.raises((UsageError, ValueError)):
        view.set(name, value)
    view._received({"kind": "set", "view": "v", "count": 3, "name": name, "value": value})
    assert view.facts()["message"]
    assert view.facts()["heard"] == {"view": "v", "count": 3}
    assert view.case == before


def test_it_measures_while_somebody_looks_and_rests_otherwise() -> None:
    try:
        measure(Case("io_uring_wait_cqe_timeout", 0), 0.001)
    except MachineError as reason:
        pytest.skip(str(reason))
    view = WaitsView()
    threads = threading.active_count()
    try:
        view._received({"kind": "hello", "view": "v"})
        deadline = time.monotonic() + 20
        while not view.facts()["taken"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert view.facts()["taken"]
        view._received({"kind": "hidden", "view": "v"})
        time.sleep(0.6)
        rested = view.facts()["taken"]
        time.sleep(0.6)
        assert view.facts()["taken"] == rested
    finally:
        view.close()
    assert threading.active_count() == threads
    view.close()


def test_a_batch_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_view, "is_batch", lambda: True)
    assert waits_view.show() is None

"""Every counter can be looked up."""

from __future__ import annotations

from engine.counters import flat_dtype
from engine.meanings import meanings


def test_every_flat_counter_has_an_entry() -> None:
    assert set(flat_dtype().names or ()) <= set(meanings())


def test_meanings_are_those_of_the_contract() -> None:
    said = meanings()
    assert said["why_list"] == "waits because: the dirty list is not empty: timeout zero"
    assert said["sending"] == "gauge: connections with a SEND in flight"
    assert said["bytes_sent"] == "by ring SENDs"

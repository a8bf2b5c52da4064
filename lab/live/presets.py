"""The arms of each case, one click each, with a sentence on what to watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lab.experiment import Experiment
from lab.parameters import Value

# What the panel sets for an arm; what is not named keeps the value it has.
_SETS: dict[str, dict[str, Value]] = {
    "sync": {"route": "sync", "depth": 1, "handler_ms": 0},
    "async": {"route": "async", "depth": 1, "handler_ms": 0},
    "async+pipelined": {"route": "async", "depth": 2, "handler_ms": 0},
    "async+poked": {"route": "async", "depth": 1, "handler_ms": 0},
    "held-completion": {"route": "async", "depth": 1, "handler_ms": 1000},
}
_WATCH = {
    "sync": "Under shipped the worker parks: iterations fall to nothing, the list shows one member "
            "and the wait has no timeout. Not healthy: press poke, and it spins.",
    "async": "Under shipped the same parked worker: a SEND in flight, a listed connection, no CPU. "
             "It looks quiet, but stop is not heard. Press poke, and it spins.",
    "async+pipelined": "Under shipped the iterations jump by a factor of a thousand and the reason "
                       "of every wait is the list. Set membership to leave, and it sleeps.",
    "async+poked": "One small request of somebody else wakes the parked worker, and from then on "
                   "it spins. Press read all: it comes to rest.",
    "held-completion": "For a second a handler holds its connection while its earlier SEND "
                       "completes. Under held-listed the worker spins for that second; under "
                       "shipped it is blocked, and others wait.",
}


@dataclass(frozen=True)
class Preset:
    """One arm of one case."""

    case: str
    arm: str
    what: str
    watch: str
    sets: Mapping[str, Value] = field(default_factory=dict)


def presets(experiment: Experiment) -> list[Preset]:
    """Those of one experiment, in its order."""
    return [
        Preset(experiment.name, arm.name, arm.what, _WATCH.get(arm.name, arm.what),
               _SETS.get(arm.name, {}))
        for arm in experiment.arms
    ]


def arm_of(route: str, depth: int, poked: bool, held: bool) -> str | None:
    """The arm that such settings are; None where the case has none."""
    if held:
        return "held-completion"
    if route == "sync":
        return "sync" if depth == 1 and not poked else None
    if depth > 1:
        return "async+pipelined"
    return "async+poked" if poked else "async"

"""What can be set in the panel, derived from the definitions that everything else derives from.

Numbers come from the experiment's Parameters (range, unit, help) and from the engine's settings;
decisions and their choices from the engine's own table. Nothing here repeats a range. Which of them
a case offers, and under which label, its description says (:mod:`lab.live.case`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.decisions import OWN, Decisions, method_name
from engine.policy import RING
from lab.parameters import Parameter, Parameters, Value

ITERATION, REQUEST, CONNECTION = "next iteration", "next request", "next connection"
POLICY = "policy"

# What the decisions of the ring server are about.
RING_QUESTIONS = {
    "membership": "a connection whose SEND is in flight",
    "timeout": "a list that is not empty",
    "send-wait": "the wait after preparing a SEND",
    "direct-write": "a handler's write during a SEND",
    "held": "a SEND completes under its handler's lock",
    "handback": "a handler hands a connection back",
    "idle": "nothing to do",
    "expired": "a wait with timeout zero",
}


@dataclass(frozen=True)
class Control:
    """A number or a word of the panel: its definition, label, and what it needs to take effect.

    ``arms`` are those in which it means something; empty: in all.
    """

    parameter: Parameter
    label: str
    effect: str
    arms: tuple[str, ...] = ()

    def spec(self, value: Value) -> dict[str, Any]:
        """What the page needs to draw it."""
        one = self.parameter
        out: dict[str, Any] = {
            "name": one.name, "label": self.label, "effect": self.effect, "unit": one.unit,
            "help": one.help, "allowed": one.allowed, "value": value, "arms": list(self.arms),
        }
        if one.choices:
            out["choices"] = [{"value": str(choice), "label": str(choice), "what": ""}
                              for choice in one.choices]
        else:
            out["stops"] = stops(one)
        return out


def stops(parameter: Parameter) -> list[float]:
    """Values that a slider steps through: every one of a short range, else a few per decade."""
    low, high = float(parameter.low or 0), float(parameter.high or 0)
    if high - low <= 16:
        return [low + step for step in range(int(high - low) + 1)]
    if parameter.unit == "bytes":
        found = {float(2**power) for power in range(31)}
    else:
        found = {mantissa * 10.0**power for power in range(-3, 7) for mantissa in (1, 2, 5)}
    if parameter.kind is int:
        found = {one for one in found if one >= 1}
    found = {one for one in found if low <= one <= high} | {low, high, float(parameter.default)}
    return sorted(found)


def policy_specs(
    choices: Mapping[str, str], name: str, of: Decisions = RING,
    questions: Mapping[str, str] = RING_QUESTIONS,
) -> list[dict[str, Any]]:
    """The choice of a preset, and of every single decision, with what was shipped marked."""
    presets = [
        {"value": preset.name, "label": preset.name, "what": preset.what}
        for preset in of.presets.values()
    ]
    specs: list[dict[str, Any]] = [{
        "name": POLICY, "label": "policy", "effect": ITERATION, "value": name, "choices": presets,
        "help": "a named combination of the decisions below",
    }]
    for decision, known in of.table().items():
        options = [
            {"value": choice.name, "what": choice.what,
             "label": choice.name + (" (shipped)" if choice.shipped else "")}
            for choice in known.values()
        ]
        if choices.get(decision) == OWN:
            options.append({"value": OWN, "label": "own (Python)", "what": "decided in Python"})
        specs.append({
            "name": method_name(decision), "label": decision, "effect": ITERATION,
            "value": choices.get(decision, ""), "choices": options,
            "help": questions.get(decision, ""),
        })
    return specs


def as_parameters(values: Mapping[str, Value], known: Parameters) -> dict[str, Value]:
    """Of the panel's values those that the experiment has; UsageError for one that it refuses, as
    the panel's own ranges are wider."""
    return {name: known[name].check(value) for name, value in values.items() if name in known}


def command_line(
    experiment: str, arm: str, policy: str, values: Mapping[str, Value],
    defaults: Mapping[str, Value],
) -> str:
    """The ``ringlab run`` line that repeats a measurement."""
    changed = [f"-p {shlex.quote(f'{name}={value}')}" for name, value in values.items()
               if defaults.get(name) != value]
    return " ".join([f"ringlab run {experiment} --arm '{arm}' --policy '{policy}'", *changed])

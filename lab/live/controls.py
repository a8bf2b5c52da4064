"""What can be set in the panel, derived from the definitions that everything else derives from.

Numbers come from the experiment's Parameters (range, unit, help) and from the engine's settings;
decisions and their choices from the engine's own table. Nothing here repeats a range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine import PRESETS
from engine.errors import UsageError
from engine.parameters import LIVE, Range
from engine.policy import method_name, table
from lab.choreography import MAX_CLIENTS
from lab.parameters import Parameter, Parameters, Value

ITERATION, REQUEST, CONNECTION = "next iteration", "next request", "next connection"
POLICY = "policy"
OWN = "own"

# For each control: its name in the experiment, its label, when the engine takes it up.
_FROM_EXPERIMENT = (
    ("rcvbuf", "client SO_RCVBUF", CONNECTION),
    ("response_size", "response size", REQUEST),
    ("depth", "pipelining depth", REQUEST),
    ("sndbuf", "server SO_SNDBUF", CONNECTION),
    ("handler_ms", "handler time", REQUEST),
    ("wait_cap_ms", "longest sleep (wait cap)", ITERATION),
)
# The experiment's name for a setting of the server, where they differ.
SERVER_NAMES = {"sndbuf": "so_sndbuf", "handler_ms": "handler_ms", "wait_cap_ms": "wait_cap_ms",
                "response_size": "response_size", "route": "route"}
_QUESTIONS = {
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
    """A number or a word of the panel: its definition, label, and what it needs to take effect."""

    parameter: Parameter
    label: str
    effect: str

    def spec(self, value: Value) -> dict[str, Any]:
        """What the page needs to draw it."""
        one = self.parameter
        out: dict[str, Any] = {
            "name": one.name, "label": self.label, "effect": self.effect, "unit": one.unit,
            "help": one.help, "allowed": one.allowed, "value": value,
        }
        if one.choices:
            out["choices"] = [{"value": str(choice), "label": str(choice), "what": ""}
                              for choice in one.choices]
        else:
            out["stops"] = stops(one)
        return out


def panel_controls(parameters: Parameters) -> dict[str, Control]:
    """The controls of an experiment's panel, by name.

    A single request is a depth of one, and a handler may take no time: the ranges of the arms
    are wider here at their low end.
    """
    own: dict[str, dict[str, Any]] = {
        "depth": {"low": 1, "default": 1, "help": "requests outstanding; the further ones are sent "
                                                  "once the first SEND waits"},
        "handler_ms": {"low": 0, "default": 0, "help": "how long a handler runs"},
    }
    controls = {
        name: Control(replace(parameters[name], **own.get(name, {})), label, effect)
        for name, label, effect in _FROM_EXPERIMENT if name in parameters
    }
    clients = Parameter("clients", int, 1, "clients", 1, MAX_CLIENTS,
                        help="connections that ask and then do not read")
    route = Parameter("route", str, "async", choices=("sync", "async"),
                      help="sync: the handler runs on the worker; async: on a thread of its own")
    return {
        "route": Control(route, "route", REQUEST),
        **controls,
        "clients": Control(clients, "stalled clients", CONNECTION),
    }


def refuse_other(experiment: str, parameters: Parameters) -> None:
    """UsageError for an experiment whose parameters are not those of the ring server's clients."""
    missing = [name for name, _, _ in _FROM_EXPERIMENT if name not in parameters]
    if missing:
        raise UsageError(f"the live panel drives the ring server and its clients; the experiment "
                         f"'{experiment}' has no {', '.join(missing)} (dirty-list has them)")


def server_value(name: str, value: Value) -> tuple[str, Value] | None:
    """The server's setting for a control; None for one that belongs to the clients."""
    setting = SERVER_NAMES.get(name)
    if setting is None:
        return None
    entry = LIVE[setting]
    if isinstance(entry, Range) and isinstance(value, (int, float)) and not entry.real:
        return setting, int(value)
    return setting, value


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


def policy_specs(choices: Mapping[str, str], name: str) -> list[dict[str, Any]]:
    """The choice of a preset, and of every single decision, with what was shipped marked."""
    presets = [
        {"value": preset.name, "label": preset.name, "what": preset.what}
        for preset in PRESETS.values()
    ]
    specs: list[dict[str, Any]] = [{
        "name": POLICY, "label": "policy", "effect": ITERATION, "value": name, "choices": presets,
        "help": "a named combination of the decisions below",
    }]
    for decision, known in table().items():
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
            "help": _QUESTIONS.get(decision, ""),
        })
    return specs


def as_parameters(values: Mapping[str, Value], known: Parameters) -> dict[str, Value]:
    """Of the panel's values those that the experiment has and allows as they are."""
    out: dict[str, Value] = {}
    for name, value in values.items():
        if name not in known:
            continue
        one = known[name]
        if one.low is not None and isinstance(value, (int, float)) and value < one.low:
            continue  # a depth of one, a handler that takes no time: not of an arm that needs them
        out[name] = one.check(value)
    return out


def command_line(
    experiment: str, arm: str, policy: str, values: Mapping[str, Value],
    defaults: Mapping[str, Value],
) -> str:
    """The ``ringlab run`` line that repeats a measurement."""
    changed = [f"-p {name}={value}" for name, value in values.items()
               if defaults.get(name) != value]
    return " ".join([f"ringlab run {experiment} --arm '{arm}' --policy '{policy}'", *changed])


def labels(names: Sequence[str], controls: Mapping[str, Control]) -> str:
    """Names of controls as a person reads them."""
    return ", ".join(controls[name].label if name in controls else name for name in names)

"""The native engines and their Python face.

``import engine`` is cheap: NumPy and the native module are loaded when a name below is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError, MachineError, PolicyError, RinglabError, UsageError

if TYPE_CHECKING:
    from engine.counters import flatten, flatten_array
    from engine.policy import PRESETS, Policy, ResolvedPolicy, resolve
    from engine.relay import SpliceRelay
    from engine.relay_policy import RelayPolicy
    from engine.relay_script import RelayScript
    from engine.relay_views import RelayLoopView, SessionView
    from engine.script import Script
    from engine.server import RingServer
    from engine.views import ConnView, LoopView, RingInfo, Wait

__all__ = [
    "PRESETS",
    "ConnView",
    "EngineError",
    "LoopView",
    "MachineError",
    "Policy",
    "PolicyError",
    "RelayLoopView",
    "RelayPolicy",
    "RelayScript",
    "ResolvedPolicy",
    "RingInfo",
    "RingServer",
    "RinglabError",
    "Script",
    "SessionView",
    "SpliceRelay",
    "UsageError",
    "Wait",
    "flatten",
    "flatten_array",
    "resolve",
]

_HOMES = {
    "PRESETS": "policy",
    "Policy": "policy",
    "ResolvedPolicy": "policy",
    "resolve": "policy",
    "RingServer": "server",
    "Script": "script",
    "SpliceRelay": "relay",
    "RelayPolicy": "relay_policy",
    "RelayScript": "relay_script",
    "RelayLoopView": "relay_views",
    "SessionView": "relay_views",
    "ConnView": "views",
    "LoopView": "views",
    "RingInfo": "views",
    "Wait": "views",
    "flatten": "counters",
    "flatten_array": "counters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

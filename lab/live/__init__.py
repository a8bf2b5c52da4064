"""The live lab: ``lab.live()`` is the panel in one line, ``lab.live.Stepper`` the loop by hand.

The package itself can be called, so that what a person types is what it is called. Importing it
loads neither widgets nor plots.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.live.opening import show
    from lab.live.panel import LivePanel
    from lab.live.stepper import Stepper

__all__ = ["LivePanel", "Stepper", "show"]

_HOMES = {"LivePanel": "panel", "Stepper": "stepper", "show": "opening"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lab.live' has no attribute '{name}'")
    module = importlib.import_module(f"lab.live.{_HOMES[name]}")
    return getattr(module, name)


class _Callable(types.ModuleType):
    """A module that does its one thing when it is called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from lab.live.opening import show

        return show(*args, **options)


sys.modules[__name__].__class__ = _Callable

"""What a notebook imports: experiments, clients, measurement, runs, plots, batch, command line.

``lab.live()`` opens the live panel, ``lab.Stepper()`` the loop by hand; ``import lab`` loads
neither until they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_LIVE = ("LivePanel", "Stepper")


def __getattr__(name: str) -> Any:
    if name == "live":
        return importlib.import_module("lab.live")
    if name in _LIVE:
        return getattr(importlib.import_module("lab.live"), name)
    raise AttributeError(f"module 'lab' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), "live", *_LIVE})

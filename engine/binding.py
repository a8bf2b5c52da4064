"""The one place that loads the native module, and small helpers to read its declarations."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from engine.errors import MachineError


@cache
def native() -> tuple[Any, Any]:
    """``(ffi, lib)`` of ``engine._native``.

    Raises MachineError, in one line, when the module is not built or cannot be loaded.
    """
    try:
        module = importlib.import_module("engine._native")
    except ModuleNotFoundError as error:
        if error.name not in ("engine._native", "_cffi_backend"):
            raise
        raise MachineError("the native engine is not built; build it with: make setup") from None
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MachineError(
            f"the native engine does not load ({reason}); build it again with: make setup"
        ) from None
    return module.ffi, module.lib


@cache
def words(enum: str) -> tuple[str, ...]:
    """The words of a C enum, by value: ``words("rl_mode")`` is ``("submit", "skip", ...)``.

    The part of the names that all share (``RL_MODE_``) and the count at the end (``RL_MODES``) are
    left out; underscores become hyphens.
    """
    ffi, _ = native()
    relements: dict[str, int] = ffi.typeof(f"enum {enum}").relements
    prefix = enum.upper() + "_"
    if not any(name.startswith(prefix) for name in relements):
        # The decisions and setting keys spell their enum in part only: RL_MEMBERSHIP, RL_SET_...
        prefix = "RL_SET_" if enum == "rl_setting" else "RL_"
    count = {enum.upper() + "S", "RL_SETTINGS"}
    named = {value: name for name, value in relements.items() if name not in count}
    return tuple(
        named[value].removeprefix(prefix).lower().replace("_", "-") for value in sorted(named)
    )


def text(pointer: Any) -> str:
    """The Python string of a C string that the engine owns."""
    ffi, _ = native()
    return str(ffi.string(pointer).decode())

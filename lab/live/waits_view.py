"""A way to wait, live: choose way, timeout and ring flags, and see its cost move."""

from __future__ import annotations

from typing import Any

from lab.mode import is_batch


def show() -> Any:
    """The live view; None in a batch, where nobody could choose anything."""
    if is_batch():
        return None
    raise NotImplementedError

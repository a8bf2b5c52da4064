"""``lab.live()``: the whole thing in one line, and what it replaces when its cell is run again."""

from __future__ import annotations

import sys
from typing import Any

from engine.base import Engine
from engine.errors import MachineError
from lab.mode import is_batch


def show(what: Engine | str | None = None, **options: Any) -> Any:
    """The live panel of an engine of yours, or of a case (``"splice"``) with one of its own.

    ``what`` None is the case dirty-list; ``options`` as of LivePanel. In a batch nothing is shown
    and None returned, so that the same notebook serves both. Where io_uring is not allowed, says so
    in one line and returns the stepper, which needs none.
    """
    from lab.live.case import case_for
    from lab.live.panel import LivePanel

    engine = None if isinstance(what, str) else what
    if isinstance(what, str):
        options["experiment"] = what
    described = case_for(engine, options.get("experiment"))
    if is_batch():
        return None
    try:
        return LivePanel(engine, **options)
    except MachineError as error:
        if described.by_hand is None:
            raise
        print(f"No live panel: {error}. Here is the stepper: the same loop, by hand.")
        return described.by_hand(options.get("policy", described.policy))


def this_cell() -> tuple[str, str] | None:
    """The cell that runs now and which run of it this is; None outside a notebook that tells."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    try:
        parent = kernel.get_parent("shell")
        return str(parent["metadata"]["cellId"]), str(parent["header"]["msg_id"])
    except (KeyError, TypeError, LookupError):
        return None


def replaced(other: tuple[str, str] | None, cell: tuple[str, str] | None) -> bool:
    """Whether ``cell`` is a later run of the cell that ``other`` was."""
    return other is not None and cell is not None and other[0] == cell[0] and other[1] != cell[1]

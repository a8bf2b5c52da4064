"""``lab.live()``: the whole thing in one line, and what it replaces when its cell is run again."""

from __future__ import annotations

import sys
from typing import Any

from engine import RingServer
from engine.errors import MachineError
from lab.mode import is_batch


def show(server: RingServer | None = None, **options: Any) -> Any:
    """The live panel of ``server``, or of a server of its own; ``options`` as of LivePanel.

    In a batch nothing is shown and None returned, so that the same notebook serves both. Where
    io_uring is not allowed, says so in one line and returns the stepper, which needs none.
    """
    if is_batch():
        return None
    from lab.live.panel import LivePanel

    try:
        return LivePanel(server, **options)
    except MachineError as error:
        from lab.live.stepper import Stepper

        print(f"No live panel: {error}. Here is the stepper: the same loop, by hand.")
        policy = options.get("policy", "shipped")
        return Stepper(policy if isinstance(policy, str) else "shipped")


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

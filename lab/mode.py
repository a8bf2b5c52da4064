"""Whether anybody is watching: the one place that decides between live and static output."""

from __future__ import annotations

import os
import sys

# Set to 1 by whoever executes a notebook unattended, and to 0 by whoever wants the live panel in
# a front end that this module does not recognise.
BATCH = "RINGLAB_BATCH"
# jupyter_server names the session of every kernel that a browser opened; VS Code names itself.
_FRONT_ENDS = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD")


def is_batch() -> bool:
    """True when output must be complete without a kernel, a browser session or a network.

    A word in the environment decides where there is one. Otherwise a kernel that no front end has
    opened (papermill, nbconvert --execute) is a batch, and so is a plain interpreter.
    """
    asked = os.environ.get(BATCH, "").strip().lower()
    if asked:
        return asked not in {"0", "no", "false", "off"}
    return not (in_kernel() and any(os.environ.get(name) for name in _FRONT_ENDS))


def in_kernel() -> bool:
    """True inside a Jupyter kernel, the place where ``display`` reaches a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")

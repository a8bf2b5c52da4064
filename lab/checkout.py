"""The checkout of ringlab that the working folder is in: where runs and reports go by default."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.errors import MachineError


def working_folder() -> Path:
    """The working folder; MachineError when it was removed meanwhile."""
    try:
        return Path.cwd()
    except OSError as error:
        raise MachineError(f"the working folder cannot be used: {error.strerror}; change to one "
                           "that is there") from None


def checkout() -> Path | None:
    """The checkout, or None outside of any."""
    here = working_folder()
    for folder in (here, *here.parents):
        with contextlib.suppress(OSError):  # one that may not be looked into is none
            if (folder / "environment.yml").is_file() and (folder / "lab").is_dir():
                return folder
    return None

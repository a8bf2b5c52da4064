"""Folders that are gone when their block is left; and, at the next use, when it never was left."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

_PROCESSES = Path("/proc")


def scratch(prefix: str, folder: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder ``PREFIXpid-...`` of this process in ``folder`` (None: that for temporary files).

    First removes those of the same prefix whose process has gone without doing it: killed, or with
    the machine. Another user's are let alone.
    """
    within = Path(tempfile.gettempdir()) if folder is None else folder
    sweep(prefix, within)
    return tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=within)


def sweep(prefix: str, folder: Path) -> None:
    """Removes what is left there of processes that are gone."""
    for left in folder.glob(f"{prefix}*-*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if not owner.isdigit() or (_PROCESSES / owner).exists():
            continue
        with contextlib.suppress(OSError):
            if left.lstat().st_uid == os.getuid():
                shutil.rmtree(left, ignore_errors=True)

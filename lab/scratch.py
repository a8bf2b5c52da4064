"""Folders that are gone when their block is left; and, at the next use, when it never was left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

_PROCESSES = Path("/proc")


class Scratch(tempfile.TemporaryDirectory[str]):
    """A folder ``PREFIXpid-...`` that is locked as long as this process has it."""

    def __init__(self, prefix: str, folder: Path) -> None:
        super().__init__(prefix=f"{prefix}{os.getpid()}-", dir=folder)
        handle = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._unlock = weakref.finalize(self, os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        """Removes it; harmless when repeated."""
        super().cleanup()
        self._unlock()


def scratch(prefix: str, folder: Path | None = None) -> Scratch:
    """A folder of this process in ``folder`` (None: that for temporary files).

    First removes those of the same prefix whose process has gone without doing it: killed, or with
    the machine. Another user's are let alone.
    """
    within = Path(tempfile.gettempdir()) if folder is None else folder
    sweep(prefix, within)
    return Scratch(prefix, within)


def sweep(prefix: str, folder: Path) -> None:
    """Removes what is left there of processes that are gone.

    One that cannot be seen from here, as in another container, still holds its folder's lock.
    """
    for left in folder.glob(f"{prefix}*-*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if not owner.isdigit() or (_PROCESSES / owner).exists():
            continue
        with contextlib.suppress(OSError):
            if left.lstat().st_uid == os.getuid():
                with locked(left, wait=False) as gone:
                    if gone:
                        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a folder's lock, which the kernel drops when a writer dies; False if it is not to be had
    (another holds it and ``wait`` is off, or it is no longer there).
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            mine = os.path.samestat(os.fstat(handle), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        yield mine
    finally:
        os.close(handle)

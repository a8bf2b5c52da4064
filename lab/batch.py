"""Executing a notebook unattended: papermill, in a kernel of this very interpreter.

Imports papermill, which takes two seconds; import this module when a report is really made.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import papermill
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.log import logger

from lab import mode
from lab.progress import NOTE_VARIABLE, Progress
from lab.scratch import scratch

KERNEL = "ringlab"
_STARTUP_S = 60
_NOTE_S = 0.5


def execute(
    source: Path, target: Path, parameters: Mapping[str, object], progress: Progress
) -> Any:
    """Run ``source`` with ``parameters`` and write what came out to ``target``, cell by cell.

    Raises what papermill raises; a cell's error is a PapermillExecutionError, and ``target`` then
    holds the notebook up to that cell, with papermill's banner.
    """
    papermill_engines.register(KERNEL, _Engine)
    # What papermill would warn about has been checked, and paths are for us to announce.
    logger.setLevel(logging.ERROR)
    with scratch("ringlab-kernel-") as name:
        folder = Path(name)
        note = folder / "progress"
        specs = _kernel_spec(folder, {mode.BATCH: "1", NOTE_VARIABLE: str(note)})
        with _following(note, progress), _heard(folder / "stderr") as stderr:
            return papermill.execute_notebook(
                source, target, parameters=dict(parameters), engine_name=KERNEL,
                kernel_name=KERNEL, language="python", progress_bar=False,
                start_timeout=_STARTUP_S, specs=specs, folder=folder, stderr=stderr,
                progress=progress,
            )


def parameters_of(source: Path) -> dict[str, str]:
    """Names in the notebook's parameters cell, each with the type that its annotation gives."""
    logger.setLevel(logging.ERROR)
    found = papermill.inspect_notebook(str(source))
    return {name: str(entry["inferred_type_name"]) for name, entry in found.items()}


def _kernel_spec(folder: Path, environment: Mapping[str, str]) -> KernelSpecManager:
    """A kernel that is this interpreter, whatever kernels are registered on the machine."""
    home = folder / KERNEL
    home.mkdir()
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
                 "--log-level=ERROR"],
        "display_name": "ringlab", "language": "python", "env": dict(environment),
    }
    (home / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    return KernelSpecManager(kernel_dirs=[str(folder)], ensure_native_kernel=False)


@contextmanager
def _following(note: Path, progress: Progress) -> Iterator[None]:
    """Meanwhile, whatever the kernel notes of its own progress is told as a step of no count."""
    over = threading.Event()

    def follow() -> None:
        told = ""
        while not over.wait(_NOTE_S):
            try:
                text = note.read_text(encoding="utf-8")
            except OSError:
                continue
            if text and text != told:
                told = text
                progress.step(text, 0)

    thread = threading.Thread(target=follow, name="progress-note", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _heard(path: Path) -> Iterator[IO[bytes]]:
    """A file for what the kernel's process says on stderr; told on ours unless it was interrupted.

    What a cell writes is not there but in the notebook. A kernel that is interrupted may still be
    at a reply as its sockets close, and complains of that at length.
    """
    with path.open("wb") as file:
        try:
            yield file
        except KeyboardInterrupt:
            raise
        except BaseException:
            _tell(path)
            raise
        _tell(path)


def _tell(path: Path) -> None:
    sys.stderr.write(path.read_text(encoding="utf-8", errors="replace"))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """What ends a kernel is bounded in time; a Ctrl-C meanwhile counts at its end, and once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number))
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _cancel_tasks() -> None:
    """Ctrl-C came in the middle of the event loop and left there what it was waiting for.

    That would go on as the kernel is ended, on sockets that are being closed.
    """
    loop = ensure_event_loop()
    if loop.is_running():
        return
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:  # nobody else will ever ask what became of them
        loop.run_until_complete(asyncio.wait(left))
        for task in left:
            if not task.cancelled():
                task.exception()


class _Client(PapermillNotebookClient):  # type: ignore[misc]
    """papermill's client, with a kernel from our own list of kernels; its files in ``folder``."""

    def __init__(
        self, nb_man: Any, specs: KernelSpecManager, folder: Path, **options: Any
    ) -> None:
        super().__init__(nb_man, **options)
        self._specs = specs
        self._folder = folder

    def create_kernel_manager(self) -> Any:
        self.km = AsyncKernelManager(
            kernel_name=KERNEL, kernel_spec_manager=self._specs,
            connection_file=str(self._folder / "connection.json"),
        )
        return self.km

    def execute(self, **options: Any) -> Any:
        try:
            return super().execute(**options)
        finally:
            manager = self.km
            if manager and manager.has_kernel:  # interrupted while the kernel came up
                self._cleanup_kernel()

    def _cleanup_kernel(self) -> None:
        with _interrupts_held():
            if isinstance(sys.exception(), KeyboardInterrupt):
                _cancel_tasks()
            super()._cleanup_kernel()


class _Engine(NBClientEngine):  # type: ignore[misc]
    """papermill's engine, telling which cell it is at."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, specs: KernelSpecManager, folder: Path,
        stderr: IO[bytes], progress: Progress, start_timeout: int = _STARTUP_S, **_: Any,
    ) -> Any:
        names = _headings(nb_man.nb.cells)
        begin, complete = nb_man.cell_start, nb_man.cell_complete

        def cell_start(cell: Any, index: int, **options: Any) -> None:
            if cell.cell_type == "code":
                progress.step(names[index], 0)
            begin(cell, index, **options)

        def cell_complete(cell: Any, cell_index: int, **options: Any) -> None:
            complete(cell, cell_index=cell_index, **options)
            progress.step(names[cell_index])

        nb_man.cell_start, nb_man.cell_complete = cell_start, cell_complete
        progress.begin(len(nb_man.nb.cells), "cells")
        try:
            client = _Client(
                nb_man, specs, folder, kernel_name=kernel_name, timeout=None, log=logger,
                startup_timeout=start_timeout, store_widget_state=False,
            )
            return client.execute(stderr=stderr)
        finally:
            progress.end()


def _headings(cells: list[Any]) -> list[str]:
    """For each cell, the nearest heading above it: what a reader would call that part."""
    name, names = "start", []
    for cell in cells:
        if cell.cell_type == "markdown":
            titles = [line for line in cell.source.splitlines() if line.startswith("#")]
            name = titles[-1].lstrip("# ") if titles else name
        names.append(name)
    return names

"""Saying how far a long piece of work has come, in a terminal, in a notebook, or not at all.

Whoever works calls ``begin``, ``step`` and ``end`` and knows nothing of where it shows. Everything
goes to stderr or to the cell's output, never to stdout, which belongs to results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import mode

# Work that ends sooner needs no progress.
DELAY_S = 2.0
# Names the file of a NoteProgress.
NOTE_VARIABLE = "RINGLAB_PROGRESS_NOTE"


# Steps of these names differ so much in length that the time left cannot be told from their count.
UNEVEN = {"cells"}


class Progress:
    """Says nothing; the base of those that do."""

    def begin(self, total: int, what: str) -> None:
        """``total`` steps of ``what`` are ahead."""

    def step(self, done: str, count: int = 1) -> None:
        """``count`` more steps are behind; ``done`` names them, or, with a count of 0, what begins.
        """

    def end(self) -> None:
        """Nothing more follows; harmless when repeated."""


class TerminalProgress(Progress):
    """A bar on stderr."""

    def __init__(self) -> None:
        self._bar: Any = None

    def begin(self, total: int, what: str) -> None:
        from tqdm import tqdm

        self.end()
        self._bar = tqdm(
            total=total, desc=what, file=sys.stderr, delay=DELAY_S, leave=False, mininterval=0.2,
            dynamic_ncols=True, bar_format="{desc} {n}/{total} |{bar:20}| "
            + ("" if what in UNEVEN else "{remaining} ") + "{postfix}",
        )

    def step(self, done: str, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(done, refresh=False)
            self._bar.update(count)
            if not count and sys.stderr.isatty():
                self._bar.refresh()  # tqdm takes a step of no count for no news

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LineProgress(Progress):
    """A line of text on stderr now and then, for a log; and one as the first step begins."""

    every_s = 10.0

    def __init__(self) -> None:
        self._begun = self._shown = 0.0
        self._total = self._done = 0
        self._what = ""
        self._first = True

    def begin(self, total: int, what: str) -> None:
        self._total, self._done, self._what = total, 0, what
        self._begun = self._shown = time.monotonic()
        self._first = True

    def step(self, done: str, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        due = self._due(now, count)
        # Whoever waits for the first step, however long it takes, is to know what for.
        first, self._first = self._first and not count, False
        if not first and not due:
            return
        self._shown = now
        left = ""
        if self._done and self._what not in UNEVEN:
            left = f", {(now - self._begun) / self._done * (self._total - self._done):.0f} s left"
        self._show(f"{self._what}: {self._done} of {self._total}{left} ({done})")

    def _due(self, now: float, count: int) -> bool:
        return now - self._begun >= DELAY_S and now - self._shown >= self.every_s

    def _show(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class NotebookProgress(LineProgress):
    """One line of text in the cell's output, rewritten in place: no widget to outlive it."""

    every_s = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._ended, self._slow = 0.0, False

    def begin(self, total: int, what: str) -> None:
        super().begin(total, what)
        self._ended = self._begun

    def _due(self, now: float, count: int) -> bool:
        # After a step that took its time the next one stands there at once, under its own name.
        slow = now - self._ended >= self.every_s
        if count:
            self._ended, self._slow = now, slow
        return now - self._shown >= self.every_s or (not count and self._slow)

    def end(self) -> None:
        if self._handle is not None:
            self._show(f"{self._what}: {self._done} of {self._total} done")
            self._handle = None

    def _show(self, line: str) -> None:
        from IPython import display as front_end

        display: Any = front_end.display
        # A bundle with text alone: the same in every front end, and in a saved notebook.
        bundle = {"text/plain": line}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class NoteProgress(Progress):
    """One line kept in a file, for a process that waits for this one and has somewhere to show it.

    A report's notebook works in a kernel, whose every word would end up in the notebook.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._total = self._done = 0
        self._what = ""

    def begin(self, total: int, what: str) -> None:
        self._total, self._done, self._what = total, 0, what

    def step(self, done: str, count: int = 1) -> None:
        self._done += count
        try:
            self._path.write_text(f"{self._what} {self._done} of {self._total}, {done}")
        except OSError:
            pass  # a full disk is the run's to report, not ours

    def end(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            pass


def for_command() -> Progress:
    """The one for a command line: a bar where stderr is a terminal, else lines for its log."""
    return TerminalProgress() if sys.stderr.isatty() else LineProgress()


def choose() -> Progress:
    """The one that fits where this runs: notebook, terminal, a report's kernel, or none."""
    note = os.environ.get(NOTE_VARIABLE)
    if note:
        return NoteProgress(Path(note))
    if mode.in_kernel():
        return Progress() if mode.is_batch() else NotebookProgress()
    return TerminalProgress() if sys.stderr.isatty() else Progress()


@contextmanager
def shown(progress: Progress, total: int, what: str) -> Iterator[Progress]:
    """``progress`` between ``begin`` and ``end``, whatever happens in the block."""
    progress.begin(total, what)
    try:
        yield progress
    finally:
        progress.end()

"""Dark windows: while a run measures, whatever streams to a browser from this process holds still.

What streams registers itself here; a run does not know what that is. It costs the run nothing where
nothing streams, and a batch never imports what does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol


class Streams(Protocol):
    """Something that can hold still for a while, and lose nothing by it."""

    def dark(self) -> AbstractContextManager[None]:
        """Nothing is streamed inside the block."""
        ...


_OPEN: weakref.WeakSet[Streams] = weakref.WeakSet()


def register(source: Streams) -> None:
    """Have it hold still during runs, for as long as somebody else keeps it alive."""
    _OPEN.add(source)


@contextmanager
def window() -> Iterator[None]:
    """Everything registered holds still inside the block."""
    with ExitStack() as stack:
        for source in list(_OPEN):
            stack.enter_context(source.dark())
        yield

"""A run holds still what streams, and lets it go on whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab import dark


class Stream:
    def __init__(self) -> None:
        self.still = 0

    @contextmanager
    def dark(self) -> Iterator[None]:
        self.still += 1
        try:
            yield
        finally:
            self.still -= 1


def test_what_is_registered_holds_still_and_goes_on() -> None:
    stream = Stream()
    dark.register(stream)
    with dark.window():
        assert stream.still == 1
    with pytest.raises(ValueError, match="measured"), dark.window():
        raise ValueError("measured")
    assert stream.still == 0


def test_a_closed_stream_is_forgotten() -> None:
    gone, kept = Stream(), Stream()
    dark.register(gone)
    dark.register(kept)
    del gone
    with dark.window():
        assert kept.still == 1

"""The typed errors of ringlab, each one clear line; the one place that makes them from errno."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
from collections.abc import Iterable, Iterator

MOST_SHOWN = 60  # characters of a wrong word in a message


class RinglabError(Exception):
    """Base of all that ringlab raises on purpose; ``str()`` of it is one line for a person."""


class UsageError(RinglabError, ValueError):
    """A value that the user gave and that is not allowed: names it, what is allowed, what to do."""


class MachineError(RinglabError, RuntimeError):
    """This machine lacks something (a limit, a right, a package): says what and what to do."""


class EngineError(RinglabError, OSError):
    """A call into the engine failed; ``errno`` holds the kernel's number."""

    def __init__(self, number: int, message: str) -> None:
        OSError.__init__(self, number, message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class PolicyError(RinglabError):
    """A policy written in Python raised; the worker was stopped. ``__cause__`` is the exception."""


def nearest(word: str, allowed: Iterable[str]) -> list[str]:
    """``allowed`` with the words most like ``word`` first."""
    names = list(allowed)
    order = {name: difflib.SequenceMatcher(None, word, name).ratio() for name in names}
    return sorted(names, key=lambda name: -order[name])


def quoted(word: str) -> str:
    """A word of the user's as a message has it: in quotes, on one line, and not without end."""
    return repr(word if len(word) <= MOST_SHOWN else f"{word[:MOST_SHOWN]}...")


def unknown(what: str, word: str, allowed: Iterable[str]) -> UsageError:
    """The error for a name that is not in a list: the list, nearest first."""
    likely = ", ".join(nearest(word[:MOST_SHOWN], allowed))
    return UsageError(f"unknown {what} {quoted(word)}; choose from: {likely}")


@contextlib.contextmanager
def given(asked: str) -> Iterator[None]:
    """Around a native call with values of the user's: one of a type that C cannot take is his."""
    try:
        yield
    except (TypeError, OverflowError) as error:
        raise UsageError(f"{asked}: {error}") from None


def check(result: int, asked: str, remedy: str = "") -> int:
    """``result`` when it is not negative, else an EngineError with what was asked and why.

    Every native call returns a negative errno on failure; this is the only place that reads it.
    """
    if result >= 0:
        return result
    number = -result
    reason = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
    raise EngineError(number, f"{asked}: {reason}" + (f"; {remedy}" if remedy else ""))

"""How the native engine asks a policy written in Python, and what becomes of its errors."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from engine.binding import native, words
from engine.errors import PolicyError, UsageError
from engine.policy import Policy, ResolvedPolicy, method_name, table
from engine.views import conn_view, loop_view

# Decisions that are yes (1) or no (0), with the words that mean so, and those that choose a way.
_NO_YES = {
    "membership": ("leave", "listed"),
    "timeout": (),
    "send-wait": ("timed", "untimed"),
    "direct-write": ("behind-send", "at-once"),
    "handback": ("no-wake", "wake"),
}
_WAYS = {"held": "rl_held", "expired": "rl_expired"}
# What each method is shown; the other decisions are about the loop.
_OF_CONN = ("membership", "direct-write", "held", "handback")
_MOST_SECONDS = 86_400.0

_running = threading.local()


def inside() -> bool:
    """Whether this thread is in a policy's method, called by the engine.

    The engine may hold locks around that call, so whoever would call back into it must not.
    """
    return getattr(_running, "depth", 0) > 0


def refuse_inside() -> None:
    """UsageError when this thread is in a policy's method."""
    if inside():
        raise UsageError("a policy cannot call its server; use the views that it is given")


class Caller:
    """One user's policy as the engine sees it. Kept alive for as long as the engine may ask."""

    def __init__(self, policy: Policy) -> None:
        ffi, _ = native()
        _install()
        self.policy = policy
        self.error: BaseException | None = None
        """The first failure: what a method raised, or the PolicyError about what it returned."""
        self.failed_in = ""
        self.handle = ffi.new_handle(self)
        self._methods = {
            number: (decision, getattr(policy, method_name(decision)))
            for number, decision in enumerate(words("rl_decision"))
            if decision in policy.decisions()
        }

    @property
    def mask(self) -> int:
        """Bit d is set when decision d is asked."""
        return sum(1 << number for number in self._methods)

    def answer(self, number: int, conn: Any, loop: Any) -> int:
        """The answer to one decision as the engine takes it; never raises."""
        _running.depth = getattr(_running, "depth", 0) + 1
        decision = ""
        try:
            decision, method = self._methods[number]
            shown = conn_view(conn) if decision in _OF_CONN else loop_view(loop)
            return self._checked(decision, method(shown))
        # Nothing may pass into C, not even SystemExit; check() brings it to the user.
        except BaseException as error:
            if self.error is None:
                self.failed_in, self.error = decision, error
            return int(native()[1].RL_POLICY_FAILED)
        finally:
            _running.depth -= 1

    def _checked(self, decision: str, value: Any) -> int:
        number = _number(decision, value)
        if number is not None:
            return number
        raise PolicyError(
            f"policy {self._where(decision)} returned {value!r:.80}; allowed: {_allowed(decision)}"
        )

    def _where(self, decision: str) -> str:
        return f"{type(self.policy).__name__}.{method_name(decision)}()"

    def raise_error(self) -> None:
        """Raises the PolicyError of the first failure, if there was one."""
        if isinstance(self.error, PolicyError):
            raise PolicyError(str(self.error))
        if self.error is not None:
            reason = " ".join(f"{type(self.error).__name__}: {self.error}".split())
            raise PolicyError(
                f"policy {self._where(self.failed_in)} raised {reason}; the worker was stopped"
            ) from self.error


def _number(decision: str, value: Any) -> int | None:
    """The engine's number for an answer, or None when it is not allowed."""
    if not isinstance(value, str) and hasattr(value, "item"):
        value = value.item()  # a NumPy scalar
    if decision in _NO_YES:
        if isinstance(value, bool):
            return int(value)
        return _NO_YES[decision].index(value) if value in _NO_YES[decision] else None
    if decision in _WAYS:
        ways = words(_WAYS[decision])
        return ways.index(value) if value in ways else None
    if value is None:
        return -1
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return round(value * 1e9) if is_number and 0 <= value <= _MOST_SECONDS else None


def _allowed(decision: str) -> str:
    if decision in _NO_YES:
        return ", ".join(["True", "False", *map(repr, _NO_YES[decision])])
    if decision in _WAYS:
        return ", ".join(map(repr, words(_WAYS[decision])))
    return f"seconds from 0 to {_MOST_SECONDS:g}, or None for no timeout"


@cache
def _install() -> None:
    """Defines the C function that the engine calls: once per process."""
    ffi, lib = native()

    def rl_python_decide(handle: Any, decision: int, conn: Any, loop: Any) -> int:
        caller: Caller = ffi.from_handle(handle)
        return caller.answer(decision, conn, loop)

    ffi.def_extern(error=lib.RL_POLICY_FAILED)(rl_python_decide)


def fill(c_policy: Any, resolved: ResolvedPolicy) -> Caller | None:
    """Writes ``resolved`` into a ``rl_policy``.

    Returns the Caller to keep alive, or None when the engine asks nobody.
    """
    ffi, lib = native()
    for number, (decision, choices) in enumerate(table().items()):
        name = resolved.choices[decision]
        # Where the policy decides itself, the index is not used but must be a valid one.
        c_policy.choice[number] = choices[name].index if name in choices else 0
    caller = None if resolved.custom is None else Caller(resolved.custom)
    c_policy.asks = caller.mask if caller else 0
    c_policy.decide = lib.rl_python_decide if caller else ffi.NULL
    c_policy.self = caller.handle if caller else ffi.NULL
    return caller

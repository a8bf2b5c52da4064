"""How the native engine asks a policy written in Python, and what becomes of its errors."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

from engine.binding import native, words
from engine.decisions import Decisions, Policy, ResolvedPolicy, method_name
from engine.errors import PolicyError, UsageError

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
        self.of = policy.family()
        _install(self.of.callback)
        self.policy = policy
        self.error: BaseException | None = None
        """The first failure: what a method raised, or the PolicyError about what it returned."""
        self.failed_in = ""
        self.ending = False
        self._inside: set[int] = set()  # threads that are in a method now
        self.handle = ffi.new_handle(self)
        self._methods = {
            number: (decision, getattr(policy, method_name(decision)))
            for number, decision in enumerate(words(self.of.enum))
            if decision in policy.decisions()
        }

    @property
    def mask(self) -> int:
        """Bit d is set when decision d is asked."""
        return sum(1 << number for number in self._methods)

    def answer(self, number: int, subject: Any, loop: Any) -> int:
        """The answer to one decision as the engine takes it; never raises."""
        failed = int(native()[1].RL_POLICY_FAILED)
        if self.ending:
            return failed
        thread = threading.get_ident()
        _running.depth = getattr(_running, "depth", 0) + 1
        decision = ""
        self._inside.add(thread)
        try:
            decision, method = self._methods[number]
            about_loop = decision in self.of.of_loop
            shown = self.of.show_loop(loop) if about_loop else self.of.show(subject)
            return self._checked(decision, method(shown))
        # Nothing may pass into C, not even SystemExit; check() brings it to the user.
        except BaseException as error:
            if self.error is None and not self.ending:
                self.failed_in, self.error = decision, error
            return failed
        finally:
            self._inside.discard(thread)
            _running.depth -= 1

    def end(self) -> None:
        """From now on no method is called any more; one that runs goes on (see :attr:`busy`)."""
        self.ending = True

    @property
    def busy(self) -> bool:
        """Whether a method of it runs now."""
        return bool(self._inside)

    def interrupt(self) -> None:
        """Raises SystemExit in methods that run now, at their next step in Python."""
        for thread in list(self._inside):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(SystemExit)
            )

    def _checked(self, decision: str, value: Any) -> int:
        answer = self.of.answers[decision]
        # A NumPy scalar is as good as the number that it holds.
        plain = value.item() if not isinstance(value, str) and hasattr(value, "item") else value
        number = answer.number(plain)
        if number is not None:
            return number
        raise PolicyError(
            f"policy {self._where(decision)} returned {value!r:.80}; allowed: {answer}"
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


@cache
def _install(callback: str) -> None:
    """Defines the C function that an engine calls: once per process."""
    ffi, lib = native()

    def decide(handle: Any, decision: int, subject: Any, loop: Any) -> int:
        caller: Caller = ffi.from_handle(handle)
        return caller.answer(decision, subject, loop)

    ffi.def_extern(name=callback, error=lib.RL_POLICY_FAILED)(decide)


def fill(of: Decisions, c_policy: Any, resolved: ResolvedPolicy) -> Caller | None:
    """Writes ``resolved`` into the C policy of that engine.

    Returns the Caller to keep alive, or None when the engine asks nobody.
    """
    ffi, lib = native()
    for number, (decision, choices) in enumerate(of.table().items()):
        name = resolved.choices[decision]
        # Where the policy decides itself, the index is not used but must be a valid one.
        c_policy.choice[number] = choices[name].index if name in choices else 0
    caller = None if resolved.custom is None else Caller(resolved.custom)
    c_policy.asks = caller.mask if caller else 0
    c_policy.decide = getattr(lib, of.callback) if caller else ffi.NULL
    c_policy.self = caller.handle if caller else ffi.NULL
    return caller

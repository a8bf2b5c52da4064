"""What every scripted engine has: it is made, set, asked and begun anew alike."""

from __future__ import annotations

import errno
from typing import Any, Self

from engine import own_policy
from engine.binding import native
from engine.configured import Configured
from engine.decisions import AnyPolicy
from engine.errors import check, given
from engine.parameters import Setting

_OUTPUT_BYTES = 1 << 20  # that one native call copies


class Scripted(Configured):
    """A state machine on its scripted backend, in virtual time; it belongs to one thread.

    A subclass names its native calls and tables, and says what a script of it is made of.
    """

    def __init__(
        self, policy: AnyPolicy, made: dict[str, int | bool], settings: dict[str, Any]
    ) -> None:
        """
        :param made: what only a new script takes, checked, by the names of its C configuration.
        :param settings: live settings and decisions, as the user gave them.
        """
        live = {name: value for name, value in settings.items() if name in self._tables.live}
        choices = {name: value for name, value in settings.items() if name not in live}
        defaults = self._tables.defaults()
        super().__init__(policy, defaults | self._tables.check_live(live), choices)
        self._made = made
        ffi, _ = native()
        config = ffi.new(f"{self._calls.handle}_config *")
        for name, value in made.items():
            setattr(config, name, int(value))
        self._tables.fill(config.settings, self._settings)
        self._keep(own_policy.fill(self._decisions, config.policy, self._policy))
        script = self._calls("new")(config)
        if script == ffi.NULL:
            check(-errno.ENOMEM, "make a script")
        self._script = ffi.gc(script, self._calls("free"))

    def _call(self, name: str, *values: Any) -> int:
        with given(name):
            result = self._calls(name)(self._script, *values)
        self.check()
        return check(result, name)

    def check(self) -> None:
        """Raises the PolicyError (its cause: what the policy raised) that stopped it."""
        for caller in self._callers:
            caller.raise_error()

    def fresh(self, policy: AnyPolicy | None = None) -> Self:
        """A new script that begins as this one would now: its sizes, its settings, its policy (or
        another one), but nothing of what was done."""
        begin: dict[str, int | bool | Setting] = self._made | self._settings
        anew: Any = type(self)
        made: Self = anew(self._policy if policy is None else policy, **begin)
        return made

    def set(self, policy: AnyPolicy | None = None, **changes: Any) -> None:
        """Changes settings, the policy, or single decisions of it: see :meth:`Engine.set`."""
        checked, resolved = self._check_changes(policy, changes)
        for name, value in checked.items():
            self._call("set", *self._tables.to_native(name, value))
            self._settings[name] = value
        if resolved is not None:
            c_policy = native()[0].new(f"{self._calls.policy} *")
            self._keep(own_policy.fill(self._decisions, c_policy, resolved))
            self._call("policy", c_policy)
            self._policy = resolved

    def _output(self, number: int) -> bytes:
        """Everything that one socket, or the socket of one connection, has taken so far."""
        ffi, _ = native()
        buffer = ffi.new("uint8_t[]", _OUTPUT_BYTES)
        pieces: list[bytes] = []
        at = 0
        while copied := self._call("output", number, buffer, at, _OUTPUT_BYTES):
            pieces.append(bytes(ffi.buffer(buffer, copied)))
            at += copied
        return b"".join(pieces)

"""What an engine and a script of one share: settings and a policy, both of which can change."""

from __future__ import annotations

from typing import Any, ClassVar

from engine import own_policy
from engine.decisions import AnyPolicy, Decisions, ResolvedPolicy, method_name
from engine.handle import Handle
from engine.native_server import Calls
from engine.parameters import Setting, Tables


class Configured(Handle):
    """Something with live settings and a policy. A subclass names its native calls and tables."""

    _calls: ClassVar[Calls]
    _decisions: ClassVar[Decisions]
    _tables: ClassVar[Tables]

    def __init__(
        self, policy: AnyPolicy, settings: dict[str, Setting], choices: dict[str, Any]
    ) -> None:
        self._settings = settings
        methods = self._decisions.methods()
        self._policy = self._decisions.resolve(
            policy, **self._tables.check_keywords(choices, methods)
        )
        # Every caller that the native side was given: it may be in one that was just replaced.
        # They outlive a finalizer, which Python runs before it takes this object apart.
        self._callers: list[own_policy.Caller] = []

    @property
    def settings(self) -> dict[str, Setting]:
        """The live settings, by name."""
        return dict(self._settings)

    @property
    def policy(self) -> ResolvedPolicy:
        """The policy in force."""
        return self._policy

    def _keep(self, caller: own_policy.Caller | None) -> None:
        if caller is not None:
            self._callers.append(caller)

    def _check_changes(
        self, policy: AnyPolicy | None, changes: dict[str, Any]
    ) -> tuple[dict[str, Setting], ResolvedPolicy | None]:
        """The settings to change and the policy to change to (None: none), all of it allowed.

        UsageError for any of it that is not, before anything was changed.
        """
        known = self._decisions.methods()
        live = {name: value for name, value in changes.items() if method_name(name) not in known}
        choices = {name: value for name, value in changes.items() if name not in live}
        checked = self._tables.check_live(live)
        if policy is None and not choices:
            return checked, None
        return checked, self._decisions.resolve(
            self._policy if policy is None else policy, **choices
        )

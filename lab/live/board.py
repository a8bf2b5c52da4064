"""What the page is told besides the rows: small facts, sent when they change and only then."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lab.live.case import Look, Shown
from lab.live.state import Now
from lab.live.stream import View


class Board:
    """The facts of one panel, by name; safe to use from any thread."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._facts: dict[str, Any] = {}
        self._said = 0
        self._lock = threading.Lock()

    def tell(self, **facts: Any) -> None:
        """Notes facts and sends those that are new."""
        with self._lock:
            changed = {name: value for name, value in facts.items()
                       if name not in self._facts or self._facts[name] != value}
            if changed:
                self._facts.update(changed)
                self._view.post({"kind": "facts", "facts": changed})

    def say(self, text: str, error: bool = False) -> None:
        """Shows one line; also when it is the same as before, for something else was meant."""
        self._said += 1
        self.tell(message={"text": text, "error": error, "number": self._said})

    def tell_all(self) -> None:
        """Sends everything, to a page that was opened (again)."""
        with self._lock:
            self._view.post({"kind": "facts", "facts": dict(self._facts)})

    def __getitem__(self, name: str) -> Any:
        with self._lock:
            return self._facts.get(name)


def strip(now: Now, look: Look, columns: Sequence[Shown]) -> dict[str, Any]:
    """The state strip: the loop in a word with the reason, its wait, and the rows of a look."""
    wait = [("", now.mode), ("because of", now.why), ("timeout", now.timeout), *look.wait]
    return {
        "state": now.state, "mark": now.look.mark, "colour": now.look.colour,
        "reason": now.reason, "mode": now.mode, "why": now.why, "timeout": now.timeout,
        "wait": [pair for pair in wait if pair != ("", "")],
        "columns": [vars(column) for column in columns],
        "rows": [dict(row) for row in look.rows], "more": look.more,
    }

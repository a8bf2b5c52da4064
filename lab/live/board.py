"""What the page is told besides the rows: small facts, sent when they change and only then."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from engine.views import ConnView
from lab.live.state import Now
from lab.live.stream import View

MOST_ROWS = 8
_FIELDS = ("sending", "write_buf", "send_buf", "listed", "owes_recv", "held", "outq")


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


def strip(now: Now, connections: Sequence[ConnView]) -> dict[str, Any]:
    """The state strip: the worker in a word with the reason, and a row per connection."""
    look = now.look
    rows: list[Mapping[str, Any]] = [
        {"name": f"connection {conn.slot}",
         **{field: getattr(conn, field) for field in _FIELDS}}
        for conn in connections[:MOST_ROWS]
    ]
    return {
        "state": now.state, "mark": look.mark, "colour": look.colour, "reason": now.reason,
        "mode": MODES.get(now.mode, now.mode), "why": now.why, "timeout": now.timeout,
        "rows": rows, "more": max(0, len(connections) - MOST_ROWS),
    }


MODES = {
    "submit": "1 submit, returns at once", "skip": "2 no system call",
    "untimed": "3a no timeout", "timed": "3b timed",
}

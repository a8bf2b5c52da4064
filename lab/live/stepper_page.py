"""The stepper in a notebook: its state as HTML, and the buttons for whoever can press them."""

from __future__ import annotations

import html
import threading
from typing import TYPE_CHECKING, Any

from engine.errors import RinglabError
from lab import palette
from lab.automaton import Automaton
from lab.live.controls import policy_specs
from lab.live.party import brief
from lab.live.stepper import COMPLETIONS, FIXTURES, PHASE_WORDS, PHASES, Seen
from lab.live.stream import View

if TYPE_CHECKING:
    from lab.live.stepper import Stepper

# What a page may ask for, beyond the phases, with the types of what comes along.
_ASKS: dict[str, dict[str, type]] = {
    "connect": {}, "request": {"slot": int, "size": int, "route": str},
    "handler": {"slot": int, "room": int}, "handler begins": {"slot": int},
    "handler ends": {"slot": int, "room": int},
    "complete": {"slot": int, "how": str, "size": int, "error": str}, "poke": {},
    "half-close": {"slot": int}, "reset": {"slot": int}, "stop": {}, "advance": {"ms": int},
}
_FIELDS = ("sending", "listed", "write_buf", "send_buf")
# What is seldom so, named where it is.
_FLAGS = {"promoted": "promoted", "owes_recv": "owes a recv", "held": "held completion",
          "queued": "on the detach queue", "handler_running": "handler runs",
          "paused": "input paused", "eof": "half-closed", "closing": "closing"}
_ENDS = {"ready": "it ended at once: completions are ready", "timeout": "it ended by its timeout",
         "asleep": "the worker sleeps; nothing inside will wake it: post a completion",
         "left": "the worker has left its loop"}


class Page:
    """The widget of one stepper. Its handler does the work itself: it takes microseconds."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._lock = threading.RLock()
        self._message = ""
        self.view = View("stepper", self._received)

    def bundle(self, **options: Any) -> Any:
        """What the notebook shows."""
        return self.view._repr_mimebundle_(**options)

    def tell(self) -> None:
        """Sends the state to every view."""
        stepper = self._stepper
        now = stepper.now
        self.view.post({"kind": "facts", "facts": {
            "automaton": Automaton(lit=now.condition).to_html(),
            "state": state_html(now), "history": _history(stepper), "at": len(stepper.seen) - 1,
            "next": now.next, "phases": [[name, PHASE_WORDS[name]] for name in PHASES],
            "policy": {"name": stepper.policy, "specs": policy_specs(
                stepper.script.policy.choices, stepper.policy)},
            "slots": [conn.slot for conn in now.connections], "completions": list(COMPLETIONS),
            "fixtures": list(FIXTURES), "message": self._message, "condition": now.condition,
        }})

    def _received(self, message: dict[str, Any]) -> None:
        if message.get("kind") not in ("hello", "do", "set", "go"):
            return
        with self._lock:
            self._message = ""
            try:
                self._do(message)
            except (RinglabError, ValueError, KeyError, TypeError) as error:
                self._message = brief(error)
            self.tell()

    def _do(self, message: dict[str, Any]) -> None:
        stepper, kind, name = self._stepper, message.get("kind"), str(message.get("action"))
        if kind == "set":
            stepper.set(**{str(message["name"]): message["value"]})
        elif kind == "go":
            stepper.go_to(int(message["number"]))
        elif kind != "do":
            return
        elif name in PHASES:
            stepper.do(name)
        elif name == "iterate":
            stepper.iterate()
        elif name == "clear":
            stepper.clear()
        elif name in FIXTURES:
            stepper.fixture(name)
        elif name in _ASKS:
            given = {key: kind(message[key]) for key, kind in _ASKS[name].items()
                     if message.get(key) not in (None, "")}
            work = {"complete": stepper.complete}.get(name)
            if work is not None:
                work(**given)
            else:
                stepper.do(name, **given)


def state_html(now: Seen) -> str:
    """The loop's wait and every connection's fields, as a table."""
    wait = now.wait
    mode = {"submit": "1", "skip": "2", "untimed": "3a", "timed": "3b"}.get(
        wait.mode, "") if wait else ""
    ended = f" {_ENDS.get(now.ended, '')}." if now.ended else ""
    decided = f"mode {mode}, timeout {now.timeout}." if wait else f"{now.timeout}."
    parts = [f"<p><strong>The wait:</strong> {html.escape(decided + ended)} "
             f"<strong>List:</strong> {now.loop.list_length} listed, {now.loop.movable} of them "
             f"can be moved by the worker itself.</p>"]
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>'
                    for name in ("", *_FIELDS, "SEND in flight", "also"))
    rows = "".join(_row(conn, size) for conn, size in zip(now.connections, now.sends, strict=True))
    rows = rows or f'<tr><td colspan="{len(_FIELDS) + 3}">nobody is connected</td></tr>'
    parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
    return "".join(parts)


def _row(conn: Any, size: int | None) -> str:
    cells = []
    for name in _FIELDS:
        value = getattr(conn, name)
        shown = ("yes" if value else "·") if isinstance(value, bool) else f"{value:,}"
        strong = value and name in ("sending", "listed", "write_buf")
        cells.append(f"<td>{'<strong>' if strong else ''}{shown}{'</strong>' if strong else ''}"
                     "</td>")
    cells.append(f"<td>{'·' if size is None else f'{size:,} bytes'}</td>")
    also = ", ".join(words for name, words in _FLAGS.items() if getattr(conn, name))
    cells.append(f"<td>{also or '·'}</td>")
    return f'<tr><th scope="row">connection {conn.slot}</th>{"".join(cells)}</tr>'


def _history(stepper: Stepper) -> list[dict[str, Any]]:
    """Everything that was done, and what was undone, each with what came of it."""
    out = []
    for seen in stepper.seen:
        said = ""
        if seen.action and seen.action.name == "decide":
            said = f"timeout {seen.timeout}"
        elif seen.action and seen.action.name == "wait":
            said = seen.ended
        out.append({"text": str(seen.action or "an idle worker"), "said": said, "done": True,
                    "condition": seen.condition})
    out += [{"text": str(action), "said": "", "done": False, "condition": ""}
            for action in stepper.undone]
    return out


def static_html(stepper: Stepper) -> str:
    """The present state without buttons, for a report and for where no widget is."""
    now = stepper.now
    steps = "".join(
        f"<li>{html.escape(entry['text'])}"
        f"{': ' + html.escape(entry['said']) if entry['said'] else ''}</li>"
        for entry in _history(stepper) if entry["done"]
    )
    return (f'<div style="background:{palette.CARD};color:{palette.INK};padding:10px 14px;'
            f'border:1px solid #d5d5d5;border-radius:4px;max-width:1180px">'
            f"<p><strong>Policy {html.escape(stepper.policy)}</strong></p>"
            f"{Automaton(lit=now.condition).to_html()}{state_html(now)}"
            f"<details><summary>What was done</summary><ol>{steps}</ol></details></div>")

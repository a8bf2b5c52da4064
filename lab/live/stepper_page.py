"""The stepper in a notebook: its state as HTML, and the buttons for whoever can press them.

What the buttons are and what the state looks like is the engine's driver's to say.
"""

from __future__ import annotations

import html
import threading
from typing import TYPE_CHECKING, Any

from engine.errors import RinglabError, UsageError
from lab import palette
from lab.automaton import Automaton
from lab.live.party import brief
from lab.live.stream import View, heard

if TYPE_CHECKING:
    from lab.live.stepper import Stepper


class Page:
    """The widget of one stepper. Its handler does the work itself: it takes microseconds."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._lock = threading.RLock()
        self._message = ""
        self._heard: dict[str, Any] | None = None
        self.view = View("stepper", self._received)

    def bundle(self, **options: Any) -> Any:
        """What the notebook shows."""
        return self.view._repr_mimebundle_(**options)

    def tell(self) -> None:
        """Sends the state to every view."""
        stepper, driver = self._stepper, self._stepper.driver
        now = stepper.now
        self.view.post({"kind": "facts", "facts": {
            "automaton": Automaton(lit=now.condition, drawing=driver.drawing).to_html(),
            "state": driver.state_html(now), "history": _history(stepper),
            "at": len(stepper.seen) - 1, "next": now.next,
            "phases": [[name, words] for name, words in driver.phase_words(now).items()],
            "policy": {"name": stepper.policy, "specs": driver.policy_specs()},
            "controls": driver.controls(), "options": driver.options(now),
            "fixtures": [[name, what] for name, what in driver.fixtures.items()],
            "message": self._message, "condition": now.condition, "heard": self._heard,
        }})

    def _received(self, message: dict[str, Any]) -> None:
        if message.get("kind") not in ("hello", "do", "set", "go"):
            return
        with self._lock:
            self._message, self._heard = "", heard(message)
            try:
                self._do(message)
            except (RinglabError, ValueError, KeyError, TypeError) as error:
                self._message = brief(error)
            self.tell()

    def _do(self, message: dict[str, Any]) -> None:
        stepper, kind, name = self._stepper, message.get("kind"), str(message.get("action"))
        driver = stepper.driver
        if kind == "set":
            stepper.set(**{str(message["name"]): message["value"]})
        elif kind == "go":
            stepper.go_to(int(message["number"]))
        elif kind != "do":
            return
        elif name in driver.phases:
            stepper.do(name)
        elif name == "iterate":
            stepper.iterate()
        elif name == "clear":
            stepper.clear(stepper.script.policy)
        elif name in driver.fixtures:
            # Under what is chosen on the page: the same steps under another policy is the lesson.
            stepper.fixture(name, stepper.script.policy)
        elif name in driver.asks:
            given = {key: _typed(key, kind, message[key])
                     for key, kind in driver.asks[name].items()
                     if message.get(key) not in (None, "")}
            getattr(stepper, name.replace("-", "_").replace(" ", "_"))(**given)


def _typed(key: str, kind: type, value: Any) -> Any:
    """A field of the page as an option; UsageError for a number that is none."""
    try:
        return kind(str(value).replace(",", "") if kind is int else value)
    except ValueError:
        raise UsageError(f"{key}={value!r:.60} is not allowed: a whole number") from None


def _history(stepper: Stepper) -> list[dict[str, Any]]:
    """Everything that was done, and what was undone, each with what came of it."""
    out = [{"text": str(seen.action or stepper.driver.begins), "said": stepper.driver.said(seen),
            "done": True, "condition": seen.condition} for seen in stepper.seen]
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
    picture = Automaton(lit=now.condition, drawing=stepper.driver.drawing).to_html()
    return (f'<div style="background:{palette.CARD};color:{palette.INK};padding:10px 14px;'
            f'border:1px solid #d5d5d5;border-radius:4px;max-width:1180px">'
            f"<p><strong>Policy {html.escape(stepper.policy)}</strong></p>"
            f"{picture}{stepper.driver.state_html(now)}"
            f"<details><summary>What was done</summary><ol>{steps}</ol></details></div>")

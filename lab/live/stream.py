"""The way from the kernel to the page: one small widget, one binary message a frame.

The widget's ES module embeds a Bokeh layout once and from then on only appends rows to its one data
source. Every message is either a small JSON object or one with a single buffer; nothing is kept in
synchronised traits, so a page that is opened again asks ("hello") and gets everything anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import traitlets

STATIC = Path(__file__).parent / "static"

# A view says that it still sees something once a second while frames come, and that it is there
# at all every ten seconds, which browsers stretch to a minute in a background tab. One in sight
# asks for a word then, so that a page never shows what a kernel that has gone said last as live.
SEEN_S = 4.0
GONE_S = 150.0
RELOAD_S = 12.0
_FRAMES_AHEAD = 40

Message = Mapping[str, Any]
Handler = Callable[[dict[str, Any]], object]


def _parts(*names: str) -> str:
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)


def heard(message: Message) -> dict[str, Any]:
    """Which message of which page is known to whatever is told with it.

    A page passes over what was said before its newest wish was known.
    """
    return {"view": str(message.get("view")), "count": int(message.get("count", 0))}


class View(anywidget.AnyWidget):
    """The browser's half: which of the two pages it shows is ``page`` (``panel``, ``stepper``).

    ``post`` may be called from any thread. ``handler`` is called with what the page sends, on
    whatever thread the kernel delivers it: it must return at once.
    """

    _esm = _parts("stream.js", "parts.js", "panel.js", "stepper.js", "start.js")
    _css = _parts("live.css")
    page = traitlets.Unicode("panel").tag(sync=True)

    def __init__(self, page: str, handler: Handler) -> None:
        super().__init__(page=page)
        self._handler: Handler | None = handler
        self._muted = False
        self.on_msg(self._received)

    def post(self, message: Message, buffer: bytes | None = None) -> bool:
        """Sends a message to every view; False when nobody can be reached any more."""
        if self._muted or self.comm is None:
            return False
        try:
            self.send(dict(message), None if buffer is None else [buffer])
        except Exception:  # a kernel that shuts down closes its sockets in any order
            return False
        return True

    def mute(self) -> None:
        """Sends nothing any more."""
        self._muted = True

    def shut(self) -> None:
        """Closes the comm and forgets the handler; harmless when repeated."""
        self._handler = None
        if self._muted:
            return
        try:
            self.close()
        except Exception:  # as above
            pass

    def _received(self, _: object, content: object, __: object) -> None:
        handler = self._handler
        if handler is not None and isinstance(content, dict):
            if content.get("kind") == "hello" and not content.get("bokeh", True):
                self.post({"kind": "bokeh"}, bokehjs())
            if content.get("ask"):
                self.post({"kind": "word"})
            handler(content)


@cache
def bokehjs() -> bytes:
    """BokehJS from the installed package, so that no page needs a network for it."""
    from bokeh.resources import Resources

    code = Resources(mode="inline", components=["bokeh"], log_level="error").js_raw
    return "\n".join(code).encode()


class Watch:
    """Whether anybody looks at a widget, from what its views report. Times of time.monotonic()."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._reported: float | None = None
        self._bye: float | None = None
        self._in_sight: set[str] = set()
        self._counts: dict[str, int] = {}
        self._waiting_since: float | None = None
        self._behind = 0

    def hello(self, view: str, count: int = 0) -> None:
        """A view was opened, or came into sight again."""
        if not self._newer(view, count):
            return
        self._reported = self._clock()
        self._bye = self._waiting_since = None
        self._behind = 0
        self._in_sight.add(view)

    def report(self, kind: str, view: str, count: int = 0, sight: bool = False) -> bool:
        """A view said ``seen`` (a frame was painted), ``here``, ``hidden`` or ``bye``.

        ``count`` counts a view's messages: the kernel may hand them over in another order. Whether
        the view is in ``sight`` though it was taken to be hidden, so that it lacks the newest rows.
        """
        now = self._clock()
        self._reported = now
        if kind == "seen":
            self._waiting_since, self._behind = None, 0
        if not self._newer(view, count):
            return False
        if kind in ("seen", "here"):
            self._bye = None
            missed = sight and view not in self._in_sight
            if kind == "seen" or sight:
                self._in_sight.add(view)
            return missed
        self._in_sight.discard(view)
        if kind == "bye" and not self._in_sight:
            self._bye = now
        return False

    def _newer(self, view: str, count: int) -> bool:
        newer = count == 0 or count > self._counts.get(view, 0)
        if newer:
            self._counts[view] = count
        return newer

    def sent(self) -> None:
        """A frame went out; until one is reported as seen, somebody may be gone."""
        self._behind += 1
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    @property
    def ever(self) -> bool:
        """Whether a view has ever been opened."""
        return self._reported is not None

    @property
    def watched(self) -> bool:
        """Whether it is worth sending a frame."""
        if not self._in_sight:
            return False
        since = self._waiting_since
        return since is None or (
            self._clock() - since < SEEN_S and self._behind < _FRAMES_AHEAD
        )

    @property
    def gone(self) -> bool:
        """Whether nobody will come back: the page was closed, or has said nothing for long."""
        now = self._clock()
        if self._bye is not None:
            return now - self._bye > RELOAD_S
        return now - (self._reported if self._reported is not None else self._begun) > GONE_S


def legend(keys: Sequence[Any]) -> list[dict[str, str]]:
    """Legend entries of a plot for the page: label, colour and dash."""
    return [{"label": key.label, "colour": key.colour, "shape": key.shape} for key in keys]

"""One way to wait, live: choose it, its timeout and ring flags, and see what it costs move.

A thread measures the chosen case over and over while somebody looks, and rests otherwise.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from engine.errors import RinglabError, UsageError
from engine.waits import FLAG_NAMES, Case, Figures, measure, tracing, way, ways
from lab.live.stream import View, Watch, _parts, heard
from lab.mode import is_batch
from lab.wait_commands import figure
from lab.waits import BASE, RING_WAIT, TIMEOUTS, label

KEPT = 120
RUN_S = 0.05
PAUSE_S = 0.15
# A rest ends soon after somebody looks again.
_REST_S = 0.3

# One thread measures at a time, whichever view it belongs to: two would measure each other.
_measuring = threading.Lock()


class _Page(View):
    """The stream's widget, with one page more."""

    _esm = _parts("stream.js", "parts.js", "panel.js", "stepper.js", "start.js", "waits.js")
    _css = _parts("live.css", "waits.css")


class WaitsView:
    """The live view of one way to wait; shows itself in a notebook, and ends with :meth:`close`."""

    def __init__(self, case: Case | None = None) -> None:
        self._case = case or Case(RING_WAIT, 0)
        self._lock = threading.Lock()
        self._taken: deque[Figures] = deque(maxlen=KEPT)
        self._base_us: float | None = None
        self._count = 0
        self._message = ""
        self._heard: dict[str, Any] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.watch = Watch()
        self.view = _Page("waits", self._received)

    @property
    def case(self) -> Case:
        """What is measured now."""
        return self._case

    def set(self, name: str, value: object) -> None:
        """Sets ``way``, ``timeout_ns`` or ``flags``; a timeout that a new way does not take changes
        to the nearest that it does. UsageError for what there is not."""
        with self._lock:
            self._case = _changed(self._case, name, value)
            self._taken.clear()

    def measure(self) -> None:
        """Measures the present case once, and the epoll_wait that it is held against."""
        case = self._case
        with _measuring:
            base = measure(BASE, RUN_S / 5, trace=False).us_p50
            figures = measure(case, RUN_S, least=5)
        with self._lock:
            if case != self._case:
                return  # somebody chose another meanwhile
            self._base_us = base
            self._taken.append(figures)
            self._count += 1
            self._message = ""

    def facts(self) -> dict[str, Any]:
        """What the page shows."""
        with self._lock:
            case, taken, base = self._case, list(self._taken), self._base_us
            known = self._heard
        chosen = way(case.way)
        return {
            "heard": known, "controls": _controls(case), "what": f"{case.way}: {chosen.what}.",
            "message": self._message, "taken": self._count, "most": KEPT,
            "us": [each.us_p50 for each in taken],
            "switches": [each.voluntary_switches for each in taken],
            "figures": _figures(taken[-1], base) if taken else [["measuring", "...", ""]],
            "caption": f"Each point: {RUN_S * 1e3:.0f} ms of {case.way} with timeout "
                       f"{label(case.timeout_ns)}, {FLAG_NAMES[case.flags]}; the newest is right.",
        }

    def close(self) -> None:
        """Ends the thread and the widget; harmless when repeated."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.view.shut()

    def _received(self, message: dict[str, Any]) -> None:
        kind, view = str(message.get("kind")), str(message.get("view"))
        if kind == "hello":
            self.watch.hello(view)
            self._begin()
        elif kind in ("seen", "here", "hidden", "bye"):
            self.watch.report(kind, view)
            return
        elif kind == "set":
            try:
                self.set(str(message.get("name")), message.get("value"))
                self._message = ""
            except (RinglabError, ValueError) as error:
                self._message = str(error)
        with self._lock:
            self._heard = heard(message)
        self.tell()

    def tell(self) -> None:
        """Sends the facts to every view."""
        if self.view.post({"kind": "facts", "facts": self.facts()}):
            self.watch.sent()

    def _begin(self) -> None:
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._work, name="ringlab-waits", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._closing.wait(_REST_S) and not self.watch.gone:
            if self._looked_at():
                with tracing():  # tracepoints are attached only while somebody looks
                    while self._looked_at():
                        self._once()
                        self._closing.wait(PAUSE_S)
        self._thread = None  # whoever looks again starts another

    def _looked_at(self) -> bool:
        return self.watch.watched and not self._closing.is_set()

    def _once(self) -> None:
        try:
            self.measure()
        except RinglabError as error:
            self._message = str(error)
            self._closing.wait(1.0)  # it will hardly go better at once
        self.tell()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.view._repr_mimebundle_(**options)


def show(case: Case | None = None) -> WaitsView | None:
    """The live view; None in a batch, where nobody is there to choose."""
    return None if is_batch() else WaitsView(case)


def _changed(case: Case, name: str, value: object) -> Case:
    if name == "way":
        case = _fitting(str(value), case.timeout_ns, case.flags)
    elif name == "timeout_ns":
        case = Case(case.way, int(str(value)), case.flags)
    elif name == "flags" and value in FLAG_NAMES:
        case = Case(case.way, case.timeout_ns, str(value))
    else:
        raise UsageError(f"there is no {name} '{value}' to be chosen")
    if why := way(case.way).refusal(case.timeout_ns):
        raise UsageError(f"{case.way} {why}")
    return case


def _fitting(name: str, timeout_ns: int, flags: str) -> Case:
    """The case of a way with the timeout nearest to the one before that it takes."""
    found = way(name)
    allowed = [ns for ns in TIMEOUTS if not found.refusal(ns)]
    return Case(name, min(allowed, key=lambda ns: abs(ns - timeout_ns)),
                flags if found.ring else "none")


def _controls(case: Case) -> list[Mapping[str, Any]]:
    chosen = way(case.way)
    names = [{"value": each.name, "label": each.name, "what": each.what}
             for each in ways().values()]
    timeouts = [{"value": str(ns), "label": label(ns), "what": ""}
                for ns in TIMEOUTS if not chosen.refusal(ns)]
    flags = [{"value": name, "label": words, "what": ""}
             for name, words in FLAG_NAMES.items() if chosen.ring or name == "none"]
    return [
        {"name": "way", "label": "way", "value": case.way, "choices": names,
         "help": "how to wait for nothing"},
        {"name": "timeout_ns", "label": "timeout", "value": str(case.timeout_ns),
         "choices": timeouts, "help": "the timeout that is asked for"},
        {"name": "flags", "label": "ring flags", "value": case.flags, "choices": flags,
         "help": "how the ring is set up"},
    ]


def _figures(newest: Figures, base_us: float | None) -> list[list[str]]:
    def count(value: float | None) -> str:
        return "not counted" if value is None else f"{value:.3f}"

    times = figure(newest.us_p50 / base_us) if base_us else "..."
    return [
        ["one wait", figure(newest.us_p50), "us p50"],
        ["one in a hundred", figure(newest.us_p99), "us p99"],
        ["against epoll_wait(0)", times, "times"],
        ["switches", count(newest.voluntary_switches), "per wait"],
        ["timers started", count(newest.timer_starts), "per wait"],
        ["CPU", f"{min(100, 100 * newest.cpu_us / newest.us_p50):.0f}", "%"],
    ]

"""The automaton of a case as a picture: the conditions of its loop, and what moves it.

That of the dirty list, with three conditions, is here; the relay's is in
:mod:`lab.automaton_splice`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field

from lab import palette
from lab.runs import Run
from lab.tables import figure, windows_line

WIDTH = 800
BOX = (204, 88)
_FONT = "system-ui, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Place:
    """One condition of a loop: name, colour, two lines about its wait, where its box is."""

    name: str
    colour: str
    lines: tuple[str, str]
    x: int
    y: int


Arrow = tuple[str, tuple[str, ...], int, int, str]
"""Path, label lines, where the label is anchored, and with which end."""


@dataclass(frozen=True)
class Drawing:
    """What is drawn, on 800 units of width."""

    height: int
    places: tuple[Place, ...]
    arrows: tuple[Arrow, ...]
    text: str
    """The arrows in words."""
    shown_by: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Which arm shows a condition under the shipped policy, and in which window."""


DIRTY_LIST = Drawing(
    330,
    (
        Place("IDLE", palette.BLUE, ("waits with a timeout (3b)", "of 25 ms: 40 waits a second"),
              16, 121),
        Place("PARKED", palette.PURPLE, ("waits without a timeout (3a)", "no CPU, deaf to stop"),
              580, 18),
        Place("SPIN", palette.VERMILION,
              ("waits with a timeout of 0 (3b)", "every wait returns at once"), 580, 224),
    ),
    (
        ("M118 121 V46 H574", ("short write: a SEND is submitted, the list is not empty",), 346,
         38, "middle"),
        ("M580 84 H400 V150 H226", ("the client reads:", "the SEND completes"), 410, 106, "start"),
        ("M682 106 V218", ("a poke: any other", "completion, or a signal"), 672, 158, "end"),
        ("M580 284 H118 V215", ("the client reads: the SEND completes, the list is empty",), 346,
         276, "middle"),
    ),
    "IDLE to PARKED: a short write submits a SEND. PARKED to SPIN: any completion that is not the "
    "SEND's, or a signal. PARKED or SPIN to IDLE: the client reads and the SEND completes.",
    {"IDLE": ("async", "idle"), "PARKED": ("async", "stall"), "SPIN": ("async+poked", "stall")},
)


@dataclass(frozen=True)
class Automaton:
    """The drawing; with a run, each box carries what that run measured in it.

    ``lit`` is the condition that a loop is in now (a name of the drawing's places): it stands out,
    the others fade. Empty: all alike.
    """

    run: Run | None = None
    lit: str = ""
    drawing: Drawing = DIRTY_LIST

    def to_svg(self) -> str:
        """An SVG element that needs nothing else."""
        boxes = "".join(self._place(place) for place in self.drawing.places)
        arrows = "".join(_arrow(*arrow) for arrow in self.drawing.arrows)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {WIDTH} {self.drawing.height}" '
            f'aria-label="{html.escape(self.to_text())}" '
            f'style="width:100%;max-width:{WIDTH}px;height:auto;display:block" '
            f'font-family="{_FONT}" font-size="12.5" fill="{palette.INK}">'
            f'<defs><marker id="ringlab-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8Z" fill="{palette.INK}"/>'
            f"</marker></defs>{arrows}{boxes}</svg>"
        )

    def _place(self, place: Place) -> str:
        box = _box(place, self._measured(place.name))
        if not self.lit:
            return box
        if self.lit != place.name:
            return f'<g opacity="0.5">{box}</g>'
        return (f'<g data-lit="{place.name}"><rect x="{place.x - 5}" y="{place.y - 5}" '
                f'width="{BOX[0] + 10}" height="{BOX[1] + 10}" rx="11" fill="none" '
                f'stroke="{palette.INK}" stroke-width="3"/>{box}</g>')

    def to_html(self) -> str:
        """The drawing on the white card of all pictures."""
        note = ""
        if self.run is not None:
            note = (f'<p style="color:{palette.FAINT_INK};font:12px {_FONT};margin:8px 0 0 0">'
                    f"Measured under the shipped policy. {html.escape(windows_line(self.run))}</p>")
        return (f'<div style="background:{palette.CARD};border:1px solid #d5d5d5;border-radius:4px;'
                f'padding:14px;max-width:1180px;box-sizing:border-box;margin:4px 0 14px 0">'
                f"{self.to_svg()}{note}</div>")

    def to_text(self) -> str:
        """The same in words."""
        now = f"The loop is in {self.lit}. " if self.lit else ""
        return now + self.drawing.text

    def _measured(self, name: str) -> str:
        arm, window = self.drawing.shown_by.get(name, ("", ""))
        for row in self.run.arms if self.run is not None else []:
            figures = row["windows"].get(window)
            if (row["arm"], row["policy"]) == (arm, "shipped") and figures:
                return f"measured: {figure(figures.get('waits_per_s'))} waits/s"
        return ""

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": self.to_text()}


def _box(place: Place, measured: str) -> str:
    width, height = BOX
    ink = palette.ink_on(place.colour)
    middle = place.x + width // 2
    lines = [line for line in (*place.lines, measured) if line]
    first = place.y + (46 if len(lines) == 2 else 41)
    texts = "".join(
        f'<text x="{middle}" y="{first + 17 * number}" text-anchor="middle" font-size="12" '
        f'fill="{ink}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (f'<rect x="{place.x}" y="{place.y}" width="{width}" height="{height}" rx="8" '
            f'fill="{place.colour}"/><text x="{middle}" y="{place.y + 24}" text-anchor="middle" '
            f'font-size="15" font-weight="700" fill="{ink}">{place.name}</text>{texts}')


def _arrow(path: str, lines: tuple[str, ...], x: int, y: int, anchor: str) -> str:
    label = "".join(
        f'<text x="{x}" y="{y + 16 * number}" text-anchor="{anchor}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (f'<path d="{path}" fill="none" stroke="{palette.INK}" stroke-width="1.6" '
            f'marker-end="url(#ringlab-tip)"/>{label}')

"""The colours, marks and words of the project: one meaning has one look in every picture.

The palette is Okabe and Ito's, made to stay apart for colour-blind readers. No meaning rests on
colour alone: a state also has a mark (a Bokeh marker, and the same shape as a character) and its
word.
"""

from __future__ import annotations

from dataclasses import dataclass

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"

# Text and lines of a picture, which always stands on a white card.
CARD = "#FFFFFF"
INK = "#1B1B1B"
FAINT_INK = "#595959"
GRID = "#E3E3E3"


@dataclass(frozen=True)
class Look:
    """How a meaning is drawn: its colour, a Bokeh marker, the same shape as a character."""

    word: str
    colour: str
    marker: str
    mark: str
    meaning: str = ""


STATES = {
    look.word: look
    for look in (
        Look("quiet", BLUE, "circle", "●", "sleeps, and wakes for stop and deadlines"),
        Look("parked", PURPLE, "square", "■", "sleeps, but deaf to stop or to the write timeout"),
        Look("spins", VERMILION, "triangle", "▲", "runs without moving anything"),
        Look("intended", YELLOW, "diamond", "◆", "polls by design"),
        Look("undecided", GREY, "x", "✕", "the measurement does not tell"),
    )
}

# Why a wait was made as it was: those that could not block have warm or dark colours.
WHYS = {
    "list": VERMILION, "active": VERMILION, "overdue": ORANGE, "owed": YELLOW, "ready": BLACK,
    "send": PURPLE, "idle": BLUE, "deadline": SKY, "event": GREEN,
}

# Windows are shaded in this order of darkness; their names stand in the picture as well.
WINDOWS = {"idle": "#F2F2F2", "stall": "#FFE9D6", "held": "#FBE3F0", "paced": "#FFF6D6",
           "drain": "#DDF0FA"}
OTHER_WINDOW = "#EEEEEE"


def state(word: str) -> Look:
    """The look of a state; one that this version does not know is drawn as undecided."""
    return STATES.get(word) or Look(word, GREY, "x", "✕")


def window(name: str) -> str:
    """The shade of a window."""
    return WINDOWS.get(name, OTHER_WINDOW)


def ink_on(colour: str) -> str:
    """Black or white, whichever stands out more on ``colour`` (#RRGGBB)."""
    light = luminance(colour)
    return BLACK if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else CARD


def luminance(colour: str) -> float:
    """Relative luminance of #RRGGBB, 0 to 1, as the web's contrast rules define it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
              for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

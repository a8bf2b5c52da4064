"""The picture of the splice case: what the relay's loop may come to, and what brings it there."""

from __future__ import annotations

from lab import palette
from lab.automaton import Drawing, Place

SPLICE = Drawing(
    374,
    (
        Place("WAITING", palette.BLUE, ("nothing to read, or no room", "epoll wakes it"), 16, 14),
        Place("WORKING", palette.GREEN, ("timeout 0, and rightly:", "its handlers move bytes"),
              298, 138),
        Place("FIXED", palette.SKY, ("recv is tried, behind the pipe:", "EAGAIN, so it sleeps"),
              580, 14),
        Place("SPIN", palette.VERMILION,
              ("no splice, no recv, no stop:", "timeout 0, a no-op each turn"), 580, 270),
        Place("LOST", palette.PURPLE, ("bytes wait to be read,", "and nobody will say so"),
              16, 270),
    ),
    (
        ("M298 164 H118 V108", ("EAGAIN, or sink full",), 128, 157, "start"),
        ("M220 40 H340 V132", ("bytes, or room",), 228, 33, "start"),
        ("M450 138 V70 H574", ("the same state,", "recv allowed"), 458, 92, "start"),
        ("M580 40 H410 V132", ("the client reads",), 420, 33, "start"),
        ("M436 226 V302 H574", ("pipe holds data,", "to_forward < 4,096", "recv forbidden"), 444,
         248, "start"),
        ("M580 336 H390 V232", ("the client reads",), 400, 354, "start"),
        ("M682 270 V108", ("switch recv-behind", "to allowed"), 672, 178, "end"),
        ("M60 102 V264", ("readiness cleared (mirror):", "no edge comes any more"), 68, 196,
         "start"),
        ("M220 314 H340 V232", ("more arrives",), 232, 307, "start"),
    ),
    "WORKING to WAITING: EAGAIN, or the sink is full; back: bytes arrive, or room is made. WORKING "
    "to SPIN: the pipe holds data, to_forward is below 4,096, and recv is forbidden. WORKING to "
    "FIXED: the same state with recv allowed; SPIN to FIXED: recv-behind is switched to allowed. "
    "SPIN or FIXED to WORKING: the client reads, or a timeout fires. WAITING to LOST: readiness "
    "was cleared on a full pipe's EAGAIN, and no edge comes; LOST to WORKING: more arrives.",
)

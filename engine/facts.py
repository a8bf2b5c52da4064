"""What the engine stands on, here: the liburing it was built with, and the kernel's ring features.

They belong to every figure that was taken with a ring.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.binding import native, text
from engine.startup import ring_error
from engine.views import RingInfo, ring_info


def liburing() -> str:
    """The version of liburing."""
    return text(native()[1].rl_liburing_version())


def probe() -> RingInfo:
    """A small ring, made and closed again; raises as a start does where io_uring is refused."""
    ffi, lib = native()
    ring = ffi.new("rl_ring_info *")
    result = lib.rl_probe(ring)
    if result < 0:
        raise ring_error(-result)
    return ring_info(ring)


def of_ring(ring: RingInfo) -> dict[str, Any]:
    """For the description of a machine: liburing, and what the kernel gave this ring."""
    return {"liburing": liburing(), **asdict(ring)}


def of_kernel() -> dict[str, Any]:
    """The same where every measurement makes rings of its own: the features that all of them have.
    """
    return {"liburing": liburing(), "features": probe().features}

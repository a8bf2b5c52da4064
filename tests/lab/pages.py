"""The stepper's page without a browser."""

from __future__ import annotations

from typing import Any

from lab.live.stepper import Stepper
from lab.live.stepper_page import Page


def opened(stepper: Stepper) -> tuple[Page, list[dict[str, Any]]]:
    """The page, and what it was told so far, which grows."""
    page = Page(stepper)
    told: list[dict[str, Any]] = []

    def post(message: Any, buffer: bytes | None = None) -> bool:
        told.append(message["facts"])
        return True

    page.view.post = post  # type: ignore[method-assign]
    return page, told

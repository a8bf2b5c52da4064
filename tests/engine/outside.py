"""How many outsides a property test tries, and which.

`make test` tries the same ones every time and everywhere: where it fails, the change failed. What
those do not reach is for `make hunt`, which tries many more, at random; what it finds is printed
with the steps that repeat it.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

HUNT = int(os.environ.get("RINGLAB_HUNT", "0"))
"""Times as many as usual, at random; 0: the usual ones."""


def run(machine: type[RuleBasedStateMachine], examples: int, steps: int, **more: Any) -> None:
    """So many outsides of at most so many steps. ``more`` go to Hypothesis' settings."""
    usual = {"derandomize": True, "database": None} if not HUNT else {}
    case = machine.TestCase
    case.settings = settings(max_examples=examples * max(HUNT, 1), stateful_step_count=steps,
                             deadline=None, **(usual | more))
    case("runTest").runTest()

"""What each counter means, in the words of the contract itself: its comments are read."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_CONTRACT = Path(__file__).parent / "native" / "ringlab.h"
_FIELD = re.compile(r"^\s*u?int64_t (\w+)(?:\[\w+\])?;[ \t]*(?:/\* (.*?) \*/)?", re.MULTILINE)
_VALUE = re.compile(r"^\s*RL_(MODE|WHY)_(\w+),[ \t]*/\* (.*?) \*/", re.MULTILINE)


@cache
def meanings() -> dict[str, str]:
    """Each flat counter of the ring server with one line on what it counts.

    Those named gauges are the state of the moment, all others only grow. A counter whose name says
    it all has an empty line.
    """
    text = _CONTRACT.read_text()
    found = {}
    for struct in ("rl_counters", "rl_sample"):
        body = text[: text.index(f"}} {struct};")]
        fields, gauges = body[body.rindex("typedef struct {") :], ""
        for part in fields.partition("/* gauges */")[::2]:
            for name, meaning in _FIELD.findall(part):
                if name not in ("waits", "why"):
                    found[name] = f"{gauges}{meaning}".strip()
            gauges = "gauge: "
    families = {"MODE": ("waits", "waits of "), "WHY": ("why", "waits because: ")}
    for family, word, meaning in _VALUE.findall(text):
        prefix, begin = families[family]
        found[f"{prefix}_{word.lower()}"] = begin + meaning
    return {"waits": "times that the loop went round its wait"} | found

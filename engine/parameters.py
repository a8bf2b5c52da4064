"""The settings and start parameters of an engine: ranges, units and defaults, in one table."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.binding import words
from engine.errors import UsageError, unknown


@dataclass(frozen=True, slots=True)
class Range:
    """A whole or real number with a unit, inclusive at both ends."""

    default: float
    low: float
    high: float
    unit: str
    real: bool = False

    def check(self, name: str, value: Any) -> float:
        """``value`` when it is allowed; else UsageError with the value, the range and the unit."""
        if not isinstance(value, str | bytes) and hasattr(value, "item"):
            value = value.item()  # a NumPy scalar
        kinds = int | float if self.real else int
        # A bool is an int to Python, but a slip here; comparisons refuse NaN.
        if not isinstance(value, kinds) or isinstance(value, bool) or not (
            self.low <= value <= self.high
        ):
            raise UsageError(f"{name}={value!r:.60} is not allowed: {self}")
        return value

    def __str__(self) -> str:
        kind = "a number" if self.real else "a whole number"
        return f"{kind} from {self.low:.16g} to {self.high:.16g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Words:
    """One word of a C enum."""

    default: str
    enum: str

    def check(self, name: str, value: Any) -> str:
        """``value`` in the engine's spelling; else UsageError with the words, nearest first."""
        word = str(value).replace("_", "-")
        if word not in words(self.enum):
            raise unknown(name, str(value), words(self.enum))
        return word


MIB = 2**20
_NS_PER_MS = 1_000_000

# What set() takes while an engine runs. The keys are those of enum rl_setting, in its order, but
# for the cap, which people think of in ms.
LIVE: dict[str, Range | Words] = {
    "response_size": Range(3 * MIB, 0, 2**30, "bytes"),
    "handler_ms": Range(0, 0, 60_000, "ms"),
    "route": Words("sync", "rl_route"),
    "write_timeout_ms": Range(0, 0, 3_600_000, "ms (0: none)"),
    "wait_cap_ms": Range(25, 0.001, 60_000, "ms", real=True),
    "max_pipeline": Range(64, 1, 65_536, "requests"),
    "so_sndbuf": Range(0, 0, 2**30, "bytes (0: the kernel's choice)"),
}

START: dict[str, Range | Words] = {
    "port": Range(0, 0, 65_535, "(0: any free one)"),
    "workers": Range(1, 1, 64, "workers"),
    "entries": Range(256, 1, 32_768, "SQ entries"),
    "setup": Words("auto", "rl_setup"),
    "recv": Words("auto", "rl_recv"),
    "sq_idle_ms": Range(100, 1, 60_000, "ms"),
    "handlers": Range(4, 1, 256, "threads"),
    "max_connections": Range(1024, 1, 1_000_000, "connections per worker"),
    "max_header": Range(8192, 64, 65_536, "bytes"),
    "stop_grace_ms": Range(250, 0, 60_000, "ms"),
    "sample_hz": Range(100, 0, 1000, "samples a second (0: none)"),
    "sample_seconds": Range(120, 1, 86_400, "s"),
}

Setting = int | float | str


def defaults() -> dict[str, Setting]:
    """Every live setting at its default."""
    return {name: entry.default for name, entry in LIVE.items()}


def check_live(given: Mapping[str, Any]) -> dict[str, Setting]:
    """``given`` in the engine's spelling; UsageError for an unknown name or a wrong value."""
    return _check(LIVE, "setting", given)


def check_start(given: Mapping[str, Any]) -> dict[str, Setting]:
    """The same for the parameters of a start."""
    return _check(START, "parameter", given)


def _check(
    known: Mapping[str, Range | Words], what: str, given: Mapping[str, Any]
) -> dict[str, Setting]:
    out: dict[str, Setting] = {}
    for name, value in given.items():
        if name not in known:
            raise unknown(what, name, known)
        out[name] = known[name].check(name, value)
    return out


@cache
def _keys() -> dict[str, int]:
    names = [word.replace("-", "_") for word in words("rl_setting")]
    return {"wait_cap_ms" if name == "cap_ns" else name: key for key, name in enumerate(names)}


def to_native(name: str, value: Setting) -> tuple[int, int]:
    """``(key, value)`` of a checked live setting, as the engine takes it."""
    entry = LIVE[name]
    if isinstance(entry, Words):
        return _keys()[name], words(entry.enum).index(str(value))
    return _keys()[name], round(float(value) * _NS_PER_MS) if entry.real else int(value)


def fill(c_settings: Any, settings: Mapping[str, Setting]) -> None:
    """Writes all live settings into the ``settings`` array of a C configuration."""
    for name, value in settings.items():
        key, number = to_native(name, value)
        c_settings[key] = number


def enum_value(entry: Range | Words, word: Setting) -> int:
    """The C number of a checked start parameter."""
    return words(entry.enum).index(str(word)) if isinstance(entry, Words) else int(word)


def check_host(host: Any) -> str:
    """A numeric address, as given; UsageError for a name, which the engine does not resolve."""
    try:
        if "%" in str(host):
            raise ValueError("scoped")
        ipaddress.ip_address(str(host))
    except ValueError:
        raise UsageError(
            f"host={str(host)!r:.60} is not a numeric address; give one such as 127.0.0.1 or ::1 "
            "(names are not resolved)"
        ) from None
    return str(host)


def check_keywords(given: Mapping[str, Any], decisions: Collection[str]) -> dict[str, Any]:
    """``given`` when every name of it is a decision; UsageError for one that is nothing at all."""
    for name in given:
        if name.replace("-", "_") not in decisions:
            raise unknown("parameter", name, [*LIVE, *START, *decisions])
    return dict(given)

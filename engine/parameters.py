"""The settings and start parameters of an engine: ranges, units and defaults, in one table."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
PORT = Range(0, 0, 65_535, "(0: any free one)")
SOCKET_BUFFER = Range(0, 0, 2**30, "bytes (0: the kernel's choice)")

# What set() takes while an engine runs. The keys are those of enum rl_setting, in its order, but
# for the cap, which people think of in ms.
LIVE: dict[str, Range | Words] = {
    "response_size": Range(3 * MIB, 0, 2**30, "bytes"),
    "handler_ms": Range(0, 0, 60_000, "ms"),
    "route": Words("sync", "rl_route"),
    "write_timeout_ms": Range(0, 0, 3_600_000, "ms (0: none)"),
    "wait_cap_ms": Range(25, 0.001, 60_000, "ms", real=True),
    "max_pipeline": Range(64, 1, 65_536, "requests"),
    "max_handler_ms": Range(60_000, 0, 60_000, "ms (that a request may ask for)"),
    "so_sndbuf": SOCKET_BUFFER,
}

START: dict[str, Range | Words] = {
    "port": PORT,
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


@dataclass(frozen=True)
class Tables:
    """The settings of one engine: what set() takes while it runs, and what only a start takes."""

    live: Mapping[str, Range | Words]
    start: Mapping[str, Range | Words]
    keys: str
    """The C enum of the live settings."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Live settings whose names are not those of the enum."""

    def defaults(self) -> dict[str, Setting]:
        """Every live setting at its default."""
        return {name: entry.default for name, entry in self.live.items()}

    def check_live(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """``given`` in the engine's spelling; UsageError for an unknown name or a wrong value."""
        return _check(self.live, "setting", given)

    def check_start(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """The same for the parameters of a start."""
        return _check(self.start, "parameter", given)

    def check_keywords(
        self, given: Mapping[str, Any], decisions: Collection[str]
    ) -> dict[str, Any]:
        """``given`` when every name is a decision; UsageError for one that is nothing at all."""
        for name in given:
            if name.replace("-", "_") not in decisions:
                raise unknown("parameter", name, [*self.live, *self.start, *decisions])
        return dict(given)

    @cached_property
    def _key_of(self) -> dict[str, int]:
        names = [word.replace("-", "_") for word in words(self.keys)]
        return {self.spelled.get(name, name): key for key, name in enumerate(names)}

    def to_native(self, name: str, value: Setting) -> tuple[int, int]:
        """``(key, value)`` of a checked live setting, as the engine takes it."""
        entry = self.live[name]
        if isinstance(entry, Words):
            return self._key_of[name], words(entry.enum).index(str(value))
        number = round(float(value) * _NS_PER_MS) if entry.real else int(value)
        return self._key_of[name], number

    def fill(self, c_settings: Any, settings: Mapping[str, Setting]) -> None:
        """Writes all live settings into the ``settings`` array of a C configuration."""
        for name, value in settings.items():
            key, number = self.to_native(name, value)
            c_settings[key] = number


def _check(
    known: Mapping[str, Range | Words], what: str, given: Mapping[str, Any]
) -> dict[str, Setting]:
    out: dict[str, Setting] = {}
    for name, value in given.items():
        if name not in known:
            raise unknown(what, name, known)
        out[name] = known[name].check(name, value)
    return out


RING = Tables(LIVE, START, "rl_setting", spelled={"cap_ns": "wait_cap_ms"})

_TIMEOUT = Range(0, 0, 3_600_000, "ms (0: none)")

RELAY = Tables(
    live={
        "client_timeout_ms": _TIMEOUT,
        "server_timeout_ms": _TIMEOUT,
        "connect_timeout_ms": Range(5_000, 0, 3_600_000, "ms (0: none)"),
        "so_sndbuf": SOCKET_BUFFER,
        "origin_sndbuf": SOCKET_BUFFER,
    },
    start={
        "port": START["port"],
        "max_sessions": Range(1024, 1, 1_000_000, "sessions"),
        "max_head": Range(8192, 64, 15_360, "bytes"),
        "stop_grace_ms": START["stop_grace_ms"],
        "sample_hz": START["sample_hz"],
        "sample_seconds": START["sample_seconds"],
    },
    keys="rl_relay_setting",
)


# -- what the scripted engines are told ----------------------------------------------------------

_AT_ONCE = 2**40  # bytes; far more than any script moves, far less than C overflows at
NUMBER = Range(0, 0, 2**31 - 1, "(numbered from 0)")
BYTES = Range(0, 0, _AT_ONCE, "bytes")
TIMES = Range(0, 0, 2**31 - 1, "calls")
ERRNO = Range(0, 0, 4095, "(an errno; 0: none)")
PASSING = Range(0, 0, 2**53, "ns")


def whole(name: str, value: Any, entry: Range) -> int:
    """A checked whole number; UsageError with the value, the range and the unit."""
    return int(entry.check(name, value))


def octets(name: str, value: Any) -> bytes:
    """Bytes that go to the engine; UsageError for what is none."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(f"{name}={value!r:.60} is not allowed: bytes, not {type(value).__name__}")
    return bytes(value)


def enum_value(entry: Range | Words, word: Setting) -> int:
    """The C number of a checked start parameter."""
    return words(entry.enum).index(str(word)) if isinstance(entry, Words) else int(word)


def check_host(host: Any, name: str = "host") -> str:
    """A numeric address of one machine, as given.

    UsageError for a name, which the engine does not resolve, and for an address of many machines,
    which no TCP connection can have.
    """
    try:
        if "%" in str(host):
            raise ValueError("scoped")
        address = ipaddress.ip_address(str(host))
    except ValueError:
        raise UsageError(
            f"{name}={str(host)!r:.60} is not a numeric address; give one such as 127.0.0.1 or ::1 "
            "(names are not resolved)"
        ) from None
    kind = "multicast" if address.is_multicast else "broadcast" if _broadcast(str(host)) else ""
    if kind:
        raise UsageError(
            f"{name}={str(host)!r} is a {kind} address, and TCP is between two; give one such as "
            "127.0.0.1"
        )
    return str(host)


def _broadcast(host: str) -> bool:
    """Whether an IPv4 address is a broadcast one of a network here: only the kernel knows all."""
    if ":" in host:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:  # which sends nothing
        try:
            asking.connect((host, 9))
        except PermissionError:  # what it says of a broadcast address that was not allowed for
            return True
        except OSError:
            pass
    return False

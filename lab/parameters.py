"""The one definition of a parameter, from which every face of it is derived.

Command line options, the papermill cell, the widgets and the tables in the documentation all read
the same :class:`Parameters`; none of them repeats a default, a unit or a range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import MOST_SHOWN, UsageError, nearest, quoted, unknown

Value = int | float | str | bool
Kind = type[int] | type[float] | type[str] | type[bool]

# Decimal and binary multiples stay apart: a socket buffer of "4k" and one of "4KiB" differ.
SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
WORDS = {"true": True, "yes": True, "on": True, "1": True,
         "false": False, "no": False, "off": False, "0": False}
_SIZE = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]+)")
_SHOWN = 60


@dataclass(frozen=True)
class Parameter:
    """One named value of an experiment: its type, unit, allowed range and one line of help.

    ``low`` and ``high`` are inclusive and belong to int and float; ``choices`` lists the allowed
    values where there are few. An int whose unit is ``bytes`` takes size suffixes (``64KiB``,
    ``3MiB``; ``k`` and ``M`` are decimal). A definition whose own default is refused does not load.
    """

    name: str
    kind: Kind
    default: Value
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[Value, ...] = ()
    help: str = ""

    def __post_init__(self) -> None:
        # The name becomes a Python variable in the papermill cell.
        if not self.name.isidentifier():
            raise UsageError(f"'{self.name}' cannot name a parameter: it is not an identifier")
        object.__setattr__(self, "default", self.check(self.default))

    @property
    def option(self) -> str:
        """The command line spelling, as in ``--response-size``."""
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What may be given, in words: the choices, or the range with its unit."""
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        if self.kind is bool:
            return "true or false"
        unit = f" {self.unit}" if self.unit else ""
        if self.low is not None and self.high is not None:
            return f"{self.low:,} to {self.high:,}{unit}"
        if self.low is not None:
            return f"{self.low:,}{unit} or more"
        if self.high is not None:
            return f"{self.high:,}{unit} or less"
        noun = {int: "a whole number", float: "a number", str: "text"}[self.kind]
        return f"{noun} of {self.unit}" if self.unit else noun

    def check(self, value: object) -> Value:
        """``value`` as this parameter's type; UsageError names the value, the range and the unit.

        Text is read as a command line would give it, so a form field, a YAML file and ``-p`` agree.
        """
        typed = self._typed(value)
        if typed is None:
            raise self._refused(value)
        if self.choices and typed not in self.choices:
            if self.kind is str:
                raise unknown(self.name, str(typed), [str(choice) for choice in self.choices])
            raise self._refused(value)
        if isinstance(typed, (int, float)) and not self._in_range(typed):
            raise self._refused(value)
        return typed

    def _typed(self, value: object) -> Value | None:
        if self.kind is str:
            return value if isinstance(value, str) else None
        if isinstance(value, str):
            return self._from_text(value.strip())
        return self._from_number(value)

    def _from_text(self, text: str) -> Value | None:
        if self.kind is bool:
            return WORDS.get(text.lower())
        try:
            return self._from_number(int(text, 0) if self.kind is int else float(text))
        except ValueError:
            return self._from_size(text)

    def _from_size(self, text: str) -> int | None:
        match = _SIZE.fullmatch(text)
        if self.kind is not int or self.unit != "bytes" or not match:
            return None
        factor = SUFFIXES.get(match[2])
        if factor is None:
            return None
        size = float(match[1].replace("_", "")) * factor
        return int(size) if size.is_integer() else None

    def _from_number(self, value: object) -> Value | None:
        # NumPy scalars come out of sweeps and sliders; item() makes them Python's own. Whatever is
        # not a single number (lists, tuples, arrays) is refused rather than guessed at.
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        if self.kind is bool:
            return bool(value) if isinstance(value, int) and value in (0, 1) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        try:
            if self.kind is float:
                return float(value) if math.isfinite(value) else None
            return int(value) if value == int(value) else None
        except (OverflowError, ValueError):  # infinite, not a number, or too large for a float
            return None

    def _in_range(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def _refused(self, value: object) -> UsageError:
        shown = " ".join(str(value).split())
        if len(shown) > _SHOWN:
            shown = shown[: _SHOWN - 3] + "..."
        message = f"{self.name}={shown} is not allowed: give {self.allowed}"
        if self.kind is int and self.unit == "bytes":
            message += f" (suffixes: {', '.join(SUFFIXES)})"
        return UsageError(message)


class Parameters:
    """An ordered, immutable collection of parameters with distinct names."""

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        self._by_name: dict[str, Parameter] = {}
        for parameter in parameters:
            if parameter.name in self._by_name:
                raise UsageError(f"parameter '{parameter.name}' is defined twice")
            self._by_name[parameter.name] = parameter

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Parameter:
        """The parameter called ``name``; UsageError lists the names, nearest first."""
        try:
            return self._by_name[name]
        except KeyError:
            raise unknown("parameter", name, self._by_name) from None

    def names(self) -> list[str]:
        """All names, in the order of definition."""
        return list(self._by_name)

    def defaults(self) -> dict[str, Value]:
        """Every name with its default."""
        return {parameter.name: parameter.default for parameter in self}

    def resolve(self, given: Mapping[str, object] | None = None) -> dict[str, Value]:
        """The defaults with ``given`` laid over them, each value checked and typed."""
        values = self.defaults()
        for name, value in (given or {}).items():
            values[name] = self[name].check(value)
        return values

    def parse(self, assignments: Iterable[str]) -> dict[str, Value]:
        """Only the values given as ``NAME=VALUE``, checked; dashes in a name count as underscores.

        A name given twice is refused: which of the two was meant cannot be known.
        """
        values: dict[str, Value] = {}
        for assignment in assignments:
            left, equals, text = assignment.partition("=")
            name = left.strip().lstrip("-").replace("-", "_")
            if not equals or not name:
                near = ", ".join(nearest(name[:MOST_SHOWN], self._by_name))
                raise UsageError(f"{quoted(assignment)} is not NAME=VALUE; names: {near}")
            if name in values:
                raise UsageError(f"parameter '{name}' is given twice")
            values[name] = self[name].check(text)
        return values

    def as_table(self) -> list[dict[str, Any]]:
        """One row a parameter, for documentation and ``--help``; all but the default is text."""
        return [
            {
                "name": parameter.name,
                "type": parameter.kind.__name__,
                "default": parameter.default,
                "unit": parameter.unit,
                "allowed": parameter.allowed,
                "help": parameter.help,
            }
            for parameter in self
        ]

    def as_cell(self, values: Mapping[str, object] | None = None) -> str:
        """The text of a notebook's ``parameters`` cell: typed assignments, one a line.

        papermill reads type and comment back for ``--help-notebook``, so both stand on the line of
        their assignment.
        """
        resolved = self.resolve(values)
        return "\n".join(_cell_line(parameter, resolved[parameter.name]) for parameter in self)


def _cell_line(parameter: Parameter, value: Value) -> str:
    # ``allowed`` already carries the unit of a range; a list of choices does not.
    unit = parameter.unit if parameter.choices else ""
    comment = "; ".join(part for part in (unit, parameter.allowed, parameter.help) if part)
    comment = " ".join(comment.split())
    return f"{parameter.name}: {parameter.kind.__name__} = {value!r}  # {comment}"

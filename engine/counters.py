"""Counters and samples as NumPy arrays, laid out from the C declarations alone.

Two shapes. The *native* one (``sample_dtype``) is the memory of ``rl_sample`` itself: nested, with
small arrays, filled by the engine without a copy. The *flat* one (``flat_dtype``, ``flatten``) is
what reports and tables use: every field one column, arrays spelled by the words of their enum
(``waits_timed``, ``why_list``), all whole numbers signed so that differences cannot wrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.binding import native, words

# Array fields, and fields that hold a value of an enum, by the enum that names them.
_ARRAYS = {"waits": "rl_mode", "why": "rl_why"}
_CODES = {"last_mode": "rl_mode", "last_why": "rl_why"}
TOTAL = "waits"
"""The one flat column that is not in memory: the sum of the ``waits_*``."""

# Where several workers are summed up, these are not amounts.
_NEWEST = ("t_ns", "process_cpu_ns")
_WHICH = ("worker", "last_timeout_ns", *_CODES)


@cache
def sample_dtype() -> np.dtype[np.void]:
    """The dtype of one ``rl_sample``, with the offsets and the size that the C compiler gave it."""
    dtype: np.dtype[np.void] = np.dtype(_spec(native()[0].typeof("rl_sample")))
    return dtype


def _spec(ctype: Any) -> Any:
    ffi, _ = native()
    if ctype.kind == "struct":
        members = ctype.fields
        return {
            "names": [name for name, _ in members],
            "formats": [_spec(field.type) for _, field in members],
            "offsets": [field.offset for _, field in members],
            "itemsize": ffi.sizeof(ctype),
        }
    if ctype.kind == "array":
        return (_spec(ctype.item), (ctype.length,))
    if ctype.kind != "primitive":
        raise TypeError(f"a sample holds numbers, structs and arrays, not {ctype.cname}")
    unsigned = int(ffi.cast(ctype, -1)) > 0
    return f"{'u' if unsigned else 'i'}{ffi.sizeof(ctype)}"


@cache
def _leaves() -> tuple[tuple[str, tuple[str | int, ...]], ...]:
    """Flat names in the order of memory, each with the path to it in the native shape."""
    return tuple(_walk(sample_dtype(), ()))


def _walk(
    dtype: np.dtype[Any], path: tuple[str | int, ...]
) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    if dtype.fields is not None:
        for name in dtype.names or ():
            yield from _walk(dtype.fields[name][0], (*path, name))
    elif dtype.subdtype is not None:
        field = str(path[-1])
        for index, word in enumerate(words(_ARRAYS[field])):
            yield f"{field}_{word.replace('-', '_')}", (*path, index)
    else:
        yield str(path[-1]), path


@cache
def flat_dtype() -> np.dtype[np.void]:
    """One column a value: int64, but ``last_mode`` and ``last_why``, which are words."""
    names = [name for name, _ in _leaves()]
    names.insert(names.index(f"{TOTAL}_{words('rl_mode')[0]}"), TOTAL)
    return np.dtype([(name, "U8" if name in _CODES else "i8") for name in names])


def empty(count: int) -> NDArray[np.void]:
    """An array of ``count`` native samples, all zero, for the engine to fill."""
    return np.zeros(count, dtype=sample_dtype())


def pointer(samples: NDArray[np.void]) -> Any:
    """The C pointer ``rl_sample *`` to an array's own memory, which it keeps alive."""
    ffi, _ = native()
    return ffi.from_buffer("rl_sample[]", samples, require_writable=True)


def flatten_array(samples: NDArray[np.void]) -> NDArray[np.void]:
    """Native samples, shape (n,), as a new flat array of the same shape (``flat_dtype``)."""
    flat = np.zeros(samples.shape, dtype=flat_dtype())
    for name, path in _leaves():
        column: Any = samples
        for step in path:
            column = column[step] if isinstance(step, str) else column[..., step]
        flat[name] = np.array(words(_CODES[name]))[column] if name in _CODES else column
    flat[TOTAL] = sum(flat[name] for name in _waits())
    return flat


@cache
def _waits() -> tuple[str, ...]:
    return tuple(f"{TOTAL}_{word.replace('-', '_')}" for word in words("rl_mode"))


def flatten(sample: Any) -> dict[str, int | str]:
    """One sample (a record of a native array) as a dict, in the order of ``flat_dtype``.

    Values are Python integers; ``last_mode`` and ``last_why`` are words.
    """
    flat = flatten_array(np.asarray(sample, dtype=sample_dtype()).reshape(1))
    names = flat.dtype.names or ()
    return dict(zip(names, flat[0].item(), strict=True))


def total(samples: Iterable[Any]) -> dict[str, int | str]:
    """Samples of several workers as one: amounts are added up.

    Times are the newest; what belongs to one worker only (its index, its newest wait) is left out
    when there is more than one.
    """
    each = [flatten(sample) for sample in samples]
    if len(each) == 1:
        return each[0]
    out: dict[str, int | str] = {}
    for name in each[0] if each else ():
        numbers = [value for one in each if isinstance(value := one[name], int)]
        if name not in _WHICH:
            out[name] = max(numbers) if name in _NEWEST else sum(numbers)
    return out

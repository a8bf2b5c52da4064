"""Counters and samples as NumPy arrays, laid out from the C declarations alone.

Two shapes. The *native* one (``sample_dtype``) is the memory of the C struct itself: nested, with
small arrays, filled by the engine without a copy. The *flat* one (``flat_dtype``, ``flatten``) is
what reports and tables use: every field one column, arrays spelled by the words of their enum
(``waits_timed``, ``why_list``), all whole numbers signed so that differences cannot wrap.

Every engine has a :class:`Layout`. The functions below it are of the ring server's, but for those
that are given samples: these know by the memory of a sample whose it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.binding import native, words

# Where several workers are summed up, these are not amounts.
_NEWEST = ("t_ns", "process_cpu_ns")
_WHICH = ("worker", "last_timeout_ns")

_Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Layout:
    """The samples of one engine."""

    struct: str
    """The C struct of a sample."""
    arrays: Mapping[str, str]
    """Array fields by the enum that names their elements."""
    codes: Mapping[str, str]
    """Fields that hold a value of an enum, by that enum."""
    total: str = ""
    """An array whose sum is a column of its own, before its elements; in no memory."""

    @cached_property
    def sample_dtype(self) -> np.dtype[np.void]:
        """The dtype of one sample, with the offsets and the size that the C compiler gave it."""
        dtype: np.dtype[np.void] = np.dtype(_spec(native()[0].typeof(self.struct)))
        return dtype

    @cached_property
    def _leaves(self) -> tuple[tuple[str, _Path], ...]:
        """Flat names in the order of memory, each with the path to it in the native shape."""
        return tuple(self._walk(self.sample_dtype, ()))

    def _walk(self, dtype: np.dtype[Any], path: _Path) -> Iterator[tuple[str, _Path]]:
        if dtype.fields is not None:
            for name in dtype.names or ():
                yield from self._walk(dtype.fields[name][0], (*path, name))
        elif dtype.subdtype is not None:
            field = str(path[-1])
            for index, word in enumerate(words(self.arrays[field])):
                yield f"{field}_{word.replace('-', '_')}", (*path, index)
        else:
            yield str(path[-1]), path

    @cached_property
    def flat_dtype(self) -> np.dtype[np.void]:
        """One column a value: int64, but the codes, which are words."""
        names = [name for name, _ in self._leaves]
        if self.total:
            names.insert(names.index(self._parts[0]), self.total)
        return np.dtype([(name, "U8" if name in self.codes else "i8") for name in names])

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        return tuple(
            f"{self.total}_{word.replace('-', '_')}" for word in words(self.arrays[self.total])
        )

    def empty(self, count: int) -> NDArray[np.void]:
        """An array of ``count`` native samples, all zero, for the engine to fill."""
        return np.zeros(count, dtype=self.sample_dtype)

    def memory(self, count: int) -> NDArray[np.uint8]:
        """Room for ``count`` native samples, not cleared, to be filled and then cut.

        NumPy copies nested structs field by field, a thousand times slower than their bytes.
        """
        return np.empty(count * self.sample_dtype.itemsize, dtype=np.uint8)

    def of_memory(self, memory: NDArray[np.uint8]) -> NDArray[np.void]:
        """The native samples that lie there, shape (n,), not copied."""
        return memory.view(self.sample_dtype)

    def pointer(self, samples: NDArray[np.void] | NDArray[np.uint8]) -> Any:
        """The C pointer to an array's own memory, which it keeps alive."""
        ffi, _ = native()
        return ffi.from_buffer(f"{self.struct}[]", samples, require_writable=True)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: number for number, (name, _) in enumerate(self._leaves)}

    def places(self, name: str) -> list[int]:
        """Where a flat column stands in :meth:`matrix`; a total, where its parts do."""
        return [self._places[part] for part in (self._parts if name == self.total else (name,))]

    def matrix(self, samples: NDArray[np.void]) -> NDArray[np.int64]:
        """Native samples as whole numbers, shape (n, fields), without laying them out by name.

        A code is its number here. Every field of a sample has 64 bits, without gaps between them.
        """
        assert self.sample_dtype.itemsize == 8 * len(self._leaves)
        numbers = np.ascontiguousarray(samples).view(np.int64)
        return numbers.reshape(len(samples), len(self._leaves))

    def from_matrix(self, numbers: NDArray[np.int64]) -> NDArray[np.void]:
        """Native samples again, of what :meth:`matrix` made of them."""
        return np.ascontiguousarray(numbers).view(self.sample_dtype).reshape(len(numbers))

    def flatten_array(self, samples: NDArray[np.void]) -> NDArray[np.void]:
        """Native samples, shape (n,), as a new flat array of the same shape (``flat_dtype``)."""
        flat = np.zeros(samples.shape, dtype=self.flat_dtype)
        for name, path in self._leaves:
            column: Any = samples
            for step in path:
                column = column[step] if isinstance(step, str) else column[..., step]
            coded = name in self.codes
            flat[name] = np.array(words(self.codes[name]))[column] if coded else column
        if self.total:
            flat[self.total] = sum(flat[name] for name in self._parts)
        return flat


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


RING = Layout(
    "rl_sample",
    arrays={"waits": "rl_mode", "why": "rl_why"},
    codes={"last_mode": "rl_mode", "last_why": "rl_why"},
    total="waits",
)
_SIDES = (
    "recv", "recv_eagain", "send", "send_eagain", "splice_in", "splice_in_eagain", "splice_out",
    "splice_out_eagain", "bytes_spliced", "bytes_copied", "read_active", "read_polled",
    "write_active", "write_polled",
)
RELAY = Layout(
    "rl_relay_sample",
    arrays={"why": "rl_relay_why", "closes": "rl_close"} | dict.fromkeys(_SIDES, "rl_side"),
    codes={"last_why": "rl_relay_why"},
)


def sample_dtype() -> np.dtype[np.void]:
    """The dtype of one ``rl_sample``: see :class:`Layout`, as for the next three."""
    return RING.sample_dtype


def flat_dtype() -> np.dtype[np.void]:
    """One column a value: int64, but ``last_mode`` and ``last_why``, which are words."""
    return RING.flat_dtype


def empty(count: int) -> NDArray[np.void]:
    """An array of ``count`` native samples, all zero, for the engine to fill."""
    return RING.empty(count)


def pointer(samples: NDArray[np.void]) -> Any:
    """The C pointer ``rl_sample *`` to an array's own memory, which it keeps alive."""
    return RING.pointer(samples)


def layout_of(samples: NDArray[np.void]) -> Layout:
    """Whose samples they are."""
    return RING if samples.dtype == RING.sample_dtype else RELAY


def flatten_array(samples: NDArray[np.void]) -> NDArray[np.void]:
    """Native samples of any engine, shape (n,), as a new flat array of the same shape."""
    return layout_of(samples).flatten_array(samples)


def flatten(sample: Any) -> dict[str, int | str]:
    """One sample (a record of a native array) as a dict, in the order of its flat dtype.

    Values are Python integers; ``last_mode`` and ``last_why`` are words.
    """
    flat = flatten_array(np.asarray(sample).reshape(1))
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
        if name not in _WHICH and numbers:
            out[name] = max(numbers) if name in _NEWEST else sum(numbers)
    return out

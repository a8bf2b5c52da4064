"""Samples as NumPy arrays: laid out like C, flattened by the words of the contract."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from engine import counters
from engine.binding import native, words

SUMMED = ("iterations", "waits", "waits_timed", "why_list", "thread_cpu_ns", "connections")


def declared(header: str, struct: str) -> list[str]:
    """The field names of a struct, as a reader of the header finds them."""
    ends = header.index(f"}} {struct};")
    text = header[header.rindex("typedef struct {", 0, ends) : ends]
    return re.findall(r"^ +u?int64_t (\w+)", text, re.MULTILINE)


def test_the_dtype_is_the_memory_of_the_struct(project: Path) -> None:
    ffi, _ = native()
    dtype = counters.sample_dtype()
    header = (project / "engine/native/ringlab.h").read_text(encoding="utf-8")
    assert dtype.itemsize == ffi.sizeof("rl_sample")
    assert dtype["c"].itemsize == ffi.sizeof("rl_counters")
    assert list(dtype["c"].names or ()) == declared(header, "rl_counters")


def test_what_c_writes_is_what_numpy_reads() -> None:
    samples = counters.empty(3)
    c = counters.pointer(samples)
    assert len(c) == 3
    c[1].t_ns = 7
    c[1].c.iterations = 2**40
    c[1].c.waits[3] = 9
    c[1].c.last_timeout_ns = -1
    assert samples["t_ns"].tolist() == [0, 7, 0]
    assert samples["c"]["iterations"][1] == 2**40
    assert samples["c"]["waits"][1].tolist() == [0, 0, 0, 9]
    assert samples["c"]["last_timeout_ns"][1] == -1


def filled() -> np.ndarray:
    """Two samples in which every number is another one."""
    samples = counters.empty(2)
    count = samples.view("u8").size
    samples.view("u8")[:] = np.arange(1, count + 1)
    samples["c"]["last_mode"] = [0, 3]
    samples["c"]["last_why"] = [1, 7]
    return samples


def test_flat_names() -> None:
    names = list(counters.flat_dtype().names or ())
    assert names[:3] == ["t_ns", "worker", "thread_cpu_ns"]
    assert [name for name in names if name.startswith("waits")] == [
        "waits", "waits_submit", "waits_skip", "waits_untimed", "waits_timed",
    ]  # fmt: skip
    assert [name.removeprefix("why_") for name in names if name.startswith("why_")] == [
        "ready", "list", "overdue", "owed", "send", "idle", "deadline", "event",
    ]  # fmt: skip
    assert len(set(names)) == len(names)


def test_flat_values() -> None:
    samples = filled()
    flat = counters.flatten_array(samples)
    assert flat.shape == samples.shape
    assert flat["t_ns"].tolist() == samples["t_ns"].tolist()
    assert flat["bytes_in"].tolist() == samples["c"]["bytes_in"].tolist()
    assert flat["waits_untimed"].tolist() == samples["c"]["waits"][:, 2].tolist()
    assert flat["waits"].tolist() == samples["c"]["waits"].sum(axis=1).tolist()
    assert flat["last_mode"].tolist() == ["submit", "timed"]
    assert flat["last_why"].tolist() == ["list", "event"]
    # Signed, so that a difference of two samples cannot wrap.
    assert (flat["iterations"][:1] - flat["iterations"][1:]).tolist()[0] < 0


def test_one_sample_as_a_dict() -> None:
    samples = filled()
    one = counters.flatten(samples[1])
    assert list(one) == list(counters.flat_dtype().names or ())
    assert tuple(one.values()) == tuple(counters.flatten_array(samples)[1].item())
    assert {type(value) for value in one.values()} == {int, str}


def test_no_samples_is_fine() -> None:
    assert counters.flatten_array(counters.empty(0)).shape == (0,)
    assert counters.total([]) == {}


def test_workers_add_up() -> None:
    samples = filled()
    one, other = (counters.flatten(sample) for sample in samples)
    both = counters.total(samples)
    for name in SUMMED:
        assert both[name] == int(one[name]) + int(other[name])
    assert both["t_ns"] == max(int(one["t_ns"]), int(other["t_ns"]))
    assert not {"worker", "last_mode", "last_why", "last_timeout_ns"} & set(both)
    assert counters.total(samples[:1]) == one


def test_words_follow_the_contract() -> None:
    assert words("rl_mode") == ("submit", "skip", "untimed", "timed")
    assert words("rl_recv") == ("auto", "buffer-ring", "plain")
    assert words("rl_setting")[0] == "response-size"
    assert words("rl_decision")[2] == "send-wait"
    assert words("rl_held") == ("park", "listed", "unlisted")

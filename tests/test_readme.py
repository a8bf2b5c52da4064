"""What the README shows is run here, as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.binding import native

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture(autouse=True)
def _ring_allowed() -> None:
    ffi, lib = native()
    if lib.rl_probe(ffi.new("rl_ring_info *")) < 0:
        pytest.skip("io_uring is not allowed here")


def test_its_first_spin_parks_spins_and_sleeps(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(snippets[0], names)
    parked, spinning, fixed = (int(n) for n in re.findall(r": (\d+) ", capsys.readouterr().out))
    assert parked == 0
    assert spinning > 5000
    assert fixed < 60
    exec(snippets[1], names)
    server = names["RingServer"]
    assert callable(server)
    with server(names["Mine"]) as mine:
        assert mine.policy.choices["timeout"] == "own"

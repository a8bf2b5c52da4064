"""The native tests and the fuzzers' corpora, under the sanitizers of this machine's compiler."""

from __future__ import annotations

import os
import subprocess

import pytest

from engine.build_native import NATIVE, ROOT

pytestmark = pytest.mark.computes

NO_SANITIZERS = 69


def sanitize(**environment: str) -> subprocess.CompletedProcess[str]:
    """What ``make sanitize`` runs, without what only a clang can do: to look for new inputs."""
    return subprocess.run(
        [str(ROOT / NATIVE / "sanitize.sh")],
        env={**os.environ, "CLANG": "no", "RINGLAB_ROUNDS": "5", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=500,
        check=False,
    )


def test_native_tests_and_every_input_of_the_corpora_hold_under_the_sanitizers():
    done = sanitize()
    if done.returncode == NO_SANITIZERS:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout
    for part in ("http", "relay"):
        inputs = len(list((ROOT / "tests/native/corpus" / part).iterdir()))
        assert f"fuzz_{part}: {inputs} inputs hold" in done.stdout
    assert done.stdout.count("test_relay: 5 rounds") == 2
    assert done.stdout.endswith("all hold\n")


def test_a_compiler_without_sanitizers_is_named_instead_of_found_well():
    done = sanitize(CC="/bin/false")
    assert done.returncode == NO_SANITIZERS
    assert "/bin/false has no address,undefined sanitizer" in done.stdout
    assert "all hold" not in done.stdout

"""The linter, the type checker and the C compiler have nothing to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import build_native

pytestmark = pytest.mark.computes


def complaints(project: Path, *command: str) -> str:
    """What a checker printed when it was not content; empty when it was."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode else ""


def test_ruff_is_content(project: Path) -> None:
    found = complaints(project, "ruff", "check", "--output-format=concise", ".")
    assert not found, f"\n{found}"


@pytest.mark.timeout(600)
def test_types_are_strict_in_engine_and_lab(project: Path) -> None:
    found = complaints(project, "mypy")
    assert not found, f"\n{found}"


def test_the_c_files_compile_without_a_warning(project: Path) -> None:
    """All of them: the stand-alone programs too, which the build of the module leaves out."""
    includes = [f"-I{folder}" for folder in build_native.prefix_dirs("include")]
    flags = ["-std=gnu11", "-O2", *build_native.WARNINGS, "-Werror", *includes]
    flags += build_native.pkg_config("--cflags")
    for source in sorted((project / build_native.NATIVE).glob("*.c")):
        command = [*build_native.compiler(), *flags, "-c", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"\n{done.stderr}"

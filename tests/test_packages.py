"""pyproject.toml, requirements.lock and environment.yml say the same thing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHONS = ("3.11", "3.12", "3.13")
# What conda brings that pip does not: the interpreter, the toolchain, pip itself.
CONDA_ONLY = {"python", "c-compiler", "liburing", "pip", "pkg-config"}
PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>[^\\]+?))? ?\\$"
)
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}(?: \\)?$")


@pytest.fixture(scope="module")
def asked(project: Path) -> dict[str, Requirement]:
    """Every requirement of pyproject.toml, its extras included, by name."""
    with (project / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)["project"]
    lists = [table["dependencies"], *table["optional-dependencies"].values()]
    parsed = [Requirement(text) for texts in lists for text in texts]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


@pytest.fixture(scope="module")
def lock_lines(project: Path) -> list[str]:
    return (project / "requirements.lock").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def locked(lock_lines: list[str]) -> dict[str, list[tuple[Version, Marker | None]]]:
    """Name to its pins; a package may have one for each range of Pythons."""
    pins: dict[str, list[tuple[Version, Marker | None]]] = {}
    for match in filter(None, map(PIN.match, lock_lines)):
        marker = Marker(match["marker"]) if match["marker"] else None
        name = canonicalize_name(match["name"])
        pins.setdefault(name, []).append((Version(match["version"]), marker))
    return pins


@pytest.fixture(scope="module")
def conda(project: Path) -> dict[str, SpecifierSet]:
    """Every package of environment.yml, those that pip brings included, by name."""
    listed = yaml.safe_load((project / "environment.yml").read_text(encoding="utf-8"))
    found = {}
    for entry in listed["dependencies"]:
        for text in entry["pip"] if isinstance(entry, dict) else [entry]:
            match = re.fullmatch(r"([a-z0-9._-]+?)((?:[<>=!~]=?).*)?", text)
            if match is None or text.startswith("-"):
                continue  # an option of pip, or the project itself
            # conda's "python=3.11" means any 3.11
            range_ = re.sub(r"^=(?!=)(.*)$", r"==\1.*", match[2] or "")
            found[canonicalize_name(match[1])] = SpecifierSet(range_)
    return found


def test_the_lock_holds_only_pins_and_hashes(lock_lines: list[str]) -> None:
    strange = [line for line in lock_lines if not PIN.match(line) and not HASH.match(line)]
    assert strange == []


def test_every_pin_has_a_hash(lock_lines: list[str]) -> None:
    following = zip(lock_lines, [*lock_lines[1:], ""], strict=True)
    bare = [line for line, after in following if PIN.match(line) and not HASH.match(after)]
    assert bare == []


def test_the_lock_names_no_address_and_no_folder(lock_lines: list[str]) -> None:
    assert [line for line in lock_lines if "://" in line or line.startswith(("-", "/"))] == []


def test_every_requirement_is_locked_at_a_version_it_allows(asked, locked) -> None:
    for name, requirement in asked.items():
        assert name in locked, f"{name} is in pyproject.toml but not in requirements.lock"
        for version, _ in locked[name]:
            assert requirement.specifier.contains(version), f"{name} {version}"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_serves_every_python_we_support(asked, locked, python: str) -> None:
    machine = {"python_version": python, "python_full_version": f"{python}.1"}
    machine |= {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    machine |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    for name in asked:
        fitting = [v for v, marker in locked[name] if marker is None or marker.evaluate(machine)]
        assert len(fitting) == 1, f"{name} has {len(fitting)} pins for Python {python}"


def test_conda_users_get_the_same_packages(asked, conda) -> None:
    assert set(conda) - CONDA_ONLY == set(asked)


def test_conda_users_get_compatible_versions(asked, locked, conda) -> None:
    for name in asked:
        assert conda[name] == asked[name].specifier, f"{name} has two ranges"
        assert all(conda[name].contains(version) for version, _ in locked[name]), name


def test_conda_brings_what_the_engine_is_built_with(conda) -> None:
    assert set(conda) >= CONDA_ONLY
    assert not conda["liburing"].contains("2.2")
    assert conda["liburing"].contains("2.3")


def test_the_supported_pythons_are_3_11_to_3_13(project: Path, conda) -> None:
    with (project / "pyproject.toml").open("rb") as file:
        supported = SpecifierSet(tomllib.load(file)["project"]["requires-python"])
    minors = [f"3.{minor}" for minor in range(8, 18)]
    assert [minor for minor in minors if supported.contains(f"{minor}.1")] == list(PYTHONS)
    assert any(conda["python"].contains(f"{minor}.1") for minor in PYTHONS)


def test_the_build_needs_only_what_the_lock_has(project: Path, locked) -> None:
    """``pip install --no-build-isolation`` finds its tools in the virtual environment."""
    with (project / "pyproject.toml").open("rb") as file:
        needs = [Requirement(text) for text in tomllib.load(file)["build-system"]["requires"]]
    for need in needs:
        pins = locked[canonicalize_name(need.name)]
        assert all(need.specifier.contains(version) for version, _ in pins), need.name

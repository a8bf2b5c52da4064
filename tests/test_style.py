"""The limits and arrows that the whole project keeps: sizes, imports, clean notebooks."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.computes

ROOT = Path(__file__).resolve().parent.parent
LINE_COLUMNS = 100
FUNCTION_LINES = 70
MADE_FOLDERS = {"build", "__pycache__", "runs", "reports", "ringlab.egg-info"}

WIDGETS = {"bokeh", "ipywidgets", "anywidget"}
DRAWING = re.compile(r"^lab/(live|plots)")
# What a command line, a pytest plugin or a batch worker imports before it does anything.
QUICK_TO_START = ["experiments", "clients", "measure", "measurement", "runs", "probe", "cli"]
TOO_SLOW_TO_START = [*sorted(WIDGETS), "pandas", "papermill", "nbconvert"]

C_DEFINITION = re.compile(r"^[A-Za-z_][^;=]*\([^;]*$")
# Put together here, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w./-])/" + r"(?:work|root|opt/(?:wheels|pypi)[\w-]*)/")
REGISTRIES = re.compile("|".join(["py" + r"pi\.org", "python" + "hosted", "registry" + r"\.npm"]))


def listed_by_git() -> list[Path] | None:
    """Files that git has or would take; None without git or outside a checkout."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return [ROOT / name for name in done.stdout.split("\0") if name]


def found_by_walking() -> Iterator[Path]:
    """All files but those in hidden folders and in folders that a build or a run made."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in MADE_FOLDERS and name[0] != "."]
        yield from (Path(folder, name) for name in names)


def project_files(*suffixes: str) -> list[Path]:
    """The project's own files, those with one of the suffixes if any are given."""
    listed = listed_by_git()
    found = set(found_by_walking() if listed is None else listed)
    return sorted(p for p in found if p.is_file() and (not suffixes or p.suffix in suffixes))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# ---- sizes --------------------------------------------------------------------------------------


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function, methods and inner ones included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def c_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of every function of C text whose closing brace stands in column one."""
    start, name, opened = 0, "", False
    for number, line in enumerate(text.splitlines(), 1):
        if not start and C_DEFINITION.match(line) and not line.startswith("typedef"):
            called = re.search(r"(\w+)\s*\(", line)
            start, name, opened = number, called[1] if called else "?", False
        if start:
            opened = opened or "{" in line
            if line.startswith("}"):
                yield name, number - start + 1
            if line.startswith("}") or (not opened and line.rstrip().endswith(";")):
                start = 0  # it was a definition and ends here, or only a declaration


def test_no_line_is_longer_than_the_limit() -> None:
    long = [
        f"{name_of(path)}:{number} has {len(line)} columns"
        for path in project_files(".py", ".c", ".h")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line.expandtabs(8)) > LINE_COLUMNS
    ]
    assert long == []


def test_no_python_function_is_longer_than_the_limit() -> None:
    long = [
        f"{name_of(path)}: {name} has {lines} lines"
        for path in project_files(".py")
        for name, lines in python_functions(path)
        if lines > FUNCTION_LINES
    ]
    assert long == []


def test_no_c_function_is_longer_than_the_limit() -> None:
    long = [
        f"{name_of(path)}: {name} has {lines} lines"
        for path in project_files(".c", ".h")
        for name, lines in c_functions(path.read_text(encoding="utf-8"))
        if lines > FUNCTION_LINES
    ]
    assert long == []


def test_the_c_limit_would_notice_a_long_function() -> None:
    body = "    work();\n" * FUNCTION_LINES
    text = "int declared(int a,\n             int b);\n\n"
    text += f"static int\nlong_one(int a)\n{{\n{body}}}\n"
    text += "int short_one(void)\n{\n    return 0;\n}\n"
    assert list(c_functions(text)) == [("long_one", FUNCTION_LINES + 3), ("short_one", 4)]


# ---- arrows -------------------------------------------------------------------------------------


def imported(nodes: Iterator[ast.AST], package: str) -> Iterator[str]:
    """Full names that the import statements among ``nodes`` bring in, relative ones resolved."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that importing a module executes: no function bodies, nothing for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_at_import(child)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def modules_of(folder: str) -> list[Path]:
    return [path for path in project_files(".py") if name_of(path).startswith(f"{folder}/")]


def test_the_engine_knows_nothing_of_lab_notebooks_tables_or_plots() -> None:
    unknown = {"lab", "pandas", "pyarrow", "IPython", "papermill", "nbformat", *WIDGETS}
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in modules_of("engine")
        for name in imported(ast.walk(tree_of(path)), package_of(path))
        if name.split(".")[0] in unknown
    ]
    assert wrong == []


def test_only_the_live_panel_and_the_plots_import_widgets_and_bokeh() -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in modules_of("lab")
        if not DRAWING.match(name_of(path))
        for name in imported(run_at_import(tree_of(path)), package_of(path))
        if name.split(".")[0] in WIDGETS
    ]
    assert wrong == []


def test_no_package_imports_tests_or_benchmarks() -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for folder in ("engine", "lab")
        for path in modules_of(folder)
        for name in imported(ast.walk(tree_of(path)), package_of(path))
        if name.split(".")[0] in {"tests", "bench"}
    ]
    assert wrong == []


def quick_modules() -> list[str]:
    """Those of ``QUICK_TO_START`` that are there, as a file or as a package."""
    there = {path.stem for path in (ROOT / "lab").glob("*.py")}
    there |= {path.parent.name for path in (ROOT / "lab").glob("*/__init__.py")}
    return [f"lab.{name}" for name in QUICK_TO_START if name in there]


@pytest.mark.parametrize("module", ["lab", *quick_modules()])
def test_starts_without_loading_what_is_slow(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        f"print(*[name for name in {TOO_SLOW_TO_START!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} loads {done.stdout}"


# ---- what git holds -----------------------------------------------------------------------------


def test_notebooks_hold_no_outputs() -> None:
    dirty = [
        f"{name_of(path)}: cell {number}"
        for path in project_files(".ipynb")
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"])
        if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"] is not None)
    ]
    assert dirty == [], "clear their outputs before committing"


def test_no_file_names_a_path_of_one_machine_or_a_package_registry() -> None:
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture, a fuzzing corpus
        for pattern in (MACHINE_PATHS, REGISTRIES):
            found += [f"{name_of(path)}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []

"""A report is whole, says what it is about, needs no network, and fails in one line."""

from __future__ import annotations

import errno
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from engine.binding import native
from engine.errors import MachineError, RinglabError, UsageError
from lab import report
from lab.dirty_list import PARAMETERS
from lab.runs import read_run
from tests.lab.made_up import quick_report

LOADING = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src",
           "object": "data", "embed": "src", "video": "src", "audio": "src"}


@pytest.fixture
def _ring_allowed() -> None:
    ffi, lib = native()
    if lib.rl_probe(ffi.new("rl_ring_info *")) < 0:
        pytest.skip("io_uring is not allowed here")


# ---- a real one ---------------------------------------------------------------------------------

pytestmark = pytest.mark.timeout(300)


class Loads(HTMLParser):
    """What a page would fetch, and how many figures it has."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.figures = 0
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(LOADING.get(tag, ""))
        if address is not None and not address.startswith("data:"):
            self.fetched.append(f"{tag} {address}")
        self.figures += tag == "figure"
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.fetched += re.findall(r"@import[^;]+|url\((?!['\"]?(?:data:|#))[^)]*\)", data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False


@pytest.mark.slow
@pytest.mark.usefixtures("_ring_allowed")
def test_the_page_fetches_nothing_and_has_all_its_plots() -> None:
    made, _ = quick_report()
    page = made.html.read_text(encoding="utf-8")
    loads = Loads()
    loads.feed(page)
    assert loads.fetched == []
    assert loads.figures == 4  # all arms, two of them over time, the table of the fixes
    assert page.count("embed_item(item, id)") == 3  # the fixes were not all run
    assert '<html lang="en">' in page
    assert "<title>The dirty list" in page


@pytest.mark.slow
@pytest.mark.usefixtures("_ring_allowed")
def test_the_notebook_is_executed_signed_and_names_its_run() -> None:
    made, _ = quick_report()
    notebook = nbformat.read(made.notebook, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [out for cell in code for out in cell.outputs if out.output_type != "display_data"
                and out.output_type != "execute_result"]
    assert NotebookNotary().check_signature(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.papermill.parameters["seconds"] == 0.3
    assert made.run is not None
    run = read_run(made.run)
    assert {(row["arm"], row["policy"]) for row in run.arms} == {
        ("async", "shipped"), ("async", "fixed"),
        ("async+pipelined", "shipped"), ("async+pipelined", "fixed")}


@pytest.mark.slow
@pytest.mark.usefixtures("_ring_allowed")
def test_progress_tells_cells_and_the_run_inside() -> None:
    made, told = quick_report()
    cells = len(nbformat.read(made.notebook, as_version=4).cells)
    assert told[0] == f"begin {cells} cells"
    assert told[-1] == "end"
    assert "The measurement" in told
    assert any(re.fullmatch(r"dirty-list \d of 4, async.* under .*", line) for line in told)


# ---- small ones, of a notebook that measures nothing --------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notebook of dirty-list is looked for; ``write`` puts one there."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(report, "NOTEBOOKS", folder)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    write(folder, "print(seconds)")
    return folder


def write(folder: Path, *code: str, parameters: str | None = None) -> None:
    cells = [
        new_markdown_cell("# A small <b>report</b>"),
        new_code_cell(PARAMETERS.as_cell() if parameters is None else parameters,
                      metadata={"tags": ["parameters"]}),
        *(new_code_cell(text) for text in code),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "dirty_list.ipynb")


def test_parameters_and_mode_reach_the_kernel_of_this_interpreter(
    small: Path, tmp_path: Path
) -> None:
    write(small, "import sys\nfrom lab import mode",
          "print(seconds, entries, sys.executable, mode.is_batch())")
    made = report.make_report("dirty-list", {"seconds": "0.5"}, tmp_path / "out", title="Titled")
    text = made.notebook.read_text(encoding="utf-8")
    printed = json.loads(text)["cells"][-1]["outputs"][0]["text"]
    assert "".join(printed).split() == ["0.5", "256", sys.executable, "True"]
    assert "<title>Titled</title>" in made.html.read_text(encoding="utf-8")
    assert made.run is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "dirty_list.html", "dirty_list.ipynb"]


def test_a_failing_cell_is_one_line_and_a_notebook_to_look_at(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = report.make_report("dirty-list", {}, out)
    before = first.html.read_bytes()
    write(small, "1 / 0", "print('never')")
    with pytest.raises(RinglabError) as caught:
        report.make_report("dirty-list", {}, out)
    assert str(caught.value).count("\n") == 0
    assert "ZeroDivisionError: division by zero" in str(caught.value)
    failed = out / "dirty_list.failed.ipynb"
    assert str(failed) in str(caught.value)
    assert "An Exception was encountered" in failed.read_text(encoding="utf-8")
    assert first.html.read_bytes() == before
    write(small, "print(1)")
    report.make_report("dirty-list", {}, out)
    assert not failed.exists()


def test_an_error_for_a_person_stays_one(small: Path, tmp_path: Path) -> None:
    write(small, "from engine.errors import MachineError\nraise MachineError('no ring; buy one')")
    with pytest.raises(MachineError, match=r"^no ring; buy one; the notebook up to there is"):
        report.make_report("dirty-list", {}, tmp_path / "out")


def test_a_kernel_that_dies_is_one_line(small: Path, tmp_path: Path) -> None:
    write(small, "import os\nos._exit(3)")
    with pytest.raises(RinglabError, match="kernel failed: DeadKernelError") as caught:
        report.make_report("dirty-list", {}, tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("given", "options", "words"), [
    ({"secondz": 1}, {}, "unknown parameter 'secondz'; choose from: seconds"),
    ({"seconds": "soon"}, {}, "seconds=soon is not allowed"),
    ({"seconds": 1e9}, {}, "0.2 to 600.0 s"),
    ({}, {"arms": ["asink"]}, "unknown arm 'asink'"),
    ({}, {"policies": ["fixt"]}, "'fixt'"),
])
def test_nothing_runs_and_nothing_is_written_for_a_mistake(
    small: Path, tmp_path: Path, given: dict[str, object], options: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        report.make_report("dirty-list", given, tmp_path / "out", **options)
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_experiment_gets_the_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown experiment 'dirty'; choose from: dirty-list"):
        report.make_report("dirty", {}, tmp_path)


def test_a_stale_parameters_cell_is_found(small: Path, tmp_path: Path) -> None:
    write(small, "print(1)", parameters="seconds: int = 1  # s\nold: float = 2.0  # gone")
    with pytest.raises(UsageError, match="has seconds as int, the experiment as float"):
        report.make_report("dirty-list", {"seconds": 1}, tmp_path / "out")
    with pytest.raises(UsageError, match=r"unknown parameter of dirty_list\.ipynb 'entries'"):
        report.make_report("dirty-list", {"entries": 8}, tmp_path / "out")


def test_a_folder_that_cannot_be_is_one_line(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(MachineError, match=r"cannot write the report to .*: Not a directory"):
        report.make_report("dirty-list", {}, tmp_path / "file" / "out")


def test_a_full_disk_leaves_the_earlier_report(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = report.make_report("dirty-list", {}, out)
    before = (first.html.read_bytes(), first.notebook.read_bytes())

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "to_html", full)
    with pytest.raises(MachineError, match=r"No space left on device \(.* MiB free"):
        report.make_report("dirty-list", {}, out)
    assert (first.html.read_bytes(), first.notebook.read_bytes()) == before
    assert len(list(out.iterdir())) == 2


def test_what_a_killed_report_left_is_swept(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".writing-999999999-abc").mkdir(parents=True)
    (out / ".writing-1-abc").mkdir()
    report.make_report("dirty-list", {}, out)
    assert [path.name for path in out.glob(".writing*")] == [".writing-1-abc"]

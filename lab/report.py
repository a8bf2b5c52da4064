"""A case's notebook, executed, and one HTML file of it that opens without a network."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import MachineError, RinglabError, UsageError, unknown
from lab import experiment as experiments
from lab.checkout import checkout, working_folder
from lab.progress import Progress, choose
from lab.runs import shown_path
from lab.scratch import scratch
from lab.tables import RUN_TYPE

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
_WRITING = ".writing-"
# Extends nbconvert's own page: nothing that would be fetched, a readable width, plain printing.
_PAGE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js_requirejs -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_css -%}
{{ super() }}
<style>
main { max-width: 1240px; margin: 0 auto; padding: 12px 20px 48px 20px; box-sizing: border-box; }
.jp-RenderedMarkdown p, .jp-RenderedMarkdown li { max-width: 52em; line-height: 1.5; }
.jp-RenderedMarkdown table { margin-left: 0; }
.jp-Cell { overflow: visible; }
.jp-OutputPrompt, .jp-InputPrompt { display: none; }
@media print { main { max-width: none; padding: 0; } }
</style>
{%- endblock -%}
"""


@dataclass(frozen=True)
class Report:
    """What was made: the executed notebook, the HTML, and the folder of the run inside it."""

    notebook: Path
    html: Path
    run: Path | None


def make_report(
    experiment: str,
    parameters: Mapping[str, object] | None = None,
    out: Path | None = None,
    *,
    arms: Iterable[str] = (),
    policies: Iterable[str] = (),
    progress: Progress | None = None,
    title: str | None = None,
) -> Report:
    """Execute the notebook of ``experiment`` and write it, and its HTML, to the folder ``out``.

    Parameters, arms and policies are checked before anything runs (UsageError). When a cell fails,
    the notebook is kept beside the report as ``NAME.failed.ipynb``, with the error at its top, and
    one line is raised. An earlier report stays until both files of the new one are complete.
    """
    source = notebook_of(experiment)
    values = _checked(experiment, source, parameters or {}, list(arms), list(policies))
    folder = out if out is not None else default_out()
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(_WRITING, folder) as temporary:
            return _make(source, Path(temporary), folder, values, progress or choose(), title)


def notebook_of(experiment: str) -> Path:
    """The notebook that tells a case; it belongs to the checkout, not to the package."""
    experiments.case(experiment)  # an unknown name gets the list of names
    path = NOTEBOOKS / f"{experiment.replace('-', '_')}.ipynb"
    if not path.is_file():
        raise MachineError(f"there is no {path}: run from a checkout of ringlab")
    return path


def default_out() -> Path:
    """``reports`` of the checkout that the working folder is in, else the working folder."""
    here = checkout()
    return here / "reports" if here else working_folder()


def ready(out: Path | None) -> Path:
    """The folder for reports, made and found to take one; MachineError, in one line, if not."""
    folder = out if out is not None else default_out()
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch(_WRITING, folder).cleanup()
    return folder


def _checked(
    name: str, source: Path, given: Mapping[str, object], arms: list[str], policies: list[str]
) -> dict[str, object]:
    """What papermill is to inject. It only warns of an unknown name, and takes any type."""
    experiment = experiments.case(name)
    resolved = experiment.parameters.resolve(given)
    experiment.settings(resolved, arms, policies)
    from lab import batch

    there = batch.parameters_of(source)
    for parameter in given:
        if parameter not in there:
            raise unknown(f"parameter of {source.name}", parameter, there)
        kind = experiment.parameters[parameter].kind.__name__
        if there[parameter] not in ("None", kind):
            raise UsageError(f"{source.name} has {parameter} as {there[parameter]}, the experiment "
                             f"as {kind}: renew its parameters cell")
    values: dict[str, object] = {parameter: resolved[parameter] for parameter in given}
    if arms:
        values["arms"] = arms
    if policies:
        values["policies"] = policies
    return values


def _make(
    source: Path, temporary: Path, folder: Path, values: Mapping[str, object],
    progress: Progress, title: str | None,
) -> Report:
    from lab import batch

    written = temporary / source.name
    final = folder / source.name
    failed = folder / f"{source.stem}.failed.ipynb"
    try:
        batch.execute(source, written, values, progress)
    except Exception as error:
        if isinstance(error, OSError):
            raise
        raise _failure(error, written, failed) from error
    nbformat = _untyped("nbformat")
    notebook = nbformat.read(written, as_version=4)
    notebook.metadata.papermill.update(input_path=source.name, output_path=source.name)
    page = temporary / f"{source.stem}.html"
    page.write_text(to_html(notebook, title), encoding="utf-8")
    nbformat.write(notebook, written)
    written.replace(final)
    page.replace(folder / page.name)
    failed.unlink(missing_ok=True)
    _sign(final)
    return Report(final, folder / page.name, run_of(notebook))


def to_html(notebook: Any, title: str | None = None) -> str:
    """One HTML page of an executed notebook, without its code, that fetches nothing."""
    from jinja2 import DictLoader

    exporter = _untyped("nbconvert").HTMLExporter(
        template_name="lab", template_file="ringlab.html.j2",
        extra_loaders=[DictLoader({"ringlab.html.j2": _PAGE})],
        exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True,
        language_code="en",
    )
    name = title or _heading(notebook)
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": name}})
    return str(body)


def run_of(notebook: Any) -> Path | None:
    """The folder of the run that an executed notebook is about, if it says so."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {}).get(RUN_TYPE)
            if data:
                content = json.loads(data) if isinstance(data, str) else data
                return Path(content["path"])
    return None


def _heading(notebook: Any) -> str:
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return str(cell.source.splitlines()[0][2:])
    return "ringlab report"


def _failure(error: Exception, written: Path, failed: Path) -> RinglabError:
    """One line about a failed cell, with the notebook kept for whoever wants to see more."""
    kept = ""
    if written.is_file():
        written.replace(failed)
        _sign(failed)
        kept = f"; the notebook up to there is {failed}"
    name, value = getattr(error, "ename", None), getattr(error, "evalue", None)
    if name is None:
        first = (str(error).strip().splitlines() or [""])[0]
        return RinglabError(f"the report's kernel failed: {type(error).__name__}: {first}{kept}")
    line = " ".join(str(value).split())
    if name in ("UsageError", "MachineError", "EngineError", "NotStored"):
        return MachineError(f"{line}{kept}")
    return RinglabError(f"cell {getattr(error, 'exec_count', '?')} of the report failed: "
                        f"{name}: {line}{kept}")


def _sign(path: Path) -> None:
    """Make JupyterLab trust the outputs; without that it would leave the plots blank."""
    try:
        notary = _untyped("nbformat.sign").NotebookNotary()
        notary.sign(_untyped("nbformat").read(path, as_version=4))
    except Exception as error:
        print(f"ringlab: {path} could not be signed ({error}); in JupyterLab, use 'Trust notebook'",
              file=sys.stderr)


def _untyped(module: str) -> Any:
    """A module without types of its own; imported late, since reports are rare and it is slow."""
    return importlib.import_module(module)


@contextlib.contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """What a disk or its rights refuse, as one line."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RinglabError) or error.errno is None:
            raise
        room = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(folder).free
                room = f" ({free / 2**20:,.1f} MiB free, about 8 MiB needed)"
        raise MachineError(
            f"cannot write the report to {shown_path(folder)}: {error.strerror}{room}; "
            f"nothing there was changed"
        ) from None

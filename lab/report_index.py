"""The page in front of the reports: in one table, what each case found on this machine.

Like the reports it is one file that fetches nothing. Every word of it is read from the runs that
the reports are about.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import RinglabError
from lab import experiment, palette
from lab.experiment import not_shown
from lab.report import refusals, run_of
from lab.runs import Run, read_run
from lab.tables import machine_line

INDEX = "index.html"
# The conclusions of a run that sum up its case; of a case that is not here, all that there are.
_TELLING = {
    "dirty-list": ("two_by_two", "open_question"),
    "splice": ("pattern", "cure", "reached", "paced"),
    "expired-wait": ("kernel_check", "spin"),
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ringlab reports</title>
<style>
body {{ margin: 0 auto; max-width: 1180px; padding: 20px; background: {card}; color: {ink};
  font: 15px/1.5 system-ui, "Helvetica Neue", Arial, sans-serif; }}
h1 {{ font-size: 24px; margin: 0 0 6px 0; }}
p {{ max-width: 52em; margin: 0 0 14px 0; }}
table {{ border-collapse: collapse; width: 100%; }}
caption {{ text-align: left; font-weight: 600; padding: 0 0 6px 0; }}
th, td {{ text-align: left; vertical-align: top; padding: 8px 12px 8px 0; }}
thead tr {{ border-bottom: 2px solid {ink}; }}
tbody tr {{ border-bottom: 1px solid #c9c9c9; }}
td p {{ margin: 0 0 6px 0; max-width: 44em; min-width: 22em; }}
th[scope=row] {{ min-width: 9em; }}
td.states {{ min-width: 13em; max-width: 18em; overflow-wrap: anywhere; }}
a {{ color: {link}; }}
small {{ color: {faint}; display: block; font-weight: 400; }}
.state {{ display: inline-block; padding: 0 7px; border-radius: 3px; font-weight: 600;
  white-space: nowrap; }}
.scroll {{ overflow-x: auto; }}
</style>
</head>
<body>
<h1>ringlab reports</h1>
<p>An event loop should sleep when only the outside world can move it forward. Each case below is
one way in which a loop did not, brought about and measured on this machine.</p>
<div class="scroll"><table>
<caption>What each case found on this machine</caption>
<thead><tr><th scope="col">Case</th><th scope="col">Found</th><th scope="col">States</th>
<th scope="col">Run</th></tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
</body>
</html>
"""


@dataclass(frozen=True)
class Entry:
    """One case: its report in the folder, and the run that it is about (or why there is none)."""

    case: str
    title: str
    page: str
    run: Run | None
    problem: str = ""


def write_index(folder: Path) -> Path:
    """Write the page for the reports that are in ``folder``; returns its path.

    MachineError, in one line, where the disk refuses.
    """
    page = folder / INDEX
    with refusals(folder):
        text = to_html(entries(folder))
        written = folder / f".{INDEX}.{os.getpid()}"
        try:
            written.write_text(text, encoding="utf-8")
            written.replace(page)
        finally:
            with contextlib.suppress(OSError):
                written.unlink()
    return page


def entries(folder: Path) -> list[Entry]:
    """The cases, in their order, that have a report in ``folder``."""
    found = []
    for name in experiment.names():
        stem = name.replace("-", "_")
        if (folder / f"{stem}.html").is_file():
            title = experiment.case(name).title
            run, problem = _run(folder / f"{stem}.ipynb")
            found.append(Entry(name, title, f"{stem}.html", run, problem))
    return found


def _run(notebook: Path) -> tuple[Run | None, str]:
    try:
        import nbformat

        path = run_of(nbformat.read(notebook, as_version=4))  # type: ignore[no-untyped-call]
        if path is None:
            return None, "the report names no run"
        return read_run(path), ""
    except (OSError, ValueError, json.JSONDecodeError, RinglabError) as error:
        return None, str(error)


def to_html(entries: Sequence[Entry]) -> str:
    """The page."""
    rows = "\n".join(_row(entry) for entry in entries) or (
        '<tr><td colspan="4">No report was made yet: ringlab report --all</td></tr>')
    return _PAGE.format(card=palette.CARD, ink=palette.INK, faint=palette.FAINT_INK,
                        link=palette.BLUE, rows=rows)


def _row(entry: Entry) -> str:
    head = (f'<th scope="row"><a href="{html.escape(entry.page)}">{html.escape(entry.case)}</a>'
            f"<small>{html.escape(entry.title)}</small></th>")
    if entry.run is None:
        why = html.escape(f"The run cannot be read: {entry.problem}.")
        return f'<tr>{head}<td colspan="3">{why}</td></tr>'
    found = "".join(f"<p>{html.escape(line)}</p>" for line in told(entry.run))
    where = (f"{html.escape(entry.run.name)}<small>{html.escape(machine_line(entry.run.machine))}"
             "</small>")
    states = f'<td class="states">{_states(entry.run)}</td>'
    return f"<tr>{head}<td>{found}</td>{states}<td>{where}</td></tr>"


def told(run: Run) -> list[str]:
    """What a run found, in the sentences of its own conclusions."""
    wanted = _TELLING.get(run.experiment) or run.data.get("conclusions", ())
    lines = []
    if run.data.get("interrupted"):
        lines.append(f"Not whole: {run.data['interrupted']}.")
    lines += [f"Not shown: {line}." for line in not_shown(run.data)]
    for name in wanted:
        found: Mapping[str, Any] = run.data.get(name) or {}
        text = str(found.get("answer") or found.get("text") or "")
        question = str(found.get("question") or "")
        if text:
            lines.append(f"{question[:1].upper()}{question[1:]} {text}".strip())
    return lines or ["Nothing was concluded: too few arms were run."]


def _states(run: Run) -> str:
    policies: dict[str, dict[str, int]] = {}
    for arm in run.arms:
        if "state" in arm:
            counts = policies.setdefault(arm["state"], {})
            counts[arm["policy"]] = counts.get(arm["policy"], 0) + 1
    parts = []
    for state in palette.STATES:
        if state in policies:
            look = palette.state(state)
            under = ", ".join(f"{name} {count}" for name, count in policies[state].items())
            parts.append(
                f'<span class="state" style="background:{look.colour};'
                f'color:{palette.ink_on(look.colour)}"><span aria-hidden="true">{look.mark}</span> '
                f"{sum(policies[state].values())} {state}</span>"
                f"<small>{html.escape(under)}</small>")
    return "".join(parts) or "<small>costs only; no loop to judge</small>"

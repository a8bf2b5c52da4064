"""Tables of a run for a notebook, a report and a terminal: the same rows as HTML and as text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab import beside, palette
from lab.runs import Run

# The card that pictures stand on: fixed colours that read the same under any theme.
# JupyterLab and nbconvert style every table of an output; what they would bend is marked important.
_STYLE = f"""
<style>
.ringlab-table {{ overflow-x: auto; background: {palette.CARD}; color: {palette.INK};
  border: 1px solid #d5d5d5; border-radius: 4px; padding: 10px 14px; margin: 4px 0 14px 0;
  max-width: 1180px; box-sizing: border-box; }}
.ringlab-table table {{ border-collapse: collapse; border: none; margin: 0 !important; width: 100%;
  table-layout: auto !important; color: {palette.INK}; font-variant-numeric: tabular-nums;
  font: 13px/1.4 system-ui, "Helvetica Neue", Arial, sans-serif; }}
.ringlab-table caption {{ caption-side: top; text-align: left; font-size: 15px; font-weight: 600;
  color: {palette.INK}; padding: 0 0 6px 0; }}
.ringlab-table p {{ color: {palette.FAINT_INK}; font: 12px/1.45 system-ui, "Helvetica Neue", Arial,
  sans-serif; margin: 6px 0 0 0; }}
.ringlab-table p.head {{ font-size: 15px; font-weight: 600; color: {palette.INK}; margin: 0; }}
.ringlab-table p.text {{ font-size: 14px; color: {palette.INK}; max-width: 60em; }}
.ringlab-table tr, .ringlab-table tr:hover {{ background: {palette.CARD} !important; }}
.ringlab-table th, .ringlab-table td {{ padding: 3px 6px !important; border: none !important;
  text-align: right !important; font-weight: 400; color: {palette.INK}; }}
.ringlab-table thead th {{ vertical-align: bottom !important; font-weight: 600;
  white-space: normal; }}
.ringlab-table thead tr {{ border-bottom: 2px solid {palette.INK} !important; }}
.ringlab-table thead th small {{ font-weight: 400; color: {palette.FAINT_INK}; display: block; }}
.ringlab-table tbody th, .ringlab-table tbody td {{ white-space: nowrap;
  vertical-align: baseline !important; }}
.ringlab-table tbody tr.first {{ border-top: 1px solid #c9c9c9 !important; }}
.ringlab-table th[scope=row], .ringlab-table th[scope=rowgroup], .ringlab-table .left {{
  text-align: left !important; }}
.ringlab-table th[scope=rowgroup] {{ font-weight: 600; }}
.ringlab-table .wrap {{ white-space: normal !important; min-width: 8em; }}
.ringlab-table .state {{ display: inline-block; padding: 0 7px; border-radius: 3px;
  font-weight: 600; }}
.ringlab-table .bad {{ font-weight: 700; color: #A33F00; }}
</style>
"""
NONE = "·"
# A table of a run carries the run's folder under this type, for whoever reads the notebook.
RUN_TYPE = "application/vnd.ringlab.run+json"
_MACHINE = {
    "kernel": "kernel", "architecture": "architecture", "cpu": "CPU", "cpus": "CPUs",
    "cpus_allowed": "CPUs allowed", "virtualisation": "virtualisation",
    "clocksource": "clocksource", "tcp_wmem": "tcp_wmem", "tcp_rmem": "tcp_rmem",
    "congestion_control": "congestion control", "memlock": "memlock", "load": "load",
    "steal_fraction": "steal fraction", "python": "Python",
}


@dataclass(frozen=True)
class Column:
    """A column: heading, unit or remark under it, and whether its cells are words."""

    head: str
    unit: str = ""
    words: bool = False
    wrap: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and how it stands out (``state``, ``bad`` or nothing)."""

    text: str
    look: str = ""


@dataclass(frozen=True)
class Table:
    """A captioned table; the first column groups rows, the second names a row.

    ``notes`` stand under it; ``data`` goes along in a notebook, by MIME type, for programs. Shows
    itself as the last value of a cell; ``str()`` is the same as plain text.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_html(self) -> str:
        """An accessible table: caption, and a scope on every heading."""
        heads = "".join(
            f'<th scope="col"{_left(column)}>{html.escape(column.head)}'
            + (f"<small>{html.escape(column.unit)}</small>" if column.unit else "") + "</th>"
            for column in self.columns
        )
        notes = f"<p>{html.escape(self.notes)}</p>" if self.notes else ""
        return (f'{_STYLE}<div class="ringlab-table"><table>'
                f"<caption>{html.escape(self.caption)}</caption>"
                f"<thead><tr>{heads}</tr></thead>{self._body()}</table>{notes}</div>")

    def _body(self) -> str:
        parts = []
        for start, count in _groups(self.rows):
            parts.append("<tbody>")
            for number, row in enumerate(self.rows[start : start + count]):
                cells = "".join(_html_cell(cell, column)
                                for cell, column in zip(row[2:], self.columns[2:], strict=True))
                first = (f'<th scope="rowgroup" rowspan="{count}">{html.escape(row[0].text)}</th>'
                         if number == 0 else "")
                kind = ' class="first"' if number == 0 else ""
                parts.append(f'<tr{kind}>{first}<th scope="row">{html.escape(row[1].text)}</th>'
                             f"{cells}</tr>")
            parts.append("</tbody>")
        return "".join(parts)

    def __str__(self) -> str:
        heads = [f"{column.head} ({column.unit})" if column.unit else column.head
                 for column in self.columns]
        texts = [heads, *([cell.text for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in texts) for i in range(len(heads))]
        lines = [self.caption, ""]
        for row in texts:
            cells = (text.ljust(width) if column.words else text.rjust(width)
                     for text, width, column in zip(row, widths, self.columns, strict=True))
            lines.append("  ".join(cells).rstrip())
        lines.insert(3, "-" * min(100, sum(widths) + 2 * len(widths)))
        return "\n".join([*lines, *([self.notes] if self.notes else [])])

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return {"text/html": self.to_html(), "text/plain": str(self), **self.data}


@dataclass(frozen=True)
class Note:
    """A heading and a paragraph on the card that tables stand on."""

    head: str
    text: str

    def to_html(self) -> str:
        """The note as a piece of HTML."""
        return (f'{_STYLE}<div class="ringlab-table"><p class="head">{html.escape(self.head)}</p>'
                f'<p class="text">{html.escape(self.text)}</p></div>')

    def __str__(self) -> str:
        return f"{self.head}\n{self.text}"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


def run_table(run: Run) -> Table:
    """Which run this is: its folder, its parameters with their units, its machine."""
    rows = [[Cell("run"), Cell("name"), Cell(run.name)],
            [Cell("run"), Cell("folder"), Cell(str(run.path))]]
    if run.data.get("interrupted"):
        rows.append([Cell("run"), Cell("not whole"), Cell(str(run.data["interrupted"]), "bad")])
    rows += [[Cell("parameters"), Cell(name), Cell(_value(value))]
             for name, value in run.parameters.items()]
    machine = run.machine
    rows += [[Cell("machine"), Cell(words), Cell(_value(machine[name]))]
             for name, words in _MACHINE.items() if machine.get(name) is not None]
    engine = machine.get("engine") or {}
    rows += [[Cell("ring"), Cell(name.replace("_", " ")), Cell(_value(value))]
             for name, value in engine.items() if value not in (None, "") and name != "thread_id"]
    columns = [Column("", words=True), Column("what", words=True),
               Column("value", words=True, wrap=True)]
    return Table("The run, its parameters and its machine", columns, rows,
                 data={RUN_TYPE: {"path": str(run.path)}})


def answer(run: Run) -> Note:
    """The founding document's open question, and what this run says to it."""
    found = run.data.get("open_question")
    if not found:
        return Note("The open question", "The arm async was not run under the shipped policy, so "
                    "this run does not answer it.")
    return Note(_sentence(str(found["question"])), str(found["answer"]))


def arms_of(run: Run) -> list[str]:
    """The arms of a run, each once, in order."""
    return list(dict.fromkeys(arm["arm"] for arm in run.arms))


def arms_table(run: Run) -> Table:
    """Every arm and policy: the state, its figures, and what was measured elsewhere beside them."""
    columns = [
        Column("arm", words=True), Column("policy", words=True), Column("state", words=True),
        Column("waits", "1/s, idle"), Column("waits", "1/s, stalled"),
        Column("celeris", "waits 1/s"),
        Column("CPU", "ms/s, idle"), Column("CPU", "ms/s, stalled"),
        Column("process", "CPU ms/s"), Column("celeris", "CPU ms/s"),
        Column("founding", "CPU ms/s"), Column("on queue", "fraction"),
    ]
    known = beside.known(run.experiment)
    rows = [_arm_row(arm, known) for arm in run.arms]
    notes = (f"{windows_line(run)} waits: turns of the worker's wait. CPU: the worker's thread; "
             f"process: the whole process while stalled, as the founding report read it. "
             f"celeris: {beside.LABELS[beside.CELERIS]}, a busy machine, so its CPU is a lower "
             f"bound; founding: {beside.LABELS[beside.FOUNDING]}. Both are other machines: compare "
             f"states and orders of magnitude, not digits.")
    return Table("What each arm did while its client stalled", columns, rows, notes)


def both_tests_table(run: Run, policies: Iterable[str] | None = None) -> Table:
    """Quiet AND complete: a policy is good only if the loop slept and every byte came, in order.

    ``policies`` None: all.
    """
    wanted = None if policies is None else set(policies)
    columns = [
        Column("arm", words=True), Column("policy", words=True),
        Column("while stalled", words=True), Column("delivered after it", "bytes"),
        Column("in order", words=True), Column("stop honoured", "within 1 s", words=True),
        Column("write timeout", "honoured", words=True), Column("others wait", "ms"),
        Column("good?", words=True, wrap=True),
    ]
    rows = []
    for arm in run.arms:
        if wanted is not None and arm["policy"] not in wanted:
            continue
        delivered = arm.get("delivered") or {}
        whole = is_complete(arm)
        good = (arm["state"] == "quiet" and whole and arm.get("honours_stop") is not False
                and arm.get("honours_write_timeout") is not False)
        got, expected = delivered.get("bytes"), delivered.get("expected")
        amount = NONE if got is None else f"{got:,}"
        if got is not None and got != expected:
            amount += f" of {expected:,}"
        rows.append([
            Cell(arm["arm"]), Cell(arm["policy"]), Cell(arm["state"], "state"),
            Cell(amount, "" if got == expected else "bad"),
            _yes_no(delivered.get("in_order")), _yes_no(arm.get("honours_stop")),
            _yes_no(arm.get("honours_write_timeout")), _number(arm.get("others_wait_ms")),
            Cell("quiet and complete") if good else Cell(_why_not(arm, whole), "bad"),
        ])
    notes = (f"{windows_line(run)} Delivered: the bodies of all repetitions, checked byte by byte. "
             f"Others wait: a small request on another connection while one stalls. "
             f"{NONE}: not tested in this arm.")
    return Table("Quiet and complete, shown together", columns, rows, notes)


def reasons_table(run: Run) -> Table:
    """The evidence in words: one sentence per arm and policy."""
    columns = [Column("arm", words=True), Column("policy", words=True), Column("state", words=True),
               Column("because", words=True, wrap=True)]
    rows = [[Cell(arm["arm"]), Cell(arm["policy"]), Cell(arm["state"], "state"),
             Cell(_sentences(arm))] for arm in run.arms]
    return Table("Why each state was given", columns, rows)


def evidence_table(run: Run, arms: Iterable[str] | None = None, policy: str = "shipped") -> Table:
    """What was seen of the stalled connection and the wait, by arm, under one policy."""
    columns = [
        Column("arm", words=True), Column("policy", words=True), Column("state", words=True),
        Column("SEND in flight", words=True), Column("in the socket", "SIOCOUTQ, bytes"),
        Column("wait mode", words=True), Column("reason of the wait", words=True),
        Column("CPU", "ms/s, idle"), Column("CPU", "ms/s, stalled"),
    ]
    wanted = None if arms is None else set(arms)
    rows = []
    for arm in run.arms:
        if arm["policy"] != policy or (wanted is not None and arm["arm"] not in wanted):
            continue
        idle, stalled = _windows(arm)
        outq = arm.get("outq")
        rows.append([
            Cell(arm["arm"]), Cell(arm["policy"]), Cell(arm["state"], "state"),
            _yes_no(arm.get("send_in_flight"), bad=False),
            Cell(NONE if outq is None else f"{outq:,.0f}"),
            Cell(_words(arm.get("wait_mode_while_stalled"))),
            Cell(_whys(arm.get("why_while_stalled"))),
            _number(idle.get("cpu_ms_per_s")), _number(stalled.get("cpu_ms_per_s")),
        ])
    return Table("What the worker was doing while the client stalled", columns, rows,
                 windows_line(run))


def is_complete(arm: Mapping[str, Any]) -> bool:
    """Whether every byte that was owed came, in order."""
    delivered = arm.get("delivered") or {}
    return bool(delivered.get("in_order")) and delivered.get("bytes") == delivered.get("expected")


def delivery(arm: Mapping[str, Any]) -> str:
    """What came of what was owed, in a few words."""
    delivered = arm.get("delivered") or {}
    if is_complete(arm):
        return "complete"
    if delivered.get("bytes") is None:
        return "not tested"
    return "out of order" if delivered["bytes"] == delivered["expected"] else "bytes missing"


def figure(value: float | None) -> str:
    """A measured figure with as many digits as it deserves."""
    if value is None:
        return NONE
    if value >= 10_000:
        return f"{value / 1e3:,.0f}k"
    if value >= 100:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def windows_line(run: Run, names: Sequence[str] = ()) -> str:
    """How long each window (those named, or all) was, and how often, as one sentence."""
    seconds: dict[str, list[float]] = {}
    repetitions: list[int] = []
    for arm in run.arms:
        for name, window in arm["windows"].items():
            if not names or name in names:
                # A merged window is as long as its repetitions together.
                times = int(window.get("repetitions", 1))
                seconds.setdefault(name, []).append(window["seconds"] / times)
                repetitions.append(times)
    if not seconds:
        return ""
    lengths = ", ".join(f"{name} {_span(found)} s" for name, found in seconds.items())
    count = _span(repetitions)
    if count == "1":
        return f"Windows: {lengths}; 1 repetition."
    return f"Windows: {lengths}, in each of {count} repetitions."


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in one sentence: kernel, CPU, count, virtualisation, congestion control."""
    cpus = machine.get("cpus")
    parts = [
        f"Linux {machine.get('kernel', '?')} {machine.get('architecture', '')}".strip(),
        str(machine.get("cpu") or "unknown CPU"),
        f"{cpus} CPU{'s' if cpus != 1 else ''}" if cpus else "",
        str(machine.get("virtualisation") or ""),
        str(machine.get("congestion_control") or ""),
    ]
    return "Machine: " + ", ".join(part for part in parts if part) + "."


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _arm_row(arm: Mapping[str, Any], known: Sequence[beside.Known]) -> list[Cell]:
    idle, stalled = _windows(arm)

    def elsewhere(source: str, quantity: str) -> Cell:
        found = beside.find(known, source, arm["arm"], arm["policy"], quantity)
        return Cell(found.shown if found else NONE)

    fraction = stalled.get("on_queue_fraction")
    return [
        Cell(arm["arm"]), Cell(arm["policy"]), Cell(arm["state"], "state"),
        _number(idle.get("waits_per_s")), _number(stalled.get("waits_per_s")),
        elsewhere(beside.CELERIS, "waits_per_s"),
        _number(idle.get("cpu_ms_per_s")), _number(stalled.get("cpu_ms_per_s")),
        _number(stalled.get("process_cpu_ms_per_s")),
        elsewhere(beside.CELERIS, "cpu_ms_per_s"), elsewhere(beside.FOUNDING, "cpu_ms_per_s"),
        Cell(NONE if fraction is None else f"{fraction:.3f}"),
    ]


def _windows(arm: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The idle window, and the one that the verdict is about."""
    windows = arm["windows"]
    there = [windows[name] for name in beside.STALLED if name in windows]
    return windows.get("idle", {}), there[0] if there else {}


def _why_not(arm: Mapping[str, Any], whole: bool) -> str:
    faults = []
    if arm["state"] != "quiet":
        faults.append(arm["state"])
    if not whole:
        faults.append(delivery(arm))
    if arm.get("honours_stop") is False:
        faults.append("deaf to stop")
    if arm.get("honours_write_timeout") is False:
        faults.append("no write timeout")
    return ", ".join(faults)


def _groups(rows: Sequence[Sequence[Cell]]) -> list[tuple[int, int]]:
    """Start and length of each stretch of rows that share their first cell."""
    groups: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        if groups and rows[groups[-1][0]][0] == row[0]:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
        else:
            groups.append((number, 1))
    return groups


def _html_cell(cell: Cell, column: Column) -> str:
    text = html.escape(cell.text)
    if cell.look == "state":
        look = palette.state(cell.text)
        text = (f'<span class="state" style="background:{look.colour};'
                f'color:{palette.ink_on(look.colour)}"><span aria-hidden="true">{look.mark}</span>'
                f" {text}</span>")
    elif cell.look:
        text = f'<span class="{cell.look}">{text}</span>'
    kinds = [name for name, on in (("left", column.words), ("wrap", column.wrap)) if on]
    return f'<td class="{" ".join(kinds)}">{text}</td>' if kinds else f"<td>{text}</td>"


def _left(column: Column) -> str:
    return ' class="left"' if column.words else ""


def _number(value: float | None) -> Cell:
    return Cell(figure(value))


def _words(value: object) -> str:
    return NONE if value is None else str(value).replace("_", " ")


def _whys(whys: object) -> str:
    """Reasons of the waits, the commonest first; a share for each where there are several."""
    if not isinstance(whys, Mapping):
        return _words(whys)
    total = sum(whys.values())
    if len(whys) < 2 or not total:
        return ", ".join(whys) or NONE
    shares = sorted(whys.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * count / total:.0f}%" for name, count in shares
                     if count / total >= 0.005)


def _value(value: object) -> str:
    """A parameter or a fact about the machine as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(item) for item in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _sentences(arm: Mapping[str, Any]) -> str:
    """The verdict's reason, then what was wrong with the stream."""
    fault = (arm.get("delivered") or {}).get("fault")
    return ". ".join(_sentence(text) for text in (arm["reason"], fault) if text) + "."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _yes_no(value: object, bad: bool = True) -> Cell:
    if value is None:
        return Cell(NONE)
    return Cell("yes") if value else Cell("no", "bad" if bad else "")

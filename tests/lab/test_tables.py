"""Tables say the same as HTML and as text, and can be read without eyes or colours."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab import beside, mode, tables
from lab.automaton import Automaton
from lab.runs import Run
from tests.lab.made_up import STATES, made_up_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made_up_run(tmp_path_factory.mktemp("runs"))


def all_tables(run: Run) -> list[tables.Table]:
    return [tables.arms_table(run), tables.both_tests_table(run), tables.reasons_table(run),
            tables.evidence_table(run), tables.run_table(run)]


def test_every_heading_has_a_scope_and_every_table_a_caption(run: Run) -> None:
    for table in all_tables(run):
        markup = table.to_html().partition("</style>")[2]
        tree = ElementTree.fromstring(markup)
        assert tree.find(".//caption").text == table.caption
        assert all(heading.get("scope") for heading in tree.iter("th"))
        widths = {sum(1 for cell in row if cell.get("scope") != "rowgroup")
                  for row in tree.findall(".//tbody/tr")}
        assert widths == {len(table.columns) - 1}


def test_text_holds_every_cell(run: Run) -> None:
    for table in all_tables(run):
        text = str(table)
        assert all(cell.text in text for row in table.rows for cell in row)


def test_states_carry_word_and_mark(run: Run) -> None:
    html = tables.arms_table(run).to_html()
    assert "▲" in html
    assert " spins</span>" in html
    assert html.count('class="state"') == len(STATES)


def test_figures_of_the_real_systems_stand_in_their_rows(run: Run) -> None:
    rows = {(row[0].text, row[1].text): [cell.text for cell in row]
            for row in tables.arms_table(run).rows}
    assert "77k to 176k" in rows["async+pipelined", "shipped"]
    assert "368 to 374" in rows["async+pipelined", "shipped"]
    assert "389 to 847" in rows["async+pipelined", "shipped"]
    assert "372 to 380" in rows["held-completion", "held-listed"]


def test_quiet_is_not_enough_to_be_good(run: Run) -> None:
    good = {(row[0].text, row[1].text): row[-1].text for row in tables.both_tests_table(run).rows}
    assert good["async", "fixed"] == "quiet and complete"
    assert good["async+pipelined", "shipped"] == "spins, out of order"
    assert good["async", "shipped"] == "parked, deaf to stop"
    torn = {**run.arms[3], "delivered": {"bytes": 1, "expected": 2, "in_order": True}}
    assert tables.delivery(torn) == "bytes missing"


def test_a_run_s_folder_goes_along_for_programs(run: Run) -> None:
    bundle = tables.run_table(run)._repr_mimebundle_()
    assert bundle[tables.RUN_TYPE] == {"path": str(run.path)}


def test_the_answer_is_the_run_s_own(run: Run, tmp_path: Path) -> None:
    assert str(tables.answer(run)) == "Why so little?\nIt sleeps."
    silent = made_up_run(tmp_path, open_question=None)
    assert "does not answer" in tables.answer(silent).text


@pytest.mark.parametrize(("value", "text"), [
    (None, tables.NONE), (0, "0"), (0.044, "0.04"), (2.93, "2.9"), (368.1, "368"),
    (142_345.0, "142k"),
])
def test_figures_have_the_digits_they_deserve(value: float | None, text: str) -> None:
    assert tables.figure(value) == text


def test_single_reference_values_are_ranges_of_themselves() -> None:
    known = beside.known()
    found = beside.find(known, beside.CELERIS, "async+pipelined", "timed-wait", "cpu_ms_per_s")
    assert found is not None
    assert (found.low, found.high, found.shown) == (670, 670, "670")
    assert beside.find(known, beside.CELERIS, "async", "nonsense", "cpu_ms_per_s") is None
    assert beside.known("splice") == []


def test_the_automaton_is_a_picture_with_words(run: Run) -> None:
    drawing = Automaton(run).to_svg()
    tree = ElementTree.fromstring(drawing)
    assert tree.get("role") == "img"
    assert "PARKED to SPIN" in tree.get("aria-label", "")
    texts = {element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"IDLE", "PARKED", "SPIN", "measured: 0 waits/s"} <= texts


@pytest.mark.parametrize(("word", "expected"), [("1", True), ("0", False), ("no", False)])
def test_the_environment_decides_whether_anybody_watches(
    monkeypatch: pytest.MonkeyPatch, word: str, expected: bool
) -> None:
    monkeypatch.setenv(mode.BATCH, word)
    assert mode.is_batch() is expected


def test_a_plain_interpreter_is_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mode.BATCH, raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", "some.ipynb")
    assert mode.is_batch()

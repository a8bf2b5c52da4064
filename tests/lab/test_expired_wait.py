"""The case expired-wait in the run store: run small, told in tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import facts
from engine.errors import EngineError, MachineError, UsageError
from engine.waits import Case, measure
from lab import cli, experiment, expired_wait, kernel, reference, wait_tables, waits
from lab.experiment import Interrupted
from lab.expired_wait import EXPERIMENT
from lab.plots.waits import df_waits, plot_timeouts, plot_zero
from lab.runs import Run, RunStore, compare, read_run
from tests.lab.made_up import Heard

WAYS = ["io_uring_wait_cqe_timeout", "io_uring_get_events", "io_uring_peek_cqe", "epoll_wait",
        "eventfd_workaround", "ring_worker_kernel", "ring_worker_poll"]
SMALL: dict[str, Any] = {"timeouts": "0,200us", "napi": "0,20", "run_ms": 2.0, "repetitions": 2,
                         "spin_seconds": 0.3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One small run."""
    try:
        measure(Case(waits.RING_WAIT, 0), 0.001)
    except MachineError as reason:
        pytest.skip(str(reason))
    store = RunStore(tmp_path_factory.mktemp("runs"))
    outcome = EXPERIMENT.run(SMALL, arms=WAYS, store=store)
    assert outcome.path is not None
    return read_run(outcome.path)


def test_the_run_holds_rows_arms_and_conclusions(run: Run) -> None:
    assert {row["way"] for row in run.data["rows"]} == set(WAYS)
    assert {arm["arm"] for arm in run.arms} == set(WAYS)
    assert {arm["policy"] for arm in run.arms} <= {"none", "coop", "defer"}
    ring = next(arm for arm in run.arms if arm["arm"] == waits.RING_WAIT)
    assert {"0", "200 us"} <= set(ring["windows"])
    assert run.data["kernel_check"]["text"]
    assert run.data["interrupted"] is None


def test_the_run_says_what_the_engine_stands_on(run: Run) -> None:
    engine = run.machine["engine"]
    assert engine["liburing"] == facts.liburing()
    assert tuple(engine["features"]) == facts.probe().features


def test_two_runs_can_be_compared(run: Run) -> None:
    rows = compare(run, run)
    assert {row["waits_per_s_ratio"] for row in rows} == {1.0}
    assert len(rows) == len(run.data["rows"])


def test_the_waits_bound_the_spin_of_dirty_list(run: Run) -> None:
    """The spin's turns are these waits and a little more, so it cannot be much faster than they."""
    spin = {row["expired"]: row for row in run.data["spin"]["rows"]}
    assert set(spin) == {"kernel", "poll"}
    for row in spin.values():
        assert 0 < row["waits_per_cpu_s"] < 1.3 * row["bound_per_cpu_s"]
    if run.data["kernel_check"]["has_check"] is False:
        # The cheap wait does not stop the spin: it turns faster.
        assert spin["poll"]["waits_per_cpu_s"] > 3 * spin["kernel"]["waits_per_cpu_s"]


def test_the_run_says_whether_the_spin_keeps_its_bound(run: Run) -> None:
    spin = run.data["spin"]
    for row in spin["rows"]:
        share = row["waits_per_cpu_s"] / row["bound_per_cpu_s"]
        assert row["of_bound"] == pytest.approx(share)
        assert row["exceeds_bound"] == (share > 1 + waits.SPREAD)
    assert spin["text"].count("of the bound") == len(spin["rows"])


def test_a_spin_over_its_bound_stands_out() -> None:
    row = {"expired": "kernel", "policy": "shipped", "wait_us": 4.0, "bound_per_cpu_s": 250_000.0,
           "waits_per_s": 1.0, "waits_per_cpu_s": 300_000.0, "us_per_iteration": 3.3,
           "of_bound": 1.2, "exceeds_bound": True}
    told = expired_wait.told_spin([row])
    assert told is not None
    assert "120% of the bound, so it EXCEEDS it" in told["text"]
    made = Run(Path("r"), {"spin": told, "machine": {}, "run": "r"})
    assert "EXCEEDS" in str(wait_tables.spin_table(made))
    assert "EXCEEDS" not in expired_wait.bound_kept(row | {"of_bound": 0.9, "exceeds_bound": False})


def test_what_the_waits_do_not_decide_fails_the_check(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "expired-wait", *(word for way in WAYS[:2] for word in ("--arm", way)),
                 "--policy", "none", "--repeat", "1", "-p", "timeouts=0", "-p", "napi=0", "-p",
                 "run_ms=1", "--out", str(tmp_path), "--check"]
    unsure = {"has_check": None, "sleeps": None, "ratio_to_get_events": 4.0, "text": "Who knows."}
    monkeypatch.setattr(waits, "kernel_check", lambda rows: unsure)
    assert cli.main(arguments) == cli.BROKEN
    assert "ringlab: not shown: Who knows." in capsys.readouterr().err
    monkeypatch.setattr(waits, "kernel_check", lambda rows: unsure | {"has_check": False})
    assert cli.main(arguments) == 0
    over = dict(run.data["spin"]["rows"][0]) | {"of_bound": 1.5, "exceeds_bound": True}
    (line,) = expired_wait.not_shown([], [over])
    assert "EXCEEDS" in line


@pytest.mark.parametrize(("cut", "raised", "told"), [
    (KeyboardInterrupt(), Interrupted, "interrupted by hand after 1 of 1 rounds, at the spin of"),
    (EngineError(5, "it fell over"), EngineError, "ended by an error: it fell over"),
])
def test_what_ends_the_second_part_costs_no_finished_round(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: BaseException,
    raised: type[BaseException], told: str,
) -> None:
    made: list[str] = []

    def first_only(choice: str, seconds: float) -> dict[str, Any]:
        if made:
            raise cut
        made.append(choice)
        return dict(run.data["spin"]["rows"][0])

    monkeypatch.setattr(expired_wait, "spin", first_only)
    store = RunStore(tmp_path)
    with pytest.raises(raised) as caught:
        EXPERIMENT.run(SMALL | {"napi": "0", "repetitions": 1}, arms=WAYS, store=store)
    kept = store.latest("expired-wait")
    assert kept.data["interrupted"].startswith(told)
    assert {row["way"] for row in kept.data["rows"]} == set(WAYS)
    assert len(kept.data["spin"]["rows"]) == 1, "the spin that was finished is kept too"
    assert str(kept.path) in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert "Not whole" in wait_tables.quality_note(kept).text


def test_an_error_in_a_later_round_keeps_those_before(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, count = waits.measure, [0]

    def falls_over(case: Case, *args: Any, **options: Any) -> Any:
        count[0] += case.way == "ppoll"
        if count[0] > 1:
            raise EngineError(4, "ppoll: interrupted")
        return real(case, *args, **options)

    monkeypatch.setattr(waits, "measure", falls_over)
    assert cli.main(["run", "expired-wait", "--arm", "ppoll", "--policy", "none", "-p",
                     "timeouts=0", "-p", "napi=0", "-p", "run_ms=1", "--repeat", "3", "--out",
                     str(tmp_path), "--no-progress"]) == cli.ERROR
    err = capsys.readouterr().err
    kept = RunStore(tmp_path).latest("expired-wait")
    assert kept.data["rounds"] == 1
    assert {row["way"] for row in kept.data["rows"]} == {"ppoll", "epoll_wait"}
    assert err.splitlines() == [
        f"ringlab: ppoll: interrupted; what was finished before is kept in {kept.path}"]


def test_a_way_that_cannot_take_the_timeout_is_named(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "expired-wait", "--arm", "epoll_wait", "--arm", "ppoll", "--policy",
                     "none", "--repeat", "1", "-p", "timeouts=50us", "-p", "napi=0", "-p",
                     "run_ms=1", "--out", str(tmp_path)]) == 0
    assert ("left out: epoll_wait with timeout 50 us (counts in steps of 1,000,000 ns)"
            in capsys.readouterr().out)
    kept = RunStore(tmp_path).latest()
    assert [one["way"] for one in kept.data["left_out"]] == ["epoll_wait"]
    assert "Left out: epoll_wait" in wait_tables.quality_note(kept).text


def test_the_second_part_tells_how_far_it_is(run: Run, tmp_path: Path) -> None:
    heard = Heard()
    EXPERIMENT.run(SMALL | {"napi": "0", "repetitions": 1, "timeouts": "0"}, progress=heard,
                   arms=["ring_worker_kernel"], policies=["defer"], store=RunStore(tmp_path))
    at = heard.lines.index("begin 1 beside the waits")
    assert heard.lines[at + 1:] == ["spin of dirty-list, expired=kernel"] * 2 + ["end"]


def test_napi_is_measured_or_its_absence_told(run: Run) -> None:
    polled = [row for row in run.data["rows"] if row["napi_us"]]
    lacking = [one for one in run.data["absent"] if one["napi_us"]]
    assert polled or lacking
    assert bool(run.data["ping_pong"]) == bool(polled)


def test_every_table_has_rows_and_both_faces(run: Run, tmp_path: Path) -> None:
    for table in (wait_tables.zero_table(run), wait_tables.flags_table(run),
                  wait_tables.spin_table(run), wait_tables.cures_table(run),
                  wait_tables.kernels_table(RunStore(tmp_path))):
        assert table.rows
        assert "<caption>" in table.to_html()
        assert table.caption in str(table)
    for note in (wait_tables.check_note(run), wait_tables.quality_note(run),
                 wait_tables.ping_note(run)):
        assert note.text
    assert wait_tables.napi_table(run).caption
    polled = {row["way"] for row in run.data["rows"] if row["napi_us"]} - {waits.RING_WAIT}
    assert {row[0].text for row in wait_tables.napi_ways_table(run).rows} == polled
    assert bool(polled) == bool(run.data["ping_pong"])


def test_reference_figures_stand_beside_ours_with_their_machine(run: Run, tmp_path: Path) -> None:
    text = str(wait_tables.zero_table(run))
    assert "11 (Zen 5, founding)" in text
    assert "4 to 5.2 (VM, 6.18)" in text
    kernels = str(wait_tables.kernels_table(RunStore(tmp_path)))
    assert "minimal kernel 7.3.4" in kernels
    assert "0.920" in kernels
    (own,) = {row["machine"] for row in reference.kernel_pair()}
    assert own.removeprefix("QEMU icount, ") in kernels
    assert "by the lab" in kernels


def test_the_pair_of_kernels_stands_way_by_way() -> None:
    table = wait_tables.pair_table()
    told = {(row[1].text, row[2].text): [cell.text for cell in row] for row in table.rows}
    assert len(told) == len({row["arm"] for row in reference.kernel_pair()})
    assert told[waits.RING_WAIT, "0"][0] == "cheaper"
    assert told[waits.RING_WAIT, "0"][6:8] == ["1.000", "0.000"]
    assert told[waits.RING_WAIT, "50 us"][0] == "same"
    assert told["epoll_wait", "0"][0] == "same"


def test_two_builds_of_one_release_are_told_apart(tmp_path: Path) -> None:
    def measured(name: str, us: float, timers: float) -> kernel.KernelFigures:
        row = {"way": waits.RING_WAIT, "timeout_ns": 0, "flags": "none", "napi_us": 0,
               "us_p50": us, "voluntary_switches": timers, "timer_starts": timers}
        return kernel.KernelFigures(Path("/there", name), "6.12.1", [row], [], 1.0)

    pair = [measured("before.bzImage", 5.0, 1.0), measured("after.bzImage", 0.9, 0.0)]
    store = RunStore(tmp_path)
    kernel.store(kernel.Comparison(pair), 1.0, store)
    here = [[cell.text for cell in row] for row in wait_tables.kernels_table(store).rows
            if row[0].text == "here"]
    assert here == [["here", "6.12.1 (before.bzImage)", "before", "5.00", "1.000", "1.000"],
                    ["here", "6.12.1 (after.bzImage)", "with the check", "0.900", "0.000",
                     "0.000"]]


def test_pictures_draw_the_frame_that_is_returned(run: Run) -> None:
    frame = df_waits(run)
    assert len(frame) == len(run.data["rows"])
    for picture in (plot_zero(run), plot_timeouts(run), plot_timeouts(run, "defer")):
        assert picture.layout is not None
        assert run.name in picture.caption
        assert "Machine: Linux" in picture.caption
    with pytest.raises(UsageError, match="sqpoll"):
        plot_timeouts(run, "sqpoll")


def test_it_is_among_the_experiments_but_has_no_live_loop() -> None:
    assert "expired-wait" in experiment.names()
    assert experiment.case("expired-wait") is EXPERIMENT
    with pytest.raises(UsageError, match="ringlab run expired-wait"):
        experiment.load("expired-wait")


@pytest.mark.parametrize(("given", "told"), [
    ({"timeouts": "50"}, "with a unit"), ({"timeouts": ","}, "timeouts is empty"),
    ({"napi": "fast"}, "napi=fast"), ({"napi": "-1"}, "0 to 1,000,000"),
    ({"run_ms": 0.5}, "run_ms"), ({"repetitions": 0}, "repetitions"),
    ({"spin_seconds": -1}, "spin_seconds"), ({"spin_seconds": 0.1}, "give 0.2 to 60 s, or 0"),
])
def test_a_value_that_makes_no_sense_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        EXPERIMENT.run(given)


@pytest.mark.parametrize("arguments", [["--arm", "epol_wait"], ["--policy", "sqpoll"]])
def test_the_command_refuses_what_there_is_not(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "expired-wait", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_runs_it_and_says_where_the_run_is(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([
        "run", "expired-wait", "--arm", "io_uring_get_events", "--policy", "none", "--repeat", "1",
        "-p", "timeouts=0", "-p", "napi=0", "-p", "run_ms=1", "--out", str(tmp_path),
    ]) == 0
    out = capsys.readouterr().out
    assert "io_uring_get_events" in out
    assert str(RunStore(tmp_path).latest("expired-wait").path) in out

"""The table of waits: its rows, ratios, words and warnings; the command that prints it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError, MachineError, UsageError
from engine.waits import TRACES, Case, measure
from lab import cli, wait_commands, waits
from lab.waits import CHEAP, CURE, DEAR, RING_WAIT, Plan, Result

FEW = [RING_WAIT, CURE, "epoll_wait", "io_uring_peek_cqe"]


@pytest.fixture(scope="module")
def result() -> Result:
    """A short run of a few ways."""
    try:
        measure(Case(RING_WAIT, 0), 0.001)
    except MachineError as reason:
        pytest.skip(str(reason))
    return waits.run(Plan(ways=FEW, timeouts_ns=(0, 50_000), rounds=3, run_s=0.01))


def test_a_zero_ring_wait_is_dear_and_get_events_is_cheap_before_the_patch(result: Result) -> None:
    """Ratios within one run. Which kernel this is, its own figures tell."""
    check = waits.kernel_check(result.rows)
    ring, cure = result.row(RING_WAIT, 0), result.row(CURE, 0)
    assert ring is not None
    assert cure is not None
    assert cure["ratio_to_epoll_wait_0"] < 4
    if check["has_check"]:
        assert ring["ratio_to_epoll_wait_0"] < DEAR
    else:
        assert check["has_check"] is False, check["text"]
        assert ring["ratio_to_epoll_wait_0"] > 5


def test_the_check_does_not_rest_on_switches() -> None:
    def rows(us: float, starts: float | None, switches: float) -> list[dict[str, Any]]:
        shared = {"timeout_ns": 0, "flags": "none", "napi_us": 0}
        return [{"way": RING_WAIT, "us_p50": us, "timer_starts": starts,
                 "voluntary_switches": switches, **shared},
                {"way": CURE, "us_p50": 0.13, "timer_starts": starts and 0.0,
                 "voluntary_switches": 0.0, **shared}]

    before = waits.kernel_check(rows(4.3, 1.0, 0.0))
    assert (before["has_check"], before["sleeps"]) == (False, False)
    sleeper = waits.kernel_check(rows(11.0, 1.0, 1.0))
    assert (sleeper["has_check"], sleeper["sleeps"]) == (False, True)
    patched = waits.kernel_check(rows(0.2, 0.0, 0.0))
    assert (patched["has_check"], patched["sleeps"]) == (True, None)
    assert waits.kernel_check(rows(0.13 * (DEAR + 1), None, 0.0))["has_check"] is False
    assert waits.kernel_check(rows(0.13 * (CHEAP - 1), None, 0.0))["has_check"] is True
    assert waits.kernel_check(rows(0.13 * (CHEAP + DEAR) / 2, None, 0.0))["has_check"] is None
    assert waits.kernel_check([])["has_check"] is None


def test_timers_tell_of_the_check_where_only_the_wait_was_measured() -> None:
    """As when ``ringlab kernel`` is narrowed down to that one way."""
    def lone(starts: float | None) -> list[dict[str, Any]]:
        return [{"way": RING_WAIT, "timeout_ns": 0, "flags": "none", "napi_us": 0, "us_p50": 0.9,
                 "timer_starts": starts, "voluntary_switches": 0.0}]

    patched, before = waits.kernel_check(lone(0.0)), waits.kernel_check(lone(1.0))
    assert (patched["has_check"], before["has_check"]) == (True, False)
    assert waits.CURE not in patched["text"]
    assert waits.kernel_check(lone(None))["has_check"] is None


def test_rows_have_their_names_and_the_base_has_ratio_one(result: Result) -> None:
    needed = {"way", "timeout_ns", "flags", "napi_us", "us_p50", "us_p99", "overrun_us_p50",
              "cpu_us", "voluntary_switches", "timer_starts", "timer_interrupts",
              "ratio_to_epoll_wait_0"}
    assert all(needed <= set(row) for row in result.rows)
    base = result.row("epoll_wait", 0)
    assert base is not None
    assert base["ratio_to_epoll_wait_0"] == pytest.approx(1.0)
    late = result.row(RING_WAIT, 50_000)
    assert late is not None
    assert late["overrun_us_p50"] == pytest.approx(late["us_p50"] - 50)
    for name in TRACES:
        assert any(row[name] is not None for row in result.rows) or name in result.untraced


def test_the_base_is_measured_even_when_nobody_asked_for_it() -> None:
    assert Plan(ways=[CURE], flags=("defer",)).cases() == [
        Case("epoll_wait", 0), Case(CURE, 0, "defer")]


def test_a_plan_leaves_out_what_makes_no_sense() -> None:
    found = Plan(napi_us=(0, 20)).cases()
    assert len(found) == len(set(found))
    assert {case.flags for case in found if case.way == "timerfd"} == {"none"}
    assert {case.timeout_ns for case in found if case.way == CURE} == {0}
    assert {case.timeout_ns for case in found if case.way == "epoll_wait"} == {0, 1_000_000}
    assert not [case for case in found if case.napi_us], "without a socket there is no NAPI"
    polled = {case.way for case in Plan(napi_us=(0, 20)).cases(socket=3) if case.napi_us}
    assert polled == set(waits.NAPI_WAYS)


@pytest.mark.parametrize(("text", "ns"), [
    ("0", 0), ("1ns", 1), ("50us", 50_000), ("50 µs", 50_000), ("1.5ms", 1_500_000), ("1s", 10**9),
])
def test_a_timeout_is_read_with_its_unit(text: str, ns: int) -> None:
    assert waits.parse_timeout(text) == ns
    if "." not in text and "µ" not in text:
        assert waits.label(ns).replace(" ", "") == text


@pytest.mark.parametrize("text", ["50", "us", "-1us", "0.5ns", "1h", "20s", ""])
def test_what_is_no_timeout_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give 0 to 10s with a unit"):
        waits.parse_timeout(text)


def row(way: str, **changes: Any) -> dict[str, Any]:
    plain = {"way": way, "timeout_ns": 0, "flags": "none", "napi_us": 0, "us_p50": 1.0,
             "us_lowest": 1.0, "us_highest": 1.01, "seconds": 1.0, "preempted": 0, "own_us": 0.001}
    return {**plain, **changes}


def test_a_quiet_machine_gets_no_warning() -> None:
    assert waits.warnings_of(Result([row("a"), row("b")], rounds=3)) == []


@pytest.mark.parametrize(("changes", "cause", "remedy"), [
    ({"us_highest": 1.5}, "differ by more than 10%", "compare ratios"),
    ({"preempted": 500}, "took the CPU", "taskset"),
    ({"own_us": 0.03}, "own cost", "clocksource"),
])
def test_a_noisy_machine_gets_a_warning_with_cause_and_remedy(
    changes: dict[str, Any], cause: str, remedy: str
) -> None:
    (line,) = waits.warnings_of(Result([row("a", **changes)], rounds=3))
    assert cause in line
    assert remedy in line


@pytest.mark.parametrize(("finished", "rounds", "rows"), [
    (2, 2, {"epoll_wait", "ppoll", CURE}), (0, 0, {"epoll_wait", "ppoll"})])
@pytest.mark.parametrize("cut", [KeyboardInterrupt(), EngineError(4, "no"), RuntimeError("a bug")])
def test_whatever_ends_it_what_was_measured_is_kept(
    result: Result, monkeypatch: pytest.MonkeyPatch, cut: Any, finished: int, rounds: int,
    rows: set[str],
) -> None:
    """Of finished rounds; where none is, of the one that was begun."""
    real, left = waits.measure, [finished * 3 + 2]

    def until(*args: Any, **options: Any) -> Any:
        if not left[0]:
            raise cut
        left[0] -= 1
        return real(*args, **options)

    monkeypatch.setattr(waits, "measure", until)
    plan = Plan(ways=["ppoll", CURE], timeouts_ns=(0,), flags=("none",), rounds=5, run_s=0.001,
                trace=False)
    kept = waits.run(plan)
    assert (kept.cut, kept.rounds) == (cut, rounds)
    assert {row["way"] for row in kept.rows} == rows
    left[0] = 0
    with pytest.raises(type(cut)):
        waits.run(plan)


def test_the_command_prints_what_was_measured_before_an_error(
    result: Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, count = waits.measure, [0]

    def falls_over(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > 2:
            raise EngineError(4, "ppoll: interrupted")
        return real(*args, **options)

    monkeypatch.setattr(waits, "measure", falls_over)
    assert cli.main(["waits", "--json", "--rounds", "3", "--run-ms", "2", "--timeout", "0",
                     "--flags", "none", "--way", "ppoll"]) == cli.ERROR
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert {row["way"] for row in told["rows"]} == {"epoll_wait", "ppoll"}
    assert told["interrupted"] == "ended by an error (ppoll: interrupted) after 1 of 3 rounds"
    progress, line = err.splitlines()
    assert progress.startswith("waits: 0 of ")
    assert line == ("ringlab: ppoll: interrupted; ended after 1 of 3 rounds; what was measured is "
                    "printed")


def test_what_is_left_out_of_a_plan_is_told_with_its_reason(
    result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    left = Plan(ways=["epoll_wait", "timerfd", CURE], timeouts_ns=(0, 50_000),
                flags=("none",)).left_out()
    assert [(one["way"], one["timeouts_ns"], one["whole"]) for one in left] == [
        ("epoll_wait", [50_000], False), (CURE, [50_000], False)]
    (lone,) = Plan(ways=["timerfd", CURE], timeouts_ns=(0,), flags=("defer",)).left_out()
    assert (lone["way"], lone["whole"]) == ("timerfd", True)
    assert cli.main(["waits", "--rounds", "1", "--run-ms", "1", "--timeout", "50us", "--flags",
                     "none", "--way", CURE, "--way", "ppoll", "--no-trace"]) == 0
    assert f"left out: {CURE} with timeout 50 us (takes no timeout)" in capsys.readouterr().out


def test_a_plan_of_which_nothing_is_left_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["waits", "--timeout", "50us", "--way", CURE]) == cli.ERROR
    err = capsys.readouterr().err
    assert "nothing is left to measure" in err
    assert "takes no timeout" in err
    assert err.count("\n") == 1


# ---- ringlab waits ---------------------------------------------------------------------------


def test_the_command_prints_json_as_told(
    result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["waits", "--json", "--rounds", "1", "--run-ms", "2", "--timeout", "0", "--flags",
                 "none", *(word for way in FEW for word in ("--way", way))]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"machine", "rows"} <= set(told)
    assert told["machine"]["kernel"]
    assert told["machine"]["engine"]["liburing"]
    assert told["machine"]["engine"]["features"]
    assert {row["way"] for row in told["rows"]} == set(FEW)
    assert told["kernel_check"]["text"]


def test_the_command_prints_a_table_and_what_it_means(
    result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["waits", "--rounds", "1", "--run-ms", "2", "--timeout", "0", "--flags", "none",
                     "--way", RING_WAIT, "--way", CURE, "--no-trace"]) == 0
    out = capsys.readouterr().out
    assert RING_WAIT in out
    assert "x epoll 0" in out
    assert "not counted: timer:hrtimer_start was not asked for" in out
    assert "This kernel" in out or "These figures" in out


def test_the_table_tells_what_a_helper_costs(
    result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["waits", "--rounds", "1", "--run-ms", "20", "--timeout", "200us", "--flags",
                     "none", "--way", "eventfd_workaround", "--no-trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-4:] == ["helper", "us", "timed", "out"]
    helped = next(line.split() for line in lines if line.startswith("eventfd_workaround"))
    assert float(helped[-2]) > 0
    assert helped[-1].endswith("%")
    base = next(line.split() for line in lines if line.startswith("epoll_wait"))
    assert base[-2:] == ["-", "100.0%"]
    plain = wait_commands.rows_table(result.rows)
    assert "helper" not in plain, "no way of these has one"


@pytest.mark.parametrize(("arguments", "told"), [
    (["--way", "epol_wait"], "epoll_wait"),
    (["--timeout", "50"], "with a unit"),
    (["--flags", "sqpoll"], "none, coop, defer"),
    (["--rounds", "0"], "0"),
])
def test_a_mistake_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["waits", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_ctrl_c_prints_the_rounds_that_were_finished(result: Result, project: Path) -> None:
    command = [sys.executable, "-c", "import sys; from lab.cli import main; sys.exit(main())",
               "waits", "--json", "--rounds", "1000", "--run-ms", "2", "--timeout", "0", "--flags",
               "none", "--way", CURE]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=project,
    ) as child:
        time.sleep(3)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert 0 < json.loads(out)["rounds"] < 1000
    assert "of 1000 rounds" in err
    assert "Traceback" not in err

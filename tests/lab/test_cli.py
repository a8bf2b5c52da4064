"""The command line as a user meets it: exit codes, one-line errors, JSON, signals."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import RingServer, waits
from lab import cli, console, doctor
from lab.clients import Client
from lab.runs import RUN_FILE, SCHEMA

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys, lab.cli; sys.exit(lab.cli.main())"]
FAST = ["-p", "seconds=0.4", "--repeat", "1", "--no-progress"]


def start(*args: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *args], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, **options,  # type: ignore[call-overload]
    )


def call(*args: str) -> tuple[int, str, str]:
    with start(*args) as process:
        out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr of a command that exits 2."""
    assert cli.main(args) == cli.ERROR
    out, err = capsys.readouterr()
    assert err.startswith("ringlab: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    return err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "dirty-lst"], "unknown experiment 'dirty-lst'; choose from: dirty-list"),
        (["run"], "Missing argument 'EXPERIMENT'"),
        (["rum"], "No such command 'rum'"),
        (["run", "dirty-list", "--bogus"], "No such option"),
        (["run", "dirty-list", "-p", "second=1"], "unknown parameter 'second'; choose from: secon"),
        (["run", "dirty-list", "-p", "seconds"], "'seconds' is not NAME=VALUE"),
        (["run", "dirty-list", "-p", "seconds=9999"], "seconds=9999 is not allowed: give 0.2 to"),
        (["run", "dirty-list", "-p", "rcvbuf=4x"], "bytes (suffixes: k, M, G, KiB, MiB, GiB)"),
        (["run", "dirty-list", "--arm", "asinc"], "unknown arm 'asinc'; choose from: async,"),
        (["run", "dirty-list", "--policy", "fxied"], "unknown policy 'fxied'; choose from: fixed,"),
        (["run", "dirty-list", "--repeat", "0"], "--repeat"),
        (["serve", "--port", "99999"], "port=99999 is not allowed: give 0 to 65,535"),
        (["serve", "--preset", "fixd"], "unknown policy 'fixd'; choose from: fixed"),
        (["serve", "--held", "lisetd"], "unknown choice of held 'lisetd'; choose from: listed"),
        (["relay", "--origin", "nowhere"], "is not HOST:PORT"),
        (["relay"], "Missing option '--origin'"),
        (["origin", "--rcvbuf", "-1"], "rcvbuf=-1 is not allowed"),
        (["serve", "--host", "localhost"], "is not a numeric address"),
        (["serve", "--idle", "tickless", "--send-wait", "untimed"], "make no sense together"),
        (["compare", "a", "b", "--out", "/nowhere"], "there is no run in /nowhere yet"),
        (["report", "nothing"], "unknown experiment 'nothing'"),
        (["run", "e" * 999], f"unknown experiment '{'e' * 60}...'; choose from: "),
        (["run", "dirty-list", "-p", "p" * 999], f"'{'p' * 60}...' is not NAME=VALUE"),
        (["serve", "--host", "224.0.0.1"], "host='224.0.0.1' is a multicast address"),
        (["origin", "--host", "255.255.255.255"], "is a broadcast address"),
        (["relay", "--origin", "::1:80"], "an IPv6 host stands in brackets, as in [::1]:8080"),
        (["runs", "--out", "/dev/null"], "/dev/null is not a folder"),
        (["compare", "a", "b", "--out", "/dev/null"], "/dev/null is not a folder"),
    ],
)
def test_mistakes_get_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    assert says in refused(capsys, *args)


def test_a_port_in_use_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is in use" in refused(capsys, "serve", "--port", port)


def test_help_and_version_need_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in ("doctor", "lab", "run", "report", "runs", "compare", "serve", "relay",
                    "origin"):
        assert f"\n  {command} " in listed
    code, out, err = call("--help")
    assert (code, out, err) == (0, listed, "")


def test_starting_is_light() -> None:
    heavy = {"numpy", "pandas", "pyarrow", "bokeh", "ipywidgets", "engine._native", "tqdm"}
    program = (
        "import sys, lab.cli; lab.cli.main(['--help'])\n"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr.strip() == "[]"


def test_set_up_and_doctor_look_for_the_same_browsers(project: Path) -> None:
    script = (project / "tools" / "bootstrap.sh").read_text(encoding="utf-8")
    sought = re.search(r"want_browser\(\) {.*?for name in ([^;]*);", script, re.DOTALL)
    assert sought is not None
    assert tuple(sought[1].split()) == doctor.BROWSERS


def test_doctor_gives_rows_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    assert "io_uring" in capsys.readouterr().out
    cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {row["state"] for row in found["rows"]} <= {"ok", "warn", "fail"}
    assert all(row["remedy"] for row in found["rows"] if row["state"] != "ok")


@pytest.mark.parametrize("root", ["/proc/nowhere", "/proc", "/dev/null/x", "/tmp/" + "x" * 300,
                                  "~nosuchuser/x"])
def test_doctor_tells_of_a_store_that_takes_no_run(
    monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.setenv("RINGLAB_RUNS", root)
    (row,) = [row for row in doctor.examine() if row.what == "runs"]
    assert row.state == doctor.FAIL
    assert "RINGLAB_RUNS" in row.remedy


def test_doctor_leaves_nothing_in_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RINGLAB_RUNS", str(tmp_path / "not" / "yet"))
    (row,) = [row for row in doctor.examine() if row.what == "runs"]
    assert row.state in (doctor.OK, doctor.WARN)
    assert list(tmp_path.iterdir()) == []


def test_doctor_and_the_wait_bench_agree_on_what_can_be_traced(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> list[doctor.Row]:
        return [row for row in doctor.examine() if row.what == "tracepoints"]

    reasons = waits.traceable()
    told = " ".join(row.found for row in rows() if row.state == doctor.OK)
    assert {event for event in waits.EVENTS.values() if event in told} == {
        event for name, event in waits.EVENTS.items() if name not in reasons}
    refused = waits.untraced("timer_starts", 3, errno.EACCES)
    monkeypatch.setattr(waits, "traceable", lambda: {"timer_starts": refused})
    (warned,) = [row for row in rows() if row.state == doctor.WARN]
    assert "timer:hrtimer_start: perf_event_open is refused" in warned.found
    assert "kernel.perf_event_paranoid=-1" in warned.remedy


def test_a_run_is_printed_kept_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--arm", "async", "--out", str(tmp_path), *FAST]
    assert cli.main(["run", "dirty-list", "--policy", "fixed", "--check", "--json", *chosen]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == SCHEMA
    assert {"experiment", "run", "parameters", "machine", "arms"} <= set(data)
    row = data["arms"][0]
    assert {"arm", "policy", "decisions", "windows", "state", "reason", "delivered",
            "honours_stop", "honours_write_timeout", "send_in_flight", "budget",
            "within_budget"} <= set(row)
    assert (tmp_path / data["run"] / RUN_FILE).is_file()

    # A fault that was asked for by name breaks no budget.
    assert cli.main(["run", "dirty-list", "--policy", "shipped", "--check", *chosen]) == 0
    table = capsys.readouterr().out
    assert "= parked" in table
    assert "sleeps in a wait without a timeout" in table

    assert cli.main(["runs", "--json", "--out", str(tmp_path)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["states"] == {"async/fixed": "quiet"}
    assert cli.main(["compare", first["name"], second["name"], "--out", str(tmp_path)]) == 0
    assert "async" in capsys.readouterr().out


def test_a_broken_budget_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lab.dirty_list import BUDGETS

    monkeypatch.setitem(BUDGETS, "shipped", BUDGETS["fixed"])
    args = ["run", "dirty-list", "--arm", "async+pipelined", "--policy", "shipped", *FAST,
            "--out", str(tmp_path)]
    assert cli.main(args) == 0, "no budget was asked for"
    assert cli.main([*args, "--check"]) == cli.BROKEN
    err = capsys.readouterr().err
    assert "budget broken: async+pipelined under shipped:" in err
    assert "waits/s over idle" in err


@pytest.mark.parametrize("out", ["/proc/nowhere", "/dev/null/x", "/tmp/" + "x" * 300])
def test_reports_that_cannot_be_written_are_one_line(
    capsys: pytest.CaptureFixture[str], out: str
) -> None:
    for what in ("--all", "expired-wait"):
        err = refused(capsys, "report", what, "--out", out)
        assert "cannot write the report to" in err
        assert len(err) < 500


def test_a_page_in_front_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lab import report

    made = report.Report(tmp_path / "n", tmp_path / "h", None)
    monkeypatch.setattr(report, "make_report", lambda *_, **__: made)
    (tmp_path / "index.html").mkdir()
    for what in ("--all", "expired-wait"):
        assert "cannot write the report to" in refused(capsys, "report", what, "--out",
                                                       str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


def test_an_arm_that_did_not_come_to_its_state_fails_the_check_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The socket takes the whole response, so there is no SEND to wait for."""
    args = ["run", "dirty-list", "--arm", "sync", *FAST, "--out", str(tmp_path),
            "-p", "response_size=1000"]
    for policy in ("shipped", "tickless"):
        assert cli.main([*args, "--policy", policy]) == 0, "no check was asked for"
        out = capsys.readouterr().out
        assert f"! sync under {policy}: no SEND was in flight" in out.replace("\n", " ")
        assert "sync  " in out
        assert cli.main([*args, "--policy", policy, "--check"]) == cli.BROKEN
        err = capsys.readouterr().err
        assert f"ringlab: not shown: sync under {policy}: no SEND was in flight" in err


def test_a_state_that_stays_undecided_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the loop's idle wake-ups, every 300 ms here, the window holds too few."""
    assert cli.main(["run", "dirty-list", "--arm", "sync", "--policy", "timed-wait", *FAST,
                     "-p", "wait_cap_ms=300", "--out", str(tmp_path), "--check"]) == cli.BROKEN
    out, err = capsys.readouterr()
    assert "! undecided" in out
    assert "ringlab: not shown: sync under timed-wait: undecided: " in err


def test_a_disk_that_refuses_costs_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lab.runs._write_durably", full)
    code = cli.main(["run", "dirty-list", "--arm", "sync", "--policy", "tickless", *FAST,
                     "--out", str(tmp_path / "runs"), "--json"])
    out, err = capsys.readouterr()
    assert code == cli.ERROR
    assert json.loads(out)["arms"][0]["arm"] == "sync"
    assert err.startswith("ringlab: cannot store the run")
    assert "; it needs " in err


@pytest.mark.parametrize("case", ["dirty-list", "splice", "expired-wait"])
def test_a_store_that_cannot_be_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    said = refused(capsys, "run", case, "--out", str(tmp_path / "file" / "runs"))
    assert "Not a directory; give a folder that can be written (--out, or RINGLAB_RUNS)" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_stops_on_signals_and_tells_its_counters(number: signal.Signals) -> None:
    with start("serve", "--json", "--preset", "shipped", "--response-size", "100KiB",
               "--so-sndbuf", "64KiB") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["settings"]["response_size"] == 102_400
        assert ready["decisions"]["membership"] == "listed"
        with Client(ready["host"], ready["port"]) as client:
            client.ask("/", 102_400)
            assert client.read_all()
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["counters"]["requests"] == 1


def test_serve_bounds_the_handler_time_that_a_client_asks_for() -> None:
    with start("serve", "--json") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with socket.create_connection((ready["host"], ready["port"]), 10) as client:
            client.sendall(b"GET /sync?ms=60000 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400 Bad Request: ms Is Over The Limit")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert ready["settings"]["max_handler_ms"] == 1000
    assert (process.returncode, RingServer().settings["max_handler_ms"]) == (0, 60_000)


def test_serve_stops_though_its_worker_is_parked() -> None:
    with start("serve", "--json", "--preset", "shipped", "--so-sndbuf", "64KiB") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with Client(ready["host"], ready["port"], rcvbuf=4096) as client:
            client.ask("/async?size=3145728", 3_145_728)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert json.loads(out)["counters"]["sending"] == 1, "it was parked with a SEND in flight"


def test_relay_and_origin_serve_together_and_stop_in_order() -> None:
    with start("origin", "--json") as origin:
        assert origin.stdout is not None
        target = json.loads(origin.stdout.readline())["target"]
        with start("relay", "--json", "--origin", target, "--preset", "before",
                   "--recv-behind", "allowed", "--so-sndbuf", "64KiB") as relay:
            assert relay.stdout is not None
            ready = json.loads(relay.stdout.readline())
            assert ready["origin"] == target
            assert ready["policy"] == "recv-allowed"
            assert ready["settings"]["so_sndbuf"] == 65_536
            assert ready["settings"]["server_timeout_ms"] == 60_000
            assert ready["settings"]["client_timeout_ms"] == 60_000
            with Client(ready["host"], ready["port"]) as client:
                client.ask("/object?size=100000", 100_000)
                assert client.read_all()
            relay.send_signal(signal.SIGTERM)
            out, err = relay.communicate(timeout=10)
        assert (relay.returncode, err) == (0, "")
        assert json.loads(out)["counters"]["requests"] == 1
        origin.send_signal(signal.SIGINT)
        out, err = origin.communicate(timeout=10)
    assert (origin.returncode, err) == (0, "")
    assert json.loads(out)["counters"]["requests"] == 1


def test_ctrl_c_keeps_what_was_finished_and_exits_130(tmp_path: Path) -> None:
    with start("run", "dirty-list", "-p", "seconds=0.3", "--repeat", "50", "--arm", "sync",
               "--policy", "tickless", "--no-progress", "--out", str(tmp_path)) as process:
        time.sleep(8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == cli.INTERRUPTED
    assert "sync" in out
    assert err.strip().startswith("ringlab: interrupted after ")
    assert err.strip().count("\n") == 0
    assert "Traceback" not in err
    assert len(list(tmp_path.glob(f"*/{RUN_FILE}"))) == 1


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    with start("doctor", "--json") as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(30)
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_tables_are_aligned() -> None:
    text = console.table([("a", "1"), ("long", "22")], ("name", "n"), "lr")
    assert text.splitlines() == ["name   n", "----  --", "a      1", "long  22"]
    assert console.number(None) == "-"
    assert console.number(185_345.2) == "185,345"
    assert console.number(0.25, 2) == "0.25"

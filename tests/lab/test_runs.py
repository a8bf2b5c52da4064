import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import MachineError, UsageError
from lab import cli, runs
from lab.runs import RunStore, compare, differences
from lab.scratch import locked

SAMPLES = np.zeros(5, dtype=[("at_ns", "u8"), ("waits", "u8", (3,)), ("mark", "S4")])
SAMPLES["at_ns"] = np.arange(5)
SAMPLES["waits"][:, 2] = 7
SAMPLES["mark"] = b"idle"


def run_of(
    experiment: str = "dirty-list", waits: float = 40.0, state: str = "quiet"
) -> dict[str, Any]:
    figures = {"seconds": 1.0, "waits_per_s": waits, "wasted_per_s": None, "cpu_ms_per_s": 0.0}
    arm = {"arm": "sync", "policy": "shipped", "windows": {"stall": figures}, "state": state}
    return {"experiment": experiment, "parameters": {"depth": 2}, "machine": {"kernel": "6.18"},
            "arms": [arm]}


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, which only root can make."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_run_comes_back_as_it_was(store: RunStore) -> None:
    given = run_of()
    path = store.write(given, SAMPLES)
    assert path.parent == store.root
    assert "schema" not in given
    run = store.load(path.name)
    assert run.data == {"schema": 1, "run": path.name, **given}
    assert (run.experiment, run.parameters) == ("dirty-list", {"depth": 2})
    frame = run.df_samples()
    assert list(frame.columns) == ["at_ns", "waits_0", "waits_1", "waits_2", "mark"]
    assert list(frame["at_ns"]) == list(range(5))
    assert set(frame["waits_2"]) == {7}
    assert set(frame["mark"]) == {"idle"}
    assert names_in(store.root) == [path.name]


def test_numpy_and_what_is_not_finite_become_json(store: RunStore) -> None:
    given = run_of() | {"note": {"a": np.float64(1.5), "b": np.arange(2), "c": float("nan"),
                                 "d": Path("x"), "e": (1, True)}}
    note = store.load(store.write(given).name).data["note"]
    assert note == {"a": 1.5, "b": [0, 1], "c": None, "d": "x", "e": [1, True]}


def test_listing_and_latest_are_in_order_and_by_experiment(store: RunStore) -> None:
    assert store.list() == []
    first = store.write(run_of())
    second = store.write(run_of("waits"))
    third = store.write(run_of(state="spins"))
    assert [info.name for info in store.list()] == [first.name, second.name, third.name]
    assert store.list()[2].states == {"sync/shipped": "spins"}
    assert store.latest().path == third
    assert store.latest("waits").path == second
    with pytest.raises(UsageError, match="no run of 'splice'"):
        store.latest("splice")


def test_prefixes(store: RunStore) -> None:
    with pytest.raises(UsageError, match="no run in"):
        store.load("2026")
    first, second = store.write(run_of()).name, store.write(run_of("waits")).name
    assert store.load(second[:-1]).name == second
    with pytest.raises(UsageError, match="begins 2 runs"):
        store.load(first[:8])
    with pytest.raises(UsageError, match=f"nearest: {first}"):
        store.load(first + "x")
    for escape in ("", "..", "../runs/" + first):
        with pytest.raises(UsageError):
            store.load(escape)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not JSON"), ("[]", "no object"), ("{}", "no schema"),
        ('{"schema": 2}', "schema 2 is newer than 1"), ('{"schema": 1}', "'experiment' is missing"),
        ('{"schema":1,"experiment":"e","run":"r","parameters":{},"machine":{},"arms":[{}]}',
         "arms"),
        ('{"schema":1,"experiment":"e","run":"r","parameters":{},"machine":{},'
         '"arms":[{"arm":"a","state":"fine"}]}', "unknown state 'fine'"),
    ],
)
def test_a_bad_run_is_one_line_and_does_not_hide_the_others(
    store: RunStore, content: str, problem: str
) -> None:
    good = store.write(run_of())
    bad = store.root / "20990101T000000-dirty-list-beef"
    bad.mkdir()
    (bad / "run.json").write_text(content)
    with pytest.raises(UsageError, match=problem) as caught:
        store.load(bad.name)
    assert "\n" not in str(caught.value)
    assert [bool(info.problem) for info in store.list()] == [False, True]
    assert store.latest().path == good


ENTRY = {"schema": 1, "experiment": "e", "run": "r", "parameters": {}, "machine": {}}


@pytest.mark.parametrize(("arm", "problem"), [
    ({"arm": "a", "policy": 7}, "the policy of arm 'a' is no text"),
    ({"arm": "a", "windows": {"stall": {"waits_per_s": "many"}}}, "'waits_per_s' of arm 'a' is no"),
    ({"arm": "a", "windows": {"stall": {"cpu_ms_per_s": 10**400}}}, "'cpu_ms_per_s' of arm 'a'"),
    ({"arm": "a", "windows": {"stall": {"cpu_ms_per_s": [1]}}}, "'cpu_ms_per_s' of arm 'a'"),
    ({"arm": "a\ud800"}, "cannot be printed"),
    ({"arm": "a", "state": ["quiet\n"]}, "unknown state"),
    ({"arm": "a", "windows": {"s": {"x": json.loads("[" * 90 + "]" * 90)}}}, "nested too deeply"),
])
def test_what_would_break_a_comparison_is_no_run(
    store: RunStore, capsys: pytest.CaptureFixture[str], arm: dict[str, Any], problem: str
) -> None:
    bad = store.root / "20990101T000000-dirty-list-beef"
    good = store.write(run_of())
    bad.mkdir()
    (bad / "run.json").write_text(json.dumps(ENTRY | {"arms": [arm]}))
    assert [bool(info.problem) for info in store.list()] == [False, True]
    for name in (bad.name, good.name):
        code = cli.main(["compare", good.name, name, "--out", str(store.root)])
        err = capsys.readouterr().err
        assert (code, problem in err, err.count("\n")) == (
            (2, True, 1) if name == bad.name else (0, False, 0))


def test_odd_folders_cost_a_line_each_and_hide_nothing(
    store: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    good = store.write(run_of())
    contents = {"99999999T999999-dirty-list-beef": json.dumps(ENTRY | {"arms": []}),
                "20990101T000000-dirty-list-0001": "[" * 100_000,
                "20990101T000000-dirty-list-0002": "\x00"}
    for name, content in contents.items():
        (store.root / name).mkdir()
        (store.root / name / "run.json").write_text(content)
    (store.root / "20990101T000000-dirty-list-0003").write_text("a file")
    (store.root / "20990101T000000-dirty-list-0004").mkdir()
    os.mkfifo(store.root / "20990101T000000-dirty-list-0004" / "run.json")
    (store.root / "2099٠101T000000-dirty-list-0005").mkdir()
    assert cli.main(["runs", "--out", str(store.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 1 + 5
    assert any(line.startswith(good.name) and "1 quiet" in line for line in lines)
    assert sum("nested too deeply" in line for line in lines) == 1
    assert cli.main(["runs", "--json", "--out", str(store.root)]) == 0
    told = {info["name"]: info for info in json.loads(capsys.readouterr().out)}
    assert told["99999999T999999-dirty-list-beef"]["started"] is None
    assert sum(not info["problem"] for info in told.values()) == 2


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    store: RunStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.root.mkdir()
    long = os.fspath(store.root / ("x" * 300))
    assert cli.main(["runs", "--out", long]) == 2
    assert "File name too long" in capsys.readouterr().err

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    for command in (["runs"], ["compare", "a", "b"]):
        assert cli.main([*command, "--out", str(store.root)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "cannot read the runs in" in err
        assert "Permission denied" in err


@pytest.mark.parametrize("root", ["/proc/nowhere/x", "/dev/null/x", "/tmp/" + "x" * 300])
def test_a_root_that_cannot_be_made_is_one_line(root: str) -> None:
    with pytest.raises(MachineError, match="cannot store the run") as caught:
        RunStore(root).write(run_of())
    assert "\n" not in str(caught.value)


def test_a_home_of_nobody_is_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGLAB_RUNS", "~nosuchuser/x")
    for command in (["runs"], ["run", "dirty-list"], ["run", "expired-wait"],
                    ["compare", "a", "b"]):
        assert cli.main(command) == 2
        err = capsys.readouterr().err
        assert "the home folder in '~nosuchuser/x' cannot be told" in err
        assert err.count("\n") == 1


def test_a_working_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    project = Path(runs.__file__).parents[1]
    program = ("import os, sys; sys.path.insert(0, sys.argv[1]); from lab import cli; "
               "os.rmdir(os.getcwd()); sys.exit(cli.main(['runs']))")
    environment = {name: value for name, value in os.environ.items() if name != "RINGLAB_RUNS"}
    done = subprocess.run([sys.executable, "-c", program, str(project)], cwd=gone, check=False,
                          capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("ringlab: the working folder cannot be used")
    assert done.stderr.count("\n") == 1


def test_samples_missing_or_broken(store: RunStore) -> None:
    run = store.load(store.write(run_of()).name)
    with pytest.raises(UsageError, match="no samples"):
        run.df_samples()
    (run.path / "samples.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(MachineError, match="cannot read the samples"):
        run.df_samples()


def test_what_cannot_be_stored_is_refused_before_the_disk_is_touched(store: RunStore) -> None:
    wrongs: list[dict[str, Any]] = [
        {"experiment": "../x"}, {"arms": {}}, {"machine": None}, {"schema": 9},
    ]
    for wrong in wrongs:
        with pytest.raises(UsageError):
            store.write(run_of() | wrong)
    with pytest.raises(UsageError, match="named fields"):
        store.write(run_of(), np.arange(3))
    assert not store.root.exists()


def test_a_full_disk_leaves_nothing_and_says_what_was_needed(small_disk: Path) -> None:
    store = RunStore(small_disk / "runs")
    kept = store.write(run_of())
    noise = np.zeros(20_000, dtype=[("x", "u8")])
    noise["x"] = np.random.default_rng(1).integers(0, 2**63, len(noise))
    with pytest.raises(MachineError, match="No space left") as caught:
        store.write(run_of(), noise)
    message = str(caught.value)
    assert re.search(r"it needs 1\d\d\.\d KiB and .* free", message)
    assert "\n" not in message
    assert str(store.root) in message
    assert names_in(store.root) == [kept.name]
    assert store.write(run_of()).is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES,
                                    errno.ENOENT, errno.ESTALE, errno.EINVAL, errno.ELOOP])
@pytest.mark.parametrize("step", ["_write_durably", "_sync_folder"])
def test_any_refusal_of_the_disk(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(runs, step, refuse)
    with pytest.raises(MachineError, match=os.strerror(number)) as caught:
        store.write(run_of(), SAMPLES)
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert ("make room" in str(caught.value)) is full
    assert "(--out, or RINGLAB_RUNS)" in str(caught.value)
    assert names_in(store.root) == []


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot store the run"):
        RunStore(tmp_path / "file" / "runs").write(run_of())


def test_an_interrupt_leaves_nothing(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_write_durably", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.write(run_of())
    assert names_in(store.root) == []


DYING = """
import os, sys
from lab import cli, runs
runs._sync_folder = lambda folder: os._exit(9)
runs.RunStore(sys.argv[1]).write({"experiment": "e", "parameters": {}, "machine": {}, "arms": []})
"""


def test_sweep_removes_the_dead_writers_folders_only(store: RunStore) -> None:
    good = store.write(run_of())
    command = [sys.executable, "-c", DYING, str(store.root)]
    assert subprocess.run(command, check=False, cwd=Path(runs.__file__).parents[1]).returncode == 9
    alive = store.root / ".writing-by-a-live-one"
    alive.mkdir()
    assert len(names_in(store.root)) == 3
    assert [info.name for info in store.list()] == [good.name]
    with locked(alive, wait=True) as mine:
        assert mine
        assert store.sweep() == 1
    assert set(names_in(store.root)) == {good.name, alive.name}
    assert store.sweep() == 1
    assert store.sweep() == 0


def test_a_run_swept_while_it_starts_is_written_again(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir
    swept: list[int] = []

    def make_and_lose(path: Path, *arguments: Any, **options: Any) -> None:
        make(path, *arguments, **options)
        if path.name.startswith(".writing-") and not swept:
            swept.append(store.sweep())

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    assert store.write(run_of()).is_dir()
    assert swept == [1]


def test_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGLAB_RUNS", str(tmp_path / "mine"))
    assert RunStore().root == tmp_path / "mine"
    monkeypatch.delenv("RINGLAB_RUNS")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "checkout/lab").mkdir(parents=True)
    (tmp_path / "checkout/notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "checkout/notebooks")
    assert runs.default_root() == tmp_path / "home/.local/share/ringlab/runs"
    (tmp_path / "checkout/environment.yml").touch()
    assert runs.default_root() == tmp_path / "checkout/data/runs"


def test_compare_puts_figures_side_by_side(store: RunStore) -> None:
    a = store.load(store.write(run_of(waits=40)).name)
    other = run_of(waits=80_000, state="spins")
    other["arms"].append(dict(other["arms"][0], arm="async"))
    other["parameters"]["depth"] = 3
    other["machine"]["load"] = [9.0]
    b = store.load(store.write(other).name)
    first, second = compare(a, b)
    assert (first["arm"], first["policy"], first["window"]) == ("sync", "shipped", "stall")
    assert (first["state_a"], first["state_b"]) == ("quiet", "spins")
    assert (first["waits_per_s_a"], first["waits_per_s_ratio"]) == (40, 2000)
    assert first["wasted_per_s_ratio"] is None
    assert first["cpu_ms_per_s_ratio"] is None
    assert (second["arm"], second["state_a"], second["waits_per_s_a"]) == ("async", None, None)
    assert differences(a, b) == [{"what": "parameters", "name": "depth", "a": 2, "b": 3}]
    json.dumps(compare(a, b))

"""An unattended notebook that is interrupted, or killed, leaves no words and no files behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from lab.scratch import scratch, sweep

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = textwrap.dedent("""
    import sys
    from pathlib import Path
    from lab import batch
    from lab.progress import Progress
    source, target = map(Path, sys.argv[1:])
    try:
        batch.execute(source, target, {}, Progress())
    except KeyboardInterrupt:
        sys.exit(130)
""")

pytestmark = pytest.mark.timeout(120)


def run(folder: Path) -> subprocess.Popen[str]:
    """A notebook that is at its only cell for minutes, once ``folder/busy`` is there."""
    code = f"""
import pathlib, time
pathlib.Path({str(folder / "busy")!r}).touch()
for number in range(10_000):
    time.sleep(0.01)
    print(number)
"""
    nbformat.write(new_notebook(cells=[new_code_cell(code)]), folder / "long.ipynb")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder / "long.ipynb"), str(folder / "out.ipynb")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
    )
    deadline = time.monotonic() + 60
    while not (folder / "busy").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return process


def test_a_ctrl_c_says_nothing_of_the_kernel_and_leaves_nothing(tmp_path: Path) -> None:
    with run(tmp_path) as process:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # as impatient people do
        out, _ = process.communicate(timeout=60)
    assert out == ""
    assert process.returncode == 130
    assert list(tmp_path.glob("ringlab-kernel-*")) == []


def test_what_a_killed_one_left_goes_with_the_next(tmp_path: Path) -> None:
    with run(tmp_path) as process:
        process.kill()
        process.communicate(timeout=60)
    left = list(tmp_path.glob("ringlab-kernel-*"))
    assert [sorted(each.name for each in folder.iterdir()) for folder in left] == [
        ["connection.json", "ringlab", "stderr"]
    ]
    sweep("ringlab-kernel-", tmp_path)
    assert list(tmp_path.glob("ringlab-kernel-*")) == []


def test_only_what_belongs_to_nobody_is_swept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = tmp_path / f"made-{gone.pid}-abc"
    kept = [tmp_path / f"made-{os.getppid()}-abc", tmp_path / "made-by-hand", tmp_path / "made-7"]
    for each in (stale, *kept):
        each.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / f"made-{gone.pid}-link").symlink_to(elsewhere)
    with scratch("made-", tmp_path) as name:
        assert Path(name).name.startswith(f"made-{os.getpid()}-")
        assert not stale.exists()
        assert all(each.exists() for each in kept)
        assert (elsewhere / "file").exists()
    assert not Path(name).exists()


def test_a_scratch_folder_is_where_temporary_files_are() -> None:
    with scratch("ringlab-test-") as name:
        assert Path(name).parent == Path(tempfile.gettempdir())


def test_a_folder_whose_owner_cannot_be_seen_but_has_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another container with the same folder for temporary files."""
    with scratch("made-", tmp_path) as name:
        monkeypatch.setattr("lab.scratch._PROCESSES", tmp_path)
        sweep("made-", tmp_path)
        assert Path(name).exists()
    left = tmp_path / f"made-{os.getpid()}-left"
    left.mkdir()
    sweep("made-", tmp_path)
    assert not left.exists(), "nobody has that one"

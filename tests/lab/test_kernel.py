"""Other kernels under QEMU: the archive, the errors, and figures that repeat to the digit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NoReturn

import pytest

from engine import facts
from engine.errors import MachineError, UsageError
from lab import cli, kernel, waits
from lab.progress import Progress
from lab.runs import read_run

pytestmark = pytest.mark.computes

IMAGE_VARIABLE = "RINGLAB_TEST_KERNEL"
PACKAGE = "linux-image-cloud-amd64"
PLAN = waits.Plan(ways=[waits.RING_WAIT, waits.CURE], timeouts_ns=(0, 50_000), flags=("none",))
BZIMAGE = b"\0" * 0x202 + b"HdrS" + b"\0" * 100


def apt(*words: str, folder: Path) -> str:
    """What an apt command prints; what it says of its failure fails the tests."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode and os.geteuid() == 0:
        # A machine that was set up without apt may have no list of packages yet, or an old one.
        subprocess.run(["apt-get", "-q", "update"], capture_output=True, check=False)
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        no_image(f"{' '.join(words)}: {last}")
    return done.stdout


def no_image(why: str) -> NoReturn:
    """QEMU is there, so nothing but the image is missing: no reason to pass over these tests."""
    pytest.fail(f"no kernel to boot: {why}. Name a bzImage with {IMAGE_VARIABLE}, for a machine "
                "without a network or without Debian's packages", pytrace=False)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image of Debian's stock cloud kernel, downloaded by its package's name.

    Or the one that RINGLAB_TEST_KERNEL names. These tests are skipped only where there is no QEMU,
    which ``make test`` installs where it can.
    """
    if shutil.which(kernel.QEMU) is None:
        pytest.skip(f"{kernel.QEMU} could not be installed")
    given = os.environ.get(IMAGE_VARIABLE)
    if given:
        return Path(given)
    for tool in ("apt-cache", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            no_image(f"there is no {tool} here")
    folder = tmp_path_factory.mktemp("kernel")
    depends = apt("apt-cache", "depends", PACKAGE, folder=folder)
    names = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image" in line]
    if not names:
        no_image(f"{PACKAGE} names no kernel")
    apt("apt-get", "-q", "download", names[0], folder=folder)
    return unpacked(next(folder.glob("*.deb")), f"vmlinuz-{names[0].removeprefix('linux-image-')}")


def unpacked(package: Path, name: str) -> Path:
    """The image alone, which stands before the modules: the package is not read to its end."""
    image = package.parent / name
    command = ["dpkg-deb", "--fsys-tarfile", package]
    with (subprocess.Popen(command, stdout=subprocess.PIPE) as whole,
          tarfile.open(fileobj=whole.stdout, mode="r|") as archive):
        for member in archive:
            if member.name == f"./boot/{name}":
                file = archive.extractfile(member)
                assert file is not None
                image.write_bytes(file.read())
                break
        whole.kill()
    assert image.is_file(), f"{package.name} has no {name}"
    return image


@pytest.mark.parametrize(("lacking", "outcome", "told"), [
    ("qemu", pytest.skip.Exception, "could not be installed"),
    ("apt-get", pytest.fail.Exception, "there is no apt-get here"),
    ("network", pytest.fail.Exception, "apt-get -q download .*: E: no network"),
    ("kernel", pytest.fail.Exception, "names no kernel"),
])
def test_only_a_machine_without_qemu_skips_other_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    lacking: str, outcome: type[BaseException], told: str,
) -> None:
    depends = "" if lacking == "kernel" else "  Depends: linux-image-6.1.0-cloud-amd64"
    scripts = {kernel.QEMU: "exit 0", "dpkg-deb": "exit 0",
               "apt-cache": f"echo '{depends}'", "apt-get": "echo E: no network >&2; exit 100"}
    left_out = kernel.QEMU if lacking == "qemu" else lacking
    for name, script in scripts.items():
        if name != left_out:
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv(IMAGE_VARIABLE, raising=False)
    with pytest.raises(outcome, match=told):
        image.__wrapped__(tmp_path_factory)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_figures_of_one_kernel_repeat_to_the_digit(image: Path) -> None:
    compared = kernel.compare([image, image], PLAN, limit_s=180)
    first, second = compared.kernels
    assert first.rows
    assert first.rows == second.rows
    assert {row["ratio"] for row in compared.rows} == {1.0}
    # A stock kernel of before the patch, in which an expired wait really sleeps.
    assert first.check["has_check"] is False
    assert first.check["sleeps"] is True
    zero = waits.find(first.rows, waits.RING_WAIT, 0)
    assert zero is not None
    assert zero["ratio_to_epoll_wait_0"] > 5
    assert zero["timer_starts"] == pytest.approx(1.0, abs=0.05)
    assert "cloud" in first.release or IMAGE_VARIABLE in os.environ
    assert first.engine["liburing"] == facts.liburing()
    assert "EXT_ARG" in first.engine["features"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_guest_that_dies_is_told_with_its_last_words(
    image: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "initramfs"
    archive.write_bytes(kernel.initramfs(b"#!/nowhere\n"))
    with pytest.raises(MachineError, match=r"the guest died.*panic") as caught:
        kernel.measure(image, archive, PLAN, 100, Progress())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_guest_that_takes_too_long_is_ended(image: Path, tmp_path: Path) -> None:
    archive = tmp_path / "initramfs"
    archive.write_bytes(kernel.initramfs(b""))
    with pytest.raises(MachineError, match="not done after 0 s"):
        kernel.measure(image, archive, PLAN, 0.2, Progress())


def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A shell script in QEMU's place, and an image for it to ignore."""
    program, image = tmp_path / "qemu", tmp_path / "bzImage"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    image.write_bytes(BZIMAGE)
    monkeypatch.setattr(kernel, "QEMU", os.fspath(program))
    return image


def test_a_guest_that_cannot_switch_itself_off_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ACPI a kernel says that it halts, and does so."""
    script = "echo ringlab done; echo reboot: System halted; exec sleep 60"
    image = emulator(tmp_path, monkeypatch, script)
    figures = kernel.measure(image, tmp_path / "initramfs", PLAN, 30, Progress())
    assert figures.seconds < 20
    script = "echo Linux version; echo ringlab failed; exec sleep 60"
    image = emulator(tmp_path, monkeypatch, script)
    with pytest.raises(MachineError, match=r"the guest's program failed.*Linux version"):
        kernel.measure(image, tmp_path / "initramfs", PLAN, 30, Progress())


def test_the_archive_is_one_that_cpio_reads(tmp_path: Path) -> None:
    data = kernel.initramfs(b"\x7fELF" + b"x" * 101)
    assert data.startswith(b"070701")
    assert len(data) % 4 == 0
    tool = shutil.which("cpio")
    if tool is None:
        names = [b"dev/console\0", b"init\0", b"TRAILER!!!\0"]
        assert all(name in data for name in names)
        return
    done = subprocess.run([tool, "-t"], input=data, capture_output=True, check=True)
    assert done.stdout.split() == [b"dev", b"proc", b"sys", b"dev/console", b"init"]


def test_the_guest_s_program_runs_here_too(tmp_path: Path) -> None:
    program = tmp_path / "init"
    program.write_bytes(kernel.program())
    program.chmod(0o755)
    done = subprocess.run([program, "ways=epoll_wait", "timeouts=0", "run_us=500"],
                          capture_output=True, text=True, timeout=60, check=False)
    if '"where": "io_uring_setup"' in done.stdout:
        pytest.skip("io_uring is refused here")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "ringlab done"
    told = json.loads(done.stdout.splitlines()[0].removeprefix("ringlab kernel "))
    assert kernel._engine(told) == facts.of_kernel()
    assert '"way": "epoll_wait"' in done.stdout


def test_what_is_missing_is_told_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, elf = tmp_path / "bzImage", tmp_path / "vmlinux"
    there.write_bytes(BZIMAGE)
    elf.write_bytes(b"\x7fELF" + b"\0" * 1000)
    monkeypatch.setattr(kernel, "QEMU", "sh")
    kernel.require([there])
    with pytest.raises(UsageError, match="there is no kernel image"):
        kernel.require([tmp_path / "absent"])
    with pytest.raises(UsageError, match="is no bzImage"):
        kernel.require([elf])
    monkeypatch.setattr(kernel, "QEMU", "qemu-of-nowhere")
    with pytest.raises(MachineError, match=r"apt-get install.*qemu-system-x86"):
        kernel.require([there])


@pytest.mark.parametrize(("told", "package"), [
    ("/usr/bin/ld: cannot find -lc: No such file", "static C library"),
    ("ld.lld: error: unable to find library -luring", "static liburing"),
    ("waits.c:1: error: something else", "does not build: waits.c:1: error"),
])
def test_a_failed_build_names_the_package(told: str, package: str) -> None:
    assert package in kernel._build_failure(told)


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--way", "eventfd_workaround"], "would share the guest's one CPU"),
    (["--way", waits.CURE, "--timeout", "50us"], "takes no timeout"),
    (["--way", "timerfd", "--flags", "defer"], "no ring takes part"),
    ([word for us in range(17) for word in ("--timeout", f"{us}us")], "give up to 16"),
])
def test_a_guest_with_nothing_to_measure_is_not_booted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    image = tmp_path / "bzImage"
    image.write_bytes(BZIMAGE)
    assert cli.main(["kernel", "--image", os.fspath(image), *arguments]) == cli.ERROR
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1


def test_an_empty_list_of_ways_is_not_every_way(tmp_path: Path) -> None:
    program = tmp_path / "init"
    program.write_bytes(kernel.program())
    program.chmod(0o755)
    done = subprocess.run([program, "ways=", "timeouts=0", "run_us=1"], capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[1:] == ["ringlab done"]


def test_the_command_tells_a_missing_image_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["kernel", "--image", os.fspath(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_store_that_refuses_costs_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"way": waits.RING_WAIT, "timeout_ns": 0, "flags": "none", "napi_us": 0, "us_p50": 5.0,
           "voluntary_switches": 1.0, "timer_starts": 1.0}
    figures = kernel.KernelFigures(Path("k"), "6.1.2", [row], [], 1.0)
    compared = kernel.Comparison([figures], kernel.side_by_side([figures]))
    monkeypatch.setattr(kernel, "compare", lambda *_, **__: compared)
    monkeypatch.setenv("RINGLAB_RUNS", "/proc/nowhere/x")
    for extra in ([], ["--json"]):
        assert cli.main(["kernel", "--image", "k", *extra]) == cli.ERROR
        out, err = capsys.readouterr()
        assert "6.1.2" in out
        assert waits.RING_WAIT in out
        assert err.startswith("ringlab: cannot store the run in /proc/nowhere/x")
        assert err.count("\n") == 1


GUEST = """case "$*" in *whole*)
echo 'ringlab kernel {"release": "6.1.2"}'
echo 'ringlab row {"way": "epoll_wait", "timeout_ns": 0, "flags": "none", "ns_p50": 200,' \\
    '"ns_p99": 300, "cpu_ns": 200, "voluntary": 0, "involuntary": 0, "traced_switches": 0,' \\
    '"timer_starts": 0, "timer_interrupts": 0, "waits": 10}'
echo ringlab done;;
*) echo Kernel panic;; esac"""


@pytest.mark.parametrize("order", [("whole", "dies"), ("dies", "whole")])
def test_a_guest_that_dies_costs_nothing_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    order: tuple[str, str],
) -> None:
    emulator(tmp_path, monkeypatch, GUEST)
    monkeypatch.setenv("RINGLAB_RUNS", os.fspath(tmp_path / "runs"))
    first, second = (os.fspath(tmp_path / name) for name in order)
    for name in order:
        (tmp_path / name).write_bytes(BZIMAGE)
    words = ["kernel", "--image", first, "--against", second, "--way", "epoll_wait"]
    assert cli.main(words) == cli.ERROR
    out, err = capsys.readouterr()
    assert "0.200" in out
    assert err.splitlines()[-1] == "ringlab: dies: the guest died; its console ends: Kernel panic"
    assert cli.main([*words, "--json"]) == cli.ERROR
    told = json.loads(capsys.readouterr().out)
    assert told["interrupted"].startswith("dies: the guest died")
    assert [Path(one["image"]).name for one in told["kernels"]] == ["whole"]
    assert read_run(Path(told["run"])).data["interrupted"] == told["interrupted"]


def test_two_guests_that_die_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = emulator(tmp_path, monkeypatch, "echo Kernel panic")
    with pytest.raises(MachineError, match="Kernel panic"):
        kernel.compare([image, image], PLAN, limit_s=20)


def test_an_image_with_a_name_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernel", "--image", "/tmp/" + "x" * 5000]) == cli.ERROR
    err = capsys.readouterr().err
    assert "File name too long" in err
    assert len(err) < 300


@pytest.mark.parametrize("compiler", ["compiler-of-nowhere", 'gcc "-O2'])
def test_without_a_compiler_the_command_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    compiler: str,
) -> None:
    image = emulator(tmp_path, monkeypatch, "exit 0")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.delitem(sys.modules, "engine.build_native", raising=False)
    kernel.program.cache_clear()
    assert cli.main(["kernel", "--image", os.fspath(image)]) == cli.ERROR
    err = capsys.readouterr().err
    assert err.startswith(f"ringlab: no C compiler (CC={compiler}): install or name one (apt: gcc")
    assert err.count("\n") == 1


def test_two_kernels_stand_row_by_row_with_their_ratio() -> None:
    def figures(us: float, way: str = waits.RING_WAIT) -> kernel.KernelFigures:
        row = {"way": way, "timeout_ns": 0, "flags": "none", "napi_us": 0, "us_p50": us}
        return kernel.KernelFigures(Path("k"), "6.1", [row], [], 1.0)

    (row,) = kernel.side_by_side([figures(5.0), figures(1.0)])
    assert row["ratio"] == pytest.approx(0.2)
    lone = kernel.side_by_side([figures(5.0), figures(1.0, "ppoll")])
    assert [(each["a"] is None, each["b"] is None) for each in lone] == [
        (False, True), (True, False)]
    assert {each["ratio"] for each in lone} == {None}

import os
import threading
import time

import pytest

from lab import machine, proc

STATUS = """Name:\tiou-sqp-4242
State:\tS (sleeping)
Threads:\t2
voluntary_ctxt_switches:\t50
nonvoluntary_ctxt_switches:\t2
"""
STAT = ("5468 (a) (b c) R 5422 5422 4418 0 -1 4194368 4 6573 0 0 37 9 4 2 20 0 3 0 46699 "
        "92487680 3351 18446744073709551615\n")
X86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu vme {}\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\n"


def test_schedstat() -> None:
    assert proc.parse_schedstat("220890692 34058 11\n") == (220890692, 34058, 11)


def test_status() -> None:
    assert proc.parse_status(STATUS) == ("iou-sqp-4242", "S", 50, 2)
    assert proc.parse_status("Name:\tx\n") == ("x", "", 0, 0)


def test_stat_of_a_name_with_brackets() -> None:
    stat = proc.parse_stat(STAT)
    assert stat == (5468, "a) (b c", "R", 37, 9, 3, 46699)


def test_meminfo() -> None:
    text = "MemTotal:       24684092 kB\nHugePages_Total:       3\n"
    assert proc.parse_meminfo(text) == {"MemTotal": 24684092 * 1024, "HugePages_Total": 3}


def test_loadavg() -> None:
    assert proc.parse_loadavg("0.39 0.17 0.08 1/79 5472\n") == (0.39, 0.17, 0.08, 1, 79)


def test_steal_counts_guest_time_once() -> None:
    times = proc.parse_cpu_times("cpu  50 0 10 30 0 0 0 10 40 0\ncpu0 1 2 3\n")
    assert times.total == 100
    assert times.steal_fraction == pytest.approx(0.1)
    assert proc.parse_cpu_times("cpu 1 2 3 4\n").steal_fraction == 0
    assert proc.parse_cpu_times("cpu 0 0 0 0\n").steal_fraction == 0
    with pytest.raises(ValueError, match="intr"):
        proc.parse_cpu_times("intr 1\n")


def test_a_thread_that_ended_reads_as_none() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    tid = thread.native_id
    assert tid is not None
    # join() returns when Python is done with the thread; the kernel may still be ending it.
    deadline = time.monotonic() + 5
    while tid in proc.tasks(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.001)
    for read in (proc.schedstat, proc.status, proc.stat):
        assert read(os.getpid(), tid) is None
    assert proc.tasks(2**22 + 1) == []
    assert proc.ring_helpers(2**22 + 1) == []


def test_this_process() -> None:
    pid = os.getpid()
    assert threading.get_native_id() in proc.tasks(pid)
    status, stat = proc.status(pid, pid), proc.stat(pid, pid)
    assert status is not None
    assert stat is not None
    assert status.name == stat.name


@pytest.mark.parametrize(
    ("cpuinfo", "hypervisor", "firmware", "expected"),
    [
        (X86.format("hypervisor"), None, None, "unnamed hypervisor"),
        (X86.format("hypervisor"), None, "Standard PC QEMU", "qemu"),
        (X86.format("hypervisor"), "xen", None, "xen"),
        (X86.format(""), None, "Google Pixelbook", "none seen"),
        (ARM, None, "KVM Virtual Machine", "kvm"),
        (ARM, None, None, "none seen"),
    ],
)
def test_virtualisation(
    cpuinfo: str, hypervisor: str | None, firmware: str | None, expected: str
) -> None:
    assert machine.virtualisation(cpuinfo, hypervisor, firmware) == expected


def test_cpu_model() -> None:
    assert machine.cpu_model(X86.format("")) == "Some CPU"
    assert machine.cpu_model(ARM) == "CPU implementer 0x41, CPU part 0xd0c"
    assert machine.cpu_model("") != ""


def test_machine_is_json_and_carries_the_engines_facts() -> None:
    import json

    facts = machine.describe({"liburing": "2.3"}, packages=["numpy", "no-such-package"])
    assert json.loads(json.dumps(facts)) == facts
    assert facts["engine"] == {"liburing": "2.3"}
    assert facts["packages"]["numpy"]
    assert facts["packages"]["no-such-package"] is None
    assert 0 <= facts["steal_fraction"] <= 1

"""The machine that a figure was taken on, as data that travels with the figure."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lab import proc

SYSCTL = Path("/proc/sys")
CLOCKSOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
PACKAGES = ("ringlab", "numpy", "cffi", "pandas", "pyarrow", "bokeh", "ipywidgets", "anywidget",
            "ipykernel", "jupyterlab", "papermill")
# Firmware strings by which hypervisors make themselves known, most telling first.
_FIRMWARE = (
    ("virtualbox", "virtualbox"), ("vmware", "vmware"), ("parallels", "parallels"),
    ("firecracker", "firecracker"), ("amazon ec2", "amazon ec2"), ("google", "google compute"),
    ("microsoft", "hyper-v"), ("xen", "xen"), ("bochs", "bochs"), ("openstack", "kvm"),
    ("kvm", "kvm"), ("qemu", "qemu"),
)


def describe(
    engine: Mapping[str, Any] | None = None, packages: Iterable[str] = PACKAGES
) -> dict[str, Any]:
    """Everything about this machine that may change a figure, ready for JSON.

    ``engine`` holds what only the caller knows (liburing version, ring features, ring flags). A
    fact that this machine does not tell is None: it is never guessed and never an error.
    """
    cpuinfo = proc.read_text("/proc/cpuinfo") or ""
    return {
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "kernel_build": platform.version(),
        "architecture": platform.machine(),
        "cpu": cpu_model(cpuinfo),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "virtualisation": virtualisation(cpuinfo, _hypervisor(), _firmware()),
        "clocksource": _line(CLOCKSOURCE),
        "clock_ticks_per_s": os.sysconf("SC_CLK_TCK"),
        "tcp_wmem": _numbers(SYSCTL / "net/ipv4/tcp_wmem"),
        "tcp_rmem": _numbers(SYSCTL / "net/ipv4/tcp_rmem"),
        "congestion_control": _line(SYSCTL / "net/ipv4/tcp_congestion_control"),
        "memlock": limit(resource.RLIMIT_MEMLOCK),
        "nofile": limit(resource.RLIMIT_NOFILE),
        "io_uring_disabled": _number(SYSCTL / "kernel/io_uring_disabled"),
        "python": platform.python_version(),
        "packages": versions(packages),
        "engine": dict(engine or {}),
        **_load(),
    }


def cpu_model(cpuinfo: str) -> str:
    """The CPU's name; ARM kernels print only numbers, so there they stand in for it."""
    fields = _first_cpu(cpuinfo)
    for key in ("model name", "cpu model", "Model", "cpu"):
        if fields.get(key):
            return fields[key]
    arm = [f"{key} {fields[key]}" for key in ("CPU implementer", "CPU part") if key in fields]
    return ", ".join(arm) or platform.processor() or platform.machine()


def virtualisation(cpuinfo: str, hypervisor: str | None, firmware: str | None) -> str:
    """The best guess without rights: a hypervisor's name, ``unnamed hypervisor`` or ``none seen``.

    On x86 the CPU flag decides whether there is one; firmware strings only put a name to it. Other
    architectures have no such flag, so there the firmware has to do.
    """
    if hypervisor:
        return hypervisor
    fields = _first_cpu(cpuinfo)
    flagged = "hypervisor" in fields.get("flags", "").split()
    if "flags" in fields and not flagged:
        return "none seen"
    for mark, name in _FIRMWARE:
        if firmware and mark in firmware.lower():
            return name
    return "unnamed hypervisor" if flagged else "none seen"


def limit(which: int) -> dict[str, int | str]:
    """Soft and hard value of a resource limit; ``unlimited`` where there is none."""
    soft, hard = (
        "unlimited" if value == resource.RLIM_INFINITY else value
        for value in resource.getrlimit(which)
    )
    return {"soft": soft, "hard": hard}


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Installed versions without importing anything; None for a package that is not there."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _load() -> dict[str, Any]:
    load = proc.read_text("/proc/loadavg")
    times = proc.read_text("/proc/stat")
    memory = proc.parse_meminfo(proc.read_text("/proc/meminfo") or "")
    return {
        "load": list(proc.parse_loadavg(load)[:3]) if load else None,
        "steal_fraction": proc.parse_cpu_times(times).steal_fraction if times else None,
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
    }


def _first_cpu(cpuinfo: str) -> dict[str, str]:
    # Some ARM kernels put the machine's name after the last CPU, so later blocks only fill gaps.
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _hypervisor() -> str | None:
    return _line(Path("/sys/hypervisor/type"))


def _firmware() -> str | None:
    names = (_line(Path("/sys/class/dmi/id") / key) for key in ("product_name", "sys_vendor"))
    return " ".join(name for name in names if name) or _line(Path("/proc/device-tree/model"))


def _line(path: Path) -> str | None:
    text = proc.read_text(path)
    return text.strip("\n\0 ") if text else None


def _number(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text else None


def _numbers(path: Path) -> list[int] | None:
    text = _line(path)
    return [int(word) for word in text.split()] if text else None

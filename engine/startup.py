"""What a start needs of the machine, and what a failed start means."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

from engine.binding import text
from engine.errors import EngineError, MachineError, RinglabError, UsageError

ELSEWHERE = "the scripted backend (engine.Script) works without io_uring"
_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
# Descriptors of a worker beyond its connections (ring, listener, eventfd, schedstat, status), and
# what the process may open while the server runs.
_PER_WORKER = 8
_SPARE = 32
# From this kernel on a ring's memory is charged to the memory cgroup, not to the memlock limit.
MEMCG_COUNTS_RINGS = (5, 12)


def need_descriptors(workers: int, name: str, count: int, each: int = 1) -> None:
    """Sees to it that the process may open what the engine can come to need.

    On each of its ``workers`` the parameter ``name`` allows ``count`` of what takes ``each`` files.

    The soft limit is raised as far as the hard one allows, as a server's start usually does; when
    that is not enough, MachineError says which limit, for what, and how to raise it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    need = in_use + workers * (count * each + _PER_WORKER) + _SPARE
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard == resource.RLIM_INFINITY or need <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
        return
    where = f" on each of {workers} workers" if workers > 1 else ""
    raise MachineError(
        f"the limit of open files is {hard}, and {name}={count}{where} needs"
        f" {need}; raise it (ulimit -Hn {need}, or LimitNOFILE= of the service) or lower"
        f" {name}"
    )


def start_error(number: int, where: str, config: Any) -> RinglabError:
    """The error for a start that failed with errno ``number`` in ``where``: says what to do."""
    if where == "io_uring_setup" or number == errno.ENOSYS:
        return ring_error(number)
    if where == "bind" or number == errno.EADDRINUSE:
        return bind_error(number, text(config.host), config.port)
    if number in (errno.EMFILE, errno.ENFILE):
        return MachineError(
            f"{where}: {os.strerror(number)}; raise the limit of open files (ulimit -n)"
        )
    if number == errno.ENOMEM:
        return memory_error(where or "the engine")
    reason = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
    return EngineError(number, f"the server did not start: {where or 'the engine'}: {reason}")


def bind_error(number: int, host: str, port: int) -> RinglabError:
    """For a listening socket that could not be had."""
    if number == errno.EADDRINUSE:
        return MachineError(
            f"port {port} on {host} is in use; give another, or port=0 for any free one"
        )
    if number == errno.EACCES:
        return MachineError(
            f"port {port} on {host} is not allowed to this user; give one of 1024 or more"
        )
    if number == errno.EADDRNOTAVAIL:
        return UsageError(f"host={host} is not an address of this machine; 127.0.0.1 always is")
    reason = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
    return EngineError(number, f"cannot listen on {host} port {port}: {reason}")


def ring_error(number: int) -> RinglabError:
    """For ``io_uring_setup`` that failed: by whom it is refused, and what to do."""
    if number == errno.ENOMEM:
        return memory_error("io_uring_setup")
    if number == errno.EINVAL:
        return MachineError(
            "io_uring_setup: this kernel does not take the setup asked for; use setup='auto' or "
            f"'none' ({os.uname().release})"
        )
    if number not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
        reason = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
        return EngineError(number, f"io_uring_setup: {reason}")
    return MachineError(f"{refusal(number, disabled_level())}; {ELSEWHERE}")


def disabled_level() -> int | None:
    """kernel.io_uring_disabled: 0, 1 or 2; None where the kernel has no such setting."""
    try:
        return int(_DISABLED.read_text())
    except (OSError, ValueError):
        return None


def refusal(number: int, disabled: int | None) -> str:
    """Why io_uring_setup said ENOSYS or EPERM, with what would change it."""
    if disabled == 2:
        return "io_uring is disabled (sysctl kernel.io_uring_disabled=2); allow it with 0"
    if disabled == 1:
        return (
            "io_uring is disabled for this user (sysctl kernel.io_uring_disabled=1); allow it with "
            "0, or join the group of kernel.io_uring_group"
        )
    if number == errno.ENOSYS and disabled is None:
        return (
            f"io_uring is absent: kernel {os.uname().release} was built without it, or a seccomp "
            "filter answers ENOSYS"
        )
    return (
        "io_uring is refused by a seccomp filter or security module of this container; run it with "
        "one that allows io_uring_setup (docker: --security-opt seccomp=...)"
    )


def memory_error(where: str) -> MachineError:
    """For ENOMEM of ``where``: what may have run out, the likelier first."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = ("this machine, or the memory cgroup of this process (memory.max), has no more: free "
              "some, or allow more")
    fewer = "or ask for fewer entries, connections or workers"
    # Nothing but a ring, and what is registered with one, is counted against the memlock limit.
    if "io_uring" not in where or soft == resource.RLIM_INFINITY:
        return MachineError(f"{where}: not enough memory; {memory}, {fewer}")
    limit = f"the memlock limit is {soft} bytes"
    if kernel_release() < MEMCG_COUNTS_RINGS:
        return MachineError(
            f"{where}: not enough memory; {limit}, and this kernel counts rings against it: raise "
            f"it (ulimit -l), {fewer}; where it is not reached, {memory}"
        )
    return MachineError(
        f"{where}: not enough memory; {memory}, {fewer}; {limit} (ulimit -l), but since Linux 5.12 "
        "only what is registered with a ring may count against it"
    )


def kernel_release() -> tuple[int, ...]:
    """Major and minor number of the running kernel."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]
                 if part.isdigit())

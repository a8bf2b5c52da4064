"""Makes two network namespaces joined by a veth pair, and hands over a TCP connection across it.

Run as a program by :mod:`lab.napi`, in a process of its own, because a process that changes its
namespaces cannot change back. The namespaces have no names and the two processes in them end once
they have handed over their sockets, so all of it lasts exactly as long as somebody holds those.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

CLIENT, SERVER = ("rl0", "10.0.0.1"), ("rl1", "10.0.0.2")
PORT = 4242
LIMIT_S = 10.0
_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_PDEATHSIG = 1
_SIOCETHTOOL = 0x8946
_SET_TSO, _SET_GRO = 0x1F, 0x2C

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A step failed; the message says which and why, in one line."""


def main(descriptor: int) -> int:
    """Sends ``client`` and ``server``, each with its socket, or ``refused: ...``."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as out:
        try:
            _build(out)
        except (Refused, OSError) as error:
            out.send(f"refused: {error}".encode())
            return 1
    return 0


def _build(out: socket.socket) -> None:
    if shutil.which("ip") is None:
        os.environ["PATH"] += os.pathsep + "/usr/sbin:/sbin"
    if shutil.which("ip") is None:
        raise Refused("the program 'ip' is not installed (package iproute2)")
    enter_namespace()
    ours, theirs = socket.socketpair()
    other = os.fork()
    if other == 0:
        ours.close()
        _serve(out, theirs)
    theirs.close()
    ours.settimeout(LIMIT_S)
    try:
        _expect(ours)
        _ip("link", "add", CLIENT[0], "type", "veth", "peer", "name", SERVER[0])
        _ip("link", "set", SERVER[0], "netns", str(other))
        set_up(*CLIENT)
        ours.send(b"go")
        _expect(ours)
        with socket.create_connection((SERVER[1], PORT), LIMIT_S) as connected:
            connected.settimeout(None)
            _hand_over(out, b"client", connected)
        _expect(ours)
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def _serve(out: socket.socket, link: socket.socket) -> None:
    """The other process: its own namespace, the other end. Does not return."""
    try:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        link.settimeout(LIMIT_S)
        _unshare(_NEWNET)
        link.send(b"made")
        _expect(link)
        set_up(*SERVER)
        with socket.create_server((SERVER[1], PORT)) as listener:
            link.send(b"listening")
            listener.settimeout(LIMIT_S)
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(None)
                _hand_over(out, b"server", accepted)
        link.send(b"done")
    except (Refused, OSError) as error:
        with contextlib.suppress(OSError):
            link.send(f"refused: {error}".encode())
    finally:
        os._exit(0)


def _expect(link: socket.socket) -> None:
    """Waits for the other process; what it was refused is refused here."""
    told = link.recv(500).decode()
    if told.startswith("refused: ") or not told:
        raise Refused(told.removeprefix("refused: ") or "the other end of the veth pair died")


def enter_namespace() -> None:
    """A network namespace of our own: as root, or as root of a user namespace of our own."""
    try:
        _unshare(_NEWNET)
        return
    except Refused:
        pass
    uid, gid = os.getuid(), os.getgid()
    _unshare(_NEWUSER | _NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", name).write_text(text)


def _unshare(what: int) -> None:
    if _libc.unshare(what):
        number = ctypes.get_errno()
        kind = "user" if what & _NEWUSER else "network"
        raise Refused(f"a {kind} namespace is refused ({os.strerror(number)}); run as root, or "
                      "allow unprivileged user namespaces (sysctl user.max_user_namespaces, "
                      "kernel.apparmor_restrict_unprivileged_userns)")


def set_up(device: str, address: str) -> None:
    """An end of the pair: GRO on, which gives veth its NAPI queue, and TSO off."""
    _ethtool(device, _SET_GRO, 1)
    _ethtool(device, _SET_TSO, 0)
    _ip("addr", "add", f"{address}/24", "dev", device)
    _ip("link", "set", device, "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["failed"])[0]
        raise Refused(f"ip {' '.join(words)}: {told}")


def _ethtool(device: str, command: int, value: int) -> None:
    data = array.array("B", struct.pack("II", command, value))
    request = struct.pack("16sP", device.encode(), data.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
        except OSError as error:
            raise Refused(f"GRO of {device} cannot be set: {error.strerror}") from None


def _hand_over(out: socket.socket, name: bytes, connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    socket.send_fds(out, [name], [connected.fileno()])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

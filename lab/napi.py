"""A TCP connection over a device that has a NAPI queue, on one machine, with nothing left of it.

Busy polling needs a network device that polls: a veth pair with GRO does, loopback does not. Its
two ends live in network namespaces without names, which vanish with the last socket in them: also
when this process is killed, and however many of them are made at once.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import MachineError

SO_INCOMING_NAPI_ID = 56
LIMIT_S = 15.0


class NoNapi(MachineError):
    """The pair of namespaces could not be had here; the message says why and what to do."""


@dataclass(frozen=True)
class Connection:
    """Both ends of the connection, in blocking mode."""

    client: socket.socket
    server: socket.socket

    @property
    def napi_id(self) -> int:
        """The NAPI queue that the client's bytes arrive by."""
        return self.client.getsockopt(socket.SOL_SOCKET, SO_INCOMING_NAPI_ID)


@contextlib.contextmanager
def connection() -> Iterator[Connection]:
    """The two ends of a connection across a veth pair of its own.

    As root, or without root where user namespaces are allowed. Raises NoNapi, in one line.
    """
    with contextlib.ExitStack() as held:
        ends = {name: held.enter_context(end) for name, end in _ends().items()}
        made = Connection(ends["client"], ends["server"])
        _exchange(made)
        if not made.napi_id:
            raise NoNapi("the veth pair has no NAPI queue (SO_INCOMING_NAPI_ID is 0): this kernel "
                         "has no GRO on veth (Linux 5.13), or no CONFIG_NET_RX_BUSY_POLL")
        yield made


@contextlib.contextmanager
def if_needed(napi_us: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """A connected socket if any polling is asked for, else -1; and what is lacking if refused.

    Only the making may fail softly: what fails in the block is the block's.
    """
    with contextlib.ExitStack() as held:
        descriptor, lacking = -1, []
        if any(napi_us):
            try:
                descriptor = held.enter_context(connection()).client.fileno()
            except NoNapi as reason:
                lacking = [{"way": "NAPI busy polling", "flags": "all", "napi_us": us,
                            "reason": str(reason)} for us in napi_us if us]
        yield descriptor, lacking


def _ends() -> dict[str, socket.socket]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found: dict[str, socket.socket] = {}
    with here:
        with there:
            child = subprocess.Popen(
                [sys.executable, "-m", "lab.napi_child", str(there.fileno())],
                pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        try:
            here.settimeout(LIMIT_S)
            while len(found) < 2:
                name, end = _receive(here)
                found[name] = end
        except BaseException:
            for end in found.values():
                end.close()
            raise
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2 if len(found) == 2 else 0.5)
            child.kill()
            child.wait()
    return found


def _receive(link: socket.socket) -> tuple[str, socket.socket]:
    try:
        message, descriptors, _, _ = socket.recv_fds(link, 1000, 1)
    except TimeoutError:
        raise NoNapi(f"the veth pair was not made within {LIMIT_S:.0f} s") from None
    told = message.decode()
    if not descriptors:
        reason = told.removeprefix("refused: ") or "the process that makes it died"
        raise NoNapi(f"no veth pair between two network namespaces: {reason}")
    return told, socket.socket(fileno=descriptors[0])


def _exchange(made: Connection) -> None:
    """One byte each way: a socket knows its queue from the first packet on."""
    for sender, receiver in ((made.client, made.server), (made.server, made.client)):
        sender.send(b"x")
        receiver.settimeout(LIMIT_S)
        receiver.recv(1)
        receiver.settimeout(None)

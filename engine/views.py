"""What can be seen of a loop, a connection, a wait and a ring: plain, read-only values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.binding import words


@dataclass(frozen=True, slots=True)
class ConnView:
    """A connection as its worker sees it (``rl_conn_view``). Sizes in bytes, times in ns."""

    slot: int
    generation: int
    fd: int
    """-1 on the scripted backend."""
    sending: bool
    """One SEND is outstanding."""
    listed: bool
    owes_recv: bool
    promoted: bool
    held: bool
    """Its SEND completed while its handler held the lock."""
    handler_running: bool
    queued: bool
    """On the detach queue."""
    paused: bool
    """Pipelining depth reached: input is not read."""
    eof: bool
    """The client has half-closed."""
    closing: bool
    write_buf: int
    """Bytes produced, not handed to the kernel."""
    send_buf: int
    """Bytes owned by the outstanding SEND, or a remainder of one."""
    sent: int
    """Bytes the socket has taken since accept."""
    requests: int
    outstanding: int
    """Requests parsed and not yet answered into a buffer."""
    outq: int
    """Bytes in the socket that the client has not acknowledged (SIOCOUTQ); -1: unknown."""
    send_age_ns: int
    """Since the outstanding SEND last made progress; -1: there is none."""


@dataclass(frozen=True, slots=True)
class LoopView:
    """A worker's loop (``rl_loop_view``). Times in ns of the engine's clock."""

    now_ns: int
    iterations: int
    empty: int
    """Empty iterations in a row."""
    list_length: int
    movable: int
    """List members that the worker itself can move."""
    sending: int
    connections: int
    sends_pending: int
    """Non-zero: a SEND was prepared since the last wait."""
    deadline_ns: int
    """The earliest real deadline; -1: none."""
    cap_ns: int
    """The longest periodic sleep."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait as it was decided: how, why, for how long."""

    mode: str
    """``submit``, ``skip``, ``untimed`` or ``timed``."""
    why: str
    """The reason: ``ready``, ``list``, ``overdue``, ``owed``, ``send``, ``idle``, ``deadline``,
    ``event``; the first four cannot block."""
    timeout_ns: int
    """-1: none."""
    can_block: bool
    way: str
    """How a timeout of zero is made: ``kernel`` or ``poll``."""


@dataclass(frozen=True, slots=True)
class RingInfo:
    """What the kernel gave a worker."""

    setup: str
    """``none``, ``coop``, ``defer`` or ``sqpoll``."""
    flags: tuple[str, ...]
    """Names of the IORING_SETUP flags, without that prefix."""
    features: tuple[str, ...]
    """Names of the IORING_FEAT flags, without that prefix."""
    sq_entries: int
    cq_entries: int
    multishot_accept: bool
    multishot_recv: bool
    buffer_ring: bool
    thread_id: int
    """Of the worker; 0 when it has ended."""


# Names of the bits, lowest first, as in the kernel's include/uapi/linux/io_uring.h.
SETUP_FLAGS = (
    "IOPOLL", "SQPOLL", "SQ_AFF", "CQSIZE", "CLAMP", "ATTACH_WQ", "R_DISABLED", "SUBMIT_ALL",
    "COOP_TASKRUN", "TASKRUN_FLAG", "SQE128", "CQE32", "SINGLE_ISSUER", "DEFER_TASKRUN",
    "NO_MMAP", "REGISTERED_FD_ONLY", "NO_SQARRAY", "HYBRID_IOPOLL", "CQE_MIXED", "SQE_MIXED",
)
FEATURES = (
    "SINGLE_MMAP", "NODROP", "SUBMIT_STABLE", "RW_CUR_POS", "CUR_PERSONALITY", "FAST_POLL",
    "POLL_32BITS", "SQPOLL_NONFIXED", "EXT_ARG", "NATIVE_WORKERS", "RSRC_TAGS", "CQE_SKIP",
    "LINKED_FILE", "REG_REG_RING", "RECVSEND_BUNDLE", "MIN_TIMEOUT", "RW_ATTR", "NO_IOWAIT",
)


def bit_names(bits: int, names: Sequence[str]) -> tuple[str, ...]:
    """The names of the bits that are set, lowest first; a bit newer than the list is ``bit N``."""
    return tuple(
        names[bit] if bit < len(names) else f"bit {bit}"
        for bit in range(bits.bit_length())
        if bits >> bit & 1
    )


def _plan(view: Any) -> list[tuple[str, bool]]:
    """Fields of a view, each with whether it is a bool (C has a number there)."""
    return [(field.name, field.type in ("bool", bool)) for field in fields(view)]


_CONN = _plan(ConnView)
_LOOP = _plan(LoopView)


def conn_view(c: Any) -> ConnView:
    """From a ``rl_conn_view`` (struct or pointer); nothing of it is kept."""
    return ConnView(*[bool(getattr(c, name)) if yes else getattr(c, name) for name, yes in _CONN])


def loop_view(c: Any) -> LoopView:
    """From a ``rl_loop_view`` (struct or pointer); nothing of it is kept."""
    return LoopView(*[getattr(c, name) for name, _ in _LOOP])


def wait_view(c: Any) -> Wait:
    """From a ``rl_wait``."""
    return Wait(
        mode=words("rl_mode")[c.mode],
        why=words("rl_why")[c.why],
        timeout_ns=c.timeout_ns,
        can_block=bool(c.can_block),
        way=words("rl_expired")[c.way],
    )


def ring_info(c: Any) -> RingInfo:
    """From a ``rl_ring_info``."""
    return RingInfo(
        setup=words("rl_setup")[c.setup],
        flags=bit_names(c.flags, SETUP_FLAGS),
        features=bit_names(c.features, FEATURES),
        sq_entries=c.sq_entries,
        cq_entries=c.cq_entries,
        multishot_accept=bool(c.multishot_accept),
        multishot_recv=bool(c.multishot_recv),
        buffer_ring=bool(c.buffer_ring),
        thread_id=c.thread_id,
    )

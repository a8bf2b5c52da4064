"""Many stalled clients in a process of their own."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from engine.errors import MachineError, UsageError
from lab import content
from lab.clients import ClientError
from lab.crowd import Crowd, need_files

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def ended(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture
def answering() -> int:
    """The port of a server that answers one 1,000-byte request per connection."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + content.body(0, 1000)

    def serve() -> None:
        kept = []
        for _ in range(20):
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(answer)
            kept.append(connection)
        time.sleep(5)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_crowd_asks_waits_and_reads(answering: int) -> None:
    with Crowd("127.0.0.1", answering, 20) as crowd:
        assert crowd.connect()["connected"] == 20
        assert crowd.ask("async", size=1000) == {"asked": 20}
        deadline = time.monotonic() + 5
        while (waiting := crowd.waiting())["clients"] < 20 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert waiting["bytes"] > 20_000
        assert crowd.read_all() == {
            "bytes": 20_000, "expected": 20_000, "in_order": True, "whole": 20, "fault": None,
        }
        pid = crowd.pid
    assert ended(pid)


def test_refusal_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    with Crowd("127.0.0.1", port, 3) as crowd, pytest.raises(ClientError, match="refused"):
        crowd.connect()


def test_silence_is_bounded_and_counted(answering: int) -> None:
    with Crowd("127.0.0.1", answering, 3, patience=0.3) as crowd:
        crowd.connect()
        crowd.ask(size=2000)
        got = crowd.read_all()
    assert got["whole"] == 0
    assert "a body of 1,000 bytes where 2,000 were asked for" in got["fault"]


def test_the_crowd_ends_with_its_parent() -> None:
    program = textwrap.dedent("""
        import socket, sys, time
        from lab.crowd import Crowd
        listener = socket.create_server(("127.0.0.1", 0))
        crowd = Crowd("127.0.0.1", listener.getsockname()[1], 5)
        crowd.connect()
        print(crowd.pid, flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert ended(pid)


def test_too_many_are_refused_with_the_limit() -> None:
    with pytest.raises(UsageError, match="give 1 to 100,000"):
        Crowd("127.0.0.1", 1, 100_001)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine has no limit of open files")
    with pytest.raises(MachineError, match=f"the hard limit is {hard:,}; raise it"):
        need_files(hard, "these connections")

"""What bad input and a machine that says no get: one clear line, and nothing left behind."""

from __future__ import annotations

import copy
import errno
import pickle
import resource
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LoopView, Policy, RelayScript, RingServer, Script, SpliceRelay, startup
from engine.binding import native
from engine.errors import EngineError, MachineError, PolicyError, RinglabError, UsageError

needs_ring = pytest.mark.skipif(
    native()[1].rl_probe(native()[0].new("rl_ring_info *")) < 0,
    reason="io_uring is not allowed here",
)


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"response_size": -1}, "response_size=-1 is not allowed: a whole number from 0 to 10737"),
        ({"response_size": -1}, "1073741824 bytes"),
        ({"response_size": 2**40}, "response_size=1099511627776 is not allowed"),
        ({"response_size": 1.5}, "response_size=1.5 is not allowed: a whole number"),
        ({"response_size": "3M"}, "response_size='3M' is not allowed"),
        ({"response_size": True}, "response_size=True is not allowed"),
        ({"handler_ms": 60_001}, "a whole number from 0 to 60000 ms"),
        ({"wait_cap_ms": 0}, "wait_cap_ms=0 is not allowed: a number from 0.001 to 60000 ms"),
        ({"wait_cap_ms": float("nan")}, "wait_cap_ms=nan is not allowed"),
        ({"max_handler_ms": 60_001}, "a whole number from 0 to 60000 ms"),
        ({"max_pipeline": 0}, "a whole number from 1 to 65536 requests"),
        ({"write_timeout_ms": -5}, "ms (0: none)"),
        ({"so_sndbuf": 2**31}, "bytes (0: the kernel's choice)"),
        ({"route": "asynk"}, "unknown route 'asynk'; choose from: async, sync"),
        ({"setup": "poll"}, "unknown setup 'poll'; choose from: sqpoll"),
        ({"recv": "ring"}, "unknown recv 'ring'; choose from: buffer-ring"),
        ({"port": 65_536}, "port=65536 is not allowed: a whole number from 0 to 65535"),
        ({"workers": 0}, "workers=0 is not allowed"),
        ({"sample_hz": 1001}, "a whole number from 0 to 1000 samples a second"),
        ({"host": "localhost"}, "host='localhost' is not a numeric address; give one such as 127"),
        ({"host": "fe80::1%lo"}, "is not a numeric address"),
        ({"host": ""}, "host='' is not a numeric address"),
        ({"host": "224.0.0.1"}, "host='224.0.0.1' is a multicast address"),
        ({"host": "ff02::1"}, "host='ff02::1' is a multicast address"),
        ({"host": "255.255.255.255"}, "host='255.255.255.255' is a broadcast address"),
        ({"host": "127.255.255.255"}, "host='127.255.255.255' is a broadcast address"),
        ({"policy": "x" * 500}, f"unknown policy '{'x' * 60}...'; choose from: "),
        ({"route": "a\nb"}, r"unknown route 'a\nb'; choose from: "),
        ({"y" * 500: 3}, f"unknown parameter '{'y' * 60}...'; choose from: "),
        ({"policy": "tickles"}, "unknown policy 'tickles'; choose from: tickless,"),
        ({"idle": "never"}, "unknown choice of idle 'never'"),
        ({"respones_size": 3}, "unknown parameter 'respones_size'; choose from: response_size,"),
    ],
)  # fmt: skip
def test_bad_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        RingServer(**given)
    assert said in one_line(caught.value)


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ("::1:80", "an IPv6 host stands in brackets, as in [::1]:8080"),
        ("[127.0.0.1]:80", "and no other does"),
        ("224.0.0.1:80", "origin='224.0.0.1' is a multicast address"),
        ("127.255.255.255:80", "origin='127.255.255.255' is a broadcast address"),
        ("127.0.0.1", "is not HOST:PORT"),
    ],
)
def test_origins_that_are_none(origin: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        SpliceRelay(origin)
    assert said in one_line(caught.value)


def test_an_origin_of_either_family() -> None:
    assert SpliceRelay("[::1]:80").origin == ("::1", 80)
    assert SpliceRelay("127.0.0.1:80").origin == ("127.0.0.1", 80)


@pytest.mark.parametrize(
    "make", [RingServer, lambda: SpliceRelay("127.0.0.1:1"), Script, RelayScript]
)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_has_one_handle(
    make: Callable[[], object], again: Callable[[object], object]
) -> None:
    with pytest.raises(UsageError, match="cannot be copied or pickled"):
        again(make())


@needs_ring
@pytest.mark.parametrize("seconds", [None, "1", float("nan"), -1, True])
def test_a_time_that_is_none(seconds: Any) -> None:
    with RingServer(sample_hz=0) as server:
        with pytest.raises(UsageError, match="a number from 0 to inf s"):
            server.wait_stopped(seconds)
        server.request_stop()
        assert server.wait_stopped(float("inf"))


@pytest.mark.parametrize("wrong", [None, "x", 1.5, 2**70, [], object()])
def test_a_script_takes_no_wrong_types(wrong: Any) -> None:
    ring, relay = Script(), RelayScript()
    calls: list[Callable[[Any], object]] = [
        ring.eof, ring.conn, ring.advance, ring.handler_begin, ring.output, ring.pending,
        lambda it: ring.room(0, it), lambda it: ring.send_done(0, it), lambda it: ring.input(0, it),
        relay.fin, relay.socket, relay.advance, lambda it: relay.input(0, it),
        lambda it: relay.connected(0, it), lambda it: relay.refuse(pipe=it),
    ]
    for call in calls:
        with pytest.raises((UsageError, EngineError)) as caught:
            call(wrong)
        one_line(caught.value)


def test_not_running() -> None:
    server = RingServer()
    for call in (server.sample, server.connections, server.request_stop, server.samples):
        with pytest.raises(UsageError, match="the server is not running; start it with start"):
            call()
    server.close()
    server.check()
    assert "not running" in repr(server)


@needs_ring
def test_a_bad_set_changes_nothing() -> None:
    with RingServer("fixed", sample_hz=0) as server:
        before = server.settings
        for given in (
            {"response_size": 5, "handler_ms": -1},
            {"response_size": 5, "held": "dropped"},
            {"response_size": 5, "policy": "no"},
            {"response_size": 5, "idle": "tickless"},
            {"workers": 2},
        ):
            with pytest.raises(UsageError) as caught:
                server.set(**given)
            one_line(caught.value)
            assert server.settings == before
            assert server.policy.name == "fixed"
        with pytest.raises(UsageError, match="worker=1 is not allowed: a whole number from 0 to 0"):
            server.sample(1)
        with pytest.raises(UsageError, match="sample_hz=5000"):
            server.sample_rate(5000)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Script, {"response_size": 5, "handler_ms": -1}),
        (Script, {"response_size": 5, "held": "dropped"}),
        (Script, {"response_size": 5, "policy": "no"}),
        (Script, {"response_size": 5, "sq_entries": 2}),
        (RelayScript, {"so_sndbuf": 5, "client_timeout_ms": -1}),
        (RelayScript, {"so_sndbuf": 5, "recv_behind": "maybe"}),
        (RelayScript, {"so_sndbuf": 5, "policy": "no"}),
        (RelayScript, {"so_sndbuf": 5, "pipe_size": 2}),
    ],
)
def test_a_bad_set_changes_nothing_of_a_script(
    kind: type[Script] | type[RelayScript], given: dict[str, Any]
) -> None:
    script = kind()
    settings, policy = script.settings, script.policy
    with pytest.raises(UsageError) as caught:
        script.set(**given)
    one_line(caught.value)
    assert script.settings == settings
    assert script.policy == policy


@needs_ring
def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError) as caught:
            RingServer(port=port).start()
    assert one_line(caught.value) == (
        f"port {port} on 127.0.0.1 is in use; give another, or port=0 for any free one"
    )


@needs_ring
def test_an_address_of_somebody_else() -> None:
    with pytest.raises(UsageError, match=r"host=192\.0\.2\.1 is not an address of this machine"):
        RingServer(host="192.0.2.1").start()


def test_file_limit() -> None:
    """Asked in a process of its own: a hard limit cannot be raised again."""
    script = textwrap.dedent(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        from engine.startup import need_descriptors
        from engine.errors import MachineError
        need_descriptors(1, "max_connections", 220)
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200)
        try:
            need_descriptors(2, "max_connections", 1000)
        except MachineError as error:
            print(error)
        from engine import SpliceRelay
        try:
            SpliceRelay("127.0.0.1:1", max_sessions=50).start()
        except MachineError as error:
            print(error)
        """
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    raised, said, relay = done.stdout.splitlines()
    assert raised == "True"
    assert said.startswith("the limit of open files is 300, and max_connections=1000 on each of 2")
    assert "ulimit -Hn" in said
    assert said.endswith("or lower max_connections")
    assert relay.startswith("the limit of open files is 300, and max_sessions=50 needs ")
    assert relay.endswith("or lower max_sessions")


@pytest.mark.parametrize(
    ("number", "disabled", "said"),
    [
        (errno.EPERM, 2, "io_uring is disabled (sysctl kernel.io_uring_disabled=2)"),
        (errno.EPERM, 1, "io_uring is disabled for this user"),
        (errno.EPERM, 0, "refused by a seccomp filter"),
        (errno.ENOSYS, 0, "refused by a seccomp filter"),
        (errno.EPERM, None, "refused by a seccomp filter"),
        (errno.ENOSYS, None, "io_uring is absent"),
    ],
)
def test_who_refuses_io_uring(number: int, disabled: int | None, said: str) -> None:
    assert said in startup.refusal(number, disabled)


def test_start_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "disabled_level", lambda: 2)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (8 << 20, 8 << 20))
    ffi, _ = native()
    host = ffi.new("char[]", b"127.0.0.1")
    config = ffi.new("rl_config *", {"host": host, "port": 80})
    for number, where, kind, said in [
        (errno.EPERM, "io_uring_setup", MachineError, "engine.Script) works without io_uring"),
        (errno.ENOMEM, "io_uring_setup", MachineError, "the memlock limit is 8388608 bytes"),
        (errno.EINVAL, "io_uring_setup", MachineError, "use setup='auto'"),
        (errno.EIO, "io_uring_setup", EngineError, "io_uring_setup: Input/output error (EIO)"),
        (errno.EADDRINUSE, "bind", MachineError, "port 80 on 127.0.0.1 is in use"),
        (errno.EACCES, "bind", MachineError, "give one of 1024 or more"),
        (errno.EMFILE, "eventfd", MachineError, "raise the limit of open files"),
        (errno.EINVAL, "", EngineError, "the server did not start: the engine: Invalid argument"),
    ]:
        error = startup.start_error(number, where, config)
        assert isinstance(error, RinglabError)
        assert type(error) is kind
        assert said in one_line(error)


@pytest.mark.parametrize(("release", "where", "soft", "first", "never"), [
    ((5, 10), "io_uring_setup", 8 << 20, "the memlock limit is 8388608", None),
    ((6, 18), "io_uring_setup", 8 << 20, "this machine, or the memory cgroup", None),
    ((6, 18), "io_uring_setup", resource.RLIM_INFINITY, "this machine, or the memory", "memlock"),
    ((5, 10), "pthread_create", 8 << 20, "this machine, or the memory cgroup", "memlock"),
])
def test_what_is_short_of_memory_is_told_as_the_kernel_counts_it(
    monkeypatch: pytest.MonkeyPatch, release: tuple[int, int], where: str, soft: int, first: str,
    never: str | None,
) -> None:
    monkeypatch.setattr(startup, "kernel_release", lambda: release)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
    line = one_line(startup.memory_error(where))
    assert line.startswith(f"{where}: not enough memory; {first}")
    assert "memory.max" in line
    assert never is None or never not in line


def test_an_engine_that_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    root = Path(__file__).resolve().parents[2]
    for file in (root / "engine").glob("*.py"):
        (tmp_path / "engine" / file.name).write_text(file.read_text(encoding="utf-8"))
    # An editable install finds the checkout's module from anywhere: take its finder away.
    script = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]; "
        "import engine; engine.RingServer()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "engine.errors.MachineError: the native engine is not built; build it with: make setup"
    )


class Broken(Policy):
    def idle(self, loop: LoopView) -> float:
        raise LookupError("nothing")


@needs_ring
def test_a_broken_policy_is_told_by_whichever_call_comes_first() -> None:
    with RingServer("fixed") as server:
        server.set(policy=Broken())
        with pytest.raises(PolicyError, match="LookupError: nothing") as caught:
            server.wait_stopped(5)
        assert isinstance(caught.value.__cause__, LookupError)
        with pytest.raises(PolicyError):
            server.check()
    # Told already: leaving the block says it no more.


@needs_ring
def test_a_broken_policy_is_told_at_the_latest_on_leaving() -> None:
    with pytest.raises(PolicyError):
        leave_broken(lambda: None)


@needs_ring
def test_a_broken_policy_does_not_hide_another_error() -> None:
    with pytest.raises(ZeroDivisionError):
        leave_broken(lambda: 1 // 0)


def leave_broken(last: Callable[[], object]) -> None:
    """Leaves a block in which the policy has failed and no call has told so."""
    with RingServer(Broken()) as server:
        until = time.monotonic() + 10
        while server._callers[0].error is None and time.monotonic() < until:
            time.sleep(0.005)
        last()


@needs_ring
def test_a_policy_cannot_call_its_server() -> None:
    class Nosy(Policy):
        server: RingServer

        def idle(self, loop: LoopView) -> float:
            self.server.counters()
            return 0.01

    policy = Nosy()
    server = policy.server = RingServer(policy)
    server.start()
    with pytest.raises(PolicyError, match="a policy cannot call its server"):
        server.wait_stopped(5)
    server.close()

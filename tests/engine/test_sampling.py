"""Samples: one a tick whatever the loop does, taken by nobody who would have to wake for it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from engine import RingServer, SpliceRelay
from engine.binding import native
from engine.errors import UsageError

pytestmark = pytest.mark.skipif(
    native()[1].rl_probe(native()[0].new("rl_ring_info *")) < 0,
    reason="io_uring is not allowed here",
)
MS = 1_000_000


def switches(thread: int) -> int:
    """Voluntary context switches of a thread of this process."""
    status = Path(f"/proc/self/task/{thread}/status").read_text(encoding="ascii")
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def tasks() -> set[int]:
    """The threads of this process."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def eventually_asleep(server: RingServer) -> None:
    """Returns when the loop is in its first wait."""
    until = time.monotonic() + 10
    while not server.counters()["waiting"]:
        assert time.monotonic() < until
        time.sleep(0.001)
    time.sleep(0.05)


def test_nobody_wakes_to_take_them() -> None:
    """The engine adds its worker and its handler threads, and the asleep ones stay asleep."""
    before = tasks()
    with RingServer("tickless", sample_hz=1000, handlers=2) as server:
        started = tasks() - before
        assert len(started) == 1 + 2
        eventually_asleep(server)
        was = {thread: switches(thread) for thread in started}
        time.sleep(0.5)
        assert len(server.samples()) >= 500
        assert {thread: switches(thread) for thread in started} == was


def test_a_sleeping_loop_has_a_sample_at_every_tick() -> None:
    with RingServer("tickless", sample_hz=200) as server:
        eventually_asleep(server)
        first = server.samples()
        time.sleep(0.5)
        second = server.samples()
        samples = np.concatenate([first[-1:], second])
        assert len(second) >= 100
        assert set(np.diff(samples["t_ns"].astype(np.int64)).tolist()) == {5 * MS}
        assert second["c"]["waiting"].all()
        assert len(set(second["c"]["iterations"].tolist())) == 1
        assert len(set(second["thread_cpu_ns"].tolist())) == 1


def test_the_process_goes_on_while_the_loop_sleeps() -> None:
    """Its CPU rises from tick to tick, not in one step when it is read."""
    with RingServer("tickless", sample_hz=200) as server:
        eventually_asleep(server)
        server.samples()
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            pass
        steps = np.diff(server.samples()["process_cpu_ns"].astype(np.int64))
        assert len(steps) >= 75
        assert (steps > 0).all()
        assert steps.max() < 3 * np.median(steps)


def test_a_spinning_loop_takes_its_own() -> None:
    """Every tick has a sample although nobody reads, and each knows more iterations."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            RingServer("shipped", sample_hz=200, so_sndbuf=16_384, response_size=8_000_000)
        )
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        client.sendall(b"GET /async HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        time.sleep(0.2)
        poke = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        poke.sendall(b"GET /sync?size=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert poke.recv(1)
        server.samples()
        time.sleep(0.5)
        samples = server.samples()
        # What is read last may find it off the CPU in the middle of a wait, for a tick or two.
        steps = np.trim_zeros(np.diff(samples["c"]["iterations"].astype(np.int64)), "b")
        assert len(steps) > 50  # a busy neighbour makes some late, and late ones are not made up
        assert (steps > 0).all()
        assert (np.diff(samples["t_ns"].astype(np.int64)) > 0).all()


def held_up(server: RingServer) -> None:
    """Returns when the loop is held up outside its wait."""
    until = time.monotonic() + 10
    while not server.counters()["blocked"]:
        assert time.monotonic() < until
        time.sleep(0.001)


def evenly_held_up(samples: np.ndarray) -> None:
    """Every tick has its sample, and each says that the loop is not in its wait."""
    assert len(samples) >= 100
    assert set(np.diff(samples["t_ns"].astype(np.int64)).tolist()) == {MS}
    assert samples["c"]["blocked"].all()
    assert not samples["c"]["waiting"].any()
    assert len(set(samples["c"]["iterations"].tolist())) == 1


def test_a_loop_in_a_sync_handler_has_a_sample_at_every_tick() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RingServer("tickless", sample_hz=1000))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        client.sendall(b"GET /sync?ms=900&size=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        held_up(server)
        server.samples()
        time.sleep(0.2)
        evenly_held_up(server.samples())


def test_a_loop_that_waits_for_a_handlers_lock_has_a_sample_at_every_tick() -> None:
    """Also when nobody reads until the loop itself goes on: it knows since when it was held up."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RingServer("shipped", sample_hz=1000, so_sndbuf=16_384))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        client.sendall(b"GET /async?size=4000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        while not server.counters()["sending"]:
            time.sleep(0.001)
        client.sendall(b"GET /async?ms=1500&size=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)  # the second handler has the lock by now: the SEND's completion is held
        assert client.recv(1 << 20)
        held_up(server)
        server.samples()
        until = time.monotonic() + 10
        while server.counters()["blocked"]:
            assert time.monotonic() < until
            time.sleep(0.3)
        samples = server.samples()
        evenly_held_up(samples[samples["c"]["blocked"] == 1])


def test_what_nobody_reads_gives_way_to_what_is_newer() -> None:
    with RingServer("tickless", sample_hz=1000, sample_seconds=1) as server:
        eventually_asleep(server)
        time.sleep(1.5)
        samples = server.samples()
        assert 1000 <= len(samples) < 1200  # taken in pieces, and time goes on
        assert server.dropped >= 400
        assert (np.diff(samples["t_ns"].astype(np.int64)) == MS).all()
        assert time.monotonic_ns() - int(samples["t_ns"][-1]) < 200 * MS


def test_the_rate_changes_from_now_on() -> None:
    with RingServer("tickless", sample_hz=100) as server:
        eventually_asleep(server)
        server.sample_rate(0)
        assert 5 <= len(server.samples()) <= 100
        time.sleep(0.1)
        assert len(server.samples()) == 0
        server.sample_rate(500)
        time.sleep(0.1)
        assert (np.diff(server.samples()["t_ns"].astype(np.int64)) == 2 * MS).all()


def test_samples_of_several_loops_come_in_the_order_of_time() -> None:
    with RingServer("tickless", workers=2, sample_hz=500) as server:
        time.sleep(0.3)
        samples = server.samples()
        assert set(samples["worker"].tolist()) == {0, 1}
        assert (np.diff(samples["t_ns"].astype(np.int64)) >= 0).all()
        counts = np.bincount(samples["worker"].astype(int))
        assert abs(int(counts[0]) - int(counts[1])) <= 1


def test_somebody_who_looks_all_the_time_takes_no_tick_from_it() -> None:
    """The loop does not wait for a reader's lock, and yet each of its sleeps is told whole."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RingServer("tickless", sample_hz=1000))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                server.counters()

        readers = [threading.Thread(target=look) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            server.samples()
            for _ in range(40):
                client.sendall(b"GET /sync?size=1 HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(4096)
                time.sleep(0.01)
            steps = np.diff(server.samples()["t_ns"].astype(np.int64))
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert len(steps) > 0.9 * steps.sum() / MS > 300


@pytest.mark.parametrize(("given", "most"), [
    ({"sample_hz": 1000, "sample_seconds": 86_400}, 2_000),
    ({"sample_hz": 1000, "sample_seconds": 400, "workers": 8}, 250),
])
def test_more_samples_than_can_be_kept_are_refused_with_what_can(
    given: dict[str, int], most: int
) -> None:
    server = RingServer("tickless", **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"give sample_seconds={most} or less") as caught:
        server.start()
    assert "2,000,000 allowed" in str(caught.value)
    with pytest.raises(UsageError, match="give sample_seconds="):
        SpliceRelay("127.0.0.1:1", sample_hz=1000, sample_seconds=86_400).start()


def test_a_slow_rate_keeps_a_long_stretch() -> None:
    """Room for the rate that was asked for; for a higher one, that may be set later, if allowed."""
    assert RingServer("tickless", sample_hz=20, sample_seconds=86_400)._capacity() == 2_000_000
    assert RingServer("tickless", sample_hz=0, sample_seconds=10)._capacity() == 1_000
    assert RingServer("tickless", sample_hz=500, sample_seconds=10)._capacity() == 5_000

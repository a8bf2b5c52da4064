"""What the tests of the relay on real sockets stand on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from engine.startup import need_descriptors
from lab.origin import Origin
from tests.engine.relay_wire import SMALL, eventually
from tests.engine.wire import held


@pytest.fixture
def relay_leaves_nothing() -> Iterator[None]:
    need_descriptors(1, "max_sessions", 1024, 6)  # a start raises the limit: not ours to count
    gc.collect()
    before = held()
    yield
    gc.collect()
    eventually(lambda: held() == before)


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin(rcvbuf=SMALL) as running:
        yield running

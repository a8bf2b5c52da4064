"""What every test shares."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared: how long one example takes says nothing about the code.
settings.register_profile(
    "ringlab", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ringlab")

# A shell without job control has its background jobs ignore SIGINT, and so would all that tests
# start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def project() -> Path:
    """The folder of the checkout."""
    return Path(__file__).resolve().parent.parent

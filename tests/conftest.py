"""What every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared: how long one example takes says nothing about the code.
settings.register_profile(
    "ringlab", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ringlab")


@pytest.fixture(scope="session")
def project() -> Path:
    """The folder of the checkout."""
    return Path(__file__).resolve().parent.parent

"""What the tests of all transports share."""

from __future__ import annotations

from uuid import uuid4

import pytest


@pytest.fixture
def queue() -> str:
    """One that nobody else uses."""
    return f"busload.test-{uuid4().hex}"

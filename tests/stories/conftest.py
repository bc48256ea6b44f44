"""Every story ends with the invariants, whether it says so or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.given import Database


@pytest.fixture(autouse=True)
def invariants(database: Database) -> Iterator[None]:
    """Set up before the bus, so that it looks after everything has stopped."""
    yield
    database.check_invariants()

"""Every story ends with the invariants, whether it says so or not."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def every_story_ends_with_the_invariants(invariants: None) -> None:
    """Ask for the fixture that checks them."""

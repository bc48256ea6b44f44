"""What tests of the dashboard are given: an application on the test's own database, and a browser's view of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from bench.pages import counted
from busload import CommandBus
from busload.dashboard import app
from tests.dashboard.site import SAME_ORIGIN, client


@pytest.fixture(autouse=True)
def no_users_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUSLOAD_DASHBOARD_USERS", raising=False)


@pytest.fixture
def dashboard(bus: CommandBus) -> Starlette:
    return app(bus)


@pytest.fixture
async def site(dashboard: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A browser on this machine, on a page of the dashboard."""
    async with client(dashboard, **SAME_ORIGIN) as http:
        yield http


@pytest.fixture
def sent() -> Iterator[list[Any]]:
    """The statements that were sent since the test began, or since the list was cleared."""
    with counted() as statements:
        yield statements

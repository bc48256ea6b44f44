"""Three servers of PostgreSQL, each with a database of its own for the test. The third can be stopped."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from busload import CommandBus, Settings
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.testing.postgres import TestServer
from tests.conftest import THROWN_AWAY, server_home


@pytest.fixture(scope="session")
def second_server() -> Iterator[TestServer]:
    with _server("second-server")[0] as server:
        yield server


@pytest.fixture(scope="session")
def third_server() -> Iterator[tuple[TestServer, EmbeddedPostgres]]:
    """Each process of the run has its own, since tests stop it."""
    server, embedded = _server(f"third-server-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}")
    with server:
        yield server, embedded


def _server(name: str) -> tuple[TestServer, EmbeddedPostgres]:
    home = server_home(name)
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    return TestServer(home, config=THROWN_AWAY), EmbeddedPostgres(home, config=THROWN_AWAY)


@dataclass(frozen=True)
class Three:
    """The DSNs of three databases on three servers, and the embedded server of the third."""

    payments: str
    orders: str
    rest: str
    third: EmbeddedPostgres

    @property
    def mapping(self) -> dict[str, str]:
        return {"payments": self.payments, "orders": self.orders, "*": self.rest}


@pytest.fixture
def three(
    server: TestServer, second_server: TestServer, third_server: tuple[TestServer, EmbeddedPostgres]
) -> Iterator[Three]:
    last, embedded = third_server
    with server.database() as payments, second_server.database() as orders, last.database() as rest:
        try:
            yield Three(payments, orders, rest, embedded)
        finally:
            embedded.start()


@pytest.fixture
async def sharded(three: Three, settings: Settings) -> AsyncIterator[CommandBus]:
    async with CommandBus(three.mapping, settings=settings) as bus:
        yield bus

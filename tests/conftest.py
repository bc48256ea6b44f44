"""What every test is given: a real PostgreSQL, and a database of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from busload import CommandBus, Settings, SyncCommandBus, WorkerSettings
from busload.store.embedded import EmbeddedPostgres
from busload.testing import TestServer
from tests.brokers.lookalike import servicebus, servicebus_url
from tests.brokers.nats import nats_url
from tests.brokers.pgmq import pgmq_url
from tests.brokers.redis import redis_url
from tests.given import Database, Given
from tests.servers import name_leader, rabbitmq_url, scratch, stop_servers

__all__ = ["nats_url", "pgmq_url", "rabbitmq_url", "redis_url", "servicebus", "servicebus_url"]  # fixtures

FOLDER = "PYTEST_BUSLOAD_FOLDER"


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a folder for its servers; the processes it is spread over inherit its name."""
    os.environ.setdefault(FOLDER, str(scratch() / f"busload-tests-{secrets.token_hex(4)}"))
    name_leader()
    # A run that was started in the background ignores it, and so would all the processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def server_home(name: str = "server") -> Path:
    """Where this run keeps a server: the same folder for all its processes, reachable for the server's own user."""
    return Path(os.environ[FOLDER]) / name


@pytest.fixture(scope="session")
def server() -> Iterator[TestServer]:
    """One server for the whole run, also when it is spread over processes."""
    home = server_home()
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    config = {"deadlock_timeout": "100ms", "log_lock_waits": "on", "max_connections": "300"}
    with TestServer(home, config=config) as server:
        yield server


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that leads the run leaves last: it stops the servers and removes their folders."""
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        folder = server_home().parent
        stop_servers(folder)
        for home in folder.glob("*"):
            EmbeddedPostgres(home).stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def dsn(server: TestServer) -> Iterator[str]:
    """A database with busload's schema, used by this test alone."""
    with server.database() as dsn:
        yield dsn


@pytest.fixture
def settings() -> Settings:
    return Settings(poll_every=timedelta(milliseconds=200))


@pytest.fixture
async def bus(dsn: str, settings: Settings) -> AsyncIterator[CommandBus]:
    async with CommandBus(dsn, settings=settings) as bus:
        yield bus


@pytest.fixture
def sync_bus(dsn: str, settings: Settings) -> Iterator[SyncCommandBus]:
    with SyncCommandBus(dsn, settings=settings) as bus:
        yield bus


@pytest.fixture
def worker_settings() -> WorkerSettings:
    """A worker that notices within milliseconds what takes seconds in production."""
    return WorkerSettings(
        poll_every=timedelta(milliseconds=50),
        sweep_every=timedelta(milliseconds=100),
        grace=timedelta(seconds=5),
        no_handler_pause=timedelta(seconds=30),
    )


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection of the test's own, in autocommit mode."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def database(dsn: str) -> Iterator[Database]:
    with Database(dsn) as database:
        yield database


@pytest.fixture
def given(bus: CommandBus, database: Database, worker_settings: WorkerSettings) -> Given:
    return Given(bus, database, worker_settings)

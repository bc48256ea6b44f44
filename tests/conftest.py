"""What every test is given: a real PostgreSQL, and a database of its own."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from busload import CommandBus, Settings, SyncCommandBus, WorkerSettings
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.testing import TestServer
from tests import isolation
from tests.brokers.lookalike import servicebus, servicebus_url
from tests.brokers.nats import nats_url
from tests.brokers.pgmq import pgmq_url
from tests.brokers.redis import redis_url
from tests.given import Database, Given
from tests.order import dealt
from tests.servers import is_leader, leave_servers, name_leader, rabbitmq_url, stop_servers

# How long an example takes is not a property's business: on a busy machine one may take seconds.
hypothesis_settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("patient")

OUTSIDE = pytest.StashKey[list[str]]()
LONGEST = (
    *("chaos", "cluster", "browser", "explorer", "test_bench.py", "test_isolation.py", "test_screenshots.py"),
    *("test_interleavings.py", "test_model.py", "test_examples.py", "test_buffers.py", "test_budget_gate.py"),
    *("test_outage_log.py", "test_limiter.py", "test_demo.py"),
)
"""Folders and files whose tests take longest."""
THROWN_AWAY = {"fsync": "off", "full_page_writes": "off"}
"""For servers that no test crashes: their data need not survive a power failure."""
OLDEST = Path("/usr/lib/postgresql/15/bin")

__all__ = ["nats_url", "pgmq_url", "rabbitmq_url", "redis_url", "servicebus", "servicebus_url"]  # fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a folder of its own; the processes it is spread over inherit its name."""
    isolation.enter()
    name_leader()
    # A run that was started in the background ignores it, and so would all the processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported and collected out of the search for garbage: it stays until the end, a million objects.

    The search took a third of the time of the collection, and each later one half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the order was shuffled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest, in each process: at the end, all have something short to do."""
    processes = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    items[:] = dealt(items, processes, lambda item: not {*item.path.parts}.isdisjoint(LONGEST))


def server_home(name: str = "server") -> Path:
    """Where this run keeps a server: the same folder for all its processes, reachable for the server's own user."""
    return isolation.folder() / name


@pytest.fixture(scope="session")
def server() -> Iterator[TestServer]:
    """One server for the whole run, also when it is spread over processes."""
    home = server_home()
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    config = {"deadlock_timeout": "100ms", "log_lock_waits": "on", "max_connections": "500"}
    with TestServer(home, config=config | {"max_prepared_transactions": "10"} | THROWN_AWAY) as server:
        yield server


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that leads the run leaves last: it stops the servers and removes the run's folder."""
    if is_leader():
        folder = isolation.folder()
        stop_servers(folder)
        for home in folder.glob("*"):
            EmbeddedPostgres(home).stop()
        if outside := isolation.seen_outside():
            session.config.stash[OUTSIDE] = outside
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        shutil.rmtree(folder, ignore_errors=True)
    else:
        leave_servers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if outside := config.stash.get(OUTSIDE, []):
        terminalreporter.section("opened outside of the run's folder: use tmp_path, or a folder below TMPDIR", red=True)
        for line in outside:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    """What still runs would write into the log of the next test, and knock at a database that is gone."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("busload-") and thread.name != "busload-embedded":
            if not isinstance(thread, threading.Timer) or thread.finished.is_set():  # else it was not cancelled
                thread.join(10)
            assert not thread.is_alive(), f"The thread {thread.name} was left running."


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


@pytest.fixture
def invariants(database: Database) -> Iterator[None]:
    """What must hold at the end of a test. Set up before the bus, so that it looks after everything has stopped."""
    yield
    database.check_invariants()


@pytest.fixture(scope="session")
def oldest_server() -> Iterator[TestServer]:
    """PostgreSQL 15, one for the whole run, like `server`, which also says who stops it."""
    if not (OLDEST / "postgres").exists():
        pytest.fail(f"PostgreSQL 15 is not in {OLDEST}: `make test` installs it, see scripts/install-servers.sh.")
    home = server_home("postgresql-15")
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    config = {"deadlock_timeout": "100ms", "max_connections": "100"}
    with TestServer(home, pg_bin=OLDEST, config=config | THROWN_AWAY) as server:
        yield server


@pytest.fixture(params=["18", "15"])
def either_server(request: pytest.FixtureRequest) -> TestServer:
    """The newest and the oldest server, in turn."""
    server: TestServer = request.getfixturevalue("server" if request.param == "18" else "oldest_server")
    return server

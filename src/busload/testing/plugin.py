"""The plugin of pytest: a database for each test, and buses that use it.

pytest loads it into every run of an environment in which busload is installed. So it imports nothing of busload before
a fixture is used. `docs/testing.md` says how the fixtures are used and overridden.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from busload.bus import CommandBus
    from busload.integrations.django_app import DjangoCommandBus
    from busload.settings import Settings
    from busload.sync.bus import SyncCommandBus
    from busload.testing.faces import AnyBus
    from busload.testing.postgres import TestServer
    from busload.transports import Transport

RUN = "PYTEST_BUSLOAD_RUN"
"""In the environment, the folder of this run: the processes that pytest-xdist starts inherit it, and share a server."""

IN_MEMORY, ROOM = Path("/dev/shm"), 2 * 1024**3  # noqa: S108
"""Where databases are made quickest, and how many bytes must be free there."""

BEFORE = pytest.StashKey[str | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("busload_bus", "the application's bus, e.g. shop.app:bus: the fixtures use it, with its handlers")
    parser.addini(
        "busload_test_database_url",
        "a PostgreSQL whose role may create databases; without it, and without BUSLOAD_TEST_DATABASE_URL, one starts",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a process that leads others, or is alone
        config.stash[BEFORE] = os.environ.get(RUN)
        os.environ[RUN] = str(_scratch() / f"busload-pytest-{secrets.token_hex(6)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that leads the run leaves last: it stops the server and removes its data."""
    if BEFORE not in config.stash:
        return
    home, before = Path(os.environ[RUN]), config.stash[BEFORE]
    if home.exists():
        from busload.postgres.embedded.server import EmbeddedPostgres

        EmbeddedPostgres(home).stop()
        shutil.rmtree(home, ignore_errors=True)
    if before is None:
        os.environ.pop(RUN, None)
    else:  # this run was started by a test of another one, in the same process
        os.environ[RUN] = before


def _scratch() -> Path:
    """A folder for data that nobody needs after the run: in memory, unless `TMPDIR` says otherwise."""
    try:
        if "TMPDIR" not in os.environ and shutil.disk_usage(IN_MEMORY).free > ROOM and os.access(IN_MEMORY, os.W_OK):
            return IN_MEMORY
    except OSError:
        pass
    return Path(tempfile.gettempdir())


@pytest.fixture(scope="session")
def busload_server(pytestconfig: pytest.Config) -> Iterator[TestServer]:
    """The PostgreSQL of this run: the one that `BUSLOAD_TEST_DATABASE_URL` names, or an embedded one."""
    from busload.settings import from_environment
    from busload.testing.postgres import TestServer

    url = from_environment("BUSLOAD_TEST_DATABASE_URL") or pytestconfig.getini("busload_test_database_url")
    if url:
        with TestServer.at(str(url)) as server:
            yield server
        return
    home = Path(os.environ[RUN])
    home.mkdir(mode=0o755, exist_ok=True)
    with TestServer(home, config={"fsync": "off", "full_page_writes": "off"}) as server:
        yield server


@pytest.fixture
def busload_dsn(busload_server: TestServer, busload_application: AnyBus | None) -> Iterator[str]:
    """A database with busload's schema, used by this test alone and dropped afterwards.

    The application's bus uses it for as long.
    """
    from busload.testing.application_bus import application_at

    with busload_server.database() as dsn, application_at(busload_application, dsn):
        yield dsn


@pytest.fixture
def busload_transport() -> Transport | str | None:
    """The broker of the buses below: none. Override it to test with one, e.g. a `BreakableTransport`."""
    return None


@pytest.fixture
def busload_settings() -> Settings | None:
    """The settings of a new bus: override it. The application's own bus keeps its settings."""
    return None


@pytest.fixture(scope="session")
def busload_application(pytestconfig: pytest.Config) -> AnyBus | None:
    """The bus that `busload_bus` names in the settings of pytest; None if it names none."""
    from busload.errors import InvalidOperationError
    from busload.testing.application_bus import application_bus

    named = str(pytestconfig.getini("busload_bus") or "")
    try:
        return application_bus(named, pytestconfig.rootpath) if named else None
    except InvalidOperationError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture
def busload_sync_bus(
    busload_dsn: str,
    busload_application: AnyBus | None,
    busload_transport: Transport | str | None,
    busload_settings: Settings | None,
) -> Iterator[SyncCommandBus]:
    """An open `SyncCommandBus` of the test's own database: the application's own, if that is one."""
    from busload.sync.bus import SyncCommandBus
    from busload.testing.application_bus import bus_of_test

    about = (busload_application, busload_dsn, busload_transport, busload_settings)
    with bus_of_test(SyncCommandBus, *about) as bus:
        try:
            yield bus.open(wait=None)
        finally:
            bus.close()


@pytest.fixture
def busload_django_bus(transactional_db: None) -> Iterator[DjangoCommandBus]:
    """The bus of a Django project, on Django's test database, for tests with pytest-django that commit.

    All commands are deleted after the test, as the rows of models are.
    """
    from busload.integrations.django_app.conf import load_bus
    from busload.integrations.django_app.testing import delete_all_commands

    bus = load_bus()
    try:
        yield bus
    finally:
        bus.close()  # its connections would keep the test database from being dropped
        delete_all_commands()


def _async_fixture(function: Callable[..., AsyncIterator[Any]]) -> Any:
    """A fixture of pytest-asyncio, in any of its modes; without it a plain one, as the plugin of anyio takes it."""
    if find_spec("pytest_asyncio") is None:
        return pytest.fixture(function)
    import pytest_asyncio

    return pytest_asyncio.fixture(function)


@_async_fixture
async def busload_bus(
    busload_dsn: str,
    busload_application: AnyBus | None,
    busload_transport: Transport | str | None,
    busload_settings: Settings | None,
) -> AsyncIterator[CommandBus]:
    """An open `CommandBus` of the test's own database: the application's own, if that is one."""
    from busload.bus import CommandBus
    from busload.testing.application_bus import bus_of_test

    about = (busload_application, busload_dsn, busload_transport, busload_settings)
    with bus_of_test(CommandBus, *about) as bus:
        try:
            yield await bus.open(wait=None)
        finally:
            await bus.close()

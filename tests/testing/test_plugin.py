"""The plugin of pytest, as a project of a user has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from busload.errors import DatabaseUnusableError, InvalidOperationError
from busload.testing import TestServer
from busload.testing.application_bus import application_bus
from tests.given import Database

ROOT = Path(__file__).parents[2]

pytest_plugins = ["pytester"]


@pytest.fixture
def at_server(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of our own run, named as a user names his: no other one has to start."""
    monkeypatch.setenv("BUSLOAD_TEST_DATABASE_URL", make_conninfo(dsn, dbname="postgres"))


def test_loading_it_imports_nothing_of_busload() -> None:
    program = (
        "import sys, busload.testing.plugin;"
        "print(*sorted(n for n in sys.modules if n.startswith(('busload', 'psycopg', 'msgspec'))))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["busload", "busload.testing", "busload.testing.plugin"]


DJANGO = """
    import django, psycopg, pytest
    from django.conf import settings
    from django.db import connection
    from django.test import TestCase
    from psycopg.conninfo import conninfo_to_dict

    from busload import SyncCommandBus
    from busload.testing import assert_not_sent, assert_sent, drain, run_handler

    bus = SyncCommandBus("postgresql://nobody@nowhere.invalid/")  # never connected

    @bus.handler("payments", "Debit")
    def debit(command, ctx):
        with connection.cursor() as cursor:  # that of the test, since it runs in its thread
            cursor.execute("INSERT INTO ledger VALUES (%s)", [command.data])

    @pytest.fixture(scope="session", autouse=True)
    def database(busload_server):
        with busload_server.database() as dsn:
            place = {name.upper(): value for name, value in conninfo_to_dict(dsn).items()}
            place["NAME"] = place.pop("DBNAME")
            settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **place}})
            django.setup()
            with psycopg.connect(dsn) as conn:
                conn.execute("CREATE TABLE ledger (account integer CHECK (account > 0))")
            yield

    class LedgerTest(TestCase):
        def rows(self):
            with connection.cursor() as cursor:
                cursor.execute("SELECT account FROM ledger")
                return cursor.fetchall()

        def test_commands_run_in_the_transaction_of_the_test(self):
            conn = connection
            bus.send("payments", "Debit", 7, conn=conn)
            bus.send("payments", "Debit", -1, max_attempts=1, conn=conn)
            assert drain(bus, conn=conn) == 2
            assert self.rows() == [(7,)]
            assert_sent(bus, "payments", "Debit", 7, status="COMPLETED", conn=conn)
            [refused] = assert_sent(bus, "payments", "Debit", -1, status="IN_TROUBLESHOOTING_QUEUE", conn=conn)
            assert refused.last_error_type == "IntegrityError"
            run_handler(bus, "payments", "Debit", 8, conn=conn)
            assert self.rows() == [(7,), (8,)]

        def test_nothing_is_left_of_it(self):
            assert_not_sent(bus, "payments", "Debit", conn=connection)
            assert self.rows() == []
"""


@pytest.mark.usefixtures("at_server")
def test_the_example_project_passes_and_so_do_the_test_cases_of_django(pytester: pytest.Pytester) -> None:
    """A database for each test, the bus of the application, every helper, and a transaction that is rolled back."""
    pytester.makepyfile(test_django=DJANGO)
    shutil.copytree(ROOT / "examples/testing", pytester.path / "examples/testing")
    shutil.copy(ROOT / "examples/testing/pytest.ini", pytester.path)
    ran = pytester.runpytest_subprocess("-q", "-p", "no:randomly", "-p", "no:django")
    ran.assert_outcomes(passed=8)


SYNC_PROJECT = {
    "conftest": """
        import pytest
        from busload.testing import BreakableTransport

        @pytest.fixture
        def busload_transport(busload_dsn, request):
            return BreakableTransport(busload_dsn) if "broker" in request.node.name else None
    """,
    "shop": """
        from busload import SyncCommandBus
        bus = SyncCommandBus(transport="redis://nowhere.invalid", dispatch="optimistic")
        events = bus.buffer("events", size=2)
        synced = []

        @bus.handler("shipping", "Ship")
        def ship(command, ctx):
            return command.data

        @events.handler()
        def sync(group, ctx):
            synced.extend(item.data for item in group)
    """,
    "test_one": """
        import pathlib, pytest, shop
        from busload import SyncCommandBus
        from busload.testing import assert_sent, broker_down, drain, run_handler

        @pytest.mark.parametrize("n", range(4))
        def test_databases_are_apart(busload_sync_bus, n):
            assert busload_sync_bus is shop.bus
            shop.bus.send("shipping", "Ship", n)
            assert drain(shop.bus) == 1
            [sent] = assert_sent(shop.bus, "shipping", "Ship", times=1)
            assert sent.result == n
            with open("servers", "a") as file:
                print(busload_sync_bus.dsn.partition("host=")[2], file=file)

        def test_buffers_of_the_application_go_along(busload_sync_bus):
            shop.events.add(1)
            shop.events.add(2)
            drain(shop.bus)
            assert shop.synced == [1, 2]

        def test_a_handler_of_a_test_is_forgotten(busload_sync_bus):
            busload_sync_bus.handler("shipping", "Once")(lambda command, ctx: 1)

        def test_a_handler_of_a_test_is_forgotten_indeed(busload_sync_bus):
            busload_sync_bus.handler("shipping", "Once")(lambda command, ctx: 2)
            assert run_handler(busload_sync_bus, "shipping", "Once") == 2

        def test_the_broker_is_down(busload_sync_bus):
            with broker_down(busload_sync_bus):
                busload_sync_bus.send("shipping", "Ship", 1)
                [sent] = assert_sent(busload_sync_bus, "shipping", "Ship")
                assert sent.status.startswith("PENDING_")

        def test_the_application_uses_the_database_that_is_asked_for_alone(busload_dsn):
            shop.bus.open()
            assert shop.bus.dsn == busload_dsn

        def test_nothing_is_asked_for():
            assert shop.bus.transport is not None  # the application's own again
    """,
}


def test_processes_share_an_embedded_server_and_need_no_event_loop(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where plugins are named one by one: without pytest-asyncio, for one."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(**SYNC_PROJECT)
    pytester.makeini("[pytest]\nbusload_bus = shop:bus\n")
    ran = pytester.runpytest_subprocess("-q", "-n2", "-p", "xdist", "-p", "busload.testing.plugin", "-W", "error")
    ran.assert_outcomes(passed=10)
    [server] = set((pytester.path / "servers").read_text().splitlines())
    assert not Path(server.partition("&")[0]).exists()  # stopped and removed


def test_the_page_shows_what_the_example_has() -> None:
    page, example = (ROOT / "docs/testing.md").read_text(), (ROOT / "examples/testing/test_shop.py").read_text()
    shown = re.findall(r"^```python\n# test_shop.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 5
    assert [text for text in shown if text not in example] == []


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("shop", "busload_bus is 'shop', wanted e.g. shop.app:bus."),
        ("nowhere:bus", "but there is no module 'nowhere', neither in "),
        ("os:nothing", "busload_bus is 'os:nothing', but 'os' has no 'nothing'."),
        ("os:sep", "busload_bus is 'os:sep', which is a str. Name a CommandBus or SyncCommandBus."),
    ],
)
def test_a_bus_that_cannot_be_found_is_told(tmp_path: Path, named: str, problem: str) -> None:
    with pytest.raises(InvalidOperationError) as refused:
        application_bus(named, tmp_path)
    assert problem in str(refused.value)


def test_a_role_that_may_not_create_databases_is_told(dsn: str, database: Database) -> None:
    database.rows("CREATE ROLE kit_nobody LOGIN")
    try:
        with pytest.raises(DatabaseUnusableError, match=r"and 'kit_nobody' may not, at .* Run `ALTER ROLE kit_nobody"):
            TestServer.at(make_conninfo(dsn, user="kit_nobody", dbname="postgres")).start()
    finally:
        database.rows("DROP ROLE kit_nobody")


def test_the_folder_of_a_server_may_be_text(tmp_path: Path) -> None:
    TestServer(str(tmp_path)).close()

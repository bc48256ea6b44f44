"""The numbered files: applied once, by one process, all or none; and the same schema whoever applies them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from busload import CommandBus, SchemaOutdated, SyncCommandBus, Worker
from busload.store.plan import Script, Statement, perform
from busload.store.schema import migrate
from busload.testing import TestServer
from tests.given import DOMAIN, Database

NEWEST = migrate.migrations()[-1].version

# Everything a schema is made of, as text.
CATALOGUE = """
    SELECT 'column', c.table_name || '.' || c.column_name,
           concat_ws(' ', c.data_type, c.character_maximum_length, c.is_nullable, c.column_default, c.is_identity)
      FROM information_schema.columns AS c WHERE c.table_schema = 'busload'
    UNION ALL SELECT 'constraint', conname || ' on ' || conrelid::regclass, pg_get_constraintdef(oid)
      FROM pg_constraint WHERE connamespace = 'busload'::regnamespace
    UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'busload'
    UNION ALL SELECT 'function', oid::regprocedure::text, pg_get_functiondef(oid) FROM pg_proc
     WHERE pronamespace = 'busload'::regnamespace
    UNION ALL SELECT 'trigger', tgname, pg_get_triggerdef(t.oid)
      FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = tgrelid
     WHERE relnamespace = 'busload'::regnamespace AND NOT tgisinternal
    UNION ALL SELECT 'view', viewname, definition FROM pg_views WHERE schemaname = 'busload'
    UNION ALL SELECT 'table', relname, concat_ws(' ', relkind, reloptions::text, obj_description(oid))
      FROM pg_class WHERE relnamespace = 'busload'::regnamespace
     ORDER BY 1, 2, 3
"""


@pytest.fixture
def empty(either_server: TestServer) -> Iterator[str]:
    with either_server.database(migrated=False) as dsn:
        yield dsn


def migrated(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [migration.version for migration in perform(conn, migrate.migrate())]


def catalogue(dsn: str) -> list[tuple[Any, ...]]:
    with Database(dsn) as database:
        return database.rows(CATALOGUE)


def test_a_fresh_database_gets_every_file_in_order(empty: str) -> None:
    assert migrated(empty) == [migration.version for migration in migrate.migrations()]
    with Database(empty) as database:
        rows = database.rows("SELECT version, name FROM busload.migration ORDER BY version")
    assert rows == [(migration.version, migration.name) for migration in migrate.migrations()]
    assert len(catalogue(empty)) > 100


def test_versions_are_numbered_without_gaps() -> None:
    assert [migration.version for migration in migrate.migrations()] == list(range(1, NEWEST + 1))


def test_a_second_time_changes_nothing(empty: str) -> None:
    migrated(empty)
    before = catalogue(empty)
    assert migrated(empty) == []
    assert catalogue(empty) == before


def test_two_at_once_apply_it_once(empty: str) -> None:
    barrier = threading.Barrier(4)
    answers: list[Any] = []

    def work() -> None:
        try:
            with psycopg.connect(empty) as conn:
                barrier.wait()
                answers.append(perform(conn, migrate.migrate()))
        except BaseException as error:
            answers.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(len, answers)) == [0, 0, 0, NEWEST]


@pytest.mark.parametrize("after", range(2 * NEWEST + 4))
def test_an_interrupted_migration_leaves_nothing_behind(server: TestServer, after: int) -> None:
    """The connection is lost after each of its steps in turn."""
    with server.database(migrated=False) as dsn:
        with psycopg.connect(dsn) as conn:
            plan, rows = migrate.migrate(), None
            for _ in range(after):
                try:
                    step = plan.send(rows)
                except StopIteration:
                    break
                assert isinstance(step, Statement | Script)
                cursor = conn.execute(step.sql, step.params if isinstance(step, Statement) else None)
                rows = cursor.fetchall() if cursor.description else []
            conn.close()
        with Database(dsn) as database:
            assert database.value("SELECT to_regnamespace('busload')") is None
        assert len(migrated(dsn)) == NEWEST


def test_a_rolled_back_migration_leaves_nothing_behind(empty: str) -> None:
    with psycopg.connect(empty) as conn:
        perform(conn, migrate.migrate())
        conn.rollback()
    with Database(empty) as database:
        assert [m.applied_at for m in database.perform(migrate.status())] == [None] * NEWEST
    assert len(migrated(empty)) == NEWEST


def test_the_printed_script_makes_the_same_schema(either_server: TestServer) -> None:
    with either_server.database(migrated=False) as by_hand, either_server.database(migrated=False) as by_us:
        with psycopg.connect(by_hand, autocommit=True) as conn:
            conn.execute(migrate.script().encode())
        migrated(by_us)
        assert catalogue(by_hand) == catalogue(by_us)
        assert migrated(by_hand) == []


def test_a_failing_script_leaves_nothing_behind(empty: str) -> None:
    broken = migrate.script().replace("COMMIT;", "SELECT 1 / 0;\nCOMMIT;")
    with psycopg.connect(empty, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute(broken.encode())
        conn.rollback()
    with Database(empty) as database:
        assert database.value("SELECT to_regnamespace('busload')") is None


def test_the_status_tells_what_is_missing(empty: str) -> None:
    with Database(empty) as database:
        assert [m.applied_at for m in database.perform(migrate.status())] == [None] * NEWEST
        migrated(empty)
        assert all(m.applied_at is not None for m in database.perform(migrate.status()))
        database.rows("DELETE FROM busload.migration WHERE version = %s", NEWEST)
        assert [m.version for m in database.perform(migrate.status()) if m.applied_at is None] == [NEWEST]


async def test_on_an_older_schema_nothing_starts(server: TestServer) -> None:
    with server.database() as dsn, Database(dsn) as database:
        database.rows("DELETE FROM busload.migration WHERE version = %s", NEWEST)
        async with CommandBus(dsn) as bus:
            bus.handler(DOMAIN, "Debit")(lambda command, ctx: None)
            with pytest.raises(SchemaOutdated, match="busload schema migrate") as refused:
                await bus.send(DOMAIN, "Debit")
            assert (refused.value.found, refused.value.needed) == (NEWEST - 1, NEWEST)
            with pytest.raises(SchemaOutdated):
                await bus.list_batches(DOMAIN)
            with pytest.raises(SchemaOutdated):
                await Worker(bus).drain()
        with SyncCommandBus(dsn) as sync_bus, pytest.raises(SchemaOutdated):
            sync_bus.send(DOMAIN, "Debit")
        assert database.count("command") == database.count("worker") == 0


async def test_a_database_without_any_schema_is_refused_and_can_be_migrated(empty: str) -> None:
    async with CommandBus(empty) as bus:
        with pytest.raises(SchemaOutdated) as refused:
            await bus.send(DOMAIN, "Debit")
        assert refused.value.found == 0
        assert len(await bus.migrate()) == NEWEST
        assert (await bus.send(DOMAIN, "Debit")).created


async def test_a_newer_schema_is_welcome(server: TestServer) -> None:
    """Old and new workers share a database during a deploy."""
    with server.database() as dsn, Database(dsn) as database:
        database.rows("INSERT INTO busload.migration (version, name) VALUES (9999, 'of the future')")
        async with CommandBus(dsn) as bus:
            assert (await bus.send(DOMAIN, "Debit")).created

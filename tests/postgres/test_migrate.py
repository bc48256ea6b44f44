"""The numbered files: applied once, by one process, all or none; and the same schema whoever applies them."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Engine, MetaData, NullPool, create_engine, text

import busload
from busload import CommandBus, SyncCommandBus, Worker
from busload.errors import DatabaseUnusableError, SchemaOutdatedError
from busload.postgres.plan import Script, Statement
from busload.postgres.schema import migrate
from busload.sync.plan import perform
from busload.testing import TestServer
from tests.given import DOMAIN, WITHIN, Database
from tests.postgres.catalogue import DUMP, schema_text
from tests.postgres.test_search_path import plant

NEWEST = migrate.MIGRATIONS[-1].version
COLOUR = migrate.Migration(NEWEST + 1, "colour", "ALTER TABLE busload.batch ADD COLUMN colour text;")
NEXT_RELEASE = (*migrate.MIGRATIONS, COLOUR)

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
    assert migrated(empty) == [migration.version for migration in migrate.MIGRATIONS]
    with Database(empty) as database:
        rows = database.rows("SELECT version, name FROM busload.migration ORDER BY version")
    assert rows == [(migration.version, migration.name) for migration in migrate.MIGRATIONS]
    assert len(catalogue(empty)) > 100


def test_the_database_is_what_the_committed_dump_says(empty: str) -> None:
    """schema.txt shows what a change of the files means. If it is meant: python -m tests.postgres.catalogue."""
    migrated(empty)
    with psycopg.connect(empty) as conn:
        assert schema_text(conn).splitlines() == DUMP.read_text().splitlines()


def test_no_line_of_the_schema_is_too_long_to_read() -> None:
    for migration in migrate.MIGRATIONS:
        assert [line for line in migration.sql.splitlines() if len(line) > 110] == []


def test_versions_are_numbered_without_gaps() -> None:
    assert [migration.version for migration in migrate.MIGRATIONS] == list(range(1, NEWEST + 1))


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
        thread.join(WITHIN)
    assert sorted(map(len, answers)) == [0, 0, 0, NEWEST]


@pytest.mark.parametrize("after", range(6))
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


WAYS = ("psycopg", "psycopg in a transaction", "asyncpg", "psql", "sqlalchemy text", "sqlalchemy driver", "alembic")


def engine(dsn: str) -> Engine:
    return create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool)


def by(way: str, dsn: str, script: str, folder: Path) -> None:
    """Apply a script as it is, by means that people have."""
    match way:
        case "psycopg":
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(script.encode(), [])  # with parameters, so it is searched for them
        case "psycopg in a transaction":
            with psycopg.connect(dsn) as conn:
                conn.execute("SELECT 1")
                conn.execute(script.encode())
        case "asyncpg":

            async def apply() -> None:
                place = conninfo_to_dict(dsn)
                conn: Any = await asyncpg.connect(
                    **{k: place[k] for k in ("host", "port", "user")}, database=place["dbname"]
                )
                await conn.execute(script)
                await conn.close()

            asyncio.run(apply())
        case "psql":
            command = ["/usr/bin/psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn]
            subprocess.run(command, input=script, text=True, check=True, timeout=60)
        case "sqlalchemy text":
            with engine(dsn).begin() as connection:
                connection.execute(text(script))
        case "sqlalchemy driver":
            with engine(dsn).begin() as connection:
                connection.exec_driver_sql(script)
        case "alembic":
            _upgrade(dsn, folder)


def _upgrade(dsn: str, folder: Path) -> None:
    (folder / "versions").mkdir()
    (folder / "env.py").write_text(
        "from alembic import context\nfrom tests.postgres.test_migrate import engine\n"
        f"with engine({dsn!r}).connect() as connection:\n"
        "    context.configure(connection=connection)\n"
        "    with context.begin_transaction():\n        context.run_migrations()\n"
    )
    revisions = [("one", None, "busload.schema.sql()"), ("two", "one", f"busload.schema.sql(since={NEWEST - 1})")]
    for revision, down, call in revisions:
        (folder / "versions" / f"{revision}.py").write_text(
            f"import busload\nfrom alembic import op\nrevision, down_revision = {revision!r}, {down!r}\n"
            f"def upgrade(): op.execute({call})\n"
        )
    config = Config()
    config.set_main_option("script_location", str(folder))
    command.upgrade(config, "head")


@pytest.mark.parametrize("way", WAYS)
def test_the_script_makes_the_same_schema_by_all_means(server: TestServer, way: str, tmp_path: Path) -> None:
    with server.database(migrated=False) as theirs, server.database() as ours:
        by(way, theirs, busload.schema.sql(), tmp_path)
        assert catalogue(theirs) == catalogue(ours)
        assert migrated(theirs) == []
        with Database(theirs) as database:
            rows = database.rows("SELECT version, name FROM busload.migration ORDER BY version")
        assert rows == [(migration.version, migration.name) for migration in migrate.MIGRATIONS]


def test_alembic_leaves_our_tables_alone_if_it_is_told_whose_they_are(dsn: str) -> None:
    """As docs/production.md has it; without that it would drop what no model of the application has."""

    def include_name(name: str | None, type_: str, parent_names: Any) -> bool:
        return not (type_ == "schema" and name == "busload")

    with psycopg.connect(dsn) as conn:
        conn.execute("CREATE SCHEMA shop; CREATE TABLE shop.forgotten (id integer)")
    with engine(dsn).connect() as connection:
        options = {"include_schemas": True, "include_name": include_name}
        found = compare_metadata(MigrationContext.configure(connection, opts=options), MetaData())
    assert [(what, str(table)) for what, table in found] == [("remove_table", "shop.forgotten")]


def test_the_script_applies_only_what_is_missing(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn:
        for _ in range(2):
            conn.execute(busload.schema.sql().encode())
        conn.execute(busload.schema.sql(since=NEWEST - 1).encode())
        assert busload.schema.version() == NEWEST
    assert migrated(empty) == []


def test_a_script_that_begins_later_is_refused_by_an_older_schema(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.RaiseException, match=f"no busload schema {NEWEST}"):
            conn.execute(busload.schema.sql(since=NEWEST).encode())
        assert conn.execute("SELECT to_regnamespace('busload')").fetchone() == (None,)
    with pytest.raises(ValueError, match="since must be a version"):
        busload.schema.sql(since=NEWEST + 1)


def test_the_script_leaves_the_session_as_it_was(empty: str) -> None:
    """Alembic goes on in the same transaction, with names that it does not qualify."""
    ask = "SELECT current_setting('search_path'), current_setting('standard_conforming_strings')"
    with psycopg.connect(empty) as conn:
        conn.execute("SET search_path = other, public; SET standard_conforming_strings = off")
        conn.execute(busload.schema.sql().encode())
        assert conn.execute(ask).fetchone() == ("other, public", "off")
        conn.commit()
        assert conn.execute(ask).fetchone() == ("other, public", "off")
    assert migrated(empty) == []


def test_the_script_holds_nothing_that_reads_as_a_parameter_and_ends_no_transaction() -> None:
    script = busload.schema.sql()
    assert "%" not in script
    assert text(script).compile().params == {}
    assert re.findall(r"(?m)^(?:BEGIN|COMMIT|ROLLBACK|START)\b.*;", script) == []


def test_a_failing_script_leaves_nothing_behind(empty: str) -> None:
    broken = busload.schema.sql().replace("\nEND\n$busload$", "\nPERFORM 1 / 0;\nEND\n$busload$")
    with psycopg.connect(empty, autocommit=True) as conn, pytest.raises(psycopg.errors.DivisionByZero):
        conn.execute(broken.encode())
    with Database(empty) as database:
        assert database.value("SELECT to_regnamespace('busload')") is None


async def test_what_is_migrated_in_a_callers_transaction_exists_if_that_commits(empty: str) -> None:
    async with CommandBus(empty) as bus, await psycopg.AsyncConnection.connect(empty) as conn:
        assert len(await bus.migrate(conn=conn)) == NEWEST
        await conn.rollback()
        assert len(await bus.migrate(conn=conn)) == NEWEST
        await conn.commit()
        assert await bus.migrate() == []
        assert (await bus.send(DOMAIN, "Debit")).created
    with SyncCommandBus(empty) as sync_bus, psycopg.connect(empty) as sync_conn:
        assert sync_bus.migrate(conn=sync_conn) == []


@pytest.fixture
def role(empty: str) -> Iterator[str]:
    """The DSN of a role without any right."""
    name = f"role_{secrets.token_hex(4)}"
    with Database(empty) as database:
        database.rows(f"CREATE ROLE {name} LOGIN")
        try:
            yield empty.replace("postgres@", f"{name}@")
        finally:
            database.rows(f"DROP OWNED BY {name}")
            database.rows(f"DROP ROLE {name}")


def test_a_migration_with_nothing_to_do_needs_no_more_than_to_see_that(empty: str, role: str) -> None:
    name = conninfo_to_dict(role)["user"]
    migrated(empty)
    with SyncCommandBus(role) as bus:
        with pytest.raises(DatabaseUnusableError, match=r"permission denied .* USAGE ON SCHEMA busload"):
            bus.migrate()
        with Database(empty) as database:
            database.rows(f"GRANT USAGE ON SCHEMA busload TO {name}")
            with pytest.raises(DatabaseUnusableError, match=r"permission denied .* SELECT ON busload.migration"):
                bus.migrate()
            database.rows(f"GRANT SELECT ON busload.migration TO {name}")
            assert bus.migrate() == []
            database.rows("DELETE FROM busload.migration WHERE version = %s", NEWEST)
        with pytest.raises(DatabaseUnusableError, match=rf"lacks {NEWEST:04}_\w+, and this role may not apply"):
            bus.migrate()


def test_the_error_names_the_right_that_a_role_lacks_to_create_a_schema(role: str) -> None:
    with SyncCommandBus(role) as bus, pytest.raises(DatabaseUnusableError, match="GRANT CREATE ON DATABASE"):
        bus.migrate()


def test_nothing_of_a_strangers_becomes_part_of_the_schema(server: TestServer) -> None:
    """Whoever migrates may have a search_path that a stranger can create in."""
    with server.database(migrated=False) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        plant(conn)
        conn.execute("SET search_path = evil, pg_catalog")
        conn.execute(busload.schema.sql().encode())
        conn.execute("RESET search_path")
        strangers = conn.execute(
            "SELECT count(*) FROM pg_depend AS d LEFT JOIN pg_proc AS f ON f.oid = d.refobjid"
            " LEFT JOIN pg_operator AS o ON o.oid = d.refobjid LEFT JOIN pg_class AS c ON c.oid = d.objid"
            " WHERE d.deptype = 'n' AND 'evil'::regnamespace IN (f.pronamespace, o.oprnamespace)"
            "   AND d.classid IN ('pg_rewrite'::regclass, 'pg_attrdef'::regclass, 'pg_constraint'::regclass,"
            "                     'pg_class'::regclass)"
        ).fetchone()
        assert strangers == (0,)


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
            with pytest.raises(SchemaOutdatedError, match="busload schema migrate") as refused:
                await bus.send(DOMAIN, "Debit")
            assert (refused.value.found, refused.value.needed) == (NEWEST - 1, NEWEST)
            with pytest.raises(SchemaOutdatedError):
                await bus.list_batches(DOMAIN)
            with pytest.raises(SchemaOutdatedError):
                await Worker(bus).drain()
        with SyncCommandBus(dsn) as sync_bus, pytest.raises(SchemaOutdatedError):
            sync_bus.send(DOMAIN, "Debit")
        assert database.count("command") == database.count("worker") == 0


async def test_a_database_without_any_schema_is_refused_and_can_be_migrated(empty: str) -> None:
    async with CommandBus(empty) as bus:
        with pytest.raises(SchemaOutdatedError) as refused:
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


# -- a release to come ------------------------------------------------------------------------------------------------


def test_the_next_release_applies_only_its_own_file(empty: str) -> None:
    migrated(empty)
    with Database(empty) as database:
        with pytest.raises(SchemaOutdatedError) as refused:
            database.perform(migrate.check(NEXT_RELEASE))
        assert (refused.value.found, refused.value.needed) == (NEWEST, NEWEST + 1)
        assert [m.version for m in database.perform(migrate.status(NEXT_RELEASE)) if not m.applied_at] == [NEWEST + 1]
        assert database.perform(migrate.migrate(NEXT_RELEASE)) == [COLOUR]
        assert database.perform(migrate.migrate(NEXT_RELEASE)) == []
        database.perform(migrate.check(NEXT_RELEASE))
        database.perform(migrate.check())  # a worker of this release goes on
        assert database.rows("SELECT colour FROM busload.batch") == []


def test_the_next_release_makes_the_same_of_a_fresh_database(server: TestServer) -> None:
    with server.database() as upgraded, server.database(migrated=False) as fresh:
        for dsn in (upgraded, fresh):
            with psycopg.connect(dsn) as conn:
                perform(conn, migrate.migrate(NEXT_RELEASE))
        assert catalogue(upgraded) == catalogue(fresh)


def test_the_script_of_the_next_release_begins_where_this_one_ends(empty: str) -> None:
    script = migrate.script(NEWEST, NEXT_RELEASE).encode()
    with psycopg.connect(empty, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.RaiseException, match=f"no busload schema {NEWEST}"):
            conn.execute(script)
        conn.execute(busload.schema.sql().encode())
        conn.execute(script)
        conn.execute(script)
        assert conn.execute("SELECT max(version) FROM busload.migration").fetchone() == (NEWEST + 1,)


# -- a schema from before the first release ---------------------------------------------------------------------------


@pytest.fixture
def unreleased(empty: str) -> Iterator[Database]:
    """A database as it was before the schema was numbered for the first release: seventeen other files."""
    with Database(empty) as database:
        database.rows("CREATE SCHEMA busload")
        database.rows(
            "CREATE TABLE busload.migration"
            " (version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        for version, name in enumerate(("loads_and_places", "fold_in_one_update", "tasks", "causes"), 1):
            database.rows("INSERT INTO busload.migration (version, name) VALUES (%s, %s)", version, name)
        yield database


async def test_an_unreleased_schema_is_refused_and_left_as_it_is(unreleased: Database, empty: str) -> None:
    before = catalogue(empty)
    async with CommandBus(empty) as bus:
        for call in (bus.send(DOMAIN, "Debit"), bus.migrate()):
            with pytest.raises(DatabaseUnusableError, match=r"before the first release.* DROP SCHEMA busload CASCADE"):
                await call
    with pytest.raises(DatabaseUnusableError, match="DROP SCHEMA"):
        unreleased.perform(migrate.status())
    for script in (busload.schema.sql(), busload.schema.sql(since=2)):
        with pytest.raises(psycopg.errors.RaiseException, match="DROP SCHEMA"):
            unreleased.rows(script)
    assert catalogue(empty) == before
    unreleased.rows("DROP SCHEMA busload CASCADE")
    assert len(migrated(empty)) == NEWEST

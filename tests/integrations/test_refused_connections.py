"""A connection whose transaction cannot be joined is refused, with what to do instead; nothing is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
from django.db import connections, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper as SqliteWrapper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, declarative_base, scoped_session, sessionmaker

from busload import BatchCommand, CommandBus, SyncCommandBus
from busload.errors import DatabaseReadOnlyError, InvalidOperationError, NothingWrittenError, SchemaOutdatedError
from busload.postgres.schema import migrate
from tests.given import DOMAIN, Database
from tests.integrations.callers import (
    KINDS,
    SYNC_KINDS,
    Caller,
    connect_asyncpg,
    django_connection,
    url_of,
)

SUPPORTED = (
    "psycopg.AsyncConnection",
    "asyncpg.Connection",
    "AsyncSession",
    "psycopg.Connection",
    "the Session of SQLAlchemy",
    "django.db.connection within atomic",
    "psycopg2",
)


@pytest.fixture(autouse=True)
def nothing_is_written(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    yield
    assert database.count("command") == 0


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Caller]:
    async with KINDS[request.param](dsn) as caller:
        yield caller


@pytest.mark.parametrize("bad", ["postgresql://", object(), 7, psycopg, asyncpg.Record, declarative_base()])
async def test_what_is_no_connection_is_refused_with_the_list_of_what_is(
    bus: CommandBus, sync_bus: SyncCommandBus, bad: Any
) -> None:
    with pytest.raises(InvalidOperationError) as refused:
        await bus.send(DOMAIN, "Debit", conn=bad)
    assert [kind for kind in SUPPORTED if kind not in str(refused.value)] == []
    with pytest.raises(InvalidOperationError, match=r"given as conn is .*psycopg\.Connection, .*Give an async one to"):
        sync_bus.send(DOMAIN, "Debit", conn=bad)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - SYNC_KINDS.keys()))
async def test_the_sync_bus_cannot_wait_for_an_async_connection(sync_bus: SyncCommandBus, dsn: str, kind: str) -> None:
    async with KINDS[kind](dsn) as caller:
        with pytest.raises(InvalidOperationError, match="Give an async one to the async bus"):
            sync_bus.send(DOMAIN, "Debit", conn=caller.conn)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_session_within_run_sync_is_refused_with_the_one_to_pass(
    bus: CommandBus, sync_bus: SyncCommandBus, dsn: str, driver: str
) -> None:
    engine = create_async_engine(url_of(dsn, driver), poolclass=NullPool)
    words = "belongs to an async engine.*Give its AsyncSession or AsyncConnection to the async bus"
    async with AsyncSession(engine) as session:
        with pytest.raises(InvalidOperationError, match=words):
            await session.run_sync(lambda inner: sync_bus.send(DOMAIN, "Debit", conn=inner))
        with pytest.raises(InvalidOperationError, match=words):
            await bus.send(DOMAIN, "Debit", conn=session.sync_session)


async def test_a_failed_transaction_is_refused_and_can_be_rolled_back(bus: CommandBus, caller: Caller) -> None:
    with pytest.raises(Exception, match="division by zero"):
        await caller.execute("SELECT 1/0")
    with pytest.raises(InvalidOperationError, match="failed transaction"):
        await bus.send(DOMAIN, "Debit", conn=caller.conn)
    await caller.rollback()
    await bus.send(DOMAIN, "Debit", conn=caller.conn)
    await caller.rollback()


async def test_a_session_in_autocommit_mode_is_refused(bus: CommandBus, sync_bus: SyncCommandBus, dsn: str) -> None:
    """Sessions of SQLAlchemy, asyncpg outside of transaction(), Django outside of atomic(), psycopg2"""
    for driver in ("psycopg", "asyncpg"):
        engine = create_async_engine(url_of(dsn, driver), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session:
            with pytest.raises(InvalidOperationError, match=r"autocommit mode.*isolation_level AUTOCOMMIT"):
                await bus.send(DOMAIN, "Debit", conn=session)
        async with engine.connect() as conn:
            with pytest.raises(InvalidOperationError, match="autocommit mode"):
                await bus.send(DOMAIN, "Debit", conn=conn)
    for driver in ("psycopg", "psycopg2"):
        waits = create_engine(url_of(dsn, driver), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with Session(waits) as blocking, pytest.raises(InvalidOperationError, match="autocommit mode"):
            sync_bus.send(DOMAIN, "Debit", conn=blocking)
    own = await connect_asyncpg(dsn)
    with pytest.raises(InvalidOperationError, match=r"no transaction.*async with conn.transaction\(\)"):
        await bus.send(DOMAIN, "Debit", conn=own)
    await own.close()
    django = django_connection(dsn)
    for use_it in (lambda: None, django.ensure_connection):  # Django connects when it is first used
        use_it()
        with pytest.raises(InvalidOperationError, match=r"'joined'.*no transaction.*transaction.atomic\(\)"):
            sync_bus.send(DOMAIN, "Debit", conn=django)
    django.close()
    second = psycopg2.connect(dsn)
    second.autocommit = True
    with pytest.raises(InvalidOperationError, match=r"conn.autocommit = False"):
        sync_bus.send(DOMAIN, "Debit", conn=second)
    second.close()


async def test_a_closed_connection_is_refused(bus: CommandBus, sync_bus: SyncCommandBus, dsn: str) -> None:
    own = await connect_asyncpg(dsn)
    await own.close()
    second = psycopg2.connect(dsn)
    second.close()
    with create_engine(url_of(dsn, "psycopg"), poolclass=NullPool).connect() as blocking:
        pass
    async with create_async_engine(url_of(dsn, "asyncpg"), poolclass=NullPool).connect() as awaited:
        pass
    unconnected = create_async_engine(url_of(dsn, "psycopg"), poolclass=NullPool).connect()
    found = conninfo_to_dict(dsn)
    async with asyncpg.create_pool(
        host=found["host"], port=found["port"], user=found["user"], database=found["dbname"], min_size=0
    ) as pool:
        given_back = await pool.acquire()
        await pool.release(given_back)
        for conn in (own, second, blocking, awaited, given_back):
            with pytest.raises(InvalidOperationError, match="closed"):
                await bus.send(DOMAIN, "Debit", conn=conn)
    with pytest.raises(InvalidOperationError, match="not connected yet"):
        await bus.send(DOMAIN, "Debit", conn=unconnected)
    for conn in (second, blocking):
        with pytest.raises(InvalidOperationError, match="closed"):
            sync_bus.send(DOMAIN, "Debit", conn=conn)


async def test_a_connection_of_asyncpg_that_belongs_to_another_event_loop_is_refused(bus: CommandBus, dsn: str) -> None:
    loop = asyncio.new_event_loop()
    elsewhere = threading.Thread(target=loop.run_forever)
    elsewhere.start()

    async def begin() -> Any:
        conn = await connect_asyncpg(dsn)
        await conn.execute("BEGIN")
        return conn

    def there(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    conn = await asyncio.to_thread(there, begin())
    try:
        with pytest.raises(InvalidOperationError, match="another event loop"):
            await bus.send(DOMAIN, "Debit", conn=conn)
    finally:
        await asyncio.to_thread(there, conn.close())
        loop.call_soon_threadsafe(loop.stop)
        elsewhere.join()
        loop.close()


def test_a_connection_of_django_that_belongs_to_another_thread_is_refused(sync_bus: SyncCommandBus, dsn: str) -> None:
    conn = django_connection(dsn)
    refused: list[str] = []

    def send() -> None:
        with pytest.raises(InvalidOperationError) as error:
            sync_bus.send(DOMAIN, "Debit", conn=conn)
        refused.append(str(error.value))

    with transaction.atomic(conn.alias):
        other = threading.Thread(target=send)
        other.start()
        other.join()
    conn.close()
    [said] = refused
    assert "another thread" in said and "django.db.connection in the thread that uses it" in said


def test_a_connection_of_django_to_another_kind_of_database_is_refused(sync_bus: SyncCommandBus, dsn: str) -> None:
    django_connection(dsn)
    conn = SqliteWrapper({**connections["default"].settings_dict, "NAME": ":memory:"}, "files")
    with pytest.raises(InvalidOperationError, match=r"'files', on SQLite; busload needs PostgreSQL"):
        sync_bus.send(DOMAIN, "Debit", conn=conn)


def test_a_session_on_another_kind_of_database_is_refused(sync_bus: SyncCommandBus) -> None:
    with (
        Session(create_engine("sqlite://")) as session,
        pytest.raises(InvalidOperationError, match="sqlite3 underneath"),
    ):
        sync_bus.send(DOMAIN, "Debit", conn=session)


def test_a_session_without_a_database_or_in_a_transaction_that_has_ended_is_refused(
    sync_bus: SyncCommandBus, dsn: str
) -> None:
    with (
        Session() as unbound,
        pytest.raises(InvalidOperationError, match=r"SQLAlchemy has no connection.*bind_arguments"),
    ):
        sync_bus.send(DOMAIN, "Debit", conn=unbound)
    engine = create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    with Session(engine, autobegin=False) as waiting, pytest.raises(InvalidOperationError, match="begin"):
        sync_bus.send(DOMAIN, "Debit", conn=waiting)


def test_an_asynchronous_connection_of_psycopg2_is_refused(sync_bus: SyncCommandBus, dsn: str) -> None:
    conn = psycopg2.connect(dsn, async_=True)
    with pytest.raises(InvalidOperationError, match="without async_"):
        sync_bus.send(DOMAIN, "Debit", conn=conn)
    conn.close()


async def test_two_calls_at_once_on_one_connection_of_asyncpg_are_refused_in_its_words(
    bus: CommandBus, dsn: str
) -> None:
    conn = await connect_asyncpg(dsn)
    ours = conn.transaction()
    await ours.start()
    sends = (bus.send(DOMAIN, "Debit", conn=conn) for _ in range(2))
    first, second = await asyncio.gather(*sends, return_exceptions=True)
    assert not isinstance(first, BaseException)
    assert isinstance(second, InvalidOperationError) and "another operation is in progress" in str(second)
    await ours.rollback()
    await conn.close()


async def test_scoped_sessions_are_joined_as_the_sessions_they_stand_for(
    bus: CommandBus, sync_bus: SyncCommandBus, dsn: str, database: Database
) -> None:
    scoped = scoped_session(sessionmaker(create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)))
    sync_bus.send(DOMAIN, "Debit", conn=scoped)
    assert scoped.execute(text("SELECT count(*) FROM busload.command")).scalar() == 1
    scoped.remove()
    engine = create_async_engine(url_of(dsn, "asyncpg"), poolclass=NullPool)
    awaited = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    await bus.send(DOMAIN, "Debit", conn=awaited)
    assert (await awaited.execute(text("SELECT count(*) FROM busload.command"))).scalar() == 1
    await awaited.remove()


MANY = [BatchCommand("Debit")] * 1500
"""So many that they are copied in"""


@pytest.fixture
def elsewhere(dsn: str) -> str:
    """A database that the bus does not know, without its schema"""
    return make_conninfo(dsn, dbname="postgres")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_database_without_the_schema_is_named_with_what_to_do(
    bus: CommandBus, sync_bus: SyncCommandBus, elsewhere: str, kind: str
) -> None:
    """Also once the bus has found its own schema; the transaction stays usable"""
    async with KINDS[kind](elsewhere) as caller:
        for _ in ("at its first call", "afterwards"):
            with pytest.raises(SchemaOutdatedError, match="'postgres', which holds no busload schema yet") as refused:
                await bus.send(DOMAIN, "Debit", conn=caller.conn)
            assert (refused.value.database, refused.value.found) == ("postgres", 0)
            assert "pass a connection to that one. Else run `busload schema migrate`" in str(refused.value)
            await bus.list_commands(DOMAIN)  # finds the schema of the bus itself
        for call in (bus.create_batch(DOMAIN, MANY, conn=caller.conn), bus.domains.pause(DOMAIN, conn=caller.conn)):
            with pytest.raises(SchemaOutdatedError, match="'postgres'"):
                await call
        await caller.execute("SELECT 1")
        if kind in SYNC_KINDS:
            sync_bus.list_commands(DOMAIN)
            with pytest.raises(SchemaOutdatedError, match="'postgres'"):
                sync_bus.send(DOMAIN, "Debit", conn=caller.conn)
            await caller.execute("SELECT 1")


async def test_a_database_of_an_older_release_is_named_with_its_version(
    bus: CommandBus, elsewhere: str, database: Database
) -> None:
    async with KINDS["psycopg-async"](elsewhere) as caller:
        for sql in (migrate.script(release=migrate.MIGRATIONS[:1]), "DROP TABLE busload.command CASCADE"):
            await caller.execute(sql)
        await bus.list_commands(DOMAIN)  # finds the schema of the bus itself
        with pytest.raises(
            SchemaOutdatedError, match="'postgres', which holds busload schema version 1, this release needs version"
        ):
            await bus.send(DOMAIN, "Debit", conn=caller.conn)
        await caller.rollback()


async def test_a_table_of_the_application_that_is_missing_is_not_taken_for_the_schema(
    bus: CommandBus, caller: Caller, database: Database
) -> None:
    """What a trigger of the application raises is raised as it is"""
    database.rows("CREATE FUNCTION strange() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM nowhere(); END $$")
    database.rows("CREATE TRIGGER strange BEFORE INSERT ON busload.command FOR EACH ROW EXECUTE FUNCTION strange()")
    with pytest.raises(psycopg.errors.UndefinedFunction, match="nowhere"):
        await bus.send(DOMAIN, "Debit", conn=caller.conn)
    await caller.execute("SELECT 1")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_transaction_that_may_not_write_is_refused_with_what_to_do(
    bus: CommandBus, sync_bus: SyncCommandBus, dsn: str, kind: str
) -> None:
    """It is also an error of psycopg, and the transaction stays usable"""
    async with KINDS[kind](dsn) as caller:
        await caller.execute("SET TRANSACTION READ ONLY")
        name = conninfo_to_dict(dsn)["dbname"]
        for call in (
            bus.send(DOMAIN, "Debit", conn=caller.conn),
            bus.create_batch(DOMAIN, MANY, conn=caller.conn),
            bus.domains.pause(DOMAIN, conn=caller.conn),
        ):
            with pytest.raises(
                DatabaseReadOnlyError, match=f"read-only transaction of database '{name}'.*READ WRITE"
            ) as no:
                await call
            assert isinstance(no.value, NothingWrittenError) and isinstance(
                no.value, psycopg.errors.ReadOnlySqlTransaction
            )
            assert (no.value.database, no.value.standby, no.value.sqlstate) == (name, False, "25006")
        if kind in SYNC_KINDS:
            with pytest.raises(DatabaseReadOnlyError, match="that this call joins has a read-only transaction"):
                sync_bus.send(DOMAIN, "Debit", conn=caller.conn)
        await caller.execute("SELECT 1")

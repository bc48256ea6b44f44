"""Statements of ours go without a cursor: prepared once they repeat, with the values that psycopg would send."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import CommandBus, Settings
from busload.postgres import prepared
from busload.postgres.own_connection import OwnAsyncConnection, connect_async
from busload.postgres.plan import Plan, Savepoint, Statement, execute, perform_async
from busload.postgres.pool import async_pool, engine_pool
from busload.postgres.prepared import compiled
from busload.sync.connection import OwnConnection
from tests.given import DOMAIN, Database

pytestmark = pytest.mark.usefixtures("invariants")

PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'busload_%'"
TWICE = b"SELECT 2 * %(number)s::bigint"


def test_a_statement_is_compiled_with_a_number_for_each_name() -> None:
    query, names, formats = compiled(b"SELECT %(b)s::text, %(a)b::int[], %(b)s::text, 7 %% 2")
    assert query == b"SELECT $1::text, $2::int[], $1::text, 7 % 2"
    assert names == ("b", "a")
    assert [str(one.value) for one in formats] == ["s", "b"]


@pytest.mark.parametrize(
    ("value", "cast"),
    [
        (None, "bigint"),
        (7, "bigint"),
        (70_000, "bigint"),
        (2**40, "bigint"),
        (True, "boolean"),
        ("Zoë", "text"),
        (UUID(int=7), "uuid"),
        (datetime(2026, 1, 2, tzinfo=UTC), "timestamptz"),
        (timedelta(seconds=1.5), "interval"),
        ([1, None, 2**40], "bigint[]"),
        (["a", None], "text[]"),
        ([], "uuid[]"),
    ],
    ids=str,
)
async def test_values_go_and_come_as_by_psycopg(dsn: str, value: Any, cast: str) -> None:
    sql = f"SELECT %(value)s::{cast}, %(value)s::{cast} IS NULL FROM generate_series(1, 2)"
    async with async_pool(dsn, 1) as pool, pool.connection() as conn:
        expected = await (await psycopg.AsyncCursor(conn).execute(sql, {"value": value}, binary=True)).fetchall()
        for _ in range(8):  # before it is prepared, and after
            assert await perform_async(conn, execute(sql.encode(), value=value)) == expected
        assert await _prepared(conn) == 1


async def test_one_statement_takes_values_of_any_size(dsn: str) -> None:
    async with async_pool(dsn, 1) as pool, pool.connection() as conn:
        for number in [1, 100_000, 2**40, None, 2] * 8:
            doubled = None if number is None else 2 * number
            assert await perform_async(conn, execute(TWICE, number=number)) == [(doubled,)]


async def test_a_worker_prepares_at_once_and_others_what_they_repeat(dsn: str) -> None:
    async with engine_pool(dsn, 1) as pool, pool.connection() as conn:
        await perform_async(conn, execute(TWICE, number=1))
        assert await _prepared(conn) == 1
    async with async_pool(dsn, 1) as pool, pool.connection() as conn:
        for _ in range(5):
            await perform_async(conn, execute(TWICE, number=1))
        assert await _prepared(conn) == 0
        await perform_async(conn, execute(TWICE, number=1))
        assert await _prepared(conn) == 1


async def test_a_connection_prepares_so_many_and_no_more(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST", 3)
    async with engine_pool(dsn, 1) as pool, pool.connection() as conn:
        for n in range(9):
            assert await perform_async(conn, execute(b"SELECT %d" % n)) == [(n,)]
        assert await _prepared(conn) == 3


@pytest.mark.parametrize("forget", ["DISCARD ALL", "DEALLOCATE ALL"])
async def test_sends_go_on_when_somebody_has_the_server_forget_what_is_prepared(
    dsn: str, database: Database, forget: str
) -> None:
    async with CommandBus(dsn, settings=Settings(pool_size=1)) as bus:  # each send is by the same connection
        for n in range(20):
            await bus.send(DOMAIN, "Debit", {"n": n})
            if n % 8 == 7:
                async with bus.pool.connection() as conn:
                    assert await _prepared(conn) >= 1
                    await conn.execute(forget)
    assert database.count("command") == 20


async def test_a_transaction_is_not_spoilt_when_the_server_has_forgotten_what_is_prepared(bus: CommandBus) -> None:
    for _ in range(8):
        assert await bus.database.in_transaction(_doubled_twice()) == 4
    async with bus.pool.connection() as conn:
        assert await _prepared(conn) >= 1
        await conn.execute("DISCARD ALL")
    assert bus.pool.size == 1
    assert await bus.database.in_transaction(_doubled_twice()) == 4


async def test_a_savepoint_keeps_its_transaction_after_a_rollback_of_another(dsn: str) -> None:
    """After a rollback psycopg has the server forget all statements, and tells nobody."""
    async with engine_pool(dsn, 1) as pool, pool.connection() as conn:
        for _ in range(3):
            with pytest.raises(psycopg.errors.DivisionByZero):
                await perform_async(conn, _failing())
            async with conn.transaction():
                assert await perform_async(conn, _doubled_twice()) == 4


async def test_a_statement_that_fits_its_table_no_more_is_prepared_again(dsn: str, database: Database) -> None:
    """And the server does not keep the old one."""
    async with engine_pool(dsn, 1) as pool, pool.connection() as conn:
        database.rows("CREATE TABLE public.thing AS SELECT 1 AS n")
        for kind in ["text", "bigint"] * 3:
            await perform_async(conn, execute(b"SELECT * FROM public.thing"))
            database.rows(f"ALTER TABLE public.thing ALTER n TYPE {kind} USING n::{kind}")
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="cached plan"):
                await perform_async(conn, execute(b"SELECT * FROM public.thing"))
        assert await perform_async(conn, execute(b"SELECT * FROM public.thing")) == [(1,)]
        assert await _prepared(conn) == 1


async def test_a_refused_row_leaves_its_statement_prepared(dsn: str) -> None:
    async with engine_pool(dsn, 1) as pool, pool.connection() as conn:
        await conn.execute("CREATE TABLE public.thing (n bigint PRIMARY KEY)")
        add = b"INSERT INTO public.thing VALUES (%(n)s::bigint)"
        await perform_async(conn, execute(add, n=1))
        names = await _names(conn)
        for _ in range(3):
            with pytest.raises(psycopg.errors.UniqueViolation):
                await perform_async(conn, execute(add, n=1))
        assert await _names(conn) == names


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed because nobody holds it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_connection_is_freed_when_nobody_holds_it(dsn: str) -> None:
    conn = await connect_async(dsn, response_timeout=60.0)
    await perform_async(conn, execute(TWICE, number=1))
    with pytest.raises(psycopg.errors.DivisionByZero):
        await perform_async(conn, execute(b"SELECT 1 / %(number)s::integer", number=0))
    await conn.close()
    await asyncio.sleep(0)  # the loop lets go of what has woken this task
    left = weakref.ref(conn)
    del conn
    assert left() is None


async def test_on_a_closed_connection_nothing_begins(dsn: str) -> None:
    """What had begun would have to be ended, and that fails on a closed connection."""
    conn = await connect_async(dsn, response_timeout=60.0)
    await conn.close()
    begun = []

    def generator() -> Iterator[int]:
        begun.append(True)
        yield 1

    with pytest.raises(psycopg.OperationalError):
        await conn.wait(generator())  # type: ignore[arg-type]
    assert not begun


async def test_a_failure_is_told_as_by_psycopg_and_the_connection_goes_on(dsn: str) -> None:
    async with async_pool(dsn, 1) as pool, pool.connection() as conn:
        for _ in range(8):
            with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero"):
                await perform_async(conn, execute(b"SELECT 1 / %(number)s::integer", number=0))
        assert await perform_async(conn, execute(TWICE, number=4)) == [(8,)]


async def test_on_a_connection_that_begins_transactions_by_itself_nothing_is_committed(dsn: str) -> None:
    """Such a connection leaves BEGIN to psycopg: a statement of ours must not go without it."""
    async with async_pool(dsn, 1) as pool, pool.connection() as conn:
        await conn.set_autocommit(False)
        await perform_async(conn, execute(b"CREATE TABLE public.kept ()"))
        await conn.rollback()
        await conn.set_autocommit(True)
        assert await perform_async(conn, execute(b"SELECT to_regclass('public.kept')::text")) == [(None,)]


def test_threads_prepare_as_well(dsn: str) -> None:
    with OwnConnection.connect(dsn, autocommit=True) as conn:
        for number in range(8):
            assert conn.answer(TWICE, {"number": number}) == [(2 * number,)]
        assert conn.execute(PREPARED).fetchone() == (1,)


def _failing() -> Plan[None]:
    """What psycopg has prepared, and what we have, in a transaction that is rolled back."""

    def failing() -> Plan[None]:
        yield Statement(b"SELECT 1", {}, binary=False)
        yield from _doubled_twice()
        yield Statement(b"SELECT 1 / %(number)s::integer", {"number": 0})

    yield Savepoint(failing(), begins=True)


def _doubled_twice() -> Plan[int]:
    [(once,)] = yield Statement(TWICE, {"number": 1})
    [(twice,)] = yield Statement(TWICE, {"number": once})
    return int(twice)


async def _names(conn: OwnAsyncConnection) -> set[str]:
    found = await conn.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'busload_%'", prepare=False)
    return {name for (name,) in await found.fetchall()}


async def _prepared(conn: OwnAsyncConnection) -> int:
    [(found,)] = await (await conn.execute(PREPARED, prepare=False)).fetchall()
    return int(found)

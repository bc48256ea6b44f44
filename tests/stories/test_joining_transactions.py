"""With `conn`, what is sent exists exactly if the caller's transaction commits; busload never commits it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from busload import BatchCommand, CommandBus, DuplicateCommandError, SyncCommandBus
from busload.errors import InvalidOperationError
from tests.given import DOMAIN, Database, Given


@pytest.fixture
async def mine(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection as applications have them: not in autocommit mode."""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        yield conn


@pytest.fixture
def ours(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn) as conn:
        yield conn


async def test_what_is_sent_appears_with_the_commit(
    bus: CommandBus, given: Given, mine: psycopg.AsyncConnection
) -> None:
    """Send, send_many and create_batch, beside the caller's own writes"""
    await mine.execute("CREATE TABLE orders (id int)")
    await mine.execute("INSERT INTO orders VALUES (1)")
    command_id = (await bus.send(DOMAIN, "Debit", conn=mine)).command_id
    await bus.send_many(DOMAIN, [BatchCommand("Debit")] * 2, conn=mine)
    batch_id = await given.batch(commands=3, conn=mine)
    assert given.database.count("command") == 0
    assert mine.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS

    await mine.commit()

    assert given.database.count("command") == 6
    assert given.database.value("SELECT count(*) FROM orders") == 1
    assert await bus.get_command(DOMAIN, command_id)
    assert await bus.get_batch(DOMAIN, batch_id)


async def test_what_is_sent_disappears_with_the_rollback(
    bus: CommandBus, given: Given, mine: psycopg.AsyncConnection
) -> None:
    """Also when sending was the first thing the connection ever did"""
    await bus.send(DOMAIN, "Debit", conn=mine)
    await mine.rollback()
    await bus.send_many(DOMAIN, [BatchCommand("Debit")], conn=mine)
    await mine.rollback()
    await given.batch(commands=3, conn=mine)
    await mine.rollback()
    async with bus.open_batch(DOMAIN, conn=mine) as batch:
        await batch.add("Debit")
    await mine.rollback()
    assert {given.database.count(table) for table in ("command", "queue", "batch", "event")} == {0}


def test_the_sync_bus_leaves_commit_and_rollback_to_the_caller(
    sync_bus: SyncCommandBus, database: Database, ours: psycopg.Connection
) -> None:
    """The first statement of a connection included"""
    sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], conn=ours)
    sync_bus.send(DOMAIN, "Debit", conn=ours)
    ours.rollback()
    assert database.count("command") == 0
    sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], conn=ours)
    assert database.count("command") == 0
    ours.commit()
    assert database.count("command") == 1


async def test_the_async_bus_joins_a_connection_that_waits(
    bus: CommandBus, database: Database, ours: psycopg.Connection
) -> None:
    """An async application with sync database code"""
    await bus.send(DOMAIN, "Debit", conn=ours)
    ours.rollback()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit")], conn=ours)
    assert database.count("command") == 0
    ours.commit()
    assert database.count("command") == 1


async def test_a_savepoint_that_is_rolled_back_takes_its_commands_along(
    bus: CommandBus, given: Given, mine: psycopg.AsyncConnection
) -> None:
    kept = (await bus.send(DOMAIN, "Debit", conn=mine)).command_id

    async def change_our_mind() -> None:
        async with mine.transaction():
            await given.batch(commands=2, conn=mine)
            raise psycopg.Rollback

    await change_our_mind()
    await mine.commit()
    assert given.database.rows("SELECT command_id FROM busload.command") == [(kept,)]
    assert given.database.count("batch") == 0


async def test_a_connection_in_autocommit_mode_gets_a_transaction_of_ours(
    bus: CommandBus, sync_bus: SyncCommandBus, given: Given, conn: psycopg.AsyncConnection, dsn: str
) -> None:
    """All or none, and there at once"""
    taken = await given.sent()
    with pytest.raises(DuplicateCommandError):
        await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", taken)], conn=conn)
    assert (given.database.count("batch"), given.database.count("command")) == (0, 1)
    await given.batch(commands=2, conn=conn)
    assert given.database.count("command") == 3
    with psycopg.connect(dsn, autocommit=True) as ours:
        sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], conn=ours)
        assert given.database.count("command") == 4
        assert ours.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def test_a_refused_duplicate_leaves_the_callers_transaction_usable(
    bus: CommandBus, given: Given, mine: psycopg.AsyncConnection
) -> None:
    """Their own writes survive"""
    taken = await given.sent()
    await mine.execute("CREATE TABLE orders (id int)")
    for send in (
        bus.send(DOMAIN, "Debit", command_id=taken, conn=mine),
        bus.send_many(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", taken)], conn=mine),
        bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", taken)], conn=mine),
    ):
        with pytest.raises(DuplicateCommandError):
            await send
    await mine.execute("INSERT INTO orders VALUES (1)")
    await bus.send(DOMAIN, "Debit", conn=mine)
    await mine.commit()
    assert given.database.value("SELECT count(*) FROM orders") == 1
    assert (given.database.count("command"), given.database.count("batch")) == (2, 0)


async def test_a_failed_or_closed_connection_is_refused(
    bus: CommandBus, sync_bus: SyncCommandBus, database: Database, dsn: str
) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as failed:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await failed.execute("SELECT 1/0")
        with pytest.raises(InvalidOperationError, match="failed transaction"):
            await bus.send(DOMAIN, "Debit", conn=failed)
        await failed.rollback()
    with pytest.raises(InvalidOperationError, match="closed"):
        await bus.send(DOMAIN, "Debit", conn=failed)
    with psycopg.connect(dsn) as ours:
        with pytest.raises(psycopg.errors.DivisionByZero):
            ours.execute("SELECT 1/0")
        with pytest.raises(InvalidOperationError, match="failed transaction"):
            sync_bus.send(DOMAIN, "Debit", conn=ours)
        ours.rollback()
    with pytest.raises(InvalidOperationError, match="closed"):
        sync_bus.send(DOMAIN, "Debit", conn=ours)
    assert database.count("command") == 0


async def test_a_connection_the_bus_cannot_join_is_refused(
    bus: CommandBus, sync_bus: SyncCommandBus, database: Database, mine: psycopg.AsyncConnection
) -> None:
    """The sync bus cannot wait for an async one; anything else is no connection"""
    with pytest.raises(InvalidOperationError, match="AsyncConnection"):
        sync_bus.send(DOMAIN, "Debit", conn=mine)  # type: ignore[arg-type]
    for bad in ("postgresql://", object()):
        with pytest.raises(InvalidOperationError, match=type(bad).__name__):
            await bus.send(DOMAIN, "Debit", conn=bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidOperationError, match=type(bad).__name__):
            sync_bus.send(DOMAIN, "Debit", conn=bad)  # type: ignore[arg-type]
    assert database.count("command") == 0


async def test_the_callers_row_factory_does_not_matter(bus: CommandBus, given: Given, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as conn:
        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", uuid4())], conn=conn)
        assert await bus.cancel_batch(DOMAIN, batch_id, reason="enough", conn=conn) == 1
        await conn.commit()
    assert (await given.batch_now(batch_id)).status == "COMPLETED_WITH_FAILURES"


@pytest.mark.parametrize("factory", [psycopg.ClientCursor, psycopg.RawCursor])
def test_a_connection_with_another_kind_of_cursor_is_joined_too(
    sync_bus: SyncCommandBus, dsn: str, factory: type[psycopg.Cursor[Any]]
) -> None:
    """The statements are ours, so the caller's way of writing them does not matter"""
    with psycopg.connect(dsn, cursor_factory=factory, row_factory=psycopg.rows.dict_row) as conn:
        batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], conn=conn)
        sync_bus.send(DOMAIN, "Debit", conn=conn)
    batch = sync_bus.get_batch(DOMAIN, batch_id)
    assert batch is not None
    assert batch.total_count == 1


def test_a_connection_in_pipeline_mode_is_refused(sync_bus: SyncCommandBus, dsn: str, database: Database) -> None:
    with psycopg.connect(dsn) as conn, conn.pipeline(), pytest.raises(InvalidOperationError, match="pipeline"):
        sync_bus.send(DOMAIN, "Debit", conn=conn)
    assert database.count("command") == 0


async def test_a_transaction_that_has_sent_cannot_be_prepared_and_leaves_nothing(
    bus: CommandBus, dsn: str, database: Database
) -> None:
    """PostgreSQL refuses it after a NOTIFY, and rolls back; a transaction that has not sent can be prepared"""
    database.rows("CREATE TABLE mine (n integer)")
    name = f"'{database.value('SELECT current_database()')}'"  # of all databases together, it must be the only one
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute("BEGIN; INSERT INTO mine VALUES (1)")
        await bus.send(DOMAIN, "Debit", conn=conn)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
            await conn.execute(f"PREPARE TRANSACTION {name}".encode())
        assert database.count("command") == database.value("SELECT count(*) FROM mine") == 0

        await conn.execute("BEGIN; INSERT INTO mine VALUES (1)")
        await conn.execute(f"PREPARE TRANSACTION {name}".encode())
        await conn.execute(f"COMMIT PREPARED {name}".encode())
    assert database.value("SELECT count(*) FROM mine") == 1

"""Many callers, few connections: no call that was given a connection waits for another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import psycopg_pool
import pytest

from busload import BatchCommand, BatchMetadata, CommandBus, Dedup, Settings, Stage, SyncCommandBus, TaskTracker
from busload.commands.ids import new_id
from busload.errors import CommandNotFoundError
from tests.chaos.harness import folder
from tests.given import DOMAIN, Database
from tests.pgbouncer import PgBouncer

pytestmark = pytest.mark.usefixtures("invariants")

SIZE, CALLERS = 10, 20
WITHIN = 60.0
"""Seconds after which calls stand still, also on a slow machine."""


@pytest.fixture
async def pgbouncer(dsn: str) -> AsyncIterator[str]:
    with folder() as path, PgBouncer(Path(path) / "pgbouncer", dsn, pool_size=SIZE) as pooler:
        yield pooler.url


Call = Callable[[CommandBus, psycopg.AsyncConnection], Awaitable[Any]]


async def hear(batch: BatchMetadata) -> None: ...


async def open_and_fill(bus: CommandBus, conn: psycopg.AsyncConnection) -> None:
    async with bus.open_batch(DOMAIN, conn=conn) as batch:
        await batch.add("Debit")


async def retry_unknown(bus: CommandBus, conn: psycopg.AsyncConnection) -> None:
    with pytest.raises(CommandNotFoundError):
        await bus.troubleshooting.retry(DOMAIN, new_id(), conn=conn)


CALLS: dict[str, Call] = {
    "send": lambda bus, conn: bus.send(DOMAIN, "Debit", conn=conn),
    "send_deduped": lambda bus, conn: bus.send(DOMAIN, "Debit", task_key=str(new_id()), dedup=Dedup(), conn=conn),
    "send_many": lambda bus, conn: bus.send_many(DOMAIN, [BatchCommand("Debit")], conn=conn),
    "create_batch": lambda bus, conn: bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=hear, conn=conn),
    "open_batch": open_and_fill,
    "create_job": lambda bus, conn: bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Debit")])], conn=conn),
    "add_to_buffer": lambda bus, conn: bus.buffer("clicks").add({"n": 1}, conn=conn),
    "pause": lambda bus, conn: bus.domains.pause(f"d{new_id()}", conn=conn),
    "enqueue": lambda bus, conn: TaskTracker(bus).enqueue(f"MAIL-{new_id()}", queue="mail", conn=conn),
    "retry": retry_unknown,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_more_callers_than_a_pooler_has_connections_do_not_stand_still(
    call: Call, pgbouncer: str, database: Database
) -> None:
    """Each holds a connection when the fresh bus is first used: all of the pooler's, and as many wait."""
    all_hold = asyncio.Barrier(SIZE)
    places = asyncio.Semaphore(SIZE)

    async def caller(bus: CommandBus, number: int) -> None:
        async with places, await psycopg.AsyncConnection.connect(pgbouncer, prepare_threshold=None) as conn:
            await conn.execute("SELECT")
            await all_hold.wait()
            await call(bus, conn)

    async with asyncio.timeout(WITHIN), CommandBus(pgbouncer, settings=Settings(transport_url=None)) as bus:
        await asyncio.gather(*(caller(bus, number) for number in range(CALLERS)))


async def test_calls_in_transactions_of_an_own_pool_do_not_wait_for_it(dsn: str, database: Database) -> None:
    """The application's pool has as many connections as the role may have, and all of them are in use."""
    database.rows("CREATE ROLE few LOGIN CONNECTION LIMIT 3")
    try:
        database.rows("GRANT USAGE ON SCHEMA busload TO few")
        database.rows("GRANT ALL ON ALL TABLES IN SCHEMA busload TO few")
        database.rows("GRANT ALL ON ALL SEQUENCES IN SCHEMA busload TO few")
        database.rows("GRANT ALL ON ALL FUNCTIONS IN SCHEMA busload TO few")
        few = psycopg.conninfo.make_conninfo(dsn, user="few")
        async with (
            asyncio.timeout(WITHIN),
            psycopg_pool.AsyncConnectionPool(few, min_size=3, max_size=3, open=False) as pool,
        ):
            await pool.wait()
            bus = await CommandBus(few).open(wait=None)  # to look for the database, it would need a fourth one

            async def caller() -> UUID:
                async with pool.connection() as conn:
                    return (await bus.send(DOMAIN, "Debit", conn=conn)).command_id

            sent = await asyncio.gather(*(caller() for _ in range(6)))
            await bus.close()
        assert len(set(sent)) == database.count("command") == 6
    finally:
        database.rows("DROP OWNED BY few")
        database.rows("DROP ROLE few")


def test_callers_of_the_sync_bus_do_not_stand_still_behind_a_pooler(dsn: str, database: Database) -> None:
    with (
        folder() as path,
        PgBouncer(Path(path) / "pgbouncer", dsn, pool_size=SIZE) as pooler,
        SyncCommandBus(pooler.url) as bus,
        ThreadPoolExecutor(SIZE) as threads,
    ):
        all_hold = threading.Barrier(SIZE)

        def caller(number: int) -> None:
            with psycopg.connect(pooler.url, prepare_threshold=None) as conn:
                conn.execute("SELECT")
                all_hold.wait(WITHIN)
                bus.send(DOMAIN, "Debit", conn=conn)

        for done in [threads.submit(caller, number) for number in range(CALLERS)]:
            done.result(WITHIN)
    assert database.count("command") == CALLERS


@pytest.mark.parametrize("size", [1, 3])
async def test_as_many_callers_as_the_bus_has_connections_do_not_wait_for_each_other(size: int, dsn: str) -> None:
    """No call holds one connection of the bus while it waits for a second one."""
    async with asyncio.timeout(WITHIN), CommandBus(dsn, settings=Settings(pool_size=size)) as bus:
        tracker = TaskTracker(bus)

        async def everything(number: int) -> None:
            batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit")])
            await bus.send(DOMAIN, "Debit", task_key=str(new_id()), dedup=Dedup())
            async with bus.open_batch(DOMAIN) as batch:
                await batch.add("Debit")
            await bus.get_batch(DOMAIN, batch_id)
            await bus.explain_batch(DOMAIN, batch_id)
            await bus.cancel_batch(DOMAIN, batch_id, reason="test")
            await bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Debit")])])
            await bus.buffer("clicks").add_many([{"n": 1}])
            await bus.buffer("clicks").claim(lambda group_id: None)
            await bus.buffer("clicks").distribute()
            await tracker.enqueue(f"MAIL-{new_id()}", queue="mail")

        await asyncio.gather(*(everything(number) for number in range(4 * size)))
        await tracker.close()
        assert bus.pool.size == bus.pool.idle <= size

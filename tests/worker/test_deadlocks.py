"""Handlers whose transactions want the same rows: they take them in one order, and who meets others is tried again."""

from __future__ import annotations

import asyncio
import threading
from uuid import UUID

import psycopg
import pytest

from busload import (
    Chunk,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    SyncHandlerContext,
    TransientCommandError,
)
from busload.commands.command import Command
from busload.worker.call_handler import MOST_COLLISIONS
from busload.worker.context import ChunkContext
from tests.given import DOMAIN, Database, Given
from tests.worker.test_locked_batches import open_batch

ONCE = RetryPolicy(max_attempts=1)
BURNT = "SELECT count(*) FROM busload.execution WHERE outcome <> 'COMPLETED'"
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def crossing(batches: tuple[UUID, UUID]) -> dict[UUID, UUID]:
    first, second = batches
    return {first: second, second: first}


async def test_handlers_of_two_batches_that_send_into_each_others_do_not_deadlock(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batches = await open_batch(bus, 150, "Cross"), await open_batch(bus, 150, "Cross")
    into = crossing(batches)

    async def cross(command: Command, ctx: HandlerContext) -> None:
        assert command.batch_id is not None
        async with ctx.transaction():
            await ctx.send(DOMAIN, "Debit", batch_id=into[command.batch_id])

    given.handler("Cross", cross)
    given.handler()
    before = database.value(DEADLOCKS)
    assert await given.drained(concurrency=10) == 600
    assert database.value(DEADLOCKS) == before
    assert database.value(BURNT) == 0
    for batch_id in batches:
        assert (await given.batch_now(batch_id)).completed_count == 300
    database.check_invariants()


async def test_a_deadlock_burns_no_attempt(bus: CommandBus, given: Given, database: Database) -> None:
    """Each holds the row of the other's batch, by its own send, before either settles."""
    batches = await open_batch(bus, 1, "Cross"), await open_batch(bus, 1, "Cross")
    into = crossing(batches)
    both = asyncio.Barrier(2)
    calls = 0

    async def cross(command: Command, ctx: HandlerContext) -> None:
        nonlocal calls
        assert command.batch_id is not None
        calls += 1
        async with ctx.transaction() as conn:
            await bus.send(DOMAIN, "Debit", batch_id=into[command.batch_id], conn=conn)
            if calls <= 2:
                await both.wait()

    given.handler("Cross", cross, retry=ONCE)
    given.handler()
    await given.drained()
    assert calls == 3
    assert database.value(BURNT) == 0
    assert database.rows("SELECT DISTINCT attempt FROM busload.execution") == [(1,)]
    for batch_id in batches:
        assert (await given.batch_now(batch_id)).completed_count == 2
    database.check_invariants()


async def test_a_deadlock_burns_no_attempt_of_a_handler_in_a_thread(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batches = await open_batch(bus, 1, "Cross"), await open_batch(bus, 1, "Cross")
    into = crossing(batches)
    both = threading.Barrier(2)
    calls: list[UUID] = []

    @bus.handler(DOMAIN, "Cross", retry=ONCE)
    def cross(command: Command, ctx: SyncHandlerContext) -> None:
        assert command.batch_id is not None
        calls.append(command.command_id)
        with ctx.transaction() as conn:
            ctx.bus.send(DOMAIN, "Debit", batch_id=into[command.batch_id], conn=conn)
            if len(set(calls)) < 2 or len(calls) == 2:
                both.wait(20)

    given.handler()
    await given.drained()
    assert len(calls) == 3
    assert database.value(BURNT) == 0
    database.check_invariants()


async def test_a_deadlock_burns_no_attempt_of_a_chunk(bus: CommandBus, given: Given, database: Database) -> None:
    batches = await open_batch(bus, 3, "Cross"), await open_batch(bus, 3, "Cross")
    into = crossing(batches)
    both = asyncio.Barrier(2)
    calls = 0

    @bus.bulk_handler(DOMAIN, "Cross", size=3, by=lambda command: command.batch_id, retry=ONCE)
    async def cross(chunk: Chunk, ctx: ChunkContext) -> None:
        nonlocal calls
        calls += 1
        for item in chunk:
            chunk.succeed(item)
        async with ctx.transaction() as conn:
            await bus.send(DOMAIN, "Debit", batch_id=into[chunk.key], conn=conn)
            if calls <= 2:
                await both.wait()

    given.handler()
    await given.drained()
    assert calls == 3
    assert database.value(BURNT) == 0
    database.check_invariants()


async def test_a_deadlock_that_the_handler_has_made_of_its_own_error_is_none(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """What a handler raises decides; only if PostgreSQL has undone its transaction is that not its own doing."""

    async def fail(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")
        raise TransientCommandError("Elsewhere.") from psycopg.errors.DeadlockDetected()

    given.handler("Debit", fail, retry=ONCE)
    await given.batch(1)
    await given.drained()
    assert database.value(BURNT) == 1
    assert database.count("troubleshooting") == 1


async def test_two_decisions_about_commands_of_the_same_batches_do_not_deadlock(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Two operators, each with a cause of their own, of which both batches have commands."""

    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise PermanentCommandError("No.", code="ODD" if command.data["n"] % 2 else "EVEN")

    given.handler("Debit", refuse)
    batches = await given.batch(60), await given.batch(60)
    await given.drained()
    groups = await bus.troubleshooting.groups(DOMAIN)
    assert [group.count for group in groups] == [60, 60]
    before = database.value(DEADLOCKS)
    for group in groups:
        await bus.troubleshooting.complete_group(DOMAIN, group.fingerprint, operator="ada")
    await given.drained(concurrency=10)
    assert database.value(DEADLOCKS) == before
    for batch_id in batches:
        assert (await given.batch_now(batch_id)).completed_count == 60
    database.check_invariants()


@pytest.mark.parametrize("kind", ["async", "def", "chunk"])
async def test_a_transaction_that_always_collides_is_a_failure_in_the_end(
    bus: CommandBus, given: Given, database: Database, kind: str
) -> None:
    """It is made again some times without burning an attempt, but not for ever: a person has to see it."""
    calls: list[int] = []
    collide = "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"

    async def alone(command: Command, ctx: HandlerContext) -> None:
        calls.append(1)
        async with ctx.transaction() as conn:
            await conn.execute(collide)

    def in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        calls.append(1)
        with ctx.transaction() as conn:
            conn.execute(collide)

    async def together(chunk: Chunk, ctx: ChunkContext) -> None:
        calls.append(1)
        async with ctx.transaction() as conn:
            await conn.execute(collide)

    if kind == "chunk":
        bus.bulk_handler(DOMAIN, "Debit", size=1, retry=ONCE)(together)
    else:
        bus.handler(DOMAIN, "Debit", retry=ONCE)(alone if kind == "async" else in_thread)
    await given.sent()
    await given.drained()
    assert len(calls) == MOST_COLLISIONS + 1
    assert database.rows("SELECT reason, attempt FROM busload.troubleshooting") == [("EXHAUSTED", 1)]
    database.check_invariants()

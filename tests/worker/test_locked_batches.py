"""A batch that somebody else holds, as a transaction does that has sent into it: what waits for it waits alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext
from busload.batches import Canary
from busload.commands import claim
from busload.errors import InvalidOperationError
from busload.worker.sweep import sweep
from tests.given import DOMAIN, WITHIN, Database, Given, counts, eventually


async def open_batch(bus: CommandBus, commands: int, command_type: str = "Debit") -> UUID:
    """A batch with some commands that takes more."""
    batch = bus.open_batch(DOMAIN)
    await batch.__aenter__()
    for n in range(commands):
        await batch.add(command_type, data={"n": n})
    await batch.checkpoint()
    return batch.batch_id


@asynccontextmanager
async def sending_into(bus: CommandBus, dsn: str, batch_id: UUID) -> AsyncIterator[psycopg.AsyncConnection]:
    """Somebody's transaction that has sent one command into the batch and is not over."""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await bus.send(DOMAIN, "Debit", batch_id=batch_id, conn=conn)
        yield conn
        await conn.rollback()


async def test_results_of_other_batches_do_not_wait_for_one_that_somebody_holds(
    bus: CommandBus, given: Given, database: Database, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    given.handler()
    held = await open_batch(bus, 300)
    free = await given.batch(3000)
    async with sending_into(bus, dsn, held) as conn, given.running() as worker:
        assert (await bus.wait_batch(DOMAIN, free, timeout=30)).completed_count == 3000
        single = await given.sent()
        status = "SELECT status FROM busload.command_status WHERE command_id = %s"
        await eventually(lambda: database.value(status, single) == "COMPLETED")
        assert counts(await given.batch_now(held)) == (300, 0, 0, 0, 0)
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len([line for line in told if str(held) in line]) == 1, told
        await conn.rollback()
        completed = "SELECT completed_count FROM busload.batch WHERE batch_id = %s"
        await eventually(lambda: database.value(completed, held) == 300)
    assert (worker.stats.completed, worker.stats.late) == (3301, 0)
    database.check_invariants()


async def test_of_a_lease_without_a_batch_that_somebody_holds_the_log_names_the_command(
    bus: CommandBus, given: Given, database: Database, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:

        @bus.handler(DOMAIN, "Debit")
        async def handle(command: Command, ctx: HandlerContext) -> None:
            await conn.execute("SELECT FROM busload.lease FOR UPDATE")

        def told() -> list[str]:
            return [one.getMessage() for one in caplog.records if "Another transaction holds" in one.getMessage()]

        command_id = await given.sent()
        async with given.running():
            await eventually(told)
            await conn.rollback()
            status = "SELECT status FROM busload.command_status WHERE command_id = %s"
            await eventually(lambda: database.value(status, command_id) == "COMPLETED")
        assert [line.partition(":")[0] for line in told()] == [
            f"Another transaction holds the lease of command {command_id}"
        ]


async def test_a_batch_that_somebody_holds_does_not_fill_up_the_worker(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """Its results may be many times as many as those that wait otherwise; they keep no room from the others."""
    seen = given.handler()
    given.settings = replace(given.settings, flush_size=10, poll_every=timedelta(hours=1))
    held = await open_batch(bus, 400)
    free = await given.batch(200)
    async with sending_into(bus, dsn, held) as conn, given.running(concurrency=10) as worker:
        assert (await bus.wait_batch(DOMAIN, free, timeout=30)).completed_count == 200
        assert worker.stats.settlement.capacity == 50
        await eventually(lambda: (worker.stats.settlement.apart, worker.stats.settlement.items) == (400, 200))
        assert (worker.stats.settled, worker.stats.finished) == (200, 600)
        await conn.rollback()
        completed = "SELECT completed_count FROM busload.batch WHERE batch_id = %s"
        await eventually(lambda: database.value(completed, held) == 400)
    settlement = worker.stats.settlement
    assert (settlement.items, settlement.taken, settlement.apart, settlement.refused) == (600, 600, 0, 0)
    assert len({command.command_id for command in seen}) == len(seen) == 600
    database.check_invariants()


async def test_several_batches_that_others_hold_are_settled_as_each_becomes_free(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    given.handler()
    first, second = await open_batch(bus, 10), await open_batch(bus, 10)
    completed = "SELECT completed_count FROM busload.batch WHERE batch_id = %s"
    async with (
        sending_into(bus, dsn, first) as one,
        sending_into(bus, dsn, second) as other,
        given.running(settings=replace(given.settings, flush_size=3)),
    ):
        single = await given.sent()
        status = "SELECT status FROM busload.command_status WHERE command_id = %s"
        await eventually(lambda: database.value(status, single) == "COMPLETED")
        await other.rollback()
        await eventually(lambda: database.value(completed, second) == 10)
        assert database.value(completed, first) == 0
        await one.rollback()
        await eventually(lambda: database.value(completed, first) == 10)
    database.check_invariants()


async def test_a_worker_that_stops_says_which_results_it_could_not_settle(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """As with any result it cannot settle; what others do not hold is settled, and the commands are handed back."""
    given.handler()
    given.settings = replace(given.settings, flush_deadline=timedelta(seconds=1))
    held = await open_batch(bus, 5)
    free = await given.batch(5)
    async with sending_into(bus, dsn, held):
        with pytest.raises(InvalidOperationError, match="5 results could not be settled"):
            async with given.running():
                await bus.wait_batch(DOMAIN, free, timeout=30)
    assert await given.drained() == 5
    database.check_invariants()


async def test_what_a_dead_worker_held_is_rescued_though_somebody_holds_one_of_its_batches(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """A canceled batch: what comes back to it is counted, so its row is needed."""
    held, free = await open_batch(bus, 1), await given.batch(1)
    dead = given.registered_worker()
    assert len(given.claimed(2, by=dead)) == 2
    await bus.cancel_batch(DOMAIN, held, reason="no")
    given.died(dead)
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM busload.batch WHERE batch_id = %s FOR UPDATE", [held])
        given.handler()
        await given.drained()
        assert (await given.batch_now(free)).completed_count == 1
        assert counts(await given.batch_now(held)) == (1, 0, 0, 0, 0)
    await given.drained()
    assert counts(await given.batch_now(held)) == (1, 0, 0, 1, 0)
    database.check_invariants()


async def handed_back(bus: CommandBus, given: Given, batches: int) -> list[UUID]:
    """Batches of one command that was asked to stop, and then handed back; by id."""
    batch_ids = [await given.batch(1) for _ in range(batches)]
    for one in given.claimed(batches):
        await bus.cancel_command(DOMAIN, one.command_id, reason="paid twice")
        given.database.perform(claim.give_back({one.lease: [one.id]}, pause=None, details=()))
    return sorted(batch_ids)


async def test_a_sweep_cancels_what_was_asked_to_stop_though_somebody_holds_the_batch_of_one(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    held, free = await handed_back(bus, given, 2)
    worker = given.registered_worker()
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM busload.batch WHERE batch_id = %s FOR UPDATE", [held])
        await asyncio.wait_for(sweep(bus.pool, worker=worker, judge=False), WITHIN)
        assert counts(await given.batch_now(held)) == (1, 0, 0, 0, 0)
        assert counts(await given.batch_now(free)) == (1, 0, 0, 1, 0)
    await sweep(bus.pool, worker=worker, judge=False)
    assert counts(await given.batch_now(held)) == (1, 0, 0, 1, 0)
    database.check_invariants()


@pytest.mark.parametrize("part", ["canceled batch", "expired command", "expired batch", "canary"])
async def test_a_sweep_goes_on_without_the_part_for_which_somebody_holds_a_load(
    bus: CommandBus, given: Given, database: Database, dsn: str, part: str
) -> None:
    """For as long as a transaction of the application likes; the next sweep does it."""
    [stopped] = await handed_back(bus, given, 1)
    hour = timedelta(hours=1)
    if part == "canary":
        other = await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3, canary=Canary(1, timedelta(microseconds=1)))
        done = "SELECT held_at IS NOT NULL FROM busload.batch WHERE batch_id = %s"
    else:
        expires_at = datetime.now(UTC) + hour if part == "expired command" else None
        expires_in = hour if part == "expired batch" else None
        other = await bus.create_batch(DOMAIN, [BatchCommand("Debit", expires_at=expires_at)], expires_in=expires_in)
        done = "SELECT canceled_count = 1 FROM busload.batch WHERE batch_id = %s"
    if part == "canceled batch":
        database.rows("UPDATE busload.batch SET canceled_at = now() WHERE batch_id = %s", other)
    database.rows("UPDATE busload.expiry SET look_at = now()")
    database.rows("UPDATE busload.batch SET expires_at = now() WHERE expires_at IS NOT NULL")
    worker = given.registered_worker()
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM busload.queue WHERE batch_id = %s FOR UPDATE", [other])
        await asyncio.wait_for(sweep(bus.pool, worker=worker, judge=False), WITHIN)
        assert counts(await given.batch_now(stopped)) == (1, 0, 0, 1, 0)
        assert not database.value(done, other)
    await sweep(bus.pool, worker=worker, judge=False)
    assert database.value(done, other)
    database.check_invariants()

"""How far past its failure budget a batch may run: one flush for each worker, whoever exceeds it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    HandlerContext,
    SyncHandlerContext,
    WorkerSettings,
)
from busload.batches import FailureBudget
from busload.worker.budget_gate import one_flush
from tests.given import DOMAIN, Given

pytestmark = pytest.mark.usefixtures("invariants")

FLUSH = 10


def small(given: Given) -> WorkerSettings:
    """Settings of a worker that may begin ten commands past a budget."""
    soon = timedelta(milliseconds=20)
    settings = replace(given.settings, concurrency=5, flush_size=FLUSH, flush_every=soon, prefetch=soon)
    assert one_flush(settings) == FLUSH
    return settings


def numbered(count: int) -> list[BatchCommand]:
    return [BatchCommand("Debit", data={"n": n}) for n in range(count)]


@pytest.mark.parametrize("how", ["plain", "in transactions of their own"])
async def test_a_worker_that_hears_of_nothing_begins_no_more_than_one_flush_past_the_budget(
    bus: CommandBus, given: Given, how: str
) -> None:
    """Another worker exceeds the budget. This one only drains, so no notification reaches it"""
    seen: list[int] = []

    @bus.handler(DOMAIN, "Debit")
    async def handle(command: Command, ctx: HandlerContext) -> None:
        seen.append(command.data["n"])
        if len(seen) == 100:
            await asyncio.to_thread(given.settled, others, "FAILED", details="{}")
        if how != "plain":
            async with ctx.transaction() as conn:
                await conn.execute("SELECT 1")

    batch_id = await bus.create_batch(DOMAIN, numbered(5000), budget=FailureBudget(0.0001, at_least=2))
    others = given.claimed(3)
    await given.drained(settings=small(given))
    batch = await given.batch_now(batch_id)
    assert (batch.held_reason, batch.completed_count) == ("BUDGET", len(seen))
    [held] = [event for event in await bus.get_batch_audit_trail(DOMAIN, batch_id) if event.type == "BATCH_HELD"]
    assert len(seen) - held.details["completed"] <= FLUSH


@pytest.mark.parametrize("how", ["plain", "some in transactions of their own", "in threads"])
async def test_a_worker_that_exceeds_the_budget_begins_no_more_than_one_flush_past_it(
    bus: CommandBus, given: Given, how: str
) -> None:
    seen: list[int] = []
    if how == "in threads":

        @bus.handler(DOMAIN, "Debit")
        def handle_in_thread(command: Command, ctx: SyncHandlerContext) -> None:
            seen.append(command.data["n"])
            raise BusinessRuleError("no")
    else:

        @bus.handler(DOMAIN, "Debit")
        async def handle(command: Command, ctx: HandlerContext) -> None:
            seen.append(command.data["n"])
            if how != "plain" and command.data["n"] % 2:
                async with ctx.transaction() as conn:
                    await conn.execute("SELECT 1")
            else:
                raise BusinessRuleError("no")

    batch_id = await bus.create_batch(DOMAIN, numbered(2000), budget=FailureBudget(0.0001, at_least=50))
    await given.drained(settings=small(given))
    batch = await given.batch_now(batch_id)
    assert batch.held_reason == "BUDGET"
    assert batch.failed_count + batch.completed_count == len(seen)
    assert 50 < batch.failed_count <= 50 + FLUSH
    assert given.database.count("lease") == 0
    await bus.resume_batch(DOMAIN, batch_id, operator="ann")
    before = batch.failed_count
    await given.drained(settings=small(given))
    assert before + 50 < (await given.batch_now(batch_id)).failed_count <= before + 50 + FLUSH


async def test_a_chunk_that_is_larger_than_a_flush_runs_alone(bus: CommandBus, given: Given) -> None:
    sizes: list[int] = []

    @bus.bulk_handler(DOMAIN, "Debit", size=30)
    async def handle(chunk: Chunk, ctx: ChunkContext) -> None:
        sizes.append(len(chunk.items))
        raise BusinessRuleError("no")

    batch_id = await bus.create_batch(DOMAIN, numbered(2000), budget=FailureBudget(0.0001, at_least=50))
    await given.drained(settings=small(given))
    batch = await given.batch_now(batch_id)
    assert (batch.held_reason, max(sizes)) == ("BUDGET", 30)
    assert 50 < batch.failed_count <= 50 + 30


async def test_what_waits_for_its_budget_keeps_no_others_from_running(bus: CommandBus, given: Given, dsn: str) -> None:
    """Somebody holds the row of the batch with the budget, so its results cannot count for a while"""
    seen: list[str] = []
    begun = asyncio.Event()

    @bus.handler(DOMAIN, "Debit")
    async def handle(command: Command, ctx: HandlerContext) -> None:
        seen.append(command.data["of"])
        if seen.count("guarded") == FLUSH:
            begun.set()

    of = {name: [BatchCommand("Debit", data={"of": name})] * 100 for name in ("guarded", "other")}
    guarded = await bus.create_batch(DOMAIN, of["guarded"], budget=FailureBudget(0.5))
    async with await psycopg.AsyncConnection.connect(dsn) as somebody:
        await somebody.execute("SELECT FROM busload.batch WHERE batch_id = %s FOR UPDATE", [guarded])
        async with given.running(settings=small(given)):
            await asyncio.wait_for(begun.wait(), 30)
            other = await bus.create_batch(DOMAIN, of["other"])
            assert (await bus.wait_batch(DOMAIN, other, timeout=30)).status == "COMPLETED"
            assert seen.count("guarded") == FLUSH
            await somebody.rollback()
            assert (await bus.wait_batch(DOMAIN, guarded, timeout=30)).status == "COMPLETED"
    assert seen.count("guarded") == 100

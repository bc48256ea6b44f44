"""A small batch begins before what stands in line of a large one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext
from busload.commands import claim
from busload.commands.execution import Lease, Leased
from busload.worker import newcomers
from busload.worker.claimer import Claimer
from busload.worker.lifecycle import Run
from busload.worker.line import Claimed
from busload.worker.newcomers import FEW, SHORTEST_GAP, split_off_few
from tests.given import DOMAIN, Database, Given, eventually

WAITING_CLAIMS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    " AND query LIKE 'WITH alive AS%%'"  # the server tells only the beginning of a statement
)


def batches(items: Iterable[Claimed]) -> list[UUID | None]:
    return [one.lease.batch_id for one in items]


def few(database: Database, worker: int, limit: int = FEW) -> list[Leased]:
    found: claim.Claim = database.perform(claim.claim_few(worker=worker, domains=[DOMAIN], limit=limit, turns={}))
    return found.leased


@asynccontextmanager
async def busy(given: Given, *, listening: bool = False) -> AsyncIterator[tuple[Run, Claimer, asyncio.Event]]:
    """A worker whose slots are taken, with more in line and a backlog, until the event is set."""
    go = asyncio.Event()
    begun = 0

    async def wait(command: Command, ctx: HandlerContext) -> None:
        nonlocal begun
        begun += 1
        if begun > 40:  # until then, the worker learns that handlers are fast
            await go.wait()

    given.handler("Debit", wait)
    await given.batch(commands=9000)
    # The pace is that of the last minutes: it does not fall while the slots are taken, however slow the machine is.
    settings = replace(given.settings, prefetch=timedelta(minutes=10), flush_size=1000, lease_for=timedelta(hours=1))
    worker = given.worker(concurrency=10, settings=settings)
    async with worker._running() as run:
        claimer = run._claimer
        while len(run._line.ready) < 20:
            await claimer.once()
            await asyncio.sleep(0)
        assert not claimer.emptied
        await eventually(lambda: begun == 50)  # all ten slots are taken
        if listening:
            running = asyncio.create_task(run.until_stopped())
            await eventually(lambda: run.notifications.has_listened)
        try:
            yield run, claimer, go
        finally:
            go.set()
            if listening:
                run.stop(hurry=False)
                await running


# -- the statement --------------------------------------------------------------------------------------------------


async def test_a_claim_of_few_takes_small_loads_whole_and_none_of_a_large_one(
    bus: CommandBus, given: Given, database: Database
) -> None:
    await given.batch(commands=3000)
    small = await given.batch(commands=5)
    worker = given.registered_worker()
    before = database.rows("SELECT lo, hi FROM busload.queue WHERE hi - lo > 10 ORDER BY hi")

    assert batches(few(database, worker)) == 5 * [small]
    assert few(database, worker) == []

    assert database.rows("SELECT lo, hi FROM busload.queue ORDER BY hi") == before
    database.check_invariants()


async def test_a_claim_of_few_leaves_out_what_is_held_less_urgent_or_crashed(
    bus: CommandBus, given: Given, database: Database
) -> None:
    await given.batch(commands=3000)
    held = await given.batch(commands=5)
    await bus.hold_batch(DOMAIN, held, reason="the bank complains")
    await bus.send(DOMAIN, "Debit", priority=-1)
    await bus.send(DOMAIN, "Debit")
    database.rows("UPDATE busload.queue SET crashes = 1 WHERE fair = 0 AND priority = 0 RETURNING 1")
    well = await bus.send(DOMAIN, "Debit")
    assert [one.command_id for one in few(database, given.registered_worker())] == [well.command_id]


async def test_a_dead_worker_claims_no_newcomers(given: Given, database: Database) -> None:
    await given.batch(commands=3000)
    await given.batch(commands=5)
    worker = given.registered_worker()
    given.died(worker)
    database.bury()
    assert few(database, worker) == []


# -- who goes first -------------------------------------------------------------------------------------------------


def leased(given: dict[UUID | None, int]) -> tuple[list[Lease], list[Leased]]:
    leases = [
        Lease(UUID(int=n), None, DOMAIN, batch_id, 0, 1, 0, 0, None, size)  # type: ignore[arg-type]
        for n, (batch_id, size) in enumerate(given.items())
    ]
    return leases, [Leased(one, 0, UUID(int=0), "Debit", None) for one in leases for _ in range(one.unsettled)]


def test_of_one_claim_the_batches_with_few_go_first() -> None:
    large, small = UUID(int=1), UUID(int=2)
    leases, commands = leased({large: 100, small: FEW, None: FEW + 1})
    first, others = split_off_few(leases, commands)
    assert batches(first) == FEW * [small]
    assert batches(others) == 100 * [large] + (FEW + 1) * [None]


def test_if_all_have_few_or_all_have_many_nobody_goes_first() -> None:
    for size in (1, 100):
        leases, commands = leased({UUID(int=1): size, UUID(int=2): 2 * size})
        assert split_off_few(leases, commands) == ([], commands)


# -- the worker -----------------------------------------------------------------------------------------------------


async def test_a_newcomer_stands_before_what_was_in_line(given: Given) -> None:
    async with busy(given) as (run, claimer, _):
        small = await given.batch(commands=5)
        claimer.newcomers.came()
        assert await claimer.newcomers.once() is None
        assert batches(run._line.ready)[:6].count(small) == 5


async def test_a_notification_is_enough_while_slots_are_taken_and_others_stand_in_line(given: Given) -> None:
    async with busy(given, listening=True) as (run, _, go):
        claimed = len(run._line.ready)
        assert claimed >= 20
        small = await given.batch(commands=5)
        await eventually(lambda: batches(run._line.ready)[:5] == 5 * [small])
        go.set()


async def test_what_a_usual_claim_finds_of_a_small_batch_begins_first(given: Given) -> None:
    async with busy(given) as (run, claimer, _):
        small = await given.batch(commands=5)
        claimer.look_at_queue()
        run._line.drop(list(run._line.ready)[1:])  # room for a claim, and one in line
        await claimer.once()
        assert batches(run._line.ready)[:5] == 5 * [small]
        assert len(set(batches(run._line.ready))) == 2


async def test_a_less_urgent_newcomer_stands_behind_what_was_in_line(given: Given, database: Database) -> None:
    async with busy(given) as (run, claimer, _):
        small = await given.batch(commands=5, priority=-1)
        database.rows("UPDATE busload.queue SET priority = -2 WHERE batch_id <> %s", small)
        claimer.newcomers.came()
        await claimer.newcomers.once()
        assert [one.lease.priority for one in list(run._line.ready)[-6:]] == [0, *5 * [-1]]
        urgent = await given.batch(commands=5, priority=1)
        claimer.newcomers.came()
        await eventually(lambda: time.monotonic() > claimer.newcomers._next_at)
        await claimer.newcomers.once()
        assert batches(run._line.ready)[:6].count(urgent) == 5


async def test_of_one_claim_a_less_urgent_small_batch_does_not_begin_first(given: Given, database: Database) -> None:
    async with busy(given) as (run, claimer, _):
        large = run._line.ready[0].lease.batch_id
        database.rows("UPDATE busload.queue SET priority = -2")
        await given.batch(commands=5, priority=-1)
        await given.batch(commands=FEW + 1, priority=1)
        claimer.look_at_queue()
        run._line.drop(list(run._line.ready)[1:])  # room for a claim, and one in line
        await claimer.once()
        found = [one.lease.priority for one in run._line.ready if one.lease.batch_id != large]
        assert found == [*(FEW + 1) * [1], *5 * [-1]]


async def test_many_notifications_are_answered_by_few_claims_for_newcomers(given: Given) -> None:
    async with busy(given) as (_, claimer, _go):
        claims, began, asked = claimer.claims, time.monotonic(), 0
        while asked < 200 or claimer.claims == claims:
            claimer.newcomers.came()
            await claimer.newcomers.once()
            asked += 1
        assert claimer.claims - claims <= (time.monotonic() - began) / SHORTEST_GAP + 1


async def test_a_claim_for_newcomers_that_finds_nothing_is_repeated_later_and_later(given: Given) -> None:
    """Other workers are faster: a claim in vain must not cost the more, the more workers there are"""
    async with busy(given) as (_, claimer, _go):
        gaps = []
        for _ in range(5):
            claimer.newcomers.came()
            claimer.newcomers._next_at = 0.0
            await claimer.newcomers.once()
            gaps.append(claimer.newcomers._gap / SHORTEST_GAP)
        assert gaps == [2, 4, 8, 8, 8]
        await given.batch(commands=5)
        claimer.newcomers.came()
        claimer.newcomers._next_at = 0.0
        await claimer.newcomers.once()
        assert claimer.newcomers._gap == SHORTEST_GAP


async def test_a_worker_whose_slots_are_not_free_soon_leaves_newcomers_to_others(
    given: Given, database: Database
) -> None:
    async with busy(given) as (_, claimer, _go):
        claimer.room.ahead = 0
        await given.batch(commands=5)
        held = database.value("SELECT sum(open) FROM busload.lease")
        claimer.newcomers.came()
        await claimer.newcomers.once()
        assert database.value("SELECT sum(open) FROM busload.lease") == held


async def test_newcomers_of_a_batch_that_is_held_while_they_are_claimed_do_not_begin(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    async with busy(given) as (run, claimer, _go):
        small = await given.batch(commands=5)
        with psycopg.connect(dsn) as conn:
            await asyncio.to_thread(conn.execute, "LOCK TABLE busload.lease IN SHARE ROW EXCLUSIVE MODE")
            claimer.newcomers.came()
            claiming = asyncio.create_task(claimer.newcomers.once())
            await eventually(lambda: claimer.sent_at is not None and database.value(WAITING_CLAIMS) > 0)
            claimer.heed_holds({small})
            conn.rollback()
        await claiming
        assert small not in batches(run._line.items)
        assert claimer.sent_at is None and run._hand_back.leaving.total() == 5


@asynccontextmanager
async def claiming_newcomers(claimer: Claimer, dsn: str) -> AsyncIterator[None]:
    """A claim for newcomers is under way, and has no answer before the block ends."""
    with psycopg.connect(dsn) as conn:
        await asyncio.to_thread(conn.execute, "LOCK TABLE busload.lease IN SHARE ROW EXCLUSIVE MODE")
        claimer.newcomers.came()
        claiming = asyncio.create_task(claimer.newcomers.once())
        await eventually(lambda: claimer.sent_at is not None)
        yield
        conn.rollback()
    await claiming


async def some_rounds() -> None:
    """As many rounds of the event loop as anybody needs who wants a connection."""
    for _ in range(30):
        await asyncio.sleep(0)


async def test_no_settlement_and_no_other_claim_is_sent_while_newcomers_are_claimed(
    given: Given, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomers, "HEAD_START", 3600.0)
    async with busy(given) as (run, claimer, go):
        run._settlement.flush_soon()
        await eventually(lambda: run._settlement.waiting == 0)
        pool = run._pool
        async with claiming_newcomers(claimer, dsn):
            in_use = pool.size - pool.idle
            go.set()
            await eventually(lambda: run._settlement.waiting > 0)
            run._settlement.flush_soon()
            await some_rounds()
            assert pool.size - pool.idle == in_use
            run._line.drop(list(run._line.ready)[1:])  # room for a claim
            claiming = asyncio.create_task(claimer.once())
            await some_rounds()
            assert len(list(claimer._under_way)) == 1
        await claiming


async def test_others_wait_only_for_a_moment_for_newcomers(given: Given, database: Database, dsn: str) -> None:
    """A claim that has to wait for somebody's lock, or for a server that is away, must not stop all others"""
    async with busy(given) as (_, claimer, _go), claiming_newcomers(claimer, dsn):
        await claimer.newcomers.let_go_first()
        assert claimer.newcomers.expected


async def test_everybody_runs_whatever_comes_while_a_large_batch_runs(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen = given.handler()
    large = await given.batch(commands=20_000)
    async with given.running(concurrency=20):
        small = [await given.batch(commands=3) for _ in range(30)]
        singles = [await bus.send(DOMAIN, "Debit") for _ in range(30)]
        many = await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(2000)])
        for batch_id in (*small, many, large):
            await bus.wait_batch(DOMAIN, batch_id, timeout=60)
        for one in singles:
            await bus.wait_command(DOMAIN, one.command_id, timeout=60)
    assert len(seen) == 20_000 + 90 + 30 + 2000
    database.check_invariants()

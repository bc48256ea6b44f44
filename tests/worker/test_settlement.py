"""Results on their way into the database: which of them count, when they are written, and what keeps them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
import pytest
from hypothesis import given as whatever
from hypothesis import strategies as st

from busload import BatchCommand, Command, CommandBus, HandlerContext
from busload.commands.execution import COMPLETED, FAILED, FAILED_ATTEMPT, TROUBLESHOOTING, Leased, Transition
from busload.postgres.outage import Outage
from busload.postgres.pool import engine_pool
from busload.worker.held_leases import HeldLeases
from busload.worker.settlement import Settlement, fold
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, counts, eventually

NEVER = timedelta(hours=1)


@pytest.fixture(autouse=True)
def flushes_may_be_hours_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busload.settings.LONGEST_FLUSH_EVERY", NEVER)


Settling: TypeAlias = Callable[..., Awaitable[Settlement]]


# -- two results for one execution ----------------------------------------------------------------------------------


def results(*outcomes: str, leased: Any = None) -> list[Transition]:
    """Several results for one execution; the fold looks at nothing but which one they are for."""
    one = leased or Leased(None, 1, UUID(int=1), "Debit", None)  # type: ignore[arg-type]
    return [Transition(one, outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    "outcomes", sorted(set(itertools.permutations([FAILED, COMPLETED, FAILED_ATTEMPT, TROUBLESHOOTING])))
)
def test_a_completion_beats_every_failure_in_any_order(outcomes: tuple[str, ...]) -> None:
    [kept] = fold(results(*outcomes))
    assert kept.outcome == COMPLETED


@pytest.mark.parametrize("outcomes", list(itertools.permutations([FAILED, FAILED_ATTEMPT, TROUBLESHOOTING])))
def test_without_a_completion_the_first_result_counts(outcomes: tuple[str, ...]) -> None:
    first, *others = results(*outcomes)
    assert fold([first, *others]) == [first]


def test_the_first_of_two_completions_counts() -> None:
    first, second = results(COMPLETED, COMPLETED)
    assert fold([first, second]) == [first]


def test_results_of_other_executions_are_untouched_and_keep_their_order() -> None:
    [alone], [first, second], [last] = results(FAILED), results(FAILED_ATTEMPT, COMPLETED), results(COMPLETED)
    assert fold([alone, first, last, second]) == [alone, second, last]
    assert fold([alone, first, last]) == [alone, first, last]
    assert fold([]) == []


@whatever(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([COMPLETED, FAILED, FAILED_ATTEMPT])), max_size=30))
def test_each_execution_has_one_result_afterwards(drawn: list[tuple[int, str]]) -> None:
    """Whatever came: one result each, a completion if there was one, and folding again changes nothing."""
    leased = [Leased(None, n, UUID(int=n), "Debit", None) for n in range(6)]  # type: ignore[arg-type]
    transitions = [Transition(leased[n], outcome) for n, outcome in drawn]
    folded = fold(transitions)
    assert {t.leased.id for t in folded} == {n for n, _ in drawn} and len(folded) == len({n for n, _ in drawn})
    for kept in folded:
        mine = [t for t in transitions if t.leased is kept.leased]
        assert kept is next((t for t in mine if t.outcome == COMPLETED), mine[0])
    assert list(fold(folded)) == list(folded)


# -- when they are written ------------------------------------------------------------------------------------------


@pytest.fixture
async def settling(given: Given, dsn: str) -> AsyncIterator[Settling]:
    """A settlement as a worker has it, over claimed commands, without the worker around it."""
    async with AsyncExitStack() as stack:

        async def settling(leased: Sequence[Leased], **settings: Any) -> Settlement:
            pool = engine_pool(dsn, 2)
            stack.push_async_callback(pool.close)
            held = HeldLeases()
            leases = list({one.lease.lease_id: one.lease for one in leased}.values())
            held.take(leases)
            patient = replace(given.settings, **{"concurrency": 10, "flush_every": NEVER, **settings})
            outage = Outage()
            stack.callback(outage.close)
            settlement = Settlement(pool, held, patient, lambda room_wanted: None, outage)
            stack.push_async_callback(settlement.close, timedelta(seconds=10))
            settlement.expect(leases)
            return settlement

        yield settling


async def put(settlement: Settlement, leased: Sequence[Leased], outcome: str = COMPLETED, **details: Any) -> None:
    for one in leased:
        one.started = time.monotonic()
        await settlement.put(Transition(one, outcome, finished=one.started, **details))


async def a_while() -> None:
    """Long enough for a flush that should not be, and would take a millisecond."""
    until = time.monotonic() + 0.15
    await eventually(lambda: time.monotonic() > until)


async def test_the_last_results_of_a_batch_are_written_at_once(given: Given, settling: Settling) -> None:
    """Nothing can join them, and somebody waits for the batch."""
    batch_id = await given.batch(commands=5)
    leased = given.claimed(limit=5)
    settlement = await settling(leased)
    await put(settlement, leased[:4])
    await a_while()
    assert (settlement.stats.waiting, settlement.stats.flushes) == (4, 0)
    await put(settlement, leased[4:])
    await eventually(lambda: settlement.settled == 5)
    assert (await given.batch_now(batch_id)).status == "COMPLETED" and settlement.stats.flushes == 1


async def test_the_last_results_of_a_part_of_a_batch_wait_for_more(given: Given, settling: Settling) -> None:
    """The batch cannot end with them."""
    await given.batch(commands=5)
    leased = given.claimed(limit=4)
    settlement = await settling(leased)
    await put(settlement, leased)
    await a_while()
    assert (settlement.stats.waiting, settlement.stats.flushes) == (4, 0)


async def test_a_batch_that_may_still_grow_has_no_last_results(
    bus: CommandBus, given: Given, settling: Settling
) -> None:
    """Only a sealed one can end."""
    async with bus.open_batch(DOMAIN, checkpoint_size=3) as batch:
        for _ in range(3):
            await batch.add("Debit")
        leased = given.claimed(limit=3)
        assert [one.lease.remaining for one in leased] == [None] * 3
        settlement = await settling(leased)
        await put(settlement, leased)
        await a_while()
        assert (settlement.stats.waiting, settlement.stats.flushes) == (3, 0)


async def test_a_command_without_a_batch_waits_for_others(given: Given, settling: Settling) -> None:
    await given.sent()
    leased = given.claimed()
    settlement = await settling(leased)
    await put(settlement, leased)
    await a_while()
    assert (settlement.stats.waiting, settlement.stats.flushes) == (1, 0)


async def test_settled_immediately_a_result_waits_for_nothing(given: Given, settling: Settling) -> None:
    """`settle="immediate"` is the way back to direct updates."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    settlement = await settling(leased, settle="immediate")
    for n, one in enumerate(leased[:2], 1):
        await put(settlement, [one])
        await eventually(lambda n=n: settlement.settled == n)  # type: ignore[misc]
    assert (await given.batch_now(batch_id)).completed_count == 2


def hold(given: Given) -> asyncio.Event:
    """A command that keeps a slot busy until it is let go, so that the worker is never idle."""
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    given.handler("Hold", wait)
    return go


@asynccontextmanager
async def busy(given: Given, **settings: Any) -> AsyncIterator[None]:
    """A worker that is told to wait an hour before it writes, and is never idle."""
    go = hold(given)
    await given.batch(commands=1, command_type="Hold")
    patient = replace(given.settings, **{"flush_every": NEVER, **settings})
    async with given.running(concurrency=10, settings=patient):
        try:
            yield
        finally:
            go.set()


@pytest.mark.parametrize("size", [1, 5, 250])
async def test_a_batch_completes_at_once_while_its_worker_is_busy_with_another(
    given: Given, database: Database, size: int
) -> None:
    """Although results may wait for an hour, and however many claims a batch took."""
    given.handler()
    async with busy(given):
        batch_id = await given.batch(commands=size)
        await eventually(lambda: status(database, batch_id) == "COMPLETED")
        assert database.value("SELECT sum(completed_count) FROM busload.batch") == size
    database.check_invariants()


def status(database: Database, batch_id: UUID) -> str:
    return str(database.value("SELECT status FROM busload.batch WHERE batch_id = %s", batch_id))


@pytest.mark.parametrize("order", ["Write first", "Write last"])
async def test_a_batch_completes_at_once_also_if_some_commands_settle_in_their_own_transaction(
    given: Given, database: Database, order: str
) -> None:
    """What a handler's transaction has settled is not waited for."""
    started, written = asyncio.Event(), asyncio.Event()

    async def debit(command: Command, ctx: HandlerContext) -> None:
        if order == "Write first":
            await eventually(lambda: database.count("execution"))
        started.set()

    async def write(command: Command, ctx: HandlerContext) -> None:
        if order == "Write last":
            await started.wait()
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")
        written.set()

    given.handler("Debit", debit)
    given.handler("Write", write)
    async with busy(given):
        batch_id = await given.bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Write")])
        await eventually(lambda: status(database, batch_id) == "COMPLETED")
    database.check_invariants()


async def test_a_worker_that_settles_immediately_does_not_wait_for_the_batch(given: Given, database: Database) -> None:
    """Another command of the batch still runs."""
    given.handler()
    async with busy(given, settle="immediate"):
        await given.bus.create_batch(DOMAIN, [BatchCommand("Hold"), BatchCommand("Debit")])
        await given.sent()
        await eventually(lambda: database.count("execution") == 2)


# -- what keeps them ------------------------------------------------------------------------------------------------


async def test_two_results_for_one_execution_in_one_flush_count_once(
    given: Given, database: Database, settling: Settling
) -> None:
    """Measured elsewhere, (failed, completed, failed) for one id ended as the third, and the work was lost."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    settlement = await settling(leased)
    for outcome in (FAILED_ATTEMPT, COMPLETED, FAILED):
        await put(settlement, leased[:1], outcome, delay=60.0 if outcome == FAILED_ATTEMPT else None)
    await put(settlement, leased[1:])
    await settlement.close(timedelta(seconds=10))
    assert counts(await given.batch_now(batch_id)) == (3, 3, 0, 0, 0)
    assert (settlement.settled, settlement.stats.flushes, settlement.stats.waiting) == (3, 1, 0)
    assert database.count("scheduled") == database.count("lease") == 0
    database.check_invariants()


async def test_a_connection_that_is_lost_in_a_flush_costs_no_result(
    given: Given, database: Database, dsn: str, settling: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    """They are kept, sent again, and counted once."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    settlement = await settling(leased)
    with psycopg.connect(dsn) as brake:
        brake.execute("SELECT FROM busload.lease FOR UPDATE")
        await put(settlement, leased)
        await eventually(lambda: database.rows(LOCKED_OUT))
        database.rows(f"SELECT pg_terminate_backend(pid) FROM ({LOCKED_OUT}) AS ours")
        await eventually(lambda: settlement.stats.failures == 1)
        assert (settlement.settled, settlement.stats.waiting) == (0, 3)
    await eventually(lambda: settlement.settled == 3)
    assert counts(await given.batch_now(batch_id)) == (3, 3, 0, 0, 0)
    assert "The database cannot be reached" in caplog.text
    database.check_invariants()


async def test_a_flush_past_its_deadline_is_repeated_and_counts_once(
    given: Given, database: Database, settling: Settling
) -> None:
    """The server may still be at the first one when the second comes."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    settlement = await settling(leased, flush_deadline=timedelta(milliseconds=100))
    database.rows(
        """CREATE FUNCTION brake() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN PERFORM pg_sleep(0.5) FROM pg_class WHERE relname = $$slow$$; RETURN NULL; END';
           CREATE TRIGGER brake AFTER INSERT ON busload.execution FOR EACH STATEMENT EXECUTE FUNCTION brake();
           CREATE TABLE slow ()"""
    )
    await put(settlement, leased)
    await eventually(lambda: settlement.stats.failures >= 2)
    database.rows("DROP TABLE slow")
    await eventually(lambda: settlement.settled == 3)
    assert counts(await given.batch_now(batch_id)) == (3, 3, 0, 0, 0)
    assert database.count("execution") == 3
    database.check_invariants()


@pytest.mark.parametrize("recorded", [1, 2, 3])
async def test_results_whose_first_answer_was_lost_are_credited_once(
    given: Given, database: Database, settling: Settling, caplog: pytest.LogCaptureFixture, recorded: int
) -> None:
    """Some of them, with new ones beside them, or all, when the lease is closed already."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    given.settled(leased[:recorded])  # a flush that was committed, and nobody heard of it
    settlement = await settling(leased)
    await put(settlement, leased)
    await eventually(lambda: settlement.settled == 3)
    assert counts(await given.batch_now(batch_id)) == (3, 3, 0, 0, 0)
    assert settlement.stats.failures == 0 and "Did not count" not in caplog.text
    assert database.count("lease") == 0 and database.count("execution") == 3
    database.check_invariants()


async def test_results_of_a_lease_that_was_lost_do_not_count_and_this_is_said(
    given: Given, database: Database, settling: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    await given.batch(commands=2)
    mine, kept = given.claimed(by=(dead := given.registered_worker())), given.claimed()
    given.died(dead)
    given.rescued()
    settlement = await settling([*mine, *kept])
    await put(settlement, mine + kept)
    await settlement.close(timedelta(seconds=10))
    assert settlement.settled == 1
    assert "Did not count 1 result, which came after the lease was lost" in caplog.text
    assert database.rows("SELECT command, lease_id FROM busload.execution") == [(kept[0].id, kept[0].lease.lease_id)]
    database.check_invariants()


async def test_a_settlement_says_how_much_room_is_left(given: Given, dsn: str, settling: Settling) -> None:
    """What the claim looks at before it takes more."""
    await given.batch(commands=30)
    leased = given.claimed(limit=30)
    settlement = await settling(leased, flush_size=4)
    assert settlement.room == settlement.stats.capacity == 50  # five flushes, or five times what can run
    with psycopg.connect(dsn) as brake:
        brake.execute("SELECT FROM busload.batch FOR UPDATE")
        await put(settlement, leased[:20])
        assert settlement.room == 30
    await eventually(lambda: settlement.room == 50)
    await put(settlement, leased[20:])


async def test_what_cannot_be_written_before_the_deadline_is_counted(
    given: Given, dsn: str, settling: Settling
) -> None:
    await given.batch(commands=3)
    leased = given.claimed(limit=3)
    settlement = await settling(leased)
    with psycopg.connect(dsn) as brake:
        brake.execute("SELECT FROM busload.batch FOR UPDATE")
        await put(settlement, leased)
        assert await settlement.close(timedelta(milliseconds=100)) == 3
    assert settlement.settled == 0


# -- a server that is slow -------------------------------------------------------------------------------------------

SLOW_ROWS = """
    CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_sleep((NEW.details #>> ''{}'')::float8); RETURN NEW; END';
    CREATE TRIGGER take_time BEFORE INSERT ON busload.execution FOR EACH ROW EXECUTE FUNCTION take_time();
"""


async def test_results_that_take_too_long_together_are_settled_in_parts(given: Given, database: Database) -> None:
    """Eight that need 1.2 s against a deadline of half a second, and one that needs a second and is given two"""

    async def say_how_slow(command: Command, ctx: HandlerContext) -> float:
        return 1.0 if command.data["n"] == 0 else 0.15

    database.rows(SLOW_ROWS)
    given.handler("Debit", say_how_slow)
    batch_id = await given.batch(commands=9)
    deadline = timedelta(seconds=0.5)
    settings = replace(given.settings, flush_deadline=deadline, lease_for=timedelta(seconds=30))
    assert await given.drained(settings=settings) == 9
    assert counts(await given.batch_now(batch_id)) == (9, 9, 0, 0, 0)
    assert database.count("execution") == 9
    database.check_invariants()

"""Counters and status change in the transaction that moves the commands, by one rule for everybody."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from busload import BusinessRuleError, Command, CommandBus, HandlerContext, PermanentCommandError, TransientCommandError
from busload.commands import settle
from busload.commands.execution import COMPLETED, FAILED, FAILED_ATTEMPT, TROUBLESHOOTING, Transition
from busload.postgres.plan import perform_async
from tests.given import DOMAIN, Given, counts

pytestmark = pytest.mark.usefixtures("invariants")


async def types_of(bus: CommandBus, batch_id: Any) -> list[str]:
    return [event.type for event in await bus.get_batch_audit_trail(DOMAIN, batch_id)]


async def test_the_first_command_that_begins_starts_its_batch(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=3)
    assert (await given.batch_now(batch_id)).status == "PENDING"

    given.claimed(1)

    started = await given.batch_now(batch_id)
    assert started.status == "IN_PROGRESS"
    assert started.started_at is not None
    assert started.started_at >= started.created_at
    given.claimed(2)
    assert (await given.batch_now(batch_id)).started_at == started.started_at
    assert (await types_of(bus, batch_id)).count("BATCH_STARTED") == 1


async def test_a_batch_that_is_locked_when_it_begins_is_started_by_its_first_result(
    bus: CommandBus, given: Given, dsn: str
) -> None:
    """A claim never waits for the batch row"""
    batch_id = await given.batch(commands=2)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("SELECT FROM busload.batch FOR UPDATE")
        leased = given.claimed(2)
        assert len(leased) == 2
        assert (await given.batch_now(batch_id)).status == "PENDING"

    given.settled(leased[:1])

    assert (await given.batch_now(batch_id)).status == "IN_PROGRESS"
    given.settled(leased[1:])
    assert (await types_of(bus, batch_id)).count("BATCH_STARTED") == 1


@pytest.mark.parametrize(
    ("outcome", "details", "expected"),
    [
        (COMPLETED, {}, (4, 1, 0, 0, 0)),
        (FAILED, {"details": '{"message": "no"}'}, (4, 0, 1, 0, 0)),
        (TROUBLESHOOTING, {"details": '{"message": "?"}', "reason": "PERMANENT"}, (4, 0, 0, 0, 1)),
        (FAILED_ATTEMPT, {"details": '{"message": "?"}', "delay": 10.0}, (4, 0, 0, 0, 0)),
    ],
)
async def test_each_way_to_end_has_its_counter(
    given: Given, outcome: str, details: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """An attempt that will be repeated is not an end"""
    batch_id = await given.batch(commands=4)
    given.settled(given.claimed(1), outcome, **details)
    assert counts(await given.batch_now(batch_id)) == expected


async def test_counters_are_exact_at_every_step(given: Given) -> None:
    """As another connection sees them"""
    batch_id = await given.batch(commands=30)
    leased = given.claimed(30)
    for done, one in enumerate(leased, start=1):
        given.settled([one])
        batch = await given.batch_now(batch_id)
        assert (batch.completed_count, batch.finished_count, batch.remaining_count) == (done, done, 30 - done)
        assert (batch.status == "COMPLETED") == (done == 30)
        given.database.check_invariants()


async def test_a_batch_whose_commands_all_succeed_is_completed(bus: CommandBus, given: Given) -> None:
    given.handler()
    batch_id = await given.batch(commands=25)

    await given.drained()

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED", (25, 25, 0, 0, 0))
    assert batch.started_at is not None
    assert batch.completed_at is not None
    assert batch.created_at <= batch.started_at <= batch.completed_at
    assert await types_of(bus, batch_id) == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"]


async def test_a_command_that_the_business_refuses_is_failed_and_the_batch_completes_with_failures(
    given: Given,
) -> None:
    async def even_only(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] % 2:
            raise BusinessRuleError("odd", code="ODD")

    given.handler("Debit", even_only)
    batch_id = await given.batch(commands=10)

    await given.drained()

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (10, 5, 5, 0, 0))
    assert batch.completed_at is not None


async def test_a_command_in_troubleshooting_is_counted_and_holds_the_batch_open(given: Given) -> None:
    """Permanent or exhausted"""

    async def fail(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] == 0:
            raise PermanentCommandError("closed")
        if command.data["n"] == 1:
            raise TransientCommandError("busy")

    given.handler("Debit", fail)
    batch_id = await given.batch(commands=4)
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (4, 2, 0, 0, 1)
    for _ in range(2):
        given.make_due()
        await given.drained()

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch), batch.completed_at) == ("IN_PROGRESS", (4, 2, 0, 0, 2), None)
    assert batch.remaining_count == 2


async def test_what_an_operator_decides_moves_the_counters_and_may_complete_the_batch(
    bus: CommandBus, given: Given
) -> None:
    """Retry, complete and cancel"""
    batch_id, [first, second, third] = await given.in_troubleshooting(commands=3)
    assert counts(await given.batch_now(batch_id)) == (3, 0, 0, 0, 3)

    await bus.troubleshooting.complete(DOMAIN, first)
    assert counts(await given.batch_now(batch_id)) == (3, 1, 0, 0, 2)

    await bus.troubleshooting.retry(DOMAIN, second)
    assert counts(await given.batch_now(batch_id)) == (3, 1, 0, 0, 1)
    await given.drained()
    assert counts(await given.batch_now(batch_id)) == (3, 1, 0, 0, 2)
    await bus.troubleshooting.complete(DOMAIN, second)

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("IN_PROGRESS", (3, 2, 0, 0, 1))
    await bus.troubleshooting.cancel(DOMAIN, third, reason="account closed")
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (3, 2, 0, 1, 0))
    assert batch.completed_at is not None
    assert (await types_of(bus, batch_id)).count("BATCH_COMPLETED") == 1


async def test_a_batch_that_an_operator_completes_to_the_last_is_completed(bus: CommandBus, given: Given) -> None:
    batch_id, command_ids = await given.in_troubleshooting(commands=2)
    for command_id in command_ids:
        await bus.troubleshooting.complete(DOMAIN, command_id)
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_the_result_of_a_worker_that_lost_its_lease_does_not_count(given: Given) -> None:
    """Its new holder settles it, once"""
    batch_id = await given.batch(commands=1)
    late_worker = given.registered_worker()
    late = given.claimed(by=late_worker)
    given.died(late_worker)
    assert given.rescued().commands == 1

    assert given.settled(late, FAILED, details='{"message": "too late"}') == set()

    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 0, 0)
    again = given.claimed()
    assert given.settled(late) == set()
    assert given.settled(again) == {again[0].id}
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED", (1, 1, 0, 0, 0))


async def test_a_result_that_is_settled_twice_counts_once(given: Given) -> None:
    """The answer to the first settlement was lost, so the worker repeats it"""
    batch_id = await given.batch(commands=2)
    leased = given.claimed(2)
    assert given.settled(leased[:1]) == given.settled(leased[:1]) == {leased[0].id}
    assert given.settled(leased) == {leased[0].id, leased[1].id}
    assert counts(await given.batch_now(batch_id)) == (2, 2, 0, 0, 0)


async def test_many_results_write_the_batch_row_once(given: Given) -> None:
    """500 completions, one counter update, and one more for the completion"""
    batch_id = await given.batch(commands=501)
    leased = given.claimed(501)
    given.database.rows("CREATE TABLE public.written (at timestamptz DEFAULT now())")
    given.database.rows(
        """CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS
           'BEGIN INSERT INTO public.written DEFAULT VALUES; RETURN NULL; END'"""
    )
    given.database.rows("CREATE TRIGGER note AFTER UPDATE ON busload.batch FOR EACH ROW EXECUTE FUNCTION public.note()")

    given.settled(leased[:500])
    assert given.database.value("SELECT count(*) FROM public.written") == 1
    given.settled(leased[500:])
    assert given.database.value("SELECT count(*) FROM public.written") == 3
    assert counts(await given.batch_now(batch_id)) == (501, 501, 0, 0, 0)


async def test_the_last_two_commands_settled_at_once_complete_their_batch_once(
    bus: CommandBus, given: Given, dsn: str
) -> None:
    """Whoever is last decides, and both wait for the same row"""
    batches = [await given.batch(commands=2) for _ in range(10)]
    leased = given.claimed(20)
    given.claimed(0)
    firsts = [Transition(one, COMPLETED) for one in leased[0::2]]
    seconds = [Transition(one, COMPLETED) for one in reversed(leased[1::2])]

    async def settle_all(transitions: list[Transition]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            for transition in transitions:
                await perform_async(conn, settle.settle([transition], now=0.0))

    await asyncio.gather(settle_all(firsts), settle_all(seconds))

    for batch_id in batches:
        assert (await given.batch_now(batch_id)).status == "COMPLETED"
        assert (await types_of(bus, batch_id)).count("BATCH_COMPLETED") == 1


async def test_two_workers_share_batches_and_count_everything_once(given: Given) -> None:
    """From creation to completion with mixed outcomes"""

    async def mixed(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] % 10 == 3:
            raise BusinessRuleError("three")
        if command.data["n"] % 10 == 7:
            raise PermanentCommandError("seven")

    seen = given.handler("Debit", mixed)
    batches = [await given.batch(commands=150) for _ in range(4)]

    await asyncio.gather(given.drained(concurrency=20), given.drained(concurrency=20))

    assert len(seen) == len({command.command_id for command in seen}) == 600
    for batch_id in batches:
        assert counts(await given.batch_now(batch_id)) == (150, 120, 15, 0, 15)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_settlement_reads_the_batches_that_it_counts_in_and_no_others(
    given: Given, dsn: str, mode: str
) -> None:
    """Also while the database knows nothing about many batches that are new"""
    await given.batch(commands=2)
    given.database.rows(
        "INSERT INTO busload.batch (batch_id, domain) SELECT gen_random_uuid(), 'others' FROM generate_series(1, 1000)"
    )
    leased = given.claimed(limit=2)
    async with await psycopg.AsyncConnection.connect(dsn) as conn, conn.transaction(force_rollback=True):
        await conn.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
        for one in leased:  # the last one completes the batch
            assert await perform_async(conn, settle.settle([Transition(one, COMPLETED)], now=0.0)) == {one.id}
        read = await conn.execute("SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'batch'")
        assert await read.fetchall() == [(0,)]

"""A batch that is held starts nothing more until it is resumed; what runs finishes, and nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import BatchCommand, BatchNotFoundError, Chunk, ChunkContext, Command, CommandBus, HandlerContext, Stage
from busload.batches import hold
from busload.commands.execution import FAILED_ATTEMPT
from busload.errors import InvalidCommandError, InvalidOperationError
from busload.explain.blockers import Blocker
from tests.given import DOMAIN, Database, Given, beside, counts, eventually, until

pytestmark = pytest.mark.usefixtures("invariants")

NEVER = timedelta(hours=1)
WAITING_CLAIMS = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%wanted AS%'"""


def places(database: Database) -> dict[str, int]:
    """How many commands wait in each place."""
    count = "SELECT coalesce(sum(hi - lo + 1), 0)::integer FROM busload."
    held, later = "scheduled WHERE reason = 'HELD'", "scheduled WHERE reason <> 'HELD'"
    found = {"queue": "queue", "held": held, "later": later, "outbox": "outbox"}
    waiting = {place: database.value(count + table) for place, table in found.items()}
    waiting["lease"] = database.value("SELECT coalesce(sum(open), 0)::integer FROM busload.lease")
    return {place: commands for place, commands in waiting.items() if commands}


def stuck(given: Given, command_type: str = "Wait") -> tuple[list[Command], asyncio.Event]:
    """A handler that waits until it is let go, and what it has been given so far."""
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    return given.handler(command_type, wait), go


async def test_nothing_of_a_held_batch_is_claimed_and_resuming_lets_all_of_it_run(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A load is split: the running part ends and counts, the waiting part is taken out of the queue"""
    batch_id = await given.batch(commands=1500)
    running = given.claimed(4)
    other = await given.batch(commands=2)

    assert await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada") is True

    assert places(database) == {"queue": 2, "held": 1496, "lease": 4}
    given.settled(running)
    assert {one.lease.batch_id for one in given.claimed(100)} == {other}
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("IN_PROGRESS", (1500, 4, 0, 0, 0))
    assert batch.held_at is not None
    assert (batch.held_reason, batch.held_by, batch.held_note) == ("OPERATOR", "ada", "the bank complains")

    assert await bus.resume_batch(DOMAIN, batch_id, operator="bob") is True

    given.handler()
    await given.drained()
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED", (1500, 1500, 0, 0, 0))
    assert (batch.held_at, batch.held_reason, batch.held_by, batch.held_note) == (None, None, None, None)
    trail = {event.type: event for event in await bus.get_batch_audit_trail(DOMAIN, batch_id)}
    held, resumed = trail["BATCH_HELD"], trail["BATCH_RESUMED"]
    assert (held.operator, held.details) == ("ada", {"held_reason": "OPERATOR", "reason": "the bank complains"})
    assert resumed.operator == "bob" and resumed.details is not None
    assert resumed.details["held_reason"] == "OPERATOR"


async def test_holding_and_resuming_again_change_nothing(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=2)
    assert await bus.resume_batch(DOMAIN, batch_id) is False
    assert await bus.hold_batch(DOMAIN, batch_id, reason="first", operator="ada") is True
    before = await given.batch_now(batch_id)
    assert await bus.hold_batch(DOMAIN, batch_id, reason="second", operator="bob") is False
    assert await given.batch_now(batch_id) == before
    assert await bus.resume_batch(DOMAIN, batch_id) is True
    assert await bus.resume_batch(DOMAIN, batch_id) is False
    types = [event.type for event in await bus.get_batch_audit_trail(DOMAIN, batch_id)]
    assert types == ["BATCH_SEALED", "BATCH_HELD", "BATCH_RESUMED"]


async def test_what_does_not_exist_or_has_ended_is_neither_held_nor_resumed(bus: CommandBus, given: Given) -> None:
    given.handler()
    ended = await given.batch()
    await given.drained()
    running = await given.batch(2)
    given.claimed(1)
    await bus.cancel_batch(DOMAIN, running, reason="wrong file")
    for batch_id in (uuid4(), ended):
        for call in (bus.hold_batch(DOMAIN, batch_id, reason="no"), bus.resume_batch(DOMAIN, batch_id)):
            with pytest.raises((BatchNotFoundError, InvalidOperationError), match=f"{batch_id}"):
                await call
    with pytest.raises(BatchNotFoundError):
        await bus.hold_batch("elsewhere", running, reason="no")
    with pytest.raises(InvalidOperationError, match="was canceled"):
        await bus.hold_batch(DOMAIN, running, reason="no")
    with pytest.raises(InvalidCommandError, match="/reason"):
        await bus.hold_batch(DOMAIN, running, reason="")


async def test_what_stands_in_line_is_handed_back_and_what_runs_finishes(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Told by notification alone; commands of another batch in the same line stay in it"""
    seen, go = stuck(given)
    quick = given.handler()
    patient = replace(given.settings, lease_for=NEVER, prefetch=timedelta(minutes=1))  # keeps its line by itself
    async with given.running(concurrency=5, settings=patient) as worker:
        await given.batch(500)
        await eventually(lambda: len(quick) == 500)
        batch_id = await given.batch(500, "Wait")
        await eventually(lambda: len(seen) == 5 and worker.stats.in_line > 0)
        other = await given.batch(3, "Wait")
        await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
        await eventually(lambda: places(database) == {"held": 495, "lease": 8})
        assert len(seen) == 5
        go.set()
        await bus.wait_batch(DOMAIN, other, timeout=20)
        await eventually(lambda: database.count("lease") == 0)
        assert (await given.batch_now(batch_id)).completed_count == 5
        await bus.resume_batch(DOMAIN, batch_id)
        assert (await bus.wait_batch(DOMAIN, batch_id, timeout=20)).completed_count == 500
    assert len({command.command_id for command in seen}) == len(seen) == 503  # each ran once


async def test_a_worker_that_missed_the_notification_finds_the_hold_when_it_polls(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen, go = stuck(given)
    quick = given.handler()
    patient = replace(given.settings, lease_for=NEVER, prefetch=timedelta(minutes=1))
    async with given.running(concurrency=5, settings=patient) as worker:
        await given.batch(500)
        await eventually(lambda: len(quick) == 500)
        batch_id = await given.batch(500, "Wait")
        await eventually(lambda: len(seen) == 5 and worker.stats.in_line > 0)
        database.rows(
            "UPDATE busload.batch SET held_at = now(), held_reason = 'OPERATOR' WHERE batch_id = %s", batch_id
        )
        await eventually(lambda: places(database) == {"held": 495, "lease": 5})
        go.set()
        await bus.resume_batch(DOMAIN, batch_id)
        await bus.wait_batch(DOMAIN, batch_id, timeout=20)


async def test_what_a_claim_under_way_brings_after_the_hold_does_not_start(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """The worker hears of a hold before the claim answers. Nobody holds the batch here, so it runs later"""
    seen = given.handler()
    async with given.running() as worker:
        with psycopg.connect(dsn) as conn:
            lock = "LOCK TABLE busload.lease IN SHARE ROW EXCLUSIVE MODE"
            await asyncio.to_thread(conn.execute, lock)  # no claim comes to its end now
            batch_id = await given.batch(3)
            await eventually(lambda: database.value(WAITING_CLAIMS) > 0)
            claimer = worker._run._claimer  # type: ignore[union-attr]
            tell = "SELECT pg_notify('busload_hold', %s)"  # until it listens
            await eventually(
                lambda: database.rows(tell, str(batch_id)) and any(batch_id in one.held for one in claimer._under_way)
            )
            conn.rollback()
        await eventually(lambda: worker.stats.handed_back == 3)
        await bus.wait_batch(DOMAIN, batch_id, timeout=20)
    assert len(seen) == 3


async def test_what_was_gathered_for_a_bulk_handler_is_handed_back(
    bus: CommandBus, given: Given, database: Database
) -> None:
    calls: list[int] = []

    @bus.bulk_handler(DOMAIN, "Push", size=100, max_wait=timedelta(hours=1))
    async def push(chunk: Chunk, ctx: ChunkContext) -> None:
        calls.append(len(chunk.items))

    async with given.running():
        batch_id = await given.batch(30, "Push")
        await eventually(lambda: database.value("SELECT sum(open) FROM busload.lease") == 30)
        await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
        await eventually(lambda: places(database) == {"held": 30})
    assert calls == []


async def test_what_comes_back_to_a_held_batch_is_not_claimed_and_is_moved_by_the_sweep(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A due retry, a command of a dead worker, one for later, and one that is sent into the open batch"""
    soon = datetime.now(UTC) + timedelta(hours=1)
    async with bus.open_batch(DOMAIN) as open_batch:
        await open_batch.add("Debit")
        await open_batch.add("Debit")
        await open_batch.add("Debit", run_at=soon)
        await open_batch.checkpoint()
        worker = given.registered_worker()
        failing, dying = given.claimed(2, by=worker)
        given.settled([failing], FAILED_ATTEMPT, delay=3600.0)
        await bus.hold_batch(DOMAIN, open_batch.batch_id, reason="the bank complains")
        assert places(database) == {"later": 2, "lease": 1}
        given.died(worker)
        given.rescued()
        given.make_due()
        await bus.send(DOMAIN, "Debit", batch_id=open_batch.batch_id)
        assert dying.lease.batch_id == open_batch.batch_id

    seen = given.handler()
    async with given.running():
        await eventually(lambda: places(database) == {"held": 4})
        assert seen == []
        await bus.resume_batch(DOMAIN, open_batch.batch_id)
        batch = await bus.wait_batch(DOMAIN, open_batch.batch_id, timeout=20)
    assert counts(batch) == (4, 4, 0, 0, 0)


async def test_an_operators_retry_waits_with_the_held_batch(bus: CommandBus, given: Given, database: Database) -> None:
    batch_id, [first, second] = await given.in_troubleshooting(2)
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
    await bus.troubleshooting.retry(DOMAIN, first, operator="ada")
    await bus.troubleshooting.complete(DOMAIN, second, operator="ada")
    assert given.claimed(10) == []
    assert database.perform(hold.withhold_stragglers()) == 1
    assert places(database) == {"held": 1}
    assert database.perform(hold.withhold_stragglers()) == 0
    assert counts(await given.batch_now(batch_id)) == (2, 1, 0, 0, 0)


async def test_a_held_batch_can_be_canceled(bus: CommandBus, given: Given, database: Database) -> None:
    batch_id = await given.batch(10)
    running = given.claimed(2)
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="wrong file") == 8
    batch = await given.batch_now(batch_id)
    assert (counts(batch), batch.held_at) == ((10, 0, 0, 8, 0), None)
    given.settled(running)
    assert (await given.batch_now(batch_id)).status == "COMPLETED_WITH_FAILURES"
    assert places(database) == {}


async def test_a_held_batch_completes_if_nothing_of_it_waits(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(2, on_complete=BatchCommand("Done"))
    running = given.claimed(2)
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
    given.settled(running)
    batch = await given.batch_now(batch_id)
    assert (batch.status, batch.held_at) == ("COMPLETED", None)
    assert [one.command_type for one in given.claimed(9)] == ["Done"]


async def test_the_batch_of_a_job_is_held_and_the_next_stage_waits_for_it(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    commands = [BatchCommand("Debit"), BatchCommand("Debit")]
    job_id = await bus.jobs.create(DOMAIN, [Stage("first", commands), Stage("second", commands)])
    [first] = await bus.list_batches(DOMAIN, job_id=job_id)
    await bus.hold_batch(DOMAIN, first.batch_id, reason="the bank complains")
    await given.drained()
    assert seen == []
    await bus.resume_batch(DOMAIN, first.batch_id)
    await given.drained()
    assert (len(seen), (await bus.jobs.wait(DOMAIN, job_id, timeout=20)).status) == (4, "COMPLETED")


async def test_with_a_broker_nothing_of_a_held_batch_is_published(dsn: str, database: Database, given: Given) -> None:
    async with CommandBus(dsn, transport=dsn, dispatch="relay", settings=given.bus.settings) as bus:
        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3)
        async with bus.open_batch(DOMAIN) as open_batch:
            await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
            await bus.hold_batch(DOMAIN, open_batch.batch_id, reason="the bank complains")
            assert places(database) == {"held": 3}
            await open_batch.add("Debit")
            await open_batch.checkpoint()
            assert places(database) == {"held": 3, "outbox": 1}
            await bus.recover()
            assert (places(database), database.count("message")) == ({"held": 3, "outbox": 1}, 0)
        for one in (batch_id, open_batch.batch_id):
            await bus.resume_batch(DOMAIN, one)
        ran = Given(bus, database, given.settings)
        seen = ran.handler()
        async with ran.running():
            for one in (batch_id, open_batch.batch_id):
                await bus.wait_batch(DOMAIN, one, timeout=20)
    assert len(seen) == 4


async def test_a_hold_waits_for_a_claim_that_splits_a_load_and_takes_what_is_left(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(10)
    with psycopg.connect(dsn) as conn:
        conn.execute("UPDATE busload.queue SET lo = lo + 4")
        conn.execute(
            """INSERT INTO busload.lease (lease_id, lo, hi, domain, batch_id, priority, attempt, forgiven, crashes,
                                          replies, fair, worker, open)
               SELECT gen_random_uuid(), lo - 4, lo - 1, domain, batch_id, 0, 1, 0, 0, false, fair, %s, 4
                 FROM busload.queue""",
            [given.registered_worker()],
        )
        thread, done = beside(dsn, lambda: hold.hold(DOMAIN, batch_id, reason="no", operator=None))
        until(lambda: database.value("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0)
        conn.commit()
    thread.join(20)
    assert done == [True]
    assert places(database) == {"held": 6, "lease": 4}


async def test_no_load_is_held_after_its_batch_was_resumed(given: Given, database: Database, dsn: str) -> None:
    """A sweep that has seen the hold meets the resume: it leaves the batch alone"""
    batch_id = await given.batch(3)
    database.rows("UPDATE busload.batch SET held_at = now(), held_reason = 'OPERATOR' WHERE batch_id = %s", batch_id)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT busload.resume_batches(ARRAY[%s], NULL)", [batch_id])
        assert database.perform(hold.withhold_stragglers()) == 0
        conn.commit()
    assert database.perform(hold.withhold_stragglers()) == 0
    assert len(given.claimed(9)) == 3


async def test_with_a_connection_of_the_caller_a_hold_and_a_resume_are_part_of_its_transaction(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection
) -> None:
    batch_id = await given.batch(3)
    async with conn.transaction(force_rollback=True):
        assert await bus.hold_batch(DOMAIN, batch_id, reason="no", conn=conn)
        assert (await given.batch_now(batch_id)).held_at is None
    assert (await given.batch_now(batch_id)).held_at is None
    async with conn.transaction():
        assert await bus.hold_batch(DOMAIN, batch_id, reason="no", conn=conn)
        assert await bus.resume_batch(DOMAIN, batch_id, conn=conn)
    assert len(given.claimed(9)) == 3


async def test_a_watcher_sees_the_hold_and_the_resume(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch()
    seen: list[bool] = []
    async for batch in bus.watch_batch(DOMAIN, batch_id, timeout=30):
        seen.append(batch.held_at is not None)
        if seen == [False]:
            await bus.hold_batch(DOMAIN, batch_id, reason="no")
        elif seen == [False, True]:
            await bus.resume_batch(DOMAIN, batch_id)
        else:
            break
    assert seen == [False, True, False]


async def test_explain_says_who_holds_a_batch_and_why(bus: CommandBus, given: Given, database: Database) -> None:
    batch_id = await given.batch(5)
    given.claimed(1, by=given.registered_worker())
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains", operator="ada")
    explanation = await bus.explain_batch(DOMAIN, batch_id)
    [held] = explanation.reasons
    assert (held.code, held.count, explanation.remaining) == (Blocker.HELD, 4, 5)
    assert "by ada: the bank complains." in held.message
    assert f"busload batch resume {batch_id}" in held.advice
    assert (held.details["held_reason"], held.details["operator"]) == ("OPERATOR", "ada")
    last = (await bus.list_batch_commands(DOMAIN, batch_id))[-1]
    assert (last.status, last.run_at) == ("SCHEDULED", None)
    [held] = (await bus.explain_command(DOMAIN, last.command_id)).reasons
    assert (held.code, held.count) == (Blocker.HELD, 1)
    assert "by ada: the bank complains." in held.message
    reasons = database.rows("SELECT DISTINCT scheduled_reason FROM busload.command_status WHERE status = 'SCHEDULED'")
    assert reasons == [("HELD",)]


async def test_claims_find_others_behind_a_hundred_held_batches(
    bus: CommandBus, given: Given, database: Database
) -> None:
    held: list[UUID] = [await given.batch(1) for _ in range(100)]
    database.rows("SELECT cardinality(busload.hold_batches(%s, 'OPERATOR', 'ada', 'no'))", held)
    other = await given.batch(1)
    assert places(database) == {"held": 100, "queue": 1}
    assert [one.lease.batch_id for one in given.claimed(9)] == [other]
    database.rows("SELECT busload.resume_batches(%s, 'ada')", held)
    assert len(given.claimed(200)) == 100

"""A paused domain: what runs finishes, nothing new starts, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, InvalidCommandError, SyncCommandBus, TaskTracker
from tests.given import DOMAIN, Database, Given, eventually

pytestmark = pytest.mark.usefixtures("invariants")

NEVER = timedelta(hours=1)


def stuck(given: Given, command_type: str = "Wait") -> tuple[list[Command], asyncio.Event]:
    """A handler that waits until it is let go, and what it has been given so far."""
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    return given.handler(command_type, wait), go


def elsewhere(given: Given) -> list[Command]:
    """A handler of another domain: once it has run what was sent later, a worker has looked."""
    seen: list[Command] = []

    async def handle(command: Command, ctx: HandlerContext) -> None:
        seen.append(command)

    given.bus.handler("crm", "Push")(handle)
    return seen


async def has_looked(given: Given, seen: list[Command]) -> None:
    """The worker has claimed and run something that was sent now, so it could have claimed what was ready before."""
    before = len(seen)
    await given.bus.send("crm", "Push", priority=-9)
    await eventually(lambda: len(seen) > before)


async def test_nothing_of_a_paused_domain_starts_and_resuming_lets_all_of_it_run(bus: CommandBus, given: Given) -> None:
    """Told by notification alone: this worker does not look by itself."""
    seen, pushed = given.handler(), elsewhere(given)
    settings = replace(given.settings, sweep_every=NEVER)
    async with given.running(domains=[DOMAIN, "crm"], settings=settings) as worker:
        await has_looked(given, pushed)
        assert await bus.domains.pause(DOMAIN, reason="the bank is down", operator="rosa")
        await eventually(lambda: worker._run is not None and DOMAIN in worker._run._shared.pauses.paused)
        await has_looked(given, pushed)  # a claim that was under way has ended, too
        batch_id = await given.batch(50)
        await has_looked(given, pushed)
        assert (seen, (await given.batch_now(batch_id)).status) == ([], "PENDING")
        assert await bus.domains.resume(DOMAIN, operator="rosa")
        assert (await bus.wait_batch(DOMAIN, batch_id, timeout=20)).completed_count == 50


async def test_a_pause_is_known_before_the_first_claim(bus: CommandBus, given: Given, database: Database) -> None:
    given.handler()
    await given.batch(5)
    await bus.domains.pause(DOMAIN)
    async with given.worker()._running() as run:
        await run._claimer.once()  # the very first thing that it does
        assert (database.count("lease"), run.stats().claims) == (0, 0)


async def test_drain_ends_when_all_that_is_ready_is_paused(bus: CommandBus, given: Given, database: Database) -> None:
    seen, pushed = given.handler(), elsewhere(given)
    batch_id = await given.batch(5)
    await bus.send("crm", "Push")
    await bus.domains.pause(DOMAIN)
    assert await given.drained(domains=[DOMAIN, "crm"]) == 1
    assert (len(seen), len(pushed)) == (0, 1)
    assert await given.drained() == 0
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 5
    await bus.domains.resume(DOMAIN)
    assert await given.drained() == 5
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_what_becomes_due_in_a_paused_domain_waits_and_is_not_lost(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    await given.sent(run_at=(await given.batch_now(await given.batch(1))).created_at + NEVER)
    await given.drained()
    await bus.domains.pause(DOMAIN)
    given.make_due()
    assert (await given.drained(), len(seen)) == (0, 1)
    await bus.domains.resume(DOMAIN)
    assert (await given.drained(), len(seen)) == (1, 2)


async def test_a_lost_notification_is_made_up_for_by_looking(
    given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Other hands, which notify nobody, stand for a notification that was lost."""
    caplog.set_level(logging.INFO, "busload")
    seen, pushed = given.handler(), elsewhere(given)
    async with given.running(domains=[DOMAIN, "crm"]):
        await has_looked(given, pushed)
        database.rows("INSERT INTO busload.pause (domain) VALUES ('payments')")
        await eventually(lambda: "Paused: payments" in caplog.text)
        await given.batch(3)
        await has_looked(given, pushed)
        assert seen == []
        database.rows("DELETE FROM busload.pause")
        await eventually(lambda: len(seen) == 3)


async def test_what_runs_finishes_and_what_stands_in_line_goes_back(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen, go = stuck(given)
    quick = given.handler()
    commands = [*(BatchCommand("Debit") for _ in range(500)), *(BatchCommand("Wait") for _ in range(500))]
    batch_id = await bus.create_batch(DOMAIN, commands)
    patient = replace(given.settings, lease_for=NEVER, prefetch=timedelta(minutes=1))  # keeps its line by itself
    async with given.running(concurrency=5, settings=patient) as worker:
        await eventually(lambda: len(seen) == 5 and worker.stats.in_line > 0)
        await bus.domains.pause(DOMAIN)
        await eventually(lambda: database.value("SELECT coalesce(sum(open), 0) FROM busload.lease") == 5)
        assert (len(quick), len(seen), worker.stats.in_line) == (500, 5, 0)
        go.set()
        await eventually(lambda: database.count("lease") == 0)
        assert len(seen) == 5
        assert (await given.batch_now(batch_id)).completed_count == 505
        await bus.domains.resume(DOMAIN)
        assert (await bus.wait_batch(DOMAIN, batch_id, timeout=20)).completed_count == 1000
    assert len({command.command_id for command in seen}) == len(seen) == 500  # each ran once


async def test_what_a_claim_under_way_brings_after_the_pause_does_not_start(
    bus: CommandBus, given: Given, database: Database, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busload")
    seen, pushed = given.handler(), elsewhere(given)
    async with given.running(domains=[DOMAIN, "crm"]) as worker:
        await has_looked(given, pushed)
        with psycopg.connect(dsn) as conn:
            lock = "LOCK TABLE busload.lease IN SHARE ROW EXCLUSIVE MODE"
            await asyncio.to_thread(conn.execute, lock)  # no claim comes to its end now
            batch_id = await given.batch(3)
            await eventually(lambda: database.value(WAITING_CLAIMS) > 0)
            await bus.domains.pause(DOMAIN)
            await eventually(lambda: "Paused: payments" in caplog.text)
            conn.rollback()
        await eventually(lambda: worker.stats.handed_back == 3)
        await has_looked(given, pushed)
        assert seen == []
        await bus.domains.resume(DOMAIN)
        await bus.wait_batch(DOMAIN, batch_id, timeout=20)
    assert len(seen) == 3


WAITING_CLAIMS = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%wanted AS%'"""


async def test_the_commands_of_other_domains_in_the_same_line_stay_in_it(
    bus: CommandBus, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busload")
    seen, go = stuck(given)
    pushed = elsewhere(given)
    quick = given.handler()
    async with given.running(
        domains=[DOMAIN, "crm"], concurrency=2, settings=replace(given.settings, prefetch=timedelta(seconds=5))
    ) as worker:
        await given.batch(500)
        await eventually(lambda: len(quick) == 500)
        await bus.send_many(DOMAIN, [BatchCommand("Wait") for _ in range(2)])
        await eventually(lambda: len(seen) == 2)
        await bus.send_many("crm", [BatchCommand("Push") for _ in range(10)])
        await eventually(lambda: worker.stats.in_line == 10)
        before = worker.stats.handed_back
        await bus.domains.pause(DOMAIN)
        await eventually(lambda: "Paused: payments" in caplog.text)
        go.set()
        await eventually(lambda: len(pushed) == 10)
        assert worker.stats.handed_back == before


async def test_pausing_twice_and_resuming_what_is_not_paused_change_nothing(bus: CommandBus) -> None:
    assert await bus.domains.pause(DOMAIN, reason="the bank is down", operator="rosa")
    [pause] = await bus.domains.pauses()
    assert (pause.domain, pause.reason, pause.operator) == (DOMAIN, "the bank is down", "rosa")
    assert not await bus.domains.pause(DOMAIN, reason="again", operator="ada")
    assert await bus.domains.pauses() == [pause]
    assert not await bus.domains.resume("crm")
    assert await bus.domains.resume(DOMAIN, operator="ada")
    assert not await bus.domains.resume(DOMAIN)
    assert await bus.domains.pauses() == []


async def test_who_paused_and_who_resumed_is_kept(bus: CommandBus, given: Given) -> None:
    """Also when it is over, which no worker and no explanation takes for a pause"""
    given.handler()
    assert await bus.domains.history() == []
    await bus.domains.pause(DOMAIN, reason="the bank is down", operator="rosa")
    await bus.domains.resume(DOMAIN, operator="ada")
    await bus.domains.pause("crm", operator="rosa")
    await bus.domains.pause(DOMAIN, reason="again", operator="bob")
    await bus.domains.resume(DOMAIN)

    [third, second, first] = await bus.domains.history()
    assert [(p.domain, p.reason, p.operator, p.resumed_by) for p in (first, second, third)] == [
        (DOMAIN, "the bank is down", "rosa", "ada"),
        ("crm", None, "rosa", None),
        (DOMAIN, "again", "bob", None),
    ]
    assert first.resumed_at is not None and third.resumed_at is not None and second.resumed_at is None
    assert first.since <= first.resumed_at <= third.since
    assert await bus.domains.history(DOMAIN) == [third, first]
    assert await bus.domains.history(limit=1) == [third]
    assert await bus.domains.pauses() == [second]

    batch_id = await given.batch(2)
    assert "PAUSED" not in [reason.code for reason in (await bus.explain_batch(DOMAIN, batch_id)).reasons]
    assert await given.drained() == 2
    tracker = TaskTracker(bus)
    execution = await tracker.enqueue("invoice:7", queue=DOMAIN)
    assert execution is not None and execution.execution_id is not None
    assert [task.task_key for task in await tracker.recover(DOMAIN, waiting_for=timedelta(0))] == ["invoice:7"]
    claimed = await tracker.claim("invoice:7", execution.execution_id)
    assert claimed is not None
    await tracker.complete(claimed)
    await tracker.close()


async def test_one_of_many_pauses_at_once_is_kept(bus: CommandBus, database: Database) -> None:
    for _ in range(3):
        paused = await asyncio.gather(*(bus.domains.pause(DOMAIN, operator=f"o{n}") for n in range(8)))
        resumed = await asyncio.gather(*(bus.domains.resume(DOMAIN, operator=f"o{n}") for n in range(8)))
        assert (sum(paused), sum(resumed)) == (1, 1)
    assert database.count("pause") == 3


@pytest.mark.parametrize(("domain", "limit"), [("a b", 1), (None, -1), (None, "1"), (7, 1)])
async def test_a_history_of_nothing_is_refused(bus: CommandBus, domain: Any, limit: Any) -> None:
    with pytest.raises(InvalidCommandError):
        await bus.domains.history(domain, limit=limit)


async def test_a_pause_joins_a_transaction(bus: CommandBus, conn: psycopg.AsyncConnection) -> None:
    async with conn.transaction(force_rollback=True):
        assert await bus.domains.pause(DOMAIN, conn=conn)
    assert await bus.domains.pauses() == []
    async with conn.transaction():
        assert await bus.domains.pause(DOMAIN, conn=conn)
    async with conn.transaction(force_rollback=True):
        assert await bus.domains.resume(DOMAIN, conn=conn)
    assert [pause.domain for pause in await bus.domains.pauses()] == [DOMAIN]


@pytest.mark.parametrize(
    ("domain", "options", "code"),
    [
        ("", {}, "INVALID_NAME"),
        ("a b", {}, "INVALID_NAME"),
        (DOMAIN, {"operator": "ro\0sa"}, "INVALID_TEXT"),
        (DOMAIN, {"operator": ""}, "INVALID_TEXT"),
        (DOMAIN, {"reason": ""}, "INVALID_TEXT"),
        (DOMAIN, {"reason": "x" * 4097}, "TOO_LONG"),
    ],
)
async def test_bad_input_is_refused_and_nothing_is_paused(
    bus: CommandBus, database: Database, domain: str, options: dict[str, Any], code: str
) -> None:
    with pytest.raises(InvalidCommandError) as refused:
        await bus.domains.pause(domain, **options)
    assert refused.value.code == code
    assert database.count("pause") == 0


def test_the_sync_bus_pauses_too(sync_bus: SyncCommandBus) -> None:
    assert sync_bus.domains.pause(DOMAIN, reason="the bank is down", operator="rosa")
    assert not sync_bus.domains.pause(DOMAIN)
    [pause] = sync_bus.domains.pauses()
    assert (pause.operator, pause.reason) == ("rosa", "the bank is down")
    assert sync_bus.domains.resume(DOMAIN)
    assert not sync_bus.domains.resume(DOMAIN)
    assert [over.since for over in sync_bus.domains.history(DOMAIN)] == [pause.since]

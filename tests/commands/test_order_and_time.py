"""Which command runs next, and when."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone

import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, WorkerSettings
from tests.given import DOMAIN, Given, counts, eventually

pytestmark = pytest.mark.usefixtures("invariants")


async def test_priority_comes_first_then_age(bus: CommandBus, given: Given) -> None:
    """In a batch, between batches and alone; of equal priority a batch takes turns with what was sent alone"""
    seen = given.handler()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", data=n, priority=p) for n, p in enumerate((0, 5, -1, 5, 0))])
    await given.sent(data=5, priority=5)
    await given.sent(data=6, priority=32767)
    await given.sent(data=7, priority=-32768)
    await given.sent(data=8)

    await given.drained(concurrency=1)

    assert [command.data for command in seen if command.batch_id] == [1, 3, 0, 4, 2]
    assert [command.data for command in seen if command.batch_id is None] == [6, 5, 8, 7]
    assert [command.priority for command in seen] == [32767, 5, 5, 5, 0, 0, 0, -1, -32768]


async def test_what_is_urgent_overtakes_a_load_that_has_begun(given: Given) -> None:
    """A worker with one slot takes one command off a load of a thousand"""
    seen = given.handler()
    await given.batch(commands=1000)
    given.settled(given.claimed(1))
    urgent = await given.sent(data="urgent", priority=1)
    async with given.running(concurrency=1):
        await eventually(lambda: seen)
    assert seen[0].command_id == urgent


async def test_a_command_with_a_time_waits_for_it(bus: CommandBus, given: Given) -> None:
    """Alone, many and in a batch; its time is the database's"""
    seen = given.handler()
    at = datetime.now(timezone(timedelta(hours=5, minutes=30))) + timedelta(hours=1)
    alone = await given.sent(run_at=at)
    await bus.send_many(DOMAIN, [BatchCommand("Debit", run_at=at), BatchCommand("Debit", data="now")])
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", run_at=at)])

    await given.drained()

    assert [command.data for command in seen] == ["now"]
    waiting = await given.command_now(alone)
    assert (waiting.status, waiting.run_at, waiting.attempts) == ("SCHEDULED", at, 0)
    assert (await given.batch_now(batch_id)).status == "PENDING"
    given.make_due()
    await given.drained()
    assert len(seen) == 4
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_a_time_that_has_passed_means_now(bus: CommandBus, given: Given) -> None:
    """However long ago, wherever"""
    seen = given.handler()
    east = timezone(timedelta(hours=14))
    for at in (datetime.now(UTC), datetime(1, 1, 1, tzinfo=UTC), datetime(1, 1, 1, tzinfo=east)):
        command_id = await given.sent(run_at=at)
        [many] = await bus.send_many(DOMAIN, [BatchCommand("Debit", run_at=at)])
        assert (await given.command_now(command_id)).status == "PENDING"
        assert (await given.command_now(many.command_id)).status == "PENDING"
    await given.drained()
    assert len(seen) == 6


async def test_a_running_worker_starts_what_falls_due(given: Given) -> None:
    """It knows when to look again, though nobody tells it"""
    seen = given.handler()
    settings = WorkerSettings(poll_every=timedelta(hours=1), sweep_every=timedelta(hours=1))
    await given.sent(run_at=datetime.now(UTC) + timedelta(milliseconds=300))
    async with given.running(settings=settings):
        await eventually(lambda: seen)


async def test_a_worker_is_woken_by_a_command_and_drains_without_pausing(bus: CommandBus, given: Given) -> None:
    """With an hour between two looks, only notifications and free slots can explain it"""
    most = running = 0

    async def run(command: Command, ctx: HandlerContext) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    seen = given.handler("Debit", run)
    settings = WorkerSettings(poll_every=timedelta(hours=1), sweep_every=timedelta(hours=1))
    first = await given.batch(commands=1)
    async with given.running(settings=settings, concurrency=5):
        await bus.wait_batch(DOMAIN, first, timeout=25)
        second = await given.batch(commands=300)
        done = await bus.wait_batch(DOMAIN, second, timeout=25)
    assert counts(done) == (300, 300, 0, 0, 0)
    assert len(seen) == 301
    assert most <= 5


async def test_a_worker_serves_its_domains_only(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    await given.sent()
    await bus.send("crm", "Debit")
    await given.drained()
    assert [command.domain for command in seen] == [DOMAIN]
    assert given.database.rows("SELECT domain FROM busload.queue") == [("crm",)]


async def test_a_worker_with_nothing_to_do_returns(given: Given) -> None:
    """An empty queue is an empty list"""
    given.handler()
    assert await given.drained() == 0
    assert given.claimed(5) == []

"""Every way in is counted and told of: which calls, per day and domain, with and without a broker, in both faces."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from busload import BatchCommand, CommandBus, Dedup, Settings, Stage, WorkerSettings
from busload.commands import claim
from tests.brokers.faulty import AWAY, FaultyTransport
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, Database, Given

pytestmark = pytest.mark.usefixtures("invariants")

STRATEGIES = ("two_phase", "checkpoint", "optimistic", "relay")
BY_WAY = "SELECT domain, way, strategy, batches, published, commands FROM busload.created_daily"
BY_WAY += " WHERE way <> 'busload' ORDER BY 1, 2, 3"
DAILY = "SELECT day, batches, published, rounds, commands FROM busload.dispatch_daily ORDER BY day"
HOUR = "SELECT domain, job_id, pending, queued, processing, completed, failed FROM busload.dispatch_recent"
AT_ONCE = timedelta(microseconds=1)


@pytest.fixture
def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture(params=[(face, broker) for face in FACES for broker in ("no broker", "broker")], ids=" ".join)
async def bus(
    dsn: str, settings: Settings, transport: FaultyTransport, request: pytest.FixtureRequest
) -> AsyncIterator[CommandBus]:
    face, broker = request.param
    options: dict[str, Any] = {} if broker == "no broker" else {"transport": transport}
    async with bus_of(face, dsn, settings=settings, **options) as bus:
        yield bus


@pytest.fixture(params=FACES)
async def published(
    dsn: str, settings: Settings, transport: FaultyTransport, request: pytest.FixtureRequest
) -> AsyncIterator[CommandBus]:
    """A bus with a broker."""
    async with bus_of(request.param, dsn, settings=settings, transport=transport) as bus:
        yield bus


def debits(count: int) -> list[BatchCommand]:
    return [BatchCommand("Debit") for _ in range(count)]


async def fill(bus: CommandBus, count: int, **options: Any) -> None:
    """An open batch, by the face that the bus has."""
    batch: Any = bus.open_batch(DOMAIN, checkpoint_size=2, **options)
    if hasattr(batch, "__aenter__"):
        async with batch:
            for _ in range(count):
                await batch.add("Debit")
    else:
        with batch:
            for _ in range(count):
                batch.add("Debit")


async def send_by_every_way(bus: CommandBus) -> int:
    """Returns how many commands that were."""
    await bus.send(DOMAIN, "Debit")
    await bus.send_many(DOMAIN, debits(2))
    await bus.send_many("crm", debits(4))
    await bus.create_batch(DOMAIN, debits(3), job_id="import-7")
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", task_key=key) for key in "aab"], dedup=Dedup())
    await fill(bus, 5, job_id="import-7")
    await bus.jobs.create(DOMAIN, [Stage("one", debits(2)), Stage("two", debits(9))])
    return 1 + 2 + 4 + 3 + 2 + 5 + 2


async def test_every_way_in_is_counted_per_day_and_domain(bus: CommandBus, database: Database) -> None:
    total = await send_by_every_way(bus)
    if bus.transport is not None:
        await bus.recover()
    broker = bus.transport is not None
    two_phase = [(DOMAIN, "create_batch", "two_phase", 1, 1, 3)]
    expected = [
        ("crm", "send", None, 0, 0, 4),
        *([(DOMAIN, "create_batch", "relay", 1, 1, 2)] if broker else [(DOMAIN, "create_batch", None, 2, 2, 5)]),
        *(two_phase if broker else []),
        (DOMAIN, "job", "relay" if broker else None, 1, 1, 2),
        (DOMAIN, "open_batch", "relay" if broker else None, 1, 1, 5),
        (DOMAIN, "send", None, 0, 0, 3),
    ]
    assert database.rows(BY_WAY) == expected
    [(_, batches, published, rounds, commands)] = database.rows(DAILY)
    assert (batches, published, rounds, commands) == (4, 4, 1.0 if broker else None, total)


async def test_every_strategy_is_counted(published: CommandBus, database: Database) -> None:
    for strategy in STRATEGIES:
        await published.create_batch(DOMAIN, debits(3), dispatch=strategy)  # type: ignore[arg-type]
    await published.recover()
    counted = [(DOMAIN, "create_batch", strategy, 1, 1, 3) for strategy in sorted(STRATEGIES)]
    assert database.rows(BY_WAY) == counted


async def test_a_day_stays_as_it_was_when_it_is_pruned(
    bus: CommandBus, database: Database, worker_settings: WorkerSettings
) -> None:
    """Also with its commands ended, in part and twice; and what comes on the same day afterwards is added."""
    await send_by_every_way(bus)
    if bus.transport is not None:
        await bus.recover()
    before, by_way = database.rows(DAILY), database.rows(BY_WAY)
    given = Given(bus, database, worker_settings)
    given.settled(given.claimed(7))
    assert (database.rows(DAILY), database.rows(BY_WAY)) == (before, by_way)
    for archive in (False, True):
        await bus.prune(AT_ONCE, archive=archive)
        assert (database.rows(DAILY), database.rows(BY_WAY)) == (before, by_way)
        given.settled(given.claimed(100))
        given.settled(
            database.perform(claim.claim(worker=given.registered_worker(), domains=["crm"], limit=100)).leased
        )
    database.rows("UPDATE busload.job SET status = 'COMPLETED', completed_at = now()")
    database.rows("UPDATE busload.task SET held_until = now() - interval '1 second'")
    while (await bus.prune(AT_ONCE)).commands:
        pass
    assert [database.count(table) for table in ("command", "batch", "dispatch")] == [0, 0, 0]
    assert (database.rows(DAILY), database.rows(BY_WAY)) == (before, by_way)
    assert database.rows("SELECT commands FROM busload.created_daily WHERE way = 'busload'") == [(1,)]
    counted = before[0][-1]
    await bus.create_batch(DOMAIN, debits(6))
    if bus.transport is not None:
        await bus.recover()
    [(_, batches, published, _, commands)] = database.rows(DAILY)
    assert (batches, published, commands) == (5, 5, counted + 6)


async def test_the_rate_of_a_day_does_not_fall_when_commands_are_published_again(
    published: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    """A batch that was published as a whole was; also if the broker refuses later what is tried again."""
    await published.create_batch(DOMAIN, debits(3))
    await fill(published, 2)
    await published.recover()
    [before] = database.rows(DAILY)
    assert before[1:4] == (2, 2, 1.0)
    database.rows(
        "WITH again AS (DELETE FROM busload.queue RETURNING lo, hi, domain, batch_id, attempt)"
        " INSERT INTO busload.outbox (lo, hi, domain, batch_id, attempt, transport)"
        " SELECT lo, hi, domain, batch_id, attempt + 1, 'postgresql' FROM again"
    )
    transport.refuse(AWAY)
    await published.recover()
    assert database.value("SELECT count(*) FROM busload.dispatch WHERE published_at IS NULL") == 2
    assert database.rows(DAILY) == [before]
    transport.mend()
    await published.recover()
    assert database.rows(DAILY) == [before]


async def test_what_was_not_published_is_counted_as_not_published(
    published: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    """Until it is; an open batch is no success before it is sealed."""
    transport.refuse(AWAY)
    await published.create_batch(DOMAIN, debits(3))
    await fill(published, 2)
    await published.recover()
    [(_, batches, done, _, _)] = database.rows(DAILY)
    assert (batches, done) == (2, 0)
    assert database.rows("SELECT job_id, commands FROM busload.dispatch_retry") == [(None, 5)]
    transport.mend()
    await published.recover()
    [(_, batches, done, rounds, _)] = database.rows(DAILY)
    assert (batches, done, rounds) == (2, 2, 2.5)


async def test_the_last_hour_tells_of_every_way_in(
    bus: CommandBus, database: Database, worker_settings: WorkerSettings
) -> None:
    """Per job, and all that has no job together: where the commands are now."""
    await bus.create_batch(DOMAIN, debits(3), job_id="import-7")
    await fill(bus, 2, job_id="import-7")
    await bus.send_many(DOMAIN, debits(4))
    old = (await bus.send(DOMAIN, "Debit")).command_id
    if bus.transport is not None:
        await bus.recover()
    database.rows("UPDATE busload.command SET created_at = now() - interval '2 hours' WHERE command_id = %s", old)
    given = Given(bus, database, worker_settings)
    given.settled(given.claimed(6))
    given.claimed(2)
    counted = {row[1]: row[2:] for row in database.rows(HOUR)}
    expected = database.rows(
        "SELECT job_id, count(*) FILTER (WHERE s.status IN ('PENDING_QUEUE', 'PENDING_RETRY')),"
        " count(*) FILTER (WHERE s.status IN ('PENDING', 'SCHEDULED')),"
        " count(*) FILTER (WHERE s.status = 'IN_PROGRESS'), count(*) FILTER (WHERE s.status = 'COMPLETED'), 0"
        " FROM busload.command_status AS s LEFT JOIN busload.batch USING (batch_id)"
        " WHERE s.command_id <> %s GROUP BY job_id",
        old,
    )
    assert counted == {row[0]: row[1:] for row in expected}
    assert set(counted) == {None, "import-7"}
    assert (sum(counted["import-7"]), sum(counted[None])) == (5, 4)


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    return [json.loads(line) for line in lines if line.startswith('{"event":"BatchTaskCreation"')]


async def test_every_batch_that_is_created_is_told_of(
    bus: CommandBus, database: Database, worker_settings: WorkerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of JSON for each, whichever call created it."""
    with caplog.at_level(logging.INFO, "busload"):
        await send_by_every_way(bus)
    events = told(caplog)
    broker = bus.transport is not None
    assert [(event["way"], event["TaskCount"], event["job_id"]) for event in events[:3]] == [
        ("create_batch", 3, "import-7"),
        ("create_batch", 2, None),
        ("open_batch", 5, "import-7"),
    ]
    [job] = events[3:]
    assert (job["way"], job["TaskCount"], job["stage"]) == ("job", 2, "one")
    strategies = ["two_phase", "relay", "relay", "relay"] if broker else [None] * 4
    assert [event["strategy"] for event in events] == strategies
    for event in events:
        assert event["ElapsedMs"] == event["total_ms"] >= event["insert_ms"] > 0
        assert (event["batch_size"], event["retry_needed"]) == (event["TaskCount"], False)
        assert {"send_ms", "mark_ms", "status", "batch_id", "domain"} <= event.keys()


async def test_the_later_stages_of_a_job_are_told_of_too(
    dsn: str, database: Database, worker_settings: WorkerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with CommandBus(dsn) as bus:
        given = Given(bus, database, worker_settings)
        given.handler()
        with caplog.at_level(logging.INFO, "busload"):
            await bus.jobs.create(DOMAIN, [Stage("one", debits(2)), Stage("two", debits(3))])
            await given.drained()
    assert [(event["stage"], event["TaskCount"]) for event in told(caplog)] == [("one", 2), ("two", 3)]
    assert ("job", 2, 2, 5) in database.rows("SELECT way, batches, published, commands FROM busload.created_daily")


async def test_a_batch_that_was_filled_bit_by_bit_has_a_report_once_it_is_sealed(
    published: CommandBus, database: Database
) -> None:
    key = uuid4()
    await fill(published, 3, batch_id=key)
    report = await published.get_dispatch(DOMAIN, key)
    assert report is not None
    assert (report.strategy, report.status, report.total_tasks, report.queued_tasks) == ("relay", "pending", 3, 0)
    await published.recover()
    report = await published.get_dispatch(DOMAIN, key)
    assert report is not None
    assert (report.status, report.queued_tasks, report.retry_needed) == ("success", 3, False)

"""The worked examples of buffer tables: claim a batch of contact activity events, hand it to a bulk job, distribute."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest

from busload import CommandBus, Group, HandlerContext, RetryPolicy
from busload.buffers import Buffer, BufferTable
from busload.buffers.event_table import all_ddl
from tests.given import Database, Given, eventually

BATCH_SIZE, MAX_BATCHES = 100, 3


@pytest.fixture
def contact_activities(database: Database) -> None:
    """The application's tables: an event references its activity, and knows the group that it is in."""
    database.rows("CREATE TABLE contact_activities (id bigint PRIMARY KEY, comment text NOT NULL)")
    database.rows(
        "CREATE TABLE contact_activity_events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
        " contact_activity_id bigint NOT NULL REFERENCES contact_activities, group_id uuid,"
        " created_at timestamptz NOT NULL DEFAULT clock_timestamp())"
    )
    for statement in all_ddl(BufferTable("contact_activity_events"))[3:]:  # it has the columns already
        database.rows(statement)


def recorded(database: Database, count: int) -> None:
    database.rows("INSERT INTO contact_activities SELECT n, 'called' FROM generate_series(1, %s) AS n", count)
    database.rows("INSERT INTO contact_activity_events (contact_activity_id) SELECT id FROM contact_activities")


def buffer(bus: CommandBus) -> Buffer:
    return bus.buffer(
        "contact_activity_events",
        size=BATCH_SIZE,
        max_age=timedelta(0),
        max_groups=MAX_BATCHES,
        table=BufferTable("contact_activity_events"),
    )


@pytest.mark.usefixtures("contact_activities")
async def test_claimed_events_go_to_a_bulk_job_and_are_deleted_as_a_group(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Each event is in one call, no call has more than a batch, and nothing stays in the table."""
    recorded(database, 450)
    calls: list[list[int]] = []

    @buffer(bus).handler()
    async def sync_with_marketing(group: Group, ctx: HandlerContext) -> None:
        calls.append([item.data["contact_activity_id"] for item in group])

    await given.drained(domains=None)
    assert sorted(id for call in calls for id in call) == list(range(1, 451))
    assert max(map(len, calls)) == BATCH_SIZE
    assert database.value("SELECT count(*) FROM contact_activity_events") == 0


@pytest.mark.usefixtures("contact_activities")
async def test_the_claim_job_of_the_document_hands_each_slice_to_one_events_job(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """It claims a batch at a time until nothing is left; then nobody is called."""
    recorded(database, 250)
    events, claimed, jobs = buffer(bus), list[UUID](), list[tuple[UUID, int]]()

    async def claim_contact_activity_events_job() -> int:
        return len(await events.claim(claimed.append, limit=BATCH_SIZE))

    @events.handler()
    async def contact_activity_events_job(group: Group, ctx: HandlerContext) -> None:
        in_table = "SELECT count(*) FROM contact_activity_events WHERE group_id = %s"
        jobs.append((group.group_id, database.value(in_table, group.group_id)))

    assert [await claim_contact_activity_events_job() for _ in range(4)] == [100, 100, 50, 0]
    assert len(claimed) == len(set(claimed)) == 3
    groups = "SELECT group_id, count(*) FROM contact_activity_events GROUP BY group_id"
    assert dict(database.rows(groups)) == dict(zip(claimed, (100, 100, 50), strict=True))
    await given.drained(domains=None)
    assert dict(jobs) == dict(zip(claimed, (100, 100, 50), strict=True)) and len(jobs) == 3
    assert database.value("SELECT count(*) FROM contact_activity_events") == 0


@pytest.mark.usefixtures("contact_activities")
async def test_no_more_batches_are_distributed_at_a_time_than_allowed(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A spike waits in the table, not in the queue."""
    recorded(database, 1000)
    go = asyncio.Event()

    @buffer(bus).handler()
    async def sync_with_marketing(group: Group, ctx: HandlerContext) -> None:
        await go.wait()

    claimed = "SELECT count(DISTINCT group_id) FROM contact_activity_events WHERE group_id IS NOT NULL"
    settings = replace(given.settings, prefetch=timedelta(0))
    async with given.running(domains=None, concurrency=1, settings=settings) as worker:
        await eventually(lambda: worker.stats.in_hand == 1 and database.count("queue") == MAX_BATCHES)
        assert database.value(claimed) == 1 + MAX_BATCHES, "one runs, and no more wait than allowed"
        go.set()
        await eventually(lambda: database.value("SELECT count(*) FROM contact_activity_events") == 0)


@pytest.mark.usefixtures("contact_activities")
async def test_a_job_that_fails_for_some_events_is_retried_with_the_rest(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Three retries, the same group, and only what failed."""
    recorded(database, 10)
    calls: list[tuple[object, list[int]]] = []

    @buffer(bus).handler(retry=RetryPolicy(max_attempts=4, backoff=(0,)))
    async def sync_with_marketing(group: Group, ctx: HandlerContext) -> None:
        calls.append((group.group_id, sorted(item.data["contact_activity_id"] for item in group)))
        for item in group:
            if item.data["contact_activity_id"] % 5 == 0 and len(calls) < 3:
                group.fail(item, TimeoutError("try again"))
            else:
                group.succeed(item)

    for _ in range(3):  # a retry is due at once, for the next worker
        await given.drained(domains=None)
    assert database.value("SELECT count(*) FROM contact_activity_events") == 0
    assert [ids for _, ids in calls] == [list(range(1, 11)), [5, 10], [5, 10]]
    assert len({group_id for group_id, _ in calls}) == 1

"""The worked examples of coordinating a database with a broker: 10,000 tasks of one stage, by three patterns."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from busload import BatchCommand, CommandBus, Settings
from busload.dispatch import DispatchReport
from busload.errors import DispatchIncompleteError, Refusal, RefusalReason
from tests.brokers.faulty import AWAY, FaultyTransport
from tests.given import Database

TASKS = 10_000
JOB, STAGE = "reproject-2025-09-25", 2
THROTTLED = Refusal(RefusalReason.REFUSED, "the broker throttles")


@pytest.fixture
def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture
async def bus(dsn: str, settings: Settings, transport: FaultyTransport) -> AsyncIterator[CommandBus]:
    async with CommandBus(dsn, transport=transport, settings=settings) as bus:
        yield bus


def task_definitions(count: int = TASKS) -> list[BatchCommand]:
    return [BatchCommand("ProcessTile", data={"tile": n}) for n in range(count)]


async def told(bus: CommandBus) -> DispatchReport:
    [batch] = await bus.list_batches("tiles")
    report = await bus.get_dispatch("tiles", batch.batch_id)
    assert report is not None
    return report


async def test_two_phases_put_all_tasks_into_the_database_and_to_the_broker(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    """Not queued before the broker has them. If the broker fails, nothing does: the tasks are marked for retry."""
    seen: list[object] = []

    async def look() -> None:
        seen.append(database.rows("SELECT DISTINCT status FROM busload.command_status"))

    transport.before = look
    await bus.create_batch("tiles", task_definitions(), job_id=JOB, stage=STAGE, dispatch="two_phase")
    result = await told(bus)
    assert seen[0] == [("PENDING_QUEUE",)]
    assert (result.status, result.database_tasks, result.queued_tasks) == ("success", TASKS, TASKS)
    assert (result.retry_needed, result.job_id, result.stage) == (False, JOB, STAGE)


async def test_two_phases_with_a_broker_that_fails_are_a_partial_success(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    transport.refuse(AWAY)
    await bus.create_batch("tiles", task_definitions(), job_id=JOB, stage=STAGE, dispatch="two_phase")
    result = await told(bus)
    assert (result.status, result.database_tasks, result.queued_tasks) == ("partial_success", TASKS, 0)
    assert result.retry_needed and result.error
    transport.mend()
    database.rows("UPDATE busload.outbox SET due_at = now()")
    await bus.recover()
    assert ((await told(bus)).queued_tasks, database.count("outbox")) == (TASKS, 0)


async def test_checkpoints_commit_one_by_one_and_the_first_failure_stops(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    """Those before it stay committed, and the same call goes on from there."""
    transport.refuses = lambda index, message: AWAY if len(transport.confirmed) + index >= 30 else None
    definitions = task_definitions()
    options = {"job_id": JOB, "stage": STAGE, "dispatch": "checkpoint"}
    with pytest.raises(DispatchIncompleteError) as stopped:
        await bus.create_batch("tiles", definitions, **options)  # type: ignore[arg-type]
    result = stopped.value.report
    assert (result.status, result.recovery_possible) == ("partial_success", True)
    assert result.checkpoints == tuple(f"{JOB}-cp-{n}" for n in (1, 2, 3))
    assert result.failed_checkpoint == f"{JOB}-cp-4"
    assert (result.tasks_committed, result.tasks_failed) == (4000, 6000)
    transport.mend()
    await bus.create_batch("tiles", definitions, batch_id=stopped.value.batch_id, **options)  # type: ignore[arg-type]
    assert database.count("command") == TASKS


async def test_the_optimistic_pattern_takes_back_only_what_the_broker_refused(
    bus: CommandBus, transport: FaultyTransport, database: Database
) -> None:
    transport.refuse(THROTTLED, 3, 7)
    await bus.create_batch("tiles", task_definitions(1000), job_id=JOB, stage=STAGE, dispatch="optimistic")
    result = await told(bus)
    assert (result.status, result.total_tasks) == ("partial_success", 1000)
    assert (result.queued_tasks, result.retry_tasks) == (800, 200)
    assert database.value("SELECT count(*) FROM busload.command_status WHERE status = 'PENDING_RETRY'") == 200

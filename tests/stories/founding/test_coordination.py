"""The worked examples of coordinating a database with a broker: 10,000 tasks of one stage, by three patterns.

And the three queries of its dashboard, word by word, on a view of our tables that has the columns of the document.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from busload import BatchCommand, CommandBus, Settings, WorkerSettings
from busload.commands.execution import FAILED
from busload.dispatch import DispatchReport
from busload.errors import DispatchIncompleteError, Refusal, RefusalReason
from tests.brokers.faulty import AWAY, FaultyTransport
from tests.given import DOMAIN, Database, Given

TASKS = 10_000
JOB, STAGE = "reproject-2025-09-25", 2
VIEW = """
    CREATE VIEW tasks AS
    SELECT c.command_id AS task_id, b.job_id AS parent_job_id, c.command_type AS task_type, c.data AS parameters,
           c.batch_id, c.publish_attempts AS queue_attempt_count, c.last_publish_error AS last_queue_error,
           c.published_at AS queued_at, c.created_at,
           CASE c.status WHEN 'PENDING' THEN 'queued' WHEN 'IN_PROGRESS' THEN 'processing' ELSE lower(c.status) END
               AS batch_status
      FROM busload.command_status AS c LEFT JOIN busload.batch AS b USING (batch_id)
"""
NEEDING_RETRY = """
    SELECT
        parent_job_id,
        COUNT(*) as pending_tasks,
        MIN(created_at) as oldest_task,
        MAX(queue_attempt_count) as max_attempts
    FROM tasks
    WHERE batch_status = 'pending_retry'
    GROUP BY parent_job_id;
"""
SUCCESS_RATE = """
    SELECT
        DATE(created_at) as date,
        COUNT(DISTINCT batch_id) as total_batches,
        COUNT(DISTINCT batch_id) FILTER (WHERE batch_status = 'queued') as successful_batches,
        AVG(queue_attempt_count) as avg_attempts
    FROM tasks
    WHERE batch_id IS NOT NULL
    GROUP BY DATE(created_at);
"""
QUEUE_LAG = """
    SELECT
        parent_job_id,
        COUNT(*) FILTER (WHERE batch_status = 'pending_queue') as pending,
        COUNT(*) FILTER (WHERE batch_status = 'queued') as queued,
        COUNT(*) FILTER (WHERE batch_status = 'processing') as processing,
        COUNT(*) FILTER (WHERE batch_status = 'completed') as completed
    FROM tasks
    WHERE created_at > NOW() - INTERVAL '1 hour'
    GROUP BY parent_job_id;
"""
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


async def test_a_task_goes_through_the_statuses_of_the_document(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """New, not queued, to be retried, queued, processing; then one task is completed and the other failed."""
    given = Given(bus, database, worker_settings)
    database.rows(VIEW)
    statuses = "SELECT batch_status FROM tasks ORDER BY batch_status"
    seen: list[object] = []

    async def look() -> None:
        seen.append(database.rows(statuses))

    transport.before = look
    transport.refuse(AWAY)
    await bus.create_batch(DOMAIN, task_definitions(2), dispatch="two_phase")
    assert seen == [[("pending_queue",)] * 2]
    transport.before = None
    assert database.rows(statuses) == [("pending_retry",)] * 2
    transport.mend()
    database.rows("UPDATE busload.outbox SET due_at = now()")
    await bus.recover()
    assert database.rows(statuses) == [("queued",)] * 2
    first, second = given.claimed(2)
    assert database.rows(statuses) == [("processing",)] * 2
    given.settled([first])
    given.settled([second], FAILED)
    assert database.rows(statuses) == [("completed",), ("failed",)]
    times = database.rows("SELECT queue_attempt_count, last_queue_error, queued_at > created_at FROM tasks")
    assert times == [(2, "nobody answers", True)] * 2


async def test_the_three_queries_of_the_dashboard_run_as_they_stand(
    bus: CommandBus, transport: FaultyTransport, database: Database, worker_settings: WorkerSettings
) -> None:
    """Our own views tell the same, and go on to do so when a day's tasks have ended."""
    given = Given(bus, database, worker_settings)
    database.rows(VIEW)
    await bus.create_batch(DOMAIN, task_definitions(5), job_id="import-7")
    given.settled(given.claimed(2)[:1])
    transport.refuse(AWAY)
    before = datetime.now(UTC)
    await bus.create_batch(DOMAIN, task_definitions(4), job_id="import-8")
    database.rows("UPDATE busload.outbox SET due_at = now()")
    await bus.recover()
    await bus.create_batch(DOMAIN, task_definitions(2), job_id="import-7", dispatch="relay")

    [(job_id, pending, oldest, attempts)] = database.rows(NEEDING_RETRY)
    assert (job_id, pending, attempts) == ("import-8", 4, 2) and before <= oldest <= datetime.now(UTC)
    assert database.rows("SELECT job_id, commands, most_rounds FROM busload.dispatch_retry") == [("import-8", 4, 2)]
    [(day, batches, successful, average)] = database.rows(SUCCESS_RATE)
    assert (batches, successful) == (3, 1)
    assert float(average) == pytest.approx((5 * 1 + 4 * 2 + 2 * 0) / 11)
    assert database.rows("SELECT day, batches, published FROM busload.dispatch_daily") == [(day, 3, 1)]
    assert sorted(database.rows(QUEUE_LAG)) == [("import-7", 2, 3, 1, 1), ("import-8", 0, 0, 0, 0)]
    ours = "SELECT job_id, pending, queued, processing, completed FROM busload.dispatch_recent ORDER BY job_id"
    assert database.rows(ours) == [("import-7", 2, 3, 1, 1), ("import-8", 4, 0, 0, 0)]

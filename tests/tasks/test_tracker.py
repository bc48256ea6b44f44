"""Work that another queue runs: two keys, from enqueue to the end of the chain."""

from __future__ import annotations

import asyncio
import inspect
import logging
import multiprocessing
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BusinessRuleError,
    CommandBus,
    Dedup,
    Execution,
    InvalidCommandError,
    PermanentCommandError,
    SyncCommandBus,
    SyncTaskTracker,
    TaskTracker,
    task_key,
)
from busload.commands import ExecutionStatus, rescue
from busload.commands import claim as claims
from busload.errors import DuplicateTaskError, InvalidOperationError, SupersededError
from busload.explain import Blocker
from busload.sync.connection import connect
from busload.testing import TestServer
from tests.given import Database, Given

pytestmark = pytest.mark.usefixtures("invariants")

QUEUE = "partner_tasks"
TASK = "partner_tasks:SATLOC:695d:02220710"
NO_TIME = timedelta(0)


@pytest.fixture
async def tracker(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    async with TaskTracker(bus) as tracker:
        yield tracker


@pytest.fixture
async def other(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    """The same application in another process."""
    async with TaskTracker(bus, name="other") as tracker:
        yield tracker


async def enqueued(tracker: TaskTracker, task_id: str = TASK, **options: Any) -> Execution:
    execution = await tracker.enqueue(task_id, **{"queue": QUEUE, **options})
    assert execution is not None
    return execution


async def claimed(tracker: TaskTracker, task_id: str = TASK, **options: Any) -> Execution:
    queued = await enqueued(tracker, task_id, **options)
    return await claim(tracker, queued)


async def claim(tracker: TaskTracker, message: Execution) -> Execution:
    assert message.task_key is not None and message.execution_id is not None
    execution = await tracker.claim(message.task_key, message.execution_id)
    assert execution is not None
    return execution


async def in_dlq(tracker: TaskTracker) -> Execution:
    dead = await tracker.fail(await claimed(tracker), PermanentCommandError("no such aircraft"))
    assert dead.status is ExecutionStatus.DLQ
    return dead


async def statuses(tracker: TaskTracker) -> list[str]:
    return [str(execution.status) for execution in await tracker.history(TASK)]


def worker_of(execution: Execution, database: Database) -> int:
    return int(database.value("SELECT worker FROM busload.lease WHERE lease_id = %s", execution.execution_id))


# -- identity ---------------------------------------------------------------------------------------------------


def test_a_task_id_is_made_of_the_queue_and_the_parts(tracker: TaskTracker) -> None:
    assert tracker.task_id("dev_partner_tasks", "SATLOC", "695d", "02220710") == TASK
    assert tracker.task_id("partner_tasks", "SATLOC", "695d", "02220710") == TASK
    assert tracker.task_id("prod_jobs", 7, UUID(int=1)) == f"jobs:7:{UUID(int=1)}"
    assert tracker.task_id("jobs", "a:b", "c") != tracker.task_id("jobs", "a", "b:c")
    assert tracker.task_id("jobs", "a:b", "c") == task_key("jobs", "a:b", "c")


def test_the_prefixes_of_environments_can_be_chosen(bus: CommandBus) -> None:
    tracker = TaskTracker(bus, prefixes=["qa-", "qa-eu-"])
    assert tracker.task_id("qa-eu-jobs", 1) == tracker.task_id("qa-jobs", 1) == "jobs:1"
    assert tracker.task_id("dev_jobs", 1) == "dev_jobs:1"


async def test_a_queue_keeps_the_name_that_it_was_given(tracker: TaskTracker, bus: CommandBus) -> None:
    """The prefix of an environment is part of the name, and in the task id there is none."""
    name = f"dev_{QUEUE}"
    queued = await enqueued(tracker, tracker.task_id(name, "SATLOC", "695d", "02220710"), queue=name)
    assert (queued.queue, queued.task_key) == (name, TASK)
    existing = await enqueued(tracker, queue=name, dedup=Dedup(on_conflict="return_existing"))
    running = await claim(tracker, queued)
    dead = await tracker.fail(running, PermanentCommandError("no such aircraft"))
    [item] = await bus.troubleshooting.list(name)
    retried = await tracker.retry(TASK)
    assert item.domain == name
    assert {one.queue for one in (existing, running, dead, retried)} == {name}
    assert [one.queue for one in await tracker.history(TASK)] == [name, name]
    [named] = await tracker.recover(name, waiting_for=NO_TIME)
    assert (named.queue, named.execution_id) == (name, retried.execution_id)
    assert await bus.get_command(name, queued.command_id) is not None


async def test_a_queue_without_a_prefix_is_recovered_in_every_environment(tracker: TaskTracker) -> None:
    """With a prefix, only that environment is: what another one runs is not published here."""
    for queue in (QUEUE, f"dev_{QUEUE}", f"prod_{QUEUE}", "dev_jobs"):
        await enqueued(tracker, f"{queue}:1", queue=queue)
    [found] = await tracker.recover(f"dev_{QUEUE}", waiting_for=NO_TIME, dry_run=True)
    assert found.queue == f"dev_{QUEUE}"
    everywhere = await tracker.recover(QUEUE, waiting_for=NO_TIME, dry_run=True)
    assert {one.queue for one in everywhere} == {QUEUE, f"dev_{QUEUE}", f"prod_{QUEUE}"}


async def test_one_tracker_serves_every_kind_of_queue(tracker: TaskTracker, database: Database) -> None:
    for queue in ("partner_tasks", "jobs", "notifications"):
        execution = await claimed(tracker, tracker.task_id(queue, 1), queue=queue)
        assert (execution.queue, execution.status) == (queue, "processing")
        await tracker.complete(execution)
    [domains] = database.rows("SELECT domains FROM busload.worker")
    assert domains == (["partner_tasks", "jobs", "notifications"],)


async def test_every_execution_has_an_id_of_its_own(tracker: TaskTracker) -> None:
    """A UUID of version 4."""
    ids = [(await enqueued(tracker, f"jobs:{n}", queue="jobs")).execution_id for n in range(50)]
    assert len(set(ids)) == 50
    assert {id.version for id in ids if id} == {4}


async def test_what_enqueue_announces_is_what_claim_gives(tracker: TaskTracker) -> None:
    """The task id is all that ties them together; there is no third key."""
    queued = await enqueued(tracker)
    running = await claim(tracker, queued)
    assert running.execution_id == queued.execution_id
    assert running.task_key == queued.task_key == TASK


async def test_an_execution_tells_all_there_is(tracker: TaskTracker, bus: CommandBus) -> None:
    """Also through the bus, since a task is a command like any other."""
    metadata = {"partner": "SATLOC", "aircraft": "695d", "log": 2220710, "customer": None}
    queued = await enqueued(tracker, metadata=metadata)
    assert (queued.status, queued.attempt, queued.queue, queued.metadata) == ("queued", 1, QUEUE, metadata)
    assert (queued.task_key, queued.retry_count, queued.started_at, queued.finished_at) == (TASK, 0, None, None)
    running = await claim(tracker, queued)
    assert running.status == "processing" and running.started_at is not None and running.worker is not None
    assert running.enqueued_at == queued.enqueued_at
    done = await tracker.complete(running, {"lines": 3})
    assert done.status == "completed" and done.finished_at is not None and done.error is None
    assert await tracker.history(TASK) == [done]
    command = await bus.get_command(QUEUE, queued.command_id)
    assert command is not None
    assert (command.status, command.result, command.data) == ("COMPLETED", {"lines": 3}, metadata)
    trail = await bus.get_audit_trail(QUEUE, queued.command_id)
    assert [event.type for event in trail] == ["SENT", "RECEIVED", "COMPLETED"]
    assert {event.execution_id for event in trail[1:]} == {done.execution_id}


async def test_each_attempt_has_its_own_time_and_its_count_of_retries(
    tracker: TaskTracker, other: TaskTracker, given: Given, database: Database
) -> None:
    """An attempt is created when the one before it ends, and an operator's retry begins to count anew."""
    seen = [queued := await enqueued(tracker)]
    seen.append(running := await claim(tracker, queued))
    given.died(worker_of(running, database))
    given.rescued()
    seen.append(again := await claim(other, queued))
    seen.append(await other.fail(again, "timeout"))
    seen.append(second := await claim(tracker, queued))
    seen.append(await tracker.fail(second, PermanentCommandError("no such aircraft")))
    seen.append(retried := await tracker.retry(TASK))
    seen.append(last := await claim(tracker, retried))
    seen.append(await tracker.complete(last))
    lost, failed, dead, done = history = await tracker.history(TASK)
    assert [str(one.status) for one in history] == ["lost", "failed", "dlq", "completed"]
    assert [one.retry_count for one in history] == [0, 0, 1, 0]
    assert [one.attempt for one in history] == [1, 1, 2, 3]
    lost_at = database.value("SELECT at FROM busload.event WHERE type = 'LEASE_LOST'")
    retried_at = database.value("SELECT at FROM busload.event WHERE type = 'OPERATOR_RETRIED'")
    assert lost.enqueued_at == queued.enqueued_at
    assert [one.enqueued_at for one in history[1:]] == [lost_at, failed.finished_at, retried_at]
    by_attempt = {(one.attempt, one.worker == lost.worker): one for one in history}
    for one in seen:  # each call told the same about an attempt as its history does
        of = by_attempt[one.attempt, one.worker in (None, lost.worker)]
        assert (one.enqueued_at, one.retry_count) == (of.enqueued_at, of.retry_count)
    assert dead.enqueued_at == second.enqueued_at == failed.finished_at
    assert done.enqueued_at == retried.enqueued_at == retried_at
    assert all(one.enqueued_at <= one.started_at for one in history if one.started_at)


async def test_an_execution_that_is_named_again_has_its_own_time(tracker: TaskTracker, database: Database) -> None:
    """Also one that a dead worker holds."""
    failed = await tracker.fail(await claimed(tracker), "timeout")
    [waiting] = await tracker.recover(QUEUE, waiting_for=NO_TIME)
    assert (waiting.enqueued_at, waiting.retry_count, waiting.can_retry) == (failed.finished_at, 1, True)
    running = await claim(tracker, waiting)
    database.rows("UPDATE busload.worker SET seen_at = now() - 2 * lease_for")
    [lost] = await tracker.recover(QUEUE, waiting_for=NO_TIME, dry_run=True)
    assert (lost.status, lost.enqueued_at, lost.retry_count) == ("lost", running.enqueued_at, 1)


async def test_whether_a_failure_is_retried_is_known_before_it_is_decided(tracker: TaskTracker) -> None:
    """And the decision is what was said."""
    queued = await enqueued(tracker, max_attempts=2)
    first = await claim(tracker, queued)
    assert (queued.can_retry, first.can_retry) == (True, True)
    failed = await tracker.fail(first, "timeout")
    second = await claim(tracker, queued)
    assert (failed.status, failed.can_retry, second.can_retry) == ("failed", True, False)
    dead = await tracker.fail(second, "timeout")
    assert (dead.status, dead.can_retry) == ("dlq", False)
    retried = await tracker.retry(TASK)
    running = await claim(tracker, retried)
    assert (retried.can_retry, running.can_retry) == (True, True)
    refused = await tracker.fail(running, BusinessRuleError("sold"))
    assert (refused.status, refused.can_retry) == ("failed", False)
    assert [one.can_retry for one in await tracker.history(TASK)] == [True, False, False]
    assert not (await enqueued(tracker, "jobs:1", queue="jobs", max_attempts=1)).can_retry


async def test_a_handler_decides_about_commands_that_have_no_limit(bus: CommandBus) -> None:
    await bus.send("jobs", "Import", task_key="jobs:import")
    await bus.send("jobs", "Import", task_key="jobs:import", max_attempts=2)
    assert [one.can_retry for one in await bus.trace("jobs:import")] == [None, True]


async def test_a_task_without_metadata_has_none_of_it(tracker: TaskTracker) -> None:
    assert (await enqueued(tracker)).metadata == {}
    assert [one.metadata for one in await tracker.history(TASK)] == [{}]


def test_there_are_six_indexes_on_what_a_task_is_kept_in(database: Database) -> None:
    """All that a task needs for good; what waits or runs has its own in the small tables of the places."""
    rows = database.rows(
        "SELECT indexname FROM pg_indexes"
        " WHERE schemaname = 'busload' AND tablename IN ('command', 'execution', 'task')"
    )
    assert len(rows) == 6


# -- dedup ------------------------------------------------------------------------------------------------------


async def test_a_duplicate_is_skipped_with_a_line_in_the_log(
    tracker: TaskTracker, caplog: pytest.LogCaptureFixture
) -> None:
    await enqueued(tracker)
    with caplog.at_level(logging.INFO, "busload"):
        assert await tracker.enqueue(TASK, queue=QUEUE) is None
    assert TASK in caplog.text
    assert await statuses(tracker) == ["queued"]


async def test_a_task_that_has_ended_is_held_for_the_window_only(tracker: TaskTracker, database: Database) -> None:
    """Five minutes after it was enqueued."""
    await tracker.complete(await claimed(tracker))
    assert await tracker.enqueue(TASK, queue=QUEUE) is None
    held_for = database.value(
        "SELECT held_until - created_at FROM busload.task JOIN busload.command USING (domain, command_id)"
    )
    assert abs(held_for - timedelta(seconds=300)) < timedelta(seconds=1)
    database.rows("UPDATE busload.task SET held_until = now() - interval '1 s'")
    assert await tracker.enqueue(TASK, queue=QUEUE) is not None
    assert await statuses(tracker) == ["completed", "queued"]


async def test_one_of_many_producers_at_once_wins(tracker: TaskTracker) -> None:
    for n in range(10):
        won = await asyncio.gather(*(tracker.enqueue(f"jobs:{n}", queue="jobs") for _ in range(8)))
        assert sum(one is not None for one in won) == 1


async def test_a_task_that_still_runs_is_held_whatever_its_age(tracker: TaskTracker, database: Database) -> None:
    """Five minutes later the first copy runs, so there is no second."""
    running = await claimed(tracker)
    database.rows("UPDATE busload.task SET held_until = now() - interval '1 day'")
    assert await tracker.enqueue(TASK, queue=QUEUE) is None
    await tracker.fail(running, "timeout")
    assert await tracker.enqueue(TASK, queue=QUEUE) is None


async def test_a_skipped_producer_can_have_the_handle_of_what_exists(tracker: TaskTracker) -> None:
    """As it is now, and with an id that can be published again while it waits."""
    existing = Dedup(on_conflict="return_existing")
    first = await enqueued(tracker)
    assert await tracker.enqueue(TASK, queue=QUEUE, dedup=existing) == first
    running = await claim(tracker, first)
    assert await tracker.enqueue(TASK, queue=QUEUE, dedup=existing) == running
    await tracker.fail(running, "timeout")
    waiting = await enqueued(tracker, dedup=existing)
    assert (waiting.status, waiting.attempt) == ("queued", 2)
    assert (await claim(tracker, waiting)).attempt == 2


async def test_a_task_is_the_same_under_every_name_of_its_queue(tracker: TaskTracker) -> None:
    """One of many producers wins, whatever prefix each of them gives; a skipped one can have the handle."""
    prefixes = ("", "dev_", "prod_", "test_") * 2
    for n in range(5):
        won = await asyncio.gather(*(tracker.enqueue(f"jobs:{n}", queue=f"{prefix}jobs") for prefix in prefixes))
        [first] = [one for one in won if one is not None]
        for prefix in prefixes[:4]:
            again = await tracker.enqueue(
                f"jobs:{n}", queue=f"{prefix}jobs", dedup=Dedup(on_conflict="return_existing")
            )
            assert again == first
        with pytest.raises(DuplicateTaskError, match=str(first.command_id)):
            await tracker.enqueue(f"jobs:{n}", queue="staging_jobs", dedup=Dedup(on_conflict="raise"))


async def test_a_duplicate_can_be_an_error_that_names_the_holder(tracker: TaskTracker, database: Database) -> None:
    first = await enqueued(tracker)
    before = database.everything()
    with pytest.raises(DuplicateTaskError) as refused:
        await tracker.enqueue(TASK, queue=QUEUE, dedup=Dedup(on_conflict="raise"))
    assert refused.value.holders == {TASK: first.command_id}
    assert database.everything() == before


async def test_the_holder_may_be_no_task_at_all(tracker: TaskTracker, bus: CommandBus, database: Database) -> None:
    """A command of a worker has no execution that could be claimed."""
    holder = await bus.send(QUEUE, "Import", task_key=TASK, dedup=Dedup())
    before = database.everything()
    with pytest.raises(InvalidOperationError, match=f"{holder.command_id} of type 'Import'"):
        await tracker.enqueue(TASK, queue=QUEUE, dedup=Dedup(on_conflict="return_existing"))
    assert database.everything() == before
    assert await tracker.enqueue(TASK, queue=QUEUE) is None


async def test_the_handle_of_what_exists_tells_what_its_history_tells(
    tracker: TaskTracker, other: TaskTracker, given: Given, database: Database
) -> None:
    """In every state; one that waits has an id that can be claimed with."""
    existing = Dedup(on_conflict="return_existing")

    async def handle() -> Execution:
        found = await tracker.enqueue(TASK, queue=QUEUE, dedup=existing)
        [*_, newest] = await tracker.history(TASK)
        assert found is not None and replace(newest, execution_id=found.execution_id) == found
        assert newest.execution_id in (found.execution_id, None)
        return found

    running = await claimed(tracker)
    assert (await handle()).status == "processing"
    given.died(worker_of(running, database))
    given.rescued()
    assert (await handle()).status == "queued"
    await other.fail(await claim(other, running), "timeout")
    assert (await handle()).attempt == 2
    await tracker.fail(await claim(tracker, running), PermanentCommandError("no"))
    assert (await handle()).status == "dlq"
    retried = await tracker.retry(TASK, operator="rosa")
    assert (await handle()).execution_id == retried.execution_id
    await tracker.complete(await claim(tracker, retried))
    assert (await handle()).status == "completed"


async def test_without_dedup_a_task_can_run_beside_itself(tracker: TaskTracker) -> None:
    first, second = await enqueued(tracker, dedup=None), await enqueued(tracker, dedup=None)
    assert (await claim(tracker, second)).execution_id == second.execution_id
    assert (await claim(tracker, first)).execution_id == first.execution_id


async def test_enqueue_joins_the_transaction_of_the_application(
    tracker: TaskTracker, conn: psycopg.AsyncConnection[Any]
) -> None:
    async with conn.transaction(force_rollback=True):
        await enqueued(tracker, conn=conn)
    assert await tracker.history(TASK) == []
    async with conn.transaction():
        await enqueued(tracker, conn=conn)
    assert await statuses(tracker) == ["queued"]


# -- claim ------------------------------------------------------------------------------------------------------


async def test_a_task_is_claimed_once(tracker: TaskTracker, other: TaskTracker) -> None:
    """Who comes second may acknowledge the message, here and in another process."""
    queued = await enqueued(tracker)
    running = await claim(tracker, queued)
    assert running.started_at is not None
    for late in (tracker, other):
        assert await late.claim(TASK, str(queued.execution_id)) is None
    await tracker.complete(running)
    for late in (tracker, other):
        assert await late.claim(TASK, str(queued.execution_id)) is None
    assert await statuses(tracker) == ["completed"]


async def test_one_of_many_workers_at_once_gets_the_task(tracker: TaskTracker, other: TaskTracker) -> None:
    for n in range(10):
        queued = await enqueued(tracker, f"jobs:{n}", queue="jobs")
        assert queued.execution_id is not None
        rush = [each.claim(f"jobs:{n}", queued.execution_id) for each in (tracker, other) * 4]
        assert sum(one is not None for one in await asyncio.gather(*rush)) == 1


async def test_a_failed_task_is_claimed_again_with_the_message_it_had(tracker: TaskTracker) -> None:
    """The message goes round, every attempt has an id and a row of its own."""
    queued = await enqueued(tracker)
    first = await claim(tracker, queued)
    await tracker.fail(first, "timeout")
    second = await claim(tracker, queued)
    assert second.attempt == 2 and second.execution_id != first.execution_id
    await tracker.fail(second, "timeout")
    third = await claim(tracker, second)
    await tracker.complete(third)
    assert await statuses(tracker) == ["failed", "failed", "completed"]
    assert len({one.execution_id for one in await tracker.history(TASK)}) == 3


async def test_a_claim_does_not_wait_for_a_time_that_was_set(tracker: TaskTracker, database: Database) -> None:
    """When to try again is up to the queue that delivers."""
    queued = await enqueued(tracker)
    await tracker.fail(await claim(tracker, queued), "timeout")
    database.rows("UPDATE busload.scheduled SET run_at = now() + interval '1 hour'")
    assert (await claim(tracker, queued)).attempt == 2


async def test_keys_that_do_not_belong_together_are_refused(tracker: TaskTracker, database: Database) -> None:
    one, two = await enqueued(tracker), await enqueued(tracker, "jobs:2", queue="jobs")
    before = database.everything()
    assert one.execution_id is not None and two.execution_id is not None
    for task_id, execution_id in [
        (TASK, two.execution_id),
        ("jobs:2", one.execution_id),
        (TASK, uuid4()),
        ("nobody", one.execution_id),
        (TASK, UUID(int=one.execution_id.int + 1)),
    ]:
        with pytest.raises(InvalidOperationError, match="is none of task"):
            await tracker.claim(task_id, execution_id)
    assert database.everything() == before


async def test_the_ids_of_a_finished_round_do_not_claim_the_next_one(tracker: TaskTracker, database: Database) -> None:
    """A message that was late by a whole round finds its own execution, which has ended."""
    old = await enqueued(tracker)
    await tracker.complete(await claim(tracker, old))
    database.rows("UPDATE busload.task SET held_until = now() - interval '1 s'")
    await enqueued(tracker)
    assert await tracker.claim(TASK, str(old.execution_id)) is None
    assert await statuses(tracker) == ["completed", "queued"]


async def test_a_paused_queue_starts_nothing(tracker: TaskTracker, other: TaskTracker, bus: CommandBus) -> None:
    """What runs finishes; the messages may go, since `recover` names the tasks when the pause is over."""
    running = await claim(tracker, await enqueued(tracker, "partner_tasks:1"))
    queued, free = await enqueued(tracker), await enqueued(tracker, "jobs:2", queue="jobs")
    await bus.domains.pause(QUEUE)
    assert await tracker.claim(TASK, str(queued.execution_id)) is None
    assert await other.recover(QUEUE, waiting_for=NO_TIME) == []
    await tracker.complete(running)
    await tracker.complete(await claim(tracker, free))
    await bus.domains.resume(QUEUE)
    [waiting] = await other.recover(QUEUE, waiting_for=NO_TIME)
    assert (await claim(tracker, waiting)).execution_id == queued.execution_id


async def test_the_command_of_a_worker_is_not_a_trackers_to_claim(bus: CommandBus, tracker: TaskTracker) -> None:
    sent = await bus.send(QUEUE, "Import", task_key=TASK)
    with pytest.raises(InvalidOperationError):
        await tracker.claim(TASK, sent.command_id)


# -- the end ----------------------------------------------------------------------------------------------------


async def test_success_is_recorded(tracker: TaskTracker) -> None:
    done = await tracker.complete(await claimed(tracker))
    assert (done.status, done.error) == ("completed", None)
    assert done.started_at is not None and done.finished_at is not None and done.started_at < done.finished_at


async def test_a_failure_with_attempts_left_is_failed(tracker: TaskTracker) -> None:
    """With the error, and one attempt more than before."""
    failed = await tracker.fail(await claimed(tracker), TimeoutError("partner did not answer"))
    assert (failed.status, failed.error, failed.attempt) == ("failed", "partner did not answer", 1)
    first, waiting = await tracker.history(TASK)
    assert first == failed and (waiting.status, waiting.attempt) == ("queued", 2)
    assert waiting.execution_id is None  # its name is given by the claim, as the announced one is used up


async def test_a_failure_without_is_in_the_dlq(tracker: TaskTracker, bus: CommandBus) -> None:
    """Where operators of the bus find it."""
    queued = await enqueued(tracker, max_attempts=2)
    assert (await tracker.fail(await claim(tracker, queued), "timeout")).status == "failed"
    assert (await tracker.fail(await claim(tracker, queued), "timeout")).status == "dlq"
    assert await tracker.claim(TASK, str(queued.execution_id)) is None
    [item] = await bus.troubleshooting.list(QUEUE)
    assert (item.task_key, item.reason, item.attempts, item.last_error_message) == (TASK, "EXHAUSTED", 2, "timeout")


async def test_three_attempts_are_the_default(tracker: TaskTracker) -> None:
    queued = await enqueued(tracker)
    seen = [(await tracker.fail(await claim(tracker, queued), "timeout")).status for _ in range(3)]
    assert seen == ["failed", "failed", "dlq"]


async def test_the_kind_of_error_decides_the_route(tracker: TaskTracker, bus: CommandBus) -> None:
    dead = await tracker.fail(await claimed(tracker), PermanentCommandError("no such aircraft", code="UNKNOWN"))
    assert dead.status == "dlq"
    [item] = await bus.troubleshooting.list(QUEUE)
    assert (item.reason, item.last_error_code) == ("PERMANENT", "UNKNOWN")
    queued = await enqueued(tracker, "jobs:2", queue="jobs")
    refused = await tracker.fail(await claim(tracker, queued), BusinessRuleError("not our customer"))
    assert refused.status == "failed"
    assert await tracker.claim("jobs:2", str(queued.execution_id)) is None


async def test_retrying_out_of_the_dlq_keeps_the_task_and_makes_an_execution(
    tracker: TaskTracker, bus: CommandBus
) -> None:
    dead = await in_dlq(tracker)
    again = await tracker.retry(TASK, operator="rosa")
    assert again.task_key == TASK and again.execution_id != dead.execution_id
    assert (again.status, again.attempt) == ("queued", 2)
    assert (await tracker.history(TASK))[-1].execution_id == again.execution_id
    running = await claim(tracker, again)
    assert running.execution_id == again.execution_id
    await tracker.complete(running)
    first, second = await tracker.history(TASK)
    assert (first.status, second.status) == ("dlq", "completed")
    [action] = first.actions
    assert (action.type, action.operator) == ("OPERATOR_RETRIED", "rosa")


async def test_a_retried_task_has_all_its_attempts_again(tracker: TaskTracker) -> None:
    await in_dlq(tracker)
    again = await tracker.retry(TASK)
    seen = [(await tracker.fail(await claim(tracker, again), "timeout")).status for _ in range(3)]
    assert seen == ["failed", "failed", "dlq"]
    third = await tracker.retry(TASK)
    assert (await claim(tracker, third)).execution_id == third.execution_id


async def test_the_old_message_claims_under_the_id_that_the_retry_announced(tracker: TaskTracker) -> None:
    """So that both names of the next execution are one, whichever message comes first."""
    dead = await in_dlq(tracker)
    again = await tracker.retry(TASK)
    running = await claim(tracker, dead)
    assert running.execution_id == again.execution_id
    assert await tracker.claim(TASK, str(again.execution_id)) is None


async def test_an_operators_retry_on_the_bus_is_recovered_and_claimed(tracker: TaskTracker, bus: CommandBus) -> None:
    """Nobody publishes then, so `recover` does."""
    dead = await in_dlq(tracker)
    await bus.troubleshooting.retry(QUEUE, dead.command_id, operator="rosa")
    [waiting] = await tracker.recover(QUEUE, waiting_for=NO_TIME)
    running = await claim(tracker, waiting)
    assert running.attempt == 2 and running.execution_id != dead.execution_id


async def test_the_newest_that_is_in_the_dlq_is_retried(tracker: TaskTracker) -> None:
    """Of a task that ran beside itself, the one that needs it."""
    dead = await tracker.fail(await claimed(tracker, dedup=None), PermanentCommandError("older"))
    await tracker.fail(await claimed(tracker, dedup=None), PermanentCommandError("newer"))
    await tracker.complete(await claimed(tracker, dedup=None))
    newer, older = await tracker.retry(TASK), await tracker.retry(TASK)
    assert older.command_id == dead.command_id != newer.command_id


async def test_nothing_in_the_dlq_is_nothing_to_retry(tracker: TaskTracker, database: Database) -> None:
    await enqueued(tracker)
    before = database.everything()
    with pytest.raises(InvalidOperationError, match="its newest execution is queued"):
        await tracker.retry(TASK)
    with pytest.raises(InvalidOperationError, match="there is no such task"):
        await tracker.retry("nobody")
    assert database.everything() == before


async def test_the_chain_is_one_query_on_the_task_id(tracker: TaskTracker, bus: CommandBus) -> None:
    """Two rounds of a task, four attempts, in order, each with id, status, error and time."""
    queued = await enqueued(tracker, dedup=Dedup(window=NO_TIME))
    await tracker.fail(await claim(tracker, queued), "first")
    await tracker.complete(await claim(tracker, queued))
    queued = await enqueued(tracker)
    await tracker.fail(await claim(tracker, queued), PermanentCommandError("second"))
    await tracker.complete(await claim(tracker, await tracker.retry(TASK)))
    history = await tracker.history(TASK)
    assert [(str(one.status), one.error) for one in history] == [
        ("failed", "first"),
        ("completed", None),
        ("dlq", "second"),
        ("completed", None),
    ]
    assert len({one.execution_id for one in history}) == 4
    times = [one.started_at for one in history if one.started_at]
    assert times == sorted(times) and len(times) == 4
    assert history == await bus.trace(TASK)


# -- late writers -----------------------------------------------------------------------------------------------


async def test_a_late_writer_changes_nothing(
    tracker: TaskTracker, other: TaskTracker, given: Given, database: Database
) -> None:
    late = await claimed(tracker)
    given.died(worker_of(late, database))
    running = await claim(other, late)
    before = database.everything()
    for attempt in (tracker.complete(late), tracker.fail(late, "late"), tracker.complete(late, {"n": 1})):
        with pytest.raises(SupersededError):
            await attempt
    assert database.everything() == before
    done = await other.complete(running)
    for attempt in (tracker.complete(late), tracker.fail(late, "late")):
        with pytest.raises(SupersededError):
            await attempt
    assert await statuses(tracker) == ["lost", "completed"]
    assert (await tracker.history(TASK))[-1] == done


async def test_who_has_not_claimed_a_task_cannot_end_it(tracker: TaskTracker, other: TaskTracker) -> None:
    """Not even who knows its id."""
    queued = await enqueued(tracker)
    with pytest.raises(InvalidOperationError, match="Claim the task"):
        await tracker.complete(queued)
    running = await claim(tracker, queued)
    with pytest.raises(SupersededError):
        await other.complete(running)
    with pytest.raises(SupersededError):
        await other.fail(running, "not mine")
    assert await statuses(tracker) == ["processing"]


async def test_what_has_ended_cannot_end_otherwise(tracker: TaskTracker) -> None:
    running = await claimed(tracker)
    await tracker.complete(running)
    with pytest.raises(SupersededError, match="already ended as completed"):
        await tracker.fail(running, "after all")
    queued = await enqueued(tracker, "jobs:2", queue="jobs")
    failed = await claim(tracker, queued)
    await tracker.fail(failed, "timeout")
    with pytest.raises(SupersededError, match="already ended as failed"):
        await tracker.complete(failed)


async def test_saying_the_same_twice_is_harmless(tracker: TaskTracker, database: Database) -> None:
    """An answer was lost, so the application asks again."""
    running = await claimed(tracker)
    done = await tracker.complete(running, {"n": 1})
    assert await tracker.complete(running, {"n": 1}) == done
    queued = await enqueued(tracker, "jobs:2", queue="jobs")
    failing = await claim(tracker, queued)
    failed = await tracker.fail(failing, "timeout")
    assert await tracker.fail(failing, "timeout") == failed
    assert database.count("execution") == 2


# -- workers that die -------------------------------------------------------------------------------------------


async def test_a_redelivered_message_takes_over_from_a_dead_worker_at_once(
    tracker: TaskTracker, other: TaskTracker, given: Given, database: Database
) -> None:
    queued = await enqueued(tracker)
    lost = await claim(tracker, queued)
    assert await other.claim(TASK, str(queued.execution_id)) is None
    given.died(worker_of(lost, database))
    taken_over = await claim(other, queued)
    assert taken_over.execution_id != lost.execution_id and taken_over.attempt == 1
    await other.complete(taken_over)
    assert await statuses(tracker) == ["lost", "completed"]


async def test_a_message_that_was_acknowledged_too_early_is_recovered(
    tracker: TaskTracker, other: TaskTracker, given: Given, database: Database
) -> None:
    """The redelivery found the task running and was acknowledged; then its worker turned out to be dead."""
    lost = await claimed(tracker)
    assert await other.claim(TASK, str(lost.execution_id)) is None
    assert await other.recover(QUEUE, waiting_for=NO_TIME) == []
    given.died(worker_of(lost, database))
    [waiting] = await other.recover(QUEUE, waiting_for=NO_TIME)
    assert (waiting.task_key, waiting.status) == (TASK, "queued")
    await other.complete(await claim(other, waiting))
    assert await statuses(tracker) == ["lost", "completed"]


@pytest.mark.parametrize("story", ["enqueued", "failed", "lost", "retried", "handed back"])
async def test_whatever_waits_too_long_is_recovered(
    tracker: TaskTracker, other: TaskTracker, given: Given, database: Database, story: str
) -> None:
    """Five minutes after it began to wait, not after it was enqueued."""
    queued = await enqueued(tracker)
    if story != "enqueued":
        running = await claim(tracker, queued)
        if story == "failed":
            await tracker.fail(running, "timeout")
        elif story == "retried":
            await tracker.fail(running, PermanentCommandError("no"))
            await tracker.retry(TASK)
        elif story == "lost":
            given.died(worker_of(running, database))
            given.rescued()
        else:
            await tracker.close(hand_back=True)
        database.rows("UPDATE busload.command SET created_at = created_at - interval '1 day'")
    assert await other.recover(QUEUE) == []
    aged(database, minutes=6)
    assert await other.recover(QUEUE, waiting_for=timedelta(minutes=7)) == []
    [waiting] = await other.recover(QUEUE)
    await other.complete(await claim(other, waiting))


def aged(database: Database, *, minutes: int) -> None:
    """Move time: all that has happened was so long ago."""
    for table, column in (("command", "created_at"), ("execution", "finished_at"), ("event", "at")):
        database.rows(f"UPDATE busload.{table} SET {column} = {column} - interval '{minutes} min'")


async def test_what_was_recovered_is_not_named_again_before_it_has_waited_as_long(
    tracker: TaskTracker, other: TaskTracker, database: Database
) -> None:
    """A queue with an hour's backlog must not get every message again each minute; it can be claimed all the time."""
    queued = await enqueued(tracker)
    aged(database, minutes=6)
    assert len(await tracker.recover(QUEUE)) == 1
    assert await tracker.recover(QUEUE) == await other.recover(QUEUE) == []
    database.rows("UPDATE busload.scheduled SET run_at = run_at - interval '6 min'")
    assert len(await other.recover(QUEUE)) == 1
    assert await tracker.recover(QUEUE) == []
    assert (await claim(tracker, queued)).execution_id == queued.execution_id
    assert await other.recover(QUEUE, waiting_for=NO_TIME) == []


async def test_a_task_is_recovered_by_one_of_many(tracker: TaskTracker, other: TaskTracker, database: Database) -> None:
    """Every process of an application may run the loop: each message is published again by one of them."""
    for n in range(20):
        await enqueued(tracker, f"jobs:{n}", queue="jobs")
    aged(database, minutes=6)
    found = await asyncio.gather(*(each.recover("jobs") for each in (tracker, other) * 4))
    assert sorted(str(one.task_key) for group in found for one in group) == sorted(f"jobs:{n}" for n in range(20))


async def test_the_oldest_are_recovered_first_and_not_more_than_asked_for(tracker: TaskTracker) -> None:
    for n in range(5):
        await enqueued(tracker, f"jobs:{n}", queue="jobs")
    hour = timedelta(hours=1)
    assert await tracker.recover("jobs", waiting_for=hour) == []
    first = await tracker.recover("jobs", waiting_for=NO_TIME, limit=2)
    assert [one.task_key for one in first] == ["jobs:0", "jobs:1"]


async def test_only_the_tasks_of_the_queue_are_recovered(tracker: TaskTracker) -> None:
    """Wherever they wait."""
    await tracker.fail(await claimed(tracker, "jobs:1", queue="jobs"), "timeout")
    await enqueued(tracker, "jobs:2", queue="jobs")
    await enqueued(tracker)
    assert [one.task_key for one in await tracker.recover(QUEUE, waiting_for=NO_TIME)] == [TASK]
    assert {one.task_key for one in await tracker.recover("jobs", waiting_for=NO_TIME)} == {"jobs:1", "jobs:2"}


async def test_only_tracked_tasks_are_recovered(tracker: TaskTracker, bus: CommandBus) -> None:
    await bus.send(QUEUE, "Import", task_key=TASK)
    assert await tracker.recover(QUEUE, waiting_for=NO_TIME) == []


async def test_a_task_that_kills_its_workers_waits_for_a_person(
    tracker: TaskTracker, bus: CommandBus, given: Given, database: Database
) -> None:
    """As every command: after the third crash of its own."""
    queued = await enqueued(tracker)
    for _ in range(3):
        async with TaskTracker(bus) as doomed:
            running = await claim(doomed, queued)
            given.died(worker_of(running, database))
            given.rescued()
    assert await tracker.claim(TASK, str(queued.execution_id)) is None
    assert (await statuses(tracker))[-1] == "dlq"
    [item] = await bus.troubleshooting.list(QUEUE)
    assert item.reason == "CRASHED"


async def test_a_tracker_that_was_declared_dead_goes_on_under_a_new_number(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Also without a heartbeat in between: the claim itself is refused, and asked again."""
    async with TaskTracker(bus, lease_for=timedelta(days=1)) as tracker:
        first = await claimed(tracker)
        before = worker_of(first, database)
        given.died(before)
        given.rescued()
        second = await claim(tracker, await enqueued(tracker, "jobs:2", queue="jobs"))
        assert worker_of(second, database) != before
        await tracker.complete(second)
        assert (await tracker.complete(first)).status == "completed"  # nobody else has begun it


@pytest.mark.parametrize("noticed", ["by its heartbeat", "by a claim"])
async def test_a_tracker_that_comes_back_goes_on_with_its_task_and_none_is_suspected(
    bus: CommandBus, given: Given, database: Database, dsn: str, noticed: str
) -> None:
    """However often the database is away for longer than the lease: its process did not die."""
    async with TaskTracker(bus, lease_for=timedelta(days=1)) as tracker, TaskTracker(bus) as other:
        running = await claimed(tracker)
        for n in range(5):
            given.died(worker_of(running, database))
            assert given.rescued().parked == 0
            if noticed == "by its heartbeat":
                with connect(dsn) as conn:
                    tracker._presence.once(conn)
            else:
                await claim(tracker, await enqueued(tracker, f"jobs:{n}", queue="jobs"))
            assert await other.claim(TASK, running.execution_id or "") is None
        assert database.value("SELECT max(crashes) FROM busload.lease") == 0
        assert (await tracker.complete(running)).attempt == 1
        assert await statuses(tracker) == ["lost"] * 5 + ["completed"]
    database.check_invariants()


async def test_a_tracker_that_comes_back_only_clears_a_task_that_others_have_begun(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    async with TaskTracker(bus, lease_for=timedelta(days=1)) as tracker, TaskTracker(bus) as other:
        running = await claimed(tracker)
        given.died(worker_of(running, database))
        given.rescued()
        theirs = await claim(other, running)
        with connect(dsn) as conn:
            tracker._presence.once(conn)
        assert database.rows("SELECT lease_id, crashes FROM busload.lease") == [(theirs.execution_id, 0)]
        with pytest.raises(SupersededError):
            await tracker.complete(running)
        assert (await other.complete(theirs)).status == "completed"
    database.check_invariants()


async def test_a_closed_tracker_is_no_worker_any_more(bus: CommandBus, database: Database) -> None:
    async with TaskTracker(bus, name="closing") as tracker:
        await tracker.complete(await claimed(tracker))
    assert database.rows("SELECT name, stopped_at IS NULL, lost FROM busload.worker") == [("closing", False, False)]
    async with TaskTracker(bus) as unused:
        await enqueued(unused, "jobs:2", queue="jobs")
    assert database.count("worker") == 1


async def test_a_tracker_that_closes_keeps_what_it_runs(
    bus: CommandBus, other: TaskTracker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lease lapses by itself; until then it may still say how it ended."""
    tracker = TaskTracker(bus)
    running = await claimed(tracker)
    with caplog.at_level(logging.WARNING, "busload"):
        await tracker.close()
    assert "closed with 1 execution under way" in caplog.text
    assert await other.claim(TASK, str(running.execution_id)) is None
    assert (await tracker.complete(running)).status == "completed"


async def test_a_tracker_that_is_told_to_hands_back_what_it_runs(bus: CommandBus, other: TaskTracker) -> None:
    tracker = TaskTracker(bus)
    running = await claimed(tracker)
    await tracker.close(hand_back=True)
    again = await claim(other, running)
    assert again.attempt == 1 and again.execution_id != running.execution_id
    with pytest.raises(SupersededError):
        await tracker.complete(running)


async def test_a_tracker_can_be_closed_when_its_database_is_gone(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """What it held lapses by itself."""
    with server.database() as dsn:
        bus = await CommandBus(dsn).open()
        tracker = TaskTracker(bus)
        await claimed(tracker)
    with caplog.at_level(logging.WARNING, "busload"):
        await tracker.close()
    assert "could not say that it has stopped" in caplog.text
    await bus.close()


async def test_a_closed_tracker_can_claim_again(bus: CommandBus) -> None:
    tracker = TaskTracker(bus)
    await tracker.complete(await claimed(tracker))
    await tracker.close()
    execution = await claim(tracker, await enqueued(tracker, "jobs:2", queue="jobs"))
    await tracker.complete(execution)
    await tracker.close()


async def test_a_tracker_retires_under_every_number_it_has_had(bus: CommandBus, database: Database) -> None:
    """Also under one that it kept for what still ran when it was closed before."""
    tracker = TaskTracker(bus)
    running = await claimed(tracker)
    await tracker.close()
    again = await claimed(tracker, "jobs:2", queue="jobs")
    for execution in (running, again):
        await tracker.complete(execution)
    await tracker.close()
    assert database.rows("SELECT stopped_at IS NULL, lost FROM busload.worker") == [(False, False)] * 2


async def test_a_tracker_that_closes_again_retires(bus: CommandBus, database: Database) -> None:
    tracker = TaskTracker(bus)
    running = await claimed(tracker)
    await tracker.close()
    await tracker.complete(running)
    await tracker.close()
    assert database.rows("SELECT stopped_at IS NULL, lost FROM busload.worker") == [(False, False)]


async def test_an_id_that_was_handed_back_is_used_up(bus: CommandBus, tracker: TaskTracker) -> None:
    """The next execution has another: the history does not announce this one again."""
    async with TaskTracker(bus) as leaving:
        running = await claimed(leaving)
        await leaving.close(hand_back=True)
    assert [one.execution_id for one in await tracker.history(TASK) if one.status == "queued"] == [None]
    assert (await claim(tracker, running)).execution_id != running.execution_id


# -- beside workers ---------------------------------------------------------------------------------------------


def held_by_a_worker(given: Given, database: Database) -> UUID:
    """A worker that serves the domain has claimed the task, for as long as it takes to see that it has no handler."""
    worker = given.registered_worker()
    [leased] = database.perform(claims.claim(worker=worker, domains=[QUEUE], limit=1)).leased
    return UUID(str(leased.lease.lease_id))


async def test_a_worker_in_the_same_domain_takes_no_task_away(tracker: TaskTracker, given: Given) -> None:
    """It claims what it has no handler for and gives it back; a claim by name waits for that."""
    given.bus.handler(QUEUE, "Import")(lambda command, ctx: None)
    async with given.running(domains=[QUEUE]):
        for n in range(100):
            await tracker.complete(await claimed(tracker, f"jobs:{n}"))


async def test_a_claim_waits_for_a_worker_to_give_its_task_back(
    tracker: TaskTracker, given: Given, database: Database
) -> None:
    queued = await enqueued(tracker)
    lease_id = held_by_a_worker(given, database)
    asked = asyncio.create_task(tracker.claim(TASK, str(queued.execution_id)))
    done, _ = await asyncio.wait([asked], timeout=0.3)
    assert not done
    database.perform(rescue.release([lease_id]))
    running = await asked
    assert running is not None
    await tracker.complete(running)
    database.check_invariants()


async def test_a_worker_that_runs_tracked_tasks_itself_is_not_waited_for_for_ever(
    tracker: TaskTracker, given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busload.tasks.tracker.PATIENCE", 0.1)
    queued = await enqueued(tracker)
    held_by_a_worker(given, database)
    assert await tracker.claim(TASK, str(queued.execution_id)) is None


async def test_what_a_worker_gave_back_is_recovered_whenever_it_is_due(
    tracker: TaskTracker, given: Given, database: Database
) -> None:
    """When the worker will look at it again says nothing about its message. Once, as ever."""
    queued = await enqueued(tracker)
    given.bus.handler(QUEUE, "Import")(lambda command, ctx: None)
    await given.drained(domains=[QUEUE])
    database.rows("UPDATE busload.scheduled SET run_at = now() + interval '1 day'")
    assert database.rows("SELECT reason FROM busload.scheduled") == [("NO_HANDLER",)]
    database.rows("UPDATE busload.command SET created_at = created_at - interval '6 min'")
    [found] = await tracker.recover(QUEUE)
    assert found.execution_id == queued.execution_id
    assert await tracker.recover(QUEUE) == []
    await tracker.complete(await claim(tracker, found))


# -- why it is not finished -------------------------------------------------------------------------------------


async def reasons(bus: CommandBus, task: Execution) -> list[tuple[Blocker, str]]:
    explanation = await bus.explain_command(QUEUE, task.command_id)
    return [(reason.code, reason.message + " " + reason.advice) for reason in explanation.reasons]


async def test_a_task_that_waits_needs_somebody_to_claim_it(
    tracker: TaskTracker, bus: CommandBus, given: Given, database: Database
) -> None:
    """No busload worker could help: it was enqueued, has failed, was recovered, or a worker gave it back."""
    task = await enqueued(tracker)
    [(code, said)] = await reasons(bus, task)
    assert code == Blocker.NOT_CLAIMED and "busload worker" not in said
    assert "has claimed it" in said and f"busload tracker recover --queue {QUEUE}" in said
    assert "not claimed" in (await bus.explain_command(QUEUE, task.command_id)).summary
    given.bus.handler(QUEUE, "Import")(lambda command, ctx: None)
    await given.drained(domains=[QUEUE])
    assert [code for code, _ in await reasons(bus, task)] == [Blocker.NOT_CLAIMED]
    running = await claim(tracker, task)
    assert await reasons(bus, task) == []
    await tracker.fail(running, TimeoutError("The partner did not answer."))
    assert [code for code, _ in await reasons(bus, task)] == [Blocker.NOT_CLAIMED]
    await tracker.recover(QUEUE, waiting_for=NO_TIME)
    database.rows("UPDATE busload.scheduled SET run_at = now() + interval '5 min'")
    [(code, said)] = await reasons(bus, task)
    assert code == Blocker.NOT_CLAIMED and "The last error was TimeoutError: The partner did not answer." in said


async def test_a_task_of_a_paused_queue_waits_for_that(tracker: TaskTracker, bus: CommandBus) -> None:
    task = await enqueued(tracker)
    await bus.domains.pause(QUEUE, reason="the partner is down")
    assert [code for code, _ in await reasons(bus, task)] == [Blocker.PAUSED]


async def test_a_task_of_a_dead_process_can_be_taken_back(
    tracker: TaskTracker, bus: CommandBus, given: Given, database: Database
) -> None:
    running = await claimed(tracker)
    given.died(worker_of(running, database))
    [(code, said)] = await reasons(bus, running)
    assert code == Blocker.WORKER_LOST and "busload tracker recover" in said and "busload worker" not in said


async def test_a_tracker_serves_no_domain(tracker: TaskTracker, bus: CommandBus) -> None:
    """It takes tasks by name: an ordinary command beside them waits for a worker."""
    await claimed(tracker)
    sent = await bus.send(QUEUE, "Import")
    [reason] = (await bus.explain_command(QUEUE, sent.command_id)).reasons
    assert reason.code == Blocker.NO_WORKER


# -- bad input --------------------------------------------------------------------------------------------------


async def test_bad_input_is_refused_and_nothing_is_written(tracker: TaskTracker, database: Database) -> None:
    running = await claimed(tracker)
    before = database.everything()
    unstorable: Any = object()
    calls = [
        (tracker.enqueue("", queue=QUEUE), "INVALID_TEXT"),
        (tracker.enqueue("a\0b", queue=QUEUE), "INVALID_TEXT"),
        (tracker.enqueue("x" * 513, queue=QUEUE), "TOO_LONG"),
        (tracker.enqueue("x", queue="no queue"), "INVALID_NAME"),
        (tracker.enqueue("x", queue="dev_"), "INVALID_NAME"),
        (tracker.enqueue("x", queue=unstorable), "INVALID_NAME"),
        (tracker.enqueue("x", queue=QUEUE, metadata=unstorable), "INVALID_OPTION"),
        (tracker.enqueue("x", queue=QUEUE, metadata={"a": unstorable}), "UNSERIALISABLE"),
        (tracker.enqueue("x", queue=QUEUE, max_attempts=0), "INVALID_OPTION"),
        (tracker.enqueue("x", queue=QUEUE, dedup=unstorable), "INVALID_OPTION"),
        (tracker.claim("", uuid4()), "INVALID_TEXT"),
        (tracker.claim(TASK, "not a uuid"), "INVALID_ID"),
        (tracker.claim(TASK, unstorable), "INVALID_ID"),
        (tracker.retry("", operator="rosa"), "INVALID_TEXT"),
        (tracker.retry(TASK, operator="\0"), "INVALID_TEXT"),
        (tracker.history(""), "INVALID_TEXT"),
        (tracker.recover("no queue"), "INVALID_NAME"),
        (tracker.recover(QUEUE, waiting_for=timedelta(seconds=-1)), "INVALID_OPTION"),
        (tracker.recover(QUEUE, waiting_for=unstorable), "INVALID_OPTION"),
        (tracker.recover(QUEUE, limit=0), "INVALID_OPTION"),
        (tracker.complete(running, unstorable), "UNSERIALISABLE"),
        (tracker.complete(unstorable), "INVALID_OPTION"),
        (tracker.fail(running, unstorable), "INVALID_OPTION"),
    ]
    for number, (call, code) in enumerate(calls):
        with pytest.raises(InvalidCommandError) as refused:
            await call
        assert refused.value.code == code, number
    assert database.everything() == before
    await tracker.complete(replace(running))


def test_a_tracker_says_what_it_needs(bus: CommandBus, sync_bus: SyncCommandBus) -> None:
    wrong: Any
    for wrong in (sync_bus, None):
        with pytest.raises(ValueError, match="CommandBus"):
            TaskTracker(wrong)
    for wrong in (bus, None):
        with pytest.raises(ValueError, match="SyncCommandBus"):
            SyncTaskTracker(wrong)
    for wrong in (
        {"prefixes": None},
        {"prefixes": "dev_"},
        {"prefixes": [1]},
        {"lease_for": NO_TIME},
        {"lease_for": 60},
        {"name": ""},
    ):
        with pytest.raises(ValueError):
            TaskTracker(bus, **wrong)
    with pytest.raises(InvalidCommandError):
        TaskTracker(bus).task_id("jobs", "")


# -- without an event loop --------------------------------------------------------------------------------------


@pytest.fixture
def sync_tracker(sync_bus: SyncCommandBus) -> Iterator[SyncTaskTracker]:
    with SyncTaskTracker(sync_bus) as tracker:
        yield tracker


def test_both_faces_have_the_same_methods() -> None:
    names = {name for name in dir(TaskTracker) if not name.startswith("_")}
    assert names == {name for name in dir(SyncTaskTracker) if not name.startswith("_")}
    for name in names | {"__init__"}:
        one, two = (inspect.signature(getattr(kind, name)).parameters for kind in (TaskTracker, SyncTaskTracker))
        assert list(one) == list(two), name
        assert [each.default for each in one.values()] == [each.default for each in two.values()], name


def test_the_whole_chain_without_an_event_loop(sync_tracker: SyncTaskTracker, sync_bus: SyncCommandBus) -> None:
    tracker = sync_tracker
    task_id = tracker.task_id("dev_partner_tasks", "SATLOC", "695d", "02220710")
    queued = tracker.enqueue(task_id, queue="dev_partner_tasks", metadata={"n": 1})
    assert queued is not None and queued.execution_id is not None
    assert tracker.enqueue(task_id, queue=QUEUE) is None
    for status in ("failed", "failed", "dlq"):
        running = tracker.claim(task_id, queued.execution_id)
        assert running is not None
        assert tracker.claim(task_id, queued.execution_id) is None
        assert tracker.fail(running, "timeout").status == status
    again = tracker.retry(task_id, operator="rosa")
    assert again.execution_id is not None
    [waiting] = tracker.recover(QUEUE, waiting_for=NO_TIME)
    assert waiting.execution_id == again.execution_id
    running = tracker.claim(task_id, again.execution_id)
    assert running is not None
    assert tracker.complete(running).status == "completed"
    with pytest.raises(SupersededError):
        tracker.fail(running, "after all")
    assert [str(one.status) for one in tracker.history(task_id)] == ["failed", "failed", "dlq", "completed"]


def test_enqueue_joins_a_transaction_without_an_event_loop(sync_tracker: SyncTaskTracker, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        assert sync_tracker.enqueue(TASK, queue=QUEUE, conn=conn) is not None
        conn.rollback()
    assert sync_tracker.history(TASK) == []


def run_in_child(tracker: SyncTaskTracker, execution_id: str, answers: Any) -> None:
    """What a child of a prefork server does with the tracker it inherits."""
    running = tracker.claim(TASK, execution_id)
    assert running is not None
    tracker.complete(running, {"worker": running.worker})
    answers.put(running.worker)
    tracker.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_a_worker_of_its_own(
    sync_tracker: SyncTaskTracker, sync_bus: SyncCommandBus, database: Database
) -> None:
    """The parent's connections and its number stay the parent's."""
    queued = sync_tracker.enqueue(TASK, queue=QUEUE)
    mine = sync_tracker.enqueue("jobs:2", queue="jobs")
    assert queued is not None and mine is not None and mine.execution_id is not None
    running = sync_tracker.claim("jobs:2", mine.execution_id)
    assert running is not None
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=run_in_child, args=(sync_tracker, str(queued.execution_id), answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() != running.worker
    assert sync_tracker.complete(running).worker == running.worker
    assert [str(one.status) for one in sync_tracker.history(TASK)] == ["completed"]
    assert database.value("SELECT count(*) FROM busload.worker WHERE stopped_at IS NOT NULL") == 1


def run_in_threads_of_child(tracker: SyncTaskTracker, answers: Any) -> None:
    barrier = threading.Barrier(8)

    def use(n: int) -> tuple[int, int]:
        barrier.wait()
        return id(tracker._bus), id(tracker._presence)

    with ThreadPoolExecutor(8) as threads:
        answers.put(len(set(threads.map(use, range(8)))))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_all_threads_of_a_forked_process_share_a_bus_and_a_worker(sync_tracker: SyncTaskTracker) -> None:
    """Otherwise each of them would open connections of its own, and the heartbeat would keep the leases of one."""
    assert sync_tracker.enqueue(TASK, queue=QUEUE) is not None
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=run_in_threads_of_child, args=(sync_tracker, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == 1


def test_a_claim_without_an_event_loop_waits_for_a_worker_too(
    sync_tracker: SyncTaskTracker, given: Given, database: Database
) -> None:
    queued = sync_tracker.enqueue(TASK, queue=QUEUE)
    assert queued is not None
    lease_id = held_by_a_worker(given, database)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(sync_tracker.claim, TASK, str(queued.execution_id))
        done, _ = wait([asked], timeout=0.3)
        assert not done
        database.perform(rescue.release([lease_id]))
        running = asked.result(60)
    assert running is not None
    sync_tracker.complete(running)

"""The worked examples of a tracker with two keys: at enqueue time, in the worker, and the full history."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from busload import CommandBus, Execution, TaskTracker
from busload.commands import ExecutionStatus
from busload.tasks import TaskMessage

QUEUE = "dev_partner_tasks"
MESSAGE: dict[str, Any] = {"partnerCode": "SATLOC", "aircraftId": "695d", "logId": "02220710", "customerId": 7}
TASK = "partner_tasks:SATLOC:695d:02220710"


@pytest.fixture
async def tracker(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    async with TaskTracker(bus) as tracker:
        yield tracker


async def enqueue(tracker: TaskTracker, queue: deque[TaskMessage]) -> Execution | None:
    """What a producer does for each message."""
    task_id = tracker.task_id(QUEUE, MESSAGE["partnerCode"], MESSAGE["aircraftId"], MESSAGE["logId"])
    execution = await tracker.enqueue(task_id, queue=QUEUE, metadata=MESSAGE)
    if execution is not None:
        queue.append(tracker.message(execution, MESSAGE))
    return execution


async def work(tracker: TaskTracker, message: TaskMessage, *, fails: bool) -> str:
    """What a worker does with a message: acknowledge it, requeue it or dead-letter it."""
    execution = await tracker.claim(*tracker.keys(message.body, message.headers))
    if execution is None:
        return "ack"
    if not fails:
        await tracker.complete(execution)
        return "ack"
    failed = await tracker.fail(execution, TimeoutError("timeout"))
    assert execution.can_retry is (failed.status is ExecutionStatus.FAILED)
    return "requeue" if execution.can_retry else "dead-letter"


async def test_at_enqueue_time_a_duplicate_is_skipped_and_the_message_has_both_keys(tracker: TaskTracker) -> None:
    queue: deque[TaskMessage] = deque()
    queued = await enqueue(tracker, queue)
    assert queued is not None and queued.task_key == TASK
    assert (queued.queue, queued.status, queued.metadata) == (QUEUE, "queued", MESSAGE)
    assert await enqueue(tracker, queue) is None
    [message] = queue
    keys = {"taskId": TASK, "executionId": str(queued.execution_id)}
    assert json.loads(message.body) == MESSAGE | keys and message.headers == keys and message.persistent


async def test_in_the_worker_a_message_is_claimed_once_requeued_and_dead_lettered(tracker: TaskTracker) -> None:
    queue: deque[TaskMessage] = deque()
    await enqueue(tracker, queue)
    [message] = queue
    assert [await work(tracker, message, fails=True) for _ in range(4)] == ["requeue", "requeue", "dead-letter", "ack"]
    retried = await tracker.retry(TASK, operator="rosa")
    assert await work(tracker, tracker.message(retried), fails=False) == "ack"
    assert await work(tracker, tracker.message(retried), fails=False) == "ack"
    assert [str(one.status) for one in await tracker.history(TASK)] == ["failed", "failed", "dlq", "completed"]


async def test_the_full_history_is_found_by_the_task_id_alone(tracker: TaskTracker) -> None:
    queue: deque[TaskMessage] = deque()
    await enqueue(tracker, queue)
    for fails in (True, True, False):
        await work(tracker, queue[0], fails=fails)
    history = await tracker.history(TASK)
    assert [(str(one.status), one.error) for one in history] == [
        ("failed", "timeout"),
        ("failed", "timeout"),
        ("completed", None),
    ]
    assert len({one.execution_id for one in history}) == 3
    created = [one.enqueued_at for one in history]
    assert created == sorted(created) and len(set(created)) == 3

"""The two keys in a message: in the body and in the headers, and out of them again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload import CommandBus, Execution, InvalidCommandError, TaskTracker
from busload.errors import InvalidOperationError
from busload.tasks.message import keys_of

QUEUE = "dev_partner_tasks"
METADATA = {"partnerCode": "SATLOC", "logId": "02220710"}
ID = uuid4()
KEYS = {"taskId": "jobs:1", "executionId": str(ID)}


@pytest.fixture
async def tracker(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    async with TaskTracker(bus) as tracker:
        yield tracker


@pytest.fixture
async def queued(tracker: TaskTracker) -> Execution:
    execution = await tracker.enqueue(tracker.task_id(QUEUE, "SATLOC"), queue=QUEUE, metadata=METADATA)
    assert execution is not None
    return execution


async def test_a_message_has_both_keys_in_its_body_and_in_its_headers(tracker: TaskTracker, queued: Execution) -> None:
    message = tracker.message(queued, {"partnerCode": "SATLOC"})
    keys = {"taskId": "partner_tasks:SATLOC", "executionId": str(queued.execution_id)}
    assert json.loads(message.body) == {"partnerCode": "SATLOC", **keys}
    assert message.headers == keys and message.persistent
    assert json.loads(tracker.message(queued).body) == {**METADATA, **keys}


async def test_the_keys_of_a_message_claim_its_task(tracker: TaskTracker, queued: Execution) -> None:
    """Whether a broker has kept the headers or not, and whatever else the body is."""
    message = tracker.message(queued)
    headers = {name: value.encode() for name, value in message.headers.items()}
    ways: list[tuple[object, Any]] = [
        (message.body, message.headers),
        (message.body, None),
        (message.body.decode(), {"retries": 2}),
        (memoryview(message.body), headers),
        (json.loads(message.body), None),
        (b"\x00 no JSON", message.headers),
    ]
    assert {tracker.keys(*way) for way in ways} == {(queued.task_key, queued.execution_id)}
    assert await tracker.claim(*tracker.keys(message.body, message.headers)) is not None


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[1]", b"nothing", b"[" * 100_000, None, 7, {"taskId": "jobs:1"}, {**KEYS, "executionId": "7"}],
    ids=repr,
)
def test_a_message_without_two_keys_is_refused(body: object) -> None:
    with pytest.raises(InvalidOperationError, match=r"dead-letter it|Dead-letter it"):
        keys_of(body if not isinstance(body, dict) else json.dumps(body))


def test_headers_and_body_that_differ_are_refused() -> None:
    assert keys_of(KEYS, KEYS) == ("jobs:1", ID)
    with pytest.raises(InvalidOperationError, match="headers of the message say"):
        keys_of(KEYS, KEYS | {"taskId": "jobs:2"})


async def test_content_that_cannot_carry_the_keys_is_refused(tracker: TaskTracker, queued: Execution) -> None:
    wrong: list[Any] = [[1], "text", {"taskId": "another"}, {"at": {1, 2}}]
    for content in wrong:
        with pytest.raises(InvalidCommandError, match="/content"):
            tracker.message(queued, content)
    with pytest.raises(InvalidCommandError, match="/execution"):
        tracker.message("jobs:1")  # type: ignore[arg-type]
    with pytest.raises(InvalidOperationError, match="no id to be claimed by"):
        tracker.message(replace(queued, execution_id=None))
    assert tracker.message(queued, {"taskId": queued.task_key}).headers["taskId"] == queued.task_key
    assert isinstance(tracker.keys(tracker.message(queued).body)[1], UUID)

"""A tracker beside a real RabbitMQ, driven by the functions of the example."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import uuid4

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue

from busload import CommandBus, Execution, TaskTracker
from examples import tracker_rabbitmq as example
from tests.given import Database, Given


@pytest.fixture
async def tracker(bus: CommandBus) -> AsyncIterator[TaskTracker]:
    async with TaskTracker(bus) as tracker:
        yield tracker


@pytest.fixture
async def connection(rabbitmq_url: str) -> AsyncIterator[AbstractConnection]:
    async with await aio_pika.connect(rabbitmq_url) as connection:
        yield connection


@pytest.fixture
async def channel(connection: AbstractConnection) -> AbstractChannel:
    return await connection.channel()


@pytest.fixture
async def queue(channel: AbstractChannel, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AbstractQueue]:
    """A queue of the test's own, with another for its dead letters."""
    name = f"dev_q{uuid4().hex}"
    monkeypatch.setattr(example, "QUEUE", name)
    dead = await channel.declare_queue(f"{name}.dead", durable=True)
    arguments = {**example.TO_DEAD, "x-dead-letter-routing-key": dead.name}
    queue = await channel.declare_queue(name, durable=True, arguments=arguments)
    yield queue
    for each in (queue, dead):
        await channel.queue_delete(each.name)


async def enqueued(tracker: TaskTracker, queue: AbstractQueue, log: str = "1") -> Execution:
    execution = await tracker.enqueue(tracker.task_id(queue.name, log), queue=queue.name, metadata={"log": log})
    assert execution is not None
    return execution


async def delivered(queue: AbstractQueue) -> AbstractIncomingMessage:
    async with asyncio.timeout(20):
        while (message := await queue.get(fail=False)) is None:
            await asyncio.sleep(0.01)
    return message


async def statuses(tracker: TaskTracker, execution: Execution) -> list[str]:
    return [str(one.status) for one in await tracker.history(str(execution.task_key))]


async def test_the_message_carries_both_keys_and_survives_the_broker(
    tracker: TaskTracker, channel: AbstractChannel, queue: AbstractQueue
) -> None:
    """In its body beside the metadata, and in its headers."""
    execution = await enqueued(tracker, queue)
    await example.publish(tracker, channel, execution)
    message = await delivered(queue)
    keys = {"taskId": execution.task_key, "executionId": str(execution.execution_id)}
    assert json.loads(message.body) == {"log": "1", **keys}
    assert message.headers == keys
    assert message.delivery_mode is aio_pika.DeliveryMode.PERSISTENT
    await message.ack()


async def test_failures_are_requeued_and_then_success_is_acknowledged(
    tracker: TaskTracker, channel: AbstractChannel, queue: AbstractQueue
) -> None:
    """The same message goes round."""
    execution = await enqueued(tracker, queue)
    await example.publish(tracker, channel, execution)
    await example.consume(tracker, await delivered(queue))
    assert await statuses(tracker, execution) == ["failed", "queued"]
    again = await delivered(queue)
    assert again.redelivered
    await example.consume(tracker, again)
    assert await statuses(tracker, execution) == ["failed", "completed"]
    assert await queue.get(fail=False) is None


async def test_the_last_failure_is_dead_lettered(
    tracker: TaskTracker, channel: AbstractChannel, queue: AbstractQueue
) -> None:
    """So is a message whose keys do not belong together."""
    execution = await enqueued(tracker, queue, "broken")
    await example.publish(tracker, channel, execution)
    for _ in range(3):
        await example.consume(tracker, await delivered(queue))
    assert await statuses(tracker, execution) == ["failed", "failed", "dlq"]
    dead = await channel.get_queue(f"{queue.name}.dead")
    letter = await delivered(dead)
    assert json.loads(letter.body)["taskId"] == execution.task_key
    await letter.ack()
    body = json.dumps({"taskId": execution.task_key, "executionId": str(uuid4())}).encode()
    await channel.default_exchange.publish(aio_pika.Message(body), routing_key=queue.name)
    await example.consume(tracker, await delivered(queue))
    await (await delivered(dead)).ack()


async def test_a_message_that_outlives_its_worker_is_acknowledged_and_its_task_is_not_lost(
    tracker: TaskTracker,
    bus: CommandBus,
    given: Given,
    database: Database,
    rabbitmq_url: str,
    channel: AbstractChannel,
    queue: AbstractQueue,
) -> None:
    """By the broker's own redelivery: it comes before anybody knows that the worker is dead."""
    execution = await enqueued(tracker, queue)
    await example.publish(tracker, channel, execution)
    doomed = await aio_pika.connect(rabbitmq_url)
    doomed_queue = await (await doomed.channel()).get_queue(queue.name)
    keys = json.loads((await delivered(doomed_queue)).body)
    async with TaskTracker(bus, name="doomed") as dying:
        assert await dying.claim(keys["taskId"], keys["executionId"]) is not None
        await doomed.close()  # without an acknowledgement
        message = await delivered(queue)
        assert message.redelivered
        await example.consume(tracker, message)
        assert await queue.get(fail=False) is None  # acknowledged away, and the task runs nowhere
        given.died(int(database.value("SELECT worker FROM busload.worker WHERE name = 'doomed'")))
        [waiting] = await tracker.recover(queue.name, waiting_for=timedelta(0))
    await example.publish(tracker, channel, waiting)
    for _ in range(2):
        await example.consume(tracker, await delivered(queue))
    assert await statuses(tracker, execution) == ["lost", "failed", "completed"]


async def test_who_was_superseded_while_it_failed_acknowledges(
    tracker: TaskTracker,
    bus: CommandBus,
    given: Given,
    database: Database,
    channel: AbstractChannel,
    queue: AbstractQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process runs the task: the message has done its work."""
    execution = await enqueued(tracker, queue)
    await example.publish(tracker, channel, execution)
    async with TaskTracker(bus, name="other") as other:

        async def process(running: Execution) -> None:
            given.died(int(database.value("SELECT worker FROM busload.lease")))
            assert await other.claim(str(running.task_key), str(running.execution_id)) is not None
            raise TimeoutError

        monkeypatch.setattr(example, "process", process)
        await example.consume(tracker, await delivered(queue))
        assert await queue.get(fail=False) is None
        assert await statuses(tracker, execution) == ["lost", "processing"]


async def test_an_acknowledgement_that_fails_is_no_failure_of_the_task(
    tracker: TaskTracker,
    rabbitmq_url: str,
    channel: AbstractChannel,
    queue: AbstractQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker is gone after the work: the task is completed, and its message comes again and finds that."""
    execution = await enqueued(tracker, queue)
    await example.publish(tracker, channel, execution)
    doomed = await aio_pika.connect(rabbitmq_url)
    message = await delivered(await (await doomed.channel()).get_queue(queue.name))

    async def process(running: Execution) -> None:
        await doomed.close()

    monkeypatch.setattr(example, "process", process)
    with pytest.raises(aio_pika.exceptions.ChannelInvalidStateError):
        await example.consume(tracker, message)
    assert await statuses(tracker, execution) == ["completed"]
    await example.consume(tracker, await delivered(queue))
    assert await queue.get(fail=False) is None

"""RabbitMQ delivers, busload remembers: each task is tracked by two keys, and none is lost with its message.
AMQP_URL=amqp://localhost python examples/tracker_rabbitmq.py"""

import asyncio
import os
from datetime import timedelta
from functools import partial
from typing import Any

import aio_pika

from busload import CommandBus, Execution, TaskTracker
from busload.commands import ExecutionStatus
from busload.errors import InvalidOperationError, SupersededError

QUEUE, DEAD, FLIGHT = "dev_flight_logs", "dev_flight_logs.dead", os.urandom(4).hex()  # another one in each run
TO_DEAD: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}


async def publish(tracker: TaskTracker, channel: aio_pika.abc.AbstractChannel, execution: Execution) -> None:
    keyed = tracker.message(execution)  # both keys, in the body and in the headers
    headers: Any = keyed.headers
    message = aio_pika.Message(keyed.body, headers=headers, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, routing_key=execution.queue)


async def consume(tracker: TaskTracker, message: aio_pika.abc.AbstractIncomingMessage) -> None:
    try:
        keys = tracker.keys(message.body, message.headers)
        execution = await tracker.claim(*keys)  # None: it runs elsewhere, or has ended
        status = ExecutionStatus.COMPLETED if execution is None else await run(tracker, execution)
    except SupersededError:  # this process was out of reach for so long that another one has taken over
        status = ExecutionStatus.COMPLETED
    except InvalidOperationError:  # two keys that do not belong together
        status = ExecutionStatus.DLQ
    if status is ExecutionStatus.COMPLETED:
        await message.ack()
    else:
        await message.reject(requeue=status is not ExecutionStatus.DLQ)


async def run(tracker: TaskTracker, execution: Execution) -> ExecutionStatus:
    try:
        await process(execution)
    except Exception as error:
        return (await tracker.fail(execution, error)).status
    await tracker.complete(execution)
    print(f"{execution.task_key}: completed by attempt {execution.attempt}")
    return ExecutionStatus.COMPLETED


async def process(execution: Execution) -> None:
    if execution.metadata["log"] == "broken" or execution.attempt == 1:
        raise TimeoutError("The partner did not answer.")


async def main() -> None:
    connection = await aio_pika.connect(os.environ.get("AMQP_URL", "amqp://localhost"))
    async with connection, CommandBus() as bus, TaskTracker(bus) as tracker:
        await bus.migrate()
        channel = await connection.channel()
        dead = await channel.declare_queue(DEAD, durable=True)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments=TO_DEAD)
        await queue.consume(partial(consume, tracker))
        for log in ("02220710", "broken", "forgotten"):  # the last: as if we had died before publishing it
            task_id = tracker.task_id(QUEUE, FLIGHT, log)
            if (queued := await tracker.enqueue(task_id, queue=QUEUE, metadata={"log": log})) and log != "forgotten":
                await publish(tracker, channel, queued)
        while (await tracker.history(task_id))[-1].status is not ExecutionStatus.COMPLETED:
            await asyncio.sleep(0.2)  # an application looks every minute, for what has waited for five
            for execution in await tracker.recover(QUEUE, waiting_for=timedelta(seconds=1)):
                await publish(tracker, channel, execution)
        letter = await dead.get(no_ack=True, fail=False)
        print(letter.headers["taskId"] if letter else "nothing", "is dead-lettered")


if __name__ == "__main__":
    asyncio.run(main())

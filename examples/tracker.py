"""Five facts about tasks that another queue runs: two keys, the task and the execution, are enough.

python examples/tracker.py
"""

from __future__ import annotations

import asyncio
import secrets

from busload import CommandBus, TaskTracker

QUEUE = "dev_partner_tasks"


async def main() -> None:
    async with CommandBus() as bus, TaskTracker(bus) as tracker:
        await bus.migrate()

        flight = secrets.token_hex(4)  # so that you can run this again: it would be the same task
        task_id = tracker.task_id(QUEUE, "SATLOC", "695d", flight)
        print(f"1. The task id is made of queue and message: {task_id}")

        queued = await tracker.enqueue(task_id, queue=QUEUE, metadata={"partner": "SATLOC", "aircraft": "695d"})
        assert queued is not None
        assert queued.execution_id is not None

        duplicate = await tracker.enqueue(task_id, queue=QUEUE)
        handed_out = await asyncio.gather(*(tracker.claim(task_id, queued.execution_id) for _ in range(10)))
        [running] = [execution for execution in handed_out if execution is not None]

        # Three attempts fail; the message goes round with the keys it has.
        failed = running
        for attempt in range(1, 4):
            failed = await tracker.fail(running, TimeoutError(f"no answer to attempt {attempt}"))
            running = await tracker.claim(task_id, queued.execution_id) or running
        retried = await tracker.retry(task_id, operator="rosa")
        assert retried.execution_id is not None
        again = await tracker.claim(task_id, retried.execution_id)
        assert again is not None
        await tracker.complete(again)

        history = await tracker.history(task_id)
        ids = {execution.execution_id for execution in history}
        print(f"2. Every execution has an id of its own: {len(ids)} executions, {len(ids)} ids")
        print(f"3. A task that is queued or runs is not enqueued again: {duplicate}")
        print(f"4. Of ten workers with the same message one gets it: {10 - handed_out.count(None)}")
        print(f"5. The task id alone finds the whole chain, also out of the {failed.status}:")
        for execution in history:
            print(f"   attempt {execution.attempt}: {execution.status}, {execution.error or 'no error'}")


if __name__ == "__main__":
    asyncio.run(main())

"""From a tracker of your own to busload's, in three phases: shadow, dual write, cut over.

python -m examples.tracker_phases.move
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta

from busload import CommandBus, Dedup
from busload.tasks import Phase, PhasedTracker
from examples.tracker_phases.sqlite_tracker import ATTEMPTS, SqliteTracker

QUEUE = "partner_tasks"
AT_ONCE = Dedup(window=timedelta(0))  # the tracker of our own lets a task be enqueued again as soon as it has ended


async def one_task(tracker: PhasedTracker, name: str) -> None:
    """What the application does in every phase: it does not know in which one it is."""
    task_id = tracker.task_id(QUEUE, name)
    queued = await tracker.enqueue(task_id, queue=QUEUE, dedup=AT_ONCE, max_attempts=ATTEMPTS)
    assert queued is not None
    assert queued.execution_id is not None
    running = await tracker.claim(task_id, queued.execution_id)
    assert running is not None
    await tracker.complete(running)
    [*_, newest] = await tracker.history(task_id)
    assert newest.status == "completed"


async def main() -> None:
    run = secrets.token_hex(4)  # so that you can run this again: it would be the same tasks and phases
    old = SqliteTracker(":memory:")
    async with CommandBus() as bus, PhasedTracker(bus, old, old_name=f"sqlite-{run}") as tracker:
        await bus.migrate()
        for phase in Phase:
            if phase is not Phase.SHADOW:  # an operator would do it: busload tracker switch dual_write
                await tracker.switch(phase, operator="rosa", at_least=12)
            for n in range(3):
                await one_task(tracker, f"{run}-{phase}-{n}")
            report = await tracker.report()
            print(f"{report.phase}: {report.compared} calls compared, {report.agreed} agreed")


if __name__ == "__main__":
    asyncio.run(main())

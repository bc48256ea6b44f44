"""What happens in both applications: people record activities one by one, and a worker syncs them in bulk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from busload import SyncCommandBus, Worker
from busload.sync import SyncBuffer
from examples.contact_activity.service import POISON

LEADS, ACTIVITIES, BAD = 25, 500, 317

Record = Callable[[int, str, str], None]
"""Writes the activity of a lead, by its number, in one transaction."""


def tell(bus: SyncCommandBus, events: SyncBuffer, scores: SyncBuffer, record: Record) -> None:
    """Record activities, sync them, and say what happened."""
    for n in range(1, ACTIVITIES + 1):
        record(n % LEADS, "call", f"Call {n}" if n != BAD else f"{POISON}alert({n})")
    try:
        record(1, "fax", "They hung up.")
    except ValueError as error:
        print(f"Rolled back: {error}")
    print(f"{events.status().waiting} events wait, and {scores.status().waiting} scores, the last of each lead")

    asyncio.run(_sync(bus, events, scores))
    for status in (events.status(), scores.status()):
        left = status.waiting + status.grouped
        print(f"{status.name}: {status.done} synced, {left} left; calls: {status.calls}")
    for group in bus.troubleshooting.list(events.name):
        for item in group.details["items"]:
            print(f"A person must look at event {item['id']}: {item['code']}, {item['message']}")


async def _sync(bus: SyncCommandBus, *buffers: SyncBuffer) -> None:
    """Work until nothing waits and nothing is tried again. In production that is `busload worker`, and it goes on."""
    for buffer in buffers:
        buffer.flush()  # the story does not wait for max_age
    async with Worker(bus, concurrency=4):
        await asyncio.to_thread(_wait, buffers)


def _wait(buffers: Sequence[SyncBuffer], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while any(map(_is_busy, buffers)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_busy(buffer: SyncBuffer) -> bool:
    status = buffer.status()
    return bool(status.waiting or status.groups_ready or status.groups_running or status.groups_retrying)

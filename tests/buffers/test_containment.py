"""What a buffer promises where much goes wrong at once: poison is contained, and a stop loses nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from math import ceil, log2
from typing import Any

import pytest

from busload import CommandBus, Group, PermanentCommandError, RetryPolicy, TransientCommandError
from tests.given import Database, Given, short_and_long

pytestmark = pytest.mark.usefixtures("invariants")

EVENTS, SIZE = "events", 100


@short_and_long("groups", (25,), (100,))
@pytest.mark.parametrize("error", [TransientCommandError, PermanentCommandError])
async def test_one_percent_of_poison_keeps_nothing_else_from_being_done(
    bus: CommandBus, given: Given, database: Database, error: type[Exception], groups: int
) -> None:
    """Whoever is there when a call fails is not blamed for it, and that takes few calls more."""
    events = bus.buffer(EVENTS, size=SIZE, max_groups=groups)
    numbers = range(SIZE * groups)
    poison = set(random.Random(15).sample(numbers, len(numbers) // 100))
    done, calls, retry = Counter[int](), 0, RetryPolicy(max_attempts=3, backoff=(0,))

    @events.handler(retry=retry, isolate_poison=True)
    async def deliver(group: Group, ctx: Any) -> None:
        nonlocal calls
        calls += 1
        if poison.intersection(item.data for item in group):
            raise error("somebody here is poisonous")
        done.update(item.data for item in group)

    await events.add_many(numbers)
    await given.drained(domains=[EVENTS])
    assert done == Counter(set(numbers) - poison), "each of the others once"
    assert {n for (n,) in database.rows("SELECT data::text::int FROM busload.buffered")} == poison
    parked = await bus.troubleshooting.list(EVENTS, limit=1000)
    assert sum(item.data["items"] for item in parked) == len(poison)
    assert {one["id"] for item in parked for one in item.details["items"]} == {
        id for (id,) in database.rows("SELECT id FROM busload.buffered")
    }, "each with its error"
    # A whole call per attempt, and for each bad item a way down to it and a call for what is left; twice at most, since
    # the last attempt looks again at the bad ones of a group together.
    assert calls <= retry.max_attempts * groups + len(poison) * (ceil(log2(SIZE)) + 4)
    status = await events.status()
    assert (status.done, status.calls, status.waiting) == (len(numbers) - len(poison), calls, 0)
    database.check_invariants()


async def test_a_worker_that_is_drained_while_others_add_loses_no_event(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Each of a hundred events is delivered once, by one of the workers that come and go meanwhile."""
    events = bus.buffer(EVENTS, size=7, max_age=timedelta(milliseconds=5))
    received = Counter[int]()

    @events.handler()
    async def deliver(group: Group, ctx: Any) -> None:
        await asyncio.sleep(0.001)
        received.update(item.data for item in group)

    async def add(numbers: range) -> None:
        for n in numbers:
            await events.add(n)

    adding = asyncio.gather(*(add(range(first, 100, 4)) for first in range(4)))
    drains = 0
    while not adding.done():
        await given.drained(domains=[EVENTS])
        drains += 1
    await adding
    await events.flush()
    await given.drained(domains=[EVENTS])
    assert drains > 0 and received == Counter(range(100))
    assert database.count("buffered") == 0
    assert database.value("SELECT max(attempt) FROM busload.execution") == 1
    database.check_invariants()

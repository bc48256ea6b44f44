"""A receiver whose limit moves while two workers call it: used, and hardly overstepped."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from busload import Command, HandlerContext, RateLimit, RetryPolicy
from tests.given import Database, Given, eventually
from tests.limits.test_limiter import Service

LEVELS = (100, 60, 120, 80, 150, 50)
EACH = 12.0
"""Seconds at each of them."""


@pytest.mark.chaos
async def test_a_limit_that_moves_is_used_and_hardly_overstepped(given: Given, database: Database) -> None:
    """72 seconds: at least 85 % used, fewer than 2 % refused, and no attempt burnt.

    The receiver counts in windows of a second. One that counts in quarters is used to 73 to 83 % only.
    """
    service = Service(limit=LEVELS[0])

    async def push(command: Command, ctx: HandlerContext) -> None:
        service.call()

    given.handler(
        function=push, rate_limit=RateLimit(50, name="partner", adaptive=True), retry=RetryPolicy(max_attempts=1)
    )
    batch_id = await given.batch(commands=20_000)
    marks = []
    async with given.running(concurrency=50), given.running(concurrency=50):
        await eventually(lambda: service.served >= 300)
        for level in LEVELS:
            service.limit = level
            marks.append((time.monotonic(), service.served, service.refused))
            await asyncio.sleep(EACH)
        marks.append((time.monotonic(), service.served, service.refused))
    allowed = 0.0
    for level, (before, after) in zip(LEVELS, pairwise(marks), strict=True):
        seconds, served, refused = (b - a for a, b in zip(before, after, strict=True))
        allowed += level * seconds
        print(f"{level:4d}/s: used {served / (level * seconds):.1%}, refused {refused} of {served + refused}")
    served, refused = marks[-1][1] - marks[0][1], marks[-1][2] - marks[0][2]
    print(f"used {served / allowed:.1%}, refused {refused / (served + refused):.2%}")
    assert served >= 0.85 * allowed
    assert refused < 0.02 * (served + refused)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 0
    database.check_invariants()

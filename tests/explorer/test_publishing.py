"""Whoever publishes is interrupted at each turn, in each way; then what was begun comes to its end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.explorer.crash_points import PAGE
from tests.explorer.publishing import (
    DECLARE,
    HOW,
    PLANS,
    PUBLISH,
    Line,
    Site,
    SteppedNats,
    SteppedRedis,
    counted,
    points,
)
from tests.given import Database, short_and_long


@pytest.fixture
async def redis(dsn: str, database: Database, redis_url: str) -> AsyncIterator[Site]:
    async with Line(redis_url) as line, Site.opened(dsn, database, SteppedRedis, redis_url, line) as site:
        yield site


@pytest.fixture
async def nats(dsn: str, database: Database, nats_url: str) -> AsyncIterator[Site]:
    async with Line(nats_url) as line, Site.opened(dsn, database, SteppedNats, nats_url, line) as site:
        yield site


@pytest.mark.timeout(1200)
@short_and_long("whole", (False,), (True,))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("plan", PLANS)
async def test_a_crash_at_any_point_of_publishing_and_another_during_recovery_lose_and_double_nothing(
    redis: Site, plan: str, how: str, whole: bool
) -> None:
    """The short run has one crash of the recovery for each crash point, the long run has all."""
    turns, recovery = await redis.turns_of(plan), await redis.turns_of_a_recovery()
    for point in points(plan, len(turns), how, len(recovery), whole=whole):
        await redis.interrupt(point)
    await redis.run_everything()


@pytest.mark.parametrize("how", HOW)
async def test_another_broker_that_is_lost_at_any_call_loses_and_doubles_nothing(nats: Site, how: str) -> None:
    for plan in PLANS:
        turns = await nats.turns_of(plan)
        assert PUBLISH in turns
        for point in points(plan, len(turns), how, len(turns), whole=False):
            if turns[point.turn] in (DECLARE, PUBLISH):
                await nats.interrupt(point)
    await nats.run_everything()


async def test_the_docs_count_the_crash_points_of_publishing_that_there_are(redis: Site) -> None:
    page = PAGE.read_text()
    assert await counted(page, redis) == page, "Run `make figures`."

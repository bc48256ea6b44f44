"""How much a worker claims: enough that fast handlers never starve, and no more than slow ones can run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given as whatever
from hypothesis import strategies as st

from busload import Command, CommandBus, HandlerContext, Worker, WorkerSettings
from busload.worker.claimer import SMALLEST_GAP, Claimer
from busload.worker.lifecycle import Run
from busload.worker.pace import SHORTEST_SAMPLE, Look, Pace
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, eventually

HELD = "SELECT coalesce(sum(open), 0) FROM busload.lease"
LARGEST = "SELECT max(n) FROM (SELECT count(*) AS n FROM busload.execution GROUP BY lease_id) AS lease"

# -- the pace as a function of what was measured --------------------------------------------------------------------


def pace(prefetch: float = 0.05, longest: float = 2.0) -> Pace:
    return Pace(prefetch, longest)


def test_before_anything_was_measured_nothing_is_held_ahead() -> None:
    """The first claim fills the slots."""
    assert pace().ahead(0, 0.0) == 0


def test_as_many_are_held_ahead_as_finish_within_the_horizon() -> None:
    assert pace(0.05).ahead(1000, 1.0) == 50
    assert pace(0.5).ahead(1000, 1.0) == 500


def test_slow_handlers_hold_nothing_ahead() -> None:
    """Ten a second, of which half a one finishes in time."""
    assert pace().ahead(10, 1.0) == 0


def test_handlers_that_slow_down_are_noticed_within_the_horizon() -> None:
    """A whole horizon without a result is all there is to know."""
    measured = pace()
    assert measured.ahead(1000, 1.0) == 50
    assert measured.ahead(1000, 1.05) == 0


def test_handlers_that_speed_up_are_noticed_within_the_horizon() -> None:
    measured = pace()
    assert measured.ahead(20, 1.0) == 1
    assert measured.ahead(20 + 500, 1.05) == pytest.approx(500, abs=1)


def test_a_part_of_a_horizon_counts_in_part() -> None:
    measured = pace()
    measured.ahead(1000, 1.0)
    assert measured.ahead(1000, 1.025) == pytest.approx(25, abs=1)


def test_what_is_too_short_to_be_measured_is_measured_with_what_follows() -> None:
    measured = pace()
    assert measured.ahead(5, SHORTEST_SAMPLE / 2) == 0
    assert measured.ahead(10, 2 * SHORTEST_SAMPLE) == pytest.approx(0.05 * 10 / (2 * SHORTEST_SAMPLE), abs=1)


def test_where_claims_are_slow_more_is_held_ahead_up_to_a_bound() -> None:
    """Fewer and larger ones leave more of the machine to the handlers."""
    slow = pace(0.05, longest=0.5)
    for _ in range(50):
        slow.claimed(0.02)
    assert slow.ahead(1000, 1.0) == pytest.approx(200, abs=1)
    for _ in range(50):
        slow.claimed(2.0)
    assert slow.horizon == 0.5 and slow.ahead(2000, 2.0) == 500


def test_without_prefetch_nothing_is_ever_held_ahead() -> None:
    """However fast they are, and however slow the claims."""
    off = pace(0.0)
    for n in range(1, 5):
        off.claimed(1.0)
        assert off.ahead(10_000 * n, float(n)) == 0


@whatever(
    prefetch=st.floats(0.001, 7.5),
    steps=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 10), st.floats(0, 5)), max_size=30),
)
def test_what_is_held_ahead_is_never_more_than_the_fastest_moment_allows(
    prefetch: float, steps: list[tuple[int, float, float]]
) -> None:
    """A bound that holds whatever is measured."""
    measured = pace(prefetch, longest=2.0)
    finished, busy, fastest, sampled = 0, 0.0, 0.0, (0, 0.0)
    for more, seconds, claim_took in steps:
        finished, busy = finished + more, busy + seconds
        measured.claimed(claim_took)
        elapsed = busy - sampled[1]
        if elapsed >= SHORTEST_SAMPLE:
            fastest = max(fastest, (finished - sampled[0]) / elapsed)
            sampled = (finished, busy)
        ahead = measured.ahead(finished, busy)
        assert 0 <= ahead <= fastest * max(prefetch, 2.0) * (1 + 1e-9)


# -- the claim round by round ---------------------------------------------------------------------------------------


@asynccontextmanager
async def rounds(given: Given, **options: Any) -> AsyncIterator[tuple[Run, Claimer]]:
    """A worker whose claims are made by the test, one by one."""
    async with given.worker(**options)._running() as run:
        yield run, run._claimer


def stuck(given: Given) -> tuple[list[Command], asyncio.Event]:
    """A handler that waits until it is let go, and what it has been given so far."""
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    return given.handler("Debit", wait), go


async def test_a_claim_that_emptied_the_queue_is_not_followed_by_another_at_once(
    given: Given, database: Database
) -> None:
    """What is sent meanwhile is claimed together, after the gap; and drain does not take the gap for an end."""
    seen = given.handler()
    async with rounds(given) as (_, claimer):
        poll = given.settings.poll_every.total_seconds()
        assert await claimer.once() == Look(poll, found_nothing=True) and claimer.emptied
        claimer._empty_at = time.monotonic() + 60  # the gap is two milliseconds; the test may take longer
        for _ in range(3):
            await given.sent()
            look = await claimer.once()
            assert look.pause is not None and look.pause > 1 and not look.found_nothing
        claimer._empty_at = time.monotonic() - SMALLEST_GAP
        assert database.count("queue") == 3
        await claimer.once()
        assert database.count("queue") == 0
        await eventually(lambda: len(seen) == 3)


async def test_many_notifications_are_answered_by_few_claims(given: Given, database: Database) -> None:
    """One wake-up each, within the smallest gap after a claim that found nothing: none of them asks the database."""
    given.handler()
    async with rounds(given) as (_, claimer):
        await claimer.once()
        looks = asked = 0
        began = time.monotonic()

        async def look() -> bool:
            nonlocal looks, asked
            found_nothing = (await claimer.once()).found_nothing
            looks, asked = looks + 1, asked + found_nothing
            return looks > 100 and looks > 10 * asked

        async with asyncio.timeout(20):
            while not await look():
                pass
        assert asked <= (time.monotonic() - began) / SMALLEST_GAP + 1


async def test_drain_does_not_end_while_something_is_ready(bus: CommandBus, given: Given, database: Database) -> None:
    """A chain of commands, of which each is sent when the queue has just been found empty."""

    async def go_on(command: Command, ctx: HandlerContext) -> None:
        if command.data < 100:
            await ctx.send(DOMAIN, "Debit", command.data + 1)

    seen = given.handler("Debit", go_on)
    await given.sent(data=1)
    assert await given.drained() == 100
    assert [command.data for command in seen] == list(range(1, 101))
    assert database.count("queue") == 0


async def test_the_first_claim_fills_the_slots_and_no_more(given: Given, database: Database) -> None:
    """Nothing is known about the handlers yet."""
    seen, go = stuck(given)
    await given.batch(commands=100)
    async with rounds(given, concurrency=7) as (running, claimer):
        assert (await claimer.once()).pause == 0
        assert running._line.in_hand == 7 == database.value(HELD)
        await eventually(lambda: len(seen) == 7)
        for _ in range(5):
            assert (await claimer.once()).pause is None
        assert running._line.in_hand == 7 == database.value(HELD)
        go.set()


async def test_handlers_that_never_finish_hold_nothing_but_their_slots(given: Given, database: Database) -> None:
    """Slow ones never hoard, whoever calls."""
    seen, go = stuck(given)
    await given.batch(commands=100)
    async with given.running(concurrency=5):
        await eventually(lambda: len(seen) == 5)
        for _ in range(20):
            await given.sent()  # wakes the claim
        over = time.monotonic() + 0.2
        await eventually(lambda: time.monotonic() > over)
        assert (len(seen), database.value(HELD)) == (5, 5)
        go.set()
        await eventually(lambda: len(seen) == 120)
    database.check_invariants()


async def test_fast_handlers_are_claimed_ahead_in_proportion_to_their_pace(given: Given, database: Database) -> None:
    """Far more in one claim than there are slots, and what runs is never more than these."""
    given.handler()
    await given.batch(commands=5000)
    settings = replace(given.settings, prefetch=timedelta(milliseconds=200))
    assert await given.drained(concurrency=10, settings=settings) == 5000
    assert database.value(LARGEST) > 50
    assert database.value("SELECT count(DISTINCT lease_id) FROM busload.execution") < 250  # 500 without
    database.check_invariants()


async def test_without_prefetch_no_claim_is_larger_than_the_slots(given: Given, database: Database) -> None:
    given.handler()
    await given.batch(commands=500)
    settings = replace(given.settings, prefetch=timedelta(0))
    async with rounds(given, concurrency=10, settings=settings) as (running, claimer):
        most = 0
        while database.count("queue"):
            await claimer.once()
            most = max(most, running._line.in_hand)
            await asyncio.sleep(0)
        assert most == 10
        await eventually(lambda: running._line.in_hand == 0)
    assert database.value(LARGEST) <= 10
    assert database.count("execution") == 500
    database.check_invariants()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prefetch": timedelta(seconds=-1)}, "prefetch"),
        ({"prefetch": timedelta(seconds=8)}, "a quarter of the lease"),
        ({"prefetch": timedelta(seconds=1), "lease_for": timedelta(seconds=3)}, "a quarter of the lease"),
        ({"settle": "sometimes"}, "'coalesced' or 'immediate', found 'sometimes'"),
    ],
)
def test_settings_that_cannot_work_are_refused(bus: CommandBus, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Worker(bus, domains=[DOMAIN], settings=WorkerSettings(**wrong))


def test_prefetch_may_be_anything_up_to_a_quarter_of_the_lease(bus: CommandBus) -> None:
    for seconds in (0, 0.001, 7.5):
        Worker(bus, domains=[DOMAIN], settings=WorkerSettings(prefetch=timedelta(seconds=seconds)))


# -- while results cannot be written --------------------------------------------------------------------------------


async def test_claims_stop_while_there_is_no_room_for_results_and_go_on_when_there_is(
    given: Given, database: Database, dsn: str
) -> None:
    """What is in hand and what waits to be written is never more than the settlement can hold."""
    seen = given.handler()
    await given.batch(commands=300)
    settings = replace(given.settings, flush_size=10, poll_every=timedelta(hours=1), sweep_every=timedelta(hours=1))
    with psycopg.connect(dsn) as brake:
        brake.execute("LOCK TABLE busload.execution IN SHARE MODE")
        async with given.running(concurrency=10, settings=settings):
            await eventually(lambda: database.rows(LOCKED_OUT))
            await eventually(lambda: len(seen) == 50)
            over = time.monotonic() + 0.2
            await eventually(lambda: time.monotonic() > over)
            assert (len(seen), database.value(HELD)) == (50, 50)
            brake.rollback()
            await eventually(lambda: len(seen) == 300)
    assert database.count("execution") == 300
    database.check_invariants()


async def test_what_is_in_hand_and_what_waits_never_exceed_the_room(given: Given, database: Database, dsn: str) -> None:
    """At every moment: also while a fast pace asks for far more."""
    most = 0

    async def look(command: Command, ctx: HandlerContext) -> None:
        nonlocal most
        most = max(most, running._line.in_hand + running._settlement.stats.waiting)

    given.handler("Debit", look)
    await given.batch(commands=2000)
    settings = replace(given.settings, flush_size=20, prefetch=timedelta(seconds=1))
    async with rounds(given, concurrency=20, settings=settings) as (running, claimer):
        capacity = running._settlement.stats.capacity
        while database.count("queue"):
            await claimer.once()
            assert running._line.in_hand + running._settlement.stats.waiting <= capacity
            await asyncio.sleep(0)
    assert 20 < most <= capacity == 100


# -- a fast start that gets stuck -----------------------------------------------------------------------------------

Running = Callable[[Command, HandlerContext], Awaitable[None]]


class Story:
    """Five hundred commands run fast, then every slot is stuck, with others in line before them."""

    def __init__(self, given: Given, fast: int = 500) -> None:
        self._given, self._fast = given, fast
        self.go = asyncio.Event()
        self.first: list[Command] = []
        self.second: list[Command] = []
        given.bus.handler(DOMAIN, "Debit")(self._run)

    async def _run(self, command: Command, ctx: HandlerContext) -> None:
        self.first.append(command)
        if len(self.first) > self._fast:
            await self.go.wait()

    @asynccontextmanager
    async def another_worker(self, dsn: str) -> AsyncIterator[None]:
        async with CommandBus(dsn) as bus:

            async def run(command: Command, ctx: HandlerContext) -> None:
                self.second.append(command)

            bus.handler(DOMAIN, "Debit")(run)
            async with Given(bus, self._given.database, self._given.settings).running(concurrency=50):
                yield

    def ran(self) -> Counter[Any]:
        return Counter(command.command_id for command in self.first + self.second)


async def test_a_worker_that_got_stuck_hands_back_what_stands_in_line(
    given: Given, database: Database, dsn: str
) -> None:
    """Another one runs it, the trail says so, no attempt is burnt, and nothing runs twice."""
    story = Story(given)
    batch_id = await given.batch(commands=3000)
    async with given.running(concurrency=5):
        await eventually(lambda: len(story.first) == 505)
        in_line = database.value("SELECT sum(hi - lo + 1) FROM busload.lease") - 505
        assert in_line > 0 or database.value(HELD) > 5
        async with story.another_worker(dsn):
            await eventually(lambda: len(story.second) == 3000 - 505)
            assert len(story.first) == 505
            story.go.set()
    assert story.ran().total() == len(story.ran()) == 3000
    released = database.value("SELECT sum(hi - lo + 1) FROM busload.event WHERE type = 'RELEASED'")
    assert released > 0
    assert database.rows("SELECT DISTINCT attempt, outcome FROM busload.execution") == [(1, "COMPLETED")]
    one = database.value(
        "SELECT command_id FROM busload.command JOIN busload.event ON id BETWEEN lo AND hi WHERE type = 'RELEASED'"
        " LIMIT 1"
    )
    trail = [event.type for event in await given.bus.get_audit_trail(DOMAIN, one)]
    assert trail == ["SENT", "RECEIVED", "RELEASED", "RECEIVED", "COMPLETED"]
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    database.check_invariants()


async def test_a_worker_that_got_stuck_does_not_take_back_what_it_handed_back(given: Given, database: Database) -> None:
    """What it gave away was not run, so it says nothing about its pace."""
    story = Story(given)
    await given.batch(commands=3000)
    async with given.running(concurrency=5):
        await eventually(lambda: database.value("SELECT count(*) FROM busload.event WHERE type = 'RELEASED'"))
        await eventually(lambda: database.value(HELD) == 5)
        before = database.count("event")
        for _ in range(10):
            await given.sent()
        over = time.monotonic() + 0.3
        await eventually(lambda: time.monotonic() > over)
        assert database.value(HELD) == 5 and database.count("event") == before
        story.go.set()
        await eventually(lambda: len(story.first) == 3010)
    assert story.ran().total() == len(story.ran())
    database.check_invariants()


async def test_a_hand_back_that_failed_is_repeated(
    given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is lost, and with it the answer; nothing stays in a line that nobody stands in."""
    story = Story(given)
    watch, braked = Claimer._watch_line, asyncio.Event()

    async def watch_once_braked(claimer: Claimer) -> float | None:
        return await watch(claimer) if braked.is_set() else 0.02

    monkeypatch.setattr(Claimer, "_watch_line", watch_once_braked)
    await given.batch(commands=3000)
    # With the usual 50 ms a pause of the machine right before the slots are stuck would leave the line empty.
    settings = replace(given.settings, prefetch=timedelta(milliseconds=200))
    async with given.running(concurrency=5, settings=settings):
        await eventually(lambda: len(story.first) == 505)
        settled = "SELECT count(*) FROM busload.execution"
        await eventually(lambda: database.value(settled) == 500)
        with psycopg.connect(dsn) as brake:
            brake.execute("SELECT FROM busload.lease FOR UPDATE")
            braked.set()
            blocked = (
                "SELECT pid FROM pg_stat_activity"
                " WHERE (query LIKE '%RELEASED%' OR query LIKE 'SELECT lease_id%') AND wait_event_type = 'Lock'"
                " AND datname = current_database()"
            )
            [(pid,)] = await eventually(lambda: database.rows(blocked))
            database.rows("SELECT pg_terminate_backend(%s)", pid)
            await eventually(lambda: not database.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid))
        async with story.another_worker(dsn):
            await eventually(lambda: len(story.second) == 3000 - 505)
            story.go.set()
    assert story.ran().total() == len(story.ran()) == 3000
    assert database.rows("SELECT DISTINCT attempt, outcome FROM busload.execution") == [(1, "COMPLETED")]
    database.check_invariants()

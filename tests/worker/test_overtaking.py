"""Who goes first in a worker's line: a small batch does not wait for what was claimed of a large one before it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext
from busload.commands.execution import Lease, Leased
from busload.commands.load import Load
from busload.worker.lifecycle import Run
from busload.worker.line import LONGEST_TURN, SHORT_TURN, Claimed, Line
from busload.worker.overtake import FEW, LONGEST_GAP, SHARE, SMALLEST_GAP, Overtaker, Precedence
from busload.worker.shared import Shared
from tests.given import DOMAIN, Database, Given, eventually

# -- who overtakes --------------------------------------------------------------------------------------------------


def lease(owner: int, commands: int = 5, *, domain: str = DOMAIN, priority: int = 0, overtakes: bool = False) -> Lease:
    load = Load.of(owner, commands)
    created = datetime.now(UTC)
    made = Lease(uuid4(), load, domain, None, priority, 1, 0, 0, created, commands, commands, None, owner)
    made.overtakes = overtakes
    return made


def overtaking(precedence: Precedence, *leases: Lease, finished: int = 0, out_of_turn: bool = False) -> list[int]:
    found = precedence.decide(leases, finished, out_of_turn=out_of_turn)
    owners = [one.fair for one in leases if one.overtakes]
    assert found == bool(owners)
    return owners


def test_an_owner_who_has_few_overtakes_those_who_have_many() -> None:
    assert overtaking(Precedence(), lease(1, 900), lease(2, 5)) == [2]
    before = Precedence()
    assert overtaking(before, lease(1, 900)) == []
    assert overtaking(before, lease(2, 5)) == [2]


def test_nobody_overtakes_where_all_have_few_or_all_have_many() -> None:
    few, many = Precedence(), Precedence()
    for _ in range(3):
        assert overtaking(few, lease(1, FEW), lease(2, 5)) == []
        assert overtaking(many, lease(1, FEW + 1), lease(2, 500)) == []


def test_who_had_many_in_the_claim_before_has_not_few() -> None:
    """A claim out of turn brings few of everybody."""
    precedence = Precedence()
    overtaking(precedence, lease(1, 900))
    assert overtaking(precedence, lease(1, 10), lease(2, 10), out_of_turn=True) == [2]
    assert overtaking(precedence, lease(1, 10), lease(3, 10), out_of_turn=True) == [3]


def test_leases_of_one_owner_count_together_and_those_of_one_number_in_two_domains_do_not() -> None:
    parts = [lease(1, FEW // 2 + 1), lease(1, FEW // 2 + 1)]
    assert overtaking(Precedence(), lease(2, 900), *parts) == []
    assert overtaking(Precedence(), lease(1, 900), lease(1, 5, domain="crm")) == [1]


def test_one_command_in_four_may_overtake() -> None:
    precedence = Precedence()
    overtaking(precedence, lease(1, 900))
    for owner in range(2, 2 + FEW):
        assert overtaking(precedence, lease(owner, 1), out_of_turn=True) == [owner]
    assert overtaking(precedence, lease(90, 1), out_of_turn=True) == []
    assert overtaking(precedence, lease(91, 1), finished=SHARE - 1, out_of_turn=True) == []
    assert overtaking(precedence, lease(92, 1), finished=SHARE, out_of_turn=True) == [92]
    assert overtaking(precedence, lease(93, 1), finished=SHARE, out_of_turn=True) == []
    assert precedence.allowance(10_000) == FEW


def test_half_of_the_allowance_is_left_to_claims_out_of_turn() -> None:
    """Else the last few commands of many large batches would use it up."""
    precedence = Precedence()
    assert overtaking(precedence, lease(1, 900), lease(2, FEW // 2), lease(3, 1)) == [2]
    assert overtaking(precedence, lease(1, 900), lease(4, 1)) == []
    assert overtaking(precedence, lease(5, FEW // 2), out_of_turn=True) == [5]


# -- the line -------------------------------------------------------------------------------------------------------


def commands(of: Lease) -> list[Leased]:
    return [Leased(of, id, uuid4(), "Debit", None) for id in of.load.ids]


def line_of(*claims: Sequence[Claimed], slots: int = 1, threads: int = 1) -> Line:
    line = Line(slots, threads, lambda: None)
    for items in claims:
        line.add(items, overtaking=items[0].lease.overtakes)
    return line


def owners(items: deque[Claimed]) -> list[int]:
    return [item.lease.fair for item in items]


async def test_those_that_overtake_keep_their_order_among_themselves() -> None:
    large, small, other = lease(1, 3), lease(2, 2, overtakes=True), lease(3, 1, overtakes=True)
    line = line_of(commands(large), commands(small), commands(other))
    assert owners(line.ready) == [2, 2, 3, 1, 1, 1]
    ids = [item.id for item in line.ready if isinstance(item, Leased)]
    assert ids == [*small.load.ids, *other.load.ids, *large.load.ids]
    assert line.in_hand == 6


async def test_a_higher_priority_does_not_wait_behind_a_lower_one() -> None:
    low, high, higher = lease(1, 2), lease(2, 2, priority=5), lease(3, 1, priority=9)
    line = line_of(commands(low), commands(high), commands(low), commands(higher))
    assert owners(line.ready) == [3, 2, 2, 1, 1, 1, 1]


async def test_who_overtakes_stays_behind_a_higher_priority() -> None:
    line = line_of(commands(lease(1, 2, priority=5)), commands(lease(2, 2)))
    line.add(
        [*commands(lease(3, 1, priority=5, overtakes=True)), *commands(lease(4, 1, overtakes=True))], overtaking=True
    )
    assert owners(line.ready) == [3, 1, 1, 4, 2, 2]


async def test_who_overtakes_goes_first_among_those_who_wait_for_a_thread() -> None:
    line = line_of(threads=1)
    first, small, high = commands(lease(1, 3)), commands(lease(2, 1, overtakes=True)), commands(lease(3, 1, priority=1))
    assert line.take_thread(first[0])
    for item in (*first[1:], *small, *high):
        assert not line.take_thread(item)
    assert owners(line.for_threads) == [3, 2, 1, 1]


# -- claims out of turn ---------------------------------------------------------------------------------------------


class Claims:
    """Takes the place of the claimer: counts how often it was asked, and says what the line allowed meanwhile."""

    def __init__(self, *, most: int = 10, useful: bool = True) -> None:
        self.most, self.useful = most, useful
        self.count = 0
        self.turns: list[float] = []
        self.line = Line(1, 1, lambda: None)
        self.overtaker = Overtaker(self.line, lambda: self.most, self._claim)

    async def _claim(self, limit: int) -> bool:
        assert limit == self.most
        self.count += 1
        self.turns.append(self.line.longest_turn)
        return self.useful


async def test_without_a_notification_nothing_is_claimed_out_of_turn() -> None:
    claims = Claims()
    assert await claims.overtaker.once() is None and claims.count == 0


async def test_slots_have_short_turns_while_a_claim_out_of_turn_is_under_way() -> None:
    claims = Claims()
    claims.overtaker.hear()
    assert claims.overtaker.due.is_set()
    await claims.overtaker.once()
    assert claims.turns == [SHORT_TURN] and claims.line.longest_turn == LONGEST_TURN


@pytest.mark.parametrize("useful", [True, False])
async def test_a_stream_of_notifications_leads_to_few_claims(useful: bool) -> None:
    """The fewer the longer they bring nobody who overtakes."""
    claims = Claims(useful=useful)
    began, rounds = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < 0.25:
        claims.overtaker.hear()
        pause = await claims.overtaker.once()
        rounds += 1
        assert pause is None or 0 < pause <= LONGEST_GAP
        await asyncio.sleep(0)
    assert rounds > 10 * claims.count
    assert 1 <= claims.count <= (elapsed / SMALLEST_GAP + 1 if useful else 5)


async def test_a_notification_that_came_too_soon_is_not_forgotten() -> None:
    claims = Claims()
    claims.overtaker.hear()
    await claims.overtaker.once()
    claims.overtaker.hear()
    pause = await claims.overtaker.once()
    assert pause is not None and claims.count == 1
    claims.overtaker._next = 0.0
    assert await claims.overtaker.once() is None and claims.count == 2
    assert await claims.overtaker.once() is None and claims.count == 2


# -- a worker -------------------------------------------------------------------------------------------------------


class Busy:
    """A worker of 4 slots with a full line of a large batch, and a handler that waits when it is told to."""

    def __init__(self, given: Given) -> None:
        self.given, self.seen = given, list[Command]()
        self.go = asyncio.Event()
        given.handler("Debit", self._work)
        given.handler("Small", self._work)

    async def _work(self, command: Command, ctx: HandlerContext) -> None:
        self.seen.append(command)
        if len(self.seen) > 400:
            await self.go.wait()

    @asynccontextmanager
    async def started(self, **batch: Any) -> AsyncIterator[tuple[Run, UUID]]:
        large = await self.given.batch(commands=3000, **batch)
        settings = replace(self.given.settings, prefetch=timedelta(seconds=2), poll_every=timedelta(hours=1))
        async with self.given.worker(concurrency=4, settings=settings)._running() as run:
            while len(self.seen) < 404:
                await run._claimer.once()
                await asyncio.sleep(0)
            assert len(run._line.ready) > 100
            yield run, large
            self.go.set()

    def next_ones(self, count: int) -> list[UUID | None]:
        return [command.batch_id for command in self.seen[404 : 404 + count]]

    async def let_go(self, count: int) -> list[UUID | None]:
        """Let them go on, and return the batches of the next ones."""
        self.go.set()
        await eventually(lambda: len(self.seen) >= 404 + count)
        return self.next_ones(count)


async def test_a_batch_of_5_that_comes_while_the_line_is_full_starts_before_what_stands_in_line(
    given: Given, database: Database
) -> None:
    busy = Busy(given)
    async with busy.started() as (run, large):
        assert (await run._claimer.once()).pause is not None, "the line is full: nothing is claimed as usual"
        small = await given.batch(commands=5, command_type="Small")
        run._overtaker.hear()
        await run._overtaker.once()
        assert await busy.let_go(6) == [small] * 5 + [large]
        database.check_invariants()


async def test_a_small_batch_of_the_next_claim_goes_first_too(given: Given) -> None:
    """Also without a claim out of turn."""
    busy = Busy(given)
    async with busy.started() as (run, large):
        small = await given.batch(commands=5, command_type="Small")
        run._line.drop(list(run._line.ready)[50:])
        assert len(run._line.ready) == 50
        await run._claimer.once()
        assert len(run._line.ready) > 100
        assert await busy.let_go(6) == [small] * 5 + [large]


async def test_single_sends_count_as_one_owner_and_do_not_overtake_themselves(given: Given) -> None:
    """A stream of them brings claims of a few, and those that come first start first."""
    busy = Busy(given)
    async with busy.started() as (run, large):
        for n in range(3):
            for one in range(4):
                await given.sent("Small", 4 * n + one)
            run._overtaker.hear()
            run._overtaker._next = 0.0
            await run._overtaker.once()
        await busy.let_go(13)
        first = busy.seen[404:417]
        assert [command.data for command in first[:12]] == list(range(12))
        assert first[12].batch_id == large


async def test_keys_take_turns_in_the_line_as_batches_do(bus: CommandBus, given: Given) -> None:
    """All batches of a customer are one owner: a small batch of theirs does not overtake the large one."""
    busy = Busy(given)
    async with busy.started(fair_by="acme") as (run, large):
        await given.batch(commands=5, command_type="Small", fair_by="acme")
        other = await given.batch(commands=5, command_type="Small", fair_by="bolt")
        run._overtaker.hear()
        await run._overtaker.once()
        assert await busy.let_go(6) == [other] * 5 + [large]


async def test_a_new_batch_starts_at_once_however_many_others_wait(given: Given, database: Database) -> None:
    """A claim out of turn begins with the newest batches."""
    busy = Busy(given)
    for _ in range(30):
        await given.batch(commands=40)
    async with busy.started() as (run, _):
        database.rows("UPDATE busload.queue SET fair = fair - (3600000::bigint << 20)")  # as if an hour had passed
        small = await given.batch(commands=5, command_type="Small")
        run._overtaker.hear()
        await run._overtaker.once()
        assert (await busy.let_go(40)).count(small) == 5


async def test_an_urgent_batch_starts_before_what_stands_in_line(bus: CommandBus, given: Given) -> None:
    busy = Busy(given)
    async with busy.started() as (run, _):
        urgent = await bus.create_batch(DOMAIN, [BatchCommand("Small", priority=5)] * 500)
        run._overtaker.hear()
        await run._overtaker.once()
        assert set(await busy.let_go(8)) == {urgent}


async def test_a_held_batch_that_a_claim_out_of_turn_brings_does_not_start(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold is heard while the claim is under way, and a claim as usual begins before its answer is there."""
    busy = Busy(given)
    async with busy.started() as (run, _):
        small = await given.batch(commands=5, command_type="Small")
        perform = Shared.perform

        async def hold_meanwhile(shared: Shared, plan: Any) -> Any:
            monkeypatch.setattr(Shared, "perform", perform)
            taken = await perform(shared, plan)
            run._claimer.heed_holds({small})
            await run._claimer._take([DOMAIN], 1, None)
            return taken

        monkeypatch.setattr(Shared, "perform", hold_meanwhile)
        run._overtaker.hear()
        await run._overtaker.once()
        await run._hand_back.once()
        assert small not in await busy.let_go(20)
        assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue WHERE batch_id = %s", small) == 5


async def test_a_worker_hears_of_a_small_batch_while_its_line_is_full(given: Given) -> None:
    """A running worker: the notification alone leads to the claim."""
    seen = given.handler("Small")
    slow = given.handler("Debit", lambda command, ctx: asyncio.sleep(0.02))
    await given.batch(commands=3000)
    settings = replace(given.settings, prefetch=timedelta(seconds=5), poll_every=timedelta(hours=1))
    async with given.running(concurrency=20, settings=settings) as worker:
        await eventually(lambda: worker.stats.in_line > 200)
        await given.batch(commands=5, command_type="Small")
        begun = len(slow)
        await eventually(lambda: len(seen) == 5)
        assert len(slow) - begun < 200, "it waited for what stood in line"

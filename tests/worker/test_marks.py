"""While somebody holds a snapshot, claims begin where the last one ended, and miss nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, CommandBus
from busload.commands import claim
from busload.commands.execution import Leased
from busload.commands.marks import Owner
from busload.postgres.pool import PLAN_ONCE
from busload.sync.plan import perform
from busload.worker import marks
from busload.worker.marks import MANY, MOST_OWNERS, Marks
from tests.cost import pages
from tests.given import DOMAIN, Database, Given, eventually

CRM = "crm"


@contextmanager
def held_snapshot(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """Nothing that dies meanwhile can be removed."""
    with psycopg.connect(dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT count(*) FROM busload.queue")
        yield conn


@pytest.fixture(autouse=True)
def planned_as_by_a_worker(database: Database) -> None:
    database.rows(PLAN_ONCE)


@pytest.fixture
def snapshot(dsn: str, database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A snapshot, and more dead entries than a usual claim is worth."""
    with held_snapshot(dsn) as conn:
        leave_dead(database, MANY + 1)
        yield conn


def leave_dead(database: Database, loads: int, domain: str = DOMAIN, fair: int = 0) -> None:
    """Loads that were ready and are gone, before all that tests send."""
    database.rows(
        "INSERT INTO busload.queue (lo, hi, domain, fair)"
        " SELECT -n << 10, -n << 10, %s, %s FROM generate_series(1, %s::bigint) AS n",
        domain,
        fair,
        loads,
    )
    database.rows("DELETE FROM busload.queue WHERE hi < 0")


class Known:
    """A worker that claims by what it knows."""

    def __init__(self, given: Given, *domains: str) -> None:
        self._database, self.domains = given.database, list(domains or (DOMAIN,))
        self.worker, self.marks, self._turns = given.registered_worker(), Marks(), dict[str, int]()
        self.survey()
        assert self.marks.known

    def survey(self) -> None:
        self._database.perform(self.marks.survey(self.domains))

    def next(self, limit: int = 100, *domains: str) -> list[Leased]:
        asked = list(domains or self.domains)
        taken = self._database.perform(
            self.marks.claim(worker=self.worker, domains=asked, limit=limit, turns=self._turns)
        )
        assert self.marks.known
        self._turns |= taken.turns
        leased: list[Leased] = taken.leased
        return leased


def data_of(leased: list[Leased]) -> list[str | None]:
    return [one.data for one in leased]


def by_batch(leased: list[Leased]) -> Counter[UUID | None]:
    return Counter(one.lease.batch_id for one in leased)


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owners", [1, 20])
async def test_a_claim_reads_no_more_when_a_hundred_times_as_much_is_dead(
    given: Given, database: Database, dsn: str, owners: int
) -> None:
    """An empty claim, and one that finds a command: both read as few pages with 60,000 dead entries as with 600."""

    def cost(known: Known) -> int:
        found = []
        with psycopg.connect(dsn) as conn:
            conn.execute(PLAN_ONCE)
            conn.commit()
            for _ in range(3):  # the first time, and now and then, a session reads catalogues as well
                plan = copy(known.marks).claim(worker=known.worker, domains=[DOMAIN], limit=100, turns={})
                found.append(pages(conn, plan))
                conn.rollback()
        return min(found)

    found: list[tuple[int, int]] = []
    with held_snapshot(dsn):
        for dead in (600, 60_000):
            for owner in range(owners):
                leave_dead(database, dead // owners, fair=owner)
            known = Known(given)
            known.next()
            empty = cost(known)
            known.survey()
            known.next()
            await given.sent()
            found.append((empty, cost(known)))
            assert len(given.claimed(9)) == 1
    few, many = found
    assert many[0] <= 1.2 * few[0] and many[1] <= 1.2 * few[1], found


@pytest.mark.usefixtures("snapshot")
async def test_a_claim_of_what_is_known_is_prepared_once(given: Given, dsn: str) -> None:
    known = Known(given)
    with psycopg.connect(dsn, prepare_threshold=0, autocommit=True) as conn:
        for limit in (1, 40_000):
            for _ in range(3):
                await given.sent(priority=random.choice((0, 5)))
            perform(conn, known.marks.claim(worker=known.worker, domains=[DOMAIN], limit=limit, turns={DOMAIN: 2**60}))
        assert conn.execute("SELECT count(*) FROM pg_prepared_statements", prepare=False).fetchone() == (1,)


# -- when it is used ---------------------------------------------------------------------------------------------------


async def test_nothing_is_known_while_few_entries_are_dead(given: Given, database: Database, dsn: str) -> None:
    with held_snapshot(dsn):
        for _ in range(MANY // 4):
            await given.sent()
        own = Marks()
        database.perform(own.survey([DOMAIN]))
        assert not own.known  # many are ready, none is dead
        leave_dead(database, MANY // 2)
        database.perform(own.survey([DOMAIN]))
        assert not own.known
        leave_dead(database, MANY)
        assert not _forgets(own, database)
    await eventually(lambda: _forgets(own, database))


def _forgets(own: Marks, database: Database) -> bool:
    """Autovacuum or another test's snapshot may be in the way for a moment."""
    database.rows("VACUUM busload.queue")
    database.perform(own.survey([DOMAIN]))
    return not own.known


@pytest.mark.usefixtures("snapshot")
async def test_with_too_many_owners_claims_are_usual_ones(given: Given, database: Database) -> None:
    known = Known(given)
    for _ in range(MOST_OWNERS + 2):
        await given.batch()
    taken = database.perform(known.marks.claim(worker=known.worker, domains=[DOMAIN], limit=1, turns={}))
    assert len(taken.leased) == 1 and not known.marks.known
    known.survey()
    assert not known.marks.known


@pytest.mark.usefixtures("snapshot")
async def test_a_worker_that_was_declared_dead_gets_nothing_and_learns_nothing(
    given: Given, database: Database
) -> None:
    known = Known(given)
    await given.sent()
    database.rows("UPDATE busload.worker SET stopped_at = now() WHERE worker = %s", known.worker)
    taken = database.perform(known.marks.claim(worker=known.worker, domains=[DOMAIN], limit=1, turns={}))
    assert taken.refused and not taken.leased
    known.worker = given.registered_worker()
    assert len(known.next()) == 1


async def test_a_worker_goes_over_to_what_it_knows_and_back_and_runs_everything(
    given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(Marks):
        last: Watched

        def __init__(self) -> None:
            super().__init__()
            Watched.last = self

    monkeypatch.setattr("busload.worker.claimer.Marks", Watched)
    monkeypatch.setattr(marks, "LOADS_BETWEEN", 20)
    monkeypatch.setattr(marks, "SHORTEST", 0.0)
    monkeypatch.setattr(marks, "SECONDS_PER_ENTRY", 0.0)
    seen = given.handler()
    sent = 0

    async def more_until(known: bool) -> None:
        nonlocal sent
        while Watched.last.known is not known:
            await given.sent()
            sent += 1
            await eventually(lambda: len(seen) == sent)  # noqa: B023 - it waits for this one
            database.rows("VACUUM busload.queue")

    async with given.running():
        await given.sent()
        await eventually(lambda: seen)
        sent = 1
        with held_snapshot(dsn):
            leave_dead(database, 2 * MANY)
            await more_until(known=True)
            for priority in (0, 3, -3):
                await given.sent(priority=priority)
            await given.batch(commands=5)
            sent += 8
            await eventually(lambda: len(seen) == sent)
        await more_until(known=False)
    assert database.is_at_rest()
    database.check_invariants()


# -- nothing is missed -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("snapshot")
async def test_what_is_committed_late_is_found_at_once(given: Given, database: Database, dsn: str) -> None:
    """Its transaction wrote it before the look, with a lower id, and committed after it."""
    async with await psycopg.AsyncConnection.connect(dsn) as late:
        await given.bus.send(DOMAIN, "Debit", "late", conn=late)
        await given.sent(data="early")
        known = Known(given)
        assert data_of(known.next()) == ['"early"']
        await given.sent(data="later")
        assert data_of(known.next()) == ['"later"']
        await late.commit()
    assert data_of(known.next()) == ['"late"']
    database.check_invariants()


@pytest.mark.usefixtures("snapshot")
async def test_what_is_handed_back_is_found_at_once(given: Given, database: Database) -> None:
    first, second = await given.sent(data=1), await given.sent(data=2)
    known = Known(given)
    taken = known.next()
    assert [one.command_id for one in taken] == [first, second] and known.next() == []
    database.perform(claim.give_back({taken[0].lease: [taken[0].id]}))
    assert [one.command_id for one in known.next()] == [first]


@pytest.mark.usefixtures("snapshot")
async def test_a_resumed_batch_another_priority_and_a_parted_load_are_found_at_once(
    given: Given, bus: CommandBus
) -> None:
    batch_id = await given.batch(commands=6)
    known = Known(given)
    await bus.hold_batch(DOMAIN, batch_id, operator="alice", reason="look")
    assert known.next() == []
    await bus.resume_batch(DOMAIN, batch_id, operator="alice")
    assert data_of(known.next(1)) == ['{"n":0}']
    await bus.reprioritize_batch(DOMAIN, batch_id, 7, operator="alice")
    assert data_of(known.next(1)) == ['{"n":1}']
    fourth = [one async for one in _commands(bus, batch_id)][3]
    await bus.cancel_command(DOMAIN, fourth, reason="no")
    assert data_of(known.next()) == ['{"n":2}', '{"n":4}', '{"n":5}']


async def _commands(bus: CommandBus, batch_id: UUID) -> Any:
    page = await bus.list_commands(DOMAIN, batch_id=batch_id, limit=10)
    for one in sorted(page.commands, key=lambda item: item.data["n"]):
        yield one.command_id


@pytest.mark.usefixtures("snapshot")
async def test_what_was_handed_back_while_its_batch_was_held_is_found_when_it_is_resumed(
    given: Given, bus: CommandBus, database: Database
) -> None:
    batch_id = await given.batch(commands=2)
    known = Known(given)
    taken = known.next()
    await bus.hold_batch(DOMAIN, batch_id, operator="alice", reason="look")
    database.perform(claim.give_back({taken[0].lease: [one.id for one in taken]}))
    assert known.next() == []
    await bus.resume_batch(DOMAIN, batch_id, operator="alice")
    assert [one.id for one in known.next()] == [one.id for one in taken]


@pytest.mark.usefixtures("snapshot")
async def test_what_comes_in_a_domain_that_was_left_out_is_taken_when_it_is_asked_for(
    bus: CommandBus, given: Given
) -> None:
    known = Known(given, DOMAIN, CRM)
    await bus.send(CRM, "Push", "crm")
    await given.sent(data="ours")
    assert data_of(known.next(9, DOMAIN)) == ['"ours"']
    assert data_of(known.next(9, DOMAIN)) == []
    assert data_of(known.next(9, CRM)) == ['"crm"']


@pytest.mark.usefixtures("snapshot")
async def test_suspects_are_taken_one_at_a_time_also_by_what_is_known(given: Given, database: Database) -> None:
    for _ in range(2):
        await given.batch(commands=2)
    database.rows("UPDATE busload.queue SET crashes = 1")
    known = Known(given)
    first = known.next()
    assert len(first) == 2 and first[0].lease.crashes == 1
    assert len(known.next()) == 2


@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_to_loads_two_workers_take_everything_that_is_ready(
    bus: CommandBus, given: Given, database: Database, dsn: str, seed: int
) -> None:
    """Sends, late commits, batches, hand-backs, splits, holds and other priorities, at random and in any order."""
    chance = random.Random(seed)
    workers = [Known(given), Known(given)]
    held: list[Leased] = []
    batches: list[UUID] = []
    on_hold: set[UUID] = set()
    late: list[psycopg.AsyncConnection[Any]] = []
    for _ in range(60):
        match chance.randrange(8):
            case 0:
                await given.sent(priority=chance.choice((0, 0, 4)))
            case 1 if len(late) < 3:
                conn = await psycopg.AsyncConnection.connect(dsn)
                await bus.send(DOMAIN, "Debit", conn=conn)
                late.append(conn)
            case 2 if late:
                conn = late.pop(chance.randrange(len(late)))
                await conn.commit()
                await conn.close()
            case 3:
                batches.append(await given.batch(commands=chance.choice((1, 5, 30))))
            case 4 if held:
                lease = chance.choice(held).lease
                mine = [one for one in held if one.lease is lease]
                database.perform(claim.give_back({lease: [one.id for one in mine]}))
                held = [one for one in held if one.lease is not lease]
            case 5 if batches:
                batch_id = chance.choice(batches)
                if batch_id in on_hold:
                    on_hold.discard(batch_id)
                    await bus.resume_batch(DOMAIN, batch_id, operator="alice")
                elif await bus.hold_batch(DOMAIN, batch_id, operator="alice", reason="look"):
                    on_hold.add(batch_id)
            case 6 if batches:
                await bus.reprioritize_batch(DOMAIN, chance.choice(batches), chance.choice((0, 4)), operator="alice")
            case _:
                held += chance.choice(workers).next(chance.choice((1, 3, 10)))
    for conn in late:
        await conn.commit()
        await conn.close()
    for batch_id in on_hold:
        await bus.resume_batch(DOMAIN, batch_id, operator="alice")
    last = workers[0]
    while taken := last.next(1000):
        held += taken
    assert database.count("queue") == 0
    assert workers[1].next(1000) == []
    database.check_invariants()


# -- whose turn it is --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("limit", [10, 100, 4000])
async def test_a_small_batch_starts_at_once_behind_a_large_one_by_what_is_known(
    given: Given, database: Database, limit: int
) -> None:
    large = await given.batch(commands=5000)
    known = Known(given)
    small = await given.batch(commands=5)
    assert by_batch(known.next(limit)) == {small: 5, large: limit - 5}
    database.check_invariants()


@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("limit", [1, 40])
async def test_large_batches_have_equal_turns_by_what_is_known(given: Given, limit: int) -> None:
    batches = [await given.batch(commands=2000) for _ in range(4)]
    known = Known(given)
    taken = by_batch([one for _ in range(8) for one in known.next(limit)])
    assert taken == dict.fromkeys(batches, 2 * limit)


@pytest.mark.usefixtures("snapshot")
async def test_priority_counts_before_turns_by_what_is_known(bus: CommandBus, given: Given) -> None:
    await given.batch(commands=20)
    known = Known(given, DOMAIN, CRM)
    for name, priority in [("low", -5), ("urgent", 9), ("urgent too", 9)]:
        await bus.send(CRM, "Push", name, priority=priority)
    assert data_of(known.next(3)) == ['"urgent"', '"urgent too"', '{"n":0}']
    assert data_of(known.next(100))[-1] == '"low"'


@pytest.mark.usefixtures("snapshot")
async def test_domains_have_equal_shares_by_what_is_known(bus: CommandBus, given: Given) -> None:
    await bus.create_batch(CRM, [BatchCommand("Push") for _ in range(3000)])
    for _ in range(30):
        await given.sent()
    known = Known(given, DOMAIN, CRM)
    assert Counter(one.lease.domain for one in known.next(40)) == {DOMAIN: 20, CRM: 20}


@pytest.mark.usefixtures("snapshot")
async def test_a_claim_by_what_is_known_locks_no_more_loads_than_it_takes(given: Given, dsn: str) -> None:
    for _ in range(4):
        await given.batch(commands=5)
    known, other = Known(given), Known(given)
    with psycopg.connect(dsn) as conn:
        plan = known.marks.claim(worker=known.worker, domains=[DOMAIN], limit=7, turns={})
        first = perform(conn, plan).leased  # not committed
        rest = [one for _ in range(3) for one in other.next()]
        assert len(first) == 7 and len(rest) == 10
        assert {one.id >> 10 for one in first}.isdisjoint(one.id >> 10 for one in rest)
        conn.commit()
    assert len(other.next()) == 3


def test_owners_are_in_turn_behind_the_last_one() -> None:
    known = {Owner("a", 0, fair): fair for fair in (5, 1, 3)} | {Owner("b", 0, 2): 2}
    assert [owner.fair for owner in marks.in_turn(known, ["a"], {"a": 1})] == [3, 5, 1]
    assert [owner.fair for owner in marks.in_turn(known, ["a"], {"a": 9})] == [1, 3, 5]
    assert [owner.fair for owner in marks.in_turn(known, ["a"], {})] == [1, 3, 5]

"""Of equal priority, batches of a domain take turns: by themselves, or by a key of the application."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, CommandBus, Dedup, InvalidCommandError
from busload.commands import claim
from busload.commands.command import Command
from busload.commands.execution import FAILED_ATTEMPT, TROUBLESHOOTING, Leased
from busload.postgres.plan import Statement
from busload.postgres.pool import PLAN_ONCE
from tests.given import DOMAIN, Database, Given


class Claims:
    """A worker that claims again and again. It knows who was the last to have a turn."""

    def __init__(self, given: Given, *domains: str, over: Database | None = None) -> None:
        self._database, self._domains = over or given.database, list(domains or (DOMAIN,))
        self._worker, self._turns = given.registered_worker(), dict[str, int]()

    def next(self, limit: int) -> list[Leased]:
        plan = claim.claim(worker=self._worker, domains=self._domains, limit=limit, turns=self._turns)
        taken = self._database.perform(plan)
        self._turns |= taken.turns
        leased: list[Leased] = taken.leased
        return leased


def by_batch(leased: list[Leased]) -> Counter[UUID | None]:
    return Counter(one.lease.batch_id for one in leased)


@pytest.mark.parametrize("limit", [10, 100, 1000, 4000])
async def test_a_small_batch_starts_at_once_behind_a_large_one(given: Given, database: Database, limit: int) -> None:
    large = await given.batch(commands=5000)
    small = await given.batch(commands=5)
    assert by_batch(given.claimed(limit)) == {small: 5, large: limit - 5}
    database.check_invariants()


@pytest.mark.parametrize("limit", [1, 2, 9])
async def test_a_worker_with_few_slots_begins_the_small_batch_with_its_second_claim(given: Given, limit: int) -> None:
    await given.batch(commands=5000)
    small = await given.batch(commands=5)
    claims = Claims(given)
    assert by_batch(claims.next(limit) + claims.next(limit))[small] >= 1


async def test_a_worker_that_finds_room_for_all_takes_all_by_priority_and_age(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """A worker that has just found less than it asked for does not ask whose turn it is."""
    old = await given.batch(commands=1500)
    await bus.send(DOMAIN, "Work", None)
    urgent = await bus.create_batch(DOMAIN, [BatchCommand("Work", priority=1)] * 5)
    worker = given.registered_worker()

    def take(limit: int) -> Counter[UUID | None]:
        plan = claim.claim(worker=worker, domains=[DOMAIN], limit=limit, no_turns=True)
        return by_batch(database.perform(plan).leased)

    assert take(100) == {urgent: 5, old: 95}
    assert take(5000) == {old: 1405, None: 1}
    assert take(5000) == {}
    database.check_invariants()


@pytest.mark.parametrize("no_turns", [False, True], ids=["in turns", "by age"])
async def test_a_claim_tells_whether_all_that_it_saw_has_one_owner(
    bus: CommandBus, given: Given, no_turns: bool
) -> None:
    async def alone(*domains: str) -> bool:
        worker = given.registered_worker()
        plan = claim.claim(worker=worker, domains=[DOMAIN, *domains], limit=10, no_turns=no_turns)
        alone: bool = given.database.perform(plan).alone
        return alone

    assert not await alone(), "nothing is ready"
    await given.batch(commands=3000)
    assert await alone() and await alone("other")
    await bus.create_batch("other", [BatchCommand("Work")] * 3)
    assert await alone() and not await alone("other")
    await given.batch(commands=3000)
    assert not await alone(), "one of the two got nothing this time"


async def test_an_owner_who_comes_later_has_its_turn_soon_even_if_no_notification_tells_of_it(given: Given) -> None:
    """A worker that found one owner only claims by age, and looks for others with each claim."""
    seen: list[Command] = []

    async def send_later(command: Command, ctx: Any) -> None:
        seen.append(command)
        if len(seen) == 50:
            await given.batch(commands=1)

    given.handler(function=send_later)
    large = await given.batch(commands=1000)
    await given.drained(concurrency=5, settings=replace(given.settings, prefetch=timedelta(0)))
    [late] = [n for n, command in enumerate(seen) if command.batch_id != large]
    assert late < 100


async def test_large_batches_take_turns(given: Given, database: Database) -> None:
    batches = [await given.batch(commands=2000) for _ in range(3)]
    claims = Claims(given)
    taken = [by_batch(claims.next(100)) for _ in range(12)]
    assert [len(each) for each in taken] == [1] * 12, "a claim splits one load only"
    assert sum(taken, Counter()) == dict.fromkeys(batches, 400)
    assert len({next(iter(each)) for each in taken[:3]}) == 3
    database.check_invariants()


async def test_none_of_50_batches_waits_for_more_than_49_others(given: Given) -> None:
    """Whatever their sizes are, and though some are always small enough to fit in."""
    batches = [await given.batch(commands=1500 if n % 3 else 40) for n in range(50)]
    claims = Claims(given)
    begun: set[UUID | None] = set()
    for _ in range(50):
        begun |= set(by_batch(claims.next(20)))
    assert begun == set(batches)


async def test_a_worker_does_not_forget_old_batches_while_new_ones_keep_coming(given: Given) -> None:
    """The handler sends more than the worker gets done, so the worker never comes to an end of the new batches."""
    seen: list[Command] = []
    enough = asyncio.Event()

    async def spread(command: Command, ctx: Any) -> None:
        seen.append(command)
        if command.batch_id != old and len(seen) < 3000:
            for _ in range(2):
                await given.batch(commands=1)
        if sum(one.batch_id == old for one in seen) >= 5 or len(seen) > 3000:
            enough.set()

    given.handler(function=spread)
    old = await given.batch(commands=1000)
    for _ in range(5):
        await given.batch(commands=1)
    async with given.running(concurrency=4, settings=replace(given.settings, prefetch=timedelta(0))):
        async with asyncio.timeout(60):
            await enough.wait()
    assert sum(one.batch_id == old for one in seen) >= 5


async def test_commands_sent_by_themselves_count_as_one_batch_and_keep_their_order(given: Given) -> None:
    batch = await given.batch(commands=1000)
    sent = [await given.sent(data=n) for n in range(60)]
    taken = Claims(given).next(20)
    assert by_batch(taken) == {None: 10, batch: 10}
    assert [one.command_id for one in taken if one.lease.batch_id is None] == sent[:10]


async def test_what_one_does_not_need_the_others_get(given: Given) -> None:
    small = [await given.batch(commands=2) for _ in range(3)]
    large = await given.batch(commands=1000)
    assert by_batch(given.claimed(100)) == dict.fromkeys(small, 2) | {large: 94}
    assert by_batch(given.claimed(10_000)) == {large: 906}


# -- by a key of the application ------------------------------------------------------------------------------------


async def test_tenants_share_however_many_batches_they_have(bus: CommandBus, given: Given) -> None:
    many = {await given.batch(commands=1000, fair_by="acme") for _ in range(10)}
    one = await given.batch(commands=1000, fair_by="bolt")
    claims = Claims(given)
    taken = sum((by_batch(claims.next(40)) for _ in range(10)), Counter[UUID | None]())
    assert taken[one] == 200 and taken.total() == 400 and set(taken) <= {one, *many}


async def test_commands_of_a_key_take_turns_with_those_of_another(bus: CommandBus, given: Given) -> None:
    for key in ["acme"] * 20 + ["bolt"] * 5:
        await bus.send(DOMAIN, "Debit", key, fair_by=key)
    await bus.send_many(DOMAIN, [BatchCommand("Debit", data="crow") for _ in range(1200)], fair_by="crow")
    taken = Counter(one.data for one in Claims(given).next(30))
    assert taken == {'"acme"': 10, '"bolt"': 5, '"crow"': 15}


async def test_commands_that_are_sent_at_once_keep_their_keys(bus: CommandBus, database: Database) -> None:
    """They leave in one statement."""
    keys = ["acme", "bolt", None] * 20
    await asyncio.gather(*(bus.send(DOMAIN, "Debit", key, fair_by=key) for key in keys))
    waiting = dict(database.rows("SELECT fair, sum(hi - lo + 1)::integer FROM busload.queue GROUP BY fair"))
    assert waiting == {database.value(HASH, "acme"): 20, database.value(HASH, "bolt"): 20, 0: 20}


async def test_an_owner_of_whom_little_fits_gets_its_turn_as_well(bus: CommandBus, given: Given) -> None:
    """A retry stands before the large loads of its batch: what is left of a claim is not always for the others."""
    other = await given.batch(commands=1000)
    await bus.send(DOMAIN, "Debit", fair_by="acme")
    await bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(1000)], fair_by="acme")
    claims = Claims(given)
    taken = by_batch(claims.next(50) + claims.next(50))
    assert taken[other] in (50, 49) and taken[None] in (50, 51)


HASH = "SELECT hashtextextended(%s, 0)"


def owners(database: Database, place: str = "queue") -> set[int]:
    return {fair for (fair,) in database.rows(f"SELECT DISTINCT fair FROM busload.{place}")}


Sender = Callable[[CommandBus], Awaitable[Any]]


async def _open(bus: CommandBus) -> None:
    async with bus.open_batch(DOMAIN, fair_by="acme", checkpoint_size=1) as batch:
        await batch.add("Debit")
        await bus.send(DOMAIN, "Debit", batch_id=batch.batch_id)
        await bus.send_many(DOMAIN, [BatchCommand("Debit")] * 1, batch_id=batch.batch_id)
        await bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(1001)], batch_id=batch.batch_id)


WAYS_IN: dict[str, Sender] = {
    "send": lambda bus: bus.send(DOMAIN, "Debit", fair_by="acme"),
    "send once": lambda bus: bus.send(DOMAIN, "Debit", task_key="t", dedup=Dedup(), fair_by="acme"),
    "send_many": lambda bus: bus.send_many(DOMAIN, [BatchCommand("Debit")], fair_by="acme"),
    "send_many by COPY": lambda bus: bus.send_many(
        DOMAIN, [BatchCommand("Debit") for _ in range(1001)], fair_by="acme"
    ),
    "create_batch": lambda bus: bus.create_batch(DOMAIN, [BatchCommand("Debit")], fair_by="acme"),
    "create_batch by COPY": lambda bus: bus.create_batch(
        DOMAIN, [BatchCommand("Debit") for _ in range(1001)], fair_by="acme"
    ),
    "open_batch": _open,
}


@pytest.mark.parametrize("way", WAYS_IN)
async def test_every_way_in_takes_a_key(bus: CommandBus, database: Database, way: str) -> None:
    await WAYS_IN[way](bus)
    assert owners(database) == {database.value(HASH, "acme")}
    database.check_invariants()


async def test_a_handler_sends_for_a_key(bus: CommandBus, given: Given, database: Database) -> None:
    async def send_on(command: Command, ctx: Any) -> None:
        async with ctx.transaction():
            await ctx.send("crm", "Note", fair_by="acme")

    given.handler(function=send_on)
    await given.sent()
    await given.drained()
    assert owners(database) == {database.value(HASH, "acme")}


async def test_without_a_key_a_batch_is_by_itself_and_a_single_command_is_nobodys(
    given: Given, database: Database
) -> None:
    batches = [await given.batch(commands=2) for _ in range(2)]
    numbers = [database.value("SELECT busload.fair_of(NULL, %s)", batch_id) for batch_id in batches]
    assert owners(database) == set(numbers) and sorted(numbers) == numbers
    database.rows("DELETE FROM busload.queue")
    await given.sent()
    assert owners(database) == {0}


async def test_a_batch_tells_its_key(bus: CommandBus, given: Given) -> None:
    assert (await given.batch_now(await given.batch(fair_by="acme"))).fair_by == "acme"
    assert (await given.batch_now(await given.batch())).fair_by is None


async def _again(given: Given, leased: list[Leased]) -> None:
    given.settled(leased, FAILED_ATTEMPT, delay=0.0)
    given.database.perform(claim.promote())


async def _retried(given: Given, leased: list[Leased]) -> None:
    given.settled(leased, TROUBLESHOOTING, reason="PERMANENT")
    await given.bus.troubleshooting.retry(DOMAIN, leased[0].command_id, operator="ann")


async def _rescued(given: Given, leased: list[Leased]) -> None:
    given.database.rows("UPDATE busload.worker SET seen_at = now() - interval '1 hour'")
    given.rescued()


async def _given_back(given: Given, leased: list[Leased]) -> None:
    given.database.perform(claim.give_back({leased[0].lease: [leased[0].id]}))


async def _set_aside(given: Given, leased: list[Leased]) -> None:
    given.database.perform(claim.give_back({leased[0].lease: [leased[0].id]}, pause=0, details=["{}"]))
    given.database.perform(claim.promote())


@pytest.mark.parametrize("way_back", [_again, _retried, _rescued, _given_back, _set_aside])
@pytest.mark.parametrize("sent", [False, True], ids=["of a batch", "alone"])
async def test_a_command_that_comes_back_has_the_same_owner(
    given: Given, database: Database, sent: bool, way_back: Callable[[Given, list[Leased]], Awaitable[None]]
) -> None:
    await (given.sent(fair_by="acme") if sent else given.batch(fair_by="acme"))
    leased = given.claimed()
    assert owners(database, "lease") == {database.value(HASH, "acme")}
    await way_back(given, leased)
    assert owners(database) == {database.value(HASH, "acme")}


@pytest.mark.parametrize("wrong", ["", "x" * 300, "nul\0", 7, ["acme"], b"acme"])
@pytest.mark.parametrize("way", ["send", "send_many", "create_batch", "open_batch"])
async def test_a_key_that_cannot_be_stored_is_refused(
    bus: CommandBus, database: Database, way: str, wrong: Any
) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "send": lambda: bus.send(DOMAIN, "Debit", fair_by=wrong),
        "send_many": lambda: bus.send_many(DOMAIN, [BatchCommand("Debit")], fair_by=wrong),
        "create_batch": lambda: bus.create_batch(DOMAIN, [BatchCommand("Debit")], fair_by=wrong),
        "open_batch": lambda: bus.open_batch(DOMAIN, fair_by=wrong).__aenter__(),
    }
    with pytest.raises(InvalidCommandError) as refused:
        await ways[way]()
    assert [problem.path for problem in refused.value.problems] == ["/fair_by"]
    assert database.count("command") == database.count("batch") == 0


async def test_a_command_that_joins_a_batch_has_no_key_of_its_own(bus: CommandBus, database: Database) -> None:
    async with bus.open_batch(DOMAIN) as batch:
        for joining in (
            bus.send(DOMAIN, "Debit", batch_id=batch.batch_id, fair_by="acme"),
            bus.send_many(DOMAIN, [BatchCommand("Debit")], batch_id=batch.batch_id, fair_by="acme"),
        ):
            with pytest.raises(InvalidCommandError, match="pass it to open_batch"):
                await joining
    assert database.count("command") == 0


# -- beside other rules ---------------------------------------------------------------------------------------------


async def test_a_higher_priority_comes_first_and_lower_ones_get_what_is_left(bus: CommandBus, given: Given) -> None:
    low = [await given.batch(commands=1000) for _ in range(2)]
    high = await bus.create_batch(DOMAIN, [BatchCommand("Debit", priority=5) for _ in range(1003)])
    highest = await bus.send(DOMAIN, "Debit", priority=9)
    claims = Claims(given)
    taken = claims.next(1000)
    assert taken[0].command_id == highest.command_id and by_batch(taken) == {None: 1, high: 999}
    assert by_batch(claims.next(4)) == {high: 4}
    rest = by_batch(claims.next(500) + claims.next(500))
    assert rest == dict.fromkeys(low, 500)


async def test_of_a_lower_priority_too_everybody_gets_a_turn(bus: CommandBus, given: Given) -> None:
    """Though a higher one fills most of each claim, and small loads fill the rest."""
    large = await given.batch(commands=1000)
    for n in range(7):
        await bus.send_many(DOMAIN, [BatchCommand("Debit", data=n) for _ in range(3)], fair_by=str(n))
        await asyncio.gather(*(bus.send(DOMAIN, "Debit", n, fair_by=str(n)) for _ in range(40)))
    claims = Claims(given)
    taken: Counter[UUID | None] = Counter()
    for _ in range(10):
        await bus.send_many(DOMAIN, [BatchCommand("Debit", priority=1) for _ in range(70)])
        taken += by_batch(claims.next(100))
    assert taken[large] >= 10


async def test_domains_take_turns_and_their_batches_too(bus: CommandBus, given: Given) -> None:
    small = [await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(5)]) for _ in range(3)]
    large = await given.batch(commands=2000)
    other = await bus.create_batch("crm", [BatchCommand("Note") for _ in range(2000)])
    claims = Claims(given, DOMAIN, "crm")
    first = by_batch(claims.next(100))
    assert [first[batch_id] for batch_id in small] == [5, 5, 5]
    taken = sum((by_batch(claims.next(50)) for _ in range(30)), Counter[UUID | None]())
    assert taken[large] >= 50 and taken[other] >= 50


async def test_a_suspect_does_not_wait_for_the_turn_of_its_batch(given: Given, database: Database) -> None:
    suspect = await given.batch(commands=2)
    for _ in range(20):
        await given.batch(commands=1000)
    database.rows("UPDATE busload.queue SET crashes = 1 WHERE batch_id = %s", suspect)
    taken = by_batch(given.claimed(10))
    assert taken[suspect] == 2 and sum(taken.values()) == 10


async def test_a_batch_that_is_being_canceled_has_no_turn(given: Given, database: Database) -> None:
    canceled = await given.batch(commands=2000)
    other = await given.batch(commands=2000)
    database.rows("UPDATE busload.batch SET canceling_until = now() + interval '1 h' WHERE batch_id = %s", canceled)
    claims = Claims(given)
    assert by_batch(claims.next(50) + claims.next(50) + claims.next(50)) == {other: 150}


async def test_two_workers_at_once_take_nothing_twice(given: Given, database: Database, dsn: str) -> None:
    """Each goes its own way through the batches, and passes over what the other has locked."""
    for n in range(30):
        await given.batch(commands=1 + 7 * n)
    total = sum(1 + 7 * n for n in range(30))

    def work(claims: Claims, empty: int = 0) -> list[int]:
        ids: list[int] = []
        while empty < 3:
            taken = claims.next(40)
            ids += [one.id for one in taken]
            empty = 0 if taken else empty + 1
        return ids

    with Database(dsn) as other:
        workers = Claims(given), Claims(given, over=other)
        both = await asyncio.gather(*(asyncio.to_thread(work, worker) for worker in workers))
    ids = [id for taken in both for id in taken]
    assert len(ids) == len(set(ids)) == total
    database.check_invariants()


async def test_a_running_worker_ends_the_small_batch_long_before_the_large_one(given: Given) -> None:
    seen = given.handler()
    large = await given.batch(commands=3000)
    small = await given.batch(commands=5)
    await given.drained(concurrency=10)
    assert len(seen) == 3005
    assert max(n for n, command in enumerate(seen) if command.batch_id == small) < 1500
    assert (await given.batch_now(large)).status == "COMPLETED"


async def test_workers_go_round(given: Given) -> None:
    """A worker knows whose turn was the last, so that large batches progress together."""
    seen = given.handler()
    batches = [await given.batch(commands=100) for _ in range(4)]
    await given.drained(concurrency=5, settings=replace(given.settings, prefetch=timedelta(0)))
    assert len(seen) == 400
    begun = [min(n for n, command in enumerate(seen) if command.batch_id == batch_id) for batch_id in batches]
    assert max(begun) < 100


# -- what a claim costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "long", "size"), [(10, 1000, 1000), (10_000, 200_000, 1)], ids=["loads of 1,000", "sent one by one"]
)
async def test_a_claim_reads_by_index_and_no_more_of_a_queue_that_is_longer(
    given: Given, database: Database, dsn: str, short: int, long: int, size: int
) -> None:
    """A large owner and a small one behind it: the claim that gives both their turn reads the same pages.

    Each of its nine descents may find the index one level deeper.
    """
    worker = given.registered_worker()

    def pages(loads: int) -> int:
        database.rows("TRUNCATE busload.queue")
        database.rows(
            "INSERT INTO busload.queue (lo, hi, domain, fair)"
            " SELECT n << 10, (n << 10) + %s, %s, 7 FROM generate_series(1, %s::bigint) AS n"
            " UNION ALL SELECT 0, 4, %s, 8",
            size - 1,
            DOMAIN,
            loads,
            DOMAIN,
        )
        database.rows("VACUUM ANALYZE busload.queue")
        statement = next(claim.claim(worker=worker, domains=[DOMAIN], limit=100, turns={DOMAIN: 7}))
        assert isinstance(statement, Statement)
        with psycopg.connect(dsn) as conn, psycopg.ClientCursor(conn) as cursor:
            cursor.execute(PLAN_ONCE)
            text = statement.sql
            for n, name in enumerate(statement.params, 1):
                text = text.replace(f"%({name})s".encode(), f"${n}".encode())
            cursor.execute(b"PREPARE claim AS " + text.replace(b"%%", b"%"))
            values = ", ".join(["%s"] * len(statement.params)).encode()
            explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE claim (" + values + b")"
            found = []
            for _ in range(3):  # the first time, and now and then, a session reads catalogues as well
                cursor.execute("SAVEPOINT here")
                cursor.execute(explain, list(statement.params.values()))
                [[[explained]]] = cursor.fetchall()
                cursor.execute("ROLLBACK TO here")
                found.append(int(explained["Plan"]["Shared Hit Blocks"] + explained["Plan"]["Shared Read Blocks"]))
            conn.rollback()
        assert "Seq Scan" not in str(explained)
        return min(found)

    few, many = pages(short), pages(long)
    assert many <= few + 9, (few, many)

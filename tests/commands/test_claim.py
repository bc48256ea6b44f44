"""How PostgreSQL hands out commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, CommandBus
from busload.commands import claim
from busload.commands.execution import FAILED_ATTEMPT, Leased
from busload.postgres.plan import Plan
from busload.sync.plan import perform
from tests.given import DOMAIN, Database, Given, at_once


def numbers(leased: list[Leased]) -> list[int]:
    return [one.id & 1023 for one in leased]


def loads(database: Database, place: str = "queue") -> list[tuple[int, int]]:
    """The loads of a place as positions from 0 to 1023."""
    return database.rows(f"SELECT lo & 1023, hi & 1023 FROM busload.{place} ORDER BY lo")


async def test_a_load_is_split_and_the_rest_stays(given: Given, database: Database) -> None:
    await given.batch(commands=10)

    first = given.claimed(limit=4)
    second = given.claimed(limit=4)

    assert numbers(first) == [0, 1, 2, 3]
    assert numbers(second) == [4, 5, 6, 7]
    assert loads(database) == [(8, 9)]
    assert loads(database, "lease") == [(0, 3), (4, 7)]
    database.check_invariants()


async def test_a_claim_takes_whole_loads_and_a_part_of_the_last_one(
    bus: CommandBus, given: Given, database: Database
) -> None:
    for _ in range(3):
        await bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(4)])

    taken = given.claimed(limit=10)

    assert numbers(taken) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert len({one.lease.lease_id for one in taken}) == 3
    assert loads(database) == [(2, 3)]
    database.check_invariants()


@pytest.mark.parametrize("limit", [1, 7, 999, 1000, 1001, 2500, 9999])
async def test_a_claim_takes_as_many_as_asked_for_and_no_more(given: Given, database: Database, limit: int) -> None:
    await given.batch(commands=2500)
    taken = given.claimed(limit=limit)
    assert len({one.id for one in taken}) == len(taken) == min(limit, 2500)
    assert database.value("SELECT coalesce(sum(hi - lo + 1), 0) FROM busload.queue") == 2500 - len(taken)
    database.check_invariants()


async def test_many_single_loads_are_taken_at_once(bus: CommandBus, given: Given, database: Database) -> None:
    for n in range(12):
        await bus.send(DOMAIN, "Debit", {"n": n})
    taken = given.claimed(limit=10)
    assert [one.data for one in taken] == [f'{{"n":{n}}}' for n in range(10)]
    assert database.count("queue") == 2


async def test_one_claim_takes_many_single_loads_and_a_part_of_a_large_one(given: Given, database: Database) -> None:
    """One statement for all free slots, however the commands were sent."""
    for n in range(6):
        await given.sent(data=n)
    await given.batch(commands=1500)
    taken = given.claimed(limit=1200)
    assert [one.data for one in taken[:7]] == ["0", "1", "2", "3", "4", "5", '{"n":0}']
    assert len(taken) == len({one.id for one in taken}) == 1200
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 306
    assert database.rows("SELECT sum(open), sum(hi - lo + 1) FROM busload.lease") == [(1200, 1200)]
    database.check_invariants()


# -- neighbours -----------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"domain": DOMAIN, "priority": 0, "attempt": 1, "forgiven": 0, "replies": False}


def sent_one_by_one(database: Database, *ids: int, **different: Any) -> None:
    """Loads of one, as many small sends leave them: ids follow each other, and each has a time of its own."""
    for id in ids:
        database.rows(
            "INSERT INTO busload.command (id, domain, command_id, command_type, data, created_at)"
            " VALUES (%s, %s, gen_random_uuid(), 'Debit', %s::text::json, '2026-01-01'::date + %s * interval '1 s')",
            id,
            different.get("domain", DOMAIN),
            str(id),
            id,
        )
        load = PLAIN | different
        database.rows(
            "INSERT INTO busload.queue (lo, hi, domain, priority, attempt, forgiven, replies)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s)",
            *(id, id, *load.values()),
        )


def leases(database: Database) -> list[tuple[int, int, int]]:
    return database.rows("SELECT lo, hi, open FROM busload.lease ORDER BY lo")


async def test_neighbours_that_were_sent_one_by_one_are_leased_as_one(given: Given, database: Database) -> None:
    sent_one_by_one(database, *range(5 * 1024, 5 * 1024 + 10))
    taken = given.claimed(limit=8)
    assert [one.id - 5 * 1024 for one in taken] == list(range(8))
    assert len({one.lease.lease_id for one in taken}) == 1 and taken[0].lease.unsettled == taken[0].lease.running == 8
    assert leases(database) == [(5 * 1024, 5 * 1024 + 7, 8)]
    assert loads(database) == [(8, 8), (9, 9)]
    database.check_invariants()
    given.settled(taken)
    assert database.count("lease") == 0
    database.check_invariants()


async def test_neighbours_leased_as_one_keep_the_time_they_were_sent_at(given: Given, database: Database) -> None:
    sent_one_by_one(database, *range(2048, 2052))
    taken = given.claimed(limit=4)
    assert len({one.lease.lease_id for one in taken}) == 1
    sent = database.rows("SELECT id, created_at FROM busload.command ORDER BY id")
    assert [(one.id, one.created_at or one.lease.created_at) for one in taken] == sent
    assert len({created_at for _, created_at in sent}) == 4


async def test_gaps_and_multiples_of_1024_part_neighbours(given: Given, database: Database) -> None:
    """A load never crosses a multiple of 1024: that is how a command's place is found."""
    sent_one_by_one(database, 2000, 2001, 2003, 2045, 2046, 2047, 2048, 2049)
    assert len(given.claimed(limit=9)) == 8
    assert leases(database) == [(2000, 2001, 2), (2003, 2003, 1), (2045, 2047, 3), (2048, 2049, 2)]
    database.check_invariants()


@pytest.mark.parametrize(
    "different", [{"priority": 1}, {"attempt": 2}, {"forgiven": 1}, {"replies": True}, {"domain": "crm"}]
)
async def test_what_differs_is_not_leased_as_one(given: Given, database: Database, different: dict[str, Any]) -> None:
    sent_one_by_one(database, 2000, 2001)
    sent_one_by_one(database, 2002, 2003, **different)
    sent_one_by_one(database, 2004)
    worker = given.registered_worker()
    taken = database.perform(claim.claim(worker=worker, domains=[DOMAIN, "crm"], limit=9))
    assert leases(database) == [(2000, 2001, 2), (2002, 2003, 2), (2004, 2004, 1)]
    for one in taken.leased:
        row = PLAIN | (different if one.id in (2002, 2003) else {})
        assert (one.lease.domain, one.lease.priority, one.lease.attempt, one.lease.forgiven) == tuple(row.values())[:4]
        assert one.data == str(one.id)
    assert database.rows("SELECT lo, replies FROM busload.lease WHERE replies") == (
        [(2002, True)] if "replies" in different else []
    )
    database.check_invariants()


async def test_parts_of_one_load_that_were_handed_back_are_leased_as_one_again(
    given: Given, database: Database
) -> None:
    await given.batch(commands=6)
    worker = given.registered_worker()
    first, second = given.claimed(limit=3, by=worker), given.claimed(limit=3, by=worker)
    for part in (first, second):
        database.perform(claim.give_back({part[0].lease: [one.id for one in part]}))
        database.rows("DELETE FROM busload.lease WHERE open = 0")
    assert loads(database) == [(0, 2), (3, 5)]
    assert numbers(given.claimed(limit=6)) == [0, 1, 2, 3, 4, 5]
    assert [(lo & 1023, hi & 1023, open) for lo, hi, open in leases(database)] == [(0, 5, 6)]
    database.check_invariants()


async def test_commands_of_different_batches_are_never_leased_as_one(given: Given, database: Database) -> None:
    one, other = await given.batch(commands=1), await given.batch(commands=1)
    database.rows("UPDATE busload.command SET id = 2000 WHERE batch_id = %s", one)
    database.rows("UPDATE busload.command SET id = 2001 WHERE batch_id = %s", other)
    database.rows("UPDATE busload.queue SET lo = 2000, hi = 2000 WHERE batch_id = %s", one)
    database.rows("UPDATE busload.queue SET lo = 2001, hi = 2001 WHERE batch_id = %s", other)
    assert [taken.lease.batch_id for taken in given.claimed(limit=2)] == [one, other]
    assert leases(database) == [(2000, 2000, 1), (2001, 2001, 1)]


# -- turns ----------------------------------------------------------------------------------------------------------


async def served(given: Given, limit: int, most: int, *domains: str) -> list[list[str]]:
    """The domains of the commands of each claim, until nothing is left or so many claims were made."""
    worker, claims = given.registered_worker(), []
    for _ in range(most):
        taken = given.database.perform(claim.claim(worker=worker, domains=list(domains), limit=limit))
        claims.append([one.lease.domain for one in taken.leased])
    return claims


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize("order", [("backlog", "small"), ("small", "backlog")])
async def test_a_domain_does_not_starve_behind_the_backlog_of_another(
    bus: CommandBus, given: Given, limit: int, order: tuple[str, str]
) -> None:
    """A hundred loads that came first, and one command: domains take turns, whichever was named first."""
    for _ in range(100):
        await bus.send("backlog", "Debit")
    await bus.send("small", "Debit")
    claims = await served(given, limit, 30, *order)
    first = next(n for n, domains in enumerate(claims) if "small" in domains)
    assert first == 0 if limit > 1 else first < 30  # one slot: each turn is a toss, thirty of them a certainty


async def test_a_domain_does_not_starve_behind_large_loads(bus: CommandBus, given: Given) -> None:
    await bus.create_batch("backlog", [BatchCommand("Debit") for _ in range(3000)])
    await bus.send("small", "Debit")
    claims = await served(given, 20, 40, "backlog", "small")
    assert any("small" in domains for domains in claims)


async def test_between_equal_backlogs_turns_are_equal(bus: CommandBus, given: Given) -> None:
    for _ in range(60):
        await bus.send("one", "Debit")
        await bus.send("other", "Debit")
    for domains in await served(given, 10, 12, "one", "other"):
        assert Counter(domains) == {"one": 5, "other": 5}


async def test_priority_counts_before_turns(bus: CommandBus, given: Given) -> None:
    for _ in range(20):
        await bus.send("urgent", "Debit", priority=1)
    await bus.send("small", "Debit")
    assert await served(given, 4, 6, "small", "urgent") == [["urgent"] * 4] * 5 + [["small"]]


async def test_higher_priority_first_then_age(bus: CommandBus, given: Given) -> None:
    for name, priority in [("old", 0), ("low", -5), ("urgent", 9), ("young", 0), ("urgent too", 9)]:
        await bus.send(DOMAIN, "Debit", name, priority=priority)
    assert [one.data for one in given.claimed(limit=5)] == ['"urgent"', '"urgent too"', '"old"', '"young"', '"low"']


async def test_priority_decides_between_a_large_batch_and_a_late_single_command(bus: CommandBus, given: Given) -> None:
    await given.batch(commands=1000)
    await bus.send(DOMAIN, "Debit", "late", priority=1)
    assert [one.data for one in given.claimed(limit=2)] == ['"late"', '{"n":0}']


async def test_several_domains_share_the_slots_by_priority(bus: CommandBus, given: Given, database: Database) -> None:
    await bus.send("crm", "Push", "crm", priority=1)
    await given.batch(commands=3)
    worker = given.registered_worker()
    taken = database.perform(claim.claim(worker=worker, domains=["crm", DOMAIN], limit=3))
    assert [(one.lease.domain, numbers([one])) for one in taken.leased] == [("crm", [0]), (DOMAIN, [0]), (DOMAIN, [1])]


async def test_other_domains_are_left_alone(bus: CommandBus, given: Given, database: Database) -> None:
    await bus.send("crm", "Push")
    assert given.claimed(limit=5) == []
    assert database.count("queue") == 1


async def test_a_claim_brings_everything_the_handler_needs(bus: CommandBus, given: Given) -> None:
    correlation_id, command_id = UUID(int=7), UUID(int=8)
    full = BatchCommand(
        "Debit", command_id, {"n": 1}, reply_to="crm", correlation_id=correlation_id, task_key="t", max_attempts=9
    )
    await bus.send_many(DOMAIN, [full, BatchCommand("Credit", data=None, reply_to="crm")])
    one, other = given.claimed(limit=2)
    assert (one.command_id, one.command_type, one.data) == (command_id, "Debit", '{"n":1}')
    assert (one.correlation_id, one.task_key, one.reply_to, one.max_attempts) == (correlation_id, "t", "crm", 9)
    assert (other.command_type, other.correlation_id, other.task_key, other.max_attempts) == (
        "Credit",
        None,
        None,
        None,
    )
    assert one.lease is other.lease and one.lease.unsettled == 2


async def test_the_execution_id_is_the_lease_and_the_position(given: Given, database: Database) -> None:
    await given.batch(commands=3)
    for one in given.claimed(limit=3):
        shown = database.value("SELECT execution_id FROM busload.command_status WHERE id = %s", one.id)
        assert shown == one.execution_id
        assert one.execution_id.int & 0xFFF == one.id & 1023
        assert one.execution_id.int >> 12 == one.lease.lease_id.int >> 12


async def test_eight_workers_claiming_at_once_never_take_a_command_twice(
    given: Given, database: Database, dsn: str
) -> None:
    await given.batch(commands=2000)
    for _ in range(100):
        await given.sent()
    workers = [given.registered_worker() for _ in range(8)]
    taken: list[int] = []

    def work(worker: int, limit: int, conn: psycopg.Connection[Any]) -> None:
        while True:
            found = perform(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=limit))
            taken.extend(one.id for one in found.leased)
            if not found.leased and not found.contended:
                return

    at_once(dsn, [partial(work, worker, 3 + 7 * n) for n, worker in enumerate(workers)])
    assert [id for id, times in Counter(taken).items() if times > 1] == []
    assert len(taken) == 2100
    assert database.count("queue") == 0
    database.check_invariants()


@pytest.mark.parametrize(
    "claim_so",
    [claim.claim, partial(claim.claim, no_turns=True), claim.claim_few],
    ids=["in turns", "by age", "a few"],
)
def test_a_claim_is_prepared_once_whoever_had_a_turn_and_however_many_it_asks_for(
    given: Given, dsn: str, claim_so: Callable[..., Plan[claim.Claim]]
) -> None:
    """psycopg prepares a statement for each combination of types, and a number has the smallest one that it fits."""
    plan = partial(claim_so, worker=given.registered_worker(), domains=[DOMAIN])
    with psycopg.connect(dsn, prepare_threshold=0) as conn:
        for turns in ({}, {DOMAIN: 0}, {DOMAIN: 2**20}, {DOMAIN: 2**60}):
            for limit in (1, 40_000):
                perform(conn, plan(limit=limit, turns=turns))
        prepared = conn.execute("SELECT count(*) FROM pg_prepared_statements", prepare=False).fetchone()
    assert prepared == (1,)


def held_open(dsn: str, query: str, *params: Any) -> psycopg.Connection[Any]:
    """A connection whose transaction holds what the query locked."""
    conn = psycopg.connect(dsn)
    conn.execute(query.encode(), params or None)
    return conn


async def test_what_others_have_locked_is_skipped_and_said_to_be_contended(
    given: Given, database: Database, dsn: str
) -> None:
    worker = given.registered_worker()
    empty = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=1))
    assert (empty.leased, empty.contended) == ([], False)
    await given.batch(commands=3)
    with held_open(dsn, "SELECT FROM busload.queue FOR UPDATE"):
        locked = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=1))
        assert (locked.leased, locked.contended) == ([], True)
    found = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=9))
    assert (len(found.leased), found.contended) == (3, False)


async def test_a_claim_locks_no_more_loads_than_it_needs(given: Given, dsn: str) -> None:
    for _ in range(4):
        await given.batch(commands=5)
    worker, other = given.registered_worker(), given.registered_worker()
    with psycopg.connect(dsn) as conn:
        first = perform(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=7))  # two loads, not committed
        with Database(dsn) as beside:
            taken = beside.perform(claim.claim(worker=other, domains=[DOMAIN], limit=100))
            assert len(taken.leased) == 0 or {one.id >> 10 for one in taken.leased}.isdisjoint(
                {one.id >> 10 for one in first.leased}
            )
            rest = beside.perform(claim.claim(worker=other, domains=[DOMAIN], limit=100))
            assert len(taken.leased) + len(rest.leased) == 10
        conn.commit()


async def test_suspects_are_taken_one_at_a_time(given: Given, database: Database) -> None:
    for _ in range(3):
        await given.batch(commands=2)
    database.rows("UPDATE busload.queue SET crashes = 1")
    worker = given.registered_worker()

    first = given.claimed(limit=10, by=worker)
    assert numbers(first) == [0, 1] and first[0].lease.crashes == 1
    assert given.claimed(limit=10, by=worker, suspects=False) == []
    assert len({one.lease.lease_id for one in given.claimed(limit=10, by=worker)}) == 1
    database.check_invariants()


async def test_a_suspect_does_not_hide_behind_its_age(given: Given, database: Database) -> None:
    await given.batch(commands=2)
    database.rows("UPDATE busload.queue SET crashes = 1")
    await given.batch(commands=2)
    without = given.claimed(limit=10, suspects=False)
    assert [one.lease.crashes for one in without] == [0, 0]
    assert [one.lease.crashes for one in given.claimed(limit=10)] == [1, 1]


async def test_the_first_claim_starts_the_batch_once(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=3)
    assert (await given.batch_now(batch_id)).status == "PENDING"
    worker = given.registered_worker()
    given.claimed(by=worker)
    given.claimed(by=worker)
    started = await given.batch_now(batch_id)
    assert started.status == "IN_PROGRESS" and started.started_at is not None
    events = database.rows("SELECT worker FROM busload.event WHERE type = 'BATCH_STARTED'")
    assert events == [(worker,)]


def started(database: Database) -> int:
    return int(database.value("SELECT count(*) FROM busload.event WHERE type = 'BATCH_STARTED'"))


async def test_two_claims_at_once_start_a_batch_once(given: Given, database: Database, dsn: str) -> None:
    batch_id = await given.batch(commands=4)
    await given.batch(commands=4)  # so that the second claim finds something beside what the first has locked
    database.rows("UPDATE busload.queue SET batch_id = %s, fair = 1", batch_id)
    database.rows("UPDATE busload.batch SET total_count = 8 WHERE batch_id = %s", batch_id)
    worker = given.registered_worker()
    with psycopg.connect(dsn) as first:
        assert perform(first, claim.claim(worker=worker, domains=[DOMAIN], limit=4)).leased
        assert len(given.claimed(limit=4, by=worker)) == 4
        first.commit()
    assert started(database) == 1
    assert (await given.batch_now(batch_id)).status == "IN_PROGRESS"


async def test_when_the_claim_that_starts_a_batch_is_undone_another_one_starts_it(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(commands=4)
    worker = given.registered_worker()
    with psycopg.connect(dsn) as undone:
        perform(undone, claim.claim(worker=worker, domains=[DOMAIN], limit=1))
        undone.rollback()
    assert ((await given.batch_now(batch_id)).status, started(database)) == ("PENDING", 0)
    given.claimed()
    assert ((await given.batch_now(batch_id)).status, started(database)) == ("IN_PROGRESS", 1)


async def test_a_claim_that_starts_nothing_writes_no_event(given: Given, database: Database) -> None:
    """Even an insert of no rows would wake the trigger on events, for each claim."""
    await given.batch(commands=3)
    worker = given.registered_worker()
    given.claimed(by=worker)
    await given.sent()
    database.rows(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'an insert into event'; END $$"
    )
    database.rows("CREATE TRIGGER refuse BEFORE INSERT ON busload.event EXECUTE FUNCTION refuse()")
    assert len(given.claimed(limit=5, by=worker)) == 3
    assert given.claimed(limit=5, by=worker) == []


@pytest.mark.parametrize("sealed", [True, False])
async def test_a_claim_says_what_has_not_ended_of_a_batch_that_takes_no_more(
    bus: CommandBus, given: Given, sealed: bool
) -> None:
    """By this the worker knows the last commands of a batch."""
    async with bus.open_batch(DOMAIN, checkpoint_size=5) as batch:
        for _ in range(5):
            await batch.add("Debit")
        if sealed:
            await bus.seal_batch(DOMAIN, batch.batch_id)
        worker = given.registered_worker()
        first = given.claimed(limit=2, by=worker)
        assert {one.lease.remaining for one in first} == {5 if sealed else None}
        given.settled(first[:1])
        given.settled(first[1:], FAILED_ATTEMPT, delay=60.0)
        assert {one.lease.remaining for one in given.claimed(limit=9, by=worker)} == {4 if sealed else None}
    await given.sent()
    assert [one.lease.remaining for one in given.claimed()] == [None]


async def test_a_locked_batch_row_neither_delays_a_claim_nor_is_its_start_forgotten(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(commands=2)
    with held_open(dsn, "SELECT FROM busload.batch FOR UPDATE"):
        database.rows("SET statement_timeout = '5 s'")
        one, other = given.claimed(limit=2)
    assert (await given.batch_now(batch_id)).status == "PENDING"
    given.settled([one])
    assert (await given.batch_now(batch_id)).status == "IN_PROGRESS"
    given.settled([other])
    trail = [event.type for event in await given.bus.get_batch_audit_trail(DOMAIN, batch_id)]
    assert trail.count("BATCH_STARTED") == 1 and trail[-1] == "BATCH_COMPLETED"
    database.check_invariants()


async def test_what_is_not_due_waits_and_what_is_due_is_promoted(bus: CommandBus, given: Given) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    await bus.send(DOMAIN, "Debit", "later", run_at=later)
    assert given.claimed() == []
    waiting = given.database.perform(claim.promote())
    assert waiting.loads == 0 and 3500 < waiting.next_due <= 3600

    given.make_due()
    promoted = given.database.perform(claim.promote())
    assert (promoted.loads, promoted.next_due) == (1, None)
    assert [one.data for one in given.claimed()] == ['"later"']


async def test_promotion_keeps_priority_attempt_and_suspicion(bus: CommandBus, given: Given) -> None:
    await bus.send(DOMAIN, "Debit", run_at=datetime.now(UTC) + timedelta(hours=1), priority=4, reply_to="crm")
    given.database.rows("UPDATE busload.scheduled SET attempt = 5, forgiven = 3, crashes = 2, run_at = now()")
    given.database.perform(claim.promote())
    row = given.database.rows("SELECT priority, attempt, forgiven, crashes, replies FROM busload.queue")
    assert row == [(4, 5, 3, 2, True)]


async def test_two_promotions_at_once_move_everything_once(given: Given, database: Database, dsn: str) -> None:
    await given.batch(commands=3)
    given.settled(given.claimed(limit=3), FAILED_ATTEMPT, delay=0.0)
    assert database.count("scheduled") == 3
    with psycopg.connect(dsn) as conn:
        assert perform(conn, claim.promote()).loads == 3
        assert database.perform(claim.promote()).loads == 0  # locked by the other one, not waited for
        conn.commit()
    assert database.count("queue") == 3
    database.check_invariants()


async def test_unknown_commands_are_given_back_without_burning_an_attempt(given: Given, database: Database) -> None:
    await given.batch(commands=6)
    leased = given.claimed(limit=6)
    unknown = [leased[1].id, leased[2].id, leased[5].id]

    assert database.perform(claim.give_back({leased[0].lease: unknown}, pause=30, details=["{}"])) == {
        leased[0].lease.lease_id
    }

    assert loads(database, "scheduled") == [(1, 2), (5, 5)]
    assert database.rows("SELECT DISTINCT attempt, reason FROM busload.scheduled") == [(1, "NO_HANDLER")]
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'NO_HANDLER'") == 2
    database.check_invariants()
    given.settled([leased[0], leased[3], leased[4]])
    assert database.count("lease") == 0
    database.check_invariants()


async def test_giving_back_twice_changes_nothing(given: Given, database: Database) -> None:
    await given.batch(commands=3)
    leased = given.claimed(limit=3)
    database.perform(claim.give_back({leased[0].lease: [leased[0].id]}, pause=30, details=["{}"]))
    before = database.everything()
    assert database.perform(claim.give_back({leased[0].lease: [leased[0].id]}, pause=30, details=["{}"])) == set()
    assert database.everything() == before
    database.check_invariants()


async def test_only_the_first_give_back_leaves_an_event(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    for _ in range(3):
        [one] = given.claimed()
        database.perform(claim.give_back({one.lease: [one.id]}, pause=0, details=["{}"]))
        database.rows("DELETE FROM busload.lease")
        given.make_due()
        database.perform(claim.promote())
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'NO_HANDLER'") == 1
    assert database.value("SELECT attempt FROM busload.queue") == 1


async def test_what_is_handed_back_is_ready_at_once_and_burns_no_attempt(given: Given, database: Database) -> None:
    """Commands that stood in line, while others of their lease run."""
    batch_id = await given.batch(commands=8)
    leased = given.claimed(limit=8)
    waiting = [leased[n] for n in (1, 2, 3, 6, 7)]

    assert database.perform(claim.give_back({leased[0].lease: [one.id for one in waiting]})) == {
        leased[0].lease.lease_id
    }

    assert loads(database) == [(1, 3), (6, 7)]
    assert database.rows("SELECT DISTINCT attempt, batch_id FROM busload.queue") == [(1, batch_id)]
    assert database.rows("SELECT open, cardinality(returned) FROM busload.lease") == [(3, 5)]
    assert database.rows("SELECT lo & 1023, hi & 1023 FROM busload.event WHERE type = 'RELEASED' ORDER BY lo") == [
        (1, 3),
        (6, 7),
    ]
    database.check_invariants()
    again = given.claimed(limit=9)
    assert [one.id for one in again] == [one.id for one in waiting]
    given.settled([leased[n] for n in (0, 4, 5)])
    given.settled(again)
    assert (await given.batch_now(batch_id)).status == "COMPLETED" and database.count("lease") == 0
    database.check_invariants()


async def test_handing_back_twice_changes_nothing(given: Given, database: Database) -> None:
    """Its answer was lost."""
    await given.batch(commands=3)
    leased = given.claimed(limit=3)
    database.perform(claim.give_back({leased[0].lease: [leased[1].id, leased[2].id]}))
    before = database.everything()
    assert database.perform(claim.give_back({leased[0].lease: [leased[1].id, leased[2].id]})) == set()
    assert database.everything() == before
    database.check_invariants()


async def test_what_is_handed_back_by_a_worker_that_lost_its_lease_changes_nothing(
    given: Given, database: Database
) -> None:
    """It was rescued meanwhile, and is ready already."""
    await given.batch(commands=3)
    late = given.claimed(limit=3, by=(dead := given.registered_worker()))
    given.died(dead)
    given.rescued()
    before = database.everything()
    assert database.perform(claim.give_back({late[0].lease: [one.id for one in late]})) == set()
    assert database.everything() == before
    database.check_invariants()


async def test_a_returned_command_can_be_claimed_while_its_neighbours_still_run(
    given: Given, database: Database
) -> None:
    """Its lease stays open for them, and covers its id."""
    await given.batch(commands=3)
    leased = given.claimed(limit=3)
    database.perform(claim.give_back({leased[0].lease: [leased[2].id]}, pause=0, details=["{}"]))
    database.perform(claim.promote())

    [again] = given.claimed(limit=5)

    assert again.id == leased[2].id and again.lease.lease_id != leased[0].lease.lease_id
    database.check_invariants()
    assert given.settled([again]) == {again.id}
    assert given.settled(leased[:2]) == {leased[0].id, leased[1].id}
    assert database.count("lease") == 0
    database.check_invariants()


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_retry_can_be_claimed_while_its_neighbours_still_run(
    given: Given, database: Database, position: int
) -> None:
    """The last command of a load is the one whose id the load is known by: its retry must not collide with it."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    failed = leased.pop(position)
    given.settled([failed], FAILED_ATTEMPT, delay=0.0)
    database.perform(claim.promote())

    [again] = given.claimed(limit=5)

    assert (again.id, again.lease.attempt) == (failed.id, 2)
    database.check_invariants()
    given.settled([again])
    given.settled(leased)
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert database.count("lease") == 0
    database.check_invariants()


async def test_a_worker_that_was_declared_dead_gets_nothing(given: Given, database: Database) -> None:
    await given.batch(commands=2)
    dead = given.registered_worker()
    given.died(dead)
    given.rescued()
    refused = database.perform(claim.claim(worker=dead, domains=[DOMAIN], limit=1))
    assert (refused.leased, refused.contended, refused.refused) == ([], False, True)
    database.rows("UPDATE busload.queue SET crashes = 1")
    assert given.claimed(by=dead) == []
    assert len(given.claimed()) == 1


async def test_a_lease_whose_commands_another_client_deleted_yields_nothing(given: Given, database: Database) -> None:
    await given.sent()
    database.rows("DELETE FROM busload.command")
    assert given.claimed() == []


async def test_a_claim_that_finds_part_of_the_work_locked_says_so(
    given: Given, database: Database, bus: CommandBus, dsn: str
) -> None:
    """A worker with free slots must come back soon, not at its next poll."""
    worker = given.registered_worker()
    await given.batch(commands=1000)
    for _ in range(50):
        await bus.send(DOMAIN, "Debit", {})
    with held_open(dsn, "SELECT FROM busload.queue ORDER BY hi LIMIT 1 FOR UPDATE"):
        found = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=100))
        assert 1 <= len(found.leased) <= 50
        assert found.contended
    rest = database.perform(claim.claim(worker=worker, domains=[DOMAIN], limit=100))
    assert (len(rest.leased), rest.contended) == (100, False)

"""How results are recorded: only while the lease exists, and once."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import CommandBus
from busload.batches import cancel
from busload.commands import claim, rescue, settle
from busload.commands.execution import (
    CANCELED,
    COMPLETED,
    FAILED,
    FAILED_ATTEMPT,
    TROUBLESHOOTING,
    Lease,
    Leased,
    Transition,
)
from busload.postgres.plan import Plan
from busload.sync.plan import perform
from tests.given import DOMAIN, WITHIN, Database, Given, at_once, beside, counts

OUTCOMES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETED, {}),
    (FAILED, {}),
    (CANCELED, {}),
    (TROUBLESHOOTING, {"reason": "PERMANENT"}),
    (FAILED_ATTEMPT, {"delay": 60.0}),
]


def settlement(leased: list[Leased], outcome: str = COMPLETED, *, again: bool = True, **details: Any) -> Plan[set[int]]:
    return settle.settle([Transition(one, outcome, **details) for one in leased], now=0.0, again=again)


@pytest.mark.parametrize(("outcome", "details"), OUTCOMES)
async def test_each_outcome_leads_to_its_place_and_its_counter(
    given: Given, database: Database, outcome: str, details: dict[str, Any]
) -> None:
    batch_id = await given.batch(commands=2)
    one, _ = given.claimed(limit=2)
    assert given.settled([one], outcome, **details) == {one.id}
    batch = await given.batch_now(batch_id)
    expected = {
        COMPLETED: (2, 1, 0, 0, 0),
        FAILED: (2, 0, 1, 0, 0),
        CANCELED: (2, 0, 0, 1, 0),
        TROUBLESHOOTING: (2, 0, 0, 0, 1),
        FAILED_ATTEMPT: (2, 0, 0, 0, 0),
    }
    assert counts(batch) == expected[outcome]
    places = {place: database.count(place) for place in ("scheduled", "troubleshooting")}
    assert places == {
        "scheduled": int(outcome == FAILED_ATTEMPT),
        "troubleshooting": int(outcome == TROUBLESHOOTING),
    }
    database.check_invariants()


async def test_the_last_settlement_closes_the_lease(given: Given, database: Database) -> None:
    await given.batch(commands=3)
    leased = given.claimed(limit=3)
    given.settled(leased[:2])
    assert database.count("lease") == 1
    given.settled(leased[2:])
    assert database.count("lease") == 0


async def test_many_leases_and_batches_in_one_statement(given: Given, database: Database) -> None:
    batches = [await given.batch(commands=3) for _ in range(5)]
    leased = given.claimed(limit=15)
    mixed = [Transition(one, COMPLETED if n % 2 else FAILED, "{}") for n, one in enumerate(leased[:-1])]
    assert len(database.perform(settle.settle(mixed, now=0.0))) == 14
    assert database.count("lease") == 1
    given.settled(leased[-1:])
    assert database.count("lease") == 0
    assert [(await given.batch_now(id)).status for id in batches] == ["COMPLETED_WITH_FAILURES"] * 5
    database.check_invariants()


async def test_a_late_worker_cannot_settle_a_rescued_command(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=1)
    dead = given.registered_worker()
    [late] = given.claimed(by=dead)
    given.died(dead)
    assert given.rescued().commands == 1
    before = database.everything()

    for outcome, details in OUTCOMES:
        assert given.settled([late], outcome, **details) == set()

    assert database.everything() == before
    assert (await given.batch_now(batch_id)).completed_count == 0
    database.check_invariants()


async def test_a_late_worker_cannot_settle_for_the_new_holder(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    dead = given.registered_worker()
    [late] = given.claimed(by=dead)
    given.died(dead)
    given.rescued()
    [current] = given.claimed()

    assert given.settled([late], FAILED) == set()
    assert given.settled([current]) == {current.id}
    assert given.settled([late], FAILED) == set()

    assert database.rows("SELECT outcome, lease_id FROM busload.execution") == [(COMPLETED, current.lease.lease_id)]
    database.check_invariants()


async def test_a_forged_lease_moves_nothing(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    [one] = given.claimed()
    lease = one.lease
    forged = Lease(uuid4(), lease.load, lease.domain, lease.batch_id, 0, 1, 0, 0, lease.created_at, 1)
    assert given.settled([Leased(forged, one.id, one.command_id, "Debit", None)]) == set()
    assert database.count("execution") == 0


@pytest.mark.parametrize(("outcome", "details"), OUTCOMES)
async def test_repeating_a_settlement_is_harmless_and_credited(
    given: Given, database: Database, outcome: str, details: dict[str, Any]
) -> None:
    await given.batch(commands=3)
    leased = given.claimed(limit=3)
    first = given.settled(leased[:2], outcome, **details)
    before = database.everything()
    assert given.settled(leased[:2], outcome, **details) == first == {leased[0].id, leased[1].id}
    assert database.everything() == before
    database.check_invariants()


async def test_a_repetition_after_the_lease_was_closed_is_credited_too(given: Given, database: Database) -> None:
    """The commit was done and only its answer was lost."""
    await given.batch(commands=2)
    leased = given.claimed(limit=2)
    assert given.settled(leased) == {one.id for one in leased}
    assert given.settled(leased) == {one.id for one in leased}
    database.check_invariants()


async def test_a_repetition_that_carries_new_results_settles_those(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    given.settled(leased[:1])
    assert given.settled(leased) == {one.id for one in leased}
    assert (await given.batch_now(batch_id)).completed_count == 3
    assert database.count("lease") == 0
    database.check_invariants()


# -- hoping for a first time ----------------------------------------------------------------------------------------


def hopeful(dsn: str, plan: Plan[Any]) -> Any:
    """As a worker's flush does it: each statement is a transaction."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        return perform(conn, plan)


@pytest.mark.parametrize(("outcome", "details"), OUTCOMES)
@pytest.mark.parametrize("rest", [0, 1])
async def test_a_first_settlement_whose_answer_was_lost_is_credited_and_counts_once(
    given: Given, database: Database, dsn: str, outcome: str, details: dict[str, Any], rest: int
) -> None:
    """The answer to the first one was lost; its lease is still open, or closed with it."""
    await given.batch(commands=2 + rest)
    leased = given.claimed(limit=2 + rest)
    ids = {one.id for one in leased[:2]}
    assert hopeful(dsn, settlement(leased[:2], outcome, again=False, **details)) == ids
    before = database.everything()
    batch = database.rows("SELECT b::text FROM busload.batch AS b")
    assert hopeful(dsn, settlement(leased[:2], outcome, again=False, **details)) == ids
    assert database.everything() == before and database.rows("SELECT b::text FROM busload.batch AS b") == batch
    assert database.count("lease") == rest
    database.check_invariants()


@pytest.mark.parametrize("known", [1, 2, 3])
async def test_recorded_and_new_results_together_are_each_credited_once(
    given: Given, database: Database, dsn: str, known: int
) -> None:
    """The statement that meets a recorded one changes nothing; its repetition writes the rest."""
    batches = [await given.batch(commands=2) for _ in range(2)]
    leased = given.claimed(limit=4)
    hopeful(dsn, settlement(leased[:known], again=False))
    assert hopeful(dsn, settlement(leased, again=False)) == {one.id for one in leased}
    assert [counts(await given.batch_now(id)) for id in batches] == [(2, 2, 0, 0, 0)] * 2
    assert database.count("lease") == 0 and database.count("execution") == 4
    database.check_invariants()


async def test_results_of_a_lost_lease_beside_recorded_and_new_ones_do_not_count(
    given: Given, database: Database, dsn: str
) -> None:
    """Three fates in one flush, each its own."""
    await given.batch(commands=4)
    lost = given.claimed(by=(dead := given.registered_worker()))
    known, new = given.claimed(limit=2), given.claimed()
    given.died(dead)
    given.rescued()
    hopeful(dsn, settlement(known[:1], again=False))
    credited = hopeful(dsn, settlement([*lost, *known, *new], again=False))
    assert credited == {one.id for one in [*known, *new]}
    assert database.count("execution") == 3
    database.check_invariants()


async def test_a_lost_answer_with_another_outcome_is_not_credited(given: Given, database: Database, dsn: str) -> None:
    """What is recorded stands."""
    await given.batch(commands=2)
    leased = given.claimed(limit=2)
    hopeful(dsn, settlement(leased[:1], FAILED, again=False))
    assert hopeful(dsn, settlement(leased, again=False)) == {leased[1].id}
    assert database.rows("SELECT outcome FROM busload.execution ORDER BY command") == [(FAILED,), (COMPLETED,)]
    database.check_invariants()


async def test_a_first_settlement_twice_at_once_counts_once(given: Given, database: Database, dsn: str) -> None:
    """The server is still at the first one when the worker has given up waiting and repeats it."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    with psycopg.connect(dsn) as first:
        perform(first, settlement(leased, again=False))
        thread, answers = beside(dsn, lambda: settlement(leased, again=False), autocommit=True)
        first.commit()
    thread.join(WITHIN)
    assert answers == [{one.id for one in leased}]
    assert counts(await given.batch_now(batch_id)) == (3, 3, 0, 0, 0)
    assert database.count("lease") == 0
    database.check_invariants()


# -- one statement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 5])
async def test_the_counters_are_folded_once_for_a_whole_flush(given: Given, dsn: str, batches: int) -> None:
    """A trigger for each row would have run five hundred times."""
    for _ in range(batches):
        await given.batch(commands=500 // batches)
    leased = given.claimed(limit=500)
    with psycopg.connect(dsn) as conn:
        conn.execute("SET LOCAL track_functions = 'pl'")
        assert len(perform(conn, settlement(leased, again=False))) == 500
        calls = "SELECT funcname, calls FROM pg_stat_xact_user_functions WHERE schemaname = 'busload'"
        counted: dict[str, int] = dict(conn.execute(calls).fetchall())
    assert {"fold_executions": 1, "fold": 1, "decide": 1}.items() <= counted.items()


async def test_a_flush_that_ends_no_batch_decides_nothing(given: Given, dsn: str) -> None:
    await given.batch(commands=500)
    leased = given.claimed(limit=499)
    with psycopg.connect(dsn) as conn:
        conn.execute("SET LOCAL track_functions = 'pl'")
        perform(conn, settlement(leased, again=False))
        calls = "SELECT funcname, calls FROM pg_stat_xact_user_functions WHERE schemaname = 'busload'"
        counted: dict[str, int] = dict(conn.execute(calls).fetchall())
    assert counted.get("fold") == 1 and "decide" not in counted


async def test_a_flush_that_fails_writes_nothing(given: Given, database: Database, dsn: str) -> None:
    """All or nothing, also for what comes before the one that cannot be stored."""
    await given.batch(commands=5)
    leased = given.claimed(limit=5)
    before = database.everything()
    bad = [Transition(one, COMPLETED, "{}" if n < 4 else "{no json") for n, one in enumerate(leased)]
    with pytest.raises(psycopg.DataError):
        hopeful(dsn, settle.settle(bad, now=0.0, again=False))
    assert database.everything() == before
    database.check_invariants()


async def test_two_flushes_over_the_same_20_batches_in_opposite_order_do_not_deadlock(
    given: Given, database: Database, dsn: str
) -> None:
    """Both wait for a batch in the middle; one that had gone the other way would hold what is next."""
    batches = [await given.batch(commands=2) for _ in range(20)]
    worker = given.registered_worker()
    pairs = [(given.claimed(by=worker)[0], given.claimed(by=worker)[0]) for _ in batches]
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = database.value(deadlocks)
    middle = sorted(one.lease.batch_id for one, _ in pairs if one.lease.batch_id is not None)[10]
    with psycopg.connect(dsn) as brake:
        brake.execute("SELECT FROM busload.batch WHERE batch_id = %s FOR UPDATE", [middle])
        forth = beside(dsn, lambda: settlement([one for one, _ in pairs]), autocommit=True)
        back = beside(dsn, lambda: settlement([other for _, other in reversed(pairs)]), autocommit=True)
        brake.rollback()
    for thread, answers in (forth, back):
        thread.join(WITHIN)
        assert [len(answer) for answer in answers] == [20]
    assert database.value(deadlocks) == before
    assert [(await given.batch_now(id)).status for id in batches] == ["COMPLETED"] * 20
    database.check_invariants()


async def test_two_flushes_over_the_same_20_leases_in_opposite_order_do_not_deadlock(
    given: Given, database: Database, dsn: str
) -> None:
    """Leases are locked in the order of their ids, before anything else."""
    for _ in range(20):
        await given.batch(commands=2)
    leased = given.claimed(limit=40)
    ones, others = leased[::2], leased[1::2]
    middle = sorted({one.lease.lease_id for one in leased})[10]
    with psycopg.connect(dsn) as brake:
        brake.execute("SELECT FROM busload.lease WHERE lease_id = %s FOR UPDATE", [middle])
        forth = beside(dsn, lambda: settlement(ones), autocommit=True)
        back = beside(dsn, lambda: settlement(others[::-1]), autocommit=True)
        brake.rollback()
    for thread, answers in (forth, back):
        thread.join(WITHIN)
        assert [len(answer) for answer in answers] == [20]
    assert database.count("lease") == 0
    database.check_invariants()


# -- the start and the end of a batch, by whoever comes first -------------------------------------------------------


def events(database: Database, type: str) -> int:
    return int(database.value("SELECT count(*) FROM busload.event WHERE type = %s", type))


async def not_started(given: Given, dsn: str, commands: int) -> list[Leased]:
    """A claim that could not have the batch's row, and left its start to the first settlement."""
    with psycopg.connect(dsn) as brake:
        brake.execute("SELECT FROM busload.batch FOR UPDATE")
        leased = given.claimed(limit=commands)
    assert given.database.value("SELECT status FROM busload.batch") == "PENDING"
    return leased


async def test_a_settlement_that_waits_for_the_claim_that_starts_the_batch_does_not_start_it_again(
    given: Given, database: Database, dsn: str
) -> None:
    """What it sees when it gets the row counts, not what it saw before it waited."""
    await given.batch(commands=4)
    leased = await not_started(given, dsn, 2)
    worker = given.registered_worker()
    with psycopg.connect(dsn) as claiming:
        assert perform(claiming, claim.claim(worker=worker, domains=[DOMAIN], limit=1)).leased
        thread, answers = beside(dsn, lambda: settlement(leased))
        assert answers == []
        claiming.commit()
    thread.join(WITHIN)
    assert answers == [{one.id for one in leased}]
    assert events(database, "BATCH_STARTED") == 1
    database.check_invariants()


async def test_a_claim_beside_the_settlement_that_starts_the_batch_does_not_start_it_again(
    given: Given, database: Database, dsn: str
) -> None:
    await given.batch(commands=4)
    leased = await not_started(given, dsn, 2)
    with psycopg.connect(dsn) as settling:
        perform(settling, settlement(leased))
        assert len(given.claimed(limit=2)) == 2
        settling.commit()
    assert events(database, "BATCH_STARTED") == 1
    database.check_invariants()


async def test_two_settlements_that_both_find_the_batch_not_started_start_it_once(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(commands=4)
    leased = await not_started(given, dsn, 4)
    with psycopg.connect(dsn) as first:
        perform(first, settlement(leased[:1]))
        thread, answers = beside(dsn, lambda: settlement(leased[1:]))
        first.commit()
    thread.join(WITHIN)
    assert answers == [{one.id for one in leased[1:]}]
    assert (events(database, "BATCH_STARTED"), events(database, "BATCH_COMPLETED")) == (1, 1)
    assert (await given.batch_now(batch_id)).started_at is not None
    database.check_invariants()


async def test_claims_and_settlements_that_race_start_and_complete_each_batch_once(
    given: Given, database: Database, dsn: str
) -> None:
    """Four workers over the same small batches, each claim and each settlement a race for the row."""
    batches = [await given.batch(commands=6) for _ in range(40)]
    workers = [given.registered_worker() for _ in range(4)]

    def work(worker: int, conn: psycopg.Connection[Any]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = perform(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=2))
            if found.leased:
                perform(conn, settlement(found.leased, again=False))
            elif not found.contended:
                return

    at_once(dsn, [partial(work, worker) for worker in workers])
    assert (events(database, "BATCH_STARTED"), events(database, "BATCH_COMPLETED")) == (40, 40)
    assert [(await given.batch_now(id)).status for id in batches] == ["COMPLETED"] * 40
    database.check_invariants()


async def test_a_second_different_result_of_the_same_attempt_does_not_count(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=2)
    leased = given.claimed(limit=2)
    given.settled(leased[:1], FAILED_ATTEMPT, delay=60.0)
    given.settled(leased[:1], COMPLETED)
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 0, 0)
    assert database.count("scheduled") == 1
    database.check_invariants()


async def test_a_result_after_a_retry_was_scheduled_is_refused(given: Given, database: Database) -> None:
    """Otherwise a handler that outlived its timeout could commit its writes although it will run again."""
    await given.batch(commands=2)
    leased = given.claimed(limit=2)
    given.settled(leased[:1], FAILED_ATTEMPT, delay=60.0)
    assert given.settled(leased[:1], COMPLETED) == set()


async def test_two_settlements_of_one_lease_at_once_both_count_and_close_it(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(commands=2)
    one, other = given.claimed(limit=2)
    with psycopg.connect(dsn) as first:
        perform(first, settlement([one]))
        thread, answers = beside(dsn, lambda: settlement([other]))
        first.commit()
    thread.join(WITHIN)
    assert answers == [{other.id}]
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert database.count("lease") == 0
    database.check_invariants()


async def test_the_same_settlement_twice_at_once_counts_once(given: Given, database: Database, dsn: str) -> None:
    """A flush that ran into its deadline is repeated while the first one is still under way in the server."""
    batch_id = await given.batch(commands=3)
    leased = given.claimed(limit=3)
    with psycopg.connect(dsn) as first:
        perform(first, settlement(leased[:2]))
        thread, answers = beside(dsn, lambda: settlement(leased[:2]), autocommit=True)
        first.commit()
    thread.join(WITHIN)
    assert answers == [{leased[0].id, leased[1].id}]
    assert (await given.batch_now(batch_id)).completed_count == 2
    assert database.count("lease") == 1
    given.settled(leased[2:])
    assert database.count("lease") == 0
    database.check_invariants()


async def test_settlements_over_the_same_batches_in_clashing_order_do_not_deadlock(
    given: Given, database: Database, dsn: str
) -> None:
    """Each takes some batches of many, in any order: without a common order they lock each other out."""
    batches = [await given.batch(commands=40) for _ in range(10)]
    worker, chance = given.registered_worker(), random.Random(7)
    members: list[list[Leased]] = [[given.claimed(by=worker)[0] for _ in range(40)] for _ in batches]
    rounds: list[list[list[Leased]]] = [[], [], [], []]
    while left := [member for member in members if member]:
        some = chance.sample(left, min(5, len(left)))
        chance.choice(rounds).append([member.pop() for member in some])

    def work(share: list[list[Leased]], conn: psycopg.Connection[Any]) -> None:
        for leased in share:
            perform(conn, settlement(leased))

    at_once(dsn, [partial(work, share) for share in rounds])
    assert [(await given.batch_now(id)).status for id in batches] == ["COMPLETED"] * 10
    database.check_invariants()


async def test_the_last_two_members_settled_at_once_complete_the_batch_once(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(commands=2)
    worker = given.registered_worker()
    [one], [other] = given.claimed(by=worker), given.claimed(by=worker)
    with psycopg.connect(dsn) as first:
        perform(first, settlement([one]))
        thread, answers = beside(dsn, lambda: settlement([other]))  # waits for the batch row
        assert answers == []
        first.commit()
    thread.join(WITHIN)
    assert answers == [{other.id}]
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'BATCH_COMPLETED'") == 1
    database.check_invariants()


async def test_when_the_first_of_two_rolls_back_the_second_stands_alone(
    given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(commands=2)
    one, other = given.claimed(limit=2)
    with psycopg.connect(dsn) as first:
        perform(first, settlement([one]))
        thread, answers = beside(dsn, lambda: settlement([one, other]))
        first.rollback()
    thread.join(WITHIN)
    assert answers == [{one.id, other.id}]
    assert (await given.batch_now(batch_id)).completed_count == 2
    assert database.count("lease") == 0
    database.check_invariants()


async def test_a_failed_attempt_of_a_canceled_batch_is_not_tried_again(given: Given, database: Database) -> None:
    batch_id = await given.batch(commands=1)
    [one] = given.claimed()
    database.perform(cancel.cancel_batch(DOMAIN, batch_id, reason="x", operator=None))
    given.settled([one], FAILED_ATTEMPT, delay=1.0)
    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 1, 0)
    assert (await given.batch_now(batch_id)).status == "COMPLETED_WITH_FAILURES"
    database.check_invariants()


@pytest.mark.parametrize(
    ("outcome", "details", "said"),
    [(COMPLETED, {"details": "7"}, "SUCCESS"), (FAILED, {}, "FAILED"), (CANCELED, {}, "CANCELED")],
)
async def test_a_reply_is_sent_by_the_settlement_that_ends_the_command(
    bus: CommandBus, given: Given, database: Database, outcome: str, details: dict[str, Any], said: str
) -> None:
    sent = await bus.send(DOMAIN, "Debit", reply_to="crm")
    [one] = given.claimed()
    given.settled([one], outcome, **details)
    given.settled([one], outcome, **details)
    rows = database.rows("SELECT command_type, data FROM busload.command WHERE domain = 'crm'")
    assert [(kind, data["outcome"], data["command_id"]) for kind, data in rows] == [
        ("DebitReply", said, str(sent.command_id))
    ]
    assert database.value("SELECT count(*) FROM busload.queue WHERE domain = 'crm'") == 1


@pytest.mark.parametrize(
    ("outcome", "details"), [(FAILED_ATTEMPT, {"delay": 1.0}), (TROUBLESHOOTING, {"reason": "PERMANENT"})]
)
async def test_no_reply_before_the_end(
    bus: CommandBus, given: Given, database: Database, outcome: str, details: dict[str, Any]
) -> None:
    await bus.send(DOMAIN, "Debit", reply_to="crm")
    given.settled(given.claimed(), outcome, **details)
    assert database.value("SELECT count(*) FROM busload.command WHERE domain = 'crm'") == 0


async def test_times_come_from_the_database_clock(given: Given, database: Database) -> None:
    await given.sent()
    [one] = given.claimed()
    one.started = 1000.0
    transition = Transition(one, COMPLETED, finished=1002.0)
    database.perform(settle.settle([transition], now=1003.0))
    took, ago = database.rows(
        "SELECT extract(epoch FROM finished_at - started_at)::float, extract(epoch FROM now() - finished_at)::float"
        "  FROM busload.execution"
    )[0]
    assert took == pytest.approx(2.0, abs=0.01)
    assert 1.0 <= ago < 5.0


async def test_what_was_settled_is_seen_by_a_release_that_waited_for_it(
    given: Given, database: Database, dsn: str
) -> None:
    """A handler's own transaction commits while its worker, which stops, hands the lease back."""
    batch_id = await given.batch(commands=2)
    one, other = given.claimed(limit=2)
    with psycopg.connect(dsn) as first:
        perform(first, settlement([one]))
        thread, answers = beside(dsn, lambda: rescue.release([one.lease.lease_id]))
        first.commit()
    thread.join(WITHIN)
    assert answers[0].commands == 1
    assert [again.id for again in given.claimed(limit=5)] == [other.id]
    assert (await given.batch_now(batch_id)).completed_count == 1
    database.check_invariants()


async def test_a_settlement_that_waited_for_a_rescue_moves_nothing(given: Given, database: Database, dsn: str) -> None:
    await given.batch(commands=2)
    dead = given.registered_worker()
    late = given.claimed(limit=2, by=dead)
    given.died(dead)
    with psycopg.connect(dsn) as rescuer:
        assert perform(rescuer, rescue.rescue()).commands == 2
        thread, answers = beside(dsn, lambda: settlement(late))
        rescuer.commit()
    thread.join(WITHIN)
    assert answers == [set()]
    assert database.count("execution") == 0
    database.check_invariants()


async def test_a_rescue_leaves_what_is_just_being_settled(given: Given, database: Database, dsn: str) -> None:
    await given.batch(commands=2)
    dead = given.registered_worker()
    late = given.claimed(limit=2, by=dead)
    given.died(dead)
    with psycopg.connect(dsn) as settler:
        perform(settler, settlement(late[:1]))
        assert given.rescued().commands == 0
        settler.commit()
    assert given.rescued().commands == 1
    assert [one.id for one in given.claimed(limit=5)] == [late[1].id]
    database.check_invariants()


async def test_the_order_of_a_claim_and_its_settlement_survives_many_small_flushes(
    given: Given, database: Database
) -> None:
    batch_id = await given.batch(commands=50)
    leased = given.claimed(limit=50)
    for one in reversed(leased):
        given.settled([one])
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert database.count("lease") == 0
    assert given.database.perform(claim.claim(worker=1, domains=[DOMAIN], limit=1)).leased == []
    database.check_invariants()

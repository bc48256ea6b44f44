"""What waits to be published: held by one relay at a time, marked by nobody else, and never moved backwards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import BatchCommand, CommandBus, SyncCommandBus
from busload.batches import cancel
from busload.commands import claim
from busload.commands.claim import DeliveredClaim
from busload.commands.load import Load
from busload.dispatch import creation_state, outbox
from busload.dispatch.outbox import Piece, Unpublished
from busload.postgres.plan import Statement
from busload.sync.plan import perform
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, counts, eventually

VIA = "postgresql"
ONE, OTHER = UUID(int=1), UUID(int=2)


@pytest.fixture
def writer(dsn: str) -> Iterator[SyncCommandBus]:
    """It leaves publishing to relays, so what it writes waits in the outbox."""
    with SyncCommandBus(dsn, transport=dsn, dispatch="relay") as writer:
        yield writer


def written(writer: SyncCommandBus, commands: int = 10) -> UUID:
    return writer.create_batch(DOMAIN, [BatchCommand("Debit", data={"n": n}) for n in range(commands)])


def taken(database: Database, relay: UUID = ONE) -> list[Unpublished]:
    loads: list[Unpublished] = database.perform(outbox.take(VIA, relay))
    return loads


def delivered(
    given: Given, wanted: dict[int, int], *, by: int | None = None, domains: list[str] | None = None
) -> DeliveredClaim:
    worker = given.registered_worker() if by is None else by
    found: DeliveredClaim = given.database.perform(
        claim.claim_delivered(worker=worker, domains=domains or [DOMAIN], wanted=wanted)
    )
    return found


def places(database: Database) -> tuple[int, int, int]:
    """Commands in the outbox, in the queue and on lease."""
    outbox, queue, lease = (
        database.value(f"SELECT coalesce(sum(hi - lo + 1), 0)::int FROM busload.{table}")
        for table in ("outbox", "queue", "lease")
    )
    return outbox, queue, lease


def whole(loads: list[Unpublished], reason: str | None = None, wait: float = 0.0) -> list[Piece]:
    return [Piece(load.load, reason, reason and "said so", wait) for load in loads]


def test_a_load_is_published_by_one_relay_at_a_time(writer: SyncCommandBus, database: Database, dsn: str) -> None:
    """Neither a hold nor a take that is not committed yet lets a second one in."""
    for _ in range(3):
        written(writer)
    with psycopg.connect(dsn) as conn:
        first = perform(conn, outbox.take(VIA, ONE, 2))
        assert len(first) == 2
        second = taken(database, OTHER)
        assert len(second) == 1
    assert {load.load.hi for load in first}.isdisjoint(load.load.hi for load in second)
    assert taken(database, OTHER) == []


def test_whoever_holds_a_load_and_dies_is_followed_by_another(writer: SyncCommandBus, database: Database) -> None:
    """A crash between writing and sending; and a crash between sending and marking."""
    written(writer)
    [load] = taken(database, ONE)
    assert taken(database, OTHER) == []
    database.rows("UPDATE busload.outbox SET due_at = now()")
    assert taken(database, OTHER) == [load]

    assert database.perform(outbox.mark(ONE, whole([load]))) == (0, 0)
    assert places(database) == (10, 0, 0)
    assert database.perform(outbox.mark(OTHER, whole([load]))) == (10, 0)
    assert database.perform(outbox.mark(OTHER, whole([load]))) == (0, 0)
    assert places(database) == (0, 10, 0)
    database.check_invariants()


def test_a_mark_moves_nothing_backwards(writer: SyncCommandBus, given: Given, database: Database) -> None:
    """A worker that was faster than the mark keeps what it has."""
    written(writer, 10)
    [load] = taken(database)
    worker = given.registered_worker()
    assert len(delivered(given, {load.load.number: 4}, by=worker).leased) == 4
    assert places(database) == (6, 0, 4)

    assert database.perform(outbox.mark(ONE, whole([load]))) == (6, 0)
    assert places(database) == (0, 6, 4)
    assert len(delivered(given, {load.load.number: 100}, by=worker).leased) == 6
    assert database.perform(outbox.mark(ONE, whole([load], "REFUSED"))) == (0, 0)
    assert places(database) == (0, 0, 10)
    database.check_invariants()


def test_a_refused_piece_of_what_a_worker_has_taken_stays_taken(
    writer: SyncCommandBus, given: Given, database: Database
) -> None:
    """The broker had the message though it was not confirmed."""
    written(writer, 10)
    [load] = taken(database)
    delivered(given, {load.load.number: 4})
    pieces = [
        Piece(Load(load.load.lo, load.load.lo + 4), "UNREACHABLE", "away", 60.0),
        Piece(Load(load.load.lo + 5, load.load.hi)),
    ]
    assert database.perform(outbox.mark(ONE, pieces)) == (5, 1)
    assert places(database) == (1, 5, 4)
    database.check_invariants()


def test_pieces_fare_for_themselves(writer: SyncCommandBus, database: Database) -> None:
    """What was not confirmed waits as PENDING_RETRY, the rest is PENDING."""
    batch_id = written(writer, 10)
    [load] = taken(database)
    pieces = [
        Piece(Load(load.load.lo, load.load.lo + 1)),
        Piece(Load(load.load.lo + 2, load.load.lo + 2), "TOO_LARGE", "too large", 60.0),
        Piece(Load(load.load.lo + 3, load.load.lo + 6)),
        Piece(Load(load.load.lo + 7, load.load.hi), "THROTTLED", "slow down", 0.0),
    ]
    assert database.perform(outbox.mark(ONE, pieces)) == (6, 4)
    found = database.rows("SELECT data ->> 'n', status FROM busload.command_status ORDER BY id")
    assert [n for n, status in found if status == "PENDING_RETRY"] == ["2", "7", "8", "9"]
    assert {status for _, status in found} == {"PENDING", "PENDING_RETRY"}
    again = taken(database, OTHER)
    assert [(one.load, one.rounds, one.batch_id) for one in again] == [
        (Load(load.load.lo + 7, load.load.hi), 1, batch_id)
    ]
    database.check_invariants()


def test_a_load_that_a_mark_names_only_in_part_stays(writer: SyncCommandBus, database: Database) -> None:
    """A load of which a piece is missing was published in part: all of it is published again."""
    written(writer, 10)
    [load] = taken(database)
    assert database.perform(outbox.mark(ONE, [Piece(Load(load.load.lo, load.load.lo + 3))])) == (0, 0)
    assert places(database) == (10, 0, 0)


def test_nothing_expires_by_age(writer: SyncCommandBus, given: Given, database: Database) -> None:
    """After an outage of any length everything is still there, and due."""
    written(writer, 10)
    database.perform(outbox.mark(ONE, whole(taken(database), "UNREACHABLE", 60.0)))
    written(writer, 5)
    for table, column in [
        ("outbox", "since"),
        ("outbox", "due_at"),
        ("command", "created_at"),
        ("batch", "created_at"),
    ]:
        database.rows(f"UPDATE busload.{table} SET {column} = {column} - interval '31 minutes'")
    given.rescued()
    database.perform(cancel.cancel_stragglers())
    assert places(database) == (15, 0, 0)
    assert sum(load.load.size for load in taken(database)) == 15
    [lag] = database.perform(outbox.lag())
    assert (lag.transport, lag.commands, lag.failed, lag.rounds) == (VIA, 15, 10, 1)
    assert lag.oldest > 1860


def test_once_the_broker_is_back_only_what_waited_for_it_is_due(writer: SyncCommandBus, database: Database) -> None:
    waits = {"UNREACHABLE": 3, "TOO_LARGE": 4, "THROTTLED": 5}
    for reason, commands in waits.items():
        written(writer, commands)
        database.perform(outbox.mark(ONE, whole(taken(database), reason, 300.0)))
    written(writer, 6)
    held = taken(database)
    assert (database.perform(outbox.next_due(VIA)) or 0) > 1

    database.perform(outbox.hurry(VIA))

    assert [load.load.size for load in taken(database, OTHER)] == [3]
    assert database.perform(outbox.mark(ONE, whole(held))) == (6, 0)


def test_commands_that_nobody_claims_are_published_again_after_pauses_that_double(
    writer: SyncCommandBus, given: Given, database: Database
) -> None:
    """A message that the broker confirmed and lost."""

    def silent() -> int:
        return len(database.perform(outbox.unclaimed(VIA, timedelta(minutes=5))))

    def pass_by(minutes: int) -> None:
        database.rows(f"UPDATE busload.queue SET published_at = published_at - interval '{minutes} minutes'")

    written(writer)
    database.perform(outbox.mark(ONE, whole(taken(database))))
    assert silent() == 0
    pass_by(6)
    assert (silent(), silent()) == (1, 0)
    pass_by(6)
    assert silent() == 0
    pass_by(6)
    assert silent() == 1
    given.claimed(10)
    pass_by(1000)
    assert silent() == 0


def test_a_mark_under_way_holds_up_nobody_and_is_looked_for_again(
    writer: SyncCommandBus, given: Given, database: Database, dsn: str
) -> None:
    """Nor does anybody else's transaction: the worker that rings for it must not wait."""
    written(writer, 10)
    [load] = taken(database)
    worker, number = given.registered_worker(), load.load.number
    with psycopg.connect(dsn) as conn:
        assert perform(conn, outbox.mark(ONE, whole([load]))) == (10, 0)
        found = delivered(given, {number: 100}, by=worker)
        assert (found.leased, found.passed_over, found.unknown) == ([], frozenset({number}), frozenset())
        conn.commit()
        found = delivered(given, {number: 4}, by=worker)
        assert (len(found.leased), found.passed_over) == (4, frozenset())
        conn.execute("SELECT FROM busload.queue FOR UPDATE")
        found = delivered(given, {number: 100}, by=worker)
        assert (found.leased, found.passed_over) == ([], frozenset({number}))
    assert len(delivered(given, {number: 100}, by=worker).leased) == 6
    assert delivered(given, {number: 100}, by=worker).passed_over == frozenset()
    database.check_invariants()


def test_a_delivery_claims_the_commands_it_names_and_no_others(
    writer: SyncCommandBus, given: Given, database: Database
) -> None:
    """Unknown loads are told, others' domains and suspects are left alone, a dead worker gets nothing."""
    written(writer, 10)
    written(writer, 10)
    first, second = sorted(load.load.number for load in taken(database))
    made_up = second + 1000
    assert delivered(given, {first: 5}, domains=["salaries"]).leased == []

    found = delivered(given, {first: 3, made_up: 7})
    assert (len(found.leased), found.unknown, found.refused) == (3, frozenset({made_up}), False)
    assert {one.id >> 10 for one in found.leased} == {first}

    dead = given.registered_worker()
    given.died(dead)
    given.rescued()
    refused = delivered(given, {second: 10}, by=dead)
    assert (refused.leased, refused.refused) == ([], True)

    database.rows("UPDATE busload.outbox SET crashes = 1 WHERE hi >> 10 = %s", second)
    assert delivered(given, {second: 10}).leased == []


async def test_a_canceled_batch_leaves_the_outbox(writer: SyncCommandBus, given: Given, database: Database) -> None:
    """Also while a relay publishes it: its mark then finds nothing, and a ring neither."""
    batch_id = written(writer, 10)
    [load] = taken(database)
    assert writer.cancel_batch(DOMAIN, batch_id, reason="not wanted") == 10
    assert database.perform(outbox.mark(ONE, whole([load]))) == (0, 0)
    assert delivered(given, {load.load.number: 10}).leased == []
    assert counts(await given.batch_now(batch_id)) == (10, 0, 0, 10, 0)
    database.check_invariants()
    assert database.is_at_rest()


async def test_a_cancel_locks_loads_in_the_order_of_a_mark(
    writer: SyncCommandBus, database: Database, dsn: str
) -> None:
    """Otherwise the two would wait for each other: also if the loads lie in the table in another order"""
    batch_id = writer.create_batch(DOMAIN, [BatchCommand("Debit", priority=priority) for priority in (1, 2)])
    waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    for table in ("outbox", "queue"):
        if table == "queue":
            database.perform(outbox.reroute(domain=None, batch_id=None, failed=False, operator=None))
        [(first,), (second,)] = database.rows(f"SELECT hi FROM busload.{table} ORDER BY hi")
        moved = f"WITH gone AS (DELETE FROM busload.{table} WHERE hi = %s RETURNING *)"
        database.rows(f"{moved} INSERT INTO busload.{table} SELECT * FROM gone", first)
        with psycopg.connect(dsn) as marking, psycopg.connect(dsn) as canceling:
            marking.execute(f"SELECT FROM busload.{table} WHERE hi = %s FOR UPDATE", [first])
            plan = cancel.cancel_batch(DOMAIN, batch_id, reason="no", operator=None)
            canceled = asyncio.create_task(asyncio.to_thread(perform, canceling, plan))
            await eventually(lambda: database.value(waits))
            marking.execute(f"SELECT FROM busload.{table} WHERE hi = %s FOR UPDATE NOWAIT", [second])
            marking.rollback()
            assert await canceled == 2
            canceling.rollback()


def test_only_batches_of_which_something_failed_count_a_round(writer: SyncCommandBus, database: Database) -> None:
    """A page has loads of many: for the others it went well"""
    fine, refused = written(writer), written(writer)
    pieces = [
        Piece(load.load, *(("REFUSED", "said so") if load.batch_id == refused else ())) for load in taken(database)
    ]
    assert database.perform(outbox.mark(ONE, pieces)) == (10, 10)
    rounds = dict(database.rows("SELECT batch_id, rounds FROM busload.dispatch"))
    assert rounds == {fine: 0, refused: 1}


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_who_reroutes_beside_a_mark_closes_the_report(
    writer: SyncCommandBus, bus: CommandBus, database: Database, dsn: str, face: str
) -> None:
    """Neither sees the other's load leave before both are committed"""
    batch_id = writer.create_batch(DOMAIN, [BatchCommand("Debit", priority=priority) for priority in (1, 2)])
    one, other = taken(database)
    database.perform(outbox.mark(ONE, whole([one], "REFUSED", 60.0)))
    pause = "BEGIN PERFORM pg_advisory_xact_lock_shared(79); RETURN NULL; END"
    database.rows(f"CREATE FUNCTION busload.pause() RETURNS trigger LANGUAGE plpgsql AS '{pause}'")
    database.rows(
        "CREATE CONSTRAINT TRIGGER pause AFTER INSERT ON busload.queue DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW WHEN (NEW.transport IS NULL) EXECUTE FUNCTION busload.pause()"
    )
    with psycopg.connect(dsn) as brake:
        brake.execute("SELECT pg_advisory_xact_lock(79)")
        rerouting = bus.outbox.reroute() if face == "async" else asyncio.to_thread(writer.outbox.reroute)
        rerouted = asyncio.ensure_future(rerouting)
        await eventually(lambda: database.rows(LOCKED_OUT))
        assert database.perform(outbox.mark(ONE, whole([other]))) == (1, 0)
        assert database.perform(creation_state.close([batch_id])) == 0
    assert await rerouted == 1
    assert database.value("SELECT published_at IS NOT NULL FROM busload.dispatch")


def test_a_mark_compares_a_piece_with_its_own_load_only(writer: SyncCommandBus, database: Database, dsn: str) -> None:
    """Otherwise its cost would rise with the square of the page"""
    for _ in range(2):
        writer.create_batch(DOMAIN, [BatchCommand("Debit", priority=priority) for priority in range(50)])
    pieces = whole(taken(database))
    assert len(pieces) == 100
    step = next(outbox.mark(ONE, pieces))
    assert isinstance(step, Statement)
    with psycopg.connect(dsn, options="-c plan_cache_mode=force_generic_plan -c enable_seqscan=off") as conn:
        told = conn.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + step.sql, step.params, prepare=True).fetchall()
    compared = re.findall(r"'Rows Removed by Join Filter': (\d+)", str(told))
    assert sum(map(int, compared)) == 0


def test_a_relay_takes_a_page_at_a_time(writer: SyncCommandBus, database: Database) -> None:
    for _ in range(3):
        written(writer, 1)
    relay = uuid4()
    assert len(database.perform(outbox.take(VIA, relay, 2))) == 2
    assert len(database.perform(outbox.take(VIA, relay, 2))) == 1
    assert database.perform(outbox.take("another", relay)) == []
    assert database.perform(outbox.next_due("another")) is None

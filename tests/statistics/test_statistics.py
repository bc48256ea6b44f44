"""`bus.statistics`: what workers count agrees with the facts, and stays when rows are put together."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from busload import (
    BatchCommand,
    BusinessRuleError,
    Chunk,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    RetryPolicy,
    SyncCommandBus,
    TaskTracker,
    TransientCommandError,
)
from busload.commands import settle
from busload.commands.execution import COMPLETED, FAILED_ATTEMPT, Transition
from busload.postgres.plan import Plan
from busload.statistics import Point, statistics
from busload.statistics.attempts import Attempts
from busload.statistics.recorder import Recorder
from busload.statistics.statistics import HOUR, MINUTE, Counts, Minute, Places
from tests.given import DOMAIN, Database, Given

pytestmark = pytest.mark.usefixtures("invariants")

NOWHERE = Places(0, 0, 0, 0, 0, None)

FACTS = """
SELECT (SELECT count(*) FROM busload.command WHERE domain = %(domain)s),
       (SELECT count(*) FROM busload.command_status WHERE domain = %(domain)s AND status = 'COMPLETED'),
       (SELECT count(*) FROM busload.command_status WHERE domain = %(domain)s AND status = 'FAILED'),
       (SELECT count(*) FROM busload.command_status WHERE domain = %(domain)s AND status = 'CANCELED'),
       (SELECT count(*) FROM busload.execution AS e JOIN busload.command AS c ON c.id = e.command
         WHERE c.domain = %(domain)s AND e.outcome = 'FAILED_ATTEMPT'),
       (SELECT count(*) FROM busload.audit WHERE domain = %(domain)s AND type = 'MOVED_TO_TROUBLESHOOTING')
"""
COUNTED = ("sent", "completed", "failed", "canceled", "retried", "troubled")


def facts(database: Database, domain: str = DOMAIN) -> tuple[int, ...]:
    """What happened according to commands, executions and events."""
    [row] = database.rows(FACTS.replace("%(domain)s", f"'{domain}'"))
    return tuple(row)


async def told(bus: CommandBus, domain: str | None = DOMAIN, **options: Any) -> tuple[int, ...]:
    """What happened according to the statistics."""
    points = await bus.statistics.series(domain, **options)
    return tuple(sum(getattr(point, name) for point in points) for name in COUNTED)


def look(database: Database) -> None:
    """The next minute has come: somebody looks at the places."""
    database.rows("UPDATE busload.turn SET taken_at = '-infinity' WHERE what = 'statistics'")
    database.perform(statistics.look(latest=60))


def pass_time(database: Database, by: timedelta) -> None:
    database.rows("UPDATE busload.statistics SET at = at - %s::interval", by)


async def test_attempts_of_every_outcome_agree_with_the_facts(
    bus: CommandBus, given: Given, database: Database
) -> None:
    async def handle(command: Command, ctx: HandlerContext) -> None:
        match command.data["n"]:
            case 1:
                raise BusinessRuleError("no")
            case 2:
                raise PermanentCommandError("broken")
            case 3 if ctx.attempt == 1:
                raise TransientCommandError("not now")
            case 4:
                async with ctx.transaction():
                    pass

    given.handler(function=handle, retry=RetryPolicy(backoff=(0,)))
    given.handler("Done")
    await given.batch(10, on_complete=BatchCommand("Done"))
    await bus.send("elsewhere", "Push")
    await given.drained()

    assert facts(database) == (10, 8, 1, 0, 1, 1)
    assert await told(bus) == facts(database)
    assert await told(bus, "elsewhere") == facts(database, "elsewhere") == (1, 0, 0, 0, 0, 0)
    assert await told(bus, None) == (11, 8, 1, 0, 1, 1)
    look(database)
    assert await told(bus) == facts(database)


async def test_the_seconds_are_those_of_the_executions(bus: CommandBus, given: Given, database: Database) -> None:
    async def bulk(chunk: Chunk, ctx: Any) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("SELECT pg_sleep(0.02)")

    async def single(command: Command, ctx: HandlerContext) -> None:
        async with bus.pool.connection() as conn:
            await conn.execute("SELECT pg_sleep(0.02)")

    given.handler(function=single)
    bus.bulk_handler(DOMAIN, "Bulk")(bulk)
    await given.batch(3)
    await given.batch(3, "Bulk")
    await given.drained()

    took = database.value("SELECT sum(extract(epoch FROM finished_at - started_at))::float8 FROM busload.execution")
    assert took > 0.05
    points = await bus.statistics.series(DOMAIN)
    assert sum(point.seconds for point in points) == pytest.approx(took, rel=0.1)
    assert await told(bus) == facts(database) == (6, 6, 0, 0, 0, 0)


async def test_what_ends_without_an_attempt_agrees_with_the_facts(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """By operators and cancels, and by workers that die."""
    _, stuck = await given.in_troubleshooting(3)
    await bus.troubleshooting.complete(DOMAIN, stuck[0])
    await bus.troubleshooting.cancel(DOMAIN, stuck[1], reason="test")
    await bus.troubleshooting.retry(DOMAIN, stuck[2])
    await given.drained()
    batch_id = await given.batch(1500)
    await bus.cancel_batch(DOMAIN, batch_id, reason="test")
    await bus.cancel_command(DOMAIN, await given.sent(), reason="test")
    await given.sent()
    for _ in range(3):  # it kills every worker that runs it
        worker = given.registered_worker()
        given.claimed(by=worker)
        given.died(worker)
        given.rescued()

    assert facts(database) == (1505, 1, 0, 1502, 0, 5)
    assert await told(bus) == facts(database)


async def test_a_retry_that_a_cancel_has_ended_counts_as_canceled(
    bus: CommandBus, given: Given, database: Database
) -> None:
    async def handle(command: Command, ctx: HandlerContext) -> None:
        assert ctx.batch_id is not None
        await bus.cancel_batch(DOMAIN, ctx.batch_id, reason="test")
        raise TransientCommandError("not now")

    given.handler(function=handle)
    await given.batch()
    await given.drained()
    assert facts(database) == (1, 0, 0, 1, 0, 0)
    assert await told(bus) == facts(database)


async def test_a_result_whose_answer_was_lost_is_told_as_it_was_recorded(given: Given, bus: CommandBus) -> None:
    batch_id = await given.batch(2)
    leased = given.claimed(2)
    await bus.cancel_batch(DOMAIN, batch_id, reason="test")
    transitions = [Transition(one, FAILED_ATTEMPT, delay=1.0) for one in leased]
    for _ in range(2):
        assert given.database.perform(settle.settle(transitions, now=0.0)) == {one.id for one in leased}
        assert [each.outcome for each in transitions] == ["CANCELED"] * 2
        for each in transitions:
            each.outcome = FAILED_ATTEMPT


async def test_executions_of_a_tracker_agree_with_the_facts(bus: CommandBus, database: Database) -> None:
    async with TaskTracker(bus) as tracker:
        for task_id, works in (("tasks:1", True), ("tasks:2", False)):
            enqueued = await tracker.enqueue(task_id, queue="tasks", max_attempts=2)
            assert enqueued is not None
            claimed = await tracker.claim(task_id, str(enqueued.execution_id))
            assert claimed is not None
            await (tracker.complete(claimed) if works else tracker.fail(claimed, "no"))
    assert facts(database, "tasks") == (2, 1, 0, 0, 1, 0)
    assert await told(bus, "tasks") == facts(database, "tasks")


async def test_the_places_of_a_minute_are_those_at_its_end(
    bus: CommandBus, sync_bus: SyncCommandBus, given: Given, database: Database
) -> None:
    given.handler()
    await given.batch(5)
    await bus.send(DOMAIN, "Debit", run_at=datetime.now(UTC) + timedelta(days=1))
    database.rows("UPDATE busload.command SET created_at = now() - interval '100 s'")
    look(database)
    pass_time(database, MINUTE)
    await given.drained()
    await given.batch(2)
    given.claimed()

    points = await bus.statistics.series()
    [index] = [n for n, point in enumerate(points[:-1]) if point.ready is not None]
    before, older, since, now = points[:index], points[index], points[index + 1 :], points[-1]
    assert sum(point.sent + point.completed for point in before) == 0
    assert (older.sent, older.completed, older.ready, older.scheduled, older.running) == (6, 0, 5, 1, 0)
    assert older.oldest_ready == pytest.approx(100, abs=50)
    assert (sum(point.sent for point in since), sum(point.completed for point in since)) == (2, 5)
    assert (now.ready, now.scheduled, now.running) == (1, 1, 1)
    assert older.at <= now.at - 2 * MINUTE
    assert now.at.tzinfo is UTC
    assert len(sync_bus.statistics.series("payments")) == 60


async def test_one_worker_looks_for_all_and_not_too_late(bus: CommandBus, given: Given, database: Database) -> None:
    await given.batch(2)
    database.rows("UPDATE busload.turn SET taken_at = '-infinity' WHERE what = 'statistics'")
    database.perform(statistics.look(latest=-1))
    assert database.count("statistics") == 0
    look(database)
    assert database.count("statistics") == 2
    for _ in range(3):
        database.rows(  # also if a minute ends meanwhile
            "UPDATE busload.turn SET taken_at = date_trunc('minute', clock_timestamp()) + interval '1 minute'"
            " WHERE what = 'statistics'"
        )
        database.perform(statistics.look(latest=60))
    assert database.count("statistics") == 2


async def test_a_series_without_statistics_has_no_gaps(bus: CommandBus) -> None:
    points = await bus.statistics.series("nowhere", last=timedelta(hours=2), step=timedelta(minutes=5))
    assert len(points) == 24
    assert {later.at - earlier.at for earlier, later in pairwise(points)} == {5 * MINUTE}
    assert {(point.sent, point.completed, point.seconds, point.ready) for point in points[:-1]} == {(0, 0, 0.0, None)}
    assert points[-1].ready == 0
    assert points[-1].at.minute % 5 == 0


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"step": timedelta(seconds=30)}, "whole minutes"),
        ({"step": timedelta(seconds=90)}, "whole minutes"),
        ({"step": 60}, "a timedelta of whole minutes"),
        ({"last": timedelta(seconds=1)}, "from one step"),
        ({"last": timedelta(days=91), "step": HOUR}, "90 days"),
        ({"last": timedelta(days=3)}, "whole hours"),
        ({"domain": "not a name"}, "wanted a letter"),
    ],
)
async def test_a_series_that_cannot_be_told_is_refused(bus: CommandBus, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InvalidCommandError, match=wanted):
        await bus.statistics.series(**options)


# -- putting rows together


def add(database: Database, at: datetime, domain: str, counts: Counts, places: Places | None = None) -> None:
    names = [each.name for each in fields(Counts)] + list(Places._fields if places else ())
    values = [*(getattr(counts, each.name) for each in fields(Counts)), *(places or ())]
    database.rows(
        f"INSERT INTO busload.statistics (at, domain, {', '.join(names)}) VALUES (%s, %s{', %s' * len(values)})",
        *(at, domain, *values),
    )


async def test_old_rows_are_put_together_and_nothing_is_lost(bus: CommandBus, database: Database) -> None:
    """Several rows of a minute become one, minutes become hours after two days, and hours go after 90 days."""
    now: datetime = database.value("SELECT date_trunc('minute', now())")
    hour = now.replace(minute=0)
    for at, minutes in ((now - 10 * MINUTE, 2), (hour - timedelta(days=2, hours=3), 4), (hour - timedelta(days=91), 1)):
        for n in range(minutes):
            for _ in range(3):
                add(database, at + n * MINUTE, DOMAIN, Counts(1, 2, 3, 4, 5, 0.5))
            add(database, at + n * MINUTE, "", Counts(), NOWHERE)
            add(database, at + n * MINUTE, DOMAIN, Counts(), Places(n, 1, 2, 3, 4, 0.5 * n))
    long = timedelta(days=60)
    by_minute, by_hour = await bus.statistics.series(), await bus.statistics.series(last=long, step=HOUR)
    assert database.perform(statistics.totals()) == {DOMAIN: Counts(21, 42, 63, 84, 105, 10.5)}

    for _ in range(3):
        database.perform(statistics.tidy())

    assert same(await bus.statistics.series(), by_minute)
    assert same(await bus.statistics.series(last=long, step=HOUR), by_hour)
    assert database.perform(statistics.totals()) == {DOMAIN: Counts(21, 42, 63, 84, 105, 10.5)}
    assert database.rows(
        "SELECT CASE WHEN at > 'epoch' THEN extract(epoch FROM now() - at)::bigint / 86400 END, domain, count(*)"
        "  FROM busload.statistics GROUP BY 1, 2 ORDER BY 1, 2"
    ) == [(0, "", 2), (0, DOMAIN, 2), (2, "", 1), (2, DOMAIN, 1), (None, "", 1), (None, DOMAIN, 1)]
    [old] = [point for point in by_hour if point.ready == 3]
    assert (old.completed, old.oldest_ready, old.unpublished) == (12, 1.5, 4)


def same(these: list[Point], those: list[Point]) -> bool:
    """Whether two series agree, apart from steps that only one of them has reached."""
    known = {point.at: point for point in those[:-1]}
    return all(point == known[point.at] for point in these if point.at in known)


# -- what came in


@hypothesis_given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 5),
    st.integers(1, 4),
)
def test_what_came_in_is_what_ended_and_what_is_there(
    happened: list[tuple[int, int, bool]], at_first: int, minutes_per_step: int
) -> None:
    """Wherever somebody looked at the end of two steps, the number between them is exact; it never falls."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    there, minutes, looks = at_first, [Minute(start - MINUTE, Counts(9), NOWHERE._replace(ready=at_first))], [(0, 0)]
    came_in: list[int] = []
    for n, (sent, ended, looked) in enumerate(happened):
        ended = min(ended, there + sent)
        there += sent - ended
        came_in.append(sent)
        minutes.append(Minute(start + n * MINUTE, Counts(ended), NOWHERE._replace(ready=there) if looked else None))
        if looked and (n + 1) % minutes_per_step == 0:
            looks.append(((n + 1) // minutes_per_step, sum(came_in)))
    step = minutes_per_step * MINUTE
    starts = [start + n * step for n in range(-(-len(happened) // minutes_per_step))]
    found = statistics.points(minutes, NOWHERE._replace(ready=there), starts, step)
    assert [point.at for point in found] == starts
    assert all(point.sent >= 0 for point in found)
    assert sum(point.sent for point in found) == sum(came_in)
    for steps, total in looks:
        assert sum(point.sent for point in found[:steps]) == total


# -- the station of a worker


async def test_what_a_worker_could_not_write_is_in_its_next_write(
    bus: CommandBus, given: Given, database: Database
) -> None:
    attempts = Attempts()
    recorder = Recorder(bus.database.in_transaction, attempts)
    await given.batch(2)
    for leased in given.claimed(2):
        given.settled([leased])
        attempts.add([Transition(leased, COMPLETED, finished=leased.started + 2)], [COMPLETED])
        database.rows("ALTER TABLE busload.statistics RENAME TO away")
        with pytest.raises(psycopg.errors.UndefinedTable):
            await recorder.record()
        await recorder.close(within=60)  # says so in the log
        database.rows("ALTER TABLE busload.away RENAME TO statistics")
    await recorder.close(within=60)
    await recorder.close(within=60)
    assert await told(bus) == facts(database) == (2, 2, 0, 0, 0, 0)


async def test_a_worker_that_settles_nothing_writes_nothing(bus: CommandBus, given: Given) -> None:
    performed: Counter[str] = Counter()

    async def perform(plan: Plan[Any]) -> Any:
        performed[getattr(plan, "__name__", "")] += 1
        return await bus.database.in_transaction(plan)

    attempts = Attempts()
    recorder = Recorder(perform, attempts)
    pauses = [await recorder.once() for _ in range(5)]
    assert set(performed) == {"look"}
    assert performed["look"] <= 2  # a minute may have ended
    assert all(0 < pause <= 5 for pause in pauses)
    [leased] = (await given.sent(), given.claimed())[1]
    attempts.add([Transition(leased, COMPLETED, finished=leased.started + 2)], [COMPLETED])
    await recorder.once()
    await recorder.once()
    assert performed["record"] == 1
    assert sum(point.seconds for point in await bus.statistics.series()) == 2

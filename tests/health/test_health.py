"""Whether all is well, as the database and the workers tell it: every reason, on both faces."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    RetryPolicy,
    Settings,
    SyncCommandBus,
    WorkerSettings,
)
from busload.health import Health, HealthCode, HealthReason, HealthSettings, HealthState, facts
from busload.health.health import Condition, Facts, LateSchedules, ReadyDomain, SeenWorker, Unpublished, judge
from busload.limits import pause
from busload.sync.plan import perform
from busload.testing import TestServer
from tests.brokers.faulty import AWAY, FaultyTransport
from tests.faces import FACES, bus_of
from tests.given import DOMAIN, WITHIN, Database, Given, eventually, raising

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)
HEALTHY, DEGRADED, CRITICAL = HealthState


@pytest.fixture(params=FACES)
async def face(request: pytest.FixtureRequest, dsn: str, settings: Settings) -> AsyncIterator[CommandBus]:
    async with bus_of(request.param, dsn, settings=settings) as bus:
        yield bus


@pytest.fixture
def hasty(given: Given, worker_settings: WorkerSettings) -> Given:
    """Workers whose heartbeats come several times a second."""
    short = replace(worker_settings, lease_for=timedelta(seconds=1), flush_deadline=timedelta(milliseconds=200))
    return Given(given.bus, given.database, short)


def codes(health: Health) -> list[tuple[str, str]]:
    return [(reason.code.value, reason.state.value) for reason in health.reasons]


async def sees(bus: CommandBus, *expected: tuple[str, str]) -> Health:
    """Wait until the health has exactly these reasons: workers tell theirs with a heartbeat."""
    while codes(health := await bus.health()) != list(expected):
        await asyncio.sleep(0.05)
    return health


async def test_a_bus_where_nothing_waits_is_healthy(face: CommandBus) -> None:
    assert await face.health() == Health(HealthState.HEALTHY, ())


async def test_ready_commands_that_nobody_serves_are_degraded_and_after_a_while_critical(
    face: CommandBus, given: Given, database: Database
) -> None:
    await face.send(DOMAIN, "Debit")
    health = await face.health()
    assert (health.state, codes(health)) == (DEGRADED, [("NO_WORKER", "DEGRADED")])
    assert health.reasons[0].domain == DOMAIN
    assert health.reasons[0].message == "1 command is ready in payments, and no worker serves it."
    database.rows("UPDATE busload.command SET created_at = now() - interval '6 minutes'")
    assert codes(await face.health()) == [("NO_WORKER", "CRITICAL")]
    worker = given.registered_worker()
    assert (await face.health()).state is HEALTHY
    given.died(worker)
    assert codes(await face.health()) == [("NO_WORKER", "CRITICAL")]


async def test_ready_commands_of_a_served_domain_are_late_after_an_hour(
    face: CommandBus, given: Given, database: Database
) -> None:
    await face.send(DOMAIN, "Debit")
    given.registered_worker()
    database.rows("UPDATE busload.command SET created_at = now() - interval '59 minutes'")
    assert (await face.health()).state is HEALTHY
    database.rows("UPDATE busload.command SET created_at = now() - interval '61 minutes'")
    assert codes(await face.health()) == [("COMMANDS_LATE", "DEGRADED")]
    database.perform(pause.pause(DOMAIN, reason=None, operator=None))
    assert (await face.health()).state is HEALTHY, "a paused domain waits on purpose"


async def test_a_command_is_late_by_its_run_at_and_not_after_a_retry(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Nor while it is scheduled"""
    given.registered_worker()
    soon = datetime.now(UTC) + timedelta(hours=1)
    await bus.send(DOMAIN, "Debit", run_at=soon)
    database.rows("UPDATE busload.command SET created_at = now() - interval '9 hours'")
    assert (await bus.health()).state is HEALTHY
    database.rows("UPDATE busload.scheduled SET run_at = now() - interval '2 hours'")
    assert codes(await bus.health()) == [("COMMANDS_LATE", "DEGRADED")], "due, though nobody has promoted it"
    database.rows("DELETE FROM busload.scheduled")
    await bus.send(DOMAIN, "Debit")
    database.rows("UPDATE busload.command SET created_at = now() - interval '9 hours'")
    database.rows("UPDATE busload.queue SET attempt = 2")
    assert (await bus.health()).state is HEALTHY


async def test_a_silent_worker_that_holds_commands_is_told(bus: CommandBus, given: Given) -> None:
    await given.batch(3)
    worker = given.registered_worker()
    given.claimed(3, by=worker)
    assert (await bus.health()).state is HEALTHY
    given.died(worker)
    health = await bus.health()
    assert codes(health) == [("WORKER_LOST", "DEGRADED")]
    assert "holds 3 commands" in health.reasons[0].message
    given.rescued()
    assert codes(await bus.health()) == [("NO_WORKER", "DEGRADED")]


@pytest.mark.parametrize("name", FACES)
async def test_a_database_that_is_away_is_critical_and_nothing_is_raised(name: str) -> None:
    bus = bus_of(name, "postgresql://nobody@127.0.0.1:1/nowhere")
    await bus.open(wait=None)
    try:
        health = await bus.health(timeout=0.5)
    finally:
        await bus.close()
    assert codes(health) == [("DATABASE_UNREACHABLE", "CRITICAL")]
    assert not health.restart_helps


async def test_a_database_without_our_schema_is_critical_also_if_it_had_it_before(
    face: CommandBus, database: Database
) -> None:
    assert (await face.health()).state is HEALTHY
    database.rows("DELETE FROM busload.migration WHERE version = (SELECT max(version) FROM busload.migration)")
    assert codes(await face.health()) == [("SCHEMA_OUTDATED", "CRITICAL")]
    database.rows("DROP SCHEMA busload CASCADE")
    health = await face.health()
    assert codes(health) == [("SCHEMA_OUTDATED", "CRITICAL")]
    assert "busload schema migrate" in health.reasons[0].message


@pytest.mark.parametrize("name", FACES)
async def test_five_vain_waits_for_a_connection_are_critical(name: str, dsn: str, settings: Settings) -> None:
    small = replace(settings, pool_size=1, pool_timeout=timedelta(milliseconds=20))
    async with bus_of(name, dsn, settings=small) as bus:
        taken: Any = bus.pool.getconn(WITHIN)
        taken = await taken if name == "async" else taken
        for times in range(1, 6):
            health = await bus.health()
            assert codes(health) == [("POOL_EXHAUSTED", "CRITICAL" if times == 5 else "DEGRADED")]
        assert health.restart_helps
        given_back: Any = bus.pool.putconn(taken)
        if name == "async":
            await given_back
        assert codes(await bus.health()) == [("POOL_EXHAUSTED", "CRITICAL")], "it is remembered for a while"


async def test_ten_failures_in_a_row_degrade_a_worker_until_an_attempt_succeeds(hasty: Given, bus: CommandBus) -> None:
    hasty.handler("Fail", raising(RuntimeError("no")), retry=RetryPolicy(max_attempts=1))
    hasty.handler("Debit")
    async with hasty.running() as worker:
        await hasty.batch(9, "Fail")
        await eventually(lambda: worker.stats.settled == 9)
        assert worker.health().state is HEALTHY
        await hasty.batch(1, "Fail")
        await eventually(lambda: worker.stats.settled == 10)
        assert codes(worker.health()) == [("FAILURES_IN_A_ROW", "DEGRADED")]
        health = await sees(bus, ("FAILURES_IN_A_ROW", "DEGRADED"))
        assert health.reasons[0].worker == worker.name
        await hasty.batch(1)
        await eventually(lambda: worker.stats.settled == 11)
        assert worker.health().state is HEALTHY
        await sees(bus)


async def test_a_no_on_purpose_is_no_failure(hasty: Given) -> None:
    hasty.handler("Refuse", raising(BusinessRuleError("not owed")))
    async with hasty.running() as worker:
        await hasty.batch(20, "Refuse")
        await eventually(lambda: worker.stats.failed == 20)
        assert worker.health().state is HEALTHY


async def test_three_threads_that_do_not_end_are_critical(dsn: str, settings: Settings, hasty: Given) -> None:
    go, alert = threading.Event(), HealthSettings(stuck_after=timedelta(milliseconds=1))
    async with CommandBus(dsn, settings=replace(settings, health=alert)) as bus:
        given = Given(bus, hasty.database, hasty.settings)

        @bus.handler(DOMAIN, "Hang", timeout=0.01, retry=RetryPolicy(max_attempts=1))
        def hang(command: Any, ctx: Any) -> None:
            go.wait()

        async with given.running(threads=4) as worker:
            await given.batch(2, "Hang")
            await eventually(lambda: codes(worker.health()) == [("STUCK_THREADS", "DEGRADED")])
            assert not worker.health().restart_helps
            await given.batch(1, "Hang")
            await eventually(lambda: codes(worker.health()) == [("STUCK_THREADS", "CRITICAL")])
            assert worker.health().restart_helps
            await sees(bus, ("STUCK_THREADS", "CRITICAL"))
            go.set()
            await eventually(lambda: worker.health().state is HEALTHY)


async def test_a_blocked_event_loop_is_told_by_the_heartbeat(hasty: Given, sync_bus: SyncCommandBus) -> None:
    told = threading.Event()

    async def block(command: Command, ctx: HandlerContext) -> None:
        while not told.is_set():
            time.sleep(0.01)

    def watch() -> None:
        while ("LOOP_BLOCKED", "DEGRADED") not in codes(sync_bus.health()):
            time.sleep(0.05)
        told.set()

    hasty.handler("Block", block)
    await hasty.sent("Block")
    watching = asyncio.create_task(asyncio.to_thread(watch))
    async with hasty.running() as worker:
        await watching
        await eventually(lambda: worker.stats.completed == 1)


async def test_a_part_of_a_worker_that_has_ended_is_critical(hasty: Given) -> None:
    hasty.handler()
    async with hasty.running() as worker:
        await eventually(lambda: worker._run is not None and worker._run._rounds)
        assert worker._run is not None
        worker._run._rounds[1].cancel()
        await eventually(lambda: codes(worker.health()) == [("STATION_ENDED", "CRITICAL")])
        assert worker.health().restart_helps


async def test_a_worker_that_does_not_run_takes_no_commands(given: Given) -> None:
    given.handler()
    worker = given.worker()
    assert codes(worker.health()) == [("NOT_RUNNING", "CRITICAL")]
    async with worker:
        assert worker.health().state is HEALTHY
        worker.stop()
        await eventually(lambda: ("NOT_RUNNING", "CRITICAL") in codes(worker.health()))
    assert not worker.health().restart_helps


async def test_publishing_that_fails_and_a_broker_that_is_away_are_told(
    dsn: str, settings: Settings, worker_settings: WorkerSettings, database: Database, conn: psycopg.AsyncConnection
) -> None:
    transport = FaultyTransport(dsn)
    transport.refuses = lambda index, message: AWAY
    async with CommandBus(dsn, transport=transport, settings=settings) as bus:
        async with conn.transaction():
            await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3, conn=conn)
        await bus.recover()
        health = await bus.health()
        assert codes(health) == [("PUBLISHING_FAILS", "DEGRADED")]
        assert health.reasons[0].message.startswith("3 commands cannot be published to ")
        database.rows("UPDATE busload.outbox SET since = now() - interval '6 minutes'")
        assert codes(await bus.health()) == [("PUBLISHING_FAILS", "CRITICAL")]
        transport.pull()
        given = Given(bus, database, replace(worker_settings, lease_for=timedelta(seconds=1)))
        given.handler()
        async with given.running() as worker:
            await eventually(lambda: codes(worker.health()) == [("BROKER_UNREACHABLE", "DEGRADED")])
            await sees(bus, ("PUBLISHING_FAILS", "CRITICAL"), ("BROKER_UNREACHABLE", "DEGRADED"))


def test_thresholds_are_settings() -> None:
    condition = Condition(failures_in_row=10, stuck_threads=3, exhaustions=5, broker_away="nats")
    found_facts = Facts(
        NOW,
        (
            ReadyDomain("late", 2, False, NOW - timedelta(hours=1), 1),
            ReadyDomain("alone", 2, True, NOW - timedelta(minutes=5), 0),
            ReadyDomain("again", 2, False, None, 0),
        ),
        (SeenWorker("w", True, NOW, 0, condition),),
        (Unpublished("nats", 1, NOW - timedelta(minutes=5), "no route"),),
        LateSchedules(2, "nightly", NOW - timedelta(minutes=5)),
    )
    found = {(reason.code.value, reason.domain): reason.state for reason in judge(found_facts, HealthSettings())}
    assert found == {
        ("COMMANDS_LATE", "late"): DEGRADED,
        ("NO_WORKER", "alone"): CRITICAL,
        ("NO_WORKER", "again"): DEGRADED,
        ("FAILURES_IN_A_ROW", None): DEGRADED,
        ("STUCK_THREADS", None): CRITICAL,
        ("POOL_EXHAUSTED", None): CRITICAL,
        ("BROKER_UNREACHABLE", None): DEGRADED,
        ("PUBLISHING_FAILS", None): CRITICAL,
        ("SCHEDULES_LATE", None): CRITICAL,
    }
    longer = timedelta(hours=2)
    patient = HealthSettings(longer, longer, failures_in_row=11, stuck_threads=4, pool_exhaustions=6)
    found = {(reason.code.value, reason.domain): reason.state for reason in judge(found_facts, patient)}
    assert set(found.values()) == {DEGRADED}
    assert not {"COMMANDS_LATE", "FAILURES_IN_A_ROW"} & {code for code, _ in found}


async def test_a_schedule_that_nobody_fires_is_named(bus: CommandBus, database: Database, given: Given) -> None:
    """The one that waits longest comes first, whatever its name; one that is paused waits on purpose"""
    for name in ("b-first", "a-second", "paused"):
        bus.schedule(name, every=timedelta(hours=1), domain="payments", command=BatchCommand("Debit"))
    await bus.schedules.sync()
    await bus.schedules.pause("paused")
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '2 minutes'")
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '3 minutes' WHERE name = 'b-first'")
    [reason] = (await bus.health()).reasons
    assert (reason.code, reason.state) == ("SCHEDULES_LATE", "DEGRADED")
    assert reason.message == (
        "2 schedules are due and not fired, the first one b-first: no worker runs that could fire."
    )
    given.registered_worker()
    [reason] = (await bus.health()).reasons
    assert reason.message.endswith(": workers run, and their log says why they do not fire.")
    database.rows("UPDATE busload.schedule SET next_due_at = now() - interval '50 s'")
    assert not (await bus.health()).reasons


def test_the_health_looks_at_some_loads_of_each_domain_however_many_are_ready(
    either_server: TestServer,
) -> None:
    with either_server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(MANY_LOADS)
        with conn.transaction():
            found = perform(conn, facts.read())
            [[scans, rows]] = conn.execute(QUEUE_READ).fetchall()
    assert [(one.domain, one.commands, one.more) for one in found.ready] == [
        ("few", 3, False),
        ("many", 1000, True),
        ("other", 1000, True),
    ]
    assert (scans, rows < 5000) == (0, True), f"{scans} scans from end to end, {rows} rows"
    late = {reason.domain: reason.message for reason in judge(found, HealthSettings())}
    assert late["few"].startswith("3 commands are ready") and late["many"].startswith("At least 1,000 commands")


MANY_LOADS = """
    INSERT INTO busload.queue (lo, hi, domain, fair)
    SELECT n * 1024, n * 1024,
           CASE WHEN n > 29997 THEN 'few' WHEN n % 2 = 0 THEN 'many' ELSE 'other' END, n % 7
      FROM generate_series(1, 30000) AS n;
    ANALYZE busload.queue;
"""
QUEUE_READ = "SELECT seq_scan, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'queue'"


def test_many_loads_of_a_paused_domain_do_not_hide_an_old_command_elsewhere(dsn: str, database: Database) -> None:
    """Nor do thousands of younger commands of its own domain, which are before it in the order of claims."""
    database.rows(
        "WITH given AS (SELECT n * 1024 AS id, CASE WHEN n <= 1500 THEN 'closed' ELSE 'open' END AS domain, n FROM"
        " generate_series(1, 4000) AS n), sent AS (INSERT INTO busload.command (id, domain, command_id, command_type,"
        " data, created_at) SELECT id, domain, gen_random_uuid(), 'Debit', '1', now() - CASE n WHEN 1501 THEN interval"
        " '2 h' WHEN 1502 THEN interval '90 min' ELSE interval '0' END FROM given)"
        " INSERT INTO busload.queue (lo, hi, domain, priority, fair)"
        " SELECT id, id, domain, CASE n WHEN 1501 THEN -5 ELSE 0 END, CASE n WHEN 1502 THEN 3 ELSE n % 2 END"
        " FROM given"
    )
    paused = pause.pause("closed", reason="closed", operator=None)
    queue = "SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_xact_user_tables WHERE relname = 'queue'"

    def ages() -> list[tuple[str, int]]:
        with psycopg.connect(dsn) as conn:
            found = perform(conn, facts.read())
            [(read,)] = conn.execute(queue).fetchall()
        assert read <= 4 * facts.MOST + 20, "it looks at a thousand loads, and leaps from owner to owner"
        return [(one.domain, round((found.now - one.since).total_seconds() / 60)) for one in found.ready if one.since]

    database.perform(paused)
    database.rows("ANALYZE busload.queue")
    assert ages() == [("open", 120)]
    database.rows("DELETE FROM busload.queue WHERE priority = -5")
    assert ages() == [("open", 90)]


def test_failures_of_long_ago_do_not_count() -> None:
    old = SeenWorker("w", True, NOW, 0, Condition(failures_in_row=99, failed_ago=601.0))
    assert not list(judge(Facts(NOW, workers=(old,)), HealthSettings()))


def test_the_worst_reason_decides_and_comes_first() -> None:
    bad = HealthReason(HealthCode.NO_WORKER, DEGRADED, "a")
    worse = HealthReason(HealthCode.SCHEMA_OUTDATED, CRITICAL, "b")
    assert Health.of([bad, worse]) == Health(CRITICAL, (worse, bad))
    assert Health.of([bad]).state is DEGRADED
    assert Health.of([]).state is HEALTHY


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"failures_in_row": 0}, "failures_in_row must be a whole number from 1 on, found 0"),
        ({"stuck_threads": True}, "stuck_threads must be a whole number from 1 on, found True"),
        ({"late_after": 5}, "late_after must be a timedelta, found 5"),
        ({"look_back": timedelta(0)}, "look_back must be more than zero"),
    ],
)
def test_thresholds_that_cannot_work_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HealthSettings(**wrong)


async def test_a_worker_of_another_release_may_tell_what_we_do_not_know(bus: CommandBus, database: Database) -> None:
    database.rows(
        "INSERT INTO busload.worker (name, domains, concurrency, lease_for, condition)"
        """ VALUES ('a', '{}', 1, '1 min', '{"new": 1}'), ('b', '{}', 1, '1 min', '{"stuck_threads": "x"}')"""
    )
    assert (await bus.health()).state is HEALTHY

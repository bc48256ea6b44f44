"""The database goes away, answers get lost, the worker is taken for dead: it goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from busload import BatchCommand, Command, CommandBus, HandlerContext, Worker
from busload.commands import rescue
from busload.errors import DatabaseUnavailableError, DatabaseUnusableError, InvalidOperationError
from busload.sync.plan import perform
from tests.chaos.harness import Server, folder
from tests.given import DOMAIN, LISTENING, LOCKED_OUT, Database, Given, eventually, until

SHORT = timedelta(milliseconds=900)
CONNECTIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'busload' AND datname = current_database()"


@pytest.fixture
def hasty(given: Given) -> Given:
    """Heartbeats three times a second."""
    given.settings = replace(given.settings, lease_for=SHORT)
    return given


RENEWED = """SELECT min(seen_at - 2 * lease_for) > (SELECT max(since) FROM busload.lease)
               FROM busload.worker WHERE stopped_at IS NULL"""
"""Whether leases have been kept alive for twice as long as they last."""


def block_for_two_leases(database: Database) -> None:
    """And then rescue what dead workers hold: nothing, as there are heartbeats all the while."""
    until(lambda: database.value(RENEWED))
    with database._conn.transaction():  # its clock stands still: however slow the machine is, this heartbeat is fresh
        until(lambda: database.value("SELECT min(seen_at) > now() FROM busload.worker WHERE stopped_at IS NULL"))
        assert perform(database._conn, rescue.rescue()).commands == 0


async def test_a_handler_that_blocks_the_loop_keeps_its_lease_and_is_reported(
    hasty: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def thoughtless(command: Command, ctx: HandlerContext) -> str:
        block_for_two_leases(database)
        return "done"

    hasty.handler("Debit", thoughtless)
    command_id = await hasty.sent()
    assert await hasty.drained() == 1
    found = await hasty.command_now(command_id)
    assert (found.status, found.attempts) == ("COMPLETED", 1)
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0
    assert "The event loop has been blocked" in caplog.text and "in thoughtless" in caplog.text


async def test_a_claim_whose_answer_waits_behind_a_blocked_loop_is_not_handed_back(
    hasty: Given, database: Database, dsn: str
) -> None:
    """The heartbeat sees the lease before the loop can: that does not make it a stranger."""
    slow = "BEGIN PERFORM pg_advisory_xact_lock_shared(78); RETURN NULL; END"
    database.rows(f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS '{slow}'")
    database.rows("CREATE TRIGGER slow AFTER INSERT ON busload.lease FOR EACH ROW EXECUTE FUNCTION slow()")
    brake = psycopg.connect(dsn, autocommit=True)

    async def block(command: Command, ctx: HandlerContext) -> None:
        brake.execute("SELECT pg_advisory_lock(78)")
        await hasty.sent("Second")
        await eventually(lambda: database.rows(LOCKED_OUT))  # the claim is in the server
        brake.execute("SELECT pg_advisory_unlock(78)")
        until(lambda: database.value("SELECT count(*) FROM busload.lease") == 2)  # and done, but not heard of
        seen = "SELECT min(seen_at) > (SELECT max(since) FROM busload.lease) + interval '0.9 s' FROM busload.worker"
        until(lambda: database.value(seen))

    hasty.handler("Debit", block)
    seconds = hasty.handler("Second")
    await hasty.sent()
    with brake:
        async with hasty.running(concurrency=2):
            await eventually(lambda: database.value("SELECT count(*) FROM busload.execution") == 2)
    assert len(seconds) == 1
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'RELEASED'") == 0
    database.check_invariants()


async def test_a_worker_that_was_declared_dead_goes_on_under_a_new_number(
    hasty: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    gate, runs, told = asyncio.Event(), [], []

    async def wait(command: Command, ctx: HandlerContext) -> str:
        runs.append(ctx.execution_id)
        if len(runs) == 1:
            await eventually(lambda: ctx.cancelled)
            told.append(True)
            await gate.wait()
            return "old"
        return "new"

    hasty.handler("Debit", wait)
    command_id = await hasty.sent()
    async with hasty.running(concurrency=2):
        await eventually(lambda: runs)
        with database._conn.transaction():
            assert database.bury().commands == 1
            [taken] = hasty.claimed()  # by another one, before it can take it up again
        await eventually(lambda: told)
        assert database.count("worker") == 3
        database.perform(rescue.release([taken.lease.lease_id]))
        await eventually(lambda: database.count("execution") == 1)
        gate.set()
        await hasty.sent()
        await eventually(lambda: database.count("execution") == 2)
    found = await hasty.command_now(command_id)
    assert (found.status, found.result, found.execution_id) == ("COMPLETED", "new", runs[1])
    assert told == [True]
    assert (
        database.value("SELECT count(*) FROM busload.execution WHERE worker = (SELECT min(worker) FROM busload.worker)")
        == 0
    )
    assert "goes on under a new number" in caplog.text
    assert database.count("lease") == 0
    database.check_invariants()


async def test_results_of_a_worker_declared_dead_are_not_credited(
    hasty: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def bury_me(command: Command, ctx: HandlerContext) -> str:
        if not database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'"):
            assert database.take_over().commands == 3  # a heartbeat must not take the leases up again
            return "too late"
        return "in time"

    hasty.handler("Debit", bury_me)
    batch_id = await hasty.batch(commands=3)
    assert await hasty.drained(concurrency=3) == 3
    batch = await hasty.batch_now(batch_id)
    assert (batch.completed_count, batch.status) == (3, "COMPLETED")
    assert database.rows("SELECT DISTINCT details::text FROM busload.execution") == [('"in time"',)]
    assert "Did not count 3 results" in caplog.text
    database.check_invariants()


async def test_a_claim_whose_answer_was_lost_is_handed_back_and_run(hasty: Given, database: Database) -> None:
    seen = hasty.handler()
    async with hasty.running():
        number = await eventually(lambda: database.rows("SELECT worker FROM busload.worker"))
        lost_claim(database, worker=number[0][0])
        await eventually(lambda: len(seen) == 1)
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'RELEASED'") == 1
    assert database.rows("SELECT attempt, outcome FROM busload.execution") == [(1, "COMPLETED")]
    database.check_invariants()


def lost_claim(database: Database, worker: int) -> None:
    """A command that was claimed in the worker's name, but it will never hear of it."""
    database.rows(
        "INSERT INTO busload.command (id, domain, command_id, command_type)"
        " VALUES (9999 * 1024, 'payments', gen_random_uuid(), 'Debit')"
    )
    database.rows(
        "INSERT INTO busload.lease"
        " (lease_id, lo, hi, domain, priority, attempt, forgiven, crashes, replies, fair, worker, open) VALUES"
        " ('0198c5d2-0000-4000-8000-000000001000', 9999 * 1024, 9999 * 1024, 'payments', 0, 1, 0, 0, false, 0, %s, 1)",
        worker,
    )


async def test_a_lease_that_was_taken_away_is_noticed(hasty: Given, database: Database) -> None:
    """By other hands than a rescue: the handler is told, and its result does not count."""
    told: list[bool] = []
    started = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        if not started.is_set():
            started.set()
            await eventually(lambda: ctx.cancelled)
            told.append(True)

    hasty.handler("Debit", wait)
    await hasty.sent()
    async with hasty.running():
        await started.wait()
        [(lease_id,)] = database.rows("SELECT lease_id FROM busload.lease")
        database.perform(rescue.release([lease_id]))
        await eventually(lambda: told)
        await eventually(lambda: database.count("execution") == 1)
    assert database.value("SELECT lease_id FROM busload.execution") != lease_id
    database.check_invariants()


async def test_terminating_every_connection_again_and_again_loses_nothing(hasty: Given, database: Database) -> None:
    async def breathe(command: Command, ctx: HandlerContext) -> None:
        await asyncio.sleep(0.005)

    seen = hasty.handler("Debit", breathe)
    batch_id = await hasty.batch(commands=400)
    async with hasty.running(concurrency=10) as worker:
        for n in range(8):
            await eventually(lambda n=n: len(seen) > 20 * n)  # type: ignore[misc]
            database.rows(f"SELECT pg_terminate_backend(pid) FROM ({CONNECTIONS}) AS ours")
        await eventually(lambda: database.value("SELECT completed_at IS NOT NULL FROM busload.batch"), within=40)
        del worker
    batch = await hasty.batch_now(batch_id)
    assert (batch.completed_count, batch.status) == (400, "COMPLETED")
    assert database.count("lease") == 0
    assert database.value("SELECT max(attempt) FROM busload.execution") == 1
    database.check_invariants()


@pytest.fixture
async def own_server() -> AsyncIterator[Server]:
    with folder() as path, Server(path / "server") as server:
        yield server


async def test_a_worker_survives_restarts_of_the_database(own_server: Server, given: Given) -> None:
    async with CommandBus(own_server.dsn) as bus:
        ran = 0

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            nonlocal ran
            ran += 1
            await asyncio.sleep(0.005)

        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(300)])
        worker = Worker(bus, settings=replace(given.settings, lease_for=timedelta(seconds=4)), concurrency=5)
        task = asyncio.create_task(worker.run())
        for n in range(2):
            await eventually(lambda n=n: ran > 50 * (n + 1))  # type: ignore[misc]
            await asyncio.to_thread(own_server.restart)
        with Database(own_server.dsn) as database:
            complete = "SELECT completed_at IS NOT NULL FROM busload.batch"
            await eventually(lambda: database.value(complete), within=40)
            assert not task.done()
            worker.stop()
            await task
            batch = await bus.get_batch(DOMAIN, batch_id)
            assert batch is not None and (batch.completed_count, batch.status) == (300, "COMPLETED")
            assert database.count("lease") == 0
            database.check_invariants()


async def test_a_worker_that_starts_before_its_database_waits_for_it(
    own_server: Server, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    async with CommandBus(own_server.dsn) as bus:
        ran = asyncio.Event()

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            ran.set()

        await bus.send(DOMAIN, "Debit")
        await asyncio.to_thread(own_server.stop)
        worker = Worker(bus, settings=given.settings)
        task = asyncio.create_task(worker.run())
        await eventually(lambda: "The database cannot be reached, waiting for it for up to 300 s" in caplog.text)
        await asyncio.to_thread(own_server.start)
        async with asyncio.timeout(60):
            await ran.wait()
        worker.stop()
        await task
        assert caplog.text.count("waiting for it") == 1


async def test_a_worker_that_waits_for_its_database_can_be_stopped_and_has_a_limit(
    own_server: Server, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    async with CommandBus(own_server.dsn) as bus:
        await asyncio.to_thread(own_server.stop)
        worker = Worker(bus, settings=replace(given.settings, wait_for_database=None), domains=[DOMAIN])
        task = asyncio.create_task(worker.run())
        await eventually(lambda: "waiting for it" in caplog.text)
        worker.stop()
        async with asyncio.timeout(30):
            await task
        brief = replace(given.settings, wait_for_database=timedelta(seconds=0.2))
        with pytest.raises(DatabaseUnavailableError, match="could not be reached for"):
            await Worker(bus, settings=brief, domains=[DOMAIN]).run()
        await asyncio.to_thread(own_server.start)


async def test_a_worker_does_not_wait_for_a_database_that_does_not_exist(dsn: str, given: Given) -> None:
    bus = CommandBus(make_conninfo(dsn, dbname="there_is_none"))
    with pytest.raises(DatabaseUnusableError, match="does not exist"):
        async with asyncio.timeout(30):
            await Worker(bus, settings=given.settings, domains=[DOMAIN]).run()


async def test_a_worker_that_cannot_settle_before_it_stops_says_so(hasty: Given, database: Database, dsn: str) -> None:
    """And its commands run again: at least once, never silently not."""
    batch_id = await hasty.batch(commands=3)
    hasty.handler()
    brake = psycopg.connect(dsn)
    brake.execute("SELECT FROM busload.batch FOR UPDATE")
    worker = hasty.worker(settings=replace(hasty.settings, lease_for=timedelta(seconds=2)))
    task = asyncio.create_task(worker.run())
    await eventually(lambda: database.rows(LOCKED_OUT))
    worker.stop()
    async with asyncio.timeout(60):
        with pytest.raises(InvalidOperationError, match="could not be settled"):
            await task
    brake.close()
    hasty.died(database.value("SELECT max(worker) FROM busload.worker"))
    assert await hasty.drained() >= 0
    assert await hasty.drained() >= 0
    batch = await hasty.batch_now(batch_id)
    assert (batch.completed_count, batch.status) == (3, "COMPLETED")
    database.check_invariants()


# -- what went wrong elsewhere: RELIABILITY.md section 6 -------------------------------------------------------------


async def test_peer_prefect_21184(hasty: Given, database: Database) -> None:
    """A blocked event loop stops heartbeats; live work is declared dead and run twice."""
    runs = []

    async def block(command: Command, ctx: HandlerContext) -> None:
        runs.append(1)
        block_for_two_leases(database)

    hasty.handler("Debit", block)
    await hasty.sent()
    await hasty.drained()
    assert runs == [1]
    assert database.rows("SELECT outcome FROM busload.execution") == [("COMPLETED",)]


async def test_peer_kombu_337(hasty: Given, database: Database) -> None:
    """A task longer than the visibility timeout runs again and again."""
    runs = []

    async def long(command: Command, ctx: HandlerContext) -> None:
        runs.append(1)
        await eventually(lambda: database.value(RENEWED))

    hasty.settings = replace(hasty.settings, lease_for=timedelta(seconds=1.5))
    hasty.handler("Debit", long)
    await hasty.sent()
    async with hasty.running():
        await asyncio.gather(hasty.drained(), eventually(lambda: database.count("execution") == 1))
    assert runs == [1]
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0


async def test_peer_bullmq_4729(given: Given, database: Database) -> None:
    """A dead LISTEN connection is never replaced."""
    seen = given.handler()
    settings = replace(given.settings, poll_every=timedelta(hours=1), sweep_every=timedelta(hours=1))
    listener = f"SELECT pid FROM {LISTENING}"
    async with given.running(settings=settings):
        for n in range(2):
            [(pid,)] = await eventually(lambda: database.rows(listener))
            database.rows("SELECT pg_terminate_backend(%s)", pid)
            await eventually(lambda pid=pid: (pid,) not in database.rows(listener))  # type: ignore[misc]
            await given.sent()
            await eventually(lambda n=n: len(seen) == n + 1)  # type: ignore[misc]


async def test_peer_pgqueuer_224(own_server: Server, given: Given, caplog: pytest.LogCaptureFixture) -> None:
    """After a database restart the flush loops for ever and the shutdown hangs."""
    caplog.set_level(logging.WARNING)
    async with CommandBus(own_server.dsn) as bus:
        started, gate = asyncio.Event(), asyncio.Event()

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            started.set()
            await gate.wait()

        await bus.send(DOMAIN, "Debit")
        worker = Worker(bus, settings=replace(given.settings, lease_for=timedelta(seconds=4)))
        task = asyncio.create_task(worker.run())
        await started.wait()
        await asyncio.to_thread(own_server.restart)
        gate.set()
        with Database(own_server.dsn) as database:
            await eventually(lambda: database.count("execution") == 1)
            worker.stop()
            async with asyncio.timeout(60):
                await task
            assert database.count("lease") == 0

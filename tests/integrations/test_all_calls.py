"""Every call that takes `conn` joins a transaction of every driver: what it does is undone by a rollback."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import BatchCommand, CommandBus, PermanentCommandError, Stage, TaskTracker
from busload.batches import FailureBudget
from busload.tasks.tracker import ONE_AT_A_TIME
from busload.testing import TestServer
from tests.given import DOMAIN, LOCKED_OUT, Given, eventually, raising
from tests.integrations.callers import KINDS

DRIVERS = ("asyncpg", "psycopg2", "psycopg-async")  # every other kind hands its statements to one of these
CALLS = {
    "send",
    "send_many",
    "create_batch",
    "open_batch",
    "migrate",
    "cancel_batch",
    "seal_batch",
    "hold_batch",
    "resume_batch",
    "reprioritize_batch",
    "set_batch_budget",
    "cancel_command",
    "reschedule_command",
}


def test_no_call_of_the_bus_is_forgotten_here() -> None:
    members = inspect.getmembers(CommandBus, inspect.isfunction)
    taking = {name for name, function in members if "conn" in inspect.signature(function).parameters}
    assert {name for name in taking if not name.startswith("_")} - CALLS == set()


@pytest.mark.parametrize("kind", DRIVERS)
async def test_every_call_that_takes_a_connection_is_undone_by_its_rollback(
    bus: CommandBus, given: Given, dsn: str, kind: str
) -> None:
    """And is done by its commit, with the same answer"""
    database = given.database
    database.rows(
        "CREATE TABLE mine (id bigserial PRIMARY KEY, group_id uuid, created_at timestamptz NOT NULL DEFAULT now(),"
        " note text, price numeric(8, 2), paid date)"
    )
    given.handler("Fail", raising(PermanentCommandError("no")))
    parked = [await given.sent("Fail") for _ in range(6)]
    await given.drained()
    [cause] = await bus.troubleshooting.groups(DOMAIN)
    batch_id, other, held = [await given.batch(commands=3) for _ in range(3)]
    await bus.hold_batch(DOMAIN, held, reason="wait")
    open_id = (await bus.open_batch(DOMAIN).__aenter__()).batch_id
    waiting = [await given.sent() for _ in range(2)]
    later = datetime.now(UTC) + timedelta(hours=1)
    stages = [Stage("one", [BatchCommand("Debit")])]
    job_id, to_cancel = [await bus.jobs.create(DOMAIN, stages) for _ in range(2)]
    tracker = TaskTracker(bus)
    events, own = bus.buffer("events"), bus.buffer("own", table="mine")
    merged = bus.buffer("merged", merge="keep_last")
    row = {"note": "ä'", "price": 1.25, "paid": later.date()}
    calls: list[Callable[[Any], Awaitable[Any]]] = [
        lambda c: bus.send(DOMAIN, "Debit", expires_at=later, batch_id=open_id, conn=c),
        lambda c: bus.cancel_batch(DOMAIN, batch_id, reason="enough", operator="ada", conn=c),
        lambda c: bus.hold_batch(DOMAIN, other, reason="wait", operator="ada", conn=c),
        lambda c: bus.resume_batch(DOMAIN, held, operator="ada", conn=c),
        lambda c: bus.reprioritize_batch(DOMAIN, other, 7, operator="ada", conn=c),
        lambda c: bus.set_batch_budget(DOMAIN, other, FailureBudget(0.5), operator="ada", conn=c),
        lambda c: bus.seal_batch(DOMAIN, open_id, conn=c),
        lambda c: bus.cancel_command(DOMAIN, waiting[0], reason="enough", conn=c),
        lambda c: bus.reschedule_command(DOMAIN, waiting[1], later, conn=c),
        lambda c: bus.domains.pause(DOMAIN, reason="deploy", operator="ada", conn=c),
        lambda c: bus.domains.resume(DOMAIN, operator="ada", conn=c),
        lambda c: bus.troubleshooting.retry(DOMAIN, parked[0], operator="ada", conn=c),
        lambda c: bus.troubleshooting.complete(DOMAIN, parked[1], result={"n": 1}, conn=c),
        lambda c: bus.troubleshooting.cancel(DOMAIN, parked[2], reason="no", conn=c),
        lambda c: bus.troubleshooting.retry_group(DOMAIN, cause.fingerprint, conn=c),
        lambda c: bus.jobs.create(DOMAIN, stages, conn=c),
        lambda c: bus.jobs.cancel(DOMAIN, to_cancel, reason="no", conn=c),
        lambda c: tracker.enqueue("a:task", queue="tasks", metadata={"n": 1}, dedup=ONE_AT_A_TIME, conn=c),
        lambda c: events.add({"n": 1}, conn=c),
        lambda c: events.add_many([{"n": n} for n in range(5)], conn=c),
        lambda c: merged.add({"n": 1}, key="k", conn=c),
        lambda c: own.add(row, conn=c),
        lambda c: bus.migrate(conn=c),
    ]
    async with KINDS[kind](dsn) as caller:
        before = database.everything()
        for call in calls:
            await call(caller.conn)
        async with bus.open_batch(DOMAIN, conn=caller.conn) as batch:
            await batch.add("Debit")
        await caller.rollback()
        assert database.everything() == before
        assert database.rows("SELECT * FROM mine") == []
        for call in calls:
            await call(caller.conn)
        await caller.commit()
    assert (await given.batch_now(batch_id)).canceled_count == 3
    assert (await given.command_now(parked[1])).result == {"n": 1}
    assert (await given.batch_now(open_id)).total_count == 1
    assert database.rows("SELECT note, price::text, paid FROM mine") == [("ä'", "1.25", later.date())]
    assert database.value("SELECT count(*) FROM busload.buffered") == 7
    assert (await bus.jobs.get(DOMAIN, job_id)) is not None
    database.check_invariants()


@pytest.mark.parametrize("kind", DRIVERS)
async def test_an_error_of_postgresql_is_one_of_psycopg_and_leaves_the_transaction_usable(
    bus: CommandBus, given: Given, dsn: str, kind: str
) -> None:
    """By its code and class; the error of the driver is its cause, if there is another driver"""
    taken = uuid4()
    with psycopg.connect(dsn) as other:
        await bus.send(DOMAIN, "Debit", command_id=taken, conn=other)
        async with KINDS[kind](dsn) as caller:
            await caller.execute("SET LOCAL lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable) as locked:
                await bus.send(DOMAIN, "Debit", command_id=taken, conn=caller.conn)
            assert locked.value.sqlstate == "55P03"
            assert locked.value.diag.message_primary == "canceling statement due to lock timeout"
            cause = type(locked.value.__cause__).__module__.partition(".")[0]
            assert cause == {"asyncpg": "asyncpg", "psycopg2": "psycopg2"}.get(kind, "builtins")
            await bus.send(DOMAIN, "Debit", conn=caller.conn)
            await caller.commit()
        assert given.database.count("command") == 1
        other.rollback()


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg-async"])
async def test_a_call_that_is_cancelled_leaves_the_transaction_usable(
    bus: CommandBus, given: Given, dsn: str, kind: str
) -> None:
    taken = uuid4()
    with psycopg.connect(dsn) as other:
        await bus.send(DOMAIN, "Debit", command_id=taken, conn=other)
        async with KINDS[kind](dsn) as caller:
            sending = asyncio.create_task(bus.send(DOMAIN, "Debit", command_id=taken, conn=caller.conn))
            await eventually(lambda: given.database.rows(LOCKED_OUT))
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await bus.send(DOMAIN, "Debit", conn=caller.conn)
            await caller.commit()
        other.rollback()
    assert given.database.count("command") == 1


@pytest.mark.parametrize("kind", DRIVERS)
async def test_the_schema_is_made_in_the_transaction_of_every_driver(server: TestServer, kind: str) -> None:
    with server.database(migrated=False) as dsn:
        async with CommandBus(dsn) as bus, KINDS[kind](dsn) as caller:
            assert await bus.migrate(conn=caller.conn)
            await caller.rollback()
            assert len(await bus.migrate(conn=caller.conn)) >= 16
            await bus.send(DOMAIN, "Debit", conn=caller.conn)
            await caller.commit()
            assert (await bus.list_commands(DOMAIN)).commands

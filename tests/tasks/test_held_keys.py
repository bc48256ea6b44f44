"""Somebody's open transaction holds a task key, a command id or a batch: who needs it waits, and nobody else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusloadError,
    CommandBus,
    Dedup,
    DuplicateCommandError,
    PermanentCommandError,
    Settings,
    SyncCommandBus,
    TaskTracker,
)
from busload.buffers import BufferTable
from busload.commands.ids import new_id
from busload.errors import LockWaitTimeoutError
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, eventually, until

pytestmark = pytest.mark.usefixtures("invariants")

KEY = "invoice:7"
COMMAND_ID = new_id()
DEDUP = Dedup(on_conflict="return_existing")
LETTER = """CREATE TABLE letter (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), about text NOT NULL, group_id uuid,
                                 created_at timestamptz NOT NULL DEFAULT clock_timestamp())"""
SOON = 60.0
"""Seconds within which what waits for nothing is done, also on a busy machine; without an end it would hang."""

Call = Callable[[Any, UUID], Any]
CALLS: dict[str, Call] = {
    "task key": lambda bus, batch_id: bus.send(DOMAIN, "Bill", task_key=KEY, dedup=DEDUP),
    "task key in a list": lambda bus, batch_id: bus.send_many(
        DOMAIN, [BatchCommand("Bill", task_key=KEY)], dedup=DEDUP
    ),
    "task key in a batch": lambda bus, batch_id: bus.create_batch(
        DOMAIN, [BatchCommand("Bill", task_key=KEY)], dedup=DEDUP
    ),
    "task key into a batch": lambda bus, batch_id: bus.send(
        DOMAIN, "Bill", task_key=KEY, dedup=DEDUP, batch_id=batch_id
    ),
    "command id": lambda bus, batch_id: bus.send(DOMAIN, "Bill", command_id=COMMAND_ID),
    "command id in a list": lambda bus, batch_id: bus.send_many(DOMAIN, [BatchCommand("Bill", COMMAND_ID)]),
    "batch": lambda bus, batch_id: bus.send(DOMAIN, "Bill", batch_id=batch_id),
    "seal": lambda bus, batch_id: bus.seal_batch(DOMAIN, batch_id),
    "cancel of a batch": lambda bus, batch_id: bus.cancel_batch(DOMAIN, batch_id, reason="wrong file"),
    "list into a batch": lambda bus, batch_id: bus.send_many(DOMAIN, [BatchCommand("Bill")], batch_id=batch_id),
}
BY_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return replace(settings, pool_size=4, lock_timeout=timedelta(minutes=10))


@contextmanager
def holding(dsn: str, batch_id: UUID) -> Iterator[psycopg.Connection[Any]]:
    """A transaction of the shop's that has sent, and is not over"""
    with psycopg.connect(dsn, application_name="shop") as conn, SyncCommandBus(dsn) as bus:
        bus.send(DOMAIN, "Bill", command_id=COMMAND_ID, task_key=KEY, dedup=DEDUP, conn=conn)
        bus.send(DOMAIN, "Bill", batch_id=batch_id, conn=conn)
        yield conn


@BY_CALL
async def test_who_waits_for_what_a_transaction_holds_leaves_connections_to_all_others(
    bus: CommandBus, dsn: str, database: Database, call: Call
) -> None:
    batch = bus.open_batch(DOMAIN)
    async with batch:
        with holding(dsn, batch.batch_id) as conn:
            waiting = [asyncio.create_task(call(bus, batch.batch_id)) for _ in range(20)]
            await eventually(lambda: database.rows(LOCKED_OUT))
            async with asyncio.timeout(SOON):
                for n in range(10):
                    await bus.send(DOMAIN, "Debit", task_key=f"other:{n}", dedup=DEDUP)
                    await bus.send_many(DOMAIN, [BatchCommand("Debit")])
            assert not any(task.done() for task in waiting)
            conn.commit()
        async with asyncio.timeout(SOON):
            ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert not [one for one in ended if isinstance(one, BaseException) and not isinstance(one, DuplicateCommandError)]
    database.check_invariants()


@pytest.mark.parametrize("action", ["retry", "complete", "cancel"])
async def test_operators_who_wait_for_each_other_leave_connections_to_all_others(
    bus: CommandBus, dsn: str, database: Database, given: Given, action: str
) -> None:
    """One operator has decided in a transaction that is not over, and the same command is decided upon by others."""
    _, [command_id] = await given.in_troubleshooting()
    decide = partial(getattr(bus.troubleshooting, action), DOMAIN, command_id)
    if action == "cancel":
        decide = partial(decide, reason="paid by phone")
    with psycopg.connect(dsn, application_name="shop") as conn, SyncCommandBus(dsn) as other:
        other.troubleshooting.retry(DOMAIN, command_id, conn=conn)
        waiting = [asyncio.create_task(decide()) for _ in range(20)]
        await eventually(lambda: database.rows(LOCKED_OUT))
        async with asyncio.timeout(SOON):
            for _ in range(10):
                await bus.send_many(DOMAIN, [BatchCommand("Debit")])
        assert not any(task.done() for task in waiting)
    async with asyncio.timeout(SOON):
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert not [one for one in ended if isinstance(one, BaseException) and not isinstance(one, BusloadError)]
    assert not [one for one in ended if isinstance(one, LockWaitTimeoutError)]
    database.check_invariants()


async def claims(bus: CommandBus, tracker: TaskTracker) -> Callable[[int], Any]:
    tasks = [await tracker.enqueue(f"bills:{n}", queue="bills") for n in range(20)]
    return lambda n: tracker.claim(tasks[n].task_key, tasks[n].execution_id)  # type: ignore[union-attr, arg-type]


async def completions(bus: CommandBus, tracker: TaskTracker) -> Callable[[int], Any]:
    claim = await claims(bus, tracker)
    running = [await claim(n) for n in range(20)]
    return lambda n: tracker.complete(running[n])


async def retries(bus: CommandBus, tracker: TaskTracker) -> Callable[[int], Any]:
    claim = await claims(bus, tracker)
    for n in range(20):
        await tracker.fail(await claim(n), PermanentCommandError("unpayable"))
    return lambda n: tracker.retry(f"bills:{n}")


async def rows(bus: CommandBus, tracker: TaskTracker) -> Callable[[int], Any]:
    buffer = bus.buffer("letters", table=BufferTable("letter"))
    return lambda n: buffer.add({"about": f"letter {n}"})


async def lists_of_rows(bus: CommandBus, tracker: TaskTracker) -> Callable[[int], Any]:
    buffer = bus.buffer("letters", table=BufferTable("letter"))
    return lambda n: buffer.add_many([{"about": f"letter {n}"}])


async def merged(bus: CommandBus, tracker: TaskTracker) -> Callable[[int], Any]:
    buffer = bus.buffer("contacts", merge="keep_last")
    await buffer.add({"n": 0}, key="7")
    return lambda n: buffer.add({"n": n}, key="7")


async def lists_merged(bus: CommandBus, tracker: TaskTracker) -> Callable[[int], Any]:
    buffer = bus.buffer("contacts", merge="keep_first")
    await buffer.add({"n": 0}, key="7")
    return lambda n: buffer.add_many([{"n": n}], key=lambda event: "7")


LOCKED: dict[Callable[..., Any], str] = {
    claims: "SELECT FROM busload.queue FOR UPDATE",
    completions: "SELECT FROM busload.lease FOR UPDATE",
    retries: "SELECT FROM busload.troubleshooting FOR UPDATE",
    rows: "LOCK TABLE letter",
    lists_of_rows: "LOCK TABLE letter",
    merged: "SELECT FROM busload.buffered FOR UPDATE",
    lists_merged: "SELECT FROM busload.buffered FOR UPDATE",
}


@pytest.mark.parametrize("calls", LOCKED, ids=lambda calls: calls.__name__)
async def test_trackers_and_buffers_that_wait_for_a_lock_leave_connections_to_all_others(
    bus: CommandBus, dsn: str, database: Database, calls: Callable[..., Any]
) -> None:
    database.rows(LETTER)
    async with TaskTracker(bus) as tracker:
        call = await calls(bus, tracker)
        with psycopg.connect(dsn, application_name="shop") as conn:
            conn.execute(LOCKED[calls].encode())
            waiting = [asyncio.create_task(call(n)) for n in range(20)]
            await eventually(lambda: database.rows("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
            async with asyncio.timeout(SOON):
                for _ in range(10):
                    await bus.send_many(DOMAIN, [BatchCommand("Debit")])
            assert not any(task.done() for task in waiting)
        async with asyncio.timeout(SOON):
            assert len(await asyncio.gather(*waiting)) == 20
    database.check_invariants()


@pytest.mark.parametrize("calls", LOCKED, ids=lambda calls: calls.__name__)
async def test_trackers_and_buffers_name_who_holds_what_they_wait_for(
    dsn: str, settings: Settings, database: Database, calls: Callable[..., Any]
) -> None:
    database.rows(LETTER)
    hasty = replace(settings, lock_timeout=timedelta(milliseconds=300))
    async with CommandBus(dsn, settings=hasty) as bus, TaskTracker(bus) as tracker:
        call = await calls(bus, tracker)
        with psycopg.connect(dsn, application_name="shop") as conn:
            conn.execute(LOCKED[calls].encode())
            with pytest.raises(LockWaitTimeoutError, match="Nothing was written") as refused:
                await call(0)
            assert [holder.application_name for holder in refused.value.holders] == ["shop"]
        await call(0)
    database.check_invariants()


@pytest.mark.parametrize("call", [CALLS["task key"], CALLS["task key in a batch"]], ids=["one", "batch"])
async def test_nobody_waits_for_ever_and_the_error_names_who_holds_it(
    dsn: str, settings: Settings, database: Database, call: Call
) -> None:
    with SyncCommandBus(dsn) as other:
        batch = other.open_batch(DOMAIN)
        with batch:
            pass
    hasty = replace(settings, lock_timeout=timedelta(milliseconds=300))
    async with CommandBus(dsn, settings=hasty) as bus, bus.open_batch(DOMAIN) as open_batch:
        with holding(dsn, open_batch.batch_id) as conn:
            before = database.everything()
            with pytest.raises(LockWaitTimeoutError, match="Nothing was written") as refused:
                await call(bus, open_batch.batch_id)
            assert database.everything() == before
            assert (refused.value.waited, refused.value.holders[0].pid) == (
                hasty.lock_timeout,
                conn.info.backend_pid,
            )
            assert (refused.value.holders[0].application_name, len(refused.value.holders)) == ("shop", 1)
            assert "(shop)" in str(refused.value)
            assert isinstance(refused.value.__cause__, psycopg.errors.LockNotAvailable)


async def test_an_enqueued_task_waits_like_a_sent_command(dsn: str, settings: Settings) -> None:
    hasty = replace(settings, lock_timeout=timedelta(milliseconds=300))
    async with CommandBus(dsn, settings=hasty) as bus:
        tracker = TaskTracker(bus)
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await tracker.enqueue("t-1", queue="jobs", conn=conn)
            with pytest.raises(LockWaitTimeoutError):
                await tracker.enqueue("t-1", queue="jobs")


def test_threads_that_wait_leave_connections_to_the_others(
    dsn: str, settings: Settings, database: Database, given: Given
) -> None:
    results: list[Any] = []
    with SyncCommandBus(dsn, settings=settings) as bus, bus.open_batch(DOMAIN) as batch:
        with holding(dsn, batch.batch_id) as conn:

            def wait() -> None:
                results.append(bus.send(DOMAIN, "Bill", task_key=KEY, dedup=DEDUP))

            threads = [threading.Thread(target=wait, daemon=True) for _ in range(12)]
            for thread in threads:
                thread.start()
            until(lambda: database.rows(LOCKED_OUT))
            for n in range(10):
                bus.send(DOMAIN, "Debit", task_key=f"other:{n}", dedup=DEDUP)
            assert results == []
            conn.commit()
        for thread in threads:
            thread.join(SOON)
    assert [(one.command_id, one.created) for one in results] == [(COMMAND_ID, False)] * 12

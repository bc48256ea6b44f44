"""Handlers written with `def`: as many at a time as there are threads, and what waits for one is in nobody's way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    HandlerContext,
    Settings,
    SyncHandlerContext,
    Worker,
    WorkerSettings,
)
from busload.worker.lifecycle import ENGINE_CONNECTIONS
from tests.given import DOMAIN, Database, Given, eventually


class Crowd:
    """Counts who is in a handler at a time; nobody leaves before the gate opens."""

    def __init__(self) -> None:
        self.gate, self._lock = threading.Event(), threading.Lock()
        self.now = self.most = self.all = 0

    def handle(self, command: Command, ctx: SyncHandlerContext) -> None:
        with self._lock:
            self.now, self.all = self.now + 1, self.all + 1
            self.most = max(self.most, self.now)
        self.gate.wait(60)
        with self._lock:
            self.now -= 1


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.gate.set()


def test_there_are_no_more_threads_than_a_server_has_connections_for(bus: CommandBus) -> None:
    bus.handler(DOMAIN, "Debit")(lambda command, ctx: None)
    assert Worker(bus).concurrency == 100
    assert Worker(bus).threads == min(32, (os.cpu_count() or 1) + 4)
    assert Worker(bus, settings=WorkerSettings(threads=7)).threads == 7
    assert Worker(bus, threads=3, settings=WorkerSettings(threads=7)).threads == 3
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="threads must be a whole number from 1 on"):
            Worker(bus, threads=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["single", "bulk"])
async def test_no_more_def_handlers_run_at_a_time_than_there_are_threads(
    bus: CommandBus, given: Given, crowd: Crowd, database: Database, kind: str
) -> None:
    if kind == "bulk":
        bus.bulk_handler(DOMAIN, "Slow", size=1, max_wait=0)(crowd.handle)
    else:
        bus.handler(DOMAIN, "Slow")(crowd.handle)
    await bus.create_batch(DOMAIN, [BatchCommand("Slow") for _ in range(40)])
    async with given.running(threads=3):
        await eventually(lambda: crowd.now == 3)
        if kind == "single":
            assert database.value("SELECT sum(open) FROM busload.lease") == 3, "others can have what has no thread here"
        crowd.gate.set()
        await eventually(database.is_at_rest)
    assert (crowd.most, crowd.all) == (3, 40)
    database.check_invariants()


@pytest.mark.parametrize("where", ["the same domain", "another domain"])
async def test_async_handlers_go_on_while_every_thread_is_taken(
    bus: CommandBus, given: Given, crowd: Crowd, database: Database, where: str
) -> None:
    """More commands than there are slots need a thread and come first."""
    other = DOMAIN if where == "the same domain" else "mail"
    seen: list[Command] = []

    async def quick(command: Command, ctx: HandlerContext) -> None:
        seen.append(command)

    bus.handler(DOMAIN, "Slow")(crowd.handle)
    bus.handler(other, "Quick")(quick)
    await bus.create_batch(DOMAIN, [BatchCommand("Slow") for _ in range(11)])
    async with given.running(threads=2, concurrency=10, domains=sorted({DOMAIN, other})):
        await eventually(lambda: crowd.now == 2)
        await bus.create_batch(other, [BatchCommand("Quick") for _ in range(50)])
        await eventually(lambda: len(seen) == 50)
        assert crowd.most == 2 and crowd.all == 2, "nothing that needs a thread has begun meanwhile"
        crowd.gate.set()
        await eventually(database.is_at_rest)
    assert crowd.most == 2
    assert database.rows("SELECT outcome, attempt, count(*) FROM busload.execution GROUP BY 1, 2") == [
        ("COMPLETED", 1, 61)
    ]
    database.check_invariants()


async def test_what_waits_for_a_thread_is_handed_back_at_once_when_the_worker_stops(
    bus: CommandBus, given: Given, crowd: Crowd, database: Database
) -> None:
    async def quick(command: Command, ctx: HandlerContext) -> None: ...

    bus.handler(DOMAIN, "Slow")(crowd.handle)
    bus.handler(DOMAIN, "Quick")(quick)
    await bus.create_batch(DOMAIN, [BatchCommand("Slow") for _ in range(30)])
    async with given.running(threads=2) as worker:
        await eventually(lambda: crowd.now == 2 and worker.stats.in_line > 0)
        worker.stop()
        await eventually(lambda: database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 28)
        crowd.gate.set()
    assert crowd.all == 2 and database.count("lease") == 0
    database.check_invariants()


async def test_what_waits_for_stuck_threads_is_left_to_other_workers(
    bus: CommandBus, given: Given, crowd: Crowd, database: Database, dsn: str
) -> None:
    async def quick(command: Command, ctx: HandlerContext) -> None: ...

    bus.handler(DOMAIN, "Slow")(crowd.handle)
    bus.handler(DOMAIN, "Quick")(quick)
    done: list[Any] = []
    async with CommandBus(dsn) as elsewhere:
        elsewhere.handler(DOMAIN, "Slow")(lambda command, ctx: done.append(command))
        await bus.create_batch(DOMAIN, [BatchCommand("Slow") for _ in range(30)])
        async with given.running(threads=2, settings=replace(given.settings, lease_for=timedelta(seconds=4))) as worker:
            await eventually(lambda: crowd.now == 2 and worker.stats.in_line > 0)
            async with Worker(elsewhere, settings=given.settings):
                await eventually(lambda: len(done) == 28, within=60)
            crowd.gate.set()
            await eventually(database.is_at_rest)
    assert crowd.most == 2
    database.check_invariants()


async def test_an_overdue_thread_stays_counted_until_it_returns(
    bus: CommandBus, given: Given, crowd: Crowd, database: Database
) -> None:
    bus.handler(DOMAIN, "Slow", timeout=0.05)(crowd.handle)
    await bus.create_batch(DOMAIN, [BatchCommand("Slow", max_attempts=1) for _ in range(4)])
    async with given.running(threads=2):
        await eventually(lambda: database.count("troubleshooting") == 2 and crowd.all >= 2)
        await asyncio.sleep(0)
        assert crowd.all == 2, "the others wait for a thread"
        crowd.gate.set()
        await eventually(lambda: crowd.all == 4)
    assert crowd.most == 2


async def test_a_worker_costs_as_many_connections_as_the_docs_say(
    dsn: str, given: Given, database: Database, worker_settings: WorkerSettings
) -> None:
    """With handlers of both kinds that write in `ctx.transaction()`, and an ORM that has a connection per thread."""
    pool_size, threads = 3, 5
    orm, opened = threading.local(), list[psycopg.Connection[Any]]()
    everybody = threading.Barrier(threads + 1)

    def threaded(command: Command, ctx: SyncHandlerContext) -> None:
        if not hasattr(orm, "conn"):
            orm.conn = psycopg.connect(dsn, application_name="orm", autocommit=True)
            opened.append(orm.conn)
            everybody.wait(60)
        orm.conn.execute("SELECT 1")
        ctx.send("mail", "Mail")
        with ctx.transaction() as conn:
            conn.execute("SELECT 1")

    async def beside(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")

    ours = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    before, most = database.value(ours), 0
    async with CommandBus(dsn, settings=Settings(pool_size=pool_size)) as bus:
        bus.handler(DOMAIN, "Thread")(threaded)
        bus.handler(DOMAIN, "Beside")(beside)
        kinds = [BatchCommand(kind) for _ in range(100) for kind in ("Thread", "Beside")]
        batch_id = await bus.create_batch(DOMAIN, kinds)
        worker = Worker(bus, domains=[DOMAIN], threads=threads, settings=worker_settings)
        async with worker:
            await asyncio.to_thread(everybody.wait, 60)
            assert database.value(ours + " AND application_name = 'orm'") == threads
            while not (await given.batch_now(batch_id)).status.final:
                most = max(most, database.value(ours) - before)
                await asyncio.sleep(0.005)
    for conn in opened:
        conn.close()
    a_bus, engine, heartbeat, listener = pool_size, ENGINE_CONNECTIONS, 1, 1
    for_async = pool_size
    for_def = pool_size + min(pool_size, threads)
    assert threads < most <= a_bus + engine + heartbeat + listener + for_async + for_def + threads
    assert worker.left_behind == []

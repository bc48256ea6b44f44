"""A connection outside of any pool is closed, also if the code that has opened it is interrupted."""

from __future__ import annotations

import _thread
import asyncio
import gc
import math
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import aclosing
from itertools import count
from typing import Any

import psycopg
import pytest

from busload import CommandBus
from busload.postgres import waiting
from busload.postgres.listen import AsyncListener
from busload.postgres.own_connection import check_server_async, connect_async
from busload.postgres.pool import async_pool
from busload.sync.connection import OwnConnection, connect
from busload.transports import Message
from busload.transports.pgmq import PgmqTransport
from busload.transports.postgresql import PostgresBroker, PostgresqlTransport
from busload.worker.find_database import find_database
from tests.given import DOMAIN, LOCKED_OUT, Database, until

WITHIN = 60.0
LOCK = 83
QUEUE = "busload.interrupted"

COMMIT_WAITS = f"""
    CREATE TEMP TABLE late (n integer);
    CREATE FUNCTION pg_temp.wait() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN NULL; END';
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION pg_temp.wait()"""
"""A commit that has written to the table waits for the lock."""


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much time passes between any two steps as on a busy machine: each statement lets others go first."""
    monkeypatch.setattr(waiting, "LONGEST_STRETCH", 0.0)
    monkeypatch.setattr(psycopg.waiting, "MAX_BUSY_TIME", 0.0)


class Cancelled:
    """Runs a coroutine, and cancels its task at some of its awaits: from the first to the last of these numbers."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], first: float, last: float) -> None:
        self._coroutine, self._first, self._last = coroutine, first, last
        self.awaits = 0

    async def run(self) -> None:
        await self

    def __await__(self) -> Generator[Any, Any, None]:
        task, steps = asyncio.current_task(), self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            try:
                awaited = next(steps) if error is None else steps.throw(error)
            except StopIteration:
                return
            if self._first <= self.awaits <= self._last and task is not None:
                task.cancel()
            self.awaits += 1
            error = None
            try:
                yield awaited
            except BaseException as thrown:
                error = thrown


async def cancelled_everywhere(use: Callable[[], Coroutine[Any, Any, object]], again: bool) -> None:
    """Use something once for each of its awaits, and cancel it there; `again` means also at each await after that."""
    left_open = []
    gc.collect()
    gc.freeze()  # each of the hundreds of searches below is for what was made since
    for first in count():
        before = asyncio.all_tasks()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cancelled = Cancelled(use(), first, math.inf if again else first)
            await ended(asyncio.create_task(cancelled.run()), f"what was cancelled at await {first}")
            for task in asyncio.all_tasks() - before:
                await ended(task, f"{task!r}, started by what was cancelled at await {first},")
            gc.collect()
        left_open += [f"at await {first}: {warning.message}" for warning in caught]
        if cancelled.awaits <= first:
            break
    assert not left_open, "\n".join(left_open)


async def ended(task: asyncio.Task[None], name: str) -> None:
    await asyncio.wait({task}, timeout=WITHIN)
    assert task.done(), f"{name} goes on"
    if not task.cancelled():
        task.result()


async def block(bus: CommandBus) -> None:
    async with await connect_async(bus.dsn, response_timeout=WITHIN) as conn:
        await conn.execute("SELECT 1")
        await asyncio.sleep(0)


async def listen(bus: CommandBus) -> None:
    listener = AsyncListener(bus.dsn, ["busload_test"], lambda channel, payload: listener.stop())
    await listener.run()


async def make_for_a_pool(bus: CommandBus) -> None:
    conn = await async_pool(bus.dsn, 1)._connect()
    await conn.close()


USES: dict[str, Callable[[CommandBus], Coroutine[Any, Any, object]]] = {
    "a block of its own": block,
    "the check of the server": lambda bus: check_server_async(bus.dsn, WITHIN),
    "the start of a worker": lambda bus: find_database(bus, None),
    "a listener": listen,
    "the connection of a pool": make_for_a_pool,
    "migrate": lambda bus: bus.migrate(),
    "doctor": lambda bus: bus.doctor(),
}


@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
@pytest.mark.parametrize("use", USES)
async def test_a_task_that_is_cancelled_leaves_no_connection_open(
    bus: CommandBus, busy: None, use: str, again: bool
) -> None:
    await bus.send(DOMAIN, "Debit")  # so the bus has checked the schema
    await cancelled_everywhere(lambda: USES[use](bus), again)


@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
@pytest.mark.parametrize("kind", [PostgresqlTransport, PgmqTransport])
async def test_a_receiver_that_is_cancelled_leaves_no_connection_open(
    dsn: str, pgmq_url: str, busy: None, kind: type[PostgresBroker], again: bool
) -> None:
    transport = kind(pgmq_url if kind is PgmqTransport else dsn)
    await transport.declare([QUEUE])
    ids = count(1)

    async def receive() -> None:
        try:
            await transport.publish([Message(QUEUE, f"{next(ids)}-1-1", b"one")])
            async with aclosing(transport.deliveries(QUEUE, prefetch=1)) as deliveries:  # type: ignore[type-var]
                async for delivery in deliveries:
                    await delivery.ack()
                    break
        finally:
            await transport.aclose()

    await cancelled_everywhere(receive, again)


def test_ctrl_c_during_the_commit_at_the_end_of_a_block_closes_its_connection(dsn: str, database: Database) -> None:
    def interrupt() -> None:
        until(lambda: database.rows(LOCKED_OUT))
        _thread.interrupt_main()

    def insert(conn: OwnConnection) -> None:
        with conn:
            conn.execute(COMMIT_WAITS)
            conn.execute("BEGIN")
            conn.execute("INSERT INTO late VALUES (1)")

    database.rows(f"SELECT pg_advisory_lock({LOCK})")
    conn = connect(dsn, response_timeout=WITHIN)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        insert(conn)
    interrupting.join()
    assert conn.closed

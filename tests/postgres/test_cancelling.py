"""Every public await ends when its caller is cancelled or its time is over, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from psycopg import generators

from busload import BatchCommand, BusloadError, CommandBus, Dedup, Settings, Stage, TaskTracker
from busload.commands.ids import new_id
from busload.postgres import own_connection
from busload.postgres.own_connection import OwnAsyncConnection
from busload.sync.connection import OwnConnection, connect
from busload.worker.coalescer import Coalescer
from tests.chaos.harness import seeded
from tests.given import DOMAIN, LOCKED_OUT, Database, eventually, until

pytestmark = pytest.mark.usefixtures("invariants")

WITHIN = 60.0
"""Seconds after which an await has not ended, also on a slow machine."""
ROUNDS, CALLERS = 4, 25

Call = Callable[[CommandBus, UUID, UUID], Awaitable[Any]]


async def watch(bus: CommandBus, batch_id: UUID, job_id: UUID) -> None:
    async for _ in bus.watch_batch(DOMAIN, batch_id):
        pass


async def fill(bus: CommandBus, batch_id: UUID, job_id: UUID) -> None:
    async with bus.open_batch(DOMAIN, checkpoint_size=2) as batch:
        for _ in range(5):
            await batch.add("Debit")


async def track(bus: CommandBus, batch_id: UUID, job_id: UUID) -> None:
    await TaskTracker(bus).enqueue(f"MAIL-{new_id()}", queue="mail")


CALLS: dict[str, Call] = {
    "wait_batch": lambda bus, batch_id, job_id: bus.wait_batch(DOMAIN, batch_id),
    "watch_batch": watch,
    "wait_job": lambda bus, batch_id, job_id: bus.jobs.wait(DOMAIN, job_id),
    "send": lambda bus, batch_id, job_id: bus.send(DOMAIN, "Debit"),
    "send_with_an_id": lambda bus, batch_id, job_id: bus.send(DOMAIN, "Debit", command_id=UUID(int=7)),
    "send_deduped": lambda bus, batch_id, job_id: bus.send(DOMAIN, "Debit", task_key="one", dedup=Dedup()),
    "send_into_a_batch": lambda bus, batch_id, job_id: bus.send(DOMAIN, "Debit", batch_id=batch_id),
    "send_many": lambda bus, batch_id, job_id: bus.send_many(DOMAIN, [BatchCommand("Debit")] * 2),
    "create_batch": lambda bus, batch_id, job_id: bus.create_batch(DOMAIN, [BatchCommand("Debit")]),
    "create_large_batch": lambda bus, batch_id, job_id: bus.create_batch(
        DOMAIN, [BatchCommand("Debit") for _ in range(1500)]
    ),
    "open_batch": fill,
    "create_job": lambda bus, batch_id, job_id: bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Debit")])]),
    "get_batch": lambda bus, batch_id, job_id: bus.get_batch(DOMAIN, batch_id),
    "explain_batch": lambda bus, batch_id, job_id: bus.explain_batch(DOMAIN, batch_id),
    "list_batches": lambda bus, batch_id, job_id: bus.list_batches(DOMAIN),
    "add_to_a_buffer": lambda bus, batch_id, job_id: bus.buffer("clicks").add({"n": 1}),
    "distribute": lambda bus, batch_id, job_id: bus.buffer("clicks").distribute(),
    "pause": lambda bus, batch_id, job_id: bus.domains.pause(DOMAIN),
    "enqueue": track,
}


@pytest.mark.parametrize("transport", [False, True], ids=["postgresql", "broker"])
async def test_every_await_ends_when_it_is_cancelled_or_its_time_is_over(dsn: str, transport: bool) -> None:
    """At random moments, hundreds of calls at a time, on fewer connections than callers."""
    chance = seeded()
    settings = Settings(pool_size=3)
    async with CommandBus(dsn, settings=settings, transport=dsn if transport else None) as bus:
        batch_id = await open_batch(bus)
        job_id = await bus.jobs.create(DOMAIN, [Stage("one", [BatchCommand("Debit")])])
        await bus.buffer("clicks").add({"n": 0})
        before = asyncio.all_tasks()
        for _ in range(ROUNDS):
            calls = [(name, call) for name, call in CALLS.items() for _ in range(CALLERS // 5)]
            chance.shuffle(calls)
            under_way = {
                asyncio.create_task(one(partial(call, bus, batch_id, job_id), chance), name=name)
                for name, call in calls
            }
            _, stuck = await asyncio.wait(under_way, timeout=WITHIN)
            assert not stuck, sorted(task.get_name() for task in stuck)
            for task in under_way:
                task.result()
        await bus.domains.resume(DOMAIN)
        assert (await bus.send(DOMAIN, "Debit")).created
        await eventually(lambda: bus.pool.size == bus.pool.idle)
        await eventually(
            lambda: {task for task in asyncio.all_tasks() - before if "listen" not in task.get_name()} == set()
        )


async def open_batch(bus: CommandBus) -> UUID:
    """One that does not complete."""
    batch = bus.open_batch(DOMAIN)
    await batch.__aenter__()
    return batch.batch_id


async def one(call: Callable[[], Awaitable[Any]], chance: random.Random) -> None:
    """Cancel a call at some moment, from outside or by a time-out around it."""
    seconds = chance.choice([0, 0.0005, 0.002, 0.02, 0.1]) * chance.random()
    called = asyncio.ensure_future(_timed(call, seconds) if chance.random() < 0.5 else call())
    if chance.random() < 0.7:
        await asyncio.sleep(seconds)
    else:
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
    called.cancel()
    await asyncio.wait({called}, timeout=WITHIN)
    assert called.done(), "it was cancelled, and goes on"
    if not called.cancelled() and (error := called.exception()) is not None:
        assert isinstance(error, TimeoutError | BusloadError), repr(error)


async def _timed(call: Callable[[], Awaitable[Any]], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await call()


async def test_waits_for_a_batch_end_in_time_while_all_connections_are_in_use(dsn: str) -> None:
    """A time-out that comes in the same moment as the connection is not lost."""
    chance = seeded()
    async with asyncio.timeout(WITHIN), CommandBus(dsn, settings=Settings(pool_size=1)) as bus:
        batch_id = await open_batch(bus)

        async def wait() -> None:
            with pytest.raises(TimeoutError, match="not complete"):
                await bus.wait_batch(DOMAIN, batch_id, timeout=chance.uniform(0.0005, 0.02))

        for _ in range(20):
            await asyncio.gather(*(wait() for _ in range(60)))
        await eventually(lambda: bus.pool.size == bus.pool.idle)
        assert bus.pool.size <= 1


async def test_a_cancelled_statement_gives_its_connection_back_and_ends_at_the_server(
    bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_connection, "CANCEL_WITHIN", WITHIN)  # on a slow machine
    async with bus.pool.connection() as conn:
        pid = conn.info.backend_pid
        sleeping = asyncio.create_task(conn.execute("SELECT pg_sleep(1000)"))
        state = f"SELECT state FROM pg_stat_activity WHERE pid = {pid}"
        await eventually(lambda: database.value(state) == "active")
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        assert await (await conn.execute("SELECT 1")).fetchone() == (1,)
    assert database.value(state) == "idle"
    assert bus.pool.size == bus.pool.idle


async def test_a_cancellation_is_not_lost_if_the_statement_fails_in_the_same_moment(
    dsn: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever catches the statement's error would go on, though it was told to end."""
    monkeypatch.setattr(own_connection, "CANCEL_WITHIN", WITHIN)
    database.rows("SELECT pg_advisory_lock(79)")
    async with CommandBus(dsn) as bus, bus.pool.connection() as conn:
        sent = asyncio.Event()

        async def cancel_safe(self: OwnAsyncConnection, *, timeout: float = 0) -> None:
            database.rows("SELECT pg_advisory_unlock(79)")  # the request is late: the statement fails by itself
            sent.set()

        monkeypatch.setattr(OwnAsyncConnection, "cancel_safe", cancel_safe)
        fails = "DO $$ BEGIN PERFORM pg_advisory_xact_lock(79); RAISE division_by_zero; END $$"
        failing = asyncio.create_task(conn.execute(fails))
        await eventually(lambda: database.rows(LOCKED_OUT))
        failing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await failing
        assert sent.is_set()


def test_a_statement_that_ctrl_c_has_hit_leaves_no_connection_in_use(dsn: str, database: Database) -> None:
    """The signal may come between any two steps, also where psycopg cannot go on reading the answer."""

    def hit(answer: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        yield next(answer)
        raise KeyboardInterrupt

    def interrupted(conn: OwnConnection) -> None:
        with conn.transaction():
            conn.pgconn.send_query(b"SELECT pg_catalog.pg_sleep(600)")
            conn.wait(hit(generators.execute(conn.pgconn)))

    with connect(dsn, response_timeout=10) as conn:
        pid = conn.info.backend_pid
        with pytest.raises(KeyboardInterrupt):
            interrupted(conn)
        assert conn.closed
    until(lambda: not database.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid))


async def test_one_cancelled_sender_takes_nobody_with_it(dsn: str, database: Database) -> None:
    """Sends that are under way at once share a statement: those who stay are sent, each once."""
    chance = seeded()
    async with asyncio.timeout(WITHIN), CommandBus(dsn) as bus:
        for _ in range(20):
            sending = [asyncio.create_task(bus.send(DOMAIN, "Debit")) for _ in range(30)]
            await asyncio.sleep(chance.random() * 0.004)
            left = [task for task in sending if chance.random() < 0.4 and not task.done()]
            for task in left:
                task.cancel()
            done = await asyncio.gather(*sending, return_exceptions=True)
            assert all(task.cancelled() or task.exception() is None for task in left)
            sent = [result for task, result in zip(sending, done, strict=True) if task not in left]
            assert all(result.created for result in sent)  # type: ignore[union-attr]
            ids = [result.command_id for result in sent]  # type: ignore[union-attr]
            assert database.value("SELECT count(*) FROM busload.command WHERE command_id = ANY(%s)", ids) == len(ids)


async def test_a_cancelled_put_into_a_full_coalescer_ends(dsn: str) -> None:
    gate = asyncio.Event()

    async def flush(items: Any) -> None:
        await gate.wait()

    coalescer: Coalescer[int] = Coalescer(flush, max_size=1, max_interval=timedelta(0), capacity=2, name="test")
    putting = [asyncio.create_task(coalescer.put(n)) for n in range(10)]
    await asyncio.sleep(0.01)
    for task in putting:
        task.cancel()
    _, stuck = await asyncio.wait(putting, timeout=WITHIN)
    assert not stuck
    gate.set()
    await coalescer.close()

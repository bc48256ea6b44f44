"""What others do with the same work on the same server. A peer that is not installed is left out.

PgQueuer runs as its guide recommends for short jobs: asyncpg, one connection for the queue manager, uvloop, its
autovacuum settings, and a large batch. reliable-cmd needs PGMQ, which comes as plain SQL, two columns that its own
migration leaves out, and `pgmq.read` with the columns of the PGMQ it was written for.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
from psycopg_pool import AsyncConnectionPool

from bench.case import Case, Measured, heard, helpers, say
from bench.clock import timed
from bench.ours import DOMAIN, WARM_UP, expect, latencies


@dataclass(frozen=True, slots=True)
class Published:
    """A rate that was stated elsewhere, for a peer that cannot be run here."""

    subject: str
    metric: str
    rates: str
    lowest: float
    highest: float


PUBLISHED = [
    Published("reliable-cmd", "create", "440–1,090/s", 440, 1090),
    Published("reliable-cmd", "drain", "~890/s, 3 processes", 890, 890),
]

PGQUEUER_CHUNK = 10_000
PGQUEUER_BATCH = 1_000
RELIABLE_CONCURRENCY = 10
PGMQ_READ = """
    ALTER FUNCTION pgmq.read(text, integer, integer, jsonb) RENAME TO read_newer;
    CREATE FUNCTION pgmq.read(queue text, visibility integer, quantity integer)
        RETURNS TABLE (msg_id bigint, read_ct integer, enqueued_at timestamptz, vt timestamptz, message jsonb)
        LANGUAGE sql AS $$
            SELECT m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message FROM pgmq.read_newer($1, $2, $3) AS m $$;
"""


def _import(name: str) -> Any:
    """Peers are optional, so the type checker must not need them."""
    return importlib.import_module(name)


# -- PgQueuer ------------------------------------------------------------------------------------------------------


async def _pgqueuer(dsn: str) -> Any:
    conn = await _import("asyncpg").connect(dsn)
    return _import("pgqueuer.db").AsyncpgDriver(conn)


async def pgqueuer_install(dsn: str, size: int) -> None:
    queries = _import("pgqueuer.queries").Queries(await _pgqueuer(dsn))
    await queries.install()
    await queries.optimize_autovacuum()


async def pgqueuer_fill(dsn: str, size: int) -> None:
    await pgqueuer_install(dsn, size)
    await _pgqueuer_enqueue(_import("pgqueuer.queries").Queries(await _pgqueuer(dsn)), size)


async def _pgqueuer_enqueue(queries: Any, size: int) -> None:
    for start in range(0, size, PGQUEUER_CHUNK):
        count = min(PGQUEUER_CHUNK, size - start)
        payloads = [b'{"n":%d}' % n for n in range(start, start + count)]
        await queries.enqueue(["nothing"] * count, payloads, [0] * count)


async def pgqueuer_create(dsn: str, size: int) -> Measured:
    queries = _import("pgqueuer.queries").Queries(await _pgqueuer(dsn))
    with timed(dsn) as lap:
        await _pgqueuer_enqueue(queries, size)
    expect(dsn, "SELECT count(*) FROM pgqueuer", size)
    return Measured(size, lap.seconds, lap.client_cpu, lap.server_cpu)


async def pgqueuer_drain(dsn: str, size: int) -> Measured:
    queue = await _pgqueuer_queue(dsn)
    with timed(dsn) as lap:
        await _pgqueuer_empty(queue)
    expect(dsn, "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'", size)
    return Measured(size, lap.seconds, lap.client_cpu, lap.server_cpu)


async def pgqueuer_drain_together(dsn: str, size: int) -> Measured:
    async with helpers("pgqueuer/drain-2", dsn, size, count=2) as both:
        for helper in both:
            assert await helper.hear() == "ready"
        with timed(dsn) as lap:
            for helper in both:
                helper.say("go")
            for helper in both:
                await helper.hear(600)
    expect(dsn, "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'", size)
    return Measured(size, lap.seconds, lap.client_cpu, lap.server_cpu)


async def pgqueuer_drain_when_told(dsn: str, size: int) -> None:
    queue = await _pgqueuer_queue(dsn)
    say("ready")
    if await heard():
        await _pgqueuer_empty(queue)
        say("done")


async def _pgqueuer_queue(dsn: str) -> Any:
    queue = _import("pgqueuer").PgQueuer(await _pgqueuer(dsn))

    @queue.entrypoint("nothing")  # type: ignore[untyped-decorator, unused-ignore]
    async def nothing(job: Any) -> None:
        """As ours."""

    return queue


async def _pgqueuer_empty(queue: Any) -> None:
    mode = _import("pgqueuer.types").QueueExecutionMode.drain
    await queue.run(batch_size=PGQUEUER_BATCH, mode=mode, dequeue_timeout=timedelta(seconds=1))


async def pgqueuer_send(dsn: str, size: int) -> Measured:
    queries = _import("pgqueuer.queries").Queries(await _pgqueuer(dsn))
    with timed(dsn) as lap:
        for n in range(size):
            await queries.enqueue("nothing", b'{"n":%d}' % n)
    return Measured(size, lap.seconds, lap.client_cpu, lap.server_cpu)


async def pgqueuer_latency(dsn: str, samples: int) -> Measured:
    async with helpers("pgqueuer/latency", dsn, samples) as [worker]:
        queries = _import("pgqueuer.queries").Queries(await _pgqueuer(dsn))

        async def once() -> float:
            began = time.monotonic()
            await queries.enqueue("stamp", b"{}")
            return float(await worker.hear()) - began

        return await latencies(dsn, samples, once)


async def pgqueuer_stamp_until_told(dsn: str, samples: int) -> None:
    queue = _import("pgqueuer").PgQueuer(await _pgqueuer(dsn))

    @queue.entrypoint("stamp")  # type: ignore[untyped-decorator, unused-ignore]
    async def stamp(job: Any) -> None:
        say(time.monotonic())

    running = asyncio.create_task(queue.run())
    await heard()
    queue.shutdown.set()
    await running


# -- reliable-cmd --------------------------------------------------------------------------------------------------


async def reliable_install(dsn: str, size: int) -> None:
    with psycopg.connect(dsn) as conn:
        _import("pgmq.install").install_pgmq_from_sql(conn=conn)
        conn.commit()
        schema = _import("commandbus.setup").get_schema_sql()
        conn.execute(schema.replace("CREATE EXTENSION IF NOT EXISTS pgmq;", ""))
        conn.execute("ALTER TABLE commandbus.batch ADD COLUMN batch_type text NOT NULL DEFAULT 'COMMAND'")
        conn.execute("ALTER TABLE commandbus.batch ADD COLUMN failed_count integer NOT NULL DEFAULT 0")
        conn.execute(PGMQ_READ.encode())
        conn.execute("SELECT pgmq.create(%s)", [f"{DOMAIN}__commands"])


async def reliable_fill(dsn: str, size: int) -> None:
    await reliable_install(dsn, size)
    async with AsyncConnectionPool(dsn, min_size=1, max_size=20) as pool:
        await _reliable_create(pool, size)


async def _reliable_create(pool: Any, size: int) -> None:
    commandbus = _import("commandbus")
    batch = [commandbus.BatchCommand("Nothing", uuid4(), {"n": n}) for n in range(size)]
    await commandbus.CommandBus(pool).create_batch(DOMAIN, batch)


async def reliable_create(dsn: str, size: int) -> Measured:
    async with AsyncConnectionPool(dsn, min_size=1, max_size=20) as pool:
        with timed(dsn) as lap:
            await _reliable_create(pool, size)
    expect(dsn, "SELECT count(*) FROM commandbus.command", size)
    return Measured(size, lap.seconds, lap.client_cpu, lap.server_cpu)


async def reliable_drain(dsn: str, size: int) -> Measured:
    commandbus = _import("commandbus")
    registry = commandbus.HandlerRegistry()

    @registry.handler(DOMAIN, "Nothing")  # type: ignore[untyped-decorator, unused-ignore]
    async def nothing(command: Any, context: Any) -> dict[str, Any]:
        return {}

    async with AsyncConnectionPool(dsn, min_size=5, max_size=20) as pool:
        worker = commandbus.Worker(pool, DOMAIN, registry)
        with timed(dsn) as lap:
            running = asyncio.create_task(worker.run(concurrency=RELIABLE_CONCURRENCY))
            await _reliable_completed(dsn, size)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return Measured(size, lap.seconds, lap.client_cpu, lap.server_cpu)


async def _reliable_completed(dsn: str, size: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        completed = 0
        while completed < size:
            await asyncio.sleep(0.05)
            [[completed]] = await (await conn.execute("SELECT completed_count FROM commandbus.batch")).fetchall()


async def reliable_send(dsn: str, size: int) -> Measured:
    async with AsyncConnectionPool(dsn, min_size=1, max_size=20) as pool:
        bus = _import("commandbus").CommandBus(pool)
        for n in range(WARM_UP):
            await bus.send(DOMAIN, "Nothing", uuid4(), {"n": n})
        with timed(dsn) as lap:
            for n in range(size):
                await bus.send(DOMAIN, "Nothing", uuid4(), {"n": n})
    return Measured(size, lap.seconds, lap.client_cpu, lap.server_cpu)


PGQUEUER: dict[str, Any] = {"migrated": False, "needs": ("pgqueuer", "asyncpg", "uvloop"), "uvloop": True}
RELIABLE: dict[str, Any] = {"migrated": False, "needs": ("commandbus", "pgmq")}

CASES = [
    Case("pgqueuer", "create", "enqueue", pgqueuer_create, prepare=pgqueuer_install, **PGQUEUER),
    Case("pgqueuer", "drain", "drain", pgqueuer_drain, prepare=pgqueuer_fill, **PGQUEUER),
    Case(
        "pgqueuer",
        "drain-2",
        "drain, 2 processes",
        pgqueuer_drain_together,
        prepare=pgqueuer_fill,
        work=pgqueuer_drain_when_told,
        **PGQUEUER,
    ),
    Case("pgqueuer", "send", "enqueue one", pgqueuer_send, prepare=pgqueuer_install, extent="sends", **PGQUEUER),
    Case(
        "pgqueuer",
        "latency",
        "enqueue to start",
        pgqueuer_latency,
        prepare=pgqueuer_install,
        work=pgqueuer_stamp_until_told,
        extent="samples",
        **PGQUEUER,
    ),
    Case("reliable-cmd", "create", "create_batch", reliable_create, prepare=reliable_install, most=5000, **RELIABLE),
    Case("reliable-cmd", "drain", "worker", reliable_drain, prepare=reliable_fill, most=2000, **RELIABLE),
    Case("reliable-cmd", "send", "send", reliable_send, prepare=reliable_install, extent="sends", most=500, **RELIABLE),
]

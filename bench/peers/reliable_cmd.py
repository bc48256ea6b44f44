"""reliable-cmd on PGMQ, which PyPI's pgmq brings as plain SQL.

Its own migration leaves out two columns that it uses, and it was written for a PGMQ whose `read` had fewer columns;
both are mended here. Callbacks live in the process that created the batch, so that process is its worker too.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any
from uuid import uuid4

import psycopg
from commandbus import (  # type: ignore[import, unused-ignore]
    BatchCommand,
    CommandBus,
    HandlerRegistry,
    SendRequest,
    Worker,
)
from commandbus.setup import get_schema_sql  # type: ignore[import, unused-ignore]
from pgmq.install import install_pgmq_from_sql  # type: ignore[import, unused-ignore]
from psycopg_pool import AsyncConnectionPool

from bench.peers import talk

DOMAIN = "bench"
CONCURRENCY = 10
CONNECTIONS = 20
PGMQ_READ = """
    ALTER FUNCTION pgmq.read(text, integer, integer, jsonb) RENAME TO read_newer;
    CREATE FUNCTION pgmq.read(queue text, visibility integer, quantity integer)
        RETURNS TABLE (msg_id bigint, read_ct integer, enqueued_at timestamptz, vt timestamptz, message jsonb)
        LANGUAGE sql AS $$
            SELECT m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message FROM pgmq.read_newer($1, $2, $3) AS m $$;
"""


async def install(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        install_pgmq_from_sql(conn=conn)
        conn.commit()
        conn.execute(get_schema_sql().replace("CREATE EXTENSION IF NOT EXISTS pgmq;", ""))
        conn.execute("ALTER TABLE commandbus.batch ADD COLUMN batch_type text NOT NULL DEFAULT 'COMMAND'")
        conn.execute("ALTER TABLE commandbus.batch ADD COLUMN failed_count integer NOT NULL DEFAULT 0")
        conn.execute(PGMQ_READ.encode())
        conn.execute("SELECT pgmq.create(%s)", [f"{DOMAIN}__commands"])


async def send(dsn: str) -> None:
    inputs: list[Any] = []

    async def make(count: int) -> None:
        inputs[:] = [SendRequest(DOMAIN, "Nothing", uuid4(), {"n": n}) for n in range(count)]

    async def enqueue(_: int) -> None:
        await bus.send_batch(inputs)

    async def one_by_one(count: int) -> None:
        for n in range(count):
            await bus.send(DOMAIN, "Nothing", uuid4(), {"n": n})

    async def stamp(_: int) -> tuple[float, float]:
        called = time.monotonic()
        await bus.send(DOMAIN, "Stamp", uuid4(), {})
        return called, time.monotonic()

    async def left(_: int) -> int:
        async with pool.connection() as conn:
            found = await conn.execute("SELECT FROM commandbus.command WHERE status <> 'COMPLETED' LIMIT 1")
            return found.rowcount

    async with AsyncConnectionPool(dsn, min_size=1, max_size=CONNECTIONS) as pool:
        bus = CommandBus(pool)
        await talk.answer({"make": make, "enqueue": enqueue, "send": one_by_one, "stamp": stamp, "left": left})


async def work(dsn: str) -> None:
    registry = HandlerRegistry()
    batch_commands: list[Any] = []

    async def run(handled: talk.Handled, drain: bool) -> None:
        async def nothing(command: Any, context: Any) -> dict[str, Any]:
            handled.count += 1
            return {}

        async def stamp(command: Any, context: Any) -> dict[str, Any]:
            talk.stamp()
            return {}

        registry.handler(DOMAIN, "Nothing")(nothing)
        registry.handler(DOMAIN, "Stamp")(stamp)
        await Worker(pool, DOMAIN, registry).run(concurrency=CONCURRENCY)

    async def make(count: int) -> None:
        batch_commands[:] = [BatchCommand("Nothing", uuid4(), {"n": n}) for n in range(count)]

    async def batch(_: int) -> None:
        async def on_complete(batch: Any) -> None:
            talk.callback()

        await CommandBus(pool).create_batch(DOMAIN, batch_commands, on_complete=on_complete)

    async with AsyncConnectionPool(dsn, min_size=5, max_size=CONNECTIONS) as pool:
        await talk.work(run, {"make": make, "batch": batch})


if __name__ == "__main__":
    asyncio.run({"install": install, "send": send, "work": work}[sys.argv[1]](sys.argv[2]))

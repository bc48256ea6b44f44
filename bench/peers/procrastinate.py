"""Procrastinate as its guide recommends: psycopg with a pool, batch_defer, and a worker that runs many at a time."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from procrastinate import App, PsycopgConnector  # type: ignore[import, unused-ignore]

from bench.peers import talk

CHUNK = 1_000
CONCURRENCY = 20


def _app(dsn: str, handled: talk.Handled) -> tuple[Any, Any, Any]:
    app = App(connector=PsycopgConnector(conninfo=dsn, min_size=4, max_size=CONCURRENCY + 2))

    async def nothing(n: int) -> None:
        handled.count += 1

    async def stamp() -> None:
        talk.stamp()

    return app, app.task(name="nothing")(nothing), app.task(name="stamp")(stamp)


async def install(dsn: str) -> None:
    app, *_ = _app(dsn, talk.Handled())
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def send(dsn: str) -> None:
    app, nothing, stamping = _app(dsn, talk.Handled())
    inputs: list[dict[str, Any]] = []

    async def make(count: int) -> None:
        inputs[:] = [{"n": n} for n in range(count)]

    async def enqueue(_: int) -> None:
        for start in range(0, len(inputs), CHUNK):
            await nothing.batch_defer_async(*inputs[start : start + CHUNK])

    async def one_by_one(count: int) -> None:
        for n in range(count):
            await nothing.defer_async(n=n)

    async def stamp(_: int) -> tuple[float, float]:
        called = time.monotonic()
        await stamping.defer_async()
        return called, time.monotonic()

    async def left(_: int) -> int:
        unfinished = "SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing') LIMIT 1"
        return len(await app.connector.execute_query_all_async(unfinished))

    async with app.open_async():
        await talk.answer({"make": make, "enqueue": enqueue, "send": one_by_one, "stamp": stamp, "left": left})


async def work(dsn: str) -> None:
    async def run(handled: talk.Handled, drain: bool) -> None:
        app, *_ = _app(dsn, handled)
        async with app.open_async():
            await app.run_worker_async(concurrency=CONCURRENCY, wait=not drain, install_signal_handlers=False)

    await talk.work(run)


if __name__ == "__main__":
    asyncio.run({"install": install, "send": send, "work": work}[sys.argv[1]](sys.argv[2]))

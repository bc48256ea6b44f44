"""PgQueuer as its guide recommends for short jobs: asyncpg, uvloop, its autovacuum settings and large batches."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import asyncpg  # type: ignore[import, unused-ignore]
import uvloop  # type: ignore[import, unused-ignore]
from pgqueuer import PgQueuer  # type: ignore[import, unused-ignore]
from pgqueuer.db import AsyncpgDriver  # type: ignore[import, unused-ignore]
from pgqueuer.queries import Queries  # type: ignore[import, unused-ignore]
from pgqueuer.types import QueueExecutionMode  # type: ignore[import, unused-ignore]

from bench.peers import talk

CHUNK = 10_000
BATCH = 1_000


async def install(dsn: str) -> None:
    queries = Queries(await _driver(dsn))
    await queries.install()
    await queries.optimize_autovacuum()


async def send(dsn: str) -> None:
    driver = await _driver(dsn)
    queries = Queries(driver)
    payloads: list[bytes | None] = []

    async def make(count: int) -> None:
        payloads[:] = [b'{"n":%d}' % n for n in range(count)]

    async def enqueue(_: int) -> None:
        for start in range(0, len(payloads), CHUNK):
            chunk = payloads[start : start + CHUNK]
            await queries.enqueue(["nothing"] * len(chunk), chunk, [0] * len(chunk))

    async def one_by_one(count: int) -> None:
        for n in range(count):
            await queries.enqueue("nothing", b'{"n":%d}' % n)

    async def stamp(_: int) -> tuple[float, float]:
        called = time.monotonic()
        await queries.enqueue("stamp", b"{}")
        return called, time.monotonic()

    async def left(_: int) -> int:
        return len(await driver.fetch("SELECT FROM pgqueuer LIMIT 1"))

    await talk.answer({"make": make, "enqueue": enqueue, "send": one_by_one, "stamp": stamp, "left": left})


async def work(dsn: str) -> None:
    queue = PgQueuer(await _driver(dsn))

    async def run(handled: talk.Handled, drain: bool) -> None:
        async def nothing(job: Any) -> None:
            handled.count += 1

        async def stamp(job: Any) -> None:
            talk.stamp()

        queue.entrypoint("nothing")(nothing)
        queue.entrypoint("stamp")(stamp)
        mode = QueueExecutionMode.drain if drain else QueueExecutionMode.continuous
        await queue.run(batch_size=BATCH, mode=mode, dequeue_timeout=timedelta(seconds=1 if drain else 30))

    await talk.work(run)


async def _driver(dsn: str) -> Any:
    return AsyncpgDriver(await asyncpg.connect(dsn))


if __name__ == "__main__":
    uvloop.run({"install": install, "send": send, "work": work}[sys.argv[1]](sys.argv[2]))

"""arq with what its worker class documents for throughput: many jobs at a time, a short poll, and no results kept."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import uvloop  # type: ignore[import, unused-ignore]
from arq import create_pool, func  # type: ignore[import, unused-ignore]
from arq.connections import RedisSettings  # type: ignore[import, unused-ignore]
from arq.worker import Worker  # type: ignore[import, unused-ignore]

from bench.peers import talk

AT_ONCE = 100
POLL = 0.01
CONCURRENCY = 100
READ = 1_000


async def _pool(url: str) -> Any:
    return await create_pool(RedisSettings.from_dsn(url))


async def install(url: str) -> None:
    await (await _pool(url)).flushall()


async def send(url: str) -> None:
    pool = await _pool(url)
    inputs: list[int] = []

    async def make(count: int) -> None:
        inputs[:] = range(count)

    async def enqueue(_: int) -> None:
        for start in range(0, len(inputs), AT_ONCE):
            await asyncio.gather(*(pool.enqueue_job("nothing", n) for n in inputs[start : start + AT_ONCE]))

    async def one_by_one(count: int) -> None:
        for n in range(count):
            await pool.enqueue_job("nothing", n)

    async def stamp(_: int) -> tuple[float, float]:
        called = time.monotonic()
        await pool.enqueue_job("stamp")
        return called, time.monotonic()

    async def left(_: int) -> int:
        return int(await pool.zcard(pool.default_queue_name))

    await talk.answer({"make": make, "enqueue": enqueue, "send": one_by_one, "stamp": stamp, "left": left})


async def work(url: str) -> None:
    pool = await _pool(url)

    async def run(handled: talk.Handled, drain: bool) -> None:
        async def nothing(ctx: Any, n: int) -> None:
            handled.count += 1

        async def stamp(ctx: Any) -> None:
            talk.stamp()

        worker = Worker(
            [func(nothing, name="nothing"), func(stamp, name="stamp")],
            redis_pool=pool,
            handle_signals=False,
            max_jobs=CONCURRENCY,
            queue_read_limit=READ,
            poll_delay=POLL,
            keep_result=0,
            log_results=False,
        )
        await worker.async_run()

    await talk.work(run)


if __name__ == "__main__":
    uvloop.run({"install": install, "send": send, "work": work}[sys.argv[1]](sys.argv[2]))

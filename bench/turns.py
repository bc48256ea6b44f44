"""How soon a small batch starts: on an idle system, and behind a large backlog that is being drained."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial

import psycopg

from bench.case import Helper, Measured, heard, helpers, percentile, say
from bench.clock import timed
from bench.ours import DOMAIN, SHORTEST, WARM_UP, commands, our_case
from busload import BatchCommand, Command, CommandBus, HandlerContext, Worker

SMALL = 5
"""Commands of the small batch."""
SAMPLES = 200


async def first_start(dsn: str, size: int, *, metric: str, processes: int) -> Measured:
    """From the commit of a batch of 5, when `create_batch` returns, to the first line of the first of its handlers.

    First on an idle system, then while the same workers drain a backlog.
    """
    async with helpers(f"busload/{metric}", dsn, size, count=processes) as workers, CommandBus(dsn) as bus:
        starts: asyncio.Queue[float] = asyncio.Queue()
        listening = [asyncio.create_task(_listen(worker, starts)) for worker in workers]
        idle = await _samples(bus, starts)
        await bus.create_batch(DOMAIN, commands(size))
        with timed(dsn) as lap:
            behind = await _samples(bus, starts)
        _expect_backlog(dsn)
        for task in listening:
            task.cancel()
    facts = {f"idle_p{percent}_ms": 1000 * percentile(idle, percent) for percent in (50, 95)}
    for percent in (50, 95):
        facts[f"times_idle_p{percent}"] = percentile(behind, percent) / percentile(idle, percent)
    return lap.measured(SAMPLES, latencies=behind, facts=facts)


async def _listen(worker: Helper, starts: asyncio.Queue[float]) -> None:
    while True:
        starts.put_nowait(float(await worker.hear(600)))


async def _samples(bus: CommandBus, starts: asyncio.Queue[float]) -> Sequence[float]:
    taken = []
    for _ in range(WARM_UP + SAMPLES):
        await asyncio.sleep(random.uniform(0.005, 0.015))
        await bus.create_batch(DOMAIN, [BatchCommand("Stamp")] * SMALL)
        committed = time.monotonic()
        started = [await starts.get() for _ in range(SMALL)]
        taken.append(max(min(started) - committed, SHORTEST))
    return taken[WARM_UP:]


def _expect_backlog(dsn: str) -> None:
    """Samples that were taken after the backlog had gone would say nothing."""
    with psycopg.connect(dsn) as conn:
        [[waiting]] = conn.execute("SELECT count(*) FROM busload.queue").fetchall()
    assert waiting, "The backlog was gone before the last sample was taken. Choose a larger --many."


async def drain_and_stamp(dsn: str, size: int, *, seconds: float) -> None:
    async def work(command: Command, ctx: HandlerContext) -> None:
        if seconds:
            await asyncio.sleep(seconds)

    async def stamp(command: Command, ctx: HandlerContext) -> None:
        say(time.monotonic())

    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nothing")(work)
        bus.handler(DOMAIN, "Stamp")(stamp)
        worker = Worker(bus)
        running = asyncio.create_task(worker.run())
        await heard()
        worker.stop()
        await running


CASES = [
    our_case(
        metric,
        f"first start behind a backlog, {title}",
        partial(first_start, metric=metric, processes=processes),
        work=partial(drain_and_stamp, seconds=seconds),
        extent="many",
        rounds=1,
        seconds=600,
    )
    for metric, title, processes, seconds in (
        ("turns", "1 process", 1, 0.0),
        ("turns-2", "2 processes", 2, 0.0),
        ("turns-5ms", "1 process, 5 ms each", 1, 0.005),
        ("turns-2-5ms", "2 processes, 5 ms each", 2, 0.005),
    )
]

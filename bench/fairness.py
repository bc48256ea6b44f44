"""How soon a small batch starts that comes while a worker drains a large one."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from functools import partial

import psycopg

from bench.case import Case, Helper, Measured, heard, helpers, say
from bench.clock import timed
from bench.ours import DOMAIN, SHORTEST, WARM_UP, Sent, commands, nothing, our_case
from busload import BatchCommand, Command, CommandBus, HandlerContext, Worker

FEW = 5
"""Commands of a small batch."""

SAMPLES = 150

CALL = 0.005
"""Seconds that a handler waits for somebody, where it does."""


async def fill_backlog(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus:
        await bus.create_batch(DOMAIN, commands(size))


async def first_start(dsn: str, size: int, *, metric: str, behind: bool) -> Measured:
    """From the commit of a batch of five to the first line of its first handler, one batch after the other.

    `left` is how many commands of the large batch still waited after the last sample.
    """
    async with helpers(f"busload/{metric}", dsn, size) as [worker], CommandBus(dsn) as bus:
        await bus.list_batches(DOMAIN)
        worker.say("go")
        for _ in range(WARM_UP):
            await _once(bus, worker)
        taken: list[Sent] = []
        with timed(dsn) as lap:
            while len(taken) < SAMPLES:
                await asyncio.sleep(random.uniform(0.005, 0.015))
                taken.append(await _once(bus, worker))
        left = _waiting(dsn)
    assert bool(left) is behind, f"{left} commands waited at the end"
    from_commit = [max(one.started - one.committed, SHORTEST) for one in taken]
    facts = {
        "from_call_p50_ms": 1000 * statistics.median(one.started - one.called for one in taken),
        "left": left,
    }
    return lap.measured(SAMPLES, latencies=from_commit, facts=facts)


async def _once(bus: CommandBus, worker: Helper) -> Sent:
    called = time.monotonic()
    await bus.create_batch(DOMAIN, [BatchCommand("Stamp") for _ in range(FEW)])
    committed = time.monotonic()
    return Sent(called, committed, min([float(await worker.hear()) for _ in range(FEW)]))


def _waiting(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("SELECT coalesce(sum(hi - lo + 1), 0)::bigint FROM busload.queue").fetchone()
    assert row is not None
    return int(row[0])


async def work(dsn: str, size: int, *, call: float = 0.0) -> None:
    """Run a worker from the first line that is heard to the end of the input."""

    async def stamp(command: Command, ctx: HandlerContext) -> None:
        say(time.monotonic())

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await asyncio.sleep(call)

    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Stamp")(stamp)
        bus.handler(DOMAIN, "Nothing")(wait if call else nothing)
        await heard()
        worker = Worker(bus)
        running = asyncio.create_task(worker.run())
        await heard()
        worker.stop()
        await running


def _case(metric: str, title: str, *, behind: bool, call: float = 0.0) -> Case:
    return our_case(
        metric,
        title,
        partial(first_start, metric=metric, behind=behind),
        prepare=fill_backlog if behind else None,
        work=partial(work, call=call),
        extent="many",
        rounds=3,
        seconds=300,
    )


CASES = [
    _case("first-start-idle", "first start of 5, nothing else waits", behind=False),
    _case("first-start-behind", "first start of 5 behind many", behind=True),
    _case("first-start-behind-calls", "first start of 5 behind many calls of 5 ms", behind=True, call=CALL),
]

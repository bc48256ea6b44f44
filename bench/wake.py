"""What a single send costs while many workers are idle, and what these workers cost while nothing is sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial

import psycopg

from bench.case import Case, Helper, Measured, heard, helpers, say
from bench.clock import timed
from bench.ours import DOMAIN, SHORTEST, WARM_UP, Sent, our_case
from busload import Command, CommandBus, HandlerContext, Worker
from busload.settings import WorkerSettings

IN_A_PROCESS = 10
"""Workers of one process at most: as many processes as workers would need the memory of a large machine."""

WHEN_WOKEN = WorkerSettings(poll_every=timedelta(minutes=10), sweep_every=timedelta(minutes=10))
"""What workers do by themselves is not to be counted for what is sent to them."""

AT_REST = 12.0
"""Seconds after which workers have come to rest, and every session has reported its transactions."""

IDLE_FOR = 30.0
"""Seconds in which the transactions of idle workers are counted."""

HINTS = 100
"""Notifications that nobody wants: they show how many sessions PostgreSQL wakes for each."""


async def wake(dsn: str, samples: int, *, workers: int) -> Measured:
    """From the commit of a send to the first line of its handler, one send after the other.

    Up to release 18, PostgreSQL wakes each session that listens to anything whenever it delivers a notification, and
    counts that as a transaction. No client takes part in these: `sessions_woken` tells them apart from
    `transactions_per_send`.
    """
    key, processes = f"busload/wake-{workers}", _processes(workers)
    async with helpers(key, dsn, samples, count=processes) as crowd, CommandBus(dsn) as bus:
        for helper in crowd:
            assert await helper.hear() == "ready"
        starts = _Starts(crowd)
        for _ in range(WARM_UP):
            await _send(bus, starts)
        beside = await _transactions(dsn, lambda: asyncio.sleep(0)) / AT_REST
        woken = (await _transactions(dsn, lambda: _notify_nobody(dsn), beside) - HINTS) / HINTS
        taken: list[Sent] = []
        with timed(dsn) as lap:

            async def send_some() -> None:
                for _ in range(samples):
                    await asyncio.sleep(random.uniform(0.005, 0.015))
                    taken.append(await _send(bus, starts))

            sent = await _transactions(dsn, send_some, beside) / samples
        starts.close()
    facts = {"transactions_per_send": sent - woken, "sessions_woken": woken}
    return lap.measured(samples, latencies=[max(one.started - one.committed, SHORTEST) for one in taken], facts=facts)


async def idle(dsn: str, samples: int) -> Measured:
    """The transactions of a worker that nothing is sent to."""
    async with helpers("busload/idle", dsn, samples) as [helper]:
        assert await helper.hear() == "ready"
        with timed(dsn) as lap:
            counted = await _transactions(dsn, lambda: asyncio.sleep(IDLE_FOR)) - 1  # the one that counts
    return lap.measured(1, facts={"idle_transactions_per_second": counted / (IDLE_FOR + AT_REST)})


class _Starts:
    """The starts of handlers in any of these processes, one after the other."""

    def __init__(self, crowd: list[Helper]) -> None:
        self._heard: asyncio.Queue[float] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._hear(helper)) for helper in crowd]

    async def next(self) -> float:
        async with asyncio.timeout(60):
            return await self._heard.get()

    async def _hear(self, helper: Helper) -> None:
        while True:
            self._heard.put_nowait(float(await helper.hear(3600)))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _send(bus: CommandBus, starts: _Starts) -> Sent:
    called = time.monotonic()
    await bus.send(DOMAIN, "Stamp", None)
    return Sent(called, time.monotonic(), await starts.next())


async def _transactions(dsn: str, work: Callable[[], Awaitable[None]], beside: float = 0.0) -> float:
    """The transactions of some work, without those that there are `beside` it in every second."""
    await asyncio.sleep(AT_REST)
    before, began = _committed(dsn), time.monotonic()
    await work()
    await asyncio.sleep(AT_REST)
    return _committed(dsn) - before - beside * (time.monotonic() - began)


async def _notify_nobody(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for n in range(HINTS):
            conn.execute(f"SELECT pg_notify('bench_nobody', '{n}')")
            await asyncio.sleep(0.01)


def _committed(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


async def work(dsn: str, size: int, *, workers: int = 1, settings: WorkerSettings | None = None) -> None:
    """Run this process's share of the workers until the input ends."""

    async def stamp(command: Command, ctx: HandlerContext) -> None:
        say(time.monotonic())

    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Stamp")(stamp)
        crowd = [Worker(bus, settings=settings) for _ in range(workers)]
        running = [asyncio.create_task(worker.run()) for worker in crowd]
        say("ready")
        await heard()
        for worker in crowd:
            worker.stop()
        await asyncio.gather(*running)


def _processes(workers: int) -> int:
    return -(-workers // IN_A_PROCESS)


def _case(workers: int) -> Case:
    return our_case(
        f"wake-{workers}",
        f"commit to start, {workers} idle {'worker' if workers == 1 else 'workers'}",
        partial(wake, workers=workers),
        work=partial(work, workers=workers // _processes(workers), settings=WHEN_WOKEN),
        extent="samples",
        rounds=3,
    )


CASES = [
    _case(1),
    _case(12),
    _case(50),
    our_case("idle", "a worker that nothing is sent to", idle, work=work, extent="samples", rounds=1),
]

"""What busload does."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import psycopg

from bench.case import Case, Measured, heard, helpers, say
from bench.clock import timed
from busload import BatchCommand, Command, CommandBus, ConcurrencyLimit, HandlerContext, Worker

DOMAIN = "bench"
our_case = partial(Case, "busload")
WARM_UP = 20
SHORTEST = 1e-6
"""Seconds: a handler can start before its sender has heard of the commit."""


def commands(count: int) -> list[BatchCommand]:
    return [BatchCommand("Nothing", data={"n": n}) for n in range(count)]


async def nothing(command: Command, ctx: HandlerContext) -> None:
    """The handler of every drain: what is left is the price of the bus."""


async def fill(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus:
        await bus.create_batch(DOMAIN, commands(size))


async def create(dsn: str, size: int) -> Measured:
    batch = commands(size)
    async with CommandBus(dsn) as bus:
        await bus.list_batches(DOMAIN)  # connected, and the schema is checked
        with timed(dsn) as lap:
            await bus.create_batch(DOMAIN, batch)
    expect(dsn, "SELECT count(*) FROM busload.command", size)
    return lap.measured(size)


async def drain(
    dsn: str, size: int, *, concurrency: int | None = None, limit: ConcurrencyLimit | None = None
) -> Measured:
    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nothing", concurrency_limit=limit)(nothing)
        worker = Worker(bus, concurrency=concurrency)
        with timed(dsn) as lap:
            settled = await worker.drain()
    assert settled == size, f"settled {settled} of {size}"
    expect_completed(dsn)
    return lap.measured(size)


async def drain_together(dsn: str, size: int, *, metric: str = "drain-2") -> Measured:
    async with helpers(f"busload/{metric}", dsn, size, count=2) as both:
        for helper in both:
            assert await helper.hear() == "ready"
        with timed(dsn) as lap:
            for helper in both:
                helper.say("go")
            settled = [int(await helper.hear(600)) for helper in both]
    assert sum(settled) == size, f"settled {settled} of {size}"
    expect_completed(dsn)
    return lap.measured(size)


async def drain_when_told(dsn: str, size: int, *, concurrency: int | None = None) -> None:
    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nothing")(nothing)
        await bus.list_batches(DOMAIN)
        say("ready")
        if await heard():
            say(await Worker(bus, concurrency=concurrency).drain())


async def send(dsn: str, size: int, *, senders: int = 1) -> Measured:
    async with CommandBus(dsn) as bus:
        for _ in range(WARM_UP):
            await bus.send(DOMAIN, "Nothing", {"n": 0})
        numbers = iter(range(size))

        async def sender() -> None:
            for n in numbers:
                await bus.send(DOMAIN, "Nothing", {"n": n})

        with timed(dsn) as lap:
            await asyncio.gather(*(sender() for _ in range(senders)))
    expect(dsn, "SELECT count(*) FROM busload.command", size + WARM_UP)
    return lap.measured(size)


async def fill_one_by_one(dsn: str, size: int) -> None:
    """Each is a load of one."""
    async with CommandBus(dsn) as bus:
        for n in range(size):
            await bus.send(DOMAIN, "Nothing", {"n": n})


async def latency(dsn: str, samples: int) -> Measured:
    """From the commit, when `send` returns, to the first line of the handler in another, idle process."""
    async with helpers("busload/latency", dsn, samples) as [worker], CommandBus(dsn) as bus:

        async def once() -> Sent:
            called = time.monotonic()
            await bus.send(DOMAIN, "Stamp", None)
            return Sent(called, time.monotonic(), float(await worker.hear()))

        return await latencies(dsn, samples, once)


@dataclass(frozen=True, slots=True)
class Sent:
    """When a send was called, when it returned, and when its handler started."""

    called: float
    committed: float
    started: float


async def latencies(dsn: str, samples: int, once: Callable[[], Awaitable[Sent]]) -> Measured:
    """Send one at a time, with a pause in which both sides come to rest.

    What counts is the time from the commit. A sender that is slow to return makes that look short, so the time from the
    call is told as well.
    """
    for _ in range(WARM_UP):
        await once()
    taken = []
    with timed(dsn) as lap:
        for _ in range(samples):
            await asyncio.sleep(random.uniform(0.005, 0.015))
            taken.append(await once())
    from_commit = [max(one.started - one.committed, SHORTEST) for one in taken]
    facts = {"from_call_p50_ms": 1000 * statistics.median(one.started - one.called for one in taken)}
    return lap.measured(samples, latencies=from_commit, facts=facts)


async def stamp_until_told(dsn: str, size: int) -> None:
    async def stamp(command: Command, ctx: HandlerContext) -> None:
        say(time.monotonic())

    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Stamp")(stamp)
        bus.handler(DOMAIN, "Nothing")(nothing)
        worker = Worker(bus)
        running = asyncio.create_task(worker.run())
        await heard()
        worker.stop()
        await running


async def batch_with_callback(dsn: str, size: int) -> Measured:
    """From the call of `create_batch` to the first line of its durable callback, with one idle worker process."""
    batch = commands(size)
    async with helpers("busload/batch", dsn, size) as [worker], CommandBus(dsn) as bus:
        await bus.send(DOMAIN, "Stamp", None)
        await worker.hear()
        await asyncio.sleep(0.3)
        with timed(dsn) as lap:
            began = time.monotonic()
            await bus.create_batch(DOMAIN, batch, on_complete=BatchCommand("Stamp"))
            seconds = float(await worker.hear(600)) - began
    return Measured(size, seconds, lap.client_cpu, lap.server_cpu)


def expect_completed(dsn: str) -> None:
    expect(dsn, "SELECT count(*) FROM busload.batch WHERE status <> 'COMPLETED'", 0)


def expect(dsn: str, query: str, wanted: int) -> None:
    """A run that lost something has no rate."""
    with psycopg.connect(dsn) as conn:
        [[found]] = conn.execute(query.encode()).fetchall()
    assert found == wanted, f"{query}: found {found}, wanted {wanted}"


CASES = [
    our_case("create", "create_batch", create),
    our_case("drain", "drain, 1 process", drain, prepare=fill),
    our_case("drain-1000", "drain, 1 process of concurrency 1,000", partial(drain, concurrency=1000), prepare=fill),
    our_case("drain-2", "drain, 2 processes", drain_together, prepare=fill, work=drain_when_told),
    our_case(
        "drain-2-1000",
        "drain, 2 processes of concurrency 1,000",
        partial(drain_together, metric="drain-2-1000"),
        prepare=fill,
        work=partial(drain_when_told, concurrency=1000),
    ),
    our_case("send", "send, one after the other", send, extent="sends"),
    our_case("send-10", "send, ten at a time", partial(send, senders=10), extent="sends"),
    our_case("singles", "sent one by one, drained", drain, prepare=fill_one_by_one, extent="singles"),
    our_case("latency", "commit to start", latency, work=stamp_until_told, extent="samples"),
    our_case("batch", "batch with callback", batch_with_callback, work=stamp_until_told, extent="batch"),
]

"""Single events in, bulk calls out: beside the same events as single commands, and with few or many that wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import psycopg

from bench.case import Measured
from bench.clock import timed
from bench.ours import DOMAIN, commands, expect, our_case
from busload import Chunk, Command, CommandBus, Group, HandlerContext, Worker
from busload.buffers import Buffer
from busload.postgres.own_connection import OwnAsyncConnection

EVENTS = "bench_events"
SIZE = 1000
CLAIMS = 10
"""Groups that are claimed of a backlog: all of a small one."""


def buffer(bus: CommandBus) -> Buffer:
    return bus.buffer(EVENTS, size=SIZE, max_age=timedelta(hours=1))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many statements this process sends in the block."""
    execute, answer, seen = psycopg.AsyncCursor.execute, OwnAsyncConnection.answer, {"statements": 0}

    async def count(*statement: Any, **options: Any) -> Any:
        seen["statements"] += 1
        return await execute(*statement, **options)

    async def count_too(*statement: Any) -> Any:
        seen["statements"] += 1
        return await answer(*statement)

    with patch.object(psycopg.AsyncCursor, "execute", count), patch.object(OwnAsyncConnection, "answer", count_too):
        yield seen


async def fill_buffer(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus:
        events = buffer(bus)
        for start in range(0, size, 10 * SIZE):
            await events.add_many([{"n": n} for n in range(start, min(size, start + 10 * SIZE))])
        await events.flush()  # what is left over is no full group
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("VACUUM ANALYZE busload.buffered")


async def fill_singles(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus:
        await bus.send_many(DOMAIN, commands(size))


async def drain_buffer(dsn: str, size: int) -> Measured:
    calls = items = 0
    async with CommandBus(dsn) as bus:
        events = buffer(bus)

        @events.handler()
        async def sync(group: Group, ctx: HandlerContext) -> None:
            nonlocal calls, items
            calls, items = calls + 1, items + len(group)

        with counted() as seen, timed(dsn) as lap:
            await Worker(bus).drain()
    assert items == size, f"{items} events of {size} were called for"
    expect(dsn, "SELECT count(*) FROM busload.buffered", 0)
    return lap.measured(size, facts={"calls": calls, **seen})


async def drain_singles(dsn: str, size: int, *, bulk: bool) -> Measured:
    """The same as commands: a call for each, or chunks of them for a bulk handler."""
    calls = 0
    async with CommandBus(dsn) as bus:
        if bulk:

            @bus.bulk_handler(DOMAIN, "Nothing", size=SIZE, max_wait=timedelta(seconds=2))
            async def push(chunk: Chunk, ctx: Any) -> None:
                nonlocal calls
                calls += 1
        else:

            @bus.handler(DOMAIN, "Nothing")
            async def nothing(command: Command, ctx: HandlerContext) -> None:
                nonlocal calls
                calls += 1

        with counted() as seen, timed(dsn) as lap:
            settled = await Worker(bus).drain()
    assert settled == size, f"settled {settled} of {size}"
    return lap.measured(size, facts={"calls": calls, **seen})


async def add(dsn: str, size: int) -> Measured:
    """One after the other, each a statement and a commit of its own."""
    async with CommandBus(dsn) as bus:
        events = buffer(bus)
        await bus.buffers.list()
        with timed(dsn) as lap:
            for n in range(size):
                await events.add({"n": n})
    expect(dsn, "SELECT count(*) FROM busload.buffered", size)
    return lap.measured(size)


async def add_many(dsn: str, size: int) -> Measured:
    payloads = [{"n": n} for n in range(size)]
    async with CommandBus(dsn) as bus:
        events = buffer(bus)
        await bus.buffers.list()
        with timed(dsn) as lap:
            await events.add_many(payloads)
    expect(dsn, "SELECT count(*) FROM busload.buffered", size)
    return lap.measured(size)


async def distribute(dsn: str, size: int) -> Measured:
    """How long it takes to look and to claim, per group, while so many wait."""
    taken: list[float] = []
    async with CommandBus(dsn) as bus:
        events = bus.buffer(EVENTS, size=min(SIZE, max(1, size // CLAIMS)), max_age=timedelta(hours=1), max_groups=1)
        with timed(dsn) as lap:
            for _ in range(CLAIMS):
                began = time.perf_counter()
                assert await events.distribute() == 1
                taken.append(time.perf_counter() - began)
                with psycopg.connect(dsn, autocommit=True) as conn:  # as if it ran at once: ready ones hold others back
                    conn.execute("DELETE FROM busload.queue")
    return lap.measured(CLAIMS, latencies=taken)


CASES = [
    our_case("buffer-singles", "events as single commands", partial(drain_singles, bulk=False), fill_singles),
    our_case("buffer-drain", "events through a buffer of 1,000", drain_buffer, fill_buffer),
    our_case("buffer-bulk", "commands to a bulk handler of 1,000", partial(drain_singles, bulk=True), fill_singles),
    our_case("buffer-add", "add to a buffer, one after the other", add, extent="sends"),
    our_case("buffer-add-many", "add to a buffer, many at once", add_many),
    our_case("buffer-few", "a group distributed with few waiting", distribute, fill_buffer, extent="few", rounds=3),
    our_case(
        "buffer-many",
        "a group distributed with many waiting",
        distribute,
        fill_buffer,
        extent="many",
        rounds=3,
        seconds=900,
    ),
]

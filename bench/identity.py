"""What task keys cost: to send, to hold, to drain, and to trace."""

from __future__ import annotations

import time

import psycopg

from bench.case import Measured
from bench.clock import timed
from bench.ours import DOMAIN, drain, expect, our_case
from busload import BatchCommand, CommandBus, Dedup
from busload.commands import search as report
from busload.commands.load import LOAD_SIZE
from busload.postgres.connection import PARAMETERS

CHUNK = 10 * LOAD_SIZE
TRACES = 50
ATTEMPTS = 100
TRACED = "bench:traced"


def keyed(count: int, start: int = 0) -> list[BatchCommand]:
    return [BatchCommand("Nothing", data={"n": n}, task_key=f"bench:{n:08}") for n in range(start, start + count)]


async def create_keyed(dsn: str, size: int, *, dedup: Dedup | None = None) -> Measured:
    batch = keyed(size)
    async with CommandBus(dsn) as bus:
        await bus.list_batches(DOMAIN)
        with timed(dsn) as lap:
            await bus.create_batch(DOMAIN, batch, dedup=dedup)
    expect(dsn, "SELECT count(*) FROM busload.command", size)
    return lap.measured(size)


async def create_once(dsn: str, size: int) -> Measured:
    return await create_keyed(dsn, size, dedup=Dedup())


async def fill_keyed(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus:
        await bus.create_batch(DOMAIN, keyed(size))


async def send_once(dsn: str, size: int) -> Measured:
    """One after the other, each a statement of its own."""
    async with CommandBus(dsn) as bus:
        await bus.list_batches(DOMAIN)
        with timed(dsn) as lap:
            for n in range(size):
                await bus.send(DOMAIN, "Nothing", {"n": n}, task_key=f"bench:{n}", dedup=Dedup())
    expect(dsn, "SELECT count(*) FROM busload.task", size)
    return lap.measured(size)


async def fill_traces(dsn: str, size: int) -> None:
    """Every command has a task key and a finished attempt; one has a hundred attempts."""
    async with CommandBus(dsn) as bus:
        for start in range(0, size, CHUNK):
            await bus.send_many(DOMAIN, keyed(min(CHUNK, size - start), start))
        await bus.send(DOMAIN, "Nothing", task_key=TRACED)
    attempt = """
        INSERT INTO busload.execution (command, attempt, outcome, lease_id, worker, started_at, finished_at, details)
        SELECT id, attempt, ({outcome})::busload.outcome, gen_random_uuid(), 0, now(), now(), '{{"message": "timeout"}}'
          FROM busload.command, generate_series(1, {attempts}) AS attempt WHERE task_key {which}
    """
    with psycopg.connect(dsn, autocommit=True) as conn:
        last = f"CASE WHEN attempt < {ATTEMPTS} THEN 'FAILED_ATTEMPT' ELSE 'COMPLETED' END"
        conn.execute(attempt.format(outcome="'COMPLETED'", attempts=1, which=f"<> '{TRACED}'").encode())
        conn.execute(attempt.format(outcome=last, attempts=ATTEMPTS, which=f"= '{TRACED}'").encode())
        conn.execute("TRUNCATE busload.queue")
        conn.execute("VACUUM ANALYZE")


async def trace(dsn: str, size: int) -> Measured:
    """How long the server takes for the chain of a hundred attempts among all the others."""
    statement = next(report.trace(TRACED, domain=None))
    taken: list[float] = []
    with psycopg.connect(dsn, autocommit=True, **PARAMETERS) as conn, timed(dsn) as lap:
        for _ in range(TRACES):
            began = time.perf_counter()
            found = conn.execute(statement.sql, statement.params).fetchall()  # type: ignore[union-attr]
            taken.append(time.perf_counter() - began)
            assert len(found) == ATTEMPTS, f"found {len(found)} of {ATTEMPTS} attempts"
    return lap.measured(TRACES, latencies=taken)


CASES = [
    our_case("create-keys", "create with task keys", create_keyed),
    our_case("create-once", "create with task keys, deduplicated", create_once),
    our_case("drain-keys", "drain with task keys", drain, prepare=fill_keyed),
    our_case("send-once", "send, deduplicated", send_once, extent="sends"),
    our_case(
        "trace", "trace of 100 attempts among many", trace, prepare=fill_traces, extent="many", rounds=1, seconds=900
    ),
]

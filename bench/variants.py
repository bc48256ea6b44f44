"""What changes busload's figures, and what must not: batches, payloads, failures, crowds, backlogs, disk and memory."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from bench.case import Measured, heard, helpers, say
from bench.clock import timed
from bench.ours import DOMAIN, commands, drain, expect, fill, our_case
from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    ConcurrencyLimit,
    HandlerContext,
    RetryPolicy,
    TransientCommandError,
    Worker,
)
from busload.commands import claim, rescue
from busload.commands.load import LOAD_SIZE
from busload.postgres.connection import PARAMETERS
from busload.sync.plan import perform

BATCHES = 1000
CHUNK = 10 * LOAD_SIZE
EACH_FAILING = 100
"""One command in so many fails."""

# -- batches -------------------------------------------------------------------------------------------------------


async def fill_without_batches(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus:
        await bus.send_many(DOMAIN, commands(size))


async def fill_many_batches(dsn: str, size: int) -> None:
    per_batch = max(1, size // BATCHES)
    async with CommandBus(dsn) as bus:
        for start in range(0, size, per_batch):
            await bus.create_batch(DOMAIN, commands(min(per_batch, size - start)))


# -- payloads ------------------------------------------------------------------------------------------------------


def payloads(count: int, length: int) -> list[BatchCommand]:
    """JSON of about that many bytes that does not compress, the same in every run."""
    source = random.Random(length)
    text = [base64.b64encode(source.randbytes(length)).decode()[: length - len('{"p":""}')] for _ in range(100)]
    return [BatchCommand("Nothing", data={"p": text[n % len(text)]}) for n in range(count)]


async def create_payloads(dsn: str, size: int, *, length: int) -> Measured:
    batch = payloads(size, length)
    async with CommandBus(dsn) as bus:
        await bus.list_batches(DOMAIN)
        with timed(dsn) as lap:
            await bus.create_batch(DOMAIN, batch)
    return lap.measured(size)


async def fill_payloads(dsn: str, size: int, *, length: int) -> None:
    async with CommandBus(dsn) as bus:
        await bus.create_batch(DOMAIN, payloads(size, length))


# -- failures ------------------------------------------------------------------------------------------------------


async def drain_failing(dsn: str, size: int, *, how: str) -> Measured:
    """One in a hundred is refused for good, or fails once and is tried again 50 ms later, or none fails."""
    ended, all_ended = 0, asyncio.Event()

    async def failing(command: Command, ctx: HandlerContext) -> None:
        nonlocal ended
        fails = command.data["n"] % EACH_FAILING == 0
        if fails and how == "retried" and ctx.attempt == 1:
            raise TransientCommandError("try again")
        ended += 1
        if ended == size:
            all_ended.set()
        if fails and how == "refused":
            raise BusinessRuleError("not this one")

    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nothing", retry=RetryPolicy(max_attempts=3, backoff=(0.05,)))(failing)
        worker = Worker(bus)
        with timed(dsn) as lap:
            running = asyncio.create_task(worker.run())
            await all_ended.wait()
            worker.stop()
            await running
    failed = -(-size // EACH_FAILING) if how == "refused" else 0
    expect(dsn, "SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'", size - failed)
    return lap.measured(size)


# -- a crowd of small workers --------------------------------------------------------------------------------------

PROCESSES = 4
WORKERS = 8
CONCURRENCY = 10


async def crowd(dsn: str, size: int, *, metric: str, batches: int) -> Measured:
    """32 small workers on commands that all appear at once: ten of one batch, ten of the next, and so on."""
    async with (
        helpers(f"busload/{metric}", dsn, size, count=PROCESSES) as processes,
        CommandBus(dsn) as bus,
        await psycopg.AsyncConnection.connect(dsn) as conn,
    ):
        for process in processes:
            assert await process.hear(120) == "ready"
        async with AsyncExitStack() as filling:
            batch = [
                await filling.enter_async_context(bus.open_batch(DOMAIN, checkpoint_size=CONCURRENCY, conn=conn))
                for _ in range(batches)
            ]
            for n in range(size):
                await batch[n // CONCURRENCY % batches].add("Nap", {"n": n})
        with timed(dsn) as lap:
            await conn.commit()
            await _all_complete(dsn)
    expect(dsn, "SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'", size)
    return lap.measured(size)


async def _all_complete(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        left = True
        while left:
            await asyncio.sleep(0.01)
            found = await conn.execute("SELECT FROM busload.batch WHERE completed_at IS NULL LIMIT 1")
            left = found.rowcount > 0


async def be_a_crowd(dsn: str, size: int) -> None:
    async def nap(command: Command, ctx: HandlerContext) -> None:
        await asyncio.sleep(0.001)

    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nap")(nap)
        workers = [Worker(bus, concurrency=CONCURRENCY) for _ in range(WORKERS)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        await asyncio.sleep(1)  # all of them have looked, and found nothing
        say("ready")
        await heard()
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)


# -- backlog -------------------------------------------------------------------------------------------------------

LIMIT = 100
CLAIMS = 50
WARM_UP = 3
SPLIT = """
    WITH taken AS (DELETE FROM busload.queue RETURNING *)
    INSERT INTO busload.queue ({columns})
    SELECT {values} FROM taken, generate_series(taken.lo, taken.hi) AS id
"""


async def fill_backlog(dsn: str, size: int, *, ones: bool = False) -> None:
    async with CommandBus(dsn) as bus:
        for start in range(0, size, CHUNK):
            await bus.send_many(DOMAIN, commands(min(CHUNK, size - start)))
    with psycopg.connect(dsn, autocommit=True) as conn:
        if ones:
            _split_loads(conn)
        conn.execute("VACUUM ANALYZE busload.queue")
        conn.execute("ANALYZE busload.command")


def _split_loads(conn: psycopg.Connection) -> None:
    """As if every command had been sent alone."""
    about = conn.execute("SELECT * FROM busload.queue LIMIT 0").description or []
    columns = [column.name for column in about]
    values = ["id" if name in ("lo", "hi") else f"taken.{name}" for name in columns]
    conn.execute(SPLIT.format(columns=", ".join(columns), values=", ".join(values)).encode())


async def claims(dsn: str, size: int) -> Measured:
    """What a claim of a hundred costs, one after the other, while the rest goes on waiting."""
    taken: list[float] = []
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=0, **PARAMETERS) as conn:
        conn.execute("SET plan_cache_mode = force_generic_plan")  # as a worker's connections
        conn.execute("SET jit = off")
        worker = perform(
            conn, rescue.register(name="bench", domains=[DOMAIN], concurrency=LIMIT, lease_for=timedelta(minutes=5))
        )
        asking = partial(claim.claim, worker=worker, domains=[DOMAIN], limit=LIMIT)
        for _ in range(WARM_UP):
            perform(conn, asking())
        with timed(dsn) as lap:
            for _ in range(min(CLAIMS, size // LIMIT - WARM_UP)):
                began = time.perf_counter()
                found = len(perform(conn, asking()).leased)
                taken.append(time.perf_counter() - began)
                assert found == LIMIT, f"claimed {found} of {LIMIT}"
    return lap.measured(len(taken) * LIMIT, latencies=taken)


# -- memory --------------------------------------------------------------------------------------------------------


def memory() -> tuple[float, float]:
    """What this process holds now, and the most it ever held, in MB."""
    status = Path("/proc/self/status").read_text()
    found = {name: int(kilobytes) / 1024 for name, kilobytes in re.findall(r"(VmRSS|VmHWM):\s+(\d+)", status)}
    return found["VmRSS"], found["VmHWM"]


async def drain_for_memory(dsn: str, size: int) -> Measured:
    """The worker's memory after a tenth of the commands, and after all of them."""
    handled, facts = 0, {}

    async def counted(command: Command, ctx: HandlerContext) -> None:
        nonlocal handled
        handled += 1
        if handled == max(1, size // 10):
            facts["tenth_mb"], facts["tenth_peak_mb"] = memory()

    async with CommandBus(dsn) as bus:
        bus.handler(DOMAIN, "Nothing")(counted)
        with timed(dsn) as lap:
            await Worker(bus).drain()
        facts["end_mb"], facts["peak_mb"] = memory()
    return lap.measured(size, facts=facts)


async def fill_for_memory(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus, bus.open_batch(DOMAIN, checkpoint_size=CHUNK) as batch:
        for n in range(size):
            await batch.add("Nothing", {"n": n})


async def stream(dsn: str, size: int) -> Measured:
    """`open_batch` with its defaults, fed by a loop that keeps nothing."""
    async with CommandBus(dsn) as bus:
        with timed(dsn) as lap:
            async with bus.open_batch(DOMAIN) as batch:
                for n in range(size):
                    await batch.add("Nothing", {"n": n})
    now, peak = memory()
    expect(dsn, "SELECT count(*) FROM busload.command", size)
    return lap.measured(size, facts={"end_mb": now, "peak_mb": peak})


# -- disk ----------------------------------------------------------------------------------------------------------


async def fill_small(dsn: str, size: int) -> None:
    async with CommandBus(dsn) as bus:
        await bus.create_batch(DOMAIN, [BatchCommand("Nothing", data={"i": 1}) for _ in range(size)])


async def drain_for_bytes(dsn: str, size: int) -> Measured:
    """What a finished command takes on the disk: all tables of history and their indexes, after a vacuum."""
    drained = await drain(dsn, size)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("VACUUM busload.command, busload.execution, busload.event")
        [taken] = conn.execute(
            "SELECT sum(pg_total_relation_size(name::regclass))"
            "  FROM unnest('{busload.command,busload.execution,busload.event}'::text[]) AS name"
        ).fetchone() or [0]
    return replace(drained, facts={"bytes": float(taken) / size})


LENGTHS = {"100b": (100, "100 B"), "1kb": (1_000, "1 kB"), "10kb": (10_000, "10 kB")}

BACKLOGS: dict[str, Any] = {"few": {"extent": "few"}, "many": {"extent": "many", "rounds": 1, "seconds": 600}}

CASES = [
    our_case("drain-unbatched", "drain without batches", drain, prepare=fill_without_batches),
    our_case("drain-1000-batches", "drain of 1,000 batches", drain, prepare=fill_many_batches),
    our_case(
        "drain-limited",
        "drain, a concurrency limit with a key per command",
        partial(drain, limit=ConcurrencyLimit(1, by="n")),
        prepare=fill,
    ),
    *(
        case
        for name, (length, title) in LENGTHS.items()
        for case in (
            our_case(
                f"create-{name}", f"create, payloads of {title}", partial(create_payloads, length=length), most=20_000
            ),
            our_case(
                f"drain-{name}",
                f"drain, payloads of {title}",
                drain,
                prepare=partial(fill_payloads, length=length),
                most=20_000,
            ),
        )
    ),
    *(
        our_case(f"drain-{how}", f"drain, {title}", partial(drain_failing, how=how), prepare=fill)
        for how, title in (("none", "none fails"), ("refused", "1 % break a rule"), ("retried", "1 % tried again"))
    ),
    *(
        our_case(metric, title, partial(crowd, metric=metric, batches=batches), work=be_a_crowd, extent="hot")
        for metric, title, batches in (
            ("crowd-1", "32 small workers, 1 batch", 1),
            ("crowd-32", "32 small workers, 32 batches", 32),
        )
    ),
    *(
        our_case(f"claim-{much}{name}", f"claim of 100{loads}, {much} waiting", claims, prepare=prepare, **how)
        for name, loads, prepare in (
            ("", "", fill_backlog),
            ("-ones", " loads of one", partial(fill_backlog, ones=True)),
        )
        for much, how in BACKLOGS.items()
    ),
    our_case("bytes", "bytes of a finished command", drain_for_bytes, prepare=fill_small),
    our_case(
        "memory", "memory of a worker", drain_for_memory, prepare=fill_for_memory, extent="many", rounds=1, seconds=900
    ),
    our_case("stream", "open_batch, streamed", stream, extent="many", rounds=1, seconds=600),
]

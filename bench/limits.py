"""What the machine allows: the same rows and round trips without a bus around them, in the same run."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import psycopg

from bench.case import Case, Measured, heard, helpers, say
from bench.clock import timed
from bench.ours import DOMAIN, Sent, expect, expect_completed, fill, latencies
from busload.commands import claim, rescue, settle
from busload.commands.execution import COMPLETED, Transition
from busload.commands.ids import new_id, new_ids
from busload.commands.load import POSITIONS
from busload.postgres.connection import PARAMETERS, Connection
from busload.sync.plan import perform

LOAD = 1000

COMMAND_COPY = """
    CREATE TABLE bare_command (LIKE busload.command INCLUDING ALL)
"""
COPY = """
    COPY bare_command (id, domain, command_id, command_type, data, batch_id, task_key, correlation_id, reply_to,
                       priority, max_attempts, run_at) FROM STDIN
"""
BARE = """
    CREATE TABLE bare_command (id bigint PRIMARY KEY, command_id uuid NOT NULL, command_type text NOT NULL, data json);
    CREATE TABLE bare_load (hi bigint PRIMARY KEY, lo bigint NOT NULL);
    CREATE TABLE bare_lease (lease_id uuid PRIMARY KEY, hi bigint NOT NULL, lo bigint NOT NULL);
    CREATE TABLE bare_execution (command bigint, attempt integer, outcome text NOT NULL, lease_id uuid NOT NULL,
                                 batch_id uuid NOT NULL, started_at timestamptz NOT NULL,
                                 finished_at timestamptz NOT NULL, PRIMARY KEY (command, attempt));
    CREATE TABLE bare_batch (batch_id uuid PRIMARY KEY, completed integer NOT NULL) WITH (fillfactor = 50);
"""
BARE_CLAIM = """
    WITH taken AS (
        DELETE FROM bare_load WHERE hi = (SELECT hi FROM bare_load ORDER BY hi LIMIT 1 FOR UPDATE SKIP LOCKED)
        RETURNING lo, hi
    ), leased AS (
        INSERT INTO bare_lease SELECT %(lease_id)s::uuid, hi, lo FROM taken
    )
    SELECT array_agg(c.id), array_agg(c.command_id), array_agg(c.command_type), array_agg(c.data::text)
      FROM taken JOIN bare_command AS c ON c.id BETWEEN taken.lo AND taken.hi
"""
BARE_COMPLETE = """
    WITH held AS (
        DELETE FROM bare_lease WHERE lease_id = %(lease_id)s::uuid RETURNING lease_id
    ), done AS (
        INSERT INTO bare_execution
        SELECT id, 1, 'COMPLETED', held.lease_id, %(batch_id)s::uuid, started_at, finished_at
          FROM held, unnest(%(ids)b::bigint[], %(started)b::timestamptz[], %(finished)b::timestamptz[])
                     AS o (id, started_at, finished_at)
        RETURNING command
    )
    UPDATE bare_batch SET completed = completed + (SELECT count(*) FROM done) WHERE batch_id = %(batch_id)s::uuid
"""


async def copy(dsn: str, size: int) -> Measured:
    """COPY of the rows that create_batch writes, into a table with the same columns and indexes."""
    batch_id = new_id()
    ids = [load * POSITIONS + n for load in range(size // LOAD + 1) for n in range(LOAD)][:size]
    rows = [
        (id, DOMAIN, command_id, "Nothing", f'{{"n":{id}}}', batch_id, None, None, None, 0, None, None)
        for id, command_id in zip(ids, new_ids(size), strict=True)
    ]
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(COMMAND_COPY)
        with timed(dsn) as lap, conn.cursor() as cursor, cursor.copy(COPY) as copying:
            for row in rows:
                copying.write_row(row)
    expect(dsn, "SELECT count(*) FROM bare_command", size)
    return lap.measured(size)


async def fill_bare(dsn: str, size: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(BARE.encode())
        conn.execute(
            "INSERT INTO bare_command SELECT n, gen_random_uuid(), 'Nothing', json_build_object('n', n)"
            " FROM generate_series(1, %s) AS n",
            [size],
        )
        conn.execute(
            "INSERT INTO bare_load SELECT least(lo + %s - 1, %s), lo FROM generate_series(1, %s, %s) AS lo",
            [LOAD, size, size, LOAD],
        )
        conn.execute("INSERT INTO bare_batch VALUES (%s, 0)", [UUID(int=1)])


async def claim_and_complete(dsn: str, size: int) -> Measured:
    """Two statements per thousand commands: lease and read them, record and count them. No handlers, no event loop."""
    done = 0
    with psycopg.connect(dsn, autocommit=True) as conn, conn.cursor(binary=True) as cursor, timed(dsn) as lap:
        while True:
            lease_id = new_id()
            [(ids, *_)] = cursor.execute(BARE_CLAIM.encode(), {"lease_id": lease_id}).fetchall()
            if ids is None:
                break
            now = [datetime.now(UTC)] * len(ids)
            parameters = {"lease_id": lease_id, "batch_id": UUID(int=1), "ids": ids, "started": now, "finished": now}
            cursor.execute(BARE_COMPLETE.encode(), parameters)
            done += len(ids)
    expect(dsn, "SELECT completed FROM bare_batch", size)
    return lap.measured(done)


async def statements(dsn: str, size: int, *, limit: int) -> Measured:
    """busload's own claim and settle on one connection, in turn and without handlers.

    A worker can be faster than that: it claims while it settles.
    """
    done = 0
    with psycopg.connect(dsn, autocommit=True, **PARAMETERS) as conn:
        conn.execute("SET plan_cache_mode = force_generic_plan")  # as a worker's connections
        worker = perform(
            conn, rescue.register(name="bench", domains=[DOMAIN], concurrency=limit, lease_for=timedelta(minutes=5))
        )
        with timed(dsn) as lap:
            while found := _claim_and_settle(conn, worker, limit):
                done += found
    assert done == size, f"settled {done} of {size}"
    expect_completed(dsn)
    return lap.measured(done)


def _claim_and_settle(conn: Connection, worker: int, limit: int) -> int:
    leased = perform(conn, claim.claim(worker=worker, domains=[DOMAIN], limit=limit)).leased
    if not leased:
        return 0
    now = time.monotonic()
    for one in leased:
        one.started = now
    return len(perform(conn, settle.settle([Transition(one, COMPLETED, finished=now) for one in leased], now=now)))


async def slots(dsn: str, size: int) -> Measured:
    """No database: a hundred slots fed by a queue, each command an awaited function."""
    waiting: asyncio.Queue[int] = asyncio.Queue()
    for n in range(size):
        waiting.put_nowait(n)
    done = 0

    async def nothing(n: int) -> None:
        nonlocal done
        done += 1

    async def slot() -> None:
        while not waiting.empty():
            await nothing(await waiting.get())

    with timed(dsn) as lap:
        await asyncio.gather(*(slot() for _ in range(100)))
    assert done == size
    return lap.measured(size)


async def insert(dsn: str, size: int) -> Measured:
    """One row per statement and commit, into a table indexed as ours."""
    rows = [(n, DOMAIN, command_id, "Nothing", f'{{"n":{n}}}') for n, command_id in enumerate(new_ids(size))]
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(COMMAND_COPY)
        with timed(dsn) as lap:
            for row in rows:
                conn.execute(
                    "INSERT INTO bare_command (id, domain, command_id, command_type, data) VALUES (%s, %s, %s, %s, %s)",
                    row,
                )
    return lap.measured(size)


async def notify(dsn: str, samples: int) -> Measured:
    """One row with its notification, heard in another process: nothing is claimed."""
    async with (
        helpers("limit/latency", dsn, samples) as [listener],
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
    ):
        await conn.execute("CREATE TABLE bare (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data text)")
        assert await listener.hear() == "ready"

        async def once() -> Sent:
            called = time.monotonic()
            await conn.execute(
                "WITH sent AS (INSERT INTO bare (data) VALUES ('{}') RETURNING n)"
                " SELECT pg_notify('bare', n::text) FROM sent"
            )
            return Sent(called, time.monotonic(), float(await listener.hear()))

        return await latencies(dsn, samples, once)


async def listen_until_told(dsn: str, samples: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute("LISTEN bare")

        async def listen() -> None:
            async for _ in conn.notifies():
                say(time.monotonic())

        listening = asyncio.create_task(listen())
        say("ready")
        await heard()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


CASES = [
    Case("limit", "create", "COPY into the same table", copy),
    Case("limit", "drain", "bare claim and complete, 1,000 at a time", claim_and_complete, prepare=fill_bare),
    Case("statements", "drain", "busload's statements, 100 at a time", partial(statements, limit=100), prepare=fill),
    Case(
        "statements",
        "drain-1000",
        "busload's statements, 1,000 at a time",
        partial(statements, limit=1000),
        prepare=fill,
    ),
    Case("asyncio", "drain", "bare asyncio, 100 slots fed by a queue", slots),
    Case("limit", "send", "INSERT and commit", insert, extent="sends"),
    Case("limit", "latency", "INSERT with NOTIFY", notify, work=listen_until_told, extent="samples"),
]

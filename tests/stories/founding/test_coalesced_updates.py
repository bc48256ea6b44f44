"""The worked examples of a batch manager: one claim per worker, one update for many results, a stop that flushes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from busload import Command, HandlerContext, PermanentCommandError, WorkerSettings
from busload.worker import Coalescer
from tests.given import Database, Given

MAX_BATCH_SIZE, MAX_BATCH_INTERVAL, CHANNEL_SIZE = 100, timedelta(seconds=5), 500
UPDATE = """
    UPDATE tasks
    SET
        status = updates.status,
        completed_at = updates.completed_at,
        error = updates.error,
        response_time = updates.response_time,
        cache_status = updates.cache_status
    FROM (
        SELECT
            unnest(%s::text[]) AS id,
            unnest(%s::text[]) AS status,
            unnest(%s::timestamptz[]) AS completed_at,
            unnest(%s::text[]) AS error,
            unnest(%s::bigint[]) AS response_time,
            unnest(%s::text[]) AS cache_status
    ) AS updates
    WHERE tasks.id = updates.id
"""
"""The statement of the document, word by word; only its parameters are those of psycopg."""


@dataclass(frozen=True, slots=True)
class TaskUpdate:
    id: str
    status: str
    completed_at: datetime | None = None
    error: str | None = None
    response_time: int | None = None
    cache_status: str | None = None


@pytest.fixture
def tasks(database: Database) -> Database:
    database.rows(
        "CREATE TABLE tasks (id text PRIMARY KEY, status text, completed_at timestamptz, error text,"
        " response_time bigint, cache_status text)"
    )
    database.rows("INSERT INTO tasks (id, status) SELECT 't' || n, 'running' FROM generate_series(1, 250) AS n")
    return database


async def test_many_updates_are_one_statement_each_hundred(
    tasks: Database, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says batch size, rows updated and duration; what stays empty is NULL."""
    caplog.set_level(logging.DEBUG, "busload")

    async def flush(updates: Sequence[TaskUpdate]) -> int:
        rows = [(u.id, u.status, u.completed_at, u.error, u.response_time, u.cache_status) for u in updates]
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            return (await conn.execute(UPDATE, [list(column) for column in zip(*rows, strict=True)])).rowcount

    manager: Coalescer[TaskUpdate] = Coalescer(
        flush, max_size=MAX_BATCH_SIZE, max_interval=MAX_BATCH_INTERVAL, capacity=CHANNEL_SIZE, name="tasks"
    )
    for n in range(1, 251):
        await manager.put(TaskUpdate(f"t{n}", "completed", datetime.now(UTC), response_time=n))
    await manager.put(TaskUpdate("unknown", "failed", error="no such task"))
    assert await manager.close() == []
    assert (
        tasks.value("SELECT count(*) FROM tasks WHERE status = 'completed' AND error IS NULL AND cache_status IS NULL")
        == 250
    )
    assert (manager.stats.flushes, manager.stats.taken, manager.stats.items) == (3, 251, 250)
    said = re.findall(r"The tasks flushed (\d+) items in [\d.]+ ms and wrote (\d+)", caplog.text)
    assert said == [("100", "100"), ("100", "100"), ("51", "50")]


async def test_each_worker_claims_other_commands_and_results_share_transactions(given: Given) -> None:
    """The pool owns the manager: success and failure go through it, and stopping the pool flushes the rest."""

    async def crawl(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] % 10 == 0:
            raise PermanentCommandError("404")

    seen = given.handler("Crawl", crawl)
    batch_id = await given.batch(commands=250, command_type="Crawl")
    workers = [given.worker(concurrency=25) for _ in range(2)]
    assert sum(await asyncio.gather(*(worker.drain() for worker in workers))) == 250
    assert sorted(command.data["n"] for command in seen) == list(range(250))
    settled = [worker.stats.settlement for worker in workers]
    assert sum(one.items for one in settled) == 250 and sum(one.flushes for one in settled) < 250 / 5
    batch = await given.batch_now(batch_id)
    assert (batch.completed_count, batch.in_troubleshooting_count) == (225, 25)


async def test_stopping_flushes_what_is_held_and_the_constants_are_accepted(tasks: Database) -> None:
    """Nothing is lost by a graceful stop, though the interval is long."""
    settings = WorkerSettings(flush_size=MAX_BATCH_SIZE, flush_every=MAX_BATCH_INTERVAL)
    assert settings.flush_every == MAX_BATCH_INTERVAL
    written: list[int] = []

    async def flush(items: Sequence[int]) -> None:
        written.extend(items)

    manager: Coalescer[int] = Coalescer(flush, max_size=100, max_interval=MAX_BATCH_INTERVAL, capacity=CHANNEL_SIZE)
    for n in range(42):
        await manager.put(n)
    assert written == []
    await manager.close()
    assert written == list(range(42)) and manager.stats.flushes == 1

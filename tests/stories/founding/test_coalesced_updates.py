"""The worked examples of a batch manager: one claim per worker, one update for many results, a stop that flushes."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from busload import WorkerSettings
from busload.worker import Coalescer
from tests.given import Database, Given

MAX_BATCH_SIZE, MAX_BATCH_INTERVAL, CHANNEL_SIZE = 100, timedelta(seconds=5), 500
UPDATE = """
    UPDATE tasks SET status = u.status, completed_at = u.completed_at, error = u.error,
                     response_time = u.response_time, cache_status = u.cache_status
      FROM unnest(%s::text[], %s::text[], %s::timestamptz[], %s::text[], %s::bigint[], %s::text[])
           AS u (id, status, completed_at, error, response_time, cache_status)
     WHERE tasks.id = u.id
"""


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
    assert tasks.value("SELECT count(*) FROM tasks WHERE status = 'completed' AND error IS NULL") == 250
    assert (manager.stats.flushes, manager.stats.taken, manager.stats.items) == (3, 251, 250)
    said = re.findall(r"The tasks flushed (\d+) items in [\d.]+ ms and wrote (\d+)", caplog.text)
    assert said == [("100", "100"), ("100", "100"), ("51", "50")]


async def test_each_worker_claims_other_commands_and_results_share_transactions(given: Given) -> None:
    """The pool owns the manager: success and failure go through it."""
    given.handler()
    batch_id = await given.batch(commands=250)
    worker = given.worker()
    assert await worker.drain() == 250
    assert worker.stats.settlement.flushes < 250 / 5 and worker.stats.settlement.items == 250
    assert (await given.batch_now(batch_id)).completed_count == 250


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

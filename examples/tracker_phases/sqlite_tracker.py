"""A tracker of our own, as many teams have one: a table with a row per execution."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from busload import Execution
from busload.commands import ExecutionStatus

ATTEMPTS = 3

TABLE = """
CREATE TABLE IF NOT EXISTS task_tracker (
    task_id TEXT, execution_id TEXT PRIMARY KEY, queue TEXT, status TEXT, retry_count INTEGER DEFAULT 0,
    error TEXT, created_at TEXT
)
"""


class SqliteTracker:
    """Six methods, which a PhasedTracker calls beside its own."""

    def __init__(self, file: str) -> None:
        self._conn = sqlite3.connect(file, isolation_level=None, timeout=30, check_same_thread=False)
        self._conn.execute(TABLE)

    async def enqueue(self, task_id: str, execution_id: UUID, *, queue: str, metadata: dict[str, Any]) -> bool:
        """A task that is queued or runs is a duplicate."""
        done = self._conn.execute(
            "INSERT INTO task_tracker (task_id, execution_id, queue, status, created_at) SELECT ?, ?, ?, 'queued', ?"
            " WHERE NOT EXISTS (SELECT 1 FROM task_tracker WHERE task_id = ? AND status IN ('queued', 'processing'))",
            (task_id, str(execution_id), queue, datetime.now(UTC).isoformat(), task_id),
        )
        return done.rowcount == 1

    async def claim(self, task_id: str, execution_id: UUID | str) -> bool:
        """One of many workers gets it."""
        done = self._conn.execute(
            "UPDATE task_tracker SET status = 'processing'"
            " WHERE task_id = ? AND execution_id = ? AND status IN ('queued', 'failed')",
            (task_id, str(execution_id)),
        )
        return done.rowcount == 1

    async def complete(self, task_id: str, execution_id: UUID | str, result: Any) -> None:
        self._conn.execute("UPDATE task_tracker SET status = 'completed' WHERE execution_id = ?", (str(execution_id),))

    async def fail(self, task_id: str, execution_id: UUID | str, error: BaseException | str) -> str:
        """Tried again until it has failed three times."""
        [(status,)] = self._conn.execute(
            "UPDATE task_tracker SET retry_count = retry_count + 1, error = ?,"
            " status = CASE WHEN retry_count + 1 < ? THEN 'failed' ELSE 'dlq' END"
            " WHERE execution_id = ? RETURNING status",
            (str(error), ATTEMPTS, str(execution_id)),
        ).fetchall()
        return str(status)

    async def retry(self, task_id: str, execution_id: UUID) -> None:
        self._conn.execute(
            "INSERT INTO task_tracker (task_id, execution_id, queue, status, created_at)"
            " SELECT task_id, ?, queue, 'queued', ? FROM task_tracker WHERE task_id = ? AND status = 'dlq' LIMIT 1",
            (str(execution_id), datetime.now(UTC).isoformat(), task_id),
        )

    async def history(self, task_id: str) -> Sequence[Execution]:
        """In the form that busload has, so that pages and reports need not know which tracker answers."""
        rows = self._conn.execute(
            "SELECT execution_id, queue, status, retry_count, error, created_at FROM task_tracker"
            " WHERE task_id = ? ORDER BY created_at",
            (task_id,),
        )
        return [
            Execution(
                execution_id=UUID(id),
                task_key=task_id,
                command_id=UUID(id),
                queue=queue,
                attempt=retries + 1,
                status=ExecutionStatus(status),
                worker=None,
                enqueued_at=datetime.fromisoformat(created_at),
                started_at=None,
                finished_at=None,
                error=error,
                metadata={},
                retry_count=retries,
            )
            for id, queue, status, retries, error, created_at in rows
        ]

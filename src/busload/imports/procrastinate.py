"""Jobs of procrastinate that wait in the status `todo`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import psycopg
from psycopg.rows import tuple_row

from busload.commands.command import BatchCommand
from busload.errors import InvalidOperationError
from busload.imports.take_over import WaitingTask, command_id_of
from busload.postgres.connection import Connection
from busload.postgres.plan import execute
from busload.postgres.statements import statements
from busload.sync.plan import perform

SQL = statements(__name__)


class Procrastinate:
    """The jobs of procrastinate in a database. If `joins`, commands are sent in the transaction that removes the jobs.

    The argument names become the keys of `data`. A `queueing_lock` becomes the task key. A `lock` is kept as the header
    `procrastinate-lock`: for a concurrency limit, put it into the data, or read the header in the handler.
    """

    name = "procrastinate"

    def __init__(self, dsn: str, *, joins: bool, queues: Sequence[str] = ()) -> None:
        self._dsn, self._joins, self._queues = dsn, joins, list(queues)

    def pages(self, size: int, *, locked: bool) -> Iterator[AbstractContextManager[_Page]]:
        with psycopg.connect(self._dsn, row_factory=tuple_row) as conn:
            [(found,)] = perform(conn, execute(SQL.has_jobs))
            if not found:
                raise InvalidOperationError(
                    "There is no table procrastinate_jobs in this database. Name that of procrastinate by --source."
                )
            last = 0
            while True:
                conn.rollback()
                about = {"after": last, "queues": self._queues, "limit": size}
                rows = perform(conn, execute(SQL.lock_waiting if locked else SQL.waiting, **about))
                if not rows:
                    return
                last = rows[-1][0]
                yield self._page(conn, rows)

    @contextmanager
    def _page(self, conn: Connection, rows: Sequence[tuple[object, ...]]) -> Iterator[_Page]:
        tasks = [self._task(*row) for row in rows]
        yield _Page(tasks, conn if self._joins else None, conn)
        conn.commit()

    def _task(self, *row: object) -> WaitingTask:
        id, deferred, queue, name, priority, lock, queueing_lock, args, scheduled_at = row
        command = BatchCommand(
            str(name),
            command_id_of(self.name, f"{id}:{deferred}"),  # another database has a job of the same number
            args,
            task_key=None if queueing_lock is None else str(queueing_lock),
            priority=max(-32768, min(32767, int(str(priority)))),
            run_at=scheduled_at,  # type: ignore[arg-type]
            headers=None if lock is None else {"procrastinate-lock": str(lock)},
        )
        return WaitingTask(str(id), str(queue), str(name), command, handle=id)


@dataclass(frozen=True, slots=True)
class _Page:
    tasks: Sequence[WaitingTask]
    conn: Connection | None
    source: Connection

    def remove(self, tasks: Sequence[WaitingTask]) -> int:
        rows = perform(self.source, execute(SQL.cancel, ids=[task.handle for task in tasks]))
        return len(rows)

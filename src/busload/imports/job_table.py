"""Jobs that wait in a table of PostgreSQL, page by page: each page is read, and removed, in one transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from busload.errors import InvalidOperationError
from busload.imports.take_over import WaitingTask
from busload.postgres.connection import Connection
from busload.postgres.plan import execute
from busload.sync.plan import perform


@dataclass(frozen=True, slots=True)
class JobStatements:
    """What is asked of a table of jobs."""

    has_jobs: bytes
    waiting: bytes
    """The next jobs after an id, by `names` and `limit`; the id is their first column."""
    lock_waiting: bytes
    cancel: bytes


class JobTable(ABC):
    """A source of jobs: each queue has its own statements, and says what a row of `waiting` means."""

    statements: JobStatements
    not_found: str
    """What to say if the table does not exist."""

    def __init__(self, dsn: str, *, joins: bool, names: Sequence[str]) -> None:
        self._dsn, self._joins, self._names = dsn, joins, list(names)

    @abstractmethod
    def task(self, *row: Any) -> WaitingTask:
        """The task that a row of `waiting` is."""

    def pages(self, size: int, *, locked: bool) -> Iterator[AbstractContextManager[JobPage]]:
        with psycopg.connect(self._dsn, row_factory=tuple_row) as conn:
            [(found,)] = perform(conn, execute(self.statements.has_jobs))
            if not found:
                raise InvalidOperationError(self.not_found)
            statement = self.statements.lock_waiting if locked else self.statements.waiting
            last = 0
            while True:
                conn.rollback()
                rows = perform(conn, execute(statement, after=last, names=self._names, limit=size))
                if not rows:
                    return
                last = rows[-1][0]
                yield self._page(conn, rows)

    @contextmanager
    def _page(self, conn: Connection, rows: Sequence[tuple[Any, ...]]) -> Iterator[JobPage]:
        tasks = [self.task(*row) for row in rows]
        yield JobPage(tasks, conn if self._joins else None, conn, self.statements.cancel)
        conn.commit()


def beyond_reach(time: str) -> str:
    """Why a job that is scheduled for a time after the year 9999 stays."""
    return f"It is scheduled for {time}, and a command waits until the year 9999 at most."


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, and the transaction in which they are removed."""

    tasks: Sequence[WaitingTask]
    conn: Connection | None
    source: Connection
    cancel: bytes

    def remove(self, tasks: Sequence[WaitingTask]) -> int:
        return len(perform(self.source, execute(self.cancel, ids=[task.handle for task in tasks])))

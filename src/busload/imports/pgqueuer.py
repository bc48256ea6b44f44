"""Jobs of PgQueuer that wait in the status `queued`."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from busload.commands.command import BatchCommand
from busload.commands.payload import PayloadRefusedError, decode_strict
from busload.errors import InvalidOperationError
from busload.imports.take_over import WaitingTask, command_id_of
from busload.postgres.connection import Connection
from busload.postgres.plan import execute
from busload.postgres.statements import statements
from busload.sync.plan import perform

SQL = statements(__name__)


class PgQueuer:
    """The jobs of PgQueuer in a database. If `joins`, commands are sent in the transaction that removes the jobs.

    A payload is bytes of any kind. What is JSON becomes `data`; other payloads stay, or become `{"base64": …}` if
    `in_base64`. A `dedupe_key` becomes the task key. Headers that are texts are kept.
    """

    name = "pgqueuer"

    def __init__(self, dsn: str, *, joins: bool, entrypoints: Sequence[str] = (), in_base64: bool = False) -> None:
        self._dsn, self._joins, self._entrypoints, self._in_base64 = dsn, joins, list(entrypoints), in_base64

    def pages(self, size: int, *, locked: bool) -> Iterator[AbstractContextManager[_Page]]:
        with psycopg.connect(self._dsn, row_factory=tuple_row) as conn:
            [(found,)] = perform(conn, execute(SQL.has_jobs))
            if not found:
                raise InvalidOperationError(
                    "There is no table pgqueuer in this database. Name that of PgQueuer as the argument DSN."
                )
            last = 0
            while True:
                conn.rollback()
                about = {"after": last, "entrypoints": self._entrypoints, "limit": size}
                rows = perform(conn, execute(SQL.lock_waiting if locked else SQL.waiting, **about))
                if not rows:
                    return
                last = rows[-1][0]
                yield self._page(conn, rows)

    @contextmanager
    def _page(self, conn: Connection, rows: Sequence[tuple[Any, ...]]) -> Iterator[_Page]:
        tasks = [self._task(*row) for row in rows]
        yield _Page(tasks, conn if self._joins else None, conn)
        conn.commit()

    def _task(
        self,
        id: int,
        created: str,
        entrypoint: str,
        priority: int,
        dedupe_key: str | None,
        payload: bytes | None,
        headers: Mapping[str, object] | None,
        run_at: datetime | None,
    ) -> WaitingTask:
        try:
            data = self._data(payload)
        except PayloadRefusedError as refused:
            problem = f"Its payload is not JSON: {refused} --base64 imports it as text."
            return WaitingTask(str(id), self.name, entrypoint, None, problem, id)
        command = BatchCommand(
            entrypoint,
            command_id_of(self.name, f"{id}:{created}"),  # another database has a job of the same number
            data,
            task_key=dedupe_key,
            priority=max(-32768, min(32767, priority)),
            run_at=run_at,
            headers={name: value for name, value in (headers or {}).items() if isinstance(value, str)} or None,
        )
        return WaitingTask(str(id), self.name, entrypoint, command, handle=id)

    def _data(self, payload: bytes | None) -> Any:
        if payload is None:
            return None
        try:
            return decode_strict(payload)
        except PayloadRefusedError:
            if not self._in_base64:
                raise
            return {"base64": base64.b64encode(payload).decode()}


@dataclass(frozen=True, slots=True)
class _Page:
    tasks: Sequence[WaitingTask]
    conn: Connection | None
    source: Connection

    def remove(self, tasks: Sequence[WaitingTask]) -> int:
        rows = perform(self.source, execute(SQL.cancel, ids=[task.handle for task in tasks]))
        return len(rows)

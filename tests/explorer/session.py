"""A connection that is given one statement at a time, and that nobody has to wait for while it waits for a lock."""

from __future__ import annotations

import select
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg.pq import Format, TransactionStatus
from psycopg.rows import tuple_row

from busload.postgres.plan import Script, Statement

OPTIONS = " ".join(
    f"-c {setting}"
    for setting in (
        "plan_cache_mode=force_generic_plan",
        "jit=off",
        "enable_seqscan=off",
        "synchronous_commit=off",
        "deadlock_timeout=20ms",
        "log_lock_waits=off",
    )
)
"""Statements are planned once, as in the sessions of a worker. Deadlocks are noticed soon."""

SHORTLY, LATER = 2, 20
"""Milliseconds after which somebody asks whether a statement waits for a lock, and asks again."""


class Session:
    """One connection to PostgreSQL."""

    def __init__(self, dsn: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True, options=OPTIONS, prepare_threshold=0)
        self.conn.prepared_max = 1000
        self.pid = self.conn.info.backend_pid
        self._socket = select.poll()
        self._socket.register(self.conn.fileno(), select.POLLIN)
        self._cursor: psycopg.Cursor[Any] | None = None
        self._running: Generator[int, int, None] | None = None
        self._wants = 0
        self._error: Exception | None = None

    def close(self) -> None:
        self.conn.close()

    @property
    def in_transaction(self) -> bool:
        return self.conn.info.transaction_status is not TransactionStatus.IDLE

    def start(self, step: Statement | Script) -> None:
        """Send a statement; `ended` says whether its answer has come."""
        self._cursor = cursor = psycopg.Cursor(self.conn, row_factory=tuple_row)
        self._error = None
        if isinstance(step, Script):
            running = cursor._execute_gen(step.sql, prepare=False)
        else:
            cursor.format = Format.BINARY if step.binary else Format.TEXT
            running = cursor._execute_gen(step.sql, step.params)
        self._running = running
        self._resume(None)

    def ended(self, milliseconds: int) -> bool:
        """Wait so long for the answer."""
        while self._running is not None:
            if self._wants & 2:
                self._resume(2)
            elif self._socket.poll(milliseconds):
                self._resume(1)
            else:
                return False
        return True

    def answer(self) -> list[Any]:
        """The rows of the statement that has ended; its error is raised."""
        assert self._running is None and self._cursor is not None
        if self._error is not None:
            raise self._error
        return self._cursor.fetchall() if self._cursor.rownumber is not None else []

    def perform(self, sql: bytes) -> None:
        """A statement that waits for nobody."""
        self.conn.execute(sql, prepare=False)

    def _resume(self, ready: int | None) -> None:
        assert self._running is not None
        try:
            self._wants = int(next(self._running) if ready is None else self._running.send(ready))
        except StopIteration:
            self._running = None
        except psycopg.Error as error:
            self._running, self._error = None, error

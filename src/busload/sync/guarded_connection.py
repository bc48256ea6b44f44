"""Made from busload.postgres.guarded_connection by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from busload.errors import InvalidOperationError
from busload.postgres.guarded_connection import (
    BEGIN,
    CLEAN,
    COMMIT,
    _refuse,
    _refuse_ended,
    _refuse_uncommitted,
    _send,
)
from busload.sync.connection import OwnConnection


class GuardedConnection(OwnConnection):
    """Refuses to end its transaction while it is guarded."""

    guarded = False
    clean = True
    """Whether nothing is left of the last handler."""
    takes_statements = False
    """The handler may have changed how values are read, and how rows are made: a cursor of psycopg knows."""

    def begin_guarded(self) -> None:
        """Begin a transaction, and forget how the last handler wanted its rows, values and notices."""
        self.clean = False
        self.cursor_factory, self.server_cursor_factory = psycopg.Cursor, psycopg.ServerCursor
        self.row_factory = tuple_row
        self._adapters = None
        self._notice_handlers.clear()
        self._notify_handlers.clear()
        self.execute(BEGIN, prepare=False)
        self.guarded = True

    def commit_guarded(self) -> None:
        self.guarded = False
        with self.lock:
            results = self.wait(_send(self.pgconn, COMMIT if self.pooled else f"{COMMIT}; {CLEAN}"))
        self.clean = _refuse_uncommitted(results, self.info.encoding)

    def rollback_guarded(self) -> None:
        """Undo what was not committed. A connection that would not be as new for the next handler is closed."""
        self.guarded = False
        try:
            if self.is_usable and not self.clean:
                self.rollback()
                with suppress(psycopg.Error):
                    if not self.pooled:
                        psycopg.Cursor(self).execute(CLEAN, prepare=False)
                    self.clean = True
        finally:
            if not (self.clean and self.is_usable):
                self.pgconn.finish()

    @property
    def is_usable(self) -> bool:
        """Whether psycopg is done with its statements. A block that was never left would go on in the next handler."""
        return (
            self.pgconn.transaction_status
            in (TransactionStatus.IDLE, TransactionStatus.INTRANS, TransactionStatus.INERROR)
            and self.pgconn.pipeline_status == PipelineStatus.OFF
            and self._pipeline is None
            and not self._num_transactions
        )

    def commit(self) -> None:
        _refuse(self.guarded, "commit")
        super().commit()

    def rollback(self) -> None:
        _refuse(self.guarded, "rollback")
        super().rollback()

    def close(self) -> None:
        _refuse(self.guarded, "close")
        super().close()

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """What every statement passes through, whoever sends it."""
        _refuse_ended(self.guarded, self.pgconn.transaction_status)
        answer = super().wait(*args, **kwargs)
        _refuse_ended(self.guarded, self.pgconn.transaction_status)
        return answer


def refuse_unfinished(conn: GuardedConnection) -> None:
    """A handler must be done with its connection when it returns: else its answers would be taken for ours."""
    if not conn.closed and not conn.is_usable:
        raise InvalidOperationError(
            "The handler returned inside of a block of its connection, such as conn.pipeline() or cursor.copy(), so "
            "what it wrote in ctx.transaction() was rolled back. Leave the block first."
        )

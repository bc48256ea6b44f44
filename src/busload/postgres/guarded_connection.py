"""The connection that a handler gets: it writes as any other, and only busload ends its transaction.

PostgreSQL refuses every COMMIT in between, also one in SQL text or by a driver of the handler's own
(`schema/0013_guard.sql`). The connection itself refuses what it can see coming, before anything is lost, and goes on in
no other transaction. The next handler gets it as if it were new, or another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row

from busload.errors import InvalidOperationError
from busload.postgres.own_connection import OwnAsyncConnection

BEGIN = """BEGIN ISOLATION LEVEL READ COMMITTED;
         INSERT INTO busload.guard DEFAULT VALUES RETURNING pg_catalog.set_config('busload.guard', ctid::text, true)"""
COMMIT = "SELECT busload.release_transaction(); COMMIT"
CLEAN = """RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; CLOSE ALL; UNLISTEN *; DISCARD TEMP; DISCARD SEQUENCES;
         SELECT pg_catalog.pg_advisory_unlock_all()"""
"""What a handler may have set for the session is undone. This is all of DISCARD ALL but its slow part, which is to
forget the plans and the prepared statements; and it may travel with the COMMIT, without a round trip of its own."""

ENDED = (
    "The handler ended ctx.transaction() itself, so what it wrote there was rolled back. "
    "Return from the handler, and busload commits; raise, and busload rolls back."
)


class GuardedAsyncConnection(OwnAsyncConnection):
    """Refuses to end its transaction while it is guarded."""

    guarded = False
    clean = True
    """Whether nothing is left of the last handler."""
    takes_statements = False
    """The handler may have changed how values are read, and how rows are made: a cursor of psycopg knows."""

    async def begin_guarded(self) -> None:
        """Begin a transaction, and forget how the last handler wanted its rows, values and notices."""
        self.clean = False
        self.cursor_factory, self.server_cursor_factory = psycopg.AsyncCursor, psycopg.AsyncServerCursor
        self.row_factory = tuple_row
        self._adapters = None
        self._notice_handlers.clear()
        self._notify_handlers.clear()
        await self.execute(BEGIN, prepare=False)
        self.guarded = True

    async def commit_guarded(self) -> None:
        self.guarded = False
        async with self.lock:
            results = await self.wait(_send(self.pgconn, COMMIT if self.pooled else f"{COMMIT}; {CLEAN}"))
        self.clean = _refuse_uncommitted(results, self.info.encoding)

    async def rollback_guarded(self) -> None:
        """Undo what was not committed. A connection that would not be as new for the next handler is closed."""
        self.guarded = False
        try:
            if self.is_usable and not self.clean:
                await self.rollback()
                with suppress(psycopg.Error):
                    if not self.pooled:
                        await psycopg.AsyncCursor(self).execute(CLEAN, prepare=False)
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

    async def commit(self) -> None:
        _refuse(self.guarded, "commit")
        await super().commit()

    async def rollback(self) -> None:
        _refuse(self.guarded, "rollback")
        await super().rollback()

    async def close(self) -> None:
        _refuse(self.guarded, "close")
        await super().close()

    async def wait(self, *args: Any, **kwargs: Any) -> Any:
        """What every statement passes through, whoever sends it."""
        _refuse_ended(self.guarded, self.pgconn.transaction_status)
        answer = await super().wait(*args, **kwargs)
        _refuse_ended(self.guarded, self.pgconn.transaction_status)
        return answer


def refuse_unfinished(conn: GuardedAsyncConnection) -> None:
    """A handler must be done with its connection when it returns: else its answers would be taken for ours."""
    if not conn.closed and not conn.is_usable:
        raise InvalidOperationError(
            "The handler returned inside of a block of its connection, such as conn.pipeline() or cursor.copy(), so "
            "what it wrote in ctx.transaction() was rolled back. Leave the block first."
        )


def _send(pgconn: PGconn, text: str) -> Any:
    pgconn.send_query(text.encode())
    return (yield from generators.execute(pgconn))


def _refuse_uncommitted(results: Sequence[PGresult], encoding: str) -> bool:
    """Returns whether all that was sent with the COMMIT was done as well: what failed after it has undone nothing."""
    failed = next((n for n, result in enumerate(results) if result.status == ExecStatus.FATAL_ERROR), None)
    if failed is None:
        return True
    if failed >= COMMIT.count(";") + 1:
        return False
    error = psycopg.errors.error_from_result(results[failed], encoding)
    if isinstance(error, psycopg.errors.InvalidTransactionTermination):
        raise InvalidOperationError(ENDED) from error
    raise error


def _refuse(guarded: bool, what: str) -> None:
    if guarded:
        raise InvalidOperationError(
            f"{what}() on the connection of ctx.transaction(): it commits together with the completion of the command. "
            "Return from the handler, and busload commits; raise, and busload rolls back. For a part that may fail, "
            "use a savepoint: conn.transaction(), or in an ORM a nested transaction."
        )


def _refuse_ended(guarded: bool, status: int) -> None:
    if guarded and status == TransactionStatus.IDLE:
        raise InvalidOperationError(ENDED)

"""The connection that a handler gets: it writes as any other, and only busload ends its transaction.

PostgreSQL refuses every COMMIT in between, also one in SQL text or by a driver of the handler's own
(`schema/0013_guard.sql`). The connection itself refuses what it can see coming, before anything is lost, and goes on in
no other transaction.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from busload.errors import InvalidOperationError
from busload.store.connection import OwnAsyncConnection, OwnConnection

BEGIN = """BEGIN ISOLATION LEVEL READ COMMITTED;
         INSERT INTO busload.guard DEFAULT VALUES RETURNING pg_catalog.set_config('busload.guard', ctid::text, true)"""
COMMIT = "SELECT busload.release_transaction(); COMMIT"

ENDED = (
    "The handler ended ctx.transaction() itself, so what it wrote there was rolled back. "
    "Return from the handler, and busload commits; raise, and busload rolls back."
)


class GuardedConnection(OwnConnection):
    """Refuses to end its transaction while it is guarded."""

    guarded = False

    def begin_guarded(self) -> None:
        self.execute(BEGIN, prepare=False)
        self.guarded = True

    def commit_guarded(self) -> None:
        self.guarded = False
        try:
            self.execute(COMMIT, prepare=False)
        except psycopg.errors.InvalidTransactionTermination as error:
            raise InvalidOperationError(ENDED) from error

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


class GuardedAsyncConnection(OwnAsyncConnection):
    """Refuses to end its transaction while it is guarded."""

    guarded = False

    async def begin_guarded(self) -> None:
        await self.execute(BEGIN, prepare=False)
        self.guarded = True

    async def commit_guarded(self) -> None:
        self.guarded = False
        try:
            await self.execute(COMMIT, prepare=False)
        except psycopg.errors.InvalidTransactionTermination as error:
            raise InvalidOperationError(ENDED) from error

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

"""Takes part in a transaction of asyncpg."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar

import asyncpg
import psycopg
from psycopg.pq import DiagnosticField as Field

from busload.errors import InvalidOperationError
from busload.integrations.other_driver import CLOSED, FAILED, error_of_server, numbered
from busload.postgres.connection import refuse_version
from busload.postgres.plan import IN_UTF8, Copy, Plan, Savepoint, Script, Statement, Step, other_encoding

T = TypeVar("T")

NO_TRANSACTION = (
    "The connection given as conn is in no transaction, so there is nothing that the call could join. "
    "Call within `async with conn.transaction():`, or pass no conn."
)
_COPY = re.compile(r"COPY (\w+)\.(\w+) ?\(([\w, ]+)\) ?FROM STDIN ?\(FORMAT binary\);?")
_FACTS = {
    Field.MESSAGE_PRIMARY: "message",
    Field.MESSAGE_DETAIL: "detail",
    Field.MESSAGE_HINT: "hint",
    Field.CONTEXT: "context",
    Field.SCHEMA_NAME: "schema_name",
    Field.TABLE_NAME: "table_name",
    Field.COLUMN_NAME: "column_name",
    Field.CONSTRAINT_NAME: "constraint_name",
}

numbered = cache(numbered)


async def join(conn: object) -> AsyncpgConnection | None:
    known = isinstance(conn, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy)
    return AsyncpgConnection.join(conn) if known else None


def join_in_threads(conn: object) -> None:
    """Nothing that blocks can wait for asyncpg."""


class AsyncpgConnection:
    """Performs plans in the open transaction of a connection."""

    blocks: Literal[False] = False

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    @classmethod
    def join(cls, conn: Any) -> AsyncpgConnection:
        """Refuse a connection that has no transaction, is closed, or belongs to another event loop."""
        try:
            if conn.is_closed():
                raise InvalidOperationError(CLOSED)
            if getattr(conn, "_loop", None) not in (None, asyncio.get_running_loop()):
                raise InvalidOperationError(
                    "The connection given as conn belongs to another event loop, which alone can wait for it. "
                    "Call from the event loop in which it was opened, or pass one of this event loop."
                )
            if not conn.is_in_transaction():
                raise InvalidOperationError(NO_TRANSACTION)
        except asyncpg.InterfaceError as error:  # it was given back to its pool
            raise InvalidOperationError(f"{CLOSED} asyncpg says: {error}") from error
        return cls(conn)

    def refuse_server(self) -> None:
        version = self._conn.get_server_version()
        refuse_version(10_000 * version.major + version.minor, self._conn.get_settings().server_encoding)

    async def perform(self, plan: Plan[T]) -> T:
        try:
            step = next(plan)
            while True:
                try:
                    answer = await self._answer(step)
                except Exception as error:
                    step = plan.throw(_translated(error))
                else:
                    step = plan.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    async def _answer(self, step: Step) -> Any:
        match step:
            case Statement(sql, params):
                statement = numbered(sql)
                rows = await self._conn.fetch(statement.sql, *statement.values(params))
                return [tuple(row) for row in rows]
            case Savepoint(plan):
                return await self._in_savepoint(plan)
            case Script(sql):
                await self._conn.execute(sql.decode())
            case Copy(sql, blocks):
                back = other_encoding(getattr(self._conn.get_settings(), "client_encoding", None))
                if back:
                    await self._conn.execute(IN_UTF8.decode())
                await self._copy(sql, blocks)
                if back:
                    await self._conn.execute(back.decode())
        return []

    async def _in_savepoint(self, plan: Plan[T]) -> T:
        """asyncpg's own transaction() refuses a transaction that was begun by a statement; this takes part in any."""
        try:
            await self._conn.execute("SAVEPOINT busload")
        except asyncpg.InFailedSQLTransactionError:
            raise InvalidOperationError(FAILED) from None
        try:
            result = await self.perform(plan)
        except BaseException:
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):  # the first error says more
                await self._conn.execute("ROLLBACK TO SAVEPOINT busload; RELEASE SAVEPOINT busload")
            raise
        await self._conn.execute("RELEASE SAVEPOINT busload")
        return result

    async def _copy(self, sql: bytes, blocks: Iterable[bytes]) -> None:
        into = _COPY.fullmatch(sql.decode())
        assert into is not None, "asyncpg writes the statement itself, so it must be of the form that we know"
        schema, table, listed = into.groups()
        columns = listed.replace(" ", "").split(",")
        await self._conn.copy_to_table(
            table, schema_name=schema, columns=columns, source=_awaited(blocks), format="binary"
        )


async def _awaited(blocks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for block in blocks:
        yield block


def _translated(error: Exception) -> Exception:
    """The error as plans know it, if it is one of asyncpg's."""
    if isinstance(error, asyncpg.PostgresError):
        facts = {field: getattr(error, name, None) for field, name in _FACTS.items()}
        return error_of_server(error, error.sqlstate or "XX000", facts)
    translated: Exception
    if isinstance(error, asyncpg.DataError):
        translated = psycopg.DataError(str(error))
    elif isinstance(error, asyncpg.InterfaceError):
        translated = InvalidOperationError(f"asyncpg cannot use the connection given as conn: {error}")
    elif isinstance(error, TimeoutError):
        translated = psycopg.errors.QueryCanceled("asyncpg's command_timeout is over")
    elif isinstance(error, OSError):
        translated = psycopg.OperationalError(f"the connection is lost: {error}")
    else:
        return error
    translated.__cause__ = error
    return translated

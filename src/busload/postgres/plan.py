"""Database work written once, for connections that wait and connections that are awaited.

A plan is a generator that yields steps and is sent their rows; it never sees a connection. Only `perform_async` waits,
and `perform` of the sync face, which is made from it. An error of the database is thrown into the plan at the step that
caused it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg.pq import Format, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import tuple_row
from psycopg.waiting import Ready, Wait

from busload.postgres.grants import say_who_may
from busload.postgres.own_connection import OwnAsyncConnection

T = TypeVar("T")
MOST_UNSENT = 1024 * 1024
"""Bytes of a COPY that libpq may hold: it keeps all that the server has not taken, and moves it with every send."""

Row: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement with its parameters; answered with its rows.

    The rows come in binary form, which is cheaper. If they come as text, a value of an unknown type is its text.
    """

    sql: bytes
    params: dict[str, Any]
    binary: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """Several statements without parameters; answered with no rows."""

    sql: bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks of bytes that go into a table by COPY, in the format it names; answered with no rows."""

    sql: bytes
    blocks: Iterable[bytes]


@dataclass(frozen=True, slots=True)
class Savepoint:
    """A plan that may fail without spoiling the transaction around it; answered with the plan's result.

    Where there is no transaction around it, the plan is one by itself if it `begins` one, else it has none.
    """

    plan: Generator[Any, Any, Any]
    begins: bool = False


ONE_MOMENT = Script(b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
"""The first step of a transaction that reads. All steps that follow see the same state, so that their counts add up."""

Step: TypeAlias = Statement | Script | Copy | Savepoint
Plan: TypeAlias = Generator[Step, Any, T]


IN_UTF8 = b"SET LOCAL client_encoding = 'UTF8'"
"""For a COPY, whose blocks are UTF-8. If the COPY fails, the end of its savepoint or transaction takes it back."""


def other_encoding(found: str | None) -> bytes | None:
    """The statement that brings back the encoding of a caller's connection, if it is another one than UTF-8."""
    return None if found in (None, "UTF8") else f"SET LOCAL client_encoding = '{found}'".encode()


def execute(sql: bytes, **params: Any) -> Plan[list[Row]]:
    rows: list[Row] = yield Statement(sql, params)
    return rows


def many(make: Callable[..., T], sql: bytes, **params: Any) -> Plan[list[T]]:
    rows: list[Row] = yield Statement(sql, params)
    return [make(*row) for row in rows]


def one(make: Callable[..., T], sql: bytes, **params: Any) -> Plan[T | None]:
    rows: list[Row] = yield Statement(sql, params)
    return make(*rows[0]) if rows else None


class _TakenBackError(Exception):
    """Ends the savepoint of a plan that is taken back, with its result."""

    def __init__(self, result: Any) -> None:
        super().__init__("the plan is taken back")
        self.result = result


def taken_back(plan: Plan[T]) -> Plan[T]:
    """The result that a plan would have: the plan is performed, and everything that it has done is undone."""
    try:
        yield Savepoint(_performed(plan), begins=True)
    except _TakenBackError as taken:
        result: T = taken.result
        return result
    raise AssertionError("a plan that is taken back always ends by its exception")


def _performed(plan: Plan[T]) -> Plan[None]:
    raise _TakenBackError((yield from plan))


def within_transaction(plan: Plan[T]) -> Plan[T]:
    """The plan for a transaction that has begun, whose caller has said how much of it is seen at one moment."""
    try:
        step = next(plan)
        while True:
            try:
                answer = [] if step is ONE_MOMENT else (yield step)
            except Exception as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def perform_async(conn: psycopg.AsyncConnection[Any], plan: Plan[T]) -> T:
    try:
        step = next(plan)
        while True:
            try:
                answer = await _answer(conn, step)
            except Exception as error:
                step = plan.throw(_explained(conn, step, error))
            else:
                step = plan.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def _answer(conn: psycopg.AsyncConnection[Any], step: Step) -> Any:
    if isinstance(step, Statement) and step.binary and isinstance(conn, OwnAsyncConnection) and conn.takes_statements:
        return await conn.answer(step.sql, step.params)
    if isinstance(step, Savepoint):
        if not step.begins and _in_no_transaction(conn):
            return await perform_async(conn, step.plan)
        async with conn.transaction():
            return await perform_async(conn, step.plan)
    if isinstance(step, Script):
        async with psycopg.AsyncCursor(conn) as cursor:
            await cursor.execute(step.sql)
        return []
    async with psycopg.AsyncCursor(conn, row_factory=tuple_row) as cursor:
        cursor.format = Format.BINARY
        if isinstance(step, Copy):
            unsent = 0
            back = other_encoding(conn.info.parameter_status("client_encoding"))
            if back:
                await cursor.execute(IN_UTF8)
            async with cursor.copy(step.sql) as copy:
                for block in step.blocks:
                    await copy.write(block)
                    unsent += len(block)
                    if unsent > MOST_UNSENT:
                        await conn.wait(_flush(conn.pgconn))
                        unsent = 0
            if back:
                await cursor.execute(back)
            return []
        if not step.binary:
            cursor.format = Format.TEXT
        await cursor.execute(step.sql, step.params)
        return await cursor.fetchall() if cursor.rownumber is not None else []


def _explained(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], step: Step, error: Exception) -> Exception:
    """The error that a plan is told: a refusal says which role is missing, and a lost connection that it is lost."""
    if isinstance(error, psycopg.errors.InsufficientPrivilege) and isinstance(step, Statement | Copy):
        help = say_who_may(step.sql, conn.info.user)
        if help is not None and help not in str(error):
            error.args = (f"{str(error).strip().removesuffix('.')}. {help}", *error.args[1:])
    return _as_lost(conn, error)


def _as_lost(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], error: Exception) -> Exception:
    """The error of psycopg for a lost connection, if Python has complained about its file descriptor."""
    if not conn.closed or not isinstance(error, ValueError | OSError):
        return error
    lost = psycopg.OperationalError(f"the connection is lost: {error}")
    lost.__cause__ = error
    return lost


def _flush(pgconn: PGconn) -> Generator[Wait, Ready | int, None]:
    """Wait until the server has taken what was written."""
    while pgconn.flush():
        while not (yield Wait.W):
            continue


def _in_no_transaction(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether each statement is a transaction by itself, so that a failure spoils no other statement."""
    return conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE

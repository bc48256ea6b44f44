"""Takes part in a transaction of psycopg2."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar
from uuid import UUID

import psycopg
import psycopg2
from psycopg.pq import DiagnosticField as Field
from psycopg2 import extensions

from busload.errors import InvalidOperationError
from busload.integrations.other_driver import CLOSED, FAILED, PARAMETER, as_list, as_text, error_of_server
from busload.postgres.connection import refuse_version
from busload.postgres.plan import IN_UTF8, Copy, Plan, Savepoint, Script, Statement, Step, other_encoding

T = TypeVar("T")

NO_TRANSACTION = (
    "The connection given as conn is in autocommit mode and in no transaction, so there is nothing that the call could "
    "join. Set conn.autocommit = False, or pass no conn."
)
_FACTS = {
    Field.MESSAGE_PRIMARY: "message_primary",
    Field.MESSAGE_DETAIL: "message_detail",
    Field.MESSAGE_HINT: "message_hint",
    Field.CONTEXT: "context",
    Field.SCHEMA_NAME: "schema_name",
    Field.TABLE_NAME: "table_name",
    Field.COLUMN_NAME: "column_name",
    Field.CONSTRAINT_NAME: "constraint_name",
}


async def join(conn: object) -> Psycopg2Connection | None:
    return join_in_threads(conn)


def join_in_threads(conn: object) -> Psycopg2Connection | None:
    return Psycopg2Connection.join(conn) if isinstance(conn, extensions.connection) else None


class Psycopg2Connection:
    """Performs plans in the transaction of a connection."""

    blocks: Literal[True] = True

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    @classmethod
    def join(cls, conn: Any) -> Psycopg2Connection:
        """Refuse a connection that can have no transaction, or a failed one."""
        if conn.closed:
            raise InvalidOperationError(CLOSED)
        if conn.async_:
            raise InvalidOperationError(
                "The connection given as conn is an asynchronous one of psycopg2, which has no transactions of its "
                "own. Pass one that was opened without async_."
            )
        status = conn.get_transaction_status()
        if status == extensions.TRANSACTION_STATUS_INERROR:
            raise InvalidOperationError(FAILED)
        if conn.autocommit and status == extensions.TRANSACTION_STATUS_IDLE:
            raise InvalidOperationError(NO_TRANSACTION)
        return cls(conn)

    def refuse_server(self) -> None:
        refuse_version(self._conn.server_version, self._conn.get_parameter_status("server_encoding"))

    def perform(self, plan: Plan[T]) -> T:
        try:
            step = next(plan)
            while True:
                try:
                    answer = self._answer(step)
                except Exception as error:
                    step = plan.throw(_translated(error))
                else:
                    step = plan.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    def _answer(self, step: Step) -> Any:
        match step:
            case Statement(sql, params):
                statement, arrays = _spelled(sql)
                values = {name: _ARRAY(v) if name in arrays else as_text(v) for name, v in params.items()}
                return self._execute(statement, values)
            case Savepoint(plan):
                return self._in_savepoint(plan)
            case Script(sql):
                self._execute(sql.decode(), None)
            case Copy(sql, blocks):
                back = other_encoding(self._conn.get_parameter_status("client_encoding"))
                with self._cursor() as cursor:
                    if back:
                        cursor.execute(IN_UTF8)
                    cursor.copy_expert(sql.decode(), _Reader(iter(blocks)))
                    if back:
                        cursor.execute(back)
        return []

    def _in_savepoint(self, plan: Plan[T]) -> T:
        self._execute("SAVEPOINT busload", None)
        try:
            result = self.perform(plan)
        except BaseException:
            with suppress(psycopg2.Error):  # the first error says more
                self._execute("ROLLBACK TO SAVEPOINT busload; RELEASE SAVEPOINT busload", None)
            raise
        self._execute("RELEASE SAVEPOINT busload", None)
        return result

    def _execute(self, sql: str, values: dict[str, Any] | None) -> list[tuple[Any, ...]]:
        with self._cursor() as cursor:
            cursor.execute(sql, values)
            return [] if cursor.description is None else cursor.fetchall()

    def _cursor(self) -> Any:
        """A plain cursor, whatever kind the application wants, that reads values as psycopg does."""
        cursor = extensions.cursor(self._conn)
        for caster in _CASTERS:
            extensions.register_type(caster, cursor)
        return cursor


@cache
def _spelled(sql: bytes) -> tuple[str, frozenset[str]]:
    """The statement as psycopg2 reads it, and the names of its arrays."""
    text = sql.decode()
    arrays = frozenset(found["name"] for found in PARAMETER.finditer(text) if found["array"])
    return PARAMETER.sub(lambda found: found[0].replace(")b", ")s", 1) if found["name"] else "%%", text), arrays


_ARRAY = as_list(as_text)


class _Reader:
    """A file of blocks, as COPY wants to read it."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes of a block; none at the end."""
        block = self._rest or next(self._blocks, b"")
        self._rest = block[size:] if 0 <= size < len(block) else b""
        return block[:size] if 0 <= size < len(block) else block


def _uuid(text: Any, cursor: Any) -> UUID | None:
    return None if text is None else UUID(text)


def _json(text: Any, cursor: Any) -> Any:
    return None if text is None else json.loads(text)


def _types() -> Iterable[Any]:
    uuid = extensions.new_type((2950,), "BUSLOAD_UUID", _uuid)
    yield uuid
    yield extensions.new_array_type((2951,), "BUSLOAD_UUID[]", uuid)
    yield extensions.new_type((114, 3802), "BUSLOAD_JSON", _json)
    yield extensions.UNICODE
    yield extensions.UNICODEARRAY
    yield extensions.PYDATETIMETZ
    yield extensions.PYINTERVAL


_CASTERS = tuple(_types())


def _translated(error: Exception) -> Exception:
    """The error as plans know it, if it is one of psycopg2's."""
    if not isinstance(error, psycopg2.Error):
        return error
    if error.pgcode is not None:
        facts = {field: getattr(error.diag, name, None) for field, name in _FACTS.items()}
        return error_of_server(error, error.pgcode, facts)
    same: type[psycopg.Error] = getattr(psycopg, type(error).__name__, psycopg.DatabaseError)
    translated = same(" ".join(str(error).split()))
    translated.__cause__ = error
    return translated

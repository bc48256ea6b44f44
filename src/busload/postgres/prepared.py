"""Statements of a connection of ours, prepared and sent without a cursor.

A cursor of psycopg serves every query that anybody may think of, and takes 40 µs of the client for each. Ours are few
and always the same: what can be known of them beforehand is found out once. Values go to the server, and come back, in
the form in which psycopg would send and read them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import psycopg
from psycopg import generators
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import DiagnosticField, ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult

MOST = 100
"""Statements that a connection prepares at most."""

FORGOTTEN = "26000"
"""The error of a prepared statement that the server knows no more."""

STALE = ("0A", "22", "42", "XX")
"""The classes of errors that a statement may end with if a table has changed since it was prepared."""

OwnConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

Key: TypeAlias = tuple[bytes, Sequence[int]]
"""A statement and the types of its parameters: 1 and 100,000 have different ones."""


class Compiled(NamedTuple):
    """A statement as PostgreSQL wants it, and which parameter is which."""

    query: bytes
    names: tuple[str, ...]
    formats: tuple[PyFormat, ...]


@lru_cache(maxsize=1000)
def compiled(sql: bytes) -> Compiled:
    """The statement with `$1` for its first parameter, and so on."""
    formats: dict[str, PyFormat] = {}

    def number(found: re.Match[bytes]) -> bytes:
        if found["name"] is None:
            return b"%"
        name = found["name"].decode()
        formats.setdefault(name, PyFormat(found["format"].decode()))
        return b"$%d" % (list(formats).index(name) + 1)

    query = _PARAMETER.sub(number, sql)
    return Compiled(query, tuple(formats), tuple(formats.values()))


_PARAMETER = re.compile(rb"%(?:%|\((?P<name>\w+)\)(?P<format>[bs]))")


class _Context:
    """What psycopg wants to know of a connection to send and read values.

    The connection holds this: were it held in turn, it would be freed by the garbage collector, some time later.
    """

    def __init__(self, conn: OwnConnection) -> None:
        self.adapters, self.connection = conn.adapters, weakref.proxy(conn)


class Prepared:
    """The prepared statements of one connection.

    Somebody else may use the connection in between, and may have the server forget them. Outside of a transaction that
    is found out by using them. In a transaction the error would spoil it: there, only what is known to be prepared is
    used.
    """

    def __init__(self, conn: OwnConnection) -> None:
        self._values = Transformer(_Context(conn))
        self._uses: dict[Key, int] = {}
        self._names: dict[Key, bytes] = {}
        self._seen: dict[bytes, int] = {}
        """Which of them were there since the connection was used by somebody else for the so-manieth time."""
        self._stale: list[bytes] = []
        """Those that are not used any more, and that the server still has."""
        self._others, self._made = 0, 0

    def used_by_others(self) -> None:
        """Take nothing for granted: somebody else uses the connection."""
        self._others += 1

    def forgotten(self) -> None:
        """Prepare all of them again: psycopg has the server forget every statement after a rollback."""
        self._names.clear()
        self._seen.clear()
        self._stale.clear()

    def answer(
        self, conn: OwnConnection, sql: bytes, params: dict[str, Any]
    ) -> Generator[Any, Any, list[tuple[Any, ...]]]:
        """Send the statement on its connection, and return its rows; `conn.wait` waits for them."""
        query, names, formats = compiled(sql)
        values, pgconn = self._values, conn.pgconn
        dumped = values.dump_sequence([params[name] for name in names], formats)
        types, sent_as = values.types or (), values.formats
        key = sql, types
        name = self._names.get(key)
        if name is None and self._is_worth_it(key, conn.prepare_threshold):
            name = yield from self._prepare(conn, key, query)
        result: PGresult | None = None
        if name is not None and (self._seen[name] == self._others or _is_idle(conn)):
            pgconn.send_query_prepared(name, dumped, sent_as, Format.BINARY)
            result = (yield from generators.execute(pgconn))[-1]
            self._seen[name] = self._others
            if result.status == ExecStatus.FATAL_ERROR and self._was_forgotten(key, result) and _is_idle(conn):
                result = None
        if result is None:
            pgconn.send_query_params(query, dumped, types, sent_as, Format.BINARY)
            result = (yield from generators.execute(pgconn))[-1]
        if result.status != ExecStatus.TUPLES_OK:
            _refuse_failed(conn, result)
            return []
        values.set_pgresult(result)
        rows = values.load_rows(0, result.ntuples, tuple)
        values.set_pgresult(None)
        return rows

    def _is_worth_it(self, key: Key, threshold: int | None) -> bool:
        """Whether the statement was used often enough to be prepared. Behind a pooler none is."""
        if threshold is None or len(self._names) >= MOST:
            return False
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        return uses > threshold

    def _prepare(self, conn: OwnConnection, key: Key, query: bytes) -> Generator[Any, Any, bytes]:
        while self._stale and _is_idle(conn):  # one that is gone already is an error, which would spoil a transaction
            conn.pgconn.send_query(b"DEALLOCATE " + self._stale.pop())
            yield from generators.execute(conn.pgconn)
        self._made += 1
        name = b"busload_%d" % self._made
        conn.pgconn.send_prepare(name, query, key[1])
        _refuse_failed(conn, (yield from generators.execute(conn.pgconn))[-1])
        self._uses.pop(key, None)
        self._names[key], self._seen[name] = name, self._others
        return name

    def _was_forgotten(self, key: Key, result: PGresult) -> bool:
        """Whether the server knows the statement no more: then it has done nothing.

        One that fits a changed table no more is prepared again by its next use.
        """
        state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        if state == FORGOTTEN or state.startswith(STALE):
            name = self._names.pop(key)
            del self._seen[name]
            if state != FORGOTTEN:
                self._stale.append(name)
        return state == FORGOTTEN


def _is_idle(conn: OwnConnection) -> bool:
    return conn.pgconn.transaction_status == TransactionStatus.IDLE


def _refuse_failed(conn: OwnConnection, result: PGresult) -> None:
    if result.status == ExecStatus.FATAL_ERROR:
        raise psycopg.errors.error_from_result(result, encoding=conn.info.encoding)

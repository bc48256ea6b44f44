"""Made from busload.postgres.plan by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import Format
from psycopg.rows import tuple_row

from busload.postgres.plan import (
    IN_UTF8,
    MOST_UNSENT,
    Copy,
    Plan,
    Savepoint,
    Script,
    Statement,
    Step,
    T,
    _explained,
    _flush,
    _in_no_transaction,
    other_encoding,
)
from busload.sync.connection import OwnConnection


def perform(conn: psycopg.Connection[Any], plan: Plan[T]) -> T:
    try:
        step = next(plan)
        while True:
            try:
                answer = _answer(conn, step)
            except Exception as error:
                step = plan.throw(_explained(conn, step, error))
            else:
                step = plan.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def _answer(conn: psycopg.Connection[Any], step: Step) -> Any:
    if isinstance(step, Statement) and step.binary and isinstance(conn, OwnConnection) and conn.takes_statements:
        return conn.answer(step.sql, step.params)
    if isinstance(step, Savepoint):
        if not step.begins and _in_no_transaction(conn):
            return perform(conn, step.plan)
        with conn.transaction():
            return perform(conn, step.plan)
    if isinstance(step, Script):
        with psycopg.Cursor(conn) as cursor:
            cursor.execute(step.sql)
        return []
    with psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
        cursor.format = Format.BINARY
        if isinstance(step, Copy):
            unsent = 0
            back = other_encoding(conn.info.parameter_status("client_encoding"))
            if back:
                cursor.execute(IN_UTF8)
            with cursor.copy(step.sql) as copy:
                for block in step.blocks:
                    copy.write(block)
                    unsent += len(block)
                    if unsent > MOST_UNSENT:
                        conn.wait(_flush(conn.pgconn))
                        unsent = 0
            if back:
                cursor.execute(back)
            return []
        if not step.binary:
            cursor.format = Format.TEXT
        cursor.execute(step.sql, step.params)
        return cursor.fetchall() if cursor.rownumber is not None else []

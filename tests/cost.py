"""What statements cost, counted in pages of memory, which are the same on every machine."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from busload.postgres.plan import Plan, Statement
from tests.given import Database


def pages(conn: psycopg.Connection[Any], plan: Plan[Any]) -> int:
    """The pages of memory that the largest statement of a plan touches."""
    most, answer = 0, None
    while True:
        try:
            step = plan.send(answer)
        except StopIteration:
            return most
        assert isinstance(step, Statement)
        with psycopg.ClientCursor(conn) as cursor:
            cursor.execute("SAVEPOINT here")
            cursor.execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + step.sql, step.params)
            [[explained]] = cursor.fetchall()
            cursor.execute("ROLLBACK TO here")
        node = (explained if isinstance(explained, list) else json.loads(explained))[0]["Plan"]
        most = max(most, node["Shared Hit Blocks"] + node["Shared Read Blocks"])
        with psycopg.Cursor(conn) as cursor:
            answer = cursor.execute(step.sql, step.params).fetchall()


def vacuumed(database: Database, table: str) -> bool:
    """Whether nothing dead is left; some is if autovacuum just analyzes another table, and sees an older state."""
    database.rows(f"VACUUM {table}")
    return bool(database.value("SELECT n_dead_tup = 0 FROM pg_stat_all_tables WHERE relid = %s::regclass", table))

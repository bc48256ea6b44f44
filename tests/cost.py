"""What statements cost, counted in pages of memory or in rows, which are the same on every machine."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import psycopg

from busload.postgres.plan import Plan, Statement
from tests.given import Database


def pages(conn: psycopg.Connection[Any], plan: Plan[Any]) -> int:
    """The pages of memory that the largest statement of a plan touches."""
    nodes = _explained(conn, plan)
    return max(int(node["Shared Hit Blocks"]) + int(node["Shared Read Blocks"]) for node in nodes)


def rows(conn: psycopg.Connection[Any], plan: Plan[Any]) -> int:
    """The rows that the steps of the largest statement of a plan look at, each as often as it is looked at.

    The server plans as it does for a statement that was asked often: once, for any values of its parameters.
    """
    conn.execute("SET plan_cache_mode = force_generic_plan")
    return max(map(_rows, _explained(conn, plan, for_any_values=True)))


def _rows(node: dict[str, Any]) -> int:
    found = node["Actual Rows"] + sum(count for name, count in node.items() if name.startswith("Rows Removed by"))
    if node["Node Type"] == "Sort":
        found *= max(math.log2(max(found, 1)), 1)
    looked_at: int = round(node["Actual Loops"] * found)
    return looked_at + sum(map(_rows, node.get("Plans", ())))


def _explained(
    conn: psycopg.Connection[Any], plan: Plan[Any], *, for_any_values: bool = False
) -> Iterator[dict[str, Any]]:
    """What the server does for each statement of a plan, which is performed."""
    answer = None
    while True:
        try:
            step = plan.send(answer)
        except StopIteration:
            return
        assert isinstance(step, Statement)
        with psycopg.ClientCursor(conn) as cursor:
            cursor.execute("SAVEPOINT here")
            sql = _prepared(cursor, step) if for_any_values else step.sql
            cursor.execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + sql, step.params)
            [[explained]] = cursor.fetchall()
            cursor.execute("ROLLBACK TO here")
            if for_any_values:
                cursor.execute("DEALLOCATE explained")
        yield (explained if isinstance(explained, list) else json.loads(explained))[0]["Plan"]
        with psycopg.Cursor(conn) as cursor:
            answer = cursor.execute(step.sql, step.params).fetchall()


def _prepared(cursor: psycopg.ClientCursor[Any], step: Statement) -> bytes:
    """Prepare a statement under a name, and return what executes it with its parameters."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)", step.sql.decode())))
    sql = re.sub(r"%\((\w+)\)[sbt]", lambda found: f"${names.index(found[1]) + 1}", step.sql.decode())
    cursor.execute(f"PREPARE explained AS {sql.replace('%%', '%')}".encode())
    return f"EXECUTE explained ({', '.join(f'%({name})s' for name in names)})".encode()


def vacuumed(database: Database, table: str) -> bool:
    """Whether nothing dead is left; some is if autovacuum just analyzes another table, and sees an older state."""
    database.rows(f"VACUUM {table}")
    return bool(database.value("SELECT n_dead_tup = 0 FROM pg_stat_all_tables WHERE relid = %s::regclass", table))

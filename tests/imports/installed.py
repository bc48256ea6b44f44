"""The tables of other queues, as these queues themselves make them."""

from __future__ import annotations

from typing import Any

import psycopg
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment
from procrastinate.schema import SchemaManager


def install_pgqueuer(conn: psycopg.Connection[Any]) -> None:
    conn.execute(QueryBuilderEnvironment().build_install_query().encode())


def install_procrastinate(conn: psycopg.Connection[Any]) -> None:
    conn.execute(SchemaManager(connector=None).get_schema().encode())  # type: ignore[arg-type]


def install_queues(conn: psycopg.Connection[Any]) -> None:
    """All queues whose tables our statements name."""
    install_pgqueuer(conn)
    install_procrastinate(conn)

"""Takes part in the transaction of a connection of Django."""

from __future__ import annotations

from typing import Any

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError
from django.utils.connection import ConnectionProxy

from busload.errors import InvalidOperationError
from busload.postgres.callers_connection import SyncJoined, refuse_unusable, underneath_in_threads


async def join(conn: object) -> SyncJoined | None:
    return join_in_threads(conn)


def join_in_threads(conn: object) -> SyncJoined | None:
    if not isinstance(conn, BaseDatabaseWrapper | ConnectionProxy):
        return None
    driver = driver_connection(conn)
    if isinstance(driver, psycopg.Connection):
        refuse_unusable(driver)
        return driver
    return underneath_in_threads(driver)


def driver_connection(conn: Any) -> Any:
    """The connection of the driver, within atomic()."""
    if conn.vendor != "postgresql":
        raise InvalidOperationError(
            f"The connection given as conn is Django's {conn.alias!r}, on {conn.display_name}; busload needs "
            "PostgreSQL. Pass connections[...] of the database with busload's schema."
        )
    try:
        conn.validate_thread_sharing()
    except DatabaseError as error:
        raise InvalidOperationError(
            f"The connection given as conn is Django's {conn.alias!r} of another thread. Each thread has its own: pass "
            "django.db.connection in the thread that uses it."
        ) from error
    if not conn.in_atomic_block and (conn.autocommit or conn.connection is None):
        raise InvalidOperationError(
            f"Django's connection {conn.alias!r} given as conn is in no transaction, so there is nothing that the call "
            "could join. Call within `with transaction.atomic():`, or pass no conn."
        )
    if conn.needs_rollback:
        raise InvalidOperationError(
            f"The transaction of Django's connection {conn.alias!r} has failed. Leave the atomic() block before you "
            "send: that rolls it back."
        )
    if conn.connection is None or conn.closed_in_transaction:
        raise InvalidOperationError(
            f"Django's connection {conn.alias!r} was closed within its transaction. Leave the atomic() block before "
            "you send."
        )
    return conn.connection

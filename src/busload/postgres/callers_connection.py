"""The transaction of a caller, which a call joins if it is given a connection."""

from __future__ import annotations

from typing import TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from busload.errors import InvalidOperationError, kind_of
from busload.postgres.connection import AnyConnection, AsyncConnection, Connection
from busload.postgres.plan import Plan, perform_async
from busload.sync.plan import perform

JOINABLE = psycopg.AsyncConnection, psycopg.Connection
JOINABLE_IN_THREADS = (psycopg.Connection,)
T = TypeVar("T")


async def perform_any(conn: AnyConnection, plan: Plan[T]) -> T:
    """Perform a plan on the caller's connection, which may be one that blocks."""
    return perform(conn, plan) if isinstance(conn, psycopg.Connection) else await perform_async(conn, plan)


def refuse_unusable(conn: Connection | AsyncConnection, *kinds: type[Connection] | type[AsyncConnection]) -> None:
    """Refuse a connection of a caller that cannot take part in a transaction. Nothing has been written then."""
    if not isinstance(conn, kinds):
        wanted = " or ".join(f"psycopg.{kind.__name__}" for kind in kinds)
        raise InvalidOperationError(
            f"The connection given as conn is {kind_of(conn)}; this bus joins a {wanted}. Pass {_underneath(conn)}."
        )
    if conn.closed:
        raise InvalidOperationError("The connection given as conn is closed. Pass an open one, or none.")
    if conn.pgconn.pipeline_status != PipelineStatus.OFF:
        raise InvalidOperationError(
            "The connection given as conn is in pipeline mode, where an answer comes too late. Send outside of it."
        )
    if conn.info.transaction_status == TransactionStatus.INERROR:
        raise InvalidOperationError(
            "The connection given as conn is in a failed transaction. Roll it back before you send."
        )


def _underneath(conn: object) -> str:
    """Say how to get the psycopg connection from what was given."""
    module = f"{type(conn).__module__}."
    found = (way for package, way in _UNDERNEATH.items() if module.startswith(package))
    return next(found, "the psycopg connection that your session or ORM uses")


_UNDERNEATH = {
    "sqlalchemy.ext.asyncio.": "(await (await session.connection()).get_raw_connection()).driver_connection",
    "sqlalchemy.": "session.connection().connection.driver_connection",
    "django.": "django.db.connection.connection, inside atomic()",
    "asyncpg.": "one of psycopg: no other driver can take part. For SQLAlchemy the URL then begins with postgresql+psycopg://",
}


def about_to_begin(conn: Connection | AsyncConnection) -> bool:
    """Whether the caller's transaction begins with its next statement."""
    return not conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE

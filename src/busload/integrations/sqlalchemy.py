"""Takes part in the transaction of a connection or session of SQLAlchemy.

The driver's connection is used directly, after SQLAlchemy has noted that its transaction has begun: then `commit()`,
`rollback()` and `begin_nested()` of the caller mean busload's commands too.
"""

from __future__ import annotations

from typing import Any

import psycopg
from sqlalchemy import Connection, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from busload.errors import InvalidOperationError, kind_of
from busload.integrations.other_driver import CLOSED
from busload.postgres.callers_connection import (
    AUTOCOMMIT,
    Joined,
    SyncJoined,
    refuse_without_transaction,
    underneath,
    underneath_in_threads,
)


async def join(conn: object) -> Joined | None:
    if not isinstance(conn, AsyncConnection | AsyncSession | async_scoped_session):
        return join_in_threads(conn)
    driver = await driver_connection_async(conn)
    if isinstance(driver, psycopg.AsyncConnection):
        refuse_without_transaction(driver)
        return driver
    if type(driver).__module__.startswith("asyncpg."):
        return await underneath(driver)
    raise _strange(driver, "psycopg or asyncpg")


def join_in_threads(conn: object) -> SyncJoined | None:
    if not isinstance(conn, Connection | Session | scoped_session):
        return None
    driver = driver_connection(conn)
    if isinstance(driver, psycopg.Connection):
        refuse_without_transaction(driver)
        return driver
    if type(driver).__module__.startswith("psycopg2."):
        return underneath_in_threads(driver)
    if isinstance(driver, psycopg.AsyncConnection) or type(driver).__module__.startswith("asyncpg."):
        raise InvalidOperationError(
            f"The session given as conn belongs to an async engine, with {kind_of(driver)} underneath, as in run_sync. "
            "Give its AsyncSession or AsyncConnection to the async bus, CommandBus, outside of run_sync."
        )
    raise _strange(driver, "psycopg or psycopg2")


def driver_connection(conn: Connection | Session | scoped_session[Any]) -> Any:
    """The connection of the driver, in the transaction that the caller has begun or begins by this."""
    try:
        connection = conn if isinstance(conn, Connection) else conn.connection()
        _begin(connection)
        return connection.connection.driver_connection
    except exc.DBAPIError:
        raise  # the database cannot be reached: this is not about what was given
    except exc.SQLAlchemyError as error:
        raise _refused(error) from error


async def driver_connection_async(conn: AsyncConnection | AsyncSession | async_scoped_session[Any]) -> Any:
    try:
        connection = conn if isinstance(conn, AsyncConnection) else await conn.connection()
        underneath = connection.sync_connection
        if underneath is None:
            raise InvalidOperationError(
                "The AsyncConnection given as conn is not connected yet. Await it, or use it in `async with`."
            )
        _begin(underneath)
        driver: Any = underneath.connection.driver_connection
        if underneath.dialect.driver == "asyncpg" and not driver.is_in_transaction():
            await connection.exec_driver_sql("SELECT")  # here SQLAlchemy begins with the first statement
            if not driver.is_in_transaction():
                raise InvalidOperationError(AUTOCOMMIT)
        return driver
    except exc.DBAPIError:
        raise
    except exc.SQLAlchemyError as error:
        raise _refused(error) from error


def _begin(connection: Connection) -> None:
    """Begin as a statement of SQLAlchemy would, so that a commit is one."""
    if connection.closed:
        raise InvalidOperationError(CLOSED)
    if not connection.in_transaction():
        connection.begin()


def _refused(error: exc.SQLAlchemyError) -> InvalidOperationError:
    return InvalidOperationError(
        f"SQLAlchemy has no connection for what was given as conn: {error} If a session has several databases, pass "
        "session.connection(bind_arguments=...) of the one with busload's schema."
    )


def _strange(driver: object, wanted: str) -> InvalidOperationError:
    package = type(driver).__module__.partition(".")[0]
    return InvalidOperationError(
        f"The session given as conn has a connection of {package} underneath ({kind_of(driver)}); this bus takes part "
        f"in transactions of {wanted}. The URL of the engine then begins with postgresql+{wanted.partition(' ')[0]}://"
    )

"""The transaction of a caller, which a call joins if it is given a connection."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar, cast

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from busload.errors import InvalidOperationError, kind_of
from busload.postgres.connection import AsyncConnection, Connection
from busload.postgres.connection import refuse_server as refuse_server_of_psycopg
from busload.postgres.plan import Plan, perform_async
from busload.sync.plan import perform

T = TypeVar("T")
OF_PSYCOPG = (psycopg.AsyncConnection, psycopg.Connection)


class _Sqlalchemy(Protocol):
    """A Connection, Session or scoped_session of SQLAlchemy."""

    def begin_nested(self) -> Any: ...
    def close(self) -> None: ...


class _AsyncSqlalchemy(Protocol):
    """An AsyncConnection, AsyncSession or async_scoped_session of SQLAlchemy."""

    def begin_nested(self) -> Any: ...
    async def close(self) -> None: ...


class _Asyncpg(Protocol):
    """A Connection of asyncpg, or one of its pool."""

    def is_in_transaction(self) -> Any: ...
    async def reset(self) -> None: ...


class _Django(Protocol):
    """`django.db.connection`, or one of `django.db.connections`."""

    def validate_no_atomic_block(self) -> Any: ...


class _Psycopg2(Protocol):
    """A connection of psycopg2."""

    def get_transaction_status(self) -> Any: ...


AnySyncConnection: TypeAlias = Connection | _Sqlalchemy | _Django | _Psycopg2
"""What the sync face joins."""

AnyConnection: TypeAlias = AsyncConnection | AnySyncConnection | _AsyncSqlalchemy | _Asyncpg
"""What the async face joins: a transaction of any kind of connection. One that blocks holds up the event loop."""


class BlockingDriver(Protocol):
    """Performs plans in the caller's transaction by another driver than psycopg."""

    blocks: Literal[True]

    def refuse_server(self) -> None: ...
    def perform(self, plan: Plan[T]) -> T: ...


class AwaitedDriver(Protocol):
    """The same by one that is awaited."""

    blocks: Literal[False]

    def refuse_server(self) -> None: ...
    async def perform(self, plan: Plan[T]) -> T: ...


SyncJoined: TypeAlias = Connection | BlockingDriver
Joined: TypeAlias = AsyncConnection | SyncJoined | AwaitedDriver
"""What takes part in the caller's transaction."""


class Integration(Protocol):
    """The module of a neighbour, which knows its connections. It returns None for an object that is none of them."""

    async def join(self, conn: object) -> Joined | None: ...
    def join_in_threads(self, conn: object) -> SyncJoined | None: ...


INTEGRATIONS = frozenset(("asyncpg", "django", "psycopg2", "sqlalchemy"))
"""Packages whose connections can be joined. Each has a module of its name, imported when it is needed."""

_SYNC_KINDS = (
    "psycopg.Connection",
    "the Connection and the Session of SQLAlchemy (on psycopg or psycopg2)",
    "django.db.connection within atomic()",
    "a connection of psycopg2",
)
_KINDS = (
    "psycopg.AsyncConnection",
    "asyncpg.Connection",
    "the AsyncConnection and the AsyncSession of SQLAlchemy (on psycopg or asyncpg)",
    *_SYNC_KINDS,
)


async def underneath(conn: AnyConnection) -> Joined:
    """What takes part in the caller's transaction. A connection that cannot is refused, and nothing is written."""
    if isinstance(conn, OF_PSYCOPG):
        refuse_unusable(conn)
        return conn
    integration = _integration(conn)
    joined = None if integration is None else await integration.join(conn)
    return joined or _refuse(conn, _KINDS)


def underneath_in_threads(conn: AnySyncConnection) -> SyncJoined:
    """The same for the sync face, which can wait for no event loop."""
    if isinstance(conn, psycopg.Connection):
        refuse_unusable(conn)
        return conn
    integration = _integration(conn)
    joined = None if integration is None else integration.join_in_threads(conn)
    return joined or _refuse(conn, _SYNC_KINDS, " Give an async one to the async bus, CommandBus.")


def _integration(conn: object) -> Integration | None:
    """The module for what this is an object of, also if the application has made a class of its own of it."""
    packages = (base.__module__.partition(".")[0] for base in type(conn).__mro__)
    package = next((package for package in packages if package in INTEGRATIONS), None)
    return None if package is None else cast(Integration, import_module(f"busload.integrations.{package}"))


def _refuse(conn: object, kinds: tuple[str, ...], advice: str = "") -> NoReturn:
    wanted = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    raise InvalidOperationError(f"The connection given as conn is {kind_of(conn)}; this bus joins {wanted}.{advice}")


async def perform_any(conn: Joined, plan: Plan[T]) -> T:
    """Perform a plan in the caller's transaction, whose connection may be one that blocks."""
    if isinstance(conn, psycopg.AsyncConnection):
        return await perform_async(conn, plan)
    if isinstance(conn, psycopg.Connection):
        return perform(conn, plan)
    return conn.perform(plan) if conn.blocks else await conn.perform(plan)


def perform_in_threads(conn: SyncJoined, plan: Plan[T]) -> T:
    """The same for the sync face."""
    return perform(conn, plan) if isinstance(conn, psycopg.Connection) else conn.perform(plan)


def refuse_unusable(conn: Connection | AsyncConnection) -> None:
    """Refuse a connection of a caller that cannot take part in a transaction. Nothing has been written then."""
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


def refuse_without_transaction(conn: object) -> None:
    """Refuse a connection of psycopg without a transaction, where a call alone would be no use. Others are always."""
    if not isinstance(conn, OF_PSYCOPG):
        return
    refuse_unusable(conn)
    if conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE:
        raise InvalidOperationError(AUTOCOMMIT)


AUTOCOMMIT = (
    "The connection or session given as conn is in autocommit mode, so there is no transaction that the call could "
    "join. Use one without autocommit, which SQLAlchemy calls isolation_level AUTOCOMMIT, or begin a transaction "
    "first, which with psycopg is `with conn.transaction():`."
)


def refuse_server(conn: Joined) -> None:
    """Refuse a server or a database that busload cannot work on."""
    if isinstance(conn, OF_PSYCOPG):
        refuse_server_of_psycopg(conn)
    else:
        conn.refuse_server()


def about_to_begin(conn: Joined) -> bool:
    """Whether the caller's transaction begins with its next statement, and psycopg would take ours for all of it."""
    if not isinstance(conn, OF_PSYCOPG):
        return False
    return not conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE

"""Connections as busload wants them: checked when they are new, cheap to check when they are used again."""

from __future__ import annotations

import logging
import select
from functools import partial
from typing import Any, TypeAlias

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from busload.errors import DatabaseUnusable, InvalidOperationError

log = logging.getLogger("busload")

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]

OLDEST_SERVER = 150000

ABOUT = """SELECT pg_backend_pid(), pg_catalog.current_setting('synchronous_commit'),
                  pg_catalog.current_setting('default_transaction_isolation')"""
ISOLATE = "SET default_transaction_isolation = 'read committed'"
"""Who waits for a row must then see it as it is: a snapshot from before would be a reason to fail."""

PLAN_ONCE = "SET plan_cache_mode = force_generic_plan; SET jit = off; SET enable_seqscan = off"
LOOK_NOWHERE = "SET search_path = pg_catalog, pg_temp"
"""For connections that never run a word of a user's: nothing is looked for in a schema where strangers may create."""

# A peer that vanished without a word is noticed within 15 seconds instead of the kernel's many minutes.
PARAMETERS: dict[str, Any] = {
    "application_name": "busload",
    "connect_timeout": 10,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}


def connect(dsn: str) -> Connection:
    """A connection outside of any pool. It prepares nothing, so a pooler may stand in between."""
    try:
        return psycopg.connect(dsn, autocommit=True, prepare_threshold=None, **PARAMETERS)
    except psycopg.ProgrammingError:
        raise _no_dsn() from None


async def connect_async(dsn: str) -> AsyncConnection:
    """A connection outside of any pool. It prepares nothing, so a pooler may stand in between."""
    try:
        return await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None, **PARAMETERS)
    except psycopg.ProgrammingError:
        raise _no_dsn() from None


def pool(
    dsn: str,
    max_size: int,
    *,
    min_size: int = 1,
    timeout: float = 30.0,
    connection_class: type[Connection] = psycopg.Connection,
) -> ConnectionPool[Any]:
    return ConnectionPool(
        dsn,
        connection_class=connection_class,
        min_size=min_size,
        max_size=max_size,
        open=False,
        kwargs=PARAMETERS | {"autocommit": True},
        timeout=timeout,
        configure=_configure,
        check=_check,
        name="busload",
    )


def async_pool(
    dsn: str,
    max_size: int,
    *,
    min_size: int = 1,
    timeout: float = 30.0,
    connection_class: type[AsyncConnection] = psycopg.AsyncConnection,
) -> AsyncConnectionPool[Any]:
    return AsyncConnectionPool(
        dsn,
        connection_class=connection_class,
        min_size=min_size,
        max_size=max_size,
        open=False,
        kwargs=PARAMETERS | {"autocommit": True},
        timeout=timeout,
        configure=_configure_async,
        check=_check_async,
        name="busload",
    )


def engine_pool(
    dsn: str, max_size: int, *, lock_timeout: str | None = None, users_tables: bool = False
) -> AsyncConnectionPool[AsyncConnection]:
    """The pool of a worker's own statements, so that handlers cannot starve them of connections.

    They are few, short and always the same: each is prepared at once, planned once and never compiled, since planning a
    claim takes as long as running it, and compiling one a hundred times as long. A plan made while tables were small
    must do when they are large: nothing is read from end to end, and now and then a connection starts afresh.
    Those that touch `users_tables` find them, and their triggers what they need, by the search_path of the role.
    """
    return AsyncConnectionPool(
        dsn,
        min_size=1,
        max_size=max_size,
        open=False,
        kwargs=PARAMETERS | {"autocommit": True, "prepare_threshold": 0},
        configure=partial(_configure_engine, lock_timeout=lock_timeout, users_tables=users_tables),
        check=_check_async,
        max_lifetime=300,
        name="busload-engine",
    )


def is_away(error: psycopg.Error) -> bool:
    """Whether the database, a lock or room is missing for now; all else is refused, and would be again at once."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_FOR_NOW)


_FOR_NOW = ("08", "40", "53", "57P", "57014", "55P03")


def refuse_server(conn: Connection | AsyncConnection) -> None:
    """The server and the database must be ones that busload can work on."""
    version, encoding = conn.info.server_version, conn.info.parameter_status("server_encoding")
    if version < OLDEST_SERVER:
        raise DatabaseUnusable(f"The server is PostgreSQL {version // 10000}, busload needs 15 or later.")
    if encoding != "UTF8":
        raise DatabaseUnusable(
            f"The database is encoded in {encoding}, busload needs UTF8. Create it with `createdb -E UTF8`."
        )


def refuse_unusable(conn: Connection | AsyncConnection, *kinds: type[Connection] | type[AsyncConnection]) -> None:
    """A caller's connection must be able to take part in a transaction; nothing has been written when this raises."""
    if not isinstance(conn, kinds):
        wanted = " or ".join(f"psycopg.{kind.__name__}" for kind in kinds)
        raise InvalidOperationError(
            f"The connection given as conn is a {type(conn).__name__}; this bus joins a {wanted}."
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


def about_to_begin(conn: Connection | AsyncConnection) -> bool:
    """Whether the caller's transaction begins with its next statement.

    It has to have one before ours: psycopg would take our block for the whole transaction, and commit it.
    """
    return not conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE


def _no_dsn() -> DatabaseUnusable:
    # The reason is not shown: it quotes the text, and that may hold a password.
    return DatabaseUnusable("The DSN is no connection string; wanted e.g. postgresql://user@host:5432/database")


def _configure(conn: Connection) -> None:
    row = conn.execute(ABOUT, prepare=False).fetchone()
    if _adapt(conn, row):
        conn.execute(ISOLATE, prepare=False)


async def _configure_async(conn: AsyncConnection) -> None:
    row = await (await conn.execute(ABOUT, prepare=False)).fetchone()
    if _adapt(conn, row):
        await conn.execute(ISOLATE, prepare=False)


async def _configure_engine(conn: AsyncConnection, *, lock_timeout: str | None, users_tables: bool) -> None:
    await _configure_async(conn)
    if conn.prepare_threshold is not None:
        await conn.execute(PLAN_ONCE if users_tables else f"{PLAN_ONCE}; {LOOK_NOWHERE}", prepare=False)
        if lock_timeout is not None:
            await conn.execute("SELECT pg_catalog.set_config('lock_timeout', %s, false)", [lock_timeout], prepare=False)


def _adapt(conn: Connection | AsyncConnection, row: Any) -> bool:
    """Get along with what there is; returns whether the isolation has to be set, which a pooler would not keep."""
    backend, synchronous_commit, isolation = row
    if backend != conn.info.backend_pid:
        # A pooler stands in between: the next transaction may run on another server connection, which would not know
        # the statements prepared on this one.
        conn.prepare_threshold = None
    if synchronous_commit == "off":
        log.warning("synchronous_commit is off: a crash of PostgreSQL can lose commands that were accepted.")
    if isolation == "read committed":
        return False
    if backend != conn.info.backend_pid:
        log.warning(
            "default_transaction_isolation is %s, and behind a pooler only PostgreSQL can change that: calls that meet "
            "others will fail. Set it to read committed for this role, by ALTER ROLE ... SET.",
            isolation,
        )
        return False
    return True


def _check(conn: Connection) -> None:
    if _something_arrived(conn):
        ConnectionPool.check_connection(conn)


async def _check_async(conn: AsyncConnection) -> None:
    if _something_arrived(conn):
        await AsyncConnectionPool.check_connection(conn)


def _something_arrived(conn: Connection | AsyncConnection) -> bool:
    """Whether an idle connection has been spoken to: that is its end, or a notice.

    Asking the kernel costs microseconds, asking the server a round trip.
    """
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN | select.POLLERR | select.POLLHUP)
    return bool(poll.poll(0))

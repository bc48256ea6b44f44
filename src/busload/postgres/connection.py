"""What both faces know about connections: how they are made, what their errors mean, which servers are refused."""

from __future__ import annotations

import logging
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg.conninfo import make_conninfo

from busload.errors import DatabaseUnavailableError, DatabaseUnusableError
from busload.postgres.dsn import place, read

log = logging.getLogger("busload")

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]

OLDEST_SERVER = 150000

SAFE_SEARCH_PATH = "SET search_path = pg_catalog, pg_temp"
"""For connections that never run SQL of a user: nothing is looked up in a schema where strangers may create."""
LOCAL_SAFE_SEARCH_PATH = SAFE_SEARCH_PATH.replace("SET", "SET LOCAL")
"""For one transaction: behind a pooler, the connection belongs to somebody else afterwards."""

# A peer that is gone without a word is noticed within 15 seconds, instead of the many minutes of the kernel.
PARAMETERS: dict[str, Any] = {
    "application_name": "busload",
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}


def has_unread_input(conn: Connection | AsyncConnection) -> bool:
    """Whether a connection has something to read: the kernel knows at once, the server after a round trip."""
    poll = select.poll()
    poll.register(conn.pgconn.socket, select.POLLIN | select.POLLERR | select.POLLHUP)
    return bool(poll.poll(0))


HOW_TO_WAIT = "open(wait=30) waits for it that many seconds"


@contextmanager
def connection_errors_explained(dsn: str, how_to_wait: str = HOW_TO_WAIT) -> Iterator[None]:
    """Add to an error which database it is about, and how to wait longer for it."""
    try:
        yield
    except psycopg.OperationalError as error:
        said = " ".join(str(error).split())
        if is_refused(error):
            raise DatabaseUnusableError(
                f"PostgreSQL does not let us into {place(dsn)}: {said}. Check user, password, database and options of "
                "the DSN."
            ) from error
        if not isinstance(error, DatabaseUnavailableError):
            said = f"The database cannot be reached: {said}"
        raise DatabaseUnavailableError(
            f"{said}{'' if said.endswith('?') else '.'} The DSN names {place(dsn)}: check host and port, and whether "
            f"the server runs; {how_to_wait}."
        ) from error


def is_away(error: psycopg.Error) -> bool:
    """Whether the database, a lock or room is missing for now. Any other error would come again at once."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_FOR_NOW)


_FOR_NOW = ("08", "40", "53", "57P", "57014", "55P03")


def is_refused(error: Exception) -> bool:
    """Whether PostgreSQL does not let us in until a person changes something. libpq then gives words and no code."""
    return getattr(error, "sqlstate", None) is None and bool(_REFUSED.search(str(error)))


_REFUSED = re.compile(
    "authentication failed|pg_hba.conf|no password supplied|does not exist|permission denied|no such (database|user)"
    "|not permitted to log in|server does not support SSL"
    r"|invalid \w+ value|definition of service"  # options that libpq does not understand: nobody was asked
)


def is_full(error: Exception) -> bool:
    """Whether a server or pooler that is there has no connection left for us."""
    return bool(_FULL.search(str(error)))


_FULL = re.compile("too many (clients|connections)|connection slots|no more connections allowed")


def refuse_server(conn: Connection | AsyncConnection) -> None:
    """Refuse a server or a database that busload cannot work on."""
    refuse_version(conn.info.server_version, conn.info.parameter_status("server_encoding"))


def refuse_version(version: int, encoding: str | None) -> None:
    """Refuse a server by what it says of itself when a connection is made."""
    if version < OLDEST_SERVER:
        raise DatabaseUnusableError(f"The server is PostgreSQL {version // 10000}, busload needs 15 or later.")
    if encoding != "UTF8":
        raise DatabaseUnusableError(
            f"The database is encoded in {encoding}, busload needs UTF8. Create it with `createdb -E UTF8`."
        )


def complete(dsn: str) -> str:
    """The DSN with our parameters, unless it sets them itself. The encoding is always ours: a COPY is made of bytes."""
    return make_conninfo(**{**PARAMETERS, **read(dsn), "client_encoding": "UTF8"})

"""Connections as busload wants them: checked when they are new, and never waited for without an end."""

from __future__ import annotations

import asyncio
import logging
import re
import select
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import waiting
from psycopg.conninfo import make_conninfo
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn

from busload.domain.retry import Backoff
from busload.errors import DatabaseUnavailable, DatabaseUnusable, InvalidOperationError, kind_of
from busload.store.dsn import place, read

log = logging.getLogger("busload")

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]
T = TypeVar("T")

OLDEST_SERVER = 150000

RESPONSE_TIMEOUT = 10.0
"""Seconds without a byte of an answer after which a connection is doubted."""

CHECK_WITHIN = 2.0
"""Seconds to connect, and again to answer, for the server that is asked whether it works on a statement."""

CANCEL_WITHIN = 1.0
"""Seconds in which the server must take a request to cancel, and again to obey it; else the connection is given up."""

BUSY_FOR = 120.0
"""Seconds of silence for which a pooler that has no connection for a question is believed to be busy with ours."""

ABOUT = """SELECT pg_catalog.pg_backend_pid(), pg_catalog.current_setting('synchronous_commit'),
                  pg_catalog.current_setting('default_transaction_isolation')"""
ISOLATE = "SET default_transaction_isolation = 'read committed'"
"""Who waits for a row must then see it as it is: a snapshot from before would be a reason to fail."""

SERVED = """SELECT EXISTS (
    SELECT FROM pg_catalog.pg_stat_activity
     WHERE pid <> pg_catalog.pg_backend_pid() AND wait_event_type IS DISTINCT FROM 'Client'
       AND state IN ('active', 'disabled')  -- the latter by track_activities = off
       AND CASE WHEN %(pooled)s::boolean
                THEN usename = current_user AND datname = current_database()
                     AND application_name = current_setting('application_name')
                     AND query_start < clock_timestamp() - interval '1 s'
                ELSE pid = %(pid)s::integer END)"""
"""Whether a backend works on its statement, rather than waiting for the client that waits for it. Behind a pooler it is
not known which one is ours: any long statement of ours may be it."""

PLAN_ONCE = "SET plan_cache_mode = force_generic_plan; SET jit = off; SET enable_seqscan = off"
LOOK_NOWHERE = "SET search_path = pg_catalog, pg_temp"
"""For connections that never run a word of a user's: nothing is looked for in a schema where strangers may create."""
LOOK_NOWHERE_NOW = LOOK_NOWHERE.replace("SET", "SET LOCAL")
"""For the transaction alone: behind a pooler the connection is somebody else's next."""

# A peer that vanished without a word is noticed within 15 seconds instead of the kernel's many minutes.
PARAMETERS: dict[str, Any] = {
    "application_name": "busload",
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}
_QUESTION: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, "connect_timeout": int(CHECK_WITHIN)}


class OwnConnection(psycopg.Connection[Any]):
    """One whose statements come to an end even if the network swallows their answer, and nothing breaks.

    A statement may take its time, as long as the server works on it. If no byte has come for `response_timeout`
    seconds, the server is asked on another connection whether it does. If not, and no answer has come meanwhile, this
    one is closed.
    """

    response_timeout: float | None = None
    asks = True
    pooled = False
    given_up = False
    conninfo = ""

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        if self.response_timeout is None:
            return super().wait(gen, *args, **kwargs)
        silent = 0.0
        while True:
            try:
                return super().wait(_watch(gen, self.pgconn, self.response_timeout), *args, **kwargs)
            except _Silence:
                silent += self.response_timeout
                if not (self.asks and (self._is_served(silent) or was_spoken_to(self))):
                    raise _give_up(self) from None
            except KeyboardInterrupt:  # psycopg has cancelled the statement, but cannot read its end if `gen` was hit
                if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                    self.pgconn.finish()
                raise

    def _is_served(self, silent: float) -> bool:
        busy = False
        try:
            with OwnConnection.connect(self.conninfo, **_QUESTION) as other:
                busy = self.pooled and silent < BUSY_FOR  # a pooler has let us in, and a full one may say no more
                other.response_timeout, other.asks = CHECK_WITHIN, False
                with other.transaction():
                    other.execute(LOOK_NOWHERE_NOW)
                    row = other.execute(SERVED, {"pid": self.info.backend_pid, "pooled": self.pooled}).fetchone()
                return row is not None and bool(row[0])
        except psycopg.Error as error:
            return is_full(error) or (busy and isinstance(error, DatabaseUnavailable))


class OwnAsyncConnection(psycopg.AsyncConnection[Any]):
    """The same for connections that are awaited. Cancelling a statement ends its wait within seconds as well."""

    response_timeout: float | None = None
    asks = True
    pooled = False
    given_up = False
    conninfo = ""

    async def wait(self, gen: Generator[Any, Any, T], interval: float = 0.1, timeout: float | None = None) -> T:
        silent = 0.0
        while True:
            watched = gen if self.response_timeout is None else _watch(gen, self.pgconn, self.response_timeout)
            try:
                return await waiting.wait_async(watched, self.pgconn.socket, interval=interval, timeout=timeout)
            except asyncio.CancelledError:
                await self._cancel(gen)
                raise
            except _Silence:
                silent += self.response_timeout or 0.0
                if not (self.asks and (await self._is_served(silent) or was_spoken_to(self))):
                    raise _give_up(self) from None

    async def _cancel(self, gen: Generator[Any, Any, T]) -> None:
        """Have the server end the statement, so that the connection can be used again. It is lost if that fails."""
        try:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                await self.cancel_safe(timeout=CANCEL_WITHIN)
                await waiting.wait_async(gen, self.pgconn.socket, interval=0.1, timeout=CANCEL_WITHIN)
        except psycopg.Error as error:  # most likely that it was cancelled; its caller hears of that in any case
            log.debug("A statement was cancelled: %s", error)
        finally:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                _give_up(self)

    async def _is_served(self, silent: float) -> bool:
        busy = False
        try:
            async with await OwnAsyncConnection.connect(self.conninfo, **_QUESTION) as other:
                busy = self.pooled and silent < BUSY_FOR  # a pooler has let us in, and a full one may say no more
                other.response_timeout, other.asks = CHECK_WITHIN, False
                async with other.transaction():
                    await other.execute(LOOK_NOWHERE_NOW)
                    cursor = await other.execute(SERVED, {"pid": self.info.backend_pid, "pooled": self.pooled})
                    row = await cursor.fetchone()
                return row is not None and bool(row[0])
        except psycopg.Error as error:
            return is_full(error) or (busy and isinstance(error, DatabaseUnavailable))


class _Silence(Exception):
    """No byte has come for too long."""


def _watch(gen: Generator[Any, Any, T], pgconn: PGconn, seconds: float) -> Generator[Any, Any, T]:
    """What psycopg waits for, and an end to waiting for a statement's answer; `gen` can then be waited for again."""
    ready: Any = None
    since = time.monotonic()
    try:
        while True:
            ready = yield gen.send(ready)
            if ready:
                since = time.monotonic()
            elif time.monotonic() - since > seconds and pgconn.transaction_status == TransactionStatus.ACTIVE:
                raise _Silence
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def was_spoken_to(conn: Connection | AsyncConnection) -> bool:
    """Whether a connection has something to read: the kernel knows at once, the server after a round trip."""
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN | select.POLLERR | select.POLLHUP)
    return bool(poll.poll(0))


def connect(dsn: str, *, response_timeout: float | None = None) -> OwnConnection:
    """A connection outside of any pool. It prepares nothing, so a pooler may stand in between."""
    conninfo = complete(dsn)
    conn = OwnConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    conn.conninfo, conn.response_timeout = conninfo, response_timeout
    return conn


async def connect_async(dsn: str, *, response_timeout: float | None = None) -> OwnAsyncConnection:
    """A connection outside of any pool. It prepares nothing, so a pooler may stand in between."""
    conninfo = complete(dsn)
    conn = await OwnAsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    conn.conninfo, conn.response_timeout = conninfo, response_timeout
    return conn


def connect_within(dsn: str, seconds: float | None) -> OwnConnection:
    """A connection as soon as the server lets us in: it is waited for so many seconds, or for ever if None.

    What waiting does not change is raised at once: a wrong password, a database that does not exist.
    """
    waiting = _Waiting(seconds)
    while True:
        try:
            return connect(dsn, response_timeout=RESPONSE_TIMEOUT)
        except psycopg.OperationalError as error:
            time.sleep(waiting.pause(error))


async def connect_within_async(dsn: str, seconds: float | None) -> OwnAsyncConnection:
    """The same, awaited."""
    waiting = _Waiting(seconds)
    while True:
        try:
            return await connect_async(dsn, response_timeout=RESPONSE_TIMEOUT)
        except psycopg.OperationalError as error:
            await asyncio.sleep(waiting.pause(error))


PATIENCE = "open(wait=30) waits for it that many seconds"


def look(dsn: str, seconds: float, patience: str = PATIENCE) -> None:
    """See that the database is there and can be used. A server that is away is waited for so many seconds."""
    with told(dsn, patience), connect_within(dsn, seconds) as conn:
        refuse_server(conn)


async def look_async(dsn: str, seconds: float) -> None:
    """The same, awaited."""
    with told(dsn):
        async with await connect_within_async(dsn, seconds) as conn:
            refuse_server(conn)


@contextmanager
def told(dsn: str, patience: str = PATIENCE) -> Iterator[None]:
    """Say which database it was, and how to be more patient with one that is away."""
    try:
        yield
    except psycopg.OperationalError as error:
        said = " ".join(str(error).split())
        if is_turned_away(error):
            raise DatabaseUnusable(
                f"PostgreSQL does not let us into {place(dsn)}: {said}. Check user, password, database and options of "
                "the DSN."
            ) from error
        if not isinstance(error, DatabaseUnavailable):
            said = f"The database cannot be reached: {said}"
        raise DatabaseUnavailable(
            f"{said}{'' if said.endswith('?') else '.'} The DSN names {place(dsn)}: check host and port, and whether "
            f"the server runs; {patience}."
        ) from error


class _Waiting:
    """For a server that cannot be reached: it is said once that we wait, and raised when the time is up."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._began, self._backoff = seconds, time.monotonic(), Backoff()

    def pause(self, error: psycopg.OperationalError) -> float:
        waited, said = time.monotonic() - self._began, " ".join(str(error).split())
        if is_turned_away(error):
            raise error
        if self._seconds is not None and waited >= self._seconds:
            if not self._seconds:
                raise error
            raise DatabaseUnavailable(f"The database could not be reached for {self._seconds:g} s: {said}") from error
        if not self._backoff.tries:
            limit = "" if self._seconds is None else f" for up to {self._seconds:g} s"
            log.warning("The database cannot be reached, waiting for it%s: %s", limit, said)
        pause = self._backoff.pause()
        return pause if self._seconds is None else max(0.0, min(pause, self._seconds - waited))


def is_away(error: psycopg.Error) -> bool:
    """Whether the database, a lock or room is missing for now; all else is refused, and would be again at once."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_FOR_NOW)


_FOR_NOW = ("08", "40", "53", "57P", "57014", "55P03")


def is_turned_away(error: Exception) -> bool:
    """Whether PostgreSQL did not let us in until a person changes something. Then libpq gives words and no code."""
    return getattr(error, "sqlstate", None) is None and bool(_TURNED_AWAY.search(str(error)))


_TURNED_AWAY = re.compile(
    "authentication failed|pg_hba.conf|no password supplied|does not exist|permission denied|no such (database|user)"
    "|not permitted to log in|server does not support SSL"
    r"|invalid \w+ value|definition of service"  # options that libpq does not understand: nobody was asked
)


def is_full(error: Exception) -> bool:
    """Whether a server or pooler that is there has no connection left for us."""
    return bool(_FULL.search(str(error)))


_FULL = re.compile("too many (clients|connections)|connection slots|no more connections allowed")


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
    """How to come from what somebody has to the psycopg connection that it uses."""
    module = f"{type(conn).__module__}."
    if module.startswith("sqlalchemy.ext.asyncio."):
        return "(await (await session.connection()).get_raw_connection()).driver_connection"
    if module.startswith("sqlalchemy."):
        return "session.connection().connection.driver_connection"
    if module.startswith("django."):
        return "django.db.connection.connection, inside atomic()"
    if module.startswith("asyncpg."):
        return "one of psycopg: no other driver can take part. For SQLAlchemy the URL then begins with postgresql+psycopg://"
    return "the psycopg connection that your session or ORM uses"


def about_to_begin(conn: Connection | AsyncConnection) -> bool:
    """Whether the caller's transaction begins with its next statement.

    It has to have one before ours: psycopg would take our block for the whole transaction, and commit it.
    """
    return not conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE


def complete(dsn: str) -> str:
    """The DSN with our parameters, unless it sets them itself."""
    return make_conninfo(**{**PARAMETERS, **read(dsn)})


def _give_up(conn: OwnConnection | OwnAsyncConnection) -> DatabaseUnavailable:
    """Close a connection whose server does not answer. A cancel or a goodbye might wait for it as well."""
    conn.given_up = True
    conn.pgconn.finish()
    return DatabaseUnavailable(
        f"PostgreSQL has not answered for {conn.response_timeout or CANCEL_WITHIN:g} s, and does not say that it works "
        "on the statement. The connection was given up; the next call opens another one."
    )


def configure(conn: OwnConnection) -> None:
    """Get along with the server, pooler and defaults that are there."""
    if _adapt(conn, conn.execute(ABOUT, prepare=False).fetchone()):
        conn.execute(ISOLATE, prepare=False)


async def configure_async(conn: OwnAsyncConnection) -> None:
    """The same, awaited."""
    if _adapt(conn, await (await conn.execute(ABOUT, prepare=False)).fetchone()):
        await conn.execute(ISOLATE, prepare=False)


def _adapt(conn: OwnConnection | OwnAsyncConnection, row: Any) -> bool:
    """Returns whether the isolation has to be set, which a pooler would not keep."""
    backend, synchronous_commit, isolation = row
    if backend != conn.info.backend_pid:
        # A pooler stands in between: the next transaction may run on another server connection, which would not know
        # the statements prepared on this one.
        conn.prepare_threshold = None
        conn.pooled = True
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

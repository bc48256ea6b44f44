"""Connections of our own: adapted to their server when they are new, and never waited for without an end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn

from busload.errors import DatabaseUnavailableError
from busload.postgres import waiting
from busload.postgres.backoff import Backoff
from busload.postgres.connection import (
    HOW_TO_WAIT,
    LOCAL_SAFE_SEARCH_PATH,
    complete,
    connection_errors_explained,
    has_unread_input,
    is_full,
    is_refused,
    refuse_server,
)
from busload.postgres.prepared import Prepared

log = logging.getLogger("busload")
T = TypeVar("T")

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
"""A statement that has waited for a row must see the row as it is: with an older snapshot it would fail."""

SERVED = """SELECT EXISTS (
    SELECT FROM pg_catalog.pg_stat_activity
     WHERE pid <> pg_catalog.pg_backend_pid() AND wait_event_type IS DISTINCT FROM 'Client'
       AND state IN ('active', 'disabled')  -- the latter by track_activities = off
       AND CASE WHEN %(pooled)s::boolean
                THEN usename = current_user AND datname = current_database()
                     AND application_name = current_setting('application_name')
                     AND query_start < clock_timestamp() - interval '1 s'
                ELSE pid = %(pid)s::integer END)"""
"""Whether a backend works on its statement, and does not wait for the client that waits for it. Behind a pooler we do
not know which backend is ours: any long statement of ours may be it."""

_QUESTION: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, "connect_timeout": int(CHECK_WITHIN)}


class OwnAsyncConnection(psycopg.AsyncConnection[Any]):
    """A connection whose statements end even if the network swallows their answer and nothing breaks.

    A statement may take its time, as long as the server works on it. If no byte has come for `response_timeout`
    seconds, the server is asked on another connection whether it does. If it does not, and no answer has come
    meanwhile, this connection is closed. If the wait for a statement is interrupted, it ends within seconds as well.
    """

    response_timeout: float | None = None
    """Seconds without a byte of an answer after which the server is asked whether it works on the statement."""
    asks = True
    """Whether the server is asked; otherwise the connection is given up at once."""
    pooled = False
    """Whether a pooler stands between us and the server."""
    given_up = False
    conninfo = ""

    def __init__(self, pgconn: PGconn) -> None:
        super().__init__(pgconn)
        self.made_at = time.monotonic()
        self._prepared_by_us = Prepared(self)

    @property
    def takes_statements(self) -> bool:
        """Whether a statement can be sent as it is: nobody has to begin a transaction for it, or to open a pipeline."""
        return self.autocommit and self.pgconn.pipeline_status == PipelineStatus.OFF

    async def answer(self, sql: bytes, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement of ours, and return its rows."""
        async with self.lock:
            return await self.wait(self._prepared_by_us.answer(self, sql, params))

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        self._prepared_by_us.used_by_others()
        return super().cursor(*args, **kwargs)

    def _deallocate(self, name: bytes | None) -> Generator[Any, Any, None]:
        """Have the server forget a statement of psycopg; if it is None, all statements, and ours with them."""
        if name is None:
            self._prepared_by_us.forgotten()
        return super()._deallocate(name)

    def belong_to(self, pool: Any) -> None:
        """Say which pool it belongs to: psycopg then leaves it open at the end of `with`."""
        self._pool = pool

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it also if the COMMIT or ROLLBACK at the end is interrupted: psycopg would leave it open."""
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            if getattr(self, "_pool", None) is None:
                await self.close()

    async def wait(self, gen: Generator[Any, Any, T], interval: float = 0.1, timeout: float | None = None) -> T:
        silent = 0.0
        while True:
            try:
                if timeout is None and self.response_timeout is not None:
                    return await waiting.for_answer(gen, self.pgconn, self.response_timeout)
                return await waiting.for_socket(gen, self.pgconn.socket, interval=interval, timeout=timeout)
            except waiting.INTERRUPTION:
                await self._cancel(gen)
                raise
            except waiting.SilenceError:
                silent += self.response_timeout or 0.0
                if not (self.asks and (await self._is_served(silent) or has_unread_input(self))):
                    raise _give_up(self) from None

    async def _cancel(self, gen: Generator[Any, Any, T]) -> None:
        """Have the server end the statement, so that the connection can be used again. It is lost if that fails."""
        try:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                await self.cancel_safe(timeout=CANCEL_WITHIN)
                await waiting.for_socket(gen, self.pgconn.socket, interval=0.1, timeout=CANCEL_WITHIN)
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
                    await other.execute(LOCAL_SAFE_SEARCH_PATH)
                    cursor = await other.execute(SERVED, {"pid": self.info.backend_pid, "pooled": self.pooled})
                    [(served,)] = await cursor.fetchall()
                return bool(served)
        except psycopg.Error as error:
            return is_full(error) or (busy and isinstance(error, DatabaseUnavailableError))


async def connect_async(dsn: str, *, response_timeout: float | None = None) -> OwnAsyncConnection:
    """A connection outside of any pool. It prepares nothing, so a pooler may stand in between."""
    conninfo = complete(dsn)
    conn = await OwnAsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    conn.conninfo, conn.response_timeout = conninfo, response_timeout
    return conn


async def connect_within_async(dsn: str, seconds: float | None) -> OwnAsyncConnection:
    """Connect as soon as the server lets us in. Wait for it so many seconds, or for ever if None.

    An error that waiting does not change is raised at once: a wrong password, a database that does not exist.
    """
    began, backoff = time.monotonic(), Backoff()
    while True:
        try:
            return await connect_async(dsn, response_timeout=RESPONSE_TIMEOUT)
        except psycopg.OperationalError as error:
            if is_refused(error) or seconds == 0:
                raise
            said = " ".join(str(error).split())
            left = math.inf if seconds is None else began + seconds - time.monotonic()
            if left <= 0:
                raise DatabaseUnavailableError(
                    f"The database could not be reached for {seconds:g} s: {said}"
                ) from error
            if not backoff.tries:
                limit = "" if seconds is None else f" for up to {seconds:g} s"
                log.warning("The database cannot be reached, waiting for it%s: %s", limit, said)
            await waiting.sleep(min(backoff.pause(), left))


async def check_server_async(dsn: str, seconds: float, how_to_wait: str = HOW_TO_WAIT) -> None:
    """Make sure that the database is there and can be used. Wait so many seconds for a server that is away."""
    with connection_errors_explained(dsn, how_to_wait):
        async with await connect_within_async(dsn, seconds) as conn:
            refuse_server(conn)


async def configure(conn: OwnAsyncConnection) -> None:
    """Adapt a new connection to its server, a pooler, and the defaults of the role."""
    cursor = await conn.execute(ABOUT, prepare=False)
    [(backend, synchronous_commit, isolation)] = await cursor.fetchall()
    if synchronous_commit == "off":
        log.warning("synchronous_commit is off: a crash of PostgreSQL can lose commands that were accepted.")
    if backend != conn.info.backend_pid:
        # A pooler stands in between: the next transaction may run on another server connection, which would not know
        # the statements prepared on this one.
        conn.prepare_threshold = None
        conn.pooled = True
    if isolation == "read committed":
        return
    if conn.pooled:
        log.warning(
            "default_transaction_isolation is %s, and behind a pooler only PostgreSQL can change that: calls that meet "
            "others will fail. Set it to read committed for this role, by ALTER ROLE ... SET.",
            isolation,
        )
    else:
        await conn.execute(ISOLATE, prepare=False)


def _give_up(conn: OwnAsyncConnection) -> DatabaseUnavailableError:
    """Close a connection whose server does not answer. A cancel or a goodbye might wait for it as well."""
    conn.given_up = True
    conn.pgconn.finish()
    return DatabaseUnavailableError(
        f"PostgreSQL has not answered for {conn.response_timeout or CANCEL_WITHIN:g} s, and does not say that it works "
        "on the statement. The connection was given up; the next call opens another one."
    )

"""Made from busload.postgres.own_connection by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from types import TracebackType
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn

from busload.errors import DatabaseUnavailableError
from busload.postgres import waiting_in_threads as waiting
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
from busload.postgres.own_connection import (
    _QUESTION,
    ABOUT,
    BUSY_FOR,
    CANCEL_WITHIN,
    CHECK_WITHIN,
    ISOLATE,
    RESPONSE_TIMEOUT,
    SERVED,
    T,
    log,
)
from busload.postgres.prepared import Prepared


class OwnConnection(psycopg.Connection[Any]):
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

    def answer(self, sql: bytes, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement of ours, and return its rows."""
        with self.lock:
            return self.wait(self._prepared_by_us.answer(self, sql, params))

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it also if the COMMIT or ROLLBACK at the end is interrupted: psycopg would leave it open."""
        try:
            super().__exit__(kind, error, trace)
        finally:
            if getattr(self, "_pool", None) is None:
                self.close()

    def wait(self, gen: Generator[Any, Any, T], interval: float = 0.1, timeout: float | None = None) -> T:
        silent = 0.0
        while True:
            try:
                if timeout is None and self.response_timeout is not None:
                    return waiting.for_answer(gen, self.pgconn, self.response_timeout)
                return waiting.for_socket(gen, self.pgconn.socket, interval=interval, timeout=timeout)
            except waiting.INTERRUPTION:
                self._cancel(gen)
                raise
            except waiting.SilenceError:
                silent += self.response_timeout or 0.0
                if not (self.asks and (self._is_served(silent) or has_unread_input(self))):
                    raise _give_up(self) from None

    def _cancel(self, gen: Generator[Any, Any, T]) -> None:
        """Have the server end the statement, so that the connection can be used again. It is lost if that fails."""
        try:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                self.cancel_safe(timeout=CANCEL_WITHIN)
                waiting.for_socket(gen, self.pgconn.socket, interval=0.1, timeout=CANCEL_WITHIN)
        except psycopg.Error as error:  # most likely that it was cancelled; its caller hears of that in any case
            log.debug("A statement was cancelled: %s", error)
        finally:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                _give_up(self)

    def _is_served(self, silent: float) -> bool:
        busy = False
        try:
            with OwnConnection.connect(self.conninfo, **_QUESTION) as other:
                busy = self.pooled and silent < BUSY_FOR  # a pooler has let us in, and a full one may say no more
                other.response_timeout, other.asks = CHECK_WITHIN, False
                with other.transaction():
                    other.execute(LOCAL_SAFE_SEARCH_PATH)
                    cursor = other.execute(SERVED, {"pid": self.info.backend_pid, "pooled": self.pooled})
                    [(served,)] = cursor.fetchall()
                return bool(served)
        except psycopg.Error as error:
            return is_full(error) or (busy and isinstance(error, DatabaseUnavailableError))


def connect(dsn: str, *, response_timeout: float | None = None) -> OwnConnection:
    """A connection outside of any pool. It prepares nothing, so a pooler may stand in between."""
    conninfo = complete(dsn)
    conn = OwnConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    conn.conninfo, conn.response_timeout = conninfo, response_timeout
    return conn


def connect_within(dsn: str, seconds: float | None) -> OwnConnection:
    """Connect as soon as the server lets us in. Wait for it so many seconds, or for ever if None.

    An error that waiting does not change is raised at once: a wrong password, a database that does not exist.
    """
    began, backoff = time.monotonic(), Backoff()
    while True:
        try:
            return connect(dsn, response_timeout=RESPONSE_TIMEOUT)
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
            waiting.sleep(min(backoff.pause(), left))


def check_server(dsn: str, seconds: float, how_to_wait: str = HOW_TO_WAIT) -> None:
    """Make sure that the database is there and can be used. Wait so many seconds for a server that is away."""
    with connection_errors_explained(dsn, how_to_wait), connect_within(dsn, seconds) as conn:
        refuse_server(conn)


def configure(conn: OwnConnection) -> None:
    """Adapt a new connection to its server, a pooler, and the defaults of the role."""
    cursor = conn.execute(ABOUT, prepare=False)
    [(backend, synchronous_commit, isolation)] = cursor.fetchall()
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
        conn.execute(ISOLATE, prepare=False)


def _give_up(conn: OwnConnection) -> DatabaseUnavailableError:
    """Close a connection whose server does not answer. A cancel or a goodbye might wait for it as well."""
    conn.given_up = True
    conn.pgconn.finish()
    return DatabaseUnavailableError(
        f"PostgreSQL has not answered for {conn.response_timeout or CANCEL_WITHIN:g} s, and does not say that it works "
        "on the statement. The connection was given up; the next call opens another one."
    )

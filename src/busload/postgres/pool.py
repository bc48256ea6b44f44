"""Connections that are made when they are needed, and kept for whoever needs one next.

A pool of our own, because the one of psycopg waits as long again after an outage as it has lasted, and can swallow a
cancellation. One connection is made at a time. A server that is away is tried again every two seconds, for as long as
somebody waits for a connection, so all are served as soon as it is back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Self

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from busload.errors import DatabaseUnavailableError, InvalidOperationError
from busload.postgres import waiting
from busload.postgres.backoff import Backoff
from busload.postgres.connection import (
    SAFE_SEARCH_PATH,
    complete,
    has_unread_input,
    is_away,
    is_refused,
)
from busload.postgres.own_connection import RESPONSE_TIMEOUT, OwnAsyncConnection, configure

IDLE, PIPELINE_OFF = TransactionStatus.IDLE, PipelineStatus.OFF
LEFT_OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
PLAN_ONCE = "SET plan_cache_mode = force_generic_plan; SET jit = off; SET enable_seqscan = off"

UNUSED_FOR = 600.0
"""Seconds after which a connection that nobody needed is closed."""


def async_pool(
    dsn: str,
    max_size: int,
    *,
    timeout: float = 30.0,
    response_timeout: float = RESPONSE_TIMEOUT,
    connection_class: type[OwnAsyncConnection] = OwnAsyncConnection,
) -> AsyncPool:
    return AsyncPool(partial(_new, connection_class, complete(dsn), response_timeout), max_size, timeout=timeout)


def engine_pool(
    dsn: str,
    max_size: int,
    *,
    lock_timeout: str | None = None,
    users_tables: bool = False,
    response_timeout: float = RESPONSE_TIMEOUT,
) -> AsyncPool:
    """The pool of a worker's own statements, so that handlers cannot starve them of connections.

    They are few, short and always the same: each is prepared at once, planned once and never compiled, since planning a
    claim takes as long as running it, and compiling one a hundred times as long. A plan made while tables were small
    must do when they are large: nothing is read from end to end, and now and then a connection starts afresh.
    Those that touch `users_tables` find them, and their triggers what they need, by the search_path of the role.
    """
    session = [PLAN_ONCE]
    if not users_tables:
        session.append(SAFE_SEARCH_PATH)
    if lock_timeout is not None:
        session.append(f"SET lock_timeout = '{lock_timeout}'")
    new = partial(_new, OwnAsyncConnection, complete(dsn), response_timeout, "; ".join(session).encode())
    return AsyncPool(new, max_size, max_lifetime=300)


class AsyncPool:
    """Connections for all who share the pool. A caller that is interrupted at any moment loses none of them."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[OwnAsyncConnection]],
        max_size: int,
        *,
        timeout: float = 30.0,
        max_lifetime: float = 3600.0,
    ) -> None:
        self.max_size, self.timeout, self._max_lifetime = max_size, timeout, max_lifetime
        self.size = 0
        """How many connections there are: handed out, idle, or being made."""
        self._connect = connect
        self._lock = threading.RLock()  # an event loop always finds it free, and a free lock costs next to nothing
        self._idle: deque[tuple[float, OwnAsyncConnection]] = deque()
        self._waiters: deque[waiting.Future[OwnAsyncConnection]] = deque()
        self._making: waiting.Activity | None = None
        self._last_error: Exception | None = None
        self._exhausted: deque[float] = deque(maxlen=1000)
        """When somebody has waited in vain because all connections were in use."""
        self._closed = False

    @property
    def idle(self) -> int:
        """How many connections nobody uses."""
        return len(self._idle)

    def exhaustions(self, within: float) -> int:
        """How often, in the last so many seconds, somebody has waited in vain because all connections were in use."""
        since = time.monotonic() - within
        with self._lock:
            return sum(at >= since for at in self._exhausted)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[OwnAsyncConnection]:
        """A connection for as long as the block lasts. A transaction that is open then ends as the block does."""
        conn = await self.getconn(timeout)
        try:
            async with conn:
                yield conn
        finally:
            await self.putconn(conn)

    async def getconn(self, timeout: float | None = None) -> OwnAsyncConnection:
        """A connection that has to be given back by `putconn`."""
        while self._idle:
            with self._lock:
                if not self._idle:  # another thread was faster
                    break
                conn = self._idle.pop()[1]
            if not has_unread_input(conn) or await self._still_works(conn):
                return conn
        return await self._wait(self.timeout if timeout is None else timeout)

    async def putconn(self, conn: OwnAsyncConnection) -> None:
        """Give a connection of this pool back. A transaction that was left open is rolled back."""
        try:
            if conn.pgconn.transaction_status in LEFT_OPEN and not (_is_piping(conn) or self._closed):
                with suppress(Exception):
                    await conn.rollback()
        finally:
            self._keep(conn)

    async def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        with self._lock:
            self._closed = True
            self._fail(InvalidOperationError("The bus or worker was closed meanwhile."))
            self._drop_idle()
        if self._making is not None:
            await self._making.cancel()

    async def _wait(self, seconds: float) -> OwnAsyncConnection:
        """Wait until a connection is given back or made."""
        with self._lock:
            if self._closed:
                raise InvalidOperationError("The connections were closed, together with their bus or worker.")
            if self._idle:  # given back in the same moment
                return self._idle.pop()[1]
            waiter: waiting.Future[OwnAsyncConnection] = waiting.Future()
            self._waiters.append(waiter)
            if self.size < self.max_size:
                self._grow()
        try:
            return await waiting.result_within(seconds, waiter)
        except BaseException as error:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                else:  # it was served in the same moment, or has an error
                    with suppress(Exception, waiting.INTERRUPTION):
                        self._keep(waiter.result())
            if isinstance(error, TimeoutError):
                raise self._too_late(seconds) from None
            raise

    def _too_late(self, seconds: float) -> DatabaseUnavailableError:
        if self._last_error is not None:
            said = " ".join(str(self._last_error).split())
            return DatabaseUnavailableError(
                f"There was no connection to PostgreSQL for {seconds:g} s: {said.removesuffix('.')}."
            )
        with self._lock:
            if self._making is None:  # else the server is slow to let us in
                self._exhausted.append(time.monotonic())
        all_of_them = "The only connection was" if self.max_size == 1 else f"All {self.max_size} connections were"
        return DatabaseUnavailableError(
            f"{all_of_them} in use for {seconds:g} s. Give connections back sooner, or raise pool_size; pool_timeout "
            "says how long to wait for one."
        )

    def _keep(self, conn: OwnAsyncConnection) -> None:
        """Keep a connection for the next who needs one. This never waits, so no interruption can lose a connection."""
        now, pgconn = time.monotonic(), conn.pgconn
        usable = pgconn.transaction_status == IDLE and pgconn.pipeline_status == PIPELINE_OFF
        with self._lock:
            if not usable or self._closed or now - conn.made_at > self._max_lifetime:
                self._discard(conn)
                return
            while self._waiters:
                waiter = self._waiters.popleft()
                if not waiter.done():
                    waiter.set_result(conn)
                    return
            self._idle.append((now, conn))
            if now - self._idle[0][0] > UNUSED_FOR:
                self._discard(self._idle.popleft()[1])

    def _discard(self, conn: OwnAsyncConnection) -> None:
        conn.pgconn.finish()
        with self._lock:
            self.size -= 1
            if conn.given_up:  # what happened to one has most likely happened to all
                self._drop_idle()
            self._grow()

    def _drop_idle(self) -> None:
        while self._idle:
            self._discard(self._idle.pop()[1])

    def _grow(self) -> None:
        """Make a connection if somebody waits for one; one at a time."""
        if self._waiters and self.size < self.max_size and not (self._making or self._closed):
            self.size += 1
            self._making = waiting.Activity(self._make, "busload-pool")

    async def _make(self) -> None:
        """Try to connect for as long as somebody waits for a connection."""
        conn: OwnAsyncConnection | None = None
        backoff = Backoff()
        try:
            while conn is None and self._waiters:
                try:
                    conn = await self._connect()
                    self._last_error = None
                except Exception as error:
                    if _is_temporary(error):
                        self._last_error = error
                        await waiting.sleep(backoff.pause())
                    else:
                        self._fail(error)
        finally:
            with self._lock:
                self._making = None
                self.size -= conn is None
        with self._lock:
            if conn is not None:
                conn.belong_to(self)
                self._keep(conn)
            self._grow()

    def _fail(self, error: Exception) -> None:
        """Waiting would not help: all who do are told why."""
        with self._lock:
            while self._waiters:
                waiter = self._waiters.popleft()
                if not waiter.done():
                    waiter.set_exception(error)

    async def _still_works(self, conn: OwnAsyncConnection) -> bool:
        """An idle connection has unread input: that is its end, or a notice."""
        try:
            await conn.execute("SELECT", prepare=False)
        except psycopg.Error:
            self._discard(conn)
            return False
        except BaseException:
            self._keep(conn)
            raise
        return True


def _is_piping(conn: OwnAsyncConnection) -> bool:
    """Whether somebody has left a pipeline open, and with it answers that nobody has read."""
    return conn.pgconn.pipeline_status != PIPELINE_OFF


def _is_temporary(error: Exception) -> bool:
    """Whether the same try may succeed later, with nobody changing anything."""
    return isinstance(error, psycopg.Error) and is_away(error) and not is_refused(error)


async def _new(
    kind: type[OwnAsyncConnection], conninfo: str, response_timeout: float, session: bytes = b""
) -> OwnAsyncConnection:
    """A connection that prepares every statement at once if there is a script for its session."""
    conn = await kind.connect(conninfo, autocommit=True)
    conn.conninfo, conn.response_timeout = conninfo, response_timeout
    try:
        await configure(conn)
        if session and not conn.pooled:
            conn.prepare_threshold = 0
            await conn.execute(session, prepare=False)
    except BaseException:
        await conn.close()
        raise
    return conn

"""Connections that are made when they are needed, and kept for whoever needs one next.

A pool of our own, because the one of psycopg waits as long again after an outage as it has lasted, and can swallow a
cancellation. One connection is made at a time. A server that is away is tried again every two seconds, for as long as
somebody waits for a connection, so all are served as soon as it is back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import Self

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from busload.domain.retry import Backoff
from busload.errors import DatabaseUnavailable, InvalidOperationError
from busload.store.connection import (
    LOOK_NOWHERE,
    PLAN_ONCE,
    RESPONSE_TIMEOUT,
    AsyncConnection,
    Connection,
    OwnAsyncConnection,
    OwnConnection,
    complete,
    configure,
    configure_async,
    is_away,
    is_turned_away,
    was_spoken_to,
)

UNUSED_FOR = 600.0
"""Seconds after which a connection that nobody needed is closed."""


def pool(
    dsn: str,
    max_size: int,
    *,
    timeout: float = 30.0,
    response_timeout: float = RESPONSE_TIMEOUT,
    connection_class: type[OwnConnection] = OwnConnection,
) -> Pool:
    return Pool(partial(_new, connection_class, complete(dsn), response_timeout), max_size, timeout=timeout)


def async_pool(
    dsn: str,
    max_size: int,
    *,
    timeout: float = 30.0,
    response_timeout: float = RESPONSE_TIMEOUT,
    connection_class: type[OwnAsyncConnection] = OwnAsyncConnection,
) -> AsyncPool:
    return AsyncPool(partial(_new_async, connection_class, complete(dsn), response_timeout), max_size, timeout=timeout)


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
    new = partial(_new_of_engine, complete(dsn), response_timeout, lock_timeout, users_tables)
    return AsyncPool(new, max_size, max_lifetime=300)


class _Kept:
    """What both pools know about their connections: since when each exists, and is idle."""

    def __init__(self, max_size: int, timeout: float, max_lifetime: float) -> None:
        self.max_size, self.timeout, self._max_lifetime = max_size, timeout, max_lifetime
        self.size = 0
        """How many connections there are: handed out, idle, or being made."""
        self._born: dict[int, float] = {}
        self._why: Exception | None = None
        self._closed = False

    def _is_old(self, conn: object) -> bool:
        return time.monotonic() - self._born.get(id(conn), 0.0) > self._max_lifetime

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvalidOperationError("The connections were closed, together with their bus or worker.")

    def _too_late(self, seconds: float) -> DatabaseUnavailable:
        if self._why is not None:
            why = " ".join(str(self._why).split())
            return DatabaseUnavailable(
                f"There was no connection to PostgreSQL for {seconds:g} s: {why.removesuffix('.')}."
            )
        all_of_them = "The only connection was" if self.max_size == 1 else f"All {self.max_size} connections were"
        return DatabaseUnavailable(
            f"{all_of_them} in use for {seconds:g} s. Give connections back sooner, or raise pool_size; pool_timeout "
            "says how long to wait for one."
        )


class AsyncPool(_Kept):
    """For one event loop. Nothing here waits for a lock, so a caller can be cancelled at any moment."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[OwnAsyncConnection]],
        max_size: int,
        *,
        timeout: float = 30.0,
        max_lifetime: float = 3600.0,
    ) -> None:
        super().__init__(max_size, timeout, max_lifetime)
        self._connect = connect
        self._idle: deque[tuple[float, OwnAsyncConnection]] = deque()
        self._waiting: deque[asyncio.Future[OwnAsyncConnection]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting = False

    @property
    def idle(self) -> int:
        """How many connections nobody uses."""
        return len(self._idle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[OwnAsyncConnection]:
        """A connection for as long as the block lasts. A transaction that is open then ends as the block does."""
        conn = await self.getconn(timeout)
        try:
            async with conn:
                yield conn
        finally:
            self._put(conn)

    async def getconn(self, timeout: float | None = None) -> OwnAsyncConnection:
        """A connection that has to be given back by `putconn`."""
        self._refuse_closed()
        while self._idle:
            _, conn = self._idle.pop()
            if not was_spoken_to(conn) or await self._answers(conn):
                return self._hand_out(conn)
        seconds = self.timeout if timeout is None else timeout
        loop = asyncio.get_running_loop()
        place: asyncio.Future[OwnAsyncConnection] = loop.create_future()
        self._waiting.append(place)
        self._grow()
        timer = loop.call_later(seconds, self._turn_away, place, seconds)
        try:
            return self._hand_out(await place)
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._put(place.result())  # it came in the same moment
            raise
        finally:
            timer.cancel()

    async def putconn(self, conn: AsyncConnection) -> None:
        """Give a connection of this pool back."""
        assert isinstance(conn, OwnAsyncConnection)
        self._put(conn)

    async def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._closed = True
        for place in self._waiting:
            if not place.done():
                place.set_exception(InvalidOperationError("The bus or worker was closed meanwhile."))
        self._drop_idle()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hand_out(self, conn: OwnAsyncConnection) -> OwnAsyncConnection:
        conn._pool = self  # type: ignore[assignment] # then psycopg leaves it open at the end of `async with conn`
        return conn

    def _put(self, conn: OwnAsyncConnection) -> None:
        """Take a connection back. It never waits, so no cancellation can lose one."""
        status = conn.pgconn.transaction_status
        if _is_piping(conn) or self._closed:
            self._discard(conn)
        elif status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            self._start(self._roll_back(conn))
        elif status != TransactionStatus.IDLE or self._is_old(conn):
            self._discard(conn)
        else:
            self._offer(conn)

    def _offer(self, conn: OwnAsyncConnection) -> None:
        conn._pool = None
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(conn)
                return
        now = time.monotonic()
        self._idle.append((now, conn))
        if now - self._idle[0][0] > UNUSED_FOR:
            self._discard(self._idle.popleft()[1])

    def _discard(self, conn: OwnAsyncConnection) -> None:
        given_up = conn.given_up
        conn._pool = None
        conn.pgconn.finish()
        self._born.pop(id(conn), None)
        self.size -= 1
        if given_up:  # what happened to one has most likely happened to all
            self._drop_idle()
        self._grow()

    def _drop_idle(self) -> None:
        while self._idle:
            self._discard(self._idle.pop()[1])

    def _grow(self) -> None:
        """Make a connection if somebody waits for one; one at a time."""
        if self._waiting and self.size < self.max_size and not (self._connecting or self._closed):
            self.size += 1
            self._connecting = True
            self._start(self._make())

    async def _make(self) -> None:
        conn: OwnAsyncConnection | None = None
        try:
            conn = await self._try()
        finally:
            self._connecting = False
            if conn is None:
                self.size -= 1
        if conn is not None:
            self._born[id(conn)] = time.monotonic()
            self._put(conn)
            self._grow()

    async def _try(self) -> OwnAsyncConnection | None:
        """A connection; None if nobody waits for one any more."""
        backoff = Backoff()
        while any(not place.done() for place in self._waiting):
            try:
                conn = await self._connect()
            except Exception as error:
                if not _may_pass(error):
                    self._fail(error)
                    continue
                self._why = error
                await asyncio.sleep(backoff.pause())
            else:
                self._why = None
                return conn
        self._waiting.clear()
        return None

    def _fail(self, error: Exception) -> None:
        """Waiting would not help: all who do are told why."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)

    def _turn_away(self, place: asyncio.Future[OwnAsyncConnection], seconds: float) -> None:
        if not place.done():
            place.set_exception(self._too_late(seconds))

    async def _answers(self, conn: OwnAsyncConnection) -> bool:
        """An idle connection has been spoken to: that is its end, or a notice."""
        try:
            await conn.execute("SELECT", prepare=False)
        except psycopg.Error:
            self._discard(conn)
            return False
        except BaseException:
            self._put(conn)
            raise
        return True

    async def _roll_back(self, conn: OwnAsyncConnection) -> None:
        try:
            await conn.rollback()
        except Exception:
            conn.pgconn.finish()
        finally:
            if conn.pgconn.transaction_status == TransactionStatus.IDLE:
                self._put(conn)
            else:
                self._discard(conn)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="busload-pool")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Pool(_Kept):
    """The same for threads. Whoever needs a connection that does not exist yet makes it himself."""

    def __init__(
        self,
        connect: Callable[[], OwnConnection],
        max_size: int,
        *,
        timeout: float = 30.0,
        max_lifetime: float = 3600.0,
    ) -> None:
        super().__init__(max_size, timeout, max_lifetime)
        self._connect = connect
        self._idle: deque[tuple[float, OwnConnection]] = deque()
        self._changed = threading.Condition()
        self._connecting = False

    @property
    def idle(self) -> int:
        """How many connections nobody uses."""
        return len(self._idle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def connection(self, timeout: float | None = None) -> Iterator[OwnConnection]:
        """A connection for as long as the block lasts. A transaction that is open then ends as the block does."""
        conn = self.getconn(timeout)
        try:
            with conn:
                yield conn
        finally:
            self.putconn(conn)

    def getconn(self, timeout: float | None = None) -> OwnConnection:
        """A connection that has to be given back by `putconn`."""
        seconds = self.timeout if timeout is None else timeout
        end = time.monotonic() + seconds
        while True:
            conn = self._take(seconds, end) or self._make(seconds, end)
            if not was_spoken_to(conn) or self._answers(conn):
                conn._pool = self  # type: ignore[assignment] # then psycopg leaves it open at the end of `with conn`
                return conn

    def putconn(self, conn: Connection) -> None:
        """Give a connection of this pool back."""
        assert isinstance(conn, OwnConnection)
        if _is_piping(conn):
            conn.pgconn.finish()
        elif conn.pgconn.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            try:
                conn.rollback()
            except Exception:
                conn.pgconn.finish()
        conn._pool = None
        if conn.pgconn.transaction_status != TransactionStatus.IDLE or self._is_old(conn):
            self._discard(conn)
            return
        with self._changed:
            if not self._closed:
                now = time.monotonic()
                self._idle.append((now, conn))
                self._changed.notify()
                if now - self._idle[0][0] <= UNUSED_FOR:
                    return
                conn = self._idle.popleft()[1]
        self._discard(conn)

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop_idle()

    def _take(self, seconds: float, end: float) -> OwnConnection | None:
        """An idle connection, or None: then this thread is to make one."""
        with self._changed:
            while True:
                self._refuse_closed()
                if self._idle:
                    return self._idle.pop()[1]
                if self.size < self.max_size and not self._connecting:
                    self.size += 1
                    self._connecting = True
                    return None
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise self._too_late(seconds)

    def _make(self, seconds: float, end: float) -> OwnConnection:
        made = False
        try:
            conn = self._try(seconds, end)
            made = True
        finally:
            with self._changed:
                self._connecting = False
                self.size -= not made
                self._changed.notify()
        self._born[id(conn)] = time.monotonic()
        return conn

    def _try(self, seconds: float, end: float) -> OwnConnection:
        backoff = Backoff()
        while True:
            try:
                conn = self._connect()
            except Exception as error:
                if not _may_pass(error):
                    raise
                self._why = error
                pause = backoff.pause()
                if time.monotonic() + pause >= end:
                    raise self._too_late(seconds) from None
                time.sleep(pause)
                self._refuse_closed()
            else:
                self._why = None
                return conn

    def _answers(self, conn: OwnConnection) -> bool:
        """An idle connection has been spoken to: that is its end, or a notice."""
        try:
            conn.execute("SELECT", prepare=False)
        except psycopg.Error:
            self._discard(conn)
            return False
        except BaseException:
            self.putconn(conn)
            raise
        return True

    def _discard(self, conn: OwnConnection) -> None:
        conn.pgconn.finish()
        with self._changed:
            self._born.pop(id(conn), None)
            self.size -= 1
            self._changed.notify()
        if conn.given_up:  # what happened to one has most likely happened to all
            self._drop_idle()

    def _drop_idle(self) -> None:
        while True:
            with self._changed:
                if not self._idle:
                    return
                _, conn = self._idle.pop()
            self._discard(conn)


def _is_piping(conn: OwnConnection | OwnAsyncConnection) -> bool:
    """Whether somebody has left a pipeline open, and with it answers that nobody has read."""
    return conn.pgconn.pipeline_status != PipelineStatus.OFF


def _may_pass(error: Exception) -> bool:
    """Whether the same try may succeed later, with nobody changing anything."""
    return isinstance(error, psycopg.Error) and is_away(error) and not is_turned_away(error)


def _new(kind: type[OwnConnection], conninfo: str, response_timeout: float) -> OwnConnection:
    conn = kind.connect(conninfo, autocommit=True)
    conn.conninfo, conn.response_timeout = conninfo, response_timeout
    try:
        configure(conn)
    except BaseException:
        conn.close()
        raise
    return conn


async def _new_async(kind: type[OwnAsyncConnection], conninfo: str, response_timeout: float) -> OwnAsyncConnection:
    conn = await kind.connect(conninfo, autocommit=True)
    conn.conninfo, conn.response_timeout = conninfo, response_timeout
    try:
        await configure_async(conn)
    except BaseException:
        await conn.close()
        raise
    return conn


async def _new_of_engine(
    conninfo: str, response_timeout: float, lock_timeout: str | None, users_tables: bool
) -> OwnAsyncConnection:
    conn = await _new_async(OwnAsyncConnection, conninfo, response_timeout)
    try:
        if not conn.pooled:
            conn.prepare_threshold = 0
            await conn.execute(PLAN_ONCE if users_tables else f"{PLAN_ONCE}; {LOOK_NOWHERE}", prepare=False)
            if lock_timeout is not None:
                set_timeout = "SELECT pg_catalog.set_config('lock_timeout', %s, false)"
                await conn.execute(set_timeout, [lock_timeout], prepare=False)
    except BaseException:
        await conn.close()
        raise
    return conn

"""The database of a bus: where it is, connections to it, and everything that is read and written there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import psycopg.errors as pg

from busload.errors import (
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    InvalidOperationError,
    LockWaitTimeoutError,
    OutcomeUnknownError,
    SchemaOutdatedError,
    nothing_written,
)
from busload.postgres import callers_connection, waiting
from busload.postgres.backoff import Backoff
from busload.postgres.callers_connection import AnyConnection, about_to_begin, perform_any, underneath
from busload.postgres.connection import AsyncConnection, refuse_server
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.postgres.own_connection import OwnAsyncConnection, check_server_async, connect_async
from busload.postgres.plan import Plan, Savepoint, Statement, perform_async, within_transaction
from busload.postgres.pool import AsyncPool, async_pool
from busload.postgres.schema import migrate
from busload.postgres.schema.migrate import Migration
from busload.postgres.write import Write, joined_database, lock_holders
from busload.settings import Settings
from busload.telemetry.find import find_telemetry

if TYPE_CHECKING:
    from busload.telemetry.opentelemetry import Telemetry

T = TypeVar("T")

BEGIN = Statement(b"SELECT", {})
"""Begins the caller's transaction: psycopg would take our block for the whole transaction otherwise, and commit it."""


class Database:
    """Performs plans on connections of its own, or on one that the caller gives.

    The database need not exist before `open`: without a DSN an embedded PostgreSQL is started then.
    """

    def __init__(self, dsn: str | None, settings: Settings) -> None:
        self._dsn, self._settings = dsn, settings
        self._embedded: EmbeddedPostgres | None = None
        self._process = os.getpid()
        self._pool: AsyncPool | None = None
        self.schema_checked = False
        self.telemetry: Telemetry | None = None
        """The spans and metrics of this bus; None if nobody has asked OpenTelemetry for any, or it is not open."""

    def move(self, dsn: str, settings: Settings) -> None:
        """Be another database from now on. It must be closed."""
        self._dsn, self._settings, self.schema_checked = dsn, settings, False

    @property
    def dsn(self) -> str:
        """Where the database is; known once it is open."""
        if self._dsn is None:
            raise InvalidOperationError("The bus is not open. Use it in `async with`, or open() it first.")
        return self._dsn

    @property
    def given_dsn(self) -> str | None:
        """Where the database is; None while an embedded one has not been started."""
        return self._dsn

    @property
    def is_open(self) -> bool:
        return self._pool is not None

    @property
    def was_forked(self) -> bool:
        """Whether another process has opened it: two processes on one connection would read each other's answers."""
        return self.is_open and self._process != os.getpid()

    @property
    def pool(self) -> AsyncPool:
        self.refuse_closed()
        assert self._pool is not None
        return self._pool

    def refuse_closed(self) -> None:
        """Refuse a call while the database is not open in this process."""
        if self._pool is None:
            raise InvalidOperationError("The bus is not open. Use it in `async with`, or open() it first.")
        if self.was_forked:
            raise InvalidOperationError("This bus was opened before a fork. Open a bus of its own in each process.")

    async def open(self, *, wait: float | None = 0.0) -> None:
        """Find the database, and see that it can be used.

        A server that cannot be reached is waited for so many seconds; with None nobody looks for it now.
        """
        await waiting.in_thread(self._start_embedded)
        try:
            if wait is not None:
                await check_server_async(self.dsn, wait)
        except BaseException:
            self._close_embedded()
            raise
        self.start()

    def start(self) -> None:
        """Be ready for calls. Connections are made when they are needed."""
        settings = self._settings
        self.telemetry = find_telemetry(settings)
        self._pool = async_pool(
            self.dsn,
            settings.pool_size,
            timeout=settings.pool_timeout.total_seconds(),
            response_timeout=settings.response_timeout.total_seconds(),
        )
        # How many connections first tries may use at a time, and how many those that know that they wait for a lock.
        self._first_tries = waiting.Semaphore(max(1, settings.pool_size // 2))
        self._waiting_room = waiting.Semaphore(max(1, settings.pool_size // 4))

    def for_this_process(self) -> Database:
        """The same database for a process that was forked off, with connections of its own."""
        own = Database(self.dsn, self._settings)
        own.start()
        return own

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        self._pool, self.schema_checked = None, False
        self._close_embedded()

    def callers_connection(self, conn: AnyConnection | None) -> AnyConnection | None:
        """The connection whose transaction a call joins: `conn`, which the caller has given.

        A database of a framework may know the transaction that its caller is in, also if no connection is given.
        """
        return conn

    async def migrate(self, conn: AnyConnection | None = None) -> list[Migration]:
        """Bring the schema up to this release, in the caller's transaction if there is one."""
        if (conn := self.callers_connection(conn)) is not None:
            return await self._join(conn, migrate.migrate())
        async with await connect_async(self.dsn) as own, own.transaction():
            refuse_server(own)
            return await perform_async(own, migrate.migrate())

    async def check_schema(self, conn: AsyncConnection) -> None:
        """Refuse a schema of another release.

        It is read on the connection of the call that needs it: a call that waited for a second connection might wait
        for itself.
        """
        if not self.schema_checked:
            refuse_server(conn)
            await perform_async(conn, self._check())

    async def read(self, plan: Plan[T], *, within: float | None = None) -> T:
        """Perform statements that need no transaction; `within` is how long to wait for a connection at most."""
        async with self.pool.connection(self._patience(within)) as conn:
            await self.check_schema(conn)
            return await perform_async(conn, plan)

    async def in_transaction(self, plan: Plan[T], *, within: float | None = None) -> T:
        """Perform a plan in a transaction of its own. The plan may be repeated, so its outcome may be unknown."""
        async with self.pool.connection(self._patience(within)) as conn:
            await self.check_schema(conn)
            async with conn.transaction():
                return await perform_async(conn, plan)

    async def write(self, write: Write[T], conn: AnyConnection | None = None) -> T:
        """Write in the caller's transaction, or in one of our own whose outcome is known when this returns."""
        if (conn := self.callers_connection(conn)) is not None:
            return await self._join(conn, self._checked(write.plan))
        if write.again is not None:
            return await self._write_patiently(write, write.again)
        pool = self.pool
        own = await _connection(pool, write)
        try:
            await self.check_schema(own)
            return await _commit(own, write)
        finally:
            await pool.putconn(own)

    async def _write_patiently(self, write: Write[T], again: Callable[[], Plan[T]]) -> T:
        """Try until the transaction ends that holds what this needs, and have no connection in between.

        First tries, and those that know that they wait, use a part of the pool each: the rest is for all other calls.
        """
        limit, backoff = self._settings.lock_timeout, Backoff(first=0.06, longest=1.25)
        end = time.monotonic() + limit.total_seconds()
        pool, room = self.pool, self._first_tries
        while True:
            async with room:
                own = await _connection(pool, write)
                try:
                    await self.check_schema(own)
                    return await _commit(own, replace(write, plan=again()))
                except psycopg.errors.LockNotAvailable as error:
                    if time.monotonic() >= end:
                        holders = await perform_async(own, lock_holders(limit))
                        raise LockWaitTimeoutError(limit, holders) from error
                finally:
                    await pool.putconn(own)
            room = self._waiting_room
            await waiting.sleep(max(0.0, min(backoff.pause(), end - time.monotonic())))  # the last try is at the end

    async def _join(self, conn: AnyConnection, plan: Plan[T]) -> T:
        """In the caller's transaction, which a failure does not spoil."""
        joined = await underneath(conn)
        if not self.schema_checked:
            callers_connection.refuse_server(joined)
        return await perform_any(joined, _joined(plan, begin=about_to_begin(joined)))

    def _check(self) -> Plan[None]:
        if not self.schema_checked:
            yield from migrate.check()
            self.schema_checked = True

    def _checked(self, plan: Plan[T]) -> Plan[T]:
        yield from self._check()
        return (yield from plan)

    def _patience(self, within: float | None) -> float | None:
        return None if within is None else min(self.pool.timeout, within)

    def _start_embedded(self) -> None:
        self._process = os.getpid()
        if self._dsn is None:
            self._embedded = EmbeddedPostgres(self._settings.home, pg_bin=self._settings.pg_bin).start()
            self._dsn = self._embedded.dsn()

    def _close_embedded(self) -> None:
        if self._embedded is not None:
            self._embedded.close()
            self._embedded, self._dsn = None, None


async def _connection(pool: AsyncPool, write: Write[Any]) -> OwnAsyncConnection:
    try:
        return await pool.getconn()
    except DatabaseUnavailableError as error:
        # A pool cannot know what its connections are for.
        raise DatabaseUnavailableError(str(error) if write.goes_on else f"{error} Nothing was written.") from error


async def _commit(conn: AsyncConnection, write: Write[T]) -> T:
    """A transaction whose COMMIT can be told from its statements when the connection breaks."""
    committing = write.one_statement
    try:
        if write.one_statement:
            return await perform_async(conn, write.plan)
        async with conn.transaction():
            result = await perform_async(conn, write.plan)
            committing = True
        return result
    except psycopg.Error as error:
        if write.goes_on:
            raise
        raise _failure(write, error, conn.info, committing=committing) from error


def _failure(write: Write[Any], error: psycopg.Error, on: psycopg.ConnectionInfo, *, committing: bool) -> Exception:
    """What a caller has to know about a transaction that failed: whether it may have been committed."""
    if isinstance(error, pg.ReadOnlySqlTransaction):
        standby = on.parameter_status("in_hot_standby") == "on"
        return DatabaseReadOnlyError(on.dbname, standby=standby, joined=False)
    if not _connection_lost(error):
        return nothing_written(error)
    if committing:
        return OutcomeUnknownError(batch_id=write.batch_id, command_ids=list(write.command_ids), job_id=write.job_id)
    why = " ".join(str(error).split())
    return DatabaseUnavailableError(f"The connection broke before the commit, so nothing was written: {why}")


def _connection_lost(error: psycopg.Error) -> bool:
    """Whether the server could not say how it ended; an error that carries a code, other than its own shutdown, did."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("57P", "08"))


def _joined(plan: Plan[T], *, begin: bool) -> Plan[T]:
    if begin:
        yield BEGIN
    try:
        result: T = yield Savepoint(within_transaction(plan), begins=True)
    except _ABOUT_THE_DATABASE as error:
        refused = yield Savepoint(_refusal(error), begins=True)
        if refused is None:
            raise
        raise refused from error
    return result


_ABOUT_THE_DATABASE = (
    SchemaOutdatedError,
    pg.ReadOnlySqlTransaction,
    pg.UndefinedTable,
    pg.UndefinedColumn,
    pg.UndefinedFunction,
    pg.InvalidSchemaName,
)
"""What another database than that of the bus raises, which a caller may have joined."""


def _refusal(error: Exception) -> Plan[Exception | None]:
    """What is wrong with the database that a call has joined; None if the error is about something else."""
    database, standby = yield from joined_database()
    if isinstance(error, pg.ReadOnlySqlTransaction):
        return DatabaseReadOnlyError(database, standby=standby, joined=True)
    try:
        yield from migrate.check()
    except SchemaOutdatedError as outdated:
        return SchemaOutdatedError(found=outdated.found, needed=outdated.needed, database=database)
    return None

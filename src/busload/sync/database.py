"""Made from busload.postgres.database by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg

from busload.errors import (
    DatabaseUnavailableError,
    InvalidOperationError,
    LockWaitTimeoutError,
)
from busload.postgres import callers_connection
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.backoff import Backoff
from busload.postgres.callers_connection import (
    AnySyncConnection,
    about_to_begin,
    perform_in_threads,
    underneath_in_threads,
)
from busload.postgres.connection import Connection, refuse_server
from busload.postgres.embedded.server import EmbeddedPostgres
from busload.postgres.plan import Plan
from busload.postgres.schema import migrate
from busload.postgres.schema.migrate import Migration
from busload.postgres.write import Write, lock_holders
from busload.settings import Settings
from busload.sync.connection import OwnConnection, check_server, connect
from busload.sync.plan import perform
from busload.sync.pool import Pool, pool
from busload.telemetry.find import find_telemetry

if TYPE_CHECKING:
    from busload.telemetry.opentelemetry import Telemetry


from busload.postgres.database import T, _failure, _joined


class Database:
    """Performs plans on connections of its own, or on one that the caller gives.

    The database need not exist before `open`: without a DSN an embedded PostgreSQL is started then.
    """

    def __init__(self, dsn: str | None, settings: Settings) -> None:
        self._dsn, self._settings = dsn, settings
        self._embedded: EmbeddedPostgres | None = None
        self._process = os.getpid()
        self._pool: Pool | None = None
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
            raise InvalidOperationError("The bus is not open. Use it in `with`, or open() it first.")
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
    def pool(self) -> Pool:
        self.refuse_closed()
        assert self._pool is not None
        return self._pool

    def refuse_closed(self) -> None:
        """Refuse a call while the database is not open in this process."""
        if self._pool is None:
            raise InvalidOperationError("The bus is not open. Use it in `with`, or open() it first.")
        if self.was_forked:
            raise InvalidOperationError("This bus was opened before a fork. Open a bus of its own in each process.")

    def open(self, *, wait: float | None = 0.0) -> None:
        """Find the database, and see that it can be used.

        A server that cannot be reached is waited for so many seconds; with None nobody looks for it now.
        """
        waiting.in_thread(self._start_embedded)
        try:
            if wait is not None:
                check_server(self.dsn, wait)
        except BaseException:
            self._close_embedded()
            raise
        self.start()

    def start(self) -> None:
        """Be ready for calls. Connections are made when they are needed."""
        settings = self._settings
        self.telemetry = find_telemetry(settings)
        self._pool = pool(
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

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool, self.schema_checked = None, False
        self._close_embedded()

    def callers_connection(self, conn: AnySyncConnection | None) -> AnySyncConnection | None:
        """The connection whose transaction a call joins: `conn`, which the caller has given.

        A database of a framework may know the transaction that its caller is in, also if no connection is given.
        """
        return conn

    def migrate(self, conn: AnySyncConnection | None = None) -> list[Migration]:
        """Bring the schema up to this release, in the caller's transaction if there is one."""
        if (conn := self.callers_connection(conn)) is not None:
            return self._join(conn, migrate.migrate())
        with connect(self.dsn) as own, own.transaction():
            refuse_server(own)
            return perform(own, migrate.migrate())

    def check_schema(self, conn: Connection) -> None:
        """Refuse a schema of another release.

        It is read on the connection of the call that needs it: a call that waited for a second connection might wait
        for itself.
        """
        if not self.schema_checked:
            refuse_server(conn)
            perform(conn, self._check())

    def read(self, plan: Plan[T], *, within: float | None = None) -> T:
        """Perform statements that need no transaction; `within` is how long to wait for a connection at most."""
        with self.pool.connection(self._patience(within)) as conn:
            self.check_schema(conn)
            return perform(conn, plan)

    def in_transaction(self, plan: Plan[T], *, within: float | None = None) -> T:
        """Perform a plan in a transaction of its own. The plan may be repeated, so its outcome may be unknown."""
        with self.pool.connection(self._patience(within)) as conn:
            self.check_schema(conn)
            with conn.transaction():
                return perform(conn, plan)

    def write(self, write: Write[T], conn: AnySyncConnection | None = None) -> T:
        """Write in the caller's transaction, or in one of our own whose outcome is known when this returns."""
        if (conn := self.callers_connection(conn)) is not None:
            return self._join(conn, self._checked(write.plan))
        if write.again is not None:
            return self._write_patiently(write, write.again)
        pool = self.pool
        own = _connection(pool, write)
        try:
            self.check_schema(own)
            return _commit(own, write)
        finally:
            pool.putconn(own)

    def _write_patiently(self, write: Write[T], again: Callable[[], Plan[T]]) -> T:
        """Try until the transaction ends that holds what this needs, and have no connection in between.

        First tries, and those that know that they wait, use a part of the pool each: the rest is for all other calls.
        """
        limit, backoff = self._settings.lock_timeout, Backoff(first=0.06, longest=1.25)
        end = time.monotonic() + limit.total_seconds()
        pool, room = self.pool, self._first_tries
        while True:
            with room:
                own = _connection(pool, write)
                try:
                    self.check_schema(own)
                    return _commit(own, replace(write, plan=again()))
                except psycopg.errors.LockNotAvailable as error:
                    if time.monotonic() >= end:
                        holders = perform(own, lock_holders(limit))
                        raise LockWaitTimeoutError(limit, holders) from error
                finally:
                    pool.putconn(own)
            room = self._waiting_room
            waiting.sleep(max(0.0, min(backoff.pause(), end - time.monotonic())))  # the last try is at the end

    def _join(self, conn: AnySyncConnection, plan: Plan[T]) -> T:
        """In the caller's transaction, which a failure does not spoil."""
        joined = underneath_in_threads(conn)
        if not self.schema_checked:
            callers_connection.refuse_server(joined)
        return perform_in_threads(joined, _joined(plan, begin=about_to_begin(joined)))

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


def _connection(pool: Pool, write: Write[Any]) -> OwnConnection:
    try:
        return pool.getconn()
    except DatabaseUnavailableError as error:
        # A pool cannot know what its connections are for.
        raise DatabaseUnavailableError(str(error) if write.goes_on else f"{error} Nothing was written.") from error


def _commit(conn: Connection, write: Write[T]) -> T:
    """A transaction whose COMMIT can be told from its statements when the connection breaks."""
    committing = write.one_statement
    try:
        if write.one_statement:
            return perform(conn, write.plan)
        with conn.transaction():
            result = perform(conn, write.plan)
            committing = True
        return result
    except psycopg.Error as error:
        if write.goes_on:
            raise
        raise _failure(write, error, conn.info, committing=committing) from error

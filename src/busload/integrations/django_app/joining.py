"""What joins the transaction that Django has open, as models do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from busload.batches.batch import CreateOptions, SyncBatchCompletionCallback
from busload.commands.command import BatchCommand
from busload.dispatch.strategy import DispatchName, Strategy
from busload.integrations.self_opening_bus import OpeningDatabase
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.plan import Plan
from busload.sync.bus import SyncCommandBus
from busload.sync.database import Database

P = ParamSpec("P")
T = TypeVar("T")

_independent: ContextVar[bool] = ContextVar("busload_django_independent", default=False)
"""Whether calls commit by themselves, also within a transaction of Django."""


@contextmanager
def _commits_by_itself() -> Iterator[None]:
    token = _independent.set(True)
    try:
        yield
    finally:
        _independent.reset(token)


def _independently(method: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> T:
        with _commits_by_itself():
            return method(*args, **options)

    return call


class JoiningDatabase(Database):
    """Joins the transaction that Django has open on this database in this thread, as models do."""

    def callers_connection(self, conn: AnySyncConnection | None) -> AnySyncConnection | None:
        if conn is not None or _independent.get():
            return conn
        connection = connection_of(alias_of_bus())
        return cast("AnySyncConnection", connection) if _has_transaction(connection) else None

    def read(self, plan: Plan[T], **waiting: float | None) -> T:
        """See what the block has written. Whoever waits sees what is committed: nobody runs anything else."""
        conn = None if waiting else self.callers_connection(None)
        return super().read(plan, **waiting) if conn is None else self._join(conn, self._checked(plan))

    def in_transaction(self, plan: Plan[T], **waiting: float | None) -> T:
        conn = None if waiting else self.callers_connection(None)
        return super().in_transaction(plan, **waiting) if conn is None else self._join(conn, self._checked(plan))


class OpeningJoiningDatabase(JoiningDatabase, OpeningDatabase):
    """The same for a bus that opens itself."""


class JoiningBus(SyncCommandBus):
    """A bus whose calls join Django's transaction: what a worker gives to handlers as `ctx.bus`, too."""

    def _make_database(self) -> Database:
        return JoiningDatabase(self._given_dsn, self.settings)

    def _create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        on_complete: SyncBatchCompletionCallback | BatchCommand | None,
        dispatch: Strategy | DispatchName | None,
        checkpoint_size: int,
        conn: AnySyncConnection | None,
        options: CreateOptions,
    ) -> UUID:
        """With a broker the relay publishes what joins a transaction, after its commit."""
        conn = self.database.callers_connection(conn)
        return super()._create_batch(domain, commands, on_complete, dispatch, checkpoint_size, conn, options)

    @contextmanager
    def independent(self) -> Iterator[None]:
        """What the bus writes within this block commits by itself, also within `atomic()`."""
        with _commits_by_itself():
            yield

    prune = _independently(SyncCommandBus.prune)  # which is many transactions
    recover = _independently(SyncCommandBus.recover)  # which publishes, and that only after a commit


def connection_of(alias: str) -> Any:
    """The connection that Django has for this alias in this thread; it may not be open yet."""
    if alias not in settings.DATABASES:
        known = ", ".join(map(repr, settings.DATABASES))
        raise ImproperlyConfigured(f"BUSLOAD['DATABASE'] is {alias!r:.80}, and DATABASES has only {known}.")
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"DATABASES[{alias!r}] is {connection.vendor}, and busload needs PostgreSQL. Set its ENGINE to "
            "'django.db.backends.postgresql', or name another database in BUSLOAD['DATABASE']."
        )
    return connection


def _has_transaction(connection: Any) -> bool:
    """Whether a statement of Django's belongs to a transaction now. No connection is made where it does not."""
    if connection.connection is None and not connection.settings_dict["AUTOCOMMIT"]:
        connection.ensure_connection()
    return connection.in_atomic_block or not (connection.connection is None or connection.autocommit)


def alias_of_bus() -> str:
    from busload.integrations.django_app.conf import configuration

    return configuration().database

"""A bus for the database that Django has, in whatever process of a Django project it is used."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.db import connections
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from busload.handlers.registry import Handlers
from busload.integrations.django_app.joining import (
    JoiningBus,
    OpeningJoiningDatabase,
    alias_of_bus,
    connection_of,
)
from busload.integrations.self_opening_bus import SelfOpeningBus
from busload.limits.rate import is_async
from busload.sync.database import Database

_LIBPQ = frozenset(option.keyword.decode() for option in Conninfo.get_defaults())
"""What of DATABASES is for the server. Other options are for Django or its driver, such as a pool."""


class DjangoCommandBus(JoiningBus, SelfOpeningBus):
    """A `SyncCommandBus` on a database of DATABASES. It opens itself when it is first used, in each process anew.

    Within `atomic()` of that database, everything that it writes belongs to the block, as what models write: it exists
    exactly if the block commits. `with bus.independent():` is for what must exist anyway.

    Which alias of DATABASES it is, says BUSLOAD["DATABASE"], "default" if it does not. In tests it is the test
    database, as for models. Handlers written with `def` may use models: a worker closes Django's old connections
    around each call, as requests do. The other `options` are those of `SyncCommandBus`.
    """

    def __init__(self, **options: Any) -> None:
        if "dsn" in options:
            raise ValueError("A DjangoCommandBus takes no dsn: DATABASES has it, and BUSLOAD['DATABASE'] says which.")
        super().__init__("", **options)
        self.handlers = _DjangoHandlers()
        self.handlers.bus_of_threads = JoiningBus

    @property
    def dsn(self) -> str:
        """Where the database is, also before the bus is open."""
        return self._find_dsn()

    def _make_database(self) -> Database:
        return OpeningJoiningDatabase(self._find_dsn, self._opened_for, self.settings, self._open_once)

    def _find_dsn(self) -> str:
        return self._given_dsn or dsn_of(alias_of_bus())  # it is given where a test has redirected the bus

    def _opened_for(self) -> object:
        """Django's test runner gives a database another name while it runs."""
        if self._given_dsn:
            return self._given_dsn
        alias = alias_of_bus()
        return alias, settings.DATABASES[alias]["NAME"]


def dsn_of(alias: str) -> str:
    """Where the database is that DATABASES has under this alias."""
    given = connection_of(alias).get_connection_params()
    given.setdefault("dbname", given.pop("database", None))  # as psycopg2 has it
    return make_conninfo(**{name: value for name, value in given.items() if name in _LIBPQ and value is not None})


class _DjangoHandlers(Handlers):
    """Handlers whose threads keep no connection of Django that is too old or dead."""

    def add(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        register = super().add(*args, **options)

        def add(function: Any) -> Any:
            in_thread = callable(function) and not is_async(function)
            register(_as_in_a_request(function) if in_thread else function)
            return function

        return add


def _as_in_a_request(function: Callable[..., Any]) -> Callable[..., Any]:
    """Django closes old connections before and after each request; a worker has no requests.

    Without this, each thread would fail with its dead connection again and again after an outage. A connection in a
    transaction stays as it is: it is that of a test which runs the handler itself.
    """

    @functools.wraps(function)
    def call(*args: Any, **fields: Any) -> Any:
        _close_old_connections()
        try:
            return function(*args, **fields)
        finally:
            _close_old_connections()
            _of_thread().found = connections.all(initialized_only=True)

    return call


def _close_old_connections() -> None:
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


class _ClosedWithTheirThread:
    """The connections that Django keeps for a thread of a worker. Nobody could close them after the thread."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __del__(self) -> None:
        for connection in self.found:
            connection.close()


def _of_thread() -> _ClosedWithTheirThread:
    known = getattr(_local, "connections", None)
    if known is None:
        known = _local.connections = _ClosedWithTheirThread()
    return known


_local = threading.local()

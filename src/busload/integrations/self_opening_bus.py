"""A bus for applications that run in several processes and have no place to open one: it opens itself."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from busload.settings import Settings
from busload.sync.bus import SyncCommandBus
from busload.sync.database import Database
from busload.sync.outbox import SyncOutbox
from busload.transports import Transport

if TYPE_CHECKING:
    from busload.telemetry.opentelemetry import Telemetry


class SelfOpeningBus(SyncCommandBus):
    """A `SyncCommandBus` that opens itself when it is first used, in each process anew, and closes with the process.

    Web servers import an application and fork then; what was opened before a fork cannot be used after it. A bus of
    this kind may be used on both sides.
    """

    def __init__(self, dsn: str | None = None, **options: Any) -> None:
        self._opening, self._opened = threading.RLock(), False
        super().__init__(dsn, **options)
        _at_fork(weakref.ref(self))

    def _make_database(self) -> Database:
        return OpeningDatabase(self._find_dsn, self._opened_for, self.settings, self._open_once)

    def _find_dsn(self) -> str | None:
        """Where the database is; asked whenever the bus opens."""
        return self._given_dsn

    def _opened_for(self) -> object:
        """What a bus is opened for: if it is another than before, the bus opens anew."""
        return self._given_dsn

    def open(self, *, wait: timedelta | float | None = 0) -> Self:
        with self._opening:
            if not self.database.is_open:
                super().open(wait=wait)
                atexit.register(self.close)
                self._opened = True
        return self

    def close(self) -> None:
        with self._opening:
            self._opened = False
            atexit.unregister(self.close)
            super().close()

    @contextmanager
    def redirected(self, dsn: str, *, transport: Transport | str | None = None) -> Iterator[Self]:
        """Be a bus of the database at `dsn` while the block lasts, for tests. It is closed before and after that."""
        self.close()
        with super().redirected(dsn, transport=transport):
            try:
                yield self
            finally:
                self.close()

    def _open_once(self, *, anew: bool = False) -> None:
        if anew:
            self.close()
        if not self._opened:
            self.open(wait=None)

    def _forget_parent(self) -> None:
        """Leave to the process that has forked this one what belongs to it: its connections, threads and locks."""
        if self._opened:
            _of_parents.append((self._sending, self._completions, self._publisher))
            assert isinstance(self.database, OpeningDatabase)
            self.database.forget_parent()
            atexit.unregister(self.close)
        self._opening, self._opened = threading.RLock(), False
        self._sending, self._completions = None, None
        self._publisher = self._make_publisher()
        self.outbox = SyncOutbox(self.database, self._limits, self._publisher)


class OpeningDatabase(Database):
    """Has its bus opened when somebody needs a connection, or asks whether there is telemetry."""

    def __init__(
        self,
        find_dsn: Callable[[], str | None],
        opened_for: Callable[[], object],
        settings: Settings,
        open_bus: Callable[..., None],
    ) -> None:
        super().__init__(None, settings)
        self._find_dsn, self._opened_for, self._open_bus = find_dsn, opened_for, open_bus
        self._is_for: object = None

    @property
    def dsn(self) -> str:
        if self._dsn is None:
            self._open_if_closed()
        return super().dsn

    @property
    def given_dsn(self) -> str | None:
        return self._dsn if self.is_open else self._find_dsn()

    @property
    def telemetry(self) -> Telemetry | None:
        """As of every bus. Senders look here first, also those that bring a connection."""
        self._open_if_closed()
        return self._telemetry

    @telemetry.setter
    def telemetry(self, telemetry: Telemetry | None) -> None:
        self._telemetry = telemetry

    def refuse_closed(self) -> None:
        self._open_if_closed()
        super().refuse_closed()

    def open(self, *, wait: float | None = 0.0) -> None:
        self._dsn, self._is_for = self._find_dsn(), self._opened_for()
        super().open(wait=wait)

    def close(self) -> None:
        super().close()
        self._dsn = None  # it may be another one the next time

    def forget_parent(self) -> None:
        _of_parents.append((self._pool, self._embedded))
        self._pool, self._embedded, self._dsn, self.schema_checked = None, None, None, False

    def _open_if_closed(self) -> None:
        self._open_bus(anew=self.is_open and self._is_for != self._opened_for())


_of_parents: list[Any] = []
"""What a parent process has opened. If it were collected here, its connections would be closed for the parent too."""


def _at_fork(bus: weakref.ref[SelfOpeningBus]) -> None:
    def forget_parent() -> None:
        if (found := bus()) is not None:
            found._forget_parent()

    os.register_at_fork(after_in_child=forget_parent)

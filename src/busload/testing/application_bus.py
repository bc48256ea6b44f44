"""The bus of a test: a new one, or that of the application, as `busload_bus` in the settings of pytest names it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from busload.bus import Bus, CommandBus
from busload.errors import InvalidOperationError, kind_of
from busload.settings import Settings
from busload.sync.bus import SyncCommandBus
from busload.testing.faces import AnyBus
from busload.transports import Transport

B = TypeVar("B", bound=Bus)


@contextmanager
def application_at(application: AnyBus | None, dsn: str, transport: Transport | str | None = None) -> Iterator[None]:
    """Redirect the application's bus to the database of the test, whichever face it has, unless it is there already.

    A test may use the application by a bus of the other face, or by none: a client of HTTP calls routes, for one. What
    the application sends then must not reach the database it has outside of tests.
    """
    if application is None or (application.database.given_dsn == dsn and application.given_transport is transport):
        yield
        return
    with application.redirected(dsn, transport=transport):
        try:
            yield
        finally:
            if isinstance(application, SyncCommandBus):
                application.close()  # it may have opened itself


@contextmanager
def bus_of_test(
    kind: type[B], application: AnyBus | None, dsn: str, transport: Transport | str | None, settings: Settings | None
) -> Iterator[B]:
    """A bus of the database at `dsn`, not open yet. If the application's bus is of that kind, it is that very object.

    Otherwise it is a new bus with copies of the application's handlers and hooks, and the application's own bus uses
    the same database.
    """
    with application_at(application, dsn, transport):
        if application is not None and isinstance(application, kind):
            yield application
            return
        given = settings or (Settings() if application is None else application.settings)
        bus = kind(dsn, transport=transport, settings=replace(given, transport_url=None, dispatch=None, queues={}))
        if application is not None:
            bus.handlers, bus.hooks = application.handlers.copy(), application.hooks.copy()
            bus.declared_buffers.update(application.declared_buffers)
            bus.declared_schedules.update(application.declared_schedules)
        yield bus


def application_bus(named: str, folder: Path) -> AnyBus:
    """The bus that `module:attribute` names; modules are looked for in the folder of the project as well."""
    module_name, _, path = named.partition(":")
    if not module_name or not path:
        raise InvalidOperationError(f"busload_bus is {named!r}, wanted e.g. shop.app:bus.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidOperationError(
            f"busload_bus is {named!r}, but there is no module {error.name!r}, neither in {folder} nor installed."
        ) from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise InvalidOperationError(f"busload_bus is {named!r}, but {module_name!r} has no {path!r}.")
        found = getattr(found, name)
    if not isinstance(found, CommandBus | SyncCommandBus):
        raise InvalidOperationError(
            f"busload_bus is {named!r}, which is {kind_of(found)}. Name a CommandBus or SyncCommandBus."
        )
    return found

"""A bus that is open as long as an asynchronous web application runs, and a worker beside it if one is wanted."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import Self

import psycopg

from busload.bus import CommandBus
from busload.errors import BusloadError, SchemaOutdatedError, kind_of
from busload.integrations import probes
from busload.postgres.schema import migrate
from busload.sync.bus import SyncCommandBus
from busload.worker import Worker

log = logging.getLogger("busload")


class BusAndWorker:
    """Opens a bus, brings its schema up to date if that is wanted, and runs a worker if one is wanted.

    A bus that is open already stays open: somebody else will close it.
    """

    def __init__(self, bus: CommandBus, *, worker: bool | Worker = False, migrate: bool = False) -> None:
        given: object = bus
        if isinstance(given, SyncCommandBus):
            how = "an event loop runs here, which it would block. Make a CommandBus with the same arguments."
            raise ValueError(f"The application needs a CommandBus, found {kind_of(given)}: {how}")
        if not isinstance(given, CommandBus):
            raise ValueError(f"The application needs a CommandBus, found {kind_of(given)}.")
        if not isinstance(worker, bool | Worker):
            raise ValueError(f"worker must be True, False or a Worker, found {kind_of(worker)}.")
        self.bus, self._migrate = bus, migrate
        self.worker = Worker(bus) if worker is True else worker or None
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            if not self.bus.database.is_open:
                await opening.enter_async_context(self.bus)
            if self._migrate:
                await self.bus.migrate()
            else:
                await self._warn_of_schema()
            if self.worker is not None:
                await opening.enter_async_context(self.worker)
            self._open = opening.pop_all()
        return self

    async def _warn_of_schema(self) -> None:
        """Say at the start what every send would say. A database that is away is no reason not to start."""
        try:
            for shard in self.bus.shards:
                await shard.database.read(migrate.check(), within=probes.PATIENCE)
        except SchemaOutdatedError as outdated:
            log.warning("The application has started and cannot send yet: %s", outdated)
        except (BusloadError, psycopg.Error):
            log.debug("The schema could not be looked at when the application started", exc_info=True)

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    def alive(self) -> probes.Probe:
        return probes.alive(self.bus.pool, self.bus.settings.health, self.worker)

    async def ready(self) -> probes.Probe:
        return probes.ready(await self.bus.health(timeout=probes.PATIENCE), self.worker)

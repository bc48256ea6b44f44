"""Litestar: a plugin that opens the bus with the application, gives it to handlers by name, and answers probes.

app = Litestar([order], plugins=[BusloadPlugin(bus, worker=True)])

@post("/orders")
async def order(data: Order, bus: Bus) -> ...:
    await bus.send("shop", "Ship", ...)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from litestar import Litestar, Response, get
from litestar.config.app import AppConfig
from litestar.di import NamedDependency, Provide
from litestar.plugins import InitPlugin

from busload.bus import CommandBus
from busload.errors import InvalidOperationError
from busload.integrations import probes
from busload.integrations.bus_and_worker import BusAndWorker
from busload.worker import Worker

__all__ = ["Bus", "BusloadPlugin"]

Bus: TypeAlias = NamedDependency[CommandBus]
"""The type of a parameter that is given the open bus. The parameter is called as the plugin says: `bus`."""


class BusloadPlugin(InitPlugin):
    """Opens the bus when the application starts, and closes it when the application ends.

    With `worker` a worker runs in the same process and event loop, one of your own if you give it: for development and
    small sites. With `migrate` the schema is brought up to this release before the first request. A handler gets the
    bus as the parameter `name`. `/healthz` and `/readyz` stand below `health_prefix`, unless that is None.
    """

    def __init__(
        self,
        bus: CommandBus,
        *,
        worker: bool | Worker = False,
        migrate: bool = False,
        name: str = "bus",
        health_prefix: str | None = "",
    ) -> None:
        self._opens = BusAndWorker(bus, worker=worker, migrate=migrate)
        self._name, self._health_prefix = name, health_prefix

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        if self._name in app_config.dependencies:
            raise InvalidOperationError(
                f"The application has a dependency {self._name!r} already. Call the bus otherwise: "
                "BusloadPlugin(bus, name='command_bus')."
            )
        opens = self._opens

        @asynccontextmanager
        async def lifespan(_: Litestar) -> AsyncIterator[None]:
            async with opens:
                yield

        def get_bus() -> CommandBus:
            return opens.bus

        app_config.lifespan = [lifespan, *(app_config.lifespan or [])]
        app_config.dependencies[self._name] = Provide(get_bus, sync_to_thread=False)
        if self._health_prefix is not None:
            app_config.route_handlers.extend(_health_routes(opens, self._health_prefix))
        return app_config


def _health_routes(opens: BusAndWorker, prefix: str) -> list[Any]:
    @get(f"{prefix}/healthz", include_in_schema=False)
    async def healthz() -> Response[dict[str, Any]]:
        return _answer(opens.alive())

    @get(f"{prefix}/readyz", include_in_schema=False)
    async def readyz() -> Response[dict[str, Any]]:
        return _answer(await opens.ready())

    return [healthz, readyz]


def _answer(probe: probes.Probe) -> Response[dict[str, Any]]:
    return Response(probe.body, status_code=probe.status, headers={"Cache-Control": "no-store"})

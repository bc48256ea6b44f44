"""Starlette, and what is built on it: a bus that lives as long as the application, and routes for probes.

    app = Starlette(lifespan=lifespan(bus), routes=[*health_routes(), ...])

FastAPI has `busload.integrations.fastapi`, which adds a dependency.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from busload.bus import CommandBus
from busload.errors import InvalidOperationError
from busload.integrations import probes
from busload.integrations.bus_and_worker import BusAndWorker
from busload.worker import Worker

Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]

STATE = "busload"
"""Where requests find what the lifespan has opened: `request.state.busload`."""


def lifespan(bus: CommandBus, *, worker: bool | Worker = False, migrate: bool = False) -> Lifespan:
    """A lifespan that opens the bus when the application starts, and closes it when the application ends.

    With `worker` a worker runs in the same process and event loop, one of your own if you give it: for development and
    small sites. With `migrate` the schema is brought up to this release before the first request.

    To add what is yours, hold it in a lifespan of your own and pass on what it yields:

        @asynccontextmanager
        async def own(app):
            async with httpx.AsyncClient() as http, lifespan(bus)(app) as state:
                yield {**state, "http": http}
    """
    opens = BusAndWorker(bus, worker=worker, migrate=migrate)

    @asynccontextmanager
    async def opened(_: Any) -> AsyncIterator[dict[str, Any]]:
        async with opens:
            yield {STATE: opens}

    return opened


def get_bus(request: HTTPConnection) -> CommandBus:
    """The bus that the lifespan of the application has opened; a dependency of FastAPI."""
    return _opened(request).bus


def health_routes(prefix: str = "") -> list[Route]:
    """`/healthz` and `/readyz` for the probes of Kubernetes and load balancers.

    `/healthz` fails if only a new process helps, `/readyz` if this process cannot serve. The answers name no host.
    """
    return [Route(f"{prefix}/healthz", healthz, methods=["GET"]), Route(f"{prefix}/readyz", readyz, methods=["GET"])]


async def healthz(request: Request) -> JSONResponse:
    return _answer(_opened(request).alive())


async def readyz(request: Request) -> JSONResponse:
    return _answer(await _opened(request).ready())


def _answer(probe: probes.Probe) -> JSONResponse:
    return JSONResponse(probe.body, probe.status, {"Cache-Control": "no-store"})


def _opened(request: HTTPConnection) -> BusAndWorker:
    found = getattr(request.state, STATE, None)
    if not isinstance(found, BusAndWorker):
        raise InvalidOperationError(
            "The application has opened no bus. Give it one, FastAPI(lifespan=lifespan(bus)); a lifespan of your own "
            "must yield what that lifespan has yielded; and a test must run the lifespan: `with TestClient(app):`."
        )
    return found

"""FastAPI: the bus as a dependency, a lifespan that opens it, and routes for probes.

app = FastAPI(lifespan=lifespan(bus, worker=True))
app.include_router(health_router())

@app.post("/orders")
async def order(new: Order, bus: Bus) -> ...:
    await bus.send("shop", "Ship", ...)
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Depends

from busload.bus import CommandBus
from busload.integrations.starlette import get_bus, healthz, lifespan, readyz

__all__ = ["Bus", "get_bus", "health_router", "lifespan"]

Bus: TypeAlias = Annotated[CommandBus, Depends(get_bus)]
"""The type of a parameter that is given the open bus. `get_bus` can be replaced in `app.dependency_overrides`."""


def health_router(prefix: str = "") -> APIRouter:
    """`/healthz` and `/readyz` for the probes of Kubernetes and load balancers; the schema of the API has neither.

    `/healthz` fails if only a new process helps, `/readyz` if this process cannot serve. The answers name no host.
    """
    router = APIRouter(prefix=prefix, include_in_schema=False)
    router.add_api_route("/healthz", healthz, methods=["GET"])
    router.add_api_route("/readyz", readyz, methods=["GET"])
    return router

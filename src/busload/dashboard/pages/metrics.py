"""Metrics: the whole database, for Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from busload.dashboard.access import Permission
from busload.dashboard.render import bus_of
from busload.dashboard.route import page
from busload.metrics.exposition import CONTENT_TYPE


async def show(request: Request) -> Response:
    return Response(str(await bus_of(request).metrics()), headers={"Content-Type": CONTENT_TYPE})


ROUTES = (page("metrics", "/metrics", show, Permission.READ),)

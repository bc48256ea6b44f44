"""`busload.dashboard.app`: all routes of the dashboard, and how they are put together."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from busload.bus import CommandBus
from busload.dashboard import guard
from busload.dashboard.access import Authenticate, Permission, Users
from busload.dashboard.export import FORMATS, export
from busload.dashboard.live import Feeds
from busload.dashboard.pages import (
    audit,
    batch,
    batches,
    buffers,
    commands,
    databases,
    decision,
    dispatch,
    domains,
    job,
    jobs,
    limits,
    metrics,
    new_batch,
    overview,
    retention,
    schedules,
    troubleshooting,
    workers,
)
from busload.dashboard.problem import Problem, as_problem, problem_page
from busload.dashboard.render import Dashboard, assets, principal_of
from busload.dashboard.route import Handler, Route, page
from busload.errors import kind_of
from busload.settings import from_environment
from busload.sync.bus import SyncCommandBus

MASK = ("*password*", "*passwd*", "*secret*", "*token*", "*api_key*", "*apikey*", "authorization")
"""Keys whose values nobody sees, unless other patterns are given."""

TIME_LIMIT = {"GET": 5.0, "POST": 30.0}
"""Seconds that a page, and an action, may take."""


async def _static(request: Request) -> Response:
    """A file of ours. Its digest is part of its address, so browsers may keep it."""
    asset = assets().get(request.path_params["file"])
    if asset is None or request.path_params["digest"] != asset.digest:
        raise Problem(404, "Not found", "There is no such file.", "Reload the page: this release has other files.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(asset.content, media_type=asset.kind, headers=headers)


ROUTES: tuple[Route, ...] = (
    *overview.ROUTES,
    *batches.ROUTES,
    *batch.ROUTES,
    *commands.ROUTES,
    *troubleshooting.ROUTES,
    *decision.ROUTES,
    *jobs.ROUTES,
    *job.ROUTES,
    *schedules.ROUTES,
    *domains.ROUTES,
    *limits.ROUTES,
    *buffers.ROUTES,
    *dispatch.ROUTES,
    *workers.ROUTES,
    *retention.ROUTES,
    *audit.ROUTES,
    *metrics.ROUTES,
    page("static", "/static/{digest}/{file}", _static, Permission.READ),
)
"""Every address of the dashboard. The navigation has those with a label, in this order."""


def app(
    bus: CommandBus,
    *,
    authenticate: Authenticate | None = None,
    hosts: Sequence[str] = guard.LOOPBACK,
    hide_payloads: bool = False,
    mask: Sequence[str] = MASK,
    title: str = "busload",
    create: bool = False,
    routes: Sequence[Route] = ROUTES,
) -> Starlette:
    """The dashboard of a bus: an ASGI application to be served by itself, or mounted at any path of another one.

    `authenticate` says who sent a request: a function of the request that returns a `Principal` or None, or a
    coroutine. Without it, the users of BUSLOAD_DASHBOARD_USERS sign in; if there are none, only people on this
    machine are served, as operators. `hosts` are the names under which the dashboard may be called. With
    `hide_payloads` readers see no data, results or error texts. Nobody sees the values of keys that match a pattern
    of `mask`. `title` tells several dashboards apart. With `create` operators may create batches by a form.

    The bus is opened with the application if it is not open, and closed only if the application has opened it. Where
    the dashboard is mounted, the outer application opens the bus.
    """
    given: object = bus
    if isinstance(given, SyncCommandBus):
        how = "its pages are async. Make a CommandBus of the same database: in Django, CommandBus(bus.dsn)."
        raise ValueError(f"The dashboard needs a CommandBus, found {kind_of(given)}: {how}")
    if not isinstance(given, CommandBus):
        raise ValueError(f"The dashboard needs a CommandBus, found {kind_of(given)}.")
    authenticate = authenticate or Users.read(from_environment("BUSLOAD_DASHBOARD_USERS") or "")
    several = databases.ROUTES if len(bus.shards) > 1 else ()
    routes = [*(new_batch.ROUTES if create else ()), *several, *routes]
    named = {route.name: route for route in routes}
    if len(named) < len(routes):
        raise ValueError("Several routes have the same name.")
    feeds = Feeds()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        opens = not bus.database.is_open
        if opens:
            await bus.open(wait=None)
        try:
            yield
        finally:
            if opens:
                await bus.close()

    async def not_found(request: Request, error: Exception) -> Response:
        return problem_page(request, as_problem(error, request.url.path))

    guarded = Middleware(
        guard.Guard,
        hosts=hosts,
        authenticate=authenticate,
        local=guard.local_principal(_user_here()),
        asks=isinstance(authenticate, Users),
        bodies={route.path: route.most_body for route in routes if route.most_body is not None},
    )
    served = Starlette(
        routes=[one for route in routes for one in _served(route, feeds)],
        middleware=[guarded],
        exception_handlers={404: not_found, 405: not_found},
        lifespan=lifespan,
    )
    served.router.redirect_slashes = False
    served.state.dashboard = Dashboard(bus, title, named, hide_payloads, tuple(mask))
    return served


def _served(route: Route, feeds: Feeds) -> list[StarletteRoute]:
    found = [StarletteRoute(route.path, _checked(route, route.handler), methods=[route.method], name=route.name)]
    if route.live is not None:

        async def stream(request: Request) -> Response:
            return feeds.stream(route, request)

        path = f"{route.path.rstrip('/')}/live"
        found.insert(0, StarletteRoute(path, _checked(route, stream), methods=["GET"], name=f"{route.name}.live"))
    for format in FORMATS if route.export is not None else ():
        handler = _checked(route, partial(export, route, format))
        path, name = f"{route.export_path}.{format}", f"{route.name}.{format}"
        found.insert(0, StarletteRoute(path, handler, methods=["GET"], name=name))
    return found


def _checked(route: Route, handler: Handler) -> Handler:
    """A handler that only those run who may, within its time; whatever goes wrong becomes a page."""

    async def serve(request: Request) -> Response:
        try:
            if not principal_of(request).may(route.permission):
                raise Problem(
                    403,
                    "Only for operators",
                    f"{principal_of(request).name} is a {principal_of(request).role}, and may only look.",
                    "Ask an operator, or for the role of one.",
                )
            async with asyncio.timeout(TIME_LIMIT[route.method]):
                return await handler(request)
        except Exception as error:
            return problem_page(request, as_problem(error, route.name))

    return serve


def _user_here() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "dashboard"

"""Databases: which one of several the pages show; these are here only if the bus is over several."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from busload.dashboard.access import Permission
from busload.dashboard.problem import not_found
from busload.dashboard.render import ALL, DATABASE, dashboard_of, url
from busload.dashboard.route import page


async def choose(request: Request) -> Response:
    """Show this database from now on, to this browser; it changes nothing but what the pages show."""
    wanted, shards = request.path_params["number"], dashboard_of(request).bus.shards
    if wanted != ALL and not (wanted.isascii() and wanted.isdecimal() and int(wanted[:4]) < len(shards)):
        raise not_found(f"There is no database {wanted!r:.80} here.", "Choose one in the navigation.")
    response = RedirectResponse(url(request, "overview"), 303)
    where: dict[str, Any] = {"path": request.scope.get("root_path", "") or "/", "httponly": True}
    if wanted == ALL:
        response.delete_cookie(DATABASE, **where, samesite="lax")
    else:
        response.set_cookie(DATABASE, wanted, **where, samesite="lax")
    return response


ROUTES = (page("database", "/database/{number}", choose, Permission.READ),)

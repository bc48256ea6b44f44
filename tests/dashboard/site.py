"""The dashboard as tests call it: over HTTP without a network, and streams as a browser reads them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import httpx
from starlette.applications import Starlette

from busload.dashboard.access import Role, User, Users
from busload.dashboard.app import ROUTES
from busload.dashboard.export import FORMATS
from busload.dashboard.route import Route

BASE = "http://localhost"
SAME_ORIGIN = {"X-Busload": "1", "Origin": BASE, "Sec-Fetch-Site": "same-origin"}
"""What a browser sends from a page of ours."""

NOWHERE = UUID("01900000-0000-7000-8000-000000000000")

MADE = {role: User.create(role.value, role) for role in Role}
USERS = [user for user, _ in MADE.values()]


def signed_in(role: Role) -> dict[str, str]:
    """The header of a browser whose user has given name and secret."""
    pair = f"{role.value}:{MADE[role][1]}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def known_users() -> Users:
    return Users(USERS)


def address(route: Route, *, export: bool = False, **params: object) -> str:
    """The path of a route, or of its export; what is not given is something that does not exist."""
    from busload.dashboard.render import assets

    known = {"domain": "payments", "digest": assets()["app.css"].digest, "file": "app.css", "name": "nobody"}
    path = route.export_path if export else route.path
    for part in [word.partition("}")[0] for word in route.path.split("{")[1:]]:
        name, _, kind = part.partition(":")
        value = params.get(name, known.get(name, NOWHERE if kind == "uuid" else "1"))
        path = path.replace(f"{{{part}}}", str(value))
    return path


def every_address() -> list[tuple[str, str, Route]]:
    """Method and path of everything that the dashboard answers, its streams and files among it."""
    found = [(route.method, address(route), route) for route in ROUTES]
    found += [("GET", f"{address(route).rstrip('/')}/live", route) for route in ROUTES if route.live]
    return found + [
        ("GET", f"{address(route, export=True)}.{format}", route)
        for route in ROUTES
        if route.export
        for format in FORMATS
    ]


@asynccontextmanager
async def client(app: Starlette, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=30) as http:
        yield http


class Answer:
    """The beginning of a response: a stream has no end."""

    def __init__(self) -> None:
        self.status, self.headers = 0, httpx.Headers()


async def first_answer(
    app: Starlette, method: str, path: str, headers: dict[str, str], client: tuple[str, int] | None = ("127.0.0.1", 9)
) -> Answer:
    """Ask, and leave as soon as the response has begun."""
    answer, leave = Answer(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if receive.asked:  # type: ignore[attr-defined]
            await leave.wait()
            return {"type": "http.disconnect"}
        receive.asked = True  # type: ignore[attr-defined]
        return {"type": "http.request", "body": b"", "more_body": False}

    receive.asked = False  # type: ignore[attr-defined]

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], httpx.Headers(message["headers"])
        leave.set()

    await app(_scope(method, path, headers, client), receive, send)
    return answer


@asynccontextmanager
async def stream(app: Starlette, path: str, **headers: str) -> AsyncIterator[asyncio.Queue[tuple[str, Any]]]:
    """The events of a live page, each its name and its values, as long as the block lasts."""
    events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
    leave = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        for event in message.get("body", b"").decode().split("\n\n"):
            name, _, data = event.partition("\n")
            if name.startswith("event: "):
                events.put_nowait((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))

    task = asyncio.create_task(app(_scope("GET", path, headers), receive, send))
    try:
        yield events
    finally:
        leave.set()
        await task


def _scope(
    method: str, path: str, headers: dict[str, str], client: tuple[str, int] | None = ("127.0.0.1", 9)
) -> dict[str, Any]:
    path, _, query = path.partition("?")
    given = {"host": "localhost", **{name.lower(): value for name, value in headers.items()}}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": client,
        "server": ("localhost", 80),
    }

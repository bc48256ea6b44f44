"""What every request has to pass, and what every response carries: pure ASGI, around all routes."""

from __future__ import annotations

import inspect
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from busload.dashboard.access import Authenticate, Principal, Role
from busload.dashboard.problem import Problem, as_problem, problem_page

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MOST_BODY = 64 * 1024
"""Bytes of a form."""

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers by which a proxy says that the request is not from this machine."""


class Guard:
    """Lets a request through if its Host is known, its sender too, and it is no forgery of another site."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        authenticate: Authenticate | None,
        local: Principal,
        asks: bool,
        bodies: Mapping[str, int],
    ) -> None:
        self._bodies = bodies  # how large forms may be, by path, where that is more than usual
        self._app, self._authenticate, self._local, self._asks = app, authenticate, local, asks
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        began = False

        async def send_with_headers(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope, receive)
        try:
            self._check_host(request)
            scope.setdefault("state", {})["principal"] = await self._principal(request)
            self._check_origin(request)
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            body = _Body(receive, self._bodies.get(path, MOST_BODY))
            body.refuse_large(request.headers.get("content-length"))
            await self._app(scope, body.receive, send_with_headers)
        except Problem as problem:
            await problem_page(request, problem)(scope, receive, send_with_headers)
        except Exception as error:
            if began:  # a page has begun already: only the server can end it
                raise
            await problem_page(request, as_problem(error, "guard"))(scope, receive, send_with_headers)

    def _check_host(self, request: Request) -> None:
        given = request.headers.getlist("host")
        if len(given) != 1 or _host_name(given[0]) not in self._hosts:
            raise Problem(
                421,
                "Unknown host",
                "The dashboard does not answer under the name in the address bar.",
                "Use one of the names that it knows, or add this one: `busload dashboard --allow-host NAME`, or "
                "`hosts=` of `busload.dashboard.app`.",
            )

    async def _principal(self, request: Request) -> Principal:
        if self._authenticate is None:
            return self._only_local(request)
        found: Any = self._authenticate(request)
        principal = await found if inspect.isawaitable(found) else found
        if isinstance(principal, Principal):
            return principal
        headers = {"WWW-Authenticate": 'Basic realm="busload", charset="UTF-8"'} if self._asks else {}
        raise Problem(
            401,
            "Sign in",
            "Nobody is signed in, or the name or the secret is wrong.",
            "Reload the page and give your name and secret. `busload dashboard user NAME` makes new ones."
            if self._asks
            else "Sign in to the application that this dashboard is a part of.",
            headers=headers,
        )

    def _only_local(self, request: Request) -> Principal:
        peer = request.client.host if request.client else ""
        if _is_loopback(peer) and not any(name in request.headers for name in FORWARDED):
            return self._local
        raise Problem(
            403,
            "Only for this machine",
            "Nobody is set up to sign in, so the dashboard serves only people on the machine that it runs on.",
            "Run `busload dashboard user NAME --role operator` there, and put what it prints into "
            "BUSLOAD_DASHBOARD_USERS.",
        )

    def _check_origin(self, request: Request) -> None:
        """A change comes from our own page: another site can send neither our header nor our origin."""
        if request.method in ("GET", "HEAD"):
            return
        origin, site = request.headers.get("origin", ""), request.headers.get("sec-fetch-site", "same-origin")
        ours = origin.lower().partition("://")[2] == request.headers["host"].lower()
        if request.headers.get("x-busload") != "1" or not ours or site != "same-origin":
            raise Problem(
                403,
                "Not from this page",
                "The request did not come from a page of this dashboard, so nothing was done.",
                "Open the page again and repeat the action there. Scripts use the `busload` command line instead.",
            )


class _Body:
    """A body that is refused as soon as it is too large."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._size, self._most = receive, 0, most

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self.refuse_large(str(self._size))
        return message

    def refuse_large(self, size: str | None) -> None:
        if size is not None and (not size.isdecimal() or int(size) > self._most):
            raise Problem(
                413,
                "Too much",
                f"The form holds more than {self._most // 1024:,} KiB, so it was not read.",
                "Send less, or use the command line, which takes text from files.",
            )


def _host_name(host: str) -> str:
    """A Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _is_loopback(peer: str) -> bool:
    try:
        return ipaddress.ip_address(peer.partition("%")[0]).is_loopback
    except ValueError:
        return False


def local_principal(name: str) -> Principal:
    """Whoever sits at this machine may do everything."""
    return Principal(name, Role.OPERATOR)

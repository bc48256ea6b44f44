"""A real browser and a real server: Debian's Chromium, and the dashboard on a port of this machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
import uvicorn
from playwright.async_api import Browser, BrowserContext, Page, async_playwright
from starlette.applications import Starlette

from busload import CommandBus
from busload.dashboard import app

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PATIENCE = 60_000
"""Milliseconds after which something that must come about has not."""


class Window:
    """A page of a browser, and what must not happen in it: errors, dialogs, requests to other hosts."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self.base = page, base
        self.wrong: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self._asked(request.url))
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))

    def _asked(self, url: str) -> None:
        if not url.startswith((self.base, "data:")):
            self.wrong.append(f"request: {url}")

    async def open(self, path: str) -> Page:
        await self.page.goto(self.base + path)
        return self.page


OpenWindow: TypeAlias = Callable[..., Awaitable[Window]]


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail(f"There is no {CHROMIUM}: `make test` installs it, see scripts/install-servers.sh.")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


@asynccontextmanager
async def serving(served: Starlette) -> AsyncIterator[str]:
    """The address of an application that is served as long as the block lasts."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(served, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def window(bus: CommandBus, browser: Browser) -> AsyncIterator[OpenWindow]:
    """Opens a browser's window on the dashboard of the test's bus. Nothing may go wrong in it."""
    async with AsyncExitStack() as stack:
        base = await stack.enter_async_context(serving(app(bus, create=True)))
        windows: list[tuple[Window, BrowserContext]] = []

        async def open_one(**options: object) -> Window:
            context = await browser.new_context(**options)  # type: ignore[arg-type]
            stack.push_async_callback(context.close)
            one = Window(await context.new_page(), base)
            windows.append((one, context))
            return one

        yield open_one
        assert [one.wrong for one, _ in windows if one.wrong] == []

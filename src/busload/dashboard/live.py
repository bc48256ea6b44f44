"""Live values: a page's values are read once for all who look at it, and only what has changed is sent."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from busload.dashboard.problem import Problem, as_problem
from busload.dashboard.render import chosen_database, sees_payloads
from busload.dashboard.route import Live, Route

log = logging.getLogger("busload")

EVERY, REST = 1.0, 9.0
"""Seconds between two looks at the database, or so many times as long as a look has taken, if that is more."""
AFTER_FAILURE = (1.0, 2.0)
"""Seconds after a look that has failed at once: a page lives again soon after the database. They are drawn, so that not
all pages look together."""
HEARTBEAT = 15.0
"""Seconds of silence after which a comment says that the stream is alive."""
LONGEST = 300.0
"""Seconds after which a stream ends: the browser comes back by itself, and is asked again who it is."""
MOST_STREAMS = 100
PATIENCE = 5.0
"""Seconds that one look may take."""


class Feed:
    """Reads the values of one page, with its filters, as long as somebody looks at it."""

    def __init__(self, route: Route, request: Request) -> None:
        self._route, self._request = route, request
        self._changed = asyncio.Condition()
        self.values: Live = {}
        self.trouble: str | None = None
        self.version, self.readers = 0, 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._read(), name=f"busload-live-{self._route.name}")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def next(self, seen: int, seconds: float) -> bool:
        """Wait until there is something that was not seen; False if nothing came in that time."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.version > seen)
        except TimeoutError:
            return False
        return True

    async def _read(self) -> None:
        assert self._route.live is not None
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                async with asyncio.timeout(PATIENCE):
                    values, trouble = await self._route.live(self._request), None
            except Exception as error:
                values, trouble = self.values, as_problem(error, self._route.name).title
            if self.version == 0 or (values, trouble) != (self.values, self.trouble):
                async with self._changed:
                    self.values, self.trouble = values, trouble
                    self.version += 1
                    self._changed.notify_all()
            took = loop.time() - began
            if trouble is not None:  # a database that is slow, not away, gets half of the time to itself
                await asyncio.sleep(max(random.uniform(*AFTER_FAILURE), took))  # noqa: S311 - spreads looks out
            else:
                await asyncio.sleep(max(EVERY, REST * took))  # where a look is dear, there are fewer


class Feeds:
    """The feeds that somebody looks at now. Those who look at the same page share one."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[object, ...], Feed] = {}
        self._streams = 0

    def stream(self, route: Route, request: Request) -> Response:
        if self._streams >= MOST_STREAMS:
            raise Problem(
                503,
                "Too many live pages",
                f"{MOST_STREAMS} pages are open, so this one stands still.",
                "Close some of them, and reload this one.",
            )
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(route, request), media_type="text/event-stream", headers=headers)

    async def _events(self, route: Route, request: Request) -> AsyncIterator[bytes]:
        key = (route.name, request.url.path, request.url.query, sees_payloads(request), chosen_database(request))
        self._streams += 1
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = Feed(route, request)
            feed.start()
        feed.readers += 1
        try:
            async for event in _changes(feed):
                yield event
        finally:
            self._streams -= 1
            feed.readers -= 1
            if not feed.readers:
                feed.stop()
                del self._feeds[key]


async def _changes(feed: Feed) -> AsyncIterator[bytes]:
    """What a reader has not seen yet: all values first, and then those that differ."""
    loop, seen = asyncio.get_running_loop(), 0
    end = loop.time() + LONGEST
    sent: dict[str, Any] = {}
    while (left := end - loop.time()) > 0:
        if not await feed.next(seen, min(HEARTBEAT, left)):
            yield b": still here\n\n"
            continue
        seen, now, trouble = feed.version, dict(feed.values), feed.trouble
        if trouble is not None:
            yield _event("trouble", {"message": trouble})
        changed = {key: value for key, value in now.items() if sent.get(key) != value}
        if changed or trouble is None:
            yield _event("values", changed)
        sent = now


def _event(name: str, values: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(values))

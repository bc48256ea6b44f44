"""The sync face in the place of the async one, so that one story can be told of both."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, cast

from busload import CommandBus, SyncCommandBus

BLOCKING = ("handler", "bulk_handler", "planner", "buffer", "open_batch", "watch_batch")
"""Methods that are not awaited in either face."""

FACES = ("async", "sync")


class _InThreads:
    """A `SyncCommandBus`, or a part of it, whose calls are awaited: each runs in a thread."""

    def __init__(self, face: Any) -> None:
        self._face = face

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._face, name)
        if name in ("outbox", "troubleshooting", "jobs"):
            return _InThreads(found)
        if not inspect.ismethod(found) or name in BLOCKING:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(found, *args, **kwargs)

        return call

    async def __aenter__(self) -> Any:
        await asyncio.to_thread(self._face.open)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._face.close)


def bus_of(face: str, dsn: str, **options: Any) -> CommandBus:
    """A bus of this face, to be used as the async one is."""
    return (
        CommandBus(dsn, **options) if face == "async" else cast(CommandBus, _InThreads(SyncCommandBus(dsn, **options)))
    )

"""Who waits for batches in this process: watchers, and functions given as `on_complete`.

A bus hears of batches by notification, and looks once per interval in case a notification was lost. It calls each
function once, outside of any transaction. A function dies with its process; a durable callback is a `BatchCommand`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from busload.batches.batch import BatchCompletionCallback, BatchMetadata, existing_batches
from busload.postgres import waiting
from busload.postgres.database import Database
from busload.postgres.listen import BATCH, AsyncListener

log = logging.getLogger("busload")

FORGET_AFTER = 3600.0
"""Seconds after which a callback of a batch that nobody ever saw is dropped: its transaction was rolled back."""

LAST_CALLS = 5.0
"""Seconds that functions which are due have to finish when the bus is closed."""

STOPPED_WITHIN = 10.0
"""Seconds after which a thread that listens is left to end by itself: it may wait for a server that is away."""


@dataclass(slots=True)
class _Callback:
    function: Any
    since: float
    seen: bool = False


class Completions:
    """Hears of batches on behalf of one bus, from the first time that somebody waits until the bus is closed."""

    def __init__(self, database: Database, poll_every: float) -> None:
        self._database, self._poll_every = database, poll_every
        self._callbacks: dict[UUID, _Callback] = {}
        self._watchers: dict[UUID, list[waiting.Event]] = {}
        self._lock = threading.Lock()  # the sync face is heard in one thread and watched in others
        self._heard = waiting.Event()
        self._closing = False
        self._listener: AsyncListener | None = None
        self._listening: waiting.Activity | None = None
        self._calling: waiting.Activity | None = None

    def call(self, batch_id: UUID, callback: BatchCompletionCallback) -> None:
        """Call this function once the batch is complete."""
        self._listen()
        with self._lock:
            self._callbacks[batch_id] = _Callback(callback, time.monotonic())
            if self._calling is None:
                self._calling = waiting.Activity(self._call_due, name="busload-callbacks")
        self._heard.set()

    @contextmanager
    def watch(self, id: UUID) -> Iterator[waiting.Event]:
        """An event that is set whenever this batch or job may have changed, while the block lasts."""
        self._listen()
        event = waiting.Event()
        with self._lock:
            self._watchers.setdefault(id, []).append(event)
        try:
            yield event
        finally:
            with self._lock:
                self._watchers[id].remove(event)
                if not self._watchers[id]:
                    del self._watchers[id]

    async def close(self) -> None:
        """Call what is due by now, for a few seconds at most; the rest is forgotten."""
        self._closing = True
        self._heard.set()
        if self._listener is not None and self._listening is not None:
            self._listener.stop()
            await self._listening.cancel()
            await self._listening.join(STOPPED_WITHIN)
        if self._calling is not None:
            await self._calling.join(LAST_CALLS)
            await self._calling.cancel()

    def _listen(self) -> None:
        with self._lock:
            if self._listener is None:
                self._listener = AsyncListener(self._database.dsn, [BATCH], self._hear)
                self._listening = waiting.Activity(self._listener.run, name="busload-listen")

    def _hear(self, channel: str | None, payload: str | None) -> None:
        batch_id = _uuid(payload)
        with self._lock:
            events = self._watchers.values() if channel is None else [self._watchers.get(batch_id, [])]
            heard = [event for watching in events for event in watching]
            if channel is None or batch_id in self._callbacks:
                heard.append(self._heard)
        for event in heard:
            event.set()

    async def _call_due(self) -> None:
        while True:
            await self._heard.wait(self._poll_every if self._callbacks else None)
            self._heard.clear()
            for callback, batch in await self._due():
                try:
                    await waiting.result_of(callback(batch))
                except waiting.FAILURES:
                    if self._calling is not None and self._calling.is_cancelled:
                        raise
                    log.exception("The on_complete function of batch %s failed", batch.batch_id)
            if self._closing:
                return

    async def _due(self) -> list[tuple[Any, BatchMetadata]]:
        """Take out the functions of batches that are complete, and drop those of batches that will never be."""
        batch_ids = list(self._callbacks)
        try:
            found = await self._database.read(existing_batches(batch_ids)) if batch_ids else []
        except Exception as error:
            log.warning("Could not look for completed batches, trying again: %s", error)
            return []
        present, due = {batch.batch_id: batch for batch in found}, []
        with self._lock:
            for batch_id, callback in list(self._callbacks.items()):
                batch = present.get(batch_id)
                if batch is not None:
                    callback.seen = True
                    if batch.status.final:
                        due.append((self._callbacks.pop(batch_id).function, batch))
                elif callback.seen or time.monotonic() - callback.since > FORGET_AFTER:
                    del self._callbacks[batch_id]
                    log.warning("Dropped the callback of batch %s: there is no such batch any more", batch_id)
        return due


def _uuid(payload: str | None) -> UUID:
    """A payload is a hint that anybody could have sent: what is not an id matches nothing."""
    try:
        return UUID(payload)
    except (TypeError, ValueError):
        return UUID(int=0)

"""Who waits for batches in this process: watchers and functions given as `on_complete`.

Both faces keep one: it hears of batches by notification, looks once per interval in case one was lost, and calls each
function once, outside any transaction. A function dies with its process; a durable callback is a `BatchCommand`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from uuid import UUID

from busload.domain.batch import BatchCompletionCallback, BatchMetadata, SyncBatchCompletionCallback
from busload.store.listen import BATCH, AsyncListener, Listener

log = logging.getLogger("busload")

FORGET_AFTER = 3600.0
"""Seconds after which a callback of a batch that nobody ever saw is dropped: its transaction was rolled back."""

LAST_CALLS = 5.0
"""Seconds that functions which are due have to finish when the bus is closed."""

Look = Callable[[Sequence[UUID]], list[BatchMetadata]]
LookAsync = Callable[[Sequence[UUID]], Awaitable[list[BatchMetadata]]]


@dataclass(slots=True)
class _Waiting:
    callback: BatchCompletionCallback | SyncBatchCompletionCallback
    since: float
    seen: bool = False


class _Callbacks:
    """The functions that wait, and the rule for when each one is due or forgotten."""

    def __init__(self) -> None:
        self.waiting: dict[UUID, _Waiting] = {}

    def add(self, batch_id: UUID, callback: BatchCompletionCallback | SyncBatchCompletionCallback) -> None:
        self.waiting[batch_id] = _Waiting(callback, time.monotonic())

    def due(self, found: list[BatchMetadata]) -> list[tuple[_Waiting, BatchMetadata]]:
        """Take out what is complete, and drop what will never be."""
        present = {batch.batch_id: batch for batch in found}
        due = []
        for batch_id, waiting in list(self.waiting.items()):
            batch = present.get(batch_id)
            if batch is not None:
                waiting.seen = True
                if batch.status.final:
                    due.append((self.waiting.pop(batch_id), batch))
            elif waiting.seen or time.monotonic() - waiting.since > FORGET_AFTER:
                del self.waiting[batch_id]
                log.warning("Dropped the callback of batch %s: there is no such batch any more", batch_id)
        return due


class AsyncCompletions:
    def __init__(self, dsn: str, look: LookAsync, poll_every: float) -> None:
        self._dsn, self._look, self._poll_every = dsn, look, poll_every
        self._callbacks = _Callbacks()
        self._watchers: dict[UUID, set[asyncio.Event]] = {}
        self._heard = asyncio.Event()
        self._closing = False
        self._listening: asyncio.Task[None] | None = None
        self._calling: asyncio.Task[None] | None = None

    def call(self, batch_id: UUID, callback: BatchCompletionCallback) -> None:
        """Call this function once the batch is complete."""
        self._listen()
        self._callbacks.add(batch_id, callback)
        if self._calling is None:
            self._calling = asyncio.create_task(self._call_due(), name="busload-callbacks")
        self._heard.set()

    def watch(self, batch_id: UUID) -> asyncio.Event:
        """An event that is set whenever this batch may have changed."""
        self._listen()
        event = asyncio.Event()
        self._watchers.setdefault(batch_id, set()).add(event)
        return event

    def unwatch(self, batch_id: UUID, event: asyncio.Event) -> None:
        events = self._watchers.get(batch_id, set())
        events.discard(event)
        if not events:
            self._watchers.pop(batch_id, None)

    async def close(self) -> None:
        """Call what is due by now, for a few seconds at most; the rest is forgotten."""
        self._closing = True
        self._heard.set()
        if self._calling is not None:
            await asyncio.wait({self._calling}, timeout=LAST_CALLS)
        for task in (self._calling, self._listening):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _listen(self) -> None:
        if self._listening is None:
            listener = AsyncListener(self._dsn, [BATCH], self._hear)
            self._listening = asyncio.create_task(listener.run(), name="busload-listen")

    def _hear(self, channel: str | None, payload: str | None) -> None:
        if channel is None:
            heard = [event for events in self._watchers.values() for event in events]
        else:
            heard = list(self._watchers.get(_uuid(payload), ()))
        for event in heard:
            event.set()
        if channel is None or _uuid(payload) in self._callbacks.waiting:
            self._heard.set()

    async def _call_due(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._poll_every if self._callbacks.waiting else None):
                    await self._heard.wait()
            except TimeoutError:
                pass
            self._heard.clear()
            try:
                found: list[BatchMetadata] | None = await self._look(list(self._callbacks.waiting))
            except Exception as error:
                log.warning("Could not look for completed batches, trying again: %s", error)
                found = None
            for waiting, batch in self._callbacks.due(found) if found is not None else []:
                try:
                    called = waiting.callback(batch)
                    if isawaitable(called):  # a plain function will do as well
                        await called
                except (Exception, asyncio.CancelledError):
                    if self._closing and self._calling is not None and self._calling.cancelling():
                        raise
                    log.exception("The on_complete function of batch %s failed", batch.batch_id)
            if self._closing:
                return


class Completions:
    def __init__(self, dsn: str, look: Look, poll_every: float) -> None:
        self._dsn, self._look, self._poll_every = dsn, look, poll_every
        self._callbacks = _Callbacks()
        self._heard = threading.Event()
        self._stopping = False
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None

    def call(self, batch_id: UUID, callback: SyncBatchCompletionCallback) -> None:
        """Call this function, in a thread of ours, once the batch is complete."""
        self._callbacks.add(batch_id, callback)
        if self._listener is None:
            self._listener = Listener(self._dsn, [BATCH], self._hear)
            self._listener.start()
            self._thread = threading.Thread(target=self._call_due, name="busload-callbacks", daemon=True)
            self._thread.start()
        self._heard.set()

    def close(self) -> None:
        """Call what is due by now, for a few seconds at most; the rest is forgotten."""
        self._stopping = True
        self._heard.set()
        if self._listener is not None and self._thread is not None:
            self._listener.stop()
            if self._thread is not threading.current_thread():  # a callback may close its own bus
                self._thread.join(LAST_CALLS)

    def _hear(self, channel: str | None, payload: str | None) -> None:
        if channel is None or _uuid(payload) in self._callbacks.waiting:
            self._heard.set()

    def _call_due(self) -> None:
        while True:
            self._heard.wait(self._poll_every if self._callbacks.waiting else None)
            self._heard.clear()
            try:
                found: list[BatchMetadata] | None = self._look(list(self._callbacks.waiting))
            except Exception as error:
                log.warning("Could not look for completed batches, trying again: %s", error)
                found = None
            for waiting, batch in self._callbacks.due(found) if found is not None else []:
                try:
                    waiting.callback(batch)
                except BaseException:  # it belongs to the callback: not even SystemExit may end the others
                    log.exception("The on_complete function of batch %s failed", batch.batch_id)
            if self._stopping:
                return


def _uuid(payload: str | None) -> UUID:
    """A payload is a hint that anybody could have sent: what is not an id matches nothing."""
    try:
        return UUID(payload)
    except (TypeError, ValueError):
        return UUID(int=0)

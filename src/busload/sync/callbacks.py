"""Made from busload.batches.callbacks by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from busload.batches.batch import BatchMetadata, SyncBatchCompletionCallback, existing_batches
from busload.batches.callbacks import FORGET_AFTER, LAST_CALLS, STOPPED_WITHIN, _Callback, _uuid, log
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.listen import BATCH
from busload.sync.database import Database
from busload.sync.listen import Listener


class Completions:
    """Hears of batches on behalf of one bus, from the first time that somebody waits until the bus is closed."""

    def __init__(self, database: Database, poll_every: float) -> None:
        self._database, self._poll_every = database, poll_every
        self._callbacks: dict[UUID, _Callback] = {}
        self._watchers: dict[UUID, list[waiting.Event]] = {}
        self._lock = threading.Lock()  # the sync face is heard in one thread and watched in others
        self._heard = waiting.Event()
        self._closing = False
        self._listener: Listener | None = None
        self._listening: waiting.Activity | None = None
        self._calling: waiting.Activity | None = None

    def call(self, batch_id: UUID, callback: SyncBatchCompletionCallback) -> None:
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

    def close(self) -> None:
        """Call what is due by now, for a few seconds at most; the rest is forgotten."""
        self._closing = True
        self._heard.set()
        if self._listener is not None and self._listening is not None:
            self._listener.stop()
            self._listening.cancel()
            self._listening.join(STOPPED_WITHIN)
        if self._calling is not None:
            self._calling.join(LAST_CALLS)
            self._calling.cancel()

    def _listen(self) -> None:
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self._database.dsn, [BATCH], self._hear)
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

    def _call_due(self) -> None:
        while True:
            self._heard.wait(self._poll_every if self._callbacks else None)
            self._heard.clear()
            for callback, batch in self._due():
                try:
                    waiting.result_of(callback(batch))
                except waiting.FAILURES:
                    if self._calling is not None and self._calling.is_cancelled:
                        raise
                    log.exception("The on_complete function of batch %s failed", batch.batch_id)
            if self._closing:
                return

    def _due(self) -> list[tuple[Any, BatchMetadata]]:
        """Take out the functions of batches that are complete, and drop those of batches that will never be."""
        batch_ids = list(self._callbacks)
        try:
            found = self._database.read(existing_batches(batch_ids)) if batch_ids else []
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

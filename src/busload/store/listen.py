"""Hears what PostgreSQL notifies. A notification is only a hint: whoever listens also looks from time to time."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Sequence

import psycopg
from psycopg import sql

from busload.store.connection import AsyncConnection, Connection, connect, connect_async

log = logging.getLogger("busload")

READY = "busload_ready"
"""Commands of a domain became ready; the payload is the domain."""
BATCH = "busload_batch"
"""A batch's counters changed, or it completed; the payload is its id. At most ten a second for one batch."""
CANCEL = "busload_cancel"
"""A batch was canceled; the payload is its id."""
PAUSE = "busload_pause"
"""A domain was paused or resumed; the payload is the domain."""
OUTBOX = "busload_outbox"
"""Commands wait to be announced; the payload is the transport."""
LIMIT = "busload_limit"
"""A receiver has refused a call; the payload is the name of the limit."""
MESSAGE = "busload_message"
"""PostgreSQL is the broker, and a queue has messages; the payload is the queue."""

Hear = Callable[[str | None, str | None], None]
"""Called with channel and payload, or with None twice: something may have been missed, so look at everything."""


class AsyncListener:
    """Listens on a connection of its own, for as long as it runs; a lost connection is replaced."""

    def __init__(self, dsn: str, channels: Sequence[str], hear: Hear) -> None:
        self._dsn, self._channels, self._hear = dsn, channels, hear

    async def run(self) -> None:
        failures = 0
        while True:
            try:
                async with await connect_async(self._dsn) as conn:
                    failures = 0
                    await self._listen(conn)
            except psycopg.Error as error:
                log.warning("Lost the connection that listens, polling until it is back: %s", error)
            failures += 1
            await asyncio.sleep(min(30.0, 0.1 * 2 ** min(failures, 8)) * random.uniform(0.5, 1))  # noqa: S311

    async def _listen(self, conn: AsyncConnection) -> None:
        for channel in self._channels:
            await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._hear(None, None)
        async for notification in conn.notifies():
            self._hear(notification.channel, notification.payload)


class Listener:
    """The same for code without an event loop: a thread with a connection of its own."""

    def __init__(self, dsn: str, channels: Sequence[str], hear: Hear) -> None:
        self._dsn, self._channels, self._hear = dsn, channels, hear
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="busload-listen", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                with connect(self._dsn) as conn:
                    failures = 0
                    self._listen(conn)
            except psycopg.Error as error:
                log.warning("Lost the connection that listens, polling until it is back: %s", error)
            failures += 1
            self._stopping.wait(min(30.0, 0.1 * 2 ** min(failures, 8)) * random.uniform(0.5, 1))  # noqa: S311

    def _listen(self, conn: Connection) -> None:
        for channel in self._channels:
            conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._hear(None, None)
        while not self._stopping.is_set():
            for notification in conn.notifies(timeout=0.2):
                self._hear(notification.channel, notification.payload)

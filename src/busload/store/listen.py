"""Hears what PostgreSQL notifies. A notification is only a hint: whoever listens also looks from time to time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import psycopg
from psycopg import sql

from busload.domain.retry import Backoff
from busload.store.connection import RESPONSE_TIMEOUT, AsyncConnection, Connection, connect, connect_async
from busload.store.outage import Outage

LISTENING = "Listening for notifications"

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
    """Listens on a connection of its own, for as long as it runs; a lost connection is replaced.

    The server has to answer every `check_every` seconds: a connection that is dead without having ended would be
    listened to for ever.
    """

    def __init__(
        self,
        dsn: str,
        channels: Sequence[str],
        hear: Hear,
        outage: Outage | None = None,
        *,
        check_every: float = RESPONSE_TIMEOUT / 2,
    ) -> None:
        self._dsn, self._channels, self._hear, self._check_every = dsn, channels, hear, check_every
        self._outage, self._outage_is_mine = outage or Outage(), outage is None

    async def run(self) -> None:
        try:
            await self._insist()
        finally:
            if self._outage_is_mine:
                self._outage.close()

    async def _insist(self) -> None:
        backoff = Backoff()
        while True:
            try:
                async with await connect_async(self._dsn, response_timeout=self._check_every) as conn:
                    backoff.reset()
                    await self._listen(conn)
            except psycopg.Error as error:
                self._outage.failed(LISTENING, error)
            await asyncio.sleep(backoff.pause())

    async def _listen(self, conn: AsyncConnection) -> None:
        for channel in self._channels:
            await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._outage.worked(LISTENING, reached=True)
        self._hear(None, None)
        while True:
            async for notification in conn.notifies(timeout=self._check_every):
                self._hear(notification.channel, notification.payload)
            await conn.execute("SELECT")  # nobody would miss a word on a connection that is dead without having ended


class Listener:
    """The same for code without an event loop: a thread with a connection of its own."""

    def __init__(
        self,
        dsn: str,
        channels: Sequence[str],
        hear: Hear,
        outage: Outage | None = None,
        *,
        check_every: float = RESPONSE_TIMEOUT / 2,
    ) -> None:
        self._dsn, self._channels, self._hear, self._check_every = dsn, channels, hear, check_every
        self._outage, self._outage_is_mine = outage or Outage(), outage is None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="busload-listen", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        if self._outage_is_mine:
            self._outage.close()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                with connect(self._dsn, response_timeout=self._check_every) as conn:
                    backoff.reset()
                    self._listen(conn)
            except psycopg.Error as error:
                self._outage.failed(LISTENING, error)
            self._stopping.wait(backoff.pause())

    def _listen(self, conn: Connection) -> None:
        for channel in self._channels:
            conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._outage.worked(LISTENING, reached=True)
        self._hear(None, None)
        checked = time.monotonic()
        while not self._stopping.is_set():
            for notification in conn.notifies(timeout=0.2):
                self._hear(notification.channel, notification.payload)
            if time.monotonic() - checked > self._check_every:
                conn.execute("SELECT")
                checked = time.monotonic()

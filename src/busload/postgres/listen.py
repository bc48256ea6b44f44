"""Hears what PostgreSQL notifies. A notification is only a hint: whoever listens also looks from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psycopg
from psycopg import sql

from busload.postgres import waiting
from busload.postgres.backoff import Backoff
from busload.postgres.connection import AsyncConnection
from busload.postgres.outage import Outage
from busload.postgres.own_connection import RESPONSE_TIMEOUT, connect_async

LISTENING = "Listening for notifications"

READY = "busload_ready"
"""Commands of a domain became ready, and all its workers are told; the payload is the domain."""
BATCH = "busload_batch"
"""A batch's counters changed, or it completed; the payload is its id. At most ten a second for one batch."""
CANCEL = "busload_cancel"
"""A batch was canceled; the payload is its id."""
HOLD = "busload_hold"
"""A batch is held; the payload is its id."""
PAUSE = "busload_pause"
"""A domain was paused or resumed; the payload is the domain."""
OUTBOX = "busload_outbox"
"""Commands wait to be published; the payload is the transport."""
LIMIT = "busload_limit"
"""A receiver has refused a call; the payload is the name of the limit."""
STOP = "busload_stop"
"""A worker is asked to stop; the payload is its number."""
SCHEDULE = "busload_schedule"
"""A schedule was declared or resumed, so one may be due earlier; no payload."""
MESSAGE = "busload_message"
"""PostgreSQL is the broker, and a queue has messages; the payload is the queue."""

Hear = Callable[[str | None, str | None], None]
"""Called with channel and payload, or with None twice: something may have been missed, so look at everything."""


class AsyncListener:
    """Listens on a connection of its own, for as long as it runs; a lost connection is replaced.

    The server has to answer every `check_every` seconds: otherwise a connection that is dead without having ended
    would be listened to for ever.
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
        self._stopped = waiting.Event()

    def stop(self) -> None:
        """Let `run` return soon. A task may be cancelled instead."""
        self._stopped.set()

    async def run(self) -> None:
        backoff = Backoff()
        try:
            while not self._stopped.is_set():
                try:
                    async with await connect_async(self._dsn, response_timeout=self._check_every) as conn:
                        backoff.reset()
                        await self._listen(conn)
                except psycopg.Error as error:
                    self._outage.failed(LISTENING, error)
                self.end()
                await self._stopped.wait(backoff.pause())
        finally:
            if self._outage_is_mine:
                self._outage.close()

    async def begin(self, conn: AsyncConnection) -> None:
        """Begin to listen on a new connection."""
        for channel in self._channels:
            await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    async def check(self, conn: AsyncConnection) -> None:
        """Ask the server for a sign of life."""
        await conn.execute("SELECT")

    def end(self) -> None:
        """Take note that the connection is gone."""

    async def _listen(self, conn: AsyncConnection) -> None:
        await self.begin(conn)
        self._outage.worked(LISTENING, reached=True)
        self._hear(None, None)
        check_at = time.monotonic() + self._check_every
        while not self._stopped.is_set():
            left = check_at - time.monotonic()
            if left <= 0:
                await self.check(conn)
                check_at = time.monotonic() + self._check_every
                continue
            async for notification in conn.notifies(timeout=min(left, waiting.NAP)):
                self._hear(notification.channel, notification.payload)

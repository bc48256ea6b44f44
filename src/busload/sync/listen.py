"""Made from busload.postgres.listen by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg
from psycopg import sql

from busload.postgres import waiting_in_threads as waiting
from busload.postgres.backoff import Backoff
from busload.postgres.connection import Connection
from busload.postgres.listen import (
    LISTENING,
    Hear,
)
from busload.postgres.outage import Outage
from busload.postgres.own_connection import RESPONSE_TIMEOUT
from busload.sync.connection import connect


class Listener:
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

    def run(self) -> None:
        backoff = Backoff()
        try:
            while not self._stopped.is_set():
                try:
                    with connect(self._dsn, response_timeout=self._check_every) as conn:
                        backoff.reset()
                        self._listen(conn)
                except psycopg.Error as error:
                    self._outage.failed(LISTENING, error)
                self.end()
                self._stopped.wait(backoff.pause())
        finally:
            if self._outage_is_mine:
                self._outage.close()

    def begin(self, conn: Connection) -> None:
        """Begin to listen on a new connection."""
        for channel in self._channels:
            conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def check(self, conn: Connection) -> None:
        """Ask the server for a sign of life."""
        conn.execute("SELECT")

    def end(self) -> None:
        """Take note that the connection is gone."""

    def _listen(self, conn: Connection) -> None:
        self.begin(conn)
        self._outage.worked(LISTENING, reached=True)
        self._hear(None, None)
        check_at = time.monotonic() + self._check_every
        while not self._stopped.is_set():
            left = check_at - time.monotonic()
            if left <= 0:
                self.check(conn)
                check_at = time.monotonic() + self._check_every
                continue
            for notification in conn.notifies(timeout=min(left, waiting.NAP)):
                self._hear(notification.channel, notification.payload)

"""Says again and again that somebody lives, from a thread and on a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from busload.postgres.connection import Connection, has_unread_input
from busload.postgres.outage import Outage
from busload.postgres.own_connection import RESPONSE_TIMEOUT
from busload.sync.connection import connect

RENEWING = "Renewing leases"
"""What the log calls it."""

LAST_BEAT = 1.0
"""Seconds that whoever stops waits for a heartbeat that is under way."""


class NextBeat:
    """When the next heartbeat comes: after a while, at once, or never."""

    def __init__(self) -> None:
        self.stopped = False
        self._due = threading.Event()

    def hurry(self) -> None:
        self._due.set()

    def stop(self) -> None:
        self.stopped = True
        self._due.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the next heartbeat; False if there is none."""
        self._due.wait(seconds)
        self._due.clear()
        return not self.stopped


def beat(
    dsn: str,
    every: float,
    pulse: NextBeat,
    once: Callable[[Connection], None],
    outage: Outage,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Call `once` every so many seconds on a connection that is opened anew when it breaks; `before` it in any case."""
    conn: Connection | None = None
    pause = every
    # Long enough for a busy server, and so short that there is time for another heartbeat before the lease ends.
    silence = min(RESPONSE_TIMEOUT, max(1.0, every))
    while pulse.wait(pause):
        before()
        try:
            if conn is not None and not conn.closed and has_unread_input(conn):  # by its end: the server may be back
                conn.close()
            if conn is None or conn.closed:
                conn = connect(dsn, response_timeout=silence)
            if pulse.stopped:  # while it waited for the server
                break
            once(conn)
            outage.worked(RENEWING, reached=True)
            pause = every
        except Exception as error:  # whatever it is, the next heartbeat may come through
            pause = min(1.0, every)
            if not pulse.stopped:
                outage.failed(RENEWING, error)
            if conn is not None:
                conn.close()
    if conn is not None:
        conn.close()

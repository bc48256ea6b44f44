"""Keeps this worker's leases alive, from a thread and on a connection of its own.

A handler that blocks the event loop then does not cost the worker its leases; it is reported instead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from uuid import UUID

from busload.domain.counted import counted
from busload.domain.execution import Lease
from busload.store import rescue
from busload.store.connection import RESPONSE_TIMEOUT, Connection, connect, was_spoken_to
from busload.store.outage import Outage
from busload.store.plan import perform
from busload.store.rescue import Renewal

log = logging.getLogger("busload")

RENEWING = "Renewing leases"

LAST_BEAT = 1.0
"""Seconds that whoever stops waits for a heartbeat that is under way."""


class Heartbeat:
    def __init__(
        self,
        dsn: str,
        *,
        name: str,
        domains: Sequence[str],
        concurrency: int,
        lease_for: timedelta,
        holding: Callable[[], list[Lease]],
        on_renewal: Callable[[Renewal], None],
        on_death: Callable[[Set[UUID], Set[UUID]], None],
        outage: Outage,
    ) -> None:
        self._outage = outage
        self._dsn, self._lease_for = dsn, lease_for
        self._facts = {"name": name, "domains": domains, "concurrency": concurrency, "lease_for": lease_for}
        self._holding, self._on_renewal, self._on_death = holding, on_renewal, on_death
        # Renew at a third of the lease, so that two renewals may fail before the commands are lost.
        self._every = lease_for.total_seconds() / 3
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._pulse = Pulse()
        self._thread = threading.Thread(target=self._run, name="busload-renew", daemon=True)
        self._starting = threading.Lock()
        self.worker = 0
        self._buried: list[int] = []
        """Numbers that this worker had: the answer to a new one may have been lost."""
        self._heard_at = self._back_at = self._asked_at = -math.inf

    @property
    def in_touch(self) -> bool:
        """Whether this worker has heard of the database for as long as a lease, and may judge who has not.

        After an outage others are on their way back as well. None of them is declared dead before they had a lease's
        time for that.
        """
        now, lease_for = time.monotonic(), self._lease_for.total_seconds()
        return now - self._heard_at <= lease_for / 2 and now - self._back_at >= lease_for

    def start(self) -> None:
        """Register the worker; raises if the database cannot be reached at all."""
        with self._starting:
            if self._pulse.stopped:  # whoever wanted it has gone
                return
            with connect(self._dsn, response_timeout=RESPONSE_TIMEOUT) as conn:
                self.worker = perform(conn, rescue.register(**self._facts))  # type: ignore[arg-type]
            self._heard_at = time.monotonic()
            self._answered.set()
            self._thread.start()

    def let_go(self) -> None:
        """Renew no more; does not wait for the heartbeat under way."""
        self._pulse.stop()

    def renew_soon(self) -> None:
        """Do not wait for the next heartbeat: it tells of cancels whose notifications were missed."""
        self._pulse.quicken()

    def stop(self) -> None:
        """Renew no more, and wait for the heartbeat under way; one that a silent network holds up ends by itself."""
        self.let_go()
        if self._thread.is_alive():
            self._thread.join(LAST_BEAT)

    def undo(self) -> None:
        """Stop and, as nothing was claimed yet, leave no trace of a living worker."""
        self.let_go()
        with self._starting:  # a start that was cancelled goes on in its thread
            self.stop()
        if self.worker:
            with connect(self._dsn, response_timeout=RESPONSE_TIMEOUT) as conn:
                perform(conn, rescue.retire(worker=self.worker))

    def _run(self) -> None:
        beat(self._dsn, self._every, self._pulse, self._once, self._outage, before=self._watch_loop)

    def _once(self, conn: Connection) -> None:
        # A claim's answer takes milliseconds: what was leased two heartbeats ago and is unknown here never arrived.
        renewal = perform(conn, rescue.renew(worker=self.worker, settled=self._lease_for * 2 / 3))
        now = time.monotonic()
        if now - self._heard_at > self._lease_for.total_seconds() / 2:  # else it is one that failed
            self._back_at = now
        self._heard_at = now
        if renewal is not None:
            self._buried.clear()
            self._tell(lambda: self._on_renewal(renewal))
            return
        if self._pulse.stopped:
            return
        leases = self._holding()
        self._buried.append(self.worker)
        plan = rescue.come_back(buried=self._buried, leases=leases, **self._facts)  # type: ignore[arg-type]
        with conn.transaction():
            self.worker, resumed = perform(conn, plan)
        self._buried.clear()
        log.warning(
            "This worker was declared dead though it lives: of its %s it has taken up %d again, and others have the "
            "rest. It goes on under a new number",
            counted(len(leases), "lease"),
            len(resumed),
        )
        self._tell(lambda: self._on_death({lease.lease_id for lease in leases} - resumed, resumed))

    def _tell(self, what: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what)

    def _watch_loop(self) -> None:
        """Say where the event loop is stuck if it has not answered since the last heartbeat."""
        now = time.monotonic()
        if not self._answered.is_set():
            if now - self._asked_at < self._every:  # a heartbeat that came early
                return
            frame = sys._current_frames().get(self._loop_thread)
            where = "".join(traceback.format_stack(frame)[-4:]) if frame else "unknown\n"
            log.warning(
                "The event loop has been blocked for %.1f s; leases are kept meanwhile. It is at:\n%s",
                now - self._asked_at,
                where,
            )
            return
        self._asked_at = now
        self._answered.clear()
        self._tell(self._answered.set)


class Pulse:
    """When the next heartbeat comes: after a while, at once, or never."""

    def __init__(self) -> None:
        self.stopped = False
        self._due = threading.Event()

    def quicken(self) -> None:
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
    pulse: Pulse,
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
            if conn is not None and (conn.closed or was_spoken_to(conn)):  # by its end: the server may be back already
                conn.close()
                conn = None
            if conn is None:
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
                conn = None
    if conn is not None:
        conn.close()

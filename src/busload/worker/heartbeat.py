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
from collections.abc import Callable, Set
from importlib.metadata import version
from typing import Any
from uuid import UUID

import msgspec

from busload.commands import rescue
from busload.commands.rescue import Renewal
from busload.commands.wording import counted
from busload.health.health import Condition
from busload.postgres.connection import Connection
from busload.postgres.heartbeat_thread import LAST_BEAT, NextBeat, beat
from busload.postgres.own_connection import RESPONSE_TIMEOUT
from busload.schedules.declare import release_of
from busload.sync.connection import connect
from busload.sync.plan import perform
from busload.worker.shared import Shared, clock

log = logging.getLogger("busload")


class Heartbeat:
    """Says that this worker lives, and takes its number.

    `on_renewal` is told of each renewal, and `on_declared_dead` of the leases that are lost and of those that were
    taken up again after the worker was declared dead: both in the event loop. `condition` tells how the worker is, and
    `on_asked_to_stop` hears that an operator has asked the worker to stop: both are called from the thread.
    """

    def __init__(
        self,
        shared: Shared,
        name: str,
        on_renewal: Callable[[Renewal], None],
        on_declared_dead: Callable[[Set[UUID], Set[UUID]], None],
        condition: Callable[[], Condition],
        on_asked_to_stop: Callable[[], None],
    ) -> None:
        self._shared, self._outage = shared, shared.outage
        lease_for = shared.settings.lease_for
        self._dsn, self._lease_for = shared.bus.dsn, lease_for
        self._facts: dict[str, Any] = {
            "name": name,
            "domains": shared.domains,
            "concurrency": shared.settings.concurrency,
            "lease_for": lease_for,
            "version": version("busload"),
            "release": release_of([*shared.bus.declared_schedules.values()]),
        }
        self._on_renewal, self._on_declared_dead, self._condition = on_renewal, on_declared_dead, condition
        self._on_asked_to_stop = on_asked_to_stop
        # Renew at a third of the lease, so that two renewals may fail before the commands are lost.
        self._every = lease_for.total_seconds() / 3
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._next_beat = NextBeat()
        self._thread = threading.Thread(target=self._run, name="busload-renew", daemon=True)
        self._starting = threading.Lock()
        self._dead_numbers: list[int] = []
        """Numbers of this worker that were declared dead: the answer to a new one may have been lost."""
        self._answered_at = self._recovered_at = self._asked_at = -math.inf

    @property
    def in_touch(self) -> bool:
        """Whether this worker has reached the database for as long as a lease, and may declare others dead.

        After an outage others are on their way back as well. None of them is declared dead before they had a lease's
        time for that.
        """
        now, lease_for = time.monotonic(), self._lease_for.total_seconds()
        return now - self._answered_at <= lease_for / 2 and now - self._recovered_at >= lease_for

    @property
    def reaches(self) -> bool:
        """Whether a heartbeat has reached the database within half a lease."""
        return time.monotonic() - self._answered_at <= self._lease_for.total_seconds() / 2

    @property
    def blocked_for(self) -> float:
        """Seconds that the event loop has not answered; 0 if that is no longer than the time between two heartbeats."""
        silent = 0.0 if self._answered.is_set() else time.monotonic() - self._asked_at
        return silent if silent >= self._every else 0.0

    def start(self) -> None:
        """Register the worker; raises if the database cannot be reached at all."""
        with self._starting:
            if self._next_beat.stopped:  # whoever wanted it has gone
                return
            sent_at = clock()
            with connect(self._dsn, response_timeout=RESPONSE_TIMEOUT) as conn:
                self._shared.number = perform(conn, rescue.register(**self._facts))
            self._shared.renewed_at = sent_at
            self._answered_at = time.monotonic()
            self._answered.set()
            self._thread.start()

    def let_go(self) -> None:
        """Renew no more; does not wait for the heartbeat under way."""
        self._next_beat.stop()

    def renew_soon(self) -> None:
        """Renew at once: a renewal brings the cancels whose notifications were missed."""
        self._next_beat.hurry()

    def stop(self) -> None:
        """Renew no more, and wait a second for the heartbeat under way; a silent network ends it later."""
        self.let_go()
        if self._thread.is_alive():
            self._thread.join(LAST_BEAT)

    def undo(self) -> None:
        """Stop, and retire the worker: nothing was claimed yet."""
        self.let_go()
        with self._starting:  # a start that was cancelled goes on in its thread
            self.stop()
        if self._shared.number:
            with connect(self._dsn, response_timeout=RESPONSE_TIMEOUT) as conn:
                perform(conn, rescue.retire(worker=self._shared.number))

    def _run(self) -> None:
        beat(self._dsn, self._every, self._next_beat, self._once, self._outage, before=self._watch_loop)

    def _once(self, conn: Connection) -> None:
        sent_at = clock()
        # A claim's answer takes milliseconds: what was leased two heartbeats ago and is unknown here never arrived.
        condition = msgspec.json.encode(self._condition()).decode()
        settled = self._lease_for * 2 / 3
        renewal = perform(conn, rescue.renew(worker=self._shared.number, settled=settled, condition=condition))
        now = time.monotonic()
        if now - self._answered_at > self._lease_for.total_seconds() / 2:  # else a single heartbeat has failed
            self._recovered_at = now
        self._answered_at = now
        if renewal is not None:
            self._shared.renewed_at = sent_at
            self._dead_numbers.clear()
            self._tell(lambda: self._on_renewal(renewal))
            if renewal.asked_to_stop:
                self._on_asked_to_stop()  # from here, in case a handler blocks the event loop
            return
        if self._next_beat.stopped:
            return
        leases = self._shared.held.leases
        self._dead_numbers.append(self._shared.number)
        sent_at = clock()
        plan = rescue.come_back(dead=self._dead_numbers, leases=leases, **self._facts)
        with conn.transaction():
            self._shared.number, resumed = perform(conn, plan)
        self._shared.renewed_at = sent_at  # after the number: a permit of the old one must not seem to be good
        self._dead_numbers.clear()
        log.warning(
            "This worker was declared dead though it lives: of its %s it has taken up %d again, and others have the "
            "rest. It goes on under a new number",
            counted(len(leases), "lease"),
            len(resumed),
        )
        self._tell(lambda: self._on_declared_dead({lease.lease_id for lease in leases} - resumed, resumed))

    def _tell(self, what: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what)

    def _watch_loop(self) -> None:
        """Log where the event loop is stuck if it has not answered since the last heartbeat."""
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

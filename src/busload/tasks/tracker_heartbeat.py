"""A tracker as one of the workers: registered, renewed by a thread, and declared dead if it is silent too long."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID

import psycopg

from busload.commands import rescue
from busload.commands.execution import Execution
from busload.commands.wording import counted
from busload.postgres.connection import Connection
from busload.postgres.heartbeat_thread import LAST_BEAT, NextBeat, beat
from busload.postgres.outage import Outage
from busload.postgres.own_connection import RESPONSE_TIMEOUT
from busload.sync.connection import connect
from busload.sync.plan import perform
from busload.tasks import track

log = logging.getLogger("busload")


class AfterFork:
    """Lets one thread of a process that was forked off make what all of them use there."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """A lock that another thread held when the process forked would stay locked in the child."""
        self.lock = threading.RLock()


after_fork = AfterFork()


class Presence:
    """A tracker as one of the workers: from its first claim until it is closed, or its process ends.

    A thread renews it on a connection of its own, so that a task which blocks the process keeps its lease.
    """

    def __init__(self, lease_for: timedelta, name: str | None) -> None:
        self.process = os.getpid()
        self.worker: int | None = None
        self.workers: list[int] = []
        """All numbers it has had; what it holds under an earlier one counts until somebody takes it over."""
        self._declared_dead = False
        """Whether it was declared dead and has not come back yet."""
        self._lease_for = lease_for
        self._name = name or f"{socket.gethostname()}:{self.process}:{secrets.token_hex(3)}"
        # Renew at a third of the lease, so that two renewals may fail before tasks are lost.
        self._every = lease_for.total_seconds() / 3
        self._held: dict[UUID, Execution] = {}
        self._unanswered: dict[object, float] = {}
        """Claims under way, and since when."""
        self._queues: dict[str, None] = {}
        self._lock = threading.Lock()
        self._dsn = ""
        self._next_beat = NextBeat()
        self._outage = Outage()
        self._thread: threading.Thread | None = None

    def register(self, dsn: str) -> int:
        """The number to claim under; the first caller registers, the others wait for that."""
        with self._lock:
            if self.worker is None:
                with connect(dsn, response_timeout=RESPONSE_TIMEOUT) as conn:
                    self._register(conn)
                self._dsn = dsn
            if self._thread is None:
                self._next_beat = NextBeat()
                self._thread = threading.Thread(target=self._run, name="busload-tracker", daemon=True)
                self._thread.start()
            assert self.worker is not None
            return self.worker

    def declared_dead(self, worker: int) -> None:
        """A claim under this number was refused: register anew, unless that has happened already."""
        with self._lock:
            if self.worker == worker:
                self.worker, self._declared_dead = None, True

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A claim is under way: its answer may have to wait for this process, whatever the database knows already."""
        claim = object()
        with self._lock:
            self._unanswered[claim] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._unanswered[claim]

    def took(self, execution: Execution | None) -> None:
        if execution is not None and execution.execution_id is not None:
            with self._lock:
                self._held[execution.execution_id] = execution
                self._queues[execution.queue] = None

    def ended(self, execution: Execution) -> None:
        with self._lock:
            if execution.execution_id is not None:
                self._held.pop(execution.execution_id, None)

    def close(self, hand_back: bool) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            self.worker = None
            self._next_beat.stop()
        if thread is not None:
            thread.join(LAST_BEAT)
            self._outage.close()
        if not (leaving := list(self.workers)):
            return
        try:
            with connect(self._dsn, response_timeout=RESPONSE_TIMEOUT) as conn, conn.transaction():
                left = perform(conn, track.leave(leaving, hand_back=hand_back))
        except psycopg.OperationalError as error:  # then its leases lapse by themselves
            log.warning("The tracker could not say that it has stopped: %s", error)
            return
        if left and not hand_back:
            executions = counted(left, "execution")
            log.warning("The tracker was closed with %s under way, for others to take over later", executions)
            return
        with self._lock:
            self.workers = [worker for worker in self.workers if worker not in leaving]

    def once(self, conn: Connection) -> None:
        """One heartbeat. Refused means that this worker was declared dead: it goes on under a new number."""
        with self._lock:
            worker, held = self.worker, set(self._held)
        if worker is None:
            return  # the next claim registers
        renewal = perform(conn, rescue.renew(worker=worker, settled=self._lease_for * 2 / 3))
        if renewal is None:
            with self._lock:
                if self.worker == worker:
                    self._declared_dead = True
                    self._register(conn)
            return
        with self._lock:
            for lease_id in held - renewal.leases:
                self._held.pop(lease_id, None)
            # What was leased two heartbeats ago and is unknown here never arrived, unless the claim that took it is
            # still under way: this process may have been too busy to read its answer.
            oldest = min(self._unanswered.values(), default=math.inf)
            unknown = [] if oldest < time.monotonic() - self._every else list(renewal.settled - self._held.keys())
        if unknown:
            with conn.transaction():
                perform(conn, rescue.release(unknown))
            log.warning("Handed back %s whose claim was never answered", counted(len(unknown), "task"))

    def _register(self, conn: Connection) -> None:
        register = rescue.register(
            name=self._name, domains=list(self._queues), concurrency=0, lease_for=self._lease_for
        )  # none at a time of those it would find by itself: it takes tasks by name
        with conn.transaction():
            worker = perform(conn, register)
            self.workers.append(worker)  # before it is known whether that was written: then it is known in any case
            held = list(self._held.values())
            resumed = perform(conn, track.come_back(worker=worker, dead=self.workers[:-1], held=held))
        self.worker = worker
        if self._declared_dead:
            log.warning(
                "This tracker was declared dead though it lives: of its %s it has taken up %d again, and others "
                "have the rest. It goes on under a new number",
                counted(len(held), "task"),
                len(resumed),
            )
        self._declared_dead = False

    def _run(self) -> None:
        beat(self._dsn, self._every, self._next_beat, self.once, self._outage)

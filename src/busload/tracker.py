"""TaskTracker: the two keys for work that other queues run.

A task is an ordinary command: its domain is the queue, its data the metadata, its task key the task id. It waits in the
ordinary places and is claimed by name, by whoever gets its message, so that its attempts, their audit and its way into
troubleshooting and out of it are those of every command. The message is only a doorbell: PostgreSQL decides who runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg

from busload.bus import CommandBus, SyncCommandBus
from busload.domain.command import check_text, refuse
from busload.domain.counted import counted
from busload.domain.dedup import Dedup, task_key
from busload.domain.execution import Execution, Failed, Succeeded
from busload.errors import Superseded, kind_of
from busload.store import rescue, track
from busload.store.connection import RESPONSE_TIMEOUT, AsyncConnection, Connection, connect
from busload.store.outage import Outage
from busload.store.plan import perform
from busload.worker.renew import LAST_BEAT, Pulse, beat

log = logging.getLogger("busload")

PREFIXES = ("dev_", "test_", "staging_", "prod_")
"""What names of queues may begin with to tell environments apart: a task is the same in all of them."""

ONE_AT_A_TIME = Dedup()
LEASE_FOR = timedelta(seconds=60)
SHORTEST = timedelta(milliseconds=100)
WAITING_FOR = timedelta(minutes=5)
GLANCE, PATIENCE = 0.02, 5.0
"""How often, and for how many seconds, a claim looks again at what a worker without a handler is about to give back."""


class _AfterFork:
    """Lets one thread of a process that was forked off make what all of them use there."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """A lock that another thread held when the process forked would stay locked in the child."""
        self.lock = threading.RLock()


_after_fork = _AfterFork()


class Tracker:
    """What both faces share: names, checks, and being a worker."""

    def __init__(self, prefixes: Sequence[str], lease_for: timedelta, name: str | None) -> None:
        if (
            isinstance(prefixes, str)
            or not isinstance(prefixes, Sequence)
            or not all(isinstance(prefix, str) for prefix in prefixes)
        ):
            raise ValueError(f"prefixes must be a list of texts, found {prefixes!r}.")
        if not isinstance(lease_for, timedelta) or lease_for < SHORTEST:
            raise ValueError(f"lease_for must be a timedelta of at least {SHORTEST}, found {lease_for!r}.")
        if name is not None:
            refuse(check_text(name, "name", 255), writes=False)
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._lease_for, self._name = lease_for, name
        self._own_presence = Presence(lease_for, name)

    def task_id(self, queue: str, *parts: str | int | UUID) -> str:
        """The readable, stable identity of a task: `task_id("dev_jobs", "A", 7)` is `jobs:A:7` in every environment."""
        return task_key(self._queue(queue), *parts)

    def _queue(self, queue: str) -> str:
        if isinstance(queue, str):
            for prefix in self._prefixes:
                if queue.startswith(prefix):
                    return queue.removeprefix(prefix)
        return queue

    @property
    def _presence(self) -> Presence:
        """A process that was forked off is a worker of its own: threads and connections stay behind in its parent."""
        with _after_fork.lock:
            if self._own_presence.process != os.getpid():
                self._own_presence = Presence(self._lease_for, self._name)
            return self._own_presence


class TaskTracker(Tracker):
    """Follows tasks that another queue runs, in the same tables as commands.

    Give both keys of `enqueue` to the queue. Who gets the message calls `claim`, and runs the task only if that returns
    an execution; then `complete` or `fail`. Leases live as long as this process does: a task whose worker died can be
    claimed again, and `recover` names those whose message is gone.
    """

    def __init__(
        self,
        bus: CommandBus,
        *,
        prefixes: Sequence[str] = PREFIXES,
        lease_for: timedelta = LEASE_FOR,
        name: str | None = None,
    ) -> None:
        if not isinstance(bus, CommandBus):
            raise ValueError(f"TaskTracker needs a CommandBus, found {kind_of(bus)}; see SyncTaskTracker.")
        super().__init__(prefixes, lease_for, name)
        self._bus = bus

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, hand_back: bool = False) -> None:
        """Stop being a worker. What still runs can be completed until its lease ends; `hand_back` gives it up."""
        await asyncio.to_thread(self._presence.close, hand_back=hand_back)

    async def enqueue(
        self,
        task_id: str,
        *,
        queue: str,
        metadata: dict[str, Any] | None = None,
        dedup: Dedup | None = ONE_AT_A_TIME,
        max_attempts: int = 3,
        conn: AsyncConnection | Connection | None = None,
    ) -> Execution | None:
        """Record a task that is about to be published; publish its two keys after the commit.

        None: another execution of it waits, runs, or was enqueued within the window of `dedup`. With
        `Dedup(on_conflict="return_existing")` that one is returned instead; with "raise" it is a `DuplicateTaskError`.
        """
        write = self._bus._requests.enqueue_task(task_id, self._queue(queue), metadata, dedup, max_attempts)
        return await self._bus._write(write, conn)

    async def claim(self, task_id: str, execution_id: UUID | str) -> Execution | None:
        """Take a task for this process to run; None if it is not yours to run, and its message can be acknowledged.

        It runs elsewhere then, has ended, waits for a person, or its queue is paused. Whoever names any execution of a
        task that waits gets it, under the id that was announced for its next execution or, if that is used up, another.
        """
        claim_by = self._bus._requests.claim_task(task_id, execution_id)
        presence, asked_at = self._presence, time.monotonic()
        while True:
            worker = presence.worker
            if worker is None:
                worker = await asyncio.to_thread(presence.register, self._bus.dsn)
            with presence.asking():
                claim = await self._bus._write(claim_by(worker))
                presence.took(claim.execution)
            if claim.refused:
                presence.declared_dead(worker)
            elif claim.passing and time.monotonic() < asked_at + PATIENCE:
                await asyncio.sleep(GLANCE)
            else:
                return claim.execution

    async def complete(self, execution: Execution, result: Any = None) -> Execution:
        """Say that a claimed task is done. `Superseded`: it was taken over meanwhile, and nothing was written."""
        return await self._end(execution, self._bus._requests.succeeded(result))

    async def fail(self, execution: Execution, error: BaseException | str) -> Execution:
        """Say that a claimed task failed, and see what becomes of it: `failed`, or `dlq` after its last attempt.

        A `PermanentCommandError` goes to the dlq at once, after a `BusinessRuleError` nothing is tried again.
        """
        return await self._end(execution, self._bus._requests.failed(error))

    async def retry(self, task_id: str, *, operator: str | None = None) -> Execution:
        """Take a task out of the dlq: the same task, a new execution, all its attempts. Publish its two keys."""
        return await self._bus._write(self._bus._requests.retry_task(task_id, operator=operator))

    async def history(self, task_id: str) -> list[Execution]:
        """Every execution of a task, oldest first."""
        return await self._bus._read(self._bus._requests.task_history(task_id))

    async def recover(self, queue: str, *, waiting_for: timedelta = WAITING_FOR, limit: int = 1000) -> list[Execution]:
        """Take back what dead workers held, and return what has waited that long without being claimed.

        Publish the two keys of each again, since its message may be lost; if it was not, the second one is harmless.
        Each is returned to one caller, and not again before it has waited as long once more.
        """
        write = self._bus._requests.recover_tasks(self._queue(queue), waiting_for=waiting_for, limit=limit)
        await self._bus._write(self._bus._requests.rescue())
        return await self._bus._write(write)

    async def _end(self, execution: Execution, outcome: Succeeded | Failed) -> Execution:
        presence = self._presence
        write = self._bus._requests.end_task(execution, outcome, workers=presence.workers)
        try:
            ended = await self._bus._write(write)
        except Superseded:
            presence.ended(execution)
            raise
        presence.ended(execution)
        return ended


class SyncTaskTracker(Tracker):
    """`TaskTracker` for code without an event loop. After a fork it opens a bus of its own, on the same database."""

    def __init__(
        self,
        bus: SyncCommandBus,
        *,
        prefixes: Sequence[str] = PREFIXES,
        lease_for: timedelta = LEASE_FOR,
        name: str | None = None,
    ) -> None:
        if not isinstance(bus, SyncCommandBus):
            raise ValueError(f"SyncTaskTracker needs a SyncCommandBus, found {kind_of(bus)}; see TaskTracker.")
        super().__init__(prefixes, lease_for, name)
        self._given = bus
        self._opened: SyncCommandBus | None = None

    @property
    def _bus(self) -> SyncCommandBus:
        with _after_fork.lock:
            bus = self._opened or self._given
            if bus._pool is not None and bus._process != os.getpid():
                bus = self._opened = SyncCommandBus(bus.dsn, settings=bus.settings).open(wait=None)
            return bus

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, hand_back: bool = False) -> None:
        """Stop being a worker. What still runs can be completed until its lease ends; `hand_back` gives it up."""
        self._presence.close(hand_back=hand_back)
        if self._opened is not None and self._opened._process == os.getpid():
            self._opened.close()
            self._opened = None

    def enqueue(
        self,
        task_id: str,
        *,
        queue: str,
        metadata: dict[str, Any] | None = None,
        dedup: Dedup | None = ONE_AT_A_TIME,
        max_attempts: int = 3,
        conn: Connection | None = None,
    ) -> Execution | None:
        """Record a task that is about to be published; see `TaskTracker.enqueue`."""
        write = self._bus._requests.enqueue_task(task_id, self._queue(queue), metadata, dedup, max_attempts)
        return self._bus._write(write, conn)

    def claim(self, task_id: str, execution_id: UUID | str) -> Execution | None:
        """Take a task for this process to run; None if it is not yours to run; see `TaskTracker.claim`."""
        claim_by = self._bus._requests.claim_task(task_id, execution_id)
        presence, asked_at = self._presence, time.monotonic()
        while True:
            worker = presence.worker or presence.register(self._bus.dsn)
            with presence.asking():
                claim = self._bus._write(claim_by(worker))
                presence.took(claim.execution)
            if claim.refused:
                presence.declared_dead(worker)
            elif claim.passing and time.monotonic() < asked_at + PATIENCE:
                time.sleep(GLANCE)
            else:
                return claim.execution

    def complete(self, execution: Execution, result: Any = None) -> Execution:
        """Say that a claimed task is done. `Superseded`: it was taken over meanwhile, and nothing was written."""
        return self._end(execution, self._bus._requests.succeeded(result))

    def fail(self, execution: Execution, error: BaseException | str) -> Execution:
        """Say that a claimed task failed, and see what becomes of it; see `TaskTracker.fail`."""
        return self._end(execution, self._bus._requests.failed(error))

    def retry(self, task_id: str, *, operator: str | None = None) -> Execution:
        """Take a task out of the dlq: the same task, a new execution, all its attempts. Publish its two keys."""
        return self._bus._write(self._bus._requests.retry_task(task_id, operator=operator))

    def history(self, task_id: str) -> list[Execution]:
        """Every execution of a task, oldest first."""
        return self._bus._read(self._bus._requests.task_history(task_id))

    def recover(self, queue: str, *, waiting_for: timedelta = WAITING_FOR, limit: int = 1000) -> list[Execution]:
        """Take back what dead workers held, and return what has waited too long; see `TaskTracker.recover`."""
        write = self._bus._requests.recover_tasks(self._queue(queue), waiting_for=waiting_for, limit=limit)
        self._bus._write(self._bus._requests.rescue())
        return self._bus._write(write)

    def _look(self, queue: str, *, waiting_for: timedelta, limit: int) -> list[Execution]:
        """What `recover` would return, and nothing is written."""
        write = self._bus._requests.recover_tasks(
            self._queue(queue), waiting_for=waiting_for, limit=limit, look_only=True
        )
        return self._bus._write(write)

    def _end(self, execution: Execution, outcome: Succeeded | Failed) -> Execution:
        presence = self._presence
        write = self._bus._requests.end_task(execution, outcome, workers=presence.workers)
        try:
            ended = self._bus._write(write)
        except Superseded:
            presence.ended(execution)
            raise
        presence.ended(execution)
        return ended


class Presence:
    """A tracker as one of the workers: from its first claim until it is closed, or its process ends.

    A thread renews it on a connection of its own, so that a task which blocks the process keeps its lease.
    """

    def __init__(self, lease_for: timedelta, name: str | None) -> None:
        self.process = os.getpid()
        self.worker: int | None = None
        self.workers: list[int] = []
        """All numbers it has had; what it holds under an earlier one counts until somebody takes it over."""
        self._buried = False
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
        self._pulse = Pulse()
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
                self._pulse = Pulse()
                self._thread = threading.Thread(target=self._run, name="busload-tracker", daemon=True)
                self._thread.start()
            assert self.worker is not None
            return self.worker

    def declared_dead(self, worker: int) -> None:
        """A claim under this number was refused: register anew, unless that has happened already."""
        with self._lock:
            if self.worker == worker:
                self.worker, self._buried = None, True

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

    def close(self, *, hand_back: bool) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            self.worker = None
            self._pulse.stop()
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
                    self._buried = True
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
            resumed = perform(conn, track.come_back(worker=worker, buried=self.workers[:-1], held=held))
        self.worker = worker
        if self._buried:
            log.warning(
                "This tracker was declared dead though it lives: of its %s it has taken up %d again, and others "
                "have the rest. It goes on under a new number",
                counted(len(held), "task"),
                len(resumed),
            )
        self._buried = False

    def _run(self) -> None:
        beat(self._dsn, self._every, self._pulse, self.once, self._outage)

"""Made from busload.tasks.tracker by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import UUID

from busload.commands import rescue
from busload.commands.checks import check
from busload.commands.dedup import Dedup
from busload.commands.execution import Execution, Failed, Succeeded
from busload.errors import SupersededError, kind_of
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.write import patient
from busload.settings import Settings
from busload.sync.database import Database
from busload.tasks import track
from busload.tasks.tracker import (
    GLANCE,
    LEASE_FOR,
    ONE_AT_A_TIME,
    PATIENCE,
    PREFIXES,
    WAITING_FOR,
    Tracker,
)
from busload.tasks.tracker_heartbeat import after_fork


class TrackedBus(Protocol):
    """What a tracker needs of a bus: a `SyncCommandBus` has it."""

    @property
    def database(self) -> Database: ...

    @property
    def settings(self) -> Settings: ...


class SyncTaskTracker(Tracker):
    """Follows tasks that another queue runs, in the same tables as commands.

    Give both keys of `enqueue` to the queue. Who gets the message calls `claim`, and runs the task only if that returns
    an execution; then `complete` or `fail`. Leases live as long as this process does: a task whose worker died can be
    claimed again, and `recover` names those whose message is gone.

    `task_id` names a task, as `task_id()` makes it, and `execution_id` one execution of it: the two keys. `execution`
    is what `claim` has returned. `queue` is the queue that runs the task, by the name that it has there. The prefix of
    an environment stays in that name, and is left out of the task id only.
    """

    def __init__(
        self,
        bus: TrackedBus,
        *,
        prefixes: Sequence[str] = PREFIXES,
        lease_for: timedelta = LEASE_FOR,
        name: str | None = None,
    ) -> None:
        if not isinstance(getattr(bus, "database", None), Database):
            several = len(getattr(bus, "shards", ())) > 1
            hint = " It is over several databases: pass the bus of one of them, bus.shard_of(queue)." if several else ""
            raise ValueError(f"SyncTaskTracker needs a SyncCommandBus, found {kind_of(bus)}.{hint}")
        super().__init__(prefixes, lease_for, name, bus.settings.limits)
        self._bus = bus
        self._opened: Database | None = None

    @property
    def _database(self) -> Database:
        """That of the bus, or in a process that was forked off one of its own, at the same place."""
        with after_fork.lock:
            database = self._opened or self._bus.database
            if database.was_forked:
                database = self._opened = database.for_this_process()
            return database

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, hand_back: bool = False) -> None:
        """Stop being a worker. What still runs can be completed until its lease ends; `hand_back` gives it up."""
        waiting.in_thread(self._presence.close, hand_back)
        if self._opened is not None and not self._opened.was_forked:
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
        conn: AnySyncConnection | None = None,
    ) -> Execution | None:
        """Record a task that is about to be published; publish its two keys after the commit.

        None says that another execution of it waits, runs, or was enqueued within the window of `dedup`. With
        `Dedup(on_conflict="return_existing")` that one is returned instead; with "raise" it is a `DuplicateTaskError`.
        `metadata` is kept with the task, `max_attempts` is how often it may run before it goes to the dlq. With `conn`
        the task exists exactly if that transaction commits.
        """
        write = track.new_task(
            self._limits,
            task_id,
            queue,
            metadata=metadata,
            dedup=dedup,
            max_attempts=max_attempts,
            others=self._other_names(queue),
        )
        return self._database.write(write, conn)

    def claim(self, task_id: str, execution_id: UUID | str) -> Execution | None:
        """Take a task for this process to run; None if it is not yours to run, and its message can be acknowledged.

        It runs elsewhere then, has ended, waits for a person, or its queue is paused. Whoever names any execution of a
        task that waits gets it, under the id that was announced for its next execution or, if that is used up, another.
        """
        claim_by = track.taking(self._limits, task_id, execution_id)
        presence, asked_at = self._presence, time.monotonic()
        while True:
            worker = presence.worker
            if worker is None:
                worker = waiting.in_thread(presence.register, self._database.dsn)
            with presence.asking():
                claim = self._database.write(claim_by(worker))
                presence.took(claim.execution)
            if claim.refused:
                presence.declared_dead(worker)
            elif claim.passing and time.monotonic() < asked_at + PATIENCE:
                waiting.sleep(GLANCE)
            else:
                return claim.execution

    def complete(self, execution: Execution, result: Any = None) -> Execution:
        """Say that a claimed task is done, with a `result` if there is one.

        `SupersededError` says that the task was taken over meanwhile, and nothing was written.
        """
        return self._end(execution, track.succeeded(self._limits, result))

    def fail(self, execution: Execution, error: BaseException | str) -> Execution:
        """Say that a claimed task failed by this `error`, and see what becomes of it.

        It is `failed`, or `dlq` after its last attempt. A `PermanentCommandError` goes to the dlq at once, after a
        `BusinessRuleError` nothing is tried again.
        """
        return self._end(execution, track.failed(error))

    def retry(self, task_id: str, *, operator: str | None = None) -> Execution:
        """Take a task out of the dlq: the same task, a new execution, all its attempts. Publish its two keys.

        `operator` is whoever decides that; the audit trail keeps it.
        """
        check(self._limits, task_id=task_id, operator=operator)
        return self._database.write(patient(partial(track.retry, task_id, operator=operator)))

    def history(self, task_id: str) -> list[Execution]:
        """Every execution of a task, oldest first."""
        check(self._limits, writes=False, task_id=task_id)
        return self._database.read(track.history(task_id))

    def recover(
        self, queue: str, *, waiting_for: timedelta = WAITING_FOR, limit: int = 1000, dry_run: bool = False
    ) -> list[Execution]:
        """Take back what dead workers held, and return what has waited for `waiting_for` without being claimed.

        Publish the two keys of each again, since its message may be lost; if it was not, the second message is
        harmless. At most `limit` are returned, each to one caller, and not again before it has waited as long once
        more. With `dry_run` nothing is written, and what dead workers hold is named as well. A `queue` without a prefix
        means the queue in every environment; `Execution.queue` tells where to publish.
        """
        write = track.recover(
            self._limits,
            queue,
            names=self.queue_names(queue),
            waiting_for=waiting_for,
            limit=limit,
            dry_run=dry_run,
        )
        if not dry_run:
            self._database.write(rescue.write())
        return self._database.write(write)

    def _end(self, execution: Execution, outcome: Succeeded | Failed) -> Execution:
        presence = self._presence
        write = track.ending(self._limits, execution, outcome, workers=presence.workers)
        try:
            ended = self._database.write(write)
        except SupersededError:
            presence.ended(execution)
            raise
        presence.ended(execution)
        return ended

"""TaskTracker: the two keys for work that other queues run.

A task is an ordinary command: its domain is the queue, its data the metadata, its task key the task id. It waits in the
ordinary places and is claimed by name, by whoever gets its message, so that its attempts, their audit and its way into
troubleshooting and out of it are those of every command. The message is only a doorbell: PostgreSQL decides who runs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import UUID

from busload.commands import rescue
from busload.commands.checks import between, check, require
from busload.commands.dedup import Dedup, task_key
from busload.commands.execution import Execution, Failed, Succeeded
from busload.errors import SupersededError, kind_of
from busload.postgres import waiting
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.write import patient
from busload.settings import InputLimits, Settings
from busload.tasks import track
from busload.tasks.message import TaskMessage, keys_of, task_message
from busload.tasks.tracker_heartbeat import Presence, after_fork

log = logging.getLogger("busload")

PREFIXES = ("dev_", "test_", "staging_", "prod_")
"""What names of queues may begin with to tell environments apart: a task is the same in all of them."""

ONE_AT_A_TIME = Dedup()
LEASE_FOR = timedelta(seconds=60)
SHORTEST = timedelta(milliseconds=100)
LONG_ENOUGH = between(SHORTEST, timedelta.max, f"a timedelta of at least {SHORTEST}")
WAITING_FOR = timedelta(minutes=5)
GLANCE, PATIENCE = 0.02, 5.0
"""How often, and for how many seconds, a claim looks again at what a worker without a handler is about to give back."""


class Tracker:
    """What both faces share: names, checks, and being a worker."""

    def __init__(self, prefixes: Sequence[str], lease_for: timedelta, name: str | None, limits: InputLimits) -> None:
        if (
            isinstance(prefixes, str)
            or not isinstance(prefixes, Sequence)
            or not all(isinstance(prefix, str) for prefix in prefixes)
        ):
            raise ValueError(f"prefixes must be a list of texts, found {prefixes!r}.")
        require(LONG_ENOUGH, lease_for=lease_for)
        check(limits, writes=False, name=name)
        self._limits = limits
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._lease_for, self._name = lease_for, name
        self._own_presence = Presence(lease_for, name)

    def task_id(self, queue: str, *parts: str | int | UUID) -> str:
        """The readable, stable identity of a task, made of the name of its `queue` and these `parts`.

        `task_id("dev_jobs", "A", 7)` is `jobs:A:7` in every environment.
        """
        return task_key(self.queue_name(queue), *parts)

    def queue_name(self, queue: str) -> str:
        """The name of a queue without the prefix that tells environments apart."""
        if isinstance(queue, str):
            for prefix in self._prefixes:
                if queue.startswith(prefix):
                    return queue.removeprefix(prefix)
        return queue

    def queue_names(self, queue: str) -> list[str]:
        """The names that a queue may have: the given one, and for a name without prefix also those with a prefix."""
        if not isinstance(queue, str) or self.queue_name(queue) != queue:
            return [queue]
        return [queue, *(prefix + queue for prefix in self._prefixes)]

    def _other_names(self, queue: str) -> list[str]:
        """The names of the same queue in other environments: a task id is the same in all of them."""
        bare = self.queue_name(queue)
        check(self._limits, queue=bare)
        return [name for name in self.queue_names(bare) if name != queue]

    def message(self, execution: Execution, content: dict[str, Any] | None = None) -> TaskMessage:
        """A message to publish about an `execution` that `enqueue`, `retry` or `recover` has returned.

        It has both keys in its body, beside the `content`, and in its headers. Without `content` the metadata of the
        task is sent. Publish it to `execution.queue`, as a persistent message.
        """
        return task_message(execution, content, self._limits.payload)

    def keys(self, body: object, headers: Mapping[str, Any] | None = None) -> tuple[str, UUID]:
        """The two keys of a message that was received, from its `body` and its `headers`: what to give to `claim`.

        `InvalidOperationError` says that they are missing, or differ between body and headers: dead-letter the message.
        """
        return keys_of(body, headers)

    @property
    def _presence(self) -> Presence:
        """A process that was forked off is a worker of its own: threads and connections stay behind in its parent."""
        with after_fork.lock:
            if self._own_presence.process != os.getpid():
                self._own_presence = Presence(self._lease_for, self._name)
            return self._own_presence


class TrackedBus(Protocol):
    """What a tracker needs of a bus: a `CommandBus` has it."""

    @property
    def database(self) -> Database: ...

    @property
    def settings(self) -> Settings: ...


class TaskTracker(Tracker):
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
            raise ValueError(f"TaskTracker needs a CommandBus, found {kind_of(bus)}.{hint}")
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, hand_back: bool = False) -> None:
        """Stop being a worker. What still runs can be completed until its lease ends; `hand_back` gives it up."""
        await waiting.in_thread(self._presence.close, hand_back)
        if self._opened is not None and not self._opened.was_forked:
            await self._opened.close()
            self._opened = None

    async def enqueue(
        self,
        task_id: str,
        *,
        queue: str,
        metadata: dict[str, Any] | None = None,
        dedup: Dedup | None = ONE_AT_A_TIME,
        max_attempts: int = 3,
        conn: AnyConnection | None = None,
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
        return await self._database.write(write, conn)

    async def claim(self, task_id: str, execution_id: UUID | str) -> Execution | None:
        """Take a task for this process to run; None if it is not yours to run, and its message can be acknowledged.

        It runs elsewhere then, has ended, waits for a person, or its queue is paused. Whoever names any execution of a
        task that waits gets it, under the id that was announced for its next execution or, if that is used up, another.
        """
        claim_by = track.taking(self._limits, task_id, execution_id)
        presence, asked_at = self._presence, time.monotonic()
        while True:
            worker = presence.worker
            if worker is None:
                worker = await waiting.in_thread(presence.register, self._database.dsn)
            with presence.asking():
                claim = await self._database.write(claim_by(worker))
                presence.took(claim.execution)
            if claim.refused:
                presence.declared_dead(worker)
            elif claim.passing and time.monotonic() < asked_at + PATIENCE:
                await waiting.sleep(GLANCE)
            else:
                return claim.execution

    async def complete(self, execution: Execution, result: Any = None) -> Execution:
        """Say that a claimed task is done, with a `result` if there is one.

        `SupersededError` says that the task was taken over meanwhile, and nothing was written.
        """
        return await self._end(execution, track.succeeded(self._limits, result))

    async def fail(self, execution: Execution, error: BaseException | str) -> Execution:
        """Say that a claimed task failed by this `error`, and see what becomes of it.

        It is `failed`, or `dlq` after its last attempt. A `PermanentCommandError` goes to the dlq at once, after a
        `BusinessRuleError` nothing is tried again.
        """
        return await self._end(execution, track.failed(error))

    async def retry(self, task_id: str, *, operator: str | None = None) -> Execution:
        """Take a task out of the dlq: the same task, a new execution, all its attempts. Publish its two keys.

        `operator` is whoever decides that; the audit trail keeps it.
        """
        check(self._limits, task_id=task_id, operator=operator)
        return await self._database.write(patient(partial(track.retry, task_id, operator=operator)))

    async def history(self, task_id: str) -> list[Execution]:
        """Every execution of a task, oldest first."""
        check(self._limits, writes=False, task_id=task_id)
        return await self._database.read(track.history(task_id))

    async def recover(
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
            await self._database.write(rescue.write())
        return await self._database.write(write)

    async def _end(self, execution: Execution, outcome: Succeeded | Failed) -> Execution:
        presence = self._presence
        write = track.ending(self._limits, execution, outcome, workers=presence.workers)
        try:
            ended = await self._database.write(write)
        except SupersededError:
            presence.ended(execution)
            raise
        presence.ended(execution)
        return ended

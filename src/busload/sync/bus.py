"""Made from busload.bus by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Self, Unpack
from uuid import UUID

from busload.batches.batch import (
    BatchMetadata,
    BatchOptions,
    CreateOptions,
    SyncBatchCompletionCallback,
    facts_of_batch,
    find_batch,
    members,
    new_batch,
)
from busload.batches.cancel import begin_to_cancel
from busload.buffers.declaration import BufferOptions, declared
from busload.bus import Bus, _timeout_error
from busload.commands import search
from busload.commands.checks import check, seconds_of
from busload.commands.command import AuditEvent, BatchCommand
from busload.commands.headers import with_context
from busload.commands.send import NewBatch
from busload.commands.send_middleware import around_send
from busload.commands.send_together import SendingInThreads
from busload.dispatch import creation_state, outbox
from busload.dispatch.create_batch import published_by
from busload.dispatch.publish_in_threads import ThreadPublisher, recover
from busload.dispatch.relay import Recovered
from busload.dispatch.strategy import DispatchName, DispatchReport, Strategy
from busload.errors import BatchNotFoundError, InvalidOperationError
from busload.explain import explanation
from busload.explain.explanation import Explanation
from busload.jobs.batch import is_of_jobs
from busload.jobs.cancel import begin_to_cancel_batch as begin_to_cancel_jobs
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.schema.migrate import Migration
from busload.postgres.write import Write
from busload.retention import kept
from busload.retention.kept import Retention
from busload.retention.prune import Pruned, Pruning
from busload.sync.audit import Audit
from busload.sync.batches import BatchVerbs
from busload.sync.buffer import Buffers, SyncBuffer
from busload.sync.callbacks import Completions
from busload.sync.cancel import cancel
from busload.sync.commands import CommandVerbs
from busload.sync.create_batch import create_and_publish, create_in_one_write
from busload.sync.database import Database
from busload.sync.doctor import DoctorVerbs
from busload.sync.handle import HandleVerbs
from busload.sync.jobs import Jobs
from busload.sync.limits import Domains, Limits
from busload.sync.metrics import MetricsVerbs
from busload.sync.open_batch import SyncOpenBatch
from busload.sync.outbox import SyncOutbox
from busload.sync.pool import Pool
from busload.sync.schedules import Schedules
from busload.sync.statistics import Statistics
from busload.sync.troubleshooting import SyncTroubleshooting
from busload.sync.workers import Workers
from busload.troubleshooting import decisions


class SyncCommandBus(Bus, BatchVerbs, CommandVerbs, DoctorVerbs, HandleVerbs, MetricsVerbs):
    """Send commands and follow their batches.

    Without a DSN it uses `BUSLOAD_DATABASE_URL`, and without that an embedded PostgreSQL. With a mapping of domains to
    DSNs it is one bus over several databases.

    What its methods share: `domain` names the queue that commands wait in, and the handlers that run them. `batch_id`
    and `command_id` name a batch and a command of that domain. `operator` is whoever acts, and `reason` why: the audit
    trail keeps both. `limit` and `offset` say how many items a list has at most, and how many it leaves out before.
    Pass `conn` to join a transaction of your own: what you send then exists exactly if that transaction commits.
    Without it, each call opens and commits its own, and has happened when it returns.
    """

    _give_up = staticmethod(decisions.give_up)

    _over_several = "SyncShardedBus"

    database: Database

    def _make_database(self) -> Database:
        return Database(self._given_dsn, self.settings)

    def _sender(self) -> Self:
        return self

    def _make_parts(self) -> None:
        self.jobs = Jobs(self, self.database, self.settings, self.via, self._changes, self._call_on_complete)
        self.limits, self.domains = Limits(self.database, self._limits), Domains(self.database, self._limits)
        self.audit = Audit(self.database, self._limits)
        self.buffers, self.workers = Buffers(self.database), Workers(self.database, self.settings)
        self.statistics = Statistics(self.database, self._limits)
        self.schedules = Schedules(self, self.database, self._limits, self.via, self.declared_schedules)
        self.troubleshooting = SyncTroubleshooting(self.database, self._limits, self)
        self._publisher = self._make_publisher()
        self.outbox = SyncOutbox(self.database, self._limits, self._publisher)
        self._sending: SendingInThreads | None = None
        self._completions: Completions | None = None

    @property
    def dsn(self) -> str:
        """Where the database is; known once the bus is open."""
        return self.database.dsn

    @property
    def pool(self) -> Pool:
        """The connections of an open bus: `bus.pool.connection()`. They are psycopg's, in autocommit mode."""
        return self.database.pool

    def open(self, *, wait: timedelta | float | None = 0) -> Self:
        """Find the database, and see that it can be used: what is wrong with the DSN or the server is told here.

        A server that cannot be reached is waited for as long as `wait` says, in seconds if it is a number. With None
        it is not looked for: the bus opens while its database is away, and calls find it when it is back.
        """
        if not self.database.is_open:
            self.database.open(wait=seconds_of(wait, "wait"))
            if self._publisher is not None:
                self._publisher.telemetry = self.database.telemetry
            self._sending = SendingInThreads(self.database.write, self.via, lines=max(1, self.settings.pool_size // 2))
            self._completions = Completions(self.database, self.settings.poll_every.total_seconds())
        return self

    def close(self) -> None:
        """Let the database, the broker and the embedded server go; what was sent is written before."""
        if self._sending is not None:
            self._sending.close()
        if self._completions is not None:
            self._completions.close()
        if self._publisher is not None:
            self._publisher.close()
        self.database.close()
        self._sending, self._completions = None, None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    def migrate(self, *, conn: AnySyncConnection | None = None) -> list[Migration]:
        """Bring the database's schema up to this release; safe to run from many processes at once.

        Where nothing is missing it needs no more than the right to read `busload.migration`. With `conn` the schema
        exists exactly if that transaction commits.
        """
        return self.database.migrate(conn)

    def create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        on_complete: SyncBatchCompletionCallback | BatchCommand | None = None,
        dispatch: Strategy | DispatchName | None = None,
        checkpoint_size: int = 1000,
        conn: AnySyncConnection | None = None,
        **options: Unpack[CreateOptions],
    ) -> UUID:
        """Create a batch with all its `commands` in one transaction, and return its id.

        `on_complete` is called, or if it is a `BatchCommand` sent, once every command has ended. The command is
        durable: the transaction that ends the last command inserts it, in the batch's domain, with the completed batch
        under the key "batch" of its data. The function is best effort: it lives and dies with this process.

        With `dedup`, commands whose task key another command holds are left out, also of the total. If none is left,
        the batch completes at once. `job_id` and `stage` are for you to find the batch by; `bus.jobs.create` sets them
        itself.

        On a bus with a transport `dispatch` says how the commands are published, and `get_dispatch` how that went:
        "two_phase" by default; "checkpoint" for more than 10,000, in transactions of `checkpoint_size` commands each,
        where repeating the call with the same `batch_id` goes on after `DispatchIncompleteError` or a crash;
        "optimistic"; or "relay", by a worker, which is how it is with `conn`, `dedup` or `canary`.
        """
        if not self.around_sends:
            return self._create_batch(domain, commands, on_complete, dispatch, checkpoint_size, conn, options)
        headers = options.get("headers")
        with around_send(self.around_sends, "create_batch", domain, headers) as call:
            options["headers"] = call.headers or headers
            call.result = batch_id = self._create_batch(
                domain, commands, on_complete, dispatch, checkpoint_size, conn, options
            )
        return batch_id

    def _create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        on_complete: SyncBatchCompletionCallback | BatchCommand | None,
        dispatch: Strategy | DispatchName | None,
        checkpoint_size: int,
        conn: AnySyncConnection | None,
        options: CreateOptions,
    ) -> UUID:
        dedup = options.get("dedup")
        check(self._limits, checkpoint_size=checkpoint_size)
        about: dict[str, Any] = {"awaits": waiting.AWAITS, "types": self.data_types}
        batch = new_batch("create_batch", self._limits, domain, options, on_complete, known=CreateOptions, **about)
        checked = partial(members, self._limits, batch, types=self.data_types)
        waits = [name for name in ("dedup", "canary") if options.get(name) is not None]
        strategy = published_by(dispatch, self.dispatch, self.via, joins=conn is not None, waits=waits)

        def create(batch: NewBatch) -> None:
            if self.transport is None or strategy is Strategy.RELAY:
                create_in_one_write(self.database, batch, checked(commands), dedup, self.via, conn)
            else:
                create_and_publish(
                    self.publisher,
                    self.database,
                    batch,
                    commands,
                    checked,
                    strategy=strategy,
                    checkpoint_size=checkpoint_size,
                )

        if (telemetry := self.database.telemetry) is None:
            create(batch)
        else:
            with telemetry.sending("create_batch", domain, **facts_of_batch(batch, commands)) as context:
                create(replace(batch, headers=with_context(batch.headers, context, self._limits)))
        self._call_on_complete(batch.batch_id, on_complete)
        return batch.batch_id

    def open_batch(
        self,
        domain: str,
        *,
        on_complete: SyncBatchCompletionCallback | BatchCommand | None = None,
        checkpoint_size: int = 1000,
        conn: AnySyncConnection | None = None,
        **options: Unpack[BatchOptions],
    ) -> SyncOpenBatch:
        """A batch to fill over time: `with bus.open_batch(...) as batch: batch.add(...)`.

        Commands leave in checkpoints of `checkpoint_size`, each a transaction of its own, and run while the next ones
        are added. The batch is sealed when the block ends and cannot complete before; `on_complete` is as in
        `create_batch`. If the block raises, the batch stays open: the checkpoints that were written run on, and you may
        add to it by `send(batch_id=...)`, seal it by `seal_batch` or cancel it.
        """
        if self.around_sends:
            with around_send(self.around_sends, "open_batch", domain, options.get("headers")) as call:
                options["headers"] = call.headers or options.get("headers")
        about: dict[str, Any] = {"awaits": waiting.AWAITS, "types": self.data_types}
        batch = new_batch("open_batch", self._limits, domain, options, on_complete, **about)
        return SyncOpenBatch(
            self.database,
            batch,
            limits=self._limits,
            types=self.data_types,
            via=self.via,
            checkpoint_size=checkpoint_size,
            dedup=options.get("dedup"),
            conn=conn,
            opened=partial(self._call_on_complete, on_complete=on_complete),
        )

    def get_dispatch(self, domain: str, batch_id: UUID) -> DispatchReport | None:
        """How the creation of a batch was published to the broker, and what of it still waits for that.

        None without a broker. What `open_batch` opened is published as it is added, and has a report once it is sealed.
        """
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        return self.database.read(creation_state.find(domain, batch_id))

    def wait_batch(self, domain: str, batch_id: UUID, timeout: timedelta | float | None = None) -> BatchMetadata:
        """Return the batch once it is complete.

        After `timeout`, in seconds if it is a number, a `TimeoutError` says how far the batch came.
        """
        batch: BatchMetadata | None = None
        try:
            with waiting.TimeLimit(seconds_of(timeout)) as limit:
                for seen in self._watch(domain, batch_id, limit):
                    batch = seen
        except TimeoutError:
            raise _timeout_error(batch_id, batch, timeout) from None
        assert batch is not None
        return batch

    def watch_batch(
        self, domain: str, batch_id: UUID, *, timeout: timedelta | float | None = None
    ) -> Iterator[BatchMetadata]:
        """Yield the batch now, whenever its counters have changed, and last when it is complete.

        After `timeout`, in seconds if it is a number, a `TimeoutError` says how far the batch came.
        """
        return self._watch(domain, batch_id, waiting.TimeLimit(seconds_of(timeout)))

    def _watch(self, domain: str, batch_id: UUID, limit: waiting.TimeLimit) -> Iterator[BatchMetadata]:
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        last: BatchMetadata | None = None
        with self._changes(batch_id) as changed:
            while True:
                changed.clear()
                batch = self.database.read(find_batch(domain, batch_id), within=limit.patience)
                if batch is None:
                    raise BatchNotFoundError(domain, batch_id)
                if batch != last:
                    last = batch
                    yield batch
                if batch.status.final:
                    return
                if not limit.left:
                    raise _timeout_error(batch_id, batch, limit.seconds)
                changed.wait(min(limit.left, self.settings.poll_every.total_seconds()))

    def cancel_batch(
        self,
        domain: str,
        batch_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AnySyncConnection | None = None,
    ) -> int:
        """Cancel what has not started yet, and return how many commands that was. The batch takes no more commands.

        Running commands are asked to stop and finish: taking a lease away would leave their side effects half done.
        What waits in troubleshooting stays there for its operator.

        It takes many small transactions, so a large batch keeps nobody waiting; meanwhile no worker claims commands of
        it. If this process dies, a worker goes on. With `conn` it is all one transaction: yours.

        In a batch of jobs, each job that has not ended is canceled as `bus.jobs.cancel` does it, all of them in the
        first transaction: none begins another stage. The result is how many jobs that were.
        """
        check(self._limits, domain=domain, batch_id=batch_id, operator=operator, reason=reason)
        of_jobs = self.database.write(Write(is_of_jobs(domain, batch_id)), conn)
        begin = partial(begin_to_cancel, domain, batch_id)
        if of_jobs:
            begin = partial(begin_to_cancel_jobs, domain, batch_id, via=self.via)
        canceled = cancel(self.database, begin, conn, reason=reason, operator=operator, batch_id=batch_id)
        return canceled.begun if of_jobs else canceled.commands

    def get_batch_audit_trail(self, domain: str, batch_id: UUID) -> list[AuditEvent]:
        """What happened to the batch itself: started, sealed, stalled, canceled, completed."""
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        return self.database.read(search.batch_audit_trail(domain, batch_id))

    def prune(
        self,
        older_than: timedelta,
        *,
        archive: bool = False,
        dry_run: bool = False,
        progress: Callable[[Pruned], None] | None = None,
    ) -> Pruned:
        """Remove commands of all domains that ended longer ago than `older_than`, and say how much that was.

        Their executions and events go with them. Commands of a batch go with their batch, once it is complete and its
        callback has ended. What is open stays, whatever its age. It takes many small transactions, so it may run beside
        the workers, and be interrupted: the next one goes on. With `archive` it all moves to `busload.archive` and
        `busload.archived_batch`; with `dry_run` it is only counted. `progress` is called after each transaction with
        what was removed so far.
        """
        check(self._limits, archive=archive, dry_run=dry_run, older_than=older_than)
        pruning = Pruning(older_than, archive=archive, dry_run=dry_run)
        for plan in pruning.plans():
            self.database.in_transaction(plan)
            if progress is not None:
                progress(pruning.pruned)
        return pruning.pruned

    def retention(self) -> Retention:
        """What is kept: how much, how old, what a prune would find, and when one was done last.

        It is cheap: numbers of rows are estimates of PostgreSQL, and old batches are counted up to 10,000.
        """
        return self.database.read(kept.read())

    @property
    def publisher(self) -> ThreadPublisher:
        """What publishes for this bus, and for a worker that runs on it; it is closed with the bus."""
        if self._publisher is None:
            raise InvalidOperationError("The bus has no transport. Give it one: SyncCommandBus(dsn, transport=URL).")
        return self._publisher

    def _make_publisher(self) -> ThreadPublisher | None:
        settings, key = self.settings, self.settings.message_key
        if self.transport is None:
            return None
        return ThreadPublisher(
            self.transport,
            self.database.in_transaction,
            prefix=settings.queue_prefix,
            queues=settings.queues,
            envelope_size=settings.envelope_size,
            message_per_command=settings.message_per_command,
            key=None if key is None else key.encode(),
        )

    def recover(self, *, publish_again_after: timedelta = timedelta(minutes=5)) -> Recovered:
        """Publish now what waits in the outbox, and again what was published that long ago and never claimed.

        `publish_again_after` is how long ago. Workers do so by themselves; this is for scripts and tests, and for
        applications without a worker of ours.
        """
        publisher, perform = self.publisher, self.database.in_transaction
        check(self._limits, publish_again_after=publish_again_after)
        perform(outbox.retry(domain=None, batch_id=None))
        perform(creation_state.close())
        return recover(publisher, perform, publish_again_after=publish_again_after)

    def explain_batch(self, domain: str, batch_id: UUID) -> Explanation:
        """Why a batch is not finished: each reason with count, since when and what to do. A healthy one has an ETA."""
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        return self.database.in_transaction(explanation.explain_batch(domain, batch_id))

    def explain_command(self, domain: str, command_id: UUID) -> Explanation:
        """Why a command is not finished, in the same form as `explain_batch`."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return self.database.in_transaction(explanation.explain_command(domain, command_id))

    def buffer(self, name: str, **options: Unpack[BufferOptions]) -> SyncBuffer:
        """Declare the buffer `name`: events are added one at a time and leave in groups of up to `size`.

        A group is one call of the buffer's handler. It leaves when it is full, has `max_bytes`, or its oldest event is
        `max_age` old; at most `max_groups` wait in the queue for a worker. `BufferOptions` says what the other options
        mean.
        """
        settings = self._declare(declared(name, options))
        return SyncBuffer(self.database, self.handlers, settings, self._limits.payload)

    def _changes(self, id: UUID) -> AbstractContextManager[waiting.Event]:
        """An event that is set whenever this batch or job may have changed."""
        self.database.refuse_closed()
        assert self._completions is not None
        return self._completions.watch(id)

    def _call_on_complete(self, batch_id: UUID, on_complete: SyncBatchCompletionCallback | BatchCommand | None) -> None:
        if on_complete is not None and not isinstance(on_complete, BatchCommand):
            assert self._completions is not None
            self._completions.call(batch_id, on_complete)

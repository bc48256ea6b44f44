"""CommandBus: send commands, create batches and follow them. Its parts, such as `bus.troubleshooting`, do the rest.

Every method checks its input, plans, and has the database perform the plan. `SyncCommandBus` is generated from this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Self, Unpack
from uuid import UUID

from busload.audit.actions import Audit
from busload.batches.api import BatchVerbs
from busload.batches.batch import (
    BatchCompletionCallback,
    BatchMetadata,
    BatchOptions,
    BatchType,
    CreateOptions,
    facts_of_batch,
    find_batch,
    members,
    new_batch,
)
from busload.batches.callbacks import Completions
from busload.batches.cancel import begin_to_cancel, cancel
from busload.batches.open_batch import OpenBatch
from busload.buffers.buffer import Buffer, Buffers
from busload.buffers.declaration import BufferOptions, BufferSettings, declared
from busload.commands import search
from busload.commands.api import CommandVerbs
from busload.commands.checks import check, seconds_of
from busload.commands.command import (
    AuditEvent,
    BatchCommand,
)
from busload.commands.data_type import DataTypes
from busload.commands.headers import with_context
from busload.commands.send import NO_BROKER, NewBatch, Via
from busload.commands.send_middleware import SendMiddleware, around_send
from busload.commands.send_together import Sending
from busload.commands.wording import counted
from busload.dispatch import creation_state, outbox
from busload.dispatch import envelope as message
from busload.dispatch.api import Outbox
from busload.dispatch.create_batch import create_and_publish, create_in_one_write, default_strategy, published_by
from busload.dispatch.publish import Publisher
from busload.dispatch.relay import Recovered, recover
from busload.dispatch.strategy import DispatchName, DispatchReport, Strategy
from busload.doctor.api import DoctorVerbs
from busload.errors import BatchNotFoundError, InvalidOperationError, kind_of
from busload.explain import explanation
from busload.explain.explanation import Explanation
from busload.handlers.handle import HandleVerbs
from busload.handlers.hooks import HookDecorators, Hooks
from busload.handlers.methods import HandlerRegistration
from busload.handlers.registry import Handlers
from busload.health.workers import Workers
from busload.jobs.api import Jobs
from busload.jobs.batch import is_of_jobs
from busload.jobs.cancel import begin_to_cancel_batch as begin_to_cancel_jobs
from busload.limits.api import Domains, Limits
from busload.metrics.api import MetricsVerbs
from busload.postgres import waiting
from busload.postgres.callers_connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.pool import AsyncPool
from busload.postgres.schema.migrate import Migration
from busload.postgres.write import Write
from busload.retention import kept
from busload.retention.kept import Retention
from busload.retention.prune import Pruned, Pruning
from busload.schedules.api import Schedules
from busload.schedules.declare import ScheduleDeclarations
from busload.schedules.schedule import Schedule
from busload.settings import InputLimits, Settings
from busload.statistics.api import Statistics
from busload.transports import Transport, find_transport
from busload.troubleshooting import decisions
from busload.troubleshooting.api import Troubleshooting


class Bus(HandlerRegistration, HookDecorators, ScheduleDeclarations, ABC):
    """What both faces share: where the database is, the handlers, and the checks."""

    _over_several: ClassVar[str]
    """The name of the class in `busload.shards` that is this bus over several databases."""

    def __new__(cls, dsn: object = None, *_: Any, **__: Any) -> Self:
        """A bus over several databases, each for some domains, if a mapping names them."""
        if isinstance(dsn, Mapping) and "_over_several" in vars(cls):
            # It is made of buses like this one, so it knows this module, and not the other way round.
            cls = getattr(import_module("busload.shards"), cls._over_several)
        return super().__new__(cls)

    def __init__(
        self,
        dsn: str | Mapping[str, str] | None = None,
        *,
        transport: Transport | str | None = None,
        dispatch: Strategy | DispatchName | None = None,
        queues: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """A bus of the database at `dsn`; nothing is connected before it is opened.

        A mapping names several databases by domain, `{"payments": dsn1, "*": dsn2}`: each domain lives in one of them,
        and `"*"` is for all domains that are not named. `shards` are the buses of these databases.
        `transport` is the broker that tells workers of commands, or its URL, and `dispatch` how batches are published
        to it. `queues` names, by domain, queues that exist at the broker: other domains have queues of their own. What
        is not given here comes from the `settings`.
        """
        if not isinstance(settings, Settings | None):
            raise ValueError(f"settings must be a Settings, found {kind_of(settings)}.")
        self.settings = settings or Settings()
        if queues is not None:
            self.settings = replace(self.settings, queues=queues)
        self.handlers, self.hooks = Handlers(), Hooks()
        given = self.settings.transport_url if transport is None else transport
        self._set_transport(given, dispatch or self.settings.dispatch)
        message.check_settings(self.settings)
        if queues and self.transport is None:
            raise ValueError(f"queues={dict(queues)!r:.80} needs a transport: CommandBus(dsn, transport=URL).")
        named = self.settings.database_url if dsn is None else dsn
        if not isinstance(named, str | None):
            raise ValueError(
                f"The DSN must be text, found {kind_of(named)}. Pass "
                f"{'it as settings=' if isinstance(named, Settings) else 'the text of it'}."
            )
        self._given_dsn = named
        self._limits: InputLimits = self.settings.limits
        self.declared_buffers: dict[str, BufferSettings] = {}
        """The buffers that were declared on this bus, by name."""
        self.declared_schedules: dict[str, Schedule] = {}
        """The schedules that were declared on this bus, by name."""
        self.database = self._make_database()
        self._make_parts()

    @property
    def data_types(self) -> DataTypes:
        """The types of data that handlers of this bus want, by domain and command type."""
        return self.handlers.data_types

    @property
    def around_sends(self) -> Sequence[SendMiddleware]:
        """The middleware around every call that sends commands."""
        return self.hooks.sending

    @property
    def shards(self) -> Sequence[Self]:
        """The buses of the databases that this one is over, one for each: of one database, this bus itself."""
        return (self,)

    def shard_of(self, domain: str) -> Self:
        """The bus of the database in which a `domain` lives: of one database, this bus itself."""
        return self

    @abstractmethod
    def _make_database(self) -> Any:
        """Make the database of this bus, for its face."""

    @abstractmethod
    def _make_parts(self) -> None:
        """Make what hangs on the bus, each part for the face of the bus."""

    @contextmanager
    def redirected(self, dsn: str, *, transport: Transport | str | None = None) -> Iterator[Self]:
        """Be a bus of the database at `dsn` while the block lasts: for tests of an application whose bus is a global.

        The bus must be closed before the block and at its end. In the block it has the given `transport`, or none.
        Its buffers go with it. Handlers and hooks that are registered in the block are forgotten at its end.
        """
        self._refuse_open()
        kept, kept_of_database = dict(vars(self)), dict(vars(self.database))
        try:
            self.handlers, self.hooks = self.handlers.copy(), self.hooks.copy()
            self.declared_buffers = dict(self.declared_buffers)
            self.declared_schedules = dict(self.declared_schedules)
            self.settings = replace(self.settings, transport_url=None, dispatch=None, queues={})
            self._set_transport(transport, None)
            self._given_dsn = dsn
            self.database.move(dsn, self.settings)
            self._make_parts()
            yield self
            self._refuse_open()
        finally:
            vars(self.database).update(kept_of_database)
            vars(self).update(kept)

    def _refuse_open(self) -> None:
        if self.database.is_open:
            raise InvalidOperationError("The bus is open. Close it before it is redirected, and before that ends.")

    def _set_transport(self, given: Transport | str | None, dispatch: Strategy | DispatchName | None) -> None:
        self.given_transport = given
        """A URL, of which everybody who runs an event loop makes a transport of its own, or a transport."""
        if not isinstance(given, Transport | str | None):
            raise ValueError(f"transport must be a URL or a Transport, found {kind_of(given)}.")
        self.transport = find_transport(given) if isinstance(given, str) else given
        self.dispatch = default_strategy(dispatch, self.transport)
        self.via = Via(self.transport.name) if self.transport else NO_BROKER
        """How commands of this bus reach workers."""

    def _declare(self, settings: BufferSettings) -> BufferSettings:
        """A buffer may be named in several places, but it is one and the same."""
        known = self.declared_buffers.setdefault(settings.name, settings)
        if known != settings:
            raise InvalidOperationError(
                f"The buffer {settings.name!r} was declared before with other settings: {known}. "
                "Declare it once and use what bus.buffer() returns."
            )
        return known


class CommandBus(Bus, BatchVerbs, CommandVerbs, DoctorVerbs, HandleVerbs, MetricsVerbs):
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

    _over_several = "ShardedBus"

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
        self.troubleshooting = Troubleshooting(self.database, self._limits, self)
        self._publisher = self._make_publisher()
        self.outbox = Outbox(self.database, self._limits, self._publisher)
        self._sending: Sending | None = None
        self._completions: Completions | None = None

    @property
    def dsn(self) -> str:
        """Where the database is; known once the bus is open."""
        return self.database.dsn

    @property
    def pool(self) -> AsyncPool:
        """The connections of an open bus: `bus.pool.connection()`. They are psycopg's, in autocommit mode."""
        return self.database.pool

    async def open(self, *, wait: timedelta | float | None = 0) -> Self:
        """Find the database, and see that it can be used: what is wrong with the DSN or the server is told here.

        A server that cannot be reached is waited for as long as `wait` says, in seconds if it is a number. With None
        it is not looked for: the bus opens while its database is away, and calls find it when it is back.
        """
        if not self.database.is_open:
            await self.database.open(wait=seconds_of(wait, "wait"))
            if self._publisher is not None:
                self._publisher.telemetry = self.database.telemetry
            self._sending = Sending(self.database.write, self.via, lines=max(1, self.settings.pool_size // 2))
            self._completions = Completions(self.database, self.settings.poll_every.total_seconds())
        return self

    async def close(self) -> None:
        """Let the database, the broker and the embedded server go; what was sent is written before."""
        if self._sending is not None:
            await self._sending.close()
        if self._completions is not None:
            await self._completions.close()
        if self._publisher is not None:
            await self._publisher.close()
        await self.database.close()
        self._sending, self._completions = None, None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def migrate(self, *, conn: AnyConnection | None = None) -> list[Migration]:
        """Bring the database's schema up to this release; safe to run from many processes at once.

        Where nothing is missing it needs no more than the right to read `busload.migration`. With `conn` the schema
        exists exactly if that transaction commits.
        """
        return await self.database.migrate(conn)

    async def create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        *,
        on_complete: BatchCompletionCallback | BatchCommand | None = None,
        dispatch: Strategy | DispatchName | None = None,
        checkpoint_size: int = 1000,
        conn: AnyConnection | None = None,
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
            return await self._create_batch(domain, commands, on_complete, dispatch, checkpoint_size, conn, options)
        headers = options.get("headers")
        with around_send(self.around_sends, "create_batch", domain, headers) as call:
            options["headers"] = call.headers or headers
            call.result = batch_id = await self._create_batch(
                domain, commands, on_complete, dispatch, checkpoint_size, conn, options
            )
        return batch_id

    async def _create_batch(
        self,
        domain: str,
        commands: Iterable[BatchCommand],
        on_complete: BatchCompletionCallback | BatchCommand | None,
        dispatch: Strategy | DispatchName | None,
        checkpoint_size: int,
        conn: AnyConnection | None,
        options: CreateOptions,
    ) -> UUID:
        dedup = options.get("dedup")
        check(self._limits, checkpoint_size=checkpoint_size)
        about: dict[str, Any] = {"awaits": waiting.AWAITS, "types": self.data_types}
        batch = new_batch("create_batch", self._limits, domain, options, on_complete, known=CreateOptions, **about)
        checked = partial(members, self._limits, batch, types=self.data_types)
        waits = [name for name in ("dedup", "canary") if options.get(name) is not None]
        strategy = published_by(dispatch, self.dispatch, self.via, joins=conn is not None, waits=waits)

        async def create(batch: NewBatch) -> None:
            if self.transport is None or strategy is Strategy.RELAY:
                await create_in_one_write(self.database, batch, checked(commands), dedup, self.via, conn)
            else:
                await create_and_publish(
                    self.publisher,
                    self.database,
                    batch,
                    commands,
                    checked,
                    strategy=strategy,
                    checkpoint_size=checkpoint_size,
                )

        if (telemetry := self.database.telemetry) is None:
            await create(batch)
        else:
            with telemetry.sending("create_batch", domain, **facts_of_batch(batch, commands)) as context:
                await create(replace(batch, headers=with_context(batch.headers, context, self._limits)))
        self._call_on_complete(batch.batch_id, on_complete)
        return batch.batch_id

    def open_batch(
        self,
        domain: str,
        *,
        on_complete: BatchCompletionCallback | BatchCommand | None = None,
        checkpoint_size: int = 1000,
        conn: AnyConnection | None = None,
        **options: Unpack[BatchOptions],
    ) -> OpenBatch:
        """A batch to fill over time: `async with bus.open_batch(...) as batch: await batch.add(...)`.

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
        return OpenBatch(
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

    async def get_dispatch(self, domain: str, batch_id: UUID) -> DispatchReport | None:
        """How the creation of a batch was published to the broker, and what of it still waits for that.

        None without a broker. What `open_batch` opened is published as it is added, and has a report once it is sealed.
        """
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        return await self.database.read(creation_state.find(domain, batch_id))

    async def wait_batch(self, domain: str, batch_id: UUID, timeout: timedelta | float | None = None) -> BatchMetadata:
        """Return the batch once it is complete.

        After `timeout`, in seconds if it is a number, a `TimeoutError` says how far the batch came.
        """
        batch: BatchMetadata | None = None
        try:
            async with waiting.TimeLimit(seconds_of(timeout)) as limit:
                async for seen in self._watch(domain, batch_id, limit):
                    batch = seen
        except TimeoutError:
            raise _timeout_error(batch_id, batch, timeout) from None
        assert batch is not None
        return batch

    def watch_batch(
        self, domain: str, batch_id: UUID, *, timeout: timedelta | float | None = None
    ) -> AsyncIterator[BatchMetadata]:
        """Yield the batch now, whenever its counters have changed, and last when it is complete.

        After `timeout`, in seconds if it is a number, a `TimeoutError` says how far the batch came.
        """
        return self._watch(domain, batch_id, waiting.TimeLimit(seconds_of(timeout)))

    async def _watch(self, domain: str, batch_id: UUID, limit: waiting.TimeLimit) -> AsyncIterator[BatchMetadata]:
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        last: BatchMetadata | None = None
        with self._changes(batch_id) as changed:
            while True:
                changed.clear()
                batch = await self.database.read(find_batch(domain, batch_id), within=limit.patience)
                if batch is None:
                    raise BatchNotFoundError(domain, batch_id)
                if batch != last:
                    last = batch
                    yield batch
                if batch.status.final:
                    return
                if not limit.left:
                    raise _timeout_error(batch_id, batch, limit.seconds)
                await changed.wait(min(limit.left, self.settings.poll_every.total_seconds()))

    async def cancel_batch(
        self,
        domain: str,
        batch_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AnyConnection | None = None,
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
        of_jobs = await self.database.write(Write(is_of_jobs(domain, batch_id)), conn)
        begin = partial(begin_to_cancel, domain, batch_id)
        if of_jobs:
            begin = partial(begin_to_cancel_jobs, domain, batch_id, via=self.via)
        canceled = await cancel(self.database, begin, conn, reason=reason, operator=operator, batch_id=batch_id)
        return canceled.begun if of_jobs else canceled.commands

    async def get_batch_audit_trail(self, domain: str, batch_id: UUID) -> list[AuditEvent]:
        """What happened to the batch itself: started, sealed, stalled, canceled, completed."""
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        return await self.database.read(search.batch_audit_trail(domain, batch_id))

    async def prune(
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
            await self.database.in_transaction(plan)
            if progress is not None:
                progress(pruning.pruned)
        return pruning.pruned

    async def retention(self) -> Retention:
        """What is kept: how much, how old, what a prune would find, and when one was done last.

        It is cheap: numbers of rows are estimates of PostgreSQL, and old batches are counted up to 10,000.
        """
        return await self.database.read(kept.read())

    @property
    def publisher(self) -> Publisher:
        """What publishes for this bus, and for a worker that runs on it; it is closed with the bus."""
        if self._publisher is None:
            raise InvalidOperationError("The bus has no transport. Give it one: CommandBus(dsn, transport=URL).")
        return self._publisher

    def _make_publisher(self) -> Publisher | None:
        settings, key = self.settings, self.settings.message_key
        if self.transport is None:
            return None
        return Publisher(
            self.transport,
            self.database.in_transaction,
            prefix=settings.queue_prefix,
            queues=settings.queues,
            envelope_size=settings.envelope_size,
            message_per_command=settings.message_per_command,
            key=None if key is None else key.encode(),
        )

    async def recover(self, *, publish_again_after: timedelta = timedelta(minutes=5)) -> Recovered:
        """Publish now what waits in the outbox, and again what was published that long ago and never claimed.

        `publish_again_after` is how long ago. Workers do so by themselves; this is for scripts and tests, and for
        applications without a worker of ours.
        """
        publisher, perform = self.publisher, self.database.in_transaction
        check(self._limits, publish_again_after=publish_again_after)
        await perform(outbox.retry(domain=None, batch_id=None))
        await perform(creation_state.close())
        return await recover(publisher, perform, publish_again_after=publish_again_after)

    async def explain_batch(self, domain: str, batch_id: UUID) -> Explanation:
        """Why a batch is not finished: each reason with count, since when and what to do. A healthy one has an ETA."""
        check(self._limits, writes=False, domain=domain, batch_id=batch_id)
        return await self.database.in_transaction(explanation.explain_batch(domain, batch_id))

    async def explain_command(self, domain: str, command_id: UUID) -> Explanation:
        """Why a command is not finished, in the same form as `explain_batch`."""
        check(self._limits, writes=False, domain=domain, command_id=command_id)
        return await self.database.in_transaction(explanation.explain_command(domain, command_id))

    def buffer(self, name: str, **options: Unpack[BufferOptions]) -> Buffer:
        """Declare the buffer `name`: events are added one at a time and leave in groups of up to `size`.

        A group is one call of the buffer's handler. It leaves when it is full, has `max_bytes`, or its oldest event is
        `max_age` old; at most `max_groups` wait in the queue for a worker. `BufferOptions` says what the other options
        mean.
        """
        settings = self._declare(declared(name, options))
        return Buffer(self.database, self.handlers, settings, self._limits.payload)

    def _changes(self, id: UUID) -> AbstractContextManager[waiting.Event]:
        """An event that is set whenever this batch or job may have changed."""
        self.database.refuse_closed()
        assert self._completions is not None
        return self._completions.watch(id)

    def _call_on_complete(self, batch_id: UUID, on_complete: BatchCompletionCallback | BatchCommand | None) -> None:
        if on_complete is not None and not isinstance(on_complete, BatchCommand):
            assert self._completions is not None
            self._completions.call(batch_id, on_complete)


def _timeout_error(batch_id: UUID, batch: BatchMetadata | None, timeout: timedelta | float | None) -> TimeoutError:
    progress = "nothing was seen"
    if batch is not None:
        one = "job" if batch.batch_type == BatchType.JOBS else "command"
        progress = f"{batch.finished_count:,} of {counted(batch.total_count, f'{one} has', f'{one}s have')} ended"
    return TimeoutError(f"Batch {batch_id} is not complete after {seconds_of(timeout)} s: {progress}.")

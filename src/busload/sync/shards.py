"""Made from busload.shards.bus by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self, Unpack, cast
from uuid import UUID

from busload.batches.batch import BatchMetadata
from busload.buffers.declaration import BufferOptions
from busload.commands.checks import seconds_of
from busload.commands.execution import Execution
from busload.commands.listing import CommandFilter, CommandPage
from busload.dispatch.publish_in_threads import ThreadPublisher
from busload.dispatch.relay import Recovered
from busload.dispatch.strategy import DispatchName, Strategy
from busload.doctor.finding import Diagnosis
from busload.errors import DatabaseUnavailableError, DatabaseUnusableError, InvalidOperationError
from busload.health.health import Health
from busload.health.overview import Overview
from busload.metrics.database import Metrics
from busload.postgres.callers_connection import AnySyncConnection
from busload.postgres.schema.migrate import Migration
from busload.retention.kept import Retention
from busload.retention.prune import Pruned
from busload.schedules.declare import ScheduleOptions
from busload.schedules.schedule import Schedule
from busload.settings import Settings
from busload.shards import merge
from busload.shards.bus import SAME_SERVER, TIES, T, by_domain, log
from busload.shards.databases import Databases, named, place, refusal
from busload.shards.routes import Routes
from busload.sync.buffer import SyncBuffer
from busload.sync.bus import SyncCommandBus
from busload.sync.database import Database
from busload.sync.shard_parts import (
    ShardedAudit,
    ShardedBuffers,
    ShardedDomains,
    ShardedJobs,
    ShardedLimits,
    ShardedOutbox,
    ShardedSchedules,
    ShardedStatistics,
    ShardedTroubleshooting,
    ShardedWorkers,
)
from busload.transports import Transport


class SyncShardedBus(SyncCommandBus):
    """A `SyncCommandBus` over several databases, which `SyncCommandBus({"payments": dsn1, "*": dsn2})` makes.

    A domain lives in one database, and so does a batch, a job, a buffer or a schedule with all that belongs to it.
    What would need two databases at once is refused. Calls about all domains ask every database, one after the other.
    """

    database: Any

    def __init__(
        self,
        dsn: str | Mapping[str, str] | None = None,
        *,
        transport: Transport | str | None = None,
        dispatch: Strategy | DispatchName | None = None,
        queues: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.routes = Routes.read(dsn)
        if isinstance(transport, Transport):
            raise ValueError(
                f"A bus over several databases makes a transport for each, found one {type(transport).__name__}. Pass "
                "its URL."
            )
        super().__init__(None, transport=transport, dispatch=dispatch, queues=queues, settings=settings)

    send = by_domain(SyncCommandBus.send)
    send_many = by_domain(SyncCommandBus.send_many)
    cancel_command = by_domain(SyncCommandBus.cancel_command)
    reschedule_command = by_domain(SyncCommandBus.reschedule_command)
    wait_command = by_domain(SyncCommandBus.wait_command)
    get_command = by_domain(SyncCommandBus.get_command)
    get_audit_trail = by_domain(SyncCommandBus.get_audit_trail)
    explain_command = by_domain(SyncCommandBus.explain_command)
    create_batch = by_domain(SyncCommandBus.create_batch)
    open_batch = by_domain(SyncCommandBus.open_batch)
    list_batch_commands = by_domain(SyncCommandBus.list_batch_commands)
    seal_batch = by_domain(SyncCommandBus.seal_batch)
    hold_batch = by_domain(SyncCommandBus.hold_batch)
    resume_batch = by_domain(SyncCommandBus.resume_batch)
    set_batch_budget = by_domain(SyncCommandBus.set_batch_budget)
    reprioritize_batch = by_domain(SyncCommandBus.reprioritize_batch)
    cancel_batch = by_domain(SyncCommandBus.cancel_batch)
    wait_batch = by_domain(SyncCommandBus.wait_batch)
    watch_batch = by_domain(SyncCommandBus.watch_batch)
    get_dispatch = by_domain(SyncCommandBus.get_dispatch)
    get_batch_audit_trail = by_domain(SyncCommandBus.get_batch_audit_trail)
    explain_batch = by_domain(SyncCommandBus.explain_batch)

    @property
    def shards(self) -> Sequence[Any]:
        """The buses of the databases, each once, in the order of the mapping."""
        return list({shard.database.given_dsn: shard for shard in self._shards}.values())

    def shard_of(self, domain: str) -> Any:
        """The bus of the database in which a `domain` lives. A domain that the mapping leaves out is refused."""
        return self._shards[self.routes.find(domain)]

    def _make_database(self) -> Database:
        self._shards = [self._shard(number, dsn) for number, dsn in enumerate(self.routes.dsns)]
        return cast(Database, Databases(lambda: self.shards))

    def _shard(self, number: int, dsn: str) -> SyncCommandBus:
        limits = replace(self.settings.limits, other_database=self.routes.elsewhere(number))
        settings = replace(self.settings, limits=limits)
        shard = SyncCommandBus(dsn, transport=self.given_transport, dispatch=self.dispatch, settings=settings)
        shard.handlers, shard.hooks = self.handlers, self.hooks
        return shard

    def _make_parts(self) -> None:
        self.jobs, self.limits, self.domains = ShardedJobs(self), ShardedLimits(self), ShardedDomains(self)
        self.audit, self.buffers, self.workers = ShardedAudit(self), ShardedBuffers(self), ShardedWorkers(self)
        self.statistics, self.schedules = ShardedStatistics(self), ShardedSchedules(self)
        self.troubleshooting, self.outbox = ShardedTroubleshooting(self), ShardedOutbox(self)
        self._publisher, self._sending, self._completions = None, None, None

    @contextmanager
    def redirected(self, dsn: str, *, transport: Transport | str | None = None) -> Iterator[Self]:
        """Have all domains in the database at `dsn` while the block lasts: for tests.

        What needs two databases at once is refused there, too.
        """
        kept = self.handlers, self.hooks, dict(self.declared_buffers), dict(self.declared_schedules)
        with ExitStack() as stack:
            for shard in self._shards:
                stack.enter_context(shard.redirected(dsn, transport=transport))
            try:
                self.handlers, self.hooks = self.handlers.copy(), self.hooks.copy()
                for shard in self._shards:
                    shard.handlers, shard.hooks = self.handlers, self.hooks
                yield self
            finally:
                self.handlers, self.hooks, self.declared_buffers, self.declared_schedules = kept

    def open(self, *, wait: timedelta | float | None = 0) -> Self:
        """Find the databases, and see that each can be used. What is wrong with a DSN or a server is told here.

        A database that cannot be reached is waited for as long as `wait` says, in seconds if it is a number. The bus
        opens without it if another one answers: calls for its domains find it when it is back. If none answers, the
        error is that of the first. With None no database is looked for.
        """
        if self.database.is_open:
            return self
        seconds = seconds_of(wait, "wait")
        away: list[DatabaseUnavailableError] = []
        try:
            for shard in self.shards:
                try:
                    shard.open(wait=seconds)
                except DatabaseUnavailableError as error:
                    log.warning("The bus opens without one of its databases. %s", error)
                    away.append(error)
                    shard.open(wait=None)
            if len(away) == len(self.shards):
                raise away[0]
            if seconds is not None and not away:
                self._refuse_same_database()
        except BaseException:
            self.close()
            raise
        return self

    def _refuse_same_database(self) -> None:
        known: dict[tuple[Any, ...], Any] = {}
        for shard in self.shards:
            with shard.pool.connection() as conn:
                cursor = conn.execute(SAME_SERVER)
                [answer] = cursor.fetchall()
            if answer in known:
                raise DatabaseUnusableError(
                    f"{place(known[answer])} and {place(shard)} are one database: everything in it would be told and "
                    "done twice. Give its domains the same DSN."
                )
            known[answer] = shard

    def close(self) -> None:
        """Let all databases and the broker go; what was sent is written before."""
        for shard in self.shards:
            shard.close()

    def each(self, ask: Callable[[Any], T]) -> list[T]:
        """What every database answers, in their order. If one is away, the error names it."""
        answers = []
        for shard in self.shards:
            with named(shard):
                answers.append(ask(shard))
        return answers

    def migrate(self, *, conn: AnySyncConnection | None = None) -> list[Migration]:
        """Bring the schema of every database up to this release; the list has the migrations of all of them.

        A transaction of yours is in one database: `conn` is for its own bus, `bus.shard_of(domain).migrate(conn=conn)`.
        """
        if conn is not None:
            raise refusal("migrate(conn=)")
        return [one for done in self.each(lambda shard: shard.migrate()) for one in done]

    def get_batch(self, domain: str | None, batch_id: UUID) -> BatchMetadata | None:
        """A batch with its counters; without a domain, of whichever database has it."""
        if domain is not None:
            found: BatchMetadata | None = self.shard_of(domain).get_batch(domain, batch_id)
            return found
        for found in self.each(lambda shard: shard.get_batch(None, batch_id)):
            if found is not None:
                return found
        return None

    def list_batches(
        self, domain: str | None, *, limit: int = 100, offset: int = 0, after: UUID | None = None, **options: Any
    ) -> list[BatchMetadata]:
        """The batches of a domain or, if it is None, of all databases, newest first, with the options of any bus."""
        if domain is not None:
            listed: list[BatchMetadata] = self.shard_of(domain).list_batches(
                domain, limit=limit, offset=offset, after=after, **options
            )
            return listed
        if after is None:
            found = self.each(
                lambda shard: shard.list_batches(None, limit=limit + offset, offset=0, after=None, **options)
            )
            return merge.newest(found, "created_at", "batch_id", limit=limit, offset=offset)
        last = self.get_batch(None, after)
        if last is None:
            return []
        end = last.created_at + timedelta(microseconds=1)
        before = min(end, options.pop("created_before", None) or end)
        pages = self.each(
            lambda shard: shard.list_batches(None, limit=limit + offset + TIES, created_before=before, **options)
        )
        mark = last.created_at, last.batch_id
        older = [[one for one in page if (one.created_at, one.batch_id) < mark] for page in pages]
        return merge.newest(older, "created_at", "batch_id", limit=limit, offset=offset)

    def list_commands(
        self, domain: str | None = None, *, limit: int = 100, after: str | None = None, **options: Unpack[CommandFilter]
    ) -> CommandPage:
        """Search the commands of a domain or, without one, of all databases, newest first."""
        if domain is not None:
            found: CommandPage = self.shard_of(domain).list_commands(domain, limit=limit, after=after, **options)
            return found
        pages = []
        for shard, begin in zip(self.shards, merge.parts_of(after, len(self.shards)), strict=True):
            if begin == merge.END:
                pages.append(merge.Page[Any]((), (), begin, None))
                continue
            with named(shard):
                page = shard.list_commands(limit=limit, after=begin or None, **options)
            pages.append(merge.Page(page.commands, [str(id) for id in page.ids], begin, page.next))
        commands, next = merge.joined(pages, lambda command: command.created_at, limit)
        return CommandPage(tuple(commands), next)

    def trace(self, task_key: str, *, domain: str | None = None) -> list[Execution]:
        """Every attempt of every command that was sent for a task, oldest first, also of several databases."""
        if domain is not None:
            found: list[Execution] = self.shard_of(domain).trace(task_key, domain=domain)
            return found
        return merge.together(self.each(lambda shard: shard.trace(task_key)), "enqueued_at", "attempt")

    def prune(
        self,
        older_than: timedelta,
        *,
        archive: bool = False,
        dry_run: bool = False,
        progress: Callable[[Pruned], None] | None = None,
    ) -> Pruned:
        """Prune every database, one after the other, and say how much that was together."""
        total = Pruned()
        for shard in self.shards:
            done = total
            told = None if progress is None else (lambda pruned, done=done: progress(done + pruned))
            with named(shard):
                total = done + shard.prune(older_than, archive=archive, dry_run=dry_run, progress=told)
        return total

    def retention(self) -> Retention:
        """What is kept in all databases together. Times are those of the database that was pruned longest ago."""
        return merge.retention(self.each(lambda shard: shard.retention()))

    @property
    def publisher(self) -> ThreadPublisher:
        """Each database has one of its own."""
        raise refusal("publisher")

    def recover(self, *, publish_again_after: timedelta = timedelta(minutes=5)) -> Recovered:
        """Publish now what waits in the outboxes of all databases."""
        found = self.each(lambda shard: shard.recover(publish_again_after=publish_again_after))
        whole: Recovered = merge.added(found)
        return whole

    def health(self, *, timeout: timedelta | float = 5) -> Health:
        """The worst of all databases; each reason names its own. `timeout` is for each of them."""
        return merge.health([(place(shard), shard.health(timeout=timeout)) for shard in self.shards])

    def doctor(self, *, timeout: timedelta | float = 30) -> Diagnosis:
        """The findings of all databases, each with the name of its own. `timeout` is for each of them."""
        return merge.diagnosis([(place(shard), shard.doctor(timeout=timeout)) for shard in self.shards])

    def overview(self) -> Overview:
        """All databases together, each at a moment of its own."""
        return merge.overview(self.each(lambda shard: shard.overview()))

    def metrics(self) -> Metrics:
        """The metrics of all databases: a label `database` tells them apart."""
        found = self.each(lambda shard: shard.metrics())
        return merge.metrics([(place(shard), one) for shard, one in zip(self.shards, found, strict=True)])

    def buffer(self, name: str, **options: Unpack[BufferOptions]) -> SyncBuffer:
        """Declare the buffer `name` in the database of the domain of that name, as on any bus."""
        shard = self.shard_of(name)
        found: SyncBuffer = shard.buffer(name, **options)
        self.declared_buffers[name] = shard.declared_buffers[name]
        return found

    def schedule(self, name: str, **options: Unpack[ScheduleOptions]) -> Schedule:
        """Declare the schedule `name` in the database of its domain, as on any bus."""
        domain = options.get("domain") or getattr(options.get("command"), "domain", None)
        if name in self.declared_schedules:
            raise InvalidOperationError(
                f"The schedule {name!r} was declared before. Declare it once, or give one of the two another name."
            )
        made: Schedule = self.shard_of(cast(str, domain)).schedule(name, **options)
        self.declared_schedules[name] = made
        return made

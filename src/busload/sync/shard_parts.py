"""Made from busload.shards.parts by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from busload.audit.actions import Action, ActionPage, ActionType, Cursor
from busload.buffers.overview import BufferOverview
from busload.buffers.status import BufferStatus
from busload.commands.command import TroubledDomain, TroubleshootingItem
from busload.dispatch.outbox import OutboxEntry
from busload.dispatch.reconcile import Reconciliation
from busload.dispatch.report import PublishingReport
from busload.errors import InvalidOperationError, ScheduleNotFoundError
from busload.health.workers import HeldCommand, KnownWorker
from busload.jobs.job import JobMetadata
from busload.limits.concurrency import ConcurrencyStatus
from busload.limits.pause import DomainOverview, Pause
from busload.limits.rate import LimitStatus
from busload.postgres.callers_connection import AnySyncConnection
from busload.schedules.schedule import Fire, ScheduleMetadata
from busload.shards import merge
from busload.shards.databases import named, refusal
from busload.shards.parts import MOST_JOBS, _numbered, of_shard
from busload.statistics.statistics import Point
from busload.sync.audit import Audit
from busload.sync.buffer import Buffers
from busload.sync.jobs import Jobs
from busload.sync.limits import Domains, Limits
from busload.sync.outbox import SyncOutbox
from busload.sync.schedules import Schedules
from busload.sync.statistics import Statistics
from busload.sync.troubleshooting import SyncTroubleshooting
from busload.sync.workers import Workers


class ShardedJobs(Jobs):
    """`bus.jobs` over several databases."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    create = of_shard("jobs", Jobs.create)
    create_batch = of_shard("jobs", Jobs.create_batch)
    resume = of_shard("jobs", Jobs.resume)
    cancel = of_shard("jobs", Jobs.cancel)
    wait = of_shard("jobs", Jobs.wait)

    def get(self, domain: str | None, job_id: UUID) -> JobMetadata | None:
        """A job with its stages; without a domain, of whichever database has it."""
        if domain is not None:
            found: JobMetadata | None = self._bus.shard_of(domain).jobs.get(domain, job_id)
            return found
        for found in self._bus.each(lambda shard: shard.jobs.get(None, job_id)):
            if found is not None:
                return found
        return None

    def list(
        self, domain: str | None, *, limit: int = 100, offset: int = 0, after: UUID | None = None, **options: Any
    ) -> builtins.list[JobMetadata]:
        """The jobs of a domain or, if it is None, of all databases, newest first. The options are those of any bus."""
        if domain is not None:
            listed: builtins.list[JobMetadata] = self._bus.shard_of(domain).jobs.list(
                domain, limit=limit, offset=offset, after=after, **options
            )
            return listed
        last = None if after is None else self.get(None, after)
        if after is not None and last is None:
            return []
        found = self._bus.each(
            lambda shard: shard.jobs.list(None, limit=limit + offset if last is None else MOST_JOBS, **options)
        )
        if last is not None:
            mark = last.created_at, last.job_id
            found = [[one for one in page if (one.created_at, one.job_id) < mark] for page in found]
        return merge.newest(found, "created_at", "job_id", limit=limit, offset=offset)


class ShardedLimits(Limits):
    """`bus.limits` over several databases. Limits of the same name in two databases are two limits."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def list(self, name: str | None = None, *, limit: int = 100) -> builtins.list[LimitStatus]:
        """The rate limits of all databases that were used within a day."""
        found = self._bus.each(lambda shard: shard.limits.list(name, limit=limit))
        return merge.together(found, "name", "subject", limit=limit)

    def reset(self, name: str, by: str | None = None, *, operator: str | None = None) -> int:
        """Let calls under the limit `name` go again at once, in all databases."""
        return sum(self._bus.each(lambda shard: shard.limits.reset(name, by, operator=operator)))

    def concurrency(self, name: str | None = None, *, limit: int = 100) -> builtins.list[ConcurrencyStatus]:
        """The concurrency limits of all databases that have calls running or commands waiting."""
        found = self._bus.each(lambda shard: shard.limits.concurrency(name, limit=limit))
        return merge.together(found, "name", "subject", limit=limit)


class ShardedDomains(Domains):
    """`bus.domains` over several databases."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    pause = of_shard("domains", Domains.pause)
    resume = of_shard("domains", Domains.resume)

    def list(self) -> builtins.list[DomainOverview]:
        """Every domain of all databases that has something waiting or running, is served or is paused."""
        return merge.domains(self._bus.each(lambda shard: shard.domains.list()))

    def pauses(self) -> builtins.list[Pause]:
        """Every domain of all databases that is paused: since when, by whom and why."""
        return merge.together(self._bus.each(lambda shard: shard.domains.pauses()), "domain")

    def history(self, domain: str | None = None, *, limit: int = 100) -> builtins.list[Pause]:
        """The pauses of a domain or of all, at most `limit` and newest first, also those that are over."""
        if domain is not None:
            found: builtins.list[Pause] = self._bus.shard_of(domain).domains.history(domain, limit=limit)
            return found
        pauses = self._bus.each(lambda shard: shard.domains.history(limit=limit))
        return merge.newest(pauses, "since", limit=limit)


class ShardedAudit(Audit):
    """`bus.audit` over several databases."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def list(
        self,
        domain: str | None = None,
        *,
        operator: str | None = None,
        action: ActionType | str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> ActionPage:
        """What operators did in a domain or, without one, in all databases, newest first, at most `limit` actions."""
        about: dict[str, Any] = {"operator": operator, "action": action, "since": since, "until": until, "limit": limit}
        shards = self._bus.shards
        if domain is not None:
            home = self._bus.shard_of(domain)
            found: ActionPage = home.audit.list(domain, after=after, **about)
            return found._replace(actions=_numbered(found.actions, shards.index(home), len(shards)))
        pages: builtins.list[merge.Page[Action]] = []
        for at, (shard, begin) in enumerate(zip(shards, merge.parts_of(after, len(shards)), strict=True)):
            page = ActionPage([], None)
            if begin != merge.END:
                with named(shard):
                    page = shard.audit.list(after=begin or None, **about)
            cursors = [str(Cursor(one.first or one.at, one.event)) for one in page.actions]
            pages.append(merge.Page(_numbered(page.actions, at, len(shards)), cursors, begin, page.next))
        actions, next = merge.joined(pages, lambda one: one.at, limit)
        return ActionPage(actions, next)


class ShardedBuffers(Buffers):
    """`bus.buffers` over several databases. A buffer lives where the domain of its name does."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    get = of_shard("buffers", Buffers.get)
    flush = of_shard("buffers", Buffers.flush)

    def list(self) -> builtins.list[BufferStatus]:
        """Every buffer of all databases that a worker has served or in which events wait, and how it is doing."""
        return merge.together(self._bus.each(lambda shard: shard.buffers.list()), "name")

    def overview(self, *, limit: int = 100) -> builtins.list[BufferOverview]:
        """Every buffer of all databases at a glance, at most `limit`."""
        found = self._bus.each(lambda shard: shard.buffers.overview(limit=limit))
        return merge.together(found, "name", limit=limit)


class ShardedWorkers(Workers):
    """`bus.workers` over several databases.

    Each database numbers its workers by itself. Here the number of a worker is that number times the number of
    databases, plus the number of the database, so that it is unique.
    """

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def list(
        self, domain: str | None = None, *, stopped_too: bool = False, after: int | None = None, limit: int = 100
    ) -> builtins.list[KnownWorker]:
        """The workers of all databases that have not stopped, at most `limit`, those with the highest number first.

        A process that serves several databases has a worker of the same name in each.
        """
        found: builtins.list[KnownWorker] = []
        shards = self._bus.shards
        for at, shard in enumerate(shards):
            if domain is not None and shard is not self._bus.shard_of(domain):
                continue
            own = None if after is None else (after - 1 - at) // len(shards) + 1
            with named(shard):
                known = shard.workers.list(domain, stopped_too=stopped_too, after=own, limit=limit)
            found += [replace(one, worker=one.worker * len(shards) + at) for one in known]
        return merge.newest([found], "worker", limit=limit)

    def get(self, worker: int) -> KnownWorker | None:
        """The worker of this number; None if there never was one, or if it is long forgotten."""
        number, at = divmod(worker, len(self._bus.shards))
        known: KnownWorker | None = self._bus.shards[at].workers.get(number)
        return None if known is None else replace(known, worker=worker)

    def running(self, worker: int, *, limit: int = 100) -> builtins.list[HeldCommand]:
        """The commands that a worker holds now, at most `limit`, and those first that it has held for longest."""
        number, at = divmod(worker, len(self._bus.shards))
        held: builtins.list[HeldCommand] = self._bus.shards[at].workers.running(number, limit=limit)
        return held

    def stop(self, worker: str | int, *, reason: str | None = None, operator: str | None = None) -> int:
        """Ask a worker to stop, as SIGTERM does: by its number, or by its name in all databases."""
        if isinstance(worker, int):
            number, at = divmod(worker, len(self._bus.shards))
            asked: int = self._bus.shards[at].workers.stop(number, reason=reason, operator=operator)
            return asked
        total, refused = 0, builtins.list[InvalidOperationError]()
        for shard in self._bus.shards:
            try:
                with named(shard):
                    total += shard.workers.stop(worker, reason=reason, operator=operator)
            except InvalidOperationError as error:
                refused.append(error)
        if len(refused) == len(self._bus.shards):
            raise refused[0]
        return total


class ShardedStatistics(Statistics):
    """`bus.statistics` over several databases."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def series(
        self,
        domain: str | None = None,
        *,
        last: timedelta = timedelta(hours=1),
        step: timedelta = timedelta(minutes=1),
    ) -> list[Point]:
        """The points of a domain or, without one, the sums of all databases, oldest first."""
        if domain is not None:
            found: list[Point] = self._bus.shard_of(domain).statistics.series(domain, last=last, step=step)
            return found
        return merge.series(self._bus.each(lambda shard: shard.statistics.series(last=last, step=step)))


class ShardedSchedules(Schedules):
    """`bus.schedules` over several databases. A name is that of one schedule, in whichever database."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def sync(self, *, conn: AnySyncConnection | None = None) -> builtins.list[str]:
        """Keep the schedules that this bus declares, each in the database of its domain."""
        if conn is not None:
            raise refusal("schedules.sync(conn=)")
        found = self._bus.each(lambda shard: shard.schedules.sync())
        return [name for names in found for name in names]

    def changes(self) -> builtins.list[str]:
        """The names of the schedules that `sync` would write: those that are new or have changed."""
        return [name for names in self._bus.each(lambda shard: shard.schedules.changes()) for name in names]

    def list(
        self, domain: str | None = None, *, limit: int = 100, after: str | None = None
    ) -> builtins.list[ScheduleMetadata]:
        """The schedules of a domain or, without one, of all databases, by name, at most `limit` of them."""
        if domain is not None:
            found: builtins.list[ScheduleMetadata] = self._bus.shard_of(domain).schedules.list(
                domain, limit=limit, after=after
            )
            return found
        listed = self._bus.each(lambda shard: shard.schedules.list(limit=limit, after=after))
        return merge.together(listed, "name", limit=limit)

    def get(self, name: str) -> ScheduleMetadata | None:
        """A schedule with its next due times, of whichever database has it; None if there is no such schedule."""
        for found in self._bus.each(lambda shard: shard.schedules.get(name)):
            if found is not None:
                one: ScheduleMetadata = found
                return one
        return None

    def pause(
        self,
        name: str,
        *,
        reason: str | None = None,
        operator: str | None = None,
        conn: AnySyncConnection | None = None,
    ) -> bool:
        """Let a schedule fire nothing until it is resumed; returns False if it was paused already."""
        paused: bool = (self._home(name)).pause(name, reason=reason, operator=operator, conn=conn)
        return paused

    def resume(self, name: str, *, operator: str | None = None, conn: AnySyncConnection | None = None) -> bool:
        """Let a paused schedule go on; returns False if it was not paused."""
        resumed: bool = (self._home(name)).resume(name, operator=operator, conn=conn)
        return resumed

    def trigger(self, name: str, *, operator: str | None = None, conn: AnySyncConnection | None = None) -> UUID:
        """Send the command of a schedule now, beside its due times, and return the id of the command."""
        command_id: UUID = (self._home(name)).trigger(name, operator=operator, conn=conn)
        return command_id

    def remove(self, name: str, *, operator: str | None = None, conn: AnySyncConnection | None = None) -> None:
        """Remove a schedule; what it has fired stays, with its history."""
        (self._home(name)).remove(name, operator=operator, conn=conn)

    def undeclared(self, *domains: str) -> builtins.list[str]:
        """The names of schedules that this bus does not declare, of these domains or, without any, of its own ones."""
        named_here: dict[int, builtins.list[str]] = {}
        for domain in domains:
            named_here.setdefault(self._bus.routes.find(domain), []).append(domain)
        names: builtins.list[str] = []
        for at, shard in enumerate(self._bus.shards):
            if not domains or at in named_here:
                with named(shard):
                    names += shard.schedules.undeclared(*named_here.get(at, ()))
        return names

    def history(self, name: str | None = None, *, limit: int = 100) -> builtins.list[Fire]:
        """What a schedule, or without `name` any of them, has fired and skipped, newest first.

        At most `limit` rows.
        """
        found = self._bus.each(lambda shard: _fires(shard, name, limit))
        if name is not None and not any(found) and self.get(name) is None:
            raise ScheduleNotFoundError(name)
        return merge.newest(found, "fired_at", limit=limit)

    def _home(self, name: str) -> Any:
        """The schedules of the database that has this one."""
        found = self.get(name)
        if found is None:
            raise ScheduleNotFoundError(name)
        return self._bus.shard_of(found.domain).schedules


class ShardedTroubleshooting(SyncTroubleshooting):
    """`bus.troubleshooting` over several databases."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    groups = of_shard("troubleshooting", SyncTroubleshooting.groups)
    get = of_shard("troubleshooting", SyncTroubleshooting.get)
    retry = of_shard("troubleshooting", SyncTroubleshooting.retry)
    complete = of_shard("troubleshooting", SyncTroubleshooting.complete)
    cancel = of_shard("troubleshooting", SyncTroubleshooting.cancel)
    retry_group = of_shard("troubleshooting", SyncTroubleshooting.retry_group)
    complete_group = of_shard("troubleshooting", SyncTroubleshooting.complete_group)
    cancel_group = of_shard("troubleshooting", SyncTroubleshooting.cancel_group)

    def list(
        self, domain: str | None, *, command_type: str | None = None, limit: int = 100, offset: int = 0
    ) -> list[TroubleshootingItem]:
        """Commands that wait for a person, newest first; of all databases if the domain is None."""
        about: dict[str, Any] = {"command_type": command_type}
        if domain is not None:
            found: list[TroubleshootingItem] = self._bus.shard_of(domain).troubleshooting.list(
                domain, limit=limit, offset=offset, **about
            )
            return found
        items = self._bus.each(lambda shard: shard.troubleshooting.list(None, limit=limit + offset, **about))
        return merge.newest(items, "since", limit=limit, offset=offset)

    def count(self, domain: str | None = None, *, command_type: str | None = None) -> int:
        """How many commands wait for a person: in a domain or in all databases, of one `command_type` or of any."""
        if domain is not None:
            found: int = self._bus.shard_of(domain).troubleshooting.count(domain, command_type=command_type)
            return found
        return sum(self._bus.each(lambda shard: shard.troubleshooting.count(command_type=command_type)))

    def domains(self, *, command_type: str | None = None) -> Sequence[TroubledDomain]:
        """The domains in which commands wait for a person, of all databases, those with most first."""
        found = self._bus.each(lambda shard: shard.troubleshooting.domains(command_type=command_type))
        return merge.troubled(found)

    def find(self, command_id: UUID) -> Sequence[TroubleshootingItem]:
        """The command with this id that waits for a person, whatever its domain and its database are."""
        found = self._bus.each(lambda shard: shard.troubleshooting.find(command_id))
        return [one for items in found for one in items]


class ShardedOutbox(SyncOutbox):
    """`bus.outbox` over several databases."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def list(self, *, domain: str | None = None, batch_id: UUID | None = None) -> list[OutboxEntry]:
        """What waits in the outboxes of all databases, by transport, domain and why."""
        found = self._of(domain, lambda shard: shard.outbox.list(domain=domain, batch_id=batch_id))
        return merge.together(found, "transport", "domain", "reason")

    def report(self, *, days: int = 14) -> PublishingReport:
        """How publishing goes in all databases together."""
        return merge.publishing(self._bus.each(lambda shard: shard.outbox.report(days=days)))

    def retry(self, *, domain: str | None = None, **options: Any) -> int:
        """Let relays try again now what waits for another round, in all databases or that of the domain."""
        return sum(self._of(domain, lambda shard: shard.outbox.retry(domain=domain, **options)))

    def reroute(self, *, domain: str | None = None, **options: Any) -> int:
        """Let PostgreSQL deliver what waits after a failed round, in all databases or that of the domain."""
        return sum(self._of(domain, lambda shard: shard.outbox.reroute(domain=domain, **options)))

    def reconcile(self, *, domain: str | None = None, **options: Any) -> builtins.list[Reconciliation]:
        """Compare what each database has published with the messages that the broker holds."""
        found = self._of(domain, lambda shard: shard.outbox.reconcile(domain=domain, **options))
        return [one for each in found for one in each]

    def _of(self, domain: str | None, ask: Callable[[Any], Any]) -> Any:
        """What the database of the domain answers or, without a domain, each of them."""
        if domain is None:
            return self._bus.each(ask)
        return [ask(self._bus.shard_of(domain))]


def _fires(shard: Any, name: str | None, limit: int) -> builtins.list[Fire]:
    """What a schedule has fired in one database, which need not be the one that has the schedule."""
    try:
        fires: builtins.list[Fire] = shard.schedules.history(name, limit=limit)
    except ScheduleNotFoundError:
        return []
    return fires

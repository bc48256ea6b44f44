"""What is wrong, how bad it is, and why: pure decisions over facts that others have read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from busload.commands.wording import counted
from busload.settings import HealthSettings


class HealthState(StrEnum):
    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    CRITICAL = "CRITICAL"


class HealthCode(StrEnum):
    """Why something is not well, for programs."""

    DATABASE_UNREACHABLE = "DATABASE_UNREACHABLE"
    DATABASE_UNUSABLE = "DATABASE_UNUSABLE"
    SCHEMA_OUTDATED = "SCHEMA_OUTDATED"
    POOL_EXHAUSTED = "POOL_EXHAUSTED"
    NO_WORKER = "NO_WORKER"
    WORKER_LOST = "WORKER_LOST"
    COMMANDS_LATE = "COMMANDS_LATE"
    FAILURES_IN_A_ROW = "FAILURES_IN_A_ROW"
    STUCK_THREADS = "STUCK_THREADS"
    LOOP_BLOCKED = "LOOP_BLOCKED"
    STATION_ENDED = "STATION_ENDED"
    SCHEDULES_LATE = "SCHEDULES_LATE"
    PUBLISHING_FAILS = "PUBLISHING_FAILS"
    BROKER_UNREACHABLE = "BROKER_UNREACHABLE"
    NOT_RUNNING = "NOT_RUNNING"


RESTART_HELPS = frozenset({HealthCode.STUCK_THREADS, HealthCode.POOL_EXHAUSTED, HealthCode.STATION_ENDED})
"""If one of these is CRITICAL, only a new process gets rid of it."""


@dataclass(frozen=True, slots=True)
class HealthReason:
    """One thing that is wrong: `code` for programs, `message` for people."""

    code: HealthCode
    state: HealthState
    """DEGRADED or CRITICAL."""
    message: str
    domain: str | None = None
    worker: str | None = None
    """The name of the worker that it is about."""
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The worst state of all its reasons; HEALTHY without any."""

    state: HealthState
    reasons: tuple[HealthReason, ...] = ()

    @classmethod
    def of(cls, reasons: Iterable[HealthReason]) -> Health:
        """The worst comes first."""
        ordered = sorted(reasons, key=lambda reason: -SEVERITY.index(reason.state))
        return cls(ordered[0].state if ordered else HealthState.HEALTHY, tuple(ordered))

    @property
    def restart_helps(self) -> bool:
        """Whether something is CRITICAL that only a new process gets rid of."""
        return any(one.state is HealthState.CRITICAL and one.code in RESTART_HELPS for one in self.reasons)


SEVERITY = (HealthState.HEALTHY, HealthState.DEGRADED, HealthState.CRITICAL)


class Condition(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a worker is, as its heartbeat tells the database. Whoever asks for the health judges it."""

    failures_in_row: int = 0
    failed_ago: float = 0.0
    """Seconds since the last of them."""
    stuck_threads: int = 0
    exhaustions: int = 0
    """How often nobody gave a connection back in time, lately."""
    blocked_for: float = 0.0
    """Seconds that the event loop has not answered."""
    broker_away: str | None = None
    """The transport whose messages do not come."""
    ended: tuple[str, ...] = ()
    """Parts of the worker that should run and do not."""
    clock: float | None = None
    """What the clock of its machine showed when it told this, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class ReadyDomain:
    """Commands that could start in a domain that is not paused, and how many workers serve it."""

    domain: str
    commands: int
    more: bool
    """Whether there may be more than that: not all were counted."""
    since: datetime | None
    """When the oldest of them became ready; None if all were tried before."""
    workers: int


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker that has not stopped; `held` are the commands that it runs."""

    name: str
    alive: bool
    seen_at: datetime
    held: int
    condition: Condition


@dataclass(frozen=True, slots=True)
class Unpublished:
    """Commands whose publishing has failed, on one transport."""

    transport: str
    commands: int
    since: datetime
    error: str | None


@dataclass(frozen=True, slots=True)
class LateSchedules:
    """Schedules that are due for so long that their due time counts as missed."""

    count: int
    first: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Facts:
    """What the database tells at one moment."""

    now: datetime
    ready: tuple[ReadyDomain, ...] = ()
    workers: tuple[SeenWorker, ...] = ()
    unpublished: tuple[Unpublished, ...] = ()
    late_schedules: LateSchedules | None = None


def judge(facts: Facts, settings: HealthSettings) -> Iterator[HealthReason]:
    """Every reason that the facts give."""
    for ready in facts.ready:
        yield from _judge_domain(ready, facts.now, settings)
    for worker in facts.workers:
        if worker.alive:
            yield from judge_worker(worker.name, worker.condition, settings)
        elif worker.held:
            held = counted(worker.held, "command")
            message = (
                f"Worker {worker.name} is silent and holds {held}; any worker takes them back when its lease ends."
            )
            yield _reason(HealthCode.WORKER_LOST, message, worker=worker.name, since=worker.seen_at)
    for failed in facts.unpublished:
        critical = facts.now - failed.since >= settings.critical_after
        said = f": {failed.error}" if failed.error else ""
        message = f"{counted(failed.commands, 'command')} cannot be published to {failed.transport}{said}"
        yield _reason(HealthCode.PUBLISHING_FAILS, message, critical=critical, since=failed.since)
    if (late := facts.late_schedules) is not None:
        runs = any(worker.alive for worker in facts.workers)
        why = "workers run, and their log says why they do not fire" if runs else "no worker runs that could fire"
        are = counted(late.count, "schedule is", "schedules are")
        message = f"{are} due and not fired, the first one {late.first}: {why}."
        critical = facts.now - late.since >= settings.critical_after
        yield _reason(HealthCode.SCHEDULES_LATE, message, critical=critical, since=late.since)


def judge_worker(name: str, condition: Condition, settings: HealthSettings) -> Iterator[HealthReason]:
    """What is wrong with one worker."""
    row, stuck = condition.failures_in_row, condition.stuck_threads
    if row >= settings.failures_in_row and condition.failed_ago < settings.look_back.total_seconds():
        message = f"Of worker {name}, the last {counted(row, 'attempt has', 'attempts have all')} failed."
        yield _reason(HealthCode.FAILURES_IN_A_ROW, message, worker=name)
    if stuck:
        message = f"Worker {name} has {counted(stuck, 'thread')} whose handler did not end at its timeout."
        critical = stuck >= settings.stuck_threads
        yield _reason(HealthCode.STUCK_THREADS, message, critical=critical, worker=name)
    if condition.exhaustions:
        yield exhausted(condition.exhaustions, settings, f"Worker {name}", worker=name)
    if condition.blocked_for:
        message = f"The event loop of worker {name} has been blocked for {condition.blocked_for:.0f} s by a handler."
        yield _reason(HealthCode.LOOP_BLOCKED, message, worker=name)
    if condition.broker_away is not None:
        message = f"Worker {name} gets no messages from {condition.broker_away}, and polls the database instead."
        yield _reason(HealthCode.BROKER_UNREACHABLE, message, worker=name)
    if condition.ended:
        message = f"Of worker {name}, these parts have ended though it runs: {', '.join(condition.ended)}."
        yield _reason(HealthCode.STATION_ENDED, message, critical=True, worker=name)


def exhausted(times: int, settings: HealthSettings, who: str, *, worker: str | None = None) -> HealthReason:
    """All connections of a pool were in use for too long, so many times."""
    message = f"{who} waited in vain for a connection {counted(times, 'time')}: all of its pool were in use."
    return _reason(HealthCode.POOL_EXHAUSTED, message, critical=times >= settings.pool_exhaustions, worker=worker)


def _judge_domain(ready: ReadyDomain, now: datetime, settings: HealthSettings) -> Iterator[HealthReason]:
    waits = timedelta(0) if ready.since is None else now - ready.since
    commands = counted(ready.commands, "command is", "commands are")
    commands = f"At least {commands}" if ready.more else commands
    if not ready.workers:
        critical = waits >= settings.critical_after
        message = f"{commands} ready in {ready.domain}, and no worker serves it."
        yield _reason(HealthCode.NO_WORKER, message, critical=critical, domain=ready.domain, since=ready.since)
    elif waits >= settings.late_after:
        message = f"{commands} ready in {ready.domain}, the oldest for {waits - timedelta(0, 0, waits.microseconds)}."
        yield _reason(HealthCode.COMMANDS_LATE, message, domain=ready.domain, since=ready.since)


def _reason(
    code: HealthCode,
    message: str,
    *,
    critical: bool = False,
    domain: str | None = None,
    worker: str | None = None,
    since: datetime | None = None,
) -> HealthReason:
    return HealthReason(
        code, HealthState.CRITICAL if critical else HealthState.DEGRADED, message, domain, worker, since
    )


def critical(code: HealthCode, message: str) -> Health:
    """Nothing else can be known."""
    return Health.of([_reason(code, message, critical=True)])

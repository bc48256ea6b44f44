"""How publishing goes: what needs another round, the last days, and the last hour, for people who look."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime

from busload.postgres.plan import Plan, many
from busload.postgres.statements import statements

SQL = statements(__name__)

MOST = 100
"""Jobs that are told of, at most."""


@dataclass(frozen=True, slots=True)
class NeedsRetry:
    """Commands of a job that wait for another round of publishing; those without a job are counted together."""

    domain: str
    transport: str
    job_id: str | None
    commands: int
    oldest: datetime
    rounds: int
    """The highest number of rounds that have failed."""


@dataclass(frozen=True, slots=True)
class Day:
    """Batches that were created on a day, in UTC."""

    day: date
    batches: int
    published: int
    """Batches all of whose commands were published, or ready at once where there is no broker."""
    dispatched: int
    """Batches that a broker was told of."""
    rounds: float | None
    """How many rounds these took on average; None without a broker."""


@dataclass(frozen=True, slots=True)
class RecentJob:
    """Where the commands are whose batches were created within the last hour, by job."""

    domain: str
    job_id: str | None
    pending: int
    """Not published yet."""
    queued: int
    processing: int
    completed: int
    failed: int
    """FAILED, CANCELED, or in troubleshooting."""


@dataclass(frozen=True, slots=True)
class PublishingReport:
    """What `bus.outbox.report()` tells."""

    retry: list[NeedsRetry]
    daily: list[Day]
    recent: list[RecentJob]


def report(*, days: int) -> Plan[PublishingReport]:
    """Read all of it."""
    retry = yield from many(NeedsRetry, SQL.retry, most=MOST)
    daily = yield from many(Day, SQL.daily, days=days)
    recent = yield from many(RecentJob, SQL.recent, most=MOST)
    return PublishingReport(retry, daily, recent)

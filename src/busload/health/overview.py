"""The whole bus at one moment: what waits, runs and needs a person, in all domains."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from busload.health.facts import ONE_MOMENT
from busload.limits import pause
from busload.limits.pause import DomainOverview
from busload.postgres.plan import Plan, Script, execute
from busload.postgres.statements import statements

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class Overview:
    """How many commands are where, in each domain, and since when the oldest of them wait."""

    at: datetime
    oldest_ready: datetime | None
    """Since when the command waits that is first in the queue; None if none does."""
    oldest_unpublished: datetime | None
    """Since when the oldest command waits in the outbox; None if none does."""
    oldest_in_troubleshooting: datetime | None
    workers: int
    """Living workers."""
    silent_workers: int
    """Workers that have not stopped and were not seen for as long as their leases last."""
    slots: int
    """Commands that the living workers can run at a time."""
    sent: int
    """Commands that were ever sent, as PostgreSQL counts inserted rows: the difference of two makes a rate.

    PostgreSQL starts again at 0 when its statistics are reset, and is up to a second late.
    """
    attempts: int
    """Attempts that have ever ended, counted in the same way."""
    domains: tuple[DomainOverview, ...]

    @property
    def ready(self) -> int:
        return sum(each.ready for each in self.domains)

    @property
    def scheduled(self) -> int:
        return sum(each.scheduled for each in self.domains)

    @property
    def running(self) -> int:
        return sum(each.running for each in self.domains)

    @property
    def in_troubleshooting(self) -> int:
        return sum(each.in_troubleshooting for each in self.domains)

    @property
    def unpublished(self) -> int:
        return sum(each.unpublished for each in self.domains)


def overview() -> Plan[Overview]:
    """Read it all at one moment; needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    [found] = yield from execute(SQL.totals)
    totals: list[Any] = [*found, tuple((yield from pause.domains()))]
    return Overview(*totals)

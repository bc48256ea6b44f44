"""The whole bus at one moment: what waits, runs and needs a person, in all domains."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from busload.limits import pause
from busload.limits.pause import DomainOverview
from busload.postgres.plan import ONE_MOMENT, Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

WINDOW = timedelta(seconds=15)
"""Rates are over so much time, or a little more."""


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
    yield ONE_MOMENT
    [found] = yield from execute(SQL.totals)
    totals: list[Any] = [*found, tuple((yield from pause.domains()))]
    return Overview(*totals)


class Rates:
    """Makes rates of counts that only grow, over the last seconds.

    After a `gap` in which nobody has looked they begin again: a rate since then would be an average of the past.
    """

    def __init__(self, gap: timedelta = timedelta.max) -> None:
        self._gap = gap
        self._seen: deque[Overview] = deque()

    def of(self, now: Overview) -> tuple[float, float] | None:
        """Commands sent and attempts ended per second; None if nobody looked before, or not for long."""
        last = self._seen[-1] if self._seen else now
        counts_anew = now.sent < last.sent or now.attempts < last.attempts
        if counts_anew or now.at - last.at > self._gap:
            self._seen.clear()
        if not self._seen or now.at > self._seen[-1].at:
            self._seen.append(now)
        while len(self._seen) > 2 and now.at - self._seen[1].at >= WINDOW:
            self._seen.popleft()
        first = self._seen[0]
        seconds = (now.at - first.at).total_seconds()
        if seconds < 1:
            return None
        return (now.sent - first.sent) / seconds, (now.attempts - first.attempts) / seconds

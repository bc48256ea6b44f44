"""A paused domain: no command starts in it until somebody resumes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from busload.postgres.plan import Plan, execute, many, perform_async
from busload.postgres.pool import AsyncPool
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class Pause:
    """No command starts in this domain until somebody resumes it. A pause that is over says when and by whom."""

    domain: str
    since: datetime
    operator: str | None
    """Who paused it."""
    reason: str | None
    resumed_at: datetime | None = None
    resumed_by: str | None = None


@dataclass(frozen=True, slots=True)
class DomainOverview:
    """How many commands are in each place of a domain, and how many workers serve it."""

    domain: str
    ready: int
    scheduled: int
    """Commands that wait for their time: a run_at, the next attempt, a handler or a limit."""
    running: int
    in_troubleshooting: int
    workers: int
    """Living workers that serve the domain."""
    pause: Pause | None
    unpublished: int = 0
    """Commands that wait in the outbox for a broker."""
    oldest_ready: datetime | None = None
    """Since when the first command waits that is ready and was not tried yet; None if there is none."""


class Pauses:
    """Which of a worker's domains are paused, as of its last look. Nothing of these starts there from then on."""

    def __init__(self, pool: AsyncPool, domains: Sequence[str]) -> None:
        self._pool, self._domains = pool, domains
        self.paused: frozenset[str] = frozenset()

    async def look(self) -> bool:
        """Ask the database; returns whether anything has changed since the last look."""
        async with self._pool.connection() as conn:
            paused = await perform_async(conn, paused_among(self._domains))
        if paused == self.paused:
            return False
        begun, ended = paused - self.paused, self.paused - paused
        self.paused = paused
        if begun:
            log.info("Paused: %s; what runs finishes, nothing new starts", ", ".join(sorted(begun)))
        if ended:
            log.info("Resumed: %s", ", ".join(sorted(ended)))
        return True


def pause(domain: str, *, reason: str | None, operator: str | None) -> Plan[bool]:
    """Pause a domain. Return False if it was paused already: that pause stays as it is."""
    return bool((yield from execute(SQL.pause, domain=domain, reason=reason, operator=operator)))


def resume(domain: str, *, operator: str | None) -> Plan[bool]:
    """Let a domain go on. Return False if it was not paused."""
    return bool((yield from execute(SQL.resume, domain=domain, operator=operator)))


def pauses() -> Plan[list[Pause]]:
    """Return the pauses that last."""
    return many(Pause, SQL.pauses)


def history(domain: str | None, *, limit: int) -> Plan[list[Pause]]:
    """Return the last pauses, also those that are over, newest first."""
    return many(Pause, SQL.history, domain=domain, limit=limit)


def paused_among(domains: Sequence[str]) -> Plan[frozenset[str]]:
    """Return those of these domains that are paused."""
    rows = yield from execute(SQL.paused, domains=list(domains))
    return frozenset(domain for (domain,) in rows)


def domains() -> Plan[list[DomainOverview]]:
    """Return every domain in which something waits or runs, or that is served or paused."""
    return many(_overview, SQL.domains)


def _overview(*row: Any) -> DomainOverview:
    domain, ready, scheduled, running, parked, workers, unpublished, since, operator, reason, oldest = row
    pause = Pause(domain, since, operator, reason) if since else None
    return DomainOverview(domain, ready, scheduled, running, parked, workers, pause, unpublished, oldest)

"""How a domain is paused, and who asks whether it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from busload.domain.pause import DomainOverview, Pause
from busload.store.plan import Plan, execute, many
from busload.store.statements import statements

SQL = statements("pause")


def pause(domain: str, *, reason: str | None, operator: str | None) -> Plan[bool]:
    """False: it was paused already, and stays as it was."""
    return bool((yield from execute(SQL.pause, domain=domain, reason=reason, operator=operator)))


def resume(domain: str, *, operator: str | None) -> Plan[bool]:
    """False: it was not paused."""
    return bool((yield from execute(SQL.resume, domain=domain, operator=operator)))


def pauses() -> Plan[list[Pause]]:
    return many(Pause, SQL.pauses)


def history(domain: str | None, *, limit: int) -> Plan[list[Pause]]:
    return many(Pause, SQL.history, domain=domain, limit=limit)


def paused(domains: Sequence[str]) -> Plan[frozenset[str]]:
    rows = yield from execute(SQL.paused, domains=list(domains))
    return frozenset(domain for (domain,) in rows)


def domains() -> Plan[list[DomainOverview]]:
    return many(_overview, SQL.domains)


def _overview(*row: Any) -> DomainOverview:
    domain, ready, scheduled, running, parked, workers, unannounced, since, operator, reason = row
    pause = Pause(domain, since, operator, reason) if since else None
    return DomainOverview(domain, ready, scheduled, running, parked, workers, pause, unannounced)

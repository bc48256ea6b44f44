"""What is kept, how much of it is old, and when it was pruned last: cheap to ask."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements
from busload.retention.prune import Pruned

SQL = statements(__name__)

AGES = (7, 30, 90, 365)
"""Days."""
MOST = 10_000
"""Batches that are counted, at most."""


@dataclass(frozen=True, slots=True)
class KeptTable:
    """A table of the past. `rows` is an estimate."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Old:
    """Batches that ended more than so many days ago, counted up to 10,000, and the commands in them."""

    days: int
    batches: int
    commands: int

    @property
    def capped(self) -> bool:
        return self.batches >= MOST


@dataclass(frozen=True, slots=True)
class LastPrune:
    """A prune that came to its end, and what it removed or archived."""

    at: datetime
    older_than: timedelta
    archive: bool
    pruned: Pruned


@dataclass(frozen=True, slots=True)
class Retention:
    """What `bus.retention()` tells."""

    tables: list[KeptTable]
    old: list[Old]
    oldest_command: datetime | None
    oldest_batch: datetime | None
    turn_at: datetime | None
    """When a worker with `keep_for` has begun to prune last; None: no worker ever did."""
    last: LastPrune | None
    under_way: int
    """Batches that are no longer shown, and being removed."""


def read() -> Plan[Retention]:
    tables = yield from many(KeptTable, SQL.tables)
    old = yield from many(Old, SQL.old, days=list(AGES), most=MOST)
    [(command, batch, turn_at, ended_at, details, under_way)] = yield from execute(SQL.since, most=MOST)
    return Retention(tables, old, command, batch, turn_at, _last(ended_at, details), under_way)


def _last(ended_at: datetime | None, details: dict[str, Any] | None) -> LastPrune | None:
    if ended_at is None or details is None:
        return None
    names = ("commands", "executions", "events", "batches")
    pruned = Pruned(*(details[name] for name in names))
    return LastPrune(ended_at, timedelta(seconds=details["older_than"]), details["archive"], pruned)

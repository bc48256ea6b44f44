"""The facts behind the health of a bus, read at one moment."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from busload.health.health import Condition, Facts, LateSchedules, ReadyDomain, SeenWorker, Unpublished
from busload.postgres.plan import ONE_MOMENT, Plan, execute, many, one
from busload.postgres.schema import migrate
from busload.postgres.statements import statements

SQL = statements(__name__)

MOST = 1000
"""Loads of a domain that are looked at."""


def read() -> Plan[Facts]:
    """Read all facts; needs a transaction of its own. Refuses a schema that is too old, at every call."""
    yield ONE_MOMENT
    yield from migrate.check()
    [(now,)] = yield from execute(SQL.now)
    ready = yield from many(ReadyDomain, SQL.ready, most=MOST)
    workers = yield from many(_worker, SQL.workers)
    unpublished = yield from many(Unpublished, SQL.unpublished)
    late = yield from one(LateSchedules, SQL.late_schedules, most=MOST)
    return Facts(now, tuple(ready), tuple(workers), tuple(unpublished), late)


def _worker(name: str, alive: bool, seen_at: datetime, held: int, condition: Any) -> SeenWorker:
    return SeenWorker(name, alive, seen_at, held, condition_of(condition))


def condition_of(told: Any) -> Condition:
    """A worker of another release may tell something else."""
    try:
        return msgspec.convert(told or {}, Condition)
    except msgspec.ValidationError:
        return Condition()

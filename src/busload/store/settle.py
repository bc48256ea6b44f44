"""How results are recorded: many attempts in one statement, each only while its lease exists."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any
from uuid import UUID

from psycopg import errors as pg

from busload.domain.execution import COMPLETED, Transition
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("settle")


def settle(transitions: Sequence[Transition], *, now: float) -> Plan[set[int]]:
    """Record attempts; return the ids of the commands this credited.

    `now` is the reading of the clock that `started` and `finished` were taken from: only differences are sent, so that
    the database's clock dates everything.
    """
    ordinals: dict[UUID, int] = {}
    for t in transitions:
        ordinals.setdefault(t.leased.lease.lease_id, len(ordinals) + 1)
    columns = {
        "leases": list(ordinals),
        "ordinals": [ordinals[t.leased.lease.lease_id] for t in transitions],
        "ids": [t.leased.id for t in transitions],
        "outcomes": _column(transitions, "outcome", usual=COMPLETED),
        "started_ago": [now - t.leased.started for t in transitions],
        "finished_ago": [now - t.finished for t in transitions],
        "details": _column(transitions, "details"),
        "delays": _column(transitions, "delay"),
        "reasons": _column(transitions, "reason"),
    }
    try:
        rows = yield from execute(SQL.settle, **columns)
    except pg.UniqueViolation:
        # The same attempts were just settled by a flush that we had given up waiting for: now it can be seen.
        rows = yield from execute(SQL.settle, **columns)
    if rows[0][0] == len(transitions):
        return {t.leased.id for t in transitions}
    credited = yield from execute(
        SQL.credited,
        ids=[t.leased.id for t in transitions],
        lease_ids=[t.leased.lease.lease_id for t in transitions],
        outcomes=columns["outcomes"],
    )
    return {id for (id,) in credited}


def _column(transitions: Sequence[Transition], name: str, usual: str | None = None) -> list[Any]:
    """The values of a column, or none at all if every one is the usual: unnest fills up what is missing."""
    values = list(map(attrgetter(name), transitions))
    return [] if values.count(usual) == len(values) else values

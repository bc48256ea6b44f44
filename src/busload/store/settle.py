"""How results are recorded: many attempts in one statement, each only while its lease exists."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any
from uuid import UUID

from psycopg import errors as pg

from busload.domain.execution import COMPLETED, Transition
from busload.store.arrays import Bigints, Floats, Integers
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("settle")


def settle(transitions: Sequence[Transition], *, now: float, again: bool = True) -> Plan[set[int]]:
    """Record attempts; return the ids of the commands this credited.

    `now` is the reading of the clock that `started` and `finished` were taken from: only differences are sent, so that
    the database's clock dates everything. With `again` off, a first time is hoped for, which is cheaper; if it was not
    the first, the statement fails and is repeated with more care, so that is not for use within a transaction.
    """
    leased = [t.leased for t in transitions]
    ids = [one.id for one in leased]
    ordinals: dict[UUID, int] = {}
    columns = {
        "ordinals": Integers.of([ordinals.setdefault(one.lease.lease_id, len(ordinals) + 1) for one in leased]),
        "leases": list(ordinals),
        "ids": Bigints.of(ids),
        "outcomes": _column(transitions, "outcome", usual=COMPLETED),
        "started_ago": Floats.of([now - one.started for one in leased]),
        "finished_ago": Floats.of([now - t.finished for t in transitions]),
        "details": _column(transitions, "details"),
        "delays": _column(transitions, "delay"),
        "reasons": _column(transitions, "reason"),
    }
    try:
        rows = yield from execute(SQL.settle, **columns, again=again)
    except pg.UniqueViolation:
        # The same attempts were settled by a flush whose answer was lost, or that we had given up waiting for.
        rows = yield from execute(SQL.settle, **columns, again=True)
    if rows[0][0] == len(transitions):
        return set(ids)
    credited = yield from execute(
        SQL.credited,
        ids=ids,
        lease_ids=[one.lease.lease_id for one in leased],
        outcomes=columns["outcomes"],
    )
    return {id for (id,) in credited}


def _column(transitions: Sequence[Transition], name: str, usual: str | None = None) -> list[Any]:
    """The values of a column, or none at all if every one is the usual: unnest fills up what is missing."""
    values = list(map(attrgetter(name), transitions))
    return [] if values.count(usual) == len(values) else values

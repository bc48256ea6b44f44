"""How PostgreSQL hands out commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat
from typing import Any
from uuid import UUID

from busload.domain.execution import Lease, Leased
from busload.domain.ids import new_id
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("claim")

MOST = 65_000
"""How many commands one claim takes at most: its leases are told apart by 16 bits of their id."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim took.

    `contended`: more was ready, but other workers had locked it at that moment. `refused`: the worker that asked was
    declared dead.
    """

    leases: list[Lease]
    leased: list[Leased]
    contended: bool
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Rung(Claim):
    """What a claim of certain loads took.

    `unknown` are those that no command has, as far as this statement saw; `passed_over` those with commands it could
    not take, which others had locked or are not for it.
    """

    unknown: frozenset[int] = frozenset()
    passed_over: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Promotion:
    """How many loads became ready, and the seconds until the next one is due."""

    loads: int
    next_due: float | None


def claim(*, worker: int, domains: list[str], limit: int, suspects: bool = True) -> Plan[Claim]:
    [row] = yield from execute(
        SQL.claim,
        worker=worker,
        domains=domains,
        limit=min(limit, MOST),
        suspects=int(suspects),
        lease=str(new_id()),  # the database counts on from here: drawing an id for each lease takes it longer
    )
    seen, leases, leased = row[0], *_read(row[1:11], *row[11:])
    contended = seen is not None and len(leased) < min(limit, seen)
    return Claim(leases, leased, contended, refused=seen is None)


def claim_rung(*, worker: int, domains: list[str], wanted: Mapping[int, int]) -> Plan[Rung]:
    """Take so many commands of each of these loads, by their number; at most `MOST` together."""
    loads = sorted(wanted)
    [row] = yield from execute(
        SQL.claim_rung,
        worker=worker,
        domains=domains,
        loads=loads,
        wanted=[wanted[load] for load in loads],
        lease=str(new_id()),
    )
    alive, unknown, passed_over, leases, leased = *row[:3], *_read(row[3:13], *row[13:])
    return Rung(
        leases,
        leased,
        contended=False,
        refused=not alive,
        unknown=frozenset(unknown),
        passed_over=frozenset(passed_over),
    )


def promote() -> Plan[Promotion]:
    [row] = yield from execute(SQL.promote)
    return Promotion(*row)


def give_back(
    parts: Mapping[Lease, Sequence[int]], *, pause: float | None = None, details: Sequence[str] = ()
) -> Plan[set[UUID]]:
    """Let others run these commands of leases; returns the leases that had them to give.

    With a pause they wait for a worker that knows their type; `details` then say of each lease which that are.
    """
    [[given, _]] = yield from execute(
        SQL.give_back,
        leases=[lease.lease_id for lease in parts],
        commands=[id for ids in parts.values() for id in ids],
        ordinals=[ordinal for ordinal, ids in enumerate(parts.values(), 1) for _ in ids],
        details=list(details),
        pause=pause,
    )
    return set(given)


def _read(
    lease_columns: tuple[list[Any], ...],
    created_at: datetime,
    created_ats: list[datetime] | None,
    ids: list[int] | None,
    command_ids: list[UUID],
    command_types: list[str],
    data: list[str | None],
    *rare: list[Any] | None,
) -> tuple[list[Lease], list[Leased]]:
    """Leases and their commands come as an array per column; of the rare ones only those that hold anything."""
    if ids is None:
        return [], []
    *shared, remaining = lease_columns
    sizes = [hi - lo + 1 for lo, hi in zip(shared[1], shared[2], strict=True)]
    leases = list(map(Lease, *shared, repeat(created_at), sizes, sizes, remaining))
    if ids == [id for lease in leases for id in range(lease.lo, lease.hi + 1)]:
        owners = [lease for lease in leases for _ in range(lease.unsettled)]
    else:
        leases, owners = _without_deleted(leases, ids)
    columns: list[Iterable[Any]] = [owners, ids, command_ids, command_types, data]
    if created_ats or any(rare):
        columns += [column or repeat(None) for column in (*rare, created_ats)]
    return leases, list(map(Leased, *columns))


def _without_deleted(leases: list[Lease], ids: list[int]) -> tuple[list[Lease], list[Lease]]:
    """Leases that other hands deleted commands of; one that is left without any is closed by the next sweep."""
    owner_of = {id: lease for lease in leases for id in range(lease.lo, lease.hi + 1)}
    owners = [owner_of[id] for id in ids]
    for lease in leases:
        lease.unsettled = lease.running = owners.count(lease)
    return [lease for lease in leases if lease.unsettled], owners

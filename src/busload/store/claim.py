"""How PostgreSQL hands out commands."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from busload.domain.execution import Lease, Leased
from busload.store.plan import Plan, execute
from busload.store.statements import statements

SQL = statements("claim")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim took.

    `contended`: something was ready, but other workers had locked it at that moment. `refused`: the worker that asked
    was declared dead.
    """

    leased: list[Leased]
    contended: bool
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Promotion:
    """How many loads became ready, and the seconds until the next one is due."""

    loads: int
    next_due: float | None


def claim(*, worker: int, domains: list[str], limit: int, suspects: bool = True) -> Plan[Claim]:
    rows = yield from execute(SQL.claim, worker=worker, domains=domains, limit=limit, suspects=suspects)
    leased: list[Leased] = []
    for _, lease_id, *row in rows:
        if lease_id is not None:
            _read(leased, lease_id, *row)
    seen = rows[0][0]
    return Claim(leased, contended=not leased and bool(seen), refused=seen is None)


def promote() -> Plan[Promotion]:
    [row] = yield from execute(SQL.promote)
    return Promotion(*row)


def give_back(lease: Lease, commands: list[int], *, pause: float, details: str) -> Plan[bool]:
    """Let commands of a lease wait for a worker that knows their type."""
    rows = yield from execute(SQL.give_back, lease_id=lease.lease_id, commands=commands, pause=pause, details=details)
    return bool(rows)


def _read(
    leased: list[Leased],
    lease_id: UUID,
    lo: int,
    hi: int,
    domain: str,
    batch_id: UUID | None,
    priority: int,
    attempt: int,
    forgiven: int,
    crashes: int,
    created_at: datetime,
    ids: list[int] | None,
    command_ids: list[UUID] | None,
    command_types: list[str],
    data: list[str | None],
    task_keys: list[str | None] | None,
    correlation_ids: list[UUID | None] | None,
    reply_tos: list[str | None] | None,
    max_attempts: list[int | None] | None,
) -> None:
    """A lease comes as one row with an array per column; columns that hold nothing do not come at all."""
    if command_ids is None:  # the commands were deleted by other hands; the lease is closed by the next sweep
        return
    lease = Lease(
        lease_id, lo, hi, domain, batch_id, priority, attempt, forgiven, crashes, created_at, len(command_ids)
    )
    positions = range(lo, hi + 1) if ids is None else ids
    if not (task_keys or correlation_ids or reply_tos or max_attempts):
        for id, command_id, command_type, text in zip(positions, command_ids, command_types, data, strict=True):
            leased.append(Leased(lease, id, command_id, command_type, text))
        return
    nothing = [None] * len(command_ids)
    columns = zip(
        positions,
        command_ids,
        command_types,
        data,
        task_keys or nothing,
        correlation_ids or nothing,
        reply_tos or nothing,
        max_attempts or nothing,
        strict=True,
    )
    for row in columns:
        leased.append(Leased(lease, *row))

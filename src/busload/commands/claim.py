"""How PostgreSQL hands out commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import repeat
from typing import Any
from uuid import UUID

import msgspec
from psycopg.types.numeric import Int4, Int8

from busload.commands.execution import Lease, Leased
from busload.commands.ids import new_id
from busload.commands.load import Load
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)

MOST = 65_000
"""How many commands one claim takes at most: its leases are told apart by 16 bits of their id."""

_headers_by_id = msgspec.json.Decoder(dict[int, msgspec.Raw])

BEFORE_ALL = -(2**63)
"""No owner of loads comes before this one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim took.

    `contended` means that more commands were ready, but other workers had locked them at that moment. `refused` means
    that the worker which asked was declared dead. `turns` names, for each domain, who was the last to have a turn: the
    next claim goes on after them. `alone` means that nobody has to wait for a turn, because all that the claim saw has
    one owner, or because it saw less than it was to take.
    """

    leases: list[Lease]
    leased: list[Leased]
    contended: bool
    refused: bool = False
    turns: Mapping[str, int] = field(default_factory=dict)
    alone: bool = False

    def joined(self, other: Claim) -> Claim:
        """What both together took."""
        return Claim(
            self.leases + other.leases,
            self.leased + other.leased,
            contended=self.contended or other.contended,
            refused=self.refused or other.refused,
            turns={**self.turns, **other.turns},
        )


@dataclass(frozen=True, slots=True)
class DeliveredClaim(Claim):
    """What a claim of certain loads took.

    `unknown` are the loads of which no command was found. `passed_over` are loads with commands that could not be
    taken, because others had locked them or they are not for this worker.
    """

    unknown: frozenset[int] = frozenset()
    passed_over: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Promotion:
    """How many loads became ready, the seconds until the next one is due, and which batches of the worker are held.

    `ready` tells whether anything was ready before, in the domains that were asked about.
    """

    loads: int
    next_due: float | None
    held: frozenset[UUID] = frozenset()
    ready: bool = False


def claim(
    *,
    worker: int,
    domains: list[str],
    limit: int,
    suspects: bool = True,
    turns: Mapping[str, int] | None = None,
    no_turns: bool = False,
) -> Plan[Claim]:
    """Take up to `limit` commands. `turns` are those of the claim before; without them it begins with the oldest.

    With `no_turns` probably no more than that are ready, or all of them have one owner. Then the claim is quicker.
    """
    known = turns or {}
    [row] = yield from execute(
        SQL.claim_all if no_turns else SQL.claim,
        worker=worker,
        **_turns_of(domains, known),
        limit=Int4(min(limit, MOST)),
        suspects=int(suspects),
        lease=str(new_id()),  # the database counts on from here: drawing an id for each lease takes it longer
    )
    seen, last, alone, leases, leased = *row[:3], *read(row[3:16], *row[16:])
    contended = seen is not None and len(leased) < min(limit, seen)
    next_turns = dict(zip(domains, last, strict=True)) if last else known
    return Claim(leases, leased, contended, refused=seen is None, turns=next_turns, alone=alone)


def claim_few(*, worker: int, domains: list[str], limit: int, turns: Mapping[str, int]) -> Plan[Claim]:
    """Take up to `limit` commands of owners with small loads: whole loads, and none of a large one."""
    [row] = yield from execute(
        SQL.claim_few,
        worker=worker,
        **_turns_of(domains, turns),
        limit=Int4(limit),
        lease=str(new_id()),
    )
    return Claim(*read(row[:13], *row[13:]), contended=False)


def _turns_of(domains: list[str], turns: Mapping[str, int]) -> dict[str, Any]:
    """Numbers of a claim have a type of their own: psycopg takes the smallest that fits, and prepares for each type."""
    return {"domains": domains, "after": [Int8(turns.get(domain, BEFORE_ALL)) for domain in domains]}


def claim_delivered(*, worker: int, domains: list[str], wanted: Mapping[int, int]) -> Plan[DeliveredClaim]:
    """Take so many commands of each of these loads, by their number; at most `MOST` together."""
    loads = sorted(wanted)
    [row] = yield from execute(
        SQL.claim_delivered,
        worker=worker,
        domains=domains,
        loads=loads,
        wanted=[wanted[load] for load in loads],
        lease=str(new_id()),
    )
    alive, unknown, passed_over, leases, leased = *row[:3], *read(row[3:16], *row[16:])
    return DeliveredClaim(
        leases,
        leased,
        contended=False,
        refused=not alive,
        unknown=frozenset(unknown),
        passed_over=frozenset(passed_over),
    )


def promote(batches: Iterable[UUID] = (), domains: Sequence[str] = ()) -> Plan[Promotion]:
    """Make ready what is due. Say which of these batches are held, and whether these domains have something ready."""
    [(loads, next_due, held, ready)] = yield from execute(SQL.promote, batches=list(batches), domains=list(domains))
    return Promotion(loads, next_due, frozenset(held), ready)


def give_back(
    parts: Mapping[Lease, Sequence[int]], *, pause: float | None = None, details: Sequence[str] = ()
) -> Plan[set[UUID]]:
    """Let others run these commands of leases. Returns the leases that still had them.

    With a `pause` the commands wait for a worker that knows their type; `details` name the types for each lease.
    """
    columns = {
        "leases": [lease.lease_id for lease in parts],
        "commands": [id for ids in parts.values() for id in ids],
        "ordinals": [ordinal for ordinal, ids in enumerate(parts.values(), 1) for _ in ids],
        "details": list(details),
    }
    if pause is None:
        [[given, _]] = yield from execute(SQL.give_back, **columns)
    else:
        [[given]] = yield from execute(SQL.set_aside, **columns, pause=pause)
    return set(given)


def read(
    lease_columns: tuple[list[Any], ...],
    created_at: datetime,
    created_ats: list[datetime] | None,
    ids: list[int] | None,
    command_ids: list[UUID],
    command_types: list[str],
    data: list[str | None],
    *rare: Any,
) -> tuple[list[Lease], list[Leased]]:
    """Leases and their commands come as one array for each column. A rare column is null if no command has a value.

    Headers are rarer still: the last column is a JSON object of those that commands have of their own, by id.
    """
    if ids is None:
        return [], []
    lease_ids, los, his, *shared, remaining, budgets, headers, _ = lease_columns
    *others, own_headers = rare
    loads = list(map(Load, los, his))
    counts = [load.size for load in loads]
    numbers = counts, counts, remaining, (share is not None for share in budgets), headers
    leases = list(map(Lease, lease_ids, loads, *shared, repeat(created_at), *numbers))
    if ids == [id for load in loads for id in load.ids]:
        owners = [lease for lease in leases for _ in range(lease.unsettled)]
    else:
        leases, owners = _without_deleted(leases, ids)
    columns: list[Iterable[Any]] = [owners, ids, command_ids, command_types, data]
    if created_ats or any(others):
        columns += [column or repeat(None) for column in (*others, created_ats)]
    leased = list(map(Leased, *columns))
    if own_headers is not None:
        texts = _headers_by_id.decode(own_headers)
        for one in leased:
            one.headers = bytes(texts[one.id]).decode() if one.id in texts else None
    return leases, leased


def _without_deleted(leases: list[Lease], ids: list[int]) -> tuple[list[Lease], list[Lease]]:
    """The leases, if somebody has deleted some of their commands. The next sweep closes a lease without commands."""
    owner_of = {id: lease for lease in leases for id in lease.load.ids}
    owners = [owner_of[id] for id in ids]
    for lease in leases:
        lease.unsettled = lease.running = owners.count(lease)
    return [lease for lease in leases if lease.unsettled], owners

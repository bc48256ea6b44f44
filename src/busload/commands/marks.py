"""How PostgreSQL hands out commands while dead entries of the queue cannot be removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from psycopg.types.numeric import Int4

from busload.commands.claim import MOST, Claim, read
from busload.commands.ids import new_id
from busload.postgres.plan import Plan, execute
from busload.postgres.statements import statements

SQL = statements(__name__)


class Owner(NamedTuple):
    """Whose loads are ready: all of a domain that have the same priority and the same `fair`."""

    domain: str
    priority: int
    fair: int


class _Found(NamedTuple):
    """An owner as a statement reports it: its first load, or None if there is none left; whether it got `more`."""

    domain: str
    priority: int
    fair: int
    first: int | None
    more: bool

    @property
    def owner(self) -> Owner:
        return Owner(self.domain, self.priority, self.fair)


_owners = msgspec.json.Decoder(list[_Found])


@dataclass(frozen=True, slots=True)
class Survey:
    """Who owns ready loads, with the first load of each, as one `snapshot` shows it.

    `entries` is how many entries of the index the survey has read.
    """

    snapshot: str
    entries: int
    owners: Mapping[Owner, int]


@dataclass(frozen=True, slots=True)
class KnownClaim(Claim):
    """What a claim of known owners took.

    `snapshot` shows what it could see. `first` has the first load of each owner, or None if there is no load left.
    """

    snapshot: str = ""
    first: Mapping[Owner, int | None] = field(default_factory=dict)


def survey(*, domains: Sequence[str], most: int) -> Plan[Survey]:
    """Look who owns ready loads in these domains, up to one owner more than `most` for each domain."""
    [[snapshot, entries, owners]] = yield from execute(SQL.survey, domains=list(domains), most=Int4(most))
    found = _owners.decode(owners) if owners else []
    return Survey(snapshot, entries, {one.owner: one.first for one in found if one.first is not None})


def claim_known(
    *,
    worker: int,
    domains: Sequence[str],
    served: Sequence[str],
    limit: int,
    since: str,
    owners: dict[Owner, int],
    suspects: bool = True,
) -> Plan[KnownClaim]:
    """Take up to `limit` commands of these owners and of those that came since the snapshot, in these domains.

    `owners` has the first load of each, in the order in which they have their turns. Owners that came in other domains
    that the worker has `served` are reported, but nothing of theirs is taken.
    """
    [row] = yield from execute(
        SQL.claim_known,
        worker=worker,
        domains=list(domains),
        served=list(served),
        places=_array(served.index(owner.domain) + 1 for owner in owners),
        priorities=_array(owner.priority for owner in owners),
        fairs=_array(owner.fair for owner in owners),
        his=_array(owners.values()),
        since=since,
        limit=Int4(min(limit, MOST)),
        suspects=int(suspects),
        lease=str(new_id()),
    )
    seen, snapshot, found, leases, leased = *row[:3], *read(row[3:16], *row[16:])
    answers = _owners.decode(found) if found else []
    with_more = {one.owner for one in answers if one.more}  # the first of them was the last to have a turn
    return KnownClaim(
        leases,
        leased,
        contended=seen is not None and len(leased) < min(limit, seen),
        refused=seen is None,
        snapshot=snapshot,
        turns={owner.domain: owner.fair for owner in reversed(owners) if owner in with_more},
        first={one.owner: one.first for one in answers},
    )


def _array(numbers: Iterable[int]) -> str:
    """As text, also if there is none: psycopg prepares for each type, and an empty list has another."""
    return f"{{{','.join(map(str, numbers))}}}"

"""Lets claims begin where the last one ended, while dead entries of the queue cannot be removed.

While somebody holds a snapshot, each load that was ever ready leaves a dead entry in the index of the queue, and a
usual claim reads all that lie before the first ready load. Then this worker claims by what it knows: who owns ready
loads, the first load of each, and the snapshot of its last look, which leads to all that became ready since.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from busload.commands.claim import BEFORE_ALL, Claim
from busload.commands.marks import KnownClaim, Owner, claim_known, survey
from busload.postgres.plan import Plan

MANY = 200
"""Dead entries before a usual claim takes noticeably longer."""

LOADS_BETWEEN = 500
"""Claims and loads that were claimed since the last survey, before another one is worth it."""

SHORTEST = 0.25
"""Seconds between two surveys, at least."""

LONGEST = 10.0
"""Seconds between two surveys, at most, while dead entries are passed over."""

SECONDS_PER_ENTRY = 3e-6
"""Seconds between two surveys for each entry that the last one has read. Reading an entry takes about 0.15 µs: so a
twentieth of the time is spent on surveys, at most."""

MOST_OWNERS = 32
"""Owners of ready loads that a claim looks at one by one. If there are more, a usual claim leaps from one to the next:
it begins behind the last, so few dead entries lie in its way."""


class Marks:
    """What a worker knows about the queue since its last look; nothing, while usual claims are as quick."""

    def __init__(self) -> None:
        self._owners: dict[Owner, int] | None = None
        self._snapshot = ""
        self._served: list[str] = []
        self._loads = 0
        self._surveyed_at = self._due_at = time.monotonic()
        self.surveys = 0

    @property
    def known(self) -> bool:
        """Whether claims go by what is known. It is so while many dead entries lie before the first ready load."""
        return self._owners is not None

    def claimed(self, taken: Claim) -> None:
        """Heed a usual claim: what it took is dead now."""
        self._loads += 1 + sum(1 if lease.batch_id else lease.load.size for lease in taken.leases)

    def is_due(self, domains: Sequence[str]) -> bool:
        """Whether to survey the queue now: what is known may be of no use any more, or of use by now."""
        now = time.monotonic()
        if self._owners is None:
            return self._loads >= LOADS_BETWEEN and now - self._surveyed_at >= SHORTEST
        return now >= self._due_at or self._served != domains

    def survey(self, domains: Sequence[str]) -> Plan[None]:
        """Look who owns ready loads in all domains that the worker serves, and how many dead entries lie there."""
        self._owners = None  # if there is no answer
        found = yield from survey(domains=domains, most=MOST_OWNERS)
        self.surveys += 1
        self._loads, self._surveyed_at = 0, time.monotonic()
        self._due_at = self._surveyed_at + min(max(found.entries * SECONDS_PER_ENTRY, SHORTEST), LONGEST)
        if found.entries - len(found.owners) > MANY and len(found.owners) <= MOST_OWNERS:
            self._owners, self._snapshot, self._served = dict(found.owners), found.snapshot, list(domains)

    def claim(
        self, *, worker: int, domains: Sequence[str], limit: int, turns: Mapping[str, int] | None, suspects: bool = True
    ) -> Plan[KnownClaim]:
        """Claim so many commands of these domains by what is known.

        If there is no answer, the next claim is a usual one: a crash of the server may have undone claims.
        """
        owners, self._owners = self._owners or {}, None
        taken = yield from claim_known(
            worker=worker,
            domains=domains,
            served=self._served,
            limit=limit,
            since=self._snapshot,
            owners=in_turn(owners, domains, turns or {}),
            suspects=suspects,
        )
        if not taken.refused:
            owners = {owner: hi for owner, hi in owners.items() if owner not in taken.first}
            owners |= {owner: hi for owner, hi in taken.first.items() if hi is not None}
            self._snapshot = taken.snapshot
        if len(owners) <= MOST_OWNERS:
            self._owners = owners
        return taken


def in_turn(known: Mapping[Owner, int], domains: Sequence[str], turns: Mapping[str, int]) -> dict[Owner, int]:
    """The owners of these domains, the next one in turn first: those behind the last that had a turn, then round."""
    asked = [owner for owner in known if owner.domain in domains]
    asked.sort(key=lambda owner: (owner.fair <= turns.get(owner.domain, BEFORE_ALL), owner.fair))
    return {owner: known[owner] for owner in asked}

"""When to claim a few commands beside those that stand in line already: a small batch must not wait for a large one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from busload.commands.execution import Lease, Leased

FEW = 16
"""Commands that begin before those in line, at most: of one claim for newcomers, or of one owner in any claim."""

SHORTEST_GAP, LONGEST_GAP = 0.01, 0.08
"""Seconds between two claims for newcomers. The gap grows while other workers are faster to take them."""

HEAD_START = 0.005
"""Seconds, at most, for which no other claim and no settlement is sent while newcomers are claimed: each of these gives
the server work for several milliseconds."""


class Newcomers:
    """Small batches and single commands that become ready while the queue holds more than this worker can take.

    A claim for them takes a millisecond or two, beside the usual one of up to a thousand commands or right before it.
    `claim` makes it, and returns how many commands it found. Until its answer is there, what else the
    worker has for the server waits in `let_go_first`.
    """

    def __init__(self, claim: Callable[[], Awaitable[int]]) -> None:
        self._claim = claim
        self._came = False
        self._under_way: asyncio.Future[None] | None = None
        self._gap, self._next_at = SHORTEST_GAP, 0.0

    def came(self) -> None:
        """Something became ready."""
        self._came = True

    @property
    def expected(self) -> bool:
        """Whether a claim for what became ready is still to come, or under way."""
        return self._came or self._under_way is not None

    async def let_go_first(self) -> None:
        """Wait for a moment until a claim for newcomers has its answer, if one is under way."""
        if self._under_way is not None:
            await asyncio.wait({self._under_way}, timeout=HEAD_START)

    async def once(self) -> float | None:
        """Claim a few commands if something became ready. Return the seconds until the gap has passed, or None."""
        now = time.monotonic()
        if not self._came:
            return None
        if now < self._next_at:
            return self._next_at - now
        self._came, self._next_at = False, now + self._gap
        answered = self._under_way = asyncio.get_running_loop().create_future()
        try:
            found = await self._claim()
        finally:
            self._under_way = None
            answered.set_result(None)
        self._gap = SHORTEST_GAP if found else min(2 * self._gap, LONGEST_GAP)
        self._next_at = now + self._gap
        return None


def split_off_few(leases: Sequence[Lease], leased: Sequence[Leased]) -> tuple[list[Leased], Sequence[Leased]]:
    """Of the commands of these leases, those of batches with few of them, and the others.

    Single commands of a domain count as one batch. If all batches have few, or all have many, nobody goes first. The
    line sees to it that nobody goes before what is more urgent.
    """
    sizes: Counter[tuple[str, UUID | None]] = Counter()
    for lease in leases:
        sizes[lease.domain, lease.batch_id] += lease.unsettled
    few = {owner for owner, size in sizes.items() if size <= FEW}
    if not few or len(few) == len(sizes):
        return [], leased
    first: list[Leased] = []
    others: list[Leased] = []
    for one in leased:
        (first if (one.lease.domain, one.lease.batch_id) in few else others).append(one)
    return first, others

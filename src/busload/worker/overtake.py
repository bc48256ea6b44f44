"""Who goes first in a worker's line: commands of owners who have few, before those of owners who have many.

An owner is a batch, a key of the application, or all commands that were sent by themselves: those who take turns.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from busload.commands.execution import Lease
from busload.postgres.waiting import Event
from busload.worker.line import LONGEST_TURN, SHORT_TURN, Line

Owner: TypeAlias = tuple[str, int]
"""Domain, and the number of the owner in it."""

FEW = 32
"""An owner with no more commands than that in a claim has few."""

SHARE = 4
"""One command in so many may overtake others, so that owners who have many go on as well."""

SMALLEST_GAP = 0.01
"""Seconds between two claims out of turn, at least."""

LONGEST_GAP = 0.08
"""Seconds between claims out of turn that bring nobody who overtakes, as when several workers hear of one batch."""


class Precedence:
    """Decides for each claim which of its leases overtake what stands in line."""

    def __init__(self) -> None:
        self._last: dict[Owner, int] = {}
        """How many commands of whom the last claim has brought, unless that was a claim out of turn."""
        self._finished, self._allowance = 0, FEW * SHARE

    def allowance(self, finished: int) -> int:
        """How many commands may overtake others by now. `finished` is how many have run so far."""
        self._allowance = min(self._allowance + finished - self._finished, FEW * SHARE)
        self._finished = finished
        return self._allowance // SHARE

    def decide(self, leases: Sequence[Lease], finished: int, *, out_of_turn: bool = False) -> bool:
        """Mark the leases that overtake; return whether there are any.

        Where all owners have few, or all have many, no lease overtakes. Half of the allowance is left to claims out of
        turn: else the last commands of many large batches would use it up.
        """
        brought: dict[Owner, int] = {}
        for lease in leases:
            owner = lease.domain, lease.fair
            brought[owner] = brought.get(owner, 0) + lease.running
        before = self._last
        if not out_of_turn:
            self._last = brought
        few = {owner for owner, count in brought.items() if count <= FEW and before.get(owner, 0) <= FEW}
        if not few or (len(few) == len(brought) and all(count <= FEW for count in before.values())):
            return False
        before_all = left = self.allowance(finished) - (0 if out_of_turn else FEW // 2)
        for lease in leases:
            if (lease.domain, lease.fair) in few and lease.running <= left:
                lease.overtakes = True
                left -= lease.running
        self._allowance -= SHARE * (before_all - left)
        return left < before_all


class Overtaker:
    """Looks for newcomers beside the claims, when they would wait behind what stands in line or is being claimed.

    `most` says how many commands such a claim may bring. `claim` makes it, and returns whether any of them overtakes.
    """

    def __init__(self, line: Line, most: Callable[[], int], claim: Callable[[int], Awaitable[bool]]) -> None:
        self._line, self._most, self._claim = line, most, claim
        self._newcomers = False
        self._next, self._gap = 0.0, SMALLEST_GAP
        self.due = Event()
        """Set when the next round should begin."""

    def hear(self) -> None:
        """Something became ready."""
        self._newcomers = True
        self.due.set()

    async def once(self) -> float | None:
        """Make a claim out of turn if it is wanted and time; return the seconds until then if it is only too soon."""
        if not self._newcomers:
            return None
        too_soon = self._next - time.monotonic()
        if too_soon > 0:
            return too_soon
        self._newcomers = False
        most = self._most()
        if most <= 0:
            return None
        began = time.monotonic()
        self._line.longest_turn = SHORT_TURN  # the event loop is needed for the claim, and each turn delays it
        try:
            useful = await self._claim(most)
        finally:
            self._line.longest_turn = LONGEST_TURN
        self._gap = SMALLEST_GAP if useful else min(2 * self._gap, LONGEST_GAP)
        # Where claims are slow, because many workers share a machine, they are rare.
        self._next = began + max(self._gap, 4 * (time.monotonic() - began))
        return None

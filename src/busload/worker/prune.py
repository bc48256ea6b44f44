"""Removes what ended long ago: one worker does it for all, a small transaction at a time."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

from busload.domain.counted import counted
from busload.domain.retention import Pruned
from busload.store.plan import Plan
from busload.store.prune import Pruning, take_turn

log = logging.getLogger("busload")

EVERY = timedelta(hours=1)
PAUSE = 0.05
"""Seconds between two transactions, so that the work of the others goes first."""


class Prune:
    """Each round is one transaction, so that a worker can stop in between: the next run goes on from there."""

    def __init__(
        self,
        perform: Callable[[Plan[Any]], Awaitable[Any]],
        keep_for: timedelta,
        archive: bool,
        every: timedelta = EVERY,
    ) -> None:
        self._perform, self._keep_for, self._archive, self._every = perform, keep_for, archive, every
        self._pruning: Pruning | None = None
        self._plans: Iterator[Plan[None]] = iter(())

    async def once(self) -> float:
        if self._pruning is None:
            seconds: float | None = await self._perform(take_turn(self._every))
            if seconds is not None:
                return max(1.0, seconds)
            self._pruning = Pruning(self._keep_for, archive=self._archive)
            self._plans = self._pruning.plans()
        plan = next(self._plans, None)
        if plan is not None:
            try:
                await self._perform(plan)
            except BaseException:
                self._plans = self._pruning.plans()
                raise
            return PAUSE
        self._report(self._pruning.pruned)
        self._pruning = None
        return self._every.total_seconds()

    def _report(self, pruned: Pruned) -> None:
        if pruned != Pruned():
            log.info(
                "%s %s and %s that ended more than %s ago",
                "Archived" if self._archive else "Removed",
                counted(pruned.commands, "command"),
                counted(pruned.batches, "batch", "batches"),
                self._keep_for,
            )

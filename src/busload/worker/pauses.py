"""Which of a worker's domains are paused: known before its first claim, and heeded from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from busload.store import pause
from busload.store.plan import perform_async
from busload.store.pool import AsyncPool

log = logging.getLogger("busload")


class Pauses:
    """Looks when it is woken by a notification, and from time to time, since one may be lost.

    From then on nothing of a paused domain starts here: a claim under way still brings its commands, and they go back.
    """

    def __init__(
        self,
        pool: AsyncPool,
        domains: Sequence[str],
        every: timedelta,
        on_change: Callable[[], None],
    ) -> None:
        self._pool, self._domains, self._every, self._on_change = pool, domains, every, on_change
        self.paused: frozenset[str] = frozenset()

    async def once(self) -> float:
        async with self._pool.connection() as conn:
            paused = await perform_async(conn, pause.paused(self._domains))
        if paused != self.paused:
            begun, ended = paused - self.paused, self.paused - paused
            self.paused = paused
            if begun:
                log.info("Paused: %s; what runs finishes, nothing new starts", ", ".join(sorted(begun)))
            if ended:
                log.info("Resumed: %s", ", ".join(sorted(ended)))
            self._on_change()
        return self._every.total_seconds()

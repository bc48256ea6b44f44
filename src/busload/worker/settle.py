"""Results on their way into the database: kept until the commit is known."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import psycopg
from psycopg_pool import AsyncConnectionPool

from busload.domain.execution import TROUBLESHOOTING, Leased, Transition, describe
from busload.settings import WorkerSettings
from busload.store import settle
from busload.store.connection import AsyncConnection
from busload.store.plan import perform_async
from busload.worker.coalescer import Coalescer, CoalescerStats
from busload.worker.held import Held

log = logging.getLogger("busload")


class Settlement:
    """Takes finished attempts and settles many of them in one statement."""

    def __init__(
        self,
        pool: AsyncConnectionPool[AsyncConnection],
        held: Held,
        settings: WorkerSettings,
        concurrency: int,
        on_settled: Callable[[], None],
    ) -> None:
        self._pool, self._held, self._on_settled = pool, held, on_settled
        self._deadline = settings.deadline
        self._results: Coalescer[Transition] = Coalescer(
            self._flush,
            max_size=settings.flush_size,
            max_interval=settings.flush_every,
            capacity=5 * max(settings.flush_size, concurrency),
        )
        self.settled = 0

    @property
    def stats(self) -> CoalescerStats:
        return self._results.stats

    async def put(self, transition: Transition) -> None:
        await self._results.put(transition)

    def settled_elsewhere(self, leased: Leased) -> None:
        """The handler's own transaction has settled this one."""
        self.settled += 1
        self._held.settled([leased])
        self._on_settled()

    def flush_soon(self) -> None:
        self._results.flush_soon()

    async def close(self, deadline: timedelta) -> int:
        """Settle the rest; returns how many results could not be settled before the deadline."""
        return len(await self._results.close(deadline))

    async def _flush(self, transitions: Sequence[Transition]) -> None:
        """A lost answer is safe to repeat. A result that cannot be stored is found by halving, and parked alone."""
        try:
            async with asyncio.timeout(self._deadline.total_seconds()), self._pool.connection() as conn:
                credited = await perform_async(conn, settle.settle(transitions, now=time.monotonic()))
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            if len(transitions) > 1:
                middle = len(transitions) // 2
                await self._flush(transitions[:middle])
                await self._flush(transitions[middle:])
            else:
                await self._park(transitions[0], error)
            return
        self.settled += len(credited)
        self._held.settled(transition.leased for transition in transitions)
        if len(credited) < len(transitions):
            log.warning("%d results came after their lease was lost and do not count", len(transitions) - len(credited))
        self._on_settled()

    async def _park(self, transition: Transition, error: psycopg.Error) -> None:
        if transition.reason == "RESULT_INVALID":
            raise error
        log.error("The result of execution %s cannot be stored: %s", transition.leased.execution_id, error)
        refused = Transition(transition.leased, TROUBLESHOOTING, describe(error), reason="RESULT_INVALID")
        refused.finished = transition.finished
        await self._flush([refused])

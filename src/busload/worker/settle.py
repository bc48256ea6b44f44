"""Results on their way into the database: kept until the commit is known."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from operator import attrgetter
from uuid import UUID

from psycopg_pool import AsyncConnectionPool

from busload.domain.execution import COMPLETED, TROUBLESHOOTING, Lease, Leased, Transition, describe
from busload.settings import WorkerSettings
from busload.store import settle
from busload.store.connection import AsyncConnection
from busload.store.plan import perform_async
from busload.worker.coalescer import Coalescer
from busload.worker.held import Held
from busload.worker.stats import CoalescerStats

log = logging.getLogger("busload")


ROOM_FOR_OTHERS = 0.7
"""The share of what it can hold that chunks fill up."""


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
            max_interval=timedelta(0) if settings.settle == "immediate" else settings.flush_every,
            capacity=capacity(settings, concurrency),
            merge=fold,
            weigh=_weigh,
            on_refused=self._park,
            name="settlement",
        )
        self._tails: set[UUID] = set()
        self.outcomes: Counter[str] = Counter()
        self.in_transactions = self.late = 0

    @property
    def stats(self) -> CoalescerStats:
        return self._results.stats

    @property
    def settled(self) -> int:
        """How many attempts have ended and count."""
        return self.outcomes.total()

    @property
    def room(self) -> int:
        """How many more results it could hold."""
        return self.stats.capacity - self.stats.waiting

    def offer(self, transition: Transition) -> bool:
        """Hand over a result if there is room for it; False if there is none, and then nothing has changed."""
        if not self._results.offer(transition):
            return False
        self._ran(transition.leased.lease)
        return True

    async def put(self, transition: Transition) -> None:
        """Hand over a result; waits while too many are held already."""
        if not self.offer(transition):
            await self._results.put(transition)
            self._ran(transition.leased.lease)

    async def put_many(self, transitions: Sequence[Transition]) -> None:
        """Hand over the results of a chunk, which may be more than it can hold: as many at a time as there is room for.

        Some of it stays free for others, so that a large chunk does not look like a settlement that cannot keep up.
        """
        for transition in transitions:
            while self.stats.fullness >= ROOM_FOR_OTHERS:
                self._results.flush_soon()
                await asyncio.sleep(0.005)
            await self.put(transition)

    def expect(self, leases: Iterable[Lease]) -> None:
        """Results of these will come. If they are the last of a batch, it need not wait for others to join them."""
        ours = self._held.unsettled_by_batch()
        self._tails &= ours.keys()
        for lease in leases:
            if lease.batch_id is not None and lease.remaining is not None and lease.remaining <= ours[lease.batch_id]:
                self._tails.add(lease.batch_id)

    def settled_elsewhere(self, leased: Leased, outcome: str = COMPLETED) -> None:
        """The handler's own transaction has settled this one."""
        self.outcomes[outcome] += 1
        self.in_transactions += 1
        self._held.settled([leased])
        self._ran(leased.lease)
        self._on_settled()

    def flush_soon(self) -> None:
        self._results.flush_soon()

    async def close(self, deadline: timedelta) -> int:
        """Settle the rest; returns how many results could not be settled before the deadline."""
        return len(await self._results.close(deadline))

    def _ran(self, lease: Lease) -> None:
        """One of its commands has come to a result. With the last of a batch there is nothing to wait for."""
        lease.running -= 1
        if lease.running == 0 and lease.batch_id in self._tails and not self._held.runs(lease.batch_id):
            self._tails.discard(lease.batch_id)
            self._results.flush_soon()

    async def _flush(self, transitions: Sequence[Transition]) -> None:
        """A lost answer is safe to repeat. What takes too long is halved; one alone has all the time of a lease."""
        deadline = self._deadline if len(transitions) > 1 else 4 * self._deadline
        async with asyncio.timeout(deadline.total_seconds()), self._pool.connection() as conn:
            credited = await perform_async(conn, settle.settle(transitions, now=time.monotonic(), again=False))
        self._held.settled(transition.leased for transition in transitions)
        if late := len(transitions) - len(credited):
            log.warning("%d results came after their lease was lost and do not count", late)
            self.late += late
            transitions = [transition for transition in transitions if transition.leased.id in credited]
        self.outcomes.update(map(attrgetter("outcome"), transitions))
        self._on_settled()

    async def _park(self, transition: Transition, error: Exception) -> None:
        """A result that cannot be stored becomes an error that can: the command waits for a person."""
        log.error("The result of execution %s cannot be stored: %s", transition.leased.execution_id, error)
        refused = Transition(transition.leased, TROUBLESHOOTING, describe(error), reason="RESULT_INVALID")
        refused.finished = transition.finished
        await self._flush([refused])


def capacity(settings: WorkerSettings, concurrency: int) -> int:
    """How many results may wait: more than a flush, one that gathers meanwhile, and all that run."""
    return 5 * max(settings.flush_size, concurrency)


def fold(transitions: Sequence[Transition]) -> Sequence[Transition]:
    """Of several results for one execution, a completion counts; without one, the first."""
    if len({id(t.leased) for t in transitions}) == len(transitions):
        return transitions
    folded: dict[int, Transition] = {}
    for transition in transitions:
        first = folded.setdefault(id(transition.leased), transition)
        if first.outcome != COMPLETED and transition.outcome == COMPLETED:
            folded[id(transition.leased)] = transition
    return list(folded.values())


def _weigh(transition: Transition) -> int:
    return len(transition.details) if transition.details is not None else 0

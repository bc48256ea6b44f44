"""Results on their way into the database: kept until the commit is known."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from datetime import timedelta
from functools import partial
from operator import attrgetter
from uuid import UUID

from psycopg.errors import LockNotAvailable

from busload.domain.counted import counted
from busload.domain.execution import COMPLETED, RESULT_INVALID, TROUBLESHOOTING, Lease, Leased, Transition, describe
from busload.settings import WorkerSettings
from busload.store import settle
from busload.store.outage import Outage
from busload.store.plan import perform_async
from busload.store.pool import AsyncPool
from busload.worker.coalescer import Coalescer, refuse_cancelled
from busload.worker.held import Held
from busload.worker.stats import CoalescerStats

log = logging.getLogger("busload")

Flush = Callable[[Sequence[Transition]], Awaitable[None]]


ROOM_FOR_OTHERS = 0.7
"""The share of what it can hold that chunks fill up."""

PATIENCE = 0.2
"""Seconds that a flush waits for a row that others hold. Flushes of other workers take milliseconds."""

LONGEST_TURN, SHORTEST_TURN = 1.0, 0.05
"""Seconds that results wait for a batch which others hold, before those of the next such batch have their turn."""

MOST_HELD_UP = 10
"""How many times the capacity may wait for one batch that somebody holds, before that holds up the others."""


class Settlement:
    """Takes finished attempts and settles many of them in one statement.

    Results of a batch that somebody else holds, as an open transaction does that has sent a command into it, wait in a
    line of their own until it is free; all others go on.
    """

    def __init__(
        self,
        pool: AsyncPool,
        held: Held,
        settings: WorkerSettings,
        concurrency: int,
        on_settled: Callable[[], None],
        outage: Outage,
    ) -> None:
        self._pool, self._held, self._on_settled, self._outage = pool, held, on_settled, outage
        self._deadline = settings.deadline
        self._capacity, self._flush_size = capacity(settings, concurrency), settings.flush_size
        self._results: Coalescer[Transition] = Coalescer(
            self._flush,
            max_size=settings.flush_size,
            max_interval=timedelta(0) if settings.settle == "immediate" else settings.flush_every,
            capacity=self._capacity,
            merge=fold,
            weigh=_weigh,
            on_refused=partial(self._park, self._flush),
            name="settlement",
            outage=outage,
        )
        self._held_up: dict[UUID, Coalescer[Transition]] = {}
        self._turn = asyncio.Lock()
        self._closing: set[asyncio.Task[list[Transition]]] = set()
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

    @property
    def waiting(self) -> int:
        """Results that are not in the database yet."""
        return self.stats.waiting + self.held_up

    @property
    def held_up(self) -> int:
        """Results among them that wait for batches which others hold."""
        return sum(line.stats.waiting for line in self._held_up.values()) if self._held_up else 0

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

    def superseded(self, leased: Leased) -> None:
        """The handler's own transaction found that the lease is gone: this attempt has ended and counts for nothing."""
        self._held.refused(leased)
        self._ran(leased.lease)

    def flush_soon(self) -> None:
        self._results.flush_soon()

    async def close(self, deadline: timedelta) -> int:
        """Settle the rest; returns how many results could not be settled before the deadline."""
        began = time.monotonic()
        left = len(await self._results.close(deadline))
        rest = max(timedelta(0), deadline - timedelta(seconds=time.monotonic() - began))
        lines = list(self._held_up.values())
        self._held_up.clear()
        left += sum(map(len, await asyncio.gather(*(line.close(rest) for line in lines))))
        await asyncio.gather(*self._closing)
        return left

    def _ran(self, lease: Lease) -> None:
        """One of its commands has come to a result. With the last of a batch there is nothing to wait for."""
        lease.running -= 1
        if lease.running == 0 and lease.batch_id in self._tails and not self._held.runs(lease.batch_id):
            self._tails.discard(lease.batch_id)
            self._results.flush_soon()

    async def _flush(self, transitions: Sequence[Transition]) -> None:
        """Settle what can be settled; what others hold up goes on by itself."""
        if self._held_up:
            self._close_empty_lines()
            transitions = await self._set_aside(transitions, self._held_up.keys())
        transitions = [one for one in transitions if not one.held_up]  # by a flush that failed for another reason
        try:
            if transitions:
                await self._settle(transitions, min(PATIENCE, self._deadline.total_seconds() / 2))
        except LockNotAvailable:
            async with self._pool.connection() as conn:
                locked = await perform_async(conn, settle.locked(transitions))
            rest = await self._set_aside(transitions, locked)
            if len(rest) == len(transitions):
                raise
            await self._flush(rest)

    async def _set_aside(self, transitions: Sequence[Transition], locked: Set[UUID]) -> list[Transition]:
        """Let those of these leases and batches wait by themselves; returns the others."""
        rest: list[Transition] = []
        for transition in transitions:
            lease = transition.leased.lease
            if lease.batch_id not in locked and lease.lease_id not in locked:
                rest.append(transition)
            elif not transition.held_up:
                transition.held_up = True
                await self._line(lease.batch_id or lease.lease_id).put(transition)
        if len(rest) < len(transitions):
            self._on_settled()  # there is room for others
        return rest

    def _line(self, key: UUID) -> Coalescer[Transition]:
        """Where results of a batch wait that others hold; of commands without one, by their lease."""
        line = self._held_up.get(key)
        if line is None:
            log.warning(
                "Another transaction holds batch %s: its results wait until that ends, all others go on. If it takes "
                "long, pg_stat_activity shows which one is idle in transaction.",
                key,
            )
            flush = partial(self._flush_in_turn, key)
            line = self._held_up[key] = Coalescer(
                flush,
                max_size=self._flush_size,
                max_interval=timedelta(0),
                capacity=MOST_HELD_UP * self._capacity,
                weigh=_weigh,
                on_refused=partial(self._park, flush),
                name=f"settlement of {key}",
                outage=self._outage,
            )
        return line

    def _close_empty_lines(self) -> None:
        for key in [key for key, line in self._held_up.items() if not line.stats.waiting]:
            closing = asyncio.create_task(self._held_up.pop(key).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _flush_in_turn(self, key: UUID, transitions: Sequence[Transition]) -> None:
        """Wait for a batch that others hold, one such batch at a time: all of them together take one connection."""
        while True:
            async with self._turn:
                turn = max(SHORTEST_TURN, LONGEST_TURN / len(self._held_up or [key]))
                try:
                    await self._settle(transitions, min(turn, self._deadline.total_seconds() / 2))
                    return
                except LockNotAvailable:
                    refuse_cancelled()
                    results = counted(len(transitions), "result")
                    log.debug("%s for batch %s must wait: others hold it", results, key)

    async def _settle(self, transitions: Sequence[Transition], patience: float) -> None:
        """A lost answer is safe to repeat. What takes too long is halved; one alone has all the time of a lease."""
        deadline = self._deadline if len(transitions) > 1 else 4 * self._deadline
        plan = settle.settle(transitions, now=time.monotonic(), again=False, patience=int(1000 * patience))
        async with asyncio.timeout(deadline.total_seconds()), self._pool.connection() as conn:
            credited = await perform_async(conn, plan)
        self._held.settled(transition.leased for transition in transitions)
        if late := len(transitions) - len(credited):
            log.warning("Did not count %s, which came after the lease was lost", counted(late, "result"))
            self.late += late
            for transition in transitions:
                if transition.leased.id not in credited:
                    self._held.refused(transition.leased)
            transitions = [transition for transition in transitions if transition.leased.id in credited]
        self.outcomes.update(map(attrgetter("outcome"), transitions))
        self._on_settled()

    async def _park(self, flush: Flush, transition: Transition, error: Exception) -> None:
        """A result that cannot be stored becomes an error that can: the command waits for a person."""
        log.error("The result of execution %s cannot be stored: %s", transition.leased.execution_id, error)
        refused = Transition(transition.leased, TROUBLESHOOTING, describe(error), reason=RESULT_INVALID)
        refused.finished = transition.finished
        await flush([refused])


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

"""Results on their way into the database: kept until the commit is known."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from datetime import timedelta
from functools import partial
from typing import TypeAlias
from uuid import UUID

import psycopg
from psycopg.errors import LockNotAvailable

from busload.commands import settle
from busload.commands.execution import (
    CANCELED,
    COMPLETED,
    FAILED_ATTEMPT,
    RESULT_INVALID,
    TROUBLESHOOTING,
    Failed,
    Lease,
    Leased,
    Outcome,
    Stopped,
    Succeeded,
    Transition,
    Unreadable,
    decide,
    deciding,
    describe,
    failure,
)
from busload.commands.payload import UndecodableError, encode
from busload.commands.retry import RetryPolicy
from busload.commands.wording import counted
from busload.errors import RateLimitedError, SnoozeError, SupersededError, TransientCommandError
from busload.handlers.registry import Handler
from busload.limits import rate
from busload.limits.limiter import Entered, LimitedError, PermitLostError, PostponedError, SnoozedError
from busload.limits.rate import Late
from busload.postgres.outage import Outage
from busload.postgres.plan import perform_async
from busload.postgres.pool import AsyncPool
from busload.postgres.waiting import TimeLimit
from busload.settings import PayloadLimits, WorkerSettings
from busload.statistics.attempts import OUTCOME, Attempts, count
from busload.worker.coalescer import Coalescer, refuse_cancelled
from busload.worker.held_leases import HeldLeases
from busload.worker.shared import Shared
from busload.worker.stats import CoalescerStats

log = logging.getLogger("busload")

Failure: TypeAlias = Failed | Stopped | Unreadable

Flush = Callable[[Sequence[Transition]], Awaitable[int]]

FAILURES = frozenset((FAILED_ATTEMPT, TROUBLESHOOTING))
"""Outcomes that say that something does not work. FAILED is none: a handler has said no on purpose."""

ROOM_FOR_OTHERS = 0.7
"""The share of the capacity that the results of a large chunk may fill: the rest is for single commands."""

NOT_BEGUN = encode({"message": "It was canceled before it had begun."})

PATIENCE = 0.2
"""Seconds that a flush waits for a row that others hold. Flushes of other workers take milliseconds."""

LONGEST_TURN, SHORTEST_TURN = 1.0, 0.05
"""Seconds that results wait for a batch that others hold, before the next such batch has its turn."""

MOST_HELD_UP = 10
"""So many times the capacity may wait for one batch that somebody holds. Beyond that, all other results wait too."""


class Settlement:
    """Takes finished attempts and settles many of them in one statement.

    Another transaction may hold a batch, because it has sent a command into the batch and is still open. The results of
    that batch then wait in a line of their own; all other results go on. `on_settled` is called when results were
    settled; its argument says whether somebody has asked for room.
    """

    def __init__(
        self,
        pool: AsyncPool,
        held: HeldLeases,
        settings: WorkerSettings,
        on_settled: Callable[[bool], None],
        outage: Outage,
    ) -> None:
        self._pool, self._held, self._on_settled, self._outage = pool, held, on_settled, outage
        self._deadline = settings.deadline
        self._capacity, self._flush_size = capacity(settings), settings.flush_size
        every = timedelta(0) if settings.settle == "immediate" else settings.flush_every
        self._results = self._coalescer("settlement", self._flush, self._capacity, every)
        self._held_up: dict[UUID, Coalescer[Transition]] = {}
        self._turn = asyncio.Lock()
        self._last_batches: set[UUID] = set()
        self._room_wanted = False
        self.heed_holds: Callable[[Set[UUID]], None] = lambda held: None
        """Told of batches that are held, before anything may begin that waits for their results to count."""
        self.let_newcomers_go_first: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        """Waits for a moment while newcomers are claimed."""
        self.outcomes: Counter[str] = Counter()
        self.attempts = Attempts()
        self.in_transactions = self.late = 0
        self.failures_in_row, self.failed_at = 0, 0.0
        """How many of the last attempts have failed, one after the other, and when the last of them was settled."""
        self.on_ended: Callable[[Iterable[Leased]], None] | None = None
        self.on_failed: Callable[[Sequence[Transition]], None] | None = None
        """Called with the commands of each settlement, if somebody wants to know."""

    @property
    def stats(self) -> CoalescerStats:
        return self._results.stats

    @property
    def settled(self) -> int:
        """How many attempts have a result in the database."""
        return self.outcomes.total()

    @property
    def room(self) -> int:
        """How many more results it could hold."""
        return self.stats.capacity - self.stats.waiting

    @property
    def waiting(self) -> int:
        """Results that are not in the database yet."""
        return self.stats.waiting + sum(line.stats.waiting for line in self._held_up.values())

    def offer(self, transition: Transition) -> bool:
        """Hand over a result if there is room. If not, return False and change nothing."""
        if not self._results.offer(transition):
            return False
        lease = transition.leased.lease
        lease.running -= 1
        if lease.running == 0:
            self._ran_all(lease)
        return True

    async def put(self, transition: Transition) -> None:
        """Hand over a result; wait while there is no room."""
        if not self.offer(transition):
            await self._results.put(transition)
            self._ran(transition.leased.lease)

    async def put_many(self, transitions: Sequence[Transition]) -> None:
        """Hand over the results of a chunk, which may exceed the capacity: as many at a time as there is room for.

        Some room stays free for others, so that a large chunk does not look like a settlement that cannot keep up.
        """
        for transition in transitions:
            while self.stats.fullness >= ROOM_FOR_OTHERS:
                self._results.flush_soon()
                await asyncio.sleep(0.005)
            await self.put(transition)

    def expect(self, leases: Iterable[Lease]) -> None:
        """Note whose results will come. The last results of a batch need not wait until others join them."""
        ours = self._held.unsettled_by_batch()
        self._last_batches &= ours.keys()
        for lease in leases:
            if lease.batch_id is not None and lease.remaining is not None and lease.remaining <= ours[lease.batch_id]:
                self._last_batches.add(lease.batch_id)

    async def look_for_holds(self, transitions: Sequence[Transition]) -> None:
        """Look whether batches of these results, which are in the database, are held: their budget may be exceeded."""
        if not self._held.has_budgets or not any(one.leased.lease.has_budget for one in transitions):
            return
        try:
            async with asyncio.timeout(self._deadline.total_seconds()), self._pool.connection() as conn:
                held = await perform_async(conn, settle.held_batches(transitions))
        except (psycopg.Error, TimeoutError):  # rather hand back what is not held than begin what is
            leases = (transition.leased.lease for transition in transitions)
            held = frozenset(lease.batch_id for lease in leases if lease.has_budget and lease.batch_id is not None)
        if held:
            self.heed_holds(held)

    def settled_elsewhere(self, transition: Transition) -> None:
        """The handler's own transaction has settled this one."""
        leased, outcome = transition.leased, transition.outcome
        self.outcomes[outcome] += 1
        self.attempts.add([transition], [outcome])
        self._count_failures((outcome,))
        self.in_transactions += 1
        self._held.settled([leased])
        self._ran(leased.lease)
        if self.on_ended is not None:
            self.on_ended([leased])
        if self.on_failed is not None:
            self.on_failed([transition])
        self.tell_settled()

    def superseded(self, leased: Leased) -> None:
        """The handler's own transaction found that the lease is gone: this attempt counts for nothing."""
        self._held.refused(leased)
        self._ran(leased.lease)

    def ask_for_room(self) -> None:
        """Let `on_settled` say when there is room for more results."""
        self._room_wanted = True

    def flush_soon(self) -> None:
        self._results.flush_soon()

    async def close(self, deadline: timedelta) -> int:
        """Settle the rest; returns how many results could not be settled before the deadline."""
        time_limit = TimeLimit(deadline.total_seconds())
        left = len(await self._results.close(deadline))
        rest = timedelta(seconds=time_limit.left)
        lines = list(self._held_up.values())
        self._held_up.clear()
        return left + sum(map(len, await asyncio.gather(*(line.close(rest) for line in lines))))

    def _coalescer(self, name: str, flush: Flush, capacity: int, every: timedelta) -> Coalescer[Transition]:
        return Coalescer(
            flush,
            max_size=self._flush_size,
            max_interval=every,
            capacity=capacity,
            merge=fold,
            weigh=_weigh,
            on_refused=partial(self._park, flush),
            name=name,
            outage=self._outage,
        )

    def tell_settled(self) -> None:
        """Say that there is room for others."""
        wanted, self._room_wanted = self._room_wanted, False
        self._on_settled(wanted)

    def _ran(self, lease: Lease) -> None:
        lease.running -= 1
        if lease.running == 0:
            self._ran_all(lease)

    def _ran_all(self, lease: Lease) -> None:
        """Every command of this lease has a result. After the last result of a batch nothing more will come: flush."""
        if lease.batch_id in self._last_batches and not self._held.runs(lease.batch_id):
            self._last_batches.discard(lease.batch_id)
            self._results.flush_soon()

    async def _flush(self, transitions: Sequence[Transition]) -> int:
        """Settle these, except for those whose batch others hold; returns how many now count."""
        if self._held_up:
            for key in [key for key, line in self._held_up.items() if not line.stats.waiting]:
                await self._held_up[key].close()
                del self._held_up[key]
            transitions = await self._set_aside(transitions, self._held_up.keys())
        transitions = [one for one in transitions if not one.held_up]  # by a flush that failed for another reason
        try:
            if not transitions:
                return 0
            return await self._settle(transitions, min(PATIENCE, self._deadline.total_seconds() / 2))
        except LockNotAvailable:
            async with self._pool.connection() as conn:
                locked = await perform_async(conn, settle.locked(transitions))
            rest = await self._set_aside(transitions, locked)
            if len(rest) == len(transitions):
                raise
            return await self._flush(rest)

    async def _set_aside(self, transitions: Sequence[Transition], locked: Set[UUID]) -> list[Transition]:
        """Let the results of locked leases and batches wait in lines of their own; return the others."""
        rest: list[Transition] = []
        for transition in transitions:
            lease = transition.leased.lease
            if lease.batch_id not in locked and lease.lease_id not in locked:
                rest.append(transition)
            elif not transition.held_up:
                transition.held_up = True
                self.stats.apart += 1
                await self._line(transition.leased).put(transition)
        if len(rest) < len(transitions):
            self.tell_settled()  # there is room for others
        return rest

    def _line(self, leased: Leased) -> Coalescer[Transition]:
        """Where the results of a batch wait that others hold; without a batch, the results of a lease."""
        batch_id, lease_id = leased.lease.batch_id, leased.lease.lease_id
        key = batch_id or lease_id
        line = self._held_up.get(key)
        if line is None:
            what = f"batch {batch_id}" if batch_id is not None else f"the lease of command {leased.command_id}"
            log.warning(
                "Another transaction holds %s: its results wait until that ends, all others go on. If it takes "
                "long, pg_stat_activity shows which one is idle in transaction.",
                what,
            )
            flush = partial(self._flush_in_turn, what)
            line = self._coalescer(f"settlement of {what}", flush, MOST_HELD_UP * self._capacity, timedelta(0))
            self._held_up[key] = line
        return line

    async def _flush_in_turn(self, what: str, transitions: Sequence[Transition]) -> int:
        """Wait for what others hold, one batch or lease at a time: all of them together take one connection."""
        while True:
            async with self._turn:
                turn = max(SHORTEST_TURN, LONGEST_TURN / max(1, len(self._held_up)))
                try:
                    written = await self._settle(transitions, min(turn, self._deadline.total_seconds() / 2))
                    self.stats.written_apart(len(transitions), written)
                    return written
                except LockNotAvailable:
                    refuse_cancelled()
                    results = counted(len(transitions), "result")
                    log.debug("%s must wait: others hold %s", results, what)

    async def _settle(self, transitions: Sequence[Transition], patience: float) -> int:
        """Settle these, and return how many of the results count. Safe to repeat after a lost answer.

        A flush that takes too long is halved; a single result has more time.
        """
        await self.let_newcomers_go_first()
        deadline = self._deadline if len(transitions) > 1 else 4 * self._deadline
        plan = settle.settle(transitions, now=time.monotonic(), again=False, patience=int(1000 * patience))
        async with asyncio.timeout(deadline.total_seconds()), self._pool.connection() as conn:
            credited = await perform_async(conn, plan)
        await asyncio.sleep(0)  # what comes next takes a millisecond, as did the answer: let others in between
        await self.look_for_holds(transitions)
        self._held.settled(transition.leased for transition in transitions)
        if self.on_ended is not None:
            self.on_ended(transition.leased for transition in transitions)
        if late := len(transitions) - len(credited):
            log.warning("Did not count %s, which came after the lease was lost", counted(late, "result"))
            self.late += late
            for transition in transitions:
                if transition.leased.id not in credited:
                    self._held.refused(transition.leased)
            transitions = [transition for transition in transitions if transition.leased.id in credited]
        if transitions:
            outcomes = list(map(OUTCOME, transitions))
            count(self.outcomes, outcomes)
            self.attempts.add(transitions, outcomes)
            self._count_failures(outcomes)
            if self.on_failed is not None:
                self.on_failed(transitions)
        self.tell_settled()
        return len(transitions)

    def _count_failures(self, outcomes: Sequence[str]) -> None:
        """Only those after the last attempt that has not failed count: most often that is the last of all."""
        if outcomes and outcomes[-1] in FAILURES:
            since = next((n for n, outcome in enumerate(reversed(outcomes)) if outcome not in FAILURES), None)
            self.failures_in_row = self.failures_in_row + len(outcomes) if since is None else since
            self.failed_at = time.monotonic()
        elif outcomes:
            self.failures_in_row = 0

    async def _park(self, flush: Flush, transition: Transition, error: Exception) -> None:
        """A result that cannot be stored becomes an error that can: the command waits for a person."""
        log.error("The result of execution %s cannot be stored: %s", transition.leased.execution_id, error)
        refused = Transition(transition.leased, TROUBLESHOOTING, describe(error), reason=RESULT_INVALID)
        refused.finished = transition.finished
        await flush([refused])


class Outcomes:
    """Records how attempts end: with a result, with an error, or put off without counting.

    The executor hands the result of a plain handler that has returned to the settlement directly: that is quicker.
    """

    def __init__(self, shared: Shared, settlement: Settlement) -> None:
        self._shared, self._settlement, self._limiter = shared, settlement, shared.limiter
        self._failures, self._limits = shared.failures, shared.bus.settings.limits.payload
        self._postponed: Coalescer[tuple[Leased, PostponedError]] = Coalescer(
            self._flush_postponed,
            max_size=1000,
            max_interval=timedelta(milliseconds=10),
            capacity=20_000,
            name="postponement",
            outage=shared.outage,
        )

    async def complete(self, transition: Transition, *, settled: bool = False) -> None:
        """A handler has returned; `settled` says that its own transaction has recorded that."""
        if settled:
            await self._settlement.look_for_holds([transition])
            self._settlement.settled_elsewhere(transition)
        else:
            await self._put(transition)
        if transition.reason is not None:
            self._failures.report_result(transition)

    async def fail(self, leased: Leased, handler: Handler, error: BaseException, entered: Entered | None) -> None:
        """A handler has raised. If the receiver of its calls wants fewer, the command waits and burns no attempt."""
        refusal, limit = deciding(error), handler.rate_limit
        was_called = limit is None or entered is not None  # else the error is that of the limit's own `by`
        if isinstance(refusal, SnoozeError) and was_called and not leased.canceled:
            await self.postpone([leased], SnoozedError(refusal.after))
        elif isinstance(refusal, RateLimitedError) and was_called and not leased.canceled:
            about = (leased.lease.domain, leased.command_type, None)
            await self.postpone([leased], await self._limiter.refused(limit, *about, refusal, entered))
        else:
            await self._decide(leased, failure(leased, error), handler.retry)

    async def fail_unreadable(self, leased: Leased, error: UndecodableError) -> None:
        """Nobody can decode its data."""
        await self._decide(leased, Unreadable(error), RetryPolicy())

    async def give_up(self, leased: Leased, error: Exception) -> None:
        """The error is the worker's own, not the handler's: the command must not hang."""
        log.error("Could not record how execution %s ended", leased.execution_id, exc_info=error)
        unrecorded = TransientCommandError(f"The outcome could not be recorded: {type(error).__name__}.")
        await self._decide(leased, failure(leased, unrecorded), RetryPolicy())

    async def stop(self, leased: Sequence[Leased]) -> None:
        """These were canceled before they have begun."""
        self._shared.permits.give_up(leased)
        for one in leased:
            one.started = time.monotonic()
            await self._put(Transition(one, CANCELED, NOT_BEGUN))

    async def drop(self, leased: Leased, why: SupersededError | PostponedError) -> None:
        """The attempt counts for nothing."""
        if isinstance(why, PostponedError):
            await self.postpone([leased], why)
        else:
            log.warning("Execution %s was superseded: %s", leased.execution_id, why)
            self._settlement.superseded(leased)

    async def postpone(self, leased: Sequence[Leased], postponed: PostponedError) -> None:
        """Let these come back when their time has come, as the same attempt. They are not ours any more."""
        self._shared.postponed += 1
        if isinstance(postponed, LimitedError):
            return  # they wait already
        if isinstance(postponed, PermitLostError):
            self._shared.permits.lost(leased)
            return
        for one in leased:
            await self._postponed.put((one, postponed))
            one.lease.running -= 1

    async def close(self, deadline: timedelta) -> None:
        """Write what was postponed. What cannot be written in time is handed back with all else that is held."""
        await self._postponed.close(deadline)

    async def _flush_postponed(self, late: Sequence[tuple[Leased, PostponedError]]) -> None:
        rows = [Late(leased.lease, leased.id, postponed.seconds, postponed.limit) for leased, postponed in late]
        async with asyncio.timeout(self._shared.settings.deadline.total_seconds()):
            await self._shared.perform(rate.postpone(rows))
        self._shared.held.settled(leased for leased, _ in late)
        self._settlement.tell_settled()

    async def _decide(self, leased: Leased, outcome: Outcome, retry: RetryPolicy) -> None:
        transition = decide(leased, outcome, retry, self._limits)
        if not isinstance(outcome, Succeeded):
            self._failures.report(transition, outcome.error)
        await self._put(transition)

    async def _put(self, transition: Transition) -> None:
        transition.finished = time.monotonic()
        await self._settlement.put(transition)


def capacity(settings: WorkerSettings) -> int:
    """How many results may wait: those of a flush, those that gather meanwhile, and those of all that runs."""
    return 5 * max(settings.flush_size, settings.concurrency)


def fold(transitions: Sequence[Transition]) -> Sequence[Transition]:
    """Keep one result for each execution: a completion if there is one, or the first result."""
    if len({id(t.leased) for t in transitions}) == len(transitions):
        return transitions
    folded: dict[int, Transition] = {}
    for transition in transitions:
        first = folded.setdefault(id(transition.leased), transition)
        if first.outcome != COMPLETED and transition.outcome == COMPLETED:
            folded[id(transition.leased)] = transition
    return list(folded.values())


def end_failed(one: Leased, outcome: Failure, handler: Handler, described: str | None = None) -> Transition:
    """The result of a command that did not succeed."""
    one.started = one.started or time.monotonic()
    transition = decide(one, outcome, handler.retry, PayloadLimits(), described)
    transition.finished = time.monotonic()
    return transition


def _weigh(transition: Transition) -> int:
    return len(transition.details) if transition.details is not None else 0

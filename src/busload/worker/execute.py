"""Command, handler, outcome: runs what was claimed, as many at a time as there are slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from psycopg_pool import AsyncConnectionPool

from busload.bus import CommandBus
from busload.domain.buffer import EXHAUSTED
from busload.domain.bulk import Group
from busload.domain.command import Command
from busload.domain.execution import (
    COMPLETED,
    Failed,
    Leased,
    Outcome,
    Succeeded,
    Transition,
    Unreadable,
    complete,
    decide,
    deciding,
)
from busload.domain.payload import Undecodable
from busload.domain.retry import RetryPolicy
from busload.errors import RateLimited, Superseded, TransientCommandError
from busload.handlers import Handler
from busload.store import settle
from busload.store.connection import AsyncConnection
from busload.store.plan import Plan
from busload.worker.calls import Calls, command_of, failure, timeout, within
from busload.worker.chunks import ChunkRunner, Gathered, Gatherer
from busload.worker.context import HandlerContext, SyncHandlerContext
from busload.worker.distribute import Tallies
from busload.worker.failures import FailureLog
from busload.worker.groups import GroupRunner, exhausted_group
from busload.worker.held import Held
from busload.worker.limit import Entered, Limiter, Postponed
from busload.worker.settle import Settlement
from busload.worker.threads import Threads

log = logging.getLogger("busload")

LONGEST_BREATH = 0.001
"""Seconds after which handlers that never wait for anything let the claim and the settlement have their turn."""


class Executor:
    """Slots that take commands from a line: a slot costs a fifth of a task per command.

    More commands may stand in line than there are slots. `low_water` is set by whoever fills the line: as soon as no
    more than that are in hand, `on_free` is called.
    """

    def __init__(
        self,
        bus: CommandBus,
        transactions: AsyncConnectionPool[AsyncConnection],
        threads: Threads,
        held: Held,
        settlement: Settlement,
        concurrency: int,
        on_free: Callable[[], None],
        limiter: Limiter,
        tallies: Tallies,
    ) -> None:
        self._bus, self._transactions, self._threads = bus, transactions, threads
        self._held, self._settlement = held, settlement
        self._concurrency, self._on_free, self._limiter = concurrency, on_free, limiter
        self._limits = bus.settings.limits.payload
        self._line: deque[Leased | Gathered] = deque()
        self._resting: list[asyncio.Future[None]] = []
        self._slots: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._breathed = self._busy = self._busy_since = 0.0
        self._stopping = False
        self.in_hand = 0
        self.finished = 0
        self.low_water = concurrency - 1
        self.rests = limiter.rests
        self.calls = Calls(threads, lambda: self._stopping)
        self._failures = failures = FailureLog()
        self.gatherer = Gatherer(bus.handlers, self.take, on_free, failures)
        self._chunks = ChunkRunner(
            bus, self.calls, transactions, threads, limiter, settlement, self.gatherer, failures, self._postpone
        )
        self._groups = GroupRunner(bus, self.calls, transactions, threads, limiter, settlement, tallies, failures)

    @property
    def busy(self) -> float:
        """Seconds in which there was something in hand."""
        return self._busy + (time.monotonic() - self._busy_since if self.in_hand else 0.0)

    @property
    def in_line(self) -> int:
        return len(self._line)

    def waited(self, now: float) -> float | None:
        """How long the first in line has waited for a slot; None if nobody stands there."""
        first = next((one for one in self._line if isinstance(one, Leased)), None)
        return None if first is None else now - first.lease.claimed

    def stuck_chunks(self, now: float, patience: float) -> list[Gathered]:
        """Chunks that have waited for a slot for longer than that; they do not stand in line any more."""
        waiting = [one for one in self._line if isinstance(one, Gathered) and now - one.lease.claimed > patience]
        if waiting:
            stuck = set(map(id, waiting))
            others = [one for one in self._line if id(one) not in stuck]
            self._line.clear()
            self._line.extend(others)
            self._fewer(len(waiting))
        return waiting

    def start(self) -> None:
        self._slots = [asyncio.create_task(self._slot(), name=f"busload-slot-{n}") for n in range(self._concurrency)]

    def take(self, leased: Sequence[Leased | Gathered]) -> None:
        if leased and self.in_hand == 0:
            self._idle.clear()
            self._busy_since = time.monotonic()
        self._line.extend(leased)
        self.in_hand += len(leased)
        self._wake_two()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def abandon_line(self) -> list[Leased | Gathered]:
        """Do not start what has not started, and return it: it is to be handed back."""
        abandoned = list(self._line)
        self._line.clear()
        if abandoned:
            self._fewer(len(abandoned))
        return abandoned

    async def stop(self, within: float) -> None:
        """Give up what still runs; it is not settled, so it will be handed back."""
        self._stopping = True
        for slot in self._slots:
            slot.cancel()
        if self._slots:
            _, stubborn = await asyncio.wait(self._slots, timeout=within)
            if stubborn:
                log.warning("%d handlers do not heed that they were cancelled", len(stubborn))

    async def close(self) -> None:
        """Let go of what groups were read and ended with, and sum up what the log has only counted."""
        await self._groups.close()
        self._failures.close()

    async def _slot(self) -> None:
        line = self._line
        while not self._stopping:  # a handler may have swallowed the cancellation
            if not line:
                await self._rest()
                self._wake_two()
                continue
            leased = line.popleft()
            try:
                if not leased.lease.lost:
                    await (self._run(leased) if isinstance(leased, Leased) else self._chunks.run(leased))
            except Exception as error:  # ours, not the handler's: the slot must live, and the command must not hang
                log.exception("Could not say how execution %s ended", leased.execution_id)
                if not isinstance(leased, Leased):
                    continue
                last_resort = TransientCommandError(f"The outcome could not be told: {type(error).__name__}.")
                await self._settlement.put(self._decide(leased, Failed(last_resort), RetryPolicy()))
            finally:
                self.finished += 1
                self._fewer(1)
            if leased.started - self._breathed > LONGEST_BREATH:
                self._breathed = leased.started
                await asyncio.sleep(0)

    def _wake_two(self) -> None:
        """Two slots that wake two more each are soon all; where handlers wait for nothing, the first few do it all."""
        for _ in range(min(2, len(self._line), len(self._resting))):
            wake = self._resting.pop()
            if not wake.done():  # else its slot was stopped
                wake.set_result(None)

    async def _rest(self) -> None:
        wake = asyncio.get_running_loop().create_future()
        self._resting.append(wake)
        await wake

    def _fewer(self, count: int) -> None:
        self.in_hand -= count
        if self.in_hand == 0:
            self._busy += time.monotonic() - self._busy_since
            self._idle.set()
        if self.in_hand <= self.low_water:
            self.low_water = -1  # said once; whoever fills the line sets it again
            self._on_free()

    async def _run(self, leased: Leased) -> None:
        leased.started = time.monotonic()
        handler = self._bus.handlers.find(leased.lease.domain, leased.command_type)
        entered: Entered | None = None
        try:
            if handler is None:  # only one that was claimed by other means than Claimer
                raise TransientCommandError(f"No handler for {leased.command_type!r}.", code="NO_HANDLER")
            if handler.gathering is not None:
                return await self._chunks.run(self.gatherer.alone(leased, handler))
            if handler.buffer is not None:
                transition = await self._groups.run(leased, handler)
            else:
                if handler.rate_limit is not None:
                    entered = await self._enter(leased, handler)
                    if leased.lease.lost:
                        return None
                transition = await self._execute(leased, handler, entered)
        except Postponed as postponed:
            return await self._postpone([leased], postponed)
        except Superseded as superseded:
            log.warning("Execution %s was superseded: %s", leased.execution_id, superseded)
            return None
        except Undecodable as error:
            transition = self._decide(leased, Unreadable(error), RetryPolicy())
        except asyncio.CancelledError as error:
            if self._stopping:
                raise
            transition = self._decide(leased, failure(leased, error), _retry(handler))
        except BaseException as error:
            # Also KeyboardInterrupt and SystemExit: raised in a handler they are the failure of that command.
            told = deciding(error)
            if isinstance(told, RateLimited) and handler is not None and not leased.lease.canceled:
                return await self._postpone([leased], await self._refused(leased, handler, told, entered))
            transition = self._decide(leased, failure(leased, error), _retry(handler))
        if transition is not None:
            transition.finished = time.monotonic()
            await self._settlement.put(transition)
        return None

    async def _execute(self, leased: Leased, handler: Handler, entered: Entered | None) -> Transition | None:
        """Run the handler; None if its own transaction has settled it already."""
        command: Command | Group = command_of(leased)
        if leased.command_type == EXHAUSTED and isinstance(command, Command):
            command = exhausted_group(command)
        if not handler.is_async:
            return await self._execute_in_thread(leased, handler, command, entered)
        context = HandlerContext(leased, self._bus, self._transactions)
        try:
            if handler.timeout is None:  # a timer per command costs more than the rest of the loop
                result = await handler.function(command, context)
            else:
                result = await within(handler.timeout, handler.function, command, context)
            transition = complete(leased, result, self._limits)
            transaction = context._transaction
            if transaction is None or transaction.conn is None:
                return transition
            if transition.outcome != COMPLETED:  # the result cannot be stored, so nothing is
                return transition
            await transaction.commit(self._settle_now(transition))
            self._settlement.settled_elsewhere(leased)
            return None
        finally:
            if context._transaction is not None:
                await context._transaction.rollback()

    async def _execute_in_thread(
        self, leased: Leased, handler: Handler, command: Command | Group, entered: Entered | None
    ) -> Transition | None:
        context = self._threads.context(leased, SyncHandlerContext)

        def call() -> Transition | None:
            try:
                if entered is not None:
                    entered.refuse_late()
                transition = complete(leased, handler.function(command, context), self._limits)
                transaction = context._transaction
                if transaction is None or transaction.conn is None or transition.outcome != COMPLETED:
                    return transition
                if context._timed_out:
                    raise Superseded("The handler outlived its time; what it wrote was rolled back.")
                transaction.commit(self._settle_now(transition))
                return None
            except StopIteration as error:  # no future can carry it: the slot would never hear of it
                raise RuntimeError("The handler raised StopIteration.") from error
            finally:
                if context._transaction is not None:
                    context._transaction.rollback()

        running = self._threads.submit(call)
        done, _ = await asyncio.wait({running}, timeout=handler.timeout)
        if done:
            transition: Transition | None = running.result()
            if transition is None:
                self._settlement.settled_elsewhere(leased)
            return transition
        # A thread cannot be stopped. Its time is over for the command, but the slot stays taken until it returns.
        context._give_up()
        overdue = self._decide(leased, failure(leased, timeout(handler.timeout)), handler.retry)
        overdue.finished = time.monotonic()
        await self._settlement.put(overdue)
        log.warning(
            "A handler of %s outlived its %s s; its slot is taken until it returns",
            leased.command_type,
            handler.timeout,
        )
        await asyncio.wait({running})
        return None

    async def _enter(self, leased: Leased, handler: Handler) -> Entered:
        """Wait for the handler's limit; the time of the attempt begins afterwards."""
        assert handler.rate_limit is not None
        subject = None if handler.rate_limit.by is None else command_of(leased)
        entered = await self._limiter.enter(handler, leased.lease.domain, leased.command_type, subject)
        leased.started = time.monotonic()
        return entered

    async def _refused(
        self, leased: Leased, handler: Handler, error: RateLimited, entered: Entered | None
    ) -> Postponed:
        return await self._limiter.refused(handler, leased.lease.domain, leased.command_type, None, error, entered)

    async def _postpone(self, leased: Sequence[Leased], postponed: Postponed) -> None:
        """Put these off; no attempt is burnt."""
        await self._limiter.postpone(leased, postponed)
        self.finished -= 1  # it says nothing about how fast commands are done

    @staticmethod
    def _settle_now(transition: Transition) -> Plan[set[int]]:
        transition.finished = time.monotonic()
        return settle.settle([transition], now=transition.finished)

    def _decide(self, leased: Leased, outcome: Outcome, retry: RetryPolicy) -> Transition:
        transition = decide(leased, outcome, retry, self._limits)
        if not isinstance(outcome, Succeeded):
            self._failures.tell(transition, outcome.error)
        return transition


def _retry(handler: Handler | None) -> RetryPolicy:
    return handler.retry if handler else RetryPolicy()

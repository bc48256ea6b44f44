"""Command, handler, outcome: runs what was claimed, as many at a time as there are slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import Any, TypeAlias, TypeGuard
from uuid import UUID

import msgspec

from busload.bus import CommandBus
from busload.domain.buffer import EXHAUSTED
from busload.domain.bulk import Group
from busload.domain.command import Command
from busload.domain.execution import (
    RESULT_INVALID,
    RESULT_NOT_KEPT,
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
from busload.store.outage import Outage
from busload.store.plan import Plan
from busload.store.pool import AsyncPool
from busload.worker.calls import MOST_COLLISIONS, Calls, command_of, failure, pause_after
from busload.worker.chunks import ChunkRunner, Gathered, Gatherer
from busload.worker.contain import Ended, Suspended, hands_on, in_own_task, timed_out
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

Rest: TypeAlias = Callable[[], Awaitable[None]]
"""What is left to do for a command once its handler has begun or ended."""


class Waiting(msgspec.Struct, eq=False):
    """A handler that waits for something, and what it was given."""

    leased: Leased
    handler: Handler
    context: HandlerContext
    suspended: Suspended


class Slot:
    """Runs one command at a time. Its task serves many, until one of them may have kept a hand on it."""

    __slots__ = ("in_thread", "leased", "name", "task")
    task: asyncio.Task[None]

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_thread = False
        self.leased: Leased | Gathered | None = None


class Executor:
    """Slots that take commands from a line: a slot costs a fifth of a task per command.

    More commands may stand in line than there are slots. `low_water` is set by whoever fills the line: as soon as no
    more than that are in hand, `on_free` is called.
    """

    def __init__(
        self,
        bus: CommandBus,
        transactions: AsyncPool,
        threads: Threads,
        held: Held,
        settlement: Settlement,
        concurrency: int,
        on_free: Callable[[], None],
        limiter: Limiter,
        tallies: Tallies,
        outage: Outage,
    ) -> None:
        self._bus, self._transactions, self._threads = bus, transactions, threads
        self._held, self._settlement = held, settlement
        self._concurrency, self._on_free, self._limiter = concurrency, on_free, limiter
        self._limits = bus.settings.limits.payload
        self._line: deque[Leased | Gathered] = deque()
        self._for_threads: deque[Leased | Gathered] = deque()
        """What was first in line and needs a thread when none is free: others need not wait for that."""
        self._in_threads = 0
        self.wants_threads: int | None = None
        """How many threads must be free for whoever fills the line to be told, once; None: it need not be."""
        self._resting: list[asyncio.Future[None]] = []
        self._slots: list[Slot] = []
        self._context = copy_context()
        """That of the worker: each attempt has a copy of its own."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._breathed = self._busy = self._busy_since = 0.0
        self._stopping = False
        self.in_hand = 0
        self.finished = 0
        self.low_water = concurrency - 1
        self.rests = limiter.rests
        self.calls = Calls(threads, self._context, lambda: self._stopping)
        self._failures = failures = FailureLog()
        self.gatherer = Gatherer(bus.handlers, self.take, on_free, failures)
        self._chunks = ChunkRunner(
            bus, self.calls, transactions, threads, limiter, settlement, self.gatherer, failures, self._postpone
        )
        self._groups = GroupRunner(
            bus, self.calls, transactions, threads, limiter, settlement, tallies, failures, outage
        )

    @property
    def busy(self) -> float:
        """Seconds in which there was something in hand."""
        return self._busy + (time.monotonic() - self._busy_since if self.in_hand else 0.0)

    @property
    def in_line(self) -> int:
        return len(self._line) + len(self._for_threads)

    @property
    def threads(self) -> int:
        return self._threads.most

    @property
    def waiting_for_threads(self) -> int:
        return len(self._for_threads)

    @property
    def free_threads(self) -> int:
        """How many more commands threads could take now; negative if some wait for one."""
        return self._threads.most - self._in_threads - len(self._for_threads)

    def waited(self, now: float) -> float | None:
        """How long the first in line has waited for a slot; None if nobody stands there."""
        first = next((one for one in self._line if isinstance(one, Leased)), None)
        return None if first is None else now - first.lease.claimed

    def stuck_chunks(self, now: float, patience: float) -> list[Gathered]:
        """Chunks that have waited for a slot for longer than that; they do not stand in line any more."""
        found: list[Gathered] = []
        for line in self._lines:
            waiting = [one for one in line if isinstance(one, Gathered) and now - one.lease.claimed > patience]
            if waiting:
                stuck = set(map(id, waiting))
                others = [one for one in line if id(one) not in stuck]
                line.clear()
                line.extend(others)
                found += waiting
        if found:
            self._fewer(len(found))
        return found

    @property
    def _lines(self) -> tuple[deque[Leased | Gathered], ...]:
        return self._for_threads, self._line

    @property
    def running(self) -> list[Leased]:
        """What has a slot now."""
        return [one for slot in self._slots if slot.leased is not None for one in _commands(slot.leased)]

    def alive(self) -> Counter[UUID]:
        """How many commands of each lease stand in line or run."""
        lines = (one for line in self._lines for item in line for one in _commands(item))
        held = [*self.running, *self.gatherer.gathered, *lines]
        return Counter(one.lease.lease_id for one in held)

    def revive(self) -> None:
        """A slot lives as long as the worker, also if somebody has cancelled every task there was."""
        for slot in self._slots:
            if slot.task.done() and not self._stopping:
                log.error("A slot's task was ended by others; the slot goes on")
                if slot.leased is not None:
                    self._done(slot)
                self._employ(slot)

    def start(self) -> None:
        self._slots = [Slot(f"busload-slot-{n}") for n in range(self._concurrency)]
        for slot in self._slots:
            self._employ(slot)

    def take(self, leased: Sequence[Leased | Gathered]) -> None:
        if leased and self.in_hand == 0:
            self._idle.clear()
            self._busy_since = time.monotonic()
        self._line.extend(leased)
        self.in_hand += len(leased)
        self._wake_two()

    def abandon_stuck(self, now: float, patience: float) -> list[Leased]:
        """Do not start what has waited for a thread for longer than that, and return it: it is to be handed back."""
        waiting, self._for_threads = self._for_threads, deque()
        stuck = [one for one in waiting if isinstance(one, Leased) and now - one.lease.claimed > patience]
        gone = set(map(id, stuck))
        self._for_threads.extend(one for one in waiting if id(one) not in gone)
        if stuck:
            self._fewer(len(stuck))
        return stuck

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def abandon_line(self) -> list[Leased | Gathered]:
        """Do not start what has not started, and return it: it is to be handed back."""
        abandoned = [*self._for_threads, *self._line]
        for line in self._lines:
            line.clear()
        if abandoned:
            self._fewer(len(abandoned))
        return abandoned

    async def stop(self, within: float) -> None:
        """Give up what still runs; it is not settled, so it will be handed back."""
        self._stopping = True
        tasks = [slot.task for slot in self._slots]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=within)

    async def close(self) -> None:
        """Let go of what groups were read and ended with, and sum up what the log has only counted."""
        await self._groups.close()
        self._failures.close()

    async def _serve(self, slot: Slot, rest: Rest | None) -> None:
        """Take commands from the line until a handler may have kept a hand on this task; another task goes on then.

        The new one begins with the rest of what was to be done: nothing that a handler left behind can disturb it.
        """
        task, line, handlers = slot.task, self._line, self._bus.handlers
        hands = hands_on(task)
        if rest is not None:
            await self._finish(slot, rest)
        while not self._stopping:  # a handler may have swallowed the cancellation
            if not line:
                await self._rest()
                self._wake_two()
                continue
            leased = slot.leased = line.popleft()
            if handlers.threaded and self._needs_thread(leased) and not self._take_thread(slot, leased):
                continue
            begun = self._begin(leased)
            if begun is None:
                rest = None
                self._done(slot)
            elif isinstance(begun, Waiting):
                rest = self._resume(begun, await begun.suspended)
                del begun  # what the handler held is let go
                if rest is None:
                    self._done(slot)
            else:
                rest = begun
            if hands_on(task) != hands and not self._stopping:
                self._employ(slot, rest)
                return
            if rest is not None:
                await self._finish(slot, rest)
            if leased.started - self._breathed > LONGEST_BREATH:
                self._breathed = leased.started
                await asyncio.sleep(0)

    def _employ(self, slot: Slot, rest: Rest | None = None) -> None:
        """Give a slot a new task. No factory of the application makes it: it must not begin at once."""
        slot.task = asyncio.Task(self._serve(slot, rest), name=slot.name)

    def _needs_thread(self, leased: Leased | Gathered) -> bool:
        if isinstance(leased, Gathered):
            return not leased.handler.is_async
        handler = self._bus.handlers.find(leased.lease.domain, leased.command_type)
        return handler is not None and not handler.is_async

    def _take_thread(self, slot: Slot, leased: Leased | Gathered) -> bool:
        """Whether there is a thread for it; if not, it waits for one beside the line, and the slot is free."""
        if self._in_threads < self._threads.most:
            self._in_threads += 1
            slot.in_thread = True
            return True
        slot.leased = None
        self._for_threads.append(leased)
        if not self._line:
            self._on_free()
        return False

    def _leave_thread(self, slot: Slot) -> None:
        slot.in_thread = False
        self._in_threads -= 1
        if self._for_threads:
            self._line.appendleft(self._for_threads.popleft())
            self._wake_two()
        if self.wants_threads is not None and self.free_threads >= self.wants_threads:
            self.wants_threads = None
            self._on_free()

    def _done(self, slot: Slot) -> None:
        slot.leased = None
        if slot.in_thread:
            self._leave_thread(slot)
        self.finished += 1
        self.in_hand -= 1
        if self.in_hand <= self.low_water or self.in_hand == 0:
            self._became_fewer()

    async def _finish(self, slot: Slot, rest: Rest) -> None:
        leased = slot.leased
        try:
            await rest()
        except Exception as error:
            await self._give_up(leased, error)
        finally:
            self._done(slot)

    async def _give_up(self, leased: Leased | Gathered | None, error: Exception) -> None:
        """The error is ours, not the handler's: the slot must live, and the command must not hang."""
        if self._stopping:
            return  # what comes after the settlement was closed is handed back
        if isinstance(leased, Leased):
            log.error("Could not say how execution %s ended", leased.execution_id, exc_info=error)
            last_resort = TransientCommandError(f"The outcome could not be told: {type(error).__name__}.")
            await self._settlement.put(self._decide(leased, Failed(last_resort), RetryPolicy()))

    def _wake_two(self) -> None:
        """Two slots that wake two more each are soon all; where handlers wait for nothing, the first few do it all."""
        wanted = min(2, len(self._line))
        while wanted > 0 and self._resting:
            wake = self._resting.pop()
            if not wake.done():  # else its task was cancelled
                wake.set_result(None)
                wanted -= 1

    async def _rest(self) -> None:
        wake = asyncio.get_running_loop().create_future()
        self._resting.append(wake)
        await wake

    def _fewer(self, count: int) -> None:
        self.in_hand -= count
        self._became_fewer()

    def _became_fewer(self) -> None:
        if self.in_hand == 0:
            self._busy += time.monotonic() - self._busy_since
            self._idle.set()
        if self.in_hand <= self.low_water:
            self.low_water = -1  # said once; whoever fills the line sets it again
            self._on_free()

    def _begin(self, leased: Leased | Gathered) -> Rest | Waiting | None:
        """Run a command as far as it comes without waiting for anything; returns what is left to do, if anything."""
        if leased.lease.lost:
            return None
        if isinstance(leased, Gathered):
            return partial(self._chunks.run, leased)
        try:
            leased.started = time.monotonic()
            handler = self._bus.handlers.find(leased.lease.domain, leased.command_type)
            if handler is None or not handler.plain:
                return partial(self._run, leased, handler)
            try:
                command = command_of(leased) if leased.command_type != EXHAUSTED else _command(leased)
            except Undecodable as error:
                return partial(self._put, self._decide(leased, Unreadable(error), RetryPolicy()))
            context = HandlerContext(leased, self._bus, self._transactions)
            own = self._context.copy()
            try:  # what is only marked as a coroutine function may do anything when it is called, and return others
                coroutine = own.run(handler.function, command, context)
                if type(coroutine) is not CoroutineType:
                    coroutine = _await(coroutine)
            except BaseException as error:
                return partial(self._end, leased, handler, context, Ended(error=error))
            try:
                yielded = own.run(coroutine.send, None)
            except StopIteration as stop:
                return self._conclude(leased, handler, context, stop.value)
            except BaseException as error:  # also KeyboardInterrupt and SystemExit: in a handler they are its failure
                return partial(self._end, leased, handler, context, Ended(error=error))
            return Waiting(leased, handler, context, Suspended(own, coroutine, yielded))
        except Exception as error:
            return partial(self._give_up, leased, error)

    def _conclude(self, leased: Leased, handler: Handler, context: HandlerContext, result: Any) -> Rest | None:
        """Hand over the result of a plain handler; returns what is left to do, if anything."""
        if context._transaction is not None:
            return partial(self._end, leased, handler, context, Ended(result))
        transition = complete(leased, result, self._limits)
        if transition.reason is not None:
            return partial(self._keep, transition)
        transition.finished = time.monotonic()
        return None if self._settlement.offer(transition) else partial(self._settlement.put, transition)

    def _resume(self, waited: Waiting, ended: Ended) -> Rest | None:
        """The same for one that has waited for something."""
        leased = waited.leased
        try:
            if ended.error is None:
                return self._conclude(leased, waited.handler, waited.context, ended.result)
            return partial(self._end, leased, waited.handler, waited.context, ended)
        except Exception as error:
            return partial(self._give_up, leased, error)

    async def _run(self, leased: Leased, handler: Handler | None) -> None:
        """Run what is not plain: it waits for its turn, may take a limited time only, needs a thread, or is a group."""
        if handler is None:  # only one that was claimed by other means than Claimer
            unknown = TransientCommandError(f"No handler for {leased.command_type!r}.", code="NO_HANDLER")
            await self._put(self._decide(leased, failure(leased, unknown), RetryPolicy()))
        elif handler.gathering is not None:
            await self._chunks.run(self.gatherer.alone(leased, handler))
        elif handler.buffer is not None:
            await self._run_group(leased, handler)
        else:
            await self._run_one(leased, handler)

    async def _run_one(self, leased: Leased, handler: Handler) -> None:
        entered: Entered | None = None
        try:
            command = _command(leased)
        except Undecodable as error:
            await self._put(self._decide(leased, Unreadable(error), RetryPolicy()))
            return
        if handler.rate_limit is not None:
            try:
                entered = await self._limiter.enter(handler, leased.lease.domain, leased.command_type, command)
            except Postponed as postponed:
                await self._postpone([leased], postponed)
                return
            except Exception as error:  # of the limit's `by`
                await self._put(self._decide(leased, failure(leased, error), handler.retry))
                return
            if leased.lease.lost:
                return
            leased.started = time.monotonic()  # the time of the attempt begins after that in which it waited
        if not handler.is_async:
            await self._run_in_thread(leased, handler, command, entered)
            return
        context = HandlerContext(leased, self._bus, self._transactions)
        try:
            late = None if entered is None else entered.refuse_late
            own = self._context.copy()
            ended = await in_own_task(own, handler.timeout, handler.function, command, context, before=late)
        except Postponed as postponed:
            await self._postpone([leased], postponed)
            return
        except asyncio.CancelledError as error:
            ended = Ended(error=error)
        await self._end(leased, handler, context, ended, entered)

    async def _end(
        self,
        leased: Leased,
        handler: Handler,
        context: HandlerContext,
        ended: Ended,
        entered: Entered | None = None,
    ) -> None:
        """Settle what a handler has returned or raised. Its own transaction does that, if it has one."""
        transaction, error = context._transaction, ended.error
        transition: Transition | None = None
        try:
            if error is None:
                transition = complete(leased, ended.result, self._limits)
            if transaction is not None and transaction.conn is not None and _is_done(transition):
                await transaction.commit(self._settle_now(transition))
                await self._keep(transition, settled=True)
                return
        except Superseded as superseded:
            self._say_superseded(leased, superseded)
            return
        except BaseException as refused:  # the commit was
            error = refused
        finally:
            if transaction is not None:
                await transaction.rollback()
        if error is not None:
            await self._fail(leased, handler, context, error, entered)
        elif transition is not None:
            await self._keep(transition)

    async def _keep(self, transition: Transition, *, settled: bool = False) -> None:
        """A handler has returned; `settled` says that its own transaction has recorded that."""
        if settled:
            self._settlement.settled_elsewhere(transition.leased, transition.outcome)
        else:
            await self._put(transition)
        if transition.reason is not None:
            self._failures.tell_result(transition)

    async def _fail(
        self,
        leased: Leased,
        handler: Handler,
        context: HandlerContext | SyncHandlerContext | None,
        error: BaseException,
        entered: Entered | None,
    ) -> None:
        if self._stopping and isinstance(error, asyncio.CancelledError):
            raise error  # it is handed back
        transaction = None if context is None else context._transaction
        if transaction is not None and transaction.collided(error) and leased.collisions < MOST_COLLISIONS:
            await self._try_again(leased)
            return
        told = deciding(error)
        if isinstance(told, RateLimited) and not leased.lease.canceled:
            await self._postpone([leased], await self._refused(leased, handler, told, entered))
        else:
            await self._put(self._decide(leased, failure(leased, error), handler.retry))

    async def _try_again(self, leased: Leased) -> None:
        """Its transaction met others that wanted the same rows: the same attempt is made again."""
        leased.collisions += 1
        log.debug("Execution %s met others for the %d. time and is made again", leased.execution_id, leased.collisions)
        await asyncio.sleep(pause_after(leased.collisions))
        self.take([leased])

    async def _run_in_thread(
        self, leased: Leased, handler: Handler, command: Command | Group, entered: Entered | None
    ) -> None:
        context = self._threads.context(leased, SyncHandlerContext)

        def call() -> tuple[Transition, bool] | Ended:
            """The handler's error; or the result, and whether the handler's own transaction has settled it."""
            try:
                if entered is not None:
                    entered.refuse_late()
                try:
                    result = handler.function(command, context)
                except BaseException as error:
                    return Ended(error=error)
                transition, transaction = complete(leased, result, self._limits), context._transaction
                if transaction is None or transaction.conn is None or not _is_done(transition):
                    return transition, False
                if context._timed_out:
                    raise Superseded("The handler outlived its time; what it wrote was rolled back.")
                transaction.commit(self._settle_now(transition))
                return transition, True
            finally:
                if context._transaction is not None:
                    context._transaction.rollback()

        running = self._threads.submit(call, self._context.copy(), [leased])
        done, _ = await asyncio.wait({running}, timeout=handler.timeout)
        if not done:
            await self._outlived(leased, handler, context, running)
            return
        try:
            ended: tuple[Transition, bool] | Ended = running.result()
        except Postponed as postponed:
            await self._postpone([leased], postponed)
            return
        except Superseded as superseded:
            self._say_superseded(leased, superseded)
            return
        except BaseException as error:  # of the commit
            ended = Ended(error=error)
        if isinstance(ended, tuple):
            transition, settled = ended
            await self._keep(transition, settled=settled)
        elif ended.error is not None:
            await self._fail(leased, handler, context, ended.error, entered)

    async def _outlived(
        self, leased: Leased, handler: Handler, context: SyncHandlerContext, running: asyncio.Future[Any]
    ) -> None:
        """A thread cannot be stopped. Its time is over for the command, but the slot stays taken until it returns."""
        context._give_up()
        await self._put(self._decide(leased, failure(leased, timed_out(handler.timeout)), handler.retry))
        log.warning(
            "A handler of %s outlived its %s s; its slot is taken until it returns",
            leased.command_type,
            handler.timeout,
        )
        await asyncio.wait({running})

    async def _run_group(self, leased: Leased, handler: Handler) -> None:
        try:
            transition = await self._groups.run(leased, handler)
        except Postponed as postponed:
            await self._postpone([leased], postponed)
        except Superseded as superseded:  # never the handler's: what that raises is the judgement of its items
            self._say_superseded(leased, superseded)
        except Undecodable as error:
            await self._put(self._decide(leased, Unreadable(error), RetryPolicy()))
        except BaseException as error:
            await self._fail(leased, handler, None, error, None)
        else:
            if transition is not None:
                await self._put(transition)

    async def _refused(
        self, leased: Leased, handler: Handler, error: RateLimited, entered: Entered | None
    ) -> Postponed:
        return await self._limiter.refused(handler, leased.lease.domain, leased.command_type, None, error, entered)

    async def _postpone(self, leased: Sequence[Leased], postponed: Postponed) -> None:
        """Put these off; no attempt is burnt."""
        await self._limiter.postpone(leased, postponed)
        self.finished -= 1  # it says nothing about how fast commands are done

    async def _put(self, transition: Transition) -> None:
        transition.finished = time.monotonic()
        await self._settlement.put(transition)

    def _say_superseded(self, leased: Leased, superseded: Superseded) -> None:
        log.warning("Execution %s was superseded: %s", leased.execution_id, superseded)
        self._settlement.superseded(leased)

    @staticmethod
    def _settle_now(transition: Transition) -> Plan[set[int]]:
        transition.finished = time.monotonic()
        return settle.settle([transition], now=transition.finished)

    def _decide(self, leased: Leased, outcome: Outcome, retry: RetryPolicy) -> Transition:
        transition = decide(leased, outcome, retry, self._limits)
        if not isinstance(outcome, Succeeded):
            self._failures.tell(transition, outcome.error)
        return transition


def _command(leased: Leased) -> Command | Group:
    """What the handler gets; raises `Undecodable`."""
    command = command_of(leased)
    return exhausted_group(command) if leased.command_type == EXHAUSTED else command


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _is_done(transition: Transition | None) -> TypeGuard[Transition]:
    """Whether a handler has done its work, so that what it wrote stays, whatever becomes of its result."""
    return transition is not None and transition.reason in (None, RESULT_NOT_KEPT, RESULT_INVALID)


def _commands(held: Leased | Gathered) -> Iterator[Leased]:
    return iter([held] if isinstance(held, Leased) else held.leased)

"""Command, handler, outcome: runs what stands in line, as much at a time as there are slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import CoroutineType
from typing import TypeAlias
from uuid import UUID

import msgspec

from busload.buffers.declaration import EXHAUSTED
from busload.buffers.groups import exhausted_group
from busload.commands import settle
from busload.commands.bulk_items import Group
from busload.commands.command import Command
from busload.commands.execution import RESULT_INVALID, RESULT_NOT_KEPT, Leased, Transition, complete
from busload.commands.payload import UndecodableError
from busload.handlers import Handler
from busload.limits.limiter import Entered, PostponedError
from busload.postgres.plan import Plan
from busload.sync.context import SyncHandlerContext
from busload.worker.call_handler import Calls, Work, awaited, command_of, outlast
from busload.worker.chunks import ChunkRunner, Gathered, Gatherer
from busload.worker.containment import RETURNED_NOTHING, Ended, Suspended, references_to
from busload.worker.context import HandlerContext
from busload.worker.groups import GroupRunner
from busload.worker.settlement import Outcomes, Settlement
from busload.worker.shared import Shared

log = logging.getLogger("busload")

Item: TypeAlias = Leased | Gathered
Rest: TypeAlias = Callable[[], Awaitable[None]]
"""What is left to do for a command once its handler has begun or ended."""

LONGEST_TURN = 0.001
"""Seconds after which a slot yields, even if no handler waits: claims and settlement need the event loop too."""


class Waiting(msgspec.Struct, eq=False):
    """A handler that waits for something, and what it was given."""

    leased: Leased
    handler: Handler
    command: Command | Group
    context: HandlerContext
    suspended: Suspended


class Slot:
    """Runs one command at a time. Its task serves many commands, until a handler may have kept a reference to it."""

    __slots__ = ("in_thread", "name", "taken", "task")
    task: asyncio.Task[None]

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_thread = False
        self.taken: Item | None = None


class Line:
    """Commands and chunks, first come first served. More may stand here than there are slots.

    What needs a thread when none is free waits beside the line, so that others need not wait for a thread as well.
    `on_low` is called when so few are in hand, or so many threads are free, as whoever fills the line has asked for.
    """

    def __init__(self, slots: int, threads: int, on_low: Callable[[], None]) -> None:
        self.ready: deque[Item] = deque()
        """What stands in line, for slots to take."""
        self._for_threads: deque[Item] = deque()
        self.threads, self._in_threads = threads, 0
        self.on_low = on_low
        self.low_water = slots - 1
        """When no more than that are in hand, `on_low` is called once."""
        self.threads_wanted: int | None = None
        """When that many threads are free, `on_low` is called once."""
        self._resting: list[asyncio.Future[None]] = []
        self.idle = asyncio.Event()
        """Set while nothing is in hand."""
        self.idle.set()
        self._busy = self._busy_since = 0.0
        self.in_hand = 0
        """How many stand in line, wait for a thread, or run."""
        self.finished = 0
        """How many have run."""

    @property
    def busy(self) -> float:
        """Seconds in which there was something in hand."""
        return self._busy + (time.monotonic() - self._busy_since if self.in_hand else 0.0)

    @property
    def items(self) -> list[Item]:
        """What has no slot yet."""
        return [*self._for_threads, *self.ready]

    @property
    def waiting_for_threads(self) -> int:
        return len(self._for_threads)

    @property
    def free_threads(self) -> int:
        """How many more commands threads could take now; negative if some wait for one."""
        return self.threads - self._in_threads - len(self._for_threads)

    def __len__(self) -> int:
        return len(self.ready) + len(self._for_threads)

    def waited(self, now: float) -> float | None:
        """How long the first command in line has waited for a slot; None if there is no command."""
        first = next((one for one in self.ready if isinstance(one, Leased)), None)
        return None if first is None else now - first.lease.claimed

    def add(self, items: Sequence[Item]) -> None:
        if items and self.in_hand == 0:
            self.idle.clear()
            self._busy_since = time.monotonic()
        self.ready.extend(items)
        self.in_hand += len(items)
        self.wake_two()

    def abandon(self) -> list[Item]:
        """Take everything out, and return it: it has to be handed back."""
        abandoned = self.items
        self._drop(abandoned)
        return abandoned

    def abandon_stuck_chunks(self, now: float, patience: float) -> list[Gathered]:
        """Take out the chunks that have waited longer than `patience`, and return them."""
        stuck = [one for one in self.items if not isinstance(one, Leased) and now - one.lease.claimed > patience]
        self._drop(stuck)
        return stuck

    def abandon_stuck_for_threads(self, now: float, patience: float) -> list[Leased]:
        """Take out the commands that have waited for a thread longer than `patience`, and return them."""
        stuck = [one for one in self._for_threads if isinstance(one, Leased) and now - one.lease.claimed > patience]
        self._drop(stuck)
        return stuck

    def take_thread(self, item: Item) -> bool:
        """Whether there is a thread for what a slot has taken. If not, it waits beside the line."""
        if self._in_threads < self.threads:
            self._in_threads += 1
            return True
        self._for_threads.append(item)
        if not self.ready:
            self.on_low()
        return False

    def leave_thread(self) -> None:
        self._in_threads -= 1
        if self._for_threads:
            self.ready.appendleft(self._for_threads.popleft())
            self.wake_two()
        if self.threads_wanted is not None and self.free_threads >= self.threads_wanted:
            self.threads_wanted = None
            self.on_low()

    def wake_two(self) -> None:
        """Wake two slots; each wakes two more. If handlers never wait, the first few slots do everything."""
        wanted = min(2, len(self.ready))
        while wanted > 0 and self._resting:
            wake = self._resting.pop()
            if not wake.done():  # else its task was cancelled
                wake.set_result(None)
                wanted -= 1

    async def rest(self) -> None:
        """Wait until there is something for this slot."""
        wake = asyncio.get_running_loop().create_future()
        self._resting.append(wake)
        await wake

    def _drop(self, gone: Sequence[Item]) -> None:
        if not gone:
            return
        ids = set(map(id, gone))
        for waiting in (self._for_threads, self.ready):
            others = [one for one in waiting if id(one) not in ids]
            waiting.clear()
            waiting.extend(others)
        self.in_hand -= len(gone)
        self.became_fewer()

    def became_fewer(self) -> None:
        if self.in_hand == 0:
            self._busy += time.monotonic() - self._busy_since
            self.idle.set()
        if self.in_hand <= self.low_water:
            self.low_water = -1  # said once; whoever fills the line asks again
            self.on_low()


class Executor:
    """Slots that take commands from the line: a slot costs a fifth of a task per command."""

    def __init__(
        self,
        shared: Shared,
        line: Line,
        gatherer: Gatherer,
        settlement: Settlement,
        outcomes: Outcomes,
    ) -> None:
        self._shared, self._line, self._gatherer, self._settlement = shared, line, gatherer, settlement
        self._bus, self._handlers, self._transactions = shared.bus, shared.bus.handlers, shared.transactions
        self._limits = shared.bus.settings.limits.payload
        self._slots = [Slot(f"busload-slot-{n}") for n in range(shared.settings.concurrency)]
        self._yielded_at = 0.0
        self.calls = Calls(shared.threads)
        self._outcomes = outcomes
        self._chunks = ChunkRunner(shared, self.calls, outcomes, settlement)
        self._groups = GroupRunner(shared, self.calls, outcomes, settlement)

    @property
    def running(self) -> list[Leased]:
        """What has a slot now."""
        return [one for slot in self._slots if slot.taken is not None for one in _commands(slot.taken)]

    def alive(self) -> Counter[UUID]:
        """How many commands of each lease stand in line, are gathered, or run."""
        in_line = (one for item in self._line.items for one in _commands(item))
        held = [*self.running, *self._gatherer.gathered, *in_line]
        return Counter(one.lease.lease_id for one in held)

    def start(self) -> None:
        for slot in self._slots:
            self._give_task(slot)

    def replace_ended_tasks(self) -> None:
        """Give a new task to each slot whose task was cancelled by somebody else."""
        for slot in self._slots:
            if slot.task.done() and not self.calls.stopping:
                log.error("A slot's task was ended by others; the slot goes on")
                if slot.taken is not None:
                    self._done(slot)
                self._give_task(slot)

    async def stop(self, within: float) -> None:
        """Give up what still runs; it is not settled, so it will be handed back."""
        self.calls.stopping = True
        tasks = [slot.task for slot in self._slots]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=within)

    async def close(self) -> None:
        await self._groups.close()

    async def _serve(self, slot: Slot, rest: Rest | None) -> None:
        """Take commands from the line until a handler may have kept a reference to this task; a new task goes on then.

        The new task begins with the rest of the work: nothing that a handler left behind can cancel it.
        """
        task, line, calls, handlers = slot.task, self._line, self.calls, self._handlers
        ready = line.ready
        hands = references_to(task)
        if rest is not None:
            await self._finish(slot, rest)
        while not calls.stopping:  # a handler may have swallowed the cancellation
            if not ready:
                await line.rest()
                line.wake_two()
                continue
            taken = slot.taken = ready.popleft()
            if handlers.threaded and self._needs_thread(taken):
                slot.in_thread = line.take_thread(taken)
                if not slot.in_thread:
                    slot.taken = None
                    continue
            begun = self._begin(taken)
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
            if references_to(task) != hands and not calls.stopping:
                self._give_task(slot, rest)
                return
            if rest is not None:
                await self._finish(slot, rest)
            if taken.started - self._yielded_at > LONGEST_TURN:
                self._yielded_at = taken.started
                await asyncio.sleep(0)

    def _give_task(self, slot: Slot, rest: Rest | None = None) -> None:
        """Give a slot a new task. The application's task factory does not make it: it must not begin at once."""
        slot.task = asyncio.Task(self._serve(slot, rest), name=slot.name)

    def _needs_thread(self, item: Item) -> bool:
        if isinstance(item, Gathered):
            return not item.handler.is_async
        handler = self._handlers.find(item.lease.domain, item.command_type)
        return handler is not None and not handler.is_async

    def _begin(self, item: Item) -> Rest | Waiting | None:
        """Run a command as far as it comes without waiting for anything; returns what is left to do, if anything."""
        if item.lease.lost:
            return None
        if isinstance(item, Gathered):
            self._gatherer.started(item)
            return partial(self._chunks.run, item)
        try:
            item.started = time.monotonic()
            handler = self._handlers.find(item.lease.domain, item.command_type)
            if handler is None or not handler.plain:
                return self._begin_special(item, handler)
            try:
                command = command_of(item) if item.command_type != EXHAUSTED else _command(item)
            except UndecodableError as error:
                return partial(self._outcomes.fail_unreadable, item, error)
            context, own = HandlerContext(item, self._bus, self._transactions), self.calls.context.copy()
            try:  # a function that is only marked as a coroutine function may raise, or return something else
                coroutine = own.run(handler.function, command, context)
                if type(coroutine) is not CoroutineType:
                    coroutine = awaited(coroutine)
            except BaseException as error:
                return self._conclude(item, handler, command, context, Ended(error=error))
            try:
                suspended = Suspended(own, coroutine, own.run(coroutine.send, None))
                return Waiting(item, handler, command, context, suspended)
            except StopIteration as stop:
                ended = RETURNED_NOTHING if stop.value is None else Ended(stop.value)
            except BaseException as error:  # also KeyboardInterrupt and SystemExit: in a handler they are its failure
                return self._conclude(item, handler, command, context, Ended(error=error))
            return self._conclude(item, handler, command, context, ended)
        except Exception as error:
            return partial(self._give_up, item, error)

    def _begin_special(self, leased: Leased, handler: Handler | None) -> Rest:
        """What is left to do for a command whose handler is not plain."""
        if handler is None:
            return partial(self._outcomes.fail_unknown, leased)
        if handler.gathering is not None:
            return partial(self._chunks.run, self._gatherer.alone(leased, handler))
        if handler.buffer is not None:
            return partial(self._groups.run, leased, handler)
        return partial(self._run, leased, handler)

    def _resume(self, waiting: Waiting, ended: Ended) -> Rest | None:
        """A plain handler has waited for something, and has ended now; returns what is left to do, if anything."""
        try:
            return self._conclude(waiting.leased, waiting.handler, waiting.command, waiting.context, ended)
        except Exception as error:
            return partial(self._give_up, waiting.leased, error)

    def _conclude(
        self, leased: Leased, handler: Handler, command: Command | Group, context: HandlerContext, ended: Ended
    ) -> Rest | None:
        if ended.error is not None or context.own_transaction is not None:
            return partial(self._make, self._work(leased, handler, command, context, None), None, ended)
        transition = complete(leased, ended.result, self._limits)
        if transition.reason is not None:
            return partial(self._outcomes.complete, transition)
        transition.finished = time.monotonic()
        return None if self._settlement.offer(transition) else partial(self._settlement.put, transition)

    async def _finish(self, slot: Slot, rest: Rest) -> None:
        taken = slot.taken
        try:
            await rest()
        except Exception as error:
            await self._give_up(taken, error)
        finally:
            self._done(slot)

    def _done(self, slot: Slot) -> None:
        slot.taken = None
        if slot.in_thread:
            slot.in_thread = False
            self._line.leave_thread()
        line = self._line
        line.finished += 1
        line.in_hand -= 1
        if line.in_hand <= line.low_water or line.in_hand == 0:
            line.became_fewer()

    async def _run(self, leased: Leased, handler: Handler) -> None:
        """Run a command whose handler waits for its turn, has a time limit, or needs a thread."""
        entered: Entered | None = None
        try:
            command = _command(leased)
        except UndecodableError as error:
            await self._outcomes.fail_unreadable(leased, error)
            return
        if handler.rate_limit is not None:
            domain, command_type = leased.lease.domain, leased.command_type
            try:
                entered = await self._shared.limiter.enter(handler.rate_limit, domain, command_type, command)
            except PostponedError as postponed:
                await self._outcomes.postpone([leased], postponed)
                return
            except Exception as error:  # of the limit's `by`
                await self._outcomes.fail(leased, handler, error, None)
                return
            if leased.lease.lost:
                return
            leased.started = time.monotonic()  # the time of the attempt begins after that in which it waited
        context = self._shared.context(handler, leased)
        await self._make(self._work(leased, handler, command, context, entered), entered)

    def _work(
        self,
        leased: Leased,
        handler: Handler,
        command: Command | Group,
        context: HandlerContext | SyncHandlerContext,
        entered: Entered | None,
    ) -> Work:
        before = None if entered is None else entered.refuse_late
        judge = partial(complete, leased, limits=self._limits)
        return Work(handler, command, context, [leased], judge, _settle, before)

    async def _make(self, work: Work, entered: Entered | None, called: Ended | None = None) -> None:
        """Make a call, or take how it `called` ended, and record what came of it."""
        [leased], handler = work.leased, work.handler
        call = await self.calls.make(work, called)
        if call.void is not None:
            await self._outcomes.drop(leased, call.void)
        elif call.error is not None:
            await self._outcomes.fail(leased, handler, call.error, entered)
        else:
            await self._outcomes.complete(call.judged, settled=call.ended is not None)
        if call.overdue is not None:
            await outlast(call.overdue, handler, leased.command_type)

    async def _give_up(self, item: Item | None, error: Exception) -> None:
        """An error of our own must not end the slot. While the worker stops, the command is handed back."""
        if isinstance(item, Leased) and not self.calls.stopping:
            await self._outcomes.give_up(item, error)


def _commands(item: Item) -> Iterator[Leased]:
    return iter([item] if isinstance(item, Leased) else item.leased)


def _settle(transition: Transition) -> Plan[set[int]] | None:
    """Settle in the handler's own transaction. What the handler wrote stays, unless the result shows it has not run."""
    if transition.reason not in (None, RESULT_NOT_KEPT, RESULT_INVALID):
        return None
    transition.finished = time.monotonic()
    return settle.settle([transition], now=transition.finished)


def _command(leased: Leased) -> Command | Group:
    """What the handler gets; raises `UndecodableError`."""
    command = command_of(leased)
    return exhausted_group(command) if leased.command_type == EXHAUSTED else command

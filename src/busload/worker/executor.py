"""Command, handler, outcome: runs what stands in line, as much at a time as there are slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from busload.buffers.declaration import EXHAUSTED
from busload.commands import settle
from busload.commands.bulk_items import Group
from busload.commands.command import Command
from busload.commands.execution import RESULT_INVALID, RESULT_NOT_KEPT, Leased, Several, Transition, complete
from busload.commands.payload import UndecodableError
from busload.handlers.registry import Handler
from busload.limits.limiter import Entered, PermitLostError, PostponedError
from busload.postgres.plan import Plan
from busload.sync.context import SyncHandlerContext
from busload.telemetry.running import running
from busload.worker.bulk_run import Stations
from busload.worker.call_handler import Calls, Work, argument_of, command_of, outlast
from busload.worker.chunks import Gatherer, run_chunk
from busload.worker.containment import RETURNED_NOTHING, Ended, Suspended, references_to
from busload.worker.context import HandlerContext
from busload.worker.groups import GroupRunner
from busload.worker.line import Claimed, Gathered, Line, commands_of
from busload.worker.permits import Permit
from busload.worker.settlement import Outcomes, Settlement
from busload.worker.shared import Shared

log = logging.getLogger("busload")

Rest: TypeAlias = Callable[[], Awaitable[None]]
"""What is left to do for a command once its handler has begun or ended."""

LONGEST_TURN = 0.0001
"""Seconds for which slots run commands in one round of the event loop, all together, if no handler waits.

Claims, settlement and notifications need the event loop too: what they wait for costs more than a round of the loop.
"""


class Waiting(msgspec.Struct, eq=False):
    """A handler that waits for something, and what it was given."""

    leased: Leased
    handler: Handler
    command: Command | Group
    context: HandlerContext
    permit: Permit | None
    suspended: Suspended


class Slot:
    """Runs one command at a time. Its task serves many commands, until a handler may have kept a reference to it."""

    __slots__ = ("in_thread", "name", "taken", "task")
    task: asyncio.Task[None]

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_thread = False
        self.taken: Claimed | None = None


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
        self._bus, self._handlers, self._transactions = shared.bus, shared.handlers, shared.transactions
        self._limits, self._state = shared.bus.settings.limits.payload, shared.state
        self._slots = [Slot(f"busload-slot-{n}") for n in range(shared.settings.concurrency)]
        self._turn_began: float | None = None
        """When the first command began in this round of the event loop; None before that."""
        self._turn_is_over = False
        self.calls = Calls(shared.threads)
        self._outcomes = outcomes
        self._stations = Stations(shared, self.calls, outcomes, settlement)
        self._groups = GroupRunner(self._stations)

    @property
    def running(self) -> list[Leased]:
        """What has a slot now."""
        return [one for slot in self._slots if slot.taken is not None for one in commands_of(slot.taken)]

    def alive(self) -> Counter[UUID]:
        """How many commands of each lease stand in line, are gathered, ask for permits, or run."""
        in_line = (one for item in self._line.items for one in commands_of(item))
        held = [*self.running, *self._gatherer.gathered, *self._shared.permits.asking, *in_line]
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
                    self._shared.permits.give_up(commands_of(slot.taken))
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
            if self._turn_is_over or not ready:
                await line.rest()
                continue
            taken = slot.taken = ready.popleft()
            if handlers.threaded and self._needs_thread(taken):
                slot.in_thread = line.take_thread(taken)
                if not slot.in_thread:
                    slot.taken = None
                    continue
            try:
                begun = self._begin(taken)
                if self._turn_began is None:
                    self._turn_began = taken.started
                    asyncio.get_running_loop().call_soon(self._begin_turn)
                elif taken.started - self._turn_began > LONGEST_TURN:
                    self._turn_is_over = True
                if begun is not None and not self._turn_is_over:
                    line.wake_two()  # this slot has to wait for something now
                if isinstance(begun, Waiting):
                    ended = await begun.suspended
                    begun = self._conclude(
                        begun.leased, begun.handler, begun.command, begun.context, begun.permit, ended
                    )
                rest = begun
            except Exception as error:
                rest = partial(self._give_up, taken, error)
            if rest is None:
                self._done(slot)
            if references_to(task) != hands and not calls.stopping:
                self._give_task(slot, rest)
                return
            if rest is not None:
                await self._finish(slot, rest)

    def _begin_turn(self) -> None:
        """The event loop has gone round: slots may go on."""
        self._turn_began = None
        if self._turn_is_over:
            self._turn_is_over = False
            self._line.wake_two()

    def _give_task(self, slot: Slot, rest: Rest | None = None) -> None:
        """Give a slot a new task. The application's task factory does not make it: it must not begin at once."""
        slot.task = asyncio.Task(self._serve(slot, rest), name=slot.name)

    def _needs_thread(self, item: Claimed) -> bool:
        if isinstance(item, Gathered):
            return not item.handler.is_async
        handler = self._handlers.find(item.lease.domain, item.command_type)
        return handler is not None and not handler.is_async

    def _begin(self, item: Claimed) -> Rest | Waiting | None:
        """Run a command as far as it comes without waiting for anything; returns what is left to do, if anything."""
        if isinstance(item, Gathered):
            running.set(Several(item.leased))
            self._gatherer.started(item)
            return partial(run_chunk, self._stations, item)
        if item.lease.lost:
            self._shared.permits.give_up([item])
            return None
        running.set(item)  # in the context of this slot, of which a plain handler gets a copy
        item.started = time.monotonic()
        handler = self._handlers.find(item.lease.domain, item.command_type)
        assert handler is not None, "the claimer hands back what has no handler"
        permit: Permit | None = None
        if not handler.plain:
            if not handler.plain_with_permit or (permit := self._shared.permits.of(item)) is None:
                return partial(self._run if handler.buffer is None else self._groups.run, item, handler)
            try:
                self._shared.permits.begin(permit)
            except PermitLostError as lost:
                return partial(self._outcomes.drop, item, lost)
        try:
            if permit is not None and permit.argument is not None:
                command = permit.argument
            else:
                command = command_of(item) if item.command_type != EXHAUSTED else argument_of(item)
        except UndecodableError as error:
            return partial(self._outcomes.fail_unreadable, item, error)
        context, own = HandlerContext(item, self._bus, self._transactions, self._state), copy_context()
        try:  # a function that is only marked as a coroutine function may raise, or return something else
            coroutine = own.run(handler.function, command, context)
            if type(coroutine) is not CoroutineType:
                coroutine = _awaited(coroutine)
        except BaseException as error:
            return self._conclude(item, handler, command, context, permit, Ended(error=error))
        try:
            suspended = Suspended(own, coroutine, own.run(coroutine.send, None))
            return Waiting(item, handler, command, context, permit, suspended)
        except StopIteration as stop:
            ended = RETURNED_NOTHING if stop.value is None else Ended(stop.value)
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: in a handler they are its failure
            return self._conclude(item, handler, command, context, permit, Ended(error=error))
        return self._conclude(item, handler, command, context, permit, ended)

    def _conclude(
        self,
        leased: Leased,
        handler: Handler,
        command: Command | Group,
        context: HandlerContext,
        permit: Permit | None,
        ended: Ended,
    ) -> Rest | None:
        if ended.error is not None or context.own_transaction is not None:
            if permit is not None:
                return partial(self._make_and_free, leased, handler, command, context, ended, permit)
            return partial(self._make, leased, handler, command, context, None, ended)
        if permit is not None:
            self._shared.permits.free(permit)
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
        """Run a command whose handler waits for its turn, has a time limit, a permit, or needs a thread."""
        permit = self._shared.permits.of(leased)
        if permit is None:
            await self._run_in_turn(leased, handler, None)
            return
        try:
            await self._run_in_turn(leased, handler, permit)
        finally:
            self._shared.permits.free(permit)

    async def _run_in_turn(self, leased: Leased, handler: Handler, permit: Permit | None) -> None:
        entered: Entered | None = None
        try:
            command = argument_of(leased) if permit is None or permit.argument is None else permit.argument
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
        await self._make(leased, handler, command, self._shared.context(handler, leased), entered, permit=permit)

    async def _make(
        self,
        leased: Leased,
        handler: Handler,
        command: Command | Group,
        context: HandlerContext | SyncHandlerContext,
        entered: Entered | None,
        called: Ended | None = None,
        permit: Permit | None = None,
    ) -> None:
        """Make a call, or take how it `called` ended, and record what came of it."""
        begin = (
            None if entered is None and permit is None else partial(self._shared.permits.begin_call, entered, permit)
        )
        judge = partial(complete, leased, limits=self._limits)
        call = await self.calls.make(Work(handler, command, context, [leased], judge, _settle, begin), called)
        overdue = call.overdue
        if overdue is not None and handler.ordered:  # nothing of its key may begin while it runs, not even a retry
            await outlast(overdue, handler, leased.command_type)
            overdue = None
        if call.void is not None:
            await self._outcomes.drop(leased, call.void)
        elif call.error is not None:
            await self._outcomes.fail(leased, handler, call.error, entered)
        else:
            await self._outcomes.complete(call.judged, settled=call.ended is not None)
        if overdue is not None:
            await outlast(overdue, handler, leased.command_type)

    async def _make_and_free(
        self,
        leased: Leased,
        handler: Handler,
        command: Command | Group,
        context: HandlerContext,
        called: Ended,
        permit: Permit,
    ) -> None:
        """As `_make`. The call may be made again, if its transaction has collided: so it keeps its permit."""
        try:
            await self._make(leased, handler, command, context, None, called, permit)
        finally:
            self._shared.permits.free(permit)

    async def _give_up(self, item: Claimed | None, error: Exception) -> None:
        """An error of our own must not end the slot. While the worker stops, the command is handed back."""
        if item is not None:
            self._shared.permits.give_up(commands_of(item))
        if isinstance(item, Leased) and not self.calls.stopping:
            await self._outcomes.give_up(item, error)


async def _awaited(awaitable: Any) -> Any:
    """What a function returned that is only marked as a coroutine function, as a coroutine."""
    return await awaitable


def _settle(transition: Transition) -> Plan[set[int]] | None:
    """Settle in the handler's own transaction. What the handler wrote stays, unless the result shows it has not run."""
    if transition.reason not in (None, RESULT_NOT_KEPT, RESULT_INVALID):
        return None
    transition.finished = time.monotonic()
    return settle.settle([transition], now=transition.finished)

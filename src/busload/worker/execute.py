"""Command, handler, outcome: runs what was claimed, as many at a time as there are slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from psycopg_pool import AsyncConnectionPool

from busload.bus import CommandBus
from busload.domain.command import Command
from busload.domain.execution import (
    COMPLETED,
    Failed,
    Leased,
    Outcome,
    Stopped,
    Succeeded,
    Transition,
    Unreadable,
    decide,
)
from busload.domain.payload import Undecodable, decode
from busload.domain.retry import RetryPolicy
from busload.errors import BusinessRuleError, PermanentCommandError, Superseded, TransientCommandError
from busload.handlers import Handler
from busload.store import settle
from busload.store.connection import AsyncConnection
from busload.store.plan import Plan
from busload.worker.context import HandlerContext
from busload.worker.held import Held
from busload.worker.settle import Settlement
from busload.worker.threads import Threads

log = logging.getLogger("busload")

FINAL_WORDS = (BusinessRuleError, PermanentCommandError)


class Executor:
    """Slots that take commands from a queue: a slot costs a fifth of a task per command."""

    def __init__(
        self,
        bus: CommandBus,
        transactions: AsyncConnectionPool[AsyncConnection],
        threads: Threads,
        held: Held,
        settlement: Settlement,
        concurrency: int,
        on_free: Callable[[], None],
    ) -> None:
        self._bus, self._transactions, self._threads = bus, transactions, threads
        self._held, self._settlement = held, settlement
        self._concurrency, self._on_free = concurrency, on_free
        self._waiting: asyncio.Queue[Leased] = asyncio.Queue()
        self._slots: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self.in_hand = 0

    @property
    def free(self) -> int:
        return self._concurrency - self.in_hand

    def start(self) -> None:
        self._slots = [asyncio.create_task(self._slot(), name=f"busload-slot-{n}") for n in range(self._concurrency)]

    def take(self, leased: Iterable[Leased]) -> None:
        for one in leased:
            self.in_hand += 1
            self._waiting.put_nowait(one)
        if self.in_hand:
            self._idle.clear()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def abandon_waiting(self) -> None:
        """Do not start what has not started: it will be handed back."""
        while not self._waiting.empty():
            self._waiting.get_nowait()
            self._one_less()

    async def stop(self) -> None:
        """Give up what still runs; it is not settled, so it will be handed back."""
        self._stopping = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)

    async def _slot(self) -> None:
        while not self._stopping:  # a handler may have swallowed the cancellation
            leased = await self._waiting.get()
            try:
                if not leased.lease.lost:
                    await self._run(leased)
            except Exception as error:  # ours, not the handler's: the slot must live, and the command must not hang
                log.exception("Could not say how execution %s ended", leased.execution_id)
                last_resort = TransientCommandError(f"The outcome could not be told: {type(error).__name__}.")
                await self._settlement.put(self._decide(leased, Failed(last_resort), RetryPolicy()))
            finally:
                self._one_less()

    def _one_less(self) -> None:
        self.in_hand -= 1
        if self.in_hand == 0:
            self._idle.set()
        self._on_free()

    async def _run(self, leased: Leased) -> None:
        leased.started = time.monotonic()
        handler = self._bus.handlers.find(leased.lease.domain, leased.command_type)
        try:
            if handler is None:  # only one that was claimed by other means than Claimer
                raise TransientCommandError(f"No handler for {leased.command_type!r}.", code="NO_HANDLER")
            transition = await self._execute(leased, handler)
        except Superseded as superseded:
            log.warning("Execution %s was superseded: %s", leased.execution_id, superseded)
            return
        except Undecodable as error:
            transition = self._decide(leased, Unreadable(error), RetryPolicy())
        except asyncio.CancelledError as error:
            if self._stopping:
                raise
            transition = self._decide(leased, _failure(leased, error), _retry(handler))
        except BaseException as error:
            # Also KeyboardInterrupt and SystemExit: raised in a handler they are the failure of that command.
            transition = self._decide(leased, _failure(leased, error), _retry(handler))
        if transition is not None:
            transition.finished = time.monotonic()
            await self._settlement.put(transition)

    async def _execute(self, leased: Leased, handler: Handler) -> Transition | None:
        """Run the handler; None if its own transaction has settled it already."""
        command = _command(leased)
        if not handler.is_async:
            return await self._execute_in_thread(leased, handler, command)
        context = HandlerContext(leased, self._bus, self._transactions)
        try:
            result = await _within(handler.timeout, handler.function, command, context)
            transition = self._decide(leased, Succeeded(result), handler.retry)
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

    async def _execute_in_thread(self, leased: Leased, handler: Handler, command: Command) -> Transition | None:
        context = self._threads.context(leased)

        def call() -> Transition | None:
            try:
                transition = self._decide(leased, Succeeded(handler.function(command, context)), handler.retry)
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
        overdue = self._decide(leased, _failure(leased, _timeout(handler.timeout)), handler.retry)
        overdue.finished = time.monotonic()
        await self._settlement.put(overdue)
        log.warning(
            "A handler of %s outlived its %s s; its slot is taken until it returns",
            leased.command_type,
            handler.timeout,
        )
        await asyncio.wait({running})
        return None

    @staticmethod
    def _settle_now(transition: Transition) -> Plan[set[int]]:
        transition.finished = time.monotonic()
        return settle.settle([transition], now=transition.finished)

    def _decide(self, leased: Leased, outcome: Outcome, retry: RetryPolicy) -> Transition:
        return decide(leased, outcome, retry, self._bus.settings.limits.payload)


async def _within(seconds: float | None, function: Callable[..., Any], *args: Any) -> Any:
    if seconds is None:  # a timer per command costs more than the rest of the loop
        return await function(*args)
    try:
        async with asyncio.timeout(seconds) as limit:
            return await function(*args)
    except TimeoutError:
        if limit.expired():
            raise _timeout(seconds) from None
        raise


def _timeout(seconds: float | None) -> TransientCommandError:
    return TransientCommandError(f"The handler did not finish within {seconds} s.", code="TIMEOUT")


def _failure(leased: Leased, error: BaseException) -> Outcome:
    """A handler of a canceled batch that raises has stopped as it was asked to, unless it says something final."""
    if leased.lease.canceled and not isinstance(error, FINAL_WORDS):
        return Stopped(error)
    return Failed(error)


def _retry(handler: Handler | None) -> RetryPolicy:
    return handler.retry if handler else RetryPolicy()


def _command(leased: Leased) -> Command:
    lease = leased.lease
    return Command(
        leased.command_id,
        lease.domain,
        leased.command_type,
        None if leased.data is None else decode(leased.data),
        lease.batch_id,
        leased.task_key,
        leased.correlation_id or leased.command_id,
        leased.reply_to,
        lease.priority,
        lease.created_at,
    )

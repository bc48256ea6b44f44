"""One call of a handler, awaited or in a thread, with a command, a chunk or a group: what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from busload.buffers.declaration import EXHAUSTED
from busload.buffers.groups import exhausted_group
from busload.commands.bulk_items import Chunk, Group
from busload.commands.command import Command
from busload.commands.execution import Leased, Several, Transition
from busload.commands.headers import joined_headers
from busload.commands.payload import decode
from busload.errors import SupersededError, UncommittedError
from busload.handlers.registry import Handler
from busload.limits.limiter import PostponedError
from busload.postgres.backoff import Backoff
from busload.postgres.plan import Plan
from busload.sync.context import SyncCallersTransaction, SyncChunkContext, SyncHandlerContext, SyncHandlerTransaction
from busload.telemetry.running import running
from busload.worker.containment import Ended, in_own_task, timed_out
from busload.worker.context import CallersTransaction, ChunkContext, HandlerContext, HandlerTransaction
from busload.worker.handler_threads import Threads

log = logging.getLogger("busload")

MOST_COLLISIONS = 10
"""How many times in a row one attempt is made again. A transaction that collides each time is at fault itself."""


@dataclass(slots=True, eq=False)
class Work:
    """What a handler is called with, and what its answer means.

    `judge` says what becomes of what the handler returned; it runs where the handler ran. `end` is given that and
    returns the plan that ends the commands within the handler's own transaction, or None if the transaction has to be
    rolled back. `begin` is called right before the handler: a `PostponedError` that it raises makes the call void.
    """

    handler: Handler
    subject: Command | Group | Chunk
    context: HandlerContext | ChunkContext | SyncHandlerContext | SyncChunkContext
    leased: Sequence[Leased]
    judge: Callable[[Any], Any]
    end: Callable[[Any], Plan[Any] | None]
    begin: Callable[[], None] | None = None
    late: PostponedError | None = None
    """What `begin` has raised: a handler that raises the same has merely failed."""

    def call(self) -> Any:
        """Call the handler; one with `async def` returns what has to be awaited."""
        running.set(self.leased[0] if len(self.leased) == 1 else Several(self.leased))
        if self.begin is not None:
            try:
                self.begin()
            except PostponedError as late:
                self.late = late
                raise
        return self.handler.function(self.subject, self.context)

    def ending(self, judged: Any) -> Plan[Any] | None:
        """The plan that ends the handler's own transaction; None if it has none, or it has to be rolled back."""
        transaction = self.context.own_transaction
        return None if transaction is None or transaction.conn is None else self.end(judged)

    def failed(self, error: BaseException | None) -> Call:
        return Call(error=error) if self.late is None else Call(void=self.late, tries=0)


@dataclass(slots=True, eq=False)
class Call:
    """What came of a call. Without an `error`, `judged` is what `Work.judge` has returned."""

    judged: Any = None
    error: BaseException | None = None
    ended: Any = None
    """The answer of the plan that was committed in the handler's own transaction; None if nothing was committed."""
    undone: bool = False
    """Whether the handler had a transaction of its own, and it was rolled back."""
    void: SupersededError | PostponedError | None = None
    """Why the call counts for nothing: others have the commands now, or its turn had passed before it began."""
    overdue: asyncio.Future[Any] | None = None
    """The thread that still runs though its time is up; its slot is taken until it returns."""
    tries: int = 1
    """How often the handler was called: again after each collision of its transaction."""


class Calls:
    """Makes calls, each in a copy of the worker's context."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.context = copy_context()
        """The worker's context: every call runs in a copy of it."""
        self.stopping = False
        """Whether the worker stops: a cancellation then is the worker's, and not the handler's own."""
        self.bulk_calls = self.bulk_items = 0
        """Calls of bulk handlers, and the items they were given."""

    async def make(self, work: Work, called: Ended | None = None) -> Call:
        """Call the handler, and commit its own transaction if it has one. Only a worker that stops makes this raise.

        `called` is how the handler ended if it was called already. If its transaction only collided with others that
        wanted the same rows, the same attempt is made again.
        """
        backoff = Backoff(first=0.01, longest=1.0)
        while True:
            if called is not None:
                call, called = await self._conclude(work, called), None
            elif work.handler.is_async:
                call = await self._await(work)
            else:
                call = await self._run_in_thread(work)
            call.tries += backoff.tries
            transaction = work.context.own_transaction
            if call.error is None or call.overdue is not None or transaction is None:
                return call
            call.undone = True
            if backoff.tries == MOST_COLLISIONS or not transaction.collided(call.error):
                return call
            pause = backoff.pause()
            log.debug("Execution %s collided for the %d. time", work.leased[0].execution_id, backoff.tries)
            await asyncio.sleep(pause)
            if all(one.lease.lost for one in work.leased):
                return Call(void=SupersededError("Another worker has this command now."), tries=call.tries)
            work.context.own_transaction = None

    async def _await(self, work: Work) -> Call:
        try:
            called = await in_own_task(self.context.copy(), work.handler.timeout, work.call)
        except asyncio.CancelledError as error:
            called = Ended(error=error)
        return await self._conclude(work, called)

    async def _conclude(self, work: Work, called: Ended) -> Call:
        """Judge the answer of an awaited handler, and end its transaction."""
        transaction, error = work.context.own_transaction, called.error
        assert not isinstance(transaction, (SyncHandlerTransaction, SyncCallersTransaction))
        if isinstance(transaction, CallersTransaction):
            if self.stopping and isinstance(error, asyncio.CancelledError):
                raise error
            try:
                committed = await transaction.is_committed()
            except Exception as unknown:
                return work.failed(error or unknown)  # if it is committed, this failure does not count
            return _completed(work, transaction.transition, committed, error)
        try:
            if error is None:
                judged = work.judge(called.result)
                if transaction is None or (plan := work.ending(judged)) is None:
                    return Call(judged)
                return Call(judged, ended=await transaction.commit(plan))
        except SupersededError as superseded:
            return Call(void=superseded)
        except BaseException as refused:  # the commit was refused
            error = refused
        finally:
            if transaction is not None:
                await transaction.rollback()
        if self.stopping and isinstance(error, asyncio.CancelledError):
            raise error  # what it was called with is handed back
        return work.failed(error)

    async def _run_in_thread(self, work: Work) -> Call:
        running = self._threads.submit(partial(self.context.copy().run, _call, work), work.leased)
        done, _ = await asyncio.wait({running}, timeout=work.handler.timeout)
        if done:
            return running.result()
        work.context.timed_out = True
        self._threads.time_is_up(running)
        undone = work.context.own_transaction is not None
        return Call(error=timed_out(work.handler.timeout), undone=undone, overdue=running)


def _call(work: Work) -> Call:
    """In a thread: call a handler, judge its answer, and end its transaction."""
    try:
        try:
            value = work.call()
        except BaseException as error:
            if isinstance(work.context.own_transaction, SyncCallersTransaction):
                return _look_up(work, work.context.own_transaction, error)
            return work.failed(error)
        transaction = work.context.own_transaction
        assert not isinstance(transaction, (HandlerTransaction, CallersTransaction))
        if isinstance(transaction, SyncCallersTransaction):
            return _look_up(work, transaction, None)
        judged = work.judge(value)
        if transaction is None or (plan := work.ending(judged)) is None:
            return Call(judged)
        if work.context.timed_out:
            raise SupersededError("The handler outlived its time; what it wrote was rolled back.")
        return Call(judged, ended=transaction.commit(plan))
    except SupersededError as superseded:
        return Call(void=superseded)
    except BaseException as refused:  # the commit was refused
        return Call(error=refused)
    finally:
        if isinstance(work.context.own_transaction, SyncHandlerTransaction):
            work.context.own_transaction.rollback()


def _look_up(work: Work, transaction: SyncCallersTransaction, error: BaseException | None) -> Call:
    try:
        committed = transaction.is_committed()
    except Exception as unknown:
        return work.failed(error or unknown)  # if it is committed, this failure does not count
    return _completed(work, transaction.transition, committed, error)


def _completed(work: Work, transition: Transition, committed: bool, error: BaseException | None) -> Call:
    """What came of a call in which the handler has completed its command in a transaction of its own."""
    if committed:
        if error is not None:
            log.warning(
                "Execution %s is completed, though its handler raised %r", transition.leased.execution_id, error
            )
        return Call(transition, ended=True)
    if isinstance(error, SupersededError):
        return Call(void=error)
    return work.failed(error or UncommittedError())


async def outlast(overdue: asyncio.Future[Any], handler: Handler, what: str) -> None:
    """Wait for a thread whose time is up: it cannot be stopped, and its slot is taken until it returns."""
    log.warning("A handler of %s still runs after its %s s and keeps its slot until it returns", what, handler.timeout)
    await asyncio.wait({overdue})


def argument_of(leased: Leased) -> Command | Group:
    """What a handler of single commands gets; raises `UndecodableError`."""
    command = command_of(leased)
    return exhausted_group(command) if leased.command_type == EXHAUSTED else command


def command_of(leased: Leased) -> Command:
    """What a handler gets; raises `UndecodableError`."""
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
        leased.created_at or lease.created_at,
        None if leased.headers is lease.headers is None else joined_headers(lease.headers, leased.headers),
    )

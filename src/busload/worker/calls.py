"""One call of a bulk handler, awaited or in a thread: what came of it, and which items are to blame if it failed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from busload.domain.bulk import Chunk, Group, Item, Judgement, isolate
from busload.domain.command import Command
from busload.domain.execution import Failed, Leased, Stopped, deciding
from busload.domain.payload import decode
from busload.errors import BusinessRuleError, PermanentCommandError, RateLimited, Superseded
from busload.handlers import Handler
from busload.store.plan import Plan
from busload.worker.contain import in_own_task, timed_out
from busload.worker.context import ChunkContext, HandlerContext, SyncChunkContext, SyncHandlerContext
from busload.worker.limit import Postponed
from busload.worker.threads import Threads


class Collided(Exception):
    """The handler's transaction met others that wanted the same rows, and was rolled back; the call is made again."""


MOST_COLLISIONS = 10
"""How many times in a row one attempt is made again; a transaction that meets others each time is at fault itself."""


def pause_after(collisions: int) -> float:
    """Seconds until a command is tried again whose transaction has met others so many times in a row.

    At first hardly any, by chance, so that those who met do not meet again; in the end half a second to one.
    """
    return min(1.0, 0.005 * float(1 << min(collisions, 10))) * random.uniform(0.5, 1)  # noqa: S311 - hides nothing


FINAL_WORDS = (BusinessRuleError, PermanentCommandError)

End = Callable[[Judgement, Any], Plan[Any]]
"""Given a judgement and what the handler has returned: the plan that ends the call's items within its transaction."""

Before = Callable[[], None] | None


@dataclass(slots=True)
class Call:
    """What came of a call.

    `ended` is what the plan has answered that was committed with the handler's own transaction; None if it had none.
    `overdue` is the thread that is still at it though its time is up: its slot is taken until it returns.
    """

    judgement: Judgement
    value: Any = None
    ended: Any = None
    overdue: asyncio.Future[Any] | None = None

    @property
    def refusal(self) -> RateLimited | None:
        """What the receiver said if it wants fewer calls."""
        told = (deciding(error) for _, error in self.judgement.failed)
        return next((error for error in told if isinstance(error, RateLimited)), None)


class Calls:
    """Makes calls, each in a copy of `context`; `stopping` tells a handler's own cancellation from that of its slot."""

    def __init__(self, threads: Threads, context: Context, stopping: Callable[[], bool]) -> None:
        self._threads, self._context, self._stopping = threads, context, stopping
        self.made = self.items = 0

    async def call(
        self,
        handler: Handler,
        bulk: Group | Chunk,
        context: HandlerContext | ChunkContext | SyncHandlerContext | SyncChunkContext,
        end: End,
        before: Before = None,
    ) -> Call:
        """Whatever the handler raises is its judgement. `Superseded` is ours: its transaction could not end them.

        `before` is called right before the handler, and what that raises is raised here.
        """
        collisions = 0
        while True:
            made = True
            try:
                if isinstance(context, HandlerContext | ChunkContext):
                    return await self._await(handler, bulk, context, end, before)
                return await self._in_thread(handler, bulk, context, end, before)
            except Postponed:  # its turn had passed before it could begin
                made = False
                raise
            except Collided as collided:
                if collisions == MOST_COLLISIONS and collided.__cause__ is not None:
                    return Call(_undone(bulk.judgement(collided.__cause__), collided.__cause__))
                collisions += 1
                bulk._forget()
                context._transaction = None
                await asyncio.sleep(pause_after(collisions))
            finally:
                if made:
                    self.made += 1
                    self.items += len(bulk)

    async def _await(
        self, handler: Handler, bulk: Group | Chunk, context: HandlerContext | ChunkContext, end: End, before: Before
    ) -> Call:
        try:
            own = self._context.copy()
            called = await in_own_task(own, handler.timeout, handler.function, bulk, context, before=before)
            if called.error is not None:
                return Call(_failed(bulk, called.error, context))
            transaction = context._transaction
            try:
                judgement = bulk.judgement()
                if transaction is None or transaction.conn is None:
                    return Call(judgement, called.result)
                return Call(judgement, called.result, await transaction.commit(end(judgement, called.result)))
            except Superseded:
                raise
            except asyncio.CancelledError as error:
                if self._stopping():
                    raise
                return Call(_failed(bulk, error, context))
            except BaseException as error:
                return Call(_failed(bulk, error, context))
        finally:
            if context._transaction is not None:
                await context._transaction.rollback()

    async def _in_thread(
        self,
        handler: Handler,
        bulk: Group | Chunk,
        context: SyncHandlerContext | SyncChunkContext,
        end: End,
        before: Before,
    ) -> Call:
        def run() -> Call:
            try:
                if before is not None:
                    before()
                try:
                    value = handler.function(bulk, context)
                except BaseException as error:
                    return Call(_failed(bulk, error, context))
                transaction = context._transaction
                try:
                    judgement = bulk.judgement()
                    if transaction is None or transaction.conn is None:
                        return Call(judgement, value)
                    if context._timed_out:
                        raise Superseded("The handler outlived its time; what it wrote was rolled back.")
                    return Call(judgement, value, transaction.commit(end(judgement, value)))
                except Superseded:
                    raise
                except BaseException as error:
                    return Call(_failed(bulk, error, context))
            finally:
                if context._transaction is not None:
                    context._transaction.rollback()

        running = self._threads.submit(run, self._context.copy(), context._commands)
        done, _ = await asyncio.wait({running}, timeout=handler.timeout)
        if done:
            call: Call = running.result()
            return call
        context._give_up()
        return Call(_failed(bulk, timed_out(handler.timeout), context), overdue=running)


def isolates(handler: Handler, call: Call, attempt: int) -> bool:
    """Whether to look for the bad items: after the second whole failure, or as soon as trying again is in vain."""
    judgement = call.judgement
    if not handler.isolate_poison or judgement.answered or call.overdue is not None or len(judgement.failed) < 2:
        return False
    error = deciding(judgement.failed[0][1])
    return not isinstance(error, RateLimited) and (attempt > 1 or isinstance(error, FINAL_WORDS))


Attempt = Callable[[list[Item]], Awaitable[Call | None]]
"""Calls the handler with a part and ends what passes; None if there is no point in going on."""


async def find_bad(
    failed: Sequence[tuple[Item, BaseException]], attempt: Attempt
) -> tuple[list[tuple[Item, BaseException]], asyncio.Future[Any] | None]:
    """Try parts of what has failed as a whole until the bad ones stand alone.

    Returns what is left, each with the last error it was there for, and a thread that outlived its time.
    """
    search = _Search(failed, attempt)
    parts = isolate([item for item, _ in failed])
    try:
        part = next(parts)
        while not search.over:
            part = parts.send(await search.passes(part))
    except StopIteration:
        if not search.proven:  # every part has passed: perhaps there were too many, and the last one was not tried
            await search.passes([item for item, _ in search.left.values()])
    return list(search.left.values()), search.overdue


class _Search:
    """What is known so far about items that failed together."""

    def __init__(self, failed: Sequence[tuple[Item, BaseException]], attempt: Attempt) -> None:
        self._attempt = attempt
        self._judged: set[Any] = set()
        self.left = {item.id: (item, error) for item, error in failed}
        self.proven = self.over = False
        self.overdue: asyncio.Future[Any] | None = None

    async def passes(self, part: list[Item]) -> bool:
        """Whether nobody in this part is under suspicion any more: all are done, or have a verdict of their own."""
        unknown = [item for item in part if item.id in self.left and item.id not in self._judged]
        if not unknown:
            return True
        call = await self._attempt(unknown)
        if call is None:
            self.over = True
            return False
        judgement = call.judgement
        for item in judgement.done:
            del self.left[item.id]
        self.left |= {item.id: (item, error) for item, error in judgement.failed}
        if judgement.answered:
            self._judged.update(item.id for item, _ in judgement.failed)
        self.proven = self.proven or not judgement.answered
        self.overdue = call.overdue
        self.over = call.overdue is not None
        return judgement.answered


def command_of(leased: Leased) -> Command:
    """What a handler gets; raises `Undecodable`."""
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
    )


def failure(leased: Leased, error: BaseException) -> Failed | Stopped:
    """A handler of a canceled batch that raises has stopped as it was asked to, unless it says something final."""
    if leased.lease.canceled and not isinstance(deciding(error), FINAL_WORDS):
        return Stopped(error)
    return Failed(error)


def _failed(
    bulk: Group | Chunk,
    error: BaseException,
    context: HandlerContext | ChunkContext | SyncHandlerContext | SyncChunkContext,
) -> Judgement:
    """The judgement of a call that raised. If it had a transaction, nothing of it is done: that was rolled back."""
    judgement = bulk.judgement(error)
    if context._transaction is None:
        return judgement
    if context._transaction.collided(error):
        raise Collided from error
    return _undone(judgement, error)


def _undone(judgement: Judgement, error: BaseException) -> Judgement:
    undone = [(item, error) for item in judgement.done]
    return Judgement([], judgement.failed + undone, {}, answered=bool(judgement.failed) and judgement.answered)

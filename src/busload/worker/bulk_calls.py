"""Calls of a bulk handler with the items of a chunk or group, or with parts of them, to find the bad items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from busload.commands.bulk_items import Chunk, Group, Item, Judgement, isolate
from busload.commands.execution import FINAL_ERRORS, Leased, deciding
from busload.errors import RateLimitedError
from busload.handlers import Handler
from busload.limits.limiter import Entered, Limiter, PostponedError, TurnPassedError
from busload.postgres.plan import Plan
from busload.sync.context import SyncChunkContext, SyncHandlerContext
from busload.worker.call_handler import Call, Calls, Work
from busload.worker.context import ChunkContext, HandlerContext

End = Callable[[Judgement, Any], Plan[Any]]
"""Given a judgement and the result of the handler: the plan that ends the items in the handler's transaction."""


@dataclass(slots=True, eq=False)
class BulkCall:
    """What came of a call with many items; `ended` and `overdue` are those of its `Call`."""

    judgement: Judgement
    value: Any = None
    ended: Any = None
    overdue: asyncio.Future[Any] | None = None

    @property
    def refusal(self) -> RateLimitedError | None:
        """The error by which the receiver asks for fewer calls, if it does."""
        errors = (deciding(error) for _, error in self.judgement.failed)
        return next((error for error in errors if isinstance(error, RateLimitedError)), None)


class BulkCalls:
    """The calls for one chunk or group."""

    def __init__(self, calls: Calls, limiter: Limiter, handler: Handler, domain: str, command_type: str) -> None:
        self._calls, self._limiter, self._handler = calls, limiter, handler
        self._domain, self._command_type = domain, command_type
        self.made = 0
        """How often the handler was called, with the call under way."""
        self.postponed: PostponedError | None = None
        """Until when the items wait that the receiver has refused."""
        self.cut_short: PostponedError | None = None
        """Why the search for bad items has ended early: the domain was paused, or the worker stops."""

    async def enter(self, bulk: Group | Chunk, *, patient: bool) -> Entered | None:
        """Wait for the turn of a call, if the handler has a limit; see `Limiter.enter`."""
        limit = self._handler.rate_limit
        if limit is None:
            return None
        return await self._limiter.enter(limit, self._domain, self._command_type, bulk, patient=patient)

    async def call(
        self,
        bulk: Group | Chunk,
        context: HandlerContext | ChunkContext | SyncHandlerContext | SyncChunkContext,
        leased: Sequence[Leased],
        end: End,
        entered: Entered | None,
    ) -> BulkCall:
        """Call the handler. Its errors judge the items. An error that makes the call void is raised."""

        def begin() -> None:
            if entered is not None:
                entered.refuse_late()
            self.made += 1
            bulk.forget_verdicts()  # of a call that is made again

        def judge(value: Any) -> BulkCall:
            return BulkCall(bulk.judgement(), value)

        def finish(judged: BulkCall) -> Plan[Any]:
            return end(judged.judgement, judged.value)

        call = await self._calls.make(Work(self._handler, bulk, context, leased, judge, finish, begin))
        self._calls.count_bulk(call.tries, call.tries * len(bulk))
        if call.void is not None:
            raise call.void
        made: BulkCall = call.judged if call.error is None else BulkCall(_judge_failed(bulk, call.error, call))
        made.ended, made.overdue = call.ended, call.overdue
        if (refusal := made.refusal) is not None:
            about = (self._domain, self._command_type, bulk)
            self.postponed = await self._limiter.refused(self._handler.rate_limit, *about, refusal, entered)
        return made

    async def insist(self, attempt: Callable[[], Awaitable[BulkCall | None]]) -> BulkCall | None:
        """Repeat a call until the receiver accepts it; None if `attempt` gives up, or nothing may start any more."""
        while True:
            try:
                call = await attempt()
                if call is None or call.judgement.answered or call.refusal is None or self.postponed is None:
                    return call
                if self._handler.rate_limit is None:  # else the next turn comes after the pause
                    await self._limiter.wait_out(self._domain, self.postponed)
            except TurnPassedError:
                continue  # the search goes on with the next turn
            except PostponedError as postponed:
                self.cut_short = postponed
                return None


def _judge_failed(bulk: Group | Chunk, error: BaseException, call: Call) -> Judgement:
    """The judgement of a call that raised. If its own transaction was rolled back, no item is done."""
    judgement = bulk.judgement(error)
    if not call.undone:
        return judgement
    undone = [(item, error) for item in judgement.done]
    return Judgement([], judgement.failed + undone, {}, answered=bool(judgement.failed) and judgement.answered)


def isolates(handler: Handler, call: BulkCall, attempt: int) -> bool:
    """Whether to search for bad items: after the second failure as a whole, or if trying again is in vain."""
    judgement = call.judgement
    if not handler.isolate_poison or judgement.answered or call.overdue is not None or len(judgement.failed) < 2:
        return False
    error = deciding(judgement.failed[0][1])
    return not isinstance(error, RateLimitedError) and (attempt > 1 or isinstance(error, FINAL_ERRORS))


Attempt = Callable[[list[Item]], Awaitable[BulkCall | None]]
"""Calls the handler with a part, and ends the items that pass; None ends the search."""


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
        if not search.proven:  # every part has passed: perhaps together they are too many; try the last part
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
        """Whether no item of this part is suspect any more: all are done, or have a verdict of their own."""
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

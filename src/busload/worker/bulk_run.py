"""One attempt at a chunk or a group: a call with all its items and, to find the bad ones, calls with parts of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from busload.commands.bulk_items import Chunk, Group, Item, Judgement, isolate
from busload.commands.execution import Leased, deciding, is_final
from busload.errors import RateLimitedError
from busload.handlers.registry import Handler
from busload.limits.limiter import Entered, PostponedError, TurnPassedError
from busload.postgres.plan import Plan
from busload.sync.context import SyncChunkContext, SyncHandlerContext
from busload.worker.call_handler import Call, Calls, Work
from busload.worker.context import ChunkContext, HandlerContext
from busload.worker.permits import Permit
from busload.worker.settlement import Outcomes, Settlement
from busload.worker.shared import Shared


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


@dataclass(frozen=True, slots=True)
class Stations:
    """What runs of chunks and groups need of their worker."""

    shared: Shared
    calls: Calls
    outcomes: Outcomes
    settlement: Settlement


class BulkRun(ABC):
    """What runs of chunks and of groups have in common."""

    def __init__(self, stations: Stations, handler: Handler, domain: str, command_type: str) -> None:
        self._shared, self._calls, self._settlement = stations.shared, stations.calls, stations.settlement
        self._handler, self._kind = handler, (domain, command_type)
        self._made = 0
        """How often the handler was called, with the call under way."""
        self._postponed: PostponedError | None = None
        """Until when the items wait that the receiver has refused."""
        self._permit: Permit | None = None
        self._cut_short: PostponedError | None = None
        """Why the search for bad items has ended early: the domain was paused, or the worker stops."""

    @abstractmethod
    async def _call_part(self, items: list[Item]) -> BulkCall | None:
        """Call the handler with some items, and end those that pass; None if they are not ours any more."""

    def leave(self) -> None:
        """Nothing more is called."""
        if self._permit is not None:
            self._shared.permits.free(self._permit)

    async def _enter(self, bulk: Group | Chunk, leased: Sequence[Leased], *, patient: bool) -> Entered | None:
        """Wait for the turn of a call, if the handler has a limit; see `Limiter.enter`.

        A permit is asked for once: it holds for all calls of this attempt, which are made one after the other.
        """
        if self._handler.concurrency_limit is not None and self._permit is None:
            self._permit = await self._shared.permits.enter(self._handler, *self._kind, bulk, leased)
        limit = self._handler.rate_limit
        return None if limit is None else await self._shared.limiter.enter(limit, *self._kind, bulk, patient=patient)

    async def _make_call(
        self,
        bulk: Group | Chunk,
        context: HandlerContext | ChunkContext | SyncHandlerContext | SyncChunkContext,
        leased: Sequence[Leased],
        end: Callable[[BulkCall], Plan[Any]],
        entered: Entered | None,
    ) -> BulkCall:
        """Call the handler. Its errors judge the items. An error that makes the call void is raised.

        `end` returns the plan that ends the items in the handler's own transaction.
        """

        def begin() -> None:
            self._shared.permits.begin_call(entered, self._permit)
            self._made += 1
            bulk.forget_verdicts()  # of a call that is made again

        def judge(value: Any) -> BulkCall:
            return BulkCall(bulk.judgement(), value)

        call = await self._calls.make(Work(self._handler, bulk, context, leased, judge, end, begin))
        self._calls.bulk_calls += call.tries
        self._calls.bulk_items += call.tries * len(bulk)
        if call.void is not None:
            raise call.void
        made: BulkCall = call.judged if call.error is None else BulkCall(_judge_failed(bulk, call.error, call))
        made.ended, made.overdue = call.ended, call.overdue
        if (refusal := made.refusal) is not None:
            limit = self._handler.rate_limit
            self._postponed = await self._shared.limiter.refused(limit, *self._kind, bulk, refusal, entered)
        return made

    async def _find_bad(self, call: BulkCall, attempt: int) -> tuple[Judgement, asyncio.Future[Any] | None]:
        """If a call has failed as a whole, try parts of its items until the bad ones stand alone.

        Returns how the items have ended that no part has ended yet, and a thread that outlived its time.
        """
        if not self._isolates(call, attempt):
            return call.judgement, call.overdue
        left = {item.id: (item, error) for item, error in call.judgement.failed}
        judged: set[Any] = set()
        proven, overdue = False, None
        parts = isolate([item for item, _ in left.values()])
        part = next(parts)
        while part:
            passes = True
            unknown = [item for item in part if item.id in left and item.id not in judged]
            if unknown:
                tried = await self._try(unknown)
                if tried is None:
                    break
                judgement, passes, overdue = tried.judgement, tried.judgement.answered, tried.overdue
                for item in judgement.done:
                    del left[item.id]
                left |= {item.id: (item, error) for item, error in judgement.failed}
                if passes:  # all are done, or have a verdict of their own
                    judged.update(item.id for item, _ in judgement.failed)
                else:
                    proven = True
                if overdue is not None:
                    break
            try:
                part = parts.send(passes)
            except StopIteration:  # if every part has passed, perhaps together they are too many: try the last part
                part = [] if proven else [item for item, _ in left.values() if item.id not in judged]
        return Judgement([], list(left.values()), {}, answered=True), overdue

    def _isolates(self, call: BulkCall, attempt: int) -> bool:
        """Whether to search for bad items: after the second failure as a whole, or if trying again is in vain."""
        failed = call.judgement.failed
        if not self._handler.isolate_poison or call.judgement.answered or call.overdue is not None or len(failed) < 2:
            return False
        error = deciding(failed[0][1])
        return not isinstance(error, RateLimitedError) and (attempt > 1 or is_final(failed[0][1], self._handler.retry))

    async def _try(self, items: list[Item]) -> BulkCall | None:
        """Repeat a call until the receiver accepts it; None if nothing of it is ours, or nothing may start any more."""
        while True:
            try:
                call = await self._call_part(items)
                if call is None or call.judgement.answered or call.refusal is None or self._postponed is None:
                    return call
                if self._handler.rate_limit is None:  # else the next turn comes after the pause
                    await self._shared.limiter.wait_out(self._kind[0], self._postponed)
            except TurnPassedError:
                continue  # the search goes on with the next turn
            except PostponedError as postponed:
                self._cut_short = postponed
                return None


def _judge_failed(bulk: Group | Chunk, error: BaseException, call: Call) -> Judgement:
    """The judgement of a call that raised. If its own transaction was rolled back, no item is done."""
    judgement = bulk.judgement(error)
    if not call.undone:
        return judgement
    undone = [(item, error) for item in judgement.done]
    return Judgement([], judgement.failed + undone, {}, answered=bool(judgement.failed) and judgement.answered)

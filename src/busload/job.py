"""What takes a job from stage to stage: a handler that every worker has, and the planners of the application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any
from uuid import UUID

from busload import store
from busload.domain.batch import BatchMetadata
from busload.domain.command import BatchCommand, Command, CommandMetadata
from busload.domain.job import JobMetadata, StageStatus, read_step
from busload.domain.rate import is_async
from busload.domain.retry import RetryPolicy
from busload.errors import (
    BusinessRuleError,
    DuplicateCommandError,
    InvalidCommandError,
    JobNotFoundError,
    PermanentCommandError,
)
from busload.store.plan import perform, perform_async

if TYPE_CHECKING:
    from busload.bus import CommandBus, SyncCommandBus
    from busload.worker.context import HandlerContext, SyncHandlerContext

RETRY = RetryPolicy(max_attempts=5, backoff=(1, 5, 30, 60))
PAGE = 1000
"""Commands of a finished stage that are read at once."""

FINAL = BusinessRuleError, DuplicateCommandError, InvalidCommandError, JobNotFoundError
"""What is the same at the next attempt: a person must look."""


class FinishedStage:
    """What a planner gets: the job, and the stage that has just ended. A stage that was skipped has no batch."""

    def __init__(self, bus: CommandBus, finished: store.job.Finished) -> None:
        self._bus = bus
        self.job: JobMetadata = finished.job
        self.name: str = finished.ended.name
        self.status: StageStatus = finished.ended.status
        self.batch: BatchMetadata | None = finished.ended.batch

    async def results(self, status: str | None = None) -> AsyncIterator[CommandMetadata]:
        """Every command of the stage, or those of one status, with its data and result; read page by page."""
        after: UUID | None = None
        while self.batch is not None:
            page = await self._bus.list_batch_commands(
                self.job.domain, self.batch.batch_id, status=status, limit=PAGE, after=after
            )
            for command in page:
                yield command
            if len(page) < PAGE:
                return
            after = page[-1].command_id


class SyncFinishedStage:
    """What a planner written with `def` gets; see `FinishedStage`."""

    def __init__(self, bus: SyncCommandBus, finished: store.job.Finished) -> None:
        self._bus = bus
        self.job: JobMetadata = finished.job
        self.name: str = finished.ended.name
        self.status: StageStatus = finished.ended.status
        self.batch: BatchMetadata | None = finished.ended.batch

    def results(self, status: str | None = None) -> Iterator[CommandMetadata]:
        """Every command of the stage, or those of one status, with its data and result; read page by page."""
        after: UUID | None = None
        while self.batch is not None:
            page = self._bus.list_batch_commands(
                self.job.domain, self.batch.batch_id, status=status, limit=PAGE, after=after
            )
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1].command_id


async def advance(command: Command, ctx: HandlerContext) -> dict[str, Any]:
    """Begin the next stage of a job, or end it, in the transaction that completes this step."""
    step = read_step(command.data)
    try:
        async with ctx.transaction() as conn:
            return {"job": await perform_async(conn, ctx._bus._requests.advance(command.domain, step))}
    except FINAL as error:
        raise _for_a_person(error) from error


def planner(function: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that begins a stage with what the function returns, in the transaction that completes the step."""

    @wraps(function)
    async def plan(command: Command, ctx: HandlerContext) -> dict[str, Any] | None:
        step, bus = read_step(command.data), ctx._bus
        try:
            finished = await bus._look(store.job.look(command.domain, step))
            if finished is None:
                return None
            planned = await function(FinishedStage(bus, finished), ctx)
            begin = bus._requests.begin_planned(command.domain, step, _commands(finished, planned))
            used = None if ctx._transaction is None else ctx._transaction.conn
            if used is not None:  # the planner's own writes and the stage are one
                return {"job": await perform_async(used, begin)}
            async with ctx.transaction() as conn:
                return {"job": await perform_async(conn, begin)}
        except FINAL as error:
            raise _for_a_person(error) from error

    @wraps(function)
    def plan_in_thread(command: Command, ctx: SyncHandlerContext) -> dict[str, Any] | None:
        step, bus = read_step(command.data), ctx._bus
        try:
            finished = bus._look(store.job.look(command.domain, step))
            if finished is None:
                return None
            planned = function(SyncFinishedStage(bus, finished), ctx)
            begin = bus._requests.begin_planned(command.domain, step, _commands(finished, planned))
            used = None if ctx._transaction is None else ctx._transaction.conn
            if used is not None:
                return {"job": perform(used, begin)}
            with ctx.transaction() as conn:
                return {"job": perform(conn, begin)}
        except FINAL as error:
            raise _for_a_person(error) from error

    return plan if is_async(function) else plan_in_thread


def _commands(finished: store.job.Finished, planned: object) -> list[BatchCommand]:
    if isinstance(planned, str | bytes | dict | BatchCommand) or not isinstance(planned, Iterable):
        raise PermanentCommandError(
            f"The planner of stage {finished.name!r} returned {planned!r:.80}, wanted a list of BatchCommand; "
            "an empty one skips the stage.",
            code="INVALID_PLAN",
        )
    return list(planned)


def _for_a_person(error: Exception) -> PermanentCommandError:
    """No retry would help. A planner's BusinessRuleError too: ended as FAILED, it would leave its job nowhere."""
    return PermanentCommandError(
        str(error), code=getattr(error, "code", None) or type(error).__name__, details=getattr(error, "details", None)
    )

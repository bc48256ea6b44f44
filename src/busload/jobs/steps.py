"""What workers run between two stages of a job: the step to the next stage, and planners."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from busload.batches.batch import BatchMetadata
from busload.commands.check_commands import check_all
from busload.commands.checks import check
from busload.commands.command import BatchCommand, Command, CommandMetadata, CommandStatus, CommandStatusName
from busload.commands.headers import encode_headers
from busload.commands.send_middleware import around_send
from busload.errors import (
    BusinessRuleError,
    DuplicateCommandError,
    InvalidCommandError,
    JobNotFoundError,
    PermanentCommandError,
)
from busload.jobs import progress
from busload.jobs.job import JobMetadata, StageMetadata, StageStatus, read_step
from busload.postgres.callers_connection import perform_any

PAGE = 1000
"""Commands of a finished stage that are read at once."""

FINAL = BusinessRuleError, DuplicateCommandError, InvalidCommandError, JobNotFoundError
"""What is the same at the next attempt: a person must look."""


async def advance(command: Command, ctx: Any) -> dict[str, Any]:
    """Begin the next stage of a job, or end it, in the transaction that completes this step."""
    step = read_step(command.data)
    try:
        async with ctx.transaction() as conn:
            headers = encode_headers(command.headers)
            plan = progress.advance(command.domain, step, command.command_id, ctx.bus.via, headers)
            return {"job": await perform_any(conn, plan)}
    except FINAL as error:
        raise _for_a_person(error) from error


class FinishedStage:
    """What a planner gets: the job, and the stage that has just ended. A stage that was skipped has no batch."""

    def __init__(self, bus: Any, job: JobMetadata, ended: StageMetadata) -> None:
        self._bus, self.job = bus, job
        self.name: str = ended.name
        self.status: StageStatus = ended.status
        self.batch: BatchMetadata | None = ended.batch

    async def results(self, status: CommandStatus | CommandStatusName | None = None) -> AsyncIterator[CommandMetadata]:
        """Every command of the stage, or those of one `status`, with its data and result; read page by page."""
        after: CommandMetadata | None = None
        while self.batch is not None:
            page = await self._bus.list_batch_commands(
                self.job.domain, self.batch.batch_id, status=status, limit=PAGE, after=after
            )
            for command in page:
                yield command
            if len(page) < PAGE:
                return
            after = page[-1]


async def plan_stage(function: Callable[..., Any], command: Command, ctx: Any) -> dict[str, Any] | None:
    """Begin a stage with what the function returns, in the transaction that completes the step."""
    step, bus = read_step(command.data), ctx.bus
    try:
        job = await bus.database.in_transaction(progress.job_to_plan(command.domain, step))
        if job is None:
            return None
        planned = await function(FinishedStage(bus, job, job.stages[step.position - 1]), ctx)
        commands = _commands(job.stages[step.position].name, planned)
        with around_send(bus.around_sends if commands else (), "planner", command.domain, command.headers) as call:
            check(bus.settings.limits, headers=call.headers)
            checked = check_all(command.domain, commands, bus.settings.limits, bus.data_types)
            begin = progress.begin_planned(command.domain, step, checked, bus.via, encode_headers(call.headers))
            used = None if ctx.own_transaction is None else ctx.own_transaction.conn
            if used is not None:  # the planner's own writes and the stage are one
                call.result = await perform_any(used, begin)
            else:
                async with ctx.transaction() as conn:
                    call.result = await perform_any(conn, begin)
        return {"job": call.result}
    except FINAL as error:
        raise _for_a_person(error) from error


def _commands(stage: str, planned: object) -> list[BatchCommand]:
    if isinstance(planned, str | bytes | dict | BatchCommand) or not isinstance(planned, Iterable):
        raise PermanentCommandError(
            f"The planner of stage {stage!r} returned {planned!r:.80}, wanted a list of BatchCommand; "
            "an empty one skips the stage.",
            code="INVALID_PLAN",
        )
    return list(planned)


def _for_a_person(error: Exception) -> PermanentCommandError:
    """No retry would help. A planner's BusinessRuleError too: ended as FAILED, it would leave its job nowhere."""
    return PermanentCommandError(
        str(error), code=getattr(error, "code", None) or type(error).__name__, details=getattr(error, "details", None)
    )

"""`bus.jobs`: create jobs, follow them, and resume or cancel them. And how a planner plans the next stage of a job."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from busload.batches.batch import BatchMetadata
from busload.batches.cancel import cancel
from busload.commands.checks import check, check_all, choice, seconds_of
from busload.commands.command import BatchCommand, Command, CommandMetadata, CommandStatus, CommandStatusName
from busload.commands.send import Via
from busload.errors import (
    BusinessRuleError,
    DuplicateCommandError,
    InvalidCommandError,
    JobNotFoundError,
    PermanentCommandError,
)
from busload.jobs import progress
from busload.jobs.job import (
    JobMetadata,
    JobStatus,
    JobStatusName,
    Stage,
    StageMetadata,
    StageStatus,
    new_job,
    read_step,
)
from busload.postgres import waiting
from busload.postgres.connection import AnyConnection
from busload.postgres.database import Database
from busload.postgres.plan import perform_async
from busload.postgres.write import Write, patient, then
from busload.settings import Settings


class Jobs:
    """Jobs: batches one after the other, each of which begins when the one before is complete.

    `domain` and `job_id` name a job.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        via: Via,
        changes: Callable[[UUID], AbstractContextManager[waiting.Event]],
    ) -> None:
        self._database, self._limits, self._poll_every = database, settings.limits, settings.poll_every.total_seconds()
        self._via, self._changes = via, changes

    async def create(
        self,
        domain: str,
        stages: Iterable[Stage],
        *,
        job_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: BatchCommand | None = None,
        continue_after_failures: bool = False,
        conn: AnyConnection | None = None,
    ) -> UUID:
        """Create a job with its first batch in one transaction, and return its id: `job_id`, or a new one.

        Each of the `stages` becomes a batch in `domain` once the one before is complete. A stage without commands is
        planned then, by the `planner` of its name. A stage that completes with failures stops the job as FAILED, unless
        `continue_after_failures`. `on_complete` is sent when the job is COMPLETED, with the job under the key "job" of
        its data. `name` and `custom_data` are for you, and kept with the job. With `conn` the job exists exactly if
        that transaction commits.
        """
        new = new_job(
            self._limits,
            domain,
            stages,
            job_id=job_id,
            name=name,
            custom_data=custom_data,
            on_complete=on_complete,
            continue_after_failures=continue_after_failures,
        )
        return await self._database.write(Write(progress.create(new, self._via), job_id=new.job_id), conn)

    async def get(self, domain: str, job_id: UUID) -> JobMetadata | None:
        """A job with its stages; None if the domain has no such job."""
        check(self._limits, writes=False, domain=domain, job_id=job_id)
        return await self._database.in_transaction(progress.job(domain, job_id))

    async def list(
        self, domain: str, *, status: JobStatus | JobStatusName | None = None, limit: int = 100, offset: int = 0
    ) -> builtins.list[JobMetadata]:
        """The jobs of a domain, or those of one `status`, newest first: at most `limit`, after the first `offset`."""
        check(self._limits, writes=False, domain=domain, limit=limit, offset=offset)
        plan = progress.jobs(domain, status=choice(JobStatus, status), limit=limit, offset=offset)
        return await self._database.in_transaction(plan)

    async def resume(
        self, domain: str, job_id: UUID, *, operator: str | None = None, conn: AnyConnection | None = None
    ) -> None:
        """Let a FAILED job go on with its next stage; after the last stage it is COMPLETED.

        A job also goes on if an operator has completed or canceled, in troubleshooting, its step to the next stage.
        `operator` names who resumes it. With `conn` it is resumed when that transaction commits.
        """
        check(self._limits, domain=domain, job_id=job_id, operator=operator)
        plan = partial(progress.resume, domain, job_id, operator=operator, via=self._via)
        await self._database.write(patient(lambda: then(plan(), None), job_id=job_id), conn)

    async def cancel(
        self,
        domain: str,
        job_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: AnyConnection | None = None,
    ) -> int:
        """Stop a job and cancel the batch of its stage, as `cancel_batch` does; no further stage begins.

        Returns how many commands were canceled. A job that is COMPLETED or CANCELED is left as it is. `reason` and
        `operator`, who cancels it, are kept with the job. With `conn` it is all one transaction: yours.
        """
        check(self._limits, domain=domain, job_id=job_id, operator=operator, reason=reason)
        begin = partial(progress.begin_to_cancel, domain, job_id)
        return await cancel(self._database, begin, conn, reason=reason, operator=operator, job_id=job_id)

    async def wait(self, domain: str, job_id: UUID, timeout: timedelta | float | None = None) -> JobMetadata:
        """Return the job once it is COMPLETED, FAILED or CANCELED.

        After `timeout`, in seconds if it is a number, a `TimeoutError` says how far the job came.
        """
        check(self._limits, writes=False, domain=domain, job_id=job_id)
        job: JobMetadata | None = None
        with self._changes(job_id) as changed:
            try:
                async with waiting.TimeLimit(seconds_of(timeout)) as limit:
                    while True:
                        changed.clear()
                        plan = progress.job(domain, job_id)
                        job = await self._database.in_transaction(plan, within=limit.patience)
                        if job is None:
                            raise JobNotFoundError(domain, job_id)
                        if job.status.final:
                            return job
                        limit.check()
                        await changed.wait(min(limit.left, self._poll_every))
            except TimeoutError:
                raise _late(job_id, job) from None


def _late(job_id: UUID, job: JobMetadata | None) -> TimeoutError:
    if job is None:
        return TimeoutError(f"Job {job_id} has not ended in time: nothing was seen.")
    at = next((stage for stage in job.stages if not stage.status.final), job.stages[-1])
    return TimeoutError(f"Job {job_id} has not ended in time: it is {job.status}, at stage {at.name!r} ({at.status}).")


PAGE = 1000
"""Commands of a finished stage that are read at once."""

FINAL = BusinessRuleError, DuplicateCommandError, InvalidCommandError, JobNotFoundError
"""What is the same at the next attempt: a person must look."""


class FinishedStage:
    """What a planner gets: the job, and the stage that has just ended. A stage that was skipped has no batch."""

    def __init__(self, bus: Any, job: JobMetadata, ended: StageMetadata) -> None:
        self._bus, self.job = bus, job
        self.name: str = ended.name
        self.status: StageStatus = ended.status
        self.batch: BatchMetadata | None = ended.batch

    async def results(self, status: CommandStatus | CommandStatusName | None = None) -> AsyncIterator[CommandMetadata]:
        """Every command of the stage, or those of one `status`, with its data and result; read page by page."""
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


async def plan_stage(function: Callable[..., Any], command: Command, ctx: Any) -> dict[str, Any] | None:
    """Begin a stage with what the function returns, in the transaction that completes the step."""
    step, bus = read_step(command.data), ctx.bus
    try:
        job = await bus.database.in_transaction(progress.job_to_plan(command.domain, step))
        if job is None:
            return None
        planned = await function(FinishedStage(bus, job, job.stages[step.position - 1]), ctx)
        commands = _commands(job.stages[step.position].name, planned)
        checked = check_all(command.domain, commands, bus.settings.limits)
        begin = progress.begin_planned(command.domain, step, checked, bus.via)
        used = None if ctx.own_transaction is None else ctx.own_transaction.conn
        if used is not None:  # the planner's own writes and the stage are one
            return {"job": await perform_async(used, begin)}
        async with ctx.transaction() as conn:
            return {"job": await perform_async(conn, begin)}
    except FINAL as error:
        raise for_a_person(error) from error


def _commands(stage: str, planned: object) -> list[BatchCommand]:
    if isinstance(planned, str | bytes | dict | BatchCommand) or not isinstance(planned, Iterable):
        raise PermanentCommandError(
            f"The planner of stage {stage!r} returned {planned!r:.80}, wanted a list of BatchCommand; "
            "an empty one skips the stage.",
            code="INVALID_PLAN",
        )
    return list(planned)


def for_a_person(error: Exception) -> PermanentCommandError:
    """No retry would help. A planner's BusinessRuleError too: ended as FAILED, it would leave its job nowhere."""
    return PermanentCommandError(
        str(error), code=getattr(error, "code", None) or type(error).__name__, details=getattr(error, "details", None)
    )

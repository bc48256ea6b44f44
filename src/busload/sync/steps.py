"""Made from busload.jobs.steps by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from busload.batches.batch import BatchMetadata
from busload.commands.check_commands import check_all
from busload.commands.checks import check
from busload.commands.command import Command, CommandMetadata, CommandStatus, CommandStatusName
from busload.commands.headers import encode_headers
from busload.commands.send_middleware import around_send
from busload.jobs import progress
from busload.jobs.job import JobMetadata, StageMetadata, StageStatus, read_step
from busload.jobs.steps import FINAL, PAGE, _commands, _for_a_person
from busload.postgres.callers_connection import perform_in_threads


def advance(command: Command, ctx: Any) -> dict[str, Any]:
    """Begin the next stage of a job, or end it, in the transaction that completes this step."""
    step = read_step(command.data)
    try:
        with ctx.transaction() as conn:
            headers = encode_headers(command.headers)
            plan = progress.advance(command.domain, step, command.command_id, ctx.bus.via, headers)
            return {"job": perform_in_threads(conn, plan)}
    except FINAL as error:
        raise _for_a_person(error) from error


class SyncFinishedStage:
    """What a planner gets: the job, and the stage that has just ended. A stage that was skipped has no batch."""

    def __init__(self, bus: Any, job: JobMetadata, ended: StageMetadata) -> None:
        self._bus, self.job = bus, job
        self.name: str = ended.name
        self.status: StageStatus = ended.status
        self.batch: BatchMetadata | None = ended.batch

    def results(self, status: CommandStatus | CommandStatusName | None = None) -> Iterator[CommandMetadata]:
        """Every command of the stage, or those of one `status`, with its data and result; read page by page."""
        after: CommandMetadata | None = None
        while self.batch is not None:
            page = self._bus.list_batch_commands(
                self.job.domain, self.batch.batch_id, status=status, limit=PAGE, after=after
            )
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1]


def plan_stage(function: Callable[..., Any], command: Command, ctx: Any) -> dict[str, Any] | None:
    """Begin a stage with what the function returns, in the transaction that completes the step."""
    step, bus = read_step(command.data), ctx.bus
    try:
        job = bus.database.in_transaction(progress.job_to_plan(command.domain, step))
        if job is None:
            return None
        planned = function(SyncFinishedStage(bus, job, job.stages[step.position - 1]), ctx)
        commands = _commands(job.stages[step.position].name, planned)
        with around_send(bus.around_sends if commands else (), "planner", command.domain, command.headers) as call:
            check(bus.settings.limits, headers=call.headers)
            checked = check_all(command.domain, commands, bus.settings.limits, bus.data_types)
            begin = progress.begin_planned(command.domain, step, checked, bus.via, encode_headers(call.headers))
            used = None if ctx.own_transaction is None else ctx.own_transaction.conn
            if used is not None:  # the planner's own writes and the stage are one
                call.result = perform_in_threads(used, begin)
            else:
                with ctx.transaction() as conn:
                    call.result = perform_in_threads(conn, begin)
        return {"job": call.result}
    except FINAL as error:
        raise _for_a_person(error) from error

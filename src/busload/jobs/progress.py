"""How a job comes about and goes from stage to stage. Whoever moves it holds its row until the transaction ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import msgspec
from psycopg import errors as pg

from busload.batches.batch import BatchMetadata, BatchStatus, existing_batches, find_batch
from busload.batches.cancel import Begun
from busload.batches.cancel import begin_to_cancel as begin_to_cancel_batch
from busload.commands import search, send
from busload.commands.command import NewCommand
from busload.commands.ids import new_id, new_ids
from busload.commands.payload import WIDEST, decode, encode
from busload.commands.send import NO_BROKER, Via
from busload.dispatch import creation_state
from busload.errors import DuplicateCommandError, InvalidOperationError, JobNotFoundError, PermanentCommandError
from busload.explain.facts import ENDED, ONE_MOMENT
from busload.jobs.job import (
    PLAN,
    PRIORITY,
    STAGE,
    JobMetadata,
    JobStatus,
    NewJob,
    StageMetadata,
    StageStatus,
    Step,
    chosen_ids,
    parts,
    read_part,
    summary,
)
from busload.postgres.plan import Plan, Row, Savepoint, Script, execute, many, one
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A job whose row is held."""

    job_id: UUID
    domain: str
    name: str | None
    status: str
    position: int
    continue_after_failures: bool
    on_complete: str | None
    via: Via = NO_BROKER


@dataclass(frozen=True, slots=True)
class _Stage:
    job_id: UUID
    position: int
    name: str
    planned: bool
    batch_id: UUID
    step_id: UUID
    plan_id: UUID
    status: str

    @property
    def awaited(self) -> UUID:
        """The command that takes the job on from this stage."""
        return self.plan_id if self.status == StageStatus.PLANNING else self.step_id


def create(job: NewJob, via: Via = NO_BROKER) -> Plan[UUID]:
    """A job with its first batch; needs a transaction."""
    yield from _refuse_taken(job)
    try:
        yield Savepoint(execute(SQL.create, **job.columns()))
    except pg.UniqueViolation:
        raise InvalidOperationError(
            f"There is already a job {job.job_id}. Nothing was written; "
            "look at it with `busload job show`, or choose another job_id."
        ) from None
    count = len(job.stages)
    yield from execute(
        SQL.create_stages,
        job_id=job.job_id,
        names=[stage.name for stage in job.stages],
        planned=[stage.commands is None for stage in job.stages],
        batch_ids=new_ids(count),
        step_ids=new_ids(count),
        plan_ids=new_ids(count),
    )
    for position, stage in enumerate(job.stages[1:], 1):
        for part, commands in enumerate(parts(stage.commands or ())):
            yield from execute(SQL.keep_part, job_id=job.job_id, position=position, part=part, commands=commands)
    held, [first, *_] = yield from _hold(job.domain, job.job_id, via)
    yield from _start(held, first, job.stages[0].commands or ())
    return job.job_id


def advance(domain: str, step: Step, via: Via = NO_BROKER) -> Plan[str]:
    """Take a job on after a stage that has ended, and return its status. Needs the transaction that completes the step.

    A step that is repeated, or comes after the job was canceled, changes nothing.
    """
    job, stages = yield from _hold(domain, step.job_id, via)
    if step.position not in range(len(stages)) or stages[step.position].status != StageStatus.IN_PROGRESS:
        return job.status
    ended = stages[step.position]
    batch = yield from find_batch(domain, ended.batch_id)
    if batch is None or not batch.status.final:
        raise PermanentCommandError(f"Stage {ended.name!r} of job {job.job_id} has not ended.")
    yield from execute(SQL.mark_stage, job_id=job.job_id, position=ended.position, status=batch.status.value)
    if job.status != JobStatus.IN_PROGRESS:
        return job.status
    if batch.status == BatchStatus.COMPLETED_WITH_FAILURES and not job.continue_after_failures:
        yield from execute(SQL.end, job_id=job.job_id, status=JobStatus.FAILED.value)
        log.warning("Job %s stopped: stage %s completed with failures", job.job_id, ended.name)
        return JobStatus.FAILED.value
    return (yield from _begin(job, stages, ended.position + 1))


def job_to_plan(domain: str, step: Step) -> Plan[JobMetadata | None]:
    """The job of a stage; None if the stage is not to be planned any more. Needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    job = yield from _read(domain, step.job_id)
    if job is None:
        raise JobNotFoundError(domain, step.job_id)
    if job.status.final or step.position not in range(1, len(job.stages)):
        return None
    return job if job.stages[step.position].status == StageStatus.PLANNING else None


def begin_planned(domain: str, step: Step, commands: Sequence[NewCommand], via: Via = NO_BROKER) -> Plan[str]:
    """Begin a stage with the commands that its planner returned, or skip it; returns the status of the job.

    A step that is repeated, or comes after the job was canceled, changes nothing.
    """
    job, stages = yield from _hold(domain, step.job_id, via)
    stage = stages[step.position]
    if job.status != JobStatus.IN_PROGRESS or stage.status != StageStatus.PLANNING:
        return job.status
    if commands:
        return (yield from _start(job, stage, commands))
    yield from execute(SQL.arrive, job_id=job.job_id, position=stage.position, status=StageStatus.SKIPPED.value)
    return (yield from _begin(job, stages, stage.position + 1))


def resume(domain: str, job_id: UUID, *, operator: str | None, via: Via = NO_BROKER) -> Plan[str]:
    """Let a job go on that has stopped after failures, or whose step was ended by other hands; needs a transaction."""
    job, stages = yield from _hold(domain, job_id, via)
    here = stages[job.position]
    if job.status != JobStatus.FAILED and not (yield from _is_stuck(job, here)):
        wanted = "Only a job that has FAILED can be resumed, or one whose step was completed or canceled by hand"
        raise InvalidOperationError(f"Job {job_id} is {job.status}. {wanted}; look at it with `busload job show`.")
    yield from execute(SQL.sign, job_id=job_id, operator=operator, reason=None)
    if here.status == StageStatus.PLANNING:
        again = replace(here, plan_id=new_id())
        yield from execute(SQL.replan, job_id=job_id, position=here.position, plan_id=again.plan_id)
        return (yield from _send_planner(job, again))
    if here.status == StageStatus.IN_PROGRESS:
        batch = yield from find_batch(domain, here.batch_id)
        status = batch.status.value if batch is not None else StageStatus.COMPLETED_WITH_FAILURES.value
        yield from execute(SQL.mark_stage, job_id=job_id, position=here.position, status=status)
    return (yield from _begin(job, stages, job.position + 1))


def begin_to_cancel(domain: str, job_id: UUID, *, reason: str, operator: str | None, in_pages: bool) -> Plan[Begun]:
    """Stop a job and mark the batch of its stage as canceled; needs a transaction."""
    job, stages = yield from _hold(domain, job_id)
    if job.status not in (JobStatus.IN_PROGRESS, JobStatus.FAILED):
        return 0, None
    yield from execute(SQL.end, job_id=job_id, status=JobStatus.CANCELED.value)
    yield from execute(SQL.sign, job_id=job_id, operator=operator, reason=reason)
    yield from execute(SQL.drop_parts, job_id=job_id)
    here = stages[job.position]
    if here.status == StageStatus.PLANNING:
        about = {"domain": domain, "plan_id": here.plan_id}
        [(ended,)] = yield from execute(SQL.cancel_planner, **about, reason=reason, operator=operator)
        return int(ended), None
    if here.status != StageStatus.IN_PROGRESS:
        return 0, None
    return (
        yield from begin_to_cancel_batch(domain, here.batch_id, reason=reason, operator=operator, in_pages=in_pages)
    )


def job(domain: str, job_id: UUID) -> Plan[JobMetadata | None]:
    """Needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    return (yield from _read(domain, job_id))


def jobs(domain: str, *, status: JobStatus | None, limit: int, offset: int) -> Plan[list[JobMetadata]]:
    """Newest first; needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    rows = yield from execute(SQL.jobs, domain=domain, status=status and status.value, limit=limit, offset=offset)
    return (yield from _with_stages(domain, rows))


def _refuse_taken(job: NewJob) -> Plan[None]:
    """What later stages and the callback will use must be free now, though it is not held until then."""
    for domain, ids in chosen_ids(job.domain, job.stages[1:], job.callback_id).items():
        taken = yield from send.taken_ids(domain, ids)
        if taken:
            raise DuplicateCommandError(domain, taken)


def _hold(domain: str, job_id: UUID, via: Via = NO_BROKER) -> Plan[tuple[_Job, list[_Stage]]]:
    """Lock the row of a job, and read its stages after that."""
    job = yield from one(_Job, SQL.hold, domain=domain, job_id=job_id)
    if job is None:
        raise JobNotFoundError(domain, job_id)
    stages = yield from _stages(job_id)
    return replace(job, via=via), stages


def _stages(*job_ids: UUID) -> Plan[list[_Stage]]:
    return many(_Stage, SQL.stages, job_ids=list(job_ids))


def _begin(job: _Job, stages: Sequence[_Stage], position: int) -> Plan[str]:
    """Begin the next stage that has something to do; after the last one the job is complete."""
    for stage in stages[position:]:
        if stage.planned:
            return (yield from _send_planner(job, stage))
        taken = yield from execute(SQL.take_parts, job_id=job.job_id, position=stage.position)
        if taken:
            commands = [command for (text,) in taken for command in read_part(text)]
            return (yield from _start(job, stage, commands))
        yield from execute(SQL.arrive, job_id=job.job_id, position=stage.position, status=StageStatus.SKIPPED.value)
    yield from execute(SQL.end, job_id=job.job_id, status=JobStatus.COMPLETED.value)
    if job.on_complete is not None:
        yield from _send_callback(job, job.on_complete)
    return JobStatus.COMPLETED.value


def _start(job: _Job, stage: _Stage, commands: Sequence[NewCommand]) -> Plan[str]:
    yield from execute(SQL.arrive, job_id=job.job_id, position=stage.position, status=StageStatus.IN_PROGRESS.value)
    callback = {
        "command_id": str(stage.step_id),
        "command_type": STAGE,
        "data": _step(stage),
        "priority": PRIORITY,
    }
    batch = send.NewBatch(
        stage.batch_id,
        job.domain,
        stage.name if job.name is None else f"{job.name}: {stage.name}"[:255],
        None,
        encode(callback, WIDEST),
        job_id=job.job_id,
        stage=stage.name,
    )
    if job.via.transport is not None:
        yield from creation_state.create(batch, commands, job.via)
    else:
        yield from send.create_batch(batch, commands)
    return JobStatus.IN_PROGRESS.value


def _send_planner(job: _Job, stage: _Stage) -> Plan[str]:
    yield from execute(SQL.arrive, job_id=job.job_id, position=stage.position, status=StageStatus.PLANNING.value)
    data = encode(_step(stage), WIDEST)
    planner = NewCommand(stage.plan_id, PLAN + stage.name, data, None, None, None, PRIORITY, None, None)
    yield from send.send_many(job.domain, [planner])
    return JobStatus.IN_PROGRESS.value


def _step(stage: _Stage) -> dict[str, Any]:
    return {"job_id": str(stage.job_id), "position": stage.position}


def _send_callback(job: _Job, on_complete: str) -> Plan[None]:
    found = yield from _read(job.domain, job.job_id)
    assert found is not None
    callback = decode(on_complete)
    data = encode(callback["data"] | {"job": summary(found)}, WIDEST)
    command = msgspec.convert(callback | {"data": data, "run_at": None}, NewCommand)
    try:
        yield from send.send_many(job.domain, [command])
    except DuplicateCommandError:  # somebody used the id meanwhile: no reason to hold the job up
        log.warning("Job %s is complete; its on_complete was not sent, since its command_id is used", job.job_id)


def _is_stuck(job: _Job, here: _Stage) -> Plan[bool]:
    """Whether its step has ended and left it where it is, which only a person can have done."""
    if job.status != JobStatus.IN_PROGRESS:
        return False
    step = yield from search.command(job.domain, here.awaited)
    return step is not None and step.status in ENDED


def _read(domain: str, job_id: UUID) -> Plan[JobMetadata | None]:
    rows = yield from execute(SQL.job, domain=domain, job_id=job_id)
    found = yield from _with_stages(domain, rows)
    return found[0] if found else None


def _with_stages(domain: str, rows: Sequence[Row]) -> Plan[list[JobMetadata]]:
    """Jobs as they are shown: with their stages, the batches of these, and the steps that are under way."""
    if not rows:
        return []
    positions = {row[0]: row[-1] for row in rows}
    stages: dict[UUID, list[_Stage]] = {job_id: [] for job_id in positions}
    for stage in (yield from _stages(*positions)):
        stages[stage.job_id].append(stage)
    ids = [stage.batch_id for those in stages.values() for stage in those]
    batches = {batch.batch_id: batch for batch in (yield from existing_batches(ids))}
    jobs = [_job(row, stages[row[0]], batches) for row in rows]
    going = [job.job_id for job in jobs if not job.status.final]
    awaited = {job_id: stages[job_id][positions[job_id]].awaited for job_id in going}
    found = (yield from search.commands(domain, list(awaited.values()))) if awaited else []
    steps = {step.command_id: step for step in found}
    return [replace(job, step=steps.get(awaited.get(job.job_id, job.job_id))) for job in jobs]


def _job(row: Row, stages: Sequence[_Stage], batches: dict[UUID, BatchMetadata]) -> JobMetadata:
    job_id, domain, name, custom_data, status_name, *others, _ = row
    status = JobStatus(status_name)
    shown = tuple(_stage(status, stage, batches.get(stage.batch_id)) for stage in stages)
    job = JobMetadata(job_id, domain, name, custom_data and decode(custom_data), status, *others)
    return replace(job, stages=shown)


def _stage(job: JobStatus, stage: _Stage, batch: BatchMetadata | None) -> StageMetadata:
    status = StageStatus(stage.status if batch is None else batch.status.value)
    if status is StageStatus.PLANNING and job is JobStatus.CANCELED:
        status = StageStatus.CANCELED
    return StageMetadata(stage.name, status, stage.planned, batch)

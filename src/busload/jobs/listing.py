"""Jobs as they are shown: with their stages, the batches of these, and the steps that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from busload.batches.batch import BatchMetadata, existing_batches
from busload.commands import search
from busload.commands.payload import decode
from busload.jobs.job import JobMetadata, JobStatus, StageMetadata, StageStatus
from busload.postgres.plan import ONE_MOMENT, Plan, Row, execute, many, one
from busload.postgres.statements import statements

SQL = statements(__name__)

TO_UNDO, UNDOING, UNDONE, NOT_UNDONE = "PENDING", "IN_PROGRESS", "DONE", "SKIPPED"
"""How far the compensation of a stage has come."""


@dataclass(frozen=True, slots=True)
class StageRow:
    job_id: UUID
    position: int
    name: str
    planned: bool
    batch_id: UUID
    step_id: UUID
    plan_id: UUID
    status: str
    undo: str | None
    undo_batch_id: UUID
    undo_step_id: UUID

    @property
    def awaited(self) -> UUID:
        """The command that takes the job on from this stage."""
        if self.undo == UNDOING:
            return self.undo_step_id
        return self.plan_id if self.status == StageStatus.PLANNING else self.step_id


def job(domain: str | None, job_id: UUID) -> Plan[JobMetadata | None]:
    """Needs a transaction of its own."""
    yield ONE_MOMENT
    return (yield from read(domain, job_id))


@dataclass(frozen=True, slots=True)
class JobOfBatch:
    job_id: UUID
    name: str | None


def job_of_batch(batch_id: UUID) -> Plan[JobOfBatch | None]:
    """The job whose stage this batch is; None if it is of no job that busload runs."""
    return one(JobOfBatch, SQL.job_of_batch, batch_id=batch_id)


def jobs(
    domain: str | None,
    *,
    status: JobStatus | None,
    batch_id: UUID | None,
    name: str | None,
    limit: int,
    offset: int,
    after: UUID | None,
) -> Plan[list[JobMetadata]]:
    """Newest first, of a domain or of all; needs a transaction of its own."""
    yield ONE_MOMENT
    wanted: dict[str, Any] = {"status": status and status.value, "batch_id": batch_id, "name": name}
    wanted |= {"limit": limit, "offset": offset, "after": after}
    if domain is None:
        rows = yield from execute(SQL.jobs_everywhere, **wanted)
    else:
        rows = yield from execute(SQL.jobs, domain=domain, **wanted)
    return (yield from _with_stages(rows))


def awaited_stage(stages: Sequence[StageRow], position: int) -> StageRow:
    """The stage whose step a job waits for: the one that is undone now, or the one where it is."""
    return next((stage for stage in stages if stage.undo == UNDOING), stages[position])


def stages_of(*job_ids: UUID) -> Plan[list[StageRow]]:
    return many(StageRow, SQL.stages, job_ids=list(job_ids))


def read(domain: str | None, job_id: UUID) -> Plan[JobMetadata | None]:
    rows = yield from execute(SQL.job, domain=domain, job_id=job_id)
    found = yield from _with_stages(rows)
    return found[0] if found else None


def _with_stages(rows: Sequence[Row]) -> Plan[list[JobMetadata]]:
    """Jobs as they are shown: with their stages, the batches of these, and the steps that are under way."""
    if not rows:
        return []
    positions = {row[0]: row[-1] for row in rows}
    stages: dict[UUID, list[StageRow]] = {job_id: [] for job_id in positions}
    for stage in (yield from stages_of(*positions)):
        stages[stage.job_id].append(stage)
    ids = [id for those in stages.values() for stage in those for id in (stage.batch_id, stage.undo_batch_id)]
    batches = {batch.batch_id: batch for batch in (yield from existing_batches(ids))}
    jobs = [_job(row, stages[row[0]], batches) for row in rows]
    going = [job for job in jobs if not job.status.final]
    awaited = {job.job_id: awaited_stage(stages[job.job_id], positions[job.job_id]).awaited for job in going}
    wanted = [(job.domain, awaited[job.job_id]) for job in going]
    found = (yield from search.commands(wanted)) if wanted else []
    steps = {step.command_id: step for step in found}
    return [replace(job, step=steps.get(awaited.get(job.job_id, job.job_id))) for job in jobs]


def _job(row: Row, stages: Sequence[StageRow], batches: dict[UUID, BatchMetadata]) -> JobMetadata:
    job_id, domain, name, custom_data, status_name, *others, _ = row
    status = JobStatus(status_name)
    shown = tuple(_stage(status, stage, batches) for stage in stages)
    job = JobMetadata(job_id, domain, name, custom_data and decode(custom_data), status, *others)
    return replace(job, stages=shown)


def _stage(job: JobStatus, stage: StageRow, batches: dict[UUID, BatchMetadata]) -> StageMetadata:
    batch = batches.get(stage.batch_id)
    status = StageStatus(stage.status if batch is None else batch.status.value)
    if status is StageStatus.PLANNING and job in (JobStatus.CANCELED, JobStatus.COMPENSATING):
        status = StageStatus.CANCELED
    compensation = batches.get(stage.undo_batch_id)
    return StageMetadata(stage.name, status, stage.planned, batch, stage.undo is not None, compensation)

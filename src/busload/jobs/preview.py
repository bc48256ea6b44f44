"""What the cancel of jobs, or the resume of one, would do: refused as the call itself would be.

A cancel is counted without a lock. What a resume would begin nobody can count, so it is done and taken back.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from busload.batches.batch import find_batch
from busload.batches.preview import Waiting, waiting
from busload.commands.command import CommandStatus
from busload.errors import BatchNotFoundError, InvalidOperationError, JobNotFoundError
from busload.jobs import listing, progress
from busload.jobs.job import JobMetadata, JobStatus, StageStatus
from busload.postgres.plan import Plan, execute, taken_back
from busload.postgres.statements import statements

SQL = statements(__name__)

WAITS = CommandStatus.PENDING, CommandStatus.SCHEDULED, CommandStatus.IN_TROUBLESHOOTING_QUEUE


@dataclass(frozen=True, slots=True)
class WaitingJobs:
    """How many jobs go on, and what waits and runs of the stages that they are in."""

    jobs: int
    commands: Waiting


def of_resume(domain: str, job_id: UUID) -> Plan[JobMetadata]:
    """The job as a resume would make it."""
    job = yield from taken_back(_resumed(domain, job_id))
    if job is None:
        raise JobNotFoundError(domain, job_id)
    return job


def _resumed(domain: str, job_id: UUID) -> Plan[JobMetadata | None]:
    yield from progress.resume(domain, job_id, operator=None)
    return (yield from listing.read(domain, job_id))


def of_cancel_batch(domain: str, batch_id: UUID) -> Plan[WaitingJobs]:
    """What the cancel of a batch of jobs would stop."""
    batch = yield from find_batch(domain, batch_id)
    if batch is None:
        raise BatchNotFoundError(domain, batch_id)
    going = yield from execute(SQL.going, domain=domain, batch_id=batch_id)
    commands = yield from waiting([stage for _, stage in going])
    return WaitingJobs(len(going), commands)


def of_cancel(job: JobMetadata) -> Plan[Waiting]:
    """What the cancel of a job would cancel, with the command that would have planned its next stage."""
    if job.status in (JobStatus.COMPENSATING, JobStatus.CANCELED):
        return Waiting()
    if job.status == JobStatus.COMPLETED or job.compensated_at is not None:
        raise InvalidOperationError(f"Job {job.job_id} is {job.status}: it has ended, and cannot be canceled.")
    if job.status == JobStatus.FAILED and job.batch_id is not None:
        [(counted,)] = yield from execute(SQL.canceled_or_complete, batch_id=job.batch_id)
        if counted:
            raise InvalidOperationError(
                f"Job {job.job_id} is {job.status}, and its batch {job.batch_id} has ended: it cannot be canceled."
            )
    running = [stage.batch.batch_id for stage in job.stages if stage.batch and stage.batch.completed_at is None]
    found = yield from waiting(running)
    planner = job.step is not None and job.step.status in WAITS and _is_planned(job)
    return Waiting(found.commands + planner, found.held, found.of_other_priority, found.running)


def _is_planned(job: JobMetadata) -> bool:
    """Whether the command that the job waits for plans a stage."""
    return any(stage.status == StageStatus.PLANNING for stage in job.stages)

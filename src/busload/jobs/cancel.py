"""How jobs are canceled, one or all of a batch: first no job goes on, then what waits is canceled in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from busload.batches.cancel import HOLD, Begun
from busload.commands.send import NO_BROKER, Via
from busload.errors import InvalidOperationError
from busload.jobs.job import JobStatus, StageStatus
from busload.jobs.listing import UNDONE
from busload.jobs.progress import hold, hold_without_step, refuse_if_counted, undo_from
from busload.postgres.plan import Plan, execute, many
from busload.postgres.statements import statements

SQL = statements(__name__)


@dataclass(frozen=True, slots=True)
class _Stopped:
    """A job that goes on no more, and where it is."""

    job_id: UUID
    compensates: bool
    stage: str
    batch_id: UUID
    plan_id: UUID
    step_ended: bool
    told: None = None


def begin_to_cancel(
    domain: str, job_id: UUID, *, reason: str, operator: str | None, in_pages: bool, via: Via = NO_BROKER
) -> Plan[Begun]:
    """Stop a job and mark the batch of its stage as canceled; needs a transaction.

    What is to be undone waits until everything that runs has ended. A job that was canceled, or goes back already, is
    left as it is.
    """
    job, stages = yield from hold(domain, job_id)
    if job.status in (JobStatus.COMPENSATING, JobStatus.CANCELED):
        return Begun(0)
    undone = any(stage.undo == UNDONE for stage in stages)
    if job.status == JobStatus.COMPLETED or undone:
        how = " and was compensated" if undone else ""
        raise InvalidOperationError(f"Job {job_id} is {job.status}{how}: it has ended, and cannot be canceled.")
    yield from refuse_if_counted(job, "canceled")
    if operator is not None:
        yield from execute(SQL.note, job_id=job_id, reason=reason, operator=operator)
    planners, batch_ids = yield from _stop(
        domain, [job_id], reason=reason, operator=operator, in_pages=in_pages, via=via
    )
    return Begun(planners, batch_ids)


def begin_to_cancel_batch(
    domain: str, batch_id: UUID, *, reason: str, operator: str | None, in_pages: bool, via: Via = NO_BROKER
) -> Plan[Begun]:
    """Stop all jobs of a batch and mark the batches of their stages as canceled; needs a transaction.

    From its commit on, no job goes on and no command starts. Returns how many jobs were stopped. The rows of the jobs
    are locked first, in order, and that of their batch after them, as everybody does it.
    """
    locked = yield from execute(SQL.lock_jobs, batch_id=batch_id)
    about = {"reason": reason, "operator": operator}
    left = [stage for (stage,) in (yield from execute(SQL.left_stages, batch_id=batch_id))]
    if not (yield from execute(SQL.mark_batch, domain=domain, batch_id=batch_id, **about)):
        return Begun(0, left)
    going = [job_id for job_id, status in locked if status == JobStatus.IN_PROGRESS]
    _, batch_ids = yield from _stop(domain, going, reason=reason, operator=operator, in_pages=in_pages, via=via)
    return Begun(len(going), [*left, *batch_ids])


def _stop(
    domain: str, job_ids: Sequence[UUID], *, reason: str, operator: str | None, in_pages: bool, via: Via
) -> Plan[tuple[int, list[UUID]]]:
    """Stop jobs whose rows are held.

    Returns how many commands that would have planned a stage were canceled, and the batches whose commands are to be.
    """
    if not job_ids:
        return 0, []
    about = {"reason": reason, "operator": operator}
    stopped = yield from many(_Stopped, SQL.stop, job_ids=list(job_ids), **about)
    running = [job.batch_id for job in stopped if job.stage == StageStatus.IN_PROGRESS]
    planned = [job for job in stopped if job.stage == StageStatus.PLANNING]
    marked = yield from execute(SQL.mark_stages, batch_ids=running, **about, in_pages=in_pages, hold=HOLD)
    planners = 0
    if planned:
        plan_ids = [job.plan_id for job in planned]
        [(planners,)] = yield from execute(SQL.cancel_planners, domain=domain, plan_ids=plan_ids, **about)
    for job in stopped:  # if nothing of it runs, and no step will come, nobody else would begin
        if job.step_ended or (job.compensates and job.stage == StageStatus.PLANNING):
            yield from undo_from(*(yield from hold_without_step(domain, job.job_id, via)))
    return int(planners), [batch_id for batch_id, _ in marked]

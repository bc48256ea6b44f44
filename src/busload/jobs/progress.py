"""How a job comes about and goes from stage to stage. Whoever moves it holds its row until the transaction ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import msgspec
from psycopg import errors as pg

from busload.batches.batch import BatchStatus, find_batch
from busload.commands import search, send
from busload.commands.command import NewCommand
from busload.commands.headers import decode_headers, encode_headers
from busload.commands.ids import ascending_ids, new_id
from busload.commands.parts import cut
from busload.commands.payload import WIDEST, decode, encode
from busload.commands.send import NO_BROKER, NewBatch, Via
from busload.commands.send_batches import BatchToWrite, create_batches, in_parts
from busload.dispatch import creation_state
from busload.dispatch.creation_event import log_creation
from busload.errors import DuplicateCommandError, InvalidOperationError, JobNotFoundError, PermanentCommandError
from busload.explain.facts import ENDED
from busload.jobs.job import (
    PART,
    PART_BYTES,
    PLAN,
    PRIORITY,
    STAGE,
    JobMetadata,
    JobStatus,
    NewJob,
    StageStatus,
    Step,
    chosen_ids,
    parts,
    read_part,
    summary,
)
from busload.jobs.listing import (
    NOT_UNDONE,
    TO_UNDO,
    UNDOING,
    UNDONE,
    StageRow,
    awaited_stage,
    read,
    stages_of,
)
from busload.postgres.arrays import unless_all_null
from busload.postgres.plan import ONE_MOMENT, Plan, Savepoint, execute, one
from busload.postgres.statements import statements

log = logging.getLogger("busload")

SQL = statements(__name__)

COLUMNS_OF_JOBS = "name", "custom_data", "on_complete", "continue_after_failures"

GOING = JobStatus.IN_PROGRESS, JobStatus.COMPENSATING


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job whose row is held."""

    job_id: UUID
    domain: str
    name: str | None
    status: str
    position: int
    continue_after_failures: bool
    on_complete: str | None
    outcome: str | None = None
    """The status that it has after its compensation."""
    batch_id: UUID | None = None
    """The batch of jobs that it counts in."""
    via: Via = NO_BROKER
    headers: str | None = None
    """What the step that takes it on has among its headers, such as the trace that the job belongs to."""


def create(
    jobs: Sequence[NewJob], via: Via = NO_BROKER, *, batch_id: UUID | None = None, headers: str | None = None
) -> Plan[None]:
    """Jobs of one domain, each with its first batch; needs a transaction. With `batch_id`, they count in that batch.

    Every batch and step of the jobs has these `headers`.
    """
    domain, job_ids = jobs[0].domain, [job.job_id for job in jobs]
    yield from _refuse_taken(jobs)
    about = {"domain": domain, "batch_id": batch_id, "job_ids": job_ids}
    about |= {name: unless_all_null(getattr(job, name) for job in jobs) for name in COLUMNS_OF_JOBS}
    try:
        yield Savepoint(execute(SQL.create, **about))
    except pg.UniqueViolation:
        raise (yield from _already_exists(job_ids)) from None
    stages = [_new_stages(job) for job in jobs]
    rows = [stage for those in stages for stage in those]
    columns = {name: unless_all_null(getattr(row, name) for row in rows) for name in StageRow.__slots__}
    yield from execute(SQL.create_stages, **columns)
    yield from _keep(jobs)
    first = [_first_batch(job, those[0], headers) for job, those in zip(jobs, stages, strict=True)]
    yield from _create_batches(first, via)


def _first_batch(job: NewJob, stage: StageRow, headers: str | None) -> BatchToWrite:
    begun = HeldJob(job.job_id, job.domain, job.name, JobStatus.IN_PROGRESS, 0, job.continue_after_failures, None)
    begun = replace(begun, headers=headers)
    return _batch_of_stage(begun, stage, job.stages[0].commands or ())


def _already_exists(job_ids: Sequence[UUID]) -> Plan[InvalidOperationError]:
    """What to say about jobs of which at least one exists."""
    found = [job_id for (job_id,) in (yield from execute(SQL.existing, job_ids=job_ids))] or job_ids
    more = f" and {len(found) - 1} more of these" if len(found) > 1 else ""
    return InvalidOperationError(
        f"There is already a job {found[0]}{more}. Nothing was written; "
        "look at it with `busload job show`, or choose another job_id."
    )


def _new_stages(job: NewJob) -> list[StageRow]:
    """The stages of a new job, with the ids of everything that will take it on. The first one begins at once."""
    ids = ascending_ids()
    return [
        StageRow(
            job_id=job.job_id,
            position=position,
            name=stage.name,
            planned=stage.commands is None,
            batch_id=next(ids),
            step_id=next(ids),
            plan_id=next(ids),
            status=(StageStatus.PENDING if position else StageStatus.IN_PROGRESS).value,
            undo=TO_UNDO if stage.undo else None,
            undo_batch_id=next(ids),
            undo_step_id=next(ids),
        )
        for position, stage in enumerate(job.stages)
    ]


def advance(domain: str, step: Step, command_id: UUID, via: Via = NO_BROKER, headers: str | None = None) -> Plan[str]:
    """Take a job on after a stage that has ended, and return its status. Needs the transaction that completes the step.

    A step that is repeated, or comes after the job was canceled, changes nothing. `command_id` is that of the step, and
    what it begins has its `headers`.
    """
    job, stages = yield from hold(domain, step.job_id, via, headers)
    if step.position not in range(len(stages)):
        return job.status
    if step.undo:
        return (yield from _go_back(job, stages, step.position, command_id))
    if stages[step.position].status != StageStatus.IN_PROGRESS:
        return job.status
    ended = stages[step.position]
    batch = yield from find_batch(domain, ended.batch_id)
    if batch is None or not batch.status.final:
        raise PermanentCommandError(f"Stage {ended.name!r} of job {job.job_id} has not ended.")
    yield from execute(SQL.mark_stage, job_id=job.job_id, position=ended.position, status=batch.status.value)
    stages[step.position] = replace(ended, status=batch.status.value)
    if job.status == JobStatus.COMPENSATING:  # it was canceled, and what ran then has ended
        return (yield from undo_next(job, stages))
    if job.status != JobStatus.IN_PROGRESS:
        return job.status
    if batch.status == BatchStatus.COMPLETED_WITH_FAILURES and not job.continue_after_failures:
        log.warning("Job %s stopped: stage %s completed with failures", job.job_id, ended.name)
        return (yield from _fail(job, stages))
    return (yield from _begin(job, stages, ended.position + 1))


def job_to_plan(domain: str, step: Step) -> Plan[JobMetadata | None]:
    """The job of a stage; None if the stage is not to be planned any more. Needs a transaction of its own."""
    yield ONE_MOMENT
    job = yield from read(domain, step.job_id)
    if job is None:
        raise JobNotFoundError(domain, step.job_id)
    if job.status.final or step.position not in range(1, len(job.stages)):
        return None
    return job if job.stages[step.position].status == StageStatus.PLANNING else None


def begin_planned(
    domain: str, step: Step, commands: Sequence[NewCommand], via: Via = NO_BROKER, headers: str | None = None
) -> Plan[str]:
    """Begin a stage with the commands that its planner returned, or skip it; returns the status of the job.

    A step that is repeated, or comes after the job was canceled, changes nothing.
    """
    job, stages = yield from hold(domain, step.job_id, via, headers)
    stage = stages[step.position]
    if job.status != JobStatus.IN_PROGRESS or stage.status != StageStatus.PLANNING:
        return job.status
    if commands:
        return (yield from _start(job, stage, commands))
    yield from execute(SQL.arrive, job_id=job.job_id, position=stage.position, status=StageStatus.SKIPPED.value)
    return (yield from _begin(job, stages, stage.position + 1))


def resume(domain: str, job_id: UUID, *, operator: str | None, via: Via = NO_BROKER) -> Plan[str]:
    """Let a job go on that has stopped after failures, or whose step was ended by other hands; needs a transaction."""
    job, stages = yield from hold_without_step(domain, job_id, via)
    here = stages[job.position]
    if job.status == JobStatus.FAILED and any(stage.undo == UNDONE for stage in stages):
        raise InvalidOperationError(f"Job {job_id} was compensated: what it has done is undone. Create another job.")
    if job.status != JobStatus.FAILED and not (yield from _is_stuck(job, awaited_stage(stages, job.position))):
        wanted = "Only a job that has FAILED can be resumed, or one whose step was completed or canceled by hand"
        raise InvalidOperationError(f"Job {job_id} is {job.status}. {wanted}; look at it with `busload job show`.")
    yield from refuse_if_counted(job, "resumed")
    yield from execute(SQL.sign, job_id=job_id, operator=operator, reason=None)
    if (undoing := awaited_stage(stages, job.position)).undo == UNDOING:
        return (yield from _go_back(job, stages, undoing.position, undoing.undo_step_id))
    if here.status == StageStatus.PLANNING:
        again = replace(here, plan_id=new_id())
        yield from execute(SQL.replan, job_id=job_id, position=here.position, plan_id=again.plan_id)
        return (yield from _send_planner(job, again))
    if job.status == JobStatus.COMPENSATING:
        return (yield from undo_from(job, stages))
    yield from _mark_ended(job, stages)
    return (yield from _begin(job, stages, job.position + 1))


def undo_from(job: HeldJob, stages: list[StageRow]) -> Plan[str]:
    """Begin to undo a job at the stage where it is, of which nothing runs any more."""
    yield from _mark_ended(job, stages)
    return (yield from undo_next(job, stages))


def _mark_ended(job: HeldJob, stages: list[StageRow]) -> Plan[None]:
    """Note how the stage has ended where the job is, if its step has not done so."""
    here = stages[job.position]
    if here.status == StageStatus.IN_PROGRESS:
        batch = yield from find_batch(job.domain, here.batch_id)
        status = batch.status.value if batch is not None else StageStatus.COMPLETED_WITH_FAILURES.value
        yield from execute(SQL.mark_stage, job_id=job.job_id, position=here.position, status=status)
        stages[job.position] = replace(here, status=status)


def refuse_if_counted(job: HeldJob, done: str) -> Plan[None]:
    """Refuse to take back a failure that a batch of jobs has counted for good. `done` is what cannot be done."""
    if job.status != JobStatus.FAILED or job.batch_id is None:
        return
    for completed, canceled in (yield from execute(SQL.lock_batch, batch_id=job.batch_id)):
        if completed or canceled:
            how = "has completed" if completed else "was canceled"
            message = f"Job {job.job_id} is {job.status}, and its batch {job.batch_id} {how}"
            raise InvalidOperationError(f"{message}: the job stays as it ended, and cannot be {done}. Create another.")


def _refuse_taken(jobs: Sequence[NewJob]) -> Plan[None]:
    """What later stages and the callback will use must be free now, though it is not held until then."""
    for domain, ids in chosen_ids(jobs, later=True).items():
        taken = yield from send.taken_ids(domain, ids)
        if taken:
            raise DuplicateCommandError(domain, taken)


def hold(
    domain: str, job_id: UUID, via: Via = NO_BROKER, headers: str | None = None
) -> Plan[tuple[HeldJob, list[StageRow]]]:
    """Lock the row of a job, and read its stages after that."""
    job = yield from one(HeldJob, SQL.hold, domain=domain, job_id=job_id)
    if job is None:
        raise JobNotFoundError(domain, job_id)
    stages = yield from stages_of(job_id)
    return replace(job, via=via, headers=headers), stages


def hold_without_step(domain: str, job_id: UUID, via: Via) -> Plan[tuple[HeldJob, list[StageRow]]]:
    """As `hold`, for somebody who takes the job on in the place of its step: it goes on with its headers."""
    job, stages = yield from hold(domain, job_id, via)
    found = yield from execute(SQL.headers_of, batch_id=stages[0].batch_id)
    return replace(job, headers=found[0][0] if found else None), stages


def _begin(job: HeldJob, stages: Sequence[StageRow], position: int) -> Plan[str]:
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


def _start(job: HeldJob, stage: StageRow, commands: Sequence[NewCommand]) -> Plan[str]:
    yield from execute(SQL.arrive, job_id=job.job_id, position=stage.position, status=StageStatus.IN_PROGRESS.value)
    yield from _create_batches([_batch_of_stage(job, stage, commands)], job.via)
    return JobStatus.IN_PROGRESS.value


def _batch_of_stage(job: HeldJob, stage: StageRow, commands: Sequence[NewCommand]) -> BatchToWrite:
    callback = {"command_id": str(stage.step_id), "data": _step(stage)}
    return _batch(job, stage, stage.batch_id, stage.name, callback), commands


def _batch(job: HeldJob, stage: StageRow, batch_id: UUID, name: str, callback: dict[str, Any]) -> NewBatch:
    callback |= {"command_type": STAGE, "priority": PRIORITY}
    return NewBatch(
        batch_id,
        job.domain,
        name if job.name is None else f"{job.name}: {name}"[:255],
        None,
        encode(callback, WIDEST),
        job_id=job.job_id,
        stage=stage.name,
        way="job",
        headers=job.headers,
    )


def _create_batches(batches: Sequence[BatchToWrite], via: Via) -> Plan[None]:
    """Create batches of stages; with a broker, their commands wait to be published."""
    strategy = None if via.transport is None else "relay"
    for part in in_parts(batches):
        began = time.perf_counter()
        if via.transport is None:
            yield from create_batches(part)
        else:
            yield from creation_state.create_batches(part, via)
        took = round((time.perf_counter() - began) * 1000 / len(part), 3)
        for batch, commands in part:
            log_creation(
                batch, len(commands), insert_ms=took, total_ms=took, transport=via.transport, strategy=strategy
            )


def _fail(job: HeldJob, stages: Sequence[StageRow]) -> Plan[str]:
    """A stage has failed. The job ends, or first undoes what it has done."""
    for stage in stages[: job.position + 1]:
        if (yield from _is_to_be_undone(job, stage)):
            yield from execute(SQL.compensate, job_id=job.job_id, outcome=JobStatus.FAILED.value)
            yield from execute(SQL.drop_parts, job_id=job.job_id)
            return (yield from undo_next(replace(job, outcome=JobStatus.FAILED.value), stages))
    yield from execute(SQL.end, job_id=job.job_id, status=JobStatus.FAILED.value)
    return JobStatus.FAILED.value


def _go_back(job: HeldJob, stages: list[StageRow], position: int, command_id: UUID) -> Plan[str]:
    """The compensation of a stage has ended, or what is left of it waits for a person. The one before is next."""
    stage = stages[position]
    if job.status != JobStatus.COMPENSATING or stage.undo != UNDOING or command_id != stage.undo_step_id:
        return job.status
    yield from execute(SQL.mark_undo, job_id=job.job_id, position=position, undo=UNDONE)
    stages[position] = replace(stage, undo=UNDONE)
    return (yield from undo_next(job, stages))


def undo_next(job: HeldJob, stages: Sequence[StageRow]) -> Plan[str]:
    """Begin to undo the last stage that has done something and is not undone; if there is none, the job ends."""
    for stage in reversed(stages[: job.position + 1]):
        if stage.undo != TO_UNDO:
            continue
        if (yield from _is_to_be_undone(job, stage)):
            place = _place_of_undo(stage.position)
            taken = yield from execute(SQL.take_parts, job_id=job.job_id, position=place)
            commands = [command for (text,) in taken for command in read_part(text)]
            yield from execute(SQL.mark_undo, job_id=job.job_id, position=stage.position, undo=UNDOING)
            # What waits for a person does not stop the rest: then the callback comes, too.
            callback = {
                "command_id": str(stage.undo_step_id),
                "data": _step(stage) | {"undo": True},
                "stalled_too": True,
            }
            name = f"compensate {stage.name}"
            batch = _batch(job, stage, stage.undo_batch_id, name, callback)
            yield from _create_batches([(batch, commands)], job.via)
            return JobStatus.COMPENSATING.value
        yield from execute(SQL.mark_undo, job_id=job.job_id, position=stage.position, undo=NOT_UNDONE)
    assert job.outcome is not None
    yield from execute(SQL.end, job_id=job.job_id, status=job.outcome)
    log.info("Job %s has ended as %s after its compensation", job.job_id, job.outcome)
    return job.outcome


def _is_to_be_undone(job: HeldJob, stage: StageRow) -> Plan[bool]:
    """Whether at least one of its commands has completed, also if others have not."""
    if stage.undo != TO_UNDO or stage.status not in (StageStatus.COMPLETED, StageStatus.COMPLETED_WITH_FAILURES):
        return False
    batch = yield from find_batch(job.domain, stage.batch_id)
    return batch is not None and batch.completed_count > 0


def _place_of_undo(position: int) -> int:
    """Where the commands that undo the stage at this position are kept."""
    return -1 - position


def _keep(jobs: Sequence[NewJob]) -> Plan[None]:
    """Keep the commands of later stages, and those that undo a stage."""
    rows = [
        (job.job_id, place, part, text)
        for job in jobs
        for position, stage in enumerate(job.stages)
        for place, commands in ((position, stage.commands if position else ()), (_place_of_undo(position), stage.undo))
        for part, text in enumerate(parts(commands or ()))
    ]
    for some in cut(rows, (len(row[-1]) for row in rows), PART, PART_BYTES):
        job_ids, positions, numbers, texts = map(list, zip(*some, strict=True))
        yield from execute(SQL.keep_parts, job_ids=job_ids, positions=positions, parts=numbers, commands=texts)


def _send_planner(job: HeldJob, stage: StageRow) -> Plan[str]:
    yield from execute(SQL.arrive, job_id=job.job_id, position=stage.position, status=StageStatus.PLANNING.value)
    data = encode(_step(stage), WIDEST)
    planner = NewCommand(stage.plan_id.int, PLAN + stage.name, data, priority=PRIORITY, headers=job.headers)
    yield from send.send_many(job.domain, [planner])
    return JobStatus.IN_PROGRESS.value


def _step(stage: StageRow) -> dict[str, Any]:
    return {"job_id": str(stage.job_id), "position": stage.position}


def _send_callback(job: HeldJob, on_complete: str) -> Plan[None]:
    found = yield from read(job.domain, job.job_id)
    assert found is not None
    callback = decode(on_complete)
    data = encode(callback["data"] | {"job": summary(found)}, WIDEST)
    headers = encode_headers((decode_headers(job.headers) or {}) | (callback.get("headers") or {}))
    row = callback | {"id_as_int": UUID(callback["command_id"]).int, "data": data, "headers": headers}
    command = msgspec.convert(row, NewCommand)
    try:
        yield from send.send_many(job.domain, [command])
    except DuplicateCommandError:  # somebody used the id meanwhile: no reason to hold the job up
        log.warning("Job %s is complete; its on_complete was not sent, since its command_id is used", job.job_id)


def _is_stuck(job: HeldJob, here: StageRow) -> Plan[bool]:
    """Whether its step has ended and left it where it is, which only a person can have done."""
    if job.status not in GOING:
        return False
    step = yield from search.command(job.domain, here.awaited)
    return step is not None and step.status in ENDED

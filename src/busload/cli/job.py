"""`busload job`: how a person at a shell sees jobs."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

import click

from busload.cli import noun, options
from busload.cli.answer import Answer, about, answers, would
from busload.cli.find import find_one, id_or_beginning, newest
from busload.cli.text_table import View
from busload.commands.search import IdRange
from busload.commands.wording import counted
from busload.errors import JobNotFoundError
from busload.jobs.job import JobMetadata, JobStatus, JobStatusName, StageMetadata
from busload.jobs.preview import of_cancel, of_resume
from busload.sync.bus import SyncCommandBus


def _stage(job: JobMetadata) -> str:
    """How far it is: the stage that has not ended, or that all have."""
    for position, stage in enumerate(job.stages, 1):
        if not stage.status.final:
            return f"{stage.name} ({position}/{len(job.stages)})"
    return f"{len(job.stages)}/{len(job.stages)}"


def _step(job: JobMetadata) -> str | None:
    step = job.step
    return None if step is None else f"{step.command_type} {step.command_id}, {step.status}"


def _compensation_failures(job: JobMetadata) -> int | None:
    return job.compensation_failures or None


def _compensation(stage: StageMetadata) -> str | None:
    """How far it was undone."""
    if (batch := stage.compensation) is None:
        return None
    parked = f", {batch.in_troubleshooting_count:,} in troubleshooting" if batch.in_troubleshooting_count else ""
    return f"{batch.completed_count:,}/{batch.total_count:,} {batch.batch_id}{parked}"


JOBS = View[JobMetadata](
    "JOB=job_id DOMAIN NAME STATUS STAGE CREATED=created_at",
    {"STAGE": _stage},
    elastic="NAME",
    spare=("CREATED", "NAME"),
    nothing="There are no such jobs.",
)
JOB = View[JobMetadata](
    "job=job_id domain name batch=batch_id custom_data status operator reason created=created_at started=started_at"
    " completed_at compensated_at compensation_failures waits_for last_error=step.last_error_message",
    {"waits for": _step, "compensation failures": _compensation_failures},
)
STAGES = View[StageMetadata](
    "STAGE=name STATUS BATCH=batch.batch_id TOTAL=batch.total_count COMPLETED=batch.completed_count"
    " FAILED=batch.failed_count CANCELED=batch.canceled_count TROUBLE=batch.in_troubleshooting_count COMPENSATION",
    {"COMPENSATION": _compensation},
    nothing="It has no stages.",
    elastic="STAGE",
)


job = noun("job", "ls --status FAILED", "show 0198c5d2-7f3a")


@job.command()
@options.status(JobStatus)
@click.option("--batch", type=id_or_beginning, metavar="ID", help="Only jobs of this batch of jobs.")
@click.option("--name", help="Only jobs in whose name this text occurs; capitals do not matter.")
@options.page(20)
@answers
def ls(
    bus: SyncCommandBus, status: JobStatusName | None, batch: IdRange | None, name: str | None, **page: Any
) -> Answer:
    """List jobs, newest first.

    busload job ls
    busload job ls --domain reports --status FAILED --limit 5
    busload job ls --batch 0198c5d2-7f3a
    busload job ls --json | jq -r '.[].job_id'
    """
    batch_id = None
    if batch is not None:
        page["domain"], batch_id = find_one(bus, "batch", batch, page["domain"])
    ask = partial(bus.jobs.list, status=status, batch_id=batch_id, name=name)
    return JOBS.list(newest(bus, ask, "created_at", "job_id", **page))


@job.command()
@about("job")
def show(bus: SyncCommandBus, domain: str, job_id: UUID) -> Answer:
    """Show how far a job has come, stage by stage, and what it waits for.

    busload job show 0198c5d2-7f3a
    busload job show 0198c5d2-7f3a --json | jq -r '.stages[].status'
    """
    found = _get(bus, domain, job_id)
    compensated = any(stage.compensation for stage in found.stages)
    stages = STAGES if compensated else STAGES.without("COMPENSATION")
    return JOB.one(found, below=stages.list(found.stages))


@job.command()
@options.operator
@options.dry_run
@about("job", transport=True)
def resume(bus: SyncCommandBus, domain: str, job_id: UUID, *, operator: str, dry_run: bool) -> Answer:
    """Let a job that has FAILED go on with its next stage; after the last one it is COMPLETED.

    busload job resume 0198c5d2-7f3a
    busload job resume 0198c5d2-7f3a --dry-run
    """
    if dry_run:
        job = bus.shard_of(domain).database.in_transaction(of_resume(domain, job_id))
        commands = sum(stage.batch.remaining_count for stage in job.stages if stage.batch)
        what = f"make job {job_id} {job.status}, {_stage(job)}, with {counted(commands, 'command')}"
        return would(what, job_id=job_id, status=job.status, stage=_stage(job), commands=commands)
    bus.jobs.resume(domain, job_id, operator=operator)
    found = _get(bus, domain, job_id)
    return Answer(found, f"Job {job_id} is {found.status}, {_stage(found)}.")


@job.command()
@options.operator
@options.reason()
@options.dry_run
@about("job")
def cancel(bus: SyncCommandBus, domain: str, job_id: UUID, *, reason: str, operator: str, dry_run: bool) -> Answer:
    """Stop a job: what has not started of its stage is canceled, what runs finishes, and no further stage begins.

    busload job cancel 0198c5d2-7f3a --reason 'wrong list'
    busload job cancel 0198c5d2-7f3a --reason 'wrong list' --dry-run
    """
    if dry_run:
        waiting = bus.shard_of(domain).database.read(of_cancel(_get(bus, domain, job_id)))
        what = f"cancel job {job_id} with {counted(waiting.commands, 'command')}"
        return would(what, job_id=job_id, canceled=waiting.commands, asked_to_stop=waiting.running)
    canceled = bus.jobs.cancel(domain, job_id, reason=reason, operator=operator)
    found = _get(bus, domain, job_id)
    were = counted(canceled, "command was", "commands were")
    value = {"job_id": job_id, "canceled": canceled, "status": found.status}
    return Answer(value, f"Job {job_id} is {found.status}; {were} canceled.")


def _get(bus: SyncCommandBus, domain: str, job_id: UUID) -> JobMetadata:
    found = bus.jobs.get(domain, job_id)
    if found is None:
        raise JobNotFoundError(domain, job_id)
    return found

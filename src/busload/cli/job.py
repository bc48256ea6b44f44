"""`busload job`: how a person at a shell sees jobs."""

from __future__ import annotations

import click

from busload.cli.database import domain_option, everywhere, find_job, id_or_beginning, open_bus
from busload.cli.database import operator as operator_here
from busload.cli.output import as_json, echo_json, facts, paragraph, table
from busload.domain.counted import counted
from busload.domain.job import JobMetadata, JobStatus, StageMetadata
from busload.errors import JobNotFoundError
from busload.store.find import IdRange

operator_option = click.option("--operator", default=operator_here, show_default="your user name", help="Who.")


@click.group()
def job() -> None:
    """Follow jobs stage by stage, resume and cancel them.

    \b
        busload job ls --status FAILED
        busload job show 0198c5d2-7f3a
    """


@job.command()
@domain_option
@click.option(
    "--status", type=click.Choice([status.value for status in JobStatus], case_sensitive=False), help="Only those."
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True)
@click.option("--offset", type=click.IntRange(0, 1_000_000), default=0, show_default=True)
@as_json
def ls(domain: str | None, status: str | None, limit: int, offset: int, as_json: bool) -> None:
    """List jobs, newest first.

    \b
        busload job ls
        busload job ls --domain reports --status FAILED --limit 5
        busload job ls --json | jq -r '.[].job_id'
    """
    with open_bus() as bus:

        def ask(domain: str, *, limit: int, offset: int) -> list[JobMetadata]:
            return bus.list_jobs(domain, status=status, limit=limit, offset=offset)

        found = everywhere(bus, domain, ask, newest=lambda j: (j.created_at, j.job_id), limit=limit, offset=offset)
    if as_json:
        echo_json(found)
        return
    columns = ("JOB", "DOMAIN", "NAME", "STATUS", "STAGE", "CREATED")
    rows = [(j.job_id, j.domain, j.name, j.status, _where(j), j.created_at) for j in found]
    table(columns, rows, nothing="There are no such jobs.", elastic="NAME", spare=("CREATED", "NAME"))


@job.command()
@click.argument("job", type=id_or_beginning, metavar="JOB_ID")
@domain_option
@as_json
def show(job: IdRange, domain: str | None, as_json: bool) -> None:
    """Show how far a job has come, stage by stage, and what it waits for.

    \b
        busload job show 0198c5d2-7f3a
        busload job show 0198c5d2-7f3a --json | jq -r '.stages[].status'
    """
    with open_bus() as bus:
        domain, job_id = find_job(bus, job, domain)
        found = bus.get_job(domain, job_id)
    if found is None:
        raise JobNotFoundError(domain, job_id)
    if as_json:
        echo_json(found)
        return
    step = found.step
    facts(
        [
            ("job", found.job_id),
            ("domain", found.domain),
            ("name", found.name),
            ("custom data", found.custom_data),
            ("status", found.status),
            ("operator", found.operator),
            ("reason", found.reason),
            ("created", found.created_at),
            ("started", found.started_at),
            ("completed at", found.completed_at),
            ("waits for", None if step is None else f"{step.command_type} {step.command_id}, {step.status}"),
            ("last error", None if step is None else step.last_error_message),
        ]
    )
    click.echo()
    columns = ("STAGE", "STATUS", "BATCH", "TOTAL", "COMPLETED", "FAILED", "CANCELED", "TROUBLE")
    table(columns, [_row(stage) for stage in found.stages], nothing="It has no stages.", elastic="STAGE")


@job.command()
@click.argument("job", type=id_or_beginning, metavar="JOB_ID")
@domain_option
@operator_option
@as_json
def resume(job: IdRange, domain: str | None, operator: str, as_json: bool) -> None:
    """Let a job that has FAILED go on with its next stage; after the last one it is COMPLETED.

    \b
        busload job resume 0198c5d2-7f3a
    """
    with open_bus(transport=True) as bus:
        domain, job_id = find_job(bus, job, domain)
        bus.resume_job(domain, job_id, operator=operator)
        found = bus.get_job(domain, job_id)
    if as_json:
        echo_json(found)
    elif found is not None:
        paragraph(f"Job {job_id} is {found.status}, {_where(found)}.")


@job.command()
@click.argument("job", type=id_or_beginning, metavar="JOB_ID")
@click.option("--reason", required=True, help="Why; shown by `show`.")
@domain_option
@operator_option
@as_json
def cancel(job: IdRange, reason: str, domain: str | None, operator: str, as_json: bool) -> None:
    """Stop a job: what has not started of its stage is canceled, what runs finishes, and no further stage begins.

    \b
        busload job cancel 0198c5d2-7f3a --reason 'wrong list'
    """
    with open_bus() as bus:
        domain, job_id = find_job(bus, job, domain)
        canceled = bus.cancel_job(domain, job_id, reason=reason, operator=operator)
        found = bus.get_job(domain, job_id)
    if as_json:
        echo_json({"job_id": job_id, "canceled": canceled, "status": None if found is None else found.status})
    elif found is not None:
        were = counted(canceled, "command was", "commands were")
        paragraph(f"Job {job_id} is {found.status}; {were} canceled.")


def _where(job: JobMetadata) -> str:
    """How far it is: the stage that has not ended, or that all have."""
    for position, stage in enumerate(job.stages, 1):
        if not stage.status.final:
            return f"{stage.name} ({position}/{len(job.stages)})"
    return f"{len(job.stages)}/{len(job.stages)}"


def _row(stage: StageMetadata) -> tuple[object, ...]:
    batch = stage.batch
    if batch is None:
        return (stage.name, stage.status, None, None, None, None, None, None)
    counts = batch.completed_count, batch.failed_count, batch.canceled_count, batch.in_troubleshooting_count
    return (stage.name, stage.status, batch.batch_id, batch.total_count, *counts)

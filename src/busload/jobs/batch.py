"""A batch of jobs: jobs that are created together, counted as the commands of a batch are, and canceled together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, cast
from uuid import UUID

from psycopg import errors as pg

from busload.batches.batch import BatchOptions, new_batch
from busload.commands.checks import refuse, wrong, wrong_list
from busload.commands.data_type import DataTypes
from busload.commands.ids import ascending_ids
from busload.commands.send import NO_BROKER, NewBatch, Via, already_exists, taken_ids
from busload.errors import BatchNotFoundError, DuplicateCommandError, InvalidCommandError, Problem
from busload.jobs import progress
from busload.jobs.job import BatchJob, NewJob, new_job, refuse_repeated
from busload.postgres.plan import Plan, Savepoint, execute
from busload.postgres.statements import statements
from busload.settings import InputLimits

SQL = statements(__name__)

MOST = 10_000
"""Jobs of a batch: each one is a batch of commands to be written, and all of them are in one transaction."""


class JobBatchOptions(TypedDict, total=False):
    """What may be said about a new batch of jobs."""

    batch_id: UUID | None
    """The id of the batch; a new one if it is left out."""
    name: str | None
    """A name for people to find the batch by."""
    custom_data: dict[str, Any] | None
    """Data of your own, which the batch keeps and its callback gets."""


def new_job_batch(
    limits: InputLimits,
    domain: str,
    jobs: Iterable[BatchJob],
    options: JobBatchOptions,
    on_complete: object,
    *,
    awaits: bool,
    types: DataTypes | None = None,
) -> tuple[NewBatch, list[NewJob]]:
    """Check a batch of jobs, with every command of every stage. An error names offenders by the place of their job.

    `types` are those of data that are known, because handlers want them.
    """
    about = cast(BatchOptions, options)
    batch = new_batch(
        "jobs.create_batch", limits, domain, about, on_complete, awaits=awaits, known=JobBatchOptions, types=types
    )
    refuse(wrong_list(jobs, "jobs", "a list of BatchJob"))
    found = list(jobs)
    if not found:
        raise InvalidCommandError([Problem("EMPTY_BATCH", "/jobs", "found no jobs, wanted at least one")])
    if len(found) > MOST:
        message = f"found {len(found):,} jobs, at most {MOST:,} are allowed; create several batches"
        raise InvalidCommandError([Problem("TOO_LARGE", "/jobs", message, limit=MOST)])
    checked: list[NewJob] = []
    problems: list[Problem] = []
    total, seen, fresh = 0, set[UUID](), ascending_ids()
    for position, job in enumerate(found):
        try:
            checked.append(_checked(limits, domain, job, seen, next(fresh), types))
        except InvalidCommandError as refused:
            total += refused.total
            problems += [replace(each, path=f"/jobs/{position}{each.path}") for each in refused.problems]
    if problems:
        raise InvalidCommandError(problems, total)
    refuse_repeated(checked, batch.callback_id)
    return batch, checked


def _checked(
    limits: InputLimits, domain: str, job: object, seen: set[UUID], fresh: UUID, types: DataTypes | None
) -> NewJob:
    if not isinstance(job, BatchJob):
        refuse([replace(wrong(job, "", "a BatchJob"), path="")])
    assert isinstance(job, BatchJob)
    if isinstance(job.job_id, UUID) and job.job_id in seen:
        message = f"found a second job {job.job_id}, wanted each id once"
        raise InvalidCommandError([Problem("INVALID_ID", "/job_id", message)])
    checked = new_job(limits, domain, job, fresh, types)
    seen.add(checked.job_id)
    return checked


def create(batch: NewBatch, jobs: Sequence[NewJob], via: Via = NO_BROKER, headers: str | None = None) -> Plan[UUID]:
    """A batch of jobs with all its jobs; needs a transaction. Its callback has these `headers`, and so has each job."""
    if batch.callback_id is not None and (yield from taken_ids(batch.domain, [batch.callback_id])):
        raise DuplicateCommandError(batch.domain, [batch.callback_id])
    columns = {name: getattr(batch, name) for name in ("batch_id", "domain", "name", "custom_data", "on_complete")}
    try:
        yield Savepoint(execute(SQL.create, **columns, total=len(jobs), headers=headers))
    except pg.UniqueViolation:
        raise already_exists(batch.batch_id) from None
    yield from progress.create(jobs, via, batch_id=batch.batch_id, headers=headers)
    return batch.batch_id


def is_of_jobs(domain: str, batch_id: UUID) -> Plan[bool]:
    """Whether this is a batch of jobs."""
    rows = yield from execute(SQL.type, domain=domain, batch_id=batch_id)
    if not rows:
        raise BatchNotFoundError(domain, batch_id)
    return bool(rows[0][0])

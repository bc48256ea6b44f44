"""Made from busload.jobs.api by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from busload.commands.checks import check, choice, seconds_of
from busload.commands.command import BatchCommand
from busload.commands.send import Via
from busload.errors import JobNotFoundError
from busload.jobs import progress
from busload.jobs.api import _late
from busload.jobs.job import JobMetadata, JobStatus, JobStatusName, Stage, new_job
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.connection import Connection
from busload.postgres.write import Write, patient, then
from busload.settings import Settings
from busload.sync.cancel import cancel
from busload.sync.database import Database


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

    def create(
        self,
        domain: str,
        stages: Iterable[Stage],
        *,
        job_id: UUID | None = None,
        name: str | None = None,
        custom_data: dict[str, Any] | None = None,
        on_complete: BatchCommand | None = None,
        continue_after_failures: bool = False,
        conn: Connection | None = None,
    ) -> UUID:
        """Create a job with its first batch in one transaction, and return its id: `job_id`, or a new one.

        Each of the `stages` becomes a batch in `domain` once the one before is complete. A stage without commands is
        planned then, by the `planner` of its name. A stage that completes with failures stops the job as FAILED, unless
        `continue_after_failures`. If the job fails or is canceled, the commands in `compensate` of its stages run, the
        last stage first. `on_complete` is sent when the job is COMPLETED, with the job under the key "job" of its data.
        `name` and `custom_data` are for you, and kept with the job. With `conn` the job exists exactly if that
        transaction commits.
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
        return self._database.write(Write(progress.create(new, self._via), job_id=new.job_id), conn)

    def get(self, domain: str, job_id: UUID) -> JobMetadata | None:
        """A job with its stages; None if the domain has no such job."""
        check(self._limits, writes=False, domain=domain, job_id=job_id)
        return self._database.in_transaction(progress.job(domain, job_id))

    def list(
        self, domain: str, *, status: JobStatus | JobStatusName | None = None, limit: int = 100, offset: int = 0
    ) -> builtins.list[JobMetadata]:
        """The jobs of a domain, or those of one `status`, newest first: at most `limit`, after the first `offset`."""
        check(self._limits, writes=False, domain=domain, limit=limit, offset=offset)
        plan = progress.jobs(domain, status=choice(JobStatus, status), limit=limit, offset=offset)
        return self._database.in_transaction(plan)

    def resume(self, domain: str, job_id: UUID, *, operator: str | None = None, conn: Connection | None = None) -> None:
        """Let a FAILED job go on with its next stage; after the last stage it is COMPLETED.

        A job that was compensated is refused.
        A job also goes on if an operator has completed or canceled, in troubleshooting, its step to the next stage.
        `operator` names who resumes it. With `conn` it is resumed when that transaction commits.
        """
        check(self._limits, domain=domain, job_id=job_id, operator=operator)
        plan = partial(progress.resume, domain, job_id, operator=operator, via=self._via)
        self._database.write(patient(lambda: then(plan(), None), job_id=job_id), conn)

    def cancel(
        self,
        domain: str,
        job_id: UUID,
        *,
        reason: str,
        operator: str | None = None,
        conn: Connection | None = None,
    ) -> int:
        """Stop a job and cancel the batch of its stage, as `cancel_batch` does; no further stage begins.

        Stages that have done something and have a compensation are undone, once everything that runs has ended.
        Returns how many commands were canceled. A job that is COMPENSATING, COMPLETED or CANCELED is left as it is.
        `reason` and `operator`, who cancels it, are kept with the job. With `conn` it is all one transaction: yours.
        """
        check(self._limits, domain=domain, job_id=job_id, operator=operator, reason=reason)
        begin = partial(progress.begin_to_cancel, domain, job_id, via=self._via)
        return cancel(self._database, begin, conn, reason=reason, operator=operator, job_id=job_id)

    def wait(self, domain: str, job_id: UUID, timeout: timedelta | float | None = None) -> JobMetadata:
        """Return the job once it is COMPLETED, FAILED or CANCELED.

        After `timeout`, in seconds if it is a number, a `TimeoutError` says how far the job came.
        """
        check(self._limits, writes=False, domain=domain, job_id=job_id)
        job: JobMetadata | None = None
        with self._changes(job_id) as changed:
            try:
                with waiting.TimeLimit(seconds_of(timeout)) as limit:
                    while True:
                        changed.clear()
                        plan = progress.job(domain, job_id)
                        job = self._database.in_transaction(plan, within=limit.patience)
                        if job is None:
                            raise JobNotFoundError(domain, job_id)
                        if job.status.final:
                            return job
                        limit.check()
                        changed.wait(min(limit.left, self._poll_every))
            except TimeoutError:
                raise _late(job_id, job) from None

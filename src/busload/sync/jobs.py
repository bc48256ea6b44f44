"""Made from busload.jobs.api by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Unpack
from uuid import UUID

from busload.batches.batch import SyncBatchCompletionCallback
from busload.commands.checks import check, choice, given, seconds_of
from busload.commands.command import BatchCommand
from busload.commands.headers import encode_headers, with_context
from busload.commands.ids import new_id
from busload.commands.send import Via
from busload.commands.send_middleware import Sender, around_send
from busload.errors import JobNotFoundError
from busload.jobs import batch, listing, progress
from busload.jobs.api import _late
from busload.jobs.batch import JobBatchOptions
from busload.jobs.cancel import begin_to_cancel
from busload.jobs.job import BatchJob, JobMetadata, JobStatus, JobStatusName, Stage, new_job
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.callers_connection import AnySyncConnection
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
        sender: Sender,
        database: Database,
        settings: Settings,
        via: Via,
        changes: Callable[[UUID], AbstractContextManager[waiting.Event]],
        call_on_complete: Callable[[UUID, Any], None],
    ) -> None:
        self._database, self._limits, self._poll_every = database, settings.limits, settings.poll_every.total_seconds()
        self._via, self._changes, self._call_on_complete = via, changes, call_on_complete
        self._sender = sender

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
        conn: AnySyncConnection | None = None,
    ) -> UUID:
        """Create a job with its first batch in one transaction, and return its id: `job_id`, or a new one.

        Each of the `stages` becomes a batch in `domain` once the one before is complete. A stage without commands is
        planned then, by the `planner` of its name. A stage that completes with failures stops the job as FAILED, unless
        `continue_after_failures`. If the job fails or is canceled, the commands in `compensate` of its stages run, the
        last stage first. `on_complete` is sent when the job is COMPLETED, with the job under the key "job" of its data.
        `name` and `custom_data` are for you, and kept with the job. With `conn` the job exists exactly if that
        transaction commits.
        """
        asked = BatchJob(stages, job_id, name, custom_data, on_complete, continue_after_failures)
        if not self._sender.around_sends:
            return self._create(domain, asked, {}, conn)
        with around_send(self._sender.around_sends, "jobs.create", domain) as call:
            call.result = created = self._create(domain, asked, call.headers, conn)
        return created

    def _create(self, domain: str, asked: BatchJob, headers: dict[str, str], conn: AnySyncConnection | None) -> UUID:
        check(self._limits, headers=headers)
        new, text = new_job(self._limits, domain, asked, new_id(), self._sender.data_types), encode_headers(headers)

        def write(headers: str | None) -> Write[UUID]:
            plan = then(progress.create([new], self._via, headers=headers), new.job_id)
            return Write(plan, job_id=new.job_id)

        if (telemetry := self._database.telemetry) is None:
            return self._database.write(write(text), conn)
        with telemetry.sending("create_job", domain, job_id=new.job_id) as context:
            return self._database.write(write(with_context(text, context, self._limits)), conn)

    def create_batch(
        self,
        domain: str,
        jobs: Iterable[BatchJob],
        *,
        on_complete: SyncBatchCompletionCallback | BatchCommand | None = None,
        conn: AnySyncConnection | None = None,
        **options: Unpack[JobBatchOptions],
    ) -> UUID:
        """Create up to 10,000 `jobs` as one batch, all or none, in one transaction, and return the id of the batch.

        The batch counts jobs as other batches count commands, and `get_batch`, `list_batches`, `wait_batch`,
        `watch_batch`, `explain_batch` and `cancel_batch` of the bus are for it, too. It completes with the last of its
        jobs that ends; `on_complete` is as in `create_batch` of the bus. With `conn`, the jobs exist exactly if your
        transaction commits. `list` finds its jobs by `batch_id`.
        """
        if not self._sender.around_sends:
            return self._create_batch(domain, jobs, on_complete, options, {}, conn)
        with around_send(self._sender.around_sends, "jobs.create_batch", domain) as call:
            call.result = created = self._create_batch(domain, jobs, on_complete, options, call.headers, conn)
        return created

    def _create_batch(
        self,
        domain: str,
        jobs: Iterable[BatchJob],
        on_complete: SyncBatchCompletionCallback | BatchCommand | None,
        options: JobBatchOptions,
        headers: dict[str, str],
        conn: AnySyncConnection | None,
    ) -> UUID:
        check(self._limits, headers=headers)
        about: dict[str, Any] = {"awaits": waiting.AWAITS, "types": self._sender.data_types}
        new, checked = batch.new_job_batch(self._limits, domain, jobs, options, on_complete, **about)
        text = encode_headers(headers)

        def write(headers: str | None) -> Write[UUID]:
            return Write(batch.create(new, checked, self._via, headers), new.batch_id)

        if (telemetry := self._database.telemetry) is None:
            self._database.write(write(text), conn)
        else:
            with telemetry.sending("create_jobs", domain, count=len(checked), batch_id=new.batch_id) as context:
                self._database.write(write(with_context(text, context, self._limits)), conn)
        self._call_on_complete(new.batch_id, on_complete)
        return new.batch_id

    def get(self, domain: str | None, job_id: UUID) -> JobMetadata | None:
        """A job with its stages; None if the domain, or no domain if it is None, has such a job."""
        check(self._limits, writes=False, **given(domain=domain), job_id=job_id)
        return self._database.in_transaction(listing.job(domain, job_id))

    def list(
        self,
        domain: str | None,
        *,
        status: JobStatus | JobStatusName | None = None,
        batch_id: UUID | None = None,
        name: str | None = None,
        limit: int = 100,
        offset: int = 0,
        after: UUID | None = None,
    ) -> builtins.list[JobMetadata]:
        """The jobs of a domain, or of all domains if it is None, newest first.

        All of them, or those of one `status` or of the batch `batch_id`, or in whose name the text `name` occurs. At
        most `limit`, after the first `offset`. `after`, the last job of the page before, pages without drift.
        """
        page: dict[str, Any] = {"name": name, "limit": limit, "offset": offset, "after": after}
        check(self._limits, writes=False, **given(domain=domain, batch_id=batch_id), **page)
        wanted = choice(JobStatus, status)
        plan = listing.jobs(domain, status=wanted, batch_id=batch_id, **page)
        return self._database.in_transaction(plan)

    def resume(
        self, domain: str, job_id: UUID, *, operator: str | None = None, conn: AnySyncConnection | None = None
    ) -> None:
        """Let a FAILED job go on with its next stage; after the last stage it is COMPLETED.

        A job that was compensated is refused, and so is a job that has failed in a batch of jobs which is complete or
        was canceled: the batch has counted it.
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
        conn: AnySyncConnection | None = None,
    ) -> int:
        """Stop a job and cancel the batch of its stage, as `cancel_batch` does; no further stage begins.

        Stages that have done something and have a compensation are undone, once everything that runs has ended.
        Returns how many commands were canceled. A job that is COMPENSATING or CANCELED is left as it is. A job that has
        ended otherwise is refused: one that is COMPLETED, was compensated, or has failed in a batch of jobs which is
        complete or was canceled. Any other FAILED job is CANCELED from here on.
        `reason` and `operator`, who cancels it, are kept with the job. With `conn` it is all one transaction: yours.
        """
        check(self._limits, domain=domain, job_id=job_id, operator=operator, reason=reason)
        begin = partial(begin_to_cancel, domain, job_id, via=self._via)
        canceled = cancel(self._database, begin, conn, reason=reason, operator=operator, job_id=job_id)
        return canceled.begun + canceled.commands

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
                        plan = listing.job(domain, job_id)
                        job = self._database.in_transaction(plan, within=limit.patience)
                        if job is None:
                            raise JobNotFoundError(domain, job_id)
                        if job.status.final:
                            return job
                        limit.check()
                        changed.wait(min(limit.left, self._poll_every))
            except TimeoutError:
                raise _late(job_id, job) from None

"""Jobs: the list of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.problem import no_such_page
from busload.dashboard.render import bus_of, cli, number, render, url, words
from busload.dashboard.route import Live, page
from busload.jobs.job import JobMetadata, JobStatus

LIMIT = 50


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs are listed: what the address says."""

    domain: str | None
    status: JobStatus | None
    name: str | None
    batch_id: UUID | None
    after: UUID | None

    @classmethod
    def of(cls, request: Request) -> Filter:
        return cls(
            asked.text(request, "domain"),
            asked.one_of(request, "status", JobStatus),
            asked.text(request, "name"),
            asked.id_of(request, "batch"),
            asked.id_of(request, "after"),
        )

    def query(self, after: UUID | None = None) -> dict[str, Any]:
        about = {"domain": self.domain, "status": self.status, "name": self.name}
        return {**about, "batch": self.batch_id, "after": after}

    @property
    def words(self) -> list[str]:
        """The options of the command line that mean the same."""
        options = {"--domain": self.domain, "--status": self.status, "--name": self.name, "--batch": self.batch_id}
        return [word for option, value in options.items() if value for word in (option, str(value))]


async def _listed(request: Request) -> tuple[Filter, list[JobMetadata]]:
    """The jobs of a page, and one more if there is a next page."""
    wanted = Filter.of(request)
    found = await bus_of(request).jobs.list(
        wanted.domain,
        status=wanted.status,
        name=wanted.name,
        batch_id=wanted.batch_id,
        after=wanted.after,
        limit=LIMIT + 1,
    )
    if not found and wanted.after is not None:
        raise no_such_page()
    return wanted, found


async def list_page(request: Request) -> Response:
    wanted, found = await _listed(request)
    shown = found[:LIMIT]
    return render(
        request,
        "jobs.html",
        title="Jobs",
        jobs=shown,
        wanted=wanted,
        given=any(wanted.query().values()),
        statuses=list(JobStatus),
        live=_values(shown),
        first=url(request, "jobs", wanted.query()) if wanted.after else None,
        next=url(request, "jobs", wanted.query(shown[-1].job_id)) if len(found) > LIMIT else None,
        cli=cli("job", "ls", *wanted.words),
    )


async def live_list(request: Request) -> Live:
    _, found = await _listed(request)
    return _values(found[:LIMIT])


def _values(jobs: Sequence[JobMetadata]) -> Live:
    values: dict[str, str | list[str]] = {"rows": [str(job.job_id) for job in jobs]}
    for job in jobs:
        values |= {
            f"{job.job_id}.status": words(job.status),
            f"{job.job_id}.status.code": job.status.value,
            f"{job.job_id}.stage": stage_of(job),
            f"{job.job_id}.ended": f"{sum(stage.status.final for stage in job.stages)} of {len(job.stages)}",
            f"{job.job_id}.parked": number(parked(job)),
        }
    return values


def stage_of(job: JobMetadata) -> str:
    """The stage that has not ended, or a dash."""
    return next((stage.name for stage in job.stages if not stage.status.final), "–")


def parked(job: JobMetadata) -> int:
    """Commands of its stages, and of what undoes them, that wait for a person."""
    batches = [batch for stage in job.stages for batch in (stage.batch, stage.compensation) if batch is not None]
    return sum(batch.in_troubleshooting_count for batch in batches)


ROUTES = (page("jobs", "/jobs", list_page, Permission.READ, label="Jobs", live=live_list),)

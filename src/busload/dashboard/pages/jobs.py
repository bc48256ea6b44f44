"""Jobs: the list of them."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.filter import Filter
from busload.dashboard.problem import no_such_page
from busload.dashboard.render import bus_of, cli, number, render, words
from busload.dashboard.route import Export, Live, Rows, page
from busload.jobs.job import JobMetadata, JobStatus

LIMIT = 50


def _wanted(request: Request) -> Filter:
    return Filter.of(request, domain=asked.text, status=asked.choice(JobStatus), name=asked.text, batch=asked.id_of)


async def _found(request: Request, wanted: Filter, after: UUID | None, limit: int) -> list[JobMetadata]:
    return await bus_of(request).jobs.list(
        wanted["domain"],
        status=wanted["status"],
        name=wanted["name"],
        batch_id=wanted["batch"],
        after=after,
        limit=limit,
    )


async def _listed(request: Request) -> tuple[Filter, UUID | None, list[JobMetadata]]:
    """The jobs of a page, and one more if there is a next page."""
    wanted, after = _wanted(request), asked.id_of(request, "after")
    found = await _found(request, wanted, after, LIMIT + 1)
    if not found and after is not None:
        raise no_such_page()
    return wanted, after, found


async def _exported(request: Request, after: UUID | None, limit: int) -> Rows:
    found = await _found(request, _wanted(request), after, limit)
    return Rows(found, found[-1].job_id if len(found) == limit else None)


async def list_page(request: Request) -> Response:
    wanted, after, found = await _listed(request)
    shown, more = found[:LIMIT], len(found) > LIMIT
    return render(
        request,
        "jobs.html",
        title="Jobs",
        jobs=shown,
        statuses=list(JobStatus),
        live=_values(shown),
        cli=cli("job", "ls", *wanted.words),
        **wanted.shown(request, "jobs", after=after, next=shown[-1].job_id if more else None),
    )


async def live_list(request: Request) -> Live:
    return _values((await _listed(request))[-1][:LIMIT])


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


EXPORT = Export(JobMetadata, _exported)
ROUTES = (page("jobs", "/jobs", list_page, Permission.READ, label="Jobs", live=live_list, export=EXPORT),)

"""One job: its stages drawn as a graph, what it waits for, and what an operator may do."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.batches.batch import BatchMetadata
from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.pages.batch import waiting
from busload.dashboard.pages.jobs import parked
from busload.dashboard.problem import not_found
from busload.dashboard.render import bus_of, cli, number, principal_of, render, sees_payloads, tree, words
from busload.dashboard.route import Live, action, page
from busload.jobs.job import JobMetadata, JobStatus

WIDTH, GAP, HEIGHT, LEFT, TIP = 190, 44, 92, 2, 11
"""Of a box in the graph, between two of them, and of the tip of an arrow, in its own units."""
NAME = 24
"""Characters of a name that fit into a box; the table below has all of it."""


@dataclass(frozen=True, slots=True)
class Box:
    """A stage in the graph, or what undoes it."""

    key: str
    x: int
    y: int
    name: str
    batch_id: UUID | None
    undoes: bool


@dataclass(frozen=True, slots=True)
class Line:
    """An arrow between two boxes."""

    x1: int
    y1: int
    x2: int
    y2: int
    undoes: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """The stages of a job from left to right, and below them what undoes each, from right to left."""

    width: int
    height: int
    box_width: ClassVar = WIDTH
    box_height: ClassVar = HEIGHT
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, job: JobMetadata) -> Graph:
        boxes, lines = [], []
        undo_y = HEIGHT + GAP
        compensated = [at for at, stage in enumerate(job.stages) if stage.compensates]
        for at, stage in enumerate(job.stages):
            x, middle = LEFT + at * (WIDTH + GAP), HEIGHT // 2
            batch_id = None if stage.batch is None else stage.batch.batch_id
            boxes.append(Box(f"stage.{at}", x, LEFT, _cut(stage.name), batch_id, False))
            if at:
                lines.append(Line(x - GAP, LEFT + middle, x - TIP, LEFT + middle, False))
            if stage.compensates:
                undo_id = None if stage.compensation is None else stage.compensation.batch_id
                boxes.append(Box(f"undo.{at}", x, undo_y, "undo " + _cut(stage.name, NAME - 5), undo_id, True))
                lines.append(Line(x + WIDTH // 2, LEFT + HEIGHT, x + WIDTH // 2, undo_y - TIP, True))
        for before, after in pairwise(compensated):
            right, left = LEFT + after * (WIDTH + GAP), LEFT + before * (WIDTH + GAP) + WIDTH
            lines.append(Line(right, undo_y + HEIGHT // 2, left + TIP, undo_y + HEIGHT // 2, True))
        width = len(job.stages) * (WIDTH + GAP) - GAP + 2 * LEFT
        height = (undo_y if compensated else LEFT) + HEIGHT + LEFT
        return cls(width, height, tuple(boxes), tuple(lines))


def _cut(name: str, most: int = NAME) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


async def _job(request: Request) -> JobMetadata:
    job_id: UUID = request.path_params["job_id"]
    found = await bus_of(request).jobs.get(None, job_id)
    if found is None:
        raise not_found(
            f"There is no job {job_id} in any domain.",
            "Check the id, and which database the dashboard uses. It may have been removed as old.",
        )
    return found


async def show(request: Request, notice: str | None = None) -> Response:
    job = await _job(request)
    return render(
        request,
        "job.html",
        title=job.name or str(job.job_id),
        job=job,
        graph=Graph.of(job),
        remaining=sum(waiting(stage.batch) for stage in job.stages if stage.batch is not None),
        resumable=job.status is JobStatus.FAILED and job.compensated_at is None,
        cancelable=not job.status.final or (job.status is JobStatus.FAILED and job.compensated_at is None),
        custom_data=tree(request, job.custom_data),
        sees=sees_payloads(request),
        live=_values(job),
        cli=cli("job", "show", job.job_id),
        notice=notice,
    )


async def live(request: Request) -> Live:
    return _values(await _job(request))


def _values(job: JobMetadata) -> Live:
    values: dict[str, str | list[str]] = {
        "status": words(job.status),
        "status.code": job.status.value,
        "ended": f"{sum(stage.status.final for stage in job.stages)} of {len(job.stages)}",
        "parked": number(parked(job)),
        "failures": number(job.compensation_failures),
        "step": "–" if job.step is None else f"{job.step.command_type}: {words(job.step.status)}",
        "rows": _rows(job),
    }
    for at, stage in enumerate(job.stages):
        values |= _box(f"stage.{at}", stage.status.value, stage.batch)
        if stage.compensates:
            values |= _box(f"undo.{at}", _undo(job, at), stage.compensation)
    return values


def _rows(job: JobMetadata) -> list[str]:
    """What makes the page another one: batches that have come, and an end."""
    batches = [batch for stage in job.stages for batch in (stage.batch, stage.compensation) if batch is not None]
    return [str(batch.batch_id) for batch in batches] + (
        [f"ended:{job.completed_at.isoformat()}"] if job.completed_at else []
    )


def _undo(job: JobMetadata, at: int) -> str:
    """How far the compensation of a stage is. They begin with the last stage, and those not needed are passed over."""
    if (compensation := job.stages[at].compensation) is not None:
        return compensation.status.value
    if job.status is not JobStatus.COMPENSATING:
        return "NOT_NEEDED" if job.status.final else "ONLY_IF_IT_FAILS"
    reached = min((n for n, stage in enumerate(job.stages) if stage.compensation is not None), default=len(job.stages))
    return "PENDING" if at < reached else "NOT_NEEDED"


def _box(key: str, status: str, batch: BatchMetadata | None) -> dict[str, str]:
    """The texts of a box. Its state is a colour too, and never only that."""
    done = "–" if batch is None else f"{number(batch.finished_count)} of {number(batch.total_count)}"
    wrong = 0 if batch is None else batch.failed_count + batch.in_troubleshooting_count
    return {
        f"{key}.status": words(status),
        f"{key}.code": status,
        f"{key}.done": done,
        f"{key}.wrong": f"{number(wrong)} failed or parked" if wrong else "",
    }


async def resume(request: Request) -> Response:
    await asked.form(request)
    job = await _job(request)
    await bus_of(request).jobs.resume(job.domain, job.job_id, operator=principal_of(request).name)
    return await show(request, "Resumed: it goes on with its next stage.")


async def cancel(request: Request) -> Response:
    reason = asked.required(await asked.form(request), "reason")
    job, operator = await _job(request), principal_of(request).name
    canceled = await bus_of(request).jobs.cancel(job.domain, job.job_id, reason=reason, operator=operator)
    return await show(request, f"Canceled, {counted(canceled, 'command')} with it. What runs finishes.")


PATH = "/jobs/{job_id:uuid}"
ROUTES = (
    page("job", PATH, show, Permission.READ, live=live),
    action("job.resume", f"{PATH}/resume", resume, Permission.OPERATE),
    action("job.cancel", f"{PATH}/cancel", cancel, Permission.OPERATE),
)

"""Batches: the list of them, and the live values of one, which its own page shows too."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.batches.batch import BatchMetadata, BatchStatus, BatchType
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.filter import Filter
from busload.dashboard.problem import no_such_page
from busload.dashboard.render import bus_of, cli, dashboard_of, number, render, words
from busload.dashboard.route import Export, Live, Rows, page

LIMIT = 50
COUNTERS = ("completed", "failed", "canceled", "in_troubleshooting")


def _wanted(request: Request) -> Filter:
    return Filter.of(
        request,
        domain=asked.text,
        status=asked.choice(BatchStatus),
        type=asked.choice(BatchType),
        name=asked.text,
        since=asked.moment,
        until=asked.moment,
    )


async def _found(request: Request, wanted: Filter, after: UUID | None, limit: int) -> list[BatchMetadata]:
    return await bus_of(request).list_batches(
        wanted["domain"],
        status=wanted["status"],
        batch_type=wanted["type"],
        name=wanted["name"],
        created_after=wanted["since"],
        created_before=wanted["until"],
        after=after,
        limit=limit,
        forecast=True,
    )


async def _listed(request: Request) -> tuple[Filter, UUID | None, list[BatchMetadata]]:
    """The batches of a page, and one more if there is a next page."""
    wanted, after = _wanted(request), asked.id_of(request, "after")
    found = await _found(request, wanted, after, LIMIT + 1)
    if not found and after is not None:
        raise no_such_page()
    return wanted, after, found


async def _exported(request: Request, after: UUID | None, limit: int) -> Rows:
    found = await _found(request, _wanted(request), after, limit)
    return Rows(found, found[-1].batch_id if len(found) == limit else None)


async def list_page(request: Request) -> Response:
    wanted, after, found = await _listed(request)
    shown, more = found[:LIMIT], len(found) > LIMIT
    return render(
        request,
        "batches.html",
        title="Batches",
        batches=shown,
        creates="batch.new" in dashboard_of(request).routes,
        statuses=list(BatchStatus),
        types=list(BatchType),
        live=_values(shown),
        cli=cli("batch", "ls", *wanted.words),
        **wanted.shown(request, "batches", after=after, next=shown[-1].batch_id if more else None),
    )


async def live_list(request: Request) -> Live:
    return _values((await _listed(request))[-1][:LIMIT])


def _values(batches: Sequence[BatchMetadata]) -> Live:
    values: dict[str, str | list[str]] = {"rows": [str(batch.batch_id) for batch in batches]}
    for batch in batches:
        values |= progress(batch, f"{batch.batch_id}.")
    return values


def progress(batch: BatchMetadata, prefix: str = "") -> dict[str, str]:
    """The live values of one batch: counters as text, and the parts of its bar in percent."""
    values = {"status": status_of(batch), "status.code": _code(batch), "total": number(batch.total_count)}
    begin, parts = 0.0, []
    for name in COUNTERS:
        count = getattr(batch, f"{name}_count")
        share = 100 * count / batch.total_count if batch.total_count else 0.0
        values |= {name: number(count), f"{name}.x": f"{begin:.3f}", f"{name}.width": f"{share:.3f}"}
        begin += share
        if count:
            parts.append(f"{number(count)} {words(name).lower()}")
    values["remaining"] = number(batch.remaining_count)
    ended = 100 * batch.finished_count // batch.total_count if batch.total_count else 0
    values["percent"] = f"{ended} %"
    values["bar"] = f"{ended} % of {number(batch.total_count)} ended" + (f": {', '.join(parts)}" if parts else "")
    forecast = batch.forecast
    values["rate"] = "–" if forecast is None else f"{number(forecast.rate)}/s"
    values["forecast"] = "–" if forecast is None else _forecast(batch)
    return {prefix + key: value for key, value in values.items()}


def status_of(batch: BatchMetadata) -> str:
    if batch.held_at is not None and not batch.status.final:
        return "Held"
    return words(batch.status)


def _code(batch: BatchMetadata) -> str:
    return "HELD" if batch.held_at is not None and not batch.status.final else batch.status.value


def _forecast(batch: BatchMetadata) -> str:
    assert batch.forecast is not None
    if batch.forecast.unknown is not None:
        return words(batch.forecast.unknown)
    return str(batch.forecast)


EXPORT = Export(BatchMetadata, _exported)
ROUTES = (page("batches", "/batches", list_page, Permission.READ, label="Batches", live=live_list, export=EXPORT),)

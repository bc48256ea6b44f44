"""Schedules: what is due when, what was fired, and how to pause, resume and trigger a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.wording import span
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.problem import Problem, no_such_page
from busload.dashboard.render import bus_of, cli, iso, live_key, principal_of, render, tree, url, words
from busload.dashboard.route import Export, Live, Rows, action, page
from busload.schedules.operate import NEWEST, history_before, newest_fires
from busload.schedules.schedule import Fire, FireType, ScheduleMetadata

MISSED = {"one": "the latest is fired", "all": "all are fired", "skip": "none is fired"}
"""What becomes of due times that were missed, by the catch-up of their schedule."""
LIMIT, FIRES = 50, 50
"""Schedules of a page, and rows of the history that are shown."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which schedules are listed: what the address says."""

    domain: str | None
    after: str | None

    @classmethod
    def of(cls, request: Request) -> Filter:
        return cls(asked.text(request, "domain"), asked.text(request, "after"))


Fires: TypeAlias = Mapping[str, Fire]
"""The last command of each schedule that has fired one, by its name."""


async def _listed(request: Request) -> tuple[Filter, list[ScheduleMetadata], Fires]:
    """The schedules of a page, one more if there is a next page, and what they have fired last."""
    wanted, bus = Filter.of(request), bus_of(request)
    found = await bus.schedules.list(wanted.domain, after=wanted.after, limit=LIMIT + 1)
    if not found and wanted.after is not None:
        raise no_such_page()
    names = [one.name for one in found[:LIMIT]]
    fires = [fire for shard in bus.shards for fire in await shard.database.read(newest_fires(names))]
    return wanted, found, {fire.schedule: fire for fire in fires}


async def _exported(request: Request, after: str | None, limit: int) -> Rows:
    found = await bus_of(request).schedules.list(Filter.of(request).domain, after=after, limit=limit)
    return Rows(found, found[-1].name if len(found) == limit else None)


async def list_page(request: Request) -> Response:
    wanted, found, fires = await _listed(request)
    shown, about = found[:LIMIT], {"domain": wanted.domain}
    return render(
        request,
        "schedules.html",
        title="Schedules",
        schedules=shown,
        fires=fires,
        wanted=wanted,
        key=live_key,
        live=_values(shown, fires),
        first=url(request, "schedules", about) if wanted.after else None,
        next=url(request, "schedules", {**about, "after": shown[-1].name}) if len(found) > LIMIT else None,
        cli=cli("schedule", "ls", *(("--domain", wanted.domain) if wanted.domain else ())),
    )


async def live_list(request: Request) -> Live:
    _, found, fires = await _listed(request)
    return _values(found[:LIMIT], fires)


def _values(schedules: Sequence[ScheduleMetadata], fires: Fires) -> Live:
    values: dict[str, str | list[str]] = {"rows": [live_key(one.name) for one in schedules]}
    for one in schedules:
        key = live_key(one.name)
        values |= {f"{key}.{name}": value for name, value in _state(one).items()}
        values |= _status(fires.get(one.name), f"{key}.status")
    return values


def _state(one: ScheduleMetadata) -> dict[str, str]:
    state, code = (
        ("Paused", "PAUSED")
        if one.paused_at is not None
        else ("Ended", "COMPLETED")
        if one.next_due_at is None
        else ("Overdue", "FAILED")
        if one.overdue
        else ("On", "OPEN")
    )
    next_due, last_due = ("" if at is None else iso(at) for at in (one.next_due_at, one.last_due_at))
    return {"state": state, "state.code": code, "next": next_due, "last": last_due}


async def _schedule(request: Request) -> tuple[ScheduleMetadata, list[Fire]]:
    name, schedules = request.path_params["name"], bus_of(request).schedules
    found = await schedules.get(name)
    if found is None:
        raise Problem(
            404,
            "Not found",
            f"There is no schedule {name!r:.200}: no application has declared it, or somebody has removed it.",
            "See the list of schedules, and which database the dashboard uses.",
        )
    return found, await schedules.history(name, limit=FIRES)


async def _exported_history(request: Request, before: int | None, limit: int) -> Rows:
    name, bus = request.path_params["name"], bus_of(request)
    schedule, _ = await _schedule(request)
    found = await bus.shard_of(schedule.domain).database.read(history_before(before or NEWEST, name, limit=limit))
    return Rows([fire for _, fire in found], found[-1][0] if len(found) == limit else None)


async def show(request: Request, notice: str | None = None) -> Response:
    found, fires = await _schedule(request)
    return render(
        request,
        "schedule.html",
        title=found.name,
        schedule=found,
        fires=fires,
        late=_late,
        row=_row,
        span=span,
        missed=MISSED,
        data=tree(request, found.data),
        limit=FIRES,
        live=_of(found, fires),
        cli=cli("schedule", "show", found.name),
        notice=notice,
    )


async def live(request: Request) -> Live:
    return _of(*await _schedule(request))


def _of(found: ScheduleMetadata, fires: Sequence[Fire]) -> Live:
    values: dict[str, str | list[str]] = {"rows": [_row(one) for one in fires], **_state(found)}
    for one in fires:
        values |= _status(one, f"{_row(one)}.status")
    return values


def _status(one: Fire | None, key: str) -> dict[str, str]:
    """How far the command of a fire is; a dash if none was sent, or it was removed."""
    status = None if one is None else one.status
    return {key: "–" if status is None else words(status), f"{key}.code": status or ""}


def _row(one: Fire) -> str:
    return live_key(one.type, str(one.command_id), one.due_at.isoformat())


def _late(one: Fire) -> str:
    return span(one.late) if one.type is FireType.DUE else "–"


async def pause(request: Request) -> Response:
    fields = await asked.form(request)
    name, by = request.path_params["name"], principal_of(request).name
    paused = await bus_of(request).schedules.pause(name, reason=asked.required(fields, "reason"), operator=by)
    return await show(request, f"Paused {name}." if paused else f"{name} was paused already.")


async def resume(request: Request) -> Response:
    await asked.form(request)
    name = request.path_params["name"]
    resumed = await bus_of(request).schedules.resume(name, operator=principal_of(request).name)
    return await show(request, f"Resumed {name}." if resumed else f"{name} was not paused.")


async def trigger(request: Request) -> Response:
    await asked.form(request)
    name = request.path_params["name"]
    command_id = await bus_of(request).schedules.trigger(name, operator=principal_of(request).name)
    return await show(request, f"Sent command {command_id}.")


PATH = "/schedules/{name}"
ROUTES = (
    page(
        "schedules",
        "/schedules",
        list_page,
        Permission.READ,
        label="Schedules",
        live=live_list,
        export=Export(ScheduleMetadata, _exported),
    ),
    page("schedule", PATH, show, Permission.READ, live=live, export=Export(Fire, _exported_history, part="history")),
    action("schedule.pause", f"{PATH}/pause", pause, Permission.OPERATE),
    action("schedule.resume", f"{PATH}/resume", resume, Permission.OPERATE),
    action("schedule.trigger", f"{PATH}/trigger", trigger, Permission.OPERATE),
)

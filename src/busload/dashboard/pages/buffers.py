"""Buffers: what waits to leave in groups, the groups under way, and how to let events go at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response

from busload.buffers.declaration import EXHAUSTED, GROUP
from busload.buffers.overview import BufferOverview
from busload.buffers.status import COUNTED, PLACES, BufferStatus
from busload.commands.wording import counted, span
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.problem import not_found
from busload.dashboard.render import ago, bus_of, cli, live_key, number, principal_of, render, sees_payloads
from busload.dashboard.route import Live, action, page

LIMIT = 100
GROUPS = 20
"""Groups in troubleshooting that are shown."""


async def list_page(request: Request) -> Response:
    buffers = await bus_of(request).buffers.overview(limit=LIMIT)
    return render(
        request,
        "buffers.html",
        title="Buffers",
        buffers=buffers,
        leaves=_leaves,
        key=live_key,
        limit=LIMIT,
        live=_values(buffers),
        cli=cli("buffer", "ls"),
    )


async def live_list(request: Request) -> Live:
    return _values(await bus_of(request).buffers.overview(limit=LIMIT))


def _values(buffers: Sequence[BufferOverview]) -> Live:
    values: dict[str, str | list[str]] = {"rows": [live_key(buffer.name) for buffer in buffers]}
    for buffer in buffers:
        key = live_key(buffer.name)
        state, code = _state(buffer.paused, buffer.problem)
        values |= {
            f"{key}.state": state,
            f"{key}.state.code": code,
            f"{key}.waiting": _waiting(buffer.waiting, buffer.waiting_capped),
            f"{key}.oldest": ago(buffer.oldest, buffer.at),
            f"{key}.calls": number(buffer.calls),
            f"{key}.done": number(buffer.done),
        }
        values |= {f"{key}.{place}": number(getattr(buffer, f"groups_{place}")) for place in PLACES}
    return values


def _state(paused: bool, problem: str | None) -> tuple[str, str]:
    if problem is not None:
        return "Problem", "FAILED"
    return ("Paused", "PAUSED") if paused else ("Open", "OPEN")


def _waiting(waiting: int | None, capped: bool) -> str:
    return "?" if waiting is None else f"{number(COUNTED)}+" if capped else number(waiting)


def _leaves(size: int | None, max_age: timedelta | None) -> str:
    """When events leave."""
    return "–" if size is None or max_age is None else f"{size:,} at a time, or after {span(max_age)}"


async def _buffer(request: Request) -> tuple[BufferStatus, datetime]:
    name = request.path_params["name"]
    found = await bus_of(request).buffers.get(name)
    if found is None:
        raise not_found(
            f"There is no buffer {name!r:.200}: no worker has declared it, and no event waits in it.",
            "See the list of buffers, and which database the dashboard uses.",
        )
    return found, datetime.now().astimezone()


async def show(request: Request, notice: str | None = None) -> Response:
    bus = bus_of(request)
    status, now = await _buffer(request)
    parked = await bus.troubleshooting.list(status.name, command_type=GROUP, limit=GROUPS)
    hooks = await bus.troubleshooting.list(status.name, command_type=EXHAUSTED, limit=GROUPS)
    return render(
        request,
        "buffer.html",
        title=status.name,
        buffer=status,
        waiting=_waiting(status.waiting, status.waiting_capped),
        leaves=_leaves(status.size, status.max_age),
        paused=status.name in [pause.domain for pause in await bus.domains.pauses()],
        parked=[*parked, *hooks],
        sees=sees_payloads(request),
        live=_of(status, now),
        cli=cli("buffer", "show", status.name),
        notice=notice,
    )


async def live(request: Request) -> Live:
    return _of(*await _buffer(request))


def _of(status: BufferStatus, now: datetime) -> Live:
    return {
        "waiting": _waiting(status.waiting, status.waiting_capped),
        "oldest": ago(status.oldest, now),
        "grouped": number(status.grouped),
        **{place: number(getattr(status, f"groups_{place}")) for place in PLACES},
        "calls": number(status.calls),
        "done": number(status.done),
        "per_call": number(status.items_per_call),
        "saved": number(status.calls_saved),
        "rows": [f"parked:{status.groups_in_troubleshooting}"],
    }


async def flush(request: Request) -> Response:
    await asked.form(request)
    status, _ = await _buffer(request)
    count = await bus_of(request).buffers.flush(status.name, operator=principal_of(request).name)
    events = counted(count, "event") + (" or more" if count >= COUNTED else "")
    return await show(request, f"{events} may leave without waiting for more." if count else "Nothing waits in it.")


PATH = "/buffers/{name}"
ROUTES = (
    page("buffers", "/buffers", list_page, Permission.READ, label="Buffers", live=live_list),
    page("buffer", PATH, show, Permission.READ, live=live),
    action("buffer.flush", f"{PATH}/flush", flush, Permission.OPERATE),
)

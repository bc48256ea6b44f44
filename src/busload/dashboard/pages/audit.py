"""The audit of operators: who did what, when and why."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.audit.actions import Action, ActionPage, ActionType
from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.filter import Filter
from busload.dashboard.problem import no_such_page
from busload.dashboard.render import bus_of, cli, render, short, url
from busload.dashboard.route import Export, Live, Rows, page

LIMIT = 50


@dataclass(frozen=True, slots=True)
class Shown:
    """An action, and a link to what it was done to."""

    action: Action
    what: str
    link: str | None


def _wanted(request: Request) -> Filter:
    return Filter.of(
        request,
        operator=asked.text,
        action=asked.choice(ActionType),
        domain=asked.text,
        since=asked.moment,
        until=asked.moment,
    )


async def _listed(request: Request) -> tuple[Filter, str | None, ActionPage]:
    wanted, after = _wanted(request), asked.text(request, "after")
    found = await bus_of(request).audit.list(**wanted, after=after, limit=LIMIT)
    if after is not None and not found.actions and found.next is None and not wanted.given:
        raise no_such_page()
    return wanted, after, found


async def _exported(request: Request, after: str | None, limit: int) -> Rows:
    return Rows(*await bus_of(request).audit.list(**_wanted(request), after=after, limit=limit))


async def list_page(request: Request) -> Response:
    wanted, after, found = await _listed(request)
    return render(
        request,
        "audit.html",
        title="Audit",
        actions=[_shown(request, action) for action in found.actions],
        types=list(ActionType),
        live=_values(found),
        cli=cli("audit", "ls", *wanted.words),
        **wanted.shown(request, "audit", after=after, next=found.next),
    )


async def live(request: Request) -> Live:
    return _values((await _listed(request))[-1])


def _values(found: ActionPage) -> Live:
    return {"rows": [str(action.event) for action in found.actions]}


def _shown(request: Request, action: Action) -> Shown:
    """What an action was done to, and where to see it."""
    if action.commands > 1:
        link = url(request, "batch", batch_id=action.batch_id) if action.batch_id else None
        return Shown(action, counted(action.commands, "command"), link)
    if action.command_id is not None and action.domain is not None:
        link = url(request, "command", domain=action.domain, command_id=action.command_id)
        return Shown(action, f"command {short(action.command_id)}", link)
    if action.worker_name is not None:
        return Shown(action, action.worker_name, url(request, "worker", worker=action.worker))
    if action.job_id is not None and _is_id(action.job_id):
        return Shown(action, f"job {short(action.job_id)}", url(request, "job", job_id=action.job_id))
    if action.batch_id is not None:
        link = url(request, "batch", batch_id=action.batch_id)
        return Shown(action, f"batch {short(action.batch_id)}", link if action.domain is not None else None)
    if action.buffer is not None:
        return Shown(action, action.buffer, url(request, "buffer", name=action.buffer))
    if action.schedule is not None:
        link = url(request, "schedule", name=action.schedule) if action.type != ActionType.SCHEDULE_REMOVED else None
        return Shown(action, action.schedule, link)
    if action.old_tracker is not None:
        return Shown(action, f"{action.old_tracker} to {action.phase}", None)
    if action.type in (ActionType.DOMAIN_PAUSED, ActionType.DOMAIN_RESUMED):
        return Shown(action, str(action.domain), url(request, "domains"))
    name = action.limit or action.domain
    return Shown(action, name or ("a command that was removed" if action.commands else "everything"), None)


def _is_id(text: str) -> bool:
    try:
        return bool(UUID(text))
    except ValueError:
        return False


EXPORT = Export(Action, _exported)
ROUTES = (page("audit", "/audit", list_page, Permission.READ, label="Audit", live=live, export=EXPORT),)

"""Domains: what waits in each, who serves it, and how to let one rest."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.checks import check
from busload.commands.search import known_domains
from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.problem import not_found
from busload.dashboard.render import bus_of, cli, number, principal_of, render
from busload.dashboard.route import Live, action, page
from busload.limits.pause import DomainOverview, Pause

LIMIT = 50
"""Pauses that are shown."""
PLACES = ("ready", "scheduled", "running", "in_troubleshooting", "unpublished", "workers")
LEADS = {"in_troubleshooting": "troubleshooting", "unpublished": "dispatch", "workers": "workers"}
"""Numbers that lead to a page about them, with its filter by domain."""


async def show(request: Request, notice: str | None = None) -> Response:
    domains, bus = await bus_of(request).domains.list(), bus_of(request)
    history = await bus.domains.history(limit=LIMIT)
    return render(
        request,
        "domains.html",
        title="Domains",
        domains=domains,
        places=PLACES,
        leads=LEADS,
        history=history,
        live=_values(domains, history),
        cli=cli("domain", "ls"),
        notice=notice,
    )


async def live(request: Request) -> Live:
    bus = bus_of(request)
    return _values(await bus.domains.list(), await bus.domains.history(limit=LIMIT))


def _values(domains: Sequence[DomainOverview], history: Sequence[Pause]) -> Live:
    values: dict[str, str | list[str]] = {
        "rows": [*(each.domain for each in domains), *(f"pause:{each.domain}:{_when(each)}" for each in history)]
    }
    for each in domains:
        values |= {f"{each.domain}.{name}": number(getattr(each, name)) for name in PLACES}
        values[f"{each.domain}.state"] = "Paused" if each.pause else "Open"
        values[f"{each.domain}.state.code"] = "PAUSED" if each.pause else "OPEN"
    return values


def _when(pause: Pause) -> str:
    return f"{pause.since.isoformat()}:{pause.resumed_at.isoformat() if pause.resumed_at else ''}"


async def pause(request: Request) -> Response:
    fields = await asked.form(request)
    domain, reason = asked.required(fields, "domain"), asked.required(fields, "reason")
    bus = bus_of(request)
    check(bus.settings.limits, writes=True, domain=domain)
    if domain not in await bus.shard_of(domain).database.read(known_domains()):
        raise not_found(
            f"No command was ever sent to {domain!r:.80}, and no worker serves it. Nothing was paused.",
            "Check the name. `busload domain pause --force` pauses a domain ahead of its first command.",
        )
    paused = await bus.domains.pause(domain, reason=reason, operator=principal_of(request).name)
    return await show(
        request, f"Paused {domain}. Nothing new starts in it." if paused else f"{domain} was paused already."
    )


async def resume(request: Request) -> Response:
    domain, bus = asked.required(await asked.form(request), "domain"), bus_of(request)
    resumed = await bus.domains.resume(domain, operator=principal_of(request).name)
    if not resumed:
        return await show(request, f"{domain} was not paused.")
    ready = sum(each.ready for each in await bus.domains.list() if each.domain == domain)
    return await show(request, f"Resumed {domain}: {counted(ready, 'command is', 'commands are')} ready in it.")


PATH = "/domains"
ROUTES = (
    page("domains", PATH, show, Permission.READ, label="Domains", live=live),
    action("domain.pause", f"{PATH}/pause", pause, Permission.OPERATE),
    action("domain.resume", f"{PATH}/resume", resume, Permission.OPERATE),
)

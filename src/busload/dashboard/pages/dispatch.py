"""Dispatch: what waits to be published to a broker, how publishing went, and what an operator may do about it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.problem import Problem
from busload.dashboard.render import ago, bus_of, cli, live_key, number, principal_of, render, sees_payloads
from busload.dashboard.route import Live, action, page
from busload.dispatch import OutboxEntry, Reconciliation
from busload.dispatch.report import PublishingReport, RecentJob

DAYS = 14


async def _read(request: Request) -> tuple[str | None, list[OutboxEntry], PublishingReport]:
    domain, bus = asked.text(request, "domain"), bus_of(request)
    return domain, await bus.outbox.list(domain=domain), await bus.outbox.report(days=DAYS)


async def show(
    request: Request, notice: str | None = None, compared: Sequence[Reconciliation] | None = None
) -> Response:
    domain, entries, report = await _read(request)
    bus = bus_of(request)
    return render(
        request,
        "dispatch.html",
        title="Dispatch",
        domain=domain,
        entries=entries,
        key=_key,
        report=report,
        job_key=_job_key,
        failed=[(name, sum(one.commands for one in those)) for name, those in _failed(entries)],
        transport=None if bus.transport is None else bus.transport.name,
        sees=sees_payloads(request),
        brokers=bool(entries) or bus.transport is not None or any(day.dispatched for day in report.daily),
        compared=compared,
        live=_values(entries, report),
        cli=cli("outbox", "ls", *(["--domain", domain] if domain else [])),
        notice=notice,
    )


async def live(request: Request) -> Live:
    _, entries, report = await _read(request)
    return _values(entries, report)


def _failed(entries: Sequence[OutboxEntry]) -> list[tuple[str, list[OutboxEntry]]]:
    """What waits after a failed round, by domain: this is what can be tried again or rerouted."""
    failed = sorted((entry for entry in entries if entry.rounds), key=lambda entry: entry.domain)
    return [(name, list(those)) for name, those in groupby(failed, key=lambda entry: entry.domain)]


def _values(entries: Sequence[OutboxEntry], report: PublishingReport) -> Live:
    now, oldest = datetime.now(UTC), min((entry.oldest for entry in entries), default=None)
    values: dict[str, str | list[str]] = {
        "commands": number(sum(entry.commands for entry in entries)),
        "oldest": ago(oldest, now),
        "failed": number(sum(entry.commands for entry in entries if entry.rounds)),
        "rounds": number(max((entry.rounds for entry in entries), default=0)),
        "under_way": number(sum(entry.being_published for entry in entries)),
        "rows": [_key(entry) for entry in entries] + [_job_key(job) for job in report.recent],
    }
    for entry in entries:
        values |= {
            f"{_key(entry)}.commands": number(entry.commands),
            f"{_key(entry)}.oldest": ago(entry.oldest, now),
            f"{_key(entry)}.rounds": number(entry.rounds),
        }
    for job in report.recent:
        for name in ("pending", "queued", "processing", "completed", "failed"):
            values[f"{_job_key(job)}.{name}"] = number(getattr(job, name))
    return values


def _key(entry: OutboxEntry) -> str:
    """What tells an entry from the others."""
    return live_key("outbox", entry.transport, entry.domain, entry.reason or "")


def _job_key(job: RecentJob) -> str:
    return live_key("job", job.domain, job.job_id or "")


async def retry(request: Request) -> Response:
    domain = (await asked.form(request)).get("domain") or None
    count = await bus_of(request).outbox.retry(domain=domain, operator=principal_of(request).name)
    due = counted(count, "command is", "commands are")
    return await show(request, f"{due} due now: the relays of the workers publish them." if count else "Nothing waits.")


async def reroute(request: Request) -> Response:
    """Done for exactly as many commands as the operator has seen; if there are others meanwhile, nothing is done."""
    fields = await asked.form(request)
    domain, expected = asked.required(fields, "domain"), asked.whole_number(fields, "count")
    outbox, operator = bus_of(request).outbox, principal_of(request).name
    found = await outbox.reroute(domain=domain, dry_run=True)
    if found != expected:
        raise Problem(
            409,
            "It has changed meanwhile",
            f"The page said that {counted(expected, 'command waits', 'commands wait')} in {domain} after a failed "
            f"round, and now {'it is' if found == 1 else 'there are'} {found:,}. Nothing was rerouted.",
            "Look at the page again, and repeat the action if it is still what you want.",
        )
    count = await outbox.reroute(domain=domain, operator=operator)
    return await show(request, f"Rerouted {counted(count, 'command')}: PostgreSQL delivers them.")


async def repair(request: Request) -> Response:
    domain = asked.required(await asked.form(request), "domain")
    operator = principal_of(request).name
    compared = await bus_of(request).outbox.reconcile(domain=domain, repair=True, operator=operator)
    again = sum(each.published_again for each in compared)
    removed = sum(each.removed for each in compared)
    said = f"Published {counted(again, 'command')} again, and removed {counted(removed, 'message')}."
    return await show(request, said, compared)


PATH = "/dispatch"
ROUTES = (
    page("dispatch", PATH, show, Permission.READ, label="Dispatch", live=live),
    action("dispatch.retry", f"{PATH}/retry", retry, Permission.OPERATE),
    action("dispatch.reroute", f"{PATH}/reroute", reroute, Permission.OPERATE),
    action("dispatch.repair", f"{PATH}/repair", repair, Permission.OPERATE),
)

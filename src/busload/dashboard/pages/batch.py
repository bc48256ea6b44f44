"""One batch: how far it is, why it is not finished, what happened to it, its commands, and what an operator may do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.batches.batch import BatchMetadata, BatchType
from busload.commands.command import AuditEvent, CommandStatus
from busload.commands.listing import CommandPage
from busload.commands.wording import counted
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.pages.batches import progress
from busload.dashboard.pages.timeline import Step, steps
from busload.dashboard.problem import not_found
from busload.dashboard.render import bus_of, cli, principal_of, render, sees_payloads, tree, url
from busload.dashboard.route import Live, action, page
from busload.explain.blockers import Reason
from busload.jobs.listing import job_of_batch

COMMANDS, CREATED = 25, "BATCH_CREATED"


@dataclass(frozen=True, slots=True)
class Why:
    """One thing that is in the way of a batch or a command, as this person may see it."""

    label: str
    count: int
    since: datetime | None
    message: str
    advice: str
    domain: str | None
    """The domain of the command or the cause that it links to."""
    command_id: UUID | None
    fingerprint: str | None


async def _batch(request: Request) -> BatchMetadata:
    batch_id: UUID = request.path_params["batch_id"]
    found = await bus_of(request).get_batch(None, batch_id)
    if found is None:
        raise not_found(
            f"There is no batch {batch_id} in any domain.",
            "Check the id, and which database the dashboard uses. It may have been removed as old.",
        )
    return found


async def _named(request: Request) -> tuple[str, UUID]:
    """The batch that an action is about."""
    batch = await _batch(request)
    return batch.domain, batch.batch_id


async def show(request: Request, notice: str | None = None) -> Response:
    chosen, after = asked.one_of(request, "status", CommandStatus), asked.text(request, "after")
    batch, bus = await _batch(request), bus_of(request)
    domain, batch_id = batch.domain, batch.batch_id
    trail = await bus.get_batch_audit_trail(domain, batch_id)
    of_batch = partial(bus.shard_of(domain).list_commands, batch_id=batch_id, status=chosen)
    commands = await listed(of_batch, after, COMMANDS)
    callback = None if batch.callback_id is None else await bus.get_command(domain, batch.callback_id)
    return render(
        request,
        "batch.html",
        title=batch.name or str(batch_id),
        batch=batch,
        timeline=_timeline(batch, trail),
        callback=callback,
        job=await bus.shard_of(domain).database.read(job_of_batch(batch_id)) if batch.job_id is not None else None,
        custom_data=tree(request, batch.custom_data),
        commands=commands.commands,
        sees=sees_payloads(request),
        chosen=chosen,
        statuses=list(CommandStatus),
        one="job" if batch.batch_type is BatchType.JOBS else "command",
        waiting=waiting(batch),
        runs_canary=runs_canary(batch),
        first=url(request, "batch", {"status": chosen}, batch_id=batch_id) if after else None,
        next=commands.next and url(request, "batch", {"status": chosen, "after": commands.next}, batch_id=batch_id),
        live=_values(batch, trail),
        cli=cli("batch", "show", batch_id),
        notice=notice,
    )


async def listed(read: Callable[..., Awaitable[CommandPage]], after: str | None, limit: int) -> CommandPage:
    """A page of commands, without a way to a next one on which there is nothing."""
    found = await read(after=after, limit=limit)
    if found.next is None or len(found) < limit:
        return found
    behind = await read(after=found.next, limit=1)
    return found if behind.commands or behind.next is not None else replace(found, next=None)


def waiting(batch: BatchMetadata) -> int:
    """How many an action may reach at most: a command in troubleshooting has not ended, and stays where it is."""
    parked = 0 if batch.batch_type is BatchType.JOBS else batch.in_troubleshooting_count
    return batch.remaining_count - parked


async def why(request: Request) -> Response:
    """Why a batch is not finished: a part of its page that is read by itself, since it needs the most statements."""
    domain = asked.text(request, "domain") or (await _batch(request)).domain
    explanation = await bus_of(request).explain_batch(domain, request.path_params["batch_id"])
    return render(
        request,
        "why.html",
        title="Why it is not finished",
        explanation=explanation,
        reasons=whys(request, explanation.reasons),
        batch=request.path_params["batch_id"],
    )


async def live(request: Request) -> Live:
    batch = await _batch(request)
    return _values(batch, await bus_of(request).get_batch_audit_trail(batch.domain, batch.batch_id))


def _values(batch: BatchMetadata, trail: Sequence[AuditEvent]) -> Live:
    values = progress(batch)
    stage = f"{values['status.code']} CANARY" if runs_canary(batch) else values["status.code"]
    return {**values, "stage": stage, "rows": [f"{event.type}:{event.at.isoformat()}" for event in _later(trail)]}


def runs_canary(batch: BatchMetadata) -> bool:
    """Whether some of it waits until its canary has ended well, or a person lets it go."""
    return batch.canary_count is not None and batch.canary_ended_at is None and not batch.status.final


def _timeline(batch: BatchMetadata, trail: Sequence[AuditEvent]) -> list[Step]:
    by = next((event.operator for event in trail if event.type == CREATED), None)
    created = AuditEvent(CREATED, batch.created_at, None, None, None, by, batch.batch_id, None)
    return steps([created, *_later(trail)])


def _later(trail: Sequence[AuditEvent]) -> list[AuditEvent]:
    """What happened after the creation. There is an event of the creation only if an operator did it."""
    return [event for event in trail if event.type != CREATED]


def whys(request: Request, reasons: Sequence[Reason]) -> list[Why]:
    """The reasons of an explanation. Their texts may quote errors, so who sees no payloads sees what they are about."""
    seen = sees_payloads(request)
    return [
        Why(
            reason.code.label,
            reason.count,
            reason.since,
            reason.message if seen else _unseen(reason),
            reason.advice,
            reason.details.get("domain"),
            reason.details.get("command_id"),
            reason.details.get("fingerprint"),
        )
        for reason in reasons
    ]


def _unseen(reason: Reason) -> str:
    """What a reason is about, without its text. A batch may be held though nothing of it waits."""
    return f"{counted(reason.count, 'command')}: {reason.code.label}." if reason.count else f"{reason.code.label}."


async def hold(request: Request) -> Response:
    fields = await asked.form(request)
    reason, operator = asked.required(fields, "reason"), principal_of(request).name
    held = await bus_of(request).hold_batch(*await _named(request), reason=reason, operator=operator)
    return await show(request, "Held. Nothing more of it starts." if held else "It was held already.")


async def resume(request: Request) -> Response:
    """Let a held batch go on, with another failure budget if one is given; or what waits for a canary that runs."""
    fields, operator = await asked.form(request), principal_of(request).name
    budget, end_canary = asked.budget(fields), "end_canary" in fields
    resumed = await bus_of(request).resume_batch(
        *await _named(request), operator=operator, budget=budget, end_canary=end_canary
    )
    changed = "" if budget is None else " It has the new failure budget."
    return await show(request, f"Resumed.{changed}" if resumed else "It was not held.")


async def set_budget(request: Request) -> Response:
    fields, operator = await asked.form(request), principal_of(request).name
    asked.required(fields, "budget")
    budget = asked.budget(fields)
    assert budget is not None
    holds = await bus_of(request).set_batch_budget(*await _named(request), budget, operator=operator)
    return await show(request, f"It has the new failure budget{', which holds it at once' if holds else ''}.")


async def reprioritize(request: Request) -> Response:
    priority = asked.whole_number(await asked.form(request), "priority")
    operator = principal_of(request).name
    changed = await bus_of(request).reprioritize_batch(*await _named(request), priority, operator=operator)
    return await show(request, f"Gave {counted(changed, 'command')} the priority {priority}.")


async def cancel(request: Request) -> Response:
    """A large batch takes many transactions. Whatever becomes of this request, the batch is canceled to its end."""
    fields = await asked.form(request)
    reason, operator = asked.required(fields, "reason"), principal_of(request).name
    batch = await _batch(request)
    canceled = await bus_of(request).cancel_batch(batch.domain, batch.batch_id, reason=reason, operator=operator)
    one = "job" if batch.batch_type is BatchType.JOBS else "command"
    return await show(request, f"Canceled {counted(canceled, one)}. What runs finishes.")


PATH = "/batches/{batch_id:uuid}"
ROUTES = (
    page("batch", PATH, show, Permission.READ, live=live),
    page("batch.why", f"{PATH}/why", why, Permission.READ),
    action("batch.hold", f"{PATH}/hold", hold, Permission.OPERATE),
    action("batch.resume", f"{PATH}/resume", resume, Permission.OPERATE),
    action("batch.set_budget", f"{PATH}/set-budget", set_budget, Permission.OPERATE),
    action("batch.reprioritize", f"{PATH}/reprioritize", reprioritize, Permission.OPERATE),
    action("batch.cancel", f"{PATH}/cancel", cancel, Permission.OPERATE),
)

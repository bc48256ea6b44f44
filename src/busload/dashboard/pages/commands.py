"""Commands: search them, one command with all that happened to it, and every attempt at a task."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from busload.commands.command import AuditEvent, CommandMetadata, CommandStatus
from busload.commands.execution import ExecutionStatus
from busload.commands.listing import CommandPage
from busload.dashboard import asked
from busload.dashboard.access import Permission
from busload.dashboard.filter import Filter
from busload.dashboard.pages.batch import listed, whys
from busload.dashboard.pages.timeline import Step, steps
from busload.dashboard.pages.troubleshooting import cause_of
from busload.dashboard.problem import Problem, no_such_page, not_found, wrong_input
from busload.dashboard.render import (
    Tree,
    bus_of,
    cli,
    number,
    principal_of,
    render,
    sees_payloads,
    tree,
    url,
    words,
)
from busload.dashboard.route import Export, Live, Rows, action, page
from busload.errors import CommandNotFoundError
from busload.jobs.listing import job_of_batch
from busload.telemetry.logs import trace_id_of
from busload.troubleshooting.selection import Cause, Selection

LIMIT, REPLIES = 50, 100
REPLIED_WITHIN = timedelta(seconds=10)
"""How far from the end of a command its reply is looked for: results are settled up to 5 seconds later."""
PLACE_OF = {
    ExecutionStatus.QUEUED: CommandStatus.PENDING,
    ExecutionStatus.PROCESSING: CommandStatus.IN_PROGRESS,
    ExecutionStatus.COMPLETED: CommandStatus.COMPLETED,
    ExecutionStatus.FAILED: CommandStatus.FAILED,
    ExecutionStatus.DLQ: CommandStatus.IN_TROUBLESHOOTING_QUEUE,
    ExecutionStatus.CANCELED: CommandStatus.CANCELED,
    ExecutionStatus.LOST: "LOST",
}
"""What pages call the status of an attempt: the same words as for commands."""
FOR_ALL, FOR_SOME = ("type", "code"), ("message", "traceback")
"""What an error tells to everybody, and what it tells to those who see payloads."""
ENDED = (CommandStatus.COMPLETED, CommandStatus.FAILED, CommandStatus.CANCELED)


def _wanted(request: Request) -> Filter:
    return Filter.of(
        request,
        domain=asked.text,
        status=asked.choice(CommandStatus),
        type=asked.text,
        task_key=asked.key,
        batch=asked.id_of,
        since=asked.moment,
        until=asked.moment,
        error=_error_text,
    )


async def _found(request: Request, wanted: Filter, after: str | None, limit: int) -> CommandPage:
    return await bus_of(request).list_commands(
        wanted["domain"],
        status=wanted["status"],
        command_type=wanted["type"],
        task_key=wanted["task_key"],
        batch_id=wanted["batch"],
        created_after=wanted["since"],
        created_before=wanted["until"],
        error=wanted["error"],
        limit=limit,
        after=after,
    )


async def search(request: Request) -> Response:
    wanted, after = _wanted(request), asked.text(request, "after")
    of_one = wanted["domain"] is not None or len(bus_of(request).shards) == 1  # others have a cursor for each database
    if after is not None and of_one and not after.isdecimal():
        raise wrong_input(f"The page begins at {after!r:.80}, which is no cursor.", "Begin with the first page.")
    found = await listed(partial(_found, request, wanted), after, LIMIT)
    if after is not None and not found.commands and found.next is None and not wanted.given:
        raise no_such_page()
    return render(
        request,
        "commands.html",
        title="Commands",
        commands=found.commands,
        statuses=list(CommandStatus),
        sees=sees_payloads(request),
        cli=cli("command", "ls", *wanted.words),
        **wanted.shown(request, "commands", after=after, next=found.next),
    )


async def _exported(request: Request, after: str | None, limit: int) -> Rows:
    found = await _found(request, _wanted(request), after, limit)
    return Rows(found.commands, found.next)


def _error_text(request: Request, name: str) -> str | None:
    """What to search in errors, for those who may see them."""
    found = asked.text(request, name)
    if found is not None and not sees_payloads(request):
        raise Problem(403, "Only for operators", "Error texts are hidden from readers.", "Search without the error.")
    return found


def _named(request: Request) -> tuple[str, UUID]:
    return request.path_params["domain"], request.path_params["command_id"]


async def _command(request: Request) -> CommandMetadata:
    found = await bus_of(request).get_command(*_named(request))
    if found is None:
        raise CommandNotFoundError(*_named(request))
    return found


async def show(request: Request, notice: str | None = None) -> Response:
    bus, command = bus_of(request), await _command(request)
    trail = await bus.get_audit_trail(*_named(request))
    explanation = await bus.explain_command(*_named(request))
    home = bus.shard_of(command.domain)
    return render(
        request,
        "command.html",
        title=f"{command.command_type} {command.command_id}",
        command=command,
        explanation=explanation,
        reasons=whys(request, explanation.reasons),
        timeline=[_shown(request, step) for step in steps(trail)],
        data=tree(request, command.data),
        result=tree(request, command.result),
        headers=tree(request, command.headers),
        trace_id=trace_id_of((command.headers or {}).get("traceparent")),
        sees=sees_payloads(request),
        ended=command.status in ENDED,
        troubled=command.status is CommandStatus.IN_TROUBLESHOOTING_QUEUE,
        cause=await _cause(request, command),
        reply=await _reply(request, command),
        job=None if command.batch_id is None else await home.database.read(job_of_batch(command.batch_id)),
        live=_values(command, trail),
        cli=cli("command", "show", command.command_id, "--domain", command.domain),
        notice=notice,
    )


async def _cause(request: Request, command: CommandMetadata) -> Cause | None:
    """What a command in troubleshooting waits for, and how many like it; None if it does not wait there."""
    if command.status is not CommandStatus.IN_TROUBLESHOOTING_QUEUE:
        return None
    item = await bus_of(request).troubleshooting.get(command.domain, command.command_id)
    return None if item is None else await cause_of(request, Selection(item.domain, item.fingerprint))


async def _reply(request: Request, command: CommandMetadata) -> str | None:
    """The address of the reply of a command that has ended. If there are too many to find it, that of a search."""
    if command.reply_to is None or command.finished_at is None or command.status not in ENDED:
        return None
    command_type = f"{command.command_type}Reply"
    since, until = command.finished_at - REPLIED_WITHIN, command.finished_at + REPLIED_WITHIN
    found = await bus_of(request).list_commands(
        command.reply_to, command_type=command_type, created_after=since, created_before=until, limit=REPLIES
    )
    for one in found.commands:
        if isinstance(one.data, dict) and one.data.get("command_id") == str(command.command_id):
            return url(request, "command", domain=one.domain, command_id=one.command_id)
    names = {"domain": command.reply_to, "type": command_type}
    return url(request, "commands", {**names, "since": since.isoformat(), "until": until.isoformat()})


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A step of a command, as this person may see it."""

    step: Step
    details: Tree | None
    error: dict[str, Any] | None
    hidden: bool
    """Whether there is more that this person may not see."""


def _shown(request: Request, step: Step) -> ShownStep:
    error, details = step.error, step.event.details
    if error is not None:
        seen = sees_payloads(request)
        told = {name: error.get(name) if seen or name in FOR_ALL else None for name in (*FOR_ALL, *FOR_SOME)}
        return ShownStep(step, tree(request, error["details"]) if "details" in error else None, told, not seen)
    if details is None:
        return ShownStep(step, None, None, False)
    return ShownStep(step, tree(request, details), None, not sees_payloads(request))


async def live(request: Request) -> Live:
    command = await _command(request)
    return _values(command, await bus_of(request).get_audit_trail(*_named(request)))


def _values(command: CommandMetadata, trail: list[AuditEvent]) -> Live:
    return {
        "status": words(command.status),
        "status.code": command.status.value,
        "attempts": number(command.attempts),
        "rows": [f"{event.type}:{event.at.isoformat()}" for event in trail],
    }


async def cancel(request: Request) -> Response:
    reason = asked.required(await asked.form(request), "reason")
    operator = principal_of(request).name
    canceled = await bus_of(request).cancel_command(*_named(request), reason=reason, operator=operator)
    return await show(request, f"{words(canceled)}.")


async def retry(request: Request) -> Response:
    await asked.form(request)
    await bus_of(request).troubleshooting.retry(*_named(request), operator=principal_of(request).name)
    return await show(request, "Put back into the queue, with all its attempts to use again.")


async def trace(request: Request) -> Response:
    key, domain = asked.key(request, "task_key"), asked.text(request, "domain")
    if key is None:
        raise wrong_input("The address names no task.", "Add ?task_key=KEY, or come from the page of a command.")
    attempts = await bus_of(request).trace(key, domain=domain)
    if not attempts:
        raise not_found(f"No command was ever sent for the task {key!r:.200}.", "Check the task key.")
    return render(
        request,
        "trace.html",
        title=f"Task {key}",
        key=key,
        attempts=attempts,
        statuses=PLACE_OF,
        sees=sees_payloads(request),
        cli=cli("trace", key, *(["--domain", domain] if domain else [])),
    )


PATH = "/commands/{domain}/{command_id:uuid}"
ROUTES = (
    page(
        "commands",
        "/commands",
        search,
        Permission.READ,
        label="Commands",
        export=Export(CommandMetadata, _exported),
    ),
    page("command", PATH, show, Permission.READ, live=live),
    action("command.cancel", f"{PATH}/cancel", cancel, Permission.OPERATE),
    action("command.retry", f"{PATH}/retry", retry, Permission.OPERATE),
    page("trace", "/trace", trace, Permission.READ),
)

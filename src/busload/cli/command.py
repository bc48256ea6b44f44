"""`busload command`: one command and all that happened to it."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import click
import msgspec

from busload.cli import Seconds, noun, options
from busload.cli.answer import Answer, about, answers
from busload.cli.find import find_one
from busload.cli.output import joined, paragraph, shown, tracebacks
from busload.cli.text_table import View
from busload.commands.cancel import Cancellation
from busload.commands.command import AuditEvent, CommandMetadata, CommandStatus
from busload.commands.search import IdRange
from busload.commands.wording import counted, per_second
from busload.errors import CommandFailedError, CommandNotFoundError, InvalidOperationError
from busload.explain.explanation import Explanation
from busload.sync.bus import SyncCommandBus


def _details(event: AuditEvent) -> object:
    """An error in one line; anything else as it is."""
    details = event.details
    if isinstance(details, dict) and "message" in details:
        return joined(details.get("code") or details.get("type"), details["message"])
    return details


def _publishing(command: CommandMetadata) -> str | None:
    """How often a broker was told of it, and what it said last."""
    tried = command.publish_attempts
    return joined(counted(tried, "attempt"), command.last_publish_error) if tried else None


COMMAND = View[CommandMetadata](
    "command=command_id domain type=command_type status data headers result last_error batch=batch_id task_key"
    " correlation=correlation_id reply_to priority attempts max_attempts run_at expires=expires_at"
    " created=created_at started=started_at finished=finished_at worker"
    " checkpoint published=published_at publishing",
    {
        "last error": lambda c: joined(c.last_error_type, c.last_error_code, c.last_error_message),
        "publishing": _publishing,
    },
)
COMMANDS = View[CommandMetadata](
    "COMMAND=command_id DOMAIN TYPE=command_type STATUS ATTEMPTS ERROR CREATED=created_at",
    {"ERROR": lambda c: joined(c.last_error_code or c.last_error_type, c.last_error_message)},
    nothing="There are no such commands.",
    elastic="ERROR",
    spare=("ATTEMPTS", "TYPE"),
)
TRAIL = View[AuditEvent](
    "AT EVENT=type ATTEMPT BY DETAILS",
    {"BY": lambda event: event.operator or event.worker, "DETAILS": _details},
    nothing="Nothing has happened to it yet.",
    elastic="DETAILS",
)


command = noun(
    "command",
    "ls --status FAILED",
    "show 0198c5d2-8000",
    "wait 0198c5d2-8000",
    "cancel 0198c5d2-8000 --reason 'paid twice'",
)


@command.command()
@options.domain
@options.status(CommandStatus)
@options.command_type
@options.batch
@click.option("--task-key", metavar="KEY", help="Only commands of this task.")
@options.moment("--since", "created_after", "Only commands that were sent then or later: a time, or 2h ago.")
@options.moment("--until", "created_before", "Only commands that were sent earlier than that.")
@click.option("--error", metavar="TEXT", help="Only commands in whose last error this text occurs.")
@options.limit(20)
@click.option("--after", metavar="CURSOR", help="Go on where a list before has ended.")
@answers
def ls(bus: SyncCommandBus, batch: IdRange | None, limit: int, after: str | None, **wanted: Any) -> Answer:
    """List commands, newest first.

    All that is asked for must hold. An index finds commands by batch, task key, and any status of those that have not
    ended; for all else, commands are read from the newest on until the list is full.

        busload command ls --domain payments --status FAILED --since 1d
        busload command ls --error 'account closed' --limit 5
        busload command ls --batch 0198c5d2-7f3a --json | jq -r '.[].command_id'
    """
    wanted["batch_id"] = None if batch is None else find_one(bus, "batch", batch, None)[1]
    found: list[CommandMetadata] = []
    while len(found) < limit:
        page = bus.list_commands(limit=limit - len(found), after=after, **wanted)
        found += page
        after = page.next
        if after is None:
            break
    if after is not None:
        click.echo(f"There may be more: --after {after}", err=True)
    return COMMANDS.list(found)


@command.command()
@about("command")
def show(bus: SyncCommandBus, domain: str, command_id: UUID) -> Answer:
    """Show a command and its audit trail: every attempt, every operator, oldest first; then where attempts failed.

    busload command show 0198c5d2-8000
    busload command show 0198c5d2-8000 --json | jq -r '.audit_trail[].type'
    """
    found, trail = bus.get_command(domain, command_id), bus.get_audit_trail(domain, command_id)
    if found is None:
        raise CommandNotFoundError(domain, command_id)
    failed = tracebacks([(event.attempt, _traceback(event.details)) for event in trail])
    return COMMAND.one(found, below=TRAIL.list(trail), lines=failed, audit_trail=trail)


@command.command()
@about("command")
def explain(bus: SyncCommandBus, domain: str, command_id: UUID) -> Answer:
    """Say why a command is not finished, and what to do about it.

    busload command explain 0198c5d2-8000
    busload command explain 0198c5d2-8000 --json | jq -r '.reasons[].advice'
    """
    return explained(bus.explain_command(domain, command_id))


@command.command()
@options.reason()
@options.operator
@about("command")
def cancel(bus: SyncCommandBus, domain: str, command_id: UUID, *, reason: str, operator: str) -> Answer:
    """Cancel a command that has not ended. One that runs is asked to stop, and is not tried again.

    busload command cancel 0198c5d2-8000 --reason 'paid twice'
    """
    done = bus.cancel_command(domain, command_id, reason=reason, operator=operator)
    said = {
        Cancellation.CANCELED: f"Canceled {command_id} in {domain}.",
        Cancellation.ASKED_TO_STOP: f"Command {command_id} in {domain} runs, and was asked to stop.",
    }
    return Answer({"command_id": command_id, "domain": domain, "done": done}, said[done])


@command.command()
@options.run_at(required=True)
@options.operator
@about("command")
def reschedule(bus: SyncCommandBus, domain: str, command_id: UUID, *, run_at: datetime, operator: str) -> Answer:
    """Let a command that waits run at another time, or now.

    busload command reschedule 0198c5d2-8000 --run-at 2h
    busload command reschedule 0198c5d2-8000 --run-at '2030-01-01 08:00'
    busload command reschedule 0198c5d2-8000 --run-at now
    """
    bus.reschedule_command(domain, command_id, run_at, operator=operator)
    now = run_at <= datetime.now(UTC)
    value = {"command_id": command_id, "domain": domain, "run_at": run_at}
    return Answer(value, f"{command_id} in {domain} runs {'now' if now else f'at {shown(run_at)}'}.")


@command.command()
@click.option("--timeout", type=Seconds(), metavar="SECONDS", help="How long to wait; default until it has ended.")
@click.option("--no-operator", is_flag=True, help="Do not wait for a person: one in troubleshooting counts as failed.")
@about("command")
def wait(bus: SyncCommandBus, domain: str, command_id: UUID, *, timeout: float | None, no_operator: bool) -> Answer:
    """Wait until a command has ended, and print its result. The exit code is 1 if it has failed or was canceled.

    busload command wait 0198c5d2-8000 --timeout 60
    busload command wait 0198c5d2-8000 --json | jq .result
    """
    value: dict[str, Any] = {"command_id": command_id, "domain": domain}
    try:
        result = bus.wait_command(domain, command_id, timeout, wait_for_operator=not no_operator)
    except TimeoutError as error:
        raise InvalidOperationError(str(error)) from None
    except CommandFailedError as error:
        value |= {"status": error.status, "error_type": error.error_type, "code": error.code}
        return Answer(value | {"message": error.error_message}, str(error), ok=False)
    return Answer(value | {"status": CommandStatus.COMPLETED, "result": result}, msgspec.json.encode(result).decode())


def explained(found: Explanation) -> Answer:
    return Answer(found, partial(_print_explanation, found))


def _print_explanation(found: Explanation) -> None:
    """A line that sums up, then each reason with its advice below it."""
    paragraph(shown(found.summary))
    for reason in found.reasons:
        since = f", since {shown(reason.since)}" if reason.since else ""
        click.echo(f"\n{reason.code}{since}")
        paragraph(shown(reason.message), first="  ", then="  ")
        paragraph(shown(reason.advice), first="  → ", then="    ")
    if found.forecast is not None and (found.forecast.done_at is not None or not found.reasons):
        click.echo(f"\nFORECAST, {per_second(found.forecast.rate, 'command')}")
        for said in (f"Done {found.forecast}.", *found.forecast.changes):
            paragraph(shown(said), first="  ", then="  ")


def _traceback(details: object) -> str | None:
    found = details.get("traceback") if isinstance(details, dict) else None
    return found if isinstance(found, str) else None

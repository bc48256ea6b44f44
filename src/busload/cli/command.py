"""`busload command`: one command and all that happened to it."""

from __future__ import annotations

from functools import partial
from uuid import UUID

import click

from busload.cli import noun
from busload.cli.answer import Answer, about
from busload.cli.output import joined, paragraph, shown, tracebacks
from busload.cli.text_table import View
from busload.commands.command import AuditEvent, CommandMetadata
from busload.errors import CommandNotFoundError
from busload.explain.explanation import Explanation
from busload.sync.bus import SyncCommandBus


def _details(event: AuditEvent) -> object:
    """An error in one line; anything else as it is."""
    details = event.details
    if isinstance(details, dict) and "message" in details:
        return joined(details.get("code") or details.get("type"), details["message"])
    return details


COMMAND = View[CommandMetadata](
    "command=command_id domain type=command_type status data result last_error batch=batch_id task_key"
    " correlation=correlation_id reply_to priority attempts max_attempts run_at"
    " created=created_at started=started_at finished=finished_at worker",
    {"last error": lambda c: joined(c.last_error_type, c.last_error_code, c.last_error_message)},
)
TRAIL = View[AuditEvent](
    "AT EVENT=type ATTEMPT BY DETAILS",
    {"BY": lambda event: event.operator or event.worker, "DETAILS": _details},
    nothing="Nothing has happened to it yet.",
    elastic="DETAILS",
)


command = noun("command", "show 0198c5d2-8000")


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


def _traceback(details: object) -> str | None:
    found = details.get("traceback") if isinstance(details, dict) else None
    return found if isinstance(found, str) else None

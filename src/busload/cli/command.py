"""`busload command`: one command and all that happened to it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from busload.cli.database import domain_option, find_command, id_or_beginning, open_bus
from busload.cli.output import as_json, echo_json, facts, paragraph, shown, table, tracebacks
from busload.domain.command import AuditEvent, CommandMetadata
from busload.domain.explanation import Explanation
from busload.errors import CommandNotFoundError
from busload.store.find import IdRange


@click.group()
def command() -> None:
    """Look at one command and all that happened to it.

    \b
        busload command show 0198c5d2-8000
    """


@command.command()
@click.argument("command", type=id_or_beginning, metavar="COMMAND_ID")
@domain_option
@as_json
def show(command: IdRange, domain: str | None, as_json: bool) -> None:
    """Show a command and its audit trail: every attempt, every operator, oldest first; then where attempts failed.

    \b
        busload command show 0198c5d2-8000
        busload command show 0198c5d2-8000 --json | jq -r '.audit_trail[].type'
    """
    with open_bus() as bus:
        domain, command_id = find_command(bus, command, domain)
        found, trail = bus.get_command(domain, command_id), bus.get_audit_trail(domain, command_id)
    if found is None:
        raise CommandNotFoundError(domain, command_id)
    if as_json:
        echo_json({**{name: getattr(found, name) for name in found.__dataclass_fields__}, "audit_trail": trail})
        return
    _print_command(found)
    click.echo()
    print_trail(trail)
    for line in tracebacks([(event.attempt, _traceback(event.details)) for event in trail]):
        click.echo(line)


@command.command()
@click.argument("command", type=id_or_beginning, metavar="COMMAND_ID")
@domain_option
@as_json
def explain(command: IdRange, domain: str | None, as_json: bool) -> None:
    """Say why a command is not finished, and what to do about it.

    \b
        busload command explain 0198c5d2-8000
        busload command explain 0198c5d2-8000 --json | jq -r '.reasons[].advice'
    """
    with open_bus() as bus:
        found = bus.explain_command(*find_command(bus, command, domain))
    print_explanation(found, as_json)


def print_explanation(found: Explanation, as_json: bool) -> None:
    """A line that sums up, then each reason with its advice below it."""
    if as_json:
        echo_json(found)
        return
    paragraph(shown(found.summary))
    for reason in found.reasons:
        since = f", since {shown(reason.since)}" if reason.since else ""
        click.echo(f"\n{reason.code}{since}")
        paragraph(shown(reason.message), first="  ", then="  ")
        paragraph(shown(reason.advice), first="  → ", then="    ")


def print_trail(trail: Sequence[AuditEvent]) -> None:
    """The audit trail as a table."""
    rows = [
        (event.at, event.type, event.attempt, event.operator or event.worker, _said(event.details)) for event in trail
    ]
    table(
        ("AT", "EVENT", "ATTEMPT", "BY", "DETAILS"), rows, nothing="Nothing has happened to it yet.", elastic="DETAILS"
    )


def _print_command(found: CommandMetadata) -> None:
    error = ": ".join(
        part for part in (found.last_error_type, found.last_error_code, found.last_error_message) if part is not None
    )
    facts(
        [
            ("command", found.command_id),
            ("domain", found.domain),
            ("type", found.command_type),
            ("status", found.status),
            ("data", found.data),
            ("result", found.result),
            ("last error", error or None),
            ("batch", found.batch_id),
            ("task key", found.task_key),
            ("correlation", found.correlation_id),
            ("reply to", found.reply_to),
            ("priority", found.priority),
            ("attempts", found.attempts),
            ("max attempts", found.max_attempts),
            ("run at", found.run_at),
            ("created", found.created_at),
            ("started", found.started_at),
            ("finished", found.finished_at),
            ("worker", found.worker),
        ]
    )


def _traceback(details: object) -> str | None:
    found = details.get("traceback") if isinstance(details, dict) else None
    return found if isinstance(found, str) else None


def _said(details: object) -> object:
    """An error in one line; anything else as it is."""
    if isinstance(details, dict) and "message" in details:
        code = details.get("code") or details.get("type")
        return f"{code}: {details['message']}" if code else details["message"]
    return details

"""`busload troubleshooting`: what waits for a person, and what that person does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import click

from busload.bus import SyncCommandBus
from busload.cli.database import domain_of_command, domain_option, everywhere, open_bus
from busload.cli.database import operator as operator_here
from busload.cli.output import as_json, echo_json, table
from busload.domain.command import TroubleshootingItem
from busload.domain.payload import decode_strict
from busload.store.connection import Connection

command_ids = click.argument("command_ids", nargs=-1, required=True, type=click.UUID, metavar="COMMAND_ID...")
operator_option = click.option(
    "--operator", default=operator_here, show_default="your user name", help="Who; kept in the audit trail."
)


@click.group()
def troubleshooting() -> None:
    """Resolve what waits for a person. Several commands at once are resolved all or none.

    \b
        busload troubleshooting ls --domain payments
        busload troubleshooting retry 0198c5d2-8000-7c11-9d2e-5b1c8a6e4f01
    """


@troubleshooting.command()
@domain_option
@click.option("--type", "command_type", help="Only commands of this type.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True)
@click.option("--offset", type=click.IntRange(0, 1_000_000), default=0, show_default=True)
@as_json
def ls(domain: str | None, command_type: str | None, limit: int, offset: int, as_json: bool) -> None:
    """List what waits for a person, newest first.

    \b
        busload troubleshooting ls
        busload troubleshooting ls --json | jq -r '.[].command_id' | xargs busload troubleshooting retry
    """
    with open_bus() as bus:

        def ask(domain: str, *, limit: int, offset: int) -> list[TroubleshootingItem]:
            return bus.troubleshooting.list(domain, command_type=command_type, limit=limit, offset=offset)

        found = everywhere(bus, domain, ask, newest=lambda item: item.since, limit=limit, offset=offset)
    if as_json:
        echo_json(found)
    else:
        print_queue(found)


@troubleshooting.command()
@command_ids
@operator_option
@domain_option
@as_json
def retry(command_ids: Sequence[UUID], operator: str, domain: str | None, as_json: bool) -> None:
    """Put commands back into the queue, with all their attempts to use again.

    \b
        busload troubleshooting retry 0198c5d2-8000-7c11-9d2e-5b1c8a6e4f01
    """

    def act(bus: SyncCommandBus, domain: str, command_id: UUID, conn: Connection) -> None:
        bus.troubleshooting.retry(domain, command_id, operator=operator, conn=conn)

    _resolve("retried", act, command_ids, domain, as_json)


@troubleshooting.command()
@command_ids
@click.option("--result", metavar="JSON", help="What the handler would have returned.")
@operator_option
@domain_option
@as_json
def complete(command_ids: Sequence[UUID], result: str | None, operator: str, domain: str | None, as_json: bool) -> None:
    """Declare commands done, with a result if there is one.

    \b
        busload troubleshooting complete 0198c5d2-8000-7c11-9d2e-5b1c8a6e4f01 --result '{"paid": "by hand"}'
    """
    value: Any = None if result is None else decode_strict(result, path="/result")

    def act(bus: SyncCommandBus, domain: str, command_id: UUID, conn: Connection) -> None:
        bus.troubleshooting.complete(domain, command_id, result=value, operator=operator, conn=conn)

    _resolve("completed", act, command_ids, domain, as_json)


@troubleshooting.command()
@command_ids
@click.option("--reason", required=True, help="Why; it is kept in the audit trail.")
@operator_option
@domain_option
@as_json
def cancel(command_ids: Sequence[UUID], reason: str, operator: str, domain: str | None, as_json: bool) -> None:
    """Give commands up, with a reason.

    \b
        busload troubleshooting cancel 0198c5d2-8000-7c11-9d2e-5b1c8a6e4f01 --reason 'paid twice'
    """

    def act(bus: SyncCommandBus, domain: str, command_id: UUID, conn: Connection) -> None:
        bus.troubleshooting.cancel(domain, command_id, reason=reason, operator=operator, conn=conn)

    _resolve("canceled", act, command_ids, domain, as_json)


def print_queue(found: Sequence[TroubleshootingItem]) -> None:
    columns = ("COMMAND", "DOMAIN", "TYPE", "REASON", "ATTEMPTS", "ERROR", "SINCE")
    rows = [
        (item.command_id, item.domain, item.command_type, item.reason, item.attempts, _error(item), item.since)
        for item in found
    ]
    table(columns, rows, nothing="Nothing waits for a person.", elastic="ERROR", spare=("SINCE", "TYPE"))


def _resolve(
    done: str,
    act: Callable[[SyncCommandBus, str, UUID, Connection], None],
    command_ids: Sequence[UUID],
    domain: str | None,
    as_json: bool,
) -> None:
    """Resolve all of them in one transaction: if one is refused, none has moved."""
    with open_bus() as bus:
        places = [(domain_of_command(bus, command_id, domain), command_id) for command_id in dict.fromkeys(command_ids)]
        with bus.pool.connection() as conn, conn.transaction():
            for each, command_id in places:
                act(bus, each, command_id, conn)
    if as_json:
        echo_json([{"domain": each, "command_id": command_id, "done": done} for each, command_id in places])
        return
    for each, command_id in places:
        click.echo(f"{done.capitalize()} {command_id} in {each}.")


def _error(item: TroubleshootingItem) -> str | None:
    parts = (item.last_error_code or item.last_error_type, item.last_error_message)
    return ": ".join(part for part in parts if part) or None

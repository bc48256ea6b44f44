"""`busload outbox`: what waits to be announced to a broker, and what to do about it."""

from __future__ import annotations

import asyncio
from uuid import UUID

import click

from busload.bus import CommandBus, SyncCommandBus
from busload.cli.database import (
    domain_option,
    find_batch,
    id_or_beginning,
    note_unknown_domain,
    open_bus,
    queue_prefix_option,
    transport_option,
)
from busload.cli.database import operator as operator_here
from busload.cli.output import as_json, echo_json, table
from busload.domain.counted import counted
from busload.domain.dispatch import Reconciliation
from busload.store import report
from busload.store.find import IdRange

batch_option = click.option("--batch", type=id_or_beginning, metavar="ID", help="Only commands of this batch.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only say how many commands that would be.")


@click.group()
def outbox() -> None:
    """See what waits for a broker, try again, or go without it.

    \b
        busload outbox ls
        busload outbox retry
        busload outbox reroute --batch 0198c5d2-7f3a --dry-run
        busload outbox reconcile --repair
    """


@outbox.command()
@domain_option
@batch_option
@as_json
def ls(domain: str | None, batch: IdRange | None, as_json: bool) -> None:
    """List what the broker has not confirmed: not tried yet, or after failed rounds, and what it said.

    \b
        busload outbox ls
        busload outbox ls --domain payments --json | jq 'map(.commands) | add'
    """
    with open_bus() as bus:
        batch_id = _batch_id(bus, batch, domain)
        found = bus.outbox.list(domain=domain, batch_id=batch_id)
        if not found:
            note_unknown_domain(bus, domain)
    if as_json:
        echo_json(found)
        return
    columns = ("TRANSPORT", "DOMAIN", "COMMANDS", "ROUNDS", "REASON", "OLDEST", "NEXT TRY", "ERROR")
    rows = [
        (e.transport, e.domain, e.commands, e.rounds, e.reason or "not tried yet", e.oldest, e.next_try, e.error)
        for e in found
    ]
    table(columns, rows, nothing="Nothing waits to be announced.", elastic="ERROR", spare=("OLDEST",))


@outbox.command()
@domain_option
@batch_option
@dry_run_option
@as_json
def retry(domain: str | None, batch: IdRange | None, dry_run: bool, as_json: bool) -> None:
    """Let the relays of workers try again now what waits for another round.

    \b
        busload outbox retry
        busload outbox retry --domain payments --dry-run
    """
    with open_bus() as bus:
        batch_id = _batch_id(bus, batch, domain)
        count = bus.outbox.retry(domain=domain, batch_id=batch_id, dry_run=dry_run)
        if not count:
            note_unknown_domain(bus, domain)
    if as_json:
        echo_json({"commands": count, "dry_run": dry_run})
    else:
        due = counted(count, "command is", "commands are")
        click.echo(f"{counted(count, 'command')} would be tried again." if dry_run else f"{due} due now.")


@outbox.command()
@domain_option
@batch_option
@click.option("--all", "everything", is_flag=True, help="Also what no round has failed for yet.")
@click.option("--operator", default=operator_here, show_default="your user name", help="Who; kept in the audit trail.")
@dry_run_option
@as_json
def reroute(
    domain: str | None, batch: IdRange | None, everything: bool, operator: str, dry_run: bool, as_json: bool
) -> None:
    """Let PostgreSQL deliver what the broker does not take: workers find it in the queue.

    Only what a round has failed for, unless --all is given. A message that the broker has all the same does no harm.

    \b
        busload outbox reroute --dry-run
        busload outbox reroute --domain payments
    """
    with open_bus() as bus:
        batch_id = _batch_id(bus, batch, domain)
        count = bus.outbox.reroute(
            domain=domain, batch_id=batch_id, failed_only=not everything, operator=operator, dry_run=dry_run
        )
        if not count:
            note_unknown_domain(bus, domain)
    if as_json:
        echo_json({"commands": count, "dry_run": dry_run})
    else:
        commands = counted(count, "command")
        click.echo(f"{commands} would be rerouted." if dry_run else f"Rerouted {commands}.")


@outbox.command()
@domain_option
@transport_option
@queue_prefix_option
@click.option("--repair", is_flag=True, help="Send messages for what has none, remove those that nothing waits for.")
@as_json
def reconcile(domain: str | None, repair: bool, as_json: bool) -> None:
    """Compare what the database has announced with the messages that the broker holds.

    Some brokers cannot be looked into; then only the counts of both sides are told. --repair takes the messages on loan
    for some seconds, so it looks at them all the same. Ends with exit code 1 if messages are missing and were not sent
    again.

    \b
        busload outbox reconcile
        busload outbox reconcile --domain payments --repair
        busload outbox reconcile --json | jq 'map(.missing) | add'
    """
    with open_bus(transport=True) as bus:
        if bus.transport is None:
            raise click.UsageError("There is no broker to compare with: set BUSLOAD_TRANSPORT_URL, or add --transport.")

        async def compare() -> list[Reconciliation]:
            async with CommandBus(bus.dsn, settings=bus.settings) as face:
                return await face.outbox.reconcile(domain=domain, repair=repair)

        known = bus._read(report.domains())
        found = [each for each in asyncio.run(compare()) if each.domain in known or each.depth or each.messages]
        if not found:
            note_unknown_domain(bus, domain)
    if as_json:
        echo_json(found)
    else:
        columns = ["QUEUE", "ANNOUNCED", "DEPTH", "LOOKED AT", "ANSWERED", "UNKNOWN", "MISSING", "RUNG AGAIN"]
        columns += ["REMOVED"] if repair else []
        nothing = "There are no domains yet." if domain is None else f"There is nothing in domain {domain!r}."
        table(columns, [_row(each)[: len(columns)] for each in found], nothing=nothing)
        for each in found:
            if not each.looked_into:
                click.echo(f"{each.transport} does not let us look at messages of {each.queue}.", err=True)
    if any(each.missing > each.rung_again for each in found):
        raise click.exceptions.Exit(1)


def _batch_id(bus: SyncCommandBus, batch: IdRange | None, domain: str | None) -> UUID | None:
    return None if batch is None else find_batch(bus, batch, domain)[1]


def _row(found: Reconciliation) -> tuple[object, ...]:
    counts = (found.messages, found.answered, found.unknown, found.missing)
    seen = counts if found.looked_into else (None,) * len(counts)
    return (found.queue, found.announced, found.depth, *seen, found.rung_again, found.removed)

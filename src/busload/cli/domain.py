"""`busload domain`: what waits in domains, and how to let one rest."""

from __future__ import annotations

import click

from busload.cli.database import note_unknown_domain, open_bus, unknown_domain
from busload.cli.database import operator as operator_here
from busload.cli.output import as_json, echo_json, table
from busload.domain.pause import DomainOverview
from busload.errors import InvalidOperationError
from busload.store import pause as store

operator_option = click.option("--operator", default=operator_here, show_default="your user name", help="Who.")


@click.group()
def domain() -> None:
    """See what waits in domains, pause and resume them.

    \b
        busload domain ls
        busload domain pause payments --reason 'the bank is down'
        busload domain resume payments
        busload domain pauses payments
    """


@domain.command()
@as_json
def ls(as_json: bool) -> None:
    """List domains: what is ready, scheduled, running or in troubleshooting, who serves them, and which are paused.

    If something waits there for a broker, a column OUTBOX tells how much.

    \b
        busload domain ls
        busload domain ls --json | jq -r '.[] | select(.workers == 0) | .domain'
    """
    with open_bus() as bus:
        found = bus._read(store.domains())
    if as_json:
        echo_json(found)
        return
    columns = ["DOMAIN", "READY", "SCHEDULED", "RUNNING", "TROUBLE", "WORKERS", "PAUSED"]
    rows = [[d.domain, d.ready, d.scheduled, d.running, d.in_troubleshooting, d.workers, _paused(d)] for d in found]
    if any(d.unannounced for d in found):
        columns.insert(1, "OUTBOX")
        for row, each in zip(rows, found, strict=True):
            row.insert(1, each.unannounced)
    table(columns, rows, nothing="Nothing waits in any domain.", elastic="PAUSED")


@domain.command()
@click.argument("domain")
@click.option("--reason", help="Why; shown by `ls` and `explain`.")
@click.option("--force", is_flag=True, help="Also a domain that no command was sent to and no worker serves.")
@operator_option
@as_json
def pause(domain: str, reason: str | None, force: bool, operator: str, as_json: bool) -> None:
    """Let nothing new start in a domain; what runs finishes, and what is sent waits.

    A domain that nobody has heard of is refused with exit code 1: the name is most likely mistyped. --force pauses it
    ahead of its first command.

    \b
        busload domain pause payments --reason 'the bank is down'
        busload domain pause reports --force --reason 'not before Monday'
    """
    with open_bus() as bus:
        if not force and (unknown := unknown_domain(bus, domain)):
            raise InvalidOperationError(f"{unknown} Nothing was paused; add --force to pause it all the same.")
        paused = bus.pause(domain, reason=reason, operator=operator)
    if as_json:
        echo_json({"domain": domain, "paused": paused})
    else:
        click.echo(f"Paused {domain}." if paused else f"{domain} was paused already.")


@domain.command()
@click.argument("domain")
@operator_option
@as_json
def resume(domain: str, operator: str, as_json: bool) -> None:
    """Let a paused domain go on. Ends with exit code 1 if nobody has heard of the domain.

    \b
        busload domain resume payments
    """
    with open_bus() as bus:
        resumed = bus.resume(domain, operator=operator)
        unknown = None if resumed else unknown_domain(bus, domain)
    if unknown is not None:
        raise InvalidOperationError(f"{unknown} Nothing was resumed.")
    if as_json:
        echo_json({"domain": domain, "resumed": resumed})
    else:
        click.echo(f"Resumed {domain}." if resumed else f"{domain} was not paused.")


@domain.command()
@click.argument("domain", required=False)
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True)
@as_json
def pauses(domain: str | None, limit: int, as_json: bool) -> None:
    """List who paused and resumed a domain, or any, newest first; also what is over.

    \b
        busload domain pauses
        busload domain pauses payments --json | jq -r '.[0].resumed_by'
    """
    with open_bus() as bus:
        found = bus.pause_history(domain, limit=limit)
        if not found:
            note_unknown_domain(bus, domain)
    if as_json:
        echo_json(found)
        return
    columns = ("DOMAIN", "SINCE", "BY", "REASON", "RESUMED", "RESUMED BY")
    rows = [(p.domain, p.since, p.operator, p.reason, p.resumed_at, p.resumed_by) for p in found]
    nothing = "Nothing was ever paused." if domain is None else f"{domain} was never paused."
    table(columns, rows, nothing=nothing, elastic="REASON")


def _paused(found: DomainOverview) -> str | None:
    if found.pause is None:
        return None
    by = f"by {found.pause.operator}" if found.pause.operator else "yes"
    return f"{by}: {found.pause.reason}" if found.pause.reason else by

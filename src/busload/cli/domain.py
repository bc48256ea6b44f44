"""`busload domain`: what waits in domains, and how to let one rest."""

from __future__ import annotations

import click

from busload.cli import noun, options
from busload.cli.answer import Answer, answers
from busload.cli.complete import completes
from busload.cli.find import unknown_domain
from busload.cli.text_table import View
from busload.errors import InvalidOperationError
from busload.limits.pause import DomainOverview, Pause
from busload.sync.bus import SyncCommandBus


def _paused(found: DomainOverview) -> str | None:
    if found.pause is None:
        return None
    by = f"by {found.pause.operator}" if found.pause.operator else "yes"
    return f"{by}: {found.pause.reason}" if found.pause.reason else by


DOMAINS = View[DomainOverview](
    "DOMAIN OUTBOX=unpublished READY SCHEDULED RUNNING TROUBLE=in_troubleshooting WORKERS PAUSED",
    {"PAUSED": _paused},
    nothing="Nothing waits in any domain.",
    elastic="PAUSED",
)
PAUSES = View[Pause]("DOMAIN SINCE BY=operator REASON RESUMED=resumed_at RESUMED_BY", elastic="REASON")


domain = noun("domain", "ls", "pause payments --reason 'the bank is down'", "resume payments", "pauses payments")


@domain.command()
@answers
def ls(bus: SyncCommandBus) -> Answer:
    """List domains: what is ready, scheduled, running or in troubleshooting, who serves them, and which are paused.

    If something waits there for a broker, a column OUTBOX tells how much.

        busload domain ls
        busload domain ls --json | jq -r '.[] | select(.workers == 0) | .domain'
    """
    found = bus.domains.list()
    view = DOMAINS if any(each.unpublished for each in found) else DOMAINS.without("OUTBOX")
    return view.list(found)


@domain.command()
@click.argument("domain", shell_complete=completes("domain"))
@options.reason(required=False)
@click.option("--force", is_flag=True, help="Also a domain that no command was sent to and no worker serves.")
@options.operator
@answers
def pause(bus: SyncCommandBus, domain: str, reason: str | None, force: bool, operator: str) -> Answer:
    """Let nothing new start in a domain; what runs finishes, and what is sent waits.

    A domain that nobody has heard of is refused with exit code 1: the name is most likely mistyped. --force pauses it
    ahead of its first command.

        busload domain pause payments --reason 'the bank is down'
        busload domain pause reports --force --reason 'not before Monday'
    """
    if not force and (unknown := unknown_domain(bus, domain)):
        raise InvalidOperationError(f"{unknown} Nothing was paused; add --force to pause it all the same.")
    paused = bus.domains.pause(domain, reason=reason, operator=operator)
    said = f"Paused {domain}." if paused else f"{domain} was paused already."
    return Answer({"domain": domain, "paused": paused}, said)


@domain.command()
@click.argument("domain", shell_complete=completes("domain"))
@options.operator
@answers
def resume(bus: SyncCommandBus, domain: str, operator: str) -> Answer:
    """Let a paused domain go on. Ends with exit code 1 if nobody has heard of the domain.

    busload domain resume payments
    """
    resumed = bus.domains.resume(domain, operator=operator)
    if not resumed and (unknown := unknown_domain(bus, domain)):
        raise InvalidOperationError(f"{unknown} Nothing was resumed.")
    said = f"Resumed {domain}." if resumed else f"{domain} was not paused."
    return Answer({"domain": domain, "resumed": resumed}, said)


@domain.command()
@click.argument("domain", required=False, shell_complete=completes("domain"))
@options.limit(100)
@answers
def pauses(bus: SyncCommandBus, domain: str | None, limit: int) -> Answer:
    """List the pauses of a domain, or of all domains, newest first, also those that have ended: who paused and resumed.

    busload domain pauses
    busload domain pauses payments --json | jq -r '.[0].resumed_by'
    """
    nothing = "Nothing was ever paused." if domain is None else f"{domain} was never paused."
    return PAUSES.list(bus.domains.history(domain, limit=limit), nothing=nothing)

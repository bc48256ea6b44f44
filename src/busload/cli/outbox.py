"""`busload outbox`: what waits to be published to a broker, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import click

from busload.cli import noun, options
from busload.cli.answer import Answer, answers, would
from busload.cli.find import domains_of, find_one
from busload.cli.text_table import View
from busload.commands.search import IdRange
from busload.commands.wording import counted
from busload.dispatch import OutboxEntry, Reconciliation
from busload.sync.bus import SyncCommandBus


def _seen(name: str) -> Callable[[Reconciliation], int | None]:
    """A figure that is known only where the broker lets us look at messages."""
    return lambda found: getattr(found, name) if found.looked_into else None


OUTBOX = View[OutboxEntry](
    "TRANSPORT DOMAIN COMMANDS ROUNDS REASON OLDEST NEXT_TRY ERROR",
    {"REASON": lambda entry: entry.reason or "not tried yet"},
    nothing="Nothing waits to be published.",
    elastic="ERROR",
    spare=("OLDEST",),
)
QUEUES = View[Reconciliation](
    "QUEUE PUBLISHED DEPTH LOOKED_AT ANSWERED UNKNOWN MISSING PUBLISHED_AGAIN REMOVED",
    {
        "LOOKED AT": _seen("messages"),
        "ANSWERED": _seen("answered"),
        "UNKNOWN": _seen("unknown"),
        "MISSING": _seen("missing"),
    },
)


outbox = noun("outbox", "ls", "retry", "reroute --batch 0198c5d2-7f3a --dry-run", "reconcile --repair")


@outbox.command()
@options.domain
@options.batch
@answers
def ls(bus: SyncCommandBus, domain: str | None, batch: IdRange | None) -> Answer:
    """List what the broker has not confirmed: not tried yet, or after failed rounds, and what it said.

    busload outbox ls
    busload outbox ls --domain payments --json | jq 'map(.commands) | add'
    """
    return OUTBOX.list(bus.outbox.list(domain=domain, batch_id=_batch_id(bus, batch, domain)))


@outbox.command()
@options.domain
@options.batch
@options.operator
@options.dry_run
@answers
def retry(bus: SyncCommandBus, domain: str | None, batch: IdRange | None, operator: str, dry_run: bool) -> Answer:
    """Let the relays of workers publish now what waits for another round.

    busload outbox retry
    busload outbox retry --domain payments --dry-run
    """
    batch_id = _batch_id(bus, batch, domain)
    count = bus.outbox.retry(domain=domain, batch_id=batch_id, operator=operator, dry_run=dry_run)
    due = counted(count, "command is", "commands are")
    return _moved(count, dry_run, f"try {counted(count, 'command')} again", f"{due} due now.")


@outbox.command()
@options.domain
@options.batch
@click.option("--all", "everything", is_flag=True, help="Also commands for which no round has failed yet.")
@options.operator
@options.dry_run
@answers
def reroute(bus: SyncCommandBus, domain: str | None, batch: IdRange | None, everything: bool, **given: Any) -> Answer:
    """Let PostgreSQL deliver what the broker does not take: workers find it in the queue.

    Only commands for which a round of publishing has failed, unless --all is given. If the broker has a message about
    them all the same, the message does no harm.

        busload outbox reroute --dry-run
        busload outbox reroute --domain payments
    """
    batch_id = _batch_id(bus, batch, domain)
    count = bus.outbox.reroute(domain=domain, batch_id=batch_id, failed_only=not everything, **given)
    commands = counted(count, "command")
    return _moved(count, given["dry_run"], f"reroute {commands}", f"Rerouted {commands}.")


@outbox.command()
@options.domain
@options.transport
@options.queue_prefix
@click.option("--repair", is_flag=True, help="Send missing messages, and remove messages that no command waits for.")
@options.operator
@options.dry_run
@answers(transport=True)
def reconcile(bus: SyncCommandBus, domain: str | None, repair: bool, operator: str, dry_run: bool) -> Answer:
    """Compare what the database has published with the messages that the broker holds.

    If a broker does not let us look at messages, only the counts of both sides are compared. --repair takes the
    messages on loan for some seconds, so it can look at them at every broker. Ends with exit code 1 if messages are
    missing and were not sent again. With --dry-run, --repair only compares.

        busload outbox reconcile
        busload outbox reconcile --domain payments --repair
        busload outbox reconcile --json | jq 'map(.missing) | add'
    """
    if bus.transport is None:
        raise click.UsageError("There is no broker to compare with: set BUSLOAD_TRANSPORT_URL, or add --transport.")

    repair = repair and not dry_run
    known = domains_of(bus, None)
    compared = bus.outbox.reconcile(domain=domain, repair=repair, operator=operator)
    found = [each for each in compared if each.domain in known or each.depth or each.messages]
    closed = [each for each in found if not each.looked_into]
    notes = [f"{each.transport} does not let us look at messages of {each.queue}." for each in closed]
    all_sent = all(each.missing <= each.published_again for each in found)
    view = QUEUES if repair else QUEUES.without("REMOVED")
    nothing = "There are no domains yet." if domain is None else f"There is nothing in domain {domain!r}."
    return view.list(found, nothing=nothing, notes=notes, ok=all_sent)


def _batch_id(bus: SyncCommandBus, batch: IdRange | None, domain: str | None) -> UUID | None:
    return None if batch is None else find_one(bus, "batch", batch, domain)[1]


def _moved(count: int, dry_run: bool, what: str, done: str) -> Answer:
    answer = would(what, commands=count) if dry_run else Answer({"commands": count, "dry_run": False}, done)
    return replace(answer, found=count > 0)

"""`busload batch`: how a person at a shell sees batches."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import click

from busload.bus import SyncCommandBus
from busload.cli.command import print_explanation
from busload.cli.database import (
    domain_option,
    everywhere,
    find_batch,
    find_job_of_batches,
    id_or_beginning,
    open_bus,
    operator,
)
from busload.cli.output import as_json, counters, echo_json, facts, progress, table
from busload.domain.batch import BatchMetadata, BatchStatus
from busload.domain.counted import counted
from busload.errors import BatchNotFoundError, InvalidOperationError
from busload.store.find import IdRange

STILL = 3.0
"""Seconds without any change after which one who waits should be told why."""


@click.group()
def batch() -> None:
    """Follow batches, learn why they are not finished, and cancel them.

    \b
        busload batch ls --status IN_PROGRESS
        busload batch watch 0198c5d2-7f3a
    """


@batch.command()
@domain_option
@click.option(
    "--status", type=click.Choice([status.value for status in BatchStatus], case_sensitive=False), help="Only those."
)
@click.option("--job", type=id_or_beginning, metavar="ID", help="Only those of a job.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True)
@click.option("--offset", type=click.IntRange(0, 1_000_000), default=0, show_default=True)
@as_json
def ls(domain: str | None, status: str | None, job: IdRange | None, limit: int, offset: int, as_json: bool) -> None:
    """List batches, newest first.

    \b
        busload batch ls
        busload batch ls --domain payments --status IN_PROGRESS --limit 5
        busload batch ls --job 0198c5d2-7f3a
        busload batch ls --json | jq -r '.[].batch_id'
    """
    with open_bus() as bus:
        job_id = None if job is None else find_job_of_batches(bus, job, domain)

        def ask(domain: str, *, limit: int, offset: int) -> list[BatchMetadata]:
            return bus.list_batches(domain, status=status, job_id=job_id, limit=limit, offset=offset)

        found = everywhere(bus, domain, ask, newest=lambda b: (b.created_at, b.batch_id), limit=limit, offset=offset)
    if as_json:
        echo_json(found)
        return
    columns = ("BATCH", "DOMAIN", "NAME", "STATUS", "TOTAL", "COMPLETED", "FAILED", "CANCELED", "TROUBLE", "CREATED")
    rows = [(b.batch_id, b.domain, b.name, b.status, b.total_count, *counters(b).values(), b.created_at) for b in found]
    table(columns, rows, nothing="There are no such batches.", elastic="NAME", spare=("CREATED", "NAME"))


@batch.command()
@click.argument("batch", type=id_or_beginning, metavar="BATCH_ID")
@domain_option
@as_json
def show(batch: IdRange, domain: str | None, as_json: bool) -> None:
    """Show how far a batch has come, and what happened to it.

    \b
        busload batch show 0198c5d2-7f3a
        busload batch show 0198c5d2-7f3a --json | jq .completed_count
    """
    with open_bus() as bus:
        domain, batch_id = find_batch(bus, batch, domain)
        found = bus.get_batch(domain, batch_id)
        trail = bus.get_batch_audit_trail(domain, batch_id)
    if found is None:
        raise BatchNotFoundError(domain, batch_id)
    if as_json:
        echo_json({**_fields(found), "audit_trail": trail})
        return
    facts(
        [
            ("batch", found.batch_id),
            ("domain", found.domain),
            ("name", found.name),
            ("custom data", found.custom_data),
            ("job", found.job_id),
            ("stage", found.stage),
            ("status", found.status),
            ("total", found.total_count),
            *counters(found).items(),
            ("remaining", found.remaining_count),
            ("created", found.created_at),
            ("started", found.started_at),
            ("completed at", found.completed_at),
        ]
    )
    click.echo()
    rows = [(event.at, event.type, event.operator, event.details) for event in trail]
    table(("AT", "EVENT", "OPERATOR", "DETAILS"), rows, nothing="Nothing has happened to it yet.", elastic="DETAILS")


@batch.command()
@click.argument("batch", type=id_or_beginning, metavar="BATCH_ID")
@domain_option
@as_json
def watch(batch: IdRange, domain: str | None, as_json: bool) -> None:
    """Follow a batch until it completes.

    Ends with exit code 0 if every command completed, and with 1 if some failed or were canceled. With --json it prints
    one JSON object per change, each on a line of its own.

    \b
        busload batch watch 0198c5d2-7f3a && echo all completed
        busload batch watch 0198c5d2-7f3a --json | jq .completed_count
    """
    with open_bus() as bus:
        follow(bus, *find_batch(bus, batch, domain), as_json)


@batch.command()
@click.argument("batch", type=id_or_beginning, metavar="BATCH_ID")
@click.option("--reason", required=True, help="Why; it is kept in the audit trail.")
@click.option("--operator", default=operator, show_default="your user name", help="Who; kept in the audit trail.")
@domain_option
@as_json
def cancel(batch: IdRange, reason: str, operator: str, domain: str | None, as_json: bool) -> None:
    """Cancel what has not started yet; what runs finishes, and what waits in troubleshooting stays there.

    \b
        busload batch cancel 0198c5d2-7f3a --reason 'wrong price list'
    """
    with open_bus() as bus:
        domain, batch_id = find_batch(bus, batch, domain)
        canceled = bus.cancel_batch(domain, batch_id, reason=reason, operator=operator)
    if as_json:
        echo_json({"batch_id": batch_id, "domain": domain, "canceled": canceled})
    else:
        click.echo(f"Canceled {counted(canceled, 'command')}.")


@batch.command()
@click.argument("batch", type=id_or_beginning, metavar="BATCH_ID")
@domain_option
@as_json
def explain(batch: IdRange, domain: str | None, as_json: bool) -> None:
    """Say why a batch is not finished, and what to do about it; of a healthy one, when it will be.

    \b
        busload batch explain 0198c5d2-7f3a
        busload batch explain 0198c5d2-7f3a --json | jq -r '.reasons[].code'
    """
    with open_bus() as bus:
        found = bus.explain_batch(*find_batch(bus, batch, domain))
    print_explanation(found, as_json)


@batch.command()
@click.argument("batch", type=id_or_beginning, metavar="BATCH_ID")
@domain_option
@as_json
def dispatch(batch: IdRange, domain: str | None, as_json: bool) -> None:
    """Show how a batch was announced to the broker, and what of it still waits for that.

    \b
        busload batch dispatch 0198c5d2-7f3a
        busload batch dispatch 0198c5d2-7f3a --json | jq .retry_needed
    """
    with open_bus() as bus:
        domain, batch_id = find_batch(bus, batch, domain)
        found = bus.get_dispatch(domain, batch_id)
        exists = found is not None or bus.get_batch(domain, batch_id) is not None
    if not exists:
        raise BatchNotFoundError(domain, batch_id)
    if found is None:
        raise InvalidOperationError(
            f"There is no report: batch {batch_id} was created without a broker, or opened and filled bit by bit."
            f" What waits to be announced: `busload outbox ls --batch {batch_id}`"
        )
    if as_json:
        told = {name: getattr(found, name) for name in found.__dataclass_fields__}
        echo_json({**told, **{name: getattr(found, name) for name in DERIVED}})
        return
    facts(
        [
            ("batch", found.batch_id),
            ("transport", found.transport),
            ("strategy", found.strategy),
            ("status", found.status),
            ("commands", found.total_tasks),
            ("in the database", found.database_tasks),
            ("announced", found.queued_tasks),
            ("to be announced", found.retry_tasks),
            ("failed rounds", found.rounds),
            ("checkpoints", len(found.checkpoints) or None),
            ("failed checkpoint", found.failed_checkpoint),
            ("error", found.error),
            ("warning", found.warning),
            ("insert ms", found.insert_ms),
            ("send ms", found.send_ms),
            ("mark ms", found.mark_ms),
            ("total ms", found.total_ms),
            ("job", found.job_id),
            ("stage", found.stage),
            ("created", found.created_at),
            ("all announced", found.announced_at),
        ]
    )


DERIVED = ("tasks_committed", "tasks_failed", "retry_tasks", "recovery_possible", "recovery_scheduled")


def follow(bus: SyncCommandBus, domain: str, batch_id: UUID, as_json: bool, *, explain: bool = False) -> None:
    """Show how far a batch comes until it completes; the exit code says whether all of it did."""
    seen = _explained(bus, domain, batch_id) if explain else bus.watch_batch(domain, batch_id)
    if as_json:
        for found in seen:
            echo_json(found)
    else:
        with progress() as show:
            for found in seen:
                show(found)
    if found.status != BatchStatus.COMPLETED:
        raise click.exceptions.Exit(1)


def _explained(bus: SyncCommandBus, domain: str, batch_id: UUID) -> Iterator[BatchMetadata]:
    """As `watch_batch`; when nothing has moved for a while, it says why, once, beside what is shown."""
    last: BatchMetadata | None = None
    told = moved = False
    while last is None or not last.status.final:
        for found in bus.watch_batch(domain, batch_id) if told else bus._watch(domain, batch_id, STILL):
            moved = moved or (last is not None and found != last)
            if found != last:
                last = found
                yield found
        if not moved and not told:
            click.echo(bus.explain_batch(domain, batch_id).summary, err=True)
            told = True
        moved = False


def _fields(batch: BatchMetadata) -> dict[str, object]:
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}

"""`busload batch`: how a person at a shell sees batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import click

from busload.batches import preview
from busload.batches.batch import BatchMetadata, BatchStatus, BatchStatusName, BatchType, BatchTypeName
from busload.batches.guards import FailureBudget
from busload.cli import noun, options
from busload.cli.answer import Answer, about, answers, would
from busload.cli.command import explained
from busload.cli.find import job_of_batches
from busload.cli.output import echo_json
from busload.cli.progress_bar import progress
from busload.cli.text_table import View
from busload.commands.command import AuditEvent
from busload.commands.wording import counted, per_second
from busload.dispatch.strategy import DispatchReport
from busload.errors import BatchNotFoundError, InvalidOperationError
from busload.jobs.preview import of_cancel_batch as of_cancel_jobs
from busload.sync.bus import SyncCommandBus

STILL = 3.0
"""Seconds without any change after which a person who waits is told why."""

BATCHES = View[BatchMetadata](
    "BATCH=batch_id DOMAIN NAME STATUS TOTAL=total_count COMPLETED=completed_count FAILED=failed_count"
    " CANCELED=canceled_count TROUBLE=in_troubleshooting_count CREATED=created_at",
    nothing="There are no such batches.",
    elastic="NAME",
    spare=("CREATED", "NAME"),
)
BATCH = View[BatchMetadata](
    "batch=batch_id domain name type=batch_type custom_data headers job=job_id stage fair_by status total=total_count"
    " completed=completed_count failed=failed_count canceled=canceled_count in_troubleshooting=in_troubleshooting_count"
    " remaining=remaining_count created=created_at started=started_at completed_at"
    " expires=expires_at callback=callback_id callback_type held=held_at held_reason held_by held_note"
    " canary=canary_count canary_until canary_ended=canary_ended_at failure_budget failure_budget_used"
    " rate done forecast",
    {
        "rate": lambda found: found.forecast and per_second(found.forecast.rate, "command"),
        "done": lambda found: found.forecast and str(found.forecast),
        "forecast": lambda found: " ".join(found.forecast.changes) or None if found.forecast else None,
    },
)
TRAIL = View[AuditEvent]("AT EVENT=type OPERATOR DETAILS", nothing="Nothing has happened to it yet.", elastic="DETAILS")
DISPATCH = View[DispatchReport](
    "batch=batch_id transport strategy status commands=total_tasks in_the_database=database_tasks"
    " published=queued_tasks to_be_published=retry_tasks failed_rounds=rounds checkpoints failed_checkpoint"
    " error warning insert_ms send_ms mark_ms total_ms job=job_id stage"
    " created=created_at all_published=published_at",
    {"checkpoints": lambda found: len(found.checkpoints) or None},
)
DERIVED = ("tasks_committed", "tasks_failed", "retry_tasks", "recovery_possible", "recovery_scheduled")


batch = noun("batch", "ls --status IN_PROGRESS", "watch 0198c5d2-7f3a")


@batch.command()
@options.status(BatchStatus)
@click.option(
    "--type",
    "batch_type",
    type=click.Choice([kind.value for kind in BatchType], case_sensitive=False),
    help="Only batches of commands, or only batches of jobs.",
)
@click.option("--job", metavar="ID", help="Only batches of this job: a UUID, its beginning, or an id of your own.")
@click.option("--name", metavar="TEXT", help="Only batches in whose name this text occurs; capitals do not matter.")
@options.moment("--since", "created_after", "Only batches that were created then or later: a time, or 2h ago.")
@options.moment("--until", "created_before", "Only batches that were created earlier than that.")
@options.page(20)
@answers
def ls(
    bus: SyncCommandBus,
    status: BatchStatusName | None,
    batch_type: BatchTypeName | None,
    job: str | None,
    name: str | None,
    **page: Any,
) -> Answer:
    """List batches, newest first.

    busload batch ls
    busload batch ls --domain payments --status IN_PROGRESS --limit 5
    busload batch ls --job 0198c5d2-7f3a
    busload batch ls --type JOBS
    busload batch ls --name invoices --since 2d
    busload batch ls --json | jq -r '.[].batch_id'
    """
    job_id = None if job is None else job_of_batches(bus, job, page["domain"])
    found = bus.list_batches(page.pop("domain"), status=status, batch_type=batch_type, job_id=job_id, name=name, **page)
    return BATCHES.list(found)


@batch.command()
@about("batch")
def show(bus: SyncCommandBus, domain: str, batch_id: UUID) -> Answer:
    """Show how far a batch has come, when it will be done, and what happened to it.

    busload batch show 0198c5d2-7f3a
    busload batch show 0198c5d2-7f3a --json | jq .completed_count
    """
    found, trail = bus.get_batch(domain, batch_id), bus.get_batch_audit_trail(domain, batch_id)
    if found is None:
        raise BatchNotFoundError(domain, batch_id)
    return BATCH.one(found, below=TRAIL.list(trail), audit_trail=trail)


@batch.command()
@about("batch", prints=True)
def watch(bus: SyncCommandBus, domain: str, batch_id: UUID, *, as_json: bool) -> None:
    """Follow a batch until it completes. If nothing moves for a while, it says why, once.

    Ends with exit code 0 if every command completed, and with 1 if some failed or were canceled. With --json it prints
    one JSON object per change, each on a line of its own.

        busload batch watch 0198c5d2-7f3a && echo all completed
        busload batch watch 0198c5d2-7f3a --json | jq .completed_count
    """
    if not follow(bus, domain, batch_id, as_json, explain=True):
        raise click.exceptions.Exit(1)


@batch.command()
@options.reason()
@options.operator
@options.dry_run
@about("batch")
def cancel(bus: SyncCommandBus, domain: str, batch_id: UUID, *, reason: str, operator: str, dry_run: bool) -> Answer:
    """Cancel what has not started yet; what runs finishes, and what waits in troubleshooting stays there.

    In a batch of jobs, cancel every job that has not ended.

        busload batch cancel 0198c5d2-7f3a --reason 'wrong price list'
        busload batch cancel 0198c5d2-7f3a --reason 'wrong list' --dry-run
    """
    found = bus.get_batch(domain, batch_id)
    of_jobs = found is not None and found.batch_type == BatchType.JOBS
    if dry_run:
        return _would_cancel(bus, domain, batch_id, of_jobs=of_jobs)
    canceled = bus.cancel_batch(domain, batch_id, reason=reason, operator=operator)
    one = "job" if of_jobs else "command"
    value = {"batch_id": batch_id, "domain": domain, "canceled": canceled}
    return Answer(value, f"Canceled {counted(canceled, one)}.")


def _would_cancel(bus: SyncCommandBus, domain: str, batch_id: UUID, *, of_jobs: bool) -> Answer:
    about = {"batch_id": batch_id, "domain": domain}
    if of_jobs:
        jobs = bus.shard_of(domain).database.read(of_cancel_jobs(domain, batch_id))
        commands = counted(jobs.commands.commands, "command")
        return would(f"cancel {counted(jobs.jobs, 'job')} with {commands}", **about, canceled=jobs.jobs)
    found = bus.shard_of(domain).database.read(preview.of_cancel(domain, batch_id))
    stop = f", and ask {counted(found.running, 'running one')} to stop" if found.running else ""
    what = f"cancel {counted(found.commands, 'command')}{stop}"
    return would(what, **about, canceled=found.commands, asked_to_stop=found.running)


@batch.command()
@options.reason()
@options.operator
@options.dry_run
@about("batch")
def hold(bus: SyncCommandBus, domain: str, batch_id: UUID, *, reason: str, operator: str, dry_run: bool) -> Answer:
    """Start nothing more of a batch until it is resumed; what runs finishes.

    busload batch hold 0198c5d2-7f3a --reason 'the bank complains'
    busload batch hold 0198c5d2-7f3a --reason 'the bank complains' --dry-run
    busload batch resume 0198c5d2-7f3a
    """
    if dry_run:
        waiting = bus.shard_of(domain).database.read(preview.of_hold(domain, batch_id)).commands
        return would(f"hold {counted(waiting, 'command')}", batch_id=batch_id, domain=domain, commands=waiting)
    held = bus.hold_batch(domain, batch_id, reason=reason, operator=operator)
    said = "Held. Nothing more of it starts." if held else "It was held already."
    return Answer({"batch_id": batch_id, "domain": domain, "held": held}, said)


@batch.command()
@click.option("--budget", type=float, metavar="SHARE", help="From here on this share of all commands may fail.")
@click.option("--at-least", type=int, default=0, metavar="N", help="With --budget: so many may fail in any case.")
@click.option("--end-canary", is_flag=True, help="Let go what waits for the canary too, though the canary still runs.")
@options.operator
@options.dry_run
@about("batch")
def resume(
    bus: SyncCommandBus,
    domain: str,
    batch_id: UUID,
    *,
    operator: str,
    budget: float | None,
    at_least: int,
    end_canary: bool,
    dry_run: bool,
) -> Answer:
    """Let a held batch go on, whatever holds it.

    A failure budget that holds it counts from here on. If the budget was exceeded while a person held the batch, the
    budget holds it from now on: resume it once more, or with --budget.

        busload batch resume 0198c5d2-7f3a
        busload batch resume 0198c5d2-7f3a --budget 0.05 --at-least 100
        busload batch resume 0198c5d2-7f3a --end-canary
    """
    if at_least and budget is None:
        raise click.UsageError("--at-least needs --budget: the budget stays as it is without it.")
    raised = None if budget is None else FailureBudget(budget, at_least)
    if dry_run:
        columns = None if raised is None else raised.columns(None)
        plan = preview.of_resume(domain, batch_id, columns, end_canary=end_canary)
        waiting, again = bus.shard_of(domain).database.read(plan)
        what = f"let {counted(waiting.commands, 'command')} go on"
        if again is not None:
            what += f", as the batch would be held again at once ({again.rstrip('.')})"
        value = {"batch_id": batch_id, "domain": domain, "commands": waiting.commands}
        return would(what, **value, held_again=again is not None)
    resumed = bus.resume_batch(domain, batch_id, operator=operator, budget=raised, end_canary=end_canary)
    found = bus.get_batch(domain, batch_id)
    said = "Resumed." if resumed else "It was not held."
    if not resumed and found is not None and found.canary_until is not None and found.canary_ended_at is None:
        said += " Its canary runs: with --end-canary, what waits for it starts now."
    held_again = resumed and found is not None and found.held_reason in ("BUDGET", "CANARY")
    if found is not None and held_again:
        said = f"Resumed, and held again at once by its {str(found.held_reason).lower()}: {found.held_note}"
    return Answer({"batch_id": batch_id, "domain": domain, "resumed": resumed, "held_again": held_again}, said)


@batch.command("budget")
@click.option("--at-least", type=int, default=0, metavar="N", help="So many may fail in any case.")
@click.option("--per-cause", is_flag=True, help="Each cause of failures has the whole budget for itself.")
@options.operator
@about("batch")
@click.argument("share", type=float)
def set_budget(
    bus: SyncCommandBus,
    domain: str,
    batch_id: UUID,
    *,
    share: float,
    at_least: int,
    per_cause: bool,
    operator: str,
) -> Answer:
    """Let another share of all commands fail before the batch is held; what has failed counts.

    A batch that is held stays held: resume it, with --budget if you like.

        busload batch budget 0198c5d2-7f3a 0.05
        busload batch budget 0198c5d2-7f3a 0.05 --at-least 100 --per-cause
    """
    holds = bus.set_batch_budget(domain, batch_id, FailureBudget(share, at_least, per_cause), operator=operator)
    found = bus.get_batch(domain, batch_id)
    if found is None:
        raise BatchNotFoundError(domain, batch_id)
    said = f"{counted(found.failure_budget or 0, 'command')} may fail, and {found.failure_budget_used} count."
    if found.held_at is not None:
        said += f" It is held{' at once' if holds else ''}: {found.held_note}"
    about = {"failure_budget": found.failure_budget, "failure_budget_used": found.failure_budget_used}
    value = {"batch_id": batch_id, "domain": domain, **about, "held": found.held_at is not None, "held_at_once": holds}
    return Answer(value, said)


@batch.command(context_settings={"ignore_unknown_options": True})  # a negative number is no option
@options.operator
@options.dry_run
@about("batch")
@click.argument("priority", type=click.IntRange(-32768, 32767))
def reprioritize(
    bus: SyncCommandBus, domain: str, batch_id: UUID, *, priority: int, operator: str, dry_run: bool
) -> Answer:
    """Give everything that waits of a batch another priority; what runs keeps its own.

    busload batch reprioritize 0198c5d2-7f3a 9
    busload batch reprioritize 0198c5d2-7f3a -5 --dry-run
    """
    if dry_run:
        changed = (
            bus.shard_of(domain).database.read(preview.of_reprioritize(domain, batch_id, priority)).of_other_priority
        )
        what = f"give {counted(changed, 'command')} the priority {priority}"
        return would(what, batch_id=batch_id, domain=domain, priority=priority, changed=changed)
    changed = bus.reprioritize_batch(domain, batch_id, priority, operator=operator)
    value = {"batch_id": batch_id, "domain": domain, "priority": priority, "changed": changed}
    return Answer(value, f"Gave {counted(changed, 'command')} the priority {priority}.")


@batch.command()
@about("batch")
def explain(bus: SyncCommandBus, domain: str, batch_id: UUID) -> Answer:
    """Say why a batch is not finished, and what to do about it.

    It also says when the batch will be done, with an interval, and what would change that.

        busload batch explain 0198c5d2-7f3a
        busload batch explain 0198c5d2-7f3a --json | jq -r '.reasons[].code'
        busload batch explain 0198c5d2-7f3a --json | jq -r .forecast.latest
    """
    return explained(bus.explain_batch(domain, batch_id))


@batch.command()
@about("batch")
def dispatch(bus: SyncCommandBus, domain: str, batch_id: UUID) -> Answer:
    """Show how a batch was published to the broker, and what of it still waits for that.

    busload batch dispatch 0198c5d2-7f3a
    busload batch dispatch 0198c5d2-7f3a --json | jq .retry_needed
    """
    found = bus.get_dispatch(domain, batch_id)
    if found is not None:
        return DISPATCH.one(found, **{name: getattr(found, name) for name in DERIVED})
    if bus.get_batch(domain, batch_id) is None:
        raise BatchNotFoundError(domain, batch_id)
    raise InvalidOperationError(
        f"There is no report: batch {batch_id} was created without a broker, or is still open."
        f" What waits to be published: `busload outbox ls --batch {batch_id}`"
    )


def follow(bus: SyncCommandBus, domain: str, batch_id: UUID, as_json: bool, *, explain: bool = False) -> bool:
    """Show how far a batch comes until it completes, and return whether all of it did."""
    seen = _watched(bus, domain, batch_id) if explain else bus.watch_batch(domain, batch_id)
    if as_json:
        for found in seen:
            echo_json(found)
    else:
        with progress() as show:
            for found in seen:
                show(found)
    return found.status == BatchStatus.COMPLETED


def _watched(bus: SyncCommandBus, domain: str, batch_id: UUID) -> Iterator[BatchMetadata]:
    """As `watch_batch`; when nothing has moved for a while, it says why, once, beside what is shown."""
    last: BatchMetadata | None = None
    told = moved = False
    while last is None or not last.status.final:
        with suppress(TimeoutError):
            for found in bus.watch_batch(domain, batch_id, timeout=None if told else STILL):
                moved = moved or (last is not None and found != last)
                if found != last:
                    last = found
                    yield found
        if not moved and not told:
            why = bus.explain_batch(domain, batch_id)
            what_to_do = f" `busload batch explain {batch_id}` says what to do." if why.reasons else ""
            click.echo(f"{why.summary}{what_to_do}", err=True)
            told = True
        moved = False

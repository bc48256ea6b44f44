"""`busload schedule`: what is due when, what was fired, and how to pause, resume and trigger it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from busload.cli import did_you_mean, noun, options
from busload.cli.answer import Answer, answers, would
from busload.cli.complete import completes
from busload.cli.output import paragraph, shown
from busload.cli.text_table import View
from busload.cli.worker import load_bus
from busload.commands.wording import counted, span
from busload.errors import InvalidOperationError, ScheduleNotFoundError
from busload.schedules.schedule import Fire, ScheduleMetadata
from busload.sync.bus import SyncCommandBus


def _paused(found: ScheduleMetadata) -> str | None:
    if found.paused_at is None:
        return None
    by = f"by {found.paused_by}" if found.paused_by else "yes"
    return f"{by}: {found.pause_reason}" if found.pause_reason else by


def _next(found: ScheduleMetadata) -> str:
    if found.overdue:
        return f"overdue since {_with_zone(found.next_due_at)}: no worker fires it"
    return _with_zone(found.next_due_at) or "ended"


def _with_zone(when: datetime | None) -> str | None:
    """A time in the zone of this machine, with its name: the schedule's zone is beside it, and may be another one."""
    return None if when is None else f"{shown(when)} {when.astimezone():%Z}"


def _sends(found: ScheduleMetadata) -> str:
    return "a batch by its planner" if found.planned else found.command_type


def _catch_up(found: ScheduleMetadata) -> str:
    return f"{found.catch_up}, at most {found.catch_up_limit}" if found.catch_up == "all" else str(found.catch_up)


SCHEDULES = View[ScheduleMetadata](
    "NAME DOMAIN SENDS WHEN ZONE=timezone NEXT LAST=last_due_at PAUSED",
    {
        "NEXT": _next,
        "LAST": lambda found: _with_zone(found.last_due_at),
        "SENDS": _sends,
        "PAUSED": _paused,
    },
    nothing="There are no schedules. An application declares them: bus.schedule(name, cron=…, command=…, domain=…).",
    elastic="PAUSED",
    spare=("LAST", "DOMAIN"),
)
SCHEDULE = View[ScheduleMetadata](
    "name domain sends data when zone=timezone starts=starts_at ends=ends_at next last=last_due_at paused catch_up"
    " missed_after expires_in priority max_attempts reply_to headers declared=declared_at",
    {
        "starts": lambda found: _with_zone(found.starts_at),
        "ends": lambda found: _with_zone(found.ends_at),
        "next": _next,
        "last": lambda found: _with_zone(found.last_due_at),
        "declared": lambda found: _with_zone(found.declared_at),
        "sends": _sends,
        "paused": _paused,
        "catch up": _catch_up,
        "missed after": lambda found: span(found.missed_after),
        "expires in": lambda found: found.expires_in and span(found.expires_in),
        "priority": lambda found: found.priority or None,
    },
)
HISTORY = View[Fire](
    "SCHEDULE TYPE DUE=due_at LATE COMMAND=command_id STATUS BATCH=batch_id BY=operator",
    {
        "LATE": lambda fire: None if fire.type != "DUE" else span(fire.late),
        "STATUS": lambda fire: counted(fire.skipped, "due time") if fire.skipped else fire.status,
    },
    nothing="Nothing was fired.",
    spare=("BATCH", "BY"),
)


schedule = noun(
    "schedule",
    "ls",
    "show nightly-billing",
    "pause nightly-billing --reason 'year-end closing'",
    "trigger nightly-billing",
    "sync app:bus --dry-run",
)

_name = click.argument("name", shell_complete=completes("schedule"))


@schedule.command()
@options.domain
@options.limit(100)
@answers
def ls(bus: SyncCommandBus, domain: str | None, limit: int) -> Answer:
    """List schedules: when each is due, in which time zone, and which are paused.

    ZONE is that of the rule. NEXT and LAST are in the zone of this machine, like all times at the shell, and name it;
    with --json in UTC.

        busload schedule ls
        busload schedule ls --json | jq -r '.[] | select(.paused_at) | .name'
    """
    return SCHEDULES.list(bus.schedules.list(domain, limit=limit))


@schedule.command()
@_name
@answers
def show(bus: SyncCommandBus, name: str) -> Answer:
    """Show one schedule with its next due times.

    busload schedule show nightly-billing
    busload schedule show nightly-billing --json | jq -r '.next_times[]'
    """
    found = _find(bus, name)

    def show() -> None:
        SCHEDULE.print_facts(found)
        if found.next_times:
            click.echo()
            paragraph(f"Next due times in {found.timezone}: {', '.join(map(_local, found.next_times))}.")

    return Answer(found, show)


@schedule.command()
@_name
@options.reason(required=False)
@options.operator
@answers
def pause(bus: SyncCommandBus, name: str, reason: str | None, operator: str) -> Answer:
    """Let a schedule fire nothing until it is resumed. A deploy does not end the pause.

    busload schedule pause nightly-billing --reason 'year-end closing'
    """
    _find(bus, name)
    paused = bus.schedules.pause(name, reason=reason, operator=operator)
    said = f"Paused {name}." if paused else f"{name} was paused already."
    return Answer({"name": name, "paused": paused}, said)


@schedule.command()
@_name
@options.operator
@answers
def resume(bus: SyncCommandBus, name: str, operator: str) -> Answer:
    """Let a paused schedule go on. Due times that it has missed are skipped or caught up, as its catch_up says.

    busload schedule resume nightly-billing
    """
    found = _find(bus, name)
    resumed = bus.schedules.resume(name, operator=operator)
    said = f"{name} was not paused."
    if resumed:
        missed = found.next_due_at is not None and found.next_due_at < datetime.now(UTC) - found.missed_after
        said = f"Resumed {name}." + (f" It has missed due times; its catch_up is {_catch_up(found)}." if missed else "")
    return Answer({"name": name, "resumed": resumed}, said)


@schedule.command()
@_name
@options.transport
@options.operator
@answers(transport=True)
def trigger(bus: SyncCommandBus, name: str, operator: str) -> Answer:
    """Send the command of a schedule now, beside its due times; also if it is paused.

    busload schedule trigger nightly-billing
    busload schedule trigger nightly-billing --json | jq -r .command_id
    """
    found = _find(bus, name)
    command_id = bus.schedules.trigger(name, operator=operator)
    value = {"name": name, "domain": found.domain, "command_id": command_id}
    return Answer(value, f"Sent {command_id} to {found.domain}.")


@schedule.command()
@click.argument("name", required=False, shell_complete=completes("schedule"))
@options.limit(100)
@answers
def history(bus: SyncCommandBus, name: str | None, limit: int) -> Answer:
    """List what a schedule, or all of them, has fired and skipped, newest first: how late, and how it ended.

    busload schedule history nightly-billing
    busload schedule history --json | jq -r '.[] | select(.skipped > 0)'
    """
    try:
        return HISTORY.list(bus.schedules.history(name, limit=limit))
    except ScheduleNotFoundError as error:
        _find(bus, error.name)  # which names the likely one
        raise


@schedule.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=completes("schedule"))
@options.operator
@options.dry_run
@answers
def rm(bus: SyncCommandBus, names: Sequence[str], operator: str, dry_run: bool) -> Answer:
    """Remove schedules; what they have fired stays. Remove them from the code first, else a worker brings them back.

    busload schedule rm nightly-billing
    busload schedule rm nightly-billing weekly-report --dry-run
    """
    for name in names:
        _find(bus, name)
    if dry_run:
        return would(f"remove {counted(len(names), 'schedule')}: {', '.join(names)}", removed=list(names))
    for name in names:
        bus.schedules.remove(name, operator=operator)
    return Answer({"removed": list(names)}, f"Removed {', '.join(names)}.")


@schedule.command()
@click.argument("application", metavar="MODULE:BUS")
@click.option("--remove", is_flag=True, help="Remove schedules of its domains that it does not declare.")
@options.operator
@options.dry_run
@options.as_json
def sync(application: str, remove: bool, operator: str, dry_run: bool, as_json: bool) -> None:
    """Keep the schedules that an application declares in its database, as its workers do when they start.

    With --remove, schedules are removed that the application no longer declares, of all domains that it has handlers
    or schedules in.

        busload schedule sync app:bus
        busload schedule sync app:bus --remove --dry-run
    """
    app = load_bus(application, handlers=False)
    with SyncCommandBus(app.database.given_dsn, settings=app.settings) as bus:
        bus.declared_schedules.update(app.declared_schedules)
        domains = {*app.handlers.domains, *(one.domain for one in app.declared_schedules.values())}
        others = bus.schedules.undeclared(*sorted(domains)) if remove else []
        changed = bus.schedules.changes() if dry_run else bus.schedules.sync()
        if not dry_run:
            for name in others:
                bus.schedules.remove(name, operator=operator)
    value: dict[str, Any] = {"declared": sorted(changed), "removed": others}
    if dry_run:
        would(f"{_said('declare', changed)}, and {_said('remove', others)}", **value).print(as_json)
    else:
        Answer(value, f"{_said('Declared', changed)}, and {_said('removed', others)}.").print(as_json)


def _said(verb: str, names: Sequence[str]) -> str:
    return f"{verb} {counted(len(names), 'schedule')}" + (f" ({', '.join(sorted(names))})" if names else "")


def _local(due: datetime) -> str:
    return f"{due:%Y-%m-%d %H:%M:%S}"


def _find(bus: SyncCommandBus, name: str) -> ScheduleMetadata:
    found = bus.schedules.get(name)
    if found is None:
        likely = did_you_mean(name, [one.name for one in bus.schedules.list(limit=10_000)])
        raise InvalidOperationError(
            f"There is no schedule {shown(name)!r:.200}.{likely} `busload schedule ls` lists what there is."
        )
    return found

"""`busload buffer`: what waits to leave in bulk, and what a table needs to be a buffer."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from busload.buffers import event_table
from busload.buffers.declaration import EXHAUSTED, GROUP, BufferTable
from busload.buffers.status import COUNTED, BufferStatus
from busload.cli import did_you_mean, noun, options
from busload.cli.answer import Answer, answers, open_bus, would
from busload.cli.complete import completes
from busload.cli.output import echo_json, joined, paragraph, shown
from busload.cli.text_table import View
from busload.commands.command import TroubleshootingItem
from busload.commands.wording import counted, span
from busload.errors import InvalidOperationError
from busload.sync.bus import SyncCommandBus

MOST_GROUPS, MOST_ITEMS = 20, 10
"""Groups in troubleshooting that `show` lists, and items of each."""


def _oldest_age(status: BufferStatus) -> timedelta | None:
    return None if status.oldest is None else max(timedelta(0), datetime.now(UTC) - status.oldest)


def _age(status: BufferStatus) -> str | None:
    age = _oldest_age(status)
    return None if age is None else span(age)


def _waiting(status: BufferStatus) -> str:
    if status.problem is not None and not status.waiting:
        return "?"
    return f"{status.waiting:,}{'+' if status.waiting_capped else ''}"


def _per_call(status: BufferStatus) -> str | None:
    return None if status.items_per_call is None else f"{status.items_per_call:,.1f}"


def _leaves(status: BufferStatus) -> str | None:
    if status.size is None or status.max_age is None:
        return None
    return f"{status.size:,} at a time, or after {span(status.max_age)}"


BUFFERS = View[BufferStatus](
    "BUFFER=name WAITING OLDEST READY=groups_ready RUNNING=groups_running RETRYING=groups_retrying"
    " TROUBLE=groups_in_troubleshooting PER_CALL SAVED=calls_saved TABLE",
    {"WAITING": _waiting, "OLDEST": _age, "PER CALL": _per_call},
    nothing="There are no buffers.",
    elastic="TABLE",
    spare=("TABLE",),
)
BUFFER = View[BufferStatus](
    "buffer=name table waiting oldest leaves in_groups=grouped groups_ready groups_running groups_retrying"
    " groups_in_troubleshooting calls done vanished items_per_call calls_saved problem",
    {
        "table": lambda status: status.table or "busload.buffered",
        "waiting": _waiting,
        "oldest": lambda status: status.oldest and f"{_age(status)} old, since {shown(status.oldest)}",
        "leaves": _leaves,
        "vanished": lambda status: status.vanished or None,
        "items per call": _per_call,
    },
)


buffer = noun(
    "buffer", "ls", "show contact_activity_events", "flush contact_activity_events", "ddl contact_activity_event"
)


@buffer.command()
@answers
def ls(bus: SyncCommandBus) -> Answer:
    """List buffers: what waits and for how long, groups in flight, events per call and calls saved.

    busload buffer ls
    busload buffer ls --json | jq -r '.[] | select(.oldest_age > 600) | .name'
    """
    found = bus.buffers.list()
    problems = [f"{status.name}: {shown(status.problem)}" for status in found if status.problem is not None]
    return BUFFERS.list(found, value=[*map(_fields, found)], notes=problems)


@buffer.command()
@click.argument("name", shell_complete=completes("buffer"))
@answers
def show(bus: SyncCommandBus, name: str) -> Answer:
    """Show how a buffer is doing, and which of its groups wait for a person and why.

    busload buffer show contact_activity_events
    busload buffer show contact_activity_events --json | jq .troubleshooting
    """
    status, paused = _find(bus, name), _is_paused(bus, name)
    parked = bus.troubleshooting.list(name, command_type=GROUP, limit=MOST_GROUPS)
    hooks = bus.troubleshooting.list(name, command_type=EXHAUSTED, limit=MOST_GROUPS)

    def show() -> None:
        resume = f"yes: `busload domain resume {name}` lets its events leave"
        BUFFER.print_facts(status, paused=resume if paused else None)
        for item in (*parked, *hooks):
            _print_waiting(item)
        if more := status.groups_in_troubleshooting - len(parked):
            click.echo()
            paragraph(f"And {more:,} more: `busload troubleshooting groups --domain {name}` lists them by cause.")

    waiting = {"troubleshooting": [*map(_parked_fields, parked)], "hooks": [*map(_hook_fields, hooks)]}
    return Answer({**_fields(status), "paused": paused, **waiting}, show)


@buffer.command()
@click.argument("name", shell_complete=completes("buffer"))
@options.operator
@options.dry_run
@answers
def flush(bus: SyncCommandBus, name: str, operator: str, dry_run: bool) -> Answer:
    """Let all events that wait now leave at once, and say how many there are.

    busload buffer flush contact_activity_events
    busload buffer flush contact_activity_events --dry-run
    """
    status, paused = _find(bus, name), _is_paused(bus, name)
    leaving = status.waiting if dry_run else bus.buffers.flush(name, operator=operator)
    events = counted(leaving, "event") + (" or more" if leaving >= COUNTED else "")
    if dry_run:
        return would(f"let {events} leave {name}", name=name, leaving=leaving)
    if not leaving:
        said = f"Nothing waits in {name}."
    elif paused:
        said = f"{events} will leave {name} once it is resumed: `busload domain resume {name}`."
    else:
        said = f"{events} will leave {name}, as soon as its workers have room."
    return Answer({"name": name, "leaving": leaving, "dry_run": dry_run}, said)


@buffer.command()
@click.argument("table_name", metavar="TABLE")
@click.option("--id", "id", default="id", help="The column that names an event.")
@click.option("--group-id", default="group_id", help="The column for the group it is in.")
@click.option("--created-at", default="created_at", help="The column that says when it was added.")
@click.option("--key", help="The column that says what it is about, for buffers that merge.")
@click.option("--partition-by", help="The column whose values never share a group.")
@click.option("--all", "everything", is_flag=True, help="Print all of it, also what is there; needs no database.")
@options.as_json
def ddl(table_name: str, partition_by: str | None, everything: bool, as_json: bool, **columns: Any) -> None:
    """Print the columns and indexes that a table of yours lacks to be a buffer, as SQL for a migration.

    busload buffer ddl contact_activity_event
    busload buffer ddl crm.outbox --id event_id --partition-by tenant
    busload buffer ddl contact_activity_event --all
    """
    wanted = BufferTable(table_name, **columns)
    if everything:
        lines = event_table.all_ddl(wanted, partition_by=partition_by)
    else:
        with open_bus() as bus:
            lines = bus.database.read(event_table.ddl(wanted, partition_by=partition_by))
    if as_json:
        echo_json(lines)
        return
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo(f"Nothing to do: {shown(table_name)} has all that a buffer needs.", err=True)


def _find(bus: SyncCommandBus, name: str) -> BufferStatus:
    known = {status.name: status for status in bus.buffers.list()}
    if name not in known:
        there_are = f"Known: {', '.join(known)}." if known else "There are none in this database."
        raise InvalidOperationError(
            f"There is no buffer {name!r:.80}.{did_you_mean(name, known)} {there_are} "
            "One is known from its first event or worker on."
        )
    return known[name]


def _is_paused(bus: SyncCommandBus, name: str) -> bool:
    return any(pause.domain == name for pause in bus.domains.pauses())


def _print_waiting(item: TroubleshootingItem) -> None:
    """Why a group waits for a person, event by event, or a function for exhausted groups; and what a person can do."""
    retry = f"Decide: `busload troubleshooting retry {item.command_id}` once the cause is gone"
    if item.command_type == GROUP:
        what, after = item.reason, f", after {counted(item.attempts, 'attempt')}"
        retry += "; `complete` or `cancel` instead of `retry` removes its events"
        events, more = _events(item)
    else:
        what, after, events, more = "The function registered with exhausted() failed", "", [], 0
    click.echo()
    paragraph(f"{what}, since {shown(item.since)}{after}: {shown(_error(item))}")
    for event in events[:MOST_ITEMS]:
        about = "" if event.get("key") is None else f" about {event['key']}"
        why = joined(event.get("code") or event.get("type"), event.get("message"))
        paragraph(f"event {shown(event.get('id'))}{shown(about)}: {shown(why or '')}", first="  ", then="    ")
    if (more := len(events) - MOST_ITEMS + more) > 0:
        click.echo(f"  and {more:,} more")
    paragraph(f"{retry}.", first="  → ", then="    ")


def _error(item: TroubleshootingItem) -> str:
    return joined(item.last_error_code or item.last_error_type, item.last_error_message) or ""


def _events(group: TroubleshootingItem) -> tuple[list[dict[str, Any]], int]:
    """The errors of a group's events, and how many were not kept. A handler may have given details of its own."""
    details = group.details if isinstance(group.details, dict) else {}
    events, more = details.get("items"), details.get("more")
    known = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    return known, more if isinstance(more, int) else 0


def _parked_fields(group: TroubleshootingItem) -> dict[str, Any]:
    return {
        "group_id": group.command_id,
        "reason": group.reason,
        "attempts": group.attempts,
        "since": group.since,
        "message": group.last_error_message,
        "items": _events(group)[0],
    }


def _hook_fields(hook: TroubleshootingItem) -> dict[str, Any]:
    return {"command_id": hook.command_id, "reason": hook.reason, "since": hook.since, "message": _error(hook)}


def _fields(status: BufferStatus) -> dict[str, Any]:
    age = _oldest_age(status)
    return {
        **asdict(status),
        "max_age": None if status.max_age is None else status.max_age.total_seconds(),
        "oldest_age": None if age is None else round(age.total_seconds(), 3),
        "items_per_call": status.items_per_call,
        "calls_saved": status.calls_saved,
    }

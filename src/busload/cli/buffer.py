"""`busload buffer`: what waits to leave in bulk, and what a table needs to be a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from busload.bus import SyncCommandBus
from busload.cli import did_you_mean
from busload.cli.database import open_bus
from busload.cli.output import as_json, echo_json, facts, paragraph, shown, table
from busload.domain.buffer import EXHAUSTED, GROUP, BufferStatus, BufferTable
from busload.domain.command import TroubleshootingItem
from busload.domain.counted import counted
from busload.domain.explanation import _span
from busload.errors import InvalidOperationError
from busload.store import relation
from busload.store.buffer import COUNTED

MOST_GROUPS, MOST_ITEMS = 20, 10
"""Groups in troubleshooting that `show` lists, and items of each."""


@click.group()
def buffer() -> None:
    """See what waits in buffers, let it leave, prepare tables to be one.

    \b
        busload buffer ls
        busload buffer show contact_activity_events
        busload buffer flush contact_activity_events
        busload buffer ddl contact_activity_event
    """


@buffer.command()
@as_json
def ls(as_json: bool) -> None:
    """List buffers: what waits and for how long, groups in flight, events per call and calls saved.

    \b
        busload buffer ls
        busload buffer ls --json | jq -r '.[] | select(.oldest_age > 600) | .name'
    """
    with open_bus() as bus:
        found = bus.list_buffers()
    if as_json:
        echo_json([_fields(status) for status in found])
        return
    columns = ("BUFFER", "WAITING", "OLDEST", "READY", "RUNNING", "RETRYING", "TROUBLE", "PER CALL", "SAVED", "TABLE")
    table(columns, [_row(one) for one in found], nothing="There are no buffers.", elastic="TABLE", spare=("TABLE",))
    for status in found:
        if status.problem is not None:
            click.echo(f"{status.name}: {shown(status.problem)}", err=True)


@buffer.command()
@click.argument("name")
@as_json
def show(name: str, as_json: bool) -> None:
    """Show how a buffer is doing, and which of its groups wait for a person and why.

    \b
        busload buffer show contact_activity_events
        busload buffer show contact_activity_events --json | jq .troubleshooting
    """
    with open_bus() as bus:
        status, paused = _find(bus, name), _is_paused(bus, name)
        parked = bus.troubleshooting.list(name, command_type=GROUP, limit=MOST_GROUPS)
        hooks = bus.troubleshooting.list(name, command_type=EXHAUSTED, limit=MOST_GROUPS)
    if as_json:
        told = [_parked_fields(group) for group in parked]
        echo_json({**_fields(status), "paused": paused, "troubleshooting": told, "hooks": [*map(_hook_fields, hooks)]})
        return
    _print_status(status, paused)
    for group in parked:
        _print_parked(group)
    for hook in hooks:
        _print_hook(hook)
    if more := status.groups_in_troubleshooting - len(parked):
        click.echo()
        paragraph(f"And {more:,} more: `busload troubleshooting groups --domain {name}` lists them by cause.")


@buffer.command()
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="Say how many would leave, and do nothing.")
@as_json
def flush(name: str, dry_run: bool, as_json: bool) -> None:
    """Let all that waits now leave without waiting for more, and say how many events that is.

    \b
        busload buffer flush contact_activity_events
        busload buffer flush contact_activity_events --dry-run
    """
    with open_bus() as bus:
        status, paused = _find(bus, name), _is_paused(bus, name)
        leaving = status.waiting if dry_run else bus.buffer(name).flush()
    if as_json:
        echo_json({"name": name, "leaving": leaving, "dry_run": dry_run})
    elif not leaving:
        click.echo(f"Nothing waits in {name}.")
    elif dry_run:
        click.echo(f"{_events(leaving)} would leave {name}; nothing was done.")
    elif paused:
        click.echo(f"{_events(leaving)} will leave {name} once it is resumed: `busload domain resume {name}`.")
    else:
        click.echo(f"{_events(leaving)} will leave {name}, as soon as its workers have room.")


@buffer.command()
@click.argument("table_name", metavar="TABLE")
@click.option("--id", "id", default="id", show_default=True, help="The column that names an event.")
@click.option("--group-id", default="group_id", show_default=True, help="The column for the group it is in.")
@click.option("--created-at", default="created_at", show_default=True, help="The column that says when it was added.")
@click.option("--key", help="The column that says what it is about, for buffers that merge.")
@click.option("--partition-by", help="The column whose values never share a group.")
@click.option("--all", "everything", is_flag=True, help="Print all of it, also what is there; needs no database.")
@as_json
def ddl(
    table_name: str,
    id: str,
    group_id: str,
    created_at: str,
    key: str | None,
    partition_by: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Print the columns and indexes that a table of yours lacks to be a buffer, as SQL for a migration.

    \b
        busload buffer ddl contact_activity_event
        busload buffer ddl crm.outbox --id event_id --partition-by tenant
        busload buffer ddl contact_activity_event --all
    """
    wanted = BufferTable(table_name, id=id, group_id=group_id, created_at=created_at, key=key)
    if everything:
        lines = relation.all_ddl(wanted, partition_by=partition_by)
    else:
        with open_bus() as bus:
            lines = bus._read(relation.ddl(wanted, partition_by=partition_by))
    if as_json:
        echo_json(lines)
        return
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo(f"Nothing to do: {shown(table_name)} has all that a buffer needs.", err=True)


def _find(bus: SyncCommandBus, name: str) -> BufferStatus:
    known = {status.name: status for status in bus.list_buffers()}
    if name not in known:
        there_are = f"Known: {', '.join(known)}." if known else "There are none in this database."
        raise InvalidOperationError(
            f"There is no buffer {name!r:.80}.{did_you_mean(name, known)} {there_are} "
            "One is known from its first event or worker on."
        )
    return known[name]


def _row(status: BufferStatus) -> Sequence[object]:
    return (
        status.name,
        _waiting(status),
        _age(status),
        status.groups_ready,
        status.groups_running,
        status.groups_retrying,
        status.groups_in_troubleshooting,
        _per_call(status),
        status.calls_saved,
        status.table,
    )


def _is_paused(bus: SyncCommandBus, name: str) -> bool:
    return any(pause.domain == name for pause in bus.list_pauses())


def _print_status(status: BufferStatus, paused: bool) -> None:
    facts(
        [
            ("buffer", status.name),
            ("table", status.table or "busload.buffered"),
            ("waiting", _waiting(status)),
            ("oldest", status.oldest and f"{_age(status)} old, since {shown(status.oldest)}"),
            ("leaves", _leaves(status)),
            ("in groups", status.grouped),
            ("groups ready", status.groups_ready),
            ("groups running", status.groups_running),
            ("groups retrying", status.groups_retrying),
            ("groups in troubleshooting", status.groups_in_troubleshooting),
            ("calls", status.calls),
            ("done", status.done),
            ("vanished", status.vanished or None),
            ("items per call", _per_call(status)),
            ("calls saved", status.calls_saved),
            ("paused", f"yes: `busload domain resume {status.name}` lets its events leave" if paused else None),
            ("problem", status.problem),
        ]
    )


def _print_parked(group: TroubleshootingItem) -> None:
    """Why a group waits for a person, event by event, and what that person can do."""
    items = _items(group)
    attempts = counted(group.attempts, "attempt")
    click.echo()
    paragraph(f"{group.reason}, since {shown(group.since)}, after {attempts}: {shown(_error(group))}")
    for item in items[:MOST_ITEMS]:
        about = "" if item.get("key") is None else f" about {item['key']}"
        why = ": ".join(str(part) for part in (item.get("code") or item.get("type"), item.get("message")) if part)
        paragraph(f"event {shown(item.get('id'))}{shown(about)}: {shown(why)}", first="  ", then="    ")
    if (more := len(items) - MOST_ITEMS + _untold(group)) > 0:
        click.echo(f"  and {more:,} more")
    retry = f"Decide: `busload troubleshooting retry {group.command_id}` once the cause is gone; "
    paragraph(retry + "`complete` or `cancel` instead of `retry` removes its events.", first="  → ", then="    ")


def _print_hook(hook: TroubleshootingItem) -> None:
    """The function for groups whose attempts are used up has failed itself."""
    click.echo()
    paragraph(f"The function registered with exhausted() failed, since {shown(hook.since)}: {shown(_error(hook))}")
    retry = f"Decide: `busload troubleshooting retry {hook.command_id}` once the cause is gone."
    paragraph(retry, first="  → ", then="    ")


def _error(item: TroubleshootingItem) -> str:
    return ": ".join(part for part in (item.last_error_code or item.last_error_type, item.last_error_message) if part)


def _items(group: TroubleshootingItem) -> list[dict[str, Any]]:
    found = group.details.get("items") if isinstance(group.details, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _untold(group: TroubleshootingItem) -> int:
    """Items whose errors were not kept, since there are so many."""
    more = group.details.get("more") if isinstance(group.details, dict) else None
    return more if isinstance(more, int) else 0


def _parked_fields(group: TroubleshootingItem) -> dict[str, Any]:
    return {
        "group_id": group.command_id,
        "reason": group.reason,
        "attempts": group.attempts,
        "since": group.since,
        "message": group.last_error_message,
        "items": _items(group),
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


def _oldest_age(status: BufferStatus) -> timedelta | None:
    return None if status.oldest is None else max(timedelta(0), datetime.now(UTC) - status.oldest)


def _age(status: BufferStatus) -> str | None:
    age = _oldest_age(status)
    return None if age is None else _span(age)


def _waiting(status: BufferStatus) -> str:
    if status.problem is not None and not status.waiting:
        return "?"
    return f"{status.waiting:,}{'+' if status.waiting_capped else ''}"


def _events(count: int) -> str:
    """How many, as far as they were counted."""
    return counted(count, "event") + (" or more" if count >= COUNTED else "")


def _per_call(status: BufferStatus) -> str | None:
    return None if status.items_per_call is None else f"{status.items_per_call:,.1f}"


def _leaves(status: BufferStatus) -> str | None:
    if status.size is None or status.max_age is None:
        return None
    return f"{status.size:,} at a time, or after {_span(status.max_age)}"

"""What people do with schedules: look at them and at what they fired, pause, resume and remove them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from busload.commands.command import CommandStatus
from busload.errors import ScheduleNotFoundError
from busload.postgres.plan import Plan, execute, many, one
from busload.postgres.statements import statements
from busload.schedules.rule import Rule
from busload.schedules.schedule import (
    CatchUp,
    Fire,
    FireType,
    ScheduledCommand,
    ScheduleMetadata,
    next_times,
)

SQL = statements(__name__)

NEWEST = 2**63 - 1
"""The number that is behind all rows of the history."""

SHOWN = 5
"""Due times to come that are shown of a schedule."""


def schedules(domain: str | None, *, limit: int, after: str | None) -> Plan[list[ScheduleMetadata]]:
    """Schedules of a domain, or of all, by name."""
    return many(_metadata, SQL.schedules, domain=domain, limit=limit, after=after)


def find(name: str) -> Plan[ScheduleMetadata | None]:
    """One schedule; None if there is no such schedule."""
    return one(_metadata, SQL.find, name=name)


def pause(name: str, *, reason: str | None, operator: str | None) -> Plan[bool]:
    """Pause a schedule. Return False if it was paused already: that pause stays as it is."""
    return (yield from _changed(name, SQL.pause, reason=reason, operator=operator))


def resume(name: str, *, operator: str | None) -> Plan[bool]:
    """Let a schedule go on. Return False if it was not paused."""
    return (yield from _changed(name, SQL.resume, operator=operator))


def remove(names: Sequence[str], *, operator: str | None) -> Plan[list[str]]:
    """Remove schedules, and return the names of those that were there. What they have fired stays."""
    rows = yield from execute(SQL.remove, names=list(names), operator=operator)
    return [name for (name,) in rows]


def remove_one(name: str, *, operator: str | None) -> Plan[None]:
    """Remove a schedule."""
    if not (yield from remove([name], operator=operator)):
        raise ScheduleNotFoundError(name)


def newest_fires(names: Sequence[str]) -> Plan[list[Fire]]:
    """The last command of each of these schedules, if it has fired one. The batch of a planner is left out."""
    return many(_fire, SQL.newest_fires, names=list(names))


def history(name: str | None, *, limit: int) -> Plan[list[Fire]]:
    """What was fired and skipped, newest first."""
    found = yield from history_before(NEWEST, name, limit=limit)
    return [fire for _, fire in found]


def history_before(before: int, name: str | None, *, limit: int) -> Plan[list[tuple[int, Fire]]]:
    """What was fired and skipped before a row of that number, newest first, each with its own number."""
    rows = yield from execute(SQL.history, name=name, before=before, limit=limit)
    return [(number, _fire(*row)) for number, *row in rows]


def _changed(name: str, sql: bytes, **about: Any) -> Plan[bool]:
    rows = yield from execute(sql, name=name, **about)
    if not rows:
        raise ScheduleNotFoundError(name)
    return bool(rows[0][0])


def _fire(schedule: str, type: str, *rest: Any) -> Fire:
    due_at, fired_at, domain, command_id, batch_id, status, finished_at, operator, skipped = rest
    how = None if status is None else CommandStatus(status)
    return Fire(
        schedule, FireType(type), due_at, fired_at, domain, command_id, batch_id, how, finished_at, operator, skipped
    )


def _metadata(
    name: str,
    domain: str,
    rule: str,
    command: str,
    next_due_at: datetime | None,
    last_due_at: datetime | None,
    paused_at: datetime | None,
    paused_by: str | None,
    pause_reason: str | None,
    catch_up: str,
    catch_up_limit: int,
    missed_after: timedelta,
    expires_in: timedelta | None,
    declared_at: datetime,
    now: datetime,
) -> ScheduleMetadata:
    when, text, times = _readable(rule, now)
    what = msgspec.json.decode(command, type=ScheduledCommand)
    return ScheduleMetadata(
        name,
        domain,
        what.command_type,
        json.loads(bytes(what.data)),
        text,
        when.timezone,
        next_due_at,
        last_due_at,
        paused_at,
        paused_by,
        pause_reason,
        CatchUp(catch_up),
        catch_up_limit,
        missed_after,
        expires_in,
        when.starts_at,
        when.ends_at,
        declared_at,
        what.priority,
        what.max_attempts,
        what.reply_to,
        what.headers,
        times,
        paused_at is None and next_due_at is not None and now - next_due_at > missed_after,
    )


def _readable(rule: str, now: datetime) -> tuple[Rule, str, tuple[datetime, ...]]:
    """A rule, its text, and its next due times. The rule of a release to come is shown as it is kept."""
    try:
        made = Rule.read(json.loads(rule))
        return made, str(made), tuple(next_times(made, SHOWN, now))
    except Exception:
        return Rule(timezone="?"), rule, ()

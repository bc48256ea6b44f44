"""The facts behind an explanation, as they were at one moment: read-only."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from busload.domain import explanation
from busload.domain.command import CommandStatus
from busload.domain.explanation import (
    BatchFacts,
    Cause,
    CommandFacts,
    Explanation,
    Failure,
    Places,
    Ready,
    Running,
    Surroundings,
    Unconfirmed,
    Waiting,
)
from busload.domain.pause import Pause
from busload.errors import BatchNotFoundError, CommandNotFoundError
from busload.store.plan import Plan, Script, execute, many
from busload.store.statements import statements

SQL = statements("explain")

ONE_MOMENT = b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
"""All statements that follow see the same state, so that their counts add up."""

ENDED = (CommandStatus.COMPLETED, CommandStatus.FAILED, CommandStatus.CANCELED)


def explain_batch(domain: str, batch_id: UUID) -> Plan[Explanation]:
    """Needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    return explanation.explain_batch((yield from _batch(domain, batch_id)))


def explain_command(domain: str, command_id: UUID) -> Plan[Explanation]:
    """Needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    facts = yield from _command(domain, command_id)
    if facts is None:
        raise CommandNotFoundError(domain, command_id)
    return explanation.explain_command(facts)


def _batch(domain: str, batch_id: UUID) -> Plan[BatchFacts]:
    rows = yield from execute(SQL.batch, domain=domain, batch_id=batch_id)
    if not rows:
        raise BatchNotFoundError(domain, batch_id)
    now, status, total, ended, *times, callback_id, first, last = rows[0]
    facts = BatchFacts(now, domain, batch_id, status, total, ended, *times)
    if facts.completed_at is not None:
        callback = (yield from _command(domain, callback_id)) if callback_id else None
        return replace(facts, callback=callback)
    around = yield from _surroundings(domain)
    if first is None:
        return replace(facts, around=around)
    usual = yield from _usual(batch_id, domain, first)
    places = yield from _places(batch_id, first, last, usual)
    if places.ready:
        lowest = min(ready.priority for ready in places.ready)
        around = yield from _with_those_ahead(around, domain, lowest, batch_id)
    return replace(facts, places=places, around=replace(around, usual=usual))


def _places(batch_id: UUID, first: int, last: int, usual: timedelta | None) -> Plan[Places]:
    here = {"batch_id": batch_id, "first": first, "last": last}
    ready = yield from many(Ready, SQL.ready, **here)
    waiting = []
    for row in (yield from execute(SQL.waiting, **here)):
        waiting.append((yield from _with_its_cause(Waiting(*row), here)))
    running = yield from many(Running, SQL.running, longer_than=explanation.longer_than(usual), **here)
    causes = yield from execute(SQL.causes, **here)
    together = causes[0][-1] if causes else 0
    unconfirmed = yield from many(Unconfirmed, SQL.unconfirmed, **here)
    return Places(
        tuple(ready),
        tuple(waiting),
        tuple(running),
        tuple(Cause(*row[:-1]) for row in causes),
        together - sum(row[0] for row in causes),
        tuple(unconfirmed),
    )


def _with_its_cause(waiting: Waiting, here: dict[str, Any]) -> Plan[Waiting]:
    """Commands that wait for their time were sent so; the others have a story."""
    if waiting.reason == "RETRY":
        rows = yield from execute(SQL.failures, **here)
        since = min((row[-1] for row in rows), default=waiting.since)
        return replace(waiting, since=since, failures=tuple(Failure(*row[:-1]) for row in rows))
    if waiting.reason == "NO_HANDLER":
        [(types, since)] = yield from execute(SQL.unknown_types, **here)
        return replace(waiting, since=since, command_types=tuple(types))
    if waiting.reason == "RATE_LIMITED":
        [(limits, since)] = yield from execute(SQL.limits, **here)
        return replace(waiting, since=since, limits=tuple(limits))
    return waiting


def _command(domain: str, command_id: UUID) -> Plan[CommandFacts | None]:
    rows = yield from execute(SQL.command, domain=domain, command_id=command_id)
    if not rows:
        return None
    now, id, batch_id, command_type, priority, status, created_at, *place, canceled_at, items = rows[0]
    ended = status in ENDED
    usual = None if ended else (yield from _usual(batch_id, domain, id, command_type))
    places = _place(now, command_id, command_type, priority, status, created_at, usual, *place)
    if status in (CommandStatus.PENDING_QUEUE, CommandStatus.PENDING_RETRY):
        found = yield from many(Unconfirmed, SQL.unconfirmed_command, id=id)
        places = replace(places, unconfirmed=tuple(found))
    if any(waiting.reason == "RATE_LIMITED" for waiting in places.waiting):
        [(limits, since)] = yield from execute(SQL.limits_of_command, id=id)
        places = replace(places, waiting=(replace(places.waiting[0], since=since, limits=tuple(limits)),))
    around = Surroundings(workers=0) if ended else (yield from _surroundings(domain))
    if places.ready:
        around = yield from _with_those_ahead(around, domain, priority, None)
    around = replace(around, usual=usual)
    events = int(items) if items is not None and items.isdecimal() else None
    return CommandFacts(
        now, domain, command_id, batch_id, command_type, status, created_at, ended, canceled_at, places, around, events
    )


def _place(
    now: datetime,
    command_id: UUID,
    command_type: str,
    priority: int,
    status: str,
    created_at: datetime,
    usual: timedelta | None,
    scheduled_reason: str | None,
    run_at: datetime,
    parked_reason: str,
    parked_at: datetime,
    error_type: str | None,
    error_code: str | None,
    error_message: str | None,
    fingerprint: str,
    failed_at: datetime | None,
    unknown_since: datetime | None,
    worker: str | None,
    leased_at: datetime,
    seen_at: datetime | None,
    lease_ends_at: datetime | None,
    lost: bool,
) -> Places:
    """The one place a command is in."""
    match status:
        case CommandStatus.PENDING:
            return Places(ready=(Ready(priority, 1, created_at),))
        case CommandStatus.SCHEDULED if run_at <= now:
            return Places(ready=(Ready(priority, 1, created_at),))
        case CommandStatus.SCHEDULED:
            since = {"RETRY": failed_at, "NO_HANDLER": unknown_since}.get(scheduled_reason or "", created_at)
            waiting = Waiting(scheduled_reason or "RUN_AT", 1, since, run_at, run_at)
            if scheduled_reason == "RETRY":
                failure = Failure(1, error_type, error_code, error_message, command_id)
                waiting = replace(waiting, failures=(failure,))
            elif scheduled_reason == "NO_HANDLER":
                waiting = replace(waiting, command_types=(command_type,))
            return Places(waiting=(waiting,))
        case CommandStatus.IN_PROGRESS:
            long = int(leased_at < now - explanation.longer_than(usual))
            return Places(running=(Running(worker, 1, leased_at, seen_at, lease_ends_at, lost, long),))
        case CommandStatus.IN_TROUBLESHOOTING_QUEUE:
            error = (error_type, error_code, error_message)
            return Places(causes=(Cause(1, parked_at, parked_reason, *error, command_id, fingerprint),))
        case _:
            return Places()


def _surroundings(domain: str) -> Plan[Surroundings]:
    [(workers, last_seen, anybody, since, operator, reason)] = yield from execute(SQL.surroundings, domain=domain)
    pause = Pause(domain, since, operator, reason) if since else None
    return Surroundings(workers, last_seen, anybody, pause)


def _with_those_ahead(around: Surroundings, domain: str, priority: int, batch_id: UUID | None) -> Plan[Surroundings]:
    [(ahead, highest)] = yield from execute(SQL.ahead, domain=domain, priority=priority, batch_id=batch_id)
    return replace(around, ahead=ahead, ahead_priority=highest)


def _usual(batch_id: UUID | None, domain: str, first: int, command_type: str | None = None) -> Plan[timedelta | None]:
    """How long an attempt takes: in its own batch; if nothing has ended there, of its type; or else in its domain."""
    usual: timedelta | None = None
    if batch_id is not None:
        [(usual,)] = yield from execute(SQL.usual, batch_id=batch_id)
    for kind in dict.fromkeys((command_type, None)):
        if usual is None:
            [(usual,)] = yield from execute(SQL.usual_before, domain=domain, first=first, command_type=kind)
    return usual

"""How due times become commands: the transaction that sends the command also advances the schedule."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from busload.commands import send
from busload.commands.checks import check
from busload.commands.command import NewCommand
from busload.commands.headers import encode_headers
from busload.commands.send import Via
from busload.commands.send_middleware import SendMiddleware, around_send
from busload.errors import DuplicateCommandError, ScheduleNotFoundError
from busload.handlers.registry import DUE
from busload.postgres.plan import Plan, execute, many, one
from busload.postgres.statements import statements
from busload.schedules.rule import Rule
from busload.schedules.schedule import (
    DUE_HEADER,
    MOST_AT_ONCE,
    SCHEDULE_HEADER,
    CatchUp,
    Decision,
    Policy,
    ScheduledCommand,
    batch_id_of,
    command_id_of,
    decide,
    key_of,
)
from busload.settings import InputLimits

log = logging.getLogger("busload")

SQL = statements(__name__)

SCHEDULES = 200
"""Schedules that one transaction fires at most."""

ANY_INPUT = InputLimits()


@dataclass(frozen=True, slots=True)
class DueSchedule:
    """A schedule that this transaction has locked."""

    name: str
    domain: str
    rule: str
    command: str
    expires_in: timedelta | None
    catch_up: str
    limit: int
    missed_after: timedelta
    declaration: str
    due_at: datetime
    now: datetime

    def decide(self, room: int) -> Decision:
        policy = Policy(CatchUp(self.catch_up), self.limit, self.missed_after)
        return decide(Rule.read(json.loads(self.rule)), policy, self.due_at, self.now, room)

    def what(self) -> ScheduledCommand:
        """What is sent at each due time."""
        return msgspec.json.decode(self.command, type=ScheduledCommand)

    def command_at(
        self, due_at: datetime, command_id: UUID, task_key: str, given: Mapping[str, str] | None = None
    ) -> NewCommand:
        """The command to send for this due time; `given` are its headers in the place of those that were declared."""
        what = self.what()
        headers = {SCHEDULE_HEADER: self.name, DUE_HEADER: due_at.astimezone(UTC).isoformat()}
        return NewCommand(
            command_id.int,
            what.command_type,
            bytes(what.data).decode(),
            what.reply_to,
            what.correlation_id,
            task_key,
            what.priority,
            max_attempts=what.max_attempts,
            domain=self.domain,
            expires_at=None if self.expires_in is None else self.now + self.expires_in,
            headers=encode_headers({**((what.headers or {}) if given is None else given), **headers}),
        )


@dataclass(slots=True)
class Fired:
    """What one look has come to."""

    commands: int = 0
    skipped: int = 0
    schedules: int = 0
    """How many schedules were due and could be read."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Declarations that cannot be read here, each with what is wrong."""
    refused: dict[str, str] = field(default_factory=dict)
    """Schedules that stay due because a middleware around sends has raised, each with what it raised."""


def fire(
    via: Via,
    unreadable: Collection[str] = (),
    around_sends: Sequence[SendMiddleware] = (),
    limits: InputLimits = ANY_INPUT,
) -> Plan[Fired]:
    """Fire schedules that are due; needs a transaction. Due times that others fire at this moment are left to them.

    Each command passes the middleware `around_sends`. If a middleware raises, the schedule stays due.
    """
    due = yield from many(DueSchedule, SQL.due, unreadable=list(unreadable), limit=SCHEDULES)
    fired, rows = Fired(), _Rows()
    commands: dict[UUID, NewCommand] = {}
    with ExitStack() as calls:
        for schedule in due:
            room = MOST_AT_ONCE - len(commands)
            if room <= 0:
                break
            try:
                decision = schedule.decide(room)
                sent = [_command(schedule, due_at) for due_at in decision.fires]
            except Exception as error:  # of a release to come, or a zone that this machine does not know
                fired.unreadable[schedule.declaration] = f"{schedule.name}: {error!r}"
                continue
            if around_sends and sent:
                try:
                    sent = calls.enter_context(_passed(schedule, decision.fires, around_sends, limits))
                except Exception as error:
                    fired.refused[schedule.name] = repr(error)
                    continue
            fired.schedules += 1
            fired.skipped += decision.skipped
            rows.advance(schedule, decision)
            for due_at, command in zip(decision.fires, sent, strict=True):
                rows.fire(schedule, due_at, command)
                commands[command.command_id] = command
        if fired.schedules:
            new = yield from execute(SQL.advance, **rows.columns())
            fired.commands = yield from _send([commands[id] for (id,) in new if id is not None], via)
        sent_calls = calls.pop_all()
    try:
        sent_calls.close()
    except Exception:  # what is sent is sent
        log.exception("A middleware around sends failed after schedules were fired")
    return fired


@contextmanager
def _passed(
    schedule: DueSchedule, fires: Sequence[datetime], around_sends: Sequence[SendMiddleware], limits: InputLimits
) -> Iterator[list[NewCommand]]:
    """The commands of these due times, each within the middleware around sends."""
    what = schedule.what()
    with ExitStack() as calls:
        sent = []
        for due_at in fires:
            call = calls.enter_context(
                around_send(around_sends, "schedule", schedule.domain, what.headers, what.command_type)
            )
            check(limits, headers=call.headers)
            command = _command(schedule, due_at, call.headers)
            call.result = command.command_id
            sent.append(command)
        yield sent


def seconds_to_next(unreadable: Collection[str] = ()) -> Plan[float | None]:
    """Seconds until a schedule is due, less than 0 if one is; None if none will be."""
    [(seconds,)] = yield from execute(SQL.next_due, unreadable=list(unreadable))
    return seconds  # type: ignore[no-any-return]


def trigger(
    name: str, command_id: UUID, via: Via, *, operator: str | None, headers: Mapping[str, str] | None = None
) -> Plan[UUID]:
    """Send the command of a schedule now, whatever its due times; `command_id` is the id that it has.

    With `headers` it has these, and not those that were declared.
    """
    schedule = yield from one(DueSchedule, SQL.to_trigger, name=name)
    if schedule is None:
        raise ScheduleNotFoundError(name)
    command = schedule.command_at(schedule.now, command_id, f"{name}@trigger:{command_id}", headers)
    about = {"schedule": name, "domain": schedule.domain, "operator": operator}
    yield from execute(SQL.note_trigger, **about, command_id=command_id, batch_id=_batch_of(command))
    yield from send.send_many(schedule.domain, [command], via=via)
    return command_id


def _command(schedule: DueSchedule, due_at: datetime, headers: Mapping[str, str] | None = None) -> NewCommand:
    return schedule.command_at(due_at, command_id_of(schedule.name, due_at), key_of(schedule.name, due_at), headers)


def _batch_of(command: NewCommand) -> UUID | None:
    return batch_id_of(command.command_id) if command.command_type.startswith(DUE) else None


NEXT = "names", "next_due_ats", "last_due_ats"
FIRES = "schedules", "due_ats", "domains", "command_ids", "batch_ids", "skipped"


class _Rows:
    """The arrays of one statement: how schedules go on, and what is written into their history."""

    def __init__(self) -> None:
        self._next: list[tuple[Any, ...]] = []
        self._fires: list[tuple[Any, ...]] = []

    def advance(self, schedule: DueSchedule, decision: Decision) -> None:
        last = decision.fires[-1] if decision.fires else None
        self._next.append((schedule.name, decision.next_due_at, last))
        if decision.skipped:
            self._fires.append((schedule.name, schedule.due_at, schedule.domain, None, None, decision.skipped))

    def fire(self, schedule: DueSchedule, due_at: datetime, command: NewCommand) -> None:
        self._fires.append((schedule.name, due_at, schedule.domain, command.command_id, _batch_of(command), 0))

    def columns(self) -> dict[str, list[Any]]:
        columns = dict(zip(NEXT, map(list, zip(*self._next, strict=True)), strict=True))
        fires = map(list, zip(*self._fires, strict=True)) if self._fires else ([] for _ in FIRES)
        return columns | dict(zip(FIRES, fires, strict=True))


def _send(commands: Sequence[NewCommand], via: Via) -> Plan[int]:
    """Send the commands of due times. One whose id is taken was sent before, and its row was removed since."""
    while commands:
        try:
            yield from send.send_many("", commands, via=via)
            return len(commands)
        except DuplicateCommandError as taken:
            commands = [command for command in commands if command.command_id not in taken.command_ids]
    return 0

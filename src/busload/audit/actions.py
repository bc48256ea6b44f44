"""`bus.audit`: who did what, and why, newest first."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from busload.commands.checks import check, given, refuse, wrong, wrong_time
from busload.postgres.database import Database
from busload.postgres.plan import Plan, many
from busload.postgres.statements import statements
from busload.settings import InputLimits

SQL = statements(__name__)

LOOKED_AT = 2000
"""Rows that one page looks at, at most: an action on many commands has a row for each of them."""

TOGETHER = timedelta(seconds=5)
"""Rows of the same operator, the same action and the same reason belong together if so little time is between them."""


class ActionType(StrEnum):
    """What operators can do."""

    OPERATOR_RETRIED = "OPERATOR_RETRIED"
    OPERATOR_COMPLETED = "OPERATOR_COMPLETED"
    OPERATOR_CANCELED = "OPERATOR_CANCELED"
    CANCELED = "CANCELED"
    ASKED_TO_STOP = "ASKED_TO_STOP"
    RESCHEDULED = "RESCHEDULED"
    REROUTED = "REROUTED"
    BATCH_CREATED = "BATCH_CREATED"
    BATCH_HELD = "BATCH_HELD"
    BATCH_RESUMED = "BATCH_RESUMED"
    BATCH_CANCELED = "BATCH_CANCELED"
    BATCH_REPRIORITIZED = "BATCH_REPRIORITIZED"
    BATCH_BUDGET_CHANGED = "BATCH_BUDGET_CHANGED"
    JOB_RESUMED = "JOB_RESUMED"
    JOB_CANCELED = "JOB_CANCELED"
    DOMAIN_PAUSED = "DOMAIN_PAUSED"
    DOMAIN_RESUMED = "DOMAIN_RESUMED"
    LIMIT_RESET = "LIMIT_RESET"
    BUFFER_FLUSHED = "BUFFER_FLUSHED"
    OUTBOX_RETRIED = "OUTBOX_RETRIED"
    OUTBOX_REPAIRED = "OUTBOX_REPAIRED"
    WORKER_ASKED_TO_STOP = "WORKER_ASKED_TO_STOP"
    SCHEDULE_PAUSED = "SCHEDULE_PAUSED"
    SCHEDULE_RESUMED = "SCHEDULE_RESUMED"
    SCHEDULE_TRIGGERED = "SCHEDULE_TRIGGERED"
    SCHEDULE_REMOVED = "SCHEDULE_REMOVED"
    TRACKER_SWITCHED = "TRACKER_SWITCHED"


@dataclass(frozen=True, slots=True)
class Action:
    """Something that an operator did. An action on many commands is one of these, and names the last of them."""

    event: int
    """The number of its last row."""
    at: datetime
    type: str
    operator: str
    commands: int
    """How many commands it was about; 0 if it was about something else."""
    batch_id: UUID | None
    domain: str | None
    command_id: UUID | None
    """The command, or the last of them; None if it is gone."""
    reason: str | None
    worker: int | None = None
    worker_name: str | None = None
    limit: str | None = None
    buffer: str | None = None
    job_id: str | None = None
    priority: str | None = None
    schedule: str | None = None
    old_tracker: str | None = None
    phase: str | None = None
    """The phase to which an old tracker was switched."""
    patched: bool = False
    """Whether the data was patched before the retry."""
    first: datetime | None = None
    """When the first of its commands was touched, if there are several."""

    def goes_with(self, later: Action) -> bool:
        """Whether this is a part of what the operator did there."""
        return (
            self.commands > 0
            and later.commands > 0
            and (self.type, self.patched, self.operator, self.reason, self.domain)
            == (later.type, later.patched, later.operator, later.reason, later.domain)
            and (later.first or later.at) - self.at <= TOGETHER
        )


class Cursor(NamedTuple):
    """Where the next page begins: behind this row."""

    at: datetime
    event: int

    def __str__(self) -> str:
        micros = (self.at - _EPOCH) // timedelta(microseconds=1)
        return f"{micros}.{self.event}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        micros, dot, event = text.partition(".")
        if not (dot and text.isascii() and micros.isdecimal() and event.isdecimal() and len(text) < 40):
            raise ValueError(text)
        if int(event) >= 2**63:
            raise ValueError(text)
        return cls(_EPOCH + timedelta(microseconds=int(micros)), int(event))


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ActionPage(NamedTuple):
    """Actions, and where the next page begins; None if this is the last one."""

    actions: list[Action]
    next: str | None


class Audit:
    """What operators did, on every face: the command line, the dashboard and programs that name an `operator`."""

    def __init__(self, database: Database, limits: InputLimits) -> None:
        self._database, self._limits = database, limits

    async def list(
        self,
        domain: str | None = None,
        *,
        operator: str | None = None,
        action: ActionType | str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> ActionPage:
        """What operators did, newest first, at most `limit` actions.

        `domain`, `operator` and `action` leave out others, `since` and `until` bound the time. `after` is `next` of the
        page before. A page looks at no more than 2,000 rows, so it may have few actions, or none, and still a `next`.
        """
        check(self._limits, writes=False, **given(domain=domain), operator=operator, limit=limit)
        times = given(since=since, until=until)
        problems = [problem for name, time in times.items() for problem in wrong_time(time, name, self._limits)]
        wanted, cursor = None, None
        if action is not None:
            try:
                wanted = ActionType(action)
            except ValueError:
                problems.append(wrong(action, "action", f"one of {', '.join(ActionType)}"))
        if after is not None:
            try:
                cursor = Cursor.read(after)
            except (ValueError, OverflowError):
                problems.append(wrong(after, "after", "the `next` of the page before"))
        refuse(problems, writes=False)
        rows = await self._database.read(_rows(cursor, since, until))
        fits: builtins.list[Action] = [
            row
            for row in rows
            if (domain is None or row.domain == domain)
            and (operator is None or row.operator == operator)
            and (wanted is None or row.type == wanted)
        ]
        return _page(rows, fits, limit)


def _rows(cursor: Cursor | None, since: datetime | None, until: datetime | None) -> Plan[list[Action]]:
    before, after = cursor or (until, None)
    return many(Action, SQL.actions, before=before, after=after, since=since, most=LOOKED_AT)


def _page(rows: Sequence[Action], fits: Iterable[Action], limit: int) -> ActionPage:
    """Join rows that belong together. What an action is in the middle of, the next page goes on with."""
    found: list[Action] = []
    for row in fits:
        if found and row.goes_with(found[-1]):
            found[-1] = _joined(found[-1], row)
        elif len(found) == limit:
            return ActionPage(found, str(_end_of(found[-1])))
        else:
            found.append(row)
    more = len(rows) == LOOKED_AT
    return ActionPage(found, str(Cursor(rows[-1].at, rows[-1].event)) if more else None)


def _joined(action: Action, row: Action) -> Action:
    """The same action with one more row, which is older."""
    same = row.batch_id == action.batch_id
    return replace(
        action,
        event=row.event,
        first=row.at,
        commands=action.commands + row.commands,
        batch_id=action.batch_id if same else None,
    )


def _end_of(action: Action) -> Cursor:
    return Cursor(action.first or action.at, action.event)

"""What a schedule is: as it is declared, as the database keeps it, and which of its due times are fired."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Any, Literal
from uuid import UUID, uuid5

import msgspec

from busload.commands.command import CommandStatus
from busload.handlers.registry import DUE
from busload.schedules.rule import Rule

NAMESPACE = UUID("6f0c4f1e-7d55-5b43-9a3c-8d8f1a1f5a10")
"""Ids of commands are made from it, the name of the schedule and the due time: each due time has its own."""

SCHEDULE_HEADER, DUE_HEADER = "busload-schedule", "busload-due-at"
"""Headers of a command that a schedule sends: the name of the schedule, and the due time in ISO format."""

MOST_AT_ONCE = 1000
"""Due times of a schedule that are fired, or counted as skipped, at once."""

CatchUpName = Literal["skip", "one", "all"]


class CatchUp(StrEnum):
    """What happens to due times that were missed: nobody was there to fire them, or the schedule was paused."""

    SKIP = "skip"
    """They are left out."""
    ONE = "one"
    """The newest one is fired, unless a due time that is not missed is fired now."""
    ALL = "all"
    """Each is fired, the newest `catch_up_limit` of them."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done about missed due times. A due time is missed if nobody has fired it `missed_after` it was due."""

    catch_up: CatchUp = CatchUp.ONE
    limit: int = 100
    missed_after: timedelta = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Decision:
    """Which due times are fired now, and when the schedule is due next."""

    fires: list[datetime]
    next_due_at: datetime | None
    skipped: int = 0
    """How many due times are left out, up to `MOST_AT_ONCE`."""


def decide(rule: Rule, policy: Policy, due_at: datetime, now: datetime, room: int = MOST_AT_ONCE) -> Decision:
    """Decide about a schedule that is due since `due_at`; `room` is how many due times may be fired at once.

    If there are more, the schedule stays due: the next look fires the others.
    """
    border = now - policy.missed_after
    if due_at >= border:
        wanted, missed = [due_at, *rule.newest(due_at, now, MOST_AT_ONCE)], 0
    else:
        on_time = rule.newest(border, now, MOST_AT_ONCE)
        kept = policy.limit if policy.catch_up is CatchUp.ALL else 1
        caught_up = rule.newest(due_at, border, kept)
        if len(caught_up) < kept:
            caught_up.insert(0, due_at)
        if policy.catch_up is CatchUp.SKIP or (policy.catch_up is CatchUp.ONE and on_time):
            caught_up = []
        count = 1 + sum(1 for _ in islice(rule.between(due_at, border), MOST_AT_ONCE - 1))
        missed = count if count == MOST_AT_ONCE else count - len(caught_up)
        wanted = [*caught_up, *on_time]
    fires = wanted[:room]
    if len(fires) < len(wanted):
        return Decision(fires, wanted[room], missed)
    return Decision(fires, rule.next(now), missed)


def key_of(name: str, due_at: datetime) -> str:
    """The task key of a due time: `nightly-billing@2026-03-29T01:00:00Z`."""
    return f"{name}@{due_at.astimezone(UTC).replace(tzinfo=None).isoformat()}Z"


def command_id_of(name: str, due_at: datetime) -> UUID:
    """The id of the command of a due time: always the same one."""
    return uuid5(NAMESPACE, key_of(name, due_at))


def batch_id_of(command_id: UUID) -> UUID:
    """The id of the batch that the planner of a due time creates, by the id of the command that plans it."""
    return uuid5(NAMESPACE, f"batch {command_id}")


class ScheduledCommand(msgspec.Struct, frozen=True):
    """The command that a schedule sends at each due time, as the database keeps it."""

    command_type: str
    data: msgspec.Raw
    reply_to: str | None = None
    correlation_id: UUID | None = None
    priority: int = 0
    max_attempts: int | None = None
    headers: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as it is declared in code."""

    name: str
    domain: str
    rule: Rule
    command: str
    """The command that it sends, as JSON text."""
    policy: Policy = field(default_factory=Policy)
    expires_in: timedelta | None = None

    @property
    def declaration(self) -> str:
        """A fingerprint of all of it: two releases that declare the same have the same."""
        parts = (self.domain, self.rule.to_json(), self.command, self.policy, self.expires_in)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]

    def next_times(self, count: int = 5, *, after: datetime | None = None) -> list[datetime]:
        """The next due times after `after`, or after now, in the time zone of the schedule."""
        return next_times(self.rule, count, after)


def next_times(rule: Rule, count: int, after: datetime | None = None) -> list[datetime]:
    """The next due times after `after`, or after now, in the time zone of the rule."""
    from busload.schedules.rule import zone

    place = zone(rule.timezone)
    return [due.astimezone(place) for due in islice(rule.after(after or datetime.now(UTC)), count)]


@dataclass(frozen=True, slots=True)
class ScheduleMetadata:
    """A schedule as the database keeps it."""

    name: str
    domain: str
    command_type: str
    """The type of the command that it sends. A planner has a type of its own."""
    data: Any
    when: str
    """A cron expression, or an interval."""
    timezone: str
    next_due_at: datetime | None
    """None if it has ended."""
    last_due_at: datetime | None
    """The due time that was fired last."""
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    catch_up: CatchUp
    catch_up_limit: int
    missed_after: timedelta
    expires_in: timedelta | None
    starts_at: datetime | None
    ends_at: datetime | None
    declared_at: datetime
    """When a release has declared it as it is now."""
    priority: int
    max_attempts: int | None
    reply_to: str | None
    headers: dict[str, str] | None
    next_times: tuple[datetime, ...]
    """The next due times, in the time zone of the schedule; as if it were not paused."""
    overdue: bool
    """Whether it is due for so long that its due time counts as missed: no worker is there to fire it."""

    @property
    def planned(self) -> bool:
        """Whether a planner makes a batch of each due time."""
        return self.command_type.startswith(DUE)


class FireType(StrEnum):
    """Why there is a row in the history of a schedule."""

    DUE = "DUE"
    TRIGGERED = "TRIGGERED"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True, slots=True)
class Fire:
    """A row in the history of a schedule: a due time that was fired, a trigger, or due times that were left out."""

    schedule: str
    type: FireType
    due_at: datetime
    """When it was due; of a trigger, when it was triggered; of skipped due times, the first of them."""
    fired_at: datetime
    domain: str
    command_id: UUID | None
    """The command that was sent; None if due times were skipped."""
    batch_id: UUID | None
    """The batch that its planner has created; None if there is none: before that, and if nothing was planned."""
    status: CommandStatus | None
    """How far the command has come; None if it was removed, or none was sent."""
    finished_at: datetime | None
    operator: str | None
    """Who has triggered it."""
    skipped: int
    """How many due times were left out; 1,000 stands for as many or more."""

    @property
    def late(self) -> timedelta:
        """How long after its due time it was fired."""
        return self.fired_at - self.due_at

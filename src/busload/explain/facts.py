"""The facts behind an explanation: where commands are, and what goes on around them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from busload.batches.forecast import Forecast
from busload.commands.command import CommandStatus
from busload.limits.pause import Pause

ENDED = (CommandStatus.COMPLETED, CommandStatus.FAILED, CommandStatus.CANCELED)

LONG = timedelta(seconds=30)
"""An attempt is never called long before this time."""
LONG_WITHOUT_COMPARISON = timedelta(minutes=10)
"""If no attempt has ended that could be compared, an attempt is called long from this time on."""
MUCH_LONGER = 10
"""An attempt is called long from this many times the usual on."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Commands of one priority that any worker could take."""

    priority: int
    count: int
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Attempts that failed alike, and one of their commands."""

    count: int
    error_type: str | None
    error_code: str | None
    message: str | None
    command_id: UUID


@dataclass(frozen=True, slots=True)
class Waiting:
    """Commands that are not due, all for one reason: RUN_AT, RETRY, NO_HANDLER, RATE_LIMITED, LIMITED or HELD.

    What is HELD is due at no time.
    """

    reason: str
    count: int
    since: datetime | None
    next_at: datetime | None
    last_at: datetime | None
    failures: tuple[Failure, ...] = ()
    command_types: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    ordered: bool = False
    """Of LIMITED: whether all of them wait for their predecessors."""


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """Commands in the outbox for one broker, all for one reason. If the reason is None, no round has failed yet."""

    transport: str
    reason: str | None
    count: int
    since: datetime
    rounds: int
    error: str | None
    next_try: datetime


@dataclass(frozen=True, slots=True)
class Barrier:
    """The oldest command of a domain that is not published yet, if others wait behind it: the domain runs in order."""

    command_id: UUID
    transport: str
    since: datetime
    rounds: int
    error: str | None
    behind: int
    """Ready commands that wait behind it, of those that are asked about."""


@dataclass(frozen=True, slots=True)
class Running:
    """Commands that one worker holds; `long` of them have run for much longer than usual."""

    worker: str | None
    count: int
    since: datetime
    seen_at: datetime | None
    lease_ends_at: datetime | None
    lost: bool
    long: int = 0


@dataclass(frozen=True, slots=True)
class Parked:
    """Commands in troubleshooting for the same cause, and one of them."""

    count: int
    since: datetime
    reason: str
    error_type: str | None
    error_code: str | None
    message: str | None
    command_id: UUID
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where the commands are that have not ended."""

    ready: tuple[Ready, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    running: tuple[Running, ...] = ()
    parked: tuple[Parked, ...] = ()
    other_parked: int = 0
    """Commands in troubleshooting for causes that are not listed."""
    unconfirmed: tuple[Unconfirmed, ...] = ()

    @property
    def count(self) -> int:
        places = (self.ready, self.waiting, self.running, self.parked, self.unconfirmed)
        return sum(part.count for parts in places for part in parts) + self.other_parked

    def __add__(self, other: Places) -> Places:
        return Places(
            self.ready + other.ready,
            self.waiting + other.waiting,
            self.running + other.running,
            self.parked + other.parked,
            self.other_parked + other.other_parked,
            self.unconfirmed + other.unconfirmed,
        )


@dataclass(frozen=True, slots=True)
class Hold:
    """Since when a batch is held, what holds it, which operator, if it is one, and why."""

    since: datetime
    reason: str
    operator: str | None
    note: str | None


@dataclass(frozen=True, slots=True)
class Canary:
    """How many commands of a batch run before all others, how many have completed, and by when they are to."""

    size: int | None
    completed: int | None
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session that has had a snapshot for long, and how many dead rows of the queue are kept meanwhile."""

    pid: int
    application: str
    since: datetime
    dead: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The domain of the commands: who serves it, and what else it has to do."""

    workers: int
    """Living workers that serve the domain."""
    last_seen: datetime | None = None
    """When the last worker that served the domain was seen."""
    anybody: bool = True
    """Whether any worker lives: each one takes back what dead workers held, whatever domains it serves."""
    pause: Pause | None = None
    ahead: int = 0
    """Ready commands of others that have a higher priority than the lowest of ours."""
    ahead_priority: int | None = None
    """The highest priority among them."""
    usual: timedelta | None = None
    """How long an attempt takes, on average of those that have ended."""
    ordered: bool = False
    """Whether the domain is claimed in the order of sending."""
    barrier: Barrier | None = None
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A batch, or a command, and everything that may be in its way."""

    now: datetime
    domain: str
    batch_id: UUID | None
    command_id: UUID | None = None
    """None for a batch."""
    status: str
    created_at: datetime
    canceled_at: datetime | None = None
    """When the batch was canceled."""
    stopping_since: datetime | None = None
    """When the command was asked to stop."""
    hold: Hold | None = None
    """What holds the batch, if it is held."""
    canary: Canary = Canary(None, None, None)
    """The canary of the batch, if it has one."""
    forecast: Forecast | None = None
    """When the batch will be done, if it has not ended."""
    total: int = 1
    ended: int
    places: Places = Places()
    around: Surroundings = Surroundings(workers=0)

    started_at: datetime | None = None
    sealed_at: datetime | None = None
    completed_at: datetime | None = None
    parts: tuple[Facts, ...] = ()
    """For a batch with commands that run in other domains than its own: the same facts for each domain by itself."""
    of_jobs: bool = False
    """Whether the batch counts jobs."""
    batch_domain: str | None = None
    """The domain of the batch, if these are the facts for another one."""
    callback: Facts | None = None
    """The command that a completed batch has sent."""

    command_type: str | None = None
    events: int | None = None
    """How many events the command holds, if it is a group of a buffer."""

    @property
    def remaining(self) -> int:
        return self.total - self.ended

    @property
    def finished(self) -> bool:
        """A batch is finished when it has completed and its callback, if it has one, has ended."""
        if self.command_id is not None:
            return not self.remaining
        return self.completed_at is not None and (self.callback is None or self.callback.finished)


def longer_than(usual: timedelta | None) -> timedelta:
    """Return the time from which on a running attempt is called long."""
    return LONG_WITHOUT_COMPARISON if usual is None else max(LONG, MUCH_LONGER * usual)

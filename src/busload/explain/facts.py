"""The facts behind an explanation, read at one moment: where commands are, and what goes on around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from busload.batches.forecast import Forecast, read_forecast
from busload.commands.command import CommandStatus
from busload.errors import BatchNotFoundError, CommandNotFoundError
from busload.limits.pause import Pause
from busload.postgres.plan import Plan, Script, execute, many, one
from busload.postgres.statements import statements

SQL = statements(__name__)

ONE_MOMENT = b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
"""All statements that follow see the same state, so that their counts add up."""

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


def read_batch(domain: str, batch_id: UUID) -> Plan[Facts]:
    """Needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    return (yield from batch_facts(domain, batch_id))


def batch_facts(domain: str, batch_id: UUID) -> Plan[Facts]:
    """What a transaction that sees one moment finds about a batch."""
    rows = yield from execute(SQL.batch, domain=domain, batch_id=batch_id)
    if not rows:
        raise BatchNotFoundError(domain, batch_id)
    now, status, total, ended, created_at, started_at, sealed_at, canceled_at, completed_at, callback_id, *rest = rows[
        0
    ]
    hold, ids, canary = _hold(*rest[:4]), rest[4:6], Canary(*rest[6:9])
    of_jobs, outlook = rest[9:]
    facts = Facts(
        now=now,
        domain=domain,
        batch_id=batch_id,
        status=status,
        total=total,
        ended=ended,
        created_at=created_at,
        started_at=started_at,
        sealed_at=sealed_at,
        canceled_at=canceled_at,
        completed_at=completed_at,
        hold=hold,
        canary=canary,
        of_jobs=of_jobs,
        forecast=read_forecast(outlook),
    )
    if completed_at is None:
        return (yield from _with_places_of_all_domains(facts, *ids))
    return replace(facts, callback=(yield from command_facts(domain, callback_id)) if callback_id else None)


def read_command(domain: str, command_id: UUID) -> Plan[Facts]:
    """Needs a transaction of its own."""
    yield Script(ONE_MOMENT)
    facts = yield from command_facts(domain, command_id)
    if facts is None:
        raise CommandNotFoundError(domain, command_id)
    return facts


def command_facts(domain: str, command_id: UUID) -> Plan[Facts | None]:
    """What a transaction that sees one moment finds about a command; None if there is no such command."""
    rows = yield from execute(SQL.command, domain=domain, command_id=command_id)
    if not rows:
        return None
    now, id, batch_id, command_type, status, created_at, canceled_at, stopping_since, lease_id, items, *rest = rows[0]
    facts = Facts(
        now=now,
        domain=domain,
        batch_id=batch_id,
        command_id=command_id,
        command_type=command_type,
        status=status,
        ended=int(status in ENDED),
        created_at=created_at,
        canceled_at=canceled_at,
        stopping_since=stopping_since,
        hold=_hold(*rest[:4]),
        canary=Canary(*rest[4:]),
        events=int(items) if items is not None and items.isdecimal() else None,
    )
    return facts if facts.ended else (yield from _with_places(facts, id, id, lease_id))


def _with_places_of_all_domains(facts: Facts, first: int | None, last: int | None) -> Plan[Facts]:
    found = yield from many(str, SQL.domains, batch_id=facts.batch_id, first=first, last=last)
    if set(found) <= {facts.domain}:
        return (yield from _with_places(facts, first, last))
    parts: list[Facts] = []
    for domain in found:
        parts.append((yield from _with_places(replace(facts, domain=domain, batch_domain=facts.domain), first, last)))
    places, own = Places(), next((part for part in parts if part.domain == facts.domain), parts[0])
    for part in parts:
        places += part.places
    return replace(facts, parts=tuple(parts), places=places, around=own.around)


def _hold(since: datetime | None, reason: str, operator: str | None, note: str | None) -> Hold | None:
    return None if since is None else Hold(since, reason, operator, note)


def _with_places(facts: Facts, first: int | None, last: int | None, lease_id: UUID | None = None) -> Plan[Facts]:
    """Add where the commands from the first to the last id in this domain are, and what goes on around them."""
    usual = yield from _usual(facts, first)
    here = {"batch_id": facts.batch_id, "domain": facts.domain, "first": first, "last": last}
    ready = yield from many(Ready, SQL.ready, **here)
    waiting = []
    for row in (yield from execute(SQL.waiting, **here)):
        waiting.append((yield from _with_its_cause(Waiting(*row), here, facts.command_type)))
    running = []
    if facts.command_id is None or lease_id is not None:
        running = yield from many(Running, SQL.running, longer_than=longer_than(usual), lease_id=lease_id, **here)
    parked = yield from execute(SQL.parked, **here)
    together = parked[0][-1] if parked else 0
    unconfirmed = yield from many(Unconfirmed, SQL.unconfirmed, **here)
    causes = tuple(Parked(*row[:-1]) for row in parked)
    others = together - sum(cause.count for cause in causes)
    places = Places(tuple(ready), tuple(waiting), tuple(running), causes, others, tuple(unconfirmed))
    around = yield from _surroundings(facts, ready, usual)
    if around.ordered and ready:
        around = replace(around, barrier=(yield from one(Barrier, SQL.barrier, **here)))
    return replace(facts, places=places, around=around)


def _with_its_cause(waiting: Waiting, here: dict[str, Any], command_type: str | None) -> Plan[Waiting]:
    """Add why the commands wait. Commands that wait for their run_at need no cause."""
    if waiting.reason == "RETRY":
        rows = yield from execute(SQL.failures, **here)
        since = min((row[-1] for row in rows), default=waiting.since)
        return replace(waiting, since=since, failures=tuple(Failure(*row[:-1]) for row in rows))
    if waiting.reason == "NO_HANDLER":
        [(types, since)] = yield from execute(SQL.unknown_types, command_type=command_type, **here)
        return replace(waiting, since=since, command_types=tuple(types))
    if waiting.reason == "RATE_LIMITED":
        [(limits, since)] = yield from execute(SQL.limits, **here)
        return replace(waiting, since=since, limits=tuple(limits))
    if waiting.reason == "LIMITED":
        [(limits, since, ordered)] = yield from execute(SQL.concurrency_limits, **here)
        return replace(waiting, since=since, limits=tuple(limits), ordered=ordered)
    return waiting


def _surroundings(facts: Facts, ready: Sequence[Ready], usual: timedelta | None) -> Plan[Surroundings]:
    domain = facts.domain
    lowest = min((one.priority for one in ready), default=None)
    own_batch = facts.batch_id if facts.command_id is None else None
    found = yield from execute(SQL.surroundings, domain=domain, priority=lowest, batch_id=own_batch)
    [(workers, last_seen, anybody, ordered, since, operator, reason, ahead, highest)] = found
    pause = Pause(domain, since, operator, reason) if since else None
    return Surroundings(workers, last_seen, anybody, pause, ahead, highest, usual, ordered)


def _usual(facts: Facts, first: int | None) -> Plan[timedelta | None]:
    """How long an attempt takes: in its batch; if nothing has ended there, of its type; otherwise in its domain."""
    here = {"batch_id": facts.batch_id, "domain": facts.domain, "first": first, "command_type": facts.command_type}
    usual: timedelta | None
    [(usual,)] = yield from execute(SQL.usual, **here)
    return usual

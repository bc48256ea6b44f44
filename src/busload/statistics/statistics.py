"""How much came in, ended and waited, per minute and domain: written by workers, read as a series of points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from busload.commands.checks import wrong
from busload.errors import Problem
from busload.limits import pause
from busload.limits.pause import DomainOverview
from busload.postgres.plan import ONE_MOMENT, Plan, execute, many
from busload.postgres.statements import statements

SQL = statements(__name__)

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
MINUTES_FOR, HOURS_FOR = timedelta(days=2), timedelta(days=90)
"""How long minutes are kept, and hours."""
MOST_POINTS = 5000
LATEST_LOOK = 15.0
"""Seconds after the end of a minute in which a look at the places still tells how the minute ended."""
FORGET_AT_ONCE = 1000
"""Rows that become too old, in one statement."""


@dataclass(frozen=True, slots=True)
class Point:
    """What happened in one step of a series, and what was where at its end."""

    at: datetime
    """The beginning of the step, in UTC."""
    sent: int
    """Commands that came in during the step."""
    completed: int
    failed: int
    canceled: int
    retried: int
    """Attempts that failed and are tried again."""
    troubled: int
    """Commands that went to troubleshooting."""
    seconds: float
    """The time that handlers took together. Each command of a bulk call counts the time of the call."""
    ready: int | None
    """Commands in this place at the end of the step, as the next ones; None if nobody looked."""
    scheduled: int | None
    running: int | None
    in_troubleshooting: int | None
    unpublished: int | None
    oldest_ready: float | None
    """Seconds that the first command has waited that is ready and was not tried yet; None if there is none."""


@dataclass(slots=True)
class Counts:
    """What was counted of a domain."""

    completed: int = 0
    failed: int = 0
    canceled: int = 0
    retried: int = 0
    troubled: int = 0
    seconds: float = 0.0

    @property
    def ended(self) -> int:
        """Commands that have ended."""
        return self.completed + self.failed + self.canceled

    @property
    def attempts(self) -> int:
        """Attempts that have ended, if the counts are those of a worker."""
        return self.ended + self.retried + self.troubled

    def add(self, more: Counts) -> None:
        self.completed += more.completed
        self.failed += more.failed
        self.canceled += more.canceled
        self.retried += more.retried
        self.troubled += more.troubled
        self.seconds += more.seconds


class Places(NamedTuple):
    """What was where at the end of a minute."""

    ready: int
    scheduled: int
    running: int
    in_troubleshooting: int
    unpublished: int
    oldest_ready: float | None

    @property
    def commands(self) -> int:
        return self.ready + self.scheduled + self.running + self.in_troubleshooting + self.unpublished


class Minute(NamedTuple):
    """What was counted in a minute, or in an hour if it is long ago."""

    at: datetime
    counts: Counts
    places: Places | None
    """None if nobody looked."""


def record(counted: Mapping[str, Counts], *, ago: float) -> Plan[None]:
    """Add what was settled within the last `ago` seconds, by domain."""
    rows = counted.values()
    yield from execute(
        SQL.record,
        ago=ago,
        domains=list(counted),
        completed=[each.completed for each in rows],
        failed=[each.failed for each in rows],
        canceled=[each.canceled for each in rows],
        retried=[each.retried for each in rows],
        troubled=[each.troubled for each in rows],
        seconds=[each.seconds for each in rows],
    )


def look(latest: float = LATEST_LOOK) -> Plan[float]:
    """Note what is in each place at the end of a minute, if nobody else does; return the seconds since that end.

    After so many seconds it is too late for that minute. Whoever looks also tidies up what is older. Needs a
    transaction.
    """
    [(taken, seconds)] = yield from execute(SQL.take_turn)
    if taken and seconds <= latest:
        yield from execute(SQL.look)
        yield from tidy()
    return float(seconds)


def tidy() -> Plan[None]:
    """Make few rows of many: of a minute that is over, of an hour that is long ago, and of what is too old."""
    yield from execute(SQL.merge_minutes)
    yield from execute(SQL.merge_hour, minutes_for=MINUTES_FOR)
    yield from execute(SQL.forget, hours_for=HOURS_FOR, limit=FORGET_AT_ONCE)


def series(domain: str | None, *, last: timedelta, step: timedelta) -> Plan[list[Point]]:
    """Read the points of a series; needs a transaction of its own."""
    yield ONE_MOMENT
    [(now,)] = yield from execute(SQL.now)
    return (yield from series_until(now, (yield from pause.domains()), domain, last=last, step=step))


def series_until(
    now: datetime, domains: Sequence[DomainOverview], domain: str | None, *, last: timedelta, step: timedelta
) -> Plan[list[Point]]:
    """Read the points of a series for somebody who has looked at the places in the same transaction."""
    starts = steps(now, last=last, step=step)
    minutes = yield from many(_minute, SQL.minutes, since=starts[0], domain=domain)
    return points(minutes, _places_now(domains, domain, now), starts, step)


def totals() -> Plan[dict[str, Counts]]:
    """What was ever counted, by domain: these numbers never fall."""
    rows = yield from execute(SQL.totals)
    return {domain: Counts(*counts) for domain, *counts in rows}


def wrong_steps(last: object, step: object) -> list[Problem]:
    """What is wrong with a series that cannot be told from what is kept."""
    if not isinstance(step, timedelta) or step < MINUTE or step % MINUTE:
        return [wrong(step, "step", "a timedelta of whole minutes, for example timedelta(minutes=5)")]
    if not isinstance(last, timedelta) or not step <= last <= HOURS_FOR:
        return [wrong(last, "last", f"a timedelta from one step ({step}) to {HOURS_FOR.days} days")]
    if last > MINUTES_FOR and step % HOUR:
        wanted = f"whole hours, as minutes are kept for {MINUTES_FOR.days} days and last is {last}"
        return [wrong(step, "step", wanted)]
    if last / step > MOST_POINTS:
        return [wrong(step, "step", f"a longer one: a series has at most {MOST_POINTS:,} points")]
    return []


def steps(now: datetime, *, last: timedelta, step: timedelta) -> list[datetime]:
    """Where each step begins, oldest first; the last one is under way."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    newest = epoch + (now - epoch) // step * step
    count = -(-last // step)
    return [newest - step * back for back in reversed(range(count))]


def points(minutes: Iterable[Minute], now: Places, starts: Sequence[datetime], step: timedelta) -> list[Point]:
    """Put minutes together to steps.

    What came in by some time is what has ended until then and what the places hold. It never falls: while nobody has
    looked at the places, or a worker has not told yet what it has settled, it stays.
    """
    sent, counts = [0] * len(starts), [Counts() for _ in starts]
    places: list[Places | None] = [None] * len(starts)
    known = ended = 0
    for minute in minutes:
        index = (minute.at - starts[0]) // step
        if index < 0 and minute.places is not None:  # the last look before the series
            known, ended = minute.places.commands, 0
            continue
        ended += minute.counts.ended
        before, known = known, max(known, ended + (minute.places.commands if minute.places else 0))
        if index >= 0:
            counts[index].add(minute.counts)
            sent[index] += known - before
            places[index] = minute.places or places[index]
    sent[-1] += max(0, ended + now.commands - known)
    places[-1] = now
    return [
        Point(
            *(at, came_in, each.completed, each.failed, each.canceled, each.retried, each.troubled, each.seconds),
            *(seen or (None,) * len(Places._fields)),
        )
        for at, came_in, each, seen in zip(starts, sent, counts, places, strict=True)
    ]


def _minute(at: datetime, *row: object) -> Minute:
    counts, looked, places = row[:6], row[6], row[7:]
    return Minute(at, Counts(*counts), Places(*places) if looked else None)  # type: ignore[arg-type]


def _places_now(domains: Iterable[DomainOverview], domain: str | None, now: datetime) -> Places:
    asked = [each for each in domains if domain in (None, each.domain)]
    waits = [now - each.oldest_ready for each in asked if each.oldest_ready is not None]
    return Places(
        sum(each.ready for each in asked),
        sum(each.scheduled for each in asked),
        sum(each.running for each in asked),
        sum(each.in_troubleshooting for each in asked),
        sum(each.unpublished for each in asked),
        max(0.0, max(waits).total_seconds()) if waits else None,
    )

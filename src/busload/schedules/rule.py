"""When a schedule is due: by a cron expression, by an interval or by a calendar. Pure functions of a rule and a time.

The packages for cron expressions and time zones are imported when the first rule is made: most programs have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from heapq import merge
from itertools import takewhile
from typing import Any

from busload.commands.checks import shown, wrong, wrong_time
from busload.errors import InvalidCommandError, Problem
from busload.settings import LONGEST

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST = timedelta(seconds=1)
"""The shortest interval."""

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
SHORTHANDS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
FIELDS = ("second", "minute", "hour", "day of the month", "month", "day of the week")
WANTED = ("0 to 59", "0 to 59", "0 to 23", "1 to 31 or L", "1 to 12 or jan to dec", "0 to 7 or sun to sat")
"""What may stand in each of these fields, alone or in a list, a range or a step."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """Times of the day, on some days: `Calendar(at="02:30", weekdays=["mon", "fri"])`.

    `at` is a `datetime.time`, a text such as "02:30", or a list of these. `weekdays` are "mon" to "sun",
    `days` are days of the month from 1 to 31, or -1 for the last one, and `months` are 1 to 12. Where they are left
    out, every day counts. A calendar has `weekdays` or `days`, not both.
    """

    at: time | str | Iterable[time | str]
    weekdays: str | Iterable[str] | None = None
    days: int | Iterable[int] | None = None
    months: int | Iterable[int] | None = None

    def expressions(self) -> tuple[str, ...]:
        """The calendar as cron expressions, one for each time of the day. What cannot be is refused."""
        problems: list[Problem] = []
        times = sorted({found for one in _listed(self.at) if (found := _time_of(one, problems)) is not None})
        if not times and not problems:
            problems.append(wrong(self.at, "calendar/at", 'a time of the day, such as "02:30"'))
        weekdays = _field(self.weekdays, "weekdays", dict.fromkeys(WEEKDAYS), f"one of {', '.join(WEEKDAYS)}", problems)
        days = _field(self.days, "days", dict.fromkeys((-1, *range(1, 32))), "1 to 31, or -1 for the last", problems)
        months = _field(self.months, "months", dict.fromkeys(range(1, 13)), "a month from 1 to 12", problems)
        if self.weekdays is not None and self.days is not None:
            message = "found weekdays and days, wanted one of them; a cron expression can have both"
            problems.append(Problem("INVALID_SCHEDULE", "/calendar", message))
        if problems:
            raise InvalidCommandError(problems, writes=False)
        days = days.replace("-1", "L")
        return tuple(f"{at.minute} {at.hour} {days} {months} {weekdays.upper()}" for at in times)


@dataclass(frozen=True, slots=True)
class Rule:
    """When a schedule is due. `expressions` are of cron; without them it is due each `every`, counted from `start`."""

    expressions: tuple[str, ...] = ()
    timezone: str = "UTC"
    every: timedelta | None = None
    starts_at: datetime | None = None
    """It is never due before this time."""
    ends_at: datetime | None = None
    """It is never due after this time."""

    def __str__(self) -> str:
        if self.every is not None:
            return f"every {self.every}"
        return " and ".join(self.expressions)

    def after(self, moment: datetime) -> Iterator[datetime]:
        """The due times after this moment, in order and in UTC, without end unless the schedule has one."""
        if self.starts_at is not None and moment < self.starts_at:
            moment = self.starts_at - timedelta.resolution
        times = self._each(moment) if self.every is not None else self._by_clock(moment)
        ends_at = self.ends_at
        return times if ends_at is None else takewhile(lambda due: due <= ends_at, times)

    def next(self, moment: datetime) -> datetime | None:
        """The first due time after this moment; None if there is none."""
        return next(self.after(moment), None)

    def between(self, moment: datetime, until: datetime) -> Iterator[datetime]:
        """The due times after `moment`, up to `until`."""
        return takewhile(lambda due: due <= until, self.after(moment))

    def newest(self, moment: datetime, until: datetime, count: int) -> list[datetime]:
        """The last `count` due times between these, in order. It does not walk through all the others before them."""
        window = self.every * count if self.every is not None else timedelta(minutes=10)
        while True:
            start = until - window if until - moment > window else moment
            found = deque(self.between(start, until), maxlen=count)
            if len(found) == count or start == moment:
                return list(found)
            window *= 4

    def to_json(self) -> dict[str, Any]:
        """What the database keeps; `read` understands it."""
        return {
            "expressions": list(self.expressions),
            "timezone": self.timezone,
            "every": None if self.every is None else self.every // timedelta.resolution,
            "starts_at": None if self.starts_at is None else self.starts_at.astimezone(UTC).isoformat(),
            "ends_at": None if self.ends_at is None else self.ends_at.astimezone(UTC).isoformat(),
        }

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Rule:
        """A rule as the database keeps it. Raises what it raises if the rule is of a release to come."""
        every, starts_at, ends_at = stored["every"], stored["starts_at"], stored["ends_at"]
        return cls(
            tuple(stored["expressions"]),
            stored["timezone"],
            None if every is None else timedelta(microseconds=every),
            None if starts_at is None else datetime.fromisoformat(starts_at),
            None if ends_at is None else datetime.fromisoformat(ends_at),
        )

    def _each(self, moment: datetime) -> Iterator[datetime]:
        every, start = self.every, self.starts_at or EPOCH
        assert every is not None
        due = start.astimezone(UTC) + ((moment - start) // every + 1) * every
        while True:
            yield due
            due += every

    def _by_clock(self, moment: datetime) -> Iterator[datetime]:
        last = moment
        for due in merge(*(_of_cron(expression, self.timezone, moment) for expression in self.expressions)):
            # Two expressions may name the same time. The first pass through the repeated hour of autumn is before a
            # moment in the second one.
            if due > last:
                yield due
                last = due


def rule(
    *,
    cron: object = None,
    every: object = None,
    calendar: object = None,
    timezone: object = "UTC",
    starts_at: object = None,
    ends_at: object = None,
    now: datetime | None = None,
) -> Rule:
    """Check how somebody says when a schedule is due. What can never be due is refused."""
    problems = _wrong_form(cron, every, calendar)
    for name, moment in (("starts_at", starts_at), ("ends_at", ends_at)):
        if moment is not None:
            problems += wrong_time(moment, name)
    problems += _wrong_zone(timezone)
    if every is not None and timezone != "UTC":
        message = f"found {shown(timezone)} with every, which counts elapsed time; leave the zone out, or use cron"
        problems.append(Problem("INVALID_SCHEDULE", "/timezone", message))
    if problems:
        raise InvalidCommandError(problems, writes=False)
    expressions: tuple[str, ...] = ()
    if isinstance(cron, str):
        expressions = (_checked(SHORTHANDS.get(cron.strip().lower(), cron)),)
    elif isinstance(calendar, Calendar):
        expressions = tuple(_checked(expression, calendar) for expression in calendar.expressions())
    assert isinstance(timezone, str)
    assert isinstance(every, timedelta | None)
    assert isinstance(starts_at, datetime | None)
    assert isinstance(ends_at, datetime | None)
    made = Rule(expressions, timezone, every, starts_at, ends_at)
    if made.next(now or datetime.now(UTC)) is None:
        if ends_at is not None:
            message = f"found {ends_at.isoformat()}, by which the schedule is never due again; wanted a later time"
            raise InvalidCommandError([Problem("INVALID_SCHEDULE", "/ends_at", message)], writes=False)
        raise _never(cron if cron is not None else calendar, "cron" if cron is not None else "calendar")
    return made


OF_THE_HOST = frozenset(("localtime", "posixrules", "Factory"))
"""Names that mean another zone on each host, or none."""


def zone(name: str) -> tzinfo:
    """The time zone of this name. UTC is itself: nothing needs to be looked up."""
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    return ZoneInfo(name)


def _wrong_form(cron: object, every: object, calendar: object) -> list[Problem]:
    forms = [name for name, form in (("cron", cron), ("every", every), ("calendar", calendar)) if form is not None]
    if len(forms) != 1:
        found = " and ".join(forms) or "none of them"
        message = f"found {found}, wanted exactly one of cron, every and calendar"
        return [Problem("INVALID_SCHEDULE", f"/{forms[0] if forms else 'cron'}", message)]
    if cron is not None and not isinstance(cron, str):
        return [wrong(cron, "cron", 'a cron expression, such as "0 2 * * *"')]
    if calendar is not None and not isinstance(calendar, Calendar):
        return [wrong(calendar, "calendar", 'a Calendar, such as Calendar(at="02:30")')]
    if every is not None and (not isinstance(every, timedelta) or not SHORTEST <= every <= LONGEST):
        return [wrong(every, "every", f"a timedelta from 1 second to {LONGEST.days} days")]
    return []


def _wrong_zone(timezone: object) -> list[Problem]:
    if isinstance(timezone, str) and timezone and timezone not in OF_THE_HOST:
        try:
            zone(timezone)
            return []
        except (LookupError, ValueError, OSError):
            pass
    message = f'found {shown(timezone)}, wanted the name of a time zone, such as "Europe/Paris" or "UTC"'
    likely = _alike(timezone) if isinstance(timezone, str) else None
    return [Problem("UNKNOWN_TIME_ZONE", "/timezone", f"{message}; did you mean {likely!r}" if likely else message)]


LONGEST_ABBREVIATION = 4
"""Letters of names such as CEST. All of these are alike, and mean something else."""


def _alike(name: str) -> str | None:
    from difflib import get_close_matches
    from zoneinfo import available_timezones

    known = {zone.lower(): zone for zone in available_timezones()}
    cities = {zone.rpartition("/")[2].lower(): zone for zone in available_timezones()}
    asked = name.lower().replace(" ", "_")
    for names in (known, cities):
        if asked in names:
            return names[asked]
    if len(asked) <= LONGEST_ABBREVIATION:  # CEST is not nearly EST
        return None
    for names in (known, cities):
        if found := get_close_matches(asked, names, 1, 0.8):
            return names[found[0]]
    return None


def _checked(expression: str, calendar: Calendar | None = None) -> str:
    """The expression with single spaces. One that cannot be read, or never comes, is refused.

    Who wrote a calendar has never seen the expression that is made from it, and is told of the calendar.
    """
    from cronsim import CronSim, CronSimError

    fields = expression.split()
    try:
        CronSim(expression, EPOCH)
    except CronSimError:
        if len(fields) not in (5, 6):
            found = f"found {shown(expression)}, which has {len(fields)} fields"
            wanted = "wanted minute, hour, day of the month, month and day of the week; or six, with seconds first"
            raise InvalidCommandError([Problem("INVALID_CRON", "/cron", f"{found}; {wanted}")], writes=False) from None
        for place, field in enumerate(fields, start=6 - len(fields)):
            alone = ["*"] * 6
            alone[place] = field
            try:
                CronSim(" ".join(alone), EPOCH)
            except CronSimError:
                found = f"found {shown(expression)}, whose {FIELDS[place]} {shown(field)} cannot be read"
                message = f"{found}; wanted {WANTED[place]}, as in *, 1, 1-5, 1,3 or */2"
                raise InvalidCommandError([Problem("INVALID_CRON", "/cron", message)], writes=False) from None
        raise (_never(expression, "cron") if calendar is None else _never(calendar, "calendar")) from None
    except (AssertionError, ValueError):  # a form that the package has no word for, such as 1L/2
        message = f"found {shown(expression)}, which cannot be read"
        raise InvalidCommandError([Problem("INVALID_CRON", "/cron", message)], writes=False) from None
    return " ".join(fields)


def _never(found: object, path: str) -> InvalidCommandError:
    message = f"found {shown(found)}, which never comes; wanted days that exist"
    return InvalidCommandError([Problem("NEVER_DUE", f"/{path}", message)], writes=False)


def _of_cron(expression: str, timezone: str, moment: datetime) -> Iterator[datetime]:
    """The due times of one expression, in UTC.

    A time that the clock skips in spring comes at the end of the gap, and a time that it shows twice in autumn comes
    once: the first time. An expression whose minute or hour begins with a star, or that has seconds, goes by elapsed
    time instead: it skips what the clock skips, and comes as often as the clock shows it.
    """
    from cronsim import CronSim

    for due in CronSim(expression, moment.astimezone(zone(timezone))):
        yield due.astimezone(UTC)


def _listed(value: Any) -> list[Any]:
    if value is None or isinstance(value, str | time | int) or not isinstance(value, Iterable):
        return [value]
    return list(value)


def _time_of(value: object, problems: list[Problem]) -> time | None:
    found = value
    if isinstance(value, str):
        try:
            found = time.fromisoformat(value)
        except ValueError:
            found = None
    if isinstance(found, time) and found.tzinfo is None and not found.second and not found.microsecond:
        return found
    wanted = 'a time of the day without a zone, in whole minutes, such as "02:30"'
    problems.append(wrong(value, "calendar/at", wanted))
    return None


def _field(given: object, name: str, known: Mapping[Any, None], wanted: str, problems: list[Problem]) -> str:
    """A field of a cron expression with these values, `*` if none are given."""
    if given is None:
        return "*"
    values = [value.lower() if isinstance(value, str) else value for value in _listed(given)]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in known:
            problems.append(wrong(value, f"calendar/{name}", wanted))
    if not values:
        problems.append(wrong(given, f"calendar/{name}", f"{wanted}, or None for all"))
    order = list(known)
    return ",".join(str(value) for value in sorted({*values} & {*known}, key=order.index))

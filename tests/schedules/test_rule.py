"""When a schedule is due: cron, intervals and calendars, also where the clock is put forward or back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, settings
from hypothesis import given as for_all
from hypothesis import strategies as st

from busload.errors import InvalidCommandError
from busload.schedules.rule import Calendar, Rule, rule

ZONES = ("UTC", "Europe/Paris", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "Asia/Kathmandu")
MINUTE = timedelta(minutes=1)


def times(made: Rule, after: datetime, count: int) -> list[str]:
    return [f"{due:%m-%d %H:%M}" for due in islice(made.after(after), count)]


def test_a_time_that_the_clock_skips_in_spring_comes_at_the_end_of_the_gap() -> None:
    """In Paris it is 03:00 after 01:59 on 29 March 2026."""
    made = rule(cron="30 2 * * *", timezone="Europe/Paris")
    assert times(made, datetime(2026, 3, 28, tzinfo=UTC), 3) == ["03-28 01:30", "03-29 01:00", "03-30 00:30"]


def test_a_time_that_the_clock_shows_twice_in_autumn_comes_once() -> None:
    """In Paris it is 02:00 again after 02:59 on 25 October 2026: asked before, between and after the two."""
    made = rule(calendar=Calendar(at="02:30"), timezone="Europe/Paris")
    assert times(made, datetime(2026, 10, 24, 12, tzinfo=UTC), 2) == ["10-25 00:30", "10-26 01:30"]
    for minute in (30, 45, 59):
        assert times(made, datetime(2026, 10, 25, 0, minute, tzinfo=UTC), 1) == ["10-26 01:30"]
    for minute in (0, 15, 30, 45):
        assert times(made, datetime(2026, 10, 25, 1, minute, tzinfo=UTC), 1) == ["10-26 01:30"]


def test_an_expression_with_a_star_for_the_minute_or_hour_goes_by_elapsed_time() -> None:
    made = rule(cron="*/30 * * * *", timezone="Europe/Paris")
    for start in (datetime(2026, 3, 29, 0, tzinfo=UTC), datetime(2026, 10, 25, 0, tzinfo=UTC)):
        assert list(islice(made.after(start), 6)) == [start + nth * 30 * MINUTE for nth in range(1, 7)]


def test_a_leap_day_comes_in_leap_years_alone() -> None:
    made = rule(cron="0 0 29 2 *")
    assert [due.date() for due in islice(made.after(datetime(2096, 1, 1, tzinfo=UTC)), 2)] == [
        date(2096, 2, 29),
        date(2104, 2, 29),  # 2100 is none
    ]
    last = rule(calendar=Calendar(at=time(23, 59), days=-1, months=[2]))
    assert times(last, datetime(2027, 1, 1, tzinfo=UTC), 2) == ["02-28 23:59", "02-29 23:59"]


def test_an_interval_is_counted_from_its_start_whoever_asks_and_when() -> None:
    every = timedelta(hours=7)
    start = datetime(2026, 1, 1, 5, 30, tzinfo=timezone(timedelta(hours=2)))
    made = rule(every=every, starts_at=start)
    first = list(islice(made.after(datetime(1990, 1, 1, tzinfo=UTC)), 1000))
    assert first[0] == start
    assert first == [start + nth * every for nth in range(1000)]
    assert list(islice(made.after(first[500]), 10)) == first[501:511]
    assert rule(every=timedelta(hours=1)).next(datetime(2026, 1, 1, 5, 30, tzinfo=UTC)) == datetime(
        2026, 1, 1, 6, tzinfo=UTC
    )


def test_nothing_is_due_before_the_start_or_after_the_end() -> None:
    start, end = datetime(2030, 1, 1, 2, tzinfo=UTC), datetime(2030, 1, 3, 2, tzinfo=UTC)
    made = rule(cron="0 2 * * *", starts_at=start, ends_at=end)
    assert times(made, datetime(2026, 1, 1, tzinfo=UTC), 9) == ["01-01 02:00", "01-02 02:00", "01-03 02:00"]
    assert made.next(end) is None


def test_a_calendar_is_times_of_the_day_on_some_days() -> None:
    monday = datetime(2026, 11, 16, tzinfo=UTC)
    office = Calendar(at=["17:00", time(9), "09:00"], weekdays=["Fri", "mon"])
    assert times(rule(calendar=office), monday, 5) == [
        *("11-16 09:00", "11-16 17:00", "11-20 09:00", "11-20 17:00", "11-23 09:00")
    ]
    ends = Calendar(at="00:00", days=[1, -1], months=[1, 2])
    assert times(rule(calendar=ends), monday, 4) == ["01-01 00:00", "01-31 00:00", "02-01 00:00", "02-28 00:00"]
    assert str(rule(cron="@daily")) == str(rule(calendar=Calendar(at="00:00"))) == "0 0 * * *"


def expected(minute: str, hour: str, zone: ZoneInfo, start: datetime, days: int) -> Iterator[datetime]:
    """What a cron expression of minute and hour means, minute by minute."""
    fixed = not minute.startswith("*") and not hour.startswith("*")
    minutes = range(0, 60, int(minute[2:] or 1)) if minute.startswith("*") else [int(minute)]
    hours = range(0, 24, int(hour[2:] or 1)) if hour.startswith("*") else [int(hour)]
    if not fixed:
        for nth in range(1, days * 24 * 60):
            moment = start + nth * MINUTE
            there = moment.astimezone(zone)
            if there.minute in minutes and there.hour in hours:
                yield moment
        return
    day = start.astimezone(zone).date() - timedelta(days=1)
    for _ in range(days + 2):
        wall = datetime.combine(day, time(hours[0], minutes[0]))
        there = wall.replace(tzinfo=zone)
        while there.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != wall:  # the clock does not show it
            wall += MINUTE
            there = wall.replace(tzinfo=zone)
        yield there.astimezone(UTC)
        day += timedelta(days=1)


@settings(max_examples=80)
@for_all(
    st.sampled_from(["*", "*/15", "*/20", "0", "30", "59"]),
    st.sampled_from(["*", "*/6", "0", "1", "2", "3", "23"]),
    st.sampled_from(ZONES),
    st.sampled_from([(3, 7), (3, 28), (4, 3), (4, 23), (10, 3), (10, 24), (10, 29), (10, 31)]),
    st.integers(0, 36 * 60 - 1),
)
def test_due_times_are_those_that_a_look_at_each_minute_finds(
    minute: str, hour: str, zone: str, day: tuple[int, int], offset: int
) -> None:
    """Around the days on which clocks change in 2026, in zones of whole and half hours, also at midnight.

    Where the clock changes by half an hour, which only Lord Howe has, hours with a star may begin half an hour late.
    """
    assume(zone != "Australia/Lord_Howe" or not (minute + hour).count("*"))
    start = datetime(2026, *day, tzinfo=UTC) + offset * MINUTE
    end = start + timedelta(days=2)
    made = rule(cron=f"{minute} {hour} * * *", timezone=zone, now=start)
    wanted = {due for due in expected(minute, hour, ZoneInfo(zone), start, 2) if start < due < end}
    assert list(made.between(start, end - timedelta.resolution)) == sorted(wanted)


@settings(max_examples=50)
@for_all(
    st.sampled_from(["* * * * *", "30 2 * * *", "*/7 3 * * 1-5", "0 */5 * * *"]),
    st.sampled_from(ZONES),
    st.integers(1, 20),
    st.integers(0, 60 * 24 * 14),
)
def test_the_newest_due_times_are_the_last_of_all(cron: str, zone: str, count: int, minutes: int) -> None:
    start = datetime(2026, 10, 20, tzinfo=UTC)
    made, until = rule(cron=cron, timezone=zone, now=start), start + minutes * MINUTE
    assert made.newest(start, until, count) == list(made.between(start, until))[-count:]


def test_a_rule_is_read_as_it_was_kept() -> None:
    moment = datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    for made in (
        rule(cron="30 2 * * MON#1", timezone="Europe/Paris", starts_at=moment),
        rule(every=timedelta(seconds=90, microseconds=1), ends_at=moment),
        rule(calendar=Calendar(at=["09:00", "17:00"], days=-1)),
    ):
        assert Rule.read(made.to_json()) == made


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"cron": "0 0 30 2 *"}, "NEVER_DUE", "'0 0 30 2 *', which never comes"),
    ({"cron": "0 0 31 4,6,9,11 *"}, "NEVER_DUE", "never comes"),
    ({"calendar": Calendar(at="05:00", days=[30, 31], months=[2])}, "NEVER_DUE", "/calendar: found Calendar("),
    ({"cron": "61 * * * *"}, "INVALID_CRON", "whose minute '61' cannot be read"),
    ({"cron": "0 25 * * *"}, "INVALID_CRON", "whose hour '25' cannot be read; wanted 0 to 23, as in *, 1, 1-5"),
    ({"cron": "0 0 * * FRY"}, "INVALID_CRON", "whose day of the week 'FRY' cannot be read"),
    ({"cron": "* * *"}, "INVALID_CRON", "which has 3 fields; wanted minute, hour"),
    ({"cron": ""}, "INVALID_CRON", "which has 0 fields"),
    ({"cron": 5}, "INVALID_OPTION", "found 5, wanted a cron expression"),
    ({"cron": "@daily", "timezone": "Europe/Pariss"}, "UNKNOWN_TIME_ZONE", "did you mean 'Europe/Paris'"),
    ({"cron": "@daily", "timezone": "paris"}, "UNKNOWN_TIME_ZONE", "did you mean 'Europe/Paris'"),
    ({"cron": "@daily", "timezone": "CEST"}, "UNKNOWN_TIME_ZONE", 'such as "Europe/Paris" or "UTC".'),
    ({"cron": "@daily", "timezone": "cet"}, "UNKNOWN_TIME_ZONE", "did you mean 'CET'"),
    ({"cron": "@daily", "timezone": "../../etc/passwd"}, "UNKNOWN_TIME_ZONE", "wanted the name of a time zone"),
    ({"cron": "@daily", "timezone": "localtime"}, "UNKNOWN_TIME_ZONE", "found 'localtime', wanted the name"),
    ({"cron": "@daily", "timezone": "posixrules"}, "UNKNOWN_TIME_ZONE", "found 'posixrules', wanted the name"),
    ({"cron": "@daily", "timezone": "Factory"}, "UNKNOWN_TIME_ZONE", "found 'Factory', wanted the name"),
    ({"cron": "@daily", "timezone": None}, "UNKNOWN_TIME_ZONE", "found None"),
    ({"every": timedelta(0)}, "INVALID_OPTION", "wanted a timedelta from 1 second"),
    ({"every": timedelta(seconds=-5)}, "INVALID_OPTION", "wanted a timedelta from 1 second"),
    ({"every": timedelta(milliseconds=999)}, "INVALID_OPTION", "wanted a timedelta from 1 second"),
    ({"every": 60}, "INVALID_OPTION", "found 60, wanted a timedelta"),
    ({"every": timedelta(days=1), "timezone": "Europe/Paris"}, "INVALID_SCHEDULE", "counts elapsed time"),
    ({}, "INVALID_SCHEDULE", "wanted exactly one of cron, every and calendar"),
    ({"cron": "@daily", "every": timedelta(1)}, "INVALID_SCHEDULE", "found cron and every"),
    ({"calendar": Calendar(at="25:00")}, "INVALID_OPTION", "found '25:00', wanted a time of the day"),
    ({"calendar": Calendar(at=[])}, "INVALID_OPTION", "wanted a time of the day"),
    ({"calendar": Calendar(at=time(2, tzinfo=UTC))}, "INVALID_OPTION", "without a zone"),
    ({"calendar": Calendar(at="02:00", weekdays=["funday"])}, "INVALID_OPTION", "wanted one of mon, tue"),
    ({"calendar": Calendar(at="02:00", days=[0])}, "INVALID_OPTION", "1 to 31"),
    ({"calendar": Calendar(at="02:00", months=[])}, "INVALID_OPTION", "or None for all"),
    ({"calendar": Calendar(at="02:00", days=[13], weekdays=["fri"])}, "INVALID_SCHEDULE", "wanted one of them"),
    ({"calendar": "daily"}, "INVALID_OPTION", "wanted a Calendar"),
    ({"cron": "@daily", "starts_at": datetime(2026, 1, 1)}, "NAIVE_DATETIME", "without a time zone"),
    ({"cron": "@daily", "ends_at": datetime(2026, 1, 1)}, "NAIVE_DATETIME", "without a time zone"),
    ({"cron": "@daily", "ends_at": datetime(2020, 1, 1, tzinfo=UTC)}, "INVALID_SCHEDULE", "never due again"),
]


@pytest.mark.parametrize(("options", "code", "message"), REFUSED)
def test_a_rule_that_cannot_be_is_refused_with_what_was_found(options: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(InvalidCommandError) as refused:
        rule(**options)
    assert refused.value.code == code
    assert message in str(refused.value)

"""Which due times are fired: on time always, missed ones as the policy says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from busload.schedules.rule import rule
from busload.schedules.schedule import CatchUp, Policy, decide

NOW = datetime(2026, 11, 18, 12, 0, 5, tzinfo=UTC)
HOURLY, SECOND = rule(every=timedelta(hours=1)), rule(every=timedelta(seconds=1))


def hour(back: int) -> datetime:
    return NOW.replace(second=0) - timedelta(hours=back)


def hours(*back: int) -> list[datetime]:
    return [hour(one) for one in back]


@pytest.mark.parametrize("policy", CatchUp)
def test_what_is_on_time_is_fired_whatever_the_policy(policy: CatchUp) -> None:
    made = decide(HOURLY, Policy(policy), hour(0), NOW)
    assert (made.fires, made.next_due_at, made.skipped) == (hours(0), hours(-1)[0], 0)


@pytest.mark.parametrize("policy", CatchUp)
def test_a_worker_that_was_late_by_seconds_leaves_out_none(policy: CatchUp) -> None:
    made = decide(SECOND, Policy(policy), NOW - timedelta(seconds=30), NOW)
    assert made.fires == [NOW - timedelta(seconds=back) for back in range(30, -1, -1)]
    assert (made.next_due_at, made.skipped) == (NOW + timedelta(seconds=1), 0)


def test_skip_leaves_out_what_was_missed() -> None:
    later = NOW + timedelta(minutes=30)
    made = decide(HOURLY, Policy(CatchUp.SKIP), hour(5), later)
    assert (made.fires, made.next_due_at, made.skipped) == ([], hours(-1)[0], 6)
    assert (decide(HOURLY, Policy(CatchUp.SKIP), hour(5), NOW)).fires == hours(0)


def test_one_fires_the_newest_that_was_missed_unless_another_is_on_time() -> None:
    later = NOW + timedelta(minutes=30)
    made = decide(HOURLY, Policy(CatchUp.ONE), hour(5), later)
    assert (made.fires, made.next_due_at, made.skipped) == (hours(0), hours(-1)[0], 5)
    made = decide(HOURLY, Policy(CatchUp.ONE), hour(5), NOW)
    assert (made.fires, made.skipped) == (hours(0), 5)
    alone = decide(HOURLY, Policy(CatchUp.ONE), hour(0), later)
    assert (alone.fires, alone.skipped) == (hours(0), 0)


def test_all_fires_each_up_to_its_limit_the_newest() -> None:
    made = decide(HOURLY, Policy(CatchUp.ALL), hour(5), NOW)
    assert (made.fires, made.skipped) == (hours(5, 4, 3, 2, 1, 0), 0)
    made = decide(HOURLY, Policy(CatchUp.ALL, limit=2), hour(5), NOW)
    assert (made.fires, made.skipped) == (hours(2, 1, 0), 3)


def test_what_there_is_no_room_for_stays_due() -> None:
    policy, due_at, fired = Policy(CatchUp.ALL), hour(5), list[datetime]()
    while due_at <= NOW:
        made = decide(HOURLY, policy, due_at, NOW, room=2)
        assert made.next_due_at is not None
        fired, due_at = [*fired, *made.fires], made.next_due_at
        assert (len(made.fires), made.skipped) == (2, 0)
    assert (fired, due_at) == (hours(5, 4, 3, 2, 1, 0), hours(-1)[0])


def test_a_due_time_of_the_rule_before_is_fired_and_the_new_rule_goes_on() -> None:
    """A deploy has changed the rule while a due time waited to be fired."""
    old = NOW - timedelta(seconds=3)
    made = decide(HOURLY, Policy(), old, NOW)
    assert (made.fires, made.next_due_at) == ([old], hours(-1)[0])


def test_a_schedule_that_has_ended_is_not_due_again() -> None:
    ended = rule(every=timedelta(hours=1), ends_at=hours(0)[0], now=hours(9)[0])
    assert decide(ended, Policy(), hour(0), NOW).next_due_at is None


def test_ten_years_of_missed_seconds_are_decided_about_at_once() -> None:
    made = decide(SECOND, Policy(CatchUp.ALL, limit=3), NOW - timedelta(days=3650), NOW)
    assert len(made.fires) == 3 + 60  # missed ones, and those of the last minute
    assert made.skipped == 1000  # or more

"""What PostgreSQL decides about limits: who may call when, who is told to wait, and what is forgotten."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload import RateLimit
from busload.commands import claim, rescue
from busload.limits import rate
from busload.limits.rate import Adapted, Ask, Grant, Late
from busload.postgres.plan import Plan, Step
from tests.given import WITHIN, Database, Given

KEY = ("crm", "")
TEN = RateLimit(10)


def asked(database: Database, wanted: int, limit: RateLimit = TEN, key: rate.Key = KEY, **more: Any) -> Grant:
    return database.perform(rate.ask({key: Ask(limit, wanted, **more)}))[key]  # type: ignore[no-any-return]


def test_calls_go_one_after_the_other_and_no_more_than_half_a_second_ahead(database: Database) -> None:
    with database.time_standing_still():
        first = asked(database, 100)
        assert (first.calls, first.every) == (6, 0.1)  # at 0, 0.1, … 0.5 seconds
        assert first.first <= 0
        assert first.next == pytest.approx(0.6)
        second = asked(database, 100)
        assert second.calls == 0
        assert second.next == pytest.approx(0.6)


def test_however_many_ask_at_once_no_call_is_given_away_twice(dsn: str) -> None:
    limit = RateLimit(1, per=timedelta(hours=1), burst=100)

    def ask_often(number: int) -> int:
        with Database(dsn) as own:
            return sum(asked(own, 3, limit, key=("crm", f"tenant {n % 2}")).calls for n in range(100))

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(ask_often, range(6))) == 200


def test_a_burst_may_come_at_once_after_a_quiet_time_and_not_after_a_refusal(database: Database) -> None:
    limit = RateLimit(1, burst=5)
    with database.time_standing_still():
        burst = asked(database, 100, limit)
        assert burst.calls == 5
        assert burst.first + 4 * burst.every <= 0.001
        assert asked(database, 100, limit).calls == 0
        database.perform(rate.refuse(KEY, limit, 0.0, None))
        assert asked(database, 100, limit).calls == 1


def test_a_block_stops_everybody_and_says_for_how_long(database: Database, dsn: str) -> None:
    asked(database, 1)
    assert database.perform(rate.refuse(KEY, TEN, 600.0, None)) == pytest.approx(600)
    assert database.perform(rate.refuse(KEY, TEN, 1.0, None)) == pytest.approx(600, abs=60)  # the longer one counts
    with Database(dsn) as other:
        waits = asked(other, 100)
        assert asked(other, 100, RateLimit(10, burst=1000)).calls == 0  # whatever burst others allow themselves
    assert waits.calls == 0
    assert 540 < waits.next <= 600
    database.rows("UPDATE busload.rate_limit SET blocked_until = now(), next_at = now()")
    assert asked(database, 100).calls > 0


def test_whoever_listens_hears_of_a_refusal(database: Database, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("LISTEN busload_limit")
        database.perform(rate.refuse(KEY, TEN, 1.0, None))  # also of a limit that nobody has asked for yet
        [heard] = conn.notifies(timeout=WITHIN, stop_after=1)
    assert heard.payload == '["crm", ""]'


@pytest.mark.parametrize("burst", [1, 5])
def test_no_call_is_due_later_than_the_present_limit_can_explain(database: Database, burst: int) -> None:
    """The limit was raised, or the clock set back: what was granted then counts for no longer than it would now."""
    with database.time_standing_still():
        asked(database, 1, RateLimit(1, per=timedelta(hours=1)))
        limit = RateLimit(10, burst=burst)
        assert asked(database, 100, limit).next <= rate.AHEAD + limit.burst / 10
        assert database.value("SELECT next_at < now() + interval '2 seconds' FROM busload.rate_limit")
        database.rows("UPDATE busload.rate_limit SET next_at = next_at - interval '0.2 seconds'")
        assert 1 <= asked(database, 100, limit).calls <= 3  # from there on it is spread evenly as ever


def test_a_block_is_not_cut_short_by_that(database: Database) -> None:
    limit = RateLimit(1, burst=5)
    hour = "interval '1 hour'"
    over = f"UPDATE busload.rate_limit SET blocked_until = blocked_until - {hour}, next_at = next_at - {hour}"
    with database.time_standing_still():
        database.perform(rate.refuse(KEY, limit, 3600.0, None))
        for _ in range(2):
            assert asked(database, 100, limit).next > 3500
        database.rows(over)
        assert asked(database, 100, limit).calls == 1  # the hour is over, and there is no burst


def test_a_row_that_somebody_has_locked_holds_up_its_own_limit_only(database: Database, dsn: str) -> None:
    other = ("mail", "")
    asks = {KEY: Ask(TEN, 1), other: Ask(TEN, 1), ("new", ""): Ask(TEN, 1)}
    asked(database, 1)
    asked(database, 1, key=other)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT FROM busload.rate_limit WHERE name = 'crm' FOR UPDATE")
        for plan in (rate.ask(asks), rate.refuse(KEY, TEN, 1.0, None)):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                database.perform(plan)
        assert set(database.perform(rate.ask(asks, skip_locked=True))) == {other, ("new", "")}
    assert set(database.perform(rate.ask(asks, skip_locked=True))) == set(asks)


def test_a_person_can_lift_a_block(database: Database, dsn: str) -> None:
    keys = [("crm", "a"), ("crm", "b"), ("mail", "")]
    for key in keys:
        database.perform(rate.refuse(key, TEN, 3600.0, None))
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("LISTEN busload_limit")
        assert database.perform(rate.reset("crm", "b")) == 1
        assert [one.payload for one in conn.notifies(timeout=WITHIN, stop_after=1)] == ['["crm", "b"]']
    assert [asked(database, 1, key=key).calls for key in keys] == [0, 1, 0]
    assert database.perform(rate.reset("crm", None)) == 2
    assert [asked(database, 100, key=key).calls > 0 for key in keys] == [True, True, False]
    assert database.perform(rate.reset("crm", "c")) == 0


def test_each_value_of_by_has_its_own_calls(database: Database) -> None:
    asks = {("crm", f"tenant-{n}"): Ask(RateLimit(1), 5) for n in range(20)}
    granted = database.perform(rate.ask(asks))
    assert {key: grant.calls for key, grant in granted.items()} == dict.fromkeys(asks, 1)


def test_an_adaptive_rate_grows_by_what_calls_of_its_round_have_shown(database: Database) -> None:
    limit = RateLimit(10, adaptive=True)
    first = asked(database, 1, limit)
    assert first.adapted == Adapted(10.0)
    grown = first.adapted.grown(20)
    second = asked(database, 1, limit, round=first.round, before=first.adapted, now=grown)
    assert second.adapted == grown
    assert second.every == pytest.approx(1 / grown.rate)
    late = asked(database, 1, limit, round=first.round - 1, before=first.adapted, now=grown.grown(1000))
    assert (late.adapted, late.every) == (grown, second.every)


def test_calls_that_are_refused_together_cut_the_rate_once(database: Database) -> None:
    limit = RateLimit(100, adaptive=True)
    asked(database, 1, limit)
    for entered_ago in (0.0, 30.0, 30.0, 30.0):  # the others had entered before the first of them was refused
        database.perform(rate.refuse(KEY, limit, 0.0, entered_ago))
    once = Adapted(100.0).cut(0.0)
    assert database.rows("SELECT round, rate, ceiling FROM busload.rate_limit") == [(1, once.rate, once.ceiling)]
    database.rows("UPDATE busload.rate_limit SET cut_at = now() - interval '1 minute'")
    database.perform(rate.refuse(KEY, limit, 0.0, 30.0))  # this one had entered after that
    assert database.value("SELECT round FROM busload.rate_limit") == 2


def test_two_refusals_at_the_same_moment_cut_the_rate_once(database: Database) -> None:
    limit = RateLimit(100, adaptive=True)
    asked(database, 1, limit)
    slow = rate.refuse(KEY, limit, 0.0, None)
    cut = slow.send(database.perform(alone(next(slow))))
    database.perform(rate.refuse(KEY, limit, 0.0, None))
    database.perform(alone(cut))
    once = Adapted(100.0).cut(0.0)
    assert database.rows("SELECT round, rate FROM busload.rate_limit") == [(1, once.rate)]


def alone(step: Step) -> Plan[Any]:
    return (yield step)


def test_a_limit_that_is_not_adaptive_is_never_cut(database: Database) -> None:
    database.perform(rate.refuse(KEY, TEN, 0.0, None))
    assert asked(database, 1).every == 0.1


def test_limits_that_nobody_has_used_for_a_day_are_forgotten(database: Database) -> None:
    for key, age, blocked in (("old", 25, 0), ("new", 1, 0), ("blocked", 25, 1)):
        asked(database, 1, key=(key, ""))
        database.rows(
            "UPDATE busload.rate_limit SET used_at = now() - %s * interval '1 hour',"
            " blocked_until = now() + (%s - 0.5) * interval '1 hour' WHERE name = %s",
            age,
            blocked,
            key,
        )
    database.perform(rate.forget())
    assert database.rows("SELECT name FROM busload.rate_limit ORDER BY name") == [("blocked",), ("new",)]


async def test_what_is_postponed_keeps_its_attempt_and_is_noted_once(given: Given, database: Database) -> None:
    await given.batch(commands=10)
    for n in range(3):
        leased = given.claimed(10)
        late = [Late(one.lease, one.id, 1.0 + (one.id % 2), "crm") for one in leased[: 4 + n]]
        assert database.perform(rate.postpone(late)) == 4 + n
        assert database.perform(rate.postpone(late)) == 0  # said again, as after a lost answer
        assert database.rows("SELECT DISTINCT attempt, reason FROM busload.scheduled") == [(1, "RATE_LIMITED")]
        database.check_invariants()
        given.make_due()
        assert database.value("SELECT sum(open)::integer FROM busload.lease") == 6 - n
        for lease_id in {one.lease.lease_id for one in leased}:
            database.perform(rescue.release([lease_id]))
        database.perform(claim.promote())
    noted = database.rows("SELECT lo, hi FROM busload.event WHERE type = 'RATE_LIMITED'")
    assert sum(hi - lo + 1 for lo, hi in noted) == 6
    assert database.count("execution") == 0
    database.check_invariants()


async def test_neighbours_that_come_back_together_are_one_load(given: Given, database: Database) -> None:
    await given.batch(commands=100)
    leased = given.claimed(100)
    database.perform(rate.postpone([Late(one.lease, one.id, 1.0, "crm") for one in leased]))
    assert database.count("scheduled") == 1
    assert database.count("lease") == 0


async def test_a_lost_lease_postpones_nothing(given: Given, database: Database) -> None:
    await given.batch(commands=1)
    worker = given.registered_worker()
    [one] = given.claimed(1, by=worker)
    given.died(worker)
    given.rescued()
    assert database.perform(rate.postpone([Late(one.lease, one.id, 1.0, "crm")])) == 0
    assert database.count("scheduled") == 0
    database.check_invariants()


@pytest.mark.parametrize("per", [timedelta(seconds=1), timedelta(hours=1)])
def test_what_people_see_of_a_limit(database: Database, per: timedelta) -> None:
    limit = RateLimit(10, per=per)
    asked(database, 1, limit)
    database.perform(rate.refuse(KEY, limit, 60.0, None))
    [seen] = database.perform(rate.limits(None, limit=10))
    assert (seen.name, seen.subject, seen.adaptive, seen.calls, seen.refused) == ("crm", "", False, 1, 1)
    assert seen.rate == pytest.approx(10 / per.total_seconds())
    assert seen.blocked_until is not None
    assert database.perform(rate.limits("other", limit=10)) == []

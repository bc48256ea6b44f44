"""When a batch will be done: what a forecast says, why it sometimes cannot say, and what would change it."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given as given_facts
from hypothesis import strategies as st

from busload import BatchCommand, Command, CommandBus, ConcurrencyLimit, HandlerContext, SyncCommandBus
from busload.batches import Canary, Forecast, NoForecast
from busload.batches.batch import find_batch
from busload.batches.forecast import SCALES, Around, Outlook, forecast
from busload.commands import claim, rescue
from busload.commands.execution import FAILED_ATTEMPT
from busload.sync.plan import perform
from tests.given import DOMAIN, Database, Given

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
STEADY = (10.0, 100.0, 1000 * (1 - 2.718281828**-3), 10_000 * (1 - 2.718281828**-0.3))


def outlook(**more: Any) -> Outlook:
    """A batch of 6,000 that has run for five minutes at 10 a second, on two workers whose slots are half busy."""
    facts: dict[str, Any] = {
        "now": NOW,
        "total": 6000,
        "ended": 3000,
        "age": 300.0,
        "paces": STEADY,
        "running": 100,
        "longest": 1.0,
        "domain": DOMAIN,
        "workers": 2,
        "slots": 200,
        "busy": 100,
    }
    return Outlook(**facts | more)


def seconds(found: Forecast) -> tuple[float, float, float]:
    assert found.earliest is not None and found.done_at is not None and found.latest is not None, found.unknown
    earliest, done, latest = ((at - NOW).total_seconds() for at in (found.earliest, found.done_at, found.latest))
    return earliest, done, latest


def test_a_steady_batch_is_done_when_its_pace_says_and_the_interval_holds_that_time() -> None:
    found = forecast(outlook())
    earliest, done, latest = seconds(found)
    assert found.rate == pytest.approx(10, rel=0.05)
    assert done == pytest.approx(300, rel=0.1)
    assert 100 < earliest < done < latest < 900
    assert (found.made_at, found.unknown) == (NOW, None)
    assert str(found).startswith("in about 5 min (")


@pytest.mark.parametrize(
    ("parked", "end"),
    [
        (0, "min)"),
        (1, "min), not counting 1 command in troubleshooting"),
        (12, "min), not counting 12 commands in troubleshooting"),
    ],
)
def test_a_forecast_says_how_many_commands_in_troubleshooting_it_leaves_out(parked: int, end: str) -> None:
    found = forecast(outlook(parked=parked))
    assert found.in_troubleshooting == parked
    assert str(found).startswith("in about ") and str(found).endswith(end)


def test_a_batch_that_has_just_begun_is_not_taken_for_a_slow_one() -> None:
    """After twenty seconds the pace over a hundred or a thousand seconds is that of twenty."""
    paces = tuple(10 * scale * (1 - math.exp(-20 / scale)) for scale in SCALES)
    found = forecast(outlook(total=400, ended=200, age=20.0, paces=paces, running=10))
    assert found.rate == pytest.approx(10, rel=0.1)
    assert seconds(found)[1] == pytest.approx(20, rel=0.1)


def test_the_interval_is_the_wider_the_less_has_ended_and_the_more_the_pace_changes() -> None:
    def width(facts: Outlook) -> float:
        earliest, done, latest = seconds(forecast(facts))
        return (latest - earliest) / done

    steady = width(outlook())
    assert width(outlook(total=60_000)) > 1.2 * steady
    assert width(outlook(paces=(30.0, 250.0, STEADY[2], STEADY[3]))) > 1.05 * steady


def test_a_batch_that_has_become_slower_is_judged_by_how_it_goes_now() -> None:
    half = tuple(pace / 2 if scale < 2 else pace for scale, pace in enumerate(STEADY))
    assert seconds(forecast(outlook(total=3100, running=10, paces=half)))[1] == pytest.approx(20, rel=0.25)


def test_a_batch_is_not_done_before_its_last_retry_or_its_last_run_at() -> None:
    """However few are left, and however fast it goes."""
    for later in ({"retries": 3, "last_retry": 900.0}, {"planned": 3, "last_planned": 900.0}):
        earliest, done, latest = seconds(forecast(outlook(total=3003, running=0, **later)))
        assert 900 <= earliest <= done <= latest


def test_a_batch_that_only_waits_for_its_retries_does_not_seem_slow_for_it() -> None:
    found = forecast(outlook(total=3150, running=0, idle=1800.0, age=2100.0, retries=150, last_retry=900.0))
    assert found.rate < 0.1 and seconds(found)[1] < 3 * 900


@pytest.mark.parametrize(
    ("facts", "reason", "said"),
    [
        ({"sealed": False}, "NOT_SEALED", "more may be added"),
        ({"held": "OPERATOR"}, "HELD", "nothing starts until it is resumed"),
        ({"held": "BUDGET"}, "BUDGET", "The failure budget of the batch holds it"),
        ({"held": "CANARY", "canary": True}, "CANARY", "The canary of the batch holds it"),
        ({"canary": True}, "CANARY", "Only the canary of the batch runs"),
        ({"paused": True}, "PAUSED", "Domain 'payments' is paused"),
        ({"workers": 0, "slots": 0}, "NO_WORKER", "No worker serves domain 'payments'"),
        ({"ended": 5990, "parked": 10, "running": 0}, "IN_TROUBLESHOOTING", "Only 10 commands are left"),
        ({"no_handler": 2}, "NO_HANDLER", "2 commands have a type that no worker had a handler for."),
        ({"age": None, "ended": 0, "paces": (0.0, 0.0, 0.0, 0.0)}, "NOTHING_ENDED", "Nothing has run to an end yet"),
        ({"idle": 200.0}, "STANDSTILL", "Nothing has ended for 3 min"),
    ],
)
def test_each_fact_that_makes_a_forecast_dishonest_is_named_instead(
    facts: dict[str, Any], reason: str, said: str
) -> None:
    found = forecast(outlook(**facts))
    assert (found.unknown, found.done_at, found.earliest, found.latest) == (NoForecast(reason), None, None, None)
    assert said in found.changes[0] and str(found) == f"unknown: {reason}"


@given_facts(
    left=st.integers(0, 10**9),
    ended=st.integers(0, 10**9),
    age=st.none() | st.floats(-1, 1e9),
    idle=st.floats(0, 1e9),
    pace=st.floats(0, 1e12),
    running=st.integers(0, 10**6),
    slots=st.integers(0, 10**6),
    retries=st.integers(0, 200),
    last_retry=st.floats(0, 1e7),
    expires=st.none() | st.floats(-1e7, 1e9),
)
def test_no_facts_make_a_forecast_fail(left: int, ended: int, pace: float, **facts: Any) -> None:
    found = forecast(outlook(total=left + ended, ended=ended, paces=(pace, pace, pace, pace), **facts))
    if found.unknown is None:
        earliest, done, latest = seconds(found)
        assert 0 <= earliest <= latest and done <= latest


@pytest.mark.parametrize(
    "facts",
    [
        {"held": "OPERATOR", "running": 3000},
        {"paused": True, "running": 3000},
        {"idle": 200.0, "retries": 3, "last_retry": 10.0},
        {"idle": 30.0},
    ],
)
def test_what_does_not_keep_the_rest_from_ending_does_not_keep_the_forecast_back(facts: dict[str, Any]) -> None:
    """All that is left runs already, or something will be tried again, or the pause is a short one."""
    assert forecast(outlook(**facts)).unknown is None


@pytest.mark.parametrize(
    ("facts", "sentences"),
    [
        ({}, []),
        (
            {"busy": 200, "running": 200},
            ["2 workers with 200 slots serve domain 'payments', and all slots are busy: with one more worker like"],
        ),
        (
            {"busy": 10, "running": 4, "workers": 1, "slots": 10},
            [
                "1 worker with 10 slots serves domain 'payments', and all slots are busy: with one more worker like it",
                "6 commands are of others: when they have ended, this batch goes faster.",
            ],
        ),
        (
            {"busy": 200, "rate_limited": 50, "limit": "bank", "allowed": 12.5},
            ["Rate limit bank allows 12.5 calls a second: a higher one would end the batch sooner, more workers"],
        ),
        (
            {"busy": 200, "limited": 50, "limit": "bank", "allowed": 5.0, "by_key": True},
            ["Concurrency limit bank allows 5 calls of one key at a time: a higher one would end the batch sooner"],
        ),
        ({"running": 3000}, ["3,000 commands run, and no other is ready: more workers would change nothing."]),
        (
            {"retries": 7, "last_retry": 90.0},
            ["7 commands have failed and will be tried again, the last in 90 s."],
        ),
        ({"planned": 1, "last_planned": 7200.0}, ["1 command has a run_at that has not come, the last in 2 h."]),
        ({"parked": 2}, ["2 commands wait for a person in troubleshooting: the batch is not done before"]),
    ],
)
def test_it_says_what_limits_the_batch_now_and_nothing_else(facts: dict[str, Any], sentences: list[str]) -> None:
    changes = forecast(outlook(**facts)).changes
    assert len(changes) == len(sentences)
    for found, wanted in zip(changes, sentences, strict=True):
        assert found.startswith(wanted)


EXPIRES = "The batch expires in 2 min: what has not started by then is canceled."


@pytest.mark.parametrize("more", [{}, {"planned": 100, "last_planned": 7200.0}])
def test_a_batch_that_expires_first_is_done_soon_after_that(more: dict[str, Any]) -> None:
    """At its pace it takes five minutes, or two hours to the last run_at; but who waits after two is canceled."""
    found = forecast(outlook(expires=120.0, busy=200, **more))
    earliest, done, latest = seconds(found)
    assert 0 < earliest <= 120 <= done <= latest < 180
    assert found.changes[0] == EXPIRES
    assert not [said for said in found.changes if "instead of" in said]
    assert "with one more worker like these more of the batch could start in time." in found.changes[1]


def test_a_retry_outlives_the_expiry_of_its_batch() -> None:
    """It has started, so it does not expire."""
    earliest, done, latest = seconds(forecast(outlook(expires=120.0, retries=3, last_retry=900.0)))
    assert 900 <= earliest <= done <= latest


@pytest.mark.parametrize("expires", [-3.0, 0.0])
def test_a_batch_whose_time_is_over_waits_for_the_next_sweep(expires: float) -> None:
    found = forecast(outlook(expires=expires))
    assert 0 <= seconds(found)[0] <= seconds(found)[2] < 60
    assert found.changes == ("The batch has expired: what has not started is canceled by the next sweep.",)


def test_an_expiry_that_comes_after_the_end_changes_nothing() -> None:
    assert forecast(outlook(expires=7200.0)) == forecast(outlook())


POSTROOM: dict[str, Any] = {"domain": "postroom", "workers": 1, "slots": 10, "busy": 5}


@pytest.mark.parametrize(
    ("there", "unknown", "sentences"),
    [
        ({}, None, []),
        ({"paused": True}, "PAUSED", ["Domain 'postroom' is paused: nothing starts there until it is resumed."]),
        ({"paused": True, "waits": False}, None, []),
        ({"workers": 0, "slots": 0}, "NO_WORKER", ["No worker serves domain 'postroom': start one."]),
        (
            {"busy": 10},
            None,
            ["1 worker with 10 slots serves domain 'postroom', and all slots are busy: with one more"],
        ),
        ({"busy": 10, "waits": False}, None, []),
        (
            {"rate_limited": 5, "limit": "post", "allowed": 2.0},
            None,
            ["Rate limit post allows 2 calls a second: a higher one would end the batch sooner, more workers"],
        ),
        (
            {"limited": 5, "limit": "post", "allowed": 2.0},
            None,
            ["Concurrency limit post allows 2 calls at a time: a higher one would end the batch sooner, more"],
        ),
    ],
)
def test_every_domain_in_which_commands_of_a_batch_wait_is_looked_at(
    there: dict[str, Any], unknown: str | None, sentences: list[str]
) -> None:
    found = forecast(outlook(elsewhere=(Around(**POSTROOM | there),), all_slots=210))
    assert (found.unknown, len(found.changes)) == (unknown and NoForecast(unknown), len(sentences))
    for said, wanted in zip(found.changes, sentences, strict=True):
        assert said.startswith(wanted)


def test_both_domains_are_named_if_both_stand_still() -> None:
    both = outlook(paused=True, workers=0, elsewhere=(Around(**POSTROOM | {"paused": True, "workers": 0}),))
    assert forecast(both).changes[0].startswith("Domains 'payments' and 'postroom' are paused: nothing starts there")
    both = outlook(workers=0, elsewhere=(Around(**POSTROOM | {"workers": 0}),))
    assert forecast(both).changes == ("No worker serves domains 'payments' and 'postroom': start one.",)


async def test_the_domains_of_a_batch_are_found_in_the_database(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """What holds up one of them holds up the batch, wherever the batch runs now and whichever domain is its own."""

    async def changes() -> tuple[str | None, tuple[str, ...]]:
        found = (await given.batch_now(batch_id)).forecast
        assert found is not None
        return found.unknown and found.unknown.value, found.changes

    there = [BatchCommand("Debit", domain="postroom") for _ in range(20)]
    batch_id = await bus.create_batch(DOMAIN, [*[BatchCommand("Debit") for _ in range(20)], *there])
    worker = given.registered_worker()
    given.settled(given.claimed(10, by=worker))
    given.claimed(2, by=worker)
    assert await changes() == ("NO_WORKER", ("No worker serves domain 'postroom': start one.",))
    about: dict[str, Any] = {"name": "post", "domains": ["postroom"], "lease_for": timedelta(seconds=30)}
    other = database.perform(rescue.register(**about, concurrency=1))
    assert await changes() == (None, ())
    await bus.domains.pause("postroom", reason="closed")
    assert (await changes())[0] == "PAUSED"
    assert (await changes())[1][0].startswith("Domain 'postroom' is paused")
    await bus.domains.resume("postroom")
    database.perform(claim.claim(worker=other, domains=["postroom"], limit=2, suspects=True))
    [said] = (await changes())[1]
    assert said.startswith("1 worker with 1 slot serves domain 'postroom', and all slots are busy")


def test_one_more_worker_is_promised_only_its_share() -> None:
    """Two workers take five minutes, so three take two thirds of that."""
    [said] = forecast(outlook(busy=200, running=200)).changes
    assert said.endswith("could be done in 3 min instead of 5 min.")


# -- on a real batch ---------------------------------------------------------------------------------------------------


async def test_both_faces_forecast_a_batch_that_runs_and_say_nothing_of_one_that_has_ended(
    bus: CommandBus, sync_bus: SyncCommandBus, given: Given
) -> None:
    batch_id = await given.batch(commands=100)
    worker = given.registered_worker()
    for _ in range(3):
        given.settled(given.claimed(10, by=worker))
    given.claimed(5, by=worker)

    batch = await given.batch_now(batch_id)
    found = batch.forecast
    assert found is not None and found.done_at is not None and found.earliest is not None and found.latest is not None
    assert found.rate > 0 and found.made_at <= found.earliest <= found.done_at <= found.latest
    again = sync_bus.get_batch(DOMAIN, batch_id)
    assert again == batch and again.forecast is not None and again.forecast != found
    explained, sync_explained = await bus.explain_batch(DOMAIN, batch_id), sync_bus.explain_batch(DOMAIN, batch_id)
    for explanation in (explained, sync_explained):
        assert explanation.forecast is not None and explanation.forecast.done_at == explanation.eta is not None
        assert f"; done {explanation.forecast}." in explanation.summary
    [listed] = await bus.list_batches(DOMAIN)
    assert listed.forecast is None
    async for seen in bus.watch_batch(DOMAIN, batch_id):
        assert seen.forecast is not None and seen.forecast.done_at is not None
        break

    given.handler()
    given.died(worker)
    given.rescued()
    await given.drained()
    assert (await given.batch_now(batch_id)).forecast is None
    assert (await bus.explain_batch(DOMAIN, batch_id)).forecast is None


async def test_the_pace_counts_what_ran_to_an_end_and_fades(given: Given, database: Database) -> None:
    """Failed attempts and canceled commands are no pace."""
    batch_id = await given.batch(commands=100)
    worker = given.registered_worker()
    given.settled(given.claimed(10, by=worker), FAILED_ATTEMPT, delay=60.0)
    given.settled(given.claimed(10, by=worker))
    pace = "SELECT pace_1, pace_10, pace_100, pace_1000 FROM busload.batch WHERE batch_id = %s"
    assert database.rows(pace, batch_id) == [(10, 10, 10, 10)]
    database.rows("UPDATE busload.batch SET paced_at = paced_at - interval '1000 s' WHERE batch_id = %s", batch_id)
    given.settled(given.claimed(10, by=worker))
    [(quick, *_, slow)] = database.rows(pace, batch_id)
    assert quick == 10 and slow == pytest.approx(10 + 10 / 2.718281828, rel=0.01)
    await given.bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    [(quick, *_, slow)] = database.rows(pace, batch_id)
    assert quick <= 10 and slow < 14


async def test_each_reason_is_found_in_the_database(bus: CommandBus, given: Given, database: Database) -> None:
    """Reads of the real state, one after the other on one batch."""

    async def unknown() -> str | None:
        found = (await given.batch_now(batch_id)).forecast
        assert found is not None
        return found.unknown and found.unknown.value

    batch_id = await given.batch(commands=200)
    assert await unknown() == "NO_WORKER"
    worker = given.registered_worker()
    assert await unknown() == "NOTHING_ENDED"
    given.settled(given.claimed(100, by=worker))
    assert await unknown() is None
    await bus.domains.pause(DOMAIN, reason="the bank is down")
    assert await unknown() == "PAUSED"
    await bus.domains.resume(DOMAIN)
    await bus.hold_batch(DOMAIN, batch_id, reason="the bank complains")
    assert await unknown() == "HELD"
    await bus.resume_batch(DOMAIN, batch_id)
    earlier = "paced_at = paced_at - interval '70 s', started_at = started_at - interval '71 s'"
    database.rows(f"UPDATE busload.batch SET {earlier}")
    assert await unknown() == "STANDSTILL"
    given.died(worker)
    assert await unknown() == "NO_WORKER"


async def test_open_batches_and_canaries_have_no_end_yet(bus: CommandBus, given: Given) -> None:
    given.registered_worker()
    async with bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit")
        await batch.checkpoint()
        found = (await given.batch_now(batch.batch_id)).forecast
        assert found is not None
        assert found.unknown == NoForecast.NOT_SEALED
    guarded = await given.batch(10, canary=Canary(size=2))
    found = (await given.batch_now(guarded)).forecast
    assert found is not None and found.unknown == NoForecast.CANARY
    assert found.changes == ("Only the canary of the batch runs: the rest waits until all of it has completed.",)


async def test_a_retry_that_is_due_later_holds_the_end(given: Given) -> None:
    batch_id = await given.batch(commands=20)
    worker = given.registered_worker()
    given.settled(given.claimed(18, by=worker))
    given.settled(given.claimed(2, by=worker), FAILED_ATTEMPT, delay=600.0)
    found = (await given.batch_now(batch_id)).forecast
    assert found is not None and found.earliest is not None
    assert found.earliest - found.made_at > timedelta(seconds=590)
    assert found.changes == ("2 commands have failed and will be tried again, the last in 10 min.",)


async def test_an_expiry_is_found_in_the_database(given: Given) -> None:
    batch_id = await given.batch(10_000, expires_in=timedelta(minutes=2))
    given.settled(given.claimed(1))
    found = (await given.batch_now(batch_id)).forecast
    assert found is not None and found.latest is not None
    assert found.latest - found.made_at < timedelta(minutes=3)
    assert found.changes[0].startswith("The batch expires in ")


async def test_a_concurrency_limit_is_named_with_what_it_allows(given: Given) -> None:
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] >= 4:
            await go.wait()

    given.handler("Debit", wait, concurrency_limit=ConcurrencyLimit(2, name="bank"))
    batch_id = await given.batch(commands=30)
    async with given.running(concurrency=10):
        found = None

        async def limited() -> bool:
            nonlocal found
            found = (await given.batch_now(batch_id)).forecast
            return bool(found and found.changes and found.changes[0].startswith("Concurrency"))

        deadline = time.monotonic() + 20
        while not await limited():
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)
        assert found is not None
        assert found.changes[0].startswith("Concurrency limit bank allows 2 calls at a time: a higher one")
        go.set()
        await given.bus.wait_batch(DOMAIN, batch_id, timeout=20)


async def test_a_forecast_reads_few_rows_however_large_the_batch_is(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """Neither what has ended, nor all that waits, nor what others have sent."""
    batch_id = await given.batch(50_000)
    worker = given.registered_worker()
    given.settled(given.claimed(10_000, by=worker))
    database.rows(  # thousands of its commands, and of others, wait one by one for another attempt
        "WITH taken AS (DELETE FROM busload.queue WHERE hi IN (SELECT max(hi) FROM busload.queue) RETURNING *)"
        " INSERT INTO busload.scheduled (lo, hi, domain, batch_id, run_at, reason)"
        " SELECT n, n, domain, batch_id, now() + interval '1 h', 'RETRY' FROM taken, generate_series(lo, hi) AS n"
        " UNION ALL SELECT n * 1024, n * 1024, domain, NULL, now() + interval '1 h', 'RETRY'"
        "  FROM taken, generate_series(1000000::bigint, 1005000) AS n"
    )
    database.rows("ANALYZE")
    with psycopg.connect(dsn, autocommit=True) as conn, conn.transaction():
        batch = perform(conn, find_batch(DOMAIN, batch_id))
        read: dict[str, int] = dict(
            conn.execute(
                "SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables"
                " WHERE schemaname = 'busload'"
            ).fetchall()
        )
    assert batch is not None and batch.forecast is not None and batch.forecast.done_at is not None
    assert sum(read.values()) < 1000, read
    tables = ", ".join(f"busload.{table}" for table in ("scheduled", "command", "queue", "execution", "batch"))
    database.rows(f"TRUNCATE {tables} CASCADE")

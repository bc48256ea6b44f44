"""Limits that all workers share: who is called, who waits, and what that costs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    Group,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    RateLimit,
    RateLimitedError,
    RetryPolicy,
    SyncCommandBus,
    TransientCommandError,
)
from busload.buffers import Buffer
from busload.explain import Blocker
from busload.limits import limiter as limiting
from busload.limits import rate
from tests.given import DOMAIN, Database, Given, eventually

HOUR = timedelta(hours=1)
NOTED = "SELECT coalesce(sum(hi - lo + 1), 0)::integer FROM busload.event WHERE type = 'RATE_LIMITED'"
LISTENS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE query LIKE 'SELECT busload.listens(%' AND state = 'idle' AND datname = current_database()"
)
REASONS = "SELECT reason, sum(hi - lo + 1)::integer FROM busload.scheduled GROUP BY reason"


async def refuse_for_an_hour(command: Command, ctx: HandlerContext) -> None:
    raise RateLimitedError(after=3600)


async def test_all_workers_together_call_no_more_often_than_the_limit_says(given: Given, database: Database) -> None:
    seen = given.handler(rate_limit=RateLimit(5, per=HOUR, burst=5))
    batch_id = await given.batch(commands=30)
    await asyncio.gather(*(given.drained() for _ in range(3)))
    assert len(seen) == 5
    assert database.rows(REASONS) == [("RATE_LIMITED", 25)]
    assert (await given.batch_now(batch_id)).completed_count == 5
    database.check_invariants()


@pytest.mark.parametrize("thread", [False, True], ids=["async", "thread"])
async def test_calls_whose_turn_passed_while_the_event_loop_was_blocked_ask_again(
    bus: CommandBus, given: Given, thread: bool
) -> None:
    """Up to half a second of them is let go ahead; they would all begin when the loop goes on"""
    began: list[float] = []
    blocked = False

    async def call(command: Command, ctx: HandlerContext) -> None:
        began.append(time.monotonic())

    def call_in_thread(command: Command, ctx: HandlerContext) -> None:
        began.append(time.monotonic())

    async def block(command: Command, ctx: HandlerContext) -> None:
        nonlocal blocked
        time.sleep(0.8)
        blocked = True

    bus.handler(DOMAIN, "Debit", rate_limit=RateLimit(100))(call_in_thread if thread else call)
    given.handler("Block", block)
    await given.batch(commands=300)
    async with given.running(concurrency=100):
        await eventually(lambda: len(began) > 30)
        await given.sent("Block", priority=10)
        await eventually(lambda: blocked)
        after = len(began)
        await eventually(lambda: len(began) > after + 60)
    busiest = max(sum(start <= at < start + 0.25 for at in began) for start in began)
    assert busiest <= 25 + 12


def test_the_databases_clock_is_read_by_the_quickest_answer() -> None:
    """So that an answer for which the process was frozen tells when it was given, not when it was read"""
    clock = limiting._Clock()
    assert clock.here(1000.0, 10.0, 10.5) == 10.5
    assert clock.here(1010.0, 20.1, 20.2) == pytest.approx(20.2)
    assert clock.here(1020.0, 30.1, 90.0) == pytest.approx(30.2), "read a minute later"
    assert clock.here(1025.0, 95.0, 95.1) == pytest.approx(95.1), "their clock was set back"
    assert clock.here(1035.0, 105.0, 105.3) == pytest.approx(105.1)
    assert clock.here(5000.0, 110.0, 110.1) == pytest.approx(110.1), "their clock was set on"


async def test_what_a_limit_holds_up_runs_later_as_its_first_attempt(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen = given.handler(rate_limit=RateLimit(1, per=HOUR))
    await given.sent()
    held_up = await given.sent()
    await given.drained()
    assert len(seen) == 1
    waiting = await given.command_now(held_up)
    assert (waiting.status, waiting.attempts) == ("SCHEDULED", 0)
    for _ in range(2):  # it comes back, and has to wait again
        given.make_due()
        await given.drained()
    assert [event.type for event in await bus.get_audit_trail(DOMAIN, held_up)] == ["SENT", "RATE_LIMITED"]
    database.rows("UPDATE busload.rate_limit SET next_at = now()")
    given.make_due()
    await given.drained()
    done = await given.command_now(held_up)
    assert (done.status, done.attempts) == ("COMPLETED", 1)
    database.check_invariants()


async def test_a_refusal_stops_everybody_and_burns_no_attempt(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """`RateLimitedError(after=...)`: one is refused, nobody else calls; with one attempt each, none is lost."""
    seen = given.handler(function=refuse_for_an_hour, rate_limit=RateLimit(1), retry=RetryPolicy(max_attempts=1))
    ids = [await given.sent() for _ in range(10)]
    await asyncio.gather(*(given.drained(concurrency=1) for _ in range(2)))
    assert len(seen) == 1
    assert database.rows(REASONS) == [("RATE_LIMITED", 10)]
    assert database.count("execution") == 0
    assert {(await given.command_now(one)).attempts for one in ids} == {0}
    assert database.value(NOTED) == 10
    database.check_invariants()


async def test_who_was_let_go_and_has_not_begun_heeds_a_refusal(given: Given, bus: CommandBus, dsn: str) -> None:
    """Two workers, one name: the second call has its time half a second ahead when the first one is refused."""
    limit, calls = RateLimit(2.05, name="partner"), Counter[str]()

    async def refuse(command: Command, ctx: HandlerContext) -> None:
        calls[command.domain] += 1
        if calls.total() == 1:
            await eventually(lambda: given.database.value("SELECT calls FROM busload.rate_limit") == 2)
        raise RateLimitedError(after=3600)

    for domain in ("left", "right"):
        bus.handler(domain, "Push", rate_limit=limit)(refuse)
    async with given.running(domains=["left"]), given.running(domains=["right"]):
        await eventually(lambda: given.database.value("SELECT count(*) FROM busload.worker") == 2)
        await asyncio.gather(bus.send("left", "Push"), bus.send("right", "Push"))
        await eventually(lambda: given.database.rows(REASONS) == [("RATE_LIMITED", 2)])
    assert calls.total() == 1
    given.database.check_invariants()


@pytest.mark.parametrize("heard", ["refusal", "nothing for a while"])
async def test_a_refusal_for_one_value_leaves_the_calls_of_the_others_alone(
    given: Given, bus: CommandBus, heard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of `good` has its time ahead when `bad` is refused; after a lost connection everybody asks."""
    monkeypatch.setattr(limiting, "LATE", 1000.0)  # a turn that a busy machine misses would be asked for again
    calls = "SELECT calls FROM busload.rate_limit WHERE subject = 'good'"
    seen: list[str] = []

    @bus.handler(DOMAIN, "Push", rate_limit=RateLimit(2.05, by=lambda command: command.data))
    async def push(command: Command, ctx: HandlerContext) -> None:
        seen.append(command.data)
        if command.data == "bad":
            await eventually(lambda: given.database.value(calls) == 2)
            if heard == "refusal":
                raise RateLimitedError(after=3600)
            assert worker._run is not None
            worker._run.notifications.hear(None, None)

    async with given.running(concurrency=3) as worker:
        await eventually(lambda: given.database.value(LISTENS) == 1)
        await bus.create_batch(DOMAIN, [BatchCommand("Push", data=one) for one in ("bad", "good", "good")])
        await eventually(lambda: seen.count("good") == 2)
    assert given.database.value(calls) == (2 if heard == "refusal" else 3)


@pytest.mark.parametrize("limit", [None, RateLimit(10)])
async def test_no_refusal_is_longer_than_an_hour(given: Given, database: Database, limit: RateLimit | None) -> None:
    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise RateLimitedError(after=timedelta(days=400))

    given.handler(function=refuse, rate_limit=limit)
    await given.sent()
    await given.drained()
    until = (
        "SELECT max(run_at) FROM busload.scheduled"
        if limit is None
        else "SELECT max(blocked_until) FROM busload.rate_limit"
    )
    assert database.value(f"SELECT ({until}) <= now() + interval '1 hour'")


async def test_a_block_that_a_person_lifts_lets_what_waits_go(
    given: Given, bus: CommandBus, sync_bus: SyncCommandBus, database: Database
) -> None:
    refuses = True

    async def push(command: Command, ctx: HandlerContext) -> None:
        if refuses:
            raise RateLimitedError(after=3600)

    given.handler(function=push, rate_limit=RateLimit(1000, name="bank"))
    batch_id = await given.batch(commands=5)
    await given.drained()
    assert database.rows(REASONS) == [("RATE_LIMITED", 5)]
    refuses = False
    assert await bus.limits.reset("bank", "tenant") == 0
    assert await bus.limits.reset("bank", "") == 1
    await given.drained()
    assert (await given.batch_now(batch_id)).completed_count == 5
    assert sync_bus.limits.reset("bank") == 1
    for wrong in ("", "x" * 600, 5):
        with pytest.raises(InvalidCommandError):
            await bus.limits.reset(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError):
        sync_bus.limits.reset("bank", "x" * 513)
    database.check_invariants()


async def test_a_locked_row_holds_up_its_own_limit_only(given: Given, bus: CommandBus, dsn: str) -> None:
    free, locked = given.handler("Debit", rate_limit=RateLimit(100)), given.handler("Push", rate_limit=RateLimit(100))
    given.database.perform(rate.ask({(f"{DOMAIN}/Push", ""): rate.Ask(RateLimit(100), 1)}))
    async with given.running(), await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("SELECT FROM busload.rate_limit FOR UPDATE")
        await bus.create_batch(DOMAIN, [BatchCommand(one) for one in ("Push", "Debit", "Push")])
        await eventually(lambda: len(free) == 1)
        assert locked == []
        await conn.rollback()
        await eventually(lambda: len(locked) == 2)
    given.database.check_invariants()


# -- groups ------------------------------------------------------------------------------------------------------------


def collected(bus: CommandBus, judge: Callable[[Group], None], **more: Any) -> tuple[Buffer, list[list[Any]]]:
    events, calls = bus.buffer("events", size=4, max_age=timedelta(milliseconds=1)), []

    @events.handler(**more)
    async def handle(group: Group, ctx: HandlerContext) -> None:
        calls.append([item.data for item in group])
        judge(group)

    return events, calls


async def test_a_limit_never_makes_the_search_in_a_group_begin_anew(
    given: Given, bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the time that parts wait for their turn, nor by a refusal of each of them."""
    monkeypatch.setattr(rate, "AHEAD", 0.0)
    given.settings = replace(given.settings, wait_for_turn=timedelta(milliseconds=20))
    refused: list[list[Any]] = []

    def judge(group: Group) -> None:
        if len(calls) > 2 and calls[-1] not in refused:
            refused.append(calls[-1])
            raise RateLimitedError(after=0.01)
        if any(item.data == 2 for item in group):
            raise TransientCommandError("500")

    two = RetryPolicy(max_attempts=2, backoff=(0,))
    events, calls = collected(bus, judge, isolate_poison=True, retry=two, rate_limit=RateLimit(20))
    await events.add_many(range(4))
    async with given.running(domains=["events"]):
        await eventually(lambda: database.count("troubleshooting") == 1)
    assert refused
    assert [len(call) for call in calls].count(4) == 2
    assert database.rows("SELECT data FROM busload.buffered") == [(2,)]
    database.check_invariants()


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_a_call_whose_turn_passed_before_it_began_is_not_counted(
    given: Given, bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    late: list[limiting.Entered] = []
    refuse = limiting.Entered.refuse_late

    def refuse_the_first(entered: limiting.Entered) -> None:
        if not late:
            late.append(replace(entered, until=0.0))
            refuse(late[0])

    monkeypatch.setattr(limiting.Entered, "refuse_late", refuse_the_first)
    events, calls = bus.buffer("events", size=4), list[int]()

    async def push(group: Group, ctx: HandlerContext) -> None:
        calls.append(len(group))

    def push_in_thread(group: Group, ctx: Any) -> None:
        calls.append(len(group))

    events.handler(rate_limit=RateLimit(100))(push if kind == "async" else push_in_thread)
    await events.add_many(range(4))
    async with given.running(domains=["events"]) as worker:
        await eventually(lambda: calls)
    assert late and calls == [4]
    assert ((await events.status()).calls, worker.stats.bulk_calls, worker.stats.bulk_items) == (1, 1, 4)
    database.check_invariants()


@pytest.mark.parametrize("last", [False, True])
async def test_what_has_failed_in_a_group_burns_its_attempt_though_others_were_refused_but_not_its_last(
    given: Given, bus: CommandBus, database: Database, last: bool
) -> None:
    def judge(group: Group) -> None:
        errors = [None, PermanentCommandError("bad"), TransientCommandError("500"), RateLimitedError(after=3600)]
        for item in group:
            error = errors[item.data]
            group.succeed(item) if error is None else group.fail(item, error)

    events, _ = collected(bus, judge, retry=RetryPolicy(max_attempts=1 if last else 2, backoff=(3600,)))
    await events.add_many(range(4))
    await given.drained(domains=["events"])
    assert database.rows("SELECT reason FROM busload.scheduled") == [("RATE_LIMITED" if last else "RETRY",)]
    parked = (
        "SELECT b.data FROM busload.buffered AS b JOIN busload.command AS c ON c.command_id = b.group_id"
        " JOIN busload.troubleshooting AS t ON t.command = c.id"
    )
    assert database.rows(parked) == [(1,)]
    assert database.rows("SELECT data FROM busload.buffered ORDER BY id") == [(1,), (2,), (3,)]
    database.check_invariants()


async def test_a_refusal_without_a_limit_concerns_one_command_alone(given: Given, database: Database) -> None:
    async def refuse_the_first(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] == 0:
            raise RateLimitedError(after=3600)

    seen = given.handler(function=refuse_the_first)
    batch_id = await given.batch(commands=10)
    await given.drained()
    assert len(seen) == 10
    assert (await given.batch_now(batch_id)).completed_count == 9
    assert database.rows(REASONS) == [("RATE_LIMITED", 1)]
    assert database.count("rate_limit") == 0
    database.check_invariants()


async def test_a_handler_in_a_thread_can_be_refused(given: Given, bus: CommandBus, database: Database) -> None:
    threads: list[str] = []

    @bus.handler(DOMAIN, "Debit", rate_limit=RateLimit(100), timeout=30)
    def refuse(command: Command, ctx: Any) -> None:
        threads.append(threading.current_thread().name)
        raise RateLimitedError(after=timedelta(hours=1))

    await given.batch(commands=3)
    await given.drained(concurrency=1)
    assert len(threads) == 1
    assert database.rows(REASONS) == [("RATE_LIMITED", 3)]
    database.check_invariants()


async def test_a_refusal_without_a_time_lasts_one_period(given: Given, database: Database) -> None:
    async def refuse(command: Command, ctx: HandlerContext) -> None:
        raise RateLimitedError

    given.handler(function=refuse, rate_limit=RateLimit(1000, per=HOUR))
    await given.sent()
    await given.drained()
    left = database.value("SELECT extract(epoch FROM blocked_until - now())::float8 FROM busload.rate_limit")
    assert 3500 < left <= 3600


async def test_each_value_of_by_has_a_limit_of_its_own(given: Given) -> None:
    seen = given.handler(rate_limit=RateLimit(1, per=HOUR, by=lambda command: command.data["n"] % 3))
    await given.batch(commands=12)
    await given.drained()
    assert Counter(command.data["n"] % 3 for command in seen) == {0: 1, 1: 1, 2: 1}
    given.database.check_invariants()


async def test_a_by_that_fails_fails_its_command_alone(given: Given, bus: CommandBus, database: Database) -> None:
    def find(command: Command) -> object:
        match command.data["n"]:
            case 0:
                return []
            case 1:
                return "x" * 513
            case 2:
                return 1 / 0
            case 3:
                return "a\0b"
            case _:
                return "tenant"

    seen = given.handler(rate_limit=RateLimit(1000, by=find))
    batch_id = await given.batch(commands=10)
    await given.drained()
    assert len(seen) == 6
    assert (await given.batch_now(batch_id)).completed_count == 6
    parked = await bus.troubleshooting.list(DOMAIN)
    assert {item.last_error_code for item in parked} == {"INVALID_RATE_LIMIT_KEY"}
    [raised] = [item.last_error_message for item in parked if item.data["n"] == 2]
    assert raised is not None and "raised ZeroDivisionError: division by zero; wanted text" in raised
    database.check_invariants()


async def test_handlers_that_name_the_same_limit_share_it(given: Given) -> None:
    limit = RateLimit(4, per=HOUR, burst=4, name="bank")
    debits, credits = given.handler("Debit", rate_limit=limit), given.handler("Credit", rate_limit=limit)
    await given.batch(commands=10)
    await given.batch(commands=10, command_type="Credit")
    await given.drained()
    assert len(debits) + len(credits) == 4


async def test_other_commands_of_the_domain_go_on(given: Given, database: Database) -> None:
    """What a receiver refuses stands before, between and behind commands that it does not concern."""
    given.handler("Push", refuse_for_an_hour, rate_limit=RateLimit(10))
    seen = given.handler("Debit")
    commands = [BatchCommand("Push" if n % 3 else "Debit") for n in range(300)]
    await given.bus.create_batch(DOMAIN, commands)
    async with given.running(concurrency=10):
        await eventually(lambda: len(seen) == 100)
    database.check_invariants()


async def test_a_backlog_is_not_churned_while_it_waits(given: Given, database: Database) -> None:
    """10 calls a second, 20 slots, 2,000 commands: the worker leaves what it cannot run where it is."""
    seen = given.handler(rate_limit=RateLimit(10))
    await given.batch(commands=2000)
    async with given.running(concurrency=20) as worker:
        await eventually(lambda: len(seen) >= 30)
        claimed = worker.stats.claimed
    postponed = database.value(NOTED)
    assert claimed <= 200
    assert postponed <= 100
    database.check_invariants()


async def test_a_blocked_backlog_is_hardly_touched(given: Given, database: Database) -> None:
    """While its receiver refuses everything, a hundred commands a second go by at most, not the whole backlog."""
    limit = RateLimit(10)
    database.perform(rate.refuse((f"{DOMAIN}/Debit", ""), limit, 3600.0, None))
    seen = given.handler(rate_limit=limit)
    await given.batch(commands=10_000)
    began = time.monotonic()
    async with given.running(concurrency=20) as worker:
        await eventually(lambda: worker.stats.claims >= 10)
        claimed = worker.stats.claimed
    seconds = time.monotonic() - began
    assert seen == []
    assert claimed <= 100 * (seconds + 1)
    database.check_invariants()


async def test_what_waits_for_a_limit_does_not_start_in_a_paused_domain(
    given: Given, bus: CommandBus, database: Database
) -> None:
    seen = given.handler(rate_limit=RateLimit(0.5))
    await given.batch(commands=3)
    async with given.running(concurrency=3):
        await eventually(lambda: len(seen) == 1)
        await bus.domains.pause(DOMAIN)
        await eventually(lambda: database.count("lease") == 0)
    assert len(seen) == 1
    assert database.count("execution") == 1
    database.check_invariants()


async def test_a_worker_that_stops_gives_back_what_waits(given: Given, database: Database) -> None:
    seen = given.handler(rate_limit=RateLimit(0.3))
    await given.batch(commands=2)
    async with given.running(concurrency=3):
        await eventually(lambda: len(seen) == 1)
        await eventually(lambda: database.count("execution") == 1)
    assert len(seen) == 1
    assert database.count("lease") == 0
    assert database.count("execution") == 1
    database.check_invariants()


async def test_a_refused_command_of_a_canceled_batch_is_canceled(
    given: Given, bus: CommandBus, database: Database
) -> None:
    begun = asyncio.Event()

    async def refuse(command: Command, ctx: HandlerContext) -> None:
        begun.set()
        await eventually(lambda: ctx.cancelled)
        raise RateLimitedError(after=3600)

    given.handler(function=refuse, rate_limit=RateLimit(10))
    batch_id = await given.batch(commands=1)
    async with given.running():
        await begun.wait()
        await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
        await eventually(lambda: database.count("lease") == 0)
    assert (await given.batch_now(batch_id)).canceled_count == 1
    database.check_invariants()


async def test_explain_says_that_a_limit_is_in_the_way(given: Given, bus: CommandBus) -> None:
    given.handler(function=refuse_for_an_hour, rate_limit=RateLimit(10, name="bank"))
    batch_id = await given.batch(commands=3)
    await given.drained()
    async with given.running():
        [reason] = (await bus.explain_batch(DOMAIN, batch_id)).reasons
    assert (reason.code, reason.count) == (Blocker.RATE_LIMITED, 3)
    assert "bank" in reason.message
    assert "busload limit show bank" in reason.advice
    [command, *_] = await bus.list_batch_commands(DOMAIN, batch_id)
    [reason] = (await bus.explain_command(DOMAIN, command.command_id)).reasons
    assert (reason.code, reason.details["limits"]) == (Blocker.RATE_LIMITED, ["bank"])


async def test_an_outage_while_calls_wait_fails_none_of_them(given: Given, database: Database) -> None:
    """The limit cannot be asked for a while, and nothing is called meanwhile; then it goes on."""
    seen = given.handler(rate_limit=RateLimit(1000), retry=RetryPolicy(max_attempts=1))
    database.rows("ALTER TABLE busload.rate_limit RENAME TO gone")
    batch_id = await given.batch(commands=5)
    async with given.running():
        await eventually(lambda: database.count("lease") > 0)
        assert seen == []
        database.rows("ALTER TABLE busload.gone RENAME TO rate_limit")
        await eventually(lambda: len(seen) == 5)
    assert (await given.batch_now(batch_id)).completed_count == 5
    database.check_invariants()


@pytest.mark.parametrize(("wait", "scheduled"), [(timedelta(seconds=0.5), 1), (timedelta(minutes=1), 0)])
async def test_a_call_holds_its_slot_for_so_long_and_waits_in_the_database_after_that(
    given: Given, database: Database, wait: timedelta, scheduled: int
) -> None:
    given.settings = replace(given.settings, wait_for_turn=wait)
    seen = given.handler("Debit", rate_limit=RateLimit(1, per=timedelta(seconds=20)))
    await given.batch(commands=2)
    async with given.running() as worker:
        await eventually(lambda: len(seen) == 1 and worker.stats.in_hand == 1 - scheduled)
        await eventually(lambda: database.count("scheduled") == scheduled)


async def test_where_there_are_no_limits_none_is_asked_for(given: Given, database: Database) -> None:
    """Whoever asked would wait for a table that is gone."""
    database.rows("ALTER TABLE busload.rate_limit RENAME TO gone")
    seen = given.handler()
    await given.batch(commands=100)
    await given.drained()
    assert len(seen) == 100


class Service:
    """A receiver that allows `limit` calls per second, counted in windows of a second, and says how long to wait."""

    WINDOW = 1.0

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.served = self.refused = 0
        self._window, self._used = 0, 0

    def call(self) -> None:
        now = time.monotonic()
        window = int(now / self.WINDOW)
        if window != self._window:
            self._window, self._used = window, 0
        if self._used >= self.limit * self.WINDOW:
            self.refused += 1
            raise RateLimitedError(after=(window + 1) * self.WINDOW - now)
        self._used += 1
        self.served += 1


async def test_an_adaptive_limit_finds_what_a_receiver_allows(given: Given) -> None:
    """It begins with 20 of 100 calls a second; how much of a limit that moves it uses is for `make chaos` to tell."""
    service = Service(limit=100)

    async def push(command: Command, ctx: HandlerContext) -> None:
        service.call()

    given.handler(function=push, rate_limit=RateLimit(20, adaptive=True), retry=RetryPolicy(max_attempts=1))
    batch_id = await given.batch(commands=3000)
    rate = "SELECT rate FROM busload.rate_limit"
    async with given.running(concurrency=100):
        await eventually(lambda: service.served >= 500, within=60)
        served, refused = service.served, service.refused
        await eventually(lambda: service.served >= served + 300, within=60)
        await eventually(lambda: 50 <= given.database.value(rate) <= 110)
    served, refused = service.served - served, service.refused - refused
    assert refused < 0.04 * (served + refused), (served, refused)
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 0

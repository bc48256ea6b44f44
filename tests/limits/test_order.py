"""Order: commands of one key run one at a time, in the order of sending, whatever becomes of their workers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    ConcurrencyLimit,
    HandlerContext,
    PermanentCommandError,
    RateLimit,
    RetryPolicy,
    SyncHandlerContext,
    TransientCommandError,
)
from busload.buffers.declaration import BufferSettings
from busload.commands import claim, rescue
from busload.commands.execution import FAILED_ATTEMPT, Leased
from busload.errors import InvalidOperationError
from busload.limits import concurrency, order, rate
from busload.limits.order import Key, OrderedClaim
from busload.postgres.plan import Plan
from busload.sync.plan import perform
from busload.worker import order as orders
from tests.given import DOMAIN, Database, Given, beside, eventually

IN_ORDER = ConcurrencyLimit(1, by="key", ordered=True)
NAME = f"{DOMAIN}/Debit"


class Ledger:
    """What ran, and whether anything of a key ran beside or before its predecessors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ran: dict[str, list[int]] = defaultdict(list)
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def begin(self, command: Command) -> None:
        with self._lock:
            key = str(command.data["key"])
            self.ran[key].append(command.data["n"])
            self.now[key] += 1
            self.most[key] = max(self.most[key], self.now[key])

    def end(self, command: Command) -> None:
        with self._lock:
            self.now[str(command.data["key"])] -= 1

    async def call(self, command: Command, ctx: HandlerContext) -> None:
        self.begin(command)
        await asyncio.sleep(0.001)
        self.end(command)

    @property
    def all_ran(self) -> int:
        return sum(map(len, self.ran.values()))

    @property
    def in_order(self) -> bool:
        return all(ran == sorted(ran) for ran in self.ran.values()) and set(self.most.values()) <= {1}


async def sent(given: Given, count: int, keys: int = 1, *, first: int = 0, **options: Any) -> UUID:
    commands = [BatchCommand("Debit", data={"key": n % keys, "n": first + n}) for n in range(count)]
    return await given.bus.create_batch(DOMAIN, commands, **options)


# -- in order ----------------------------------------------------------------------------------------------------------


async def test_commands_of_a_key_run_in_the_order_of_sending_one_at_a_time(given: Given, database: Database) -> None:
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER)
    batch_id = await sent(given, 100, keys=5)
    async with given.running(concurrency=10), given.running(concurrency=10), given.running(concurrency=10):
        await eventually(lambda: ledger.all_ran == 100)
        await eventually(database.is_at_rest)
    assert ledger.in_order
    assert (await given.batch_now(batch_id)).completed_count == 100
    await eventually(lambda: database.count("first_in_order") == 0)
    database.check_invariants()


async def test_drain_runs_all_in_order(given: Given, database: Database) -> None:
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER)
    await sent(given, 30, keys=3)
    assert await given.drained(concurrency=10) == 30
    assert ledger.in_order
    assert database.count("first_in_order") == 0


# -- each interleaving -------------------------------------------------------------------------------------------------


def key_of(one: Leased) -> Key:
    assert one.data is not None
    return Key(NAME, str(json.loads(one.data)["key"]))


def claiming(worker: int, limit: int = 100) -> Plan[OrderedClaim]:
    return order.claim_in_order(
        worker=worker,
        domain=DOMAIN,
        limit=limit,
        suspects=True,
        owned=True,
        keys=lambda leased: {one: key_of(one) for one in leased},
    )


def claimed(given: Given, worker: int, limit: int = 100) -> list[Leased]:
    """What a worker without a process behind it may run after a claim."""
    taken: OrderedClaim = given.database.perform(claiming(worker, limit))
    return taken.first


def numbers(leased: Sequence[Leased]) -> list[int]:
    return [json.loads(one.data or "")["n"] for one in leased]


def advanced(given: Given, *keys: str) -> int:
    count: int = given.database.perform(order.advance([Key(NAME, key) for key in keys or ("0",)]))
    return count


async def test_only_the_first_of_each_key_may_run_and_the_others_wait(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    await sent(given, 6, keys=2)
    assert numbers(claimed(given, worker)) == [0, 1]
    assert database.rows("SELECT reason, limit_subject FROM busload.scheduled ORDER BY hi") == [
        ("LIMITED", "0"), ("LIMITED", "1"), ("LIMITED", "0"), ("LIMITED", "1"),
    ]  # fmt: skip
    assert claimed(given, given.registered_worker()) == []
    database.check_invariants()


async def test_the_next_one_runs_after_the_result_is_settled_and_not_before(given: Given, database: Database) -> None:
    """If it ran when the call has ended, and the worker died before the flush, the command would run after it."""
    worker = given.registered_worker()
    await sent(given, 3)
    first = claimed(given, worker)
    assert advanced(given) == 0 and claimed(given, worker) == []
    given.settled(first)
    assert advanced(given) == 1
    assert numbers(claimed(given, worker)) == [1]
    assert advanced(given) == 0


async def test_nobody_who_is_sent_meanwhile_overtakes_the_next(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    await sent(given, 2)
    given.settled(claimed(given, worker))
    await sent(given, 1, first=2)
    assert claimed(given, worker) == []  # the first has ended, and nobody has told of it yet
    assert advanced(given) == 1
    assert numbers(claimed(given, worker)) == [1]


async def test_what_waits_for_its_predecessors_is_never_due_however_long_they_take(
    given: Given, database: Database
) -> None:
    worker = given.registered_worker()
    await sent(given, 5)
    first = claimed(given, worker)
    assert database.rows("SELECT DISTINCT run_at = 'infinity' FROM busload.scheduled") == [(True,)]
    database.perform(claim.promote())
    assert database.count("queue") == 0
    for expected in range(5):
        assert numbers(first) == [expected]
        given.settled(first)
        advanced(given)
        first = claimed(given, worker)
    database.check_invariants()


async def test_a_limit_that_was_not_ordered_before_does_not_wake_what_waits_in_order(
    given: Given, database: Database
) -> None:
    await sent(given, 5)
    assert numbers(claimed(given, given.registered_worker())) == [0]
    database.rows("INSERT INTO busload.concurrency_limit (name, most) VALUES (%s, 1)", NAME)
    assert database.perform(concurrency.wake_forgotten()) == 0
    assert (database.count("queue"), database.count("scheduled")) == (0, 4)


async def test_a_worker_with_more_slots_than_a_claim_takes_claims_again_at_once(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would take a claim that was cut short for the last one, and wait for a poll of an hour."""
    monkeypatch.setattr(order, "MOST", 10)
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER)
    await sent(given, 30)
    claimed(given, given.registered_worker(), 1)  # the first of the key runs elsewhere
    await given.bus.send(DOMAIN, "Debit", data={"key": "other", "n": 0})
    async with given.running(concurrency=50, settings=replace(given.settings, poll_every=timedelta(hours=1))):
        await eventually(lambda: ledger.ran["other"] == [0])


async def test_a_by_that_is_slow_makes_claims_smaller_and_stops_nothing(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "IDLE", 250)
    monkeypatch.setattr(orders, "KEYS_WITHIN", 0.05)
    ledger = Ledger()

    def by(command: Command) -> str:
        time.sleep(0.01)  # the function is slow: what the test is about
        return str(command.data["n"])

    given.handler(function=ledger.call, concurrency_limit=ConcurrencyLimit(1, by=by, ordered=True))
    await sent(given, 60)
    async with given.running(concurrency=60):
        await eventually(lambda: ledger.all_ran == 60)
        await eventually(database.is_at_rest)


async def test_a_retry_runs_before_its_successors(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    await sent(given, 2)
    given.settled(claimed(given, worker), FAILED_ATTEMPT, delay=3600.0)
    assert advanced(given) == 0 and claimed(given, worker) == []
    database.rows("UPDATE busload.scheduled SET run_at = now() WHERE reason = 'RETRY'")
    database.perform(claim.promote())
    assert numbers(claimed(given, worker)) == [0]


async def test_what_a_dead_worker_ran_runs_again_before_its_successors(given: Given, database: Database) -> None:
    dead, alive = given.registered_worker(), given.registered_worker()
    await sent(given, 2)
    claimed(given, dead)
    given.died(dead)
    given.rescued()
    assert advanced(given) == 0 and database.perform(order.sweep()) == 0
    assert numbers(claimed(given, alive)) == [0]


async def test_what_is_handed_back_stays_the_first(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    await sent(given, 2)
    [first] = claimed(given, worker)
    database.perform(claim.give_back({first.lease: [first.id]}))
    assert advanced(given) == 0
    assert numbers(claimed(given, worker)) == [0]


async def test_what_is_put_off_by_its_rate_stays_the_first(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    await sent(given, 2)
    [first] = claimed(given, worker)
    database.perform(rate.postpone([rate.Late(first.lease, first.id, 3600.0, "crm")]))
    assert advanced(given) == 0 and database.perform(order.sweep()) == 0
    given.database.rows("UPDATE busload.scheduled SET run_at = now() WHERE reason = 'RATE_LIMITED'")
    database.perform(claim.promote())
    assert numbers(claimed(given, worker)) == [0]


async def test_one_that_waits_for_a_person_steps_out_and_is_sorted_in_when_it_is_back(
    given: Given, database: Database
) -> None:
    ledger = Ledger()

    async def call(command: Command, ctx: HandlerContext) -> None:
        await ledger.call(command, ctx)
        if command.data["n"] == 0 and ctx.attempt == 1:
            raise PermanentCommandError("account closed")

    given.handler(function=call, concurrency_limit=IN_ORDER)
    await sent(given, 2)
    assert await given.drained() == 2
    assert ledger.ran["0"] == [0, 1]
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    await sent(given, 3, first=2)
    worker = given.registered_worker()
    [running] = claimed(given, worker)
    assert numbers([running]) == [2]
    await given.bus.troubleshooting.retry(DOMAIN, item.command_id, operator="ann")
    await given.drained()
    assert claimed(given, worker) == []  # it has come back behind the one that runs
    given.settled([running])
    advanced(given)
    await given.drained()
    assert ledger.ran["0"] == [0, 1, 0, 3, 4]


@pytest.mark.parametrize("how", ["cancel", "hold", "reschedule", "cancel the next"])
async def test_what_leaves_the_line_from_outside_lets_the_next_one_run_with_the_next_sweep(
    given: Given, database: Database, how: str
) -> None:
    worker, bus = given.registered_worker(), given.bus
    batch_id = await sent(given, 1)
    await sent(given, 2, first=1)
    [first] = claimed(given, worker)
    database.perform(claim.give_back({first.lease: [first.id]}))
    assert database.perform(order.sweep()) == 0
    following = 1
    if how == "cancel":
        await bus.cancel_command(DOMAIN, first.command_id, reason="no")
    elif how == "hold":
        await bus.hold_batch(DOMAIN, batch_id, reason="wait")
    elif how == "reschedule":
        await bus.reschedule_command(DOMAIN, first.command_id, run_at=datetime.now(UTC) + timedelta(hours=1))
    else:
        [first] = claimed(given, worker)
        second = database.value("SELECT c.command_id FROM busload.command c ORDER BY id OFFSET 1 LIMIT 1")
        await bus.cancel_command(DOMAIN, second, reason="no")
        given.settled([first])
        following = 2
    assert database.perform(order.sweep()) == 1
    assert numbers(claimed(given, worker)) == [following]
    if how == "hold":  # it is sorted in by its id among those that wait
        await bus.resume_batch(DOMAIN, batch_id)
        assert claimed(given, worker) == []
        assert database.value("SELECT min(lo) FROM busload.scheduled WHERE reason = 'LIMITED'") == first.id


async def test_a_load_that_somebody_has_locked_is_not_overtaken(given: Given, database: Database, dsn: str) -> None:
    """An open transaction cancels a command, say; it may yet be rolled back."""
    worker = given.registered_worker()
    await sent(given, 1)
    await sent(given, 1, first=1, priority=5)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT FROM busload.queue ORDER BY hi LIMIT 1 FOR UPDATE")
        taken = database.perform(claiming(worker))
        assert (taken.leased, taken.contended) == ([], True)
    assert numbers(claimed(given, worker)) == [0]


async def test_what_is_not_published_yet_is_not_overtaken(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    await sent(given, 1)
    await sent(given, 1, first=1)
    database.rows(
        "WITH gone AS (DELETE FROM busload.queue WHERE hi = (SELECT min(hi) FROM busload.queue) RETURNING *)"
        " INSERT INTO busload.outbox (lo, hi, domain, batch_id, fair, transport)"
        " SELECT lo, hi, domain, batch_id, fair, 'nats' FROM gone"
    )
    taken = database.perform(claiming(worker))
    assert (taken.leased, taken.contended, taken.barred) == ([], False, True)


async def test_one_worker_at_a_time_claims_in_a_domain(given: Given, database: Database, dsn: str) -> None:
    """The second sees what the first has entered, though it asked before that was committed."""
    worker = given.registered_worker()
    await sent(given, 4, keys=2)
    with psycopg.connect(dsn) as conn:
        taken = perform(conn, claiming(worker, limit=1))
        assert numbers(taken.first) == [0]
        thread, answers = beside(dsn, partial(claiming, worker))
        assert answers == []
    thread.join(60)
    assert numbers(answers[0].first) == [1]


async def test_a_client_that_freezes_within_its_claim_is_disconnected_and_its_claim_undone(
    given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = given.registered_worker()
    await sent(given, 2)
    with closing(psycopg.connect(dsn)) as frozen:
        with monkeypatch.context() as patch:
            patch.setattr(order, "IDLE", 1000)
            assert numbers(perform(frozen, claiming(worker)).first) == [0]
        there = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        await eventually(lambda: database.value(there, frozen.info.backend_pid) == 0, within=10)
    assert numbers(claimed(given, worker)) == [0]


async def test_commands_are_claimed_in_the_order_of_sending_whatever_their_priority(
    given: Given, database: Database
) -> None:
    for n, priority in enumerate((0, 5, -3, 5, 0)):
        await sent(given, 1, first=n, priority=priority)
    taken = [numbers(database.perform(claiming(given.registered_worker(), limit=1)).leased) for _ in range(5)]
    assert taken == [[0], [1], [2], [3], [4]]


async def test_a_worker_whose_answer_was_lost_hands_back_and_the_first_is_still_the_first(
    given: Given, database: Database
) -> None:
    worker = given.registered_worker()
    await sent(given, 2)
    [first] = claimed(given, worker)  # nobody got this answer
    database.perform(rescue.release([first.lease.lease_id]))
    assert database.perform(order.sweep()) == 0
    assert numbers(claimed(given, worker)) == [0]


# -- the worker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["returns", "fails", "own transaction", "in a thread"])
async def test_whatever_a_call_ends_with_the_next_one_follows(given: Given, database: Database, how: str) -> None:
    """No sweep comes to its help, and no flush waits for others to join it, though something else runs."""
    ledger, go = Ledger(), asyncio.Event()

    async def other(command: Command, ctx: HandlerContext) -> None:
        ledger.ran["other"].append(0)
        await go.wait()

    async def call(command: Command, ctx: HandlerContext) -> None:
        await ledger.call(command, ctx)
        if how == "own transaction":
            async with ctx.transaction() as conn:
                await conn.execute("SELECT 1")
        if how == "fails" and ctx.attempt == 1:
            raise TransientCommandError("once more") if command.data["n"] % 2 else PermanentCommandError("never")

    def in_thread(command: Command, ctx: SyncHandlerContext) -> None:
        ledger.begin(command)
        ledger.end(command)

    function: Any = in_thread if how == "in a thread" else call
    given.bus.handler(DOMAIN, "Debit", concurrency_limit=IN_ORDER, retry=RetryPolicy(backoff=(0.001,)))(function)
    given.handler("Other", other)
    await given.sent("Other")
    slow = replace(given.settings, sweep_every=timedelta(hours=1), flush_every=timedelta(seconds=5))
    async with given.running(concurrency=5, settings=slow):
        await eventually(lambda: ledger.ran["other"] == [0])
        await sent(given, 6)
        try:
            await eventually(lambda: len(set(ledger.ran["0"])) == 6, within=20)  # six flushes would take longer
        finally:
            go.set()
    assert ledger.in_order


async def test_a_thread_that_outlives_its_time_keeps_its_successors_waiting(
    given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    ledger, go = Ledger(), threading.Event()

    def call(command: Command, ctx: SyncHandlerContext) -> None:
        ledger.begin(command)
        if ctx.attempt == 1 and command.data["n"] == 0:
            go.wait(60)
        ledger.end(command)

    options: dict[str, Any] = {"timeout": 0.05, "retry": RetryPolicy(max_attempts=3, backoff=(0.01,))}
    given.bus.handler(DOMAIN, "Debit", concurrency_limit=IN_ORDER, **options)(call)
    ran = given.handler("Other")
    await sent(given, 2)
    async with given.running(concurrency=5):
        try:
            await eventually(lambda: "still runs after" in caplog.text)
            for _ in range(5):  # rounds in which the retry would have come
                before = len(ran)
                await given.sent("Other")
                await eventually(partial(lambda before: len(ran) > before, before))
            assert ledger.all_ran == 1
        finally:
            go.set()
        await eventually(database.is_at_rest)
    assert ledger.ran["0"] == [0, 0, 1] and ledger.in_order


async def test_it_goes_together_with_a_rate_limit(given: Given, database: Database) -> None:
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER, rate_limit=RateLimit(200, burst=1))
    await sent(given, 10)
    async with given.running(concurrency=10):
        await eventually(database.is_at_rest)
    assert ledger.ran["0"] == list(range(10)) and ledger.in_order


async def test_a_worker_that_may_be_dead_begins_none(given: Given, database: Database) -> None:
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER)
    seldom = replace(given.settings, lease_for=timedelta(seconds=120))  # no heartbeat comes between
    async with given.running(settings=seldom) as worker:
        await sent(given, 1)
        await eventually(lambda: ledger.all_ran == 1)
        assert worker._run is not None
        worker._run._heartbeat.stop()  # one that comes because the worker has begun to listen would say that it lives
        shared = worker._run._shared
        lasts = shared.lease_seconds
        shared.renewed_at -= lasts
        released = "SELECT count(*) FROM busload.event WHERE type = 'RELEASED'"
        await sent(given, 2, first=1)
        await eventually(lambda: ledger.all_ran > 1 or database.value(released) > 0)
        assert ledger.all_ran == 1
        shared.renewed_at += lasts
        await eventually(database.is_at_rest)
    assert ledger.ran["0"] == [0, 1, 2]


async def test_a_worker_that_was_declared_dead_and_is_back_keeps_to_the_order(given: Given, database: Database) -> None:
    ledger, go = Ledger(), asyncio.Event()

    async def call(command: Command, ctx: HandlerContext) -> None:
        ledger.begin(command)
        await go.wait()
        ledger.end(command)

    given.handler(function=call, concurrency_limit=IN_ORDER)
    await sent(given, 3)
    often = replace(given.settings, lease_for=timedelta(seconds=3))  # a heartbeat a second
    async with given.running(settings=often):
        await eventually(lambda: ledger.all_ran == 1)
        database.bury()
        await eventually(lambda: database.value("SELECT count(*) FROM busload.worker") == 2)
        database.perform(order.sweep())
        go.set()
        await eventually(database.is_at_rest)
    assert list(dict.fromkeys(ledger.ran["0"])) == [0, 1, 2]


async def test_other_types_of_the_domain_go_along(given: Given, database: Database) -> None:
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER)
    limited = given.handler("Limited", concurrency_limit=ConcurrencyLimit(2))
    plain = given.handler("Plain")
    await sent(given, 4)
    for _ in range(3):
        await given.sent("Plain")
        await given.sent("Limited")
    await given.sent("Unknown")
    await given.drained()
    assert (len(plain), len(limited), ledger.ran["0"]) == (3, 3, [0, 1, 2, 3])
    assert database.rows("SELECT reason FROM busload.scheduled") == [("NO_HANDLER",)]


async def test_a_key_that_is_none_parks_its_command_alone(given: Given, database: Database) -> None:
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by=lambda command: command.data["key"], ordered=True))
    await given.bus.create_batch(DOMAIN, [BatchCommand("Debit", data=data) for data in ({"key": 1}, {}, {"key": 1})])
    await given.drained()
    assert len(seen) == 2
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    assert item.last_error_code == "INVALID_LIMIT_KEY"


# -- sending -----------------------------------------------------------------------------------------------------------


async def test_who_sends_after_another_send_has_returned_gets_a_higher_id(given: Given, database: Database) -> None:
    """Two senders, batches and single sends that leave together: each is sent after the one before has returned."""
    database.perform(order.register_domain(DOMAIN))
    async with CommandBus(given.bus.dsn) as other:
        for n in range(3):
            await given.sent(data={"n": 5 * n})
            await other.send(DOMAIN, "Debit", data={"n": 5 * n + 1})
            await given.sent(data={"n": 5 * n + 2}, priority=3)
            await given.bus.create_batch(DOMAIN, [BatchCommand("Debit", data={"n": 5 * n + 3})])
            await given.sent(data={"n": 5 * n + 4})
    found = [n for (n,) in database.rows("SELECT (data ->> 'n')::int FROM busload.command ORDER BY id")]
    assert found == list(range(15))


async def test_a_domain_that_no_worker_has_claimed_in_order_for_a_month_is_forgotten(
    given: Given, database: Database
) -> None:
    """Unless it is paused. A worker that serves the domain says so again"""
    for domain in ("gone", "new", "paused"):
        database.perform(order.register_domain(domain))
    await given.bus.domains.pause("paused", reason="for long")
    database.rows("UPDATE busload.ordered_domain SET used_at = now() - interval '31 days' WHERE domain <> 'new'")
    given.handler(concurrency_limit=ConcurrencyLimit(1, by="n", ordered=True))
    await given.drained()
    known = "SELECT domain FROM busload.ordered_domain ORDER BY 1"
    assert database.rows(known) == [("new",), ("paused",), (DOMAIN,)]


async def test_a_worker_says_once_a_day_that_it_claims_a_domain_in_order(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    given.handler(concurrency_limit=ConcurrencyLimit(1, by="n", ordered=True))
    monkeypatch.setattr("busload.worker.order.REGISTERED_FOR", 0.0)
    forgotten = "DELETE FROM busload.ordered_domain RETURNING domain"
    async with given.running():
        for _ in range(2):
            await eventually(lambda: database.rows(forgotten))


# -- what people see ---------------------------------------------------------------------------------------------------


async def test_explain_says_that_commands_wait_for_their_predecessors(given: Given, database: Database) -> None:
    batch_id = await sent(given, 3)
    claimed(given, given.registered_worker())
    explained = await given.bus.explain_batch(DOMAIN, batch_id)
    [reason] = [reason for reason in explained.reasons if reason.code == "LIMITED"]
    assert reason.count == 2
    assert reason.message == f"2 commands wait for their predecessors in the order of {NAME}."


async def test_the_list_of_limits_shows_the_first_of_each_key(given: Given, database: Database) -> None:
    worker = given.registered_worker()
    await sent(given, 3)
    [first] = claimed(given, worker)
    [status] = await given.bus.limits.concurrency()
    assert (status.name, status.subject, status.most, status.running, status.waiting) == (NAME, "0", 1, 1, 2)
    assert (status.workers, status.commands) == (("given",), (first.command_id,))
    given.settled([first], FAILED_ATTEMPT, delay=3600.0)
    [status] = await given.bus.limits.concurrency(NAME)
    assert (status.running, status.waiting, status.workers, status.commands) == (0, 2, (), (first.command_id,))


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"calls": 2, "by": "key"}, "ordered=True needs one call at a time, found calls=2"),
        ({"calls": 1}, "ordered=True needs a `by`"),
        ({"calls": 1, "by": "key", "ordered": 1}, "ordered must be True or False, found 1"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_where_it_is_made(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        ConcurrencyLimit(**{"ordered": True, **wrong})
    assert said in str(refused.value)


def test_only_single_commands_run_in_order() -> None:
    bus = CommandBus("postgresql://nowhere")
    limit = ConcurrencyLimit(1, by=lambda chunk: 1, ordered=True)
    with pytest.raises(InvalidOperationError, match="only single commands run in order, and this handler gets a chunk"):
        bus.bulk_handler("crm", "Push", concurrency_limit=limit)(Ledger().call)
    with pytest.raises(InvalidOperationError, match="this handler gets a group"):
        bus.handlers.add("crm", "busload.Group", buffer=BufferSettings("crm"), concurrency_limit=limit)(Ledger().call)
    assert bus.handlers.ordered == set()


def test_handlers_that_share_a_name_agree_on_the_order() -> None:
    bus = CommandBus("postgresql://nowhere")
    bus.handler("crm", "Push", concurrency_limit=ConcurrencyLimit(1, by="key", name="crm"))(Ledger().call)
    with pytest.raises(
        InvalidOperationError, match="'crm' has ordered=False for crm/Push, and ordered=True for crm/Ge"
    ):
        bus.handler("crm", "Get", concurrency_limit=ConcurrencyLimit(1, by="key", name="crm", ordered=True))(
            Ledger().call
        )

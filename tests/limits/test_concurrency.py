"""Concurrency limits: never more calls at a time than a receiver takes, whatever becomes of the workers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import (
    BatchCommand,
    Chunk,
    ChunkContext,
    Command,
    CommandBus,
    ConcurrencyLimit,
    Group,
    HandlerContext,
    RateLimit,
    RetryPolicy,
    SyncHandlerContext,
    TransientCommandError,
    Worker,
)
from busload.commands.execution import Leased
from busload.errors import InvalidOperationError
from busload.limits import concurrency
from busload.limits.concurrency import MANY, Granted, Held, Request, Singles
from busload.postgres.plan import Plan, execute
from busload.sync.plan import perform
from busload.worker import claimer, lifecycle
from busload.worker.lifecycle import Run
from busload.worker.permits import MADE_TWICE
from busload.worker.sweep import sweep
from tests.given import DOMAIN, Database, Given, beside, eventually


class InFlight:
    """Counts the calls that run, by key, and remembers the most that ran at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.calls = 0
        self.go = asyncio.Event()
        self.go.set()

    def begin(self, key: str) -> None:
        with self._lock:
            self.calls += 1
            self.now[key] += 1
            self.most[key] = max(self.most[key], self.now[key])

    def end(self, key: str) -> None:
        with self._lock:
            self.now[key] -= 1

    async def call(self, command: Command, ctx: HandlerContext) -> None:
        key = str(command.data["key"])
        self.begin(key)
        await self.go.wait()
        await asyncio.sleep(0.002)
        self.end(key)


def by_key(command: Command) -> str:
    return str(command.data["key"])


async def sent(given: Given, count: int, keys: int = 1, command_type: str = "Debit") -> UUID:
    commands = [BatchCommand(command_type, data={"key": n % keys, "n": n}) for n in range(count)]
    return await given.bus.create_batch(DOMAIN, commands)


def take(requests: Sequence[Request], *, worker: int) -> Plan[list[int | None]]:
    """Ask for permits; returns their numbers."""
    granted = yield from concurrency.take(requests, worker=worker)
    return [*granted.numbers]


def free(permit: Held) -> Plan[int]:
    return concurrency.free([(permit.alone(), [0])])


def held_by(given: Given, worker: int, subject: str = "0", name: str = f"{DOMAIN}/Debit", calls: int = 1) -> Held:
    """Another worker, without a process behind it, holds a permit: for a command of its own."""
    [other] = given.claimed(by=worker)
    request = Request(name, subject, calls, [(other.lease, other.id)])
    [permit] = given.database.perform(take([request], worker=worker))
    assert permit
    return Held(name, subject, permit)


def run(worker: Worker) -> Run:
    assert worker._run is not None
    return worker._run


def reasons(database: Database) -> Counter[str]:
    return Counter(dict(database.rows("SELECT reason, sum(hi - lo + 1)::int FROM busload.scheduled GROUP BY reason")))


# -- how many at a time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 3])
async def test_never_more_calls_of_a_key_run_than_its_limit(given: Given, database: Database, calls: int) -> None:
    flights = InFlight()
    given.handler(function=flights.call, concurrency_limit=ConcurrencyLimit(calls, by=by_key))
    batch_id = await sent(given, 60, keys=3)
    async with given.running(concurrency=20), given.running(concurrency=20):
        await eventually(lambda: flights.calls == 60)
        await eventually(lambda: database.is_at_rest())
    assert set(flights.most.values()) == {calls}
    assert (await given.batch_now(batch_id)).completed_count == 60
    assert database.count("permit") == 0
    database.check_invariants()


async def test_however_many_ask_at_once_no_permit_is_given_twice(given: Given, dsn: str) -> None:
    """Eight ask for the same sixty keys, each in another order; nobody waits for ever."""
    worker = given.registered_worker()
    await given.batch(8 * 60)
    leased = [given.claimed(60, by=worker) for _ in range(8)]
    start = threading.Barrier(8)

    def ask(nth: int) -> list[int | None]:
        mine = [(f"key {n}", one) for n, one in enumerate(leased[nth])]
        random.Random(nth).shuffle(mine)
        requests = [Request("crm", key, 3, [(one.lease, one.id)]) for key, one in mine]
        with Database(dsn) as mine_alone:
            start.wait(60)
            answers: list[int | None] = mine_alone.perform(take(requests, worker=worker))
            return answers

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(8)))
    granted = [answer for each in answers for answer in each if answer != 0]
    assert len(granted) == len(set(granted)) == 180
    held = given.database.rows("SELECT count(*) FROM busload.permit GROUP BY limit_subject")
    assert {count for (count,) in held} == {3}
    assert reasons(given.database) == {"LIMITED": 300}
    given.database.check_invariants()


async def test_who_asks_while_a_permit_is_being_taken_waits_for_the_answer(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    given.database.rows("INSERT INTO busload.concurrency_limit (name, most) VALUES ('crm', 1)")
    await given.batch(2)
    [first], [second] = given.claimed(by=worker), given.claimed(by=worker)
    requests = [Request("crm", "", 1, [(one.lease, one.id)]) for one in (first, second)]
    with psycopg.connect(dsn) as conn:
        [permit] = perform(conn, take(requests[:1], worker=worker))
        assert permit
        thread, answers = beside(dsn, partial(take, requests[1:], worker=worker))
        assert answers == []
    thread.join(60)
    assert answers == [[0]]
    assert reasons(given.database) == {"LIMITED": 1}


async def test_who_asks_while_a_permit_is_being_freed_gets_it(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    await given.batch(2)
    permit = held_by(given, worker, name="crm")
    [one] = given.claimed(by=worker)
    with psycopg.connect(dsn) as conn:
        assert perform(conn, free(permit)) == 0
        request = Request("crm", permit.subject, 1, [(one.lease, one.id)])
        thread, answers = beside(dsn, partial(take, [request], worker=worker))
        assert answers == []
    thread.join(60)
    assert len(answers) == 1
    assert answers[0][0] not in (0, None, permit.permit)
    assert reasons(given.database) == {}


async def test_who_frees_a_permit_while_a_command_begins_to_wait_lets_it_ask_again(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    await given.batch(2)
    permit = held_by(given, worker, name="crm")
    [one] = given.claimed(by=worker)
    with psycopg.connect(dsn) as conn:
        request = Request("crm", permit.subject, 1, [(one.lease, one.id)])
        assert perform(conn, take([request], worker=worker)) == [0]
        thread, answers = beside(dsn, partial(free, permit))
        assert answers == []
    thread.join(60)
    assert answers == [1]
    assert reasons(given.database) == {}
    assert given.database.count("queue") == 1


async def test_while_nobody_waits_permits_of_a_key_are_taken_and_freed_side_by_side(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    await given.batch(3)
    permit = held_by(given, worker, name="crm", calls=3)
    [first], [second] = given.claimed(by=worker), given.claimed(by=worker)
    requests = [Request("crm", permit.subject, 3, [(one.lease, one.id)]) for one in (first, second)]
    with psycopg.connect(dsn) as conn:
        assert perform(conn, take(requests[:1], worker=worker)) != [0]
        assert given.database.perform(free(permit)) == 0  # does not wait for the commit above
    with psycopg.connect(dsn) as conn:
        assert perform(conn, free(permit)) == 0
        assert given.database.perform(take(requests[1:], worker=worker)) != [0]
    assert given.database.count("permit") == 2


async def granted_together(given: Given, worker: int, count: int = MANY + 10) -> Granted:
    """Permits of many keys that were granted in one answer."""
    await given.batch(count)
    asked = Singles()
    asked.add("crm", 1, [f"key {n}" for n in range(count)], given.claimed(count, by=worker))
    granted: Granted = given.database.perform(concurrency.take_single(asked, worker=worker))
    assert len(granted.numbers) == given.database.count("permit") == count
    return granted


async def test_permits_that_were_granted_together_are_given_back_without_their_index(
    given: Given, database: Database, dsn: str
) -> None:
    """Only those whose calls have ended, in whatever order they ended."""
    granted = await granted_together(given, given.registered_worker())
    scans = "SELECT pg_stat_get_xact_numscans('busload.permit_pkey'::regclass)"
    ended = list(range(5, MANY + 5))
    random.Random(1).shuffle(ended)
    with psycopg.connect(dsn) as conn:
        assert perform(conn, concurrency.free([(granted, ended)])) == 0
        assert conn.execute(scans).fetchone() == (0,)
    left = [*range(5), *range(MANY + 5, MANY + 10)]
    assert database.rows("SELECT permit FROM busload.permit ORDER BY 1") == [(granted.numbers[nth],) for nth in left]
    database.perform(concurrency.free([(granted, left)]))
    assert database.count("permit") == 0


@pytest.mark.parametrize("running", [0, 7, MANY + 9])
async def test_a_call_that_runs_keeps_its_permit_when_all_others_that_were_granted_with_it_have_ended(
    given: Given, database: Database, running: int
) -> None:
    granted = await granted_together(given, given.registered_worker())
    database.perform(concurrency.free([(granted, [n for n in range(MANY + 10) if n != running])]))
    assert database.rows("SELECT permit FROM busload.permit") == [(granted.numbers[running],)]


async def test_permits_are_given_back_wherever_their_rows_are_now(given: Given, database: Database) -> None:
    """The table was written anew; a permit was adopted; another worker has freed one."""
    granted = await granted_together(given, given.registered_worker())
    database.rows("VACUUM FULL busload.permit")
    database.perform(concurrency.adopt([(granted, 3, 1024)], worker=given.registered_worker()))
    database.rows("DELETE FROM busload.permit WHERE limit_subject = 'key 9'")
    database.perform(concurrency.free([(granted, list(range(MANY + 10)))]))
    assert database.count("permit") == 0


async def test_permits_that_are_given_back_together_let_those_ask_that_wait_for_them(
    given: Given, database: Database
) -> None:
    worker = given.registered_worker()
    granted = await granted_together(given, worker)
    await given.batch(2)
    late = [
        Request("crm", f"key {n}", 1, [(one.lease, one.id)])
        for n, one in zip((0, MANY + 9), given.claimed(2, by=worker), strict=True)
    ]
    assert database.perform(take(late, worker=worker)) == [0, 0]
    assert database.perform(concurrency.free([(granted, list(range(MANY)))])) == 1
    assert reasons(database) == {"LIMITED": 1}
    assert database.count("queue") == 1
    database.check_invariants()


@pytest.mark.parametrize(("held", "asked"), [(300, 300), (300, 2), (2, 300), (2, 2)])
@pytest.mark.parametrize("space", [27711006, 27711009])
async def test_limits_are_locked_against_each_other_however_many_are_locked_at_once(
    dsn: str, space: int, held: int, asked: int
) -> None:
    """Many limits have one lock, few have their own: of a limit that both need, the second waits for the first."""

    def lock(count: int) -> Plan[Any]:
        subjects = [f"key {n}" for n in range(count)]
        return execute(
            b"SELECT busload.lock_limits(%(space)s::integer, ARRAY['crm'], %(subjects)s::text[], true)::text",
            space=space,
            subjects=subjects,
        )

    with psycopg.connect(dsn) as conn:
        perform(conn, lock(held))
        thread, answers = beside(dsn, partial(lock, asked))
        assert answers == []
    thread.join(60)
    assert len(answers) == 1


@pytest.mark.parametrize("length", [10, 2 * MADE_TWICE])
async def test_a_call_gets_its_command_whether_it_was_kept_since_its_key_was_asked_for_or_not(
    given: Given, length: int
) -> None:
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    command_id = await given.sent(data={"key": 7, "text": length * "x"}, task_key="order 7")
    async with given.running():
        await eventually(lambda: len(seen) == 1)
    [command] = seen
    assert command.command_id == command_id
    assert command.data == {"key": 7, "text": length * "x"}
    assert command.task_key == "order 7"


async def test_the_next_commands_are_claimed_while_permits_of_the_last_are_asked_for(
    given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "ASKED_TOGETHER", 1)
    flights = InFlight()
    given.handler(function=flights.call, concurrency_limit=ConcurrencyLimit(1, by="key"))
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT busload.lock_limits(27711006, %s, %s, true)", [[f"{DOMAIN}/Debit"], ["0", "1"]])
        await sent(given, 2, keys=2)
        async with given.running() as worker:
            await eventually(lambda: database.value("SELECT coalesce(sum(open), 0) FROM busload.lease") == 2)
            await eventually(lambda: len(run(worker)._permits.asking) == 2)
            for _ in range(3):  # they wait for an answer, and are not forgotten
                await run(worker)._hand_back_deserted()
            assert flights.calls == 0
            conn.rollback()
            await eventually(lambda: flights.calls == 2 and database.is_at_rest())
    assert database.count("permit") == 0
    assert database.rows("SELECT lo FROM busload.event WHERE type = 'RELEASED'") == []
    database.check_invariants()


async def test_handlers_in_threads_are_limited_as_well(given: Given, database: Database) -> None:
    flights, pause = InFlight(), threading.Event()

    def call(command: Command, ctx: SyncHandlerContext) -> None:
        flights.begin("all")
        pause.wait(0.005)
        flights.end("all")

    given.bus.handler(DOMAIN, "Debit", concurrency_limit=ConcurrencyLimit(2))(call)
    await sent(given, 30)
    assert await given.drained(concurrency=10) == 30
    assert flights.most["all"] == 2
    assert database.count("permit") == 0


async def test_a_thread_that_outlives_its_time_keeps_its_permit(given: Given, database: Database) -> None:
    """The call is still in flight, though its attempt has failed."""
    stuck, ended = threading.Event(), threading.Event()

    def call(command: Command, ctx: SyncHandlerContext) -> None:
        if ctx.attempt == 1 and command.data["n"] == 0:
            ended.wait(60)
        elif not ended.is_set():
            stuck.set()

    options: dict[str, Any] = {"timeout": 0.05, "retry": RetryPolicy(max_attempts=3, backoff=(0.01,))}
    given.bus.handler(DOMAIN, "Debit", concurrency_limit=ConcurrencyLimit(1), **options)(call)
    await sent(given, 2)
    async with given.running(concurrency=5):
        await eventually(lambda: reasons(database)["LIMITED"] == 2)
        ended.set()
        await eventually(database.is_at_rest)
    assert not stuck.is_set()


async def test_a_limit_is_shared_by_its_name(given: Given, database: Database) -> None:
    flights = InFlight()
    limit = ConcurrencyLimit(2, name="crm", by="key")
    given.handler("Debit", flights.call, concurrency_limit=limit)
    given.handler("Credit", flights.call, concurrency_limit=limit)
    await sent(given, 10)
    await sent(given, 10, command_type="Credit")
    assert await given.drained(concurrency=10) == 20
    assert flights.most["0"] == 2


async def test_a_limit_goes_together_with_a_rate_limit(given: Given, database: Database) -> None:
    flights = InFlight()
    given.handler(
        function=flights.call,
        concurrency_limit=ConcurrencyLimit(2, by="key"),
        rate_limit=RateLimit(1000, burst=100),
    )
    await sent(given, 20)
    async with given.running(concurrency=10):
        await eventually(lambda: flights.calls == 20)
        await eventually(database.is_at_rest)
    assert flights.most["0"] == 2
    assert database.count("permit") == 0


async def test_a_call_put_off_by_its_rate_holds_no_permit(given: Given, database: Database) -> None:
    """It would keep others waiting for as long as its receiver refuses calls."""
    flights = InFlight()
    given.handler(
        function=flights.call, concurrency_limit=ConcurrencyLimit(1), rate_limit=RateLimit(1, per=timedelta(hours=1))
    )
    await sent(given, 2)
    await given.drained()
    assert flights.calls == 1
    assert reasons(database) == {"RATE_LIMITED": 1}
    assert database.count("permit") == 0


async def test_a_retry_needs_a_permit_again(given: Given, database: Database) -> None:
    flights = InFlight()

    async def call(command: Command, ctx: HandlerContext) -> None:
        await flights.call(command, ctx)
        if ctx.attempt == 1:
            raise TransientCommandError("once more")

    given.handler(function=call, concurrency_limit=ConcurrencyLimit(1, by="key"), retry=RetryPolicy(backoff=(0.001,)))
    batch_id = await sent(given, 10)
    async with given.running(concurrency=10):
        await eventually(database.is_at_rest)
    assert flights.calls == 20 and flights.most["0"] == 1
    assert (await given.batch_now(batch_id)).completed_count == 10


async def test_the_chunks_of_a_bulk_handler_are_calls(given: Given, database: Database) -> None:
    """What waits comes back as whole chunks, not one by one."""
    flights = InFlight()

    async def push(chunk: Chunk, ctx: ChunkContext) -> None:
        flights.begin("all")
        await asyncio.sleep(0.002)
        flights.end("all")

    given.bus.bulk_handler(DOMAIN, "Debit", size=10, max_wait=0.05, concurrency_limit=ConcurrencyLimit(1))(push)
    batch_id = await sent(given, 100)
    async with given.running(concurrency=10), given.running(concurrency=10):
        await eventually(database.is_at_rest)
    assert flights.most["all"] == 1
    assert flights.calls <= 40
    assert (await given.batch_now(batch_id)).completed_count == 100
    assert database.count("permit") == 0
    database.check_invariants()


async def test_the_groups_of_a_buffer_are_calls(given: Given, database: Database) -> None:
    """Two run at once, and never three"""
    flights, both = InFlight(), asyncio.Event()
    events = given.bus.buffer("events", size=5, max_age=timedelta(milliseconds=1))

    @events.handler(concurrency_limit=ConcurrencyLimit(2, by=lambda group: group.buffer))
    async def push(group: Group, ctx: HandlerContext) -> None:
        flights.begin(group.buffer)
        if flights.most[group.buffer] == 2:
            both.set()
        await both.wait()
        await asyncio.sleep(0.002)
        flights.end(group.buffer)

    await events.add_many([{"n": n} for n in range(50)])
    async with given.running(domains=["events"], concurrency=10):
        await eventually(both.is_set)
        await eventually(lambda: database.count("buffered") == 0)
        await eventually(database.is_at_rest)
    assert flights.most["events"] == 2
    assert database.count("permit") == 0


# -- what waits --------------------------------------------------------------------------------------------------------


async def test_what_waits_for_a_limit_holds_no_slot_and_is_explained(given: Given, database: Database) -> None:
    flights = InFlight()
    flights.go.clear()
    given.handler(function=flights.call, concurrency_limit=ConcurrencyLimit(1, by="key", name="crm"))
    others = given.handler("Other")
    batch_id = await sent(given, 10)
    async with given.running(concurrency=2) as worker:
        await eventually(lambda: reasons(database)["LIMITED"] == 9)
        await given.sent("Other")
        await eventually(lambda: len(others) == 1)
        explained = await given.bus.explain_batch(DOMAIN, batch_id)
        [reason] = [reason for reason in explained.reasons if reason.code == "LIMITED"]
        assert reason.count == 9
        assert reason.details["limits"] == ["crm"]
        assert "9 commands wait for a concurrency limit, crm" in reason.message
        [status] = await given.bus.limits.concurrency()
        assert (status.name, status.subject, status.most, status.running, status.waiting) == ("crm", "0", 1, 1, 9)
        assert status.workers == (worker.name,)
        assert len(status.commands) == 1 and status.since is not None
        assert await given.bus.limits.concurrency("other") == []
        waiting = await given.bus.list_batch_commands(DOMAIN, batch_id, limit=20)
        assert Counter(one.status for one in waiting) == {"IN_PROGRESS": 1, "SCHEDULED": 9}
        assert {one.attempts for one in waiting if one.status == "SCHEDULED"} == {0}
        flights.go.set()
        await eventually(lambda: flights.calls == 10)
        await eventually(database.is_at_rest)
    audit = await given.bus.get_audit_trail(DOMAIN, waiting[-1].command_id)
    assert [event.details for event in audit if event.type == "LIMITED"] == [{"limit": "crm", "by": "0"}]
    assert flights.most["0"] == 1


async def test_what_waits_is_woken_by_the_lowest_id(given: Given, database: Database) -> None:
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    permit = None
    await sent(given, 1)
    worker = given.registered_worker()
    permit = held_by(given, worker)
    await sent(given, 3)
    await given.drained()
    assert seen == [] and reasons(database) == {"LIMITED": 3}
    assert database.perform(free(permit)) == 1
    [(lo,)] = database.rows("SELECT lo FROM busload.queue")
    assert lo < database.value("SELECT min(lo) FROM busload.scheduled")
    assert await given.drained() == 3
    assert [command.data["n"] for command in seen] == [0, 1, 2]


async def test_a_canceled_batch_takes_back_what_waits_for_a_limit(given: Given, database: Database) -> None:
    given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    held_by(given, given.registered_worker())
    batch_id = await sent(given, 3)
    await given.drained()
    await given.bus.cancel_batch(DOMAIN, batch_id, reason="stop")
    assert (await given.batch_now(batch_id)).canceled_count == 3
    database.check_invariants()


async def test_what_was_to_ask_and_was_canceled_does_not_keep_others_waiting(given: Given, database: Database) -> None:
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    permit = held_by(given, given.registered_worker())
    first, second = await sent(given, 1), await sent(given, 1)
    await given.drained()
    assert reasons(database) == {"LIMITED": 2}
    assert database.perform(free(permit)) == 1
    await given.bus.cancel_batch(DOMAIN, first, reason="stop")
    assert database.perform(concurrency.sweep()) == 1
    await given.drained()
    assert [command.batch_id for command in seen] == [second]


async def test_a_held_batch_does_not_keep_others_waiting_for_its_limit(given: Given, database: Database) -> None:
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    permit = held_by(given, given.registered_worker())
    first, second = await sent(given, 20), await sent(given, 3)
    await given.drained()
    assert reasons(database) == {"LIMITED": 23}
    await given.bus.hold_batch(DOMAIN, first, reason="wait")
    assert reasons(database) == {"HELD": 20, "LIMITED": 3}
    assert database.perform(free(permit)) == 1
    await given.drained()
    assert [command.batch_id for command in seen] == [second] * 3
    await given.bus.resume_batch(DOMAIN, first)
    await given.drained()
    assert [command.batch_id for command in seen] == [second] * 3 + [first] * 20
    database.check_invariants()


async def test_what_begins_to_wait_for_a_limit_in_a_held_batch_does_not_keep_others_waiting(
    given: Given, database: Database
) -> None:
    """It was claimed before the hold, and asked for its permit after it."""
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    worker = given.registered_worker()
    permit = held_by(given, worker)
    first = await sent(given, 5)
    leased = given.claimed(5, by=worker)
    await given.bus.hold_batch(DOMAIN, first, reason="wait")
    late = [Request(permit.name, "0", 1, [(one.lease, one.id)]) for one in leased]
    assert database.perform(take(late, worker=worker)) == [0] * 5
    second = await sent(given, 1)
    await given.drained()
    assert database.perform(free(permit)) == 1
    await given.drained()
    assert [command.batch_id for command in seen] == [second]
    assert database.perform(concurrency.sweep()) == 0
    await given.bus.resume_batch(DOMAIN, first)
    assert database.perform(concurrency.sweep()) == 1
    await given.drained()
    assert [command.batch_id for command in seen] == [second] + [first] * 5
    database.check_invariants()


async def test_a_paused_domain_does_not_keep_others_waiting_for_their_limit(given: Given, database: Database) -> None:
    flights, limit = InFlight(), ConcurrencyLimit(1, name="crm", by="key")
    seen = given.handler("Debit", concurrency_limit=limit)
    given.bus.handler("other", "Debit", concurrency_limit=limit)(flights.call)
    await sent(given, 1)
    permit = held_by(given, given.registered_worker(), name="crm")
    await sent(given, 20)
    await given.bus.create_batch("other", [BatchCommand("Debit", data={"key": 0})] * 3)
    domains = [DOMAIN, "other"]
    await given.drained(domains=domains)
    assert reasons(database) == {"LIMITED": 23}
    await given.bus.domains.pause(DOMAIN)
    assert database.perform(free(permit)) == 1
    await given.drained(domains=domains)
    assert (len(seen), flights.calls) == (0, 3)
    assert database.perform(concurrency.sweep()) == 0
    await given.bus.domains.resume(DOMAIN)
    assert database.perform(concurrency.sweep()) == 1
    await given.drained(domains=domains)
    assert (len(seen), flights.calls) == (20, 3)
    database.check_invariants()


async def test_what_waits_for_a_limit_in_a_resumed_domain_asks_again_at_once(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with the next sweep, which is an hour away. The first one comes as the worker starts."""
    swept = asyncio.Event()

    async def sweep_and_say(*args: Any, **options: Any) -> None:
        await sweep(*args, **options)
        swept.set()

    monkeypatch.setattr(lifecycle, "sweep", sweep_and_say)
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    permit = held_by(given, given.registered_worker())
    await sent(given, 1)
    async with given.running(settings=replace(given.settings, sweep_every=timedelta(hours=1))) as worker:
        await eventually(lambda: reasons(database) == {"LIMITED": 1})
        await swept.wait()
        await given.bus.domains.pause(DOMAIN)
        await eventually(lambda: DOMAIN in run(worker)._pauses.paused)
        assert database.perform(free(permit)) == 0
        await given.bus.domains.resume(DOMAIN)
        await eventually(lambda: len(seen) == 1)


async def test_a_command_that_waits_for_a_limit_shows_no_time_at_which_it_runs(
    given: Given, database: Database
) -> None:
    given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    held_by(given, given.registered_worker())
    late = await given.bus.send(DOMAIN, "Debit", {"key": 0})
    await given.drained()
    assert reasons(database) == {"LIMITED": 1}
    command = await given.bus.get_command(DOMAIN, late.command_id)
    assert command is not None
    assert (command.status, command.run_at) == ("SCHEDULED", None)


async def test_no_more_is_claimed_than_slots_take_while_permits_are_asked_for(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that take long: what is asked for will need a slot."""
    monkeypatch.setattr(claimer, "ASKED_TOGETHER", 1)
    flights = InFlight()
    flights.go.clear()
    given.handler(function=flights.call, concurrency_limit=ConcurrencyLimit(1, by="n"))
    await sent(given, 20)
    async with given.running(concurrency=3) as worker:
        await eventually(lambda: flights.calls == 3)
        await run(worker)._claimer.once()
        assert database.value("SELECT sum(open) FROM busload.lease") == 3
        flights.go.set()
        await eventually(database.is_at_rest)


async def test_a_worker_that_stops_claims_no_further_part(
    given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permits of two parts are asked for, and the answers are late."""
    monkeypatch.setattr(claimer, "ASKED_TOGETHER", 1)
    given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT busload.lock_limits(27711006, %s, %s, true)", [[f"{DOMAIN}/Debit"], [*"01234"]])
        await sent(given, 5, keys=5)
        async with given.running(concurrency=5) as worker:
            await eventually(lambda: database.value("SELECT coalesce(sum(open), 0) FROM busload.lease") == 2)
            await eventually(lambda: len(run(worker)._permits.asking) == 2)
            claiming = run(worker)._claimer
            worker.stop()
            await eventually(lambda: claiming.stopping)
            conn.rollback()
    assert claiming.claimed == 2
    assert (database.count("lease"), database.count("permit")) == (0, 0)
    database.check_invariants()


async def test_limits_of_several_names_are_asked_for_together(given: Given, database: Database) -> None:
    """Each request has its own name and its own number of calls, whether there are permits for all or not."""
    worker = given.registered_worker()
    await given.batch(9)
    leased = given.claimed(4, by=worker) + given.claimed(5, by=worker)
    limits = [("one", 1), ("two", 2), ("two", 2)] * 3
    requests = [
        Request(name, "key", most, [(one.lease, one.id)]) for (name, most), one in zip(limits, leased, strict=True)
    ]
    answers = [*database.perform(take(requests[:3], worker=worker))]
    assert database.rows("SELECT permit, command FROM busload.permit ORDER BY command") == [
        (answer, one.id) for answer, one in zip(answers, leased[:3], strict=True)
    ]
    answers += database.perform(take(requests[3:], worker=worker))
    assert answers[3:] == [0] * 6
    count = "SELECT limit_name, limit_subject, array_agg(command ORDER BY command) FROM busload.permit GROUP BY 1, 2"
    assert sorted(database.rows(count)) == [
        ("one", "key", [leased[0].id]),
        ("two", "key", [leased[1].id, leased[2].id]),
    ]
    database.check_invariants()


async def test_a_hold_that_is_heard_while_permits_are_asked_for_is_heeded(
    given: Given, database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permits of two commands are asked for one by one, and both answers are late."""
    monkeypatch.setattr(claimer, "ASKED_TOGETHER", 1)
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    waits = "SELECT count(*) FROM pg_stat_activity WHERE pg_blocking_pids(pid) && %s::integer[]"
    lock = "SELECT busload.lock_limits(27711006, ARRAY[%s], ARRAY[%s], true)"
    name = f"{DOMAIN}/Debit"
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        first.execute(lock, [name, "0"])
        second.execute(lock, [name, "1"])
        batch_id = await sent(given, 2, keys=2)
        async with given.running() as worker:
            pids = [first.info.backend_pid, second.info.backend_pid]
            await eventually(lambda: database.value(waits, pids) == 2)
            asking = run(worker)._claimer._asking
            assert len(asking) == 2
            await given.bus.hold_batch(DOMAIN, batch_id, reason="wait")
            tell = "SELECT pg_notify('busload_hold', %s)"  # until it listens
            await eventually(
                lambda: database.rows(tell, str(batch_id)) and all(batch_id in heard for heard in asking.values())
            )
            first.rollback()
            second.rollback()
            await eventually(lambda: database.count("lease") == 0 and database.count("permit") == 0)
    assert seen == []


# -- workers that die, freeze and come back ----------------------------------------------------------------------------


async def test_the_share_of_a_dead_worker_is_freed_and_not_before_it_is_declared_dead(
    given: Given, database: Database
) -> None:
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    frozen = given.registered_worker()
    held_by(given, frozen)
    await sent(given, 1)
    given.died(frozen)  # silent for too long, and nobody has noticed
    assert database.perform(concurrency.sweep()) == 0
    assert database.count("permit") == 1
    given.rescued()
    assert database.perform(concurrency.sweep()) == 0  # nothing has asked yet
    assert database.count("permit") == 0
    assert await given.drained() == 2
    assert len(seen) == 2
    database.check_invariants()


async def test_a_call_does_not_begin_with_a_permit_that_was_lost(given: Given, database: Database) -> None:
    """It waits in line for a thread while its worker is declared dead. Then it asks again."""
    permits: dict[int, int] = {}
    ended = threading.Event()
    count = (
        "SELECT count(*) FROM busload.permit JOIN busload.worker USING (worker)"
        " WHERE stopped_at IS NULL AND limit_subject = %s"
    )

    def call(command: Command, ctx: SyncHandlerContext) -> None:
        permits[command.data["key"]] = database.value(count, str(command.data["key"]))
        ended.wait(60)

    given.handler("Other")  # in a domain of threads only, nothing is claimed that has no thread
    given.bus.handler(DOMAIN, "Debit", concurrency_limit=ConcurrencyLimit(1, by="key"))(call)
    await sent(given, 2, keys=2)
    settings = replace(given.settings, threads=1, lease_for=timedelta(seconds=60))
    async with given.running(concurrency=2, settings=settings) as worker:
        await eventually(lambda: len(permits) == 1 and database.count("permit") == 2)
        database.bury()
        database.perform(concurrency.sweep())
        run(worker)._heartbeat.renew_soon()
        await eventually(lambda: run(worker)._shared.number == 2)
        ended.set()
        await eventually(lambda: len(permits) == 2)
        await eventually(database.is_at_rest)
    assert permits == {0: 1, 1: 1}


async def test_a_worker_that_may_be_dead_begins_no_call(given: Given, database: Database) -> None:
    """As after a freeze: it has not heard from the database for as long as its leases last."""
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    seldom = replace(given.settings, lease_for=timedelta(seconds=120))  # no heartbeat comes between
    async with given.running(settings=seldom) as worker:
        await sent(given, 1)
        await eventually(lambda: len(seen) == 1)
        run(worker)._heartbeat.stop()  # one that comes because the worker has begun to listen would say that it lives
        shared = run(worker)._shared
        lasts = shared.settings.lease_for.total_seconds()
        shared.renewed_at -= lasts
        released = "SELECT count(*) FROM busload.event WHERE type = 'RELEASED'"
        await sent(given, 1)
        await eventually(lambda: len(seen) == 2 or database.value(released) > 0)
        assert len(seen) == 1
        shared.renewed_at += lasts
        await eventually(lambda: len(seen) == 2)


async def test_a_call_that_goes_on_after_its_worker_was_declared_dead_counts_again(
    given: Given, database: Database
) -> None:
    flights = InFlight()
    flights.go.clear()
    given.handler(function=flights.call, concurrency_limit=ConcurrencyLimit(1, by="key"))
    await sent(given, 1)
    async with given.running():
        await eventually(lambda: flights.calls == 1)
        database.bury()
        database.perform(concurrency.sweep())
        await eventually(lambda: database.count("permit") == 1)
        flights.go.set()
        await eventually(database.is_at_rest)
        await eventually(lambda: database.count("permit") == 0)


async def test_a_permit_that_was_adopted_meanwhile_is_not_freed_as_that_of_a_dead_worker(
    given: Given, database: Database, dsn: str
) -> None:
    await sent(given, 1)
    dead, alive = given.registered_worker(), given.registered_worker()
    permit = held_by(given, dead)
    database.rows("UPDATE busload.worker SET stopped_at = now() WHERE worker = %s", dead)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT busload.lock_limits(27711008, ARRAY[%s], ARRAY[%s], true)", [permit.name, permit.subject])
        thread, answers = beside(dsn, concurrency.sweep)  # it has read whose permits they are
        assert answers == []
        database.perform(concurrency.adopt([(permit.alone(), 0, 1024)], worker=alive))
    thread.join(60)
    assert answers == [0]
    assert database.rows("SELECT worker FROM busload.permit") == [(alive,)]
    database.perform(free(permit))
    assert database.count("permit") == 0


async def test_a_permit_whose_answer_was_lost_is_freed(given: Given, database: Database) -> None:
    """The worker does not know of it, so nobody will use it."""
    seen = given.handler(concurrency_limit=ConcurrencyLimit(1, by="key"))
    async with given.running():
        await eventually(lambda: database.value("SELECT count(*) FROM busload.worker") == 1)
        database.rows(
            "INSERT INTO busload.permit (limit_name, limit_subject, worker, command, since)"
            " SELECT %s, '0', worker, 1024, '-infinity' FROM busload.worker",
            f"{DOMAIN}/Debit",
        )
        await sent(given, 1)
        await eventually(lambda: len(seen) == 1)
        await eventually(database.is_at_rest)


async def test_what_is_handed_back_from_the_line_gives_its_permit_back(given: Given, database: Database) -> None:
    """A pause takes what has not begun out of the line."""
    flights = InFlight()
    flights.go.clear()
    given.handler("Other", flights.call)
    given.handler(concurrency_limit=ConcurrencyLimit(5, by="key"))
    await given.bus.create_batch(
        DOMAIN, [BatchCommand("Other", data={"key": 0}), *[BatchCommand("Debit", data={"key": 0})] * 3]
    )
    leased: list[Leased] = given.claimed(0)
    assert leased == []
    async with given.running(concurrency=1):
        await eventually(lambda: flights.calls == 1)
        await given.bus.domains.pause(DOMAIN)
        await eventually(lambda: database.count("permit") == 0)
        flights.go.set()
        await given.bus.domains.resume(DOMAIN)
        await eventually(database.is_at_rest)
    assert database.count("permit") == 0


async def test_what_is_canceled_in_line_gives_its_permit_back(given: Given, database: Database) -> None:
    """It waits for the only thread. No sweep comes to its help."""
    seen: list[int] = []
    go = threading.Event()

    def call(command: Command, ctx: SyncHandlerContext) -> None:
        seen.append(command.data["n"])
        go.wait(60)

    given.handler("Other")  # else no more is claimed than there are threads
    given.bus.handler(DOMAIN, "Debit", concurrency_limit=ConcurrencyLimit(2))(call)
    batch_id = await sent(given, 2)
    permits = "SELECT count(*) FROM busload.permit JOIN busload.command ON id = command WHERE command_id = %s"
    settings = replace(given.settings, threads=1, sweep_every=timedelta(hours=1), lease_for=timedelta(hours=1))
    async with given.running(concurrency=2, settings=settings):
        await eventually(lambda: len(seen) == 1 and database.count("permit") == 2)
        second = (await given.bus.list_batch_commands(DOMAIN, batch_id))[1 - seen[0]]
        await given.bus.cancel_command(DOMAIN, second.command_id, reason="no")
        try:
            await eventually(lambda: database.value(permits, second.command_id) == 0)
        finally:
            go.set()
        await eventually(database.is_at_rest)
    assert len(seen) == 1
    assert (await given.batch_now(batch_id)).canceled_count == 1


# -- limits that nobody uses -------------------------------------------------------------------------------------------


def known_limits(database: Database) -> set[str]:
    return {name for (name,) in database.rows("SELECT name FROM busload.concurrency_limit")}


def grow_old(database: Database, *names: str) -> None:
    age = "UPDATE busload.concurrency_limit SET used_at = now() - interval '25 hours' WHERE name = ANY (%s)"
    database.rows(age, list(names))


async def test_a_limit_that_nobody_has_used_for_a_day_is_forgotten(given: Given, database: Database) -> None:
    """Unless a call has a permit of it, or a command waits for one."""
    worker = given.registered_worker()
    await given.batch(5)
    gone, _new, _held, waited = (held_by(given, worker, name=name) for name in ("gone", "new", "held", "waited"))
    [one] = given.claimed(by=worker)
    late = Request("waited", waited.subject, 1, [(one.lease, one.id)])
    assert database.perform(take([late], worker=worker)) == [0]
    database.perform(free(gone))
    database.rows("DELETE FROM busload.permit WHERE limit_name = 'waited'")  # and nobody was woken
    grow_old(database, "gone", "held", "waited")
    database.perform(concurrency.forget())
    assert known_limits(database) == {"new", "held", "waited"}


async def test_a_sweep_forgets_limits_that_nobody_uses(given: Given, database: Database) -> None:
    given.handler(concurrency_limit=ConcurrencyLimit(1, by="key", name="crm"))
    await sent(given, 1)
    await given.drained()
    assert known_limits(database) == {"crm"}
    grow_old(database, "crm")
    await given.drained()
    assert known_limits(database) == set()


async def test_a_limit_that_is_asked_for_while_it_is_being_forgotten_is_known(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    await given.batch(2)
    permit = held_by(given, worker, name="crm")
    given.database.perform(free(permit))
    grow_old(given.database, "crm")
    [one] = given.claimed(by=worker)
    request = Request("crm", permit.subject, 1, [(one.lease, one.id)])
    with psycopg.connect(dsn) as conn:
        perform(conn, concurrency.forget())
        thread, answers = beside(dsn, partial(take, [request], worker=worker))
        assert answers == []
    thread.join(60)
    assert answers[0][0]
    assert known_limits(given.database) == {"crm"}


async def test_a_limit_that_is_being_asked_for_is_not_forgotten(given: Given, dsn: str) -> None:
    worker = given.registered_worker()
    await given.batch(2)
    permit = held_by(given, worker, name="crm")
    given.database.perform(free(permit))
    grow_old(given.database, "crm")
    [one] = given.claimed(by=worker)
    request = Request("crm", permit.subject, 1, [(one.lease, one.id)])
    with psycopg.connect(dsn) as conn:
        assert perform(conn, take([request], worker=worker)) != [0]
        thread, answers = beside(dsn, concurrency.forget)
        assert answers == []
    thread.join(60)
    assert answers == [None]
    assert known_limits(given.database) == {"crm"}


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (lambda command: None, "returned None"),
        (lambda command: [1], "returned [1]"),
        (lambda command: {}, "returned {}"),
        (lambda command: "x" * 513, "wanted text of at most 512 bytes"),
        (lambda command: "a\0b", "wanted text"),
        (lambda command: command.data["missing"], "raised KeyError: 'missing'"),
        ("missing", "raised KeyError: 'missing'"),
    ],
)
async def test_a_key_that_is_none_parks_its_command_alone(
    given: Given, database: Database, by: Callable[[Command], object] | str, said: str
) -> None:
    def of_some(command: Command) -> object:
        return by(command) if callable(by) and command.data["n"] == 1 else command.data["n"]

    limit = ConcurrencyLimit(5, by=of_some if callable(by) else by)
    seen = given.handler(concurrency_limit=limit)
    good: dict[str, Any] = {} if callable(by) else {by: "there"}
    commands = [BatchCommand("Debit", data={"n": n, **(good if n != 1 else {})}) for n in range(3)]
    batch_id = await given.bus.create_batch(DOMAIN, commands)
    await given.drained()
    assert sorted(command.data["n"] for command in seen) == [0, 2]
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    assert (item.reason, item.last_error_code) == ("PERMANENT", "INVALID_LIMIT_KEY")
    assert item.last_error_message is not None and said in item.last_error_message
    assert (await given.batch_now(batch_id)).completed_count == 2
    assert database.count("permit") == 0


async def test_a_key_function_that_ends_the_process_parks_its_command_alone(given: Given, database: Database) -> None:
    def leave(command: Command) -> str:
        raise SystemExit(3)

    given.handler(concurrency_limit=ConcurrencyLimit(1, by=leave))
    others = given.handler("Other")
    await sent(given, 1)
    await given.sent("Other")
    await given.drained()
    assert len(others) == 1
    assert database.count("troubleshooting") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"calls": 0}, "calls must be a whole number from 1"),
        ({"calls": -1}, "found -1"),
        ({"calls": 1.5}, "found 1.5"),
        ({"calls": True}, "found True"),
        ({"calls": 1, "by": 5}, "by must be a function with def or the name of a field, found 5"),
        ({"calls": 1, "by": ""}, "found an empty name"),
        ({"calls": 1, "by": InFlight.call}, "by must be a function with def"),
        ({"calls": 1, "name": "with space"}, "with space"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_where_it_is_made(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=r".") as refused:
        ConcurrencyLimit(**wrong)
    assert said in str(refused.value)


def test_different_limits_of_one_name_are_refused() -> None:
    bus = CommandBus("postgresql://nowhere")
    bus.handler("crm", "Push", concurrency_limit=ConcurrencyLimit(2, name="crm"))(InFlight().call)
    bus.handler("crm", "Pull", concurrency_limit=ConcurrencyLimit(2, name="crm"))(InFlight().call)
    with pytest.raises(InvalidOperationError, match="'crm' allows 2 calls at a time for crm/Push, and 3 for crm/Get"):
        bus.handler("crm", "Get", concurrency_limit=ConcurrencyLimit(3, name="crm"))(InFlight().call)
    assert bus.handlers.find("crm", "Get") is None


def test_only_a_single_command_has_a_field_for_a_key() -> None:
    bus = CommandBus("postgresql://nowhere")
    with pytest.raises(InvalidOperationError, match=r"a chunk has no fields\. Give it a function: by=lambda chunk: "):
        bus.bulk_handler("crm", "Push", concurrency_limit=ConcurrencyLimit(2, by="tenant"))(InFlight().call)
    with pytest.raises(ValueError, match="concurrency_limit must be a ConcurrencyLimit, found 3"):
        bus.handler("crm", "Push", concurrency_limit=3)  # type: ignore[arg-type]

"""Command, handler, outcome: timeouts, every kind of exception, results that cannot be stored."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    PermanentCommandError,
    RetryPolicy,
    SyncHandlerContext,
    TransientCommandError,
    WorkerSettings,
)
from busload.worker.executor import LONGEST_TURN
from tests.given import DOMAIN, Database, Given, counts, eventually, raising

ONCE = RetryPolicy(max_attempts=1)


class Odd(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def parked(given: Given) -> Any:
    [item] = await given.bus.troubleshooting.list(DOMAIN)
    return item


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        TransientCommandError("x"),
        KeyError("x"),
        asyncio.CancelledError(),
        TimeoutError("mine"),
        KeyboardInterrupt(),
        SystemExit(3),
        Odd("x"),
        Unprintable(),
        RecursionError("deep"),
        MemoryError(),
        ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["async", "def"])
async def test_whatever_a_handler_raises_is_the_failure_of_its_command_alone(
    bus: CommandBus, given: Given, database: Database, error: BaseException, kind: str
) -> None:
    def fail(command: Command, ctx: SyncHandlerContext) -> None:
        raise error

    bus.handler(DOMAIN, "Fail", retry=ONCE)(fail if kind == "def" else raising(error))
    seen = given.handler()
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Fail"), BatchCommand("Debit")])
    assert await given.drained() == 3
    item = await parked(given)
    assert (item.reason, item.last_error_type) == ("EXHAUSTED", type(error).__name__)
    assert len(seen) == 2
    assert counts(await given.batch_now(batch_id)) == (3, 2, 0, 0, 1)
    assert database.count("lease") == 0
    database.check_invariants()


@pytest.mark.parametrize("kind", ["async", "def"])
async def test_stop_iteration_does_not_take_the_slot_with_it(bus: CommandBus, given: Given, kind: str) -> None:
    """`next()` of an empty iterator: no future and no coroutine can carry it."""

    def empty(command: Command, ctx: SyncHandlerContext) -> Any:
        return next(iter(()))

    async def empty_async(command: Command, ctx: HandlerContext) -> Any:
        return next(iter(()))

    bus.handler(DOMAIN, "Debit", retry=ONCE)(empty if kind == "def" else empty_async)
    await given.batch(commands=2)
    async with asyncio.timeout(60):
        assert await given.drained(concurrency=1) == 2
    assert given.database.count("troubleshooting") == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BusinessRuleError("no"), "FAILED"),
        (PermanentCommandError("no"), "IN_TROUBLESHOOTING_QUEUE"),
        (TransientCommandError("no"), "SCHEDULED"),
        (ValueError("no"), "SCHEDULED"),
    ],
)
async def test_the_error_decides_the_route(given: Given, error: Exception, status: str) -> None:
    given.handler("Debit", raising(error))
    command_id = await given.sent()
    await given.drained()
    assert (await given.command_now(command_id)).status == status


async def test_an_async_handler_that_takes_too_long_is_cancelled(given: Given) -> None:
    ended = []

    async def slow(command: Command, ctx: HandlerContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    given.handler("Debit", slow, timeout=0.05, retry=ONCE)
    await given.sent()
    assert await given.drained() == 1
    item = await parked(given)
    assert (item.reason, item.last_error_code) == ("EXHAUSTED", "TIMEOUT")
    assert "0.05 s" in item.last_error_message and ended == [1]


async def test_a_timeout_of_the_handlers_own_is_not_taken_for_ours(given: Given) -> None:
    async def inner(command: Command, ctx: HandlerContext) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    given.handler("Debit", inner, timeout=30, retry=ONCE)
    await given.sent()
    await given.drained()
    assert (await parked(given)).last_error_type == "TimeoutError"


async def test_a_timeout_uses_up_an_attempt_like_any_failure(given: Given) -> None:
    async def slow(command: Command, ctx: HandlerContext) -> str:
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return f"attempt {ctx.attempt}"

    given.handler("Debit", slow, timeout=0.05, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    command_id = await given.sent()
    assert await given.drained() == 2
    assert (await given.command_now(command_id)).result == "attempt 2"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end in any case, so that no thread is left behind."""
    gate = threading.Event()
    yield gate
    gate.set()


async def test_a_thread_that_takes_too_long_is_over_for_the_command_but_keeps_its_slot(
    bus: CommandBus, given: Given, database: Database, gate: threading.Event
) -> None:
    told = []

    def slow(command: Command, ctx: SyncHandlerContext) -> str:
        gate.wait(30)
        told.append(ctx.cancelled)
        return "too late"

    bus.handler(DOMAIN, "Slow", timeout=0.05, retry=ONCE)(slow)
    seen = given.handler()
    await given.sent("Slow")
    async with given.running(concurrency=1):
        await eventually(lambda: database.count("troubleshooting") == 1)
        await given.sent()
        for _ in range(5):
            await asyncio.sleep(0.02)
        assert seen == [], "the only slot is taken until the thread returns"
        gate.set()
        await eventually(lambda: len(seen) == 1)
    assert told == [True]
    assert (await parked(given)).last_error_code == "TIMEOUT"
    assert database.rows("SELECT outcome FROM busload.execution ORDER BY finished_at") == [
        ("TROUBLESHOOTING",),
        ("COMPLETED",),
    ]
    database.check_invariants()


async def test_what_an_overdue_thread_raises_in_the_end_is_not_reported_as_an_error_of_the_program(
    bus: CommandBus, given: Given, database: Database, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(command: Command, ctx: SyncHandlerContext) -> None:
        gate.wait(30)
        raise ValueError("nobody listens any more")

    bus.handler(DOMAIN, "Slow", timeout=0.05, retry=ONCE)(slow)
    await given.sent("Slow")
    async with given.running(concurrency=1):
        await eventually(lambda: database.count("troubleshooting") == 1)
        gate.set()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_thread_that_outlives_the_worker_changes_nothing(
    bus: CommandBus, given: Given, database: Database, gate: threading.Event
) -> None:
    started = threading.Event()
    database.rows("CREATE TABLE effect (command_id uuid)")
    ended = threading.Event()

    def slow(command: Command, ctx: SyncHandlerContext) -> None:
        try:
            with ctx.transaction() as conn:
                conn.execute("INSERT INTO effect VALUES (%s)", [command.command_id])
                started.set()
                gate.wait(30)
        finally:
            ended.set()

    bus.handler(DOMAIN, "Slow")(slow)
    await given.sent("Slow")
    async with asyncio.timeout(60):
        async with given.running() as worker:
            await asyncio.to_thread(started.wait, 60)
            worker.stop(hurry=True)
    assert database.count("lease") == 0 and database.count("queue") == 1
    gate.set()
    assert await asyncio.to_thread(ended.wait, 60)
    idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%' AND datname = current_database()"
    await eventually(lambda: database.value(idle) == 0)
    assert database.value("SELECT count(*) FROM effect") == 0
    assert database.count("execution") == 0
    database.check_invariants()


@pytest.mark.parametrize(
    "result",
    ["nul \0", "\ud800", float("nan"), 10**5000, "x" * 2**21],
    ids=["NUL", "surrogate", "NaN", "digits", "size"],
)
@pytest.mark.parametrize("kind", ["async", "def"])
async def test_a_result_that_cannot_be_stored_is_parked_alone_and_not_run_again(
    bus: CommandBus, given: Given, database: Database, result: object, kind: str
) -> None:
    runs = []

    def bad(command: Command, ctx: SyncHandlerContext) -> object:
        runs.append(1)
        return result

    async def bad_async(command: Command, ctx: HandlerContext) -> object:
        runs.append(1)
        return result

    bus.handler(DOMAIN, "Bad")(bad if kind == "def" else bad_async)
    given.handler()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Bad"), BatchCommand("Debit")])
    await given.drained()
    assert (await parked(given)).reason == "RESULT_INVALID"
    assert runs == [1]
    assert database.value("SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'") == 2
    database.check_invariants()


def refuse_in_the_database(database: Database) -> None:
    """The server refuses what our own check let pass: as a future release, or a limit nobody knows, might."""
    database.rows(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.outcome = 'COMPLETED' AND NEW.details::text LIKE '%unstorable%' THEN"
        "   RAISE 'no' USING ERRCODE = '22P05'; END IF; RETURN NEW; END $$"
    )
    database.rows("CREATE TRIGGER refuse BEFORE INSERT ON busload.execution FOR EACH ROW EXECUTE FUNCTION refuse()")


async def test_one_row_that_the_database_refuses_does_not_take_its_flush_with_it(
    given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_in_the_database(database)

    async def answer(command: Command, ctx: HandlerContext) -> str:
        return "unstorable" if command.data["n"] in (7, 41) else "fine"

    given.handler("Debit", answer)
    batch_id = await given.batch(commands=100)
    assert await given.drained() == 100
    assert counts(await given.batch_now(batch_id)) == (100, 98, 0, 0, 2)
    items = await given.bus.troubleshooting.list(DOMAIN)
    assert {item.reason for item in items} == {"RESULT_INVALID"}
    assert {item.data["n"] for item in items} == {7, 41}
    assert "cannot be stored" in caplog.text
    assert database.count("lease") == 0
    database.check_invariants()


async def test_data_that_cannot_be_decoded_is_parked_alone(bus: CommandBus, given: Given, database: Database) -> None:
    """A row put in by other hands: valid JSON for PostgreSQL, but not for us."""
    given.handler()
    batch_id = await given.batch(commands=3)
    database.rows(
        "UPDATE busload.command SET data = %s::json WHERE id % 1024 = 1".replace("% 1024", "%% 1024"),
        "[" * 5000 + "]" * 5000,
    )
    assert await given.drained() == 3
    assert (await parked(given)).reason == "UNDECODABLE"
    assert counts(await given.batch_now(batch_id)) == (3, 2, 0, 0, 1)
    database.check_invariants()


async def test_the_context_tells_who_runs(given: Given, database: Database) -> None:
    found: dict[str, Any] = {}

    async def look(command: Command, ctx: HandlerContext) -> None:
        found.update(execution=ctx.execution_id, attempt=ctx.attempt, batch=ctx.batch_id, cancelled=ctx.cancelled)
        if ctx.attempt == 1:
            raise TransientCommandError("again")

    given.handler("Debit", look, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    batch_id = await given.batch(commands=1)
    await given.drained()
    assert (found["attempt"], found["batch"], found["cancelled"]) == (2, batch_id, False)
    [(execution_id,)] = database.rows("SELECT execution_id FROM busload.command_status")
    assert found["execution"] == execution_id
    assert len(database.rows("SELECT DISTINCT lease_id FROM busload.execution")) == 2


async def test_an_object_with_an_async_call_is_a_handler(bus: CommandBus, given: Given) -> None:
    class Debit:
        async def __call__(self, command: Command, ctx: HandlerContext) -> str:
            return "called"

    bus.handler(DOMAIN, "Debit")(Debit())
    command_id = await given.sent()
    await given.drained()
    assert (await given.command_now(command_id)).result == "called"


# -- what went wrong elsewhere: RELIABILITY.md section 6 -------------------------------------------------------------


async def test_peer_river_1105(bus: CommandBus, given: Given, database: Database) -> None:
    """A worker that does not know the kind discards the job."""
    given.handler()
    command_id = await given.sent("Unheard.Of")
    await given.drained()
    found = await given.command_now(command_id)
    assert (found.status, found.attempts) == ("SCHEDULED", 0)
    database.check_invariants()


async def test_peer_kestra_10326(bus: CommandBus, given: Given, database: Database) -> None:
    """NUL in an output leaves the run "running" for ever."""

    async def nul(command: Command, ctx: HandlerContext) -> str:
        return "a\0b"

    given.handler("Debit", nul)
    batch_id = await given.batch(commands=2)
    assert await given.drained() == 2
    assert database.count("lease") == 0
    assert (await given.batch_now(batch_id)).in_troubleshooting_count == 2


async def test_peer_awx_13398(given: Given, database: Database) -> None:
    """One unstorable row fails the whole coalesced write, or loops for ever."""
    refuse_in_the_database(database)
    answers: list[Callable[[], Awaitable[str]]] = []

    async def answer(command: Command, ctx: HandlerContext) -> str:
        return "unstorable" if command.data["n"] == 0 else "fine"

    given.handler("Debit", answer)
    batch_id = await given.batch(commands=64)
    async with asyncio.timeout(60):
        assert await given.drained(concurrency=64) == 64
    assert counts(await given.batch_now(batch_id)) == (64, 63, 0, 0, 1)
    assert answers == []


async def test_peer_dramatiq_868(given: Given) -> None:
    """The completion callback never fires if one member fails for good."""
    given.handler("Fail", raising(BusinessRuleError("no")))
    done = given.handler("Done")
    batch_id: UUID = await given.batch(commands=1, command_type="Fail", on_complete=BatchCommand("Done"))
    await given.drained()
    assert [command.data["batch"]["batch_id"] for command in done] == [str(batch_id)]


async def test_peer_good_job_1239(given: Given) -> None:
    """A job that failed and then succeeded: the success callback never runs."""

    async def second_time(command: Command, ctx: HandlerContext) -> None:
        if ctx.attempt == 1:
            raise TransientCommandError("busy")

    given.handler("Debit", second_time, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    done = given.handler("Done")
    batch_id = await given.batch(commands=1, on_complete=BatchCommand("Done"))
    await given.drained()
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert len(done) == 1


@pytest.mark.parametrize("size", [1, 2, 9])
async def test_peer_oban_1022_and_good_job_832(given: Given, size: int) -> None:
    """Callbacks do not run for a batch of one; or run about once per job."""
    given.handler()
    done = given.handler("Done")
    await given.batch(commands=size, on_complete=BatchCommand("Done"))
    await given.drained()
    assert len(done) == 1


@pytest.mark.parametrize("threaded", [False, True], ids=["tasks", "threads"])
async def test_commands_of_one_claim_run_in_all_slots_at_once(given: Given, threaded: bool) -> None:
    together, threads = asyncio.Barrier(20), threading.Barrier(20)

    async def meet(command: Command, ctx: HandlerContext) -> None:
        async with asyncio.timeout(20):
            await together.wait()

    def meet_in_threads(command: Command, ctx: SyncHandlerContext) -> None:
        threads.wait(20)

    given.bus.handler(DOMAIN, "Debit", retry=ONCE)(meet_in_threads if threaded else meet)
    batch_id = await given.batch(commands=40)
    settings = WorkerSettings(concurrency=20, threads=20, poll_every=timedelta(minutes=1))
    assert await given.drained(settings=settings) == 40
    assert counts(await given.batch_now(batch_id)) == (40, 40, 0, 0, 0)


async def test_slots_together_leave_the_event_loop_after_one_turn(given: Given) -> None:
    loop = asyncio.get_running_loop()
    rounds, begun_in = 0, Counter[int]()
    counting: asyncio.Handle

    def count_round() -> None:
        nonlocal rounds, counting
        rounds += 1
        counting = loop.call_soon(count_round)

    async def busy(command: Command, ctx: HandlerContext) -> None:
        begun_in[rounds] += 1
        until = time.monotonic() + 2 * LONGEST_TURN
        while time.monotonic() < until:
            pass

    given.handler("Debit", busy)
    await given.batch(commands=60)
    counting = loop.call_soon(count_round)
    try:
        assert await given.drained() == 60
    finally:
        counting.cancel()
    assert max(begun_in.values()) <= 2  # the second one finds that the turn is over

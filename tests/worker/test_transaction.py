"""What a handler writes in its transaction and its completion: both or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    RetryPolicy,
    Settings,
    SyncHandlerContext,
    TransientCommandError,
)
from busload.commands import settle
from busload.commands.execution import COMPLETED, FAILED_ATTEMPT, Transition
from busload.errors import InvalidOperationError, SupersededError
from busload.sync.context import SyncHandlerTransaction
from busload.sync.guarded_connection import GuardedConnection
from busload.sync.pool import pool
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, eventually

INSERT = "INSERT INTO effect (command_id, attempt) VALUES (%s, %s)"
ONCE = RetryPolicy(max_attempts=1)
BOTH = pytest.mark.parametrize("kind", ["async", "def"])


@pytest.fixture(autouse=True)
def effects(database: Database) -> Database:
    database.rows("CREATE TABLE effect (command_id uuid, attempt integer)")
    return database


def register(bus: CommandBus, kind: str, during: Any = None, after: Any = None, **options: Any) -> None:
    """A handler that writes one row; `during` runs in its transaction, `after` when the block has ended."""

    async def write_async(command: Command, ctx: HandlerContext) -> Any:
        async with ctx.transaction() as conn:
            await conn.execute(INSERT, [command.command_id, ctx.attempt])
            if during:
                during(command, ctx)
        return after(command, ctx) if after else "written"

    def write(command: Command, ctx: SyncHandlerContext) -> Any:
        with ctx.transaction() as conn:
            conn.execute(INSERT, [command.command_id, ctx.attempt])
            if during:
                during(command, ctx)
        return after(command, ctx) if after else "written"

    bus.handler(DOMAIN, "Debit", **options)(write if kind == "def" else write_async)


def fail(command: Command, ctx: Any) -> None:
    raise ValueError("no")


@BOTH
async def test_writes_and_completion_commit_together(
    bus: CommandBus, given: Given, effects: Database, kind: str
) -> None:
    register(bus, kind)
    batch_id = await given.batch(commands=20)
    assert await given.drained(concurrency=5) == 20
    assert effects.rows("SELECT count(DISTINCT command_id), count(*) FROM effect") == [(20, 20)]
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert effects.rows("SELECT DISTINCT details::text FROM busload.execution") == [('"written"',)]
    assert effects.count("lease") == 0, "the last one closes the lease, whoever that is"
    effects.check_invariants()


@BOTH
async def test_writes_and_completion_share_one_transaction_id(
    bus: CommandBus, given: Given, effects: Database, kind: str
) -> None:
    register(bus, kind)
    await given.sent()
    await given.drained()
    [(effect, execution)] = effects.rows(
        "SELECT e.xmin::text, x.xmin::text FROM effect e CROSS JOIN busload.execution x"
    )
    assert effect == execution


@BOTH
@pytest.mark.parametrize("where", ["during", "after"])
async def test_if_the_handler_raises_nothing_is_written(
    bus: CommandBus, given: Given, effects: Database, kind: str, where: str
) -> None:
    """Also after the block: the transaction stays open until the handler returns."""
    register(bus, kind, retry=ONCE, **{where: fail})
    await given.sent()
    await given.drained()
    assert effects.value("SELECT count(*) FROM effect") == 0
    assert effects.value("SELECT reason FROM busload.troubleshooting") == "EXHAUSTED"
    effects.check_invariants()


@BOTH
async def test_a_retry_writes_once(bus: CommandBus, given: Given, effects: Database, kind: str) -> None:
    def first_time(command: Command, ctx: Any) -> None:
        if ctx.attempt == 1:
            raise TransientCommandError("busy")

    register(bus, kind, during=first_time, retry=RetryPolicy(max_attempts=3, backoff=(0,)))
    await given.batch(commands=5)
    assert await given.drained() == 10
    assert effects.rows("SELECT attempt, count(*) FROM effect GROUP BY attempt") == [(2, 5)]
    effects.check_invariants()


@BOTH
async def test_a_broken_business_rule_writes_nothing(
    bus: CommandBus, given: Given, effects: Database, kind: str
) -> None:
    def no(command: Command, ctx: Any) -> None:
        raise BusinessRuleError("no")

    register(bus, kind, after=no)
    command_id = await given.sent()
    await given.drained()
    assert effects.value("SELECT count(*) FROM effect") == 0
    assert (await given.command_now(command_id)).status == "FAILED"


class Proxy:
    """What stands for something that exists only within a request, as frameworks have it."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("Outside of a request.")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


class Model:
    """Raises what is no `Exception`, or an error without words, when it is converted."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def model_dump(self, **_: Any) -> Any:
        raise self._error


@BOTH
@pytest.mark.parametrize(
    "result",
    [object, lambda: "a\0b", Proxy, lambda: Model(Unspeakable()), lambda: Model(SystemExit(3))],
    ids=["no JSON", "NUL", "proxy", "unspeakable", "exit"],
)
async def test_what_was_written_stays_though_the_result_cannot_be_kept(
    bus: CommandBus, given: Given, effects: Database, kind: str, result: Callable[[], object]
) -> None:
    """The work is done, and whoever decides about the command may rely on that."""
    register(bus, kind, after=lambda command, ctx: result())
    command_id = await given.sent()
    assert await given.drained() == 1
    given.make_due()
    assert await given.drained() == 0
    assert effects.value("SELECT count(*) FROM effect") == 1
    command = await given.command_now(command_id)
    if command.status != "COMPLETED":
        assert result() == "a\0b"
        assert effects.value("SELECT reason FROM busload.troubleshooting") == "RESULT_INVALID"
    else:
        assert list(command.result) == ["result_not_kept"]
    effects.check_invariants()


@BOTH
async def test_a_superseded_handler_writes_nothing_and_the_new_one_does(
    bus: CommandBus, given: Given, effects: Database, kind: str
) -> None:
    """The worker is declared dead while its handler is between its write and its return."""
    runs = []

    def bury(command: Command, ctx: Any) -> None:
        runs.append(ctx.execution_id)
        if len(runs) == 1:
            with Database(bus.dsn) as beside:
                assert beside.take_over().commands == 1

    register(bus, kind, during=bury)
    command_id = await given.sent()
    async with given.running(settings=replace(given.settings, lease_for=timedelta(milliseconds=900))):
        await eventually(lambda: effects.value("SELECT count(*) FROM busload.execution"))
    assert len(set(runs)) == 2
    assert effects.value("SELECT count(*) FROM effect") == 1
    found = await given.command_now(command_id)
    assert (found.status, found.execution_id) == ("COMPLETED", runs[1])
    effects.check_invariants()


@BOTH
async def test_what_is_sent_in_the_transaction_exists_exactly_if_it_commits(
    bus: CommandBus, given: Given, effects: Database, kind: str
) -> None:
    pushed = []

    async def send_async(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            await ctx.send(DOMAIN, "Push", command.data)
            if command.data == "fail":
                raise ValueError("no")

    def send(command: Command, ctx: SyncHandlerContext) -> None:
        with ctx.transaction():
            ctx.send(DOMAIN, "Push", command.data)
            if command.data == "fail":
                raise ValueError("no")

    async def push(command: Command, ctx: HandlerContext) -> None:
        pushed.append(command.data)

    bus.handler(DOMAIN, "Debit", retry=ONCE)(send if kind == "def" else send_async)
    bus.handler(DOMAIN, "Push")(push)
    await bus.send(DOMAIN, "Debit", "fail")
    await bus.send(DOMAIN, "Debit", "succeed")
    await given.drained()
    assert pushed == ["succeed"]
    effects.check_invariants()


@BOTH
async def test_outside_of_a_transaction_send_stands_for_itself(bus: CommandBus, given: Given, kind: str) -> None:
    async def send_async(command: Command, ctx: HandlerContext) -> None:
        await ctx.send("crm", "Push")
        raise ValueError("no")

    def send(command: Command, ctx: SyncHandlerContext) -> None:
        ctx.send("crm", "Push")
        raise ValueError("no")

    bus.handler(DOMAIN, "Debit", retry=ONCE)(send if kind == "def" else send_async)
    await given.sent()
    await given.drained()
    assert given.database.value("SELECT count(*) FROM busload.command WHERE domain = 'crm'") == 1


@BOTH
async def test_a_second_transaction_is_refused(bus: CommandBus, given: Given, effects: Database, kind: str) -> None:
    def again(command: Command, ctx: Any) -> None:
        ctx.transaction()

    register(bus, kind, during=again, retry=ONCE)
    await given.sent()
    await given.drained()
    [(kind_of_error,)] = effects.rows("SELECT error ->> 'type' FROM busload.troubleshooting")
    assert kind_of_error == InvalidOperationError.__name__


async def test_an_async_timeout_in_the_transaction_rolls_it_back(
    bus: CommandBus, given: Given, effects: Database
) -> None:
    async def slow(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute(INSERT, [command.command_id, 1])
            await asyncio.Event().wait()

    bus.handler(DOMAIN, "Debit", timeout=0.05, retry=ONCE)(slow)
    await given.sent()
    await given.drained()
    assert effects.value("SELECT count(*) FROM effect") == 0
    idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%' AND datname = current_database()"
    await eventually(lambda: effects.value(idle) == 0)


async def test_a_thread_whose_time_was_over_before_it_could_commit_is_superseded(
    given: Given, effects: Database, dsn: str
) -> None:
    """Its attempt is recorded as failed and will be tried again: then its writes must not stay."""
    await given.sent()
    [one] = given.claimed()
    connections = pool(dsn, 1, connection_class=GuardedConnection)
    try:
        transaction = SyncHandlerTransaction(connections, {one.lease})
        with transaction as conn:
            conn.execute(INSERT, [one.command_id, 1])
        given.settled([one], FAILED_ATTEMPT, delay=60.0)
        with pytest.raises(SupersededError):
            transaction.commit(settle.settle([Transition(one, COMPLETED)], now=0.0))
    finally:
        connections.close()
    assert effects.value("SELECT count(*) FROM effect") == 0
    effects.check_invariants()


@pytest.fixture
async def narrow_bus(dsn: str) -> AsyncIterator[CommandBus]:
    """A bus with a single connection: whoever keeps it starves the next."""
    async with CommandBus(dsn, settings=Settings(pool_size=1, poll_every=timedelta(milliseconds=200))) as bus:
        yield bus


@BOTH
@pytest.mark.parametrize("then", ["raises", "returns"])
async def test_a_connection_that_is_lost_in_a_transaction_is_given_back(
    narrow_bus: CommandBus, effects: Database, given: Given, kind: str, then: str
) -> None:
    """Otherwise every such loss would cost the pool one of its connections, for good."""
    bus = narrow_bus

    def cut(command: Command, ctx: Any) -> None:
        if ctx.attempt == 1:
            pid = ctx.own_transaction.conn.info.backend_pid
            with Database(bus.dsn) as beside:
                beside.rows("SELECT pg_terminate_backend(%s)", pid)
                while beside.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid):
                    pass
            if then == "raises":
                raise ValueError("no")

    register(bus, kind, during=cut, retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    for _ in range(2):
        await bus.send(DOMAIN, "Debit")
    worker = given.worker()
    worker._bus = bus
    async with asyncio.timeout(60):
        await worker.drain()
    assert effects.rows("SELECT outcome, count(*) FROM busload.execution GROUP BY outcome ORDER BY outcome") == [
        ("COMPLETED", 2),
        ("FAILED_ATTEMPT", 2),
    ]
    assert effects.rows("SELECT attempt, count(*) FROM effect GROUP BY attempt") == [(2, 2)]
    effects.check_invariants()


@BOTH
async def test_handlers_wait_for_the_connection_of_their_transaction_and_none_fails(
    narrow_bus: CommandBus, effects: Database, given: Given, kind: str
) -> None:
    """Eight run at once and share one connection."""
    backends = []

    def note(command: Command, ctx: Any) -> None:
        backends.append(ctx.own_transaction.conn.info.backend_pid)

    register(narrow_bus, kind, during=note, retry=ONCE)
    await narrow_bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(8)])
    worker = given.worker(concurrency=8)
    worker._bus = narrow_bus
    async with asyncio.timeout(60):
        await worker.drain()
    assert (len(backends), len(set(backends))) == (8, 1)
    assert effects.rows("SELECT outcome, attempt, count(*) FROM busload.execution GROUP BY 1, 2") == [
        ("COMPLETED", 1, 8)
    ]
    effects.check_invariants()


async def test_a_handler_that_adds_to_its_own_batch_does_not_deadlock_with_its_neighbours(
    bus: CommandBus, given: Given, effects: Database
) -> None:
    """It holds the batch and wants the lease, while a flush holds the lease and wants the batch."""
    sent = asyncio.Event()

    async def fan_out(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            await ctx.send(DOMAIN, "Plain", batch_id=ctx.batch_id)
            sent.set()
            with Database(bus.dsn) as beside, suppress(AssertionError):  # nobody waits: all the better
                await eventually(lambda: beside.rows(LOCKED_OUT), within=1.5)

    async def plain(command: Command, ctx: HandlerContext) -> None:
        await sent.wait()

    bus.handler(DOMAIN, "FanOut", retry=ONCE)(fan_out)
    bus.handler(DOMAIN, "Plain", retry=ONCE)(plain)
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = effects.value(deadlocks)
    async with bus.open_batch(DOMAIN, checkpoint_size=3) as batch:
        for command_type in ("Plain", "FanOut", "Plain"):
            await batch.add(command_type)
        async with given.running(concurrency=4):
            await eventually(lambda: effects.value("SELECT count(*) FROM busload.execution") >= 4)
    effects.rows("SELECT pg_stat_clear_snapshot()")
    assert effects.rows("SELECT DISTINCT outcome FROM busload.execution") == [("COMPLETED",)]
    assert effects.value(deadlocks) == before
    effects.check_invariants()

"""`ctx.complete(conn=...)`: a handler's writes in a transaction of its own and its completion, both or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload import Command, CommandBus, HandlerContext, RetryPolicy, SyncHandlerContext
from busload.errors import InvalidCommandError, InvalidOperationError, SupersededError
from tests.given import DOMAIN, Database, Given, eventually
from tests.integrations.callers import ASYNC_KINDS, SYNC_KINDS, Caller

INSERT = "INSERT INTO effect VALUES ('{}', {})"


@pytest.fixture(autouse=True)
def effects(database: Database) -> Database:
    database.rows("CREATE TABLE effect (command_id uuid, attempt integer)")
    return database


def register(bus: CommandBus, kind: str, dsn: str) -> None:
    """A handler that writes a row and completes, in a transaction of this kind; its data says what goes wrong."""
    retry = RetryPolicy(max_attempts=3, backoff=(0,))

    async def work(caller: Caller, command: Command, ctx: Any) -> Any:
        await caller.execute(INSERT.format(command.command_id, ctx.attempt))
        done = ctx.complete(conn=caller.conn, result={"attempt": ctx.attempt})
        if done is not None:
            await done
        if command.data == "rolled back" and ctx.attempt == 1:
            await caller.rollback()
        elif command.data == "raises" and ctx.attempt == 1:
            raise ValueError("before the commit")
        else:
            await caller.commit()
        if command.data == "raises late":
            raise ValueError("after the commit")
        return "not this"

    async def of_async(command: Command, ctx: HandlerContext) -> Any:
        async with ASYNC_KINDS[kind](dsn) as caller:
            return await work(caller, command, ctx)

    def of_thread(command: Command, ctx: SyncHandlerContext) -> Any:
        async def run() -> Any:
            async with SYNC_KINDS[kind](dsn) as caller:
                return await work(caller, command, ctx)

        with asyncio.Runner() as runner:  # only what the callers of these tests are written in; nothing waits
            return runner.run(run())

    bus.handler(DOMAIN, "Debit", retry=retry)(of_async if kind in ASYNC_KINDS else of_thread)


@pytest.mark.parametrize("kind", [*ASYNC_KINDS, *SYNC_KINDS])
async def test_writes_and_completion_commit_together_or_not_at_all(
    bus: CommandBus, given: Given, effects: Database, dsn: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each command only the attempt counts that committed: both its row and its result are that attempt's"""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    register(bus, kind, dsn)
    expected = {"works": 1, "rolled back": 2, "raises": 2, "raises late": 1}
    sent = {data: await given.sent(data=data) for data in expected}
    await given.drained(concurrency=2)
    for data, command_id in sent.items():
        found, attempt = await given.command_now(command_id), expected[data]
        assert (found.status, found.result) == ("COMPLETED", {"attempt": attempt}), data
        assert effects.rows("SELECT attempt FROM effect WHERE command_id = %s", command_id) == [(attempt,)], data
    assert effects.count("lease") == 0
    effects.check_invariants()


@pytest.mark.parametrize("kind", [*ASYNC_KINDS, *SYNC_KINDS])
@pytest.mark.parametrize("others", [0, 2], ids=["alone", "with-others-in-its-lease"])
async def test_a_second_transaction_of_an_attempt_is_refused_once_the_first_has_committed(
    bus: CommandBus, given: Given, effects: Database, dsn: str, kind: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loop does that repeats its transaction after a commit with an unclear end"""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    refused: list[str] = []

    async def work(caller: Caller, command: Command, ctx: Any) -> None:
        try:
            for n in range(2):
                await caller.execute(INSERT.format(command.command_id, n))
                await _complete(ctx, caller, n)
                await caller.commit()
        except SupersededError as superseded:
            refused.append(str(superseded))
            raise

    _handle(bus, kind, dsn, work)
    batch_id = await given.batch(1 + others)
    await given.drained(concurrency=1)
    assert (await given.batch_now(batch_id)).completed_count == 1 + others
    assert len(refused) == 1 + others
    assert all("has completed already" in one for one in refused)
    assert effects.rows("SELECT attempt FROM effect") == [(0,)] * (1 + others)
    assert {row[0] for row in effects.rows("SELECT details::text FROM busload.execution")} == {"0"}
    effects.check_invariants()


@pytest.mark.parametrize("kind", [*ASYNC_KINDS, *SYNC_KINDS])
async def test_a_second_completion_in_one_transaction_is_refused_and_the_first_counts(
    bus: CommandBus, given: Given, effects: Database, dsn: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction can go on and commit"""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")

    async def work(caller: Caller, command: Command, ctx: Any) -> None:
        await _complete(ctx, caller, 1)
        with pytest.raises(InvalidOperationError, match="can be called once"):
            await _complete(ctx, caller, 2)
        await caller.execute(INSERT.format(command.command_id, 1))
        await caller.commit()

    _handle(bus, kind, dsn, work)
    sent = await given.sent()
    await given.drained()
    found = await given.command_now(sent)
    assert (found.status, found.result) == ("COMPLETED", 1), found.last_error_message
    assert effects.rows("SELECT attempt FROM effect") == [(1,)]


@pytest.mark.parametrize("kind", [*ASYNC_KINDS, *SYNC_KINDS])
async def test_a_completion_that_was_rolled_back_can_be_made_again(
    bus: CommandBus, given: Given, effects: Database, dsn: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rolled back to a savepoint, and with all of the first transaction"""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")

    async def work(caller: Caller, command: Command, ctx: Any) -> None:
        async with caller.undone_savepoint():
            await _complete(ctx, caller, 1)
        await _complete(ctx, caller, 2)
        await caller.rollback()
        await _complete(ctx, caller, 3)
        await caller.execute(INSERT.format(command.command_id, 3))
        await caller.commit()

    _handle(bus, kind, dsn, work)
    sent = await given.sent()
    await given.drained()
    found = await given.command_now(sent)
    assert (found.status, found.result) == ("COMPLETED", 3), found.last_error_message
    assert effects.rows("SELECT attempt FROM effect") == [(3,)]


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "with-others-in-its-lease"])
async def test_a_second_transaction_that_waited_for_the_first_is_refused_after_its_commit(
    bus: CommandBus, given: Given, effects: Database, dsn: str, others: int
) -> None:
    """Its statement began before the commit, so it does not see the row of the first"""
    refused: list[str] = []

    async def handle(command: Command, ctx: HandlerContext) -> None:
        async with (
            await psycopg.AsyncConnection.connect(dsn) as first,
            await psycopg.AsyncConnection.connect(dsn) as second,
        ):
            await ctx.complete(conn=first, result=1)
            await second.execute("INSERT INTO effect VALUES (%s, 2)", [command.command_id])
            waiting = asyncio.create_task(ctx.complete(conn=second, result=2))
            blocked = "SELECT cardinality(pg_blocking_pids(%s))"
            await eventually(lambda: effects.value(blocked, second.info.backend_pid) == 1)
            await first.commit()
            with pytest.raises(SupersededError) as superseded:
                await waiting
            refused.append(str(superseded.value))
            await second.rollback()

    bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))(handle)
    batch_id = await given.batch(1 + others)
    await given.drained(concurrency=1)
    assert (await given.batch_now(batch_id)).completed_count == len(refused) == 1 + others
    assert all("has completed already" in one for one in refused)
    assert effects.rows("SELECT * FROM effect") == []
    assert {row[0] for row in effects.rows("SELECT details::text FROM busload.execution")} == {"1"}
    effects.check_invariants()


async def test_what_outlives_its_handler_cannot_complete_the_command_again(
    bus: CommandBus, given: Given, effects: Database, dsn: str
) -> None:
    contexts: list[HandlerContext] = []

    async def handle(command: Command, ctx: HandlerContext) -> str:
        contexts.append(ctx)
        return "first"

    bus.handler(DOMAIN, "Debit")(handle)
    sent = await given.sent()
    await given.drained()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("INSERT INTO effect VALUES (%s, 1)", [sent])
        with pytest.raises(SupersededError, match="by the end of its handler"):
            await contexts[0].complete(conn=conn, result="late")
        await conn.rollback()
    assert (await given.command_now(sent)).result == "first"


async def test_a_handler_that_lost_its_command_is_told_so_in_its_transaction(
    bus: CommandBus, given: Given, effects: Database, dsn: str
) -> None:
    told: list[Exception] = []

    async def handle(command: Command, ctx: HandlerContext) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            if not told:
                effects.take_over()
            await conn.execute("INSERT INTO effect VALUES (%s, 1)", [command.command_id])
            try:
                await ctx.complete(conn=conn)
            except SupersededError as superseded:
                told.append(superseded)
                raise

    bus.handler(DOMAIN, "Debit")(handle)
    sent = await given.sent()
    async with given.running(settings=replace(given.settings, lease_for=timedelta(milliseconds=900))):
        await eventually(lambda: effects.count("execution"))
    # On a machine that is slower than the lease, the attempt after that may lose its command as well.
    assert told and all("Roll your transaction back" in str(each) for each in told)
    assert effects.rows("SELECT count(*) FROM effect") == [(1,)]
    assert (await given.command_now(sent)).status == "COMPLETED"


async def test_a_handler_that_returns_before_its_commit_has_failed_and_its_late_commit_finds_nothing(
    bus: CommandBus, given: Given, effects: Database, dsn: str
) -> None:
    """Left open, the transaction holds the command; once it is gone, the attempt is recorded as failed"""
    left_open: list[psycopg.AsyncConnection[Any]] = []

    async def handle(command: Command, ctx: HandlerContext) -> None:
        conn = await psycopg.AsyncConnection.connect(dsn)
        await conn.execute("INSERT INTO effect VALUES (%s, 1)", [command.command_id])
        await ctx.complete(conn=conn)
        left_open.append(conn)
        asyncio.get_running_loop().call_later(0.1, conn.pgconn.finish)

    bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))(handle)
    sent = await given.sent()
    await given.drained()
    found = await given.command_now(sent)
    assert (found.status, found.last_error_type) == ("IN_TROUBLESHOOTING_QUEUE", "UncommittedError")
    assert effects.rows("SELECT * FROM effect") == []
    await left_open[0].close()


async def test_what_cannot_be_completed_is_refused_and_the_handler_can_go_on(
    bus: CommandBus, given: Given, effects: Database, dsn: str
) -> None:
    """A result that is no JSON, a connection in autocommit mode, a second transaction"""
    refused: list[str] = []

    async def handle(command: Command, ctx: HandlerContext) -> str:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            with pytest.raises(InvalidOperationError) as error:
                await ctx.complete(conn=conn)
            refused.append(str(error.value))
            await conn.set_autocommit(False)
            with pytest.raises(InvalidCommandError) as wrong:
                await ctx.complete(conn=conn, result=object())
            refused.append(str(wrong.value))
            async with ctx.transaction() as own:
                with pytest.raises(InvalidOperationError, match="not both") as error:
                    await ctx.complete(conn=own)
                refused.append(str(error.value))
        return "by returning"

    bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))(handle)
    sent = await given.sent()
    await given.drained()
    assert "autocommit" in refused[0] and "/result" in refused[1] and "ctx.transaction()" in refused[2]
    found = await given.command_now(sent)
    assert (found.status, found.result) == ("COMPLETED", "by returning")


async def test_a_group_of_a_buffer_is_not_completed_as_one(bus: CommandBus, given: Given, dsn: str) -> None:
    events = bus.buffer("events", size=2, max_age=timedelta(0))
    refused: list[str] = []

    @events.handler()
    async def handle(group: Any, ctx: HandlerContext) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            with pytest.raises(InvalidOperationError, match="group of a buffer") as error:
                await ctx.complete(conn=conn)
        refused.append(str(error.value))

    await events.add({"n": 1})
    await given.drained(domains=None)
    assert len(refused) == 1


def _handle(bus: CommandBus, kind: str, dsn: str, work: Callable[[Caller, Command, Any], Awaitable[None]]) -> None:
    """A handler that does this with a caller of this kind, once."""

    async def of_async(command: Command, ctx: HandlerContext) -> None:
        async with ASYNC_KINDS[kind](dsn) as caller:
            await work(caller, command, ctx)

    def of_thread(command: Command, ctx: SyncHandlerContext) -> None:
        async def run() -> None:
            async with SYNC_KINDS[kind](dsn) as caller:
                await work(caller, command, ctx)

        with asyncio.Runner() as runner:
            runner.run(run())

    bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))(of_async if kind in ASYNC_KINDS else of_thread)


async def _complete(ctx: Any, caller: Caller, result: int) -> None:
    done = ctx.complete(conn=caller.conn, result=result)
    if done is not None:
        await done

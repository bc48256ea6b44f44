"""A drain inside of a test's transaction, on every kind of connection that `conn=` takes, in both faces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    Dedup,
    HandlerContext,
    RetryPolicy,
    Stage,
    SyncCommandBus,
    SyncHandlerContext,
)
from busload.handlers.hooks import CommandFailure
from busload.jobs import FinishedStage
from busload.testing import assert_sent, drain, run_handler, travel
from tests.given import DOMAIN, Database
from tests.integrations.callers import KINDS, SYNC_KINDS, Caller


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Caller]:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")  # its connection blocks, and these tests are awaited
    async with KINDS[request.param](dsn) as caller:
        yield caller


@pytest.fixture(params=SYNC_KINDS)
async def blocking(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Caller]:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    async with SYNC_KINDS[request.param](dsn) as caller:
        yield caller


async def test_handlers_run_in_the_tests_transaction_on_every_kind_of_connection(
    bus: CommandBus, caller: Caller, database: Database
) -> None:
    """What they send, a failed statement, a job with a planner, a schedule, and a rollback of it all"""
    seen: list[Any] = []
    told: list[CommandFailure] = []
    bus.on_failure(told.append)

    @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))
    async def debit(command: Command, ctx: HandlerContext) -> str:
        seen.append(command.data)
        await caller.execute(f"INSERT INTO ledger VALUES ({command.data})")
        async with ctx.transaction():
            await ctx.send(DOMAIN, "Sent", command.data, task_key="one", dedup=Dedup())
        return "debited"

    @bus.handler(DOMAIN, "Complete")
    async def complete(command: Command, ctx: HandlerContext) -> None:
        await ctx.complete(conn=caller.conn, result="done")

    @bus.handler(DOMAIN, "Broken", retry=RetryPolicy(max_attempts=1))
    async def broken(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            await ctx.send(DOMAIN, "Never")
            await caller.execute("SELECT 1 / 0")

    @bus.handler(DOMAIN, "Failed", retry=RetryPolicy(max_attempts=1))
    async def failed(command: Command, ctx: HandlerContext) -> None:
        await caller.execute("SELECT 1 / 0")

    @bus.handler(DOMAIN, "Undone", retry=RetryPolicy(max_attempts=1))
    async def undone(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction():
            await caller.execute("INSERT INTO ledger VALUES (100)")
            raise BusinessRuleError("no")

    @bus.handler(DOMAIN, "No")
    async def no(command: Command, ctx: HandlerContext) -> None:
        raise BusinessRuleError("no")

    @bus.handler(DOMAIN, "Sent")
    async def sent(command: Command, ctx: HandlerContext) -> None:
        seen.append(("sent", command.data))

    @bus.planner(DOMAIN, "later")
    async def plan(ended: FinishedStage, ctx: HandlerContext) -> list[BatchCommand]:
        return [BatchCommand("Sent", data="planned")]

    bus.schedule("hourly", every=timedelta(hours=1), domain=DOMAIN, command=BatchCommand("Sent", data="due"))
    await caller.execute("CREATE TABLE ledger (account integer UNIQUE)")
    about: dict[str, Any] = {"conn": caller.conn}
    for kind in ("Debit", "Complete", "Broken", "Failed", "Undone", "No"):
        await bus.send(DOMAIN, kind, 7, **about)
    await bus.jobs.create(DOMAIN, [Stage("first", [BatchCommand("No")]), Stage("later")], **about)
    await bus.jobs.create(DOMAIN, [Stage("first", [BatchCommand("Sent", data="first")]), Stage("later")], **about)
    assert await drain(bus, **about) >= 10
    await travel(bus, timedelta(hours=1), **about)
    await drain(bus, **about)
    assert await run_handler(bus, DOMAIN, "Debit", 8, **about) == "debited"
    sent_ones = [("sent", each) for each in (7, "first", "planned", "due")]
    assert sorted(map(str, seen)) == sorted(map(str, [7, 8, *sent_ones]))
    assert sorted(one.command_type for one in told) == ["Broken", "Failed", "No", "No", "Undone"]
    for kind, status in (("Debit", "COMPLETED"), ("Complete", "COMPLETED"), ("Broken", "IN_TROUBLESHOOTING_QUEUE")):
        await assert_sent(bus, DOMAIN, kind, status=status, **about)
    await caller.execute("INSERT INTO ledger VALUES (100)")
    await caller.rollback()
    assert database.count("command") == database.count("schedule") == 0


async def test_handlers_with_def_run_there_too(sync_bus: SyncCommandBus, blocking: Caller, database: Database) -> None:
    seen: list[Any] = []
    told: list[str] = []

    @sync_bus.on_failure
    async def tell(failure: CommandFailure) -> None:
        told.append(failure.command_type)

    @sync_bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))
    def debit(command: Command, ctx: SyncHandlerContext) -> None:
        with ctx.transaction():
            ctx.send(DOMAIN, "Sent", command.data)
        seen.append(command.data)

    @sync_bus.handler(DOMAIN, "Sent")
    def sent(command: Command, ctx: SyncHandlerContext) -> None:
        seen.append(("sent", command.data))

    @sync_bus.handler(DOMAIN, "Broken", retry=RetryPolicy(max_attempts=1))
    def broken(command: Command, ctx: SyncHandlerContext) -> None:
        raise BusinessRuleError("no")

    conn: Any = blocking.conn
    for kind in ("Debit", "Broken"):
        sync_bus.send(DOMAIN, kind, 7, conn=conn)
    stages = [Stage("first", [BatchCommand("Sent", data=1)]), Stage("second", [BatchCommand("Sent", data=2)])]
    sync_bus.jobs.create(DOMAIN, stages, conn=conn)
    drain(sync_bus, conn=conn)
    assert sorted(map(str, seen)) == ["('sent', 1)", "('sent', 2)", "('sent', 7)", "7"]
    assert told == ["Broken"]
    await blocking.rollback()
    assert database.count("command") == 0


async def test_a_handler_that_writes_by_psycopg_is_told_what_to_do_on_another_driver(bus: CommandBus, dsn: str) -> None:
    @bus.handler(DOMAIN, "Debit", retry=RetryPolicy(max_attempts=1))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")

    async with KINDS["asyncpg"](dsn) as caller:
        await bus.send(DOMAIN, "Debit", conn=caller.conn)
        await drain(bus, conn=caller.conn)
        [item] = await assert_sent(bus, DOMAIN, "Debit", status="IN_TROUBLESHOOTING_QUEUE", conn=caller.conn)
        said = item.last_error_message or ""
        assert "asyncpg" in said and "ctx.complete(conn=...)" in said and "postgresql+psycopg://" in said

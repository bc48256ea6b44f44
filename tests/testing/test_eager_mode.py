"""Eager mode: a send runs its handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, SyncCommandBus, SyncHandlerContext
from busload.errors import InvalidOperationError
from busload.testing import assert_sent, eager


async def test_what_is_sent_has_run_when_the_call_returns(bus: CommandBus) -> None:
    ran: list[object] = []

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> object:
        ran.append(command.data)
        if command.data == 1:
            await ctx.send("payments", "Debit", 2)
            await ctx.bus.send("payments", "Debit", 3)
        return command.data

    with eager(bus):
        sent = await bus.send("payments", "Debit", 1)
        assert sorted(map(str, ran)) == ["1", "2", "3"]
        command = await bus.get_command("payments", sent.command_id)
        assert command is not None
        assert (command.status, command.result) == ("COMPLETED", 1)
        batch_id = await bus.create_batch("payments", [BatchCommand("Debit", data=n) for n in (4, 5)])
        batch = await bus.get_batch("payments", batch_id)
        assert batch is not None
        assert batch.status == "COMPLETED"
        await bus.send("payments", "Debit", 6, run_at=datetime.now(UTC) + timedelta(days=1))
        await asyncio.gather(bus.send("payments", "Debit", 7), bus.send("payments", "Debit", 8))
        assert {7, 8} <= set(ran)
        assert 6 not in ran
    await bus.send("payments", "Debit", 9)
    assert 9 not in ran


def test_the_error_of_a_handler_reaches_the_sender(sync_bus: SyncCommandBus) -> None:
    @sync_bus.handler("payments", "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None:
        raise ValueError("account closed")

    with eager(sync_bus), pytest.raises(ValueError, match="account closed"):
        sync_bus.send("payments", "Debit", max_attempts=1)
    [sent] = assert_sent(sync_bus, "payments", "Debit", times=1)
    assert sent.status == "IN_TROUBLESHOOTING_QUEUE"
    with eager(sync_bus, raises=False):
        sync_bus.send("payments", "Debit", max_attempts=1)


async def test_a_handler_that_snoozes_has_not_failed(bus: CommandBus) -> None:
    """The sender gets no error, neither of its own command nor of one that was put off before and is due now"""

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        if command.data:
            ctx.snooze(command.data)

    with eager(bus):
        later = await bus.send("payments", "Debit", 3600)
        again = await bus.send("payments", "Debit", 0.001)
        await bus.send("payments", "Debit")
        for sent in (later, again):
            command = await bus.get_command("payments", sent.command_id)
            assert command is not None
            assert command.status == "SCHEDULED"


def test_a_handler_that_snoozes_has_not_failed_without_await(sync_bus: SyncCommandBus) -> None:
    @sync_bus.handler("payments", "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None:
        ctx.snooze(3600)

    with eager(sync_bus):
        sync_bus.send("payments", "Debit")
    assert_sent(sync_bus, "payments", "Debit", times=1, status="SCHEDULED")


async def test_handlers_find_the_state_of_the_test_also_in_a_transaction(bus: CommandBus) -> None:
    """The bus has a lifespan, which a call with `conn` does not open"""
    seen: list[object] = []

    @bus.lifespan
    async def resources() -> AsyncIterator[str]:
        yield "of the lifespan"

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append(ctx.state)

    async with await psycopg.AsyncConnection.connect(bus.dsn) as conn:
        with eager(bus):
            await bus.send("payments", "Debit")
            with pytest.raises(
                InvalidOperationError, match=r"calls with conn= open none: .*eager\(bus, state=engine\)"
            ):
                await bus.send("payments", "Debit", max_attempts=1, conn=conn)
        with eager(bus, state="of the test"):
            await bus.send("payments", "Debit")
            await bus.send("payments", "Debit", conn=conn)
        await conn.rollback()
    assert seen == ["of the lifespan", "of the test", "of the test"]


def test_in_a_transaction_handlers_run_in_it(sync_bus: SyncCommandBus, dsn: str) -> None:
    ran: list[object] = []
    sync_bus.handler("payments", "Debit")(lambda command, ctx: ran.append(command.data))
    with eager(sync_bus), psycopg.connect(dsn) as conn:
        sync_bus.send("payments", "Debit", 1, conn=conn)
        assert ran == [1]
        assert_sent(sync_bus, "payments", "Debit", status="COMPLETED", times=1, conn=conn)
        conn.rollback()
    assert sync_bus.list_commands("payments").commands == ()

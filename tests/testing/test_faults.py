"""Faults on demand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, RetryPolicy, SyncCommandBus, SyncHandlerContext
from busload.errors import InvalidOperationError
from busload.handlers.hooks import CommandFailure
from busload.testing import BreakableTransport, assert_sent, broker_down, drain, fail_next, kill_worker, travel
from tests.given import Database


async def test_the_next_calls_fail_and_the_one_after_that_does_not(bus: CommandBus) -> None:
    calls: list[int] = []

    @bus.handler("payments", "Debit", retry=RetryPolicy(max_attempts=3, backoff=(0,)))
    async def debit(command: Command, ctx: HandlerContext) -> int:
        calls.append(ctx.attempt)
        return ctx.attempt

    with fail_next(bus, "payments", "Debit", TimeoutError("the bank is silent"), times=2) as fault:
        await bus.send("payments", "Debit")
        await drain(bus)
        assert (fault.happened, fault.left, calls) == (2, 0, [3])
    [sent] = await assert_sent(bus, "payments", "Debit", status="COMPLETED", times=1)
    assert (sent.result, sent.last_error_message) == (3, "the bank is silent")
    with fail_next(bus, "payments", "Debit", TimeoutError):
        pass
    await bus.send("payments", "Debit")
    await drain(bus)
    assert calls == [3, 1]  # a fault ends with its block


async def test_a_killed_worker_has_done_the_work_and_it_is_done_again(bus: CommandBus, database: Database) -> None:
    database.rows("CREATE TABLE ledger (account integer)")
    calls: list[int] = []

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None:
        calls.append(ctx.attempt)
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES (1)")

    with kill_worker(bus, "payments", "Debit") as fault:
        await bus.send("payments", "Debit")
        await drain(bus)
    assert (fault.happened, calls) == (1, [1, 1])
    assert database.count_rows("ledger") == 1  # what the dead worker wrote was rolled back
    [sent] = await assert_sent(bus, "payments", "Debit", status="COMPLETED", times=1)
    assert "LEASE_LOST" in [event.type for event in await bus.get_audit_trail("payments", sent.command_id)]
    database.check_invariants()


async def test_a_command_that_kills_three_workers_calls_on_failure(bus: CommandBus) -> None:
    seen: list[str | None] = []
    bus.on_failure(lambda failure: seen.append(failure.reason))

    @bus.handler("payments", "Debit")
    async def debit(command: Command, ctx: HandlerContext) -> None: ...

    with kill_worker(bus, "payments", "Debit", times=3):
        await bus.send("payments", "Debit")
        await drain(bus)
    assert seen == ["CRASHED"]


def test_faults_of_handlers_with_def(sync_bus: SyncCommandBus) -> None:
    calls: list[int] = []

    @sync_bus.handler("payments", "Debit", retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    def debit(command: Command, ctx: SyncHandlerContext) -> None:
        calls.append(ctx.attempt)

    sync_bus.send("payments", "Debit")
    with kill_worker(sync_bus, "payments", "Debit"):
        drain(sync_bus)
    assert calls == [1, 1]
    sync_bus.send("payments", "Debit")
    with fail_next(sync_bus, "payments", "Debit", ValueError):
        drain(sync_bus)
    assert calls == [1, 1, 2]
    seen: list[str | None] = []

    @sync_bus.on_failure
    async def note(failure: CommandFailure) -> None:
        seen.append(failure.reason)

    sync_bus.send("payments", "Debit")
    with kill_worker(sync_bus, "payments", "Debit", times=3):
        drain(sync_bus)
    assert seen == ["CRASHED"]


async def test_commands_wait_in_the_outbox_while_the_broker_is_down(dsn: str) -> None:
    seen: list[Any] = []

    async def debit(command: Command, ctx: HandlerContext) -> None:
        seen.append(command.data)

    async with CommandBus(dsn, transport=BreakableTransport(dsn)) as bus:
        bus.handler("payments", "Debit")(debit)
        with broker_down(bus):
            batch_id = await bus.create_batch("payments", [BatchCommand("Debit", data=1)])
            await assert_sent(bus, "payments", "Debit", status="PENDING_RETRY", times=1)
        report = await bus.get_dispatch("payments", batch_id)
        assert report is not None
        assert (report.queued_tasks, report.retry_needed) == (0, 1)
        await travel(bus, timedelta(minutes=1))  # past the pause after which a relay tries again
        await drain(bus)
        assert seen == [1]


async def test_faults_that_cannot_be_are_refused(bus: CommandBus) -> None:
    with pytest.raises(InvalidOperationError, match=r"no handler of payments/Debit on this bus. It has: none"):
        fail_next(bus, "payments", "Debit", ValueError).__enter__()
    with pytest.raises(ValueError, match="wants an exception, found"):
        fail_next(bus, "payments", "Debit", "no").__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="times"):
        kill_worker(bus, "payments", "Debit", times=0).__enter__()
    with pytest.raises(InvalidOperationError, match="whose transport is a BreakableTransport, found None"):
        broker_down(bus).__enter__()

"""A batch that is canceled starts nothing more; what runs is asked to stop and counts once, however it ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    HandlerContext,
    SyncHandlerContext,
    TransientCommandError,
    WorkerSettings,
)
from busload.commands.execution import FAILED_ATTEMPT
from busload.errors import BatchSealedError, InvalidOperationError
from tests.given import DOMAIN, END_LISTENERS, LISTENERS, Given, closed_to_newcomers, counts, eventually, raising

pytestmark = pytest.mark.usefixtures("invariants")

DEAF_TO_HEARTBEATS = WorkerSettings(lease_for=timedelta(hours=1), poll_every=timedelta(milliseconds=50))


async def test_a_batch_canceled_before_it_starts_ends_at_once(bus: CommandBus, given: Given) -> None:
    """PENDING to COMPLETED_WITH_FAILURES, without a start"""
    batch_id = await given.batch(commands=1500)

    assert await bus.cancel_batch(DOMAIN, batch_id, reason="wrong file", operator="ada") == 1500

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (1500, 0, 0, 1500, 0))
    assert batch.started_at is None
    assert batch.completed_at is not None
    events = {event.type: event for event in await bus.get_batch_audit_trail(DOMAIN, batch_id)}
    assert "BATCH_STARTED" not in events
    assert (events["BATCH_CANCELED"].operator, events["BATCH_CANCELED"].details) == ("ada", {"reason": "wrong file"})
    seen = given.handler()
    await given.drained()
    assert seen == []


async def test_every_canceled_command_says_by_whom_and_why(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=2)
    await bus.cancel_batch(DOMAIN, batch_id, reason="wrong file", operator="ada")
    for command in await bus.list_batch_commands(DOMAIN, batch_id):
        assert (command.status, command.attempts) == ("CANCELED", 0)
        assert command.finished_at is not None
        canceled = (await bus.get_audit_trail(DOMAIN, command.command_id))[-1]
        assert (canceled.type, canceled.operator, canceled.batch_id) == ("CANCELED", "ada", batch_id)
        assert canceled.details == {"reason": "wrong file"}


async def test_what_runs_when_its_batch_is_canceled_counts_as_it_ends(bus: CommandBus, given: Given) -> None:
    """A load is split; the running part completes, the waiting part is canceled"""
    batch_id = await given.batch(commands=10)
    running = given.claimed(4)

    assert await bus.cancel_batch(DOMAIN, batch_id, reason="enough") == 6

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("IN_PROGRESS", (10, 0, 0, 6, 0))
    given.settled(running[:3])
    assert (await given.batch_now(batch_id)).status == "IN_PROGRESS"
    given.settled(running[3:])
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (10, 4, 0, 6, 0))


async def test_running_commands_are_asked_to_stop(bus: CommandBus, given: Given) -> None:
    """By notification, long before the heartbeat; one stops with an error, one goes on to its end"""
    both = asyncio.Barrier(3)

    async def run(command: Command, ctx: HandlerContext) -> None:
        await both.wait()
        assert not ctx.cancelled
        await eventually(lambda: ctx.cancelled)
        if command.data["n"] == 0:
            raise RuntimeError("stopped as asked")

    given.handler("Debit", run)
    batch_id = await given.batch(commands=4)
    async with given.running(concurrency=2, settings=DEAF_TO_HEARTBEATS):
        await both.wait()
        assert await bus.cancel_batch(DOMAIN, batch_id, reason="enough") == 2
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=25)

    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (4, 1, 0, 3, 0))
    stopped = (await bus.list_batch_commands(DOMAIN, batch_id))[0]
    assert (stopped.status, stopped.last_error_message) == ("CANCELED", "stopped as asked")


async def test_a_handler_in_a_thread_is_asked_to_stop_as_well(bus: CommandBus, given: Given) -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    @bus.handler(DOMAIN, "Debit")
    def run(command: Command, ctx: SyncHandlerContext) -> None:
        loop.call_soon_threadsafe(begun.set)
        deadline = time.monotonic() + 30
        while not ctx.cancelled and time.monotonic() < deadline:
            time.sleep(0.005)
        raise InterruptedError("stopped as asked")

    batch_id = await given.batch()
    async with given.running(settings=DEAF_TO_HEARTBEATS):
        await begun.wait()
        await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=30)
    assert counts(batch) == (1, 0, 0, 1, 0)


async def test_a_worker_that_listens_again_hears_of_a_cancel_that_it_has_missed(bus: CommandBus, given: Given) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def run(command: Command, ctx: HandlerContext) -> None:
        begun.set()
        await eventually(lambda: ctx.cancelled, within=60)
        stopped.set()

    given.handler("Debit", run)
    batch_id = await given.batch()
    async with given.running(settings=DEAF_TO_HEARTBEATS):
        await begun.wait()
        await eventually(lambda: given.database.value(LISTENERS))
        with closed_to_newcomers(bus.dsn):
            given.database.rows(END_LISTENERS)
            await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
        await asyncio.wait_for(stopped.wait(), 60)


async def test_a_worker_that_missed_the_notification_hears_of_the_cancel_with_its_heartbeat(
    bus: CommandBus, given: Given
) -> None:
    """Notifications are hints"""
    begun = asyncio.Event()

    async def run(command: Command, ctx: HandlerContext) -> None:
        begun.set()
        await eventually(lambda: ctx.cancelled)
        raise RuntimeError("stopped as asked")

    given.handler("Debit", run)
    batch_id = await given.batch()
    async with given.running(settings=replace(given.settings, lease_for=timedelta(milliseconds=900))):
        await begun.wait()
        given.database.rows("UPDATE busload.batch SET canceled_at = now()")  # as a cancel does, but tells nobody
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=25)
    assert counts(batch) == (1, 0, 0, 1, 0)


async def test_a_final_outcome_is_kept_after_the_cancel(bus: CommandBus, given: Given) -> None:
    """A business rule that was broken stays FAILED"""
    begun = asyncio.Event()

    async def run(command: Command, ctx: HandlerContext) -> None:
        begun.set()
        await eventually(lambda: ctx.cancelled)
        raise BusinessRuleError("overdrawn")

    given.handler("Debit", run)
    batch_id = await given.batch()
    async with given.running():
        await begun.wait()
        await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=25)
    assert counts(batch) == (1, 0, 1, 0, 0)


async def test_an_attempt_that_would_be_repeated_ends_as_canceled(bus: CommandBus, given: Given) -> None:
    """Though its worker has not heard of the cancel"""
    batch_id = await given.batch()
    running = given.claimed()
    await bus.cancel_batch(DOMAIN, batch_id, reason="enough")

    given.settled(running, FAILED_ATTEMPT, details='{"message": "busy"}', delay=10.0)

    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (1, 0, 0, 1, 0))
    assert given.database.count("scheduled") == 0


async def test_what_waits_for_its_time_or_its_next_attempt_is_canceled(bus: CommandBus, given: Given) -> None:
    """Scheduled by run_at, and by a retry"""
    given.handler("Busy", raising(TransientCommandError("busy")))
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Busy"), BatchCommand("Debit", run_at=tomorrow)])
    await given.drained()
    assert given.database.count("scheduled") == 2

    assert await bus.cancel_batch(DOMAIN, batch_id, reason="enough") == 2

    commands = await bus.list_batch_commands(DOMAIN, batch_id)
    assert [(command.status, command.attempts) for command in commands] == [("CANCELED", 1), ("CANCELED", 0)]
    assert counts(await given.batch_now(batch_id)) == (2, 0, 0, 2, 0)


async def test_what_comes_back_to_a_canceled_batch_is_canceled(bus: CommandBus, given: Given) -> None:
    """From a dead worker"""
    batch_id = await given.batch()
    worker = given.registered_worker()
    given.claimed(by=worker)
    await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    given.died(worker)
    given.rescued()
    batch = await given.batch_now(batch_id)
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (1, 0, 0, 1, 0))


async def test_nothing_of_a_canceled_batch_is_retried_by_an_operator(bus: CommandBus, given: Given) -> None:
    """What waits for a person stays there until the person completes or cancels it."""
    batch_id, [command_id] = await given.in_troubleshooting()
    await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 0, 1)
    with pytest.raises(InvalidOperationError, match="canceled batch"):
        await bus.troubleshooting.retry(DOMAIN, command_id)
    await bus.troubleshooting.cancel(DOMAIN, command_id, reason="enough")
    assert counts(await given.batch_now(batch_id)) == (1, 0, 0, 1, 0)


async def test_canceled_commands_reply_that_they_were(bus: CommandBus, given: Given) -> None:
    """Waiting ones with the reason, running ones with what they said"""
    batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit", reply_to="ledger") for _ in range(3)])
    running = given.claimed(1)
    await bus.cancel_batch(DOMAIN, batch_id, reason="wrong file")
    given.settled(running, FAILED_ATTEMPT, details='{"message": "busy"}', delay=10.0)

    replies = [row[0] for row in given.database.rows("SELECT data FROM busload.command WHERE domain = 'ledger'")]
    assert [reply["outcome"] for reply in replies] == ["CANCELED"] * 3
    assert sorted(reply["error"]["message"] for reply in replies) == ["busy", "wrong file", "wrong file"]
    sent = {str(command.command_id) for command in await bus.list_batch_commands(DOMAIN, batch_id)}
    assert {reply["command_id"] for reply in replies} == sent


async def test_canceling_again_or_too_late_changes_nothing(bus: CommandBus, given: Given) -> None:
    given.handler()
    done = await given.batch(commands=2)
    await given.drained()
    assert await bus.cancel_batch(DOMAIN, done, reason="too late") == 0
    assert (await given.batch_now(done)).status == "COMPLETED"

    canceled = await given.batch(commands=2, command_type="Later")
    assert await bus.cancel_batch(DOMAIN, canceled, reason="first") == 2
    before = given.database.everything()
    assert await bus.cancel_batch(DOMAIN, canceled, reason="second") == 0
    assert given.database.everything() == before


async def test_an_open_batch_that_is_canceled_takes_no_more_commands(bus: CommandBus, given: Given) -> None:
    async def fill() -> UUID:
        async with bus.open_batch(DOMAIN, checkpoint_size=1) as batch:
            await batch.add("Debit")
            assert await bus.cancel_batch(DOMAIN, batch.batch_id, reason="enough") == 1
            opened.append(batch.batch_id)
            await batch.add("Debit")
        return batch.batch_id

    opened: list[UUID] = []
    with pytest.raises(BatchSealedError):
        await fill()
    batch = await given.batch_now(opened[0])
    assert (batch.status, counts(batch)) == ("COMPLETED_WITH_FAILURES", (1, 0, 0, 1, 0))


async def test_a_cancel_may_join_a_transaction(bus: CommandBus, given: Given, dsn: str) -> None:
    batch_id = await given.batch(commands=3)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        assert await bus.cancel_batch(DOMAIN, batch_id, reason="perhaps", conn=conn) == 3
        await conn.rollback()
    assert counts(await given.batch_now(batch_id)) == (3, 0, 0, 0, 0)
    assert len(given.claimed(5)) == 3


async def test_a_cancel_and_a_claim_at_once_share_the_commands(bus: CommandBus, given: Given) -> None:
    """Whatever the order, every command is counted once"""

    async def run(command: Command, ctx: HandlerContext) -> Any:
        await asyncio.sleep(0)

    given.handler("Debit", run)
    batch_id = await given.batch(commands=400)
    async with given.running(concurrency=7):
        await eventually(lambda: given.database.count("execution") > 0)
        canceled = await bus.cancel_batch(DOMAIN, batch_id, reason="enough")
        batch = await bus.wait_batch(DOMAIN, batch_id, timeout=20)
    assert batch.completed_count + batch.canceled_count == 400
    assert canceled <= batch.canceled_count

"""Whoever asked is told once that a batch has completed: by a durable command, or by a function."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BatchMetadata,
    BusinessRuleError,
    CommandBus,
    DuplicateCommandError,
    PermanentCommandError,
    SyncCommandBus,
    TransientCommandError,
    Worker,
)
from tests.given import DOMAIN, Given, counts, eventually, raising

pytestmark = pytest.mark.usefixtures("invariants")


class Calls:
    """A callback that remembers what it was called with."""

    def __init__(self) -> None:
        self.batches: list[BatchMetadata] = []
        self.called = asyncio.Event()

    async def __call__(self, batch: BatchMetadata) -> None:
        self.batches.append(batch)
        self.called.set()

    async def once(self) -> BatchMetadata:
        async with asyncio.timeout(25):
            await self.called.wait()
        [batch] = self.batches
        return batch


async def in_another_process(script: str, *args: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *args)
    async with asyncio.timeout(30):
        assert await process.wait() == 0


DRAIN = """
import asyncio, sys
from busload import CommandBus, Worker

async def main(dsn):
    async with CommandBus(dsn) as bus:
        @bus.handler("payments", "Debit")
        async def debit(command, ctx): ...
        await Worker(bus).drain()

asyncio.run(main(sys.argv[1]))
"""

CREATE_AND_DIE = """
import asyncio, os, sys
from busload import BatchCommand, CommandBus

async def main(dsn):
    async with CommandBus(dsn) as bus:
        done = BatchCommand("Done", data={"mail": "x"})
        await bus.create_batch("payments", [BatchCommand("Debit")], on_complete=done)
        os._exit(0)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_durable_callback_is_sent_with_the_completed_batch(bus: CommandBus, given: Given) -> None:
    """In the batch's domain, its own data kept"""
    given.handler()
    done = given.handler("Done")
    batch_id = await given.batch(
        commands=3, name="payroll", custom_data={"a": 1}, on_complete=BatchCommand("Done", data={"mail": "x"})
    )
    assert given.database.count("command") == 3

    await given.drained()

    [callback] = done
    batch = await given.batch_now(batch_id)
    told = callback.data.pop("batch")
    assert callback.data == {"mail": "x"}
    assert (callback.domain, callback.batch_id) == (DOMAIN, None)
    assert (told["batch_id"], told["name"], told["custom_data"]) == (str(batch_id), "payroll", {"a": 1})
    assert (told["status"], told["total_count"], told["completed_count"]) == ("COMPLETED", 3, 3)
    assert (told["failed_count"], told["canceled_count"], told["in_troubleshooting_count"]) == (0, 0, 0)
    assert datetime.fromisoformat(told["completed_at"]) == batch.completed_at
    assert datetime.fromisoformat(told["started_at"]) == batch.started_at


async def test_a_durable_callback_keeps_the_options_it_was_given(bus: CommandBus, given: Given) -> None:
    """Id, correlation, reply, task key, priority, attempts"""
    command_id, correlation_id = uuid4(), uuid4()
    on_complete = BatchCommand(
        "Done",
        command_id,
        reply_to="office",
        correlation_id=correlation_id,
        task_key="payroll",
        priority=7,
        max_attempts=1,
    )
    await given.batch(on_complete=on_complete)
    given.settled(given.claimed())

    sent = await given.command_now(command_id)
    assert (sent.reply_to, sent.correlation_id, sent.task_key) == ("office", correlation_id, "payroll")
    assert (sent.priority, sent.max_attempts, sent.status) == (7, 1, "PENDING")
    given.handler("Done")
    await given.drained()
    assert given.database.value("SELECT command_type FROM busload.command WHERE domain = 'office'") == "DoneReply"


async def test_a_function_is_called_once_with_the_final_numbers(bus: CommandBus, given: Given) -> None:
    given.handler("Debit", raising(BusinessRuleError("no")))
    calls = Calls()
    batch_id = await given.batch(commands=3, on_complete=calls)

    await given.drained()

    told = await calls.once()
    assert told == await given.batch_now(batch_id)
    assert (told.status, counts(told)) == ("COMPLETED_WITH_FAILURES", (3, 0, 3, 0, 0))
    another = Calls()
    await bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=another)
    await given.drained()
    await another.once()
    assert len(calls.batches) == 1


async def test_a_batch_of_one_command_calls_back(given: Given) -> None:
    given.handler()
    calls = Calls()
    batch_id = await given.batch(commands=1, on_complete=calls)
    await given.drained()
    assert (await calls.once()).batch_id == batch_id


async def test_nobody_is_called_while_something_is_in_troubleshooting(bus: CommandBus, given: Given) -> None:
    """The operator's action that ends it calls"""
    calls = Calls()
    batch_id, [first, second] = await given.in_troubleshooting(commands=2, on_complete=calls)
    await bus.troubleshooting.complete(DOMAIN, first)
    another = Calls()
    given.handler()
    await given.batch(on_complete=another)
    await given.drained()
    await another.once()
    assert calls.batches == []

    await bus.troubleshooting.cancel(DOMAIN, second, reason="closed")

    told = await calls.once()
    assert (told.batch_id, counts(told)) == (batch_id, (2, 1, 0, 1, 0))


async def test_an_operators_action_sends_the_durable_callback_in_its_own_transaction(
    bus: CommandBus, given: Given, dsn: str
) -> None:
    """Rolled back with it, sent once"""
    done = given.handler("Done")
    _, [command_id] = await given.in_troubleshooting(on_complete=BatchCommand("Done"))
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await bus.troubleshooting.complete(DOMAIN, command_id, conn=conn)
        await conn.rollback()
    await given.drained()
    assert done == []

    await bus.troubleshooting.complete(DOMAIN, command_id)
    await given.drained()

    assert len(done) == 1
    assert done[0].data["batch"]["completed_count"] == 1


async def test_a_function_is_called_outside_any_transaction(bus: CommandBus, given: Given, dsn: str) -> None:
    """What it is told is committed, and it may use the bus"""
    seen: list[Any] = []
    called = asyncio.Event()

    async def look(batch: BatchMetadata) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            cursor = await conn.execute("SELECT status FROM busload.batch WHERE batch_id = %s", [batch.batch_id])
            seen.append(await cursor.fetchone())
        await bus.send(DOMAIN, "Next")
        called.set()

    given.handler()
    await given.batch(on_complete=look)
    await given.drained()
    async with asyncio.timeout(25):
        await called.wait()
    assert seen == [("COMPLETED",)]
    assert given.database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Next'") == 1


@pytest.mark.parametrize("error", [RuntimeError("mail server is down"), asyncio.CancelledError()], ids=repr)
async def test_a_function_that_raises_is_logged_and_changes_nothing(
    given: Given, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """The batch stays complete, and other callbacks are still called"""

    async def fail(batch: BatchMetadata) -> None:
        raise error

    given.handler()
    batch_id = await given.batch(on_complete=fail)
    with caplog.at_level(logging.ERROR, logger="busload"):
        await given.drained()
        await eventually(lambda: str(batch_id) in caplog.text)
    assert (await given.batch_now(batch_id)).status == "COMPLETED"

    calls = Calls()
    await given.batch(on_complete=calls)
    await given.drained()
    await calls.once()


async def test_a_function_hears_of_a_batch_that_another_process_completed(given: Given, dsn: str) -> None:
    """Creator and worker share nothing but the database"""
    calls = Calls()
    batch_id = await given.batch(commands=5, on_complete=calls)

    await in_another_process(DRAIN, dsn)

    told = await calls.once()
    assert (told.batch_id, told.status, counts(told)) == (batch_id, "COMPLETED", (5, 5, 0, 0, 0))


async def test_a_durable_callback_outlives_the_process_that_created_the_batch(given: Given, dsn: str) -> None:
    await in_another_process(CREATE_AND_DIE, dsn)
    given.handler()
    done = given.handler("Done")
    await given.drained()
    assert [callback.data["mail"] for callback in done] == ["x"]


async def test_a_durable_callback_that_fails_for_good_is_visible_and_its_batch_stays_complete(
    bus: CommandBus, given: Given
) -> None:
    given.handler()
    given.handler("Done", raising(PermanentCommandError("no such mailbox", code="MAILBOX")))
    batch_id = await given.batch(on_complete=BatchCommand("Done"))

    await given.drained()

    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    [item] = await bus.troubleshooting.list(DOMAIN, command_type="Done")
    assert (item.reason, item.last_error_code) == ("PERMANENT", "MAILBOX")
    assert item.data["batch"]["batch_id"] == str(batch_id)


async def test_a_durable_callback_has_its_own_attempts(bus: CommandBus, given: Given) -> None:
    given.handler()
    tried = given.handler("Done", raising(TransientCommandError("busy")))
    batch_id = await given.batch(on_complete=BatchCommand("Done", max_attempts=2))

    await given.drained()
    given.make_due()
    await given.drained()

    assert len(tried) == 2
    assert [item.reason for item in await bus.troubleshooting.list(DOMAIN)] == ["EXHAUSTED"]
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_a_durable_callback_without_a_handler_waits_visibly(bus: CommandBus, given: Given) -> None:
    given.handler()
    callback_id = uuid4()
    batch_id = await given.batch(on_complete=BatchCommand("Done", callback_id))

    await given.drained()

    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    assert (await given.command_now(callback_id)).status == "SCHEDULED"
    assert "NO_HANDLER" in [event.type for event in await bus.get_audit_trail(DOMAIN, callback_id)]
    done = given.handler("Done")
    given.make_due()
    await given.drained()
    assert [command.command_id for command in done] == [callback_id]


async def test_the_id_of_a_callback_must_be_free(bus: CommandBus, given: Given) -> None:
    """Taken in the table or in the list, it would keep the batch from ever completing"""
    taken = await given.sent()
    before = given.database.everything()
    with pytest.raises(DuplicateCommandError, match=str(taken)):
        await given.batch(on_complete=BatchCommand("Done", taken))
    with pytest.raises(DuplicateCommandError, match=str(taken)):
        async with bus.open_batch(DOMAIN, on_complete=BatchCommand("Done", taken)):
            pass
    own = uuid4()
    with pytest.raises(DuplicateCommandError, match=str(own)):
        await bus.create_batch(DOMAIN, [BatchCommand("Debit", own)], on_complete=BatchCommand("Done", own))
    assert given.database.everything() == before


async def test_an_id_that_is_used_up_after_the_batch_was_created_does_not_hold_it_up(
    bus: CommandBus, given: Given
) -> None:
    callback_id = uuid4()
    batch_id = await given.batch(on_complete=BatchCommand("Done", callback_id))
    await given.sent("Other", command_id=callback_id)
    given.settled([one for one in given.claimed(2) if one.command_type == "Debit"])
    assert (await given.batch_now(batch_id)).status == "COMPLETED"


async def test_a_cancel_that_ends_a_batch_calls_back(bus: CommandBus, given: Given) -> None:
    calls = Calls()
    batch_id = await given.batch(commands=2, on_complete=calls)
    await bus.cancel_batch(DOMAIN, batch_id, reason="mistake")
    told = await calls.once()
    assert (told.status, counts(told)) == ("COMPLETED_WITH_FAILURES", (2, 0, 0, 2, 0))


async def test_a_seal_that_ends_a_batch_calls_back(bus: CommandBus, given: Given) -> None:
    """Function and durable command, for an empty batch and one that was done before"""
    calls = Calls()
    async with bus.open_batch(DOMAIN, on_complete=calls):
        pass
    assert counts(await calls.once()) == (0, 0, 0, 0, 0)

    given.handler()
    done = given.handler("Done")
    async with bus.open_batch(DOMAIN, on_complete=BatchCommand("Done")) as batch:
        await batch.add("Debit")
        await batch.checkpoint()
        await given.drained()
        assert done == []
    await given.drained()
    assert [command.data["batch"]["total_count"] for command in done] == [1]


async def test_a_function_of_a_batch_that_was_rolled_back_is_never_called(
    bus: CommandBus, given: Given, dsn: str
) -> None:
    ghost, real = Calls(), Calls()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await given.batch(on_complete=ghost, conn=conn)
        await conn.rollback()
    given.handler()
    await given.batch(on_complete=real)
    await given.drained()
    await real.once()
    assert ghost.batches == []


def test_a_function_of_the_sync_bus_is_called_from_a_thread_of_ours(sync_bus: SyncCommandBus) -> None:
    """No event loop needed; its exception is logged only"""
    told: list[tuple[UUID, str, str]] = []
    both = threading.Barrier(2, timeout=60)

    def fail(batch: BatchMetadata) -> None:
        raise SystemExit("never mind")

    def note(batch: BatchMetadata) -> None:
        told.append((batch.batch_id, batch.status, threading.current_thread().name))
        both.wait()

    @sync_bus.handler(DOMAIN, "Debit")
    def debit(command: Any, ctx: Any) -> None: ...

    sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=fail)
    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=note)
    asyncio.run(Worker(sync_bus).drain())
    both.wait()
    assert told == [(batch_id, "COMPLETED", "busload-callbacks")]

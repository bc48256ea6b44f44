"""The worked examples of batches: create one and follow its counters, resolve failures, hear of its completion."""

from __future__ import annotations

from dataclasses import fields
from uuid import uuid4

import pytest

from busload import BatchCommand, BatchMetadata, Command, CommandBus, HandlerContext, PermanentCommandError
from tests.given import Database, Given, eventually

DOMAIN = "payments"


COMMAND = ("command_type", "command_id", "data", "reply_to", "correlation_id")
METADATA = (
    *("batch_id", "domain", "name", "custom_data", "status", "total_count", "completed_count", "failed_count"),
    *("canceled_count", "in_troubleshooting_count", "created_at", "started_at", "completed_at"),
)


def debits(count: int) -> list[BatchCommand]:
    return [BatchCommand("Debit", uuid4(), {"account": n, "amount": 10}) for n in range(count)]


async def debit(command: Command, ctx: HandlerContext) -> dict[str, int]:
    if command.data["account"] in (3, 4):
        raise PermanentCommandError("no such account")
    return {"debited": command.data["amount"]}


def test_the_classes_have_the_fields_of_the_document_in_its_order() -> None:
    assert tuple(each.name for each in fields(BatchCommand))[:5] == COMMAND
    assert tuple(each.name for each in fields(BatchMetadata))[:13] == METADATA


async def test_a_batch_is_created_processed_and_counted(bus: CommandBus, given: Given) -> None:
    """PENDING, IN_PROGRESS, COMPLETED; with the audit events of both transitions."""
    given.handler("Debit", debit)
    batch_id = await bus.create_batch(DOMAIN, debits(3), name="Monthly billing", custom_data={"month": 5})
    created = await bus.get_batch(DOMAIN, batch_id)
    assert created is not None and (created.status, created.total_count) == ("PENDING", 3)
    assert await bus.list_batches(DOMAIN, status="PENDING", limit=100, offset=0) == [created]
    await given.drained()
    done = await bus.get_batch(DOMAIN, batch_id)
    assert done is not None and (done.status, done.completed_count) == ("COMPLETED", 3)
    assert done.started_at is not None and done.completed_at is not None
    commands = await bus.list_batch_commands(DOMAIN, batch_id, status="COMPLETED", limit=100, offset=0)
    assert [command.result for command in commands] == [{"debited": 10}] * 3
    types = [event.type for event in await bus.get_batch_audit_trail(DOMAIN, batch_id)]
    assert types.index("BATCH_STARTED") < types.index("BATCH_COMPLETED")
    with pytest.raises(ValueError):
        await bus.create_batch(DOMAIN, [])


async def test_operators_move_the_counters_until_the_batch_completes(bus: CommandBus, given: Given) -> None:
    given.handler("Debit", debit)
    batch_id = await bus.create_batch(DOMAIN, debits(5))
    await given.drained()
    batch = await bus.get_batch(DOMAIN, batch_id)
    assert batch is not None
    assert (batch.status, batch.completed_count, batch.in_troubleshooting_count) == ("IN_PROGRESS", 3, 2)
    first, second = await bus.troubleshooting.list(DOMAIN)
    await bus.troubleshooting.complete(DOMAIN, first.command_id, operator="rosa")
    await bus.troubleshooting.cancel(DOMAIN, second.command_id, operator="rosa", reason="closed")
    batch = await bus.get_batch(DOMAIN, batch_id)
    assert batch is not None and batch.status == "COMPLETED_WITH_FAILURES"
    assert (batch.completed_count, batch.canceled_count, batch.in_troubleshooting_count) == (4, 1, 0)


async def test_the_callback_is_given_the_final_numbers_once(bus: CommandBus, given: Given, database: Database) -> None:
    heard: list[BatchMetadata] = []

    async def on_complete(batch: BatchMetadata) -> None:
        heard.append(batch)

    given.handler("Debit", debit)
    batch_id = await bus.create_batch(DOMAIN, debits(3), on_complete=on_complete)
    async with given.running():
        await eventually(lambda: len(heard) == 1)
    assert (heard[0].batch_id, heard[0].status, heard[0].completed_count) == (batch_id, "COMPLETED", 3)

"""The same journeys for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    DuplicateCommandError,
    InvalidCommandError,
    PermanentCommandError,
    SyncCommandBus,
    SyncHandlerContext,
    Worker,
)
from busload.errors import BatchSealedError, CommandNotFoundError, InvalidOperationError
from tests.given import DOMAIN, Database, counts


def drain(bus: SyncCommandBus) -> int:
    return asyncio.run(Worker(bus).drain())


def test_a_batch_from_creation_to_completion(sync_bus: SyncCommandBus) -> None:
    """Handlers written with def run in threads"""
    threads: set[str] = set()

    @sync_bus.handler(DOMAIN, "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> dict[str, int]:
        threads.add(threading.current_thread().name)
        if command.data == 3:
            raise BusinessRuleError("three")
        if command.data == 7:
            raise PermanentCommandError("seven")
        return {"n": command.data}

    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit", data=n) for n in range(10)], name="sync")
    assert drain(sync_bus) == 10

    batch = sync_bus.get_batch(DOMAIN, batch_id)
    assert batch is not None
    assert (batch.status, counts(batch)) == ("IN_PROGRESS", (10, 8, 1, 0, 1))
    assert all(name.startswith("busload-handler") for name in threads)
    [item] = sync_bus.troubleshooting.list(DOMAIN)
    sync_bus.troubleshooting.complete(DOMAIN, item.command_id, result="by hand", operator="ada")
    done = sync_bus.wait_batch(DOMAIN, batch_id, timeout=25)
    assert (done.status, counts(done)) == ("COMPLETED_WITH_FAILURES", (10, 9, 1, 0, 0))
    commands = sync_bus.list_batch_commands(DOMAIN, batch_id)
    assert [command.result for command in commands[:3]] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [b.batch_id for b in sync_bus.list_batches(DOMAIN, status="COMPLETED_WITH_FAILURES")] == [batch_id]
    assert sync_bus.get_audit_trail(DOMAIN, item.command_id)[-1].operator == "ada"
    assert sync_bus.get_batch_audit_trail(DOMAIN, batch_id)[-1].type == "BATCH_COMPLETED"


def test_single_commands_and_many(sync_bus: SyncCommandBus, database: Database) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    sent = sync_bus.send(DOMAIN, "Debit", {"a": 1}, priority=3, run_at=tomorrow, task_key="k", max_attempts=2)
    found = sync_bus.get_command(DOMAIN, sent.command_id)
    assert found is not None
    assert (found.data, found.priority, found.run_at, found.task_key, found.max_attempts) == (
        {"a": 1},
        3,
        tomorrow,
        "k",
        2,
    )
    before = database.everything()
    with pytest.raises(DuplicateCommandError, match=str(sent.command_id)):
        sync_bus.send(DOMAIN, "Debit", command_id=sent.command_id)
    with pytest.raises(DuplicateCommandError, match=str(sent.command_id)):
        sync_bus.send_many(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", sent.command_id)])
    with pytest.raises(InvalidCommandError):
        sync_bus.create_batch(DOMAIN, [])
    assert database.everything() == before
    assert len(sync_bus.send_many(DOMAIN, [BatchCommand("Debit")] * 3)) == 3


def test_an_open_batch(sync_bus: SyncCommandBus, database: Database) -> None:
    @sync_bus.handler(DOMAIN, "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None: ...

    with sync_bus.open_batch(DOMAIN, checkpoint_size=2) as batch:
        for _ in range(5):
            batch.add("Debit")
        assert batch.added == 4
        drain(sync_bus)
        sync_bus.send(DOMAIN, "Debit", batch_id=batch.batch_id)
        now = sync_bus.get_batch(DOMAIN, batch.batch_id)
        assert now is not None
        assert counts(now) == (5, 4, 0, 0, 0)
    with pytest.raises(BatchSealedError):
        batch.add("Debit")
    with pytest.raises(BatchSealedError):
        sync_bus.send(DOMAIN, "Debit", batch_id=batch.batch_id)
    assert sync_bus.seal_batch(DOMAIN, batch.batch_id) is False
    drain(sync_bus)
    assert sync_bus.wait_batch(DOMAIN, batch.batch_id, timeout=25).completed_count == 6

    with pytest.raises(OSError, match="disk"), sync_bus.open_batch(DOMAIN) as broken:
        raise OSError("disk")
    left = sync_bus.get_batch(DOMAIN, broken.batch_id)
    assert left is not None
    assert left.status == "PENDING"


def test_operators_and_cancels(sync_bus: SyncCommandBus) -> None:
    @sync_bus.handler(DOMAIN, "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None:
        raise PermanentCommandError("closed")

    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit", data=n) for n in range(3)])
    drain(sync_bus)
    first, second, third = (item.command_id for item in sync_bus.troubleshooting.list(DOMAIN))
    sync_bus.troubleshooting.retry(DOMAIN, first, operator="ada")
    sync_bus.troubleshooting.cancel(DOMAIN, second, reason="no", operator="ada")
    with pytest.raises(InvalidOperationError):
        sync_bus.troubleshooting.retry(DOMAIN, second)
    with pytest.raises(CommandNotFoundError):
        sync_bus.troubleshooting.complete(DOMAIN, uuid4())
    assert sync_bus.cancel_batch(DOMAIN, batch_id, reason="enough", operator="ada") == 1
    sync_bus.troubleshooting.complete(DOMAIN, third)
    done = sync_bus.wait_batch(DOMAIN, batch_id, timeout=25)
    assert (done.status, counts(done)) == ("COMPLETED_WITH_FAILURES", (3, 1, 0, 2, 0))


def test_watching(sync_bus: SyncCommandBus) -> None:
    @sync_bus.handler(DOMAIN, "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> None: ...

    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 2)
    pictures = sync_bus.watch_batch(DOMAIN, batch_id)
    assert next(pictures).status == "PENDING"
    drain(sync_bus)
    assert [picture.status for picture in pictures][-1] == "COMPLETED"


def test_a_handlers_writes_and_its_completion_commit_together(sync_bus: SyncCommandBus, database: Database) -> None:
    """What it sends as well; its error rolls everything back"""
    database.rows("CREATE TABLE booked (n int)")

    @sync_bus.handler(DOMAIN, "Debit")
    def debit(command: Command, ctx: SyncHandlerContext) -> Any:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO booked VALUES (%s)", [command.data])
            ctx.send("crm", "Tell", command.data)
            if command.data == 1:
                raise BusinessRuleError("no")
            return "booked"

    ids = [sync_bus.send(DOMAIN, "Debit", n).command_id for n in range(2)]
    drain(sync_bus)
    assert database.rows("SELECT n FROM booked") == [(0,)]
    assert database.rows("SELECT data FROM busload.command WHERE domain = 'crm'") == [(0,)]
    statuses = [(found.status, found.result) for id in ids if (found := sync_bus.get_command(DOMAIN, id))]
    assert statuses == [("COMPLETED", "booked"), ("FAILED", None)]


def test_no_event_loop_is_hidden_in_it(sync_bus: SyncCommandBus, dsn: str) -> None:
    """It works inside a running loop, and joins a transaction there"""

    async def inside() -> None:
        with psycopg.connect(dsn) as conn:
            sync_bus.send(DOMAIN, "Debit", conn=conn)
            sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")])
        assert len(sync_bus.list_batches(DOMAIN)) == 1

    asyncio.run(inside())

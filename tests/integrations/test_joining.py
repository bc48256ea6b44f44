"""What is sent exists exactly if the caller's transaction commits, on every kind of connection, in both faces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from busload import BatchCommand, CommandBus, Dedup, DuplicateCommandError, SyncCommandBus
from busload.errors import DuplicateTaskError
from tests.given import DOMAIN, Database, Given
from tests.integrations.callers import KINDS, SYNC_KINDS, Caller


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Caller]:
    """An application in its own transaction, which sends by the async bus."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")  # its connection blocks, and these tests are awaited
    async with KINDS[request.param](dsn) as caller:
        yield caller


@pytest.fixture(params=SYNC_KINDS)
async def blocking(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Caller]:
    """An application in its own transaction, which sends by the sync bus."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    async with SYNC_KINDS[request.param](dsn) as caller:
        yield caller


def of_all_kinds(count: int) -> list[BatchCommand]:
    """Commands that use everything a command can have, so that each value goes through the driver."""
    late = datetime.now(UTC) + timedelta(hours=1)
    return [
        BatchCommand(
            "Debit",
            data={"n": n, "text": "ä%s%%'\"\\{}\n"},
            task_key=f"t{n}" if n % 2 else None,
            correlation_id=uuid4() if n % 3 else None,
            reply_to="accounts" if n % 5 == 0 else None,
            priority=-(n % 7),
            run_at=late if n % 4 == 0 else None,
            max_attempts=n % 3 + 1 if n % 2 else None,
            headers={"tenant": "a"} if n % 2 else None,
        )
        for n in range(count)
    ]


async def test_what_is_sent_is_there_exactly_if_the_caller_commits(
    bus: CommandBus, given: Given, caller: Caller
) -> None:
    """Sending is the first thing the connection ever does; the caller's own writes go with it"""
    await bus.send(DOMAIN, "Debit", {"n": 1}, conn=caller.conn)
    await caller.execute("CREATE TABLE orders (id int)")
    await bus.send_many(DOMAIN, of_all_kinds(20), conn=caller.conn)
    await bus.create_batch(DOMAIN, of_all_kinds(20), name="of mine", conn=caller.conn)
    await caller.rollback()
    assert {given.database.count(table) for table in ("command", "queue", "batch", "event", "scheduled")} == {0}

    await bus.send(DOMAIN, "Debit", conn=caller.conn)  # and nothing else: a commit is one all the same
    await caller.commit()
    assert given.database.count("command") == 1

    sent = await bus.send(DOMAIN, "Debit", {"n": 1}, conn=caller.conn)
    await caller.execute("CREATE TABLE orders (id int)")
    commands = of_all_kinds(20)
    results = await bus.send_many(DOMAIN, commands, conn=caller.conn)
    batch_id = await bus.create_batch(DOMAIN, of_all_kinds(20), name="of mine", conn=caller.conn)
    assert given.database.count("command") == 1
    await caller.commit()
    assert given.database.count("command") == 42
    assert given.database.value("SELECT count(*) FROM orders") == 0
    assert await bus.get_command(DOMAIN, sent.command_id)
    batch = await bus.get_batch(DOMAIN, batch_id)
    assert batch is not None and (batch.total_count, batch.name) == (20, "of mine")
    for given_command, result in zip(commands, results, strict=True):
        found = await bus.get_command(DOMAIN, result.command_id)
        assert found is not None
        for name in ("data", "task_key", "reply_to", "priority", "max_attempts"):
            if name != "max_attempts" or given_command.max_attempts is not None:
                assert getattr(found, name) == getattr(given_command, name)


async def test_a_savepoint_that_is_rolled_back_takes_only_its_commands_along(
    bus: CommandBus, given: Given, caller: Caller
) -> None:
    kept = await bus.send(DOMAIN, "Debit", conn=caller.conn)
    async with caller.undone_savepoint():
        await bus.send(DOMAIN, "Debit", conn=caller.conn)
        await given.batch(commands=2, conn=caller.conn)
    later = await bus.send(DOMAIN, "Debit", conn=caller.conn)
    await caller.commit()
    found = given.database.rows("SELECT command_id FROM busload.command ORDER BY id")
    assert found == [(kept.command_id,), (later.command_id,)]
    assert given.database.count("batch") == 0


async def test_a_refused_duplicate_leaves_the_transaction_usable(bus: CommandBus, given: Given, caller: Caller) -> None:
    """By command_id and by task key; the error names the one that is there"""
    taken = await given.sent()
    await caller.execute("CREATE TABLE orders (id int)")
    for send in (
        bus.send(DOMAIN, "Debit", command_id=taken, conn=caller.conn),
        bus.send_many(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", taken)], conn=caller.conn),
        bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", taken)], conn=caller.conn),
    ):
        with pytest.raises(DuplicateCommandError) as refused:
            await send
        assert refused.value.command_ids == (taken,)
    await caller.execute("INSERT INTO orders VALUES (1)")
    once = Dedup(window=timedelta(minutes=5), on_conflict="raise")
    first = await bus.send(DOMAIN, "Debit", task_key="k", dedup=once, conn=caller.conn)
    with pytest.raises(DuplicateTaskError) as held:
        await bus.send(DOMAIN, "Debit", task_key="k", dedup=once, conn=caller.conn)
    assert held.value.holders == {"k": first.command_id}
    again = await bus.send(DOMAIN, "Debit", task_key="k", dedup=Dedup(), conn=caller.conn)
    assert (again.created, again.command_id) == (False, first.command_id)
    await caller.commit()
    assert given.database.value("SELECT count(*) FROM orders") == 1
    assert (given.database.count("command"), given.database.count("batch")) == (2, 0)


async def test_thousands_of_commands_go_in_by_copy_or_not_at_all(bus: CommandBus, given: Given, caller: Caller) -> None:
    """Also after a duplicate among them was refused"""
    commands = of_all_kinds(2000)
    taken = await given.sent()
    with pytest.raises(DuplicateCommandError):
        await bus.create_batch(DOMAIN, [*commands, BatchCommand("Debit", taken)], conn=caller.conn)
    batch_id = await bus.create_batch(DOMAIN, commands, conn=caller.conn)
    await caller.commit()
    assert given.database.value("SELECT count(*) FROM busload.command WHERE batch_id = %s", batch_id) == 2000
    assert given.database.count("command") == 2001
    data = given.database.value("SELECT data->>'text' FROM busload.command WHERE batch_id = %s LIMIT 1", batch_id)
    assert data == "ä%s%%'\"\\{}\n"


async def test_texts_are_copied_in_as_they_are_whatever_the_encoding_of_the_connection(
    bus: CommandBus, given: Given, caller: Caller
) -> None:
    """Which the connection keeps"""
    await caller.execute("SET client_encoding = 'LATIN1'")
    commands = [BatchCommand("Debit", data="Zo\u00eb, 5 \u20ac", headers={"to": "Zo\u00eb"})] * 1500
    batch_id = await bus.create_batch(DOMAIN, commands, conn=caller.conn)
    await caller.execute(
        "DO $$ BEGIN ASSERT (SELECT setting = 'LATIN1' FROM pg_settings WHERE name = 'client_encoding'); END $$"
    )
    await caller.commit()
    [found] = given.database.rows(
        "SELECT DISTINCT data #>> '{}', headers ->> 'to' FROM busload.command WHERE batch_id = %s", batch_id
    )
    assert found == ("Zo\u00eb, 5 \u20ac", "Zo\u00eb")


async def test_the_sync_bus_joins_every_kind_that_blocks(
    sync_bus: SyncCommandBus, database: Database, blocking: Caller
) -> None:
    """Commit, rollback, a savepoint that is rolled back, a duplicate, a batch by COPY"""
    conn: Any = blocking.conn
    sync_bus.send(DOMAIN, "Debit", conn=conn)
    sync_bus.create_batch(DOMAIN, of_all_kinds(3), conn=conn)
    await blocking.rollback()
    assert (database.count("command"), database.count("batch")) == (0, 0)

    sent = sync_bus.send(DOMAIN, "Debit", conn=conn)
    async with blocking.undone_savepoint():
        sync_bus.send_many(DOMAIN, of_all_kinds(3), conn=conn)
    with pytest.raises(DuplicateCommandError):
        sync_bus.send(DOMAIN, "Debit", command_id=sent.command_id, conn=conn)
    sync_bus.create_batch(DOMAIN, of_all_kinds(1100), conn=conn)
    assert database.count("command") == 0
    await blocking.commit()
    assert (database.count("command"), database.count("batch")) == (1101, 1)

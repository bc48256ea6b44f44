"""Time moves by moving rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from busload import Command, CommandBus, Dedup, HandlerContext, RetryPolicy, SyncCommandBus
from busload.testing import assert_sent, drain, travel, travel_to
from tests.given import Database, Given

DAY = timedelta(days=1)


async def _nothing(command: Any, ctx: Any) -> None: ...


async def test_what_was_to_come_is_due(bus: CommandBus, database: Database) -> None:
    """Scheduled commands, retries, expiry and dedup windows."""
    attempts: list[int] = []

    @bus.handler("payments", "Debit", retry=RetryPolicy(max_attempts=2, backoff=(3600,)))
    async def debit(command: Command, ctx: HandlerContext) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError("no answer")

    bus.handler("payments", "Later")(_nothing)
    dedup = Dedup(window=timedelta(hours=12))
    tomorrow = datetime.now(UTC) + DAY
    await bus.send("payments", "Later", run_at=tomorrow)
    await bus.send("nobody", "Late", expires_at=tomorrow)
    first = await bus.send("payments", "Debit", task_key="a", dedup=dedup)

    await drain(bus)
    assert attempts == [1]
    await travel(bus, timedelta(hours=2))
    await drain(bus)
    assert attempts == [1, 2]
    again = await bus.send("payments", "Debit", task_key="a", dedup=dedup)
    assert (again.created, again.command_id) == (False, first.command_id)

    await travel(bus, DAY)
    await drain(bus)
    await assert_sent(bus, "payments", "Later", status="COMPLETED", times=1)
    await assert_sent(bus, "nobody", "Late", status="CANCELED", times=1)
    assert (await bus.send("payments", "Debit", task_key="a", dedup=dedup)).created
    database.check_invariants()


async def test_a_lease_is_due_when_nothing_was_heard_of_its_worker(bus: CommandBus, given: Given) -> None:
    seen = given.handler()
    await given.sent()
    given.claimed()
    assert await drain(bus) == 0
    await travel(bus, timedelta(minutes=5))
    assert await drain(bus) == 1
    assert len(seen) == 1


def test_travel_to_a_moment_in_a_transaction_of_its_own(sync_bus: SyncCommandBus, dsn: str) -> None:
    sync_bus.handler("payments", "Later")(lambda command, ctx: None)
    with psycopg.connect(dsn) as conn:
        sync_bus.send("payments", "Later", run_at=datetime.now(UTC) + DAY, conn=conn)
        assert drain(sync_bus, conn=conn) == 0
        travel_to(sync_bus, datetime.now(UTC) + 2 * DAY, conn=conn)
        assert drain(sync_bus, conn=conn) == 1
        conn.rollback()


def test_only_the_future_can_be_travelled_to(sync_bus: SyncCommandBus) -> None:
    with pytest.raises(ValueError, match="wants a timedelta of more than 0, found"):
        travel(sync_bus, -DAY)
    with pytest.raises(ValueError, match=r"wants a moment in the future, found .*; now is"):
        travel_to(sync_bus, datetime.now(UTC) - DAY)
    with pytest.raises(ValueError, match="time zone"):
        travel_to(sync_bus, datetime(2030, 1, 1))


def test_every_table_with_times_moves(sync_bus: SyncCommandBus, database: Database) -> None:
    """So a table of a later release is not forgotten: it moves by itself, or is left out by name."""
    from busload.testing.time_travel import SQL

    moved = {update.split()[1] for (update,) in database.rows(SQL.updates.decode().replace("%%", "%"))}
    with_times = {
        f"busload.{table}"
        for (table,) in database.rows(
            "SELECT DISTINCT table_name FROM information_schema.columns JOIN information_schema.tables "
            "USING (table_schema, table_name) WHERE table_schema = 'busload' AND table_type = 'BASE TABLE' "
            "AND data_type = 'timestamp with time zone'"
        )
    }
    left_out = {"migration", "statistics", "archive", "archived_batch", "archived_job"}
    assert with_times - moved == {f"busload.{table}" for table in left_out}

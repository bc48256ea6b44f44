"""Queries written for the first design of batches, by the names of its tables: they run as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from busload import BatchCommand, BusinessRuleError, Command, CommandBus, HandlerContext, PermanentCommandError
from tests.given import DOMAIN, Database, Given

COLUMNS = {
    "batch_id": "uuid",
    "domain": "text",
    "name": "text",
    "custom_data": "jsonb",
    "status": "text",
    "total_count": "integer",
    "completed_count": "integer",
    "failed_count": "integer",
    "canceled_count": "integer",
    "in_troubleshooting_count": "integer",
    "created_at": "timestamp with time zone",
    "started_at": "timestamp with time zone",
    "completed_at": "timestamp with time zone",
}
"""The table that the document creates, in its order. VARCHAR is text here; lengths are checked on the way in."""


@pytest.fixture
def conn(dsn: str) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    """A connection of an application whose search_path has the names of the document."""
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        conn.execute("SET search_path = public, busload")
        yield conn


def one(conn: psycopg.Connection[dict[str, Any]], query: str, *params: object) -> dict[str, Any]:
    [row] = conn.execute(query.encode(), params).fetchall()
    return row


def test_the_table_has_the_columns_of_the_document(database: Database) -> None:
    rows = database.rows(
        "SELECT column_name, data_type FROM information_schema.columns"
        " WHERE table_schema = 'busload' AND table_name = 'command_bus_batch' ORDER BY ordinal_position"
    )
    assert dict(rows) == COLUMNS and [name for name, _ in rows] == list(COLUMNS)


async def test_queries_on_the_tables_of_the_document_follow_a_batch_from_its_creation_to_its_end(
    bus: CommandBus, given: Given, conn: psycopg.Connection[dict[str, Any]]
) -> None:
    """Status, counters and times, and the commands that reference their batch."""

    async def debit(command: Command, ctx: HandlerContext) -> None:
        if command.data["n"] == 1:
            raise BusinessRuleError("closed")
        if command.data["n"] in (2, 3):
            raise PermanentCommandError("no such account")

    given.handler("Debit", debit)
    commands = [BatchCommand("Debit", data={"n": n}) for n in range(5)]
    batch_id = await bus.create_batch(DOMAIN, commands, name="Monthly billing", custom_data={"month": 5})
    single = await given.sent()
    by_id = "SELECT * FROM command_bus_batch WHERE batch_id = %s"
    row = one(conn, by_id, batch_id)
    assert list(row) == list(COLUMNS)
    assert (row["status"], row["total_count"], row["started_at"]) == ("PENDING", 5, None)
    assert (row["domain"], row["name"], row["custom_data"]) == (DOMAIN, "Monthly billing", {"month": 5})
    of_batch = "SELECT command_id FROM command_bus_command WHERE batch_id = %s"
    listed = await bus.list_batch_commands(DOMAIN, batch_id)
    assert {r["command_id"] for r in conn.execute(of_batch.encode(), [batch_id])} == {c.command_id for c in listed}
    assert one(conn, "SELECT batch_id FROM command_bus_command WHERE command_id = %s", single)["batch_id"] is None

    await given.drained()
    row = one(conn, by_id, batch_id)
    counts = ("completed_count", "failed_count", "canceled_count", "in_troubleshooting_count")
    assert (row["status"], [row[name] for name in counts]) == ("IN_PROGRESS", [2, 1, 0, 2])
    assert row["started_at"] is not None and row["completed_at"] is None
    parked = "SELECT command_id FROM command_bus_command WHERE batch_id = %s AND status = 'IN_TROUBLESHOOTING_QUEUE'"
    first, second = (r["command_id"] for r in conn.execute(parked.encode(), [batch_id]))
    await bus.troubleshooting.complete(DOMAIN, first, operator="rosa")
    await bus.troubleshooting.cancel(DOMAIN, second, operator="rosa", reason="no")

    row = one(conn, by_id, batch_id)
    assert (row["status"], [row[name] for name in counts]) == ("COMPLETED_WITH_FAILURES", [3, 1, 1, 0])
    ended = "SELECT batch_id FROM command_bus_batch WHERE completed_count + failed_count + canceled_count = total_count"
    assert one(conn, ended)["batch_id"] == batch_id
    found = await bus.get_batch(DOMAIN, batch_id)
    assert found is not None
    assert {name: getattr(found, name) for name in COLUMNS} == row


async def test_the_queries_that_the_document_has_indexes_for(
    bus: CommandBus, given: Given, conn: psycopg.Connection[dict[str, Any]]
) -> None:
    """By domain, by status, the newest first; an orphaned batch is one that has not completed for long."""
    batches = [await given.batch(commands=1) for _ in range(3)]
    queries = (
        f"SELECT batch_id FROM command_bus_batch WHERE domain = '{DOMAIN}' ORDER BY created_at DESC",
        "SELECT batch_id FROM command_bus_batch WHERE status = 'PENDING' ORDER BY created_at DESC LIMIT 100 OFFSET 0",
        "SELECT batch_id FROM command_bus_batch WHERE completed_at IS NULL AND created_at < NOW() + interval '1 hour'"
        " ORDER BY created_at DESC",
    )
    for query in queries:
        assert [row["batch_id"] for row in conn.execute(query.encode())] == batches[::-1]
    statuses = "SELECT status, count(*) AS n FROM command_bus_batch GROUP BY status"
    assert conn.execute(statuses.encode()).fetchall() == [{"status": "PENDING", "n": 3}]
    joined = (
        "SELECT b.batch_id, count(*) AS n FROM command_bus_batch b"
        " JOIN command_bus_command c ON c.batch_id = b.batch_id GROUP BY b.batch_id"
    )
    assert {row["batch_id"]: row["n"] for row in conn.execute(joined.encode())} == dict.fromkeys(batches, 1)


async def test_the_names_can_be_qualified_and_a_pruned_batch_is_not_shown(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await given.batch(commands=1)
    query = "SELECT count(*) FROM busload.command_bus_batch WHERE batch_id = %s"
    assert database.value(query, batch_id) == 1
    database.rows("UPDATE busload.batch SET pruned_at = now() WHERE batch_id = %s", batch_id)
    assert database.value(query, batch_id) == 0


def test_commands_of_a_batch_are_found_without_reading_all_commands(dsn: str, given: Given) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("SET enable_seqscan = off")
        query = "EXPLAIN SELECT count(*) FROM busload.command_bus_command WHERE batch_id = '{}'"
        plan = "\n".join(line for (line,) in conn.execute(query.format(UUID(int=1)).encode()))
        assert "load_of_batch" in plan and "Seq Scan on command" not in plan, plan

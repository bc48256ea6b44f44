"""A batch and its commands come into being together, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import BatchCommand, CommandBus, DuplicateCommandError, InvalidCommandError
from busload.errors import InvalidOperationError
from tests.given import DOMAIN, Database, Given, counts

pytestmark = pytest.mark.usefixtures("invariants")


async def test_a_batch_and_all_its_commands_exist_after_one_call(bus: CommandBus, given: Given) -> None:
    """More commands than two loads hold."""
    batch_id = await given.batch(commands=2500, name="payroll", custom_data={"month": "2026-11", "sites": [1, None]})

    batch = await given.batch_now(batch_id)
    assert isinstance(batch_id, UUID)
    assert (batch.batch_id, batch.domain, batch.name) == (batch_id, DOMAIN, "payroll")
    assert batch.custom_data == {"month": "2026-11", "sites": [1, None]}
    assert batch.status == "PENDING"
    assert counts(batch) == (2500, 0, 0, 0, 0)
    assert (batch.started_at, batch.completed_at) == (None, None)
    assert abs(datetime.now(UTC) - batch.created_at) < timedelta(minutes=1)
    commands = await bus.list_batch_commands(DOMAIN, batch_id, limit=3000)
    assert [command.data["n"] for command in commands] == list(range(2500))
    assert {command.status for command in commands} == {"PENDING"}
    assert {(command.domain, command.batch_id) for command in commands} == {(DOMAIN, batch_id)}


async def test_every_command_of_a_batch_is_sent_with_its_batch_id(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=3)

    for command in await bus.list_batch_commands(DOMAIN, batch_id):
        [sent] = await bus.get_audit_trail(DOMAIN, command.command_id)
        assert (sent.type, sent.batch_id) == ("SENT", batch_id)
    alone = await given.command_now(await given.sent())
    assert alone.batch_id is None


async def test_every_option_of_a_command_is_kept(bus: CommandBus, given: Given) -> None:
    """Reply_to and correlation_id by keyword, the first three by position."""
    command_id, correlation_id = uuid4(), uuid4()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    batch_id = await bus.create_batch(
        DOMAIN,
        [
            BatchCommand(
                "Debit",
                command_id,
                {"cents": 1},
                reply_to="ledger",
                correlation_id=correlation_id,
                task_key="invoice:7",
                priority=-3,
                run_at=tomorrow,
                max_attempts=9,
            )
        ],
    )

    [found] = await bus.list_batch_commands(DOMAIN, batch_id)
    assert (found.command_type, found.command_id, found.data) == ("Debit", command_id, {"cents": 1})
    assert (found.reply_to, found.correlation_id, found.task_key) == ("ledger", correlation_id, "invoice:7")
    assert (found.priority, found.run_at, found.max_attempts) == (-3, tomorrow, 9)
    assert found.status == "SCHEDULED"


async def test_a_batch_may_bring_its_own_id_once(bus: CommandBus, given: Given) -> None:
    """A second batch of that id is refused in every domain, so an id means one batch."""
    batch_id = uuid4()
    assert await given.batch(commands=2, batch_id=batch_id) == batch_id

    before = given.database.everything()
    for domain in (DOMAIN, "crm"):
        with pytest.raises(InvalidOperationError, match=str(batch_id)):
            await bus.create_batch(domain, [BatchCommand("Debit")], batch_id=batch_id)
    assert given.database.everything() == before


async def test_an_empty_batch_is_a_value_error(bus: CommandBus, database: Database) -> None:
    with pytest.raises(ValueError) as refused:
        await bus.create_batch(DOMAIN, [])
    assert isinstance(refused.value, InvalidCommandError)
    assert (refused.value.code, refused.value.problems[0].path) == ("EMPTY_BATCH", "/commands")
    assert (database.count("batch"), database.count("event")) == (0, 0)


async def test_an_id_twice_in_the_list_writes_nothing(bus: CommandBus, database: Database) -> None:
    twice = uuid4()
    commands = [BatchCommand("Debit", id) for id in (uuid4(), twice, uuid4(), twice)]

    with pytest.raises(DuplicateCommandError, match=str(twice)) as refused:
        await bus.create_batch(DOMAIN, commands)

    assert (refused.value.domain, refused.value.command_ids) == (DOMAIN, (twice,))
    assert (database.count("batch"), database.count("command"), database.count("queue")) == (0, 0, 0)


async def test_an_id_that_the_table_has_writes_nothing(bus: CommandBus, given: Given) -> None:
    """Though it is the last of 1,500 commands, after a whole load was written"""
    taken = await given.sent()
    before = given.database.everything()

    with pytest.raises(DuplicateCommandError, match=str(taken)) as refused:
        await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(1500)] + [BatchCommand("Debit", taken)])

    assert refused.value.command_ids == (taken,)
    assert given.database.everything() == before
    assert await bus.create_batch("crm", [BatchCommand("Debit", taken)])  # another domain, another command


async def test_nobody_sees_half_a_batch(bus: CommandBus, given: Given, dsn: str) -> None:
    """Batch, commands, places and audit appear together, with the commit"""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(1001)], conn=conn)
        assert await bus.get_batch(DOMAIN, batch_id) is None
        assert given.claimed(10) == []
        await conn.commit()

    assert counts(await given.batch_now(batch_id)) == (1001, 0, 0, 0, 0)
    assert len(given.claimed(2000)) == 1001


async def test_a_generator_is_taken_as_it_comes(bus: CommandBus, given: Given) -> None:
    batch_id = await bus.create_batch(DOMAIN, (BatchCommand("Debit", data=n) for n in range(5)))
    assert [c.data for c in await bus.list_batch_commands(DOMAIN, batch_id)] == [0, 1, 2, 3, 4]


async def test_a_generator_that_raises_halfway_writes_nothing(bus: CommandBus, database: Database) -> None:
    def rows() -> Iterator[BatchCommand]:
        yield BatchCommand("Debit")
        raise OSError("the file ends here")

    before = database.everything()
    with pytest.raises(OSError, match="the file ends here"):
        await bus.create_batch(DOMAIN, rows())
    assert database.everything() == before


async def test_a_batch_of_a_million_would_be_a_thousand_waiting_rows(given: Given) -> None:
    """3,500 commands travel as four loads"""
    await given.batch(commands=3500)
    assert given.database.rows("SELECT hi - lo + 1 FROM busload.queue ORDER BY hi") == [
        (1000,),
        (1000,),
        (1000,),
        (500,),
    ]


def test_the_batch_table_has_the_columns_that_were_promised(database: Database) -> None:
    found = database.rows(
        """SELECT column_name, data_type, character_maximum_length, is_nullable, column_default
             FROM information_schema.columns WHERE table_schema = 'busload' AND table_name = 'batch'"""
    )
    columns = {name: (kind, length, nullable, default) for name, kind, length, nullable, default in found}
    assert columns["batch_id"] == ("uuid", None, "NO", None)
    assert columns["domain"] == ("text", None, "NO", None)
    assert columns["name"] == ("text", None, "YES", None)
    assert columns["custom_data"] == ("jsonb", None, "YES", None)
    assert columns["status"] == ("text", None, "NO", "'PENDING'::text")
    for counter in ("total", "completed", "failed", "canceled", "in_troubleshooting"):
        assert columns[f"{counter}_count"] == ("integer", None, "NO", "0")
    assert columns["created_at"] == ("timestamp with time zone", None, "NO", "now()")
    for moment in ("started_at", "completed_at"):
        assert columns[moment] == ("timestamp with time zone", None, "YES", None)


@pytest.mark.parametrize("column", ["domain", "name"])
async def test_a_batch_has_a_domain_and_a_name_of_at_most_255_characters(given: Given, column: str) -> None:
    """Also for those who write past the bus."""
    await given.batch()
    given.database.rows(f"UPDATE busload.batch SET {column} = repeat('x', 255)")
    with pytest.raises(psycopg.errors.CheckViolation):
        given.database.rows(f"UPDATE busload.batch SET {column} = repeat('x', 256)")


async def test_a_batch_has_one_of_four_statuses(given: Given) -> None:
    await given.batch()
    with pytest.raises(psycopg.errors.CheckViolation):
        given.database.rows("UPDATE busload.batch SET status = 'DONE'")


def test_batches_are_found_by_domain_status_and_age_and_commands_by_batch(database: Database) -> None:
    indexes = [row[0] for row in database.rows("SELECT indexdef FROM pg_indexes WHERE schemaname = 'busload'")]
    for wanted in ("batch USING btree (domain, created_at DESC", "batch USING btree (domain, status, created_at DESC"):
        assert any(wanted in index for index in indexes)
    assert any("command USING btree (batch_id" in index for index in indexes)

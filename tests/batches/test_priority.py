"""A batch has a priority for its commands, and another one later for those that still wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from busload import BatchCommand, BatchNotFoundError, CommandBus, InvalidCommandError, SyncCommandBus
from busload.commands.execution import FAILED_ATTEMPT
from busload.errors import InvalidOperationError
from tests.given import DOMAIN, Database, Given

pytestmark = pytest.mark.usefixtures("invariants")

SOON = datetime.now(UTC) + timedelta(hours=1)


def of_batch(given: Given, limit: int = 9) -> list[object]:
    """Claim, and say of which batches."""
    return [one.lease.batch_id for one in given.claimed(limit)]


async def test_the_priority_of_a_batch_is_that_of_commands_that_have_none(bus: CommandBus, given: Given) -> None:
    ordinary = await given.batch(2)
    urgent = await bus.create_batch(DOMAIN, [BatchCommand("Debit"), BatchCommand("Debit", priority=3)], priority=7)
    async with bus.open_batch(DOMAIN, priority=5) as open_batch:
        await open_batch.add("Debit")
        await open_batch.add("Debit", priority=9)
    found = [(command.priority) for command in await bus.list_batch_commands(DOMAIN, urgent)]
    assert found == [7, 3]
    claimed = [(one.lease.batch_id, one.lease.priority) for one in given.claimed(9)]
    opened = open_batch.batch_id
    assert claimed == [(opened, 9), (urgent, 7), (opened, 5), (urgent, 3), (ordinary, 0), (ordinary, 0)]


async def test_everything_that_waits_gets_another_priority_and_what_runs_keeps_its_own(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Loads change, not commands: in the queue, scheduled, held and in the outbox"""
    commands = [BatchCommand("Debit")] * 1500 + [BatchCommand("Debit", run_at=SOON)] * 2
    batch_id = await bus.create_batch(DOMAIN, commands)
    failing, _running = given.claimed(2)
    given.settled([failing], FAILED_ATTEMPT, delay=3600.0)

    assert await bus.reprioritize_batch(DOMAIN, batch_id, 7, operator="ada") == 1501

    places = "SELECT priority, sum(hi - lo + 1)::integer FROM busload.{} GROUP BY priority"
    assert database.rows(places.format("queue")) == [(7, 1498)]
    assert database.rows(places.format("scheduled")) == [(7, 3)]
    assert {one.lease.priority for one in given.claimed(5)} == {7}
    found = {command.priority for command in await bus.list_batch_commands(DOMAIN, batch_id, limit=2000)}
    assert found == {7, 0}
    [event] = [e for e in await bus.get_batch_audit_trail(DOMAIN, batch_id) if e.type == "BATCH_REPRIORITIZED"]
    assert (event.operator, event.details) == ("ada", {"priority": 7, "commands": 1501})
    assert await bus.reprioritize_batch(DOMAIN, batch_id, 7) == 0


async def test_a_batch_overtakes_another_one(bus: CommandBus, given: Given) -> None:
    first, second, held = await given.batch(3), await given.batch(2), await given.batch(1)
    await bus.hold_batch(DOMAIN, held, reason="the bank complains")
    assert await bus.reprioritize_batch(DOMAIN, second, 5) == 2
    assert await bus.reprioritize_batch(DOMAIN, held, 9) == 1
    assert of_batch(given, 3) == [second, second, first]
    await bus.resume_batch(DOMAIN, held)
    assert of_batch(given) == [held, first, first]


async def test_what_waits_to_be_published_gets_another_priority(dsn: str, given: Given, database: Database) -> None:
    async with CommandBus(dsn, transport=dsn, dispatch="relay", settings=given.bus.settings) as bus:
        batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3)
        assert await bus.reprioritize_batch(DOMAIN, batch_id, -4) == 3
    assert database.rows("SELECT priority FROM busload.outbox") == [(-4,)]


async def test_a_priority_that_makes_no_sense_and_a_batch_that_has_ended_are_refused(
    bus: CommandBus, given: Given, sync_bus: SyncCommandBus
) -> None:
    batch_id = await given.batch()
    for priority in (40_000, 1.5, None, True):
        with pytest.raises(InvalidCommandError, match="/priority"):
            await bus.reprioritize_batch(DOMAIN, batch_id, priority)  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError, match="/priority"):
        await given.batch(priority=40_000)
    with pytest.raises(BatchNotFoundError):
        await bus.reprioritize_batch(DOMAIN, uuid4(), 1)
    await bus.cancel_batch(DOMAIN, batch_id, reason="no")
    with pytest.raises(InvalidOperationError, match="has ended"):
        sync_bus.reprioritize_batch(DOMAIN, batch_id, 1)

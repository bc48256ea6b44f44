"""`bus.overview()`: the whole bus at one moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from busload import BatchCommand, CommandBus, SyncCommandBus
from tests.given import DOMAIN, Database, Given, eventually


async def test_the_overview_counts_what_is_in_each_place_of_each_domain(
    bus: CommandBus, given: Given, sync_bus: SyncCommandBus, database: Database
) -> None:
    await given.in_troubleshooting(2)
    later = datetime.now(UTC) + timedelta(hours=1)
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", run_at=later if n else None) for n in range(5)])
    await bus.send("crm", "Push")
    database.rows("UPDATE busload.command SET created_at = now() - interval '1 hour' WHERE domain = 'crm'")
    given.claimed(1)
    for found in (await bus.overview(), sync_bus.overview()):
        assert (found.ready, found.running, found.scheduled, found.in_troubleshooting) == (1, 1, 4, 2)
        assert (found.unpublished, found.oldest_unpublished) == (0, None)
        assert {domain.domain: domain.ready for domain in found.domains} == {"crm": 1, DOMAIN: 0}
        assert found.oldest_ready is not None
        assert timedelta(minutes=59) < found.at - found.oldest_ready < timedelta(minutes=61)
        assert found.oldest_in_troubleshooting is not None
        assert (found.workers, found.silent_workers, found.slots) == (1, 0, 10)


async def test_an_idle_bus_has_nothing_to_tell(bus: CommandBus) -> None:
    found = await bus.overview()
    assert (found.ready, found.running, found.oldest_ready, found.oldest_in_troubleshooting) == (0, 0, None, None)
    assert (found.workers, found.domains) == (0, ())


async def test_a_silent_worker_is_told(bus: CommandBus, given: Given) -> None:
    given.died(given.registered_worker())
    found = await bus.overview()
    assert (found.workers, found.silent_workers, found.slots) == (0, 1, 0)


async def test_what_a_held_batch_has_in_the_queue_is_not_the_oldest(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch()
    await bus.hold_batch(DOMAIN, batch_id, reason="test")
    assert (await bus.overview()).oldest_ready is None


async def test_rows_that_were_ever_written_are_counted(bus: CommandBus, given: Given, database: Database) -> None:
    """The server's own counts come a moment late."""
    given.handler()
    await given.batch(7)
    await given.drained()
    await eventually(
        lambda: database.rows(
            "SELECT 1 FROM pg_stat_get_tuples_inserted('busload.command'::regclass) AS sent,"
            " pg_stat_get_tuples_inserted('busload.execution'::regclass) AS ended WHERE sent >= 7 AND ended >= 7"
        )
    )
    found = await bus.overview()
    assert found.sent >= 7
    assert found.attempts >= 7

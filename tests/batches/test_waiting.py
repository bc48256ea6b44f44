"""Who waits for a batch hears of it by notification; polling is the floor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from uuid import uuid4

import pytest

from busload import BatchCommand, BatchMetadata, BatchNotFoundError, CommandBus, Settings, SyncCommandBus
from busload.errors import InvalidOperationError
from tests.given import DOMAIN, Database, Given, eventually

pytestmark = pytest.mark.usefixtures("invariants")

NEVER = Settings(poll_every=timedelta(hours=1))
"""Only a notification can explain that somebody noticed."""
OFTEN = Settings(poll_every=timedelta(milliseconds=20))

LISTENING = "application_name = 'busload' AND query LIKE 'LISTEN%%' AND datname = current_database()"


@pytest.fixture
async def patient(dsn: str) -> AsyncIterator[CommandBus]:
    async with CommandBus(dsn, settings=NEVER) as bus:
        yield bus


@pytest.fixture
def patient_sync(dsn: str) -> Iterator[SyncCommandBus]:
    with SyncCommandBus(dsn, settings=NEVER) as bus:
        yield bus


async def is_listened(given: Given) -> None:
    await eventually(lambda: given.database.value(f"SELECT count(*) FROM pg_stat_activity WHERE {LISTENING}"))


def deafen(database: Database) -> int:
    """Cut the connections that listen; returns how many there were."""
    return len(database.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {LISTENING}"))


async def test_wait_batch_is_woken_by_a_notification(patient: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=2)
    waiting = asyncio.create_task(patient.wait_batch(DOMAIN, batch_id, timeout=20))
    await is_listened(given)
    given.settled(given.claimed(2))
    batch = await waiting
    assert batch == await given.batch_now(batch_id)
    assert batch.status == "COMPLETED"


async def test_a_batch_that_completes_before_anybody_listens_is_noticed(patient: CommandBus, given: Given) -> None:
    """Between the first look and the first notification"""
    for _ in range(5):
        batch_id = await given.batch()
        leased = given.claimed()
        waiting = asyncio.create_task(patient.wait_batch(DOMAIN, batch_id, timeout=timedelta(seconds=20)))
        await asyncio.sleep(0)
        given.settled(leased)
        assert (await waiting).status == "COMPLETED"


async def test_wait_batch_returns_at_once_what_is_complete_already(patient: CommandBus, given: Given) -> None:
    batch_id = await given.batch()
    given.settled(given.claimed())
    assert (await patient.wait_batch(DOMAIN, batch_id, timeout=25)).status == "COMPLETED"


async def test_watch_batch_yields_every_new_state_and_ends_with_the_last(patient: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=3)
    leased = given.claimed(3)
    seen: list[BatchMetadata] = []
    async with asyncio.timeout(20):
        async for batch in patient.watch_batch(DOMAIN, batch_id):
            seen.append(batch)
            await is_listened(given)
            if leased:
                # Progress is notified at most ten times a second; move that moment instead of waiting for it.
                given.database.rows("UPDATE busload.batch SET notified_at = '-infinity'")
                given.settled([leased.pop(0)])
    assert [batch.completed_count for batch in seen] == [0, 1, 2, 3]
    assert [batch.status.final for batch in seen] == [False, False, False, True]


async def test_without_notifications_polling_finds_out(given: Given, dsn: str) -> None:
    """The connection that listens is cut"""
    async with CommandBus(dsn, settings=OFTEN) as bus:
        batch_id = await given.batch()
        leased = given.claimed()
        waiting = asyncio.create_task(bus.wait_batch(DOMAIN, batch_id, timeout=20))
        called: list[BatchMetadata] = []

        async def note(batch: BatchMetadata) -> None:
            called.append(batch)

        await is_listened(given)
        assert deafen(given.database) == 1
        given.settled(leased)
        assert (await waiting).status == "COMPLETED"
        another = await bus.create_batch(DOMAIN, [BatchCommand("Debit")], on_complete=note)
        given.settled(given.claimed())
        await eventually(lambda: called)
        assert called[0].batch_id == another


async def test_a_listener_that_was_cut_listens_again(patient: CommandBus, given: Given) -> None:
    batch_id = await given.batch()
    leased = given.claimed()
    waiting = asyncio.create_task(patient.wait_batch(DOMAIN, batch_id, timeout=20))
    await is_listened(given)
    assert deafen(given.database) == 1
    given.settled(leased)
    assert (await waiting).status == "COMPLETED"


async def test_waiting_too_long_says_how_far_it_came(bus: CommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=3)
    given.settled(given.claimed(1))
    with pytest.raises(TimeoutError, match=r"1 of 3 commands have ended"):
        await bus.wait_batch(DOMAIN, batch_id, timeout=0.2)


async def test_waiting_for_an_unknown_batch_is_an_error(bus: CommandBus, sync_bus: SyncCommandBus, dsn: str) -> None:
    """An unknown batch, or a bus that is not open"""
    unknown = uuid4()
    with pytest.raises(BatchNotFoundError, match=str(unknown)):
        await bus.wait_batch(DOMAIN, unknown)
    with pytest.raises(BatchNotFoundError, match=str(unknown)):
        sync_bus.wait_batch(DOMAIN, unknown)
    with pytest.raises(InvalidOperationError, match="not open"):
        await CommandBus(dsn).wait_batch(DOMAIN, unknown)
    with pytest.raises(InvalidOperationError, match="not open"):
        SyncCommandBus(dsn).wait_batch(DOMAIN, unknown)


async def test_many_wait_for_one_batch(patient: CommandBus, given: Given) -> None:
    """One of them giving up disturbs nobody"""
    given.handler()
    batch_id = await given.batch(commands=5)
    waiting = [asyncio.create_task(patient.wait_batch(DOMAIN, batch_id, timeout=20)) for _ in range(5)]
    await is_listened(given)
    waiting.pop().cancel()
    await given.drained()
    assert {batch.status for batch in await asyncio.gather(*waiting)} == {"COMPLETED"}


async def test_the_sync_bus_is_woken_by_a_notification(patient_sync: SyncCommandBus, given: Given) -> None:
    batch_id = await given.batch(commands=2)
    leased = given.claimed(2)
    waiting = asyncio.create_task(asyncio.to_thread(patient_sync.wait_batch, DOMAIN, batch_id, 20))
    await is_listened(given)
    given.settled(leased)
    assert (await waiting).completed_count == 2


async def test_the_sync_bus_polls_when_its_listener_is_cut(given: Given, dsn: str) -> None:
    with SyncCommandBus(dsn, settings=OFTEN) as bus:
        batch_id = await given.batch()
        leased = given.claimed()
        waiting = asyncio.create_task(asyncio.to_thread(bus.wait_batch, DOMAIN, batch_id, 20))
        await is_listened(given)
        assert deafen(given.database) == 1
        given.settled(leased)
        assert (await waiting).status == "COMPLETED"


def test_the_sync_bus_says_how_far_it_came(sync_bus: SyncCommandBus) -> None:
    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit")])
    with pytest.raises(TimeoutError, match="0 of 1 command has ended"):
        sync_bus.wait_batch(DOMAIN, batch_id, timeout=timedelta(milliseconds=50))
    with pytest.raises(TimeoutError, match="not complete after 0 s: 0 of 1 command has ended"):
        list(sync_bus.watch_batch(DOMAIN, batch_id, timeout=0))


async def test_watching_too_long_says_how_far_it_came(bus: CommandBus, given: Given) -> None:
    states = aiter(bus.watch_batch(DOMAIN, await given.batch(), timeout=0))
    assert (await anext(states)).finished_count == 0
    with pytest.raises(TimeoutError, match="not complete after 0 s: 0 of 1 command has ended"):
        await anext(states)


async def test_a_notification_sent_by_anybody_is_not_believed(patient: CommandBus, given: Given) -> None:
    """A notification is a hint that anybody could have sent"""
    batch_id = await given.batch()
    waiting = asyncio.create_task(patient.wait_batch(DOMAIN, batch_id, timeout=20))
    await is_listened(given)
    for payload in (str(batch_id), "", "nonsense", str(uuid4())):
        given.database.rows("SELECT pg_notify('busload_batch', %s)", payload)
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    given.settled(given.claimed())
    assert (await waiting).status == "COMPLETED"

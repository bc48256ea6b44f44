"""The cancel of a large batch: many short transactions, and nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, CommandBus, Settings, SyncCommandBus
from busload.batches import cancel
from busload.commands import claim
from busload.commands.execution import FAILED_ATTEMPT
from busload.errors import DatabaseUnavailableError, PartlyDoneError
from busload.postgres.write import Write
from busload.sync.plan import perform
from tests.given import DOMAIN, LOCKED_OUT, Database, Given, counts, eventually

pytestmark = pytest.mark.usefixtures("invariants")

PAGES = """SELECT xmin, sum(hi - lo + 1) FROM busload.event WHERE type = 'CANCELED' GROUP BY xmin"""
COMPLETIONS = "SELECT count(*) FROM busload.event WHERE type = 'BATCH_COMPLETED'"


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page holds up to a load more than this."""
    monkeypatch.setattr(cancel, "PAGE", 100)


async def large(bus: CommandBus, **options: object) -> UUID:
    """A batch of loads of one command, and of larger ones."""
    single = [BatchCommand("Debit", data=n, priority=n % 300, **options) for n in range(600)]  # type: ignore[arg-type]
    return await bus.create_batch(DOMAIN, single)


async def test_a_large_batch_is_canceled_by_many_small_transactions(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await large(bus, reply_to="answers")
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="no") == 600
    pages = database.rows(PAGES)
    assert len(pages) >= 6 and max(commands for _, commands in pages) <= 110
    assert counts(await given.batch_now(batch_id)) == (600, 0, 0, 600, 0)
    assert database.value("SELECT count(*) FROM busload.queue WHERE domain = 'answers'") == 600
    assert database.value(COMPLETIONS) == 1
    database.check_invariants()


def test_a_large_batch_is_canceled_by_many_small_transactions_without_await(
    sync_bus: SyncCommandBus, database: Database
) -> None:
    commands = [BatchCommand("Debit", data=n, priority=n % 300) for n in range(600)]
    batch_id = sync_bus.create_batch(DOMAIN, commands)
    assert sync_bus.cancel_batch(DOMAIN, batch_id, reason="no") == 600
    assert len(database.rows(PAGES)) >= 6
    database.check_invariants()


async def test_a_cancel_that_joins_a_transaction_is_part_of_it(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    batch_id = await large(bus)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        assert await bus.cancel_batch(DOMAIN, batch_id, reason="no", conn=conn) == 600
        await conn.rollback()
        assert counts(await given.batch_now(batch_id)) == (600, 0, 0, 0, 0)
        assert await bus.cancel_batch(DOMAIN, batch_id, reason="no", conn=conn) == 600
        await conn.commit()
    assert len(database.rows(PAGES)) == 1
    assert counts(await given.batch_now(batch_id)) == (600, 0, 0, 600, 0)
    database.check_invariants()


def in_pages(database: Database, batch_id: UUID) -> Iterator[int]:
    """Cancel a batch in one transaction after the other; yields after each how many commands are canceled."""
    about = {"reason": "Wrong list.", "operator": "rosa"}
    canceled, of = database.perform(cancel.begin_to_cancel(DOMAIN, batch_id, **about, in_pages=True))
    after: int | None = cancel.BEGINNING
    while of is not None and after is not None:
        yield canceled
        more, after = database.perform(cancel.page(of, after, **about, hold=cancel.HOLD))
        canceled += more
    yield canceled


async def test_between_pages_others_claim_and_nothing_of_the_batch_starts(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Also while what is canceled stands before all else in the queue; and counters are exact after each page."""
    batch_id = await large(bus)
    other = await given.sent()
    worker = given.registered_worker()
    for n, canceled in enumerate(in_pages(database, batch_id)):
        database.check_invariants()
        leased = given.claimed(1000, by=worker)
        assert [one.command_id for one in leased] == ([other] if n == 0 else [])
        assert (await given.batch_now(batch_id)).canceled_count == canceled
    assert canceled == 600 and n >= 6
    assert database.value(COMPLETIONS) == 1


async def test_a_cancel_whose_process_died_between_pages_is_finished_by_a_worker(
    bus: CommandBus, given: Given, database: Database
) -> None:
    seen = given.handler()
    batch_id = await large(bus, reply_to="answers")
    pages = in_pages(database, batch_id)
    for _ in range(3):
        next(pages)
    assert (await given.batch_now(batch_id)).canceled_count < 600
    await given.drained()
    assert seen == []  # somebody is at it
    database.rows("UPDATE busload.batch SET canceling_until = now() - interval '1 s'")
    await given.drained()
    assert seen == []
    assert counts(await given.batch_now(batch_id)) == (600, 0, 0, 600, 0)
    assert max(commands for _, commands in database.rows(PAGES)) <= 110
    said = "SELECT DISTINCT details ->> 'reason' FROM busload.event WHERE type = 'CANCELED'"
    assert database.rows(said) == [("Wrong list.",)]
    assert database.value("SELECT canceling_until FROM busload.batch") is None
    assert database.value(COMPLETIONS) == 1
    database.check_invariants()


async def test_a_page_that_ends_within_a_load_leaves_nothing_of_it_out(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Commands of a load that wait for a retry stand alone, one right behind the other; the last is a page of one."""
    batch_id = await given.batch(201)
    assert len(given.settled(given.claimed(201), FAILED_ATTEMPT, delay=3600.0)) == 201
    singles = "SELECT count(*), count(DISTINCT hi >> 10), max(hi) - min(hi) FROM busload.scheduled WHERE lo = hi"
    assert database.rows(singles) == [(201, 1, 200)]
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="no") == 201
    assert [commands for _, commands in sorted(database.rows(PAGES), key=lambda page: int(page[0]))] == [100, 100, 1]
    assert counts(await given.batch_now(batch_id)) == (201, 0, 0, 201, 0)
    database.check_invariants()


async def test_pages_without_anything_to_cancel_leave_out_nothing_of_the_next(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """Also not the first command of the first load behind them, and where nothing is left of a whole page."""
    commands = [BatchCommand("Debit", data=n, priority=250 - n) for n in range(250)]
    batch_id = await bus.create_batch(DOMAIN, commands)
    assert database.value("SELECT count(*) FROM busload.queue WHERE lo = hi AND lo & 1023 = 0") == 250
    for page in (100, 100):
        running = given.claimed(page)
        assert len(running) == page
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="no") == 50
    assert counts(await given.batch_now(batch_id)) == (250, 0, 0, 50, 0)
    database.check_invariants()


async def test_whoever_finishes_a_cancel_leaves_nothing_out_either(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await given.batch(250)
    given.settled(given.claimed(250), FAILED_ATTEMPT, delay=3600.0)
    next(in_pages(database, batch_id))
    database.rows("UPDATE busload.batch SET canceling_until = now() - interval '1 s'")
    swept = 0
    while found := database.perform(cancel.cancel_stragglers()):
        swept += found
    assert swept == 250
    assert counts(await given.batch_now(batch_id)) == (250, 0, 0, 250, 0)
    database.check_invariants()


async def test_a_cancel_that_breaks_between_pages_does_not_say_that_nothing_was_written(
    bus: CommandBus, dsn: str, database: Database
) -> None:
    batch_id = await large(bus)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT FROM busload.queue FOR UPDATE")
        canceling = asyncio.create_task(bus.cancel_batch(DOMAIN, batch_id, reason="Wrong list."))
        await eventually(lambda: database.rows(f"SELECT pg_terminate_backend(pid) FROM ({LOCKED_OUT}) AS ours"))
        with pytest.raises(PartlyDoneError, match=r"0 commands are canceled so far.*Repeat the call") as told:
            await canceling
    assert "othing was written" not in str(told.value) and "nobody can say" not in str(told.value)
    assert database.value("SELECT canceled_at FROM busload.batch") is not None
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="Wrong list.") == 600


async def test_a_cancel_whose_later_page_gets_no_connection_says_what_was_done(
    bus: CommandBus, dsn: str, database: Database
) -> None:
    batch_id = await large(bus)
    settings = Settings(pool_size=1, pool_timeout=timedelta(seconds=0.2))
    async with CommandBus(dsn, settings=settings) as narrow:
        with psycopg.connect(dsn) as conn:
            conn.execute("SELECT FROM busload.queue FOR UPDATE")
            canceling = asyncio.create_task(narrow.cancel_batch(DOMAIN, batch_id, reason="Wrong list."))
            await eventually(lambda: database.rows(LOCKED_OUT))
            next_in_line = asyncio.create_task(narrow.pool.getconn(timeout=60))
            await asyncio.sleep(0)
        taken = await next_in_line  # right after the first page
        with pytest.raises(
            PartlyDoneError, match=rf"batch {batch_id} has begun, and \d+ commands are canceled so far"
        ) as told:
            await canceling
        with pytest.raises(DatabaseUnavailableError, match=r"The only connection was in use.*Nothing was written"):
            await narrow.cancel_batch(DOMAIN, batch_id, reason="Wrong list.")
        await narrow.pool.putconn(taken)
        assert "othing was written" not in str(told.value)
        assert isinstance(told.value.__cause__, DatabaseUnavailableError)
        canceled = told.value.commands
        assert 0 < canceled < 600 and canceled == (await bus.get_batch(DOMAIN, batch_id)).canceled_count  # type: ignore[union-attr]
        assert await narrow.cancel_batch(DOMAIN, batch_id, reason="Wrong list.") == 600 - canceled


def test_a_cancel_without_await_whose_later_page_gets_no_connection_says_what_was_done(
    sync_bus: SyncCommandBus, dsn: str, database: Database
) -> None:
    batch_id = sync_bus.create_batch(DOMAIN, [BatchCommand("Debit", data=n, priority=n % 300) for n in range(600)])
    settings = Settings(pool_size=1, pool_timeout=timedelta(seconds=0.2))
    with SyncCommandBus(dsn, settings=settings) as narrow:
        performed = 0
        write = narrow.database.write

        def take_the_connection_after_three(what: Write[Any], conn: Any = None) -> Any:
            nonlocal performed
            if performed == 3:  # which kind of batch it is, the mark, and the first page
                narrow.pool.getconn()
            performed += 1
            return write(what, conn)

        narrow.database.write = take_the_connection_after_three  # type: ignore[method-assign, assignment]
        with pytest.raises(PartlyDoneError, match=r"1\d\d commands are canceled so far") as told:
            narrow.cancel_batch(DOMAIN, batch_id, reason="no")
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.event WHERE type = 'CANCELED'") == told.value.commands


async def test_what_runs_goes_on_and_other_batches_are_claimed_after_a_cancel(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    batch_id = await given.batch(5)
    later = await given.batch(5)
    leased = given.claimed(2)
    assert await bus.cancel_batch(DOMAIN, batch_id, reason="no") == 3
    assert len(given.settled(leased)) == 2
    assert counts(await given.batch_now(batch_id)) == (5, 2, 0, 3, 0)
    with psycopg.connect(dsn) as conn:
        taken = perform(conn, claim.claim(worker=given.registered_worker(), domains=[DOMAIN], limit=10))
    assert {one.lease.batch_id for one in taken.leased} == {later}
    database.check_invariants()

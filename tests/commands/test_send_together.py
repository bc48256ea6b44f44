"""Sends that are under way at once leave together, and each ends as if it had been alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BatchNotFoundError,
    Command,
    CommandBus,
    DuplicateCommandError,
    HandlerContext,
    InvalidCommandError,
    SendResult,
    Settings,
)
from busload.commands import send_together
from busload.commands.load import LOAD_SIZE, POSITIONS
from busload.commands.send_together import _Neighbours, _Notices
from busload.errors import BatchSealedError, InvalidOperationError, OutcomeUnknownError
from tests.given import DOMAIN, WITHIN, Database, Given, eventually

BLOCKED = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture(autouse=True)
def invariants(database: Database) -> Iterator[None]:
    yield
    database.check_invariants()


@pytest.fixture
async def foreign(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A transaction of somebody else that is open."""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("SELECT 1")
        yield conn


def transactions(database: Database, command_type: str = "Debit") -> int:
    return int(
        database.value("SELECT count(DISTINCT xmin::text) FROM busload.command WHERE command_type = %s", command_type)
    )


async def test_sends_under_way_at_once_leave_together(bus: CommandBus, database: Database) -> None:
    """The first leaves at once, the other 299 in one statement, as one load with one notification"""
    async with bus.pool.connection() as conn:
        await conn.execute("LISTEN busload_ready")
        results = await asyncio.gather(*(bus.send(DOMAIN, "Debit", n) for n in range(300)))
        heard = [notification.payload async for notification in conn.notifies(timeout=WITHIN, stop_after=2)]
        await conn.execute("UNLISTEN *")
    assert heard == [DOMAIN, DOMAIN]
    assert transactions(database) == 2
    assert sorted(database.rows("SELECT hi - lo + 1 FROM busload.queue")) == [(1,), (299,)]
    stored = dict(database.rows("SELECT command_id, data::text::integer FROM busload.command"))
    assert [stored[result.command_id] for result in results] == list(range(300))


async def test_a_send_that_finds_none_under_way_is_a_transaction_of_its_own(
    bus: CommandBus, database: Database
) -> None:
    """Committed when it returns, waiting for nobody"""
    for n in range(5):
        await bus.send(DOMAIN, "Debit")
        assert database.count("command") == n + 1
    assert transactions(database) == 5


async def test_what_travels_together_arrives_where_each_belongs(bus: CommandBus, given: Given) -> None:
    """Of several domains, priorities and times, with every option"""
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    chosen, correlation = uuid4(), uuid4()
    first, plain, other, later, full = await asyncio.gather(
        bus.send(DOMAIN, "Debit", "first"),
        bus.send(DOMAIN, "Debit", "plain"),
        bus.send("crm", "Call", "other", priority=5),
        bus.send(DOMAIN, "Debit", "later", run_at=tomorrow),
        bus.send(
            DOMAIN,
            "Debit",
            "full",
            command_id=chosen,
            task_key="invoice:7",
            max_attempts=9,
            reply_to="ledger",
            correlation_id=correlation,
        ),
    )
    assert transactions(given.database) == 2
    assert full == SendResult(chosen, created=True)
    for result, domain, data, status in (
        (first, DOMAIN, "first", "PENDING"),
        (plain, DOMAIN, "plain", "PENDING"),
        (other, "crm", "other", "PENDING"),
        (later, DOMAIN, "later", "SCHEDULED"),
    ):
        found = await given.command_now(result.command_id, domain)
        assert (found.data, found.status, found.task_key, found.max_attempts) == (data, status, None, None)
    found = await given.command_now(chosen)
    assert (found.task_key, found.max_attempts, found.reply_to) == ("invoice:7", 9, "ledger")
    assert (found.correlation_id, found.priority) == (correlation, 0)
    assert given.database.rows("SELECT priority, replies FROM busload.queue WHERE domain = 'crm'") == [(5, False)]
    assert given.database.value("SELECT count(*) FROM busload.queue WHERE replies") == 1


async def test_a_duplicate_fails_alone(bus: CommandBus, given: Given) -> None:
    """Against the table and among themselves; a bad one never leaves"""
    taken, twice = await given.sent(), uuid4()
    outcomes = await asyncio.gather(
        *(bus.send(DOMAIN, "Debit") for _ in range(10)),
        bus.send(DOMAIN, "Debit", command_id=taken),
        bus.send(DOMAIN, "Debit", command_id=twice),
        bus.send(DOMAIN, "Debit", command_id=twice),
        bus.send(DOMAIN, "no name"),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, SendResult) for outcome in outcomes[:10])
    assert isinstance(outcomes[10], DuplicateCommandError)
    assert outcomes[10].command_ids == (taken,)
    assert sorted(type(outcome).__name__ for outcome in outcomes[11:13]) == ["DuplicateCommandError", "SendResult"]
    assert isinstance(outcomes[13], InvalidCommandError)
    assert given.database.count("command") == 12


@pytest.mark.parametrize("leads", [True, False], ids=["the first", "one of the others"])
@pytest.mark.parametrize("commits", [True, False])
async def test_who_waits_for_another_transaction_keeps_nobody_waiting(
    bus: CommandBus, database: Database, foreign: psycopg.AsyncConnection, leads: bool, commits: bool
) -> None:
    """Otherwise a transaction that sends something before its end would wait for itself, for ever"""
    contested = uuid4()
    await bus.send(DOMAIN, "Debit", command_id=contested, conn=foreign)
    ids = [contested, None, None, None] if leads else [None, None, contested, None]
    senders = [asyncio.create_task(bus.send(DOMAIN, "Credit", command_id=id)) for id in ids]
    waiting = senders.pop(ids.index(contested))

    async with asyncio.timeout(20):
        assert all(result.created for result in await asyncio.gather(*senders))
        assert (await bus.send(DOMAIN, "Credit")).created
    assert not waiting.done()

    if commits:
        await foreign.commit()
        with pytest.raises(DuplicateCommandError):
            await waiting
    else:
        await foreign.rollback()
        assert (await waiting).command_id == contested
    assert database.count("command") == 5


async def test_a_cancelled_sender_harms_no_other(
    bus: CommandBus, database: Database, foreign: psycopg.AsyncConnection
) -> None:
    """Neither while its statement runs nor while it waits for the next one, which goes without it"""
    await foreign.execute("LOCK TABLE busload.queue IN SHARE MODE")
    senders = [asyncio.create_task(bus.send(DOMAIN, "Debit", n)) for n in range(6)]
    await eventually(lambda: database.value(f"SELECT count(*) {BLOCKED}"))
    senders[0].cancel()
    senders[3].cancel()
    await eventually(lambda: senders[0].done() and senders[3].done())
    await foreign.rollback()

    outcomes = await asyncio.gather(*senders, return_exceptions=True)

    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [n in (0, 3) for n in range(6)]
    assert database.rows("SELECT data::text FROM busload.command ORDER BY 1") == [("1",), ("2",), ("4",), ("5",)]


async def test_a_lost_connection_leaves_each_sender_with_its_own_id(
    bus: CommandBus, database: Database, foreign: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was committed is not known; repeating with that id is accepted exactly once"""
    monkeypatch.setattr(send_together, "PATIENCE", 60_000)
    await foreign.execute("LOCK TABLE busload.queue IN SHARE MODE")
    ids = [uuid4() for _ in range(4)]
    senders = [asyncio.create_task(bus.send(DOMAIN, "Debit", command_id=id)) for id in ids]
    for ended in (1, 4):  # the first, then the others together
        await eventually(lambda: database.rows(f"SELECT pg_terminate_backend(pid) {BLOCKED}"))
        await eventually(lambda ended=ended: sum(sender.done() for sender in senders) == ended)  # type: ignore[misc]
    await foreign.rollback()

    for id, sender in zip(ids, senders, strict=True):
        with pytest.raises(OutcomeUnknownError) as unknown:
            await sender
        assert unknown.value.command_ids == (id,)
        assert (await bus.send(DOMAIN, "Debit", command_id=id)).created
    assert database.count("command") == 4


async def test_closing_the_bus_waits_for_what_is_under_way(
    dsn: str, settings: Settings, database: Database, foreign: psycopg.AsyncConnection
) -> None:
    bus = await CommandBus(dsn, settings=settings).open()
    await foreign.execute("LOCK TABLE busload.queue IN SHARE MODE")
    senders = [asyncio.create_task(bus.send(DOMAIN, "Debit")) for _ in range(50)]
    await eventually(lambda: database.value(f"SELECT count(*) {BLOCKED}"))
    closing = asyncio.create_task(bus.close())
    await foreign.rollback()
    await closing
    assert [sender.done() for sender in senders] == [True] * 50
    assert all(result.created for result in await asyncio.gather(*senders))
    assert database.count("command") == 50
    with pytest.raises(InvalidOperationError, match="not open"):
        await bus.send(DOMAIN, "Debit")


async def test_work_that_handlers_discover_is_inserted_in_bulk(bus: CommandBus, given: Given) -> None:
    """200 handlers that each send one are a few transactions, by the same way as any send"""

    async def discover(command: Command, ctx: HandlerContext) -> None:
        await ctx.send(DOMAIN, "Found", command.data)

    given.handler("Debit", discover)
    found = given.handler("Found")
    await given.batch(commands=200)

    await given.drained(concurrency=100)

    assert sorted(command.data["n"] for command in found) == list(range(200))
    assert transactions(given.database, "Found") <= 20


async def test_sends_one_after_the_other_get_neighbouring_ids(
    bus: CommandBus, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a worker can take them as one load; each domain and priority by itself; a refused one is a gap"""
    monkeypatch.setattr(send_together, "NEIGHBOURS_FOR", 60)
    taken = await given.sent()
    for domain in ("crm", DOMAIN, "crm"):
        await bus.send(domain, "Debit")
    with pytest.raises(DuplicateCommandError):
        await bus.send(DOMAIN, "Debit", command_id=taken)
    await bus.send(DOMAIN, "Debit")
    await bus.send(DOMAIN, "Debit", priority=1)
    await bus.send(DOMAIN, "Debit", priority=1)
    await asyncio.gather(bus.send(DOMAIN, "Debit"), bus.send(DOMAIN, "Debit"), bus.send(DOMAIN, "Debit"))

    found = given.database.rows("SELECT domain, priority, id / 1024, id % 1024 FROM busload.command ORDER BY id")
    blocks: dict[int, list[int]] = {}
    for _, _, block, position in found:
        blocks.setdefault(block, []).append(position)
    assert list(blocks.values()) == [[0, 1, 3, 4], [0, 1], [0, 1], [0, 1]]
    assert len({(domain, priority, block) for domain, priority, block, _ in found}) == 4
    assert given.database.value("SELECT count(*) FROM busload.queue WHERE lo = hi") == 8


def test_a_position_is_given_out_once_within_its_time_and_never_beyond_the_load() -> None:
    neighbours, kind, now = _Neighbours(), (DOMAIN, 0), 50.0
    assert neighbours.next_id(kind, now) is None
    neighbours.begin(kind, now, 7 * POSITIONS)
    given_out = [neighbours.next_id(kind, now + 0.05) for _ in range(LOAD_SIZE)]
    assert given_out == [*range(7 * POSITIONS + 1, 7 * POSITIONS + LOAD_SIZE), None]
    neighbours.begin(kind, now, 8 * POSITIONS)
    assert neighbours.next_id((DOMAIN, 1), now) is None
    assert neighbours.next_id(("crm", 0), now) is None
    assert neighbours.next_id(kind, now + 0.2) is None


async def test_workers_are_notified_at_once_after_a_quiet_time_and_of_the_last_send() -> None:
    """Nothing is owed for longer than a few milliseconds, and closing pays at once"""
    notified: list[list[str]] = []
    notices = _Notices(notified.append)
    assert notices.due(DOMAIN, 50.0)
    assert not notices.notifying(DOMAIN, 50.0)
    assert not notices.due(DOMAIN, 50.001)
    assert notices.due("crm", 50.001)
    notices.owe(DOMAIN)
    assert notices.due(DOMAIN, 50.1)
    assert notices.notifying(DOMAIN, 50.1)  # it tells of those before, so nothing is left to ring for
    notices.notify_now()
    assert notified == []
    notices.owe(DOMAIN)
    notices.owe("crm")
    notices.notify_now()
    assert notified == [["crm", DOMAIN]]
    notices.owe(DOMAIN)
    await eventually(lambda: notified[1:] == [[DOMAIN]])
    notices.notify_now()
    assert len(notified) == 2


async def test_workers_hear_of_many_sends_by_the_first_and_the_last(
    dsn: str, settings: Settings, conn: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once after a silence, and at latest when the bus is closed; without one notification each"""
    monkeypatch.setattr(send_together, "QUIET_FOR", 60)
    monkeypatch.setattr(send_together, "OWED_FOR", 60)
    await conn.execute("LISTEN busload_ready")

    async def hear(last: str) -> list[str]:
        heard: list[str] = []
        async for notification in conn.notifies(timeout=WITHIN):
            heard.append(notification.payload)
            if heard[-1] == last:
                break
        return heard

    async with CommandBus(dsn, settings=settings) as bus:
        await bus.send(DOMAIN, "Debit")
        assert await hear(DOMAIN) == [DOMAIN]
        for _ in range(20):
            await bus.send(DOMAIN, "Debit")
        await conn.execute("NOTIFY busload_ready, 'still open'")
        assert await hear("still open") == ["still open"]
    await conn.execute("NOTIFY busload_ready, 'closed'")
    assert await hear("closed") == [DOMAIN, "closed"]


async def test_workers_hear_of_the_last_send_though_the_bus_stays_open(
    bus: CommandBus, conn: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few milliseconds after it; a first one to another domain is told at once"""
    monkeypatch.setattr(send_together, "QUIET_FOR", 60)
    await conn.execute("LISTEN busload_ready")
    for domain in (DOMAIN, DOMAIN, "crm"):
        await bus.send(domain, "Debit")
    heard = [notification.payload async for notification in conn.notifies(timeout=WITHIN, stop_after=3)]
    assert sorted(heard) == ["crm", DOMAIN, DOMAIN]


async def test_workers_are_notified_although_a_later_send_failed(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second send carries no notification, and the third, which carries one for both, is refused"""
    taken = await given.sent()
    monkeypatch.setattr(send_together, "QUIET_FOR", 60)
    monkeypatch.setattr(send_together, "OWED_FOR", 60)
    await bus.send(DOMAIN, "Debit")
    monkeypatch.setattr(send_together, "QUIET_FOR", 0)
    monkeypatch.setattr(send_together, "OWED_FOR", 0.001)
    await conn.execute("LISTEN busload_ready")
    with pytest.raises(DuplicateCommandError):
        await bus.send(DOMAIN, "Debit", command_id=taken)
    heard = [notification.payload async for notification in conn.notifies(timeout=WITHIN, stop_after=1)]
    assert heard == [DOMAIN]


async def test_a_send_to_a_batch_is_one_statement_that_checks_the_batch(bus: CommandBus, given: Given) -> None:
    """Its total rises with the command, or nothing is written"""
    async with bus.open_batch(DOMAIN) as batch:
        await asyncio.gather(*(bus.send(DOMAIN, "Debit", batch_id=batch.batch_id) for _ in range(5)))
        with pytest.raises(BatchNotFoundError):
            await bus.send("crm", "Debit", batch_id=batch.batch_id)
        with pytest.raises(BatchNotFoundError):
            await bus.send(DOMAIN, "Debit", batch_id=uuid4())
        assert (await given.batch_now(batch.batch_id)).total_count == 5
    for many in (1, 1500):
        with pytest.raises(BatchSealedError):
            await bus.send_many(DOMAIN, [BatchCommand("Debit")] * many, batch_id=batch.batch_id)
    assert given.database.count("command") == 5


async def test_a_bus_that_is_being_closed_takes_no_more_sends_and_so_comes_to_its_end(dsn: str) -> None:
    """Senders that never pause must not keep it open."""
    bus = await CommandBus(dsn).open()
    refused: list[InvalidOperationError] = []

    async def send_on_and_on() -> None:
        try:
            while True:
                await bus.send(DOMAIN, "Debit")
        except InvalidOperationError as error:
            refused.append(error)

    senders = [asyncio.create_task(send_on_and_on()) for _ in range(20)]
    await asyncio.sleep(0)
    async with asyncio.timeout(WITHIN):
        await bus.close()
        await asyncio.gather(*senders)
    assert len(refused) == 20

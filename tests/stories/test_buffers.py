"""Single events in, bulk calls out: whole journeys through a buffer."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import CommandBus, Group, HandlerContext, RetryPolicy, Settings, SyncCommandBus
from busload.buffers import BufferTable
from busload.buffers.event_table import all_ddl
from tests.given import LOCKED_OUT, Database, Given, eventually, short_and_long

NOW = timedelta(0)
CRM = """
    CREATE TABLE contact_activity (id bigint PRIMARY KEY, comment text NOT NULL);
    CREATE TABLE contact_activity_event (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        contact_activity_id bigint NOT NULL REFERENCES contact_activity,
        group_id uuid, created_at timestamptz NOT NULL DEFAULT clock_timestamp());
    CREATE UNIQUE INDEX ON contact_activity_event (contact_activity_id) WHERE group_id IS NULL;
"""


@pytest.fixture
def crm(database: Database) -> str:
    database.rows(CRM)
    for statement in all_ddl(BufferTable("contact_activity_event"))[3:]:
        database.rows(statement)
    return "contact_activity_event"


async def test_an_application_records_single_activities_and_the_service_gets_bulk_calls(
    bus: CommandBus, given: Given, dsn: str, database: Database
) -> None:
    """The write path keeps its shape, a rollback leaves nothing"""
    events = bus.buffer("contact_activity_events", size=100, max_age=timedelta(hours=1))
    database.rows("CREATE TABLE activity (id int)")
    received: list[list[int]] = []

    @events.handler()
    async def sync(group: Group, ctx: Any) -> None:
        received.append([item.data["activity"] for item in group])

    async def record_activity(n: int) -> None:
        async with bus.pool.connection() as conn, conn.transaction() as transaction:
            await conn.execute("INSERT INTO activity VALUES (%s)", [n])
            await events.add({"activity": n}, conn=conn)
            if n % 10 == 9:
                raise psycopg.Rollback(transaction)

    await asyncio.gather(*(record_activity(n) for n in range(500)))
    await events.flush()
    await given.drained(domains=None)

    committed = [n for (n,) in database.rows("SELECT id FROM activity")]
    assert len(committed) == 450
    assert sorted(n for call in received for n in call) == sorted(committed)
    assert sorted(len(call) for call in received) == [50, 100, 100, 100, 100]
    assert database.count("buffered") == 0
    status = await events.status()
    assert (status.calls, status.done, status.items_per_call, status.calls_saved) == (5, 450, 90, 445)
    database.check_invariants()


async def test_a_table_with_its_own_rules_is_a_buffer(
    bus: CommandBus, given: Given, database: Database, crm: str
) -> None:
    """Foreign key, one open event per row, joins by the group's id"""
    events = bus.buffer("marketing", table=crm, size=10, max_age=NOW)
    received: list[str] = []
    database.rows("INSERT INTO contact_activity SELECT n, 'call ' || n FROM generate_series(1, 25) AS n")
    record = "INSERT INTO contact_activity_event (contact_activity_id) SELECT n FROM generate_series(1, 25) AS n"
    database.rows(record)
    with pytest.raises(psycopg.errors.UniqueViolation):
        database.rows("INSERT INTO contact_activity_event (contact_activity_id) VALUES (7)")
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        database.rows("INSERT INTO contact_activity_event (contact_activity_id) VALUES (4711)")

    @events.handler()
    async def sync(group: Group, ctx: Any) -> None:
        async with bus.pool.connection() as conn:
            rows = await conn.execute(
                "SELECT a.comment FROM contact_activity_event JOIN contact_activity AS a"
                " ON a.id = contact_activity_id WHERE group_id = %s",
                [group.group_id],
            )
            received.extend(comment for (comment,) in await rows.fetchall())
        if not any("call 7" in comment for comment in received[:-10]) and len(received) == 10:
            await conn_insert_next(bus)

    async def conn_insert_next(bus: CommandBus) -> None:
        async with bus.pool.connection() as conn:  # its event is in flight: a newer one is accepted as the next
            await conn.execute("INSERT INTO contact_activity_event (contact_activity_id) VALUES (7)")

    await given.drained(domains=None, concurrency=1)
    counted = Counter(received)
    assert counted == Counter({f"call {n}": 1 for n in range(1, 26)}) + Counter({"call 7": 1})
    assert database.value("SELECT count(*) FROM contact_activity_event") == 0
    database.check_invariants()


async def test_a_buffer_that_keeps_history_copies_what_it_deletes(
    bus: CommandBus, given: Given, database: Database
) -> None:
    """In the same statement"""
    events = bus.buffer("events", archive=True, max_age=NOW)

    @events.handler()
    async def sync(group: Group, ctx: Any) -> None: ...

    ids = await events.add_many([{"n": 1}, {"n": 2}])
    await given.drained(domains=None)
    rows = database.rows("SELECT id, data ->> 'n', outcome FROM busload.buffer_archive ORDER BY id")
    assert rows == [(str(ids[0]), "1", "DONE"), (str(ids[1]), "2", "DONE")]
    assert database.count("buffered") == 0
    written = "SELECT DISTINCT xmin::text FROM busload."
    assert database.rows(f"{written}buffer_archive") == database.rows(f"{written}execution")

    database.rows("CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no space'; END$$")
    database.rows("CREATE TRIGGER never BEFORE DELETE ON busload.buffered EXECUTE FUNCTION never()")
    await events.add({"n": 3})
    await given.drained(domains=None)
    assert database.count("buffer_archive") == 2, "what is not deleted is not copied"


async def test_a_group_that_failed_comes_back_as_it_was(bus: CommandBus, given: Given, database: Database) -> None:
    """No other group takes its events; ids and group_id are the receiver's idempotency keys"""
    events = bus.buffer("events", size=10, max_age=NOW)
    calls: list[tuple[UUID, list[int]]] = []

    @events.handler(retry=RetryPolicy(max_attempts=3, backoff=(60,)))
    async def sync(group: Group, ctx: Any) -> None:
        calls.append((group.group_id, [item.id for item in group]))
        if len(calls) == 1:
            raise ConnectionError("the service is away")

    await events.add_many(range(5))
    await given.drained(domains=None)
    await events.add_many(range(5))
    await given.drained(domains=None)
    given.make_due()
    await given.drained(domains=None)
    assert calls[0] == calls[2] and not set(calls[0][1]) & set(calls[1][1])
    assert database.count("buffered") == 0
    database.check_invariants()


async def test_both_faces_share_a_buffer(bus: CommandBus, dsn: str, settings: Settings, given: Given) -> None:
    """A web application without an event loop adds, an async worker calls"""
    events = bus.buffer("events", size=3, max_age=timedelta(hours=1))
    received: list[Any] = []

    @events.handler()
    def sync(group: Group, ctx: Any) -> None:
        received.append([item.data for item in group])

    with SyncCommandBus(dsn, settings=settings) as sync_bus:
        theirs = sync_bus.buffer("events", size=3, max_age=timedelta(hours=1))
        theirs.add_many([1, 2])
        await events.add(3)
        await given.drained(domains=None)
        assert received == [[1, 2, 3]]
        assert theirs.status() == await events.status()


# -- storms -----------------------------------------------------------------------------------------------------


@contextmanager
def threads(*jobs: Callable[[threading.Event], None]) -> Iterator[None]:
    """Each job runs in a thread of its own until the block ends; what one of them raises is raised here."""
    ending, failures = threading.Event(), list[BaseException]()

    def work(job: Callable[[threading.Event], None]) -> None:
        try:
            job(ending)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=[job]) for job in jobs]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in running:
            thread.join()
    if failures:
        raise failures[0]


@short_and_long("seconds", (3.0,), (30.0,))
async def test_events_of_a_subject_arrive_once_and_in_order_in_a_storm(
    bus: CommandBus, given: Given, dsn: str, seconds: float
) -> None:
    """Events of a hundred subjects at full speed, and claimers that get in each other's way.

    The payloads of a subject are lists of numbers which a merge appends to each other: what the service gets must be
    every number, once, in order.
    """

    claimers = 8

    def appended(older: list[int], newer: list[int]) -> list[int]:
        return older + newer

    options: dict[str, Any] = {"size": 50, "max_age": timedelta(milliseconds=200), "max_groups": 50, "merge": appended}
    events = bus.buffer("events", **options)
    received: defaultdict[str, list[int]] = defaultdict(list)
    oldest = timedelta(0)

    @events.handler()
    async def sync(group: Group, ctx: Any) -> None:
        nonlocal oldest
        for item in group:
            assert item.key is not None
            received[item.key] += item.data
            oldest = max(oldest, datetime.now(UTC) - item.created_at)

    sent: Counter[str] = Counter()
    with SyncCommandBus(dsn, settings=Settings(pool_size=claimers + 6)) as sync_bus:
        theirs = sync_bus.buffer("events", **options)

        def adder(n: int) -> Callable[[threading.Event], None]:
            def add(ending: threading.Event) -> None:
                chance = random.Random(n)
                while not ending.is_set():
                    chosen = [f"{n}-{chance.randrange(25)}" for _ in range(chance.randrange(1, 60))]
                    numbers = []
                    for key in chosen:
                        numbers.append([sent[key]])
                        sent[key] += 1
                    keys = iter(chosen)
                    theirs.add_many(numbers, key=lambda _: next(keys))

            return add

        def claim(ending: threading.Event) -> None:
            while not ending.is_set():
                theirs.distribute()

        def rage() -> None:
            with threads(*(adder(n) for n in range(4)), *[claim] * claimers):
                time.sleep(seconds)  # the length of the storm, not a wait for something

        async with given.running(domains=None):
            await asyncio.to_thread(rage)

            async def all_gone() -> bool:
                return (await events.status()).waiting == 0

            deadline = time.monotonic() + 60 + 2 * seconds
            while not await all_gone():
                assert time.monotonic() < deadline
            await eventually(lambda: sum(map(len, received.values())) >= sum(sent.values()))
    for key, numbers in received.items():
        assert numbers == list(range(sent[key])), (key, _first_wrong(numbers))
    assert sum(sent.values()) > 0 and received.keys() == sent.keys()
    assert oldest < timedelta(seconds=60 + 2 * seconds)
    given.database.check_invariants()


def _first_wrong(numbers: list[int]) -> list[int]:
    wrong = next((n for n, number in enumerate(numbers) if n != number), len(numbers))
    return numbers[max(0, wrong - 3) : wrong + 5]


@pytest.mark.parametrize("form", ["own", "theirs"])
def test_no_event_is_in_two_groups_in_a_storm(
    sync_bus: SyncCommandBus, database: Database, dsn: str, form: str
) -> None:
    """Every group holds exactly the events that its claim has counted"""
    database.rows("CREATE TABLE theirs (n int)")
    for statement in all_ddl(BufferTable("theirs")):
        database.rows(statement)
    table = None if form == "own" else "theirs"
    with SyncCommandBus(dsn, settings=Settings(pool_size=14)) as bus:
        events = bus.buffer("events", size=20, max_age=timedelta(milliseconds=50), max_groups=10_000, table=table)
        added = [0] * 4

        def adder(n: int) -> Callable[[threading.Event], None]:
            def add(ending: threading.Event) -> None:
                while not ending.is_set():
                    events.add_many([{"n": 1}] * 7)
                    added[n] += 7

            return add

        def claim(ending: threading.Event) -> None:
            while not ending.is_set():
                events.distribute()

        with threads(*(adder(n) for n in range(4)), *[claim] * 8):
            time.sleep(3)  # the length of the storm
        events.flush()
        while events.distribute():
            pass
    where = "busload.buffered" if form == "own" else "theirs"
    assert database.value(f"SELECT count(*) FROM {where} WHERE group_id IS NULL") == 0
    assert database.value(f"SELECT count(*) FROM {where}") == sum(added) > 0
    wrong = f"""SELECT c.command_id, (c.data ->> 'items')::int, count(b.group_id) FROM busload.command c
                  LEFT JOIN {where} b ON b.group_id = c.command_id GROUP BY c.id
                HAVING (c.data ->> 'items')::int <> count(b.group_id) OR count(b.group_id) > 20"""
    assert database.rows(wrong) == []
    database.check_invariants()


@short_and_long("rounds", (20,), (1000,))
async def test_a_newer_event_of_a_subject_in_flight_is_the_next_one(bus: CommandBus, given: Given, rounds: int) -> None:
    events = bus.buffer("events", merge="keep_last", max_age=NOW)
    received: list[Any] = []

    @events.handler()
    async def sync(group: Group, ctx: Any) -> None:
        for item in group:
            received.append(item.data)
            if item.data % 2 == 0:
                assert await events.add(item.data + 1, key="a") is not None
                assert await events.add(item.data + 1, key="a") is None

    for round in range(0, 2 * rounds, 2):
        await events.add(round, key="a")
        await given.drained(domains=None)
    assert received == list(range(2 * rounds))


UPDATED = "UPDATE contact SET name = 'new' WHERE id = 2"


@pytest.mark.parametrize("ends", ["all", "some", "in its transaction"])
async def test_an_update_of_a_row_while_its_group_runs_is_delivered_too(
    bus: CommandBus, given: Given, database: Database, dsn: str, ends: str
) -> None:
    """The row would be deleted as it is, though its handler has seen what it was"""
    database.rows(
        "CREATE TABLE contact (id integer PRIMARY KEY, name text NOT NULL, group_id uuid,"
        " created_at timestamptz NOT NULL DEFAULT now());"
        " CREATE UNIQUE INDEX ON contact (name) WHERE group_id IS NULL;"
        " INSERT INTO contact SELECT n, 'old' || n FROM generate_series(1, 4) AS n"
    )
    events = bus.buffer("contacts", size=10, table="contact")
    delivered: list[dict[int, str]] = []

    @events.handler(retry=RetryPolicy(max_attempts=2, backoff=(0,)))
    async def sync(group: Group, ctx: HandlerContext) -> None:
        delivered.append({item.id: item.data["name"] for item in group})
        async with AsyncExitStack() as stack:
            if ends == "in its transaction":
                conn = await stack.enter_async_context(ctx.transaction())
                await conn.execute("UPDATE contact SET name = 'mine' WHERE id = 1")
                async with conn.transaction():
                    await conn.execute("UPDATE contact SET name = 'mine too' WHERE id = 3")
        if len(delivered) == 1:
            database.rows(UPDATED)
            if ends == "some":
                for item in group:
                    (group.fail(item, "later") if item.id == 4 else group.succeed(item))

    await events.flush()
    await given.drained(domains=None)
    assert delivered[0] == {1: "old1", 2: "old2", 3: "old3", 4: "old4"}
    later = {2: "new"} | ({4: "old4"} if ends == "some" else {})
    assert sorted(pair for call in delivered[1:] for pair in call.items()) == sorted(later.items())
    assert database.rows("SELECT id, name FROM contact") == []
    assert (await events.status()).done == 5
    database.check_invariants()


async def test_an_update_that_commits_while_its_row_is_deleted_is_delivered_too(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """The delete waits for the transaction that updates, and then finds another row than it has read"""
    database.rows(
        "CREATE TABLE contact (id integer PRIMARY KEY, name text NOT NULL, group_id uuid,"
        " created_at timestamptz NOT NULL DEFAULT now());"
        " INSERT INTO contact VALUES (1, 'old'), (2, 'old')"
    )
    events = bus.buffer("contacts", size=10, table="contact")
    delivered: list[list[str]] = []

    async with await psycopg.AsyncConnection.connect(dsn) as conn:

        @events.handler()
        async def sync(group: Group, ctx: HandlerContext) -> None:
            delivered.append([item.data["name"] for item in group])
            if len(delivered) == 1:
                await conn.execute(UPDATED)

        await events.flush()
        working = asyncio.create_task(given.drained(domains=None))
        await eventually(lambda: database.rows(LOCKED_OUT))
        await conn.commit()
        await working
    assert delivered == [["old", "old"], ["new"]]
    assert database.rows("SELECT id FROM contact") == []

"""The distributor: what every worker does for the buffers it serves, and what it does when a table lets it down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from busload import BatchCommand, CommandBus, Group, InvalidCommandError, PermanentCommandError, SyncCommandBus, Worker
from busload.buffers import Buffer, BufferTable
from busload.buffers.distribute import Distributor, Tallies
from busload.buffers.event_table import all_ddl
from busload.errors import InvalidOperationError
from busload.limits.pause import Pauses
from busload.postgres.pool import engine_pool
from busload.worker import distribution
from tests.given import Database, Given, eventually

NEVER, NOW, MINUTE = timedelta(days=30), timedelta(0), timedelta(minutes=1)
PROBLEM = "SELECT max(problem) FROM busload.buffer WHERE buffer = 'theirs'"
LOCKED_OUT = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
COLUMNS = """id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int, group_id uuid,
             created_at timestamptz NOT NULL DEFAULT clock_timestamp()"""


def handled(events: Buffer) -> list[list[Any]]:
    """Register a handler; returns the list of calls, each the data of its items."""
    calls: list[list[Any]] = []

    async def handle(group: Group, ctx: Any) -> None:
        calls.append([item.data for item in group])

    events.handler()(handle)
    return calls


@pytest.fixture
def table(database: Database) -> str:
    database.rows(f"CREATE TABLE theirs ({COLUMNS})")
    for statement in all_ddl(BufferTable("theirs"))[3:]:
        database.rows(statement)
    return "theirs"


async def test_a_worker_makes_groups_of_what_is_full_at_once(bus: CommandBus, given: Given) -> None:
    """Nobody waits for max_age"""
    events = bus.buffer("events", size=10, max_age=NEVER)
    calls = handled(events)
    async with given.running(domains=None):
        await events.add_many(range(25))
        await eventually(lambda: len(calls) == 2)
        await events.flush()
        await eventually(lambda: len(calls) == 3)
    assert sorted(n for call in calls for n in call) == list(range(25))
    assert (await events.status()).waiting == 0
    given.database.check_invariants()


async def test_a_worker_makes_a_group_when_its_oldest_event_is_old_enough(bus: CommandBus, given: Given) -> None:
    """Its loop sleeps no longer than that"""
    events = bus.buffer("events", size=10, max_age=timedelta(milliseconds=300))
    calls = handled(events)
    slow = given.settings.__class__(poll_every=timedelta(hours=1), sweep_every=timedelta(milliseconds=100))
    await events.add("first")
    async with given.running(domains=None, settings=slow):
        await eventually(lambda: calls)
    assert calls == [["first"]]


async def test_a_drain_ends_when_nothing_is_due(bus: CommandBus, given: Given, database: Database) -> None:
    """Not before: what is due in a buffer is work like any other; what is not due stays"""
    events = bus.buffer("events", size=10, max_age=timedelta(hours=1), max_groups=2)
    calls = handled(events)
    await events.add_many(range(57))
    await given.drained(domains=None)
    assert [len(call) for call in calls] == [10] * 5
    assert (await events.status()).waiting == 7
    await events.flush()
    assert await given.drained(domains=None) == 1
    assert len(calls) == 6
    database.check_invariants()


async def test_a_drain_does_not_wait_for_a_key_that_waits_for_a_person(bus: CommandBus, given: Given) -> None:
    """Its next event cannot leave, though it is due"""
    events = bus.buffer("events", merge="keep_last", max_age=NOW)

    @events.handler()
    async def refuse(group: Group, ctx: Any) -> None:
        raise PermanentCommandError("no")

    await events.add(1, key="a")
    await given.drained(domains=None)
    await events.add(2, key="a")
    assert await given.drained(domains=None) == 0
    status = await events.status()
    assert (status.waiting, status.groups_in_troubleshooting) == (1, 1)


async def test_a_worker_serves_the_buffers_of_its_domains_only(bus: CommandBus, given: Given) -> None:
    one, two = bus.buffer("one", max_age=NOW), bus.buffer("two", max_age=NOW)
    calls_one, calls_two = handled(one), handled(two)
    await one.add(1)
    await two.add(2)
    await given.drained(domains=["two"])
    assert (calls_one, calls_two) == ([], [[2]])
    assert ((await one.status()).waiting, (await two.status()).waiting) == (1, 0)


async def test_a_paused_buffer_makes_no_groups(bus: CommandBus, given: Given) -> None:
    """What is added meanwhile waits, and leaves when it is resumed"""
    events = bus.buffer("events", size=2, max_age=NOW)
    calls = handled(events)
    await bus.domains.pause("events")
    await events.add_many(range(4))
    await given.drained(domains=None)
    assert (await events.status()).waiting == 4
    async with given.running(domains=None):
        await bus.domains.resume("events")
        await eventually(lambda: len(calls) == 2)


async def test_a_worker_does_not_start_on_an_unfit_table(bus: CommandBus, given: Given, database: Database) -> None:
    """The message says what it lacks; nothing was claimed"""
    database.rows("CREATE TABLE theirs (id int PRIMARY KEY)")
    handled(bus.buffer("events", table="theirs"))
    with pytest.raises(InvalidOperationError, match=r"no column 'group_id'.*busload buffer ddl theirs"):
        await given.drained(domains=None)
    database.rows("DROP TABLE theirs")
    with pytest.raises(InvalidOperationError, match="no table 'theirs'"):
        await given.worker(domains=None).run()


async def test_a_worker_says_which_index_a_table_lacks(
    bus: CommandBus, given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    database.rows(f"CREATE TABLE theirs ({COLUMNS})")
    handled(bus.buffer("events", table="theirs"))
    with caplog.at_level(logging.WARNING, "busload"):
        await given.drained(domains=None)
    assert "CREATE INDEX ON public.theirs (created_at, id) WHERE group_id IS NULL;" in caplog.text


async def test_a_buffer_without_a_handler_is_pointed_out(
    bus: CommandBus, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    """Events that wait for a function nobody has registered; once, at the start"""
    handled(bus.buffer("served", max_age=NOW))
    lonely = bus.buffer("lonely", max_age=NOW)
    bus.buffer("empty")
    await lonely.add(1)
    with caplog.at_level(logging.WARNING, "busload"):
        await given.drained(domains=None)
    assert [r.getMessage() for r in caplog.records] == ["Events wait in buffer lonely, which has no handler here"]
    assert (await lonely.status()).waiting == 1


@pytest.mark.parametrize(
    ("breaks", "mends", "said"),
    [
        (
            "ALTER TABLE theirs DROP COLUMN group_id",
            "ALTER TABLE theirs ADD COLUMN group_id uuid",
            "no column 'group_id'",
        ),
        ("ALTER TABLE theirs RENAME TO hidden", "ALTER TABLE hidden RENAME TO theirs", "no table 'theirs'"),
        (
            "ALTER TABLE theirs RENAME created_at TO made_at",
            "ALTER TABLE theirs RENAME made_at TO created_at",
            "no column 'created_at'",
        ),
    ],
    ids=["drop column", "no table", "rename"],
)
async def test_a_table_that_breaks_under_a_running_worker_holds_up_nobody_else(
    bus: CommandBus,
    given: Given,
    database: Database,
    table: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: str,
    mends: str,
    said: str,
) -> None:
    """A clear error, once; other buffers go on; when it is mended its events leave: nothing is lost"""
    given.settings = replace(given.settings, recheck_table_after=timedelta(milliseconds=100))
    theirs, own = bus.buffer("theirs", table=table, max_age=NOW), bus.buffer("own", max_age=NOW)
    seen, others = handled(theirs), handled(own)
    async with given.running(domains=None):
        await theirs.add({"n": 1})
        await eventually(lambda: seen and not database.value("SELECT count(*) FROM theirs"))
        caplog.clear()
        with caplog.at_level(logging.INFO, "busload"):
            await asyncio.to_thread(database.rows, breaks)
            database.rows(f"INSERT INTO {'hidden' if 'hidden' in breaks else 'theirs'} (n) VALUES (2)")
            await eventually(lambda: "makes no groups" in caplog.text)
            for n in range(5):
                await own.add(n)
                await eventually(lambda n=n: len(others) == n + 1)  # type: ignore[misc]
            errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert len(errors) == 1 and said in errors[0]
            await asyncio.to_thread(database.rows, mends)
            await eventually(lambda: len(seen) == 2)
            await eventually(lambda: "is fit again" in caplog.text)
    assert [call[0]["n"] for call in seen] == [1, 2]
    assert database.value("SELECT count(*) FROM theirs") == 0


async def test_a_locked_table_holds_up_no_other_buffer(bus: CommandBus, given: Given, dsn: str, table: str) -> None:
    """A migration that takes its time"""
    theirs, own = bus.buffer("theirs", table=table, max_age=NOW), bus.buffer("own", max_age=NOW)
    seen, others = handled(theirs), handled(own)
    await theirs.add({"n": 1})
    async with await psycopg.AsyncConnection.connect(dsn) as conn, given.running(domains=None) as worker:
        await eventually(lambda: seen and not given.database.value("SELECT count(*) FROM theirs"))
        await conn.execute("LOCK TABLE theirs")
        for n in range(3):
            await own.add(n)
            await eventually(lambda n=n: len(others) == n + 1)  # type: ignore[misc]
        assert worker.stats.completed >= 3
        await conn.rollback()


async def test_a_locked_table_keeps_no_worker_from_starting(
    bus: CommandBus, given: Given, dsn: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that others serve, nor its own, which is looked at when it is free again"""
    monkeypatch.setattr(distribution, "LOCK_TIMEOUT", "100ms")
    other = bus.buffer("other", table=table, max_age=NOW)
    await other.add({"n": 1})
    seen, others = handled(other), handled(bus.buffer("own", max_age=NOW))
    await given.drained(domains=["other"])
    await other.add({"n": 2})
    async with await psycopg.AsyncConnection.connect(dsn) as conn, CommandBus(dsn) as elsewhere:
        await conn.execute("LOCK TABLE theirs")
        plain = handled(elsewhere.buffer("plain", max_age=NOW))
        await elsewhere.buffer("plain", max_age=NOW).add(1)
        await Worker(elsewhere, settings=given.settings).drain()
        assert plain == [[1]]
        async with given.running(domains=None):
            await bus.buffer("own", max_age=NOW).add(3)
            await eventually(lambda: others)
            assert len(seen) == 1
            await conn.rollback()
            await eventually(lambda: len(seen) == 2)


async def test_locked_tables_cannot_use_up_the_connections_of_the_engine(
    bus: CommandBus, given: Given, dsn: str, database: Database
) -> None:
    """More of them than there are connections: commands run on"""
    names = [f"theirs_{n}" for n in range(14)]
    database.rows(";".join(f"CREATE TABLE {name} ({COLUMNS})" for name in names))
    calls = [handled(bus.buffer(name, table=name, max_age=NOW)) for name in names]
    commands = given.handler()
    async with await psycopg.AsyncConnection.connect(dsn) as conn, given.running(domains=None):
        await conn.execute(f"LOCK TABLE {', '.join(names)}".encode())
        for n in range(3):
            await eventually(lambda: database.value(LOCKED_OUT) >= min(n + 1, 3))  # noqa: B023
            await given.sent()
            await eventually(lambda n=n: len(commands) == n + 1)  # type: ignore[misc]
        await conn.execute(f"INSERT INTO {names[-1]} (n) VALUES (1)".encode())
        await conn.commit()
        await eventually(lambda: calls[-1])


async def test_what_keeps_a_buffer_from_making_groups_is_seen_in_its_status(
    bus: CommandBus, given: Given, database: Database, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its table has all that it needs: a trigger that refuses every claim, with a code of the class 55"""
    given.settings = replace(given.settings, recheck_table_after=timedelta(milliseconds=100))
    database.rows(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN RAISE EXCEPTION 'nobody may claim' USING ERRCODE = '55000'; END $$;
           CREATE TRIGGER refuse BEFORE UPDATE ON theirs FOR EACH ROW EXECUTE FUNCTION refuse()"""
    )
    theirs, own = bus.buffer("theirs", table=table, max_age=NOW), bus.buffer("own", max_age=NOW)
    seen, others = handled(theirs), handled(own)
    await theirs.add({"n": 1})
    async with given.running(domains=None):
        await eventually(lambda: database.value(PROBLEM))
        status = await theirs.status()
        assert status.waiting == 1
        assert status.problem is not None and "nobody may claim" in status.problem
        assert await bus.buffers.list() == [await own.status(), status]
        await asyncio.to_thread(database.rows, "DROP TRIGGER refuse ON theirs")
        await eventually(lambda: seen)
        await eventually(lambda: not database.value(PROBLEM))
    assert others == []


async def test_a_problem_that_is_gone_is_cleared_by_the_next_worker(
    bus: CommandBus, given: Given, database: Database, table: str
) -> None:
    events = bus.buffer("theirs", table=table)
    handled(events)
    await given.drained(domains=None)
    database.rows("UPDATE busload.buffer SET problem = 'it was unfit'")
    await given.drained(domains=None)
    assert (await events.status()).problem is None


async def test_a_table_is_one_buffer(bus: CommandBus, given: Given, dsn: str, table: str) -> None:
    """Two of them would take each other's events; one whose workers have stopped is no hindrance"""
    handled(bus.buffer("one", table=table))
    async with CommandBus(dsn) as elsewhere:
        handled(elsewhere.buffer("two", table=f"public.{table}"))
        async with given.running(domains=None):
            await eventually(lambda: given.database.count("buffer"))
            with pytest.raises(InvalidOperationError, match=r"public\.theirs is the buffer 'one' already"):
                await Worker(elsewhere, settings=given.settings).drain()
        await Worker(elsewhere, settings=given.settings).drain()
    handled(bus.buffer("three", table=table))
    with pytest.raises(InvalidOperationError, match="cannot be the buffer 'three' too"):
        await given.drained(domains=None)


async def test_a_drain_of_many_partitions_comes_to_its_end(bus: CommandBus, given: Given) -> None:
    """More that is not due than one look weighs"""
    events = bus.buffer("events", size=2, max_groups=5, max_age=NEVER, partition_by="p")
    calls = handled(events)
    await events.add_many({"p": p} for p in range(30))
    assert await given.drained(domains=None) == 0
    assert calls == []


async def test_the_domain_of_a_buffer_has_no_other_commands(bus: CommandBus, given: Given) -> None:
    """They would take the room of its groups; and nobody sends groups but busload"""
    bus.handler("other", "Push")(print)
    handled(bus.buffer("events"))
    with pytest.raises(InvalidOperationError, match="is a buffer"):
        bus.handler("events", "Push")(print)
    with pytest.raises(InvalidOperationError, match="is a buffer"):
        handled(bus.buffer("other"))
    bus.buffer("events").exhausted()(print)
    for command_type in ("busload.Group", "busload.Exhausted"):
        for sending in (
            bus.send("events", command_type, {}),
            bus.create_batch("events", [BatchCommand(command_type)]),
            bus.create_batch("events", [BatchCommand("Push")], on_complete=BatchCommand(command_type)),
        ):
            with pytest.raises(InvalidCommandError, match="busload sends itself") as refused:
                await sending
            assert refused.value.problems[0].code == "INVALID_NAME"


async def test_counters_are_written_by_rounds_and_at_the_end(bus: CommandBus, given: Given) -> None:
    events = bus.buffer("events", size=10, max_age=NEVER)
    calls = handled(events)
    await events.add_many(range(30))
    await given.drained(domains=None)
    status = await events.status()
    assert (status.calls, status.done, status.items_per_call, status.calls_saved) == (3, 30, 10, 27)
    async with given.running(domains=None):
        await events.add_many(range(10))
        await eventually(lambda: len(calls) == 4)
        await eventually(lambda: given.database.value("SELECT done FROM busload.buffer") == 40)
    assert (await events.status()).calls == 4
    rare = given.settings.__class__(poll_every=timedelta(hours=1), sweep_every=timedelta(milliseconds=100))
    await events.add_many(range(10))
    async with given.running(domains=None, settings=rare):
        await eventually(lambda: len(calls) == 5)
    assert (await events.status()).calls == 5  # no further round came: written when it stopped


@pytest.fixture
async def distributor(bus: CommandBus, dsn: str) -> Any:
    pool = engine_pool(dsn, 2)

    def make(events: Buffer, tallies: Tallies | None = None) -> Distributor:
        pauses = Pauses(pool, [events.name])
        return Distributor(pool, events.settings, pauses, tallies or Tallies(), MINUTE, MINUTE)

    yield make
    await pool.close()


async def test_what_could_not_be_counted_is_counted_later(
    bus: CommandBus, database: Database, distributor: Callable[..., Distributor]
) -> None:
    events, tallies = bus.buffer("events"), Tallies()
    one = distributor(events, tallies)
    await one.start()
    tallies.add("events", calls=1, done=5)
    database.rows("ALTER TABLE busload.buffer RENAME TO elsewhere")
    with pytest.raises(psycopg.Error):
        await one.write_tallies()
    database.rows("ALTER TABLE busload.elsewhere RENAME TO buffer")
    tallies.add("events", calls=1, done=2, vanished=1)
    tallies.add("others", calls=7)
    await one.write_tallies()
    status = await events.status()
    assert (status.calls, status.done, status.vanished) == (2, 7, 1)
    assert tallies.take() == [("others", 7, 0, 0)]


async def test_a_round_says_when_to_look_again(
    bus: CommandBus, database: Database, distributor: Callable[..., Distributor]
) -> None:
    events = bus.buffer("events", size=2, max_age=timedelta(seconds=100), max_groups=1)
    one = distributor(events)
    await one.start()
    assert await one.once() == 60.0  # nothing waits
    await events.add(1)
    assert await one.once() == 60.0
    database.rows("UPDATE busload.buffered SET created_at = now() - interval '70 s'")
    assert 0 < await one.once() <= 30
    await events.add_many(range(5))
    assert await one.once() == 15.0  # more is full than has room in the queue
    assert one.groups == 1


async def test_a_sync_bus_and_its_worker_know_the_same_buffers(
    sync_bus: SyncCommandBus, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    events = sync_bus.buffer("events", max_age=NOW)
    sync_bus.buffer("lonely").add(1)
    calls: list[int] = []

    @events.handler()
    def handle(group: Group, ctx: Any) -> None:
        calls.append(len(group))

    events.add_many(range(3))
    with caplog.at_level(logging.WARNING, "busload"):
        await Worker(sync_bus, settings=given.settings).drain()
    assert calls == [3]
    assert "lonely" in caplog.text

"""How events wait and leave in groups: what each statement promises, in both forms of a buffer."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import CommandBus, Group, InvalidCommandError, SyncCommandBus
from busload.buffers import Buffer, BufferTable, event_table
from busload.buffers import claim as buffer
from busload.buffers import status as buffer_status
from busload.buffers.declaration import BufferSettings
from busload.buffers.event_table import OWN, all_ddl, ddl, find
from busload.errors import InvalidOperationError
from busload.sync.plan import perform
from tests.cost import pages, vacuumed
from tests.given import Database, Given, at_once, eventually, short_and_long, until

NEVER = timedelta(days=30)
TABLE = """CREATE TABLE activity (id bigint PRIMARY KEY);
           INSERT INTO activity SELECT generate_series(1, 100);
           CREATE TABLE activity_events (
               id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, activity_id bigint REFERENCES activity,
               tenant integer, group_id uuid, created_at timestamptz NOT NULL DEFAULT clock_timestamp())"""

REST = "group_id uuid, created_at timestamptz NOT NULL DEFAULT clock_timestamp()"


@pytest.fixture
def events(bus: CommandBus) -> Buffer:
    return bus.buffer("events", size=10, max_age=NEVER)


@pytest.fixture
def table(database: Database) -> str:
    database.rows(TABLE)
    for statement in all_ddl(BufferTable("activity_events"), partition_by="tenant")[-2:]:
        database.rows(statement)
    return "activity_events"


def groups(database: Database, table: str = "busload.buffered") -> list[list[int]]:
    """The ids of each group, in the order in which the groups were made."""
    rows = database.rows(
        f"SELECT array_agg(b.id ORDER BY b.id) FROM {table} b JOIN busload.command c ON c.command_id = b.group_id"
        " GROUP BY c.id ORDER BY c.id"
    )
    return [ids for (ids,) in rows]


def age(database: Database, by: str = "1 hour", where: str = "true") -> None:
    """Move time: what waits has waited that much longer."""
    database.rows(f"UPDATE busload.buffered SET created_at = created_at - interval '{by}' WHERE {where}")


def round_of(settings: BufferSettings, database: Database, **options: Any) -> buffer.Round:
    at = database.perform(find(settings))
    round = buffer.Round(settings, at, **options)
    for plan in round.plans():
        database.perform(plan)
    return round


# -- adding -----------------------------------------------------------------------------------------------------


async def test_an_event_waits_with_its_payload_key_and_size(bus: CommandBus, database: Database) -> None:
    events = bus.buffer("events")
    id = await events.add({"contact": 42}, key="c42")
    assert database.rows("SELECT id, buffer, partition, key, data, bytes, group_id, once FROM busload.buffered") == [
        (id, "events", "", "c42", {"contact": 42}, len('{"contact":42}'), None, False)
    ]
    assert await events.add(None) != id
    assert await events.add({"contact": 42}, key="c42") is not None  # a key alone merges nothing


async def test_an_event_exists_exactly_if_the_callers_transaction_commits(
    bus: CommandBus, sync_bus: SyncCommandBus, dsn: str, database: Database
) -> None:
    """The rest of the transaction and the event: both or neither, on each kind of connection"""
    database.rows("CREATE TABLE lead (id int)")
    events, sync_events = bus.buffer("events"), sync_bus.buffer("events")
    for commits in (True, False):
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.execute("INSERT INTO lead VALUES (1)")
            await events.add({"n": 1}, conn=conn)
            await events.add_many([{"n": 2}, {"n": 3}], conn=conn)
            assert database.count("buffered") == (0 if commits else 5)
            await (conn.commit() if commits else conn.rollback())
        with psycopg.connect(dsn) as sync_conn:
            sync_conn.execute("INSERT INTO lead VALUES (1)")
            await events.add({"n": 4}, conn=sync_conn)
            sync_events.add({"n": 5}, conn=sync_conn)
            sync_conn.commit() if commits else sync_conn.rollback()
        assert (database.count("buffered"), database.value("SELECT count(*) FROM lead")) == (5, 2)


async def test_many_events_come_in_the_order_of_the_input(bus: CommandBus, database: Database) -> None:
    """Also if it takes several statements."""
    events = bus.buffer("events")
    ids = await events.add_many({"n": n} for n in range(4500))
    assert ids == sorted(ids) and len(ids) == 4500
    rows = database.rows("SELECT id, (data ->> 'n')::int FROM busload.buffered ORDER BY id")
    assert rows == list(zip(ids, range(4500), strict=True))
    assert await events.add_many([]) == []


async def test_many_events_are_added_all_or_none_and_every_offender_is_named(bus: CommandBus) -> None:
    events = bus.buffer("events", partition_by="tenant", merge="keep_last")
    bad = [{"tenant": 1}, {"tenant": object()}, {"tenant": 2, "x": float("nan")}, [1], {"tenant": 3}]
    keys = iter(["a", "b", "c", "d", None])
    with pytest.raises(InvalidCommandError) as refused:
        await events.add_many(bad, key=lambda _: next(keys))  # type: ignore[arg-type, return-value]
    assert {problem.index for problem in refused.value.problems} == {1, 2, 3, 4}
    assert (await events.status()).waiting == 0


@pytest.mark.parametrize("rule", ["keep_last", "keep_first"])
async def test_at_most_one_event_of_a_key_waits(bus: CommandBus, database: Database, rule: Any) -> None:
    """The newer one replaces it or is dropped; its age is that of the first, so that it leaves in time"""
    events = bus.buffer("events", merge=rule, max_age=timedelta(minutes=2))
    first = await events.add({"n": 1}, key="a")
    born = database.value("SELECT created_at FROM busload.buffered")
    assert await events.add({"n": 2, "longer": True}, key="a") is None
    await events.add({"n": 3}, key="b")
    assert await events.add_many([{"n": 4}, {"n": 5}, {"n": 6}], key=lambda d: "c" if d["n"] > 4 else "a") == [
        None,
        database.value("SELECT id FROM busload.buffered WHERE key = 'c'"),
        None,
    ]
    kept = {"a": 4, "b": 3, "c": 6} if rule == "keep_last" else {"a": 1, "b": 3, "c": 5}
    rows = database.rows("SELECT key, (data ->> 'n')::int, bytes = length(data::text) FROM busload.buffered")
    assert sorted(rows) == [(key, n, True) for key, n in kept.items()]
    assert database.rows("SELECT id, created_at FROM busload.buffered WHERE key = 'a'") == [(first, born)]


async def test_the_same_key_in_two_buffers_is_two_subjects(bus: CommandBus) -> None:
    one, two = bus.buffer("one", merge="keep_last"), bus.buffer("two", merge="keep_last")
    assert await one.add(1, key="a") is not None
    assert await two.add(1, key="a") is not None
    assert await one.add(1, key="a") is None


@short_and_long("rounds", (10,), (100,))
@pytest.mark.parametrize("rule", ["keep_last", "keep_first"])
async def test_a_newer_event_of_a_key_in_flight_is_kept_as_the_next(
    bus: CommandBus, database: Database, rule: Any, rounds: int
) -> None:
    """Never rejected, never merged into the running one, and not taken while that is in its group"""
    events = bus.buffer("events", merge=rule, size=5, max_age=timedelta(0))
    for round in range(rounds):
        running = await events.add({"round": round, "n": 1}, key="a")
        assert await events.distribute() == 1
        following = await events.add({"round": round, "n": 2}, key="a")
        assert following is not None and following != running
        assert await events.add({"round": round, "n": 3}, key="a") is None
        assert await events.distribute() == 0
        database.rows("DELETE FROM busload.buffered WHERE id = %s", running)  # it is done
        assert await events.distribute() == 1
        kept = database.rows("SELECT id, (data ->> 'n')::int FROM busload.buffered WHERE group_id IS NOT NULL")
        assert kept == [(following, 3 if rule == "keep_last" else 2)]
        database.rows("DELETE FROM busload.buffered")
        database.rows("DELETE FROM busload.queue")


@pytest.mark.parametrize("rule", ["keep_last", "keep_first"])
async def test_an_event_that_took_another_in_does_not_leave_before_that_is_committed(
    bus: CommandBus, dsn: str, database: Database, rule: Any
) -> None:
    """Its handler would read the subject as it was before, and nobody would look at it again."""
    events = bus.buffer("events", merge=rule, max_age=timedelta(0))
    await events.add({"n": 1}, key="a")
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        assert await events.add({"n": 2}, key="a", conn=conn) is None
        assert await events.distribute() == 0
        await conn.commit()
    assert await events.distribute() == 1


async def test_an_event_that_waits_for_a_claim_of_its_key_becomes_the_next(
    bus: CommandBus, dsn: str, database: Database
) -> None:
    """The claim is under way when it arrives"""
    events = bus.buffer("events", merge="keep_last")
    await events.add({"n": 1}, key="a")
    adding: list[asyncio.Task[Any]] = []

    async def meanwhile(group_id: UUID) -> None:
        adding.append(asyncio.create_task(events.add({"n": 2}, key="a")))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        await eventually(lambda: database.value(waits))

    assert len(await events.claim(meanwhile)) == 1
    assert await adding[0] is not None
    rows = database.rows("SELECT (data ->> 'n')::int, group_id IS NULL FROM busload.buffered ORDER BY id")
    assert rows == [(1, False), (2, True)]


def test_two_calls_that_add_the_same_keys_cannot_deadlock(sync_bus: SyncCommandBus, dsn: str) -> None:
    events = sync_bus.buffer("events", merge="keep_last")
    keys = [f"k{n}" for n in range(200)]

    def add(order: list[str], _: object) -> None:
        for _ in range(15):
            events.add_many(order, key=str)

    at_once(dsn, [partial(add, order) for order in (keys, keys[::-1], keys[100:] + keys[:100])])
    assert events.status().waiting == 200


# -- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"name": ""}, "/name"),
        ({"name": "a b"}, "/name"),
        ({"name": 7}, "/name"),
        ({"size": 0}, "/size"),
        ({"size": -1}, "/size"),
        ({"size": True}, "/size"),
        ({"size": 1.5}, "/size"),
        ({"max_groups": 0}, "/max_groups"),
        ({"max_bytes": 0}, "/max_bytes"),
        ({"max_age": 120}, "/max_age"),
        ({"max_age": timedelta(seconds=-1)}, "/max_age"),
        ({"max_age": timedelta(days=4000)}, "/max_age"),
        ({"merge": "last"}, "/merge"),
        ({"archive": "yes"}, "/archive"),
        ({"on_exhausted": "drop"}, "/on_exhausted"),
        ({"partition_by": ""}, "/partition_by"),
        ({"partition_by": 7}, "/partition_by"),
        ({"table": ""}, "/table/name"),
        ({"table": 7}, "/table"),
        ({"table": "a\0b"}, "/table/name"),
        ({"table": BufferTable("t", id="")}, "/table/id"),
        ({"table": "t", "merge": "keep_last"}, "/table/key"),
    ],
    ids=str,
)
def test_a_wrong_declaration_is_refused(sync_bus: SyncCommandBus, options: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidCommandError, match="wanted") as refused:
        sync_bus.buffer(**{"name": "events", **options})
    assert [problem.path for problem in refused.value.problems] == [path]


def test_a_buffer_is_declared_once_though_in_many_places(sync_bus: SyncCommandBus) -> None:
    sync_bus.buffer("events", size=10)
    sync_bus.buffer("events", size=10)
    with pytest.raises(InvalidOperationError, match="declared before with other settings"):
        sync_bus.buffer("events", size=11)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"x": object()}, "a"),
        ({"x": float("nan")}, "a"),
        ({"x": "\ud800"}, "a"),
        ("x" * 2_000_000, "a"),
        ({1: 2}, "a"),
        ({}, None),
        ({}, ""),
        ({}, 7),
        ({}, "a\0"),
        ({}, "k" * 513),
    ],
    ids=lambda value: repr(value)[:20],
)
async def test_a_bad_event_is_refused_and_nothing_written(bus: CommandBus, data: Any, key: Any) -> None:
    events = bus.buffer("events", merge="keep_last")
    with pytest.raises(InvalidCommandError):
        await events.add(data, key=key)
    with pytest.raises(InvalidCommandError):
        await events.add_many([{}, data], key=lambda one: key if one == data else "fine")
    assert (await events.status()).waiting == 0


@pytest.mark.parametrize("items", ["abc", b"abc", {"a": 1}, 7, None])
async def test_many_events_must_be_many(bus: CommandBus, items: Any) -> None:
    with pytest.raises(InvalidCommandError, match="wanted several payloads"):
        await bus.buffer("events").add_many(items)
    with pytest.raises(InvalidCommandError, match="wanted a function"):
        await bus.buffer("events").add_many([1], key="a")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [{}, [], 1.5, True, "t" * 513])
async def test_a_partition_must_be_text_or_a_number(bus: CommandBus, value: Any) -> None:
    events = bus.buffer("events", partition_by="tenant")
    with pytest.raises(InvalidCommandError) as refused:
        await events.add({"tenant": value})
    assert refused.value.problems[0].path == "/data/tenant"


# -- leaving ----------------------------------------------------------------------------------------------------


async def test_a_slice_gets_a_group_and_the_group_its_command(events: Buffer, database: Database) -> None:
    """The oldest first, one command per group, whose id is the group's"""
    ids = await events.add_many(range(25))
    assert await events.distribute() == 2
    assert groups(database) == [ids[:10], ids[10:20]]
    commands = database.rows("SELECT command_id, domain, command_type, data FROM busload.command ORDER BY id")
    assert [command[1:] for command in commands] == [
        ("events", "busload.Group", {"buffer": "events", "items": 10, "partition": None, "table": None})
    ] * 2
    in_groups = {
        group for (group,) in database.rows("SELECT group_id FROM busload.buffered WHERE group_id IS NOT NULL")
    }
    assert in_groups == {command[0] for command in commands}
    assert database.count("queue") == 2
    database.check_invariants()


async def test_a_group_leaves_when_it_is_full_or_old_or_flushed(events: Buffer, database: Database) -> None:
    """Not only when somebody polls"""
    await events.add_many(range(9))
    assert await events.distribute() == 0
    await events.add(9)
    assert await events.distribute() == 1  # full
    await events.add_many(range(3))
    assert await events.distribute() == 0
    age(database, "31 days", "id = 12")
    assert await events.distribute() == 1  # its second one is old
    assert groups(database)[1] == [11, 12, 13]
    await events.add_many(range(4))
    assert await events.flush() == 4
    await events.add(5)
    assert await events.distribute() == 1
    assert await events.distribute() == 0
    await events.add(6)
    assert await events.distribute() == 0  # what came after the flush waits again
    assert (await events.status()).waiting == 1


async def test_a_group_holds_no_more_bytes_than_allowed(bus: CommandBus, database: Database) -> None:
    """What is too large by itself leaves alone"""
    events = bus.buffer("events", size=100, max_bytes=250, max_age=NEVER)
    ids = await events.add_many(["x" * 98, "x" * 98])
    assert await events.distribute() == 0
    ids += await events.add_many(["x" * 98, "y" * 400, "x" * 98, "x" * 98])
    assert await events.distribute() == 3
    assert groups(database) == [ids[:2], [ids[2]], [ids[3]]]
    assert await events.flush() == 2
    assert await events.distribute() == 1


async def test_a_group_is_of_one_partition(bus: CommandBus, database: Database) -> None:
    """Per tenant, with sizes and ages of its own"""
    events = bus.buffer("events", size=3, max_age=NEVER, partition_by="tenant")
    for n in range(8):
        await events.add({"n": n, "tenant": ["a", 7, None][n % 3]})
    assert await events.distribute() == 2
    rows = database.rows("SELECT data ->> 'partition' FROM busload.command ORDER BY 1")
    assert rows == [("7",), ("a",)]
    age(database, "31 days", "partition = ''")
    assert await events.distribute() == 1
    assert database.rows("SELECT partition FROM busload.buffered WHERE group_id IS NULL") == []
    assert len(groups(database)) == 3


async def test_a_claim_that_failed_half_way_leaves_no_trace(events: Buffer, database: Database) -> None:
    """No group without its command, no command without its group, wherever it breaks"""
    await events.add_many(range(10))
    for place in ("command", "queue"):
        database.rows(
            f"""CREATE FUNCTION crash_{place}() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'power cut'; END $$;
                CREATE TRIGGER crash AFTER INSERT ON busload.{place} FOR EACH ROW EXECUTE FUNCTION crash_{place}()"""
        )
        with pytest.raises(psycopg.Error, match="power cut"):
            await events.distribute()
        assert (await events.status()).waiting == 10
        assert (database.count("command"), database.count("queue")) == (0, 0)
        database.rows(f"DROP TRIGGER crash ON busload.{place}")
    assert await events.distribute() == 1
    database.check_invariants()


async def test_claims_at_the_same_time_take_different_events(events: Buffer, dsn: str, database: Database) -> None:
    """What another transaction holds is skipped, not waited for"""
    ids = await events.add_many(range(25))
    at = database.perform(find(events.settings))
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two:
        for conn in (one, two):
            round = buffer.Round(events.settings, at)
            for plan in round.plans():
                perform(conn, plan)
            assert round.groups == (2 if conn is one else 0)  # the five that are left are not due
    assert groups(database) == [ids[:10], ids[10:20]]


async def test_too_many_claims_are_harmless_and_too_few_are_made_up_for(events: Buffer, database: Database) -> None:
    """Two look, both claim what they have seen; then nothing is left that is due"""
    await events.add_many(range(20))
    at = database.perform(find(events.settings))
    rounds = [buffer.Round(events.settings, at) for _ in range(2)]
    plans = [iter(round.plans()) for round in rounds]
    for one in plans:
        database.perform(next(one))
    await events.add_many(range(10))
    for one in plans:
        for plan in one:
            database.perform(plan)
    assert sum(round.groups for round in rounds) + await events.distribute() == 3
    assert len(groups(database)) == 3


async def test_no_more_groups_are_made_than_may_wait_in_the_queue(bus: CommandBus, database: Database) -> None:
    """Those that are ready already are subtracted"""
    events = bus.buffer("events", size=10, max_groups=3, max_age=timedelta(0))
    await events.add_many(range(100))
    assert await events.distribute() == 3
    assert await events.distribute() == 0
    database.rows("DELETE FROM busload.queue WHERE hi = (SELECT min(hi) FROM busload.queue)")
    assert await events.distribute() == 1


async def test_a_look_that_finds_no_room_says_so(bus: CommandBus, database: Database) -> None:
    """Otherwise `distribute` would look at the same partitions again and again, and a worker would come back late"""
    events = bus.buffer("events", size=1, max_groups=1, max_age=timedelta(0), partition_by="p")
    await events.add_many([{"p": "a"}, {"p": "b"}])
    assert await events.distribute() == 1
    round = round_of(events.settings, database, after="a")
    assert (round.groups, round.cursor, round.short_of_room) == (0, "a", True)


async def test_no_partition_is_forgotten_for_the_others(bus: CommandBus, database: Database) -> None:
    """Room for few groups, many partitions that are always full: each has its turn"""
    events = bus.buffer("events", size=2, max_groups=5, max_age=NEVER, partition_by="p")
    cursor: str | None = None
    served: list[str] = []
    for _ in range(12):
        await events.add_many({"p": p} for p in range(30) for _ in range(2))
        database.rows("DELETE FROM busload.queue")
        round = round_of(events.settings, database, after=cursor)
        cursor = round.cursor
        assert round.groups == 5
    rows = database.rows("SELECT data ->> 'partition' FROM busload.command ORDER BY id")
    served = [partition for (partition,) in rows]
    assert set(served[:30]) == {str(p) for p in range(30)}
    assert max(served.count(str(p)) for p in range(30)) == 2


async def test_what_is_old_leaves_before_what_is_full(bus: CommandBus, database: Database) -> None:
    events = bus.buffer("events", size=2, max_groups=1, max_age=timedelta(hours=1), partition_by="p")
    await events.add_many({"p": p} for p in ("a", "a", "b", "c"))
    age(database, "2 hours", "partition = 'b'")
    age(database, "3 hours", "partition = 'c'")
    for expected in ("c", "b", "a"):
        assert round_of(events.settings, database).groups == 1
        assert database.value("SELECT data ->> 'partition' FROM busload.command ORDER BY id DESC LIMIT 1") == expected
        database.rows("DELETE FROM busload.queue")


async def test_thousands_of_partitions_are_looked_at_in_turns(
    bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look is bounded; the next one goes on where it ended"""
    monkeypatch.setattr(buffer, "MOST_PARTITIONS", 100)
    events = bus.buffer("events", size=2, max_groups=1000, max_age=timedelta(hours=1), partition_by="p")
    await events.add_many({"p": f"{p:04}"} for p in range(250))
    age(database, "2 hours", "partition = '0249'")
    first = round_of(events.settings, database)
    assert (first.groups, first.cursor) == (0, "0099")
    second = round_of(events.settings, database, after=first.cursor)
    assert (second.groups, second.cursor) == (0, "0199")
    third = round_of(events.settings, database, after=second.cursor)
    assert (third.groups, third.cursor) == (1, None)


async def test_all_that_is_due_leaves_at_once_and_there_is_an_end_to_it(
    bus: CommandBus, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In more partitions than one look sees; and with more events that are not due than one look weighs"""
    monkeypatch.setattr(buffer, "MOST_PARTITIONS", 10)
    events = bus.buffer("events", size=2, max_groups=5, max_age=timedelta(hours=1), partition_by="p")
    await events.add_many({"p": f"{p:04}"} for p in range(35))
    assert await events.distribute() == 0
    age(database, "2 hours", "partition IN ('0015', '0034')")
    assert await events.distribute() == 2


async def test_a_merging_buffer_keeps_the_order_of_a_key(bus: CommandBus, database: Database) -> None:
    """What is in a group that has not ended keeps the later ones of its key back, and nothing else"""
    events = bus.buffer("events", size=2, max_age=timedelta(0), merge=lambda older, newer: newer)
    ids = [await events.add(n, key=key) for n, key in enumerate("aabac")]
    assert await events.distribute() == 2
    assert groups(database) == [[ids[0], ids[1], ids[3]], [ids[2], ids[4]]]  # the third a is the same item
    ids += [await events.add(n, key=key) for n, key in enumerate("dac")]
    assert await events.distribute() == 1
    assert groups(database)[-1] == [ids[5]]  # the fourth a waits, d does not
    database.rows("DELETE FROM busload.buffered WHERE id = ANY (%s)", [ids[0], ids[1], ids[3]])
    assert await events.distribute() == 1
    assert groups(database)[-1] == [ids[6]]


async def test_all_that_waits_for_a_key_leaves_together(bus: CommandBus, database: Database) -> None:
    """Of a few busy subjects, a claim must not have to step over all that waits behind the first ones"""
    events = bus.buffer("events", size=2, max_age=timedelta(0), merge=lambda older, newer: newer)
    await events.add_many([n % 3 for n in range(30)], key=str)
    assert await events.distribute() == 2
    assert sorted(map(len, groups(database))) == [10, 20]


async def test_what_was_kept_back_goes_first_once_it_is_free(bus: CommandBus, database: Database) -> None:
    """Also if that happens between two claims of a round: the second begins at the oldest again"""
    events = bus.buffer("events", size=2, max_age=timedelta(0), merge=lambda older, newer: newer)
    running = await events.add(0, key="a")
    assert await events.distribute() == 1
    ids = [await events.add(n, key=key) for n, key in enumerate("abca")]
    plans = buffer.Round(events.settings, database.perform(find(events.settings))).plans()
    database.perform(next(plans))
    database.perform(next(plans))
    database.rows("DELETE FROM busload.buffered WHERE id = %s", running)
    for plan in plans:
        database.perform(plan)
    assert groups(database) == [ids[1:3], [ids[0], ids[3]]]


@pytest.mark.parametrize("form", ["own", "theirs"])
async def test_an_event_that_somebody_holds_keeps_the_later_ones_of_its_key_back(
    bus: CommandBus, dsn: str, database: Database, form: str
) -> None:
    """The application has locked the oldest, or one in between: what is newer must not overtake it"""
    merging: Any = {"merge": lambda older, newer: newer, "max_age": timedelta(0)}
    if form == "theirs":
        database.rows(f"CREATE TABLE t (id int PRIMARY KEY, key text, {REST})")
        merging["table"] = BufferTable("t", key="key")
    table = "t" if form == "theirs" else "busload.buffered"
    events = bus.buffer("events", **merging)
    for n, key in enumerate("aabaab", 1):
        await events.add({"id": n}, key=key)
    ids = [id for (id,) in database.rows(f"SELECT id FROM {table} ORDER BY created_at, id")]
    with psycopg.connect(dsn) as conn:
        conn.execute(f"SELECT FROM {table} WHERE id = {ids[0]} FOR UPDATE".encode())
        assert await events.distribute() == 1
        assert groups(database, table) == [[ids[2], ids[5]]]
        conn.rollback()
        conn.execute(f"SELECT FROM {table} WHERE id = {ids[3]} FOR UPDATE".encode())
        assert await events.distribute() == 1
        assert groups(database, table)[1] == ids[:2]
        database.rows(f"DELETE FROM {table} WHERE group_id IS NOT NULL")
        assert await events.distribute() == 0
        conn.rollback()
    assert await events.distribute() == 1
    assert groups(database, table) == [ids[3:5]]


async def test_an_event_keeps_the_later_ones_of_its_key_in_other_partitions_back(
    bus: CommandBus, database: Database
) -> None:
    """Its subject has moved: what it did there goes first"""
    events = bus.buffer("events", size=2, max_age=NEVER, partition_by="p", merge=lambda older, newer: newer)
    keys = iter("aabb")
    ids = await events.add_many([{"p": "old"}, {"p": "new"}, {"p": "new"}, {"p": "new"}], key=lambda _: next(keys))
    assert await events.distribute() == 1
    assert groups(database) == [ids[2:]]
    age(database, "31 days", "partition = 'old'")
    assert await events.distribute() == 1
    database.rows("DELETE FROM busload.buffered WHERE group_id IS NOT NULL")
    await events.flush()
    assert await events.distribute() == 1
    assert groups(database) == [[ids[1]]]


@pytest.mark.parametrize("keys", [100_000, 5])
async def test_keeping_back_reads_no_backlog(bus: CommandBus, dsn: str, database: Database, keys: int) -> None:
    """A claim of a merging buffer costs the same however many wait, for other keys or for the same"""
    settings = BufferSettings("events", size=100, max_groups=1, max_age=timedelta(0), merge=lambda older, newer: newer)
    at, cost = database.perform(find(settings)), []
    for count in (3000, 15_000):
        database.rows("TRUNCATE busload.buffered, busload.queue")
        database.rows(
            f"INSERT INTO busload.buffered (buffer, key, data, bytes) SELECT 'events', (n % {keys})::text, '1', 1"
            f" FROM generate_series(1, {count}) AS n"
        )
        database.rows("ANALYZE busload.buffered")
        with psycopg.connect(dsn) as conn:
            for setting in ("plan_cache_mode = force_generic_plan", "jit = off", "enable_seqscan = off"):
                conn.execute(f"SET {setting}".encode())
            cost.append([pages(conn, plan) for plan in buffer.Round(settings, at).plans()][1])
    assert cost[1] <= 1.5 * cost[0]


async def test_claims_of_a_merging_buffer_take_turns(bus: CommandBus, dsn: str, database: Database) -> None:
    """Otherwise one could take the newer event of a key while another has the older in its hands"""
    events = bus.buffer("events", size=1, max_age=timedelta(0), merge=lambda older, newer: newer)
    assert await events.distribute() == 0
    older = await events.add("older", key="a")
    claiming: list[asyncio.Task[int]] = []

    async def meanwhile(group_id: UUID) -> None:
        await events.add("newer", key="a")
        claiming.append(asyncio.create_task(events.distribute()))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = current_database()"
        await eventually(lambda: database.value(waits))

    assert await events.claim(meanwhile, limit=1) == [older]
    assert await claiming[0] == 0
    assert groups(database) == [[older]]


# -- claim with a callback --------------------------------------------------------------------------------------


async def test_claim_hands_the_group_to_a_callback_in_its_transaction(
    events: Buffer, bus: CommandBus, database: Database
) -> None:
    """Due or not; the ids are returned; nothing claimed, nothing called"""
    called: list[UUID] = []
    assert await events.claim(called.append) == [] and called == []
    ids = await events.add_many(range(5))
    assert await events.claim(called.append, limit=3) == ids[:3]

    async def send(group_id: UUID, conn: Any) -> None:
        called.append(group_id)
        await bus.send("audit", "Claimed", {"group": str(group_id)}, conn=conn)

    assert await events.claim(send) == ids[3:]
    rows = database.rows("SELECT command_id FROM busload.command WHERE domain = 'events' ORDER BY id")
    assert [group for (group,) in rows] == called
    assert database.value("SELECT data ->> 'group' FROM busload.command WHERE domain = 'audit'") == str(called[1])
    database.check_invariants()


async def test_a_claim_whose_callback_raises_has_not_happened(events: Buffer, database: Database) -> None:
    await events.add_many(range(5))
    before = database.everything()

    def refuse(group_id: UUID) -> None:
        raise RuntimeError("the other queue is away")

    with pytest.raises(RuntimeError, match="away"):
        await events.claim(refuse)
    assert database.everything() == before | {"buffer": 1}
    assert (await events.status()).waiting == 5


async def test_claim_needs_a_callback(events: Buffer, sync_bus: SyncCommandBus) -> None:
    """An error without one"""
    await events.add(1)
    with pytest.raises(TypeError):
        await events.claim()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="needs a function"):
        await events.claim(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError, match="limit"):
        await events.claim(print, limit=0)

    async def later(group_id: UUID) -> None: ...

    with pytest.raises(TypeError, match="async function"):
        sync_bus.buffer("events", size=10, max_age=NEVER).claim(later)
    assert (await events.status()).waiting == 1


def test_the_sync_face_does_the_same(sync_bus: SyncCommandBus, database: Database) -> None:
    """The simple claim job is distribute() in a loop"""
    events = sync_bus.buffer("events", size=4, max_age=NEVER)
    ids = [events.add({"n": 0}), *events.add_many({"n": n} for n in range(1, 10))]
    assert events.distribute() == 2
    assert events.flush() == 2
    assert events.distribute() == 1
    assert events.distribute() == 0
    assert groups(database) == [ids[:4], ids[4:8], ids[8:]]
    events.add({})
    called: list[UUID] = []
    assert events.claim(lambda group_id, conn: called.append(group_id)) == [ids[-1] + 1]
    assert len(called) == 1
    status = events.status()
    assert (status.waiting, status.grouped, status.groups_ready) == (0, 11, 4)
    assert sync_bus.buffers.list() == [status]


# -- status -----------------------------------------------------------------------------------------------------


async def test_the_status_tells_what_waits_and_where_the_groups_are(
    bus: CommandBus, events: Buffer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = await events.status()
    assert (nothing.waiting, nothing.oldest, nothing.items_per_call, nothing.calls_saved) == (0, None, None, 0)
    await events.add_many(range(34))
    await events.distribute()
    oldest = database.value("SELECT min(created_at) FROM busload.buffered WHERE group_id IS NULL")
    status = await events.status()
    assert (status.waiting, status.waiting_capped, status.oldest, status.grouped) == (4, False, oldest, 30)
    assert (status.groups_ready, status.groups_running, status.groups_retrying) == (3, 0, 0)
    database.perform(buffer_status.count([("events", 2, 30, 1)]))
    database.perform(buffer_status.count([("events", 1, 3, 0)]))
    status = await events.status()
    assert (status.calls, status.done, status.vanished) == (3, 33, 1)
    assert (status.items_per_call, status.calls_saved) == (11, 30)
    monkeypatch.setattr(buffer_status, "COUNTED", 2)
    status = await events.status()
    assert (status.waiting, status.waiting_capped) == (2, True)


async def test_the_list_names_buffers_that_nobody_has_served_yet(bus: CommandBus, table: str) -> None:
    for name in ("b", "a", "c"):
        await bus.buffer(name).add(1)
    theirs = bus.buffer("theirs", table=table)
    await theirs.add({"activity_id": 1})
    await theirs.distribute()
    assert [(one.name, one.table, one.waiting) for one in await bus.buffers.list()] == [
        ("a", None, 1),
        ("b", None, 1),
        ("c", None, 1),
        ("theirs", "public.activity_events", 1),
    ]


async def test_events_that_another_client_wrote_spoil_no_list(bus: CommandBus, database: Database) -> None:
    """Whatever they called the buffer"""
    database.rows("INSERT INTO busload.buffered (buffer, data, bytes) VALUES ('no name!', '1', 1), ('', '1', 1)")
    assert [(one.name, one.waiting, one.problem) for one in await bus.buffers.list()] == [
        ("", 1, None),
        ("no name!", 1, None),
    ]


async def test_a_buffer_whose_table_is_gone_spoils_no_list(bus: CommandBus, database: Database, table: str) -> None:
    theirs = bus.buffer("theirs", table=table, max_age=timedelta(0))
    await bus.buffer("own").add(1)
    await theirs.add({"activity_id": 1})
    assert await theirs.distribute() == 1
    database.rows("DROP TABLE activity_events")
    own, gone = await bus.buffers.list()
    assert (own.waiting, own.problem) == (1, None)
    assert gone.problem is not None and "There is no table" in gone.problem
    assert (gone.groups_ready, gone.waiting) == (1, 0)
    with pytest.raises(InvalidOperationError, match="no table"):
        await theirs.status()


async def test_a_locked_table_holds_up_no_list(bus: CommandBus, dsn: str, table: str) -> None:
    """A migration: its buffer says so, the others are counted"""
    theirs = bus.buffer("theirs", table=table, max_age=timedelta(0))
    await bus.buffer("own").add(1)
    await theirs.add({"activity_id": 1})
    await theirs.distribute()
    with psycopg.connect(dsn) as conn:
        conn.execute("LOCK TABLE activity_events")
        own, locked = await bus.buffers.list()
        assert (own.waiting, own.problem) == (1, None)
        assert locked.problem is not None and "locked" in locked.problem
        assert (locked.table, locked.groups_ready) == ("public.activity_events", 1)
        assert await theirs.status() == locked
        conn.rollback()
    assert (await theirs.status()).problem is None


async def test_who_only_knows_the_name_sees_and_flushes_an_applications_table(
    bus: CommandBus, dsn: str, table: str
) -> None:
    """As the CLI does: what a worker has declared stays as it is"""
    theirs = bus.buffer("theirs", table=table, size=7, max_age=NEVER, partition_by="tenant")
    await theirs.add({"activity_id": 1, "tenant": 1})
    await theirs.distribute()
    async with CommandBus(dsn) as other:
        by_name = other.buffer("theirs")
        status = await by_name.status()
        assert (status.waiting, status.table, status.size) == (1, "public.activity_events", 7)
        assert await by_name.flush() == 1
        assert await by_name.status() == status
    assert await theirs.distribute() == 1


# -- an application's table -------------------------------------------------------------------------------------


async def test_a_table_of_ones_own_behaves_the_same(bus: CommandBus, database: Database, table: str) -> None:
    """Rows that ordinary tools insert, with their foreign keys"""
    events = bus.buffer("events", table=table, size=3, max_age=NEVER, partition_by="tenant")
    database.rows("INSERT INTO activity_events (activity_id, tenant) SELECT n, n % 2 FROM generate_series(1, 7) AS n")
    database.rows("INSERT INTO activity_events (activity_id) SELECT n FROM generate_series(1, 4) AS n")
    assert await events.distribute() == 3
    assert sorted(groups(database, table)) == [[1, 3, 5], [2, 4, 6], [8, 9, 10]]
    assert await events.flush() == 2
    assert await events.distribute() == 2
    assert sorted(groups(database, table), key=lambda ids: (len(ids), ids))[:2] == [[7], [11]]
    kept = database.rows(
        "SELECT relation, id_column, group_column, created_column, partition_column FROM busload.buffer"
    )
    assert kept == [("public.activity_events", "id", "group_id", "created_at", "tenant")]


async def test_events_can_be_added_to_a_table_of_ones_own(bus: CommandBus, dsn: str, table: str) -> None:
    """The keys are columns; a foreign key is heeded, and the caller's transaction survives it"""
    events = bus.buffer("events", table=BufferTable(table, key="activity_id"))
    assert await events.add({"activity_id": 1, "tenant": 5}) == 1
    assert await events.add_many([{"activity_id": 2}, {"tenant": 7}], key=None) == [2, 3]
    assert await events.add({"tenant": 1}, key="4") == 4
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            await events.add({"activity_id": 4711}, conn=conn)
        await events.add({"activity_id": 3}, conn=conn)
        await conn.rollback()
    with pytest.raises(psycopg.errors.GeneratedAlways):
        await events.add({"id": 1})
    for bad in ({"nobody": 1}, {"group_id": uuid4()}):
        with pytest.raises(InvalidOperationError, match="has no column"):
            await events.add(bad)
    worse: Any
    for worse in ({}, [], 7, {1: 2}):
        with pytest.raises(InvalidCommandError, match="wanted a dict of columns"):
            await events.add(worse)
    with pytest.raises(InvalidCommandError, match="no column for it"):
        await bus.buffer("keyless", table=table).add({"tenant": 1}, key="4")
    assert (await events.status()).waiting == 4


async def test_a_row_may_come_with_its_id_and_with_any_json(bus: CommandBus, database: Database) -> None:
    database.rows(
        """CREATE TABLE t (id uuid PRIMARY KEY, a json, b jsonb, c int[], d jsonb, group_id uuid,
                           created_at timestamptz NOT NULL DEFAULT now())"""
    )
    events, id = bus.buffer("events", table="t"), uuid4()
    assert await events.add({"id": id, "a": [1, "x"], "b": 7, "c": [1, 2], "d": "text"}) == id
    assert await events.add_many([{"id": uuid4(), "a": {"n": None}, "b": None, "d": True}])
    rows = database.rows("SELECT a, b, c, d, b IS NULL FROM t ORDER BY b NULLS LAST")
    assert rows == [([1, "x"], 7, [1, 2], "text", False), ({"n": None}, None, None, True, True)]


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"n": object()}, "/data/n"),
        ({"x": "a\0b"}, "/data/x"),
        ({"j": {"a": object()}}, "/data/j"),
        ({"x": "\ud800"}, "/data/x"),
    ],
    ids=["object", "nul", "json", "surrogate"],
)
async def test_a_value_that_cannot_be_sent_is_named(
    bus: CommandBus, database: Database, row: dict[str, Any], path: str
) -> None:
    """The event by its number, the column, and nothing written"""
    database.rows(
        """CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int, x text, j jsonb, group_id uuid,
                           created_at timestamptz NOT NULL DEFAULT now())"""
    )
    events = bus.buffer("events", table="t")
    with pytest.raises(InvalidCommandError, match="wanted a value that PostgreSQL can hold") as refused:
        await events.add_many([{"n": 1}, {"n": 2, **row}])
    assert [(problem.index, problem.path) for problem in refused.value.problems] == [(1, path)]
    with pytest.raises(InvalidCommandError):
        await events.add(row)
    assert database.value("SELECT count(*) FROM t") == 0


@pytest.mark.parametrize(("type", "one", "two"), [("char(4)", "ab", "abcd"), ("bit(3)", "101", "110")])
async def test_types_with_a_length_keep_it(
    bus: CommandBus, given: Given, database: Database, type: str, one: str, two: str
) -> None:
    """As id, as partition, as key and as any other column: nothing is cut off, and everything leaves"""
    database.rows(
        f"""CREATE TABLE t (id {type} PRIMARY KEY, tenant {type}, subject {type}, plain {type}, group_id uuid,
                            created_at timestamptz NOT NULL DEFAULT clock_timestamp())"""
    )
    table = BufferTable("t", key="subject")
    events = bus.buffer("events", table=table, partition_by="tenant", merge="keep_last", max_age=timedelta(0))
    seen: list[tuple[str, str | None, str]] = []

    @events.handler()
    async def handle(group: Group, ctx: Any) -> None:
        seen.extend((item.id.strip(), item.key, item.data["plain"].strip()) for item in group)
        for item in group:
            group.succeed(item)

    for text in (one, two):
        assert await events.add({"id": text, "tenant": text, "subject": text, "plain": text}) is not None
    assert [text.strip() for (text,) in database.rows("SELECT plain::text FROM t ORDER BY created_at")] == [one, two]
    await given.drained(domains=None)
    assert sorted(seen) == [(one, one, one), (two, two, two)]
    assert database.value("SELECT count(*) FROM t") == 0


async def test_what_is_too_long_is_refused_and_not_cut_off(bus: CommandBus, database: Database) -> None:
    database.rows(
        """CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, x varchar(3), group_id uuid,
                           created_at timestamptz NOT NULL DEFAULT now())"""
    )
    with pytest.raises(psycopg.errors.StringDataRightTruncation):
        await bus.buffer("events", table="t").add({"x": "abcd"})


async def test_a_time_without_a_zone_that_is_yet_to_come_is_due(bus: CommandBus, database: Database) -> None:
    """It was written in a zone that nobody knows of: better too soon than hours late"""
    database.rows("CREATE TABLE naive (id int PRIMARY KEY, group_id uuid, created_at timestamp NOT NULL)")
    events = bus.buffer("events", table="naive", max_age=timedelta(hours=1))
    database.rows("INSERT INTO naive VALUES (1, NULL, (now() + interval '9 hours') AT TIME ZONE 'UTC')")
    assert await events.distribute() == 1
    database.rows("INSERT INTO naive VALUES (2, NULL, (now() - interval '1 minute') AT TIME ZONE 'UTC')")
    assert await events.distribute() == 0


async def test_times_without_a_zone_never_make_an_event_late(bus: CommandBus, dsn: str, database: Database) -> None:
    """Some write them in UTC, some in the server's zone"""
    database.rows("CREATE TABLE naive (id int PRIMARY KEY, group_id uuid, created_at timestamp NOT NULL)")
    events = bus.buffer("events", table="naive", max_age=timedelta(hours=1))
    for n, zone in enumerate(["Asia/Tokyo", "UTC", "America/New_York"]):
        name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        database.rows(f"""ALTER DATABASE "{name}" SET timezone = '{zone}'""")
        for written_in in {zone, "UTC"}:
            database.rows("DELETE FROM naive")
            when = f"(now() - interval '61 minutes') AT TIME ZONE '{written_in}'"
            database.rows(f"INSERT INTO naive VALUES ({n}, NULL, {when})")
            async with CommandBus(dsn) as there:
                again = there.buffer("events", table="naive", max_age=timedelta(hours=1))
                assert await again.distribute() == 1, (zone, written_in)
    assert (await events.status()).waiting == 0


async def test_a_column_may_be_called_like_a_place_in_a_statement(bus: CommandBus, database: Database) -> None:
    database.rows(
        """CREATE TABLE t (id int PRIMARY KEY, group_id uuid, created_at timestamptz NOT NULL DEFAULT now(),
                           "{id}" int, "%(v0)s" text, "{values}" jsonb)"""
    )
    database.rows("ALTER TABLE t ALTER id ADD GENERATED ALWAYS AS IDENTITY")
    events = bus.buffer("events", table="t")
    assert await events.add({"{id}": 7, "%(v0)s": "x", "{values}": {"a": 1}}) == 1
    assert database.rows('SELECT "{id}", "%%(v0)s", "{values}" FROM t WHERE %s', True) == [(7, "x", {"a": 1})]


NAMES = ['we"ird', "Order Events", "x; DROP TABLE activity", "a%(b)s%%c", "{table}", "täble", "select", "x.y"]


@pytest.mark.parametrize("name", NAMES)
async def test_no_name_can_become_sql(bus: CommandBus, database: Database, name: str) -> None:
    """Table, columns and schema may be called what they like; PostgreSQL quotes them"""
    quoted = '"' + name.replace('"', '""') + '"'
    database.rows(
        f"CREATE TABLE {quoted} (id int PRIMARY KEY, group_id uuid, created_at timestamptz NOT NULL DEFAULT now())"
    )
    database.rows(f"ALTER TABLE {quoted} RENAME group_id TO {quoted}")
    database.rows(f"""ALTER TABLE {quoted} ADD COLUMN "{(name + "2").replace('"', '""')}" text""")
    table = BufferTable(name, group_id=name, key=name + "2")
    events = bus.buffer("events", table=table, partition_by=name + "2", merge="keep_last", max_age=timedelta(0))
    for statement in database.perform(ddl(table, partition_by=name + "2")):
        database.rows(statement)
    assert database.perform(ddl(table, partition_by=name + "2")) == []
    database.rows(f"INSERT INTO {quoted} VALUES (1), (2)")
    assert await events.distribute() == 1
    status = await events.status()
    assert (status.waiting, status.grouped) == (0, 2)
    assert (await bus.buffers.list())[0].grouped == 2


@pytest.mark.parametrize("name", ["a'b", 'a"', "a.b.c.d.e", "pg_class; SELECT 1", "--", "%s", "{id}", "''", "a b"])
async def test_a_name_that_is_none_is_simply_not_found(bus: CommandBus, name: str) -> None:
    with pytest.raises(InvalidOperationError, match="There is no table"):
        await bus.buffer("events", table=name).distribute()


async def test_a_table_is_found_in_its_schema_and_in_any_case(bus: CommandBus, database: Database) -> None:
    database.rows('CREATE SCHEMA "Sales"')
    columns = "(id int PRIMARY KEY, group_id uuid, created_at timestamptz NOT NULL DEFAULT now())"
    for spelled in ('"Sales".events', '"Sales"."Events"', "plain"):
        database.rows(f"CREATE TABLE {spelled} {columns}")
    found = {}
    for name in ('"Sales".events', '"Sales".EVENTS', '"Sales"."Events"', "plain", "PLAIN", "public.plain"):
        found[name] = database.perform(find(BufferSettings("events", table=BufferTable(name)))).table
    assert list(found.values()) == ['"Sales".events'] * 2 + ['"Sales"."Events"'] + ["public.plain"] * 3


@pytest.mark.parametrize(
    ("create", "options", "said"),
    [
        ("CREATE TABLE t (x int)", {}, "no column 'id'.*no column 'group_id'.*no column 'created_at'"),
        ("CREATE VIEW t AS SELECT 1 AS id", {}, "it is no table"),
        ("CREATE TABLE t (id int, group_id uuid, created_at timestamptz NOT NULL)", {}, "'id'.*is not unique"),
        ("CREATE TABLE t (id int UNIQUE, group_id uuid, created_at timestamptz NOT NULL)", {}, "'id'.*is not unique"),
        (
            "CREATE TABLE t (id int, x int, group_id uuid, created_at timestamptz NOT NULL, PRIMARY KEY (id, x))",
            {},
            "'id'.*is not unique",
        ),
        ("CREATE TABLE t (id int PRIMARY KEY, group_id text, created_at timestamptz NOT NULL)", {}, "wanted uuid"),
        (
            "CREATE TABLE t (id int PRIMARY KEY, group_id uuid NOT NULL, created_at timestamptz NOT NULL)",
            {},
            "must not be null",
        ),
        ("CREATE TABLE t (id int PRIMARY KEY, group_id uuid, created_at date NOT NULL)", {}, "of type date"),
        ("CREATE TABLE t (id int PRIMARY KEY, group_id uuid, created_at timestamptz)", {}, "may be null"),
        (
            "CREATE TABLE t (id int PRIMARY KEY, group_id uuid, created_at timestamptz NOT NULL)",
            {"partition_by": "tenant"},
            "no column 'tenant'.*partition_by",
        ),
    ],
    ids=range(10),
)
async def test_an_unfit_table_is_refused_with_what_it_lacks(
    bus: CommandBus, database: Database, create: str, options: dict[str, Any], said: str
) -> None:
    """What was found, what was wanted, and the command that prints what to do; whoever touches it first"""
    database.rows(create)
    events = bus.buffer("events", table="t", **options)
    for call in (events.distribute, events.status, events.flush, lambda: events.claim(print)):
        with pytest.raises(InvalidOperationError, match=rf"(?s){said}.*busload buffer ddl t"):
            await call()
    assert database.everything()["buffer"] == 0


@pytest.mark.parametrize(
    "columns",
    [
        "id int, group_id uuid, created_at timestamptz NOT NULL",
        "id int UNIQUE, group_id uuid, created_at timestamptz NOT NULL",
        "id int, x int PRIMARY KEY, group_id uuid, created_at timestamptz NOT NULL",
        "id int, x int, group_id uuid, created_at timestamptz NOT NULL, PRIMARY KEY (id, x)",
        "x int PRIMARY KEY",
        "id int PRIMARY KEY, group_id varchar(36) NOT NULL, created_at timestamptz NOT NULL",
        "id int PRIMARY KEY, group_id uuid NOT NULL, created_at date",
        "id int PRIMARY KEY, group_id uuid, created_at timestamp",
        '"id" int PRIMARY KEY, group_id char(36), created_at date NOT NULL',
    ],
)
def test_what_ddl_prints_makes_an_unfit_table_fit(database: Database, columns: str) -> None:
    """All that the start of a worker complains about"""
    database.rows(f"CREATE TABLE t ({columns})")
    settings = BufferSettings("events", table=BufferTable("t"))
    with pytest.raises(InvalidOperationError):
        database.perform(find(settings))
    for statement in database.perform(ddl(BufferTable("t"))):
        assert not statement.startswith("--")
        database.rows(statement)
    database.perform(find(settings))
    assert database.perform(ddl(BufferTable("t"))) == []


def test_ddl_says_what_only_a_person_can_mend(database: Database) -> None:
    database.rows("CREATE TABLE t (id int PRIMARY KEY, group_id bigint, created_at int)")
    lines = [line for line in database.perform(ddl(BufferTable("t"))) if line.startswith("--")]
    assert [line.split(": ")[1] for line in lines] == [
        "the column group_id is of type bigint, wanted uuid",
        "the column created_at is of type integer, wanted timestamptz",
    ]
    database.rows("CREATE VIEW v AS SELECT * FROM t")
    assert "no table that rows can be locked in" in database.perform(ddl(BufferTable("v")))[0]
    with pytest.raises(InvalidOperationError, match=r"no column 'k' \(key\) and none 'p' \(partition_by\); it has id"):
        database.perform(ddl(BufferTable("t", key="k"), partition_by="p"))


@pytest.mark.parametrize("column", ["group_id", '"NOT (group_id IS NULL"'])
@pytest.mark.parametrize(
    ("waits", "grouped", "fit"),
    [
        ("{} IS NULL", "{} IS NOT NULL", True),
        ("NOT {} IS NOT NULL", "NOT {} IS NULL", True),  # as Django spells Q(group_id__isnull=...) and its negation
        ("NOT NOT {} IS NULL", "NOT (NOT (NOT {} IS NULL))", True),
        ("({} IS NULL) = true", "({} IS NULL) = false", True),
        ("{} IS NOT DISTINCT FROM NULL", "({} IS NULL) <> true", True),
        ("NOT {} IS NULL", "NOT {} IS NOT NULL", False),
        ("({} IS NULL) AND id > 7", "({} IS NOT NULL) AND id > 7", False),
        ("({} IS NULL) = (id > 7)", "id > 7", False),
    ],
)
def test_an_index_fits_if_postgresql_uses_it_however_its_condition_is_spelled(
    database: Database, column: str, waits: str, grouped: str, fit: bool
) -> None:
    name = column.strip('"')
    database.rows(f"CREATE TABLE t (id int NOT NULL, {column} uuid, created_at timestamptz NOT NULL, UNIQUE (id))")
    database.rows(f"CREATE INDEX waits ON t (created_at, id) WHERE {waits.format(column)}")
    database.rows(f"CREATE INDEX grouped ON t ({column}) WHERE {grouped.format(column)}")
    lacking = [line for line in database.perform(ddl(BufferTable("t", group_id=name))) if "INDEX" in line]
    assert len(lacking) == (0 if fit else 2)
    waiting = f"SELECT * FROM t WHERE {column} IS NULL ORDER BY created_at LIMIT 1"
    taken = f"SELECT * FROM t WHERE {column} = gen_random_uuid()"
    for scan in ("seqscan", "bitmapscan", "sort"):
        database.rows(f"SET enable_{scan} = off")
    for index, statement in (("waits", waiting), ("grouped", taken)):
        used = any(f"using {index} on t" in line for (line,) in database.rows(f"EXPLAIN {statement}"))
        assert used == fit


def test_ddl_prints_what_a_table_lacks_and_no_more(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """What it prints can be run, and then there is nothing left to print"""
    database.rows("CREATE TABLE t (contact_id bigint)")
    table = BufferTable("t", key="contact_id")
    settings = BufferSettings("events", table=table, merge="keep_last")
    with pytest.raises(InvalidOperationError, match="no table 'u'"):
        database.perform(ddl(BufferTable("u")))
    statements = database.perform(ddl(table))
    assert [statement.split(" ON ")[0].split(" ADD ")[0] for statement in statements] == [
        *["ALTER TABLE public.t"] * 3,
        *["CREATE INDEX"] * 4,
    ]
    for statement in statements[:3]:
        database.rows(statement)
    with caplog.at_level(logging.WARNING, "busload"):
        database.perform(event_table.check(settings))
    assert "CREATE INDEX ON public.t (created_at, id) WHERE group_id IS NULL;" in caplog.text
    for statement in statements[3:]:
        database.rows(statement)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "busload"):
        database.perform(event_table.check(settings))
    assert caplog.text == ""
    assert database.perform(ddl(table)) == []
    everything = all_ddl(table)
    assert [line.replace("public.", "") for line in statements] == everything[:7]
    assert everything[7].startswith("-- optional")


# -- what it costs ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["own", "theirs"])
def waiting(request: pytest.FixtureRequest, dsn: str, database: Database) -> Any:
    """Fills a buffer with that many events, of which as many again have left before; returns what a look and a claim
    of a thousand cost there."""

    def cost(count: int) -> tuple[int, int]:
        settings = BufferSettings("events", size=1000, max_groups=20, max_age=NEVER)
        if request.param == "theirs":
            database.rows("DROP TABLE IF EXISTS t")
            database.rows("CREATE TABLE t (data text)")
            settings = BufferSettings("events", size=1000, max_groups=20, max_age=NEVER, table=BufferTable("t"))
            for statement in all_ddl(BufferTable("t")):
                database.rows(statement)
            database.rows("ALTER TABLE t SET (autovacuum_enabled = false)")
            fill, table = "INSERT INTO t (data) SELECT 'x' FROM generate_series(1, %s)", "t"
        else:
            database.rows("TRUNCATE busload.buffered")
            database.rows("ALTER TABLE busload.buffered SET (autovacuum_enabled = false)")
            table = "busload.buffered"
            fill = f"INSERT INTO {table} (buffer, data, bytes) SELECT 'events', '{{}}', 2 FROM generate_series(1, %s)"
        database.rows(fill, 2 * count)
        database.rows(f"ANALYZE {table}")
        half = f"id <= (SELECT min(id) FROM {table}) + {count} - 1"
        database.rows(f"UPDATE {table} SET group_id = gen_random_uuid() WHERE {half}")
        until(lambda: vacuumed(database, table))
        with psycopg.connect(dsn) as conn:
            for setting in ("plan_cache_mode = force_generic_plan", "jit = off", "enable_seqscan = off"):
                conn.execute(f"SET {setting}".encode())
            at = perform(conn, find(settings))
            pages(conn, next(buffer.Round(settings, at).plans()))  # the catalogues are in memory from now on
            look, claim, *_ = [pages(conn, plan) for plan in buffer.Round(settings, at).plans()]
        return look, claim

    return cost


def test_a_claim_costs_the_same_however_many_wait(waiting: Any) -> None:
    """Neither the look nor the claim counts the backlog; ten thousand against a hundred thousand

    Each of the two descents of the look finds the index one level deeper.
    """
    few, many = waiting(10_000), waiting(100_000)
    assert many[0] <= few[0] + 2
    assert many[1] <= 1.3 * few[1]


def test_a_statement_that_needs_a_column_the_table_lacks_says_so(database: Database) -> None:
    database.rows(TABLE)
    keyless = database.perform(find(BufferSettings("events", table=BufferTable("activity_events"))))
    with pytest.raises(InvalidOperationError, match="has no key_column"):
        keyless.spell(b"SELECT {key_column}")
    assert OWN.spell(b"SELECT '{}', {id}") == b"SELECT '{}', id"

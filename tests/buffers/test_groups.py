"""How the events of a group leave it, and what fences that: the lease of its command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from busload import CommandBus
from busload.buffers import Buffer, BufferTable, event_table
from busload.buffers import groups as group
from busload.buffers.declaration import BufferSettings
from busload.buffers.event_table import OWN
from busload.buffers.groups import Ending, RunningGroup
from busload.commands import claim, rescue
from busload.commands.execution import COMPLETED, FAILED_ATTEMPT, TROUBLESHOOTING, Leased, Transition
from busload.errors import SupersededError
from busload.postgres.plan import Plan
from busload.sync.plan import perform
from tests.given import Database, Given

EVENTS = "contact_events"


async def taken(given: Given, events: Buffer, worker: int, payloads: list[Any]) -> RunningGroup:
    """A group that a worker has claimed."""
    await events.add_many(payloads)
    await events.distribute()
    [leased] = given.database.perform(claim.claim(worker=worker, domains=[EVENTS], limit=1)).leased
    return RunningGroup(replace(OWN, buffer=EVENTS), leased, archive=True, partition="p")


def conclusion(leased: Leased, outcome: str = COMPLETED, **more: Any) -> Callable[[int], Transition]:
    return lambda done: Transition(leased, outcome, json.dumps({"done": done}), **more)


def ids(database: Database, running: RunningGroup) -> list[int]:
    return [
        id
        for (id,) in database.rows("SELECT id FROM busload.buffered WHERE group_id = %s ORDER BY id", running.group_id)
    ]


async def test_a_lost_answer_to_the_end_of_a_group_is_said_again_and_counts_once(
    bus: CommandBus, given: Given, database: Database
) -> None:
    running = await taken(given, bus.buffer(EVENTS, size=2), given.registered_worker(), ["a", "b"])
    ending, conclude = Ending(done=None, expected=2), conclusion(running.leased)
    first = database.perform(group.finish(running, ending, conclude, 0.0, fenced=False))
    again = database.perform(group.finish(running, ending, conclude, 0.0, fenced=False))
    assert (first.done, first.credited, again.done, again.credited, again.missing) == (2, True, 0, True, 0)
    assert database.rows("SELECT details FROM busload.execution") == [({"done": 2},)]
    assert database.count("buffer_archive") == 2
    database.check_invariants()


@pytest.mark.parametrize("fenced", [False, True])
async def test_after_the_lease_was_lost_nothing_is_settled_parted_or_parked(
    bus: CommandBus, given: Given, database: Database, fenced: bool
) -> None:
    """What was delivered leaves all the same, unless what was written for it belongs to the same transaction."""
    worker = given.registered_worker()
    running = await taken(given, bus.buffer(EVENTS, size=4), worker, [1, 2, 3, 4])
    given.died(worker)
    given.rescued()
    before = database.everything()
    ending = Ending(done=[1], expected=1, left=1, parted=[2], parted_error="{}", exhausted=True, hook=True, delete=True)
    conclude = conclusion(running.leased, TROUBLESHOOTING, reason="EXHAUSTED")
    plan = group.finish(running, ending, conclude, 0.0, fenced=fenced)
    if fenced:
        with pytest.raises(SupersededError):
            database.perform(plan)
        assert database.everything() == before
        return
    ended = database.perform(plan)
    assert (ended.done, ended.credited) == (1, False)
    assert ids(database, running) == [2, 3, 4]
    changed = {table for table, count in database.everything().items() if count != before[table]}
    assert changed == {"buffered", "buffer_archive"}
    assert database.perform(group.halve(running, [3, 4], 1)) is False and ids(database, running) == [2, 3, 4]
    database.check_invariants()


async def test_a_lease_that_comes_back_while_its_group_ends_leaves_no_event_behind(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """A worker that was silent gets its lease back after the end of its group has found none."""
    worker = given.registered_worker()
    running = await taken(given, bus.buffer(EVENTS, size=2), worker, ["a", "b"])
    lease = running.leased.lease
    given.died(worker)
    given.rescued()

    def come_back() -> None:
        mine, loads = [lease.lease_id], [running.leased.id >> 10]
        again = rescue.resume(worker=given.registered_worker(), dead=[worker], leases=mine, whole=mine, loads=loads)
        assert database.perform(again) == {lease.lease_id}

    def interrupted(plan: Plan[Any]) -> Plan[Any]:
        found = yield next(plan)
        assert found == [], "the lease is lost"
        come_back()
        while True:
            try:
                found = yield plan.send(found)
            except StopIteration as end:
                return end.value

    plan = group.finish(running, Ending(done=None, expected=2), conclusion(running.leased), 0.0, fenced=False)
    with psycopg.connect(dsn) as conn:
        perform(conn, interrupted(plan))
    status = database.value("SELECT status FROM busload.command_status WHERE command_id = %s", running.group_id)
    assert (status, ids(database, running)) == ("IN_PROGRESS", []), "delivered events leave, and the command runs on"
    database.check_invariants()


async def test_halving_makes_a_suspect_of_each_half(bus: CommandBus, given: Given, database: Database) -> None:
    running = await taken(given, bus.buffer(EVENTS, size=4), given.registered_worker(), [1, 2, 3, 4])
    database.rows("UPDATE busload.lease SET crashes = 2")
    assert database.perform(group.halve(running, [3, 4], 2)) is True
    assert ids(database, running) == [1, 2] and database.value("SELECT crashes FROM busload.lease") == 1
    [(other,)] = database.rows("SELECT DISTINCT group_id FROM busload.buffered WHERE id > 2")
    told = database.rows(
        "SELECT c.command_id, c.data, q.crashes, q.attempt"
        " FROM busload.queue AS q JOIN busload.command AS c ON c.id = q.lo"
    )
    assert told == [(other, {"buffer": EVENTS, "items": 2, "partition": "p", "table": None}, 1, 1)]
    mine = database.value("SELECT data FROM busload.command WHERE command_id = %s", running.group_id)
    assert mine == {"buffer": EVENTS, "items": 2, "partition": "p", "table": None}
    database.check_invariants()


async def test_the_end_of_a_group_is_one_transaction(
    bus: CommandBus, given: Given, database: Database, dsn: str
) -> None:
    """Rolled back, everything is where it was; an event is never deleted without its settlement."""
    running = await taken(given, bus.buffer(EVENTS, size=4), given.registered_worker(), [1, 2, 3, 4])
    before = database.everything()
    ending = Ending(done=[1, 2], expected=2, left=1, parted=[3], parted_error='{"type": "E", "message": "m"}')
    conclude = conclusion(running.leased, FAILED_ATTEMPT, delay=0.0)
    with psycopg.connect(dsn) as conn:
        perform(conn, group.finish(running, ending, conclude, 0.0, fenced=False))
        conn.rollback()
    assert database.everything() == before and ids(database, running) == [1, 2, 3, 4]
    database.perform(group.finish(running, ending, conclude, 0.0, fenced=False))
    assert ids(database, running) == [4] and database.count("troubleshooting") == database.count("scheduled") == 1
    database.check_invariants()


@pytest.mark.parametrize("kind", ["integer", "uuid", "text", "numeric", "timestamptz", "grade"])
async def test_ids_of_any_type_come_back_to_their_rows(
    bus: CommandBus, given: Given, database: Database, kind: str
) -> None:
    database.rows("CREATE TYPE grade AS ENUM ('a', 'b', 'c')")
    values = {
        "integer": "VALUES (1), (2), (3)",
        "uuid": "SELECT gen_random_uuid() FROM generate_series(1, 3)",
        "text": "VALUES ('x'), ('y'''), ('')",
        "numeric": "VALUES (1.5), (10000000000000000000000), (-3)",
        "timestamptz": "SELECT now() + n * interval '1 microsecond' FROM generate_series(1, 3) AS n",
        "grade": "VALUES ('a'::grade), ('b'), ('c')",
    }
    database.rows(
        f'CREATE TABLE "Odd % Events" ("Id %" {kind} PRIMARY KEY, "my group" uuid,'
        " created_at timestamptz NOT NULL DEFAULT now())"
    )
    database.rows(f'INSERT INTO "Odd % Events" ("Id %") {values[kind]}')
    table = BufferTable("Odd % Events", id="Id %", group_id="my group")
    events = bus.buffer(EVENTS, size=3, table=table)
    await events.flush()
    assert await events.distribute() == 1
    [leased] = database.perform(claim.claim(worker=given.registered_worker(), domains=[EVENTS], limit=1)).leased
    at = database.perform(event_table.find(BufferSettings(EVENTS, table=table)))
    running = RunningGroup(at, leased, archive=True)
    rows = database.perform(group.read(at, leased.command_id))
    assert len(rows) == 3
    ended = database.perform(group.end_part(running, [rows[0].id], 2, fenced=True))
    assert (ended.done, ended.missing) == (1, 0)
    assert database.perform(group.halve(running, [rows[1].id], 1)) is True
    assert [row.id for row in database.perform(group.read(at, leased.command_id))] == [rows[2].id]
    assert database.count("buffer_archive") == 1

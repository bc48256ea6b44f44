"""What ended long ago is removed or archived; what is open, or belongs to something open, stays."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from busload import (
    BatchCommand,
    BusinessRuleError,
    Command,
    CommandBus,
    CommandStatus,
    Dedup,
    HandlerContext,
    InvalidCommandError,
    PermanentCommandError,
    RetryPolicy,
    SyncCommandBus,
    TransientCommandError,
    Worker,
    WorkerSettings,
)
from busload.commands import rescue, send_together, settle
from busload.commands.execution import COMPLETED, Transition
from busload.errors import InvalidOperationError
from busload.retention import Pruned, prune
from busload.retention.prune import Prune
from busload.sync.plan import perform
from tests.given import DOMAIN, Database, Given, eventually, raising

pytestmark = pytest.mark.usefixtures("invariants")

MONTH = timedelta(days=30)
AT_ONCE = timedelta(microseconds=1)
HISTORY = ("command", "execution", "event", "batch", "task")


def aged(database: Database, days: int = 31) -> None:
    """Move time: everything that there is happened so many days earlier."""
    for table, columns in {
        "command": ["created_at"],
        "execution": ["started_at", "finished_at"],
        "event": ["at"],
        "batch": ["created_at", "started_at", "completed_at", "sealed_at"],
        "task": ["held_until"],
    }.items():
        sets = ", ".join(f"{column} = {column} - interval '{days} days'" for column in columns)
        database.rows(f"UPDATE busload.{table} SET {sets}")


def left(database: Database) -> dict[str, int]:
    return {table: count for table in HISTORY if (count := database.count(table))}


def orphans(database: Database) -> list[tuple[Any, ...]]:
    """What refers to something that is no longer there."""
    return database.rows("""
        SELECT 'execution', command::text FROM busload.execution e
         WHERE NOT EXISTS (SELECT FROM busload.command c WHERE c.id = e.command)
        UNION ALL SELECT 'event', event::text FROM busload.event v
         WHERE lo IS NOT NULL AND NOT EXISTS (SELECT FROM busload.command c WHERE c.id BETWEEN v.lo AND v.hi)
        UNION ALL SELECT 'event of a batch', event::text FROM busload.event v
         WHERE lo IS NULL AND NOT EXISTS (SELECT FROM busload.batch b WHERE b.batch_id = v.batch_id)
        UNION ALL SELECT 'member', id::text FROM busload.command c
         WHERE batch_id IS NOT NULL AND NOT EXISTS (SELECT FROM busload.batch b WHERE b.batch_id = c.batch_id)
        UNION ALL SELECT 'here and in the archive', id::text FROM busload.command JOIN busload.archive USING (id)""")


async def ended_in_every_way(given: Given) -> list[UUID]:
    """Five commands without a batch: completed, completed after a retry, failed, completed and canceled by a person."""
    given.handler("Debit")
    given.handler("Refuse", raising(PermanentCommandError("no")))
    given.handler("Deny", raising(BusinessRuleError("no")))
    attempts: list[UUID] = []

    async def flaky(command: Command, ctx: HandlerContext) -> None:
        attempts.append(command.command_id)
        if len(attempts) == 1:
            raise TransientCommandError("not yet")

    given.handler("Flaky", flaky, retry=RetryPolicy(backoff=(0,)))
    ids = [await given.sent(kind) for kind in ("Debit", "Flaky", "Deny", "Refuse", "Refuse")]
    await given.drained()
    given.make_due()
    await given.drained()
    await given.bus.troubleshooting.complete(DOMAIN, ids[3], operator="ada")
    await given.bus.troubleshooting.cancel(DOMAIN, ids[4], reason="no", operator="ada")
    return ids


async def test_what_ended_long_ago_goes_with_its_executions_and_events(given: Given, database: Database) -> None:
    await ended_in_every_way(given)
    aged(database)

    assert await given.bus.prune(MONTH) == Pruned(commands=5, executions=6, events=2, batches=0)
    assert left(database) == {}
    assert await given.bus.prune(MONTH) == Pruned()


async def test_what_ended_later_stays_however_old_it_is(given: Given, database: Database) -> None:
    ids = await ended_in_every_way(given)
    aged(database, days=29)
    assert await given.bus.prune(MONTH) == Pruned()

    database.rows("UPDATE busload.command SET created_at = created_at - interval '1 year'")
    assert await given.bus.prune(MONTH) == Pruned()
    assert len([await given.command_now(command_id) for command_id in ids]) == 5


async def test_what_is_open_stays_in_whatever_place_it_is(given: Given, database: Database) -> None:
    """Queue, scheduled, a retry, a lease, troubleshooting; and everything can still run to its end"""
    given.handler("Refuse", raising(PermanentCommandError("no")))
    given.handler("Flaky", raising(TransientCommandError("not yet")), retry=RetryPolicy(backoff=(86_400,)))
    parked, retried = await given.sent("Refuse"), await given.sent("Flaky")
    await given.drained()
    running = await given.sent("Debit")
    assert [one.command_id for one in given.claimed()] == [running]
    later = await given.sent("Debit", run_at=await now_and(given, days=365))
    ready = await given.sent("Debit")
    aged(database, days=400)

    before = database.everything()
    assert await given.bus.prune(MONTH) == Pruned()
    assert database.everything() == before
    places = {id: (await given.command_now(id)).status for id in (parked, retried, running, later, ready)}
    assert list(places.values()) == [
        CommandStatus.IN_TROUBLESHOOTING_QUEUE,
        CommandStatus.SCHEDULED,
        CommandStatus.IN_PROGRESS,
        CommandStatus.SCHEDULED,
        CommandStatus.PENDING,
    ]


async def now_and(given: Given, *, days: int) -> Any:
    return given.database.value("SELECT now() + %s * interval '1 day'", days)


async def test_commands_go_only_together_with_their_batch(given: Given, database: Database) -> None:
    """Nine of ten have ended long ago, the tenth waits for a person"""
    given.handler("Debit")
    given.handler("Refuse", raising(PermanentCommandError("no")))
    commands = [BatchCommand("Debit") for _ in range(9)]
    batch_id = await given.bus.create_batch(DOMAIN, [*commands, BatchCommand("Refuse")])
    await given.drained()
    aged(database)
    assert await given.bus.prune(MONTH) == Pruned()

    [item] = await given.bus.troubleshooting.list(DOMAIN)
    await given.bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="no")
    assert await given.bus.prune(MONTH) == Pruned()
    assert len(await given.bus.list_batch_commands(DOMAIN, batch_id)) == 10

    aged(database)
    pruned = await given.bus.prune(MONTH)
    assert (pruned.commands, pruned.executions, pruned.batches) == (10, 10, 1)
    assert left(database) == {}


async def test_an_open_command_of_a_batch_that_says_it_is_complete_stays(given: Given, database: Database) -> None:
    """Other hands have put a command back into the queue: it stays, with its load and its batch, and can still run."""
    given.handler("Debit")
    await given.batch(1500)
    await given.drained()
    aged(database)
    [(id,)] = database.rows("""
        DELETE FROM busload.execution WHERE command = (SELECT min(id) + 7 FROM busload.command) RETURNING command""")
    database.rows(
        "INSERT INTO busload.queue (lo, hi, domain, batch_id)"
        " SELECT id, id, domain, batch_id FROM busload.command WHERE id = %s",
        id,
    )

    pruned = await given.bus.prune(MONTH)
    assert (pruned.commands, pruned.batches) == (500, 0)
    assert (database.count("command"), database.count("batch")) == (1000, 1)
    assert [one.id for one in given.claimed(1)] == [id]


async def test_an_open_batch_without_an_open_command_stays(given: Given, database: Database) -> None:
    given.handler("Debit")
    async with given.bus.open_batch(DOMAIN) as batch:
        await batch.add("Debit")
        await batch.checkpoint()
        await given.drained()
        aged(database)
        assert await given.bus.prune(MONTH) == Pruned()
        await batch.add("Debit")
    await given.drained()
    aged(database)
    assert (await given.bus.prune(MONTH)).commands == 2


async def test_a_canceled_batch_and_an_empty_one_go_too(given: Given, database: Database) -> None:
    batch_id = await given.batch(5)
    assert await given.bus.cancel_batch(DOMAIN, batch_id, reason="no") == 5
    async with given.bus.open_batch(DOMAIN):
        pass
    aged(database)
    pruned = await given.bus.prune(MONTH)
    assert (pruned.commands, pruned.executions, pruned.batches) == (5, 0, 2)
    assert left(database) == {}


@pytest.mark.parametrize("ending", ["queue", "troubleshooting", "ended a moment ago"])
async def test_a_batch_stays_while_its_callback_is_open(given: Given, database: Database, ending: str) -> None:
    given.handler("Debit")
    batch_id = await given.batch(3, on_complete=BatchCommand("Tell"))
    if ending == "troubleshooting":
        given.handler("Tell", raising(PermanentCommandError("no")))
    if ending == "ended a moment ago":
        await Worker(given.bus, domains=[DOMAIN], settings=given.settings).drain()
        aged(database)
        given.handler("Tell")
        given.make_due()
        await given.drained()
    else:
        await given.drained()
        aged(database)
    assert (await given.batch_now(batch_id)).status == "COMPLETED"
    before = database.everything()

    assert await given.bus.prune(MONTH) == Pruned()
    assert database.everything() == before
    database.check_invariants()


async def test_a_callback_that_has_ended_goes_with_its_batch_and_not_before_it(
    given: Given, database: Database
) -> None:
    """As long as a batch is shown, its callback is there"""
    given.handler("Debit")
    told = given.handler("Tell")
    batch_id = await given.batch(3, on_complete=BatchCommand("Tell"))
    await given.drained()
    aged(database)
    database.rows("UPDATE busload.batch SET completed_at = now()")
    assert await given.bus.prune(MONTH) == Pruned()
    database.check_invariants()

    aged(database)
    assert (await given.bus.prune(MONTH, dry_run=True)).commands == 4
    pruned = await given.bus.prune(MONTH)
    assert (pruned.commands, pruned.batches, len(told)) == (4, 1, 1)
    assert await given.bus.get_batch(DOMAIN, batch_id) is None
    assert left(database) == {}


async def test_a_dry_run_counts_what_will_go_and_changes_nothing(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "SLICE", 3)
    monkeypatch.setattr(prune, "PAGE", 2)
    await ended_in_every_way(given)
    for count in (1, 4, 2, 7):
        await given.batch(count, on_complete=BatchCommand("Debit"))
    canceled = await given.batch(6)
    await given.bus.cancel_batch(DOMAIN, canceled, reason="no")
    await given.drained()
    aged(database)
    await given.sent()
    before = database.everything()

    promised = await given.bus.prune(MONTH, dry_run=True)
    assert (promised.commands, promised.batches) == (29, 5)
    assert database.everything() == before
    assert database.value("SELECT count(*) FROM busload.batch WHERE pruned_at IS NOT NULL") == 0

    assert await given.bus.prune(MONTH) == promised
    assert left(database) == {"command": 1}


async def test_the_archive_keeps_each_command_once_with_its_history(given: Given, database: Database) -> None:
    """Accepted once, present once, the archive included"""
    ids = await ended_in_every_way(given)
    batch_id = await given.batch(3, name="Monthly", custom_data={"month": 5})
    await given.drained()
    aged(database)
    trails = {id: await given.bus.get_audit_trail(DOMAIN, id) for id in ids}
    accepted = set(database.rows("SELECT id, command_id, data::text, batch_id, created_at FROM busload.command"))

    pruned = await given.bus.prune(MONTH, archive=True)
    assert (pruned.commands, pruned.executions, pruned.batches) == (8, 9, 1)
    assert left(database) == {}
    archived = database.rows("SELECT id, command_id, data::text, batch_id, created_at FROM busload.archive")
    assert len(archived) == 8
    assert set(archived) == accepted
    for id, trail in trails.items():
        [(executions, events)] = database.rows(
            "SELECT executions, events FROM busload.archive WHERE domain = %s AND command_id = %s", DOMAIN, id
        )
        attempts = [event for event in trail if event.type == "RECEIVED"]
        assert [(e["attempt"], e["execution_id"], e["worker"]) for e in executions] == [
            (event.attempt, str(event.execution_id), event.worker) for event in attempts
        ]
        assert [(e["type"], e["operator"]) for e in events] == [
            (event.type, event.operator) for event in trail if event.operator
        ]
    [(found, name, custom_data, total, events)] = database.rows(
        "SELECT batch_id, name, custom_data, total_count, events FROM busload.archived_batch"
    )
    assert (found, name, custom_data, total) == (batch_id, "Monthly", {"month": 5}, 3)
    assert [event["type"] for event in events] == ["BATCH_SEALED", "BATCH_STARTED", "BATCH_COMPLETED"]


async def test_a_marked_batch_is_no_longer_shown(given: Given, database: Database) -> None:
    given.handler("Debit")
    batch_id, other = await given.batch(2), await given.batch(1)
    await given.drained()
    database.rows("UPDATE busload.batch SET pruned_at = now() WHERE batch_id = %s", batch_id)
    bus = given.bus
    assert await bus.get_batch(DOMAIN, batch_id) is None
    assert [batch.batch_id for batch in await bus.list_batches(DOMAIN)] == [other]
    assert await bus.list_batch_commands(DOMAIN, batch_id) == []
    assert await bus.list_batch_commands(DOMAIN, batch_id, status="COMPLETED") == []
    assert await bus.get_batch_audit_trail(DOMAIN, batch_id) == []
    assert len(await bus.list_batch_commands(DOMAIN, other, status="COMPLETED")) == 1


async def test_an_interrupted_prune_is_continued_by_the_next(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after each of its transactions in turn: what is shown is whole, and the next run removes the rest."""
    monkeypatch.setattr(prune, "SLICE", 1000)
    given.handler("Debit")
    for _ in range(3):
        await given.batch(2, on_complete=BatchCommand("Debit"))
    large = await given.batch(2500)
    for _ in range(3):
        await given.sent()
    await given.drained()
    aged(database)
    commands, removed, steps = database.count("command"), 0, 0
    while database.count("command"):
        steps += 1
        assert steps < 20, left(database)
        interrupted = prune.Pruning(MONTH, archive=True)
        plans = interrupted.plans()
        for _ in range(steps):
            if (plan := next(plans, None)) is not None:
                database.perform(plan)
        removed += interrupted.pruned.commands
        database.check_invariants()
        assert database.count("command") + database.count("archive") == commands
        shown = await given.bus.get_batch(DOMAIN, large)
        assert shown is None or len(await given.bus.list_batch_commands(DOMAIN, large, limit=9999)) == 2500
    assert steps > 4
    assert removed == commands
    rest = await given.bus.prune(MONTH, archive=True)
    assert rest.commands == 0
    assert left(database) == {}
    assert database.count("archived_batch") == 4


async def test_a_transaction_removes_few_commands_and_whole_loads(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "SLICE", 1500)
    given.handler("Debit")
    await given.batch(5000)
    await given.bus.send_many(DOMAIN, [BatchCommand("Debit") for _ in range(4000)])
    await given.drained()
    aged(database)
    pruning = prune.Pruning(MONTH)
    counts, before = [], 9000
    for plan in pruning.plans():
        database.perform(plan)
        now = database.count("command")
        counts.append(before - now)
        before = now
    assert [count for count in counts if count] == [2000, 2000, 1000, 2000, 2000]


async def test_an_event_about_several_commands_goes_with_the_last_of_them(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_together, "NEIGHBOURS_FOR", 60)
    for _ in range(3):
        await given.sent()
    leased = given.claimed(3)
    assert len({one.lease.lease_id for one in leased}) == 1
    database.perform(rescue.release([leased[0].lease.lease_id]))
    assert database.value("SELECT hi - lo + 1 FROM busload.event WHERE type = 'RELEASED'") == 3
    given.settled(given.claimed(1))
    aged(database)

    assert await given.bus.prune(MONTH, dry_run=True) == Pruned(commands=1, executions=1)
    assert await given.bus.prune(MONTH, archive=True) == Pruned(commands=1, executions=1)
    assert database.value("SELECT events -> 0 ->> 'type' FROM busload.archive") == "RELEASED"
    database.check_invariants()
    given.settled(given.claimed(2))
    aged(database)
    assert await given.bus.prune(MONTH) == Pruned(commands=2, executions=2, events=1)


async def test_a_lease_that_is_open_for_neighbours_stays_right(
    given: Given, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its worker settled and settles again, because the answer was lost, must not be counted twice."""
    monkeypatch.setattr(send_together, "NEIGHBOURS_FOR", 60)
    for _ in range(4):
        await given.sent()
    worker = given.registered_worker()
    leased = given.claimed(4, by=worker)
    assert len({one.lease.lease_id for one in leased}) == 1
    first = [Transition(one, COMPLETED) for one in leased[:2]]
    assert len(database.perform(settle.settle(first, now=0.0))) == 2
    aged(database)

    assert await given.bus.prune(MONTH) == Pruned()
    assert database.perform(settle.settle(first, now=0.0, again=True)) == {one.id for one in leased[:2]}
    assert database.value("SELECT open FROM busload.lease") == 2
    given.died(worker)
    assert given.rescued().commands == 2
    aged(database)
    assert (await given.bus.prune(MONTH)).commands == 2
    database.check_invariants()
    for _ in range(2):  # suspects by now: one at a time
        assert len(given.settled(given.claimed(4))) == 1
    aged(database)
    assert (await given.bus.prune(MONTH)).commands == 2
    assert left(database) == {}


async def test_a_rescue_passes_over_what_is_no_longer_there(given: Given, database: Database) -> None:
    """Other hands have removed a command in the middle of a lease: the rest of it goes back all the same."""
    for _ in range(3):
        await given.sent()
    worker = given.registered_worker()
    leased = given.claimed(3, by=worker)
    given.settled([leased[1]])
    assert database.perform(prune.Pruning(AT_ONCE)._remove([leased[1].id])).commands == 1
    given.died(worker)
    assert given.rescued().commands == 2
    database.check_invariants()
    assert {one.command_id for one in given.claimed(1) + given.claimed(1)} == {
        leased[0].command_id,
        leased[2].command_id,
    }


async def test_a_key_whose_holder_was_removed_is_free(given: Given, database: Database) -> None:
    given.handler("Debit")
    dedup = Dedup(window=timedelta(minutes=5))
    first = await given.bus.send(DOMAIN, "Debit", task_key="invoice:7", dedup=dedup)
    await given.drained()
    aged(database)
    assert (await given.bus.prune(MONTH)).commands == 1
    assert left(database) == {}

    again = await given.bus.send(DOMAIN, "Debit", task_key="invoice:7", dedup=dedup)
    assert again.created and again.command_id != first.command_id


async def test_a_holder_stays_as_long_as_the_window_of_its_key(given: Given, database: Database) -> None:
    """Whoever is told that it holds the key finds it there"""
    given.handler("Debit")
    dedup = Dedup(window=timedelta(days=100))
    first = await given.bus.send(DOMAIN, "Debit", task_key="invoice:7", dedup=dedup)
    await given.drained()
    aged(database)
    for dry_run in (True, False):
        assert (await given.bus.prune(MONTH, dry_run=dry_run)).commands == 0

    again = await given.bus.send(DOMAIN, "Debit", task_key="invoice:7", dedup=dedup)
    assert not again.created and again.command_id == first.command_id
    assert (await given.command_now(again.command_id)).status == "COMPLETED"
    aged(database, days=100)
    for dry_run in (True, False):
        assert (await given.bus.prune(MONTH, dry_run=dry_run)).commands == 1
    assert left(database) == {}


async def test_a_key_that_another_command_has_taken_stays_with_it(given: Given, database: Database) -> None:
    given.handler("Debit")
    dedup = Dedup(window=timedelta(0))
    await given.bus.send(DOMAIN, "Debit", task_key="invoice:7", dedup=dedup)
    await given.drained()
    aged(database)
    second = await given.bus.send(DOMAIN, "Debit", task_key="invoice:7", dedup=dedup)
    assert (await given.bus.prune(MONTH)).commands == 1
    assert not (await given.bus.send(DOMAIN, "Debit", task_key="invoice:7", dedup=dedup)).created
    assert database.rows("SELECT command_id FROM busload.task") == [(second.command_id,)]


async def test_the_id_of_a_removed_command_may_be_used_again(given: Given, database: Database) -> None:
    given.handler("Debit")
    command_id = uuid4()
    for _ in range(2):
        assert (await given.bus.send(DOMAIN, "Debit", command_id=command_id)).created
        await given.drained()
        aged(database)
        assert (await given.bus.prune(MONTH, archive=True)).commands == 1
    assert database.count("archive") == 2


@pytest.mark.parametrize("older_than", [timedelta(0), timedelta(days=-1), timedelta.max, 30, "30d", None])
async def test_an_age_that_is_none_is_refused(given: Given, sync_bus: SyncCommandBus, older_than: Any) -> None:
    given.handler("Debit")
    await given.sent()
    await given.drained()
    for message in ("found", "wanted a timedelta of more than zero"):
        with pytest.raises(InvalidCommandError, match=message) as refused:
            await given.bus.prune(older_than)
        assert (refused.value.problems[0].code, refused.value.problems[0].path) == ("INVALID_OPTION", "/older_than")
        with pytest.raises(InvalidCommandError, match=message):
            sync_bus.prune(older_than)
    with pytest.raises(InvalidCommandError, match="wanted True or False"):
        await given.bus.prune(MONTH, archive="no")  # type: ignore[arg-type]
    assert given.database.count("command") == 1


async def test_the_sync_bus_prunes_as_well(given: Given, sync_bus: SyncCommandBus, database: Database) -> None:
    await ended_in_every_way(given)
    aged(database)
    promised = await asyncio.to_thread(sync_bus.prune, MONTH, dry_run=True)
    assert await asyncio.to_thread(sync_bus.prune, MONTH, archive=True) == promised == Pruned(5, 6, 2, 0)
    assert database.count("archive") == 5


async def test_prunes_take_turns_and_a_dry_run_waits_for_nobody(given: Given, database: Database, dsn: str) -> None:
    """Another prune is in the middle of a transaction"""
    given.handler("Debit")
    await given.sent()
    await given.drained()
    aged(database)
    waiting = """
        SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
    with psycopg.connect(dsn) as conn:
        for plan in itertools.islice(prune.Pruning(MONTH).plans(), 2):
            perform(conn, plan)
        other = asyncio.create_task(given.bus.prune(MONTH))
        await eventually(lambda: database.rows(waiting))
        assert await given.bus.prune(MONTH, dry_run=True) == Pruned(commands=1, executions=1)
        assert not other.done()
        conn.commit()
    assert await other == Pruned(commands=1, executions=1)


# -- what is old among what is young -----------------------------------------------------------------------------------


def sent_as_loads_of_one(database: Database, count: int, *, first: int, age: str) -> None:
    database.rows(
        "INSERT INTO busload.command (id, domain, command_id, command_type, created_at)"
        " SELECT n * 1024, 'past', gen_random_uuid(), 'Debit', now() - %s::interval"
        "   FROM generate_series(%s::int, %s::int) AS n",
        age,
        first,
        first + count - 1,
    )
    database.rows(
        "INSERT INTO busload.execution (command, attempt, outcome, lease_id, worker, started_at, finished_at)"
        " SELECT id, 1, 'COMPLETED', gen_random_uuid(), 0, created_at, created_at FROM busload.command"
        "  WHERE id >= %s::bigint * 1024",
        first,
    )


async def test_what_is_old_behind_some_that_are_young_is_found(given: Given, database: Database) -> None:
    """Loads are nearly in the order of time: a number may be drawn long before its commands are committed."""
    sent_as_loads_of_one(database, 10, first=1_000_000, age="1 day")
    sent_as_loads_of_one(database, 10, first=1_000_100, age="1 year")
    sent_as_loads_of_one(database, 900, first=1_000_200, age="1 day")
    sent_as_loads_of_one(database, 10, first=1_002_000, age="1 year")
    assert (await given.bus.prune(MONTH)).commands == 20


async def test_the_price_is_that_of_what_is_old(database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in rows that the server fetches, not in time."""
    monkeypatch.setattr(prune, "SLICE", 100)
    sent_as_loads_of_one(database, 10, first=1_000_000, age="1 year")
    sent_as_loads_of_one(database, 20_000, first=1_000_100, age="1 day")
    fetched = "SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_xact_user_tables WHERE schemaname = 'busload'"
    pruning = prune.Pruning(MONTH)
    with psycopg.connect(dsn) as conn:
        for plan in pruning.plans():
            perform(conn, plan)
        [read] = conn.execute(fetched).fetchone() or [0]
    assert pruning.pruned.commands == 10
    assert read < 5_000


async def test_loads_of_batches_that_stay_are_passed_over(given: Given, database: Database, dsn: str) -> None:
    given.handler("Debit")
    await given.batch(10_000, on_complete=BatchCommand("Tell"))
    await given.sent()
    await given.drained()
    aged(database)
    fetched = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'command'"
    pruning = prune.Pruning(MONTH)
    with psycopg.connect(dsn) as conn:
        transactions = sum(1 for plan in pruning.plans() if perform(conn, plan) is None)
        [read] = conn.execute(fetched).fetchone() or [0]
    assert pruning.pruned.commands == 1
    assert read < 200
    assert transactions < 8


# -- workers -----------------------------------------------------------------------------------------------------------


async def test_a_worker_with_keep_for_prunes_by_itself(given: Given, database: Database) -> None:
    await ended_in_every_way(given)
    aged(database)
    young = await given.sent()
    async with given.running():
        await eventually(lambda: not database.count("queue") and not database.count("lease"))
    assert database.count("command") == 6

    async with given.running(settings=replace(given.settings, keep_for=MONTH, archive=True)):
        await eventually(lambda: database.count("command") == 1)
    assert database.count("archive") == 5
    assert (await given.command_now(young)).status == "COMPLETED"


async def test_one_worker_prunes_for_all_of_them(given: Given, database: Database) -> None:
    given.handler("Debit")
    for _ in range(3):
        await given.sent()
    await given.drained()
    aged(database)
    first, second = (Prune(given.bus.database.in_transaction, MONTH, archive=False) for _ in range(2))
    assert await first.once() < 1
    assert await second.once() > 3000
    while database.count("command"):
        assert await first.once() < 1
    while (pause := await first.once()) < 1:
        pass
    assert pause > 3000

    given_back = Prune(given.bus.database.in_transaction, MONTH, archive=False)
    database.rows("UPDATE busload.turn SET taken_at = taken_at - interval '1 hour'")
    assert await given_back.once() < 1


async def test_a_worker_that_could_not_prune_tries_again(given: Given, database: Database) -> None:
    given.handler("Debit")
    await given.sent()
    await given.drained()
    aged(database)
    calls = 0

    async def perform(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 4, 7):  # not the first one, which takes the turn
            raise psycopg.OperationalError("the server closed the connection")
        return await given.bus.database.in_transaction(plan)

    pruning = Prune(perform, MONTH, archive=False)
    for _ in range(40):
        with contextlib.suppress(psycopg.OperationalError):
            await pruning.once()
    assert calls > 7 and database.count("command") == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"keep_for": timedelta(0)}, "keep_for must be more than zero"),
        ({"keep_for": 30}, "keep_for must be a timedelta"),
        ({"keep_for": timedelta(days=99_999)}, "keep_for must be at most"),
        ({"archive": "yes"}, "archive must be True or False"),
    ],
)
def test_a_worker_refuses_what_is_no_age(dsn: str, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Worker(CommandBus(dsn), domains=[DOMAIN], settings=WorkerSettings(**setting))


# -- while everything else goes on -------------------------------------------------------------------------------------


async def test_pruning_beside_all_that_happens_loses_nothing(given: Given, database: Database, dsn: str) -> None:
    """Workers, three prunes, retries, failures, cancels, operators and dedup; the invariants always hold"""
    bus, calls = given.bus, 0

    async def shaky(command: Command, ctx: HandlerContext) -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise TransientCommandError("not yet")
        if calls % 11 == 0:
            raise PermanentCommandError("a person must look")
        if calls % 13 == 0:
            raise BusinessRuleError("no")

    given.handler("Debit", shaky, retry=RetryPolicy(max_attempts=9, backoff=(0,)))
    told = given.handler("Tell")
    over = asyncio.Event()
    removed: list[Pruned] = []
    accepted = callbacks = 0

    async def prune_again_and_again() -> None:
        while not over.is_set():
            removed.append(await bus.prune(AT_ONCE, archive=True))

    async def resolve_again_and_again() -> None:
        turn = itertools.count()
        while not over.is_set():
            for item in await bus.troubleshooting.list(DOMAIN, limit=50):
                n = next(turn)
                if n % 3 == 0:
                    with contextlib.suppress(InvalidOperationError):  # nothing of a canceled batch is tried again
                        await bus.troubleshooting.retry(DOMAIN, item.command_id)
                elif n % 3 == 1:
                    await bus.troubleshooting.complete(DOMAIN, item.command_id)
                else:
                    await bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="no")
            await asyncio.sleep(0.01)

    def nothing_open() -> bool:
        places = ("queue", "scheduled", "lease", "troubleshooting")
        return not any(database.count(place) for place in places)

    tasks = [asyncio.create_task(prune_again_and_again()) for _ in range(3)]
    tasks.append(asyncio.create_task(resolve_again_and_again()))
    async with given.running(), given.running():
        for round in range(12):
            batch_id = await given.batch(100, on_complete=BatchCommand("Tell"))
            accepted, callbacks = accepted + 100, callbacks + 1
            if round % 4 == 3:
                await bus.cancel_batch(DOMAIN, batch_id, reason="no")
            async with bus.open_batch(DOMAIN) as batch:
                for n in range(20):
                    await batch.add("Debit", {"n": n})
                    if n % 5 == 0:
                        await batch.checkpoint()
            accepted += 20
            for n in range(20):
                sent = await bus.send(DOMAIN, "Debit", task_key=f"task:{n}", dedup=Dedup(window=timedelta(0)))
                accepted += sent.created
            database.check_invariants()
            assert orphans(database) == []
        await eventually(nothing_open, within=60)
        over.set()
        await asyncio.gather(*tasks)
    removed.append(await bus.prune(AT_ONCE, archive=True))
    assert left(database) == {}
    assert database.count("archive") == sum(pruned.commands for pruned in removed) == accepted + callbacks
    assert database.count("archived_batch") == sum(pruned.batches for pruned in removed) == 24
    assert len({command.command_id for command in told}) == callbacks
    endings = database.rows("""
        SELECT id FROM busload.archive
         WHERE (SELECT count(*) FROM json_array_elements(executions) e
                 WHERE e ->> 'outcome' IN ('COMPLETED', 'FAILED', 'CANCELED'))
             + (SELECT count(*) FROM json_array_elements(events) e
                 WHERE e ->> 'type' IN ('CANCELED', 'OPERATOR_COMPLETED', 'OPERATOR_CANCELED')) <> 1""")
    assert endings == []

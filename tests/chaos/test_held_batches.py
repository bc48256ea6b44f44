"""Counters are exact in every snapshot while batches are held, resumed, expired, canceled and reprioritised."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

from busload import BatchCommand, Settings, SyncCommandBus
from busload.batches import FailureBudget
from busload.errors import InvalidOperationError
from busload.testing import TestServer
from tests.chaos.harness import Auditor, Workers, deadlocks, folder, seeded
from tests.chaos.test_counters import operate
from tests.given import DOMAIN, Database, short_and_long, until

OPERATORS = 6


@short_and_long("workers_count, snapshots, acts", (2, 30, 60), (8, 500, 1500))
def test_counters_are_exact_while_batches_are_held_resumed_expired_canceled_and_reprioritised(
    server: TestServer, workers_count: int, snapshots: int, acts: int
) -> None:
    chance = seeded()
    with (
        server.database() as dsn,
        folder() as path,
        Database(dsn) as database,
        SyncCommandBus(dsn, settings=Settings()) as bus,
        Workers(dsn, path, concurrency=20, pause=0.02, sweep_ms=100) as workers,
        Auditor(dsn) as auditor,
    ):
        before = deadlocks(database)
        workers.start(workers_count)
        until(lambda: database.count("worker") == workers_count, 60)
        looked = auditor.snapshots
        late = bus.create_batch(DOMAIN, [BatchCommand("Mixed")] * 100, expires_in=2.0)
        bus.hold_batch(DOMAIN, late, reason="until it is too late")
        act_on_one(bus)
        batches: list[UUID] = []
        # Several at once: where processors are few and busy, each act takes long, and most of that is waiting.
        with ThreadPoolExecutor(OPERATORS) as operators:
            seeds = [chance.randrange(10**6) for _ in range(OPERATORS)]

            def operator(seed: int) -> int:
                own, done = random.Random(seed), 0
                while (auditor.snapshots - looked < snapshots or done < acts / OPERATORS) and not auditor.mismatches:
                    if own.random() < 0.2 or len(batches) < 5:
                        batches.append(create(bus, own))
                    act(bus, own, own.choice(batches[-20:]))
                    with suppress(InvalidOperationError):  # another operator may have decided
                        operate(bus, own, limit=3)
                    done += 1
                return done

            done = sum(operators.map(operator, seeds))
        assert auditor.mismatches == []
        until(lambda: database.value("SELECT expired_at FROM busload.batch WHERE batch_id = %s", late), 60)
        until(lambda: settled(bus, database, batches, chance), 120)
        assert workers.stop() == [0] * workers_count, workers.last_words()
        assert auditor.mismatches == []
        assert deadlocks(database) - before == 0
        database.check_invariants()
        assert (database.count("lease"), database.count("scheduled"), database.count("queue")) == (0, 0, 0)
        happened = dict(
            database.rows("SELECT type, count(*) FROM busload.event WHERE type LIKE 'BATCH%' GROUP BY type")
        )
        assert happened.keys() >= {
            "BATCH_HELD",
            "BATCH_RESUMED",
            "BATCH_REPRIORITIZED",
            "BATCH_BUDGET_CHANGED",
            "BATCH_EXPIRED",
            "BATCH_CANCELED",
            "BATCH_COMPLETED",
        }
        print(
            f"{len(batches)} batches, {done} acts, {workers_count} workers, {auditor.snapshots} snapshots, "
            f"0 mismatches, 0 deadlocks: {happened}"
        )


def create(bus: SyncCommandBus, chance: random.Random) -> UUID:
    """A batch, one in three of which expires soon; and some of its commands do so by themselves."""
    soon = datetime.now(UTC) + timedelta(seconds=chance.uniform(2, 4))
    size = chance.choice([3, 60, 300])
    commands = [BatchCommand("Mixed", data={"n": n}, expires_at=soon if n % 7 == 0 else None) for n in range(size)]
    expires_in = chance.choice([None, None, chance.uniform(0.3, 3)])
    return bus.create_batch(DOMAIN, commands, expires_in=expires_in, priority=chance.choice([0, 3]))


def act_on_one(bus: SyncCommandBus) -> None:
    """Everything that is done to batches, to one that cannot end before: nobody has a handler for it."""
    batch_id = bus.create_batch(DOMAIN, [BatchCommand("Unknown")] * 100)
    assert bus.hold_batch(DOMAIN, batch_id, reason="chaos", operator="test")
    assert bus.resume_batch(DOMAIN, batch_id, operator="test")
    bus.reprioritize_batch(DOMAIN, batch_id, 3, operator="test")
    assert not bus.set_batch_budget(DOMAIN, batch_id, FailureBudget(0.5), operator="test")
    bus.cancel_batch(DOMAIN, batch_id, reason="chaos", operator="test")


def act(bus: SyncCommandBus, chance: random.Random, batch_id: UUID) -> None:
    with suppress(InvalidOperationError):  # it may have ended meanwhile
        match chance.randrange(12):
            case 0 | 1 | 2 | 3:
                bus.hold_batch(DOMAIN, batch_id, reason="chaos", operator="test")
            case 4 | 5 | 6:
                bus.resume_batch(DOMAIN, batch_id, operator="test")
            case 7 | 8:
                bus.reprioritize_batch(DOMAIN, batch_id, chance.randrange(-5, 5), operator="test")
            case 9 | 10:
                budget = FailureBudget(chance.uniform(0.01, 0.5), per_cause=chance.random() < 0.5)
                bus.set_batch_budget(DOMAIN, batch_id, budget, operator="test")
            case _:
                bus.cancel_batch(DOMAIN, batch_id, reason="chaos", operator="test")


def settled(bus: SyncCommandBus, database: Database, batches: list[UUID], chance: random.Random) -> bool:
    """Resume what is held and decide what is parked, until every batch is complete."""
    for (batch_id,) in database.rows("SELECT batch_id FROM busload.batch WHERE held_at IS NOT NULL"):
        with suppress(InvalidOperationError):
            bus.resume_batch(DOMAIN, batch_id, operator="test")
    operate(bus, chance, limit=100)
    return not database.value("SELECT count(*) FROM busload.batch WHERE completed_at IS NULL")

"""Counters are exact in every snapshot, whoever writes; and a batch completes once, however close its last members."""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

import psycopg

from busload import BatchCommand, Settings, SyncCommandBus
from busload.commands import settle
from busload.commands.execution import COMPLETED, FAILED, Leased, Transition
from busload.errors import InvalidOperationError
from busload.sync.plan import perform
from busload.testing import TestServer
from tests.chaos.harness import Auditor, Workers, deadlocks, folder, seeded
from tests.given import DOMAIN, Database, Given, at_once, short_and_long, until


@short_and_long("seconds", (5.0,), (30.0,))
def test_counters_equal_the_facts_in_every_snapshot(server: TestServer, seconds: float) -> None:
    chance = seeded()
    with (
        server.database() as dsn,
        folder() as path,
        Database(dsn) as database,
        SyncCommandBus(dsn, settings=Settings()) as bus,
        Workers(dsn, path, concurrency=20, pause=0.02) as workers,
        Auditor(dsn) as auditor,
    ):
        before = deadlocks(database)
        workers.start(8)
        open_batches = [bus.open_batch(DOMAIN, name=f"shared {n}") for n in range(20)]
        batches = [batch.__enter__().batch_id for batch in open_batches]
        done = busy(bus, batches, chance, seconds)
        for batch in open_batches:
            bus.seal_batch(DOMAIN, batch.batch_id)
        settle_all(bus, database, batches, chance)
        assert workers.stop() == [0] * 8, workers.last_words()
        assert auditor.mismatches == []
        assert auditor.snapshots >= seconds, "it has looked all the while, however slow the machine is"
        assert deadlocks(database) - before == 0
        database.check_invariants()
        assert database.count("lease") == 0
        print(
            f"counters: {done} commands in 20 shared batches, 8 workers, {seconds:.0f} s: "
            f"{auditor.snapshots} snapshots, {len(auditor.mismatches)} mismatches, 0 deadlocks"
        )


def busy(bus: SyncCommandBus, batches: list[UUID], chance: random.Random, seconds: float) -> int:
    """Add to every batch, operate on what is parked, cancel two: until the time is up."""
    sent, ends, canceled = 0, time.monotonic() + seconds, set[UUID]()
    while time.monotonic() < ends:
        batch_id = chance.choice(batches)
        if batch_id not in canceled:
            many = [BatchCommand("Mixed", data={"n": n}) for n in range(chance.choice([1, 7, 60]))]
            bus.send_many(DOMAIN, many, batch_id=batch_id)
            sent += len(many)
        if len(canceled) < 2 and time.monotonic() > ends - seconds / 2:
            bus.cancel_batch(DOMAIN, batch_id, reason="chaos", operator="test")
            canceled.add(batch_id)
        operate(bus, chance, limit=3)
    return sent


def operate(bus: SyncCommandBus, chance: random.Random, limit: int) -> None:
    for item in bus.troubleshooting.list(DOMAIN, limit=limit):
        match chance.randrange(3):
            case 0:
                with suppress(InvalidOperationError):  # of a canceled batch nothing is tried again
                    bus.troubleshooting.retry(DOMAIN, item.command_id, operator="test")
            case 1:
                bus.troubleshooting.complete(DOMAIN, item.command_id, operator="test")
            case _:
                bus.troubleshooting.cancel(DOMAIN, item.command_id, reason="chaos", operator="test")


def settle_all(bus: SyncCommandBus, database: Database, batches: list[UUID], chance: random.Random) -> None:
    def complete() -> bool:
        operate(bus, chance, limit=100)
        return not database.value("SELECT count(*) FROM busload.batch WHERE completed_at IS NULL")

    until(complete, 60)


@short_and_long("batches", (100,), (1000,))
async def test_the_last_two_members_at_once_complete_their_batch_once(given: Given, dsn: str, batches: int) -> None:
    """Two members of each batch, leased by two workers, settled at once."""
    workers = [given.registered_worker() for _ in range(2)]
    pairs: list[list[Leased]] = []
    for n in range(batches):
        await given.batch(commands=2, name=str(n), on_complete=BatchCommand("Done"))
        pairs.append([given.claimed(by=worker)[0] for worker in workers])
    each_pair = threading.Barrier(2, timeout=60)

    def settle_all_of(side: int, conn: psycopg.Connection[Any]) -> None:
        for n, pair in enumerate(pairs):
            outcome = [COMPLETED, FAILED][n % 2]
            each_pair.wait()
            assert perform(conn, settle.settle([Transition(pair[side], outcome)], now=0.0)) == {pair[side].id}

    at_once(dsn, [partial(settle_all_of, side) for side in range(2)])
    database = given.database
    completed = database.rows("SELECT count(*) FROM busload.event WHERE type = 'BATCH_COMPLETED' GROUP BY batch_id")
    assert completed == [(1,)] * batches
    assert database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Done'") == batches
    assert deadlocks(database) == 0
    database.check_invariants()
    print(f"last-member race: {batches} batches, exactly one completion and one callback each, 0 deadlocks")


def test_a_worker_that_is_told_to_stop_leaves_exact_counters(server: TestServer) -> None:
    """Not only at the end: also in every snapshot while eight workers come and go."""
    with server.database() as dsn, folder() as path, Database(dsn) as database, SyncCommandBus(dsn) as bus:
        with Workers(dsn, path, concurrency=5, pause=0.02) as workers, Auditor(dsn) as auditor:
            batch_id = bus.create_batch(DOMAIN, [BatchCommand("Work") for _ in range(1500)])
            workers.start(2)
            until(lambda: workers.noted("end"))
            for started in range(2, 6):
                until(lambda n=started: database.count("worker") == n)  # type: ignore[misc]  # it hears signals now
                workers.kill(workers.alive[0], signal.SIGTERM)
                workers.start()
                until(lambda n=started: len(workers.look()) == n - 1)  # type: ignore[misc]
            bus.wait_batch(DOMAIN, batch_id, timeout=30)
            workers.stop()
            assert set(workers.ended.values()) == {0}, workers.last_words()
        assert auditor.mismatches == []
        assert database.value("SELECT max(attempt) FROM busload.execution") == 1
        assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0
        assert database.count("lease") == 0
        assert max(workers.noted("end").values()) == 1
        database.check_invariants()

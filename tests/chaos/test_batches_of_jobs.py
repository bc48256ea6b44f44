"""Batches of jobs count exactly in every snapshot while their jobs end, fail, are resumed, canceled and compensated."""

from __future__ import annotations

import random
from contextlib import suppress
from uuid import UUID

from busload import BatchCommand, BatchJob, Settings, Stage, SyncCommandBus
from busload.errors import InvalidOperationError
from busload.testing import TestServer
from tests.chaos.harness import Auditor, Workers, deadlocks, folder, seeded
from tests.chaos.test_counters import operate
from tests.given import DOMAIN, Database, short_and_long, until


@short_and_long("workers_count, snapshots, acts, kills", (2, 30, 60, 1), (8, 500, 1500, 20))
def test_batches_of_jobs_count_exactly_while_jobs_end_fail_and_are_resumed_canceled_and_compensated(
    server: TestServer, workers_count: int, snapshots: int, acts: int, kills: int
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
        batches: list[UUID] = []
        done, looked, killed = 0, auditor.snapshots, 0
        while (auditor.snapshots - looked < snapshots or done < acts) and not auditor.mismatches:
            if chance.random() < 0.2 or len(batches) < 3:
                batches.append(create(bus, chance))
            act(bus, chance, chance.choice(batches[-10:]))
            operate_on_commands(bus, chance)
            done += 1
            if killed < kills and done > acts * (killed + 1) / (kills + 1):
                workers.kill(workers.alive[0])
                workers.start()
                killed += 1
        until(lambda: settled(bus, database, chance), 120)
        workers.stop()
        assert auditor.mismatches == []
        assert deadlocks(database) - before == 0
        database.check_invariants()
        ended = dict(database.rows("SELECT status, count(*) FROM busload.job GROUP BY status"))
        assert ended.keys() == {"COMPLETED", "FAILED", "CANCELED"}
        print(
            f"{len(batches)} batches, {sum(ended.values())} jobs, {done} acts, {workers_count} workers, "
            f"{killed} kills, {auditor.snapshots} snapshots, 0 mismatches, 0 deadlocks: {ended}"
        )


def create(bus: SyncCommandBus, chance: random.Random) -> UUID:
    """A few jobs of two stages, most of which meet a failure sooner or later; some undo what they have done."""

    def stages() -> list[Stage]:
        sizes = chance.choice([1, 2, 5]), chance.choice([0, 1, 3])
        undo = BatchCommand("Mixed") if chance.random() < 0.4 else None
        return [Stage(f"s{n}", [BatchCommand("Mixed")] * size, undo) for n, size in enumerate(sizes)]

    jobs = [BatchJob(stages(), continue_after_failures=chance.random() < 0.2) for _ in range(chance.choice([1, 3, 12]))]
    return bus.jobs.create_batch(DOMAIN, jobs, on_complete=BatchCommand("Done"))


def act(bus: SyncCommandBus, chance: random.Random, batch_id: UUID) -> None:
    if chance.random() < 0.1:
        bus.cancel_batch(DOMAIN, batch_id, reason="chaos", operator="test")
        return
    jobs = bus.jobs.list(DOMAIN, batch_id=batch_id)
    job = chance.choice(jobs)
    with suppress(InvalidOperationError):  # it may have ended, or its batch
        if chance.random() < 0.6:
            failed = [one for one in jobs if one.status == "FAILED"] or [job]
            bus.jobs.resume(DOMAIN, chance.choice(failed).job_id, operator="test")
        else:
            bus.jobs.cancel(DOMAIN, job.job_id, reason="chaos", operator="test")


def operate_on_commands(bus: SyncCommandBus, chance: random.Random) -> None:
    with suppress(InvalidOperationError):  # a worker that came back may have taken it
        operate(bus, chance, limit=3)


def settled(bus: SyncCommandBus, database: Database, chance: random.Random) -> bool:
    """Decide what is parked, until every batch is complete."""
    with suppress(InvalidOperationError):
        operate(bus, chance, limit=100)
    return not database.value("SELECT count(*) FROM busload.batch WHERE completed_at IS NULL")

"""Canary and failure budget while workers are killed: a ledger that busload does not write tells what ran."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from busload import BatchCommand, BatchMetadata, Settings, SyncCommandBus, WorkerSettings
from busload.batches import Canary, FailureBudget
from busload.testing import TestServer
from busload.worker.budget_gate import one_flush
from tests.chaos.harness import Auditor, Workers, deadlocks, folder, seeded
from tests.given import DOMAIN, Database, short_and_long, until

CONCURRENCY, FLUSH_SIZE = 5, 10
FLUSH = one_flush(WorkerSettings(concurrency=CONCURRENCY, flush_size=FLUSH_SIZE))
"""The commands that a worker may begin past a budget: what the docs say."""


@dataclass
class Storm:
    """A batch, and as many workers as there should be, of which one after the other is killed."""

    bus: SyncCommandBus
    database: Database
    workers: Workers
    count: int
    chance: random.Random
    killed: int = 0

    def kill(self) -> None:
        time.sleep(self.chance.uniform(0.02, 0.2))
        if self.workers.alive:
            self.workers.kill(self.chance.choice(self.workers.alive))
            self.killed += 1
        self.workers.keep(self.count)

    def batch(self, batch_id: UUID) -> BatchMetadata:
        found = self.bus.get_batch(DOMAIN, batch_id)
        assert found is not None
        return found

    def nothing_runs(self) -> bool:
        """Also the commands of the dead were taken back."""
        return self.database.count("lease") == 0

    def started(self) -> int:
        return self.workers.noted("start").total()


@contextmanager
def storm(server: TestServer, count: int) -> Iterator[Storm]:
    chance = seeded()
    with (
        server.database() as dsn,
        folder() as path,
        Database(dsn) as database,
        SyncCommandBus(dsn, settings=Settings()) as bus,
        Workers(
            dsn, path, concurrency=CONCURRENCY, flush_size=FLUSH_SIZE, pause=0.01, lease_for=2, sweep_ms=100
        ) as workers,
        Auditor(dsn) as auditor,
    ):
        before = deadlocks(database)
        workers.start(count)
        found = Storm(bus, database, workers, count, chance)
        yield found
        until(found.nothing_runs, 60)
        database.check_invariants()
        assert auditor.mismatches == []
        assert auditor.snapshots > 0
        assert deadlocks(database) - before == 0
        print(f"{found.killed} kills, {auditor.snapshots} snapshots, 0 mismatches, 0 deadlocks")


@short_and_long("count, kills, rounds, commands", (4, 3, 2, 4000), (8, 20, 20, 100_000))
def test_workers_that_are_killed_run_no_more_past_the_budget_than_one_flush_each(
    server: TestServer, count: int, kills: int, rounds: int, commands: int
) -> None:
    """Every command fails. The batch is held, resumed and held again, and canceled at last."""
    allowed = 100
    with storm(server, count) as run:
        all_of_them = [BatchCommand("Refuse") for _ in range(commands)]
        batch_id = run.bus.create_batch(DOMAIN, all_of_them, budget=FailureBudget(0.0001, at_least=allowed))
        for round in range(rounds):
            before, killed = (run.started() if round else 0), run.killed
            if round:
                assert run.bus.resume_batch(DOMAIN, batch_id, operator="test")
            while run.killed < killed + kills and run.batch(batch_id).held_at is None:
                run.kill()
            until(lambda: run.batch(batch_id).held_reason == "BUDGET", 60)
            until(run.nothing_runs, 60)
            started, processes = run.started() - before, count + run.killed - killed
            print(f"round {round}: {started} started, {started - allowed} past the budget, {processes} processes")
            assert allowed < started <= allowed + processes * FLUSH
        batch = run.batch(batch_id)
        left = commands - batch.failed_count - batch.in_troubleshooting_count
        assert run.bus.cancel_batch(DOMAIN, batch_id, reason="enough") == left
        batch = run.batch(batch_id)
        assert batch.canceled_count == left
        assert batch.completed_count == 0


@short_and_long("count, kills, size, commands", (4, 4, 100, 3000), (8, 30, 1000, 50_000))
def test_nothing_but_the_canary_runs_before_it_has_ended_though_workers_are_killed(
    server: TestServer, count: int, kills: int, size: int, commands: int
) -> None:
    with storm(server, count) as run:
        canary = Canary(size, timedelta(hours=1))
        batch_id = run.bus.create_batch(DOMAIN, [BatchCommand("Work") for _ in range(commands)], canary=canary)
        first: set[UUID] = set()
        while run.killed < kills and run.batch(batch_id).canary_ended_at is None:
            run.kill()

        def passed() -> bool:
            """A command that was running whenever its worker died is parked, and then a person decides."""
            batch = run.batch(batch_id)
            for item in run.bus.troubleshooting.list(DOMAIN):
                run.bus.troubleshooting.retry(DOMAIN, item.command_id, operator="test")
            if batch.held_reason is not None:
                until(run.nothing_runs, 60)
                run.database.rows(
                    "UPDATE busload.batch SET held_reason = 'OPERATOR' WHERE batch_id = %s AND held_at IS NOT NULL",
                    batch_id,
                )
                run.bus.resume_batch(DOMAIN, batch_id)
            return batch.canary_ended_at is not None

        until(passed, 120)
        until(lambda: run.batch(batch_id).status == "COMPLETED", 120)
        notes = run.workers.notes()
        ended: set[UUID] = set()
        for fact, command_id, *_ in notes:
            if fact == "start" and len(ended) < size:
                first.add(command_id)
            elif fact == "end":
                ended.add(command_id)
        assert len(first) == size, "others have started before all of the canary had ended"
        assert len(ended) == commands


@short_and_long("count, kills, commands", (4, 3, 3000), (8, 20, 50_000))
def test_a_canary_that_fails_is_all_that_runs_though_workers_are_killed(
    server: TestServer, count: int, kills: int, commands: int
) -> None:
    size = 50
    with storm(server, count) as run:
        batch_id = run.bus.create_batch(DOMAIN, [BatchCommand("Refuse") for _ in range(commands)], canary=Canary(size))
        for _ in range(kills):
            run.kill()
        until(lambda: run.batch(batch_id).held_reason == "CANARY", 60)
        until(run.nothing_runs, 60)
        assert len(run.workers.noted("start")) <= size
        run.bus.cancel_batch(DOMAIN, batch_id, reason="wrong")
        batch = run.batch(batch_id)
        assert batch.failed_count + batch.in_troubleshooting_count + batch.canceled_count == commands

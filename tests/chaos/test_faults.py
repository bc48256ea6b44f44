"""Workers are killed and frozen, PostgreSQL is cut off: nothing is lost, counts twice or completes twice."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import psycopg

from busload import BatchCommand, DuplicateCommandError, Settings, SyncCommandBus
from busload.commands.ids import new_ids
from busload.errors import InvalidOperationError, OutcomeUnknownError
from busload.testing import TestServer
from tests.chaos.harness import Accepted, Auditor, Server, Workers, folder, retry_crashed, seeded
from tests.chaos.nursery import DID_NOT_START
from tests.given import DOMAIN, Database, short_and_long, until

KINDS = ["Work", "Work", "Transfer", "Block"]


@dataclass
class Producer:
    """Creates batches while everything falls down around it; what is acknowledged goes into its own ledger."""

    dsn: str
    accepted: Accepted
    commands: int
    batches: list[UUID] = field(default_factory=list)
    unknown: int = 0

    def run(self, chance: random.Random) -> None:
        with SyncCommandBus(self.dsn, settings=Settings(pool_size=2)) as bus:
            left = self.commands
            while left:
                size = min(left, chance.choice([1, 5, 40, 150]))
                self._create(bus, size, chance)
                left -= size

    def _create(self, bus: SyncCommandBus, size: int, chance: random.Random) -> None:
        [batch_id, done, *ids] = new_ids(size + 2)
        commands = [BatchCommand(chance.choice(KINDS), command_id) for command_id in ids]
        deadline = time.monotonic() + 60
        while True:
            try:
                bus.create_batch(DOMAIN, commands, batch_id=batch_id, on_complete=BatchCommand("Done", done))
                break
            except OutcomeUnknownError:
                self.unknown += 1
            except (DuplicateCommandError, InvalidOperationError):
                break  # the first try was accepted after all
            except psycopg.OperationalError:
                assert time.monotonic() < deadline
        self.accepted.note([*ids, done])
        self.batches.append(batch_id)


@short_and_long("kills, restarts, commands", (15, 2, 1500), (200, 20, 20_000))
def test_kill_9_and_immediate_restarts_lose_nothing_and_count_nothing_twice(
    kills: int, restarts: int, commands: int
) -> None:
    chance = seeded()
    with folder() as path, Server(path / "server") as server:
        accepted = Accepted(path / "accepted")
        producer = Producer(server.dsn, accepted, commands)
        with Workers(server.dsn, path, lease_for=1.5, concurrency=10, pause=0.05) as workers:
            began = time.monotonic()
            workers.start(3)
            producing = threading.Thread(target=producer.run, args=(chance,))
            producing.start()
            harm(server, workers, chance, kills=kills, restarts=restarts)
            harmed = time.monotonic() - began
            producing.join(120)
            assert not producing.is_alive()
            workers.keep(3)
            with Database(server.dsn) as database, SyncCommandBus(server.dsn) as bus:
                parked = retry_crashed(bus, database, DOMAIN)
                took = time.monotonic() - began
                assert workers.stop() == [0] * 3, workers.last_words()
                assert set(workers.ended.values()) <= {0, -signal.SIGKILL, DID_NOT_START}, workers.last_words()
                lost = check(database, workers, accepted, producer)
        accepted.close()
        ended = workers.noted("end")
        print(
            f"kill loop: {kills} kill -9 and {restarts} immediate restarts in {harmed:.0f} s "
            f"during {commands} commands in {len(producer.batches)} batches: {lost} lost, 0 double-counted, "
            f"0 duplicate completions; "
            f"{sum(ended.values()) - len(ended)} handler runs repeated, {parked} parked as CRASHED and retried, "
            f"{producer.unknown} outcomes unknown to the producer, all done after {took:.0f} s"
        )


def harm(server: Server, workers: Workers, chance: random.Random, *, kills: int, restarts: int) -> None:
    """Kill a worker and start another, and now and then cut off the server."""
    cuts = {round((n + 1) * kills / (restarts + 1)) for n in range(restarts)}
    for n in range(kills):
        seen = workers.ledger.stat().st_size
        if n in cuts:
            server.restart()
        # A worker that has not begun to work would be a waste of a kill, one that is between two notes is not.
        until(lambda seen=seen: at_work(workers, seen) or not busy(server), 60)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.05))  # where in its round it dies is left to chance
        workers.kill(chance.choice(workers.alive))
        workers.start()


def at_work(workers: Workers, seen: int) -> bool:
    workers.keep(3)
    return workers.ledger.stat().st_size > seen


def busy(server: Server) -> bool:
    try:
        with psycopg.connect(server.dsn, connect_timeout=2) as conn:
            return bool(conn.execute("SELECT EXISTS (SELECT FROM busload.queue)").fetchone() == (True,))
    except psycopg.OperationalError:
        return True


def check(database: Database, workers: Workers, accepted: Accepted, producer: Producer) -> int:
    promised = accepted.all()
    stored = {command_id for (command_id,) in database.rows("SELECT command_id FROM busload.command")}
    ended = workers.noted("end")
    lost = [command_id for command_id in promised if command_id not in stored or not ended[command_id]]
    assert lost == []
    assert len(stored) == len(promised) == len(set(promised)), "nothing that nobody sent"
    assert database.value("SELECT count(*) FROM busload.batch WHERE status = 'COMPLETED'") == len(producer.batches)
    assert database.value("SELECT sum(completed_count) FROM busload.batch") == producer.commands
    completions = database.rows("SELECT count(*) FROM busload.event WHERE type = 'BATCH_COMPLETED' GROUP BY batch_id")
    assert completions == [(1,)] * len(producer.batches)
    database.check_invariants()
    # Every completion is one that a handler reported: under the execution that wrote the note.
    reported = {(command, execution) for fact, command, execution, _ in workers.notes() if fact == "end"}
    credited = database.rows(
        "SELECT c.command_id, busload.execution_id(e.lease_id, c.id) FROM busload.execution e"
        "  JOIN busload.command c ON c.id = e.command WHERE e.outcome = 'COMPLETED'"
    )
    assert [row for row in credited if row not in reported] == []
    assert len(credited) == len(promised)
    # Effects that were written in the handler's transaction: exactly one each.
    effects = database.rows("SELECT count(*) FROM effect GROUP BY command_id")
    assert set(effects) <= {(1,)}
    assert len(effects) == database.value("SELECT count(*) FROM busload.command WHERE command_type = 'Transfer'")
    return len(lost)


@contextmanager
def fleet(server: TestServer, **options: float) -> Iterator[tuple[Workers, Database, SyncCommandBus, Path]]:
    with server.database() as dsn, folder() as path, Database(dsn) as database, SyncCommandBus(dsn) as bus:
        database.rows("CREATE TABLE effect (command_id uuid)")
        with Workers(dsn, path, gate=str(path / "gate"), **options) as workers:
            yield workers, database, bus, path


@short_and_long("zombies, at_once", (4, 4), (50, 5))
def test_a_frozen_worker_that_wakes_up_is_not_credited(server: TestServer, zombies: int, at_once: int) -> None:
    """SIGSTOP beyond the lease while a handler runs, SIGCONT after another worker has taken over.

    Who wakes up may take up again what nobody else has begun. What the other one has begun is never credited to it.
    """
    credited = refused = 0
    with fleet(server, lease_for=2.5, concurrency=3) as (workers, database, bus, path):
        for _ in range(zombies // at_once):
            (path / "gate").unlink(missing_ok=True)
            notes = len(workers.notes())
            batch_id = bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(3 * at_once)])
            pids = workers.start(at_once)
            until(lambda notes=notes: len(workers.notes()) == notes + 3 * at_once)  # type: ignore[misc]
            leases = held(database)
            for pid in pids:
                workers.kill(pid, signal.SIGSTOP)
            workers.start(concurrency=3 * at_once)
            # Time passes, the heir finds them dead and runs what they had.
            until(lambda leases=leases: not held(database) & leases and held(database), 30)  # type: ignore[misc]
            (path / "gate").touch()
            for pid in pids:
                workers.kill(pid, signal.SIGCONT)  # wakes up and finds the gate open: its handlers return
            batch = bus.wait_batch(DOMAIN, batch_id, timeout=60)
            assert (batch.completed_count, batch.status) == (3 * at_once, "COMPLETED")
            woke = lambda pids=pids: {p for fact, _, _, p in workers.notes() if fact == "end"} >= set(pids)  # noqa: E731
            until(woke, 30)
            assert set(workers.stop()) == {0}, workers.last_words()
            winners = database.rows(
                "SELECT c.command_id, e.lease_id"
                "  FROM busload.execution AS e JOIN busload.command AS c ON c.id = e.command WHERE c.batch_id = %s",
                batch_id,
            )
            taken_over = {command for _, command, _, pid in workers.notes() if pid not in pids}
            credited += sum(lease_id in leases for command, lease_id in winners if command in taken_over)
            refused += sum(command in taken_over for command, _ in winners)
        assert credited == 0
        assert refused > 0
        database.check_invariants()
        assert database.count("lease") == 0
    print(f"zombies: {zombies} workers frozen beyond their lease, {refused} commands taken over, {credited} credited")


def held(database: Database) -> set[UUID]:
    return {lease_id for (lease_id,) in database.rows("SELECT lease_id FROM busload.lease")}


@short_and_long("innocent, concurrency", (200, 10), (5000, 100))
def test_a_command_that_kills_its_worker_ends_alone_and_parked(
    server: TestServer, innocent: int, concurrency: int
) -> None:
    with fleet(server, lease_for=30, concurrency=concurrency, pause=0.01) as (workers, database, bus, _):
        commands = [BatchCommand("Work", data=n) for n in range(innocent)]
        commands.insert(innocent // 3, BatchCommand("Suicide"))
        batch_id = bus.create_batch(DOMAIN, commands)
        deaths = 0
        while database.value("SELECT count(*) FROM busload.troubleshooting") == 0:
            assert deaths < 40
            if not workers.alive:
                workers.start()
            until(lambda: (workers.look() and not workers.alive) or database.count("troubleshooting"), 30)
            if not workers.alive:
                deaths += 1
                database.rows("UPDATE busload.worker SET seen_at = '-infinity' WHERE stopped_at IS NULL")  # time passes
        until(lambda: database.value("SELECT completed_count FROM busload.batch") == innocent, 30)
        assert workers.stop() == [0]
        [item] = bus.troubleshooting.list(DOMAIN)
        assert (item.command_type, item.reason) == ("Suicide", "CRASHED")
        batch = bus.get_batch(DOMAIN, batch_id)
        assert batch is not None and (batch.completed_count, batch.in_troubleshooting_count) == (innocent, 1)
        assert workers.noted("start")[item.command_id] == deaths
        assert set(workers.ended.values()) == {0, 9}
        database.check_invariants()
    print(f"poison: one command among {innocent} killed {deaths} workers and ended parked, the others completed")


def test_the_auditor_notices_a_counter_that_is_wrong(server: TestServer) -> None:
    """The proof that the proof can fail."""
    with server.database() as dsn, Database(dsn) as database, SyncCommandBus(dsn) as bus:
        bus.create_batch(DOMAIN, [BatchCommand("Work"), BatchCommand("Work")])
        with Auditor(dsn, every=0.01) as auditor:
            until(lambda: auditor.snapshots > 1)
            assert auditor.mismatches == []
            database.rows("UPDATE busload.batch SET completed_count = 1")
            until(lambda: auditor.mismatches)

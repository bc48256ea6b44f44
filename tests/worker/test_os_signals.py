"""SIGTERM to a process that works: it finishes what it can, hands back the rest, and leaves with 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from busload import BatchCommand, SyncCommandBus
from busload.testing import TestServer
from tests.chaos.harness import SOURCES, Auditor, Server, Workers, folder
from tests.chaos.nursery import DID_NOT_START
from tests.given import DOMAIN, LISTENERS, Database, pending, short_and_long, until


@pytest.fixture
def path() -> Iterator[Path]:
    with folder() as path:
        yield path


@pytest.fixture
def workers(dsn: str, path: Path) -> Iterator[Workers]:
    with Workers(dsn, path, gate=str(path / "gate"), concurrency=5) as workers:
        yield workers


def waiting(sync_bus: SyncCommandBus, workers: Workers, commands: int = 20) -> None:
    """Twenty commands, of which the worker runs five until the gate opens."""
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(commands)])
    until(lambda: len(workers.notes()) == 5)


def nothing_was_burnt(database: Database, *, executions: int, left: int, workers: int = 1) -> None:
    assert database.count("lease") == 0
    assert database.count("execution") == executions
    assert database.value("SELECT coalesce(sum(hi - lo + 1), 0) FROM busload.queue") == left
    assert database.rows("SELECT DISTINCT attempt, crashes FROM busload.queue") == [(1, 0)] * bool(left)
    assert database.rows("SELECT lost, stopped_at IS NOT NULL FROM busload.worker") == [(False, True)] * workers
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0
    database.check_invariants()


# -- SIGTERM while it works ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_what_runs_is_finished_and_the_rest_is_left(
    workers: Workers, sync_bus: SyncCommandBus, database: Database, path: Path, number: int
) -> None:
    [pid] = workers.start(grace=60)
    waiting(sync_bus, workers)
    workers.kill(pid, number)
    until(lambda: not pending(pid))
    (path / "gate").touch()
    until(lambda: pid in workers.look())
    assert workers.ended[pid] == 0, workers.log.read_text()
    assert len(workers.noted("start")) == len(workers.noted("end")) == 5, "no new claim after the signal"
    nothing_was_burnt(database, executions=5, left=15)


def test_what_does_not_finish_within_the_grace_time_is_handed_back(
    workers: Workers, sync_bus: SyncCommandBus, database: Database
) -> None:
    [pid] = workers.start(grace=0.5)
    waiting(sync_bus, workers)
    began = time.monotonic()
    workers.kill(pid, signal.SIGTERM)
    until(lambda: pid in workers.look())
    assert workers.ended[pid] == 0, workers.last_words()
    assert time.monotonic() - began < 0.5 + 15
    nothing_was_burnt(database, executions=0, left=20)


@short_and_long("in_flight, times, beyond_grace", (2000, 1, 15), (10_000, 20, 2))
def test_all_that_is_in_flight_is_released_and_no_attempt_is_burnt(
    server: TestServer, in_flight: int, times: int, beyond_grace: float
) -> None:
    """SIGTERM with that many handlers waiting; the exit takes so many seconds more than the grace time at most."""
    grace, longest = 0.5, 0.0
    with server.database() as dsn, folder() as path, Database(dsn) as database, SyncCommandBus(dsn) as bus:
        bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(in_flight + 100)])
        with Workers(dsn, path, gate=str(path / "gate"), concurrency=in_flight, grace=grace) as workers:
            for n in range(times):
                workers.ledger.write_text("")
                [pid] = workers.start()
                until(lambda: len(workers.noted("start")) == in_flight, within=60)
                began = time.monotonic()
                workers.kill(pid, signal.SIGTERM)
                until(lambda pid=pid: pid in workers.look(), within=60)  # type: ignore[misc]
                longest = max(longest, time.monotonic() - began - grace)
                assert workers.ended[pid] == 0, workers.last_words()
                nothing_was_burnt(database, executions=0, left=in_flight + 100, workers=n + 1)
            (path / "gate").touch()
            workers.start()
            until(lambda: database.value("SELECT completed_at IS NOT NULL FROM busload.batch"), within=60)
            assert workers.stop() == [0], workers.last_words()
        assert database.rows("SELECT DISTINCT attempt, outcome FROM busload.execution") == [(1, "COMPLETED")]
        database.check_invariants()
    print(f"{times} times SIGTERM with {in_flight} in flight: all released, exit at most grace + {longest:.1f} s")
    assert longest < beyond_grace


def test_what_stands_in_line_is_handed_back_and_others_run_it(server: TestServer) -> None:
    """What a worker holds ahead of its slots was never started, and a stop starts none of it."""
    quick, slow, concurrency = 4000, 600, 5
    with server.database() as dsn, folder() as path, Database(dsn) as database, SyncCommandBus(dsn) as bus:
        options = {"gate": str(path / "gate"), "concurrency": concurrency, "prefetch": 1, "grace": 60}
        with Workers(dsn, path, **options) as workers, Auditor(dsn) as auditor:
            bus.create_batch(DOMAIN, [BatchCommand("Done") for _ in range(quick)], priority=1)
            batch_id = bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(slow)])
            [pid] = workers.start()
            # Quick ones have set the pace, so it holds more of the slow ones than it has slots for.
            held = "SELECT coalesce(sum(open), 0) FROM busload.lease WHERE batch_id = %s"
            until(lambda: len(workers.noted("start")) == concurrency and database.value(held, batch_id) > 50)
            workers.kill(pid, signal.SIGTERM)
            until(lambda: not pending(pid))
            (path / "gate").touch()
            until(lambda: pid in workers.look())
            assert workers.ended[pid] == 0, workers.last_words()
            assert len(workers.noted("start")) == concurrency, "nothing from the line was started"
            nothing_was_burnt(database, executions=quick + concurrency, left=slow - concurrency)
            workers.start()
            batch = bus.wait_batch(DOMAIN, batch_id, timeout=60)
            assert (batch.completed_count, batch.status) == (slow, "COMPLETED")
            assert workers.stop() == [0], workers.last_words()
        assert auditor.mismatches == []
        assert max(workers.noted("start").values()) == 1
        assert database.rows("SELECT DISTINCT attempt FROM busload.execution") == [(1,)]
        database.check_invariants()


# -- SIGTERM while the database is down ------------------------------------------------------------------------------


@short_and_long("times", (1,), (20,))
def test_results_that_a_stop_without_a_database_abandons_are_counted_and_run_again(times: int) -> None:
    """The worker waits as long as a flush may take, says how many results it abandons, and exits with an error."""
    with folder() as path, Server(path / "server") as server:
        options = {"gate": str(path / "gate"), "concurrency": 20, "lease_for": 2, "grace": 5}
        with Workers(server.dsn, path, **options) as workers:
            for _ in range(times):
                (path / "gate").unlink(missing_ok=True)
                workers.ledger.write_text("")
                workers.log.write_text("")
                with SyncCommandBus(server.dsn) as bus:
                    batch_id = bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(7)])
                [pid] = workers.start()
                until(lambda: len(workers.noted("start")) == 7)
                server.stop()
                (path / "gate").touch()
                until(lambda: len(workers.noted("end")) == 7)
                workers.kill(pid, signal.SIGTERM)
                until(lambda pid=pid: pid in workers.look(), within=30)  # type: ignore[misc]
                assert workers.ended[pid] == 1, workers.last_words()
                assert (
                    "7 results could not be settled before the worker stopped. Their commands run again."
                    in workers.last_words()
                )
                server.start()
                workers.start()
                with SyncCommandBus(server.dsn) as bus:
                    batch = bus.wait_batch(DOMAIN, batch_id, timeout=60)
                assert (batch.completed_count, batch.status) == (7, "COMPLETED")
                assert workers.stop() == [0], workers.last_words()
                assert set(workers.noted("end").values()) == {2}, "abandoned results run again, once"
        with Database(server.dsn) as database:
            assert database.value("SELECT count(*) FROM busload.execution") == 7 * times
            assert database.count("lease") == 0
            database.check_invariants()
    print(f"{times} stops without a database: exit with an error that counts the results, which ran again")


# -- signals at other times ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@short_and_long("times", (1,), (25,))
def test_a_second_signal_hurries(
    workers: Workers, sync_bus: SyncCommandBus, database: Database, first: int, second: int, times: int
) -> None:
    """Two signals while handlers wait; the grace time would be ten minutes."""
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(20)])
    for n in range(times):
        workers.ledger.write_text("")
        [pid] = workers.start(grace=600)
        until(lambda: len(workers.notes()) == 5)
        workers.kill(pid, first)
        until(lambda pid=pid: not pending(pid))  # type: ignore[misc]  # two that arrive together are one
        assert pid not in workers.look()
        workers.kill(pid, second)
        until(lambda pid=pid: pid in workers.look())  # type: ignore[misc]
        assert workers.ended[pid] == 0, workers.last_words()
        nothing_was_burnt(database, executions=0, left=20, workers=n + 1)
    print(f"{times} times a second signal with five running: left at once, everything released, no attempt burnt")


def test_an_idle_worker_leaves_at_once(workers: Workers, database: Database) -> None:
    [pid] = workers.start(grace=600)
    until(lambda: database.count("worker") == 1)
    until(lambda: database.value(LISTENERS))
    workers.kill(pid, signal.SIGTERM)
    until(lambda: pid in workers.look())
    assert workers.ended[pid] == 0, workers.last_words()


@short_and_long("times", (8,), (200,))
def test_a_signal_while_it_starts_leaves_nothing_behind(
    workers: Workers, sync_bus: SyncCommandBus, database: Database, path: Path, times: int
) -> None:
    (path / "gate").touch()
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(5)])
    for n in range(times):
        number = [signal.SIGTERM, signal.SIGINT][n % 2]
        [pid] = workers.start()
        until(lambda n=n: time.monotonic() * 1000 % 8 // 1 == n % 8)  # type: ignore[misc]  # a little later each time
        workers.kill(pid, number)
        until(lambda pid=pid: pid in workers.look())  # type: ignore[misc]
        # Before it listens to signals, the system ends it; on SIGINT Python does, with an exception.
        by_python = (1, DID_NOT_START) if number == signal.SIGINT else ()
        assert workers.ended[pid] in (0, -number, *by_python), workers.last_words()
        assert "could not be settled" not in workers.last_words()
    assert database.count("lease") == 0
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0
    database.check_invariants()
    print(f"{times} signals during start-up, SIGTERM and SIGINT in turn: nothing left behind")


STUCK = """
import asyncio, sys, time
from datetime import timedelta
from busload import CommandBus, Worker, WorkerSettings

async def main():
    async with CommandBus(sys.argv[1]) as bus:
        @bus.handler("payments", "Debit")
        def stuck(command, ctx):
            print("started", flush=True)
            time.sleep(600)
        await Worker(bus, settings=WorkerSettings(grace=timedelta(seconds=0.3))).run(signals=True)

asyncio.run(main())
"""


def test_a_thread_that_never_ends_does_not_keep_the_process(
    dsn: str, sync_bus: SyncCommandBus, database: Database
) -> None:
    sync_bus.send(DOMAIN, "Debit")
    paths = os.pathsep.join([str(SOURCES), *(path for path in sys.path if path.endswith("site-packages"))])
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, dsn],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": paths, "PATH": os.defpath, "HOME": "/"},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()
    nothing_was_burnt(database, executions=0, left=1)


def test_peer_pgqueuer_630(workers: Workers, sync_bus: SyncCommandBus, database: Database) -> None:
    """Cancellation at SIGTERM skips the status write; rows stay picked and block others."""
    [pid] = workers.start(grace=0.1)
    waiting(sync_bus, workers)
    workers.kill(pid, signal.SIGTERM)
    until(lambda: pid in workers.look())
    (workers.ledger.parent / "gate").touch()
    workers.start()
    until(lambda: database.value("SELECT completed_at IS NOT NULL FROM busload.batch"))
    assert workers.stop() == [0]
    database.check_invariants()


def test_peer_graphile_worker_449(workers: Workers, sync_bus: SyncCommandBus, database: Database) -> None:
    """An unclean stop leaves jobs locked for hours."""
    [pid] = workers.start()
    waiting(sync_bus, workers, commands=5)
    workers.kill(pid, signal.SIGKILL)
    until(lambda: pid in workers.look())
    (workers.ledger.parent / "gate").touch()
    database.rows("UPDATE busload.worker SET seen_at = now() - lease_for - interval '1 s'")
    workers.start()
    until(lambda: database.value("SELECT completed_at IS NOT NULL FROM busload.batch"))
    assert workers.stop() == [0]
    database.check_invariants()

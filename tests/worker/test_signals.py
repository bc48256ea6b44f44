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
from tests.chaos.harness import SOURCES, Workers, folder
from tests.given import DOMAIN, Database, until


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


def nothing_was_burnt(database: Database, *, executions: int, left: int) -> None:
    assert database.count("lease") == 0
    assert database.count("execution") == executions
    assert database.value("SELECT coalesce(sum(hi - lo + 1), 0) FROM busload.queue") == left
    assert database.rows("SELECT DISTINCT attempt, crashes FROM busload.queue") == [(1, 0)] * bool(left)
    assert database.rows("SELECT lost, stopped_at IS NOT NULL FROM busload.worker") == [(False, True)]
    assert database.value("SELECT count(*) FROM busload.event WHERE type = 'LEASE_LOST'") == 0
    database.check_invariants()


def pending(pid: int) -> bool:
    """Whether the kernel has not delivered a signal to this process yet."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return int(status["ShdPnd"], 16) != 0 or int(status["SigPnd"], 16) != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_is_finished_and_the_rest_is_left(
    workers: Workers, sync_bus: SyncCommandBus, database: Database, path: Path, number: int
) -> None:
    [pid] = workers.start(grace=60)
    waiting(sync_bus, workers)
    workers.kill(pid, number)
    until(lambda: not pending(pid))
    (path / "gate").touch()
    until(lambda: pid in workers.look(), within=10)
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
    until(lambda: pid in workers.look(), within=10)
    assert workers.ended[pid] == 0, workers.log.read_text()
    assert time.monotonic() - began < 0.5 + 2.5
    nothing_was_burnt(database, executions=0, left=20)


def test_a_second_signal_hurries(workers: Workers, sync_bus: SyncCommandBus, database: Database) -> None:
    [pid] = workers.start(grace=600)
    waiting(sync_bus, workers)
    workers.kill(pid, signal.SIGTERM)
    until(lambda: not pending(pid))  # two that arrive together are one
    assert pid not in workers.look()
    workers.kill(pid, signal.SIGTERM)
    until(lambda: pid in workers.look(), within=10)
    assert workers.ended[pid] == 0, workers.log.read_text()
    nothing_was_burnt(database, executions=0, left=20)


def test_an_idle_worker_leaves_at_once(workers: Workers, database: Database) -> None:
    [pid] = workers.start(grace=600)
    until(lambda: database.count("worker") == 1)
    until(lambda: database.value("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"))
    workers.kill(pid, signal.SIGTERM)
    until(lambda: pid in workers.look(), within=5)
    assert workers.ended[pid] == 0, workers.log.read_text()


def test_a_signal_while_it_starts_leaves_nothing_behind(
    workers: Workers, sync_bus: SyncCommandBus, database: Database, path: Path
) -> None:
    (path / "gate").touch()
    sync_bus.create_batch(DOMAIN, [BatchCommand("Wait") for _ in range(5)])
    for n in range(8):
        [pid] = workers.start()
        until(lambda n=n: time.monotonic() * 1000 % 8 // 1 == n)  # type: ignore[misc]  # a little later each time
        workers.kill(pid, signal.SIGTERM)
        until(lambda pid=pid: pid in workers.look(), within=10)  # type: ignore[misc]
        assert workers.ended[pid] in (0, -signal.SIGTERM), workers.log.read_text()
    assert database.count("lease") == 0
    database.check_invariants()


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
        await Worker(bus, settings=WorkerSettings(grace=timedelta(seconds=0.3))).run()

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
        assert process.wait(timeout=5) == 0
    finally:
        process.kill()
        process.communicate()
    nothing_was_burnt(database, executions=0, left=1)


def test_peer_pgqueuer_630(workers: Workers, sync_bus: SyncCommandBus, database: Database) -> None:
    """Cancellation at SIGTERM skips the status write; rows stay picked and block others."""
    [pid] = workers.start(grace=0.1)
    waiting(sync_bus, workers)
    workers.kill(pid, signal.SIGTERM)
    until(lambda: pid in workers.look(), within=10)
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

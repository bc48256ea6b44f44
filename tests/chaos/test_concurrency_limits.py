"""Workers are killed and frozen while their calls are limited: never more at a time than a receiver takes."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import psycopg

from busload import BatchCommand, Settings, SyncCommandBus
from busload.commands import claim, rescue
from busload.limits.concurrency import Singles, take_single
from busload.sync.plan import perform
from tests.chaos.harness import Server, Workers, folder, seeded
from tests.chaos.nursery import CONCURRENT
from tests.given import Database, short_and_long, until

LEASE = 1.5
"""Seconds."""
FREEZES = [2.0, 0.6, 2.5]
"""How long workers are frozen, in leases: so long that they are declared dead, or not quite."""
MOST = [1, 2, 3, 4, 5]
WAIT = 900.0


@short_and_long("count, keys, commands, faults", (3, 20, 1000, 4), (8, 200, 100_000, 60))
def test_never_more_calls_run_than_allowed_though_workers_are_killed_and_frozen(
    count: int, keys: int, commands: int, faults: int
) -> None:
    chance = seeded()
    with folder() as path, Server(path / "server") as server, Database(server.dsn) as database:
        with SyncCommandBus(server.dsn, settings=Settings(pool_size=2)) as bus:
            for first in range(0, commands, 5000):
                work = [command(n, keys) for n in range(first, min(first + 5000, commands))]
                bus.create_batch(CONCURRENT, work)
        options = {"calls": str(path / "calls"), "concurrent": MOST, "domains": [CONCURRENT], "pause": 0.02}
        with Workers(server.dsn, path, lease_for=LEASE, concurrency=20, **options) as workers:
            workers.start(count)
            until(lambda: (path / "calls").exists() and ended(path) > 0, 60)
            harm(workers, chance, count, faults)
            until(database.is_at_rest, WAIT)
            workers.stop()
        lives: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
        for pid, started_at, stopped_at in database.rows(
            "SELECT split_part(name, ':', 2)::int, extract(epoch FROM started_at)::float8,"
            "       CASE WHEN lost THEN extract(epoch FROM stopped_at)::float8 END"
            "  FROM busload.worker ORDER BY worker"
        ):
            lives[pid].append((started_at, stopped_at))
        assert sum(stopped is not None for spans in lives.values() for _, stopped in spans) > 0
        most, strays, calls = most_in_flight(path / "calls", lives)
        print(f"{calls} calls, at most {dict(sorted(most.items()))} at a time, {strays} begun as the process froze")
        assert calls >= commands
        assert all(found <= allowed for allowed, found in most.items())
        assert most[5] > 1
        assert strays <= (faults + 1) // 2
        completed = "SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'"
        assert database.value(completed) == commands
        assert database.count("permit") == 0
        database.check_invariants()


def test_a_permit_outlasts_a_crash_of_the_server() -> None:
    """The server crashes right after it has granted permits, and with it everything that was not on the disk."""
    with folder() as path, Server(path / "server") as server:
        with SyncCommandBus(server.dsn) as bus:
            bus.create_batch(CONCURRENT, [command(n, 10) for n in range(20)])
        with Database(server.dsn) as database:
            database.rows("ALTER SYSTEM SET wal_writer_delay = '10s'")
            database.rows("SELECT pg_reload_conf()")
            lease_for = timedelta(minutes=5)
            plan = rescue.register(name="given", domains=[CONCURRENT], concurrency=20, lease_for=lease_for)
            worker = database.perform(plan)
            leased = database.perform(claim.claim(worker=worker, domains=[CONCURRENT], limit=20)).leased
            asked, again = Singles(), Singles()
            for n, one in enumerate(leased):
                (asked if n < 10 else again).add("crm", str(n % 10), 1, one)
            with psycopg.connect(server.dsn, autocommit=True) as conn:  # as those of workers
                permits = perform(conn, take_single(asked, worker=worker))
            server.restart()
        with Database(server.dsn) as database:
            assert database.rows("SELECT permit FROM busload.permit ORDER BY permit") == [(one,) for one in permits]
            assert database.perform(take_single(again, worker=worker)) == [0] * 10
            database.check_invariants()


def command(n: int, keys: int) -> BatchCommand:
    return BatchCommand(f"At{MOST[n % len(MOST)]}", data={"key": n // len(MOST) % max(1, keys // len(MOST))})


def ended(path: Path) -> int:
    return (path / "calls").read_text().count("end ")


def harm(workers: Workers, chance: random.Random, count: int, faults: int) -> None:
    """Kill a worker, or freeze it: for so long that it is declared dead, or nearly so long."""
    for fault in range(faults):
        time.sleep(chance.uniform(0.2, 0.6))
        workers.keep(count)
        pid = chance.choice(workers.alive)
        if fault % 2 == 0:
            workers.kill(pid, signal.SIGSTOP)
            time.sleep(LEASE * FREEZES[fault // 2 % len(FREEZES)])
            workers.kill(pid, signal.SIGCONT)
        else:
            workers.kill(pid)
    workers.keep(count)


def most_in_flight(path: Path, lives: dict[int, list[tuple[float, float | None]]]) -> tuple[dict[int, int], int, int]:
    """The most calls of one key that ran at a time, by what is allowed; how many were begun by the dead; all calls.

    A call of a worker that was declared dead counts until then: what it already ran went on. A process that is frozen
    between its last look at the clock and the first line of the handler begins that one call when it thaws.
    """
    spans: dict[str, list[tuple[float, int]]] = defaultdict(list)
    begins: dict[str, tuple[str, int, float]] = {}
    ends: dict[str, float] = {}
    strays = 0
    for line in path.read_text().splitlines():
        fact, key, execution, pid, at = line.split()
        if fact == "begin":
            begins[execution] = key, int(pid), int(at) / 1e9
        else:
            ends[execution] = int(at) / 1e9
    for execution, (key, process, began) in begins.items():
        alive = [(start, stop) for start, stop in lives[process] if start <= began]
        _, stop = alive[-1]
        if stop is not None and began >= stop:
            strays += 1
            continue
        end = min(ends.get(execution, float("inf")), stop or float("inf"))
        spans[key] += [(began, 1), (end, -1)]
    most: dict[int, int] = defaultdict(int)
    for key, edges in spans.items():
        now = 0
        for _, step in sorted(edges):
            now += step
            allowed = int(key.partition("/")[0].removeprefix("At"))
            most[allowed] = max(most[allowed], now)
    return most, strays, len(begins)

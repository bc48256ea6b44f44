"""A ledger of calls: when each began and ended, while the workers that made them were killed and frozen."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from busload import BatchCommand, Settings, SyncCommandBus
from tests.chaos.harness import Server, Workers, folder, seeded
from tests.given import Database, until

LEASE = 1.5
"""Seconds."""
FREEZES = [2.0, 0.6, 2.5]
"""How long workers are frozen, in leases: so long that they are declared dead, or not quite."""
WAIT = 900.0

Lives = dict[int, list[tuple[float, float | None]]]
"""For each process, when it was a worker, and when it was declared dead, if it was."""


class Call(NamedTuple):
    """A call of a worker that lived, until it ended or its worker was declared dead: what it already ran went on."""

    began: float
    end: float
    n: int


@dataclass
class Ledger:
    """All calls by key, and how many there were.

    A process that is frozen between its last look at the clock and the first line of the handler begins that one call
    when it thaws: a stray.
    """

    calls: dict[str, list[Call]]
    count: int
    strays: int


@contextmanager
def harmed_run(
    domain: str,
    commands: Sequence[BatchCommand],
    workers: int,
    faults: int,
    rests: Callable[[Database], bool] = lambda database: True,
    **options: Any,
) -> Iterator[tuple[Database, Ledger]]:
    """Workers run these commands and are killed and frozen meanwhile; what they noted, when the database is at rest.

    `rests` says whether something else has come to rest, too. Each command completes once, and there are as few strays
    as freezes.
    """
    chance = seeded()
    with folder() as path, Server(path / "server") as server, Database(server.dsn) as database:
        with SyncCommandBus(server.dsn, settings=Settings(pool_size=2)) as bus:
            for first in range(0, len(commands), 5000):
                bus.create_batch(domain, commands[first : first + 5000])
        file = path / "calls"
        options |= {"calls": str(file), "domains": [domain]}
        with Workers(server.dsn, path, lease_for=LEASE, concurrency=20, **options) as running:
            running.start(workers)
            until(lambda: file.exists() and "end " in file.read_text(), 60)
            harm(running, chance, workers, faults)
            until(database.is_at_rest, WAIT)
            until(lambda: rests(database), 60)
            running.stop()
        lives = lives_of(database)
        assert sum(stopped is not None for spans in lives.values() for _, stopped in spans) > 0
        ledger = read(file, lives)
        assert ledger.count >= len(commands)
        assert ledger.strays <= (faults + 1) // 2
        completed = "SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'"
        assert database.value(completed) == len(commands)
        yield database, ledger
        database.check_invariants()


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


def lives_of(database: Database) -> Lives:
    lives: Lives = defaultdict(list)
    for pid, started_at, stopped_at in database.rows(
        "SELECT split_part(name, ':', 2)::int, extract(epoch FROM started_at)::float8,"
        "       CASE WHEN lost THEN extract(epoch FROM stopped_at)::float8 END"
        "  FROM busload.worker ORDER BY worker"
    ):
        lives[pid].append((started_at, stopped_at))
    return lives


def read(path: Path, lives: Lives) -> Ledger:
    begins: dict[str, tuple[str, int, int, float]] = {}
    ends: dict[str, float] = {}
    for line in path.read_text().splitlines():
        fact, key, n, execution, pid, at = line.split()
        if fact == "begin":
            begins[execution] = key, int(n), int(pid), int(at) / 1e9
        else:
            ends[execution] = int(at) / 1e9
    ledger = Ledger(defaultdict(list), len(begins), 0)
    for execution, (key, number, process, began) in begins.items():
        _, stop = [life for life in lives[process] if life[0] <= began][-1]
        if stop is not None and began >= stop:
            ledger.strays += 1
        else:
            end = min(ends.get(execution, float("inf")), stop or float("inf"))
            ledger.calls[key].append(Call(began, end, number))
    return ledger

"""Workers are killed and frozen while commands run in order: none overtakes its predecessors, and none runs beside."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from busload import BatchCommand, Settings, SyncCommandBus
from tests.chaos.harness import Server, Workers, folder, seeded
from tests.chaos.nursery import ORDERED
from tests.chaos.test_concurrency_limits import LEASE, WAIT, ended, harm
from tests.given import Database, short_and_long, until

TYPES = ["Plain", "InThread", "InTransaction", "Plain"]


@short_and_long("count, keys, commands, faults", (3, 10, 400, 4), (8, 200, 100_000, 60))
def test_no_command_overtakes_its_predecessors_though_workers_are_killed_and_frozen(
    count: int, keys: int, commands: int, faults: int
) -> None:
    chance = seeded()
    with folder() as path, Server(path / "server") as server, Database(server.dsn) as database:
        with SyncCommandBus(server.dsn, settings=Settings(pool_size=2)) as bus:
            for first in range(0, commands, 5000):
                work = [command(n, keys) for n in range(first, min(first + 5000, commands))]
                bus.create_batch(ORDERED, work)
        options = {"calls": str(path / "calls"), "ordered": True, "domains": [ORDERED], "pause": 0.01}
        with Workers(server.dsn, path, lease_for=LEASE, concurrency=20, **options) as workers:
            workers.start(count)
            until(lambda: (path / "calls").exists() and ended(path) > 0, 60)
            harm(workers, chance, count, faults)
            until(database.is_at_rest, WAIT)
            until(lambda: database.count("first_in_order") == 0, 60)
            workers.stop()
        lives: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
        for pid, started_at, stopped_at in database.rows(
            "SELECT split_part(name, ':', 2)::int, extract(epoch FROM started_at)::float8,"
            "       CASE WHEN lost THEN extract(epoch FROM stopped_at)::float8 END"
            "  FROM busload.worker ORDER BY worker"
        ):
            lives[pid].append((started_at, stopped_at))
        assert sum(stopped is not None for spans in lives.values() for _, stopped in spans) > 0
        calls, inversions, beside, strays = judge(path / "calls", lives)
        print(f"{calls} calls: {inversions} out of order, {beside} beside another, {strays} begun as the process froze")
        assert calls >= commands
        assert (inversions, beside) == (0, 0)
        assert strays <= (faults + 1) // 2
        completed = "SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'"
        assert database.value(completed) == commands
        database.check_invariants()


def command(n: int, keys: int) -> BatchCommand:
    return BatchCommand(TYPES[n // keys % len(TYPES)], data={"key": n % keys, "n": n})


def judge(path: Path, lives: dict[int, list[tuple[float, float | None]]]) -> tuple[int, int, int, int]:
    """All calls; those that began after a later command of their key; those that began beside another; strays.

    A call of a worker that was declared dead counts until then: what it already ran went on. A process that is frozen
    between its last look at the clock and the first line of the handler begins that one call when it thaws: a stray.
    """
    begins: dict[str, tuple[str, int, int, float]] = {}
    ends: dict[str, float] = {}
    for line in path.read_text().splitlines():
        fact, key, number, execution, pid, at = line.split()
        if fact == "begin":
            begins[execution] = key, int(number), int(pid), int(at) / 1e9
        else:
            ends[execution] = int(at) / 1e9
    strays = 0
    calls: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for execution, (key, n, process, began) in begins.items():
        alive = [(start, stop) for start, stop in lives[process] if start <= began]
        _, stop = alive[-1]
        if stop is not None and began >= stop:
            strays += 1
            continue
        calls[key].append((began, min(ends.get(execution, float("inf")), stop or float("inf")), n))
    inversions = beside = 0
    for of_key in calls.values():
        highest, last_end = -1, 0.0
        for began, end, n in sorted(of_key):
            inversions += n < highest
            beside += began < last_end
            highest, last_end = max(highest, n), max(last_end, end)
    return len(begins), inversions, beside, strays

"""Workers are killed and frozen while their calls are limited: never more at a time than a receiver takes."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

import psycopg

from busload import BatchCommand, SyncCommandBus
from busload.commands import claim, rescue
from busload.limits.concurrency import Singles, take_single
from busload.sync.plan import perform
from tests.chaos.harness import Server, folder
from tests.chaos.ledger import Call, harmed_run
from tests.chaos.nursery import CONCURRENT
from tests.given import Database, short_and_long

MOST = [1, 2, 3, 4, 5]


@short_and_long("count, keys, commands, faults", (3, 20, 1000, 4), (8, 200, 100_000, 60))
def test_never_more_calls_run_than_allowed_though_workers_are_killed_and_frozen(
    count: int, keys: int, commands: int, faults: int
) -> None:
    work = [command(n, keys) for n in range(commands)]
    with harmed_run(CONCURRENT, work, count, faults, concurrent=MOST, pause=0.02) as (database, ledger):
        most = most_in_flight(ledger.calls)
        print(
            f"{ledger.count} calls, at most {dict(sorted(most.items()))} at a time, "
            f"{ledger.strays} begun as the process froze"
        )
        assert all(found <= allowed for allowed, found in most.items())
        assert most[5] > 1
        assert database.count("permit") == 0


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
            asked.add("crm", 1, [str(n) for n in range(10)], leased[:10])
            again.add("crm", 1, [str(n) for n in range(10)], leased[10:])
            with psycopg.connect(server.dsn, autocommit=True) as conn:  # as those of workers
                permits = perform(conn, take_single(asked, worker=worker)).numbers
            server.restart()
        with Database(server.dsn) as database:
            assert database.rows("SELECT permit FROM busload.permit ORDER BY permit") == [(one,) for one in permits]
            assert database.perform(take_single(again, worker=worker)).numbers == [0] * 10
            database.check_invariants()


def command(n: int, keys: int) -> BatchCommand:
    return BatchCommand(f"At{MOST[n % len(MOST)]}", data={"key": n // len(MOST) % max(1, keys // len(MOST))})


def most_in_flight(by_key: dict[str, list[Call]]) -> dict[int, int]:
    """The most calls of one key that ran at a time, by what is allowed."""
    most: dict[int, int] = defaultdict(int)
    for key, calls in by_key.items():
        now, allowed = 0, int(key.partition("/")[0].removeprefix("At"))
        for _, step in sorted(edge for call in calls for edge in ((call.began, 1), (call.end, -1))):
            now += step
            most[allowed] = max(most[allowed], now)
    return most

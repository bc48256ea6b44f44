"""Many actors, one database: whatever comes between two statements, what busload promises holds."""

from __future__ import annotations

import threading

import psycopg
import pytest

from busload.testing import TestServer
from tests.explorer.casts import CASTS
from tests.explorer.exhaustive import SCOPES, explore_all
from tests.explorer.schedule import begin, explore, replay, shrink, told
from tests.explorer.worlds import world_of

SCHEDULES = {"workers": 120, "operators": 80, "strangers": 80, "relays": 80, "senders": 80}
"""In every run, by the same seeds, so that a run that fails can be repeated."""
LENGTH = 18


def explored(server: TestServer, cast: str) -> None:
    with world_of(server, CASTS[cast]) as world:
        for seed in range(SCHEDULES[cast]):
            run = explore(world, seed, LENGTH, look_every=3)
            if run.violation:
                pytest.fail(told(shrink(world, run, tries=60), f"--cast {cast} --length {LENGTH} --replay {seed}"))


@pytest.mark.timeout(600)
def test_workers_and_a_sweeper_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "workers")


@pytest.mark.timeout(600)
def test_operators_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "operators")


@pytest.mark.timeout(600)
def test_a_transaction_that_stays_open_loses_and_doubles_nothing(server: TestServer) -> None:
    explored(server, "strangers")


@pytest.mark.timeout(600)
def test_relays_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "relays")


@pytest.mark.timeout(600)
def test_senders_and_a_pruner_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "senders")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scope", SCOPES)
def test_all_orders_of_a_small_scope_lose_and_double_nothing(server: TestServer, scope: str) -> None:
    with world_of(server, SCOPES[scope].cast) as world:
        explored = explore_all(world, SCOPES[scope])
        if explored.failed is not None:
            pytest.fail(told(explored.failed))
        assert explored.complete
        assert explored.states > 30


def test_a_schedule_is_the_same_each_time_it_is_replayed(server: TestServer) -> None:
    with world_of(server, CASTS["operators"]) as world:
        for seed in range(8):
            first = explore(world, seed, LENGTH)
            assert first.violation is None
            assert replay(world, first.actions).story == first.story


def test_nobody_waits_for_a_lock_from_outside_of_the_schedule(server: TestServer) -> None:
    """Such as that of a vacuum: else a schedule would go another way each time one comes."""
    with world_of(server, CASTS["operators"]) as world, psycopg.connect(world.dsn) as vacuum:
        worker = world.actors["worker 1"]
        begin(world, worker, "register!")
        vacuum.execute("LOCK TABLE busload.queue IN ACCESS EXCLUSIVE MODE")

        def let_go_when_somebody_has_looked() -> None:
            waits = "SELECT FROM unnest(pg_blocking_pids(%s)) AS by WHERE by = %s"
            looked = "SELECT FROM pg_stat_activity WHERE pid = %s AND query LIKE '%%pg_blocking_pids%%'"
            with psycopg.connect(world.dsn, autocommit=True) as conn:
                while not (
                    conn.execute(waits, [worker.session.pid, vacuum.info.backend_pid]).fetchall()
                    and conn.execute(looked, [world.watch.info.backend_pid]).fetchall()
                ):
                    pass
            vacuum.rollback()

        letting_go = threading.Thread(target=let_go_when_somebody_has_looked)
        letting_go.start()
        begin(world, worker, "claim 1")
        letting_go.join()
        assert not worker.waits

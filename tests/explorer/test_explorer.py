"""Many actors, one database: whatever comes between two statements, what busload promises holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from busload.testing import TestServer
from tests.explorer.casts import CASTS
from tests.explorer.schedule import explore, replay, shrink, told
from tests.explorer.world import World

SCHEDULES = 150
"""Of each cast, in every run: by the same seeds, so that a run that fails can be repeated."""
LENGTH = 18


@contextmanager
def world_of(server: TestServer, cast: str) -> Iterator[World]:
    with server.database() as dsn:
        world = World(dsn, CASTS[cast])
        try:
            yield world
        finally:
            world.close()


def explored(server: TestServer, cast: str) -> None:
    with world_of(server, cast) as world:
        for seed in range(SCHEDULES):
            run = explore(world, seed, LENGTH, look_every=3)
            if run.violation:
                pytest.fail(told(shrink(world, run, tries=60), f"--cast {cast} --length {LENGTH} --replay {seed}"))


def test_workers_and_a_sweeper_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "workers")


def test_operators_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "operators")


def test_a_transaction_that_stays_open_loses_and_doubles_nothing(server: TestServer) -> None:
    explored(server, "strangers")


def test_relays_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "relays")


def test_senders_and_a_pruner_lose_and_double_nothing(server: TestServer) -> None:
    explored(server, "senders")


def test_a_schedule_is_the_same_each_time_it_is_replayed(server: TestServer) -> None:
    with world_of(server, "operators") as world:
        for seed in range(10):
            first = explore(world, seed, LENGTH)
            story = list(first.story)
            assert first.violation is None
            assert list(replay(world, first.actions).story) == story

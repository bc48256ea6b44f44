"""Worlds for tests, each in a database of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from busload.testing import TestServer
from tests.explorer.world import World


@contextmanager
def world_of(server: TestServer, cast: Sequence[str]) -> Iterator[World]:
    with server.database() as dsn:
        world = World(dsn, cast)
        try:
            yield world
        finally:
            world.close()

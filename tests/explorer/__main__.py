"""`python -m tests.explorer`: explore schedules of many actors for as long as asked."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from busload.testing import TestServer
from tests.explorer.casts import CASTS, EVERYBODY
from tests.explorer.exhaustive import LARGER, SCOPES, explore_all
from tests.explorer.schedule import Run, explore, replay, shrink, told
from tests.explorer.world import World

CONFIG = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off", "max_connections": "60"}


@contextmanager
def own_world(names: Sequence[str] = EVERYBODY) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="busload-explore-") as home:
        Path(home).chmod(0o755)
        with TestServer(Path(home), config=CONFIG) as server, server.database() as dsn:
            world = World(dsn, names)
            try:
                yield world
            finally:
                world.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make explore", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; drawn by chance if left out")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to explore")
    parser.add_argument("--length", type=int, default=24, help="actions of a schedule, at most")
    parser.add_argument("--replay", metavar="SEED", type=int, help="carry out one schedule again, and tell its story")
    parser.add_argument("--cast", choices=sorted(CASTS), help="who takes part; everybody if left out")
    parser.add_argument("--exhaustive", action="store_true", help="try all orders of the small scopes, and of larger")
    options = parser.parse_args(arguments)
    if options.exhaustive:
        return exhaustive(options.seconds)
    with own_world(CASTS.get(options.cast, EVERYBODY)) as world:
        if options.replay is not None:
            run = explore(world, options.replay, options.length)
            print("\n".join(run.story))
            return report(world, run, options.replay, options) if run.violation else 0
        first = options.seed if options.seed is not None else int.from_bytes(os.urandom(4)) * 1000
        began, seed, commits, actions = time.monotonic(), first, 0, 0
        while time.monotonic() - began < options.seconds:
            run = explore(world, seed, options.length)
            if run.violation:
                return report(world, run, seed, options)
            seed, commits, actions = seed + 1, commits + world.commits, actions + len(run.actions)
        print(f"{seed - first} schedules from seed {first}: {actions} actions, {commits} commits checked, no violation")
    return 0


def exhaustive(seconds: float) -> int:
    """Each scope for as long as asked, at most."""
    for name, scope in {**SCOPES, **LARGER}.items():
        with own_world(scope.cast) as world:
            explored = explore_all(world, scope, seconds=seconds)
            if explored.failed is not None:
                print(told(explored.failed))
                return 1
            whole = "all orders" if explored.complete else "not all orders"
            print(f"{name}: {explored.states} states in {explored.schedules} schedules, {whole}", flush=True)
    return 0


def report(world: World, run: Run, seed: int, options: argparse.Namespace) -> int:
    again = replay(world, run.actions)
    cast = f"--cast {options.cast} " if options.cast else ""
    repeat = f"{cast}--length {options.length} --replay {seed}"
    print(told(shrink(world, again) if again.violation else run, repeat), flush=True)
    if not again.violation:
        print("(It did not happen again when the same actions were carried out.)")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Records real runs of batches to calibrate forecasts on: `python -m bench.forecast RUNS.jsonl --from 0 --runs 80`.

Each run is a batch of its own shape, with real workers on an embedded PostgreSQL. While it runs, the recorder keeps
what a forecast would be told when 10, 25, 50, 75 and 90 % of it have ended, and how many seconds later it was done.
Handlers mostly wait, so many runs go on beside each other. `tests/batches/test_calibration.py` replays the recording.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    ConcurrencyLimit,
    HandlerContext,
    RateLimit,
    RetryPolicy,
    TransientCommandError,
    Worker,
)
from busload.testing import TestServer

MOMENTS = (0.10, 0.25, 0.50, 0.75, 0.90)
"""Shares of a batch that have ended when the recorder looks."""
LOOK_EVERY = 0.02
DEFAULTS = {"parked": 0, "sealed": True, "canary": False, "running": 0, "paused": False}
SIDE_BY_SIDE = 14

Takes = Callable[[int, random.Random], float]
"""How many seconds the n-th command takes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How one run goes. `moves` says at which second a worker joins (+1) or leaves (-1)."""

    name: str
    sizes: tuple[int, ...]
    takes: Takes
    concurrency: int = 100
    workers: int = 1
    fails: float = 0.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rate: float | None = None
    at_a_time: int | None = None
    moves: tuple[tuple[float, int], ...] = ()
    works: float = 0.0
    rests: float = 0.0


def quick(r: random.Random) -> Shape:
    return Shape("quick", (r.randint(8_000, 20_000),), lambda n, _: 0.0)


def large(r: random.Random) -> Shape:
    return Shape("large", (50_000,), lambda n, _: 0.001, concurrency=200)


def slow(r: random.Random) -> Shape:
    each, slots = r.uniform(0.15, 0.6), r.randint(4, 20)
    return Shape("slow", (int(r.uniform(4, 10) / each * slots),), lambda n, _: each, slots)


def small(r: random.Random) -> Shape:
    each, spread = r.uniform(0.2, 0.6), r.uniform(0.2, 0.8)
    return Shape("small", (50,), lambda n, c: each * c.lognormvariate(0, spread), r.randint(2, 6))


def log_normal(r: random.Random) -> Shape:
    each, spread, slots = r.uniform(0.05, 0.2), r.uniform(0.5, 1.2), r.randint(5, 30)
    size = int(r.uniform(4, 9) * slots / each / math.exp(spread**2 / 2))
    return Shape("log-normal", (size,), lambda n, c: each * c.lognormvariate(0, spread), slots)


def bimodal(r: random.Random) -> Shape:
    share, long, slots = r.uniform(0.05, 0.3), r.uniform(0.3, 1.0), r.randint(5, 30)
    size = int(r.uniform(4, 9) * slots / (share * long + 0.02))
    return Shape("bimodal", (size,), lambda n, c: long if c.random() < share else 0.02, slots)


def drifting(name: str, low: float, high: float) -> Callable[[random.Random], Shape]:
    def make(r: random.Random) -> Shape:
        each, slots, factor = r.uniform(0.05, 0.2), r.randint(5, 25), r.uniform(low, high)
        size = int(r.uniform(5, 9) * slots / each / ((1 + factor) / 2))
        return Shape(name, (size,), lambda n, _: each * (1 + (factor - 1) * n / size), slots)

    return make


def moving(name: str, workers: int, move: int) -> Callable[[random.Random], Shape]:
    def make(r: random.Random) -> Shape:
        each, slots = r.uniform(0.05, 0.2), r.randint(5, 20)
        seconds = r.uniform(5, 9)
        size = int(seconds * slots * workers / each)
        takes: Takes = lambda n, c: each * c.uniform(0.7, 1.3)  # noqa: E731
        return Shape(name, (size,), takes, slots, workers, moves=((seconds * r.uniform(0.3, 0.6), move),))

    return make


def retried(name: str, share: float) -> Callable[[random.Random], Shape]:
    def make(r: random.Random) -> Shape:
        each, slots = r.uniform(0.05, 0.2), r.randint(5, 25)
        backoff = tuple(r.uniform(0.3, 1.0) * 2**n for n in range(3))
        size = int(r.uniform(5, 9) * slots / each)
        return Shape(name, (size,), lambda n, _: each, slots, fails=share, retry=RetryPolicy(10, backoff))

    return make


def rate_limited(r: random.Random) -> Shape:
    rate = r.uniform(20, 200)
    return Shape("rate limit", (int(rate * r.uniform(5, 10)),), lambda n, _: 0.01, r.randint(20, 100), rate=rate)


def limited(r: random.Random) -> Shape:
    each, most = r.uniform(0.05, 0.2), r.randint(2, 8)
    size = int(r.uniform(5, 9) * most / each)
    takes: Takes = lambda n, c: each * c.uniform(0.7, 1.3)  # noqa: E731
    return Shape("concurrency limit", (size,), takes, r.randint(20, 100), at_a_time=most)


def beside(r: random.Random) -> Shape:
    each, slots = r.uniform(0.02, 0.1), r.randint(10, 30)
    sizes = tuple(int(r.uniform(1, 5) * slots / each) for _ in range(3))
    return Shape("in turns", sizes, lambda n, c: each * c.uniform(0.7, 1.3), slots)


def bursts(r: random.Random) -> Shape:
    each, slots = r.uniform(0.03, 0.1), r.randint(5, 25)
    works, rests = r.uniform(0.4, 1.2), r.uniform(0.3, 1.0)
    size = int(r.uniform(5, 9) * slots / each * works / (works + rests))
    return Shape("bursts", (size,), lambda n, _: each, slots, works=works, rests=rests)


def stragglers(r: random.Random) -> Shape:
    each, slots, long = r.uniform(0.05, 0.2), r.randint(8, 25), r.uniform(2, 4)
    size, few = int(r.uniform(5, 8) * slots / each), r.randint(1, 4)
    return Shape("stragglers", (size,), lambda n, _: long if n >= size - few else each, slots)


SHAPES: dict[Callable[[random.Random], Shape], int] = {
    quick: 14,
    large: 8,
    slow: 16,
    small: 24,
    log_normal: 20,
    bimodal: 16,
    drifting("speeding up", 0.25, 0.6): 16,
    drifting("slowing down", 1.6, 4.0): 16,
    moving("worker joins", 1, 1): 14,
    moving("worker leaves", 2, -1): 14,
    retried("1 % retried", 0.01): 16,
    retried("20 % retried", 0.20): 16,
    rate_limited: 14,
    limited: 14,
    beside: 8,
    bursts: 14,
    stragglers: 14,
}
"""Shapes, and how many runs of each. A run of `beside` is three batches."""


def plan(seed: int = 2026) -> list[Shape]:
    """All runs, in an order that mixes shapes, the same each time for one seed."""
    r = random.Random(seed)
    shapes = [make(r) for make, count in SHAPES.items() for _ in range(count)]
    r.shuffle(shapes)
    return shapes


async def run(dsn: str, number: int, shape: Shape) -> list[dict[str, Any]]:
    """Run the batches of one shape to their end, and return what was seen of each."""
    domain, chance = f"run-{number}", random.Random(number)
    async with CommandBus(dsn) as bus, AsyncExitStack() as workers:
        limits: dict[str, Any] = {"retry": shape.retry}
        if shape.rate is not None:
            limits["rate_limit"] = RateLimit(shape.rate)
        if shape.at_a_time is not None:
            limits["concurrency_limit"] = ConcurrencyLimit(shape.at_a_time)

        @bus.handler(domain, "Wait", **limits)
        async def wait(command: Command, ctx: HandlerContext) -> None:
            seconds = shape.takes(command.data["n"], chance)
            if shape.works:
                into = time.monotonic() % (shape.works + shape.rests)
                seconds += max(0.0, shape.works + shape.rests - into) if into > shape.works else 0.0
            if seconds:
                await asyncio.sleep(seconds)
            if chance.random() < shape.fails:
                raise TransientCommandError("It fails by chance.")

        batches = [
            await bus.create_batch(domain, [BatchCommand("Wait", data={"n": n}) for n in range(size)])
            for size in shape.sizes
        ]
        running = [await _join(workers, bus, shape) for _ in range(shape.workers)]
        moves = asyncio.create_task(_move(workers, bus, shape, running))
        seen = await asyncio.gather(*(_watch(dsn, batch_id, shape) for batch_id in batches))
        moves.cancel()
    return seen


async def _join(workers: AsyncExitStack, bus: CommandBus, shape: Shape) -> Worker:
    return await workers.enter_async_context(Worker(bus, concurrency=shape.concurrency))


async def _move(workers: AsyncExitStack, bus: CommandBus, shape: Shape, running: list[Worker]) -> None:
    for after, move in shape.moves:
        await asyncio.sleep(after)
        if move > 0:
            await _join(workers, bus, shape)
        else:
            running.pop().stop()


async def _watch(dsn: str, batch_id: UUID, shape: Shape) -> dict[str, Any]:
    """Look at a batch until it is done; what is kept are the looks right after each of the moments."""
    looks: list[dict[str, Any]] = []
    moments = list(MOMENTS)
    query = "SELECT busload.outlook(b)::text, b.completed_at FROM busload.batch AS b WHERE batch_id = %s"
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        while True:
            found = await (await conn.execute(query, [batch_id])).fetchone()
            assert found is not None
            if found[1] is not None:
                break
            look = json.loads(found[0])
            done = look["ended"] / look["total"]
            if moments and done >= moments[0]:
                while moments and done >= moments[0]:
                    moment = moments.pop(0)
                looks.append({"at": moment, **look})
            await asyncio.sleep(LOOK_EVERY)
    for look in looks:
        now = datetime.fromisoformat(look.pop("now"))
        look["done_in"] = (found[1] - now).total_seconds()
        del look["domain"]
    total = looks[0]["total"] if looks else 0
    return {"shape": shape.name, "total": total, "looks": [dict(_compact(look)) for look in looks]}


def _compact(look: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in look.items():
        if name != "total" and (name not in DEFAULTS or DEFAULTS[name] != value):
            yield name, _rounded(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


async def record(dsn: str, shapes: dict[int, Shape], path: Path) -> None:
    free = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(number: int, shape: Shape) -> None:
        async with free:
            for seen in await run(dsn, number, shape):
                if seen["looks"]:
                    with path.open("a") as file:
                        file.write(json.dumps({"run": number, **seen}, separators=(",", ":")) + "\n")

    await asyncio.gather(*(one(number, shape) for number, shape in shapes.items()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("path", type=Path, help="the recording, which grows")
    options.add_argument("--from", type=int, default=0, dest="first", help="the first run to record")
    options.add_argument("--runs", type=int, default=len(plan()), help="how many runs to record")
    options.add_argument("--seed", type=int, default=2026, help="other runs of the same shapes")
    given = options.parse_args()
    logging.getLogger("busload").setLevel(logging.CRITICAL)  # failures by chance are no news
    shapes = dict(list(enumerate(plan(given.seed)))[given.first : given.first + given.runs])
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        with TestServer(Path(home), config={"max_connections": "300"}) as server, server.database() as dsn:
            began = time.monotonic()
            asyncio.run(record(dsn, shapes, given.path))
            print(f"Recorded {len(shapes)} of {len(plan())} runs in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()

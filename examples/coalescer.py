"""Write many small things in few statements: readings of sensors, of which only the latest of each is kept.

    python examples/coalescer.py

Producers hand over one reading at a time. The coalescer passes up to 500 of them to `write`, keeps them until it has
returned, repeats it if it fails, and sets aside what the database refuses.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from busload import CommandBus
from busload.worker import Coalescer

UPSERT = """
    INSERT INTO reading SELECT * FROM unnest(%s::text[], %s::int[], %s::float8[])
     ON CONFLICT (sensor) DO UPDATE SET at = excluded.at, celsius = excluded.celsius WHERE reading.at < excluded.at"""

bus = CommandBus()


@dataclass(frozen=True)
class Reading:
    sensor: str
    at: int
    celsius: float


async def write(readings: Sequence[Reading]) -> None:
    """One statement for all. It is safe to repeat, as an older reading never replaces a newer one."""
    columns = [[r.sensor for r in readings], [r.at for r in readings], [r.celsius for r in readings]]
    async with bus.pool.connection() as conn:
        await conn.execute(UPSERT, columns)


def latest(readings: Sequence[Reading]) -> Sequence[Reading]:
    """Two readings of a sensor may not meet in one statement: the newer one counts."""
    return list({r.sensor: r for r in sorted(readings, key=lambda r: r.at)}.values())


async def refuse(reading: Reading, error: Exception) -> None:
    print(f"Refused: {reading.celsius} of {reading.sensor}, {type(error).__name__}")


async def measure(readings: Coalescer[Reading], first: int) -> None:
    for at in range(10):
        for sensor in range(first, first + 50):
            await readings.put(Reading(f"sensor {sensor}", at, 20 + at / 10))  # waits when 5,000 are not written yet
        await asyncio.sleep(0.02)


async def main() -> None:
    async with bus, bus.pool.connection() as conn:
        columns = "sensor text PRIMARY KEY, at int, celsius float8 CHECK (celsius > -273.15)"
        await conn.execute(f"CREATE TABLE IF NOT EXISTS reading ({columns})".encode())
        readings = Coalescer(
            write,
            max_size=500,
            max_interval=timedelta(milliseconds=50),
            capacity=5000,
            merge=latest,
            weigh=lambda reading: 16 + len(reading.sensor),  # bytes: a flush ends at max_bytes as well
            max_bytes=64 * 1024,
            on_refused=refuse,
        )
        await readings.put(Reading("a broken one", 1, -1000.0))
        await asyncio.gather(*(measure(readings, first) for first in range(0, 500, 50)))
        left = await readings.close(deadline=timedelta(seconds=10))
        stats = readings.stats
        print(f"{stats.items} readings in {stats.flushes} flushes, {stats.saved_share:.1%} of transactions saved")
        [(sensors, at)] = await (await conn.execute("SELECT count(*), min(at) FROM reading")).fetchall()
        print(f"{sensors} sensors, the latest of each at {at}; {len(left)} left behind")


if __name__ == "__main__":
    asyncio.run(main())

"""What a worker does for buffers: it makes groups of their events, on connections of their own."""

from __future__ import annotations

from busload.buffers.distribute import LOCK_TIMEOUT, Distributor, warn_of_unserved
from busload.postgres.pool import engine_pool
from busload.worker.loop import Loop
from busload.worker.shared import Shared

MOST_DISTRIBUTING = 8
"""Connections for distributing, at most. They are apart, so that a locked table of a buffer holds up nothing else."""


class Distribution:
    """The buffers that a worker serves, each with a loop that empties it."""

    def __init__(self, shared: Shared) -> None:
        bus, settings = shared.bus, shared.settings
        buffers = [buffer for buffer in bus.handlers.buffers if buffer.name in shared.domains]
        self._bus, self._pool, self._own_pool = bus, shared.pool, None
        if buffers:
            self._pool = self._own_pool = engine_pool(
                bus.dsn,
                min(len(buffers), MOST_DISTRIBUTING),
                lock_timeout=LOCK_TIMEOUT,
                users_tables=True,
                response_timeout=bus.settings.response_timeout.total_seconds(),
            )
        every, recheck_after = settings.poll_every, settings.recheck_table_after
        self._distributors = [
            Distributor(self._pool, buffer, shared.pauses, shared.tallies, every, recheck_after) for buffer in buffers
        ]
        self.loops = [Loop(f"Distributing {one.name}", one.once, shared.outage) for one in self._distributors]

    async def start(self) -> None:
        """Look at the tables of the buffers, and warn of buffers that nobody serves."""
        for distributor in self._distributors:
            await distributor.start()
        served = {buffer.name for buffer in self._bus.handlers.buffers}
        await warn_of_unserved(self._pool, list(self._bus.declared_buffers.values()), served)

    async def distribute(self) -> int:
        """Make groups of what is due, and return how many."""
        return sum([await distributor.distribute() for distributor in self._distributors])

    async def close(self) -> None:
        if self._own_pool is not None:
            await self._own_pool.close()

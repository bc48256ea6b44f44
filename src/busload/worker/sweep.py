"""Dead leases, canceled batches, late starts: what every worker puts right from time to time, needing no leader."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from psycopg_pool import AsyncConnectionPool

from busload.store import rescue
from busload.store.connection import AsyncConnection
from busload.store.plan import perform_async

log = logging.getLogger("busload")


class Sweep:
    def __init__(self, pool: AsyncConnectionPool[AsyncConnection], every: timedelta, worker: Callable[[], int]) -> None:
        self._pool, self._every, self._worker = pool, every, worker

    async def once(self) -> float:
        async with self._pool.connection() as conn:
            async with conn.transaction():
                returned = await perform_async(conn, rescue.rescue())
            async with conn.transaction():
                canceled = await perform_async(conn, rescue.cancel_stragglers())
            await perform_async(conn, rescue.start_batches(worker=self._worker()))
        if returned.commands:
            log.warning(
                "Took back %d commands from dead workers, %d of them to troubleshooting",
                returned.commands,
                returned.parked,
            )
        if canceled:
            log.info("Canceled %d commands that came back to a canceled batch", canceled)
        return self._every.total_seconds()

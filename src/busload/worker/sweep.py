"""Dead leases, canceled batches, late starts: what every worker puts right from time to time, needing no leader."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from psycopg.errors import LockNotAvailable

from busload.domain.counted import counted
from busload.store import rescue
from busload.store.connection import AsyncConnection
from busload.store.plan import perform_async
from busload.store.pool import AsyncPool
from busload.worker.held import Held

log = logging.getLogger("busload")

PATIENCE = 1000
"""Milliseconds that a rescue waits for a batch that others hold, before it takes back what belongs to others."""


class Sweep:
    def __init__(
        self, pool: AsyncPool, every: timedelta, worker: Callable[[], int], in_touch: Callable[[], bool]
    ) -> None:
        self._pool, self._every, self._worker, self._in_touch = pool, every, worker, in_touch

    async def once(self) -> float:
        async with self._pool.connection() as conn:
            returned = await self._rescue(conn)
            canceled = await self._cancel(conn)
            await perform_async(conn, rescue.start_batches(worker=self._worker()))
        if returned.commands:
            log.warning(
                "Took back %s from dead workers, %d to troubleshooting",
                counted(returned.commands, "command"),
                returned.parked,
            )
        if canceled:
            log.info("Canceled %s that came back to a canceled batch", counted(canceled, "command"))
        return self._every.total_seconds()

    @staticmethod
    async def _cancel(conn: AsyncConnection) -> int:
        """A transaction per page, until nothing is left."""
        total = canceled = 0
        while total == 0 or canceled:
            async with conn.transaction():
                canceled = await perform_async(conn, rescue.cancel_stragglers())
            total += canceled
            if not canceled:
                break
        return total

    async def _rescue(self, conn: AsyncConnection) -> rescue.Returned:
        """What belongs to a batch that somebody holds must not keep all else from being taken back."""
        worker, judge = self._worker(), self._in_touch()
        try:
            async with conn.transaction():
                return await perform_async(conn, rescue.rescue(worker=worker, judge=judge, patience=PATIENCE))
        except LockNotAvailable:
            async with conn.transaction():
                return await perform_async(conn, rescue.rescue(worker=worker, judge=judge, free_only=True))


class DesertedLeases:
    """The net below: an attempt that nobody works at any more, by whatever fault, is handed back and not kept for ever.

    A heartbeat renews every lease of a worker, so no other worker would ever take it over.
    """

    def __init__(
        self,
        held: Held,
        alive: Callable[[], Mapping[UUID, int]],
        hand_back: Callable[[Sequence[UUID]], Awaitable[None]],
        every: timedelta,
    ) -> None:
        self._held, self._alive, self._hand_back, self._every = held, alive, hand_back, every

    async def once(self) -> float:
        if deserted := self._held.deserted(self._alive()):
            leases = counted(len(deserted), "lease")
            log.error("Handing back %s whose commands have neither run to an end nor wait to run", leases)
            await self._hand_back(deserted)
        return self._every.total_seconds()

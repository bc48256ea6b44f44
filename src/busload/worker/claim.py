"""Ready commands, leased: fills the free slots of the executor."""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable

from psycopg_pool import AsyncConnectionPool

from busload.domain.execution import Lease, Leased
from busload.domain.payload import encode
from busload.handlers import Handlers
from busload.settings import WorkerSettings
from busload.store import claim, rescue
from busload.store.connection import AsyncConnection
from busload.store.plan import perform_async
from busload.worker.execute import Executor
from busload.worker.held import Held
from busload.worker.settle import Settlement

log = logging.getLogger("busload")


class Claimer:
    def __init__(
        self,
        pool: AsyncConnectionPool[AsyncConnection],
        handlers: Handlers,
        executor: Executor,
        settlement: Settlement,
        held: Held,
        domains: list[str],
        settings: WorkerSettings,
        worker: Callable[[], int],
    ) -> None:
        self._pool, self._handlers = pool, handlers
        self._executor, self._settlement, self._held = executor, settlement, held
        self._domains, self._settings, self._worker = domains, settings, worker
        self._unknown: set[tuple[str, str]] = set()
        self.found_nothing = False
        self.ran_suspect = False
        self.asked_at: float | None = None
        """When the claim under way was sent; None while there is none."""

    async def once(self) -> float | None:
        """Claim for all free slots in one statement; returns how long to wait before the next look."""
        limit = self._executor.free
        if limit <= 0:
            return None  # a slot that comes free wakes the loop
        taken = await self._claim(limit)
        self.found_nothing = not (taken.leased or taken.contended or taken.refused)
        if self.found_nothing and self._executor.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        if taken.contended:
            return random.uniform(0.002, 0.01)  # noqa: S311 - spreads workers out, hides nothing
        return 0 if len(taken.leased) >= limit else self._settings.poll_every.total_seconds()

    async def promote(self) -> float:
        """Make ready what is due; returns how long to wait for the next that will be."""
        async with self._pool.connection() as conn:
            promotion = await perform_async(conn, claim.promote())
        if promotion.loads:
            return 0
        poll = self._settings.poll_every.total_seconds()
        return poll if promotion.next_due is None else max(0.001, min(poll, promotion.next_due))

    async def _claim(self, limit: int) -> claim.Claim:
        suspects = not self._held.has_suspect
        plan = claim.claim(worker=self._worker(), domains=self._domains, limit=limit, suspects=suspects)
        self.asked_at = time.monotonic()
        try:
            async with self._pool.connection() as conn:
                taken = await perform_async(conn, plan)
            self._held.take(taken.leased)
        finally:
            self.asked_at = None
        try:
            known = await self._known(taken.leased)
        except BaseException:  # none of them will run: a lease we do not hold is handed back by the heartbeat
            self._held.drop({one.lease.lease_id for one in taken.leased})
            raise
        self._executor.take(known)
        self.ran_suspect = self._held.has_suspect
        return taken

    async def _known(self, leased: list[Leased]) -> list[Leased]:
        """Give back what this worker has no handler for; it waits for one that has."""
        find = self._handlers.find
        unknown = [one for one in leased if find(one.lease.domain, one.command_type) is None]
        if not unknown:
            return leased
        by_lease: dict[Lease, list[Leased]] = defaultdict(list)
        for one in unknown:
            by_lease[one.lease].append(one)
            if (one.lease.domain, one.command_type) not in self._unknown:
                self._unknown.add((one.lease.domain, one.command_type))
                log.warning(
                    "No handler for %s in %s here; such commands wait for a worker that has one",
                    one.command_type,
                    one.lease.domain,
                )
        async with self._pool.connection() as conn:
            for lease, commands in by_lease.items():
                details = encode({"command_types": sorted({one.command_type for one in commands})})
                pause = self._settings.no_handler_pause.total_seconds()
                await perform_async(
                    conn, claim.give_back(lease, [one.id for one in commands], pause=pause, details=details)
                )
                self._held.settled(commands)
                if lease.unsettled <= 0:
                    async with conn.transaction():
                        await perform_async(conn, rescue.release([lease.lease_id]))
        refused = set(map(id, unknown))
        return [one for one in leased if id(one) not in refused]

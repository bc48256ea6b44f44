"""Ready commands, leased: fills the free slots of the executor."""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable

from psycopg_pool import AsyncConnectionPool

from busload.domain.execution import Lease, Leased
from busload.domain.ids import LOAD_SIZE
from busload.domain.payload import encode
from busload.handlers import Handlers
from busload.settings import WorkerSettings
from busload.store import claim, rescue
from busload.store.connection import AsyncConnection
from busload.store.plan import perform_async
from busload.worker.execute import Executor
from busload.worker.held import Held
from busload.worker.pauses import Pauses
from busload.worker.settle import Settlement

log = logging.getLogger("busload")

SMALLEST_GAP = 0.002
"""Seconds after a claim that emptied the queue before the next one: what is sent one by one is claimed together."""

SMALLEST_TICK = 0.02
"""Seconds from a look that found something due to the next one: retries become due one by one."""

MOST_AHEAD = 20
"""How many commands a slot may have ahead of it, however fast the last ones were: the next ones may be slow."""

SHORTEST_SAMPLE = 0.0005
"""Seconds that a pace is measured over, at least."""


class Claimer:
    """Keeps the executor's slots filled, and as much in line before them as they finish within `prefetch`."""

    def __init__(
        self,
        pool: AsyncConnectionPool[AsyncConnection],
        handlers: Handlers,
        executor: Executor,
        settlement: Settlement,
        held: Held,
        pauses: Pauses,
        domains: list[str],
        settings: WorkerSettings,
        concurrency: int,
        worker: Callable[[], int],
    ) -> None:
        self._pool, self._handlers = pool, handlers
        self._executor, self._settlement, self._held = executor, settlement, held
        self._domains, self._pauses = domains, pauses
        self._settings, self._worker = settings, worker
        self._concurrency = concurrency
        self._farthest = max(MOST_AHEAD * concurrency, LOAD_SIZE)
        self._quarter_lease = settings.lease_for.total_seconds() / 4
        prefetch = settings.prefetch.total_seconds()
        self._pace = Pace(prefetch, longest=max(prefetch, self._quarter_lease / 4))
        self._empty_at = 0.0
        self._leaving: list[Leased] = []
        self._unknown: set[tuple[str, str]] = set()
        self.claims = self.empty_claims = self.claimed = self.handed_back = 0
        self.ahead = 0
        """How many commands should stand in line, as of the last look."""
        self.waits_for_room = False
        self.emptied = False
        """Whether the last claim took all there was."""
        self.found_nothing = False
        self.ran_suspect = False
        self.asked_at: float | None = None
        """When the claim under way was sent; None while there is none."""

    async def once(self) -> float | None:
        """Claim in one statement what is missing; returns how long to wait before the next look."""
        self.found_nothing = False
        too_soon = self._empty_at + SMALLEST_GAP - time.monotonic()
        if too_soon > 0:
            return too_soon
        if self._leaving:
            await self._hand_back_leaving()
        in_hand = self._executor.in_hand
        ahead = self._pace.ahead(self._executor.finished, self._executor.busy)
        ahead = self.ahead = min(ahead, self._farthest)
        # Half of what is ahead may be used up before the next claim, so that a claim is worth its round trip.
        low_water = self._concurrency - 1 + ahead // 2
        # Each command in hand becomes a result, and there must be room for it.
        limit = min(self._concurrency + ahead, self._settlement.room) - in_hand
        self.waits_for_room = limit <= 0
        if in_hand > low_water or limit <= 0:
            self._executor.low_water = min(low_water, in_hand - 1)
            return await self._watch_line()
        taken = await self._claim(limit)
        self.found_nothing = not (taken.leased or taken.contended or taken.refused)
        if self.found_nothing and self._executor.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        self.emptied = len(taken.leased) < limit and not taken.contended
        if taken.contended:
            return random.uniform(0.002, 0.01)  # noqa: S311 - spreads workers out, hides nothing
        if not self.emptied:
            return 0
        self._empty_at = time.monotonic()
        self._executor.low_water = 0
        return self._settings.poll_every.total_seconds()

    async def hand_back_line(self) -> None:
        """Let others run what has not started."""
        self._leaving += self._executor.abandon_line()
        await self._hand_back_leaving()

    async def _hand_back_leaving(self) -> None:
        """If the answer is lost, it is said again: only then is it certain. Meanwhile others may begin to leave."""
        leaving = list(self._leaving)
        await self._give_back([one for one in leaving if not one.settled], pause=None)
        gone = set(map(id, leaving))
        self._leaving = [one for one in self._leaving if id(one) not in gone]

    def heed_pauses(self) -> None:
        """What stands in line of a domain that is paused now does not start any more; the next look hands it back."""
        paused, line = self._pauses.paused, self._executor.abandon_line()
        self._leaving += [one for one in line if one.lease.domain in paused]
        self._executor.take([one for one in line if one.lease.domain not in paused])

    async def promote(self) -> float:
        """Make ready what is due; returns how long to wait for what will be: long enough for some to come together."""
        promotion = await self.promote_due()
        poll = self._settings.poll_every.total_seconds()
        pause = poll if promotion.next_due is None else min(poll, promotion.next_due)
        return max(pause, SMALLEST_TICK) if promotion.loads else max(pause, 0.001)

    async def promote_due(self) -> claim.Promotion:
        async with self._pool.connection() as conn:
            return await perform_async(conn, claim.promote())

    async def _claim(self, limit: int) -> claim.Claim:
        paused = self._pauses.paused
        domains = [domain for domain in self._domains if domain not in paused]
        if not domains:
            return claim.Claim([], [], contended=False)
        suspects = not self._held.has_suspect
        plan = claim.claim(worker=self._worker(), domains=domains, limit=limit, suspects=suspects)
        self.asked_at = time.monotonic()
        try:
            async with self._pool.connection() as conn:
                taken = await perform_async(conn, plan)
            self._held.take(taken.leases)
            self.claims += 1
            self.claimed += len(taken.leased)
            self.empty_claims += not taken.leased
            self._pace.claimed(time.monotonic() - self.asked_at)
        finally:
            self.asked_at = None
        try:
            known = await self._known(taken.leased)
        except BaseException:  # none of them will run: a lease we do not hold is handed back by the heartbeat
            self._held.drop({lease.lease_id for lease in taken.leases})
            raise
        self._settlement.expect(taken.leases)
        self._executor.take(known)
        if self._pauses.paused is not paused:
            self.heed_pauses()  # before a slot can begin what this claim has brought
        self.ran_suspect = self._held.has_suspect
        return taken

    async def _known(self, leased: list[Leased]) -> list[Leased]:
        """Give back what this worker has no handler for; it waits for one that has."""
        find = self._handlers.find
        kinds = {(one.lease.domain, one.command_type) for one in leased}
        strange = {kind for kind in kinds if find(*kind) is None}
        if not strange:
            return leased
        for domain, command_type in strange - self._unknown:
            log.warning(
                "No handler for %s in %s here; such commands wait for a worker that has one", command_type, domain
            )
        self._unknown |= strange
        unknown = [one for one in leased if (one.lease.domain, one.command_type) in strange]
        await self._give_back(unknown, pause=self._settings.no_handler_pause.total_seconds())
        return [one for one in leased if (one.lease.domain, one.command_type) not in strange]

    async def _watch_line(self) -> float | None:
        """Slots that got stuck must not keep what stands in line from other workers."""
        waited = self._executor.waited(time.monotonic())
        if waited is None:
            return None  # a slot that comes free wakes the loop
        patience = min(max(1.0, 20 * self._pace.horizon), self._quarter_lease)
        if waited > patience:
            log.info("Handing back %d commands that have waited %.1f s for a slot", self._executor.in_line, waited)
            await self.hand_back_line()
        return patience / 4

    async def _give_back(self, leased: list[Leased], *, pause: float | None) -> None:
        """Let others run these: at once, or after a pause where nobody here has a handler for them."""
        by_lease: dict[Lease, list[Leased]] = defaultdict(list)
        for one in leased:
            by_lease[one.lease].append(one)
        async with self._pool.connection() as conn:
            if pause is None:
                whole = [lease for lease, commands in by_lease.items() if len(commands) == lease.unsettled]
                await self._release(conn, whole)
                for lease in whole:
                    self._gave_back(lease, by_lease.pop(lease))
            if not by_lease:
                return
            parts = {lease: [one.id for one in commands] for lease, commands in by_lease.items()}
            types = ({one.command_type for one in commands} for commands in by_lease.values())
            details = [encode({"command_types": sorted(each)}) for each in types]
            await perform_async(conn, claim.give_back(parts, pause=pause, details=details))
            for lease, commands in by_lease.items():
                self._gave_back(lease, commands)

    def _gave_back(self, lease: Lease, commands: list[Leased]) -> None:
        lease.running -= len(commands)
        self.handed_back += len(commands)
        self._held.settled(commands)

    @staticmethod
    async def _release(conn: AsyncConnection, leases: list[Lease]) -> None:
        async with conn.transaction():
            await perform_async(conn, rescue.release([lease.lease_id for lease in leases]))


class Pace:
    """How many commands to hold ahead of the slots: as many as finish here within the horizon.

    The horizon is `prefetch`, or ten claims' time where claims are slow, as they are when many workers share a machine:
    fewer and larger ones then leave more of it to the handlers. It is never longer than `longest`.
    """

    def __init__(self, prefetch: float, longest: float) -> None:
        self._prefetch, self._longest = prefetch, longest
        self._claim = 0.0
        self._rate = 0.0
        self._finished, self._busy = 0, 0.0

    @property
    def horizon(self) -> float:
        """Seconds."""
        return min(max(self._prefetch, 10 * self._claim), self._longest)

    def claimed(self, seconds: float) -> None:
        """Learn how long a claim took."""
        self._claim += (seconds - self._claim) / 4

    def ahead(self, finished: int, busy: float) -> int:
        """Learn that so many have finished so far, in so many seconds in which there was something to do."""
        if self._prefetch == 0:
            return 0
        elapsed = busy - self._busy
        if elapsed >= SHORTEST_SAMPLE:
            rate = (finished - self._finished) / elapsed
            self._rate += (rate - self._rate) * (min(1.0, elapsed / self._prefetch) if self._rate else 1.0)
            self._finished, self._busy = finished, busy
        return int(self._rate * self.horizon)

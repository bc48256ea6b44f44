"""Ready commands, leased: fills the free slots of the executor."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar
from uuid import UUID

from busload.domain.counted import counted
from busload.domain.execution import Lease, Leased, Transition
from busload.domain.ids import LOAD_SIZE
from busload.domain.payload import encode
from busload.handlers import Handlers
from busload.settings import WorkerSettings
from busload.store import claim, rescue
from busload.store.connection import AsyncConnection
from busload.store.plan import Plan, perform_async
from busload.store.pool import AsyncPool
from busload.worker.execute import Executor
from busload.worker.held import Held
from busload.worker.pauses import Pauses
from busload.worker.receive import Receiver
from busload.worker.settle import Settlement

log = logging.getLogger("busload")

C = TypeVar("C", bound=claim.Claim)

SMALLEST_GAP = 0.002
"""Seconds after a claim that emptied the queue before the next one: what is sent one by one is claimed together."""

LONGEST_EMPTY = 0.05
"""Seconds for which a domain of bulk handlers that was found empty is left out of claims for single commands."""

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
        pool: AsyncPool,
        handlers: Handlers,
        executor: Executor,
        settlement: Settlement,
        held: Held,
        pauses: Pauses,
        domains: list[str],
        settings: WorkerSettings,
        concurrency: int,
        worker: Callable[[], int],
        receiver: Receiver | None = None,
    ) -> None:
        self._pool, self._handlers = pool, handlers
        self._receiver = receiver
        self._polls = self._polled_first = False
        self._polled_at = 0.0
        self._polled: set[str] = set()
        self._executor, self._settlement, self._held = executor, settlement, held
        self._gatherer = executor.gatherer
        self._rests = executor.rests
        self._rest = math.inf
        self._domains, self._pauses = domains, pauses
        self._settings, self._worker = settings, worker
        self._concurrency = concurrency
        self._farthest = max(MOST_AHEAD * concurrency, LOAD_SIZE)
        self._quarter_lease = settings.lease_for.total_seconds() / 4
        prefetch = settings.prefetch.total_seconds()
        self._pace = Pace(prefetch, longest=max(prefetch, self._quarter_lease / 4))
        self._empty_at = 0.0
        self._bulk_empty_at: dict[str, float] = {}
        self._left_out = False
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
        self.draining = False
        """Whether it is to look everywhere before it says that there is nothing."""
        self.asked_at: float | None = None
        """When the claim under way was sent; None while there is none."""
        self.heard = True
        """Whether the database has said that something is ready, or may have: with a broker, that is worth a look."""

    async def once(self) -> float | None:
        """Claim in one statement what is missing; returns how long to wait before the next look."""
        self.found_nothing, self._rest = False, math.inf
        too_soon = self._empty_at + SMALLEST_GAP - time.monotonic()
        if too_soon > 0:
            return too_soon
        if self._leaving:
            await self._hand_back_leaving()
        if self._executor.waiting_for_threads:
            await self._watch_threads()
        waiting = self._executor.waiting_for_threads
        in_hand = self._executor.in_hand - waiting  # what waits for a thread has no slot, and keeps none from others
        concurrency = self._slots()
        ahead = self._pace.ahead(self._executor.finished, self._executor.busy)
        ahead = self.ahead = min(ahead, self._farthest)
        # Half of what is ahead may be used up before the next claim, so that a claim is worth its round trip.
        low_water = concurrency - 1 + ahead // 2
        # Each command in hand becomes a result, and there must be room for it.
        limit = min(concurrency + ahead, self._settlement.room - waiting) - in_hand
        self.waits_for_room = limit <= 0
        if in_hand > low_water or limit <= 0:
            self._executor.low_water = min(low_water, in_hand - 1) + waiting
            limit = 0
        wanted = self._wanted(limit)
        if not wanted:
            return await self._watch_line()
        if self._receiver is not None:
            self._decide_on_poll(self._receiver)
        found = [(await self._claim(domains, most), most) for domains, most in wanted]
        self._note_empty(wanted, found)
        self.found_nothing = not any(taken.leased or taken.contended or taken.refused for taken, _ in found)
        if self._rest < math.inf or self._left_out:
            self.found_nothing = False  # it has not looked everywhere
        if self.found_nothing and self._executor.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        contended = any(taken.contended for taken, _ in found)
        self.emptied = not contended and all(len(taken.leased) < most for taken, most in found)
        if contended:
            return random.uniform(0.002, 0.01)  # noqa: S311 - spreads workers out, hides nothing
        if not self.emptied:
            return 0
        self._empty_at = time.monotonic()
        pause = min(self._settings.poll_every.total_seconds(), self._rest)
        if self._receiver is not None and not any(taken.refused for taken, _ in found):
            pause = self._pause(self._receiver, [domain for domains, _ in wanted for domain in domains])
        if limit:
            self._executor.low_water = 0
        else:
            pause = min(pause, await self._watch_line() or math.inf)
        if waiting:
            pause = min(pause, self._quarter_lease / 4)
        return min(pause, LONGEST_EMPTY) if self._left_out else pause

    def _wanted(self, limit: int) -> list[tuple[list[str], int]]:
        """What to claim: domains, and how many commands of them.

        Where there are bulk handlers only, as many as chunks may hold, whatever the slots do. Where there are others
        too, no more than the slots can take, since nobody knows beforehand of which type a command is. Where all
        handlers are written with `def`, no more than the threads can take; where some are, until as many wait for a
        thread as there are slots.
        """
        if not self._handlers.gathers and not self._handlers.threaded:
            return [(self._domains, limit)] if limit else []
        if self._executor.in_hand < self._concurrency:
            self._gatherer.slot_is_free()
        single: list[str] = []
        threaded: list[str] = []
        wanted: list[tuple[list[str], int]] = []
        for domain in self._domains:
            room = self._gatherer.room(domain)
            if room is None or (room and not self._gatherer.only_gathers(domain)):
                threads = self._handlers.threads(domain)
                if threads == "all":
                    threaded.append(domain)
                elif threads == "none" or self._executor.waiting_for_threads < self._concurrency:
                    single.append(domain)
            elif room:
                wanted.append(([domain], room))
        if self._handlers.threaded:
            # As with slots: half of what is ahead may be used up before the next claim.
            enough = 1 + self.ahead // 2 - self.ahead
            if threaded and limit and self._executor.free_threads >= enough:
                wanted.append((threaded, min(limit, self._executor.free_threads + self.ahead)))
            self._executor.wants_threads = enough
        if not single or not limit:
            self._left_out = False
            return wanted
        # A domain that was empty a moment ago need not be asked with every claim for single commands.
        now = time.monotonic()
        due = [one for one in wanted if now - self._bulk_empty_at.get(one[0][0], 0.0) > LONGEST_EMPTY]
        self._left_out = len(due) < len(wanted)
        return [(single, limit), *due]

    def _slots(self) -> int:
        """How many commands can run at a time: where all need threads, no more than there are."""
        threads = self._executor.threads
        if not self._handlers.threaded or threads >= self._concurrency:
            return self._concurrency
        all_need_them = all(self._handlers.threads(domain) == "all" for domain in self._domains)
        return threads if all_need_them else self._concurrency

    def _note_empty(self, wanted: list[tuple[list[str], int]], found: list[tuple[claim.Claim, int]]) -> None:
        if self._handlers.gathers:
            now = time.monotonic()
            for (domains, _), (taken, most) in zip(wanted, found, strict=True):
                if len(domains) == 1 and len(taken.leased) < most:
                    self._bulk_empty_at[domains[0]] = now

    async def hand_back_line(self) -> None:
        """Let others run what has not started."""
        self._leaving += self._gatherer.unpack(self._executor.abandon_line()) + self._gatherer.abandon()
        await self._hand_back_leaving()

    async def _hand_back_leaving(self) -> None:
        """If the answer is lost, it is said again: only then is it certain. Meanwhile others may begin to leave."""
        leaving = list(self._leaving)
        await self._give_back([one for one in leaving if not one.settled], pause=None)
        gone = set(map(id, leaving))
        self._leaving = [one for one in self._leaving if id(one) not in gone]

    def alive(self) -> Counter[UUID]:
        """How many commands of each lease stand in line, run, or are on their way back."""
        return self._executor.alive() + Counter(one.lease.lease_id for one in self._leaving)

    def heed_pauses(self) -> None:
        """What stands in line of a domain that is paused now does not start any more; the next look hands it back."""
        self.heard = True
        paused, line = self._pauses.paused, self._executor.abandon_line()
        self._leaving += self._gatherer.unpack(one for one in line if one.lease.domain in paused)
        self._leaving += self._gatherer.abandon(paused)
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

    async def _claim(self, domains: list[str], limit: int) -> claim.Claim:
        paused = self._pauses.paused
        domains = [domain for domain in domains if domain not in paused]
        if self._rests:
            domains = self._without_resting(domains)
        if not domains:
            return claim.Claim([], [], contended=False)
        if self._receiver is not None:
            return await self._claim_by_turns(domains, limit, paused)
        return await self._poll(domains, limit, paused)

    async def _poll(self, domains: list[str], limit: int, paused: frozenset[str]) -> claim.Claim:
        suspects = not self._held.has_suspect
        plan = claim.claim(worker=self._worker(), domains=domains, limit=limit, suspects=suspects)
        taken = await self._ask(plan)
        await self._begin(taken, paused)
        return taken

    async def _ask(self, plan: Plan[C]) -> C:
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
        return taken

    async def _begin(self, taken: claim.Claim, paused: frozenset[str]) -> None:
        try:
            known = await self._known(taken.leased)
        except BaseException:
            self._let_go(taken.leases)
            raise
        self._settlement.expect(taken.leases)
        if self._rests:
            self._rests.claimed(taken.leased)
        try:
            refused = self._start(known)
        except BaseException:
            self._let_go(taken.leases)
            raise
        if self._pauses.paused is not paused:
            self.heed_pauses()  # before a slot can begin what this claim has brought
        self.ran_suspect = self._held.has_suspect
        for transition in refused:
            await self._settlement.put(transition)

    def _decide_on_poll(self, receiver: Receiver) -> None:
        """With a broker the queue is looked at when the database calls, and at times: a message may be lost."""
        now = time.monotonic()
        self._polls = self.heard or not receiver.connected or now - self._polled_at >= receiver.poll_every
        if self._polls:
            self.heard, self._polled_at = False, now
            self._polled.clear()

    def _pause(self, receiver: Receiver, asked: list[str]) -> float:
        resting = self._rests.resting() if self._rests else {}
        paused = self._pauses.paused
        look = receiver.rings.next_look(domain for domain in asked if domain not in paused and domain not in resting)
        if self._polls and not self._polled.issuperset(domain for domain in self._domains if domain not in paused):
            self.heard = True  # what was called may be of a domain that could not be asked now
        poll = self._polled_at + receiver.poll_every - time.monotonic()
        return min(max(poll, 0.001), self._rest, math.inf if look is None else look)

    async def _claim_by_turns(self, domains: list[str], limit: int, paused: frozenset[str]) -> claim.Claim:
        """What messages were about and, if a look is due, what the queue holds: neither keeps the other waiting."""
        ways = [self._answer_rings]
        if self._polls:
            self._polled.update(domains)
            ways = [*ways, self._poll] if self._polled_first else [self._poll, *ways]
            self._polled_first = not self._polled_first
        found: list[claim.Claim] = []
        for way in ways:
            if limit > 0:
                taken = await way(domains, limit, paused)
                found.append(taken)
                limit -= len(taken.leased)
            if self._polls and (limit <= 0 or taken.contended):
                self.heard = True  # there may be more
        return _together(found)

    async def _answer_rings(self, domains: list[str], limit: int, paused: frozenset[str]) -> claim.Claim:
        assert self._receiver is not None
        rings = self._receiver.rings
        wanted = rings.wanted(domains, limit)
        if not wanted:
            return claim.Claim([], [], contended=False)
        taken = await self._ask(claim.claim_rung(worker=self._worker(), domains=domains, wanted=wanted))
        rings.answer(wanted, taken)
        await self._begin(taken, paused)
        return taken

    def _let_go(self, leases: Iterable[Lease]) -> None:
        """None of their commands will run: a lease we do not hold is handed back by the heartbeat."""
        leases = list(leases)
        self._held.drop({lease.lease_id for lease in leases})
        for lease in leases:
            lease.lost = True

    def _start(self, leased: list[Leased]) -> list[Transition]:
        """Into the line, or to those who gather; returns the results of those that cannot be gathered."""
        if not self._handlers.gathers:
            self._executor.take(leased)
            return []
        gathers = self._gatherer.gathers
        single = [one for one in leased if not gathers(one.lease.domain, one.command_type)]
        self._executor.take(single)
        return self._gatherer.take(one for one in leased if gathers(one.lease.domain, one.command_type))

    def _without_resting(self, domains: list[str]) -> list[str]:
        """Leave those alone that bring mostly what a limit holds up; when they have rested, there is another look."""
        if self.draining and not self._executor.in_hand:
            return domains
        resting = self._rests.resting()
        self._rest = min([self._rest, *(resting[domain] for domain in domains if domain in resting)])
        return [domain for domain in domains if domain not in resting]

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

    async def _watch_threads(self) -> None:
        """Threads that got stuck must not keep what waits for one from other workers."""
        stuck = self._executor.abandon_stuck(time.monotonic(), self._quarter_lease)
        if stuck:
            commands = counted(len(stuck), "command")
            log.info("Handing back %s after %.1f s of waiting for a thread", commands, self._quarter_lease)
            await self._hand_back(stuck)

    async def _watch_line(self) -> float | None:
        """Slots that got stuck must not keep what stands in line from other workers."""
        now = time.monotonic()
        stuck = self._executor.stuck_chunks(now, self._quarter_lease)
        if stuck:
            for domain in {gathered.lease.domain for gathered in stuck}:
                self._gatherer.stuck(domain)
            await self._hand_back(self._gatherer.unpack(stuck))
        waited = self._executor.waited(now)
        if waited is None:  # a slot that comes free wakes the loop
            return self._quarter_lease / 4 if self._executor.in_line else None
        patience = min(max(1.0, 20 * self._pace.horizon), self._quarter_lease)
        if waited > patience:
            commands = counted(self._executor.in_line, "command")
            log.info("Handing back %s after %.1f s of waiting for a slot", commands, waited)
            line = self._executor.abandon_line()
            self._executor.take([one for one in line if not isinstance(one, Leased)])
            await self._hand_back([one for one in line if isinstance(one, Leased)])
        return patience / 4

    async def _hand_back(self, leased: list[Leased]) -> None:
        self._leaving += leased
        await self._hand_back_leaving()

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


def _together(found: Sequence[claim.Claim]) -> claim.Claim:
    return claim.Claim(
        [lease for taken in found for lease in taken.leases],
        [leased for taken in found for leased in taken.leased],
        contended=any(taken.contended for taken in found),
        refused=any(taken.refused for taken in found),
    )


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

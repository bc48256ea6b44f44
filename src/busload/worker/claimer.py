"""Claims commands that are ready, and fills the line before the slots with them."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from busload.commands import claim, rescue
from busload.commands.counted import counted
from busload.commands.execution import Lease, Leased, Transition
from busload.commands.load import LOAD_SIZE
from busload.commands.payload import encode
from busload.dispatch.deliveries import Deliveries
from busload.worker.broker_stations import Broker
from busload.worker.chunks import Gatherer
from busload.worker.executor import Line
from busload.worker.settlement import Settlement
from busload.worker.shared import Shared

log = logging.getLogger("busload")

NOTHING = claim.Claim([], [], contended=False)

SMALLEST_GAP = 0.002
"""Seconds between a claim that emptied the queue and the next: commands sent one by one are claimed together."""

LONGEST_EMPTY = 0.05
"""Seconds for which claims leave out a domain of bulk handlers that was empty."""

SMALLEST_TICK = 0.02
"""Seconds between two promotions that find something: retries become due one by one."""

SHORTEST_SAMPLE = 0.0005
"""Seconds that a pace is measured over, at least."""

MOST_AHEAD = 20
"""Commands in line for each slot, at most: however fast the last ones were, the next ones may be slow."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a round of the claimer found."""

    pause: float | None
    """Seconds until the next round; None if the next round waits until something has changed."""
    found_nothing: bool = False
    """Whether nothing is ready in any domain."""
    emptied: bool = False
    """Whether the last claim took everything that was ready."""


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


class HandBack:
    """Hands back commands and leases, without burning an attempt.

    If the answer of the database is lost, it is asked again: only then is it certain.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._leaving: list[Leased] = []
        self.commands = 0
        """How many were handed back so far."""

    @property
    def leaving(self) -> Counter[UUID]:
        """How many commands of each lease are on their way back."""
        return Counter(one.lease.lease_id for one in self._leaving)

    def add(self, leased: Iterable[Leased]) -> None:
        """Hand these back with the next call of `once`."""
        self._leaving += leased

    async def once(self) -> None:
        """Hand back what was added. Meanwhile others may be added."""
        if not self._leaving:
            return
        leaving = list(self._leaving)
        await self._give_back([one for one in leaving if not one.settled])
        gone = set(map(id, leaving))
        self._leaving = [one for one in self._leaving if id(one) not in gone]

    async def postpone_unknown(self, leased: list[Leased], seconds: float) -> None:
        """Nobody here has a handler for these: they wait for a worker that has one."""
        by_lease = _by_lease(leased)
        types = ({one.command_type for one in commands} for commands in by_lease.values())
        details = [encode({"command_types": sorted(each)}) for each in types]
        await self._give_back_parts(by_lease, seconds, details)

    async def release(self, lease_ids: Sequence[UUID]) -> None:
        """Hand back leases whose commands do not run here: the answer to a claim was lost, or the worker stops."""
        returned = await self._shared.in_transaction(rescue.release(list(lease_ids)))
        self._shared.held.drop(lease_ids)
        self.commands += returned.commands
        if returned.commands:
            log.info("Handed back %s", counted(returned.commands, "command"))

    async def _give_back(self, leased: list[Leased]) -> None:
        parts = _by_lease(leased)
        whole = {lease: parts.pop(lease) for lease in list(parts) if len(parts[lease]) == lease.unsettled}
        if whole:
            await self._shared.in_transaction(rescue.release([lease.lease_id for lease in whole]))
            self._forget(whole)
        if parts:
            await self._give_back_parts(parts, None, ())

    async def _give_back_parts(
        self, parts: dict[Lease, list[Leased]], pause: float | None, details: Sequence[str]
    ) -> None:
        ids = {lease: [one.id for one in commands] for lease, commands in parts.items()}
        await self._shared.perform(claim.give_back(ids, pause=pause, details=details))
        self._forget(parts)

    def _forget(self, parts: dict[Lease, list[Leased]]) -> None:
        for lease, commands in parts.items():
            lease.running -= len(commands)
            self.commands += len(commands)
            self._shared.held.settled(commands)


class Claimer:
    """Keeps the slots busy, and holds as many commands in line as the slots finish within `prefetch`."""

    def __init__(
        self,
        shared: Shared,
        hand_back: HandBack,
        line: Line,
        gatherer: Gatherer,
        settlement: Settlement,
        broker: Broker | None = None,
    ) -> None:
        self._shared, self._line, self._gatherer = shared, line, gatherer
        self._settlement, self._hand_back, self._broker = settlement, hand_back, broker
        self._held, self._handlers, self._pauses = shared.held, shared.bus.handlers, shared.pauses
        self._rests, self._domains, self._settings = shared.limiter.rests, shared.domains, shared.settings
        self._concurrency = shared.settings.concurrency
        self._farthest = max(MOST_AHEAD * shared.settings.concurrency, LOAD_SIZE)
        self._quarter_lease = shared.settings.lease_for.total_seconds() / 4
        prefetch = shared.settings.prefetch.total_seconds()
        self._pace = Pace(prefetch, longest=max(prefetch, self._quarter_lease / 4))
        self._rest = math.inf
        self._emptied = False
        self._empty_at = 0.0
        self._bulk_empty_at: dict[str, float] = {}
        self._left_out = False
        self._everywhere = False
        self._unknown: set[tuple[str, str]] = set()
        self._queue_wanted = True
        """With a broker: whether to look at the queue itself, as something may be ready without a message."""
        self._polls = self._polled_first = False
        self._polled_at = 0.0
        self._polled: set[str] = set()
        self.sent_at: float | None = None
        """When the claim under way was sent; None while there is none."""
        self.claims = self.empty_claims = self.claimed = 0
        self.ahead = 0
        """How many commands should stand in line, as of the last look."""

    def look_at_queue(self) -> None:
        """Look at the queue itself in the next round: something may be ready that no message tells of."""
        self._queue_wanted = True

    async def once(self, *, everywhere: bool = False) -> Look:
        """Claim what is missing, in one statement. With `everywhere`, leave out no domain because of its limits."""
        self._everywhere, self._rest = everywhere, math.inf
        too_soon = self._empty_at + SMALLEST_GAP - time.monotonic()
        if too_soon > 0:
            return Look(too_soon, emptied=self._emptied)
        await self._hand_back.once()
        if self._line.waiting_for_threads:
            await self._watch_threads()
        waiting = self._line.waiting_for_threads
        limit = self._limit(waiting)
        wanted = self._wanted(limit)
        if not wanted:
            return Look(await self._watch_line(), emptied=self._emptied)
        if self._broker is not None:
            self._decide_on_poll(self._broker)
        found = [(await self._claim(domains, most), most) for domains, most in wanted]
        if self._handlers.gathers:
            now = time.monotonic()
            for (domains, most), (taken, _) in zip(wanted, found, strict=True):
                if len(domains) == 1 and len(taken.leased) < most:
                    self._bulk_empty_at[domains[0]] = now
        found_nothing = not any(taken.leased or taken.contended or taken.refused for taken, _ in found)
        if self._rest < math.inf or self._left_out:
            found_nothing = False  # some domains were left out
        if found_nothing and self._line.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        contended = any(taken.contended for taken, _ in found)
        self._emptied = not contended and all(len(taken.leased) < most for taken, most in found)
        pause: float | None
        if contended:
            pause = random.uniform(0.002, 0.01)  # noqa: S311 - spreads workers out, hides nothing
        elif not self._emptied:
            pause = 0
        else:
            self._empty_at = time.monotonic()
            pause = min(self._settings.poll_every.total_seconds(), self._rest)
            if self._broker is not None and not any(taken.refused for taken, _ in found):
                pause = self._pause(self._broker, [domain for domains, _ in wanted for domain in domains])
            if limit:
                self._line.low_water = 0
            else:
                pause = min(pause, await self._watch_line() or math.inf)
            if waiting:
                pause = min(pause, self._quarter_lease / 4)
            if self._left_out:
                pause = min(pause, LONGEST_EMPTY)
        return Look(pause, found_nothing, self._emptied)

    def _limit(self, waiting: int) -> int:
        """How many single commands to claim. `waiting` is how many wait for a thread: those take no slot."""
        in_hand = self._line.in_hand - waiting
        concurrency = self._slots()
        ahead = self._pace.ahead(self._line.finished - self._shared.postponed, self._line.busy)
        ahead = self.ahead = min(ahead, self._farthest)
        # Half of what is ahead may be used up before the next claim, so that a claim is worth its round trip.
        low_water = concurrency - 1 + ahead // 2
        # Each command in hand becomes a result, and there must be room for it.
        limit = min(concurrency + ahead, self._settlement.room - waiting) - in_hand
        if limit <= 0:
            self._settlement.ask_for_room()
        if in_hand > low_water or limit <= 0:
            self._line.low_water = min(low_water, in_hand - 1) + waiting
            return 0
        return limit

    def _wanted(self, limit: int) -> list[tuple[list[str], int]]:
        """What to claim: domains, and how many commands of them.

        A domain with bulk handlers only: as many as its chunks may hold. A domain with other handlers too: no more than
        the slots can take, because the type of a command is not known before the claim. A domain whose handlers are all
        written with `def`: no more than the threads can take. A domain with some of these: until as many commands wait
        for a thread as there are slots.
        """
        if not self._handlers.gathers and not self._handlers.threaded:
            return [(self._domains, limit)] if limit else []
        if self._line.in_hand < self._concurrency:
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
                elif threads == "none" or self._line.waiting_for_threads < self._concurrency:
                    single.append(domain)
            elif room:
                wanted.append(([domain], room))
        if self._handlers.threaded:
            # As with slots: half of what is ahead may be used up before the next claim.
            enough = 1 + self.ahead // 2 - self.ahead
            if threaded and limit and self._line.free_threads >= enough:
                wanted.append((threaded, min(limit, self._line.free_threads + self.ahead)))
            self._line.threads_wanted = enough
        if not single or not limit:
            self._left_out = False
            return wanted
        # Not every claim for single commands needs to ask a domain that was empty a moment ago.
        now = time.monotonic()
        due = [one for one in wanted if now - self._bulk_empty_at.get(one[0][0], 0.0) > LONGEST_EMPTY]
        self._left_out = len(due) < len(wanted)
        return [(single, limit), *due]

    def _slots(self) -> int:
        """How many commands can run at a time: if all need a thread, no more than there are threads."""
        threads = self._line.threads
        if not self._handlers.threaded or threads >= self._concurrency:
            return self._concurrency
        all_need_them = all(self._handlers.threads(domain) == "all" for domain in self._domains)
        return threads if all_need_them else self._concurrency

    def empty_line(self) -> None:
        """Start nothing of what stands in line; the next round hands it back."""
        self._hand_back.add(self._gatherer.unpack(self._line.abandon()) + self._gatherer.abandon())

    async def hand_back_line(self) -> None:
        """Let others run what has not started."""
        self.empty_line()
        await self._hand_back.once()

    def heed_pauses(self) -> None:
        """Take what belongs to paused domains out of the line; the next round hands it back."""
        self._queue_wanted = True
        paused, line = self._pauses.paused, self._line.abandon()
        self._hand_back.add(self._gatherer.unpack(one for one in line if one.lease.domain in paused))
        self._hand_back.add(self._gatherer.abandon(paused))
        self._line.add([one for one in line if one.lease.domain not in paused])

    async def promote(self) -> float:
        """Make ready what is due; return the seconds until the next promotion, so that some come together."""
        promotion = await self.promote_due()
        poll = self._settings.poll_every.total_seconds()
        pause = poll if promotion.next_due is None else min(poll, promotion.next_due)
        return max(pause, SMALLEST_TICK) if promotion.loads else max(pause, 0.001)

    async def promote_due(self) -> claim.Promotion:
        return await self._shared.perform(claim.promote())

    async def _claim(self, domains: list[str], limit: int) -> claim.Claim:
        """Claim so many commands of these domains, and put them into the line.

        With a broker, claim what messages tell of and, if it is time, what the queue holds; the two take turns at being
        first.
        """
        paused = self._pauses.paused
        domains = [domain for domain in domains if domain not in paused]
        if self._rests:
            domains = self._without_resting(domains)
        if not domains:
            return NOTHING
        if self._broker is None:
            return await self._take(domains, limit, paused, None)
        ways: list[Deliveries | None] = [self._broker.deliveries]
        if self._polls:
            self._polled.update(domains)
            ways.insert(1 if self._polled_first else 0, None)
            self._polled_first = not self._polled_first
        found = NOTHING
        for deliveries in ways:
            if limit > 0:
                taken = await self._take(domains, limit, paused, deliveries)
                found = found.joined(taken)
                limit -= len(taken.leased)
            if self._polls and (limit <= 0 or taken.contended):
                self._queue_wanted = True  # there may be more
        return found

    async def _take(
        self, domains: list[str], limit: int, paused: frozenset[str], deliveries: Deliveries | None
    ) -> claim.Claim:
        """Claim in one statement what the queue holds, or what messages tell of."""
        number, taken = self._shared.number, NOTHING
        sent_at = self.sent_at = time.monotonic()
        try:
            if deliveries is None:
                suspects = not self._held.has_suspect
                taken = await self._shared.perform(
                    claim.claim(worker=number, domains=domains, limit=limit, suspects=suspects)
                )
            elif wanted := deliveries.wanted(domains, limit):
                delivered = await self._shared.perform(
                    claim.claim_delivered(worker=number, domains=domains, wanted=wanted)
                )
                deliveries.answer(wanted, delivered)
                taken = delivered
            else:
                return NOTHING
            self._held.take(taken.leases)
        finally:
            self.sent_at = None
        self.claims += 1
        self.claimed += len(taken.leased)
        self.empty_claims += not taken.leased
        self._pace.claimed(time.monotonic() - sent_at)
        try:
            known = await self._known(taken.leased)
            self._settlement.expect(taken.leases)
            if self._rests:
                self._rests.claimed(taken.leased)
            refused = self._start(known)
        except BaseException:
            # Run none of these commands. The heartbeat hands back a lease that is not held here.
            self._held.drop(lease.lease_id for lease in taken.leases)
            for lease in taken.leases:
                lease.lost = True
            raise
        if self._pauses.paused is not paused:
            self.heed_pauses()  # before a slot can begin what this claim has brought
        for transition in refused:
            await self._settlement.put(transition)
        return taken

    def _decide_on_poll(self, broker: Broker) -> None:
        """Look at the queue itself when the database notifies, and at times: a message may be lost."""
        now = time.monotonic()
        self._polls = self._queue_wanted or not broker.connected or now - self._polled_at >= broker.poll_every
        if self._polls:
            self._queue_wanted, self._polled_at = False, now
            self._polled.clear()

    def _pause(self, broker: Broker, asked: list[str]) -> float:
        resting = self._rests.resting() if self._rests else {}
        paused = self._pauses.paused
        look = broker.deliveries.next_look(domain for domain in asked if domain not in paused and domain not in resting)
        if self._polls and not self._polled.issuperset(domain for domain in self._domains if domain not in paused):
            self._queue_wanted = True  # a notification may be about a domain that was not asked now
        poll = self._polled_at + broker.poll_every - time.monotonic()
        return min(max(poll, 0.001), self._rest, math.inf if look is None else look)

    def _start(self, leased: list[Leased]) -> list[Transition]:
        """Put commands into the line, or into chunks; return the results of those that cannot be gathered."""
        if not self._handlers.gathers:
            self._line.add(leased)
            return []
        gathers = self._gatherer.gathers
        single = [one for one in leased if not gathers(one.lease.domain, one.command_type)]
        self._line.add(single)
        return self._gatherer.take(one for one in leased if gathers(one.lease.domain, one.command_type))

    def _without_resting(self, domains: list[str]) -> list[str]:
        """Leave out domains that bring mostly what a limit holds up, for a while."""
        if self._everywhere and not self._line.in_hand:
            return domains
        resting = self._rests.resting()
        self._rest = min([self._rest, *(resting[domain] for domain in domains if domain in resting)])
        return [domain for domain in domains if domain not in resting]

    async def _known(self, leased: list[Leased]) -> list[Leased]:
        """Give back commands that have no handler here; they wait for a worker that has one."""
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
        await self._hand_back.postpone_unknown(unknown, self._settings.no_handler_pause.total_seconds())
        return [one for one in leased if (one.lease.domain, one.command_type) not in strange]

    async def _watch_threads(self) -> None:
        """Hand back what waits too long for a thread: the threads may be stuck."""
        stuck = self._line.abandon_stuck_for_threads(time.monotonic(), self._quarter_lease)
        if stuck:
            commands = counted(len(stuck), "command")
            log.info("Handing back %s after %.1f s of waiting for a thread", commands, self._quarter_lease)
            self._hand_back.add(stuck)
            await self._hand_back.once()

    async def _watch_line(self) -> float | None:
        """Hand back what waits too long for a slot: the slots may be stuck. Return when to look again."""
        now = time.monotonic()
        stuck = self._line.abandon_stuck_chunks(now, self._quarter_lease)
        if stuck:
            for domain in {gathered.lease.domain for gathered in stuck}:
                self._gatherer.stuck(domain)
            self._hand_back.add(self._gatherer.unpack(stuck))
            await self._hand_back.once()
        waited = self._line.waited(now)
        if waited is None:  # a slot that comes free wakes the loop
            return self._quarter_lease / 4 if len(self._line) else None
        patience = min(max(1.0, 20 * self._pace.horizon), self._quarter_lease)
        if waited > patience:
            log.info("Handing back %s after %.1f s of waiting for a slot", counted(len(self._line), "command"), waited)
            line = self._line.abandon()
            self._line.add([one for one in line if not isinstance(one, Leased)])
            self._hand_back.add(one for one in line if isinstance(one, Leased))
            await self._hand_back.once()
        return patience / 4


def _by_lease(leased: Iterable[Leased]) -> dict[Lease, list[Leased]]:
    by_lease: dict[Lease, list[Leased]] = defaultdict(list)
    for one in leased:
        by_lease[one.lease].append(one)
    return by_lease

"""Claims commands that are ready, and fills the line before the slots with them."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Set
from functools import partial
from typing import TypeAlias
from uuid import UUID

from busload.commands import claim
from busload.commands.execution import Leased, Transition
from busload.commands.load import LOAD_SIZE
from busload.dispatch.deliveries import Deliveries
from busload.worker.broker_stations import Broker
from busload.worker.budget_gate import BudgetGate, one_flush
from busload.worker.chunks import Gatherer
from busload.worker.hand_back import HandBack
from busload.worker.line import Claimed, Line, commands_of
from busload.worker.order import may_run, parts_in_turn
from busload.worker.pace import Look, Pace
from busload.worker.settlement import Settlement
from busload.worker.shared import Shared
from busload.worker.stuck_line import StuckLine

log = logging.getLogger("busload")

Want: TypeAlias = tuple[list[str], int]
"""Domains, and how many commands of them to claim."""

NOTHING = claim.Claim([], [], contended=False)

SMALLEST_GAP = 0.002
"""Seconds between a claim that emptied the queue and the next: commands sent one by one are claimed together."""

LONGEST_EMPTY = 0.05
"""Seconds for which claims leave out a domain of bulk handlers that was empty."""

SMALLEST_TICK = 0.02
"""Seconds between two promotions that find something: retries become due one by one."""

OLDEST_EVERY = 16
"""One claim in so many begins with the oldest batches, which else would wait as long as ever more new ones come."""

MOST_AHEAD = 20
"""Commands in line for each slot, at most: however fast the last ones were, the next ones may be slow."""

ASKED_TOGETHER = 1000
"""Commands that are claimed, and whose permits are asked for, in one statement at most."""

MOST_ASKING = 2
"""Statements at a time that ask for permits: the server begins the next one while we run what the last one granted."""


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
        self._stuck = StuckLine(line, gatherer, hand_back, self._pace, self._quarter_lease)
        self._gate = BudgetGate(
            self._held, one_flush(shared.settings), lambda: gatherer.gathered, settlement.flush_soon
        )
        settlement.heed_holds = self.heed_holds
        self._promoted_at = time.monotonic()
        self._empty_at = 0.0
        self._bulk_empty_at: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        """Who was the last to have a turn, for each domain."""
        self._until_oldest = OLDEST_EVERY
        self._all_fits = True
        """Whether the last claim found less than it asked for: then nobody has to wait for a turn."""
        self._alone = False
        """Whether the last claim in turns found one owner only, and nothing became ready since it was sent."""
        self._queue_wanted = True
        """With a broker: whether to look at the queue itself, as something may be ready without a message."""
        self._polls = self._queue_first = False
        self._polled_at = 0.0
        self._first_part = 0
        self.wake: Callable[[], None] = lambda: None
        """Has the next round begin at once."""
        self._held_meanwhile: set[UUID] = set()
        """Batches that were held since the last claim was sent: it may still bring commands of them."""
        self._asking: dict[asyncio.Task[None], set[UUID]] = {}
        """Claims whose permits are asked for, and the batches that were held since."""
        self.sent_at: float | None = None
        """When the claim under way was sent; None while there is none."""
        self.emptied = False
        """Whether the last claim took everything that was ready."""
        self.claims = self.empty_claims = self.claimed = 0
        self.ahead = 0
        """How many commands should stand in line, as of the last look."""

    def look_at_queue(self) -> None:
        """Look at the queue itself in the next round: something may be ready that no message tells of."""
        self._queue_wanted, self._alone = True, False

    async def once(self, *, everywhere: bool = False) -> Look:
        """Claim what is missing, in one statement.

        With `everywhere`, for a worker that only drains, leave out no domain because of its limits; and as nobody else
        promotes then, do so from time to time.
        """
        if everywhere and time.monotonic() - self._promoted_at >= self._settings.poll_every.total_seconds():
            await self.promote()
        too_soon = self._empty_at + SMALLEST_GAP - time.monotonic()
        if too_soon > 0:
            return Look(too_soon)
        await self._hand_back.once()
        self._line.let_in()
        if self._line.for_threads:
            await self._stuck.look_for_threads()
        waiting = len(self._line.for_threads)
        limit = self._limit(waiting)
        wanted, left_out = self._wanted(limit)
        if not wanted:
            return Look(await self._watch_line())
        rest = math.inf
        if self._rests and (self._line.in_hand or not everywhere):
            wanted, rest = self._without_resting(wanted)
        if self._broker is not None:
            self._decide_on_poll(self._broker)
        try:
            found = [await self._claim_in_parts(domains, most) for domains, most in wanted]
        except asyncio.CancelledError:
            for asking in self._asking:
                asking.cancel()
            raise
        finally:
            await self._answered()
        taken_all = [len(taken.leased) < most for taken, (_, most) in zip(found, wanted, strict=True)]
        if self._handlers.gathers:
            now = time.monotonic()
            for (domains, _), empty in zip(wanted, taken_all, strict=True):
                if len(domains) == 1 and empty:
                    self._bulk_empty_at[domains[0]] = now
        found_nothing = not any(taken.leased or taken.contended or taken.refused for taken in found)
        if rest < math.inf or left_out:
            found_nothing = False  # some domains were left out
        if found_nothing and self._line.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        contended = any(taken.contended for taken in found)
        self.emptied = not contended and all(taken_all)
        pause: float | None
        if contended:
            pause = random.uniform(0.002, 0.01)  # noqa: S311 - spreads workers out, hides nothing
        elif not self.emptied:
            pause = 0
        else:
            self._empty_at = time.monotonic()
            pause = min(self._settings.poll_every.total_seconds(), rest)
            if self._broker is not None and not any(taken.refused for taken in found):
                pause = min(self._pause(self._broker, [domain for domains, _ in wanted for domain in domains]), rest)
            if limit:
                self._line.low_water = 0
            else:
                pause = min(pause, await self._watch_line() or math.inf)
            if waiting:
                pause = min(pause, self._quarter_lease / 4)
            if left_out:
                pause = min(pause, LONGEST_EMPTY)
        return Look(pause, found_nothing)

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

    def _wanted(self, limit: int) -> tuple[list[Want], bool]:
        """What to claim, and whether a domain is left out because it was empty a moment ago.

        A domain with bulk handlers only: as many as its chunks may hold. A domain with other handlers too: no more than
        the slots can take, because the type of a command is not known before the claim. A domain whose handlers are all
        written with `def`: no more than the threads can take. A domain with some of these: until as many commands wait
        for a thread as there are slots.
        """
        if not self._handlers.gathers and not self._handlers.threaded:
            return ([(self._domains, limit)] if limit else []), False
        if self._line.in_hand < self._concurrency:
            self._gatherer.slot_is_free()
        single: list[str] = []
        threaded: list[str] = []
        wanted: list[Want] = []
        for domain in self._domains:
            room = self._gatherer.room(domain)
            if room is None or (room and not self._gatherer.only_gathers(domain)):
                threads = self._handlers.threads(domain)
                if threads == "all":
                    threaded.append(domain)
                elif threads == "none" or len(self._line.for_threads) < self._concurrency:
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
            return wanted, False
        # Not every claim for single commands needs to ask a domain that was empty a moment ago.
        now = time.monotonic()
        due = [one for one in wanted if now - self._bulk_empty_at.get(one[0][0], 0.0) > LONGEST_EMPTY]
        return [(single, limit), *due], len(due) < len(wanted)

    def _slots(self) -> int:
        """How many commands can run at a time: if all need a thread, no more than there are threads."""
        threads = self._line.threads
        if not self._handlers.threaded or threads >= self._concurrency:
            return self._concurrency
        all_need_them = all(self._handlers.threads(domain) == "all" for domain in self._domains)
        return threads if all_need_them else self._concurrency

    def empty_line(self) -> None:
        """Start nothing of what stands in line; the next round hands it back."""
        self._take_out(self._line.items)
        self._hand_back.add(self._gatherer.abandon())

    def heed_pauses(self) -> None:
        """Take what belongs to paused domains out of the line; the next round hands it back."""
        self._queue_wanted = True
        paused = self._pauses.paused
        self._take_out([one for one in self._line.items if one.lease.domain in paused])
        self._hand_back.add(self._gatherer.abandon(paused))

    def take_out_stopping(self) -> list[Leased]:
        """Take single commands out of the line that were asked to stop before they have begun, and return them."""
        stopping = [one for one in self._line.items if isinstance(one, Leased) and one.id in one.lease.stopping]
        self._line.drop(stopping)
        return stopping

    def hear_of_hold(self, payload: str) -> None:
        """Heed the notification of a hold."""
        try:
            self.heed_holds({UUID(payload)})
        except ValueError:
            log.debug("Ignored a notification of a hold without an id")

    def heed_holds(self, held: Set[UUID]) -> None:
        """Take what belongs to these batches out of the line; the next round hands it back."""
        self._held_meanwhile |= held
        for heard in self._asking.values():
            heard |= held
        items = self._line.items
        self._take_out([item for item in items if any(one.lease.batch_id in held for one in commands_of(item))])
        self._hand_back.add(self._gatherer.abandon(batches=held))
        self.wake()

    def _take_out(self, items: Collection[Claimed]) -> None:
        """Take these out of the line; the next round hands them back."""
        self._stuck.take_out(items)

    async def promote(self) -> float:
        """Make ready what is due; return the seconds until the next promotion, so that some come together.

        It also finds holds of which no notification came.
        """
        waits = len(self._line) > 0 or next(self._gatherer.gathered, None) is not None
        promotion = await self._shared.perform(claim.promote(self._held.batches if waits else ()))
        self._promoted_at = time.monotonic()
        if promotion.held:
            self.heed_holds(promotion.held)
        poll = self._settings.poll_every.total_seconds()
        pause = poll if promotion.next_due is None else min(poll, promotion.next_due)
        return max(pause, SMALLEST_TICK) if promotion.loads else max(pause, 0.001)

    async def _claim_in_parts(self, domains: list[str], limit: int) -> claim.Claim:
        """Claim so many commands of these domains; if they may need permits, in parts.

        While the permits of one part are asked for, slots run the part before, and the next part is claimed.
        """
        if not self._handlers.concurrency_limits or limit <= ASKED_TOGETHER:
            return await self._claim(domains, limit)
        part, found = math.ceil(limit / math.ceil(limit / ASKED_TOGETHER)), NOTHING
        while (wanted := min(part, limit - len(found.leased))) > 0:
            taken = await self._claim(domains, wanted)
            found = found.joined(taken)
            if len(taken.leased) < wanted or taken.contended:
                break
        return found

    async def _claim(self, domains: list[str], limit: int) -> claim.Claim:
        """Claim so many commands of these domains, and put them into the line.

        Domains whose commands run in order are claimed one by one. All take turns at being first.
        """
        ordered = self._handlers.ordered
        if not ordered or ordered.isdisjoint(domains):
            return await self._claim_together(domains, limit)
        self._first_part += 1
        found = NOTHING
        for part in parts_in_turn(domains, ordered, self._first_part):
            if limit > 0:
                taken = await self._claim_together(part, limit)
                found = found.joined(taken)
                limit -= len(taken.leased)
        return found

    async def _claim_together(self, domains: list[str], limit: int) -> claim.Claim:
        """Claim so many commands of these domains, and put them into the line.

        With a broker, claim what messages tell of and, if it is time, what the queue holds; the two take turns at being
        first.
        """
        if self._broker is None:
            return await self._take(domains, limit, None)
        ways: list[Deliveries | None] = [self._broker.deliveries]
        if self._polls:
            ways.insert(0 if self._queue_first else 1, None)
        found = NOTHING
        for deliveries in ways:
            if limit > 0:
                taken = await self._take(domains, limit, deliveries)
                found = found.joined(taken)
                limit -= len(taken.leased)
            if self._polls and (limit <= 0 or taken.contended):
                self._queue_wanted = True  # there may be more
        return found

    async def _take(self, domains: list[str], limit: int, deliveries: Deliveries | None) -> claim.Claim:
        """Claim in one statement what the queue holds, or what messages tell of."""
        paused = self._pauses.paused
        domains = [domain for domain in domains if domain not in paused]
        if not domains:
            return NOTHING
        number, taken = self._shared.number, NOTHING
        self._held_meanwhile = set()
        wanted: dict[int, int] = {}
        waiting: list[Leased] = []
        refused: list[Transition] = []
        sent_at = self.sent_at = time.monotonic()
        try:
            if deliveries is not None and not (wanted := deliveries.wanted(domains, limit)):
                return NOTHING
            if domains[0] in self._handlers.ordered:
                taken, refused = await self._shared.permits.order.claim(domains[0], limit)
                waiting = taken.waiting
                if deliveries is not None:
                    deliveries.answer(wanted, taken.delivered(wanted))
            elif deliveries is None:
                suspects = not self._held.has_suspect
                self._until_oldest = (self._until_oldest or OLDEST_EVERY) - 1
                turns = self._turns if self._until_oldest else None
                no_turns = self._all_fits or (self._alone and self._until_oldest > 0)
                look = partial(claim.claim, worker=number, domains=domains, limit=limit, suspects=suspects)
                self._alone = self._alone or not no_turns  # unless a notification comes meanwhile
                taken = await self._shared.perform(look(turns=turns, no_turns=no_turns))
                if self._until_oldest:
                    self._turns |= taken.turns
                self._all_fits = len(taken.leased) < limit and not taken.contended
                self._alone = self._alone and taken.alone is not False
            else:
                delivered = await self._shared.perform(
                    claim.claim_delivered(worker=number, domains=domains, wanted=wanted)
                )
                deliveries.answer(wanted, delivered)
                taken = delivered
            self._held.take(taken.leases)
            if self._held.has_budgets:
                self._line.gate = self._gate
        finally:
            self.sent_at = None
        self.claims += 1
        self.claimed += len(taken.leased)
        self.empty_claims += not taken.leased
        self._pace.claimed(time.monotonic() - sent_at)
        try:
            known = await self._hand_back.without_unknown(may_run(taken.leased, waiting, refused, self._held))
            self._settlement.expect(taken.leases)
            if self._rests:
                self._rests.claimed(taken.leased)
            if not self._handlers.concurrency_limits:
                refused = self._add(known)
        except BaseException:
            # Run none of these commands. The heartbeat hands back a lease that is not held here.
            self._held.drop(lease.lease_id for lease in taken.leases)
            for lease in taken.leases:
                lease.lost = True
            raise
        if self._handlers.concurrency_limits:
            await self._ask_for_permits(known, paused)
        elif self._pauses.paused is not paused:
            self.heed_pauses()  # before a slot can begin what this claim has brought
        if self._held_meanwhile:
            self.heed_holds(self._held_meanwhile)
        for transition in refused:
            await self._settlement.put(transition)
        return taken

    def _add(self, known: list[Leased]) -> list[Transition]:
        """Put commands into the line, or into a chunk; return the results of those that fail at once."""
        refused: list[Transition] = []
        if self._handlers.gathers:
            known, refused = self._gatherer.take(known)
        self._line.add(known)
        return refused

    async def _ask_for_permits(self, known: list[Leased], paused: Collection[str]) -> None:
        """Begin to ask for the permits of these commands: so the server has always something to do."""
        heard = self._held_meanwhile
        self._asking[asyncio.create_task(self._add_with_permits(known, paused, heard))] = heard
        await self._answered(MOST_ASKING - 1)

    async def _answered(self, left: int = 0) -> None:
        """Wait until no more than so many requests have no answer. The commands of the others stand in line."""
        failure: Exception | None = None
        while len(self._asking) > left:
            first = next(iter(self._asking))
            try:
                await first
            except Exception as error:
                failure = error
            finally:
                del self._asking[first]
        if failure is not None:
            raise failure

    async def _add_with_permits(self, known: list[Leased], paused: Collection[str], held: set[UUID]) -> None:
        """Put those commands into the line that have a permit or need none; `held` has the batches held meanwhile."""
        try:
            granted, refused = await self._shared.permits.take(known)
        except BaseException:
            self._hand_back.add(known)
            raise
        refused += self._add(granted)
        if self._pauses.paused is not paused:
            self.heed_pauses()
        if held:
            self.heed_holds(held)
        for transition in refused:
            await self._settlement.put(transition)

    def _decide_on_poll(self, broker: Broker) -> None:
        """Look at the queue itself when the database notifies, and at times: a message may be lost."""
        now = time.monotonic()
        self._polls = self._queue_wanted or not broker.connected or now - self._polled_at >= broker.poll_every
        if self._polls:
            self._queue_wanted, self._queue_first, self._polled_at = False, not self._queue_first, now

    def _pause(self, broker: Broker, asked: Collection[str]) -> float:
        ours = {domain for domain in self._domains if domain not in self._pauses.paused}
        look = broker.deliveries.next_look(ours.intersection(asked))
        if self._polls and not ours.issubset(asked):
            self._queue_wanted = True  # a notification may be about a domain that was not asked now
        poll = self._polled_at + broker.poll_every - time.monotonic()
        return min(max(poll, 0.001), math.inf if look is None else look)

    def _without_resting(self, wanted: list[Want]) -> tuple[list[Want], float]:
        """Leave out domains that bring mostly what a limit holds up; return also the seconds until one is due again."""
        resting, paused = self._rests.resting(), self._pauses.paused
        awake = [([domain for domain in domains if domain not in resting], most) for domains, most in wanted]
        left_out = {domain for domains, _ in wanted for domain in domains if domain in resting}
        return awake, min((resting[domain] for domain in left_out - paused), default=math.inf)

    async def _watch_line(self) -> float | None:
        """Hand back what waits too long for a slot. Return when to look again."""
        return await self._stuck.look()

"""Claims commands that are ready, and fills the line before the slots with them."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from uuid import UUID

from busload.commands import claim
from busload.commands.execution import Lease, Leased, Transition
from busload.dispatch.deliveries import Deliveries
from busload.worker.broker_stations import Broker
from busload.worker.budget_gate import BudgetGate, one_flush
from busload.worker.chunks import Gatherer
from busload.worker.hand_back import HandBack
from busload.worker.line import Claimed, Line, commands_of
from busload.worker.marks import Marks
from busload.worker.newcomers import Newcomers, split_off_few
from busload.worker.order import may_run, parts_in_turn
from busload.worker.pace import Look, Pace, sooner
from busload.worker.room import LONGEST_EMPTY, Room
from busload.worker.settlement import Settlement
from busload.worker.shared import Shared
from busload.worker.stuck_line import StuckLine
from busload.worker.under_way import ClaimsUnderWay, UnderWay
from busload.worker.wake_ups import WakeUps

log = logging.getLogger("busload")

NOTHING = claim.Claim([], [], contended=False)

SMALLEST_GAP = 0.002
"""Seconds between a claim that emptied the queue and the next: commands sent one by one are claimed together."""

SMALLEST_TICK = 0.02
"""Seconds between two promotions that find something: retries become due one by one."""

ASLEEP_AFTER = 10.0
"""Seconds without a command after which a worker that is found by those who send looks less often by itself."""

ASLEEP_CLAIMS = 30.0
"""Seconds between two claims of such a worker, if nobody wakes it: its looks for what is due see what is ready, too."""

ASLEEP_POLLS = 2.0, 4.0
"""Then it looks at a random time of so many times `poll_every`: so the looks of all workers spread out."""

OLDEST_EVERY = 16
"""One claim in so many begins with the oldest batches, which else would wait as long as ever more new ones come."""

ASKED_TOGETHER = 1000
"""Commands that are claimed, and whose permits are asked for, in one statement at most: the numbers of so many permits
follow each other."""

MOST_PARTS = 10
"""Parts that are claimed in a row. At the end of the row, slots may have to wait for the permits of the last one."""

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
        self._quarter_lease = shared.settings.lease_for.total_seconds() / 4
        prefetch = shared.settings.prefetch.total_seconds()
        self._pace = Pace(prefetch, longest=max(prefetch, self._quarter_lease / 4))
        self.room = Room(shared, line, gatherer, settlement, self._pace)
        self.newcomers = Newcomers(self._claim_few)
        self.marks = Marks()
        self.wake_ups = WakeUps(shared.perform)
        self._stuck = StuckLine(line, gatherer, hand_back, self._pace, self._quarter_lease)
        self._gate = BudgetGate(
            self._held, one_flush(shared.settings), lambda: gatherer.gathered, settlement.flush_soon
        )
        settlement.let_newcomers_go_first = self.newcomers.let_go_first
        settlement.heed_holds = self.heed_holds
        self._promoted_at = self._claimed_at = time.monotonic()
        self._empty_at = 0.0
        self._turns: dict[str, int] = {}
        """Who was the last to have a turn, for each domain."""
        self._until_oldest = OLDEST_EVERY
        self._all_fits = True
        """Whether the last claim found less than it asked for: then nobody has to wait for a turn."""
        self._alone = False
        """Whether the last claim found one owner only, and nothing became ready since it was sent."""
        self._queue_wanted = True
        """With a broker: whether to look at the queue itself, as something may be ready without a message."""
        self._polls = self._queue_first = False
        self._polled_at = 0.0
        self._first_part = 0
        self.wake: Callable[[], None] = lambda: None
        """Has the next round begin at once."""
        self.is_found: Callable[[], bool] = lambda: False
        """Tells whether those who send find this worker, and wake it."""
        self._under_way = ClaimsUnderWay()
        self._asking: dict[asyncio.Task[None], set[UUID]] = {}
        """Claims whose permits are asked for, and the batches that were held since."""
        self._asked_for: dict[asyncio.Task[None], int] = {}
        """How many commands each of these claims has brought."""
        self.emptied = False
        """Whether the last claim took everything that was ready."""
        self.stopping = False
        self.claims = self.empty_claims = self.claimed = 0

    @property
    def sent_at(self) -> float | None:
        """When the oldest claim was sent that has no answer; None while there is none."""
        return self._under_way.sent_at

    def look_at_queue(self) -> None:
        """Look at the queue itself in the next round: something may be ready that no message tells of."""
        self._queue_wanted, self._alone = True, False

    @property
    def asleep(self) -> bool:
        """Whether the worker has had nothing to do for a while, and will be woken."""
        long_ago = time.monotonic() - self._claimed_at >= ASLEEP_AFTER
        return long_ago and self.emptied and self._line.in_hand == 0 and self.is_found()

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
        limit = self.room.limit(waiting)
        wanted, left_out = self.room.wanted(limit)
        if not wanted:
            return Look(sooner(await self._watch_line(), await self.wake_ups.hand_on(self.wake_ups.count)))
        rest = math.inf
        if self._rests and (self._line.in_hand or not everywhere):
            wanted, rest = self.room.without_resting(wanted)
        if self._broker is not None:
            self._decide_on_poll(self._broker)
        await self.newcomers.once()
        await self.newcomers.let_go_first()
        woken = self.wake_ups.count  # what a wake-up during the claims is about, they may not have seen
        try:
            claims = [await self._claim_in_parts(domains, most) for domains, most in wanted]
        except asyncio.CancelledError:
            for asking in self._asking:
                asking.cancel()
            raise
        finally:
            await self._answered()
        found, taken_all = [taken for taken, _ in claims], True
        for (_, every), want in zip(claims, wanted, strict=True):
            if every:
                self.room.was_empty(want)
                self.wake_ups.taken(want[0], woken)
            else:
                taken_all = False
        found_nothing = not any(taken.leased or taken.contended or taken.refused for taken in found)
        if rest < math.inf or left_out:
            found_nothing = False  # some domains were left out
        if found_nothing and self._line.in_hand == 0:
            self._settlement.flush_soon()  # no further result will join those that wait
        contended = any(taken.contended for taken in found)
        self.emptied = taken_all and not contended
        pause: float | None
        if contended:
            pause = random.uniform(0.002, 0.01)  # noqa: S311 - spreads workers out, hides nothing
        elif not self.emptied:
            pause = 0
        else:
            self._empty_at = time.monotonic()
            refused = any(taken.refused for taken in found)
            poll = ASLEEP_CLAIMS if self.asleep and not refused else self._settings.poll_every.total_seconds()
            pause = min(poll, rest)
            if self._broker is not None and not refused:
                pause = min(self._pause(self._broker, [domain for domains, _ in wanted for domain in domains]), rest)
            if limit:
                self._line.low_water = 0
            else:
                pause = min(pause, await self._watch_line() or math.inf)
            if waiting:
                pause = min(pause, self._quarter_lease / 4)
            if left_out:
                pause = min(pause, LONGEST_EMPTY)
        if not contended and not self.newcomers.expected:  # else the claim for newcomers may take it
            pause = sooner(pause, await self.wake_ups.hand_on(woken))
        return Look(pause, found_nothing)

    def empty_line(self) -> None:
        """The worker stops: start nothing of what stands in line. The next round hands it back."""
        self.stopping = True
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
        self._under_way.hear_of(held)
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

        It also finds holds of which no notification came, and commands for a worker that is not woken for them.
        """
        waits = len(self._line) > 0 or next(self._gatherer.gathered, None) is not None
        asleep = self.asleep
        unwoken = self._domains if asleep and self._broker is None else ()
        plan = claim.promote(self._held.batches if waits else (), unwoken)
        promotion = await self._shared.perform(plan)
        self._promoted_at = time.monotonic()
        if promotion.held:
            self.heed_holds(promotion.held)
        if promotion.ready:
            self.look_at_queue()
            self.wake()
        poll = self._settings.poll_every.total_seconds()
        if asleep:
            poll *= random.uniform(*ASLEEP_POLLS)  # noqa: S311 - spreads workers out, hides nothing
        pause = poll if promotion.next_due is None else min(poll, promotion.next_due)
        return max(pause, SMALLEST_TICK) if promotion.loads else max(pause, 0.001)

    async def _claim_in_parts(self, domains: list[str], limit: int) -> tuple[claim.Claim, bool]:
        """Claim so many commands of these domains, and return also whether there were fewer.

        Commands that may need permits are claimed in parts: while the permits of one part are asked for, slots run the
        part before, and the next part is claimed. Where all commands take a slot, this goes on while slots are quick.
        """
        if not self._handlers.concurrency_limits:
            taken = await self._claim(domains, limit)
            return taken, len(taken.leased) < limit
        all_take_slots = not (self._handlers.gathers or self._handlers.threaded or self._handlers.ordered)
        found, left, least = NOTHING, limit, max(1, ASKED_TOGETHER // 2)
        for _ in range(MOST_PARTS):
            wanted = min(left, ASKED_TOGETHER)
            taken = await self._claim(domains, wanted)
            found, left = found.joined(taken), left - len(taken.leased)
            if len(taken.leased) < wanted or taken.contended:
                return found, len(taken.leased) < wanted
            if left < least and all_take_slots:
                asked_for = sum(size for asking, size in self._asked_for.items() if not asking.done())
                left = self.room.limit(0, asked_for=asked_for)  # slots may have run what came first
            if left < least or self.stopping:
                break
        return found, False

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
        wanted: dict[int, int] = {}
        if deliveries is not None and not (wanted := deliveries.wanted(domains, limit)):
            return NOTHING
        number, taken = self._shared.number, NOTHING
        waiting: list[Leased] = []
        refused: list[Transition] = []
        with self._under_way.sending(paused) as under_way:
            if domains[0] in self._handlers.ordered:
                ordered, refused = await self._shared.permits.order.claim(domains[0], limit)
                taken, waiting = ordered, ordered.waiting
                if deliveries is not None:
                    deliveries.answer(wanted, ordered.delivered(wanted))
            elif deliveries is None:
                suspects = not self._held.has_suspect
                self._until_oldest = (self._until_oldest or OLDEST_EVERY) - 1
                turns = self._turns if self._until_oldest else None
                no_turns = self._all_fits or self._alone
                if self.marks.is_due(self._domains):
                    await self._shared.perform(self.marks.survey(self._domains))
                known = self.marks.known
                look = self.marks.claim if known else partial(claim.claim, no_turns=no_turns)
                self._alone = True  # unless a notification comes meanwhile
                taken = await self._shared.perform(
                    look(worker=number, domains=domains, limit=limit, turns=turns, suspects=suspects)
                )
                if not known:
                    self.marks.claimed(taken)
                if self._until_oldest:
                    self._turns |= taken.turns
                self._all_fits = len(taken.leased) < limit and not taken.contended
                self._alone = self._alone and taken.alone
            else:
                delivered = await self._shared.perform(
                    claim.claim_delivered(worker=number, domains=domains, wanted=wanted)
                )
                deliveries.answer(wanted, delivered)
                taken = delivered
            self._pace.claimed(time.monotonic() - under_way.sent())
            await self._bring(taken, under_way, waiting, refused)
        return taken

    async def _claim_few(self) -> int:
        """Claim a few commands of owners with few, and let them begin before those in line. Return how many."""
        paused, limit = self._pauses.paused, self.room.few()
        others = {*paused, *self._handlers.ordered, *self._rests.resting()}
        domains = [domain for domain in self._domains if domain not in others]
        if limit <= 0 or not domains or self._handlers.concurrency_limits or self.marks.known:
            return 0
        woken = self.wake_ups.count
        with self._under_way.sending(paused) as under_way:
            plan = claim.claim_few(worker=self._shared.number, domains=domains, limit=limit, turns=self._turns)
            taken = await self._shared.perform(plan)
            await self._bring(taken, under_way, [], [], first=True)
        self.wake_ups.taken({lease.domain for lease in taken.leases}, woken)
        return len(taken.leased)

    async def _bring(
        self,
        taken: claim.Claim,
        under_way: UnderWay,
        waiting: list[Leased],
        refused: list[Transition],
        *,
        first: bool = False,
    ) -> None:
        """Put what a claim has taken into the line, or ask for its permits. With `first` it is to begin first."""
        self._held.take(taken.leases)
        under_way.sent_at = None
        if self._held.has_budgets:
            self._line.gate = self._gate
        self.claims += 1
        self.claimed += len(taken.leased)
        if taken.leased:
            self._claimed_at = time.monotonic()
        self.empty_claims += not taken.leased
        try:
            known = await self._hand_back.without_unknown(may_run(taken.leased, waiting, refused, self._held))
            self._settlement.expect(taken.leases)
            if self._rests:
                self._rests.claimed(taken.leased)
            if not self._handlers.concurrency_limits:
                refused = self._add(known, taken.leases, first=first)
        except BaseException:
            # Run none of these commands. The heartbeat hands back a lease that is not held here.
            self._held.drop(lease.lease_id for lease in taken.leases)
            for lease in taken.leases:
                lease.lost = True
            raise
        if self._handlers.concurrency_limits:
            await self._ask_for_permits(known, under_way)
        elif self._pauses.paused is not under_way.paused:
            self.heed_pauses()  # before a slot can begin what this claim has brought
        if under_way.held:
            self.heed_holds(under_way.held)
        for transition in refused:
            await self._settlement.put(transition)

    def _add(self, known: list[Leased], leases: Sequence[Lease] = (), *, first: bool = False) -> list[Transition]:
        """Put commands into the line, or into a chunk; return the results of those that fail at once.

        With `first` they begin before those in line. Of several leases, those of owners with few commands do so.
        """
        refused: list[Transition] = []
        if self._handlers.gathers:
            known, refused = self._gatherer.take(known)
        if first:
            self._line.add(known, first=True)
        elif len(leases) > 1 and self._line.ready:
            few, others = split_off_few(leases, known)
            self._line.add(others)
            self._line.add(few, first=True)  # unless others are more urgent
        else:
            self._line.add(known)
        return refused

    async def _ask_for_permits(self, known: list[Leased], under_way: UnderWay) -> None:
        """Begin to ask for the permits of these commands: so the server has always something to do."""
        asking = self._add_with_permits(known, under_way.paused, under_way.held)
        task = asyncio.create_task(asking)
        self._asking[task], self._asked_for[task] = under_way.held, len(known)
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
                del self._asking[first], self._asked_for[first]
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

    async def _watch_line(self) -> float | None:
        """Hand back what waits too long for a slot. Return when to look again."""
        return await self._stuck.look()

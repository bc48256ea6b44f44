"""How many commands a worker claims, and of which domains."""

from __future__ import annotations

import math
import time
from typing import TypeAlias

from busload.commands.load import LOAD_SIZE
from busload.worker.chunks import Gatherer
from busload.worker.line import Line
from busload.worker.newcomers import FEW
from busload.worker.pace import Pace
from busload.worker.settlement import Settlement
from busload.worker.shared import Shared

Want: TypeAlias = tuple[list[str], int]
"""Domains, and how many commands of them to claim."""

LONGEST_EMPTY = 0.05
"""Seconds for which claims leave out a domain of bulk handlers that was empty."""

MOST_AHEAD = 20
"""Commands in line for each slot, at most: however fast the last ones were, the next ones may be slow."""


class Room:
    """Slots that are free or soon will be, threads, chunks, and room for results."""

    def __init__(self, shared: Shared, line: Line, gatherer: Gatherer, settlement: Settlement, pace: Pace) -> None:
        self._shared, self._line, self._gatherer, self._settlement = shared, line, gatherer, settlement
        self._pace, self._handlers, self._domains = pace, shared.bus.handlers, shared.domains
        self._concurrency = shared.settings.concurrency
        self._farthest = max(MOST_AHEAD * shared.settings.concurrency, LOAD_SIZE)
        self._reserved = FEW if settlement.stats.capacity >= 100 * FEW else 0
        """Room for the results of newcomers, which the usual claims leave if there is room to spare."""
        self._bulk_empty_at: dict[str, float] = {}
        self.ahead = 0
        """How many commands should stand in line, as of the last look."""

    def few(self) -> int:
        """How many commands may be claimed to begin before those in line: 0 if slots are not free again soon."""
        return min(self._reserved, self.ahead, self._settlement.room - self._line.in_hand)

    def limit(self, waiting: int, *, asked_for: int = 0) -> int:
        """How many single commands to claim. `waiting` is how many wait for a thread: those take no slot.

        While permits are asked for, as many more commands may be held, if so many end soon.
        """
        in_hand = self._line.in_hand - waiting + asked_for
        concurrency = self._slots()
        ahead = self._pace.ahead(self._line.finished - self._shared.postponed, self._line.busy)
        ahead = self.ahead = min(ahead, self._farthest)
        # Half of what is ahead may be used up before the next claim, so that a claim is worth its round trip.
        low_water = concurrency - 1 + ahead // 2
        # Each command in hand, or about to be, becomes a result, and there must be room for it.
        room = self._settlement.room - self._reserved - waiting
        limit = min(concurrency + ahead + min(ahead, asked_for), room) - in_hand
        if limit <= 0:
            self._settlement.ask_for_room()
        if (in_hand > low_water and not asked_for) or limit <= 0:
            self._line.low_water = min(low_water, in_hand - 1) + waiting
            return 0
        return limit

    def wanted(self, limit: int) -> tuple[list[Want], bool]:
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

    def without_resting(self, wanted: list[Want]) -> tuple[list[Want], float]:
        """Leave out domains that bring mostly what a limit holds up; return also the seconds until one is due again."""
        resting, paused = self._shared.limiter.rests.resting(), self._shared.pauses.paused
        awake = [([domain for domain in domains if domain not in resting], most) for domains, most in wanted]
        left_out = {domain for domains, _ in wanted for domain in domains if domain in resting}
        return awake, min((resting[domain] for domain in left_out - paused), default=math.inf)

    def _slots(self) -> int:
        """How many commands can run at a time: if all need a thread, no more than there are threads."""
        threads = self._line.threads
        if not self._handlers.threaded or threads >= self._concurrency:
            return self._concurrency
        all_need_them = all(self._handlers.threads(domain) == "all" for domain in self._domains)
        return threads if all_need_them else self._concurrency

    def was_empty(self, want: Want) -> None:
        """A claim found all that is ready of these domains."""
        if self._handlers.gathers and len(want[0]) == 1:
            self._bulk_empty_at[want[0][0]] = time.monotonic()

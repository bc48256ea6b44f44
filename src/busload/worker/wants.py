"""What a worker wants of which domains: single commands for its slots, others for threads and for chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from busload.handlers.registry import Handlers
from busload.worker.chunks import Gatherer
from busload.worker.line import Line

Want: TypeAlias = tuple[list[str], int]
"""Domains, and how many commands of them to claim."""

LONGEST_EMPTY = 0.05
"""Seconds for which claims leave out a domain of bulk handlers that was empty."""


class Wants:
    """Divides what a worker has room for among its domains. `concurrency` is the number of its slots."""

    def __init__(
        self, handlers: Handlers, domains: list[str], concurrency: int, line: Line, gatherer: Gatherer
    ) -> None:
        self._handlers, self._domains, self._concurrency = handlers, domains, concurrency
        self._line, self._gatherer = line, gatherer
        self._empty_at: dict[str, float] = {}

    def learn(self, wanted: Sequence[Want], taken_all: Sequence[bool]) -> None:
        """Remember which domains of bulk handlers were empty."""
        if self._handlers.gathers:
            now = time.monotonic()
            for (domains, _), empty in zip(wanted, taken_all, strict=True):
                if len(domains) == 1 and empty:
                    self._empty_at[domains[0]] = now

    def single_ones(self) -> list[str]:
        """The domains without bulk handlers."""
        return [domain for domain in self._domains if not self._gatherer.serves(domain)]

    def of(self, limit: int, ahead: int) -> tuple[list[Want], bool]:
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
            enough = 1 + ahead // 2 - ahead
            if threaded and limit and self._line.free_threads >= enough:
                wanted.append((threaded, min(limit, self._line.free_threads + ahead)))
            self._line.threads_wanted = enough
        if not single or not limit:
            return wanted, False
        # Not every claim for single commands needs to ask a domain that was empty a moment ago.
        now = time.monotonic()
        due = [one for one in wanted if now - self._empty_at.get(one[0][0], 0.0) > LONGEST_EMPTY]
        return [(single, limit), *due], len(due) < len(wanted)

    def slots(self) -> int:
        """How many commands can run at a time: if all need a thread, no more than there are threads."""
        threads = self._line.threads
        if not self._handlers.threaded or threads >= self._concurrency:
            return self._concurrency
        all_need_them = all(self._handlers.threads(domain) == "all" for domain in self._domains)
        return threads if all_need_them else self._concurrency

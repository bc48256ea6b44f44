"""What stands in line for too long: it is handed back, because slots or threads may be stuck."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from busload.commands.execution import Leased
from busload.commands.wording import counted
from busload.worker.chunks import Gatherer
from busload.worker.hand_back import HandBack
from busload.worker.line import Claimed, Gathered, Line
from busload.worker.pace import Pace

log = logging.getLogger("busload")


class StuckLine:
    """Takes out of the line what this worker will not begin in time; others run it."""

    def __init__(self, line: Line, gatherer: Gatherer, hand_back: HandBack, pace: Pace, quarter_lease: float) -> None:
        self._line, self._gatherer, self._hand_back = line, gatherer, hand_back
        self._pace, self._quarter_lease = pace, quarter_lease

    def take_out(self, items: Collection[Claimed]) -> None:
        """Take these out of the line; the next round hands them back."""
        self._line.drop(items)
        self._hand_back.add(self._gatherer.unpack(items))

    async def look_for_threads(self) -> None:
        """Hand back what waits too long for a thread: the threads may be stuck."""
        late = time.monotonic() - self._quarter_lease
        stuck = [one for one in self._line.for_threads if isinstance(one, Leased) and one.lease.claimed < late]
        if stuck:
            commands = counted(len(stuck), "command")
            log.info("Handing back %s after %.1f s of waiting for a thread", commands, self._quarter_lease)
            self.take_out(stuck)
            await self._hand_back.once()

    async def look(self) -> float | None:
        """Hand back what waits too long for a slot: the slots may be stuck. Return when to look again."""
        now = time.monotonic()
        late = now - self._quarter_lease
        if self._gatherer.has_chunks_in_line and (
            stuck := [one for one in self._line.items if isinstance(one, Gathered) and one.in_line_since < late]
        ):
            for gathered in stuck:
                self._gatherer.stuck(gathered.lease.domain)
            self.take_out(stuck)
            await self._hand_back.once()
        patience = min(max(1.0, 20 * self._pace.horizon), self._quarter_lease)
        if late_at_gate := [one for one in self._line.at_gate if one.lease.claimed < now - patience]:
            self.take_out(late_at_gate)  # others hold their batch: they would keep the worker from claiming more
            await self._hand_back.once()
        first = next((one for one in self._line.ready if isinstance(one, Leased)), None)
        if first is None:  # a slot that comes free wakes the loop
            return self._quarter_lease / 4 if len(self._line) else None
        waited = now - first.lease.claimed
        if waited > patience:
            log.info("Handing back %s after %.1f s of waiting for a slot", counted(len(self._line), "command"), waited)
            self.take_out([one for one in self._line.items if isinstance(one, Leased)])
            await self._hand_back.once()
        return patience / 4

"""Outbox → transport: announces what was written, again and again until the broker has confirmed it."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from datetime import timedelta
from uuid import uuid4

from busload.announcer import Announcer
from busload.announcing import Perform, Round, announce_page, recover
from busload.domain.counted import counted
from busload.errors import RefusalReason
from busload.store import outbox
from busload.store.outbox import Lag

log = logging.getLogger("busload")

LONGEST_PAUSE = 10.0
"""Seconds between two rounds while the broker cannot be reached."""

ROUNDS_TO_REPORT = 3
PASSING = (RefusalReason.UNREACHABLE, RefusalReason.THROTTLED)
"""What goes away by itself; other reasons need a person, and are reported at once."""

LARGER = 10
"""How many times as many loads a relay takes at a time where they are small: commands that were sent one by one."""

SAY_AGAIN = 60.0
"""Seconds for which a reason must be gone, and with it all that waits for another round, before it is news again."""

LOCKED_PAUSE = 0.25
"""Seconds before another look at what is due but locked."""

STRANDED_AFTER = 60.0
"""Seconds after which commands that wait for a transport of another name are taken for stranded."""

LAG_EVERY = 15.0
"""Seconds between two looks at how much waits."""


class Relay:
    """Announces what is due; any number of them share an outbox, since a load is held by one at a time.

    While the broker is away, a round takes one page, and the next one waits for up to ten seconds. As soon as it is
    back, all that waited for it alone is due. A queue that is silent while others answer is no reason to wait.
    """

    def __init__(self, announcer: Announcer, perform: Perform, poll_every: timedelta) -> None:
        self._announcer, self._perform = announcer, perform
        self._poll_every = poll_every.total_seconds()
        self._id = uuid4()
        self._failures = 0
        self._resume_at = self._lag_at = 0.0
        self._hurries = False
        self._page = announcer.page
        self._said: dict[str, float] = {}
        self._stranded: set[str] = set()
        self.rounds = self.failed_rounds = self.relayed = 0
        self.lag: list[Lag] = []
        """What waits in the outbox, by transport, as of the last look."""

    def broker_is_back(self) -> None:
        """Somebody has reached it: do not wait for the end of a pause, ours or that of one who died meanwhile."""
        self._hurries, self._resume_at = True, 0.0

    async def once(self) -> float:
        """Announce one page of what is due; returns how long to wait for the next one."""
        wait = self._resume_at - time.monotonic()
        if wait > 0:  # commands that were sent meanwhile need not try for themselves
            return wait
        await self._look_at_lag()
        if self._hurries or self._announcer.heard_again():
            await self._hurry()
        done = await self.announce_page()
        if done.unreachable is not None or done.throttled:
            return max(0.0, self._resume_at - time.monotonic())
        if done.loads:
            return 0
        due = await self._perform(outbox.next_due(self._announcer.transport.name, self._announcer.left_alone))
        if due is None:
            return self._poll_every
        # Due, and yet not taken: somebody has locked it.
        return min(self._poll_every, due if due > 0 else LOCKED_PAUSE)

    async def announce_due(self) -> int:
        """Announce all that is due; returns how many commands are ready by it. It ends when the broker is away."""
        ready = 0
        while time.monotonic() >= self._resume_at:
            done = await self.announce_page()
            ready += done.ready
            if not done.loads:
                break
        return ready

    async def announce_page(self) -> Round:
        done = await announce_page(self._announcer, self._perform, self._id, self._page)
        if not done.loads:
            return done
        small = len(done.loads) == self._page and done.ready <= 10 * self._page and not done.again
        self._page = LARGER * self._announcer.page if small else self._announcer.page
        self.rounds += 1
        self.relayed += done.ready
        self._report(done)
        if done.unreachable is not None:
            self._pause(done.unreachable)
        elif done.throttled:
            self.failed_rounds += 1
            self._resume_at = time.monotonic() + done.throttled
        elif done.ready:
            if self._failures:
                log.info("The broker can be reached again: announcing what has waited")
                await self._hurry()
            self._failures = 0
        return done

    def _pause(self, error: str) -> None:
        if not self._failures:
            log.warning("Could not reach the broker; commands wait in the outbox until it is back: %s", error)
        self._failures += 1
        self.failed_rounds += 1
        pause = min(LONGEST_PAUSE, 0.25 * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1)  # noqa: S311
        self._resume_at = time.monotonic() + pause

    async def _hurry(self) -> None:
        await self._perform(outbox.hurry(self._announcer.transport.name))
        self._hurries = False

    def _report(self, done: Round) -> None:
        """Say once why commands are not announced; see `_forget_what_was_said`."""
        rounds = {load.hi >> 10: load.rounds + 1 for load in done.loads}
        waiting: Counter[str] = Counter()
        errors: dict[str, str | None] = {}
        for piece in done.pieces:
            if piece.reason is None:
                continue
            if piece.reason not in PASSING or rounds[piece.hi >> 10] >= ROUNDS_TO_REPORT:
                waiting[piece.reason] += piece.hi - piece.lo + 1
                errors[piece.reason] = piece.error
        for reason in waiting.keys() - self._said.keys():
            log.log(
                logging.WARNING if reason in PASSING else logging.ERROR,
                "The transport %s does not confirm messages about %s or more (%s); they stay in the outbox "
                "and are tried again: %s",
                *(self._announcer.transport.name, counted(waiting[reason], "command"), reason, errors[reason]),
            )
        self._said |= dict.fromkeys(waiting, time.monotonic())

    def _forget_what_was_said(self) -> None:
        """While something waits for another round, its reason is known; rounds for others say nothing about that."""
        if not any(one.failed for one in self.lag if one.transport == self._announcer.transport.name):
            recent = time.monotonic() - SAY_AGAIN
            self._said = {reason: seen for reason, seen in self._said.items() if seen > recent}

    async def _look_at_lag(self) -> None:
        now = time.monotonic()
        if now >= self._lag_at:
            self._lag_at = now + LAG_EVERY
            self.lag = await self._perform(outbox.lag())
            self._forget_what_was_said()
            self._warn_of_stranded()

    def _warn_of_stranded(self) -> None:
        """Commands of a transport that was given up wait for ever, unless somebody still relays to it."""
        ours = self._announcer.transport.name
        for lag in self.lag:
            if lag.transport != ours and lag.oldest > STRANDED_AFTER and lag.transport not in self._stranded:
                self._stranded.add(lag.transport)
                log.warning(
                    "%s waited %.0f s for the transport %s, and this worker announces by %s. If nobody relays to it "
                    "any more, let PostgreSQL deliver: `busload outbox reroute --all`",
                    *(counted(lag.commands, "command has", "commands have"), lag.oldest, lag.transport, ours),
                )


class Recovery:
    """Puts right what crashes have left between the database and the broker, from time to time."""

    def __init__(self, announcer: Announcer, perform: Perform, every: timedelta, ring_again_after: timedelta) -> None:
        self._announcer, self._perform = announcer, perform
        self._every, self._ring_again_after = every.total_seconds(), ring_again_after
        self._first = True
        self.rung_again = 0

    async def once(self) -> float:
        if self._first:  # workers that start together do not all sweep together
            self._first = False
            return random.uniform(0, self._every)  # noqa: S311
        found = await recover(self._announcer, self._perform, ring_again_after=self._ring_again_after)
        self.rung_again += found.rung_again
        return self._every

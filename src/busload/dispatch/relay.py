"""Outbox → transport: publishes what was written, again and again, until the broker has confirmed it."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from datetime import timedelta
from uuid import uuid4

from busload.commands.counted import counted
from busload.dispatch import outbox
from busload.dispatch.outbox import Lag
from busload.dispatch.publish import Publisher
from busload.dispatch.recover import Perform, Round, publish_page, recover
from busload.errors import RefusalReason
from busload.postgres.backoff import Backoff

log = logging.getLogger("busload")

LONGEST_PAUSE = 10.0
"""Seconds between two rounds while the broker cannot be reached."""

ROUNDS_TO_REPORT = 3
PASSING = (RefusalReason.UNREACHABLE, RefusalReason.THROTTLED)
"""Reasons that go away by themselves. The others need a person, and are reported at once."""

LARGER = 10
"""How many times as many loads a relay takes at a time if they are small: commands that were sent one by one."""

REPORT_AGAIN = 60.0
"""Seconds without a reason, and with nothing left that waits for another round, before the reason is reported again."""

LOCKED_PAUSE = 0.25
"""Seconds before another try to take loads that are due but locked."""

STRANDED_AFTER = 60.0
"""Seconds after which commands for another transport are thought to have no relay."""

LAG_EVERY = 15.0
"""Seconds between two looks at how much waits in the outbox."""


class Relay:
    """Publishes what is due. Any number of relays share an outbox: a load is held by one of them at a time.

    While the broker is away, a round tries one page, and the next round waits for up to ten seconds. As soon as the
    broker is back, everything that waited only for the broker is due. A queue that does not answer while others do is
    no reason to wait.
    """

    def __init__(self, publisher: Publisher, perform: Perform, poll_every: timedelta) -> None:
        self._publisher, self._perform = publisher, perform
        self._poll_every = poll_every.total_seconds()
        self._id = uuid4()
        self._backoff = Backoff(0.5, LONGEST_PAUSE)
        self._resume_at = self._lag_at = 0.0
        self._hurries = False
        self._page = publisher.page
        self._reported: dict[str, float] = {}
        self._stranded: set[str] = set()
        self.rounds = self.failed_rounds = self.relayed = 0
        self.lag: list[Lag] = []
        """What waits in the outbox, by transport, as of the last look."""

    def broker_is_back(self) -> None:
        """Somebody has reached the broker: end our pause, and those of loads that wait for it."""
        self._hurries, self._resume_at = True, 0.0

    async def once(self) -> float:
        """Publish one page of what is due; returns the seconds to wait before the next round."""
        wait = self._resume_at - time.monotonic()
        if wait > 0:  # commands that were sent meanwhile do not end the pause
            return wait
        await self._look_at_lag()
        if self._hurries or self._publisher.recovered():
            await self._hurry()
        done = await self.publish_page()
        if done.unreachable is not None or done.throttled:
            return max(0.0, self._resume_at - time.monotonic())
        if done.loads:
            return 0
        due = await self._perform(outbox.next_due(self._publisher.transport.name, self._publisher.left_alone))
        if due is None:
            return self._poll_every
        # A load that is due and was not taken is locked.
        return min(self._poll_every, due if due > 0 else LOCKED_PAUSE)

    async def publish_due(self) -> int:
        """Publish all that is due, unless the broker is away; returns how many commands were published."""
        ready = 0
        while time.monotonic() >= self._resume_at:
            done = await self.publish_page()
            ready += done.ready
            if not done.loads:
                break
        return ready

    async def publish_page(self) -> Round:
        done = await publish_page(self._publisher, self._perform, self._id, self._page)
        if not done.loads:
            return done
        small = len(done.loads) == self._page and done.ready <= 10 * self._page and not done.again
        self._page = LARGER * self._publisher.page if small else self._publisher.page
        self.rounds += 1
        self.relayed += done.ready
        self._report(done)
        if done.unreachable is not None:
            self._pause(done.unreachable)
        elif done.throttled:
            self.failed_rounds += 1
            self._resume_at = time.monotonic() + done.throttled
        elif done.ready:
            if self._backoff.tries:
                log.info("The broker can be reached again: publishing what has waited")
                await self._hurry()
            self._backoff.reset()
        return done

    def _pause(self, error: str) -> None:
        if not self._backoff.tries:
            log.warning("Could not reach the broker; commands wait in the outbox until it is back: %s", error)
        self.failed_rounds += 1
        self._resume_at = time.monotonic() + self._backoff.pause()

    async def _hurry(self) -> None:
        await self._perform(outbox.hurry(self._publisher.transport.name))
        self._hurries = False

    def _report(self, done: Round) -> None:
        """Log each reason why commands are not published, once; see `_forget_reports`."""
        rounds = {one.load.number: one.rounds + 1 for one in done.loads}
        waiting: Counter[str] = Counter()
        errors: dict[str, str | None] = {}
        for piece in done.pieces:
            if piece.reason is None:
                continue
            if piece.reason not in PASSING or rounds[piece.load.number] >= ROUNDS_TO_REPORT:
                waiting[piece.reason] += piece.load.size
                errors[piece.reason] = piece.error
        for reason in waiting.keys() - self._reported.keys():
            log.log(
                logging.WARNING if reason in PASSING else logging.ERROR,
                "The transport %s does not confirm messages about %s or more (%s); they stay in the outbox "
                "and are tried again: %s",
                *(self._publisher.transport.name, counted(waiting[reason], "command"), reason, errors[reason]),
            )
        self._reported |= dict.fromkeys(waiting, time.monotonic())

    def _forget_reports(self) -> None:
        """Forget old reasons only when nothing waits for another round: until then each reason has been reported."""
        if not any(one.failed for one in self.lag if one.transport == self._publisher.transport.name):
            recent = time.monotonic() - REPORT_AGAIN
            self._reported = {reason: seen for reason, seen in self._reported.items() if seen > recent}

    async def _look_at_lag(self) -> None:
        now = time.monotonic()
        if now >= self._lag_at:
            self._lag_at = now + LAG_EVERY
            self.lag = await self._perform(outbox.lag())
            self._forget_reports()
            self._warn_of_stranded()

    def _warn_of_stranded(self) -> None:
        """Commands for a transport that is used no more wait for ever, unless somebody still relays to it."""
        ours = self._publisher.transport.name
        for lag in self.lag:
            if lag.transport != ours and lag.oldest > STRANDED_AFTER and lag.transport not in self._stranded:
                self._stranded.add(lag.transport)
                log.warning(
                    "%s waited %.0f s for the transport %s, and this worker publishes by %s. If nobody relays to it "
                    "any more, let PostgreSQL deliver: `busload outbox reroute --all`",
                    *(counted(lag.commands, "command has", "commands have"), lag.oldest, lag.transport, ours),
                )


class Recovery:
    """Repairs, from time to time, what crashes have left between the database and the broker."""

    def __init__(
        self, publisher: Publisher, perform: Perform, every: timedelta, publish_again_after: timedelta
    ) -> None:
        self._publisher, self._perform = publisher, perform
        self._every, self._publish_again_after = every.total_seconds(), publish_again_after
        self._first = True
        self.published_again = 0

    async def once(self) -> float:
        if self._first:  # so that workers that start together do not all recover together
            self._first = False
            return random.uniform(0, self._every)  # noqa: S311
        found = await recover(self._publisher, self._perform, publish_again_after=self._publish_again_after)
        self.published_again += found.published_again
        return self._every

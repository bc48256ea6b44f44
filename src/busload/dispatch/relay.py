"""Outbox → transport: publishes what was written until the broker has confirmed it, and repairs what crashes have left.

Relays of workers publish round after round; `bus.recover()` does so once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg

from busload.commands.wording import counted
from busload.dispatch import creation_state, outbox
from busload.dispatch.outbox import Lag, Piece, Unpublished
from busload.dispatch.publish import Perform, Publisher
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

SHORT_REST, LONGEST_REST = 0.25, 10.0
"""Seconds between two rounds if the broker was too busy for the first: unless it names a time, and at most."""

MARK_AGAIN = (0.1, 0.5, 2.0)
"""Seconds between two tries to mark loads, if the database did not answer."""


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


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery did: commands it published, those it published again, and creations that are complete by it."""

    relayed: int = 0
    published_again: int = 0
    closed: int = 0


async def recover(publisher: Publisher, perform: Perform, *, publish_again_after: timedelta) -> Recovered:
    """Publish what is due, publish again what nobody has claimed, and close complete creations.

    Any number may do so at once, also beside relays. What the broker does not confirm waits for a relay.
    """
    relay, relayed, published_again, reachable = uuid4(), 0, 0, True
    while reachable:
        done = await publish_page(publisher, perform, relay, publisher.page)
        relayed += done.ready
        reachable = done.unreachable is None and not done.throttled
        if not done.loads:
            break
    while reachable:
        unclaimed = await perform(outbox.unclaimed(publisher.transport.name, publish_again_after, publisher.page))
        if not unclaimed:
            break
        pieces = await publisher.publish(unclaimed, again=True)
        round = Round(unclaimed, pieces, _stuck(publisher, unclaimed))
        published_again += sum(piece.load.size for piece in round.pieces if piece.reason is None)
        reachable = round.unreachable is None and not round.throttled
    closed = await perform(creation_state.close())
    if relayed or published_again:
        commands = counted(relayed, "command")
        log.info("Recovered: published %s, and again %d that nobody had claimed", commands, published_again)
    return Recovered(relayed, published_again, closed)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took, and how many commands are `ready` now or wait for another round, `again`."""

    loads: Sequence[Unpublished] = ()
    pieces: Sequence[Piece] = ()
    stuck: Collection[str] = ()
    """Domains whose queues do not answer, while others do."""
    ready: int = 0
    again: int = 0

    @property
    def unreachable(self) -> str | None:
        """What the transport said, if the broker could not be reached: it has confirmed no message of any queue."""
        if any(piece.reason is None for piece in self.pieces):
            return None
        stuck = {one.load.number for one in self.loads if one.domain in self.stuck}
        unanswered = (piece for piece in self.pieces if piece.reason == RefusalReason.UNREACHABLE)
        return next((piece.error or "" for piece in unanswered if piece.load.number not in stuck), None)

    @property
    def throttled(self) -> float:
        """Seconds to leave the broker alone, if it was too busy for the whole round. The loads of this round wait as
        long as the broker asked for; other loads, for which it may have time, wait no longer than this."""
        if any(piece.reason is None for piece in self.pieces):
            return 0.0
        asked = [piece.after or SHORT_REST for piece in self.pieces if piece.reason == RefusalReason.THROTTLED]
        return min(LONGEST_REST, *asked) if asked else 0.0


async def publish_page(publisher: Publisher, perform: Perform, relay: UUID, page: int) -> Round:
    """Publish one page of what is due. If this ends half way, another round repeats it after a minute."""
    loads = await perform(outbox.take(publisher.transport.name, relay, page, publisher.left_alone))
    if not loads:
        return Round()
    pieces = await publisher.publish(loads)
    batches = {load.batch_id for load in loads if load.batch_id is not None}
    ready, again = await _mark(perform, relay, pieces)
    if batches:
        await perform(creation_state.close(sorted(batches)))
    return Round(loads, pieces, _stuck(publisher, loads), ready, again)


def _stuck(publisher: Publisher, loads: Sequence[Unpublished]) -> set[str]:
    return {domain for domain in {load.domain for load in loads} if publisher.is_stuck(domain)}


async def _mark(perform: Perform, relay: UUID, pieces: Sequence[Piece]) -> tuple[int, int]:
    """Mark the loads until the database has answered. To mark them twice moves nothing."""
    for pause in MARK_AGAIN:
        try:
            return await perform(outbox.mark(relay, pieces))  # type: ignore[no-any-return]
        except psycopg.OperationalError as error:
            log.debug("Could not mark what was published, saying it again: %r", error)
            await asyncio.sleep(pause)
    return await perform(outbox.mark(relay, pieces))  # type: ignore[no-any-return]

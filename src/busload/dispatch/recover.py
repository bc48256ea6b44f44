"""A round of publishing: take what is due, publish it, mark it. And the repair of what crashes have left.

Relays of workers do rounds for ever, `bus.recover()` once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from busload.commands.counted import counted
from busload.dispatch import creation_state, outbox
from busload.dispatch.outbox import Piece, Unpublished
from busload.dispatch.publish import Publisher
from busload.dispatch.strategy import Recovered
from busload.errors import RefusalReason
from busload.postgres import waiting
from busload.postgres.plan import Plan

log = logging.getLogger("busload")

Perform = Callable[[Plan[Any]], Coroutine[Any, Any, Any]]
"""Performs a plan in a transaction of its own."""

SHORT_REST, LONGEST_REST = 0.25, 10.0
"""Seconds between two rounds if the broker was too busy for the first: unless it names a time, and at most."""

MARK_AGAIN = (0.1, 0.5, 2.0)
"""Seconds between two tries to mark loads, if the database did not answer."""


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
        unclaimed = (piece for piece in self.pieces if piece.reason == RefusalReason.UNREACHABLE)
        return next((piece.error or "" for piece in unclaimed if piece.load.number not in stuck), None)

    @property
    def throttled(self) -> float:
        """Seconds to leave the broker alone, if it was too busy for the whole round. The loads of this round wait as
        long as the broker asked for; other loads, for which it may have time, wait no longer than this."""
        if any(piece.reason is None for piece in self.pieces):
            return 0.0
        asked = [piece.after or SHORT_REST for piece in self.pieces if piece.reason == RefusalReason.THROTTLED]
        return min(LONGEST_REST, *asked) if asked else 0.0


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
            marked: tuple[int, int] = await perform(outbox.mark(relay, pieces))
        except psycopg.OperationalError as error:
            log.debug("Could not mark what was published, saying it again: %r", error)
            await waiting.sleep(pause)
        else:
            return marked
    return await perform(outbox.mark(relay, pieces))  # type: ignore[no-any-return]

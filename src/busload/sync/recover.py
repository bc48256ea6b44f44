"""Made from busload.dispatch.recover by scripts/generate_sync.py. Change the source instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from busload.commands.counted import counted
from busload.dispatch import creation_state, outbox
from busload.dispatch.outbox import Piece, Unpublished
from busload.dispatch.publish_in_threads import ThreadPublisher
from busload.dispatch.recover import MARK_AGAIN, Round, log
from busload.dispatch.strategy import Recovered
from busload.postgres import waiting_in_threads as waiting
from busload.postgres.plan import Plan

Perform = Callable[[Plan[Any]], Any]
"""Performs a plan in a transaction of its own."""


def recover(publisher: ThreadPublisher, perform: Perform, *, publish_again_after: timedelta) -> Recovered:
    """Publish what is due, publish again what nobody has claimed, and close complete creations.

    Any number may do so at once, also beside relays. What the broker does not confirm waits for a relay.
    """
    relay, relayed, published_again, reachable = uuid4(), 0, 0, True
    while reachable:
        done = publish_page(publisher, perform, relay, publisher.page)
        relayed += done.ready
        reachable = done.unreachable is None and not done.throttled
        if not done.loads:
            break
    while reachable:
        unclaimed = perform(outbox.unclaimed(publisher.transport.name, publish_again_after, publisher.page))
        if not unclaimed:
            break
        pieces = publisher.publish(unclaimed, again=True)
        round = Round(unclaimed, pieces, _stuck(publisher, unclaimed))
        published_again += sum(piece.load.size for piece in round.pieces if piece.reason is None)
        reachable = round.unreachable is None and not round.throttled
    closed = perform(creation_state.close())
    if relayed or published_again:
        commands = counted(relayed, "command")
        log.info("Recovered: published %s, and again %d that nobody had claimed", commands, published_again)
    return Recovered(relayed, published_again, closed)


def publish_page(publisher: ThreadPublisher, perform: Perform, relay: UUID, page: int) -> Round:
    """Publish one page of what is due. If this ends half way, another round repeats it after a minute."""
    loads = perform(outbox.take(publisher.transport.name, relay, page, publisher.left_alone))
    if not loads:
        return Round()
    pieces = publisher.publish(loads)
    batches = {load.batch_id for load in loads if load.batch_id is not None}
    ready, again = _mark(perform, relay, pieces)
    if batches:
        perform(creation_state.close(sorted(batches)))
    return Round(loads, pieces, _stuck(publisher, loads), ready, again)


def _stuck(publisher: ThreadPublisher, loads: Sequence[Unpublished]) -> set[str]:
    return {domain for domain in {load.domain for load in loads} if publisher.is_stuck(domain)}


def _mark(perform: Perform, relay: UUID, pieces: Sequence[Piece]) -> tuple[int, int]:
    """Mark the loads until the database has answered. To mark them twice moves nothing."""
    for pause in MARK_AGAIN:
        try:
            marked: tuple[int, int] = perform(outbox.mark(relay, pieces))
        except psycopg.OperationalError as error:
            log.debug("Could not mark what was published, saying it again: %r", error)
            waiting.sleep(pause)
        else:
            return marked
    return perform(outbox.mark(relay, pieces))  # type: ignore[no-any-return]

"""A round of announcing: take what is due, publish, mark. And the sweep that puts right what crashes have left.

Relays of workers do rounds for ever, `bus.recover()` once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from busload.announcer import Announcer
from busload.domain.counted import counted
from busload.domain.dispatch import Recovered
from busload.errors import RefusalReason
from busload.store import dispatch, outbox
from busload.store.outbox import Piece, Unannounced
from busload.store.plan import Plan

log = logging.getLogger("busload")

Perform = Callable[[Plan[Any]], Coroutine[Any, Any, Any]]
"""Performs a plan in a transaction of its own."""

SHORT_REST, LONGEST_REST = 0.25, 10.0
"""Seconds between two rounds if the broker was too busy for all of the first: if it names no time, and at most."""

MARK_AGAIN = (0.1, 0.5, 2.0)
"""Seconds before what became of messages is said again, if the database did not answer."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took and what became of it: commands that are ready now, and those that wait for another one."""

    loads: Sequence[Unannounced] = ()
    pieces: Sequence[Piece] = ()
    stuck: Collection[str] = ()
    """Domains whose queues do not answer, while others do."""
    ready: int = 0
    again: int = 0

    @property
    def unreachable(self) -> str | None:
        """What the transport said, if the broker could not be reached: nothing was confirmed, of no queue."""
        if any(piece.reason is None for piece in self.pieces):
            return None
        stuck = {load.hi >> 10 for load in self.loads if load.domain in self.stuck}
        silent = (piece for piece in self.pieces if piece.reason == RefusalReason.UNREACHABLE)
        return next((piece.error or "" for piece in silent if piece.hi >> 10 not in stuck), None)

    @property
    def throttled(self) -> float:
        """Seconds to leave the broker alone, if it was too busy for all of it. Its loads wait as long as it asked for
        anyway; others, for which it may have time, wait no longer than this."""
        if any(piece.reason is None for piece in self.pieces):
            return 0.0
        asked = [piece.after or SHORT_REST for piece in self.pieces if piece.reason == RefusalReason.THROTTLED]
        return min(LONGEST_REST, *asked) if asked else 0.0


async def recover(announcer: Announcer, perform: Perform, *, ring_again_after: timedelta) -> Recovered:
    """Announce what is due, ring again for what nobody came for, close creations that are complete.

    Any number may do so at once, also beside relays. What the broker does not confirm waits for a relay.
    """
    relay, relayed, rung_again, reachable = uuid4(), 0, 0, True
    while reachable:
        done = await announce_page(announcer, perform, relay, announcer.page)
        relayed += done.ready
        reachable = done.unreachable is None and not done.throttled
        if not done.loads:
            break
    while reachable:
        silent = await perform(outbox.silent(announcer.transport.name, ring_again_after, announcer.page))
        if not silent:
            break
        pieces = await announcer.announce(silent, again=True)
        rung = Round(silent, pieces, _stuck(announcer, silent))
        rung_again += sum(piece.hi - piece.lo + 1 for piece in rung.pieces if piece.reason is None)
        reachable = rung.unreachable is None and not rung.throttled
    closed = await perform(dispatch.close())
    if relayed or rung_again:
        commands = counted(relayed, "command")
        log.info("Recovered: announced %s, rang again for %d that nobody had come for", commands, rung_again)
    return Recovered(relayed, rung_again, closed)


async def announce_page(announcer: Announcer, perform: Perform, relay: UUID, page: int) -> Round:
    """If it ends half way, its loads are held for a minute; then another round announces them again."""
    loads = await perform(outbox.take(announcer.transport.name, relay, page, announcer.left_alone))
    if not loads:
        return Round()
    pieces = await announcer.announce(loads)
    batches = {load.batch_id for load in loads if load.batch_id is not None}
    ready, again = await _mark(perform, relay, pieces)
    if batches:
        await perform(dispatch.close(sorted(batches)))
    return Round(loads, pieces, _stuck(announcer, loads), ready, again)


def _stuck(announcer: Announcer, loads: Sequence[Unannounced]) -> set[str]:
    return {domain for domain in {load.domain for load in loads} if announcer.is_stuck(domain)}


async def _mark(perform: Perform, relay: UUID, pieces: Sequence[Piece]) -> tuple[int, int]:
    """Say it until the database has heard it; a second time moves nothing."""
    for pause in MARK_AGAIN:
        try:
            marked: tuple[int, int] = await perform(outbox.mark(relay, pieces))
        except psycopg.OperationalError as error:
            log.debug("Could not mark what was announced, saying it again: %r", error)
            await asyncio.sleep(pause)
        else:
            return marked
    return await perform(outbox.mark(relay, pieces))  # type: ignore[no-any-return]

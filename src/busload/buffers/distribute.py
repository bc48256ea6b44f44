"""Makes groups of buffered events. Every worker does this for the buffers it serves; no leader is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from datetime import timedelta
from typing import TypeVar

import psycopg

from busload.buffers import claim, event_table, status
from busload.buffers.declaration import BufferSettings
from busload.buffers.event_table import Relation
from busload.errors import InvalidOperationError
from busload.limits.pause import Pauses
from busload.postgres.connection import is_away
from busload.postgres.plan import Plan, perform_async
from busload.postgres.pool import AsyncPool

log = logging.getLogger("busload")

T = TypeVar("T")

LOCK_TIMEOUT = "1s"
"""How long a round waits for a table that others have locked, and for other workers to have their turn."""

SHORTEST_PAUSE = 0.01
REMEMBER = 60.0
"""Seconds after which a buffer is declared again, so that people see that it is served."""


class Tallies:
    """Counts the calls and events of buffers, until they are written to the database.

    Counted in memory: a row that every group had to update would make them wait for each other.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, buffer: str, *, calls: int = 0, done: int = 0, vanished: int = 0) -> None:
        counts = self._counts[buffer]
        counts[0] += calls
        counts[1] += done
        counts[2] += vanished

    def take(self, *buffers: str) -> list[tuple[str, int, int, int]]:
        """Take out the counts of some buffers, or of all, to write them."""
        found = [name for name in self._counts if not buffers or name in buffers]
        return [(name, *self._counts.pop(name)) for name in sorted(found)]  # type: ignore[misc]

    def put_back(self, tallies: list[tuple[str, int, int, int]]) -> None:
        for name, calls, done, vanished in tallies:
            self.add(name, calls=calls, done=done, vanished=vanished)


class Distributor:
    """Makes groups of what is due in one buffer.

    A table may become unfit while the worker runs, perhaps by a DROP COLUMN. That is logged once, and the table is
    looked at again after a while; its events wait meanwhile.
    """

    def __init__(
        self,
        pool: AsyncPool,
        settings: BufferSettings,
        pauses: Pauses,
        tallies: Tallies,
        every: timedelta,
        recheck_after: timedelta,
    ) -> None:
        self._pool, self._settings, self._pauses, self._tallies = pool, settings, pauses, tallies
        self._every, self._recheck_after = every.total_seconds(), recheck_after.total_seconds()
        self._at: Relation | None = None
        self._problem: str | None = ""
        """What is wrong with the table, as it was noted; None if nothing is, and empty before the first round."""
        self._locked = False
        self._look_at = self._declared_at = 0.0
        self._cursor: str | None = None
        self.groups = 0

    @property
    def name(self) -> str:
        return self._settings.name

    async def start(self) -> None:
        """Refuse a table that cannot be a buffer, before anything is claimed. A locked table is checked later."""
        try:
            at = await self._perform(event_table.check(self._settings))
            await self._perform(status.refuse_rivals(self._settings, at))
            await self._declare(at)
        except psycopg.errors.LockNotAvailable as error:
            self._found_locked(error)
        else:
            self._at = at

    async def once(self) -> float:
        """Make groups of what is due; return the seconds until the next round."""
        began = time.monotonic()
        round = await self._round()
        if round is None:
            return self._every
        if round.short_of_room:
            return self._every / 4
        if round.cursor is not None:  # a round sees a page of partitions: spend a fifth of the time on the next pages
            return min(self._every, max(SHORTEST_PAUSE, 4 * (time.monotonic() - began)))
        if round.next_due is None:
            return self._every
        return min(self._every, max(SHORTEST_PAUSE, round.next_due))

    async def distribute(self) -> int:
        """Make groups of all that is due, as far as there is room; return how many."""
        groups = 0
        self._cursor = None
        while True:
            round = await self._round(around=False)
            if round is None and self._locked:
                await asyncio.sleep(SHORTEST_PAUSE)
                continue
            groups += 0 if round is None else round.groups
            if round is None or round.cursor is None or round.short_of_room:
                return groups

    async def write_tallies(self) -> None:
        await write_tallies(self._pool, self._tallies, self.name)

    async def _round(self, *, around: bool = True) -> claim.Round | None:
        """Do one round; None if the buffer is paused, or its table is unfit or locked."""
        locked, self._locked = self._locked, False
        await self.write_tallies()
        if self.name in self._pauses.paused or time.monotonic() < self._look_at:
            return None
        try:
            at = self._at
            if at is None:
                at = await self._perform(event_table.check(self._settings))
            await self._declare(at)
            round = claim.Round(self._settings, at, self._cursor, around=around)
            for plan in round.plans():
                await self._perform(plan)
        except psycopg.errors.LockNotAvailable as error:
            self._found_locked(error, again=locked)
            return None
        except (psycopg.Error, InvalidOperationError) as error:
            if isinstance(error, psycopg.Error) and is_away(error):
                raise  # the database is away, not the table unfit
            await self._found_unfit(error)
            return None
        if self._problem:
            log.info("The table of buffer %s is fit again: its events leave", self._settings.name)
        if self._problem is not None:
            await self._perform(status.note_problem(self.name, None))
        self._at, self._problem, self._cursor = at, None, round.cursor
        self.groups += round.groups
        return round

    async def _declare(self, at: Relation) -> None:
        now = time.monotonic()
        if now - self._declared_at > REMEMBER or not self._declared_at:
            await self._perform(status.declare(self._settings, at))
            self._declared_at = now

    def _found_locked(self, error: Exception, again: bool = False) -> None:
        self._locked = True
        level = logging.DEBUG if again else logging.INFO
        log.log(level, "Buffer %s waits for others who have locked it: %s", self.name, error)

    async def _found_unfit(self, error: Exception) -> None:
        self._at, self._look_at = None, time.monotonic() + self._recheck_after
        if isinstance(error, psycopg.Error):
            try:
                await self._perform(event_table.find(self._settings))
            except InvalidOperationError as clear:
                error = clear
        said, self._problem = self._problem, str(error)
        if said != self._problem:
            log.error(
                "Buffer %s makes no groups, its events wait; looking again every %.0f s: %s",
                self._settings.name,
                self._recheck_after,
                error,
            )
        await self._perform(status.note_problem(self.name, self._problem))

    async def _perform(self, plan: Plan[T]) -> T:
        """Perform a plan, in a transaction only if it needs one: an open transaction that waits holds up others."""
        async with self._pool.connection() as conn:
            if not claim.takes_turns(self._settings):
                return await perform_async(conn, plan)
            async with conn.transaction():
                return await perform_async(conn, plan)


async def write_tallies(pool: AsyncPool, tallies: Tallies, *buffers: str) -> None:
    """Add the counts to those in the database. Counts that could not be written are kept."""
    taken = tallies.take(*buffers)
    if not taken:
        return
    try:
        async with pool.connection() as conn:
            await perform_async(conn, status.count(taken))
    except BaseException:
        tallies.put_back(taken)
        raise


async def warn_of_unserved(pool: AsyncPool, declared: list[BufferSettings], served: set[str]) -> None:
    """Log which buffers hold events that this worker has no handler for."""
    own = {settings.name: settings for settings in declared}
    async with pool.connection() as conn:
        names = await perform_async(conn, status.names())
        for name in sorted({*names, *own} - served):
            try:
                async with conn.transaction():
                    waits = await perform_async(conn, status.waits(name, own.get(name)))
            except (InvalidOperationError, psycopg.Error):
                continue  # the workers that serve it log what is wrong
            if waits:
                level = logging.WARNING if name in own else logging.INFO
                log.log(level, "Events wait in buffer %s, which has no handler here", name)

"""How a worker is woken alone, and what it does about commands that it cannot take then."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence

from psycopg import sql

from busload.commands import wake
from busload.postgres.connection import AsyncConnection
from busload.postgres.listen import AsyncListener, Hear
from busload.postgres.outage import Outage
from busload.postgres.own_connection import RESPONSE_TIMEOUT
from busload.postgres.plan import Plan, perform_async
from busload.worker.shared import Shared

ECHO = 1.0
"""Seconds in which a worker hears what it has told all workers, itself among them."""

SHORTEST_GAP = 0.01
"""Seconds between two times that a worker tells the others of work that it cannot take."""


class WakeUps:
    """The domains of which this worker alone was told that commands are ready.

    If it does not take all that is ready there, it tells the other workers. So a single command wakes one worker, and
    a burst wakes all that it can feed.
    """

    def __init__(self, perform: Callable[[Plan[None]], Awaitable[None]]) -> None:
        self._perform = perform
        self._domains: dict[str, int] = {}
        """Each with the number of the last wake-up for it."""
        self.count = 0
        """How many wake-ups have come."""
        self._told: dict[str, float] = {}
        """The domains of which this worker has told all, and when."""
        self._next_at = 0.0

    def came(self, domain: str) -> None:
        """This worker alone was told that commands of a domain are ready."""
        self.count += 1
        self._domains[domain] = self.count

    def taken(self, domains: Collection[str], count: int) -> None:
        """Nothing is left in these domains of what so many wake-ups were for: later ones are about something else."""
        for domain in domains:
            if self._domains.get(domain, count + 1) <= count:
                del self._domains[domain]

    def is_own(self, domain: str) -> bool:
        """Whether this worker itself has told all workers of a domain: said once for each time."""
        return time.monotonic() - self._told.pop(domain, -ECHO) < ECHO

    async def hand_on(self, count: int) -> float | None:
        """Tell the others what is left of what so many wake-ups were for: this worker cannot take it.

        Return the seconds until it may, if that is too soon.
        """
        if not any(number <= count for number in self._domains.values()):
            return None
        now = time.monotonic()
        if now < self._next_at:
            return self._next_at - now
        await self.hand_on_at_once()
        return None

    async def hand_on_at_once(self) -> None:
        """Tell the others, however short ago they were told."""
        self._next_at = time.monotonic() + SHORTEST_GAP
        domains, self._domains = self._domains, {}
        self._told |= dict.fromkeys(domains, time.monotonic())
        await self._perform(wake.tell_all(sorted(domains)))


class WakeListener(AsyncListener):
    """Listens for a worker, and lets those who send find its session, if the session is its own.

    Behind a pooler it is not: nobody would hear what comes there. Then the worker hears what all are told, if that.
    """

    def __init__(
        self, shared: Shared, channels: Sequence[str], hear: Hear, outage: Outage, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(shared.bus.dsn, channels, hear, outage, check_every=RESPONSE_TIMEOUT)
        self._shared, self._on_lost = shared, on_lost
        self._leaving = False
        self.is_found = False
        """Whether those who send find the session, as far as the worker knows."""

    async def begin(self, conn: AsyncConnection) -> None:
        await super().begin(conn)
        if not self._leaving and not getattr(conn, "pooled", False):
            session = conn.info.backend_pid
            await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(wake.channel_of(session))))
            await perform_async(conn, wake.begin(self._shared.number, session))
            self.is_found = True

    async def check(self, conn: AsyncConnection) -> None:
        """The worker may have another number by now, and others may have to be taken out."""
        if self.is_found and not self._leaving:
            await perform_async(conn, wake.listens(self._shared.number, conn.info.backend_pid))
        else:
            await super().check(conn)

    def end(self) -> None:
        if self.is_found:
            self.is_found = False
            self._on_lost()

    async def leave(self) -> None:
        """Be found no longer, and tell the others what is ready: somebody may just have woken this worker for it."""
        self._leaving = True
        if self.is_found:
            await self._shared.perform(wake.listens(self._shared.number, None))
            await self._shared.perform(wake.tell_all(self._shared.domains))

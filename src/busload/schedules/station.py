"""The station of a worker that fires schedules. It looks when the next one is due, and when it is told of a change."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from busload.commands.send import Via
from busload.commands.send_middleware import SendMiddleware
from busload.commands.wording import counted
from busload.postgres.backoff import Backoff
from busload.postgres.plan import Plan
from busload.schedules.declare import changes, declare
from busload.schedules.fire import ANY_INPUT, Fired, fire, seconds_to_next
from busload.schedules.schedule import Schedule
from busload.settings import InputLimits

log = logging.getLogger("busload")

LONGEST_PAUSE, SHORTEST_PAUSE = 60.0, 0.001
"""Seconds between two looks. A notification may be lost, so nobody waits longer, also if nothing is due for a year."""
LONGEST_WAIT = 1.0
"""Seconds between two looks while another worker holds what is due."""


Perform = Callable[[Plan[Any]], Awaitable[Any]]


class ScheduleStation:
    """Keeps the schedules of its bus in the database, and fires those that are due, whoever has declared them."""

    def __init__(
        self,
        perform: Perform,
        in_transaction: Perform,
        schedules: Sequence[Schedule],
        via: Via,
        around_sends: Sequence[SendMiddleware] = (),
        limits: InputLimits = ANY_INPUT,
    ) -> None:
        self._perform, self._in_transaction, self._schedules, self._via = perform, in_transaction, schedules, via
        self._around_sends, self._limits = around_sends, limits
        self._others = Backoff(first=0.02, longest=LONGEST_WAIT)
        self._unreadable: set[str] = set()
        """Declarations that this worker cannot read, and leaves to others."""
        self._left, self._declared_at = 0, 0.0
        """How many schedules a newer release declares otherwise, and when this worker has looked."""
        self._refused: dict[str, str] = {}
        """What middleware has raised about schedules that are still due."""

    async def start(self) -> None:
        """Keep what the bus declares. Of the releases whose workers are alive, the one that was seen last wins."""
        if not self._schedules:
            return
        if changed := await self._in_transaction(declare(self._schedules)):
            log.info("Declared %s: %s", counted(len(changed), "schedule"), ", ".join(sorted(changed)[:10]))
        left = await self._perform(changes(self._schedules))
        if left and not self._left:
            log.warning(
                "%s: %s. A newer release, or another application, declares this otherwise, and has the name as long as "
                "a worker of it runs. Give schedules of two applications different names; `busload schedule sync` "
                "gives the name to this one",
                counted(
                    len(left), "schedule is not as it is declared here", "schedules are not as they are declared here"
                ),
                ", ".join(sorted(left)[:10]),
            )
        self._left, self._declared_at = len(left), time.monotonic()

    async def once(self) -> float:
        """Fire what is due, and return the seconds until the next look."""
        if self._left and time.monotonic() - self._declared_at >= LONGEST_PAUSE:
            await self.start()  # the newer release may be gone
        pause: float | None = await self._perform(seconds_to_next(self._unreadable))
        if pause is not None and pause <= 0:
            fired = await self.fire()
            pause = await self._perform(seconds_to_next(self._unreadable))
            if not fired and pause is not None and pause <= 0:
                return self._others.pause()  # another worker is about to fire it
        self._others.reset()
        return LONGEST_PAUSE if pause is None else min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)

    async def fire(self) -> int:
        """Fire what is due, and return how many commands were sent and due times skipped."""
        plan = fire(self._via, self._unreadable, self._around_sends, self._limits)
        fired: Fired = await self._in_transaction(plan)
        for name, raised in fired.refused.items():
            if self._refused.get(name) != raised:
                log.error("The schedule %s stays due: a middleware around sends has raised %s", name, raised)
        self._refused = fired.refused
        for declaration, problem in fired.unreadable.items():
            self._unreadable.add(declaration)
            log.error("This worker cannot read a schedule, and leaves it to others: %s", problem)
        if fired.skipped:
            log.warning("Skipped %s that nobody was there to fire", counted(fired.skipped, "due time"))
        if fired.commands:
            log.debug("Fired %s", counted(fired.commands, "due time"))
        return fired.commands + fired.skipped

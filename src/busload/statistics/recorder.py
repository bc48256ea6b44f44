"""The station of a worker that writes down what the worker has settled, and looks at all places once a minute."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import psycopg

from busload.postgres.plan import Plan
from busload.statistics.attempts import Attempts
from busload.statistics.statistics import Counts, look, record

log = logging.getLogger("busload")

EVERY = 5.0
"""Seconds between two writes: what a worker takes with it if it is killed."""


class Recorder:
    """Adds the attempts to the statistics every few seconds, and at the end of each minute of the database.

    `in_transaction` performs a plan in a transaction of the worker's own.
    """

    def __init__(self, in_transaction: Callable[[Plan[Any]], Awaitable[Any]], attempts: Attempts) -> None:
        self._perform, self._attempts = in_transaction, attempts
        self._recorded: dict[str, Counts] = {}
        self._since = time.monotonic()
        """When the last write was, on the worker's own clock."""
        self._next_minute = 0.0

    async def once(self) -> float:
        """Write what is new, and return the seconds until the next write."""
        await self.record()
        now = time.monotonic()
        if now >= self._next_minute:
            seconds = await self._perform(look())
            self._next_minute = now + 60 - seconds
        return min(EVERY, max(self._next_minute - now, 0.01))

    async def record(self) -> None:
        """Write what was settled since the last write. If that fails, the next write has all of it."""
        counted, now = self._attempts.by_domain(), time.monotonic()
        fresh = {domain: _since(self._recorded.get(domain), counts) for domain, counts in counted.items()}
        fresh = {domain: counts for domain, counts in fresh.items() if counts.attempts}
        if fresh:
            await self._perform(record(fresh, ago=now - self._since))
            self._recorded = counted
        self._since = now

    async def close(self, within: float) -> None:
        """Write the rest, if that takes no more than so many seconds."""
        try:
            async with asyncio.timeout(within):
                await self.record()
        except (psycopg.Error, TimeoutError) as error:
            log.warning("The statistics lack what this worker has settled in the last seconds: %r", error)


def _since(earlier: Counts | None, now: Counts) -> Counts:
    if earlier is None:
        return now
    return Counts(*(getattr(now, each.name) - getattr(earlier, each.name) for each in fields(Counts)))

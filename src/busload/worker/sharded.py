"""A worker of a bus over several databases: one for each of them, in one process, which start and stop together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Self
from uuid import UUID

from busload.bus import CommandBus
from busload.errors import InvalidOperationError
from busload.health.health import Health, HealthCode, HealthState
from busload.settings import WorkerSettings
from busload.shards import merge
from busload.shards.databases import place
from busload.sync.bus import SyncCommandBus
from busload.worker.find_database import find_database
from busload.worker.stats import BrokerStats, WorkerStats
from busload.worker.worker import Worker

log = logging.getLogger("busload")

START_TOGETHER = 5.0
"""Seconds that a worker of one database, which runs, waits for those of the others before the start is over."""

OF_DATABASE = (HealthCode.NOT_RUNNING, HealthCode.DATABASE_UNREACHABLE)
"""What is wrong with a worker that waits for its database."""


class ShardedWorker(Worker):
    """Runs a worker for each database that has one of its domains.

    A database that is away keeps only its own worker waiting, for as long as it takes. A worker that ends with an error
    stops all others, since a supervisor can only start the whole process again.
    """

    def __init__(
        self,
        bus: CommandBus | SyncCommandBus,
        *,
        domains: Sequence[str] | None = None,
        concurrency: int | None = None,
        threads: int | None = None,
        settings: WorkerSettings | None = None,
        name: str | None = None,
        lifespan: Callable[[], Any] | None = None,
    ) -> None:
        about: dict[str, Any] = {"concurrency": concurrency, "threads": threads, "lifespan": lifespan}
        super().__init__(bus, domains=domains, settings=settings, name=name, **about)
        own = replace(self.settings, wait_for_database=None)
        self._workers: dict[str, Worker] = {}
        self._entering: list[asyncio.Task[Any]] = []
        for shard in self._bus.shards:
            served = [domain for domain in self.domains if self._bus.shard_of(domain) is shard]
            if served:
                worker = Worker(shard, domains=served, settings=own, name=self.name, lifespan=lifespan)
                worker.on_asked_to_stop = self._heed_request
                self._workers[place(shard)] = worker

    @property
    def workers(self) -> Sequence[Worker]:
        """The worker of each database."""
        return tuple(self._workers.values())

    @property
    def stats(self) -> WorkerStats:
        """The figures of all databases added up."""
        return added_up([worker.stats for worker in self.workers]) if self._workers else self._last_stats

    def health(self) -> Health:
        """The worst of all databases; each reason names its own.

        While the worker of one database is well, another one that does not reach its own is DEGRADED, not CRITICAL: a
        new process would not reach it either, and would leave the others alone meanwhile.
        """
        found = [(place, worker.health()) for place, worker in self._workers.items()]
        if any(health.state is not HealthState.CRITICAL for _, health in found):
            found = [(place, _eased(health)) for place, health in found]
        return merge.health(found)

    @property
    def left_behind(self) -> list[tuple[str, UUID]]:
        return [one for worker in self.workers for one in worker.left_behind]

    async def drain(self) -> int:
        """Work until nothing is ready or due in any database, then return how many attempts were settled.

        What a handler sends into another database is found by another round over all of them.
        """
        self._refuse_domains()
        for shard in self._bus.shards:
            if any(self._bus.shard_of(domain) is shard for domain in self.domains):
                await find_database(shard, self.settings.wait_for_database)
        total = 0
        while done := sum(await self._together(worker.drain() for worker in self.workers)):
            total += done
        return total

    async def __aenter__(self) -> Self:
        """Work beside the block; returns when every database that can be reached is served, and raises if one refuses.

        One that is away is served when it is back.
        """
        if self._entering:
            raise self._refusal()
        self._refuse_domains()
        self.asked_to_stop = False
        self._entering = [asyncio.create_task(worker.__aenter__()) for worker in self.workers]
        try:
            done, rest = await asyncio.wait(self._entering, return_when=asyncio.FIRST_COMPLETED)
            if rest:
                more, _ = await asyncio.wait(rest, timeout=START_TOGETHER)
                done |= more
            for task in done:
                task.result()
        except BaseException:
            with suppress(Exception):
                await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all, with all the grace time; raises what one of them ended with."""
        entering, self._entering = self._entering, []
        self.stop()
        await asyncio.gather(*entering, return_exceptions=True)  # also those that waited for their database
        await self._together(worker.__aexit__() for worker in self.workers)

    def stop(self, *, hurry: bool = False) -> None:
        """Stop all of them; with `hurry`, without waiting for what runs."""
        for worker in self.workers:
            worker.stop(hurry=hurry)

    def abandon(self) -> None:
        for worker in self.workers:
            worker.abandon()

    async def _run_until_stopped(self, started: asyncio.Future[None] | None = None) -> None:
        self._refuse_domains()
        self.asked_to_stop = False
        await self._together(worker.run() for worker in self.workers)

    async def _together(self, calls: Any) -> list[Any]:
        """Await all; the first that fails stops the others, and is raised when they have stopped."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        for task in tasks:
            task.add_done_callback(self._stop_after_failure)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _stop_after_failure(self, task: asyncio.Future[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error(
                "The worker of one database has ended with an error, so those of the others stop: %s", task.exception()
            )
            self.stop()

    def _refuse_domains(self) -> None:
        super()._refuse_domains()
        if not self._workers:
            raise InvalidOperationError("The worker has no domains: register a handler on its bus, or name domains.")


def _eased(health: Health) -> Health:
    return Health.of(
        replace(one, state=HealthState.DEGRADED) if one.code in OF_DATABASE else one for one in health.reasons
    )


def added_up(found: Sequence[WorkerStats]) -> WorkerStats:
    """The figures of several workers as those of one."""
    brokers = [one.broker for one in found if one.broker is not None]
    settlement, *others = (one.settlement for one in found)
    for one in others:
        settlement = settlement.plus(one)
    handlers = tuple(chain(*(one.handlers for one in found)))
    blank = [replace(one, settlement=settlement, handlers=handlers, broker=None) for one in found]
    whole = merge.added(blank, first=["settlement", "handlers"])
    return replace(whole, broker=_brokers(brokers)) if brokers else whole


def _brokers(found: Sequence[BrokerStats]) -> BrokerStats:
    refused: dict[str, int] = {}
    for reason, count in chain(*(one.refused.items() for one in found)):
        refused[reason] = refused.get(reason, 0) + count
    whole = merge.added(found, first=["transport", "refused", "outbox", "connected"])
    outbox = tuple(chain(*(one.outbox for one in found)))
    return replace(whole, refused=refused, outbox=outbox, connected=all(one.connected for one in found))

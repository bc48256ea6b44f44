"""A worker, as an application sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Self, cast
from uuid import UUID

from busload.bus import CommandBus
from busload.commands.checks import refuse, wrong_name
from busload.commands.execution import Leased
from busload.errors import InvalidOperationError, kind_of
from busload.handlers.hooks import generator_of
from busload.health.health import Health
from busload.settings import WorkerSettings
from busload.shards import ShardedBus, SyncShardedBus
from busload.sync.bus import SyncCommandBus
from busload.worker.condition import not_running
from busload.worker.find_database import StoppedEarlyError
from busload.worker.lifecycle import Run
from busload.worker.metrics import metrics_text
from busload.worker.os_signals import Signals
from busload.worker.settlement import capacity
from busload.worker.stats import CoalescerStats, WorkerStats

log = logging.getLogger("busload")


class Worker:
    """Runs the commands of some domains: all that have handlers on the bus, unless `domains` says which.

    `concurrency` commands run at a time; at most `threads` of them have a handler written with `def`. `lifespan` is
    used in the place of that of the bus: see `bus.lifespan`.

    `async with Worker(bus):` works beside your own code, `await run()` works until `stop()`, and `await drain()` works
    until nothing is ready or due: for tests and scripts. To stop means: claim no more, let what runs finish within the
    grace time, settle every result, and hand the rest back without burning an attempt. Signals are left to your
    program, unless it asks for them by `run(signals=True)`.

    On a bus over several databases it is a worker for each of them, which start and stop together: `concurrency` and
    `threads` are for each.
    """

    def __new__(cls, bus: object, **_: Any) -> Self:
        """A worker for each database, all in one, if the bus is over several."""
        if cls is Worker and isinstance(bus, ShardedBus | SyncShardedBus):
            from busload.worker.sharded import ShardedWorker

            return cast(Self, super().__new__(ShardedWorker))
        return super().__new__(cls)

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
        if not isinstance(bus, CommandBus | SyncCommandBus):
            raise ValueError(f"A Worker needs a CommandBus or SyncCommandBus, found {kind_of(bus)}.")
        if not isinstance(settings, WorkerSettings | None):
            raise ValueError(f"settings must be a WorkerSettings, found {kind_of(settings)}.")
        given = settings or WorkerSettings()
        self.settings = replace(
            given,
            concurrency=given.concurrency if concurrency is None else concurrency,
            threads=given.threads if threads is None else threads,
        )
        self.concurrency, self.threads = self.settings.concurrency, self.settings.most_threads
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._bus = bus if isinstance(bus, CommandBus) else async_face(bus)
        if isinstance(domains, str):
            raise ValueError(f"domains must be a list of names, found the text {domains!r}.")
        self._domains = list(domains) if domains is not None else None
        if lifespan is not None:
            generator_of(lifespan, "lifespan", 0)
        self._lifespan = lifespan
        self._run: Run | None = None
        self._beside: asyncio.Task[None] | None = None
        self._asked = 0
        """How urgently it was asked to stop: 1 with all its grace time, 2 without."""
        self._has_run = False
        self.asked_to_stop = False
        """Whether an operator has asked it to stop during its last run: `bus.workers.stop`."""
        self.on_asked_to_stop: Callable[[], None] = self.stop
        """What it does then: it stops. It is called once in a run, from another thread."""
        self._left_behind: list[Leased] = []
        self._last_stats = WorkerStats(self.concurrency, CoalescerStats(capacity(self.settings)))

    @property
    def domains(self) -> list[str]:
        return self._domains if self._domains is not None else self._bus.handlers.domains

    @property
    def stats(self) -> WorkerStats:
        """The figures of this moment; once it has stopped, those of its last run."""
        return self._run.stats() if self._run is not None and self._run.started else self._last_stats

    def metrics(self) -> str:
        """The figures of `stats`, in the text format of Prometheus."""
        settings = self.settings
        about = {
            "domains": ",".join(self.domains),
            "settle": settings.settle,
            "prefetch": f"{settings.prefetch.total_seconds():g}",
        }
        return metrics_text(self.stats, worker=self.name, about=about)

    def health(self) -> Health:
        """How this worker is, as far as it knows without asking anybody: its threads, its connections, its attempts.

        `bus.health()` tells about all workers and everything around them.
        """
        if self._run is None or not self._run.started:
            return Health.of([not_running(self.name, "has not started" if self._run else "does not run")])
        return self._run.self_check.health()

    @property
    def left_behind(self) -> list[tuple[str, UUID]]:
        """Type and id of the commands whose handlers did not end though the last run has: they were handed back.

        A thread cannot be stopped, and an `async` handler may swallow that it was cancelled.
        """
        return [(one.command_type, one.command_id) for one in self._left_behind]

    async def run(self, *, signals: bool = False) -> None:
        """Work until told to stop.

        With `signals`, SIGTERM and SIGINT do that too: for a process that is all the worker's own. A second signal does
        not wait for what runs, and a third one ends the process.
        """
        heard = Signals(lambda count: self.stop(hurry=count > 1)) if signals else nullcontext()
        with heard:  # also while it starts and stops
            await self._run_until_stopped()

    async def drain(self) -> int:
        """Work until nothing is ready or due, then return how many attempts were settled."""
        with suppress(StoppedEarlyError):
            async with self._running() as run:
                return await run.until_drained()
        return 0

    async def __aenter__(self) -> Self:
        """Work beside the block; returns when it has started, and raises if it cannot."""
        if self._beside is not None:
            raise self._refusal()
        started = asyncio.get_running_loop().create_future()
        beside = self._beside = asyncio.create_task(self._run_until_stopped(started), name="busload-worker")
        try:
            await asyncio.wait({beside, started}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            beside.cancel()
            await asyncio.wait({beside})
            self._beside = None
            raise
        if beside.done():
            self._beside = None
            beside.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, with all the grace time; raises what the worker ended with."""
        beside, self._beside = self._beside, None
        if beside is not None:
            self.stop()
            await beside

    def stop(self, *, hurry: bool = False) -> None:
        """Stop; with `hurry`, without waiting for what runs.

        Call this as often as you like, at any moment and from any thread. Before the first run it is remembered, and
        that run ends as soon as it has begun. After a run it does nothing.
        """
        if self._run is None and self._has_run:
            return
        self._asked = max(self._asked, 2 if hurry else 1)
        if self._run is not None:
            self._run.stop(hurry=self._asked > 1)

    def abandon(self) -> None:
        """Hand everything back from another thread, while the event loop is blocked and before the process ends."""
        if self._run is not None:
            self._run.abandon()

    def _heed_request(self) -> None:
        if not self.asked_to_stop:
            self.asked_to_stop = True
            log.info("An operator has asked worker %s to stop", self.name)
            self.on_asked_to_stop()

    async def _run_until_stopped(self, started: asyncio.Future[None] | None = None) -> None:
        with suppress(StoppedEarlyError):
            async with self._running() as run:
                if started is not None:
                    started.set_result(None)
                await run.until_stopped()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Run]:
        self._refuse_domains()
        if self._run is not None:
            raise self._refusal()
        run = self._run = Run(self._bus, self.settings, self.domains, self.name, self._heed_request, self._lifespan)
        self._left_behind, self.asked_to_stop = [], False
        if self._asked:
            run.stop(hurry=self._asked > 1)
        try:
            async with run:
                yield run
        finally:
            if run.started:
                self._last_stats = run.stats()
            self._left_behind = run.left_behind
            self._run, self._has_run, self._asked = None, True, 0

    def _refuse_domains(self) -> None:
        limits = self._bus.settings.limits
        refuse([problem for domain in self.domains for problem in wrong_name(domain, "domains", limits)], writes=False)
        if not self.domains:
            raise InvalidOperationError("The worker has no domains: register a handler on its bus, or name domains.")

    def _refusal(self) -> InvalidOperationError:
        return InvalidOperationError(
            f"Worker {self.name} is running already. Wait until it has stopped, or make another Worker."
        )


def async_face(bus: SyncCommandBus) -> CommandBus:
    dsn = bus.routes.mapping if isinstance(bus, SyncShardedBus) else bus.database.given_dsn
    face = CommandBus(dsn, transport=bus.given_transport, dispatch=bus.dispatch, settings=bus.settings)
    if isinstance(bus, SyncShardedBus):
        for one, shard in zip(bus.shards, face.shards, strict=True):
            shard.handlers, shard.hooks = bus.handlers, bus.hooks
            shard.declared_buffers, shard.declared_schedules = one.declared_buffers, one.declared_schedules
    face.handlers, face.declared_buffers, face.hooks = bus.handlers, bus.declared_buffers, bus.hooks
    face.declared_schedules = bus.declared_schedules
    return face

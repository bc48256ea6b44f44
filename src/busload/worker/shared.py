"""What the stations of a running worker share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from busload.buffers.distribute import Tallies
from busload.bus import CommandBus
from busload.commands.execution import Leased
from busload.handlers.registry import Handler, Handlers
from busload.limits.limiter import Limiter
from busload.limits.pause import Pauses
from busload.postgres.outage import Outage
from busload.postgres.plan import Plan, perform_async
from busload.postgres.pool import AsyncPool
from busload.settings import WorkerSettings
from busload.sync.context import SyncChunkContext, SyncHandlerContext
from busload.worker.context import NO_STATE, ChunkContext, HandlerContext
from busload.worker.failure_log import FailureLog
from busload.worker.handler_threads import Threads
from busload.worker.held_leases import HeldLeases

if TYPE_CHECKING:
    from busload.worker.permits import Permits

T = TypeVar("T")

clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds on a clock that also goes on while the machine sleeps, where there is one."""


@dataclass(slots=True, eq=False)
class Shared:
    """One for each run of a worker."""

    bus: CommandBus
    settings: WorkerSettings
    domains: list[str]
    pool: AsyncPool
    """For the statements of the worker itself."""
    transactions: AsyncPool
    """For the transactions of `async` handlers."""
    threads: Threads
    pauses: Pauses
    limiter: Limiter
    state: Any = NO_STATE
    """What the lifespan of this worker has yielded."""
    held: HeldLeases = field(default_factory=HeldLeases)
    outage: Outage = field(default_factory=Outage)
    failures: FailureLog = field(default_factory=FailureLog)
    tallies: Tallies = field(default_factory=Tallies)
    postponed: int = 0
    """How many calls were put off by a limit: they say nothing about how fast commands are done."""
    number: int = 0
    """This worker's number in the database; the heartbeat takes a new one after the worker was declared dead."""
    renewed_at: float = -math.inf
    """When the last heartbeat was sent that the database has answered, by `clock`."""
    permits: Permits = field(init=False)
    handlers: Handlers = field(init=False)
    """The handlers of the bus; with OpenTelemetry, each begins its span."""
    lease_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.lease_seconds = self.settings.lease_for.total_seconds()
        self.handlers = self.bus.handlers

    async def perform(self, plan: Plan[T]) -> T:
        async with self.pool.connection() as conn:
            return await perform_async(conn, plan)

    async def in_transaction(self, plan: Plan[T]) -> T:
        async with self.pool.connection() as conn, conn.transaction():
            return await perform_async(conn, plan)

    def context(self, handler: Handler, leased: Leased) -> HandlerContext | SyncHandlerContext:
        """What a handler is given besides its command or group."""
        if handler.is_async:
            return HandlerContext(leased, self.bus, self.transactions, self.state)
        return SyncHandlerContext(leased, *self.threads.connections, self.state)

    def chunk_context(self, handler: Handler, leased: Sequence[Leased]) -> ChunkContext | SyncChunkContext:
        """What a bulk handler is given besides its chunk."""
        if handler.is_async:
            return ChunkContext(leased, self.bus, self.transactions, self.state)
        return SyncChunkContext(leased, *self.threads.connections, self.state)

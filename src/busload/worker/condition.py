"""How a running worker is: what its heartbeat tells the database, and what its probes answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from busload.health.health import Condition, Health, HealthCode, HealthReason, HealthState, judge_worker
from busload.postgres.pool import AsyncPool
from busload.sync.pool import Pool
from busload.worker.broker_stations import Broker
from busload.worker.heartbeat import Heartbeat
from busload.worker.settlement import Settlement
from busload.worker.shared import Shared


class SelfCheck:
    """Asked by the heartbeat's thread and by probes in the event loop; only reads."""

    def __init__(
        self,
        name: str,
        shared: Shared,
        settlement: Settlement,
        broker: Broker | None,
        stopping: asyncio.Event,
        rounds: Callable[[], Iterable[asyncio.Task[None]]],
    ) -> None:
        self._name, self._shared, self._settlement, self._broker = name, shared, settlement, broker
        self._stopping, self._rounds, self._settings = stopping, rounds, shared.bus.settings.health
        self.heartbeat: Heartbeat | None = None

    def condition(self) -> Condition:
        shared, settings, settlement = self._shared, self._settings, self._settlement
        look_back = settings.look_back.total_seconds()
        pools: list[AsyncPool | Pool] = [shared.transactions, shared.pool, shared.bus.pool, *shared.threads.pools]
        return Condition(
            failures_in_row=settlement.failures_in_row,
            failed_ago=time.monotonic() - settlement.failed_at if settlement.failures_in_row else 0.0,
            stuck_threads=shared.threads.stuck(settings.stuck_after.total_seconds()),
            exhaustions=sum(pool.exhaustions(look_back) for pool in pools),
            blocked_for=0.0 if self.heartbeat is None else self.heartbeat.blocked_for,
            broker_away=None if self._broker is None or self._broker.connected else shared.bus.via.transport,
            ended=tuple(task.get_name() for task in self._rounds() if task.done() and not self._stopping.is_set()),
            clock=time.time(),
        )

    def health(self) -> Health:
        """The health of this worker alone, as far as it knows without asking anybody."""
        reasons = list(judge_worker(self._name, self.condition(), self._settings))
        if self.heartbeat is None or not self.heartbeat.reaches or self._shared.outage.is_away:
            message = f"Worker {self._name} does not reach its database."
            reasons.append(_critical(HealthCode.DATABASE_UNREACHABLE, message, self._name))
        if self._stopping.is_set():
            reasons.append(not_running(self._name, "stops"))
        return Health.of(reasons)


def not_running(name: str, what: str) -> HealthReason:
    return _critical(HealthCode.NOT_RUNNING, f"Worker {name} {what}, and takes no commands.", name)


def _critical(code: HealthCode, message: str, worker: str) -> HealthReason:
    return HealthReason(code, HealthState.CRITICAL, message, worker=worker)

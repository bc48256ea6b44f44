"""What `/healthz` and `/readyz` of a web process answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from busload.health.health import Health, HealthCode, HealthReason, HealthState, exhausted
from busload.postgres.pool import AsyncPool
from busload.settings import HealthSettings
from busload.sync.pool import Pool
from busload.worker import Worker

PATIENCE = 2.0
"""Seconds that `/readyz` waits for the database. Probes themselves wait for a few seconds at most."""

_OWN = {HealthCode.DATABASE_UNREACHABLE, HealthCode.DATABASE_UNUSABLE, HealthCode.SCHEMA_OUTDATED}
"""Reasons for which this process cannot serve, as all others with the same database."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer to a probe: a status code of HTTP, and what is wrong.

    The body names neither hosts nor workers: these routes are often as public as the application.
    """

    status: int
    body: dict[str, Any]


def alive(pool: Pool | AsyncPool, settings: HealthSettings, worker: Worker | None) -> Probe:
    """503 if only a new process helps. It asks nobody, so an outage of the database restarts no process."""
    reasons = [] if worker is None else list(worker.health().reasons)
    if times := pool.exhaustions(settings.look_back.total_seconds()):
        reasons.append(exhausted(times, settings, "This process"))
    health = Health.of(reasons)
    return _probe(health, ok=not health.restart_helps)


def ready(health: Health, worker: Worker | None) -> Probe:
    """503 if this process cannot serve: it has no usable database, or no free connection, or its own worker is down.

    What is wrong elsewhere, such as a domain without a worker, is told and fails no probe: web processes that are taken
    out of service for it would make it worse.
    """
    if worker is not None:
        health = Health.of((*health.reasons, *worker.health().reasons))
    stops = any(_stops(reason, worker) for reason in health.reasons)
    return _probe(health, ok=not stops)


def _stops(reason: HealthReason, worker: Worker | None) -> bool:
    here = reason.worker is None or (worker is not None and reason.worker == worker.name)
    own = reason.code in _OWN or reason.code is HealthCode.POOL_EXHAUSTED or reason.worker is not None
    return reason.state is HealthState.CRITICAL and here and own


def _probe(health: Health, *, ok: bool) -> Probe:
    reasons = []
    for reason in health.reasons:
        told = {"code": reason.code.value, "state": reason.state.value}
        told |= {} if reason.domain is None else {"domain": reason.domain}
        told |= {} if reason.since is None else {"since": reason.since.isoformat()}
        if told not in reasons:  # a worker tells some of what the database has heard from it
            reasons.append(told)
    return Probe(200 if ok else 503, {"state": health.state.value, "reasons": reasons})

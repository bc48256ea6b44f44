"""Whether the bus, its workers and its broker are well, and if not, why."""

from busload.health.health import Health, HealthCode, HealthReason, HealthState
from busload.health.overview import Overview
from busload.health.workers import HeldCommand, KnownWorker
from busload.settings import HealthSettings

__all__ = [
    "Health",
    "HealthCode",
    "HealthReason",
    "HealthSettings",
    "HealthState",
    "HeldCommand",
    "KnownWorker",
    "Overview",
]

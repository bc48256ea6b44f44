"""How often and how many at a time receivers are called, and domains that are paused."""

from busload.limits.concurrency import ConcurrencyStatus
from busload.limits.pause import DomainOverview, Pause
from busload.limits.rate import LimitStatus

__all__ = [
    "ConcurrencyStatus",
    "DomainOverview",
    "LimitStatus",
    "Pause",
]

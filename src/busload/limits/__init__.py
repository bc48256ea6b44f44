"""How often receivers are called, and domains that are paused."""

from busload.limits.pause import Pause
from busload.limits.rate import LimitStatus

__all__ = [
    "LimitStatus",
    "Pause",
]

"""How a call waits for what somebody's open transaction holds: a task key, a command id, a batch."""

from __future__ import annotations

import random
import time
from datetime import timedelta

SHORTEST, LONGEST = 0.05, 1.0
"""Seconds between two tries; they double."""


class LockWait:
    """When to try again, and when to stop."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self._end = time.monotonic() + limit.total_seconds()
        self._pause = SHORTEST

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def pause(self) -> float:
        """Seconds until the next try. Those who began together do not try together."""
        pause = self._pause * random.uniform(0.75, 1.25)  # noqa: S311
        self._pause = min(2 * self._pause, LONGEST)
        return max(0.0, min(pause, self._end - time.monotonic()))


def waiting_parts(pool_size: int) -> tuple[int, int]:
    """How many connections first tries may use at a time, and how many those who know that they wait."""
    return max(1, pool_size // 2), max(1, pool_size // 4)

"""How often a command is tried and how long it waits in between, and the pauses of all else that tries again."""

from __future__ import annotations

import random
from dataclasses import dataclass

LONGEST_PAUSE = 2.0
"""Seconds between two tries, at most: whatever was away is used again within that time of its return."""


class Backoff:
    """The pauses between tries of something that is away: each twice the one before, up to two seconds, with jitter."""

    def __init__(self) -> None:
        self.tries = 0

    def pause(self) -> float:
        """How many seconds to wait after one more failure."""
        self.tries += 1
        return min(LONGEST_PAUSE, 0.05 * 2.0 ** min(self.tries, 10)) * random.uniform(0.5, 1)  # noqa: S311

    def reset(self) -> None:
        """It worked."""
        self.tries = 0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `max_attempts` attempts; the n-th failure waits the n-th `backoff` seconds, the last one repeats."""

    max_attempts: int = 3
    backoff: tuple[float, ...] = (10, 60, 300)

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ValueError(f"max_attempts must be a whole number from 1 on, found {self.max_attempts!r}.")
        if not isinstance(self.backoff, tuple | list):
            raise ValueError(f"backoff must hold seconds, e.g. (10, 60), found {self.backoff!r:.80}.")
        if any(isinstance(s, bool) or not isinstance(s, int | float) or not 0 <= s < 10**9 for s in self.backoff):
            raise ValueError(f"backoff must hold seconds from 0 on, found {self.backoff!r}.")
        object.__setattr__(self, "backoff", tuple(self.backoff))

    def exhausted(self, attempt: int, limit: int | None = None) -> bool:
        """Whether this was the last attempt; a command's own `max_attempts` is the `limit` that wins."""
        return attempt >= (limit or self.max_attempts)

    def delay(self, attempt: int) -> float:
        """Seconds to wait after this failed attempt."""
        if not self.backoff:
            return 0.0
        return float(self.backoff[min(attempt, len(self.backoff)) - 1])

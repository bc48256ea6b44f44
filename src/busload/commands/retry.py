"""How often a command is tried, and how long it waits in between."""

from __future__ import annotations

from dataclasses import dataclass

from busload.commands.checks import require, whole


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `max_attempts` attempts; the n-th failure waits the n-th `backoff` seconds, the last one repeats."""

    max_attempts: int = 3
    backoff: tuple[float, ...] = (10, 60, 300)

    def __post_init__(self) -> None:
        require(whole(1), max_attempts=self.max_attempts)
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

"""How far ahead of its slots a worker claims, and when it looks again."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_SAMPLE = 0.0005
"""Seconds that a pace is measured over, at least."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a round of the claimer found."""

    pause: float | None
    """Seconds until the next round; None if the next round waits until something has changed."""
    found_nothing: bool = False
    """Whether nothing is ready in any domain."""


def sooner(pause: float | None, other: float | None) -> float | None:
    """The shorter of two pauses; None is one that has no end."""
    if pause is None or other is None:
        return other if pause is None else pause
    return min(pause, other)


class Pace:
    """How many commands to hold ahead of the slots: as many as finish here within the horizon.

    The horizon is `prefetch`, or ten claims' time where claims are slow, as they are when many workers share a machine:
    fewer and larger ones then leave more of it to the handlers. It is never longer than `longest`.
    """

    def __init__(self, prefetch: float, longest: float) -> None:
        self._prefetch, self._longest = prefetch, longest
        self._claim = 0.0
        self._rate = 0.0
        self._finished, self._busy = 0, 0.0

    @property
    def horizon(self) -> float:
        """Seconds."""
        return min(max(self._prefetch, 10 * self._claim), self._longest)

    def claimed(self, seconds: float) -> None:
        """Learn how long a claim took."""
        self._claim += (seconds - self._claim) / 4

    def ahead(self, finished: int, busy: float) -> int:
        """Learn that so many have finished so far, in so many seconds in which there was something to do."""
        if self._prefetch == 0:
            return 0
        elapsed = busy - self._busy
        if elapsed >= SHORTEST_SAMPLE:
            rate = (finished - self._finished) / elapsed
            self._rate += (rate - self._rate) * (min(1.0, elapsed / self._prefetch) if self._rate else 1.0)
            self._finished, self._busy = finished, busy
        return int(self._rate * self.horizon)

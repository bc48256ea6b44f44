"""The pauses of everything that tries again."""

from __future__ import annotations

import random

LONGEST_PAUSE = 2.0
"""Seconds between two tries, at most: a database that was away is used again within that time of its return."""


class Backoff:
    """The pauses between tries of something that does not work: each is twice the one before, up to `longest`.

    Chance shortens each pause by up to a half, so that many who wait for the same thing do not come at once.
    """

    def __init__(self, first: float = 0.1, longest: float | None = None) -> None:
        self._first, self._longest = first, longest
        self.tries = 0

    def pause(self) -> float:
        """How many seconds to wait after one more failure."""
        self.tries += 1
        longest = LONGEST_PAUSE if self._longest is None else self._longest
        return min(longest, self._first * 2.0 ** min(self.tries - 1, 16)) * random.uniform(0.5, 1)  # noqa: S311

    def reset(self) -> None:
        """It worked."""
        self.tries = 0

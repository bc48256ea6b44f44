"""Queues that do not answer while others do, for example because they have no leader."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from busload.errors import Refusal

LONGEST_PAUSE = 300.0

LONGEST_LEFT_ALONE, FORGOTTEN = 60.0, 120.0
"""Seconds for which an unresponsive queue is left alone at most, and after which its earlier silence is forgotten."""


def pause(rounds: int, asked: float | None = None) -> float:
    """Seconds before the next round: doubling up to five minutes, not all at once, and no less than the broker asks."""
    doubled = min(2.0 ** min(rounds, 16), LONGEST_PAUSE)
    return max(doubled * random.uniform(0.8, 1.2), asked or 0.0)  # noqa: S311 - spreads rounds out, hides nothing


@dataclass(slots=True)
class _Unresponsive:
    since: float
    why: Refusal
    last: float = 0.0
    tries: int = 0
    until: float = 0.0


class UnresponsiveQueues:
    """Each of these queues is left alone for a while, which grows: to wait for them in vain would hold up the others.

    If no queue has answered since one became unresponsive, the broker may be away: then no queue is left alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._answered_at = clock, -math.inf
        self._queues: dict[str, _Unresponsive] = {}

    def is_stuck(self, queue: str) -> bool:
        return queue in self._queues and self._queues[queue].tries > 0

    def left_alone(self) -> dict[str, Refusal]:
        """The queues that are not to be tried now, each with the refusal of the last try."""
        now = self._clock()
        return {queue: one.why for queue, one in self._queues.items() if now < one.until}

    def learn(self, heard: Iterable[str], unresponsive: Mapping[str, Refusal], began: float) -> bool:
        """Note which queues have answered since `began`, and which have not; returns whether a stuck queue has."""
        now, stuck = self._clock(), False
        for queue in heard:
            self._answered_at = now
            stuck |= self.is_stuck(queue)
            self._queues.pop(queue, None)
        for queue, why in unresponsive.items():
            one = self._queues.get(queue)
            if one is None or now - one.last > FORGOTTEN:
                one = self._queues[queue] = _Unresponsive(began, why)
            one.why, one.last = why, now
            if self._answered_at >= one.since:
                one.until = now + min(pause(one.tries), LONGEST_LEFT_ALONE)
                one.tries += 1
        return stuck

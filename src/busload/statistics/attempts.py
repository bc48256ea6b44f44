"""The attempts that a worker has settled: how they ended and how long they took, by domain and type of command."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

from busload.commands.execution import (
    CANCELED,
    COMPLETED,
    FAILED,
    FAILED_ATTEMPT,
    TROUBLESHOOTING,
    Transition,
)
from busload.statistics.statistics import Counts

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: the upper bounds of the buckets of a histogram. What took longer is in one more bucket."""

OUTCOMES = (COMPLETED, FAILED, CANCELED, FAILED_ATTEMPT, TROUBLESHOOTING)

KIND = attrgetter("leased.lease.domain", "leased.command_type")
OUTCOME = attrgetter("outcome")


class AttemptsOfType:
    """Attempts of one type of command in one domain."""

    __slots__ = ("buckets", "outcomes", "seconds")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.buckets = [0] * (len(BOUNDS) + 1)
        """How many attempts took at most so long, and longer than the bound before."""
        self.seconds = 0.0

    def add(self, outcomes: Sequence[str], durations: list[float]) -> None:
        """Count attempts. The durations are sorted on the way."""
        self.outcomes.update(outcomes)
        self.seconds += sum(durations)
        if len(durations) <= 8:
            for duration in durations:
                self.buckets[bisect_left(BOUNDS, duration)] += 1
            return
        # Few bounds lie within so many durations: to look the bounds up is quicker than to look up each duration.
        durations.sort()
        index, done = bisect_left(BOUNDS, durations[0]), 0
        while done < len(durations):
            until = bisect_right(durations, BOUNDS[index]) if index < len(BOUNDS) else len(durations)
            self.buckets[index] += until - done
            index, done = index + 1, until


class Attempts(dict[tuple[str, str], AttemptsOfType]):
    """The attempts of each domain and type of which one was settled."""

    def add(self, transitions: Sequence[Transition], outcomes: Sequence[str]) -> None:
        """Count attempts that are settled, and their outcomes in the same order."""
        durations = [each.finished - each.leased.started for each in transitions]
        kinds = list(map(KIND, transitions))
        if kinds.count(kinds[0]) == len(kinds):  # most often all are alike
            self._of(kinds[0]).add(outcomes, durations)
            return
        for kind, outcome, duration in zip(kinds, outcomes, durations, strict=True):
            self._of(kind).add((outcome,), [duration])

    def by_domain(self) -> dict[str, Counts]:
        """What was counted so far, of all types together."""
        found: dict[str, Counts] = {}
        for (domain, _), each in self.items():
            found.setdefault(domain, Counts()).add(counts(each.outcomes, each.seconds))
        return found

    def _of(self, kind: tuple[str, str]) -> AttemptsOfType:
        found = self.get(kind)
        if found is None:
            found = self[kind] = AttemptsOfType()
        return found


def counts(outcomes: Mapping[str, int], seconds: float) -> Counts:
    """What attempts count in the statistics."""
    completed, failed, canceled, retried, troubled = (outcomes.get(outcome, 0) for outcome in OUTCOMES)
    return Counts(completed, failed, canceled, retried, troubled, seconds)

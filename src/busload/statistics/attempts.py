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
        """Count attempts. The durations may be sorted on the way."""
        count(self.outcomes, outcomes)
        self.seconds += sum(durations)
        first, last = bisect_left(BOUNDS, min(durations)), bisect_left(BOUNDS, max(durations))
        if first == last:  # most often all are in one bucket
            self.buckets[first] += len(durations)
            return
        durations.sort()
        done = 0
        for index in range(first, last + 1):
            until = bisect_right(durations, BOUNDS[index]) if index < len(BOUNDS) else len(durations)
            self.buckets[index] += until - done
            done = until


class Attempts(dict[tuple[str, str], AttemptsOfType]):
    """The attempts of each domain and type of which one was settled."""

    def add(self, transitions: Sequence[Transition], outcomes: Sequence[str]) -> None:
        """Count attempts that are settled, at least one, and their outcomes in the same order.

        Every command passes here, so what is usual is quick: all are of one domain and type.
        """
        durations = [each.finished - each.leased.started for each in transitions]
        types = {each.leased.command_type for each in transitions}
        domains = {lease.domain for lease in {each.leased.lease for each in transitions}}
        if len(types) == len(domains) == 1:
            self._of((domains.pop(), types.pop())).add(outcomes, durations)
            return
        apart: dict[tuple[str, str], tuple[list[str], list[float]]] = {}
        for each, outcome, duration in zip(transitions, outcomes, durations, strict=True):
            kind = each.leased.lease.domain, each.leased.command_type
            ended, took = apart.setdefault(kind, ([], []))
            ended.append(outcome)
            took.append(duration)
        for kind, (ended, took) in apart.items():
            self._of(kind).add(ended, took)

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


def count(counter: Counter[str], outcomes: Sequence[str]) -> None:
    """Count outcomes, at least one. Most often all are equal, which is quick to see."""
    first = outcomes[0]
    if outcomes.count(first) == len(outcomes):
        counter[first] += len(outcomes)
    else:
        counter.update(outcomes)


def counts(outcomes: Mapping[str, int], seconds: float) -> Counts:
    """What attempts count in the statistics."""
    completed, failed, canceled, retried, troubled = (outcomes.get(outcome, 0) for outcome in OUTCOMES)
    return Counts(completed, failed, canceled, retried, troubled, seconds)

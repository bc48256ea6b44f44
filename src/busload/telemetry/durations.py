"""How long handlers ran, gathered by domain and type of error, for readers that take what was gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from threading import Lock
from typing import TypeAlias

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Seconds: the upper bounds of a histogram of durations, as the conventions advise them."""

MOST = 2000
"""Kinds that are told apart, as many as the SDK's default: what comes after them is counted as `OTHERS`."""

Kind: TypeAlias = tuple[str, str | None]
"""A domain, and the type of the error if the handlers have raised one."""

OTHERS: Kind = ("", None)


class Histogram:
    """How long some calls took."""

    __slots__ = ("buckets", "least", "most", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS) + 1)
        """How many took at most so long, and longer than the bound before; the last one has the rest."""
        self.least, self.most = float("inf"), float("-inf")
        self.seconds = 0.0

    def add(self, durations: Sequence[float]) -> None:
        """Count durations, at least one."""
        least, most = min(durations), max(durations)
        first = bisect_left(BUCKETS, least)
        if bisect_left(BUCKETS, most) == first:  # most often all are in one bucket
            self.buckets[first] += len(durations)
        else:
            for each in durations:
                self.buckets[bisect_left(BUCKETS, each)] += 1
        self.least, self.most = min(self.least, least), max(self.most, most)
        self.seconds += sum(durations)

    def merge(self, other: Histogram) -> None:
        """Count what another one has counted."""
        self.buckets = [mine + its for mine, its in zip(self.buckets, other.buckets, strict=True)]
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.seconds += other.seconds


class Durations:
    """What is gathered for one reader. Workers add from their threads, and the reader takes it from its own."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._gathered: dict[Kind, Histogram] = {}

    def add(self, kind: Kind, durations: Sequence[float]) -> None:
        with self._lock:
            found = self._gathered.get(kind)
            if found is None:
                kind = kind if len(self._gathered) < MOST else OTHERS
                found = self._gathered.setdefault(kind, Histogram())
            found.add(durations)

    def take(self) -> dict[Kind, Histogram]:
        """What was added since the last call."""
        with self._lock:
            taken, self._gathered = self._gathered, {}
        return taken


class GathersDurations(ABC):
    """A meter provider that takes durations many at once, where its SDK would take a call for each."""

    gathers_durations: bool
    """Whether it takes them so, as it is set up."""

    @abstractmethod
    def add_durations(self, domain: str, error: str | None, durations: Sequence[float]) -> None:
        """Count how long these handlers ran: those that have raised an error of this type or, if it is None, none."""

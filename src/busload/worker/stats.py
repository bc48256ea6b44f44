"""What a worker and its coalescer have done so far, and how long it took."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from busload.domain.counted import counted

log = logging.getLogger("busload")

SAMPLES = 1024
"""How many recent waits the percentiles are taken from."""
EVERY = 16
"""Of what gathers, the wait of the first item and of every sixteenth after it is measured: next to free."""
RECENT = 10
"""Seconds that `rate` looks back."""
REPORT_EVERY = 60.0
"""Seconds between two lines in the log about what was settled."""


@dataclass(slots=True)
class CoalescerStats:
    """What a coalescer has done so far; `waiting` is what it holds now, also while it is being flushed."""

    capacity: int
    capacity_bytes: int | None = None
    items: int = 0
    """Items that were flushed."""
    flushes: int = 0
    failures: int = 0
    """Flushes that raised, and were rolled back and repeated."""
    waiting: int = 0
    waiting_bytes: int = 0
    most_waiting: int = 0
    """The largest `waiting` that a flush has met."""
    last_flush: float = 0.0
    """Seconds the last flush took."""
    flush_seconds: float = 0.0
    """Seconds that all flushes took together."""
    measured: int = 0
    """Items whose latency was measured."""
    measured_seconds: float = 0.0
    """The sum of these latencies."""
    _marks: deque[tuple[int, float]] = field(default_factory=deque, repr=False)
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES), repr=False)
    _born: float = field(default_factory=time.monotonic, repr=False)
    _seconds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    """A second of the clock and what was flushed in it, for the last ten in which something was."""
    _at: float | None = field(default=None, repr=False)
    """When a snapshot was taken; None while it is still counting."""

    @property
    def fullness(self) -> float:
        """The share of the capacity that is taken: from 0.8 on, items come faster than they leave."""
        by_bytes = self.waiting_bytes / self.capacity_bytes if self.capacity_bytes else 0.0
        return max(self.waiting / self.capacity, by_bytes)

    @property
    def flush_size(self) -> float:
        """Items per flush, on average."""
        return self.items / self.flushes if self.flushes else 0.0

    @property
    def saved(self) -> int:
        """Transactions that one write per item would have taken in addition."""
        return self.items - self.flushes

    @property
    def saved_share(self) -> float:
        """The share of transactions that was saved: 0.95 is one flush for every 20 items."""
        return self.saved / self.items if self.items else 0.0

    @property
    def failed_share(self) -> float:
        """The share of flushes that was rolled back."""
        return self.failures / (self.flushes + self.failures) if self.failures else 0.0

    @property
    def rate(self) -> float:
        """Items per second, over the last ten seconds or as long as there is something to look back on."""
        now = time.monotonic() if self._at is None else self._at
        first = int(now) - RECENT + 1
        elapsed = now - max(self._born, first)
        return sum(count for second, count in self._seconds if second >= first) / elapsed if elapsed > 0 else 0.0

    def latency(self, percent: float) -> float:
        """Seconds from `put` to the end of the flush that wrote the item: a percentile over the most recent ones."""
        return percentile(sorted(self._waits), percent)

    def snapshot(self) -> CoalescerStats:
        """The figures of this moment, which do not change any more."""
        now = time.monotonic() if self._at is None else self._at
        return replace(self, _marks=deque(), _waits=self._waits.copy(), _seconds=self._seconds.copy(), _at=now)

    def since(self, earlier: CoalescerStats) -> CoalescerStats:
        """What was done after an earlier snapshot of the same coalescer; its latencies are of that time too."""
        period = self.snapshot()
        period.items -= earlier.items
        period.flushes -= earlier.flushes
        period.failures -= earlier.failures
        period.flush_seconds -= earlier.flush_seconds
        period.measured -= earlier.measured
        period.measured_seconds -= earlier.measured_seconds
        older = max(0, len(self._waits) - period.measured)
        period._waits = deque(islice(self._waits, older, None), maxlen=SAMPLES)
        return period

    def mark(self) -> None:
        """The item that has just come is one whose wait is measured."""
        self._marks.append((self.items + self.waiting, time.monotonic()))

    def flushed(self, count: int, weight: int, seconds: float) -> None:
        """The oldest so many items were flushed in so many seconds."""
        now = time.monotonic()
        self.most_waiting = max(self.most_waiting, self.waiting)
        self.waiting -= count
        self.waiting_bytes -= weight
        self.items += count
        self.flushes += 1
        self.last_flush = seconds
        self.flush_seconds += seconds
        while self._marks and self._marks[0][0] <= self.items:
            wait = now - self._marks.popleft()[1]
            self._waits.append(wait)
            self.measured += 1
            self.measured_seconds += wait
        if self._seconds and self._seconds[-1][0] == int(now):
            count += self._seconds.pop()[1]
        self._seconds.append((int(now), count))


@dataclass(frozen=True, slots=True)
class OutboxStats:
    """What waits to be announced on one transport, in the whole database, as of the worker's last look."""

    transport: str
    commands: int
    failed: int
    """Those after a round that has failed."""
    oldest: float
    """Seconds that the oldest has waited."""
    rounds: int
    """The most rounds that have failed for one of them."""


@dataclass(frozen=True, slots=True)
class BrokerStats:
    """What a worker did between the outbox and the broker, and between the broker and its claims."""

    transport: str
    connected: bool = False
    """Whether messages come for every domain; while they do not, it polls as without a broker."""
    messages: int = 0
    """Messages handed to the broker, by the worker and the bus it runs on."""
    confirmed: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """Those that were not confirmed, by reason."""
    rounds: int = 0
    """Rounds in which the relay had something to announce."""
    failed_rounds: int = 0
    """Those in which the broker could not be reached, or asked it to wait."""
    relayed: int = 0
    """Commands that are ready by it."""
    rung_again: int = 0
    """Commands that were announced long ago and that nobody had come for."""
    rings: int = 0
    """Messages that came and could be read."""
    rung: int = 0
    """Commands that were claimed for them."""
    duplicates: int = 0
    """Messages that found nothing: the commands had been claimed before."""
    unknown: int = 0
    """Loads in messages that are not in the database."""
    refused_messages: int = 0
    """Messages that nobody can read, or that are not signed by us."""
    outbox: tuple[OutboxStats, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What a worker does at this moment, and has done since it started. Of a stopped one: what its last run came to."""

    concurrency: int
    settlement: CoalescerStats
    """How results were written: flush size, rate, latency, fullness, transactions saved, rollbacks."""
    claims: int = 0
    """Claim statements, one for all free slots."""
    empty_claims: int = 0
    """Those that found nothing."""
    claimed: int = 0
    """Commands they brought."""
    in_hand: int = 0
    """Commands that run or stand in line now."""
    in_line: int = 0
    """Commands that wait for a slot now."""
    prefetch: int = 0
    """How many commands it wants to stand in line now: what its slots finish within `WorkerSettings.prefetch`."""
    completed: int = 0
    failed: int = 0
    canceled: int = 0
    parked: int = 0
    """Attempts that ended in troubleshooting."""
    failed_attempts: int = 0
    """Attempts after which the command will be tried again."""
    in_transactions: int = 0
    """Attempts that were settled by the handler's own transaction, not by a flush."""
    late: int = 0
    """Results that came after their lease was lost, and do not count."""
    handed_back: int = 0
    """Commands that were claimed and not run: they waited too long, have no handler here, or the worker stopped."""
    lost_leases: int = 0
    bulk_calls: int = 0
    """Calls of bulk handlers, and of those of buffers."""
    bulk_items: int = 0
    """Commands and events that they were given."""
    broker: BrokerStats | None = None
    """None where PostgreSQL delivers."""

    @property
    def finished(self) -> int:
        """Attempts that have a result, whether it is settled or still waits for its flush."""
        return self.settlement.items + self.settlement.waiting + self.in_transactions

    @property
    def settled(self) -> int:
        """Attempts whose result is committed and counts."""
        return self.completed + self.failed + self.canceled + self.parked + self.failed_attempts


class Report:
    """Says in the log what was settled: once a minute, and when the worker stops. Silent if nothing was."""

    def __init__(self, stats: Callable[[], WorkerStats]) -> None:
        self._stats = stats
        self._first = self._last = stats()

    async def once(self) -> float:
        earlier, self._last = self._last, self._stats()
        _say("In the last minute", earlier, self._last)
        return REPORT_EVERY

    def finish(self) -> None:
        _say("In this run", self._first, self._stats())


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed; 0 if there is none."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def _say(when: str, earlier: WorkerStats, now: WorkerStats) -> None:
    flushed = now.settlement.since(earlier.settlement)
    alone = now.in_transactions - earlier.in_transactions
    if not flushed.items and not alone:
        return
    p50, p95, p99 = (1000 * flushed.latency(percent) for percent in (50, 95, 99))
    log.info(
        "%s %s settled in %s of %.1f on average, %d by handlers' own transactions; "
        "from result to commit p50 %.1f ms, p95 %.1f ms, p99 %.1f ms; %.0f %% full, %s repeated",
        *(when, counted(flushed.items, "result was", "results were")),
        *(counted(flushed.flushes, "flush", "flushes"), flushed.flush_size, alone),
        *(p50, p95, p99, 100 * flushed.fullness, counted(flushed.failures, "flush", "flushes")),
    )

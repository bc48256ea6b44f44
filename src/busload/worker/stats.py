"""What a worker and its coalescer have done so far, and how long it took."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import accumulate, islice
from typing import ClassVar

from busload.commands.wording import counted
from busload.statistics.attempts import Attempts
from busload.worker.metrics import counter, derived, figure, figures_of, gauge

log = logging.getLogger("busload")

SAMPLES = 2048
"""How many recent waits the percentiles are taken from."""
FIRST, EVERY = 64, 16
"""Of the items that gather, the first 64 are timed, and every sixteenth after them. An item that is not timed came
after the one before it that is, so it has waited at most as long as that one."""
RECENT = 10
"""Seconds that `rate` looks back."""
REPORT_EVERY = 60.0
"""Seconds between two lines in the log about what was settled."""
SETTLED = "worker_settled_total"
OUTCOMES = {
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CANCELED": "canceled",
    "TROUBLESHOOTING": "parked",
    "FAILED_ATTEMPT": "failed_attempt",
}
"""What metrics call the outcomes."""


@dataclass(slots=True)
class CoalescerStats:
    """What a coalescer has done so far, and what it holds now."""

    capacity: int = gauge("Items that may be held; then no more are taken.", "settlement_capacity", default=MISSING)
    capacity_bytes: int | None = figure("Bytes that these may have, if items are weighed.", default=None)
    items: int = counter("Items that flushes have written.", "settlement_results_total")
    taken: int = counter("Items that flushes have taken: those that they wrote, refused, or set apart.")
    flushes: int = counter("Flushes, one transaction each.", "settlement_flushes_total")
    failures: int = counter("Flushes that were rolled back and repeated.", "settlement_failures_total")
    waiting: int = gauge("Items that are held, those being flushed included.", "settlement_waiting")
    apart: int = gauge("Items that wait apart, for a batch that somebody holds.", "settlement_apart")
    waiting_bytes: int = gauge("Bytes of the items that are held, if items are weighed.", "settlement_waiting_bytes")
    most_waiting: int = figure("The largest `waiting` that a flush has met.")
    last_flush: float = figure("Seconds that the last flush took.", default=0.0)
    flush_seconds: float = counter(
        "Seconds that all flushes took together.", "settlement_flush_seconds_total", default=0.0
    )
    measured: int = counter("Items whose latency is known: measured, or at most that of the item timed before it.")
    measured_seconds: float = counter("The sum of these latencies in seconds.", default=0.0)
    _marks: deque[tuple[int, float]] = field(default_factory=deque, repr=False)
    """The number and the time of each item that is timed and not flushed yet."""
    _last_mark: float | None = field(default=None, repr=False)
    """The time of the last timed item that was flushed: those that came with it may be flushed later."""
    _samples: int = field(default=0, repr=False)
    _waits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES), repr=False)
    """How long items have waited at most, and how many of them."""
    _born: float = field(default_factory=time.monotonic, repr=False)
    _seconds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    """A second of the clock and what was flushed in it, for the last ten in which something was."""
    _at: float | None = field(default=None, repr=False)
    """When a snapshot was taken; None while it is still counting."""

    @property
    @derived("settlement_fullness_ratio", "gauge")
    def fullness(self) -> float:
        """The share of the capacity that is taken: from 0.8 on, items come faster than they leave."""
        by_bytes = self.waiting_bytes / self.capacity_bytes if self.capacity_bytes else 0.0
        return max(self.waiting / self.capacity, by_bytes)

    @property
    @derived("settlement_refused_total", "counter")
    def refused(self) -> int:
        """Items that a flush has not written: results that came after their lease was lost."""
        return max(0, self.taken - self.items - self.apart)

    @property
    @derived()
    def flush_size(self) -> float:
        """Items per flush, on average."""
        return self.taken / self.flushes if self.flushes else 0.0

    @property
    @derived("settlement_saved_transactions_total", "counter")
    def saved(self) -> int:
        """Transactions that one write per item would have taken in addition."""
        return self.taken - self.flushes

    @property
    @derived()
    def saved_share(self) -> float:
        """The share of transactions that was saved: 0.95 is one flush for every 20 items."""
        return self.saved / self.taken if self.taken else 0.0

    @property
    @derived()
    def failed_share(self) -> float:
        """The share of flushes that was rolled back."""
        return self.failures / (self.flushes + self.failures) if self.failures else 0.0

    @property
    @derived()
    def rate(self) -> float:
        """Items per second, over the last ten seconds or as long as there is something to look back on."""
        now = time.monotonic() if self._at is None else self._at
        first = int(now) - RECENT + 1
        elapsed = now - max(self._born, first)
        return sum(count for second, count in self._seconds if second >= first) / elapsed if elapsed > 0 else 0.0

    @derived("settlement_latency_seconds", "summary")
    def latency(self, percent: float) -> float:
        """Seconds from `put` to the end of the flush that took the item: a percentile over the last flushes.

        It errs upwards: an item that is not timed counts with the wait of the timed item before it.
        """
        return percentile(sorted(self._waits), percent)

    def snapshot(self) -> CoalescerStats:
        """The figures of this moment, which do not change any more."""
        now = time.monotonic() if self._at is None else self._at
        return replace(self, _marks=deque(), _waits=self._waits.copy(), _seconds=self._seconds.copy(), _at=now)

    def plus(self, other: CoalescerStats) -> CoalescerStats:
        """The figures of this one and another one of this moment together, as if they were one coalescer."""
        whole, other = self.snapshot(), other.snapshot()
        for name in figures_of(CoalescerStats):
            mine, its = (getattr(one, name) for one in (whole, other))
            if name in _LARGEST:
                setattr(whole, name, max(mine, its))
            elif name in _ADDED and None not in (mine, its):
                setattr(whole, name, mine + its)
        whole._waits = deque((*whole._waits, *other._waits), maxlen=SAMPLES)
        whole._seconds = deque(sorted((Counter(dict(whole._seconds)) + Counter(dict(other._seconds))).items()), RECENT)
        whole._born, whole._samples = min(whole._born, other._born), whole._samples + other._samples
        return whole

    def since(self, earlier: CoalescerStats) -> CoalescerStats:
        """What was done after an earlier snapshot of the same coalescer; its latencies are of that time too."""
        period = self.snapshot()
        for name in _COUNTED:
            setattr(period, name, getattr(self, name) - getattr(earlier, name))
        older = max(0, len(self._waits) - (self._samples - earlier._samples))
        period._waits = deque(islice(self._waits, older, None), maxlen=SAMPLES)
        return period

    def mark(self) -> None:
        """The item that has just come is one whose wait is measured."""
        self._marks.append((self.taken + self.waiting, time.monotonic()))

    def flushed(self, count: int, weight: int, seconds: float, written: int | None = None) -> None:
        """The oldest so many items were flushed in so many seconds; if `written` is None, all of them were written."""
        now = time.monotonic()
        self.most_waiting = max(self.most_waiting, self.waiting)
        self.waiting -= count
        self.waiting_bytes -= weight
        self._measure(count, now)
        self.taken += count
        self.items += count if written is None else written
        self.flushes += 1
        self.last_flush = seconds
        self.flush_seconds += seconds
        if self._seconds and self._seconds[-1][0] == int(now):
            count += self._seconds.pop()[1]
        self._seconds.append((int(now), count))

    def written_apart(self, count: int, written: int) -> None:
        """So many items that waited apart were flushed, and so many of them written."""
        self.apart -= count
        self.items += written

    def _measure(self, count: int, now: float) -> None:
        """Note how long the oldest so many items have waited: each as long as the timed item at or before it."""
        done, end = self.taken, self.taken + count
        while self._marks and self._marks[0][0] <= end:
            number, at = self._marks.popleft()
            self._note_wait(number - 1 - done, now)
            done, self._last_mark = number - 1, at
        self._note_wait(end - done, now)

    def _note_wait(self, count: int, now: float) -> None:
        if count and self._last_mark is not None:
            wait = now - self._last_mark
            self._waits.append((wait, count))
            self._samples += 1
            self.measured += count
            self.measured_seconds += count * wait


_LARGEST = ("most_waiting", "last_flush")
_ADDED = {one.name for one in fields(CoalescerStats) if not one.name.startswith("_")} - {*_LARGEST}
_COUNTED = [
    name
    for name, one in figures_of(CoalescerStats).items()
    if one.kind == "counter" and name not in ("saved", "refused")
]


@dataclass(frozen=True, slots=True)
class OutboxStats:
    """What waits to be published on one transport, in the whole database, as of the worker's last look."""

    transport: str
    commands: int = gauge("Commands that wait to be published.", "outbox_commands", default=MISSING)
    failed: int = gauge("Commands of these after a failed round.", "outbox_failed", default=MISSING)
    oldest: float = gauge("Seconds that the oldest of them has waited.", "outbox_oldest_seconds", default=MISSING)
    rounds: int = gauge("The most rounds that have failed for one of them.", "outbox_rounds", default=MISSING)


@dataclass(frozen=True, slots=True)
class BrokerStats:
    """What a worker did between the outbox and the broker, and between the broker and its claims."""

    transport: str
    connected: bool = gauge(
        "Whether messages come for every domain; while they do not, the worker polls as without a broker.",
        "broker_connected",
        "broker",
        default=False,
    )
    messages: int = figure("Messages handed to the broker, by the worker and its bus.", source="publisher")
    confirmed: int = counter(
        "Messages that the broker confirmed.", "broker_messages_total", "publisher", result="confirmed"
    )
    refused: Mapping[str, int] = counter(
        "Messages that were not confirmed, by reason.", "broker_messages_total", default=dict, label="result"
    )
    rounds: int = counter("Rounds in which the relay had something to publish.", "relay_rounds_total", "relay")
    failed_rounds: int = counter(
        "Rounds in which the broker could not be reached, or asked the relay to wait.",
        "relay_failed_rounds_total",
        "relay",
    )
    relayed: int = counter("Commands published from the outbox.", "relay_commands_total", "relay")
    published_again: int = counter(
        "Commands published again as nobody came.", "relay_published_again_total", "recovery"
    )
    received: int = counter("Messages that came and could be read.", "receive_messages_total", "deliveries")
    claimed: int = counter("Commands claimed for these messages.", "receive_commands_total", "deliveries")
    duplicates: int = counter(
        "Messages that found nothing: their commands had been claimed before.", "receive_duplicates_total", "deliveries"
    )
    unknown: int = counter("Loads in messages that are not in the database.", "receive_unknown_total", "deliveries")
    refused_messages: int = counter(
        "Messages that nobody can read, or that are not signed by us.", "receive_refused_total"
    )
    outbox: tuple[OutboxStats, ...] = figure(
        "An `OutboxStats` per transport; the worker looks at the whole database every 15 seconds.", default=()
    )


@dataclass(frozen=True, slots=True)
class HandlerStats:
    """The attempts at one type of command in one domain, since the worker started."""

    LABELS: ClassVar = ("domain", "type")

    domain: str
    type: str
    outcomes: Mapping[str, int] = counter(
        "Attempts whose result is committed, by how they ended.",
        "handler_attempts_total",
        default=MISSING,
        label="outcome",
    )
    durations: tuple[int, ...] = figure(
        "How many of these took at most 1, 2.5, 5, 10, 25, 50, 100, 250 or 500 ms, 1, 2.5, 5, 10, 30, 60 or 300 s, or "
        "longer. Each attempt counts once, at the first of these that it does not exceed.",
        "handler_duration_seconds",
        kind="histogram",
        default=MISSING,
    )
    seconds: float = figure("Seconds that these took together.", default=0.0)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What a worker does now, and has done since it started; once it has stopped, what its last run has done."""

    concurrency: int = gauge("Commands that may run at a time.", "worker_concurrency", default=MISSING)
    settlement: CoalescerStats = figure("How results were written, as `CoalescerStats`.", default=MISSING)
    claims: int = counter("Claim statements, one for all free slots.", "worker_claims_total", "claimer")
    empty_claims: int = counter("Claims that found nothing.", "worker_empty_claims_total", "claimer")
    claimed: int = counter("Commands that were claimed.", "worker_claimed_total", "claimer")
    in_hand: int = gauge("Commands that run or stand in line now.", "worker_in_hand", "line")
    in_line: int = gauge("Commands that wait for a slot now.", "worker_in_line")
    prefetch: int = gauge(
        "Commands that should stand in line now: what the slots finish within `WorkerSettings.prefetch`.",
        "worker_prefetch",
        "room.ahead",
    )
    completed: int = counter(
        "Attempts that completed their command.", SETTLED, "outcomes.COMPLETED", outcome="completed"
    )
    failed: int = counter("Attempts that ended in a final no.", SETTLED, "outcomes.FAILED", outcome="failed")
    canceled: int = counter("Attempts whose command was canceled.", SETTLED, "outcomes.CANCELED", outcome="canceled")
    parked: int = counter(
        "Attempts that ended in troubleshooting.", SETTLED, "outcomes.TROUBLESHOOTING", outcome="parked"
    )
    failed_attempts: int = counter(
        "Attempts after which the command will be tried again.",
        SETTLED,
        "outcomes.FAILED_ATTEMPT",
        outcome="failed_attempt",
    )
    in_transactions: int = counter(
        "Attempts that were settled by the handler's own transaction, not by a flush.",
        "worker_in_transactions_total",
        "settlement",
    )
    late: int = counter(
        "Results that came after their lease was lost, and do not count.", "worker_late_results_total", "settlement"
    )
    handed_back: int = counter(
        "Commands that were claimed and not run: they waited too long, have no handler here, or the worker stopped.",
        "worker_handed_back_total",
        "hand_back.commands",
    )
    bulk_calls: int = counter("Calls of bulk handlers, and of handlers of buffers.", "worker_bulk_calls_total", "calls")
    bulk_items: int = counter("Commands and events that these calls were given.", "worker_bulk_items_total", "calls")
    lost_leases: int = counter("Leases that others took over.", "worker_lost_leases_total", "held.lost")
    handlers: tuple[HandlerStats, ...] = figure(
        "A `HandlerStats` for each domain and type of which an attempt was settled.", default=()
    )
    broker: BrokerStats | None = figure(
        "What the broker delivered, as `BrokerStats`; None where PostgreSQL delivers.", default=None
    )

    @property
    @derived("worker_finished_total", "counter")
    def finished(self) -> int:
        """Attempts that have a result, whether it is settled or still waits for its flush."""
        return self.settlement.taken + self.settlement.waiting + self.in_transactions

    @property
    @derived()
    def settled(self) -> int:
        """Attempts whose result is committed and counts."""
        return self.completed + self.failed + self.canceled + self.parked + self.failed_attempts


def handler_stats(attempts: Attempts) -> tuple[HandlerStats, ...]:
    """What was counted so far, as figures that do not change any more."""
    return tuple(
        HandlerStats(
            *(domain, command_type),
            {name: each.outcomes[outcome] for outcome, name in OUTCOMES.items()},
            *(tuple(each.buckets), each.seconds),
        )
        for (domain, command_type), each in sorted(attempts.items())
    )


class Report:
    """Says in the log what was settled: once a minute, and when the worker stops. Silent if nothing was."""

    def __init__(self, stats: Callable[[], WorkerStats]) -> None:
        self._stats = stats
        self._first = self._last = stats()

    async def once(self) -> float:
        earlier, self._last = self._last, self._stats()
        _log_period("In the last minute", earlier, self._last)
        return REPORT_EVERY

    def finish(self) -> None:
        _log_period("In this run", self._first, self._stats())


def percentile(ordered: Sequence[tuple[float, int]], percent: float) -> float:
    """The smallest value that so many percent of the items do not exceed; 0 if there is none.

    Each value is given with the number of items that it stands for.
    """
    wanted = max(1, math.ceil(sum(count for _, count in ordered) * percent / 100))
    reached = accumulate(count for _, count in ordered)
    return next((value for (value, _), items in zip(ordered, reached, strict=True) if items >= wanted), 0.0)


def _log_period(when: str, earlier: WorkerStats, now: WorkerStats) -> None:
    flushed = now.settlement.since(earlier.settlement)
    alone = now.in_transactions - earlier.in_transactions
    if not flushed.taken and not alone:
        return
    refused = f", {counted(flushed.refused, 'result')} refused" if flushed.refused else ""
    p50, p95, p99 = (1000 * flushed.latency(percent) for percent in (50, 95, 99))
    log.info(
        "%s %s settled in %s of %.1f on average, %d by handlers' own transactions; "
        "from result to commit p50 %.1f ms, p95 %.1f ms, p99 %.1f ms; %.0f %% full, %s repeated%s",
        *(when, counted(flushed.items, "result was", "results were")),
        *(counted(flushed.flushes, "flush", "flushes"), flushed.flush_size, alone),
        *(p50, p95, p99, 100 * flushed.fullness, counted(flushed.failures, "flush", "flushes"), refused),
    )

"""Collects items and hands many of them over together: many outcomes, one statement."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate, chain, islice
from typing import Generic, TypeVar

import psycopg

from busload.commands.wording import counted
from busload.errors import InvalidOperationError
from busload.postgres.backoff import Backoff
from busload.postgres.outage import Outage
from busload.telemetry.running import running
from busload.worker.stats import EVERY, FIRST, CoalescerStats

log = logging.getLogger("busload")

T = TypeVar("T")
LAST_WORDS = 5.0
"""Seconds that `close` waits for a flush that was cancelled."""
NEARLY_FULL = 0.8
"""The share of the capacity from which on a coalescer that stands still is worth a warning."""
SAY_EVERY = 60.0
"""Seconds between two lines about the same coalescer."""

REFUSALS = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,  # too long, or too deep, for the server whatever its settings
    psycopg.errors.StatementTooComplex,
)
"""Errors that an item causes, so that trying again is in vain. All other errors may pass."""


class Coalescer(Generic[T]):
    """Collects items and passes them to `flush`, at most `max_size` at a time.

    A flush begins when `max_size` items wait, when the oldest has waited `max_interval`, on `flush_soon()` and on
    close. While one is under way the next items gather. Items are kept until `flush` has returned: if it raises, the
    same items are passed again, after a pause that grows, so `flush` must be safe to repeat. When `capacity` items are
    held, `put` waits; nothing is ever dropped. `flush` may return how many of the items it has written; None means all.

    `weigh` says how many bytes an item takes: a flush then also ends at `max_bytes`, and `put` waits while four times
    as many are held. `merge` may fold the items of a flush before it. With `on_refused`, a flush that fails by a
    `psycopg.DataError`, an `IntegrityError` or a limit of the server is halved until the bad items stand alone; each of
    these is passed to `on_refused`, and the others are flushed. `stats` has the figures. Flushes that fail are logged
    as an `outage`, which others may share. A coalescer that is nearly full and has ended no flush for `warn_after` says
    so in the log.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[T]], Awaitable[int | None]],
        *,
        max_size: int = 100,
        max_interval: timedelta = timedelta(milliseconds=100),
        capacity: int = 500,
        merge: Callable[[Sequence[T]], Sequence[T]] | None = None,
        weigh: Callable[[T], int] | None = None,
        max_bytes: int = 16 * 1024 * 1024,
        on_refused: Callable[[T, Exception], Awaitable[None]] | None = None,
        warn_after: timedelta = timedelta(seconds=5),
        name: str = "coalescer",
        outage: Outage | None = None,
    ) -> None:
        for name_of, value in (("max_size", max_size), ("capacity", capacity), ("max_bytes", max_bytes)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name_of} must be a whole number, found {value!r}.")
        if not 1 <= max_size <= capacity:
            raise ValueError(f"max_size must be from 1 to capacity ({capacity}), found {max_size}.")
        if max_interval < timedelta(0):
            raise ValueError(f"max_interval must not be negative, found {max_interval}.")
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be 1 or more, found {max_bytes}.")
        self.stats = CoalescerStats(capacity, 4 * max_bytes if weigh is not None else None)
        self._flush, self._merge, self._on_refused = flush, merge, on_refused
        self._weigh, self._max_bytes, self._name = weigh, max_bytes, name
        self._part = f"A flush of the {name}, whose items are kept,"
        self._max_size, self._capacity = max_size, capacity
        self._interval, self._warn_after = max_interval.total_seconds(), warn_after.total_seconds()
        self._items: deque[T] = deque()
        self._due = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._silent_until = self._no_warning_until = 0.0
        self._outage, self._outage_is_mine = outage or Outage(), outage is None
        self._watching: asyncio.TimerHandle | None = None

    async def put(self, item: T) -> None:
        """Hand over an item; wait while the coalescer is full. After `close` this raises `InvalidOperationError`."""
        while not self.offer(item):
            self._room.clear()
            if time.monotonic() >= self._silent_until:  # said once a minute at most
                self._silent_until = time.monotonic() + SAY_EVERY
                held = counted(self.stats.waiting, "item")
                log.error("The %s is full with %s; waiting to hand over %.200r", self._name, held, item)
            self.flush_soon()  # it may be full of bytes, and then no further item makes the flush due
            await self._room.wait()

    def offer(self, item: T) -> bool:
        """Hand over an item if there is room. If not, return False and change nothing."""
        stats = self.stats
        if self._closing:
            raise InvalidOperationError("The coalescer is closed and takes no more items.")
        if stats.waiting >= self._capacity:
            return False
        if self._weigh is not None:
            weight = self._weigh(item)
            if stats.waiting_bytes and stats.waiting_bytes + weight > 4 * self._max_bytes:
                return False
            stats.waiting_bytes += weight
        stats.waiting += 1
        self._items.append(item)
        count = len(self._items)
        if count <= FIRST or count % EVERY == 1:
            stats.mark()
        if count == self._max_size:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._due.set)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"busload-{self._name}")
        return True

    def flush_soon(self) -> None:
        """Flush what is held without waiting for more items."""
        if self._items:
            self._due.set()

    async def close(self, deadline: timedelta | None = None) -> list[T]:
        """Flush what is held and stop. A second call does no harm.

        After the deadline, stop anyway and return what could not be flushed.
        """
        self._closing = True
        self._room.set()
        self._due.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=None if deadline is None else deadline.total_seconds())
            if not self._task.done():
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=LAST_WORDS)  # a flush may ignore it
            if self._task.done() and not self._task.cancelled():
                self._task.result()
        if self._timer is not None:
            self._timer.cancel()
        if self._outage_is_mine:
            self._outage.close()
        left = list(self._items)
        self._items.clear()
        self.stats.waiting = self.stats.waiting_bytes = 0
        return left

    async def _run(self) -> None:
        running.set(None)  # the command whose result came first has begun this, but what is logged here is not its own
        while self._items or not self._closing:
            await self._due.wait()
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            # What has gathered leaves in full flushes and one last, smaller one.
            gathered = len(self._items)
            while gathered > 0:
                gathered -= await self._flush_once()
            # What came meanwhile has its own time to gather, unless it is a full flush already.
            if self._closing or len(self._items) >= self._max_size:
                self._due.set()

    async def _flush_once(self) -> int:
        """Flush some items until it succeeds. A part that never can is halved until the bad items stand alone."""
        items, merge, on_refused = self._next_items(), self._merge, self._on_refused
        parts: list[Sequence[T]] = [items]
        unwritten = 0

        async def flush(part: Sequence[T]) -> None:
            nonlocal unwritten
            written = await self._flush(part)
            unwritten += len(part) - written if isinstance(written, int) else 0

        began = time.monotonic()
        self._watch(began)
        try:
            if merge is not None:

                async def fold() -> None:
                    parts[:] = filter(None, [list(merge(items))])

                await self._insist(fold, len(items), halve=False)
            while parts:
                part = parts[0]
                refused = await self._insist(partial(flush, part), len(part), halve=on_refused is not None)
                if refused is not None and len(part) > 1:
                    middle = len(part) // 2
                    parts[:1] = [part[:middle], part[middle:]]
                    continue
                if refused is not None and on_refused is not None:
                    await self._insist(partial(on_refused, part[0], refused), 1, halve=False)
                del parts[0]
        except BaseException:
            self._items.extendleft(reversed(list(chain(*parts))))  # still ours: close() hands it to the caller
            raise
        finally:
            if self._watching is not None:
                self._watching.cancel()
        weight = sum(map(self._weigh, items)) if self._weigh and self.stats.waiting_bytes else 0
        written = len(items) - unwritten
        self.stats.flushed(len(items), weight, time.monotonic() - began, written)
        flushed, took = counted(len(items), "item"), 1000 * self.stats.last_flush
        log.debug("The %s flushed %s in %.1f ms and wrote %d", self._name, flushed, took, written)
        if self.stats.waiting < self._capacity:
            self._room.set()
        await asyncio.sleep(0)  # to make the next flush takes a millisecond, as did this one's end: let others between
        return len(items)

    def _next_items(self) -> list[T]:
        """As many items as fit into a flush; at least one, whatever its size."""
        if self._weigh is None or self.stats.waiting_bytes <= self._max_bytes:
            count = min(self._max_size, len(self._items))
        else:
            totals = accumulate(map(self._weigh, islice(self._items, self._max_size)))
            count = max(1, sum(total <= self._max_bytes for total in totals))
        return [self._items.popleft() for _ in range(count)]

    def _watch(self, began: float) -> None:
        """Look later whether a flush is still under way while the coalescer is nearly full."""
        after = max(self._warn_after, self._no_warning_until - time.monotonic())
        self._watching = asyncio.get_running_loop().call_later(after, self._warn_of_standstill, began)

    def _warn_of_standstill(self, began: float) -> None:
        now = time.monotonic()
        is_known = self._closing or self._outage.is_away  # the log says so already
        if self.stats.fullness >= NEARLY_FULL and not is_known:
            self._no_warning_until = now + SAY_EVERY
            log.warning(
                "The %s is %.0f %% full, and no flush has ended for %.0f s: look what its statements wait for",
                self._name,
                100 * self.stats.fullness,
                now - began,
            )
        self._watch(began)

    async def _insist(self, attempt: Callable[[], Awaitable[None]], count: int, *, halve: bool) -> Exception | None:
        """Try until it succeeds, with pauses that grow; or return the error if halves may succeed.

        Halves may succeed if the flush took too long and, with `halve`, if an item causes the error.
        """
        backoff = Backoff()
        while True:
            try:
                await attempt()
                self._outage.worked(self._part, reached=True)
                return None
            except (Exception, asyncio.CancelledError) as error:
                refuse_cancelled()
                self.stats.failures += 1
                if (halve and isinstance(error, REFUSALS)) or (isinstance(error, TimeoutError) and count > 1):
                    log.debug("Flush of %s failed and is halved: %r", counted(count, "item"), error)
                    return error
                pause = backoff.pause()
                self._outage.failed(self._part, error, of=counted(count, "item"))
                await asyncio.sleep(pause)


def refuse_cancelled() -> None:
    """Raise `CancelledError` if this task is cancelled, rather than something that a flush had started.

    A statement that was cancelled while it failed by itself reports its failure instead.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError

"""Many outcomes, one statement: collects items and hands them over together."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from busload.errors import InvalidOperationError

log = logging.getLogger("busload")

T = TypeVar("T")
LONGEST_PAUSE = 5.0


@dataclass(slots=True)
class CoalescerStats:
    """What a coalescer has done so far; `waiting` is what it holds now, also while it is being flushed."""

    items: int = 0
    flushes: int = 0
    failures: int = 0
    waiting: int = 0


class Coalescer(Generic[T]):
    """Collects items and passes them to `flush`, at most `max_size` at a time.

    A flush begins when `max_size` items wait, when the oldest has waited `max_interval`, on `flush_soon()` and on
    close. While one is under way the next items gather. Items are kept until `flush` has returned: if it raises, the
    same items are passed again, after a pause that grows, so `flush` must be safe to repeat. When `capacity` items are
    held, `put` waits; nothing is ever dropped. `merge` may fold the items of a flush before it.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[T]], Awaitable[None]],
        *,
        max_size: int = 100,
        max_interval: timedelta = timedelta(milliseconds=100),
        capacity: int = 500,
        merge: Callable[[Sequence[T]], Sequence[T]] | None = None,
    ) -> None:
        if not 1 <= max_size <= capacity:
            raise ValueError(f"max_size must be from 1 to capacity ({capacity}), found {max_size}.")
        self.stats = CoalescerStats()
        self._flush, self._merge = flush, merge
        self._max_size, self._capacity = max_size, capacity
        self._interval = max_interval.total_seconds()
        self._items: deque[T] = deque()
        self._due = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def put(self, item: T) -> None:
        """Hand over an item; waits while the coalescer is full, and is refused once it is closed."""
        while self.stats.waiting >= self._capacity and not self._closing:
            self._room.clear()
            await self._room.wait()
        if self._closing:
            raise InvalidOperationError("The coalescer is closed and takes no more items.")
        self.stats.waiting += 1
        self._items.append(item)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="busload-coalescer")
        if len(self._items) >= self._max_size:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._due.set)

    def flush_soon(self) -> None:
        """Do not wait for more: nobody is about to hand over another item."""
        if self._items:
            self._due.set()

    async def close(self, deadline: timedelta | None = None) -> list[T]:
        """Flush what is held and stop. After the deadline, stop anyway and return what could not be flushed."""
        self._closing = True
        self._room.set()
        self._due.set()
        if self._task is not None:
            try:
                async with asyncio.timeout(None if deadline is None else deadline.total_seconds()):
                    await asyncio.shield(self._task)
            except TimeoutError:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        left = list(self._items)
        self._items.clear()
        return left

    async def _run(self) -> None:
        while self._items or not self._closing:
            await self._due.wait()
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            # What has gathered leaves in full flushes and one last, smaller one.
            for _ in range(-(-len(self._items) // self._max_size)):
                await self._flush_once()
            if self._items:
                self._due.set()

    async def _flush_once(self) -> None:
        items = [self._items.popleft() for _ in range(min(self._max_size, len(self._items)))]
        try:
            await self._repeat(items)
        except BaseException:
            self._items.extendleft(reversed(items))  # still ours: close() hands it to the caller
            raise
        self.stats.waiting -= len(items)
        self.stats.items += len(items)
        self.stats.flushes += 1
        if self.stats.waiting < self._capacity:
            self._room.set()

    async def _repeat(self, items: Sequence[T]) -> None:
        failures = 0
        while True:
            try:
                return await self._flush(self._merge(items) if self._merge else items)
            except Exception as error:
                failures += 1
                self.stats.failures += 1
                pause = min(LONGEST_PAUSE, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1)  # noqa: S311
                log.warning("Flush of %d items failed, they are kept, again in %.1f s: %r", len(items), pause, error)
                await asyncio.sleep(pause)

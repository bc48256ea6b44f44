"""Many items, one flush: nothing is dropped, whatever the flush does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from busload import Coalescer, InvalidOperationError
from tests.given import eventually

NEVER = timedelta(hours=1)
SOON = timedelta(milliseconds=5)


class Sink:
    """What was flushed; can be made to wait or to fail."""

    def __init__(self) -> None:
        self.flushes: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.failures = 0
        self.tries = 0

    async def __call__(self, items: Sequence[int]) -> None:
        self.tries += 1
        await self.open.wait()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("gone")
        self.flushes.append(list(items))

    @property
    def items(self) -> list[int]:
        return [item for flush in self.flushes for item in flush]


async def test_a_full_coalescer_flushes_at_once() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=3, max_interval=NEVER)
    for item in range(3):
        await coalescer.put(item)
    await eventually(lambda: sink.flushes == [[0, 1, 2]])
    await coalescer.close()


async def test_the_oldest_item_waits_no_longer_than_the_interval() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_interval=SOON)
    await coalescer.put(1)
    await eventually(lambda: sink.flushes == [[1]])
    await coalescer.put(2)
    await eventually(lambda: sink.flushes == [[1], [2]])
    await coalescer.close()


async def test_below_size_and_interval_nothing_is_flushed_until_asked() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=10, max_interval=NEVER)
    await coalescer.put(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert sink.flushes == []
    coalescer.flush_soon()
    await eventually(lambda: sink.flushes == [[1]])
    await coalescer.close()


async def test_no_flush_is_larger_than_max_size() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=4, max_interval=NEVER, capacity=100)
    sink.open.clear()
    for item in range(50):
        await coalescer.put(item)
    sink.open.set()
    assert await coalescer.close() == []
    assert sink.items == list(range(50))
    assert max(map(len, sink.flushes)) == 4 and len(sink.flushes) <= 14


async def test_while_one_flush_is_under_way_the_next_items_gather() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=100, max_interval=SOON)
    sink.open.clear()
    await coalescer.put(0)
    await eventually(lambda: sink.tries == 1)
    for item in range(1, 20):
        await coalescer.put(item)
    sink.open.set()
    await eventually(lambda: len(sink.items) == 20)
    assert sink.flushes[0] == [0] and len(sink.flushes) == 2
    await coalescer.close()


async def test_when_it_is_full_put_waits_and_nothing_is_dropped() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=2, max_interval=SOON, capacity=6)
    sink.open.clear()
    puts = [asyncio.create_task(coalescer.put(item)) for item in range(20)]
    await eventually(lambda: sink.tries == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert sum(put.done() for put in puts) == 6 == coalescer.stats.waiting
    sink.open.set()
    await asyncio.gather(*puts)
    await coalescer.close()
    assert sorted(sink.items) == list(range(20))
    assert coalescer.stats.waiting == 0


async def test_many_producers_never_exceed_the_capacity() -> None:
    most = 0

    async def flush(items: Sequence[int]) -> None:
        nonlocal most
        most = max(most, coalescer.stats.waiting)
        await asyncio.sleep(0)

    coalescer = Coalescer(flush, max_size=3, max_interval=SOON, capacity=5)

    async def produce(first: int) -> None:
        for item in range(first, first + 50):
            await coalescer.put(item)

    await asyncio.gather(*(produce(100 * n) for n in range(8)))
    await coalescer.close()
    assert coalescer.stats.items == 400 and most <= 5


async def test_a_flush_that_fails_is_repeated_with_the_same_items(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.failures = 2
    coalescer = Coalescer(sink, max_size=2, max_interval=SOON)
    await coalescer.put(1)
    await coalescer.put(2)
    await coalescer.put(3)
    await eventually(lambda: sink.items == [1, 2, 3])
    assert sink.flushes[0] == [1, 2]
    assert coalescer.stats.failures == 2 and coalescer.stats.items == 3
    assert "they are kept" in caplog.text
    await coalescer.close()


async def test_close_flushes_what_is_held() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=4, max_interval=NEVER)
    for item in range(6):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert sink.items == [0, 1, 2, 3, 4, 5]


async def test_close_waits_for_the_flush_under_way() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=1, max_interval=NEVER)
    sink.open.clear()
    await coalescer.put(1)
    await eventually(lambda: sink.tries == 1)
    closing = asyncio.create_task(coalescer.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    sink.open.set()
    assert await closing == []
    assert sink.items == [1]


async def test_close_repeats_a_failing_flush_until_the_deadline_and_returns_the_rest() -> None:
    sink = Sink()
    sink.failures = 10**6
    coalescer = Coalescer(sink, max_size=2, max_interval=SOON)
    for item in range(5):
        await coalescer.put(item)
    assert await coalescer.close(timedelta(milliseconds=150)) == [0, 1, 2, 3, 4]
    assert sink.items == []


async def test_close_returns_at_its_deadline_although_a_flush_hangs() -> None:
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=1, max_interval=NEVER)
    await coalescer.put(1)
    await eventually(lambda: sink.tries == 1)
    await coalescer.put(2)
    async with asyncio.timeout(5):
        assert await coalescer.close(timedelta(milliseconds=50)) == [1, 2]


async def test_put_after_close_is_refused() -> None:
    sink = Sink()
    coalescer: Coalescer[int] = Coalescer(sink)
    await coalescer.close()
    with pytest.raises(InvalidOperationError, match="closed"):
        await coalescer.put(1)


async def test_a_put_that_waits_for_room_is_refused_by_close_and_not_left_hanging() -> None:
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=1, max_interval=NEVER, capacity=1)
    await coalescer.put(1)
    waiting = asyncio.create_task(coalescer.put(2))
    await eventually(lambda: sink.tries == 1)
    closing = asyncio.create_task(coalescer.close())
    with pytest.raises(InvalidOperationError):
        await waiting
    sink.open.set()
    assert await closing == []
    assert sink.items == [1]


async def test_closing_twice_is_harmless() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_interval=NEVER)
    await coalescer.put(1)
    first, second = await asyncio.gather(coalescer.close(), coalescer.close())
    assert first == second == []
    assert await coalescer.close() == []
    assert sink.flushes == [[1]]


async def test_closing_one_that_was_never_used_is_harmless() -> None:
    assert await Coalescer(Sink()).close(timedelta(0)) == []


async def test_merge_folds_the_items_of_a_flush() -> None:
    sink = Sink()

    def last_of_each_parity(items: Sequence[int]) -> Sequence[int]:
        return list({item % 2: item for item in items}.values())

    coalescer = Coalescer(sink, max_size=10, max_interval=NEVER, merge=last_of_each_parity)
    for item in range(6):
        await coalescer.put(item)
    await coalescer.close()
    assert sink.flushes == [[4, 5]]
    assert coalescer.stats.items == 6 and coalescer.stats.waiting == 0


async def test_stats_tell_what_was_done() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=2, max_interval=NEVER)
    for item in range(5):
        await coalescer.put(item)
    await coalescer.close()
    stats = coalescer.stats
    assert (stats.items, stats.flushes, stats.failures, stats.waiting) == (5, 3, 0, 0)


@pytest.mark.parametrize("options", [{"max_size": 0}, {"max_size": 11, "capacity": 10}, {"max_size": -1}])
def test_impossible_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_size must be from 1 to capacity"):
        Coalescer(Sink, **options)  # type: ignore[arg-type]


async def test_a_cancelled_put_leaves_nothing_half_done() -> None:
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=1, max_interval=NEVER, capacity=1)
    await coalescer.put(1)
    waiting = asyncio.create_task(coalescer.put(2))
    await eventually(lambda: sink.tries == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    sink.open.set()
    await coalescer.put(3)
    await coalescer.close()
    assert sink.items == [1, 3]


async def test_peer_sidekiq_5909() -> None:
    """A local buffer that overflows drops jobs without a word."""
    sink = Sink()
    sink.failures = 3
    coalescer = Coalescer(sink, max_size=5, max_interval=SOON, capacity=10)
    await asyncio.gather(*(coalescer.put(item) for item in range(200)))
    await coalescer.close()
    assert sorted(sink.items) == list(range(200))


async def test_peer_river_258() -> None:
    """A completer gives up on the rest of a batch after repeated failure."""
    sink = Sink()
    sink.failures = 4
    coalescer = Coalescer(sink, max_size=2, max_interval=SOON)
    for item in range(7):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert sink.items == list(range(7))

"""Many items, one flush: nothing is dropped, whatever the flush does."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busload.errors import InvalidOperationError
from busload.worker import Coalescer
from busload.worker.stats import EVERY
from tests.given import eventually

NEVER = timedelta(hours=1)
SOON = timedelta(milliseconds=5)


class Sink:
    """What was flushed; can be made to wait, to fail, and to refuse some items for good."""

    def __init__(self, *, refuses: Sequence[int] = (), error: type[Exception] = psycopg.DataError) -> None:
        self.flushes: list[list[int]] = []
        self.refused: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.failures = 0
        self.tries = 0
        self.fails_at = -1
        self._calls = 0
        self._refuses, self._error = set(refuses), error

    async def __call__(self, items: Sequence[int]) -> None:
        self.tries += 1
        await self.open.wait()
        self._fail()
        if not self._refuses.isdisjoint(items):
            raise self._error("one of them cannot be stored")
        self.flushes.append(list(items))

    async def refuse(self, item: int, error: Exception) -> None:
        self._fail()
        assert isinstance(error, self._error)
        self.refused.append(item)

    def _fail(self) -> None:
        self._calls += 1
        if self._calls == self.fails_at:
            raise ConnectionError("gone")
        if self.failures:
            self.failures -= 1
            raise ConnectionError("gone")

    @property
    def items(self) -> list[int]:
        return [item for flush in self.flushes for item in flush]


async def turns(count: int = 20) -> None:
    """Let everything that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that failed is repeated at once."""
    monkeypatch.setattr("busload.postgres.backoff.LONGEST_PAUSE", 0.0005)


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


async def test_a_flush_by_size_restarts_the_interval() -> None:
    """What comes after it has the whole interval to find company."""
    flushed: dict[int, float] = {}

    async def flush(items: Sequence[int]) -> None:
        flushed.update(dict.fromkeys(items, time.monotonic()))

    interval = 0.3
    coalescer = Coalescer(flush, max_size=2, max_interval=timedelta(seconds=interval))
    began = time.monotonic()
    await coalescer.put(0)
    await eventually(lambda: time.monotonic() > began + interval / 2)
    await coalescer.put(1)
    await eventually(lambda: flushed.keys() == {0, 1})
    put_at = time.monotonic()
    await coalescer.put(2)
    await eventually(lambda: 2 in flushed)
    assert flushed[2] - put_at >= 0.99 * interval
    await coalescer.close()


async def test_flushing_nothing_is_a_no_op() -> None:
    """Nothing waits when it is asked to, when the interval of what was flushed is over, and on close."""
    sink = Sink()
    merged: list[int] = []

    def merge(items: Sequence[int]) -> Sequence[int]:
        merged.append(len(items))
        return items

    coalescer = Coalescer(sink, max_size=3, max_interval=SOON, merge=merge)
    coalescer.flush_soon()
    await turns()
    for item in range(3):
        await coalescer.put(item)
    over = time.monotonic() + 4 * SOON.total_seconds()
    await eventually(lambda: time.monotonic() > over)
    coalescer.flush_soon()
    await turns()
    assert await coalescer.close() == []
    assert sink.flushes == [[0, 1, 2]] and sink.tries == 1 and merged == [3]
    assert coalescer.stats.flushes == 1


async def test_no_flush_is_larger_than_max_size() -> None:
    """Also not on close, when everything leaves at once."""
    sink = Sink()
    coalescer = Coalescer(sink, max_size=4, max_interval=NEVER, capacity=100)
    sink.open.clear()
    for item in range(50):
        await coalescer.put(item)
    sink.open.set()
    assert await coalescer.close() == []
    assert sink.items == list(range(50))
    assert max(map(len, sink.flushes)) == 4 and len(sink.flushes) <= 14


async def test_between_two_flushes_the_event_loop_goes_round() -> None:
    loop = asyncio.get_running_loop()
    rounds, flushed_in = 0, Counter[int]()
    counting: asyncio.Handle

    def count_round() -> None:
        nonlocal rounds, counting
        rounds += 1
        counting = loop.call_soon(count_round)

    async def flush(items: Sequence[int]) -> None:
        flushed_in[rounds] += 1

    coalescer = Coalescer(flush, max_size=1, max_interval=NEVER, capacity=100)
    counting = loop.call_soon(count_round)
    try:
        for item in range(20):
            await coalescer.put(item)
        await eventually(lambda: flushed_in.total() == 20)
    finally:
        counting.cancel()
        await coalescer.close(NEVER)
    assert max(flushed_in.values()) == 1


async def test_items_are_flushed_in_the_order_they_came() -> None:
    sink = Sink()
    sink.failures = 2
    coalescer = Coalescer(sink, max_size=7, max_interval=SOON, capacity=20)
    for item in range(200):
        await coalescer.put(item)
    await coalescer.close()
    assert sink.items == list(range(200))


async def test_while_one_flush_is_under_way_the_next_items_gather() -> None:
    """A slow flush does not stall the intake."""
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


async def test_the_first_that_has_to_wait_says_so_and_names_its_item(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=1, max_interval=NEVER, capacity=2, name="tills")
    puts = [asyncio.create_task(coalescer.put(item)) for item in (11, 12, 713, 714, 715)]
    await eventually(lambda: sink.tries == 1)
    await turns()
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in said] == [
        "The tills is full with 2 items; waiting to hand over 713",
    ]
    sink.open.set()
    await asyncio.gather(*puts)
    await coalescer.close()
    assert sink.items == [11, 12, 713, 714, 715]


async def test_offer_says_no_when_it_is_full_and_changes_nothing() -> None:
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=2, max_interval=NEVER, capacity=2)
    assert coalescer.offer(1) and coalescer.offer(2)
    assert not coalescer.offer(3)
    assert coalescer.stats.waiting == 2
    sink.open.set()
    await coalescer.close()
    assert sink.items == [1, 2]
    with pytest.raises(InvalidOperationError, match="closed"):
        coalescer.offer(4)


async def test_one_that_is_busy_and_nearly_full_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    """As long as flushes end, somebody who looks finds nothing to do."""
    looks = 0

    async def flush(items: Sequence[int]) -> None:
        nonlocal looks
        looks += coalescer.stats.fullness >= 0.8
        await asyncio.sleep(0.01)

    coalescer = Coalescer(flush, max_size=2, max_interval=NEVER, capacity=10, warn_after=timedelta(seconds=0.2))
    item = 0
    while looks < 50:
        while coalescer.offer(item):
            item += 1
        await asyncio.sleep(0)
    await coalescer.close()
    assert caplog.text == ""


def weigh(item: int) -> int:
    return item


async def test_a_flush_ends_at_max_bytes() -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=100, max_interval=NEVER, weigh=weigh, max_bytes=10)
    for item in [4, 4, 4, 2, 2, 9, 1, 10, 1]:
        assert coalescer.offer(item)
    assert coalescer.stats.waiting_bytes == 37
    assert await coalescer.close() == []
    assert sink.flushes == [[4, 4], [4, 2, 2], [9, 1], [10], [1]]
    assert coalescer.stats.waiting_bytes == 0


async def test_put_waits_while_four_times_max_bytes_are_held() -> None:
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=100, max_interval=SOON, weigh=weigh, max_bytes=10)
    for _ in range(10):
        assert coalescer.offer(4)
    assert not coalescer.offer(1)
    assert (coalescer.stats.waiting, coalescer.stats.waiting_bytes) == (10, 40)
    waiting = asyncio.create_task(coalescer.put(1))
    await turns()
    assert not waiting.done()
    sink.open.set()
    await waiting
    await coalescer.close()
    assert sum(sink.items) == 41 and coalescer.stats.waiting_bytes == 0


@pytest.mark.parametrize("before", [0, 1, 40])
async def test_one_item_heavier_than_everything_still_goes_through_and_alone(before: int) -> None:
    sink = Sink()
    coalescer = Coalescer(sink, max_size=100, max_interval=SOON, weigh=weigh, max_bytes=10)
    for _ in range(before):
        assert coalescer.offer(1)
    async with asyncio.timeout(25):
        await coalescer.put(1000)
        await coalescer.put(2)
        await coalescer.close()
    assert [1000] in sink.flushes and sink.items == [1] * before + [1000, 2]
    assert coalescer.stats.waiting_bytes == 0


async def test_one_that_is_full_of_bytes_does_not_wait_for_the_interval() -> None:
    """Nobody can hand over another item, so waiting for more would only be waiting."""
    sink = Sink()
    coalescer = Coalescer(sink, max_size=100, max_interval=NEVER, weigh=weigh, max_bytes=10)
    async with asyncio.timeout(25):
        for item in [10, 10, 10, 10, 5, 39]:
            await coalescer.put(item)
    await coalescer.close()
    assert sink.items == [10, 10, 10, 10, 5, 39]


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
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("A flush of the coalescer, whose items are kept, failed with 2 items, trying again: ")
    assert "gone" in said[0] and "works again after" in said[1]
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
    async with asyncio.timeout(25):
        assert await coalescer.close(timedelta(milliseconds=50)) == [1, 2]


async def test_closing_again_after_the_deadline_is_harmless() -> None:
    """What was left has been handed over already."""
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=1, max_interval=NEVER)
    await coalescer.put(1)
    await eventually(lambda: sink.tries == 1)
    deadline = timedelta(milliseconds=20)
    first, patient = await asyncio.gather(coalescer.close(deadline), coalescer.close())
    assert sorted(first + patient) == [1]
    assert await coalescer.close() == []
    assert await coalescer.close(deadline) == []
    assert (coalescer.stats.waiting, coalescer.stats.fullness) == (0, 0.0)


async def test_what_a_halved_flush_has_written_is_not_returned_by_close() -> None:
    """The guilty item's report hangs when the deadline comes; the half before it was flushed, the one after was not."""
    sink = Sink(refuses=[5])
    hangs = asyncio.Event()

    async def hang(item: int, error: Exception) -> None:
        hangs.set()
        await asyncio.Event().wait()

    coalescer = Coalescer(sink, max_size=8, max_interval=NEVER, on_refused=hang)
    for item in range(8):
        await coalescer.put(item)
    await asyncio.wait_for(hangs.wait(), 25)
    left = await coalescer.close(timedelta(milliseconds=20))
    assert sink.items == [0, 1, 2, 3, 4]
    assert left == [5, 6, 7]


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
    async with asyncio.timeout(25):
        with pytest.raises(InvalidOperationError):
            await waiting
    sink.open.set()
    assert await closing == []
    assert sink.items == [1]


@pytest.mark.parametrize("rounds", range(20))
async def test_an_item_handed_over_while_it_closes_is_flushed_or_refused(rounds: int) -> None:
    """10,000 items race with close; none blocks, none is lost, none is taken after a refusal."""
    sink = Sink()
    coalescer = Coalescer(sink, max_size=5, max_interval=SOON, capacity=20)
    accepted: list[int] = []
    refused: list[int] = []

    async def produce(first: int) -> None:
        for item in range(first, first + 50):
            try:
                await coalescer.put(item)
            except InvalidOperationError:
                refused.append(item)
            else:
                accepted.append(item)

    async with asyncio.timeout(25):
        producers = [asyncio.create_task(produce(50 * n)) for n in range(10)]
        await turns(5 * rounds)
        left, *_ = await asyncio.gather(coalescer.close(), *producers)
    assert left == []
    assert sorted(sink.items) == sorted(accepted)
    assert sorted(accepted + refused) == list(range(500))


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
    stats = coalescer.stats
    assert (stats.flush_size, stats.rate, stats.latency(50), stats.fullness, stats.saved) == (0, 0, 0, 0, 0)
    for item in range(5):
        await coalescer.put(item)
    await coalescer.close()
    assert (stats.items, stats.flushes, stats.failures, stats.waiting) == (5, 3, 0, 0)
    assert (stats.saved, stats.flush_size) == (2, 5 / 3) and stats.rate > 0


async def test_stats_add_up_at_every_moment(impatient: None) -> None:
    """What waits and what was flushed is what was handed over, whatever went wrong in between."""
    sink = Sink(refuses=[3, 50])
    sink.failures = 3
    coalescer = Coalescer(sink, max_size=8, max_interval=SOON, capacity=32, weigh=weigh, on_refused=sink.refuse)
    stats = coalescer.stats
    given = weight = 0
    for item in range(100):
        await coalescer.put(item)
        given, weight = given + 1, weight + item
        assert stats.items + stats.waiting == given
        assert stats.waiting_bytes <= weight and 0 <= stats.fullness <= 1
        assert stats.fullness == stats.waiting / 32
    await coalescer.close()
    assert (stats.items, stats.waiting, stats.waiting_bytes, stats.fullness) == (100, 0, 0, 0.0)
    assert len(sink.items) + len(sink.refused) == 100
    assert 100 / 8 <= stats.flushes <= 100 and stats.saved == 100 - stats.flushes
    assert stats.failures >= 3 + 2


async def test_latency_is_the_time_from_put_to_the_end_of_the_flush() -> None:
    sink = Sink()
    sink.open.clear()
    coalescer = Coalescer(sink, max_size=4 * EVERY, max_interval=NEVER)
    began = time.monotonic()
    for item in range(4 * EVERY):
        await coalescer.put(item)
    await eventually(lambda: time.monotonic() > began + 0.1)
    assert coalescer.stats.latency(99) == 0.0
    sink.open.set()
    await coalescer.close()
    took = time.monotonic() - began
    stats = coalescer.stats
    assert 0.09 < stats.latency(50) <= stats.latency(95) <= stats.latency(99) <= took
    assert 0.09 < stats.last_flush <= took


@pytest.mark.parametrize("options", [{"max_size": 0}, {"max_size": 11, "capacity": 10}, {"max_size": -1}])
def test_impossible_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_size must be from 1 to capacity"):
        Coalescer(Sink, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"max_interval": timedelta(seconds=-1)}, {"max_bytes": 0}])
def test_impossible_bounds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Coalescer(Sink, **options)  # type: ignore[arg-type]


# -- what can never be stored ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 1000, 1024])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
async def test_one_bad_item_is_found_in_a_few_flushes_and_the_others_are_flushed(count: int, place: str) -> None:
    """Of n items at most 2 log n + 1 further flushes."""
    bad = {"first": 0, "middle": count // 2, "last": count - 1}[place]
    sink = Sink(refuses=[bad])
    coalescer = Coalescer(sink, max_size=count, max_interval=NEVER, capacity=count, on_refused=sink.refuse)
    for item in range(count):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert sink.refused == [bad]
    assert sink.items == [item for item in range(count) if item != bad]
    assert sink.tries - 1 <= 2 * math.ceil(math.log2(count)) + 1
    assert (coalescer.stats.items, coalescer.stats.flushes, coalescer.stats.waiting) == (count, 1, 0)


@pytest.mark.parametrize("error", [psycopg.DataError, psycopg.IntegrityError, psycopg.errors.UntranslatableCharacter])
async def test_each_of_several_bad_items_is_reported_once(error: type[Exception]) -> None:
    bad = [0, 1, 40, 41, 63, 64, 99]
    sink = Sink(refuses=bad, error=error)
    coalescer = Coalescer(sink, max_size=64, max_interval=NEVER, on_refused=sink.refuse)
    for item in range(100):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert sink.refused == bad
    assert sink.items == [item for item in range(100) if item not in bad]


@pytest.mark.parametrize("call", range(1, 7))
async def test_a_passing_failure_among_refusals_is_repeated(impatient: None, call: int) -> None:
    """Of the flush, of any part of it, and of the report: none of them loses an item or blames another one."""
    sink = Sink(refuses=[2])
    sink.fails_at = call
    coalescer = Coalescer(sink, max_size=4, max_interval=NEVER, on_refused=sink.refuse)
    for item in range(4):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert (sink.items, sink.refused) == ([0, 1, 3], [2])
    assert coalescer.stats.failures == 4  # the refusals of 4, 2 and 1 items, and the one that passed


async def test_a_report_that_fails_is_repeated(impatient: None) -> None:
    sink = Sink(refuses=[1])
    reports = []

    async def report(item: int, error: Exception) -> None:
        reports.append(item)
        if len(reports) < 3:
            raise psycopg.OperationalError("not now")
        if len(reports) < 5:
            raise psycopg.DataError("not this either")  # about the report: nothing is left to be halved

    coalescer = Coalescer(sink, max_size=3, max_interval=NEVER, on_refused=report)
    for item in range(3):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert reports == [1] * 5 and sink.items == [0, 2]


@pytest.mark.parametrize("error", [psycopg.OperationalError, psycopg.errors.DeadlockDetected, ConnectionError])
async def test_an_error_about_no_single_item_is_repeated_and_not_halved(
    impatient: None, error: type[Exception]
) -> None:
    sizes = []

    async def flush(items: Sequence[int]) -> None:
        sizes.append(len(items))
        if len(sizes) < 4:
            raise error("not now")

    sink = Sink()
    coalescer = Coalescer(flush, max_size=10, max_interval=NEVER, on_refused=sink.refuse)
    for item in range(10):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert sizes == [10] * 4 and sink.refused == []


async def test_without_on_refused_a_data_error_is_repeated_like_any_other(
    impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = []

    async def flush(items: Sequence[int]) -> None:
        sizes.append(len(items))
        if len(sizes) < 4:
            raise psycopg.DataError("no")

    coalescer = Coalescer(flush, max_size=10, max_interval=NEVER)
    for item in range(10):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert sizes == [10] * 4
    assert caplog.text.count("whose items are kept, failed with 10 items, trying again") == 1


async def test_a_folded_flush_is_halved_as_it_was_folded() -> None:
    """Otherwise what lost the fold would be flushed by the other half."""
    sink = Sink(refuses=[33])

    def largest_of_each_ten(items: Sequence[int]) -> Sequence[int]:
        return list({item // 10: item for item in sorted(items)}.values())

    coalescer = Coalescer(sink, max_size=8, max_interval=NEVER, merge=largest_of_each_ten, on_refused=sink.refuse)
    for item in [11, 21, 31, 41, 12, 22, 33, 42]:
        await coalescer.put(item)
    await coalescer.close()
    assert sorted(sink.items) == [12, 22, 42] and sink.refused == [33]
    assert (coalescer.stats.items, coalescer.stats.waiting) == (8, 0)


# -- whatever happens -----------------------------------------------------------------------------------------------


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(0, 10)),
    max_bytes=st.integers(1, 40),
    producers=st.lists(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=12), min_size=1, max_size=5),
    answers=st.lists(st.sampled_from(["fine", "fine", "slow", "lost", "hung"]), max_size=12),
    cancelled=st.sets(st.integers(0, 4)),
    close_after=st.integers(0, 40),
    interval=st.sampled_from([timedelta(0), SOON, NEVER]),
    deadline=st.sampled_from([None, timedelta(0), timedelta(milliseconds=5)]),
)
def test_every_item_is_flushed_refused_or_returned_exactly_once(
    impatient: None,
    sizes: tuple[int, int],
    max_bytes: int,
    producers: list[list[tuple[int, bool]]],
    answers: list[str],
    cancelled: set[int],
    close_after: int,
    interval: timedelta,
    deadline: timedelta | None,
) -> None:
    """Whatever fails, is refused, is cancelled or closed, in whichever order."""
    max_size, spare = sizes
    items = [(n, k, *item) for n, share in enumerate(producers) for k, item in enumerate(share)]
    flushed: list[Any] = []
    refused: list[Any] = []
    accepted: list[Any] = []
    rejected: list[Any] = []
    largest = 0

    async def answer() -> None:
        match answers.pop() if answers else "fine":
            case "slow":
                await turns(7)
            case "lost":
                await turns(2)
                raise ConnectionError("gone")
            case "hung" if deadline is not None:
                await asyncio.Event().wait()

    async def flush(batch: Sequence[Any]) -> None:
        nonlocal largest
        largest = max(largest, len(batch))
        await answer()
        if any(bad for _, _, _, bad in batch):
            raise psycopg.DataError("no")
        flushed.extend(batch)

    async def on_refused(item: Any, error: Exception) -> None:
        await answer()
        refused.append(item)

    async def scenario() -> list[Any]:
        coalescer: Coalescer[Any] = Coalescer(
            flush,
            max_size=max_size,
            capacity=max_size + spare,
            max_interval=interval,
            weigh=lambda item: item[2],
            max_bytes=max_bytes,
            on_refused=on_refused,
        )

        async def produce(n: int) -> None:
            for item in (item for item in items if item[0] == n):
                try:
                    await coalescer.put(item)
                except InvalidOperationError:
                    rejected.append(item)
                else:
                    accepted.append(item)
                if item[1] % 3 == 2:
                    coalescer.flush_soon()
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(produce(n)) for n in range(len(producers))]
        await turns(close_after)
        for n in cancelled & set(range(len(tasks))):
            tasks[n].cancel()
        async with asyncio.timeout(25):
            left, *_ = await asyncio.gather(coalescer.close(deadline), *tasks, return_exceptions=True)
            assert isinstance(left, list)
            assert await coalescer.close(deadline) == []
        assert coalescer.stats.waiting == coalescer.stats.waiting_bytes == 0
        return left

    left = asyncio.run(scenario())
    assert Counter(flushed + refused + left) == Counter(accepted)
    assert all(item[3] for item in refused) and not any(item[3] for item in flushed)
    assert set(rejected).isdisjoint(accepted)
    assert largest <= max_size
    if deadline is None:
        assert left == []


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


async def test_a_flush_that_takes_too_long_is_halved_until_it_does_not() -> None:
    """The same again would take as long again, and nothing would ever leave."""
    tries: list[int] = []
    flushed: list[int] = []

    async def flush(items: Sequence[int]) -> None:
        tries.append(len(items))
        if len(items) > 3:
            raise TimeoutError
        flushed.extend(items)

    coalescer = Coalescer(flush, max_size=10, max_interval=NEVER)
    for item in range(10):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert flushed == list(range(10))
    assert tries == [10, 5, 2, 3, 5, 2, 3]


async def test_what_merge_returns_may_be_anything_to_go_through_and_nothing_at_all() -> None:
    flushes: list[list[int]] = []

    async def flush(items: Sequence[int]) -> None:
        flushes.append(list(items))

    coalescer = Coalescer(flush, max_size=2, max_interval=NEVER, merge=lambda items: (i for i in items if i > 1))  # type: ignore[arg-type, return-value]
    for item in range(4):
        await coalescer.put(item)
    assert await coalescer.close() == []
    assert flushes == [[2, 3]]
    assert coalescer.stats.items == 4


@pytest.mark.parametrize("wrong", [{"max_size": 2.5}, {"capacity": "10"}, {"max_bytes": True}])
def test_sizes_are_whole_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        Coalescer(Sink(), **wrong)

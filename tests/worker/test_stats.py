"""What a worker says about itself: its figures are those of the database, and its log and metrics repeat them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from busload import BusinessRuleError, Command, CommandBus, HandlerContext, PermanentCommandError, TransientCommandError
from busload.commands import claim, rescue
from busload.settings import LONGEST_FLUSH_EVERY
from busload.sync.plan import perform
from busload.worker import Coalescer, CoalescerStats, WorkerStats
from busload.worker import stats as stats_module
from busload.worker.metrics import metrics_text
from busload.worker.stats import Report, percentile
from tests.given import DOMAIN, Database, Given, eventually, raising

NEVER = timedelta(hours=1)


class Gate:
    """A flush that waits until it is let through, and then fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.open = asyncio.Event()
        self.tries, self.failures = 0, failures

    async def __call__(self, items: Sequence[Any]) -> None:
        self.tries += 1
        await self.open.wait()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("gone")


def opened(failures: int = 0) -> Gate:
    gate = Gate(failures)
    gate.open.set()
    return gate


# The coalescer's figures


async def test_flush_size_and_saved_transactions_are_those_of_the_flushes() -> None:
    """Average batch size, and transactions against one per item."""
    coalescer = Coalescer(opened(), max_size=25, max_interval=NEVER)
    assert (coalescer.stats.flush_size, coalescer.stats.saved_share) == (0, 0)
    for item in range(100):
        await coalescer.put(item)
    await coalescer.close()
    stats = coalescer.stats
    assert (stats.items, stats.flushes, stats.flush_size) == (100, 4, 25)
    assert (stats.saved, stats.saved_share) == (96, 0.96)


async def test_latency_is_from_put_to_the_end_of_the_flush() -> None:
    """Update latency, also of an item that waits for a slow flush before its own quick one."""
    gate = Gate()
    coalescer = Coalescer(gate, max_size=1, max_interval=NEVER)
    before_put = time.monotonic()
    await coalescer.put(1)
    await eventually(lambda: gate.tries == 1)
    await coalescer.put(2)
    after_put = time.monotonic()
    await eventually(lambda: time.monotonic() - after_put > 0.05)
    assert coalescer.stats.latency(50) == 0
    before_open = time.monotonic()
    gate.open.set()
    await coalescer.close()
    after_flush = time.monotonic()
    for percent in (1, 50, 95, 99):
        assert before_open - after_put <= coalescer.stats.latency(percent) <= after_flush - before_put
    assert coalescer.stats.measured == 2
    assert coalescer.stats.measured_seconds == pytest.approx(sum(map(coalescer.stats.latency, (50, 99))))


async def test_every_sixteenth_item_of_a_long_line_is_timed_and_stands_for_those_after_it() -> None:
    """The first 64 are timed one by one: small flushes have exact figures."""
    coalescer = Coalescer(opened(), max_size=100, max_interval=NEVER)
    for item in range(100):
        await coalescer.put(item)
    await coalescer.close()
    assert [count for _, count in coalescer.stats._waits] == [1] * 64 + [16, 16, 4]
    assert coalescer.stats.measured == 100


async def test_an_item_is_measured_by_the_flush_that_wrote_it_and_no_earlier_one() -> None:
    passes = asyncio.Semaphore(0)
    begun: list[int] = []

    async def flush(items: Sequence[int]) -> None:
        begun.extend(items)
        await passes.acquire()

    coalescer = Coalescer(flush, max_size=1, max_interval=NEVER)
    await coalescer.put(1)
    await eventually(lambda: begun == [1])
    await coalescer.put(2)
    passes.release()
    await eventually(lambda: begun == [1, 2])
    assert (coalescer.stats.items, coalescer.stats.measured) == (1, 1)
    passes.release()
    await coalescer.close()
    assert (coalescer.stats.items, coalescer.stats.measured) == (2, 2)


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 50), (95, 95), (99, 99), (100, 100), (0, 1)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, expected: float) -> None:
    assert percentile([(value, 1) for value in range(1, 101)], percent) == expected
    assert percentile([(7.0, 3)], percent) == 7
    assert percentile([], percent) == 0


def test_a_value_that_stands_for_many_weighs_as_much_as_they_do() -> None:
    assert [percentile([(1.0, 4), (5.0, 16)], percent) for percent in (20, 21, 50, 99)] == [1, 5, 5, 5]


async def test_the_rate_is_what_was_flushed_per_second() -> None:
    before = time.monotonic()
    coalescer = Coalescer(opened(), max_size=10, max_interval=NEVER)
    born = time.monotonic()
    for item in range(300):
        await coalescer.put(item)
    await coalescer.close()
    asked = time.monotonic()
    rate = coalescer.stats.rate
    assert 300 / (time.monotonic() - before) <= rate <= 300 / (asked - born)


def test_the_rate_forgets_what_is_older_than_ten_seconds() -> None:
    now = time.monotonic()
    stats = CoalescerStats(10, _born=now - 3600, _at=now)
    stats._seconds.extend([(int(now) - 11, 5000), (int(now) - 1, 40), (int(now), 10)])
    assert 5 <= stats.rate <= 50 / 9


async def test_a_flush_that_is_rolled_back_counts_as_a_failure_and_not_as_a_flush() -> None:
    """Rollbacks, and their share."""
    coalescer = Coalescer(opened(failures=2), max_size=1, max_interval=NEVER)
    await coalescer.put(1)
    await coalescer.put(2)
    assert await coalescer.close() == []
    assert (coalescer.stats.flushes, coalescer.stats.failures) == (2, 2)
    assert coalescer.stats.failed_share == 0.5


async def test_fullness_counts_what_is_being_flushed_and_remembers_the_worst() -> None:
    gate = Gate()
    coalescer = Coalescer(gate, max_size=2, max_interval=NEVER, capacity=10)
    for item in range(6):
        await coalescer.put(item)
    await eventually(lambda: gate.tries == 1)
    assert coalescer.stats.fullness == 0.6
    gate.open.set()
    await coalescer.close()
    assert coalescer.stats.fullness == 0
    assert coalescer.stats.most_waiting == 6


async def test_few_heavy_items_fill_it_as_many_light_ones_do() -> None:
    gate = Gate()
    coalescer = Coalescer(gate, max_size=10, max_interval=NEVER, capacity=100, weigh=len, max_bytes=100)
    await coalescer.put("x" * 300)
    assert coalescer.stats.fullness == 0.75
    gate.open.set()
    await coalescer.close()


async def test_a_coalescer_warns_when_it_is_nearly_full_and_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    """An alert at 80 %, before `put` has to wait, and once a minute at most."""
    gate = Gate()
    coalescer = Coalescer(
        gate, max_size=100, max_interval=NEVER, capacity=500, name="ledger", warn_after=timedelta(seconds=0.05)
    )
    for item in range(399):
        await coalescer.put(item)
    await eventually(lambda: gate.tries == 1)
    assert "full" not in caplog.text
    for item in range(399, 500):
        assert coalescer.offer(item)
    await eventually(lambda: "full" in caplog.text)
    [said] = [record for record in caplog.records if "full" in record.message]
    assert said.levelname == "WARNING"
    assert re.match(r"The ledger is \d+ % full, and no flush has ended for 0 s: look what its statements", said.message)
    gate.open.set()
    await coalescer.close()


async def test_a_coalescer_warns_when_it_fills_by_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it is full of."""
    gate = Gate()
    coalescer = Coalescer(
        gate,
        max_size=10,
        max_interval=NEVER,
        capacity=100,
        weigh=len,
        max_bytes=100,
        warn_after=timedelta(seconds=0.05),
    )
    await coalescer.put("x" * 350)
    coalescer.flush_soon()
    await eventually(lambda: gate.tries == 1)
    await eventually(lambda: "88 % full" in caplog.text)
    gate.open.set()
    await coalescer.close()


async def test_every_flush_says_its_size_and_duration_to_whoever_debugs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "busload")
    coalescer = Coalescer(opened(), max_size=3, max_interval=NEVER, name="ledger")
    for item in range(3):
        await coalescer.put(item)
    await coalescer.close()
    assert re.search(r"The ledger flushed 3 items in \d+\.\d ms and wrote 3", caplog.text)


async def test_a_snapshot_stays_and_since_tells_what_came_after_it() -> None:
    gate = opened(failures=1)
    coalescer = Coalescer(gate, max_size=2, max_interval=NEVER)
    for item in range(4):
        await coalescer.put(item)
    await eventually(lambda: coalescer.stats.items == 4)
    earlier = coalescer.stats.snapshot()
    for item in range(6):
        await coalescer.put(item)
    await coalescer.close()
    assert (earlier.items, earlier.flushes, earlier.failures, earlier.waiting) == (4, 2, 1, 0)
    period = coalescer.stats.since(earlier)
    assert (period.items, period.flushes, period.failures, period.flush_size) == (6, 3, 0, 2)
    assert period.measured == coalescer.stats.measured - earlier.measured == 6
    assert sum(count for _, count in period._waits) == 6
    assert coalescer.stats.items == 10


class Hurried(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that an hour of load takes a moment and no chance."""

    now = 0.0
    _ready: Sequence[Any]
    _scheduled: list[asyncio.TimerHandle]

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if timers and not self._ready:
            self.now = max(self.now, min(timers))
        super()._run_once()  # type: ignore[misc]


def under_load(per_minute: int, minutes: int, **options: Any) -> tuple[CoalescerStats, list[float]]:
    """What a coalescer does under a steady load, and how long each item waited."""
    waits: list[float] = []

    async def flush(items: Sequence[float]) -> None:
        now = asyncio.get_running_loop().time()
        waits.extend(now - put for put in items)

    async def load() -> CoalescerStats:
        clock = asyncio.get_running_loop().time
        coalescer: Coalescer[float] = Coalescer(flush, **options)
        began = clock()
        for n in range(per_minute * minutes):
            await asyncio.sleep(began + n * 60 / per_minute - clock())
            await coalescer.put(clock())
        await coalescer.close()
        return coalescer.stats

    with asyncio.Runner(loop_factory=Hurried) as runner, pytest.MonkeyPatch.context() as patched:
        patched.setattr("busload.worker.stats.time", SimpleNamespace(monotonic=runner.get_loop().time))
        return runner.run(load()), sorted(waits)


def true_percentile(waits: list[float], percent: float) -> float:
    return percentile([(wait, 1) for wait in waits], percent)


@pytest.mark.parametrize(
    ("per_minute", "size"), [(120, 100), (240, 100), (600, 100), (720, 100), (2400, 200), (2400, 50), (9600, 1000)]
)
def test_latencies_err_upwards_and_by_sixteen_items_at_most(per_minute: int, size: int) -> None:
    """Of flushes that are timed item by item the figures are exact."""
    stats, waits = under_load(per_minute, 1, max_size=size, max_interval=timedelta(seconds=5), capacity=5 * size)
    most = 15 * 60 / per_minute if min(size, per_minute / 12) > 64 else 0
    for percent in (1, 50, 95, 99, 100):
        true = true_percentile(waits, percent)
        assert true - 1e-6 <= stats.latency(percent) <= true + most + 1e-6, percent
    assert sum(waits) - 1e-6 <= stats.measured_seconds and stats.measured == len(waits)


@pytest.mark.parametrize(
    ("per_minute", "size", "a_minute"),
    [(480, (38, 42), (11, 13)), (600, (48, 52), (11, 13)), (720, (58, 62), (11, 13))],
)
def test_the_promised_figures_hold_under_the_promised_load(
    per_minute: int, size: tuple[int, int], a_minute: tuple[int, int]
) -> None:
    """At 480 to 720 updates a minute, 100 or 5 s: 40 to 60 a flush, 12 flushes a minute, under 5 s."""
    stats, waits = under_load(per_minute, 10, max_size=100, max_interval=timedelta(seconds=5), capacity=500)
    assert size[0] <= stats.flush_size <= size[1]
    assert a_minute[0] <= stats.flushes / 10 <= a_minute[1]
    assert stats.saved_share >= 0.95
    assert stats.most_waiting < 0.8 * stats.capacity
    assert 2 <= stats.latency(50) <= stats.latency(95) <= stats.latency(99) <= 5 + 1e-6
    assert stats.items == len(waits) == 10 * per_minute


@pytest.mark.parametrize(
    ("per_minute", "size", "saved"),
    [(6_000, 10, 0.89), (12_000, 20, 0.94), (60_000, 100, 0.985), (120_000, 100, 0.985)],
)
def test_a_flush_grows_with_the_load_until_it_is_full(per_minute: int, size: int, saved: float) -> None:
    """Size = rate × interval, up to max_size; 20 to a flush are 95 % of all transactions."""
    stats, waits = under_load(per_minute, 1, max_size=100, max_interval=timedelta(milliseconds=100), capacity=500)
    assert 0.9 * size <= stats.flush_size <= 1.1 * size
    assert stats.saved_share >= saved
    assert true_percentile(waits, 99) <= 0.1 + 1e-6


# The worker's figures


async def test_stats_agree_with_the_database(given: Given, database: Database) -> None:
    """Every count, and one transaction per flush, seen from the other side."""
    given.handler()
    given.handler("Park", raising(PermanentCommandError("closed")))
    given.handler("Refuse", raising(BusinessRuleError("never")))
    given.handler("Later", raising(TransientCommandError("busy")))
    for command_type, commands in {"Debit": 700, "Park": 5, "Refuse": 3, "Later": 2}.items():
        await given.batch(commands, command_type)
    worker = given.worker(concurrency=50)
    assert await worker.drain() == 710
    stats = worker.stats
    assert (stats.completed, stats.parked, stats.failed, stats.failed_attempts, stats.canceled) == (700, 5, 3, 2, 0)
    assert stats.claimed == stats.finished == stats.settled == stats.settlement.items == 710
    assert stats.claims > stats.empty_claims >= 1
    assert (stats.in_hand, stats.in_line, stats.handed_back, stats.late, stats.lost_leases) == (0, 0, 0, 0, 0)
    assert (stats.settlement.waiting, stats.settlement.failures) == (0, 0)
    assert stats.settlement.flushes == database.value("SELECT count(DISTINCT xmin::text) FROM busload.execution")
    assert stats.settlement.most_waiting <= stats.settlement.capacity
    assert 0 < stats.settlement.latency(50) <= stats.settlement.latency(99)


async def test_under_load_a_twentieth_of_the_transactions_is_left(given: Given, database: Database) -> None:
    """Transactions and trigger runs −95 %, completion accuracy 100 %."""
    given.handler()
    batch_id = await given.batch(commands=3000)
    worker = given.worker(concurrency=100)
    await worker.drain()
    assert worker.stats.settlement.saved_share >= 0.95
    assert database.value("SELECT count(DISTINCT xmin::text) FROM busload.execution") <= 150
    assert (await given.batch_now(batch_id)).completed_count == 3000


async def test_switched_off_every_result_has_a_transaction_of_its_own(given: Given, database: Database) -> None:
    """Back to direct updates by two settings."""
    given.handler()
    await given.batch(commands=30)
    worker = given.worker(settings=replace(given.settings, settle="immediate", flush_size=1))
    await worker.drain()
    assert (worker.stats.settlement.flushes, worker.stats.settlement.saved) == (30, 0)
    assert database.value("SELECT count(DISTINCT xmin::text) FROM busload.execution") == 30


async def test_an_immediate_result_does_not_wait_for_others(given: Given) -> None:
    """Although others are still running, and the interval is an hour."""
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    given.handler("Wait", wait)
    given.handler()
    await given.sent("Wait")
    settings = replace(given.settings, settle="immediate", flush_every=LONGEST_FLUSH_EVERY)
    async with given.running(settings=settings) as worker:
        await eventually(lambda: worker.stats.in_hand == 1)
        await given.sent()
        await eventually(lambda: worker.stats.completed == 1)
        assert worker.stats.in_hand == 1
        go.set()


async def test_stats_tell_what_a_worker_does_now(given: Given) -> None:
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    given.handler("Wait", wait)
    given.handler()
    settings = replace(given.settings, prefetch=timedelta(seconds=5))
    await given.batch(commands=300, priority=1)
    await given.batch(commands=40, command_type="Wait")
    worker = given.worker(concurrency=5, settings=settings)
    assert worker.stats == replace(worker.stats, claimed=0, in_hand=0, concurrency=5)
    running = asyncio.create_task(worker.run())
    # The pace of the first 300 has it hold the slow ones ahead.
    await eventually(lambda: worker.stats.in_hand == 40 and worker.stats.settlement.items == 300)
    stats = worker.stats
    assert (stats.claimed, stats.in_line, stats.finished, stats.completed) == (340, 35, 300, 300)
    assert stats.prefetch >= 35
    go.set()
    await eventually(lambda: worker.stats.completed == 340)
    assert stats.completed == 300  # a picture, not a window
    worker.stop()
    await running
    assert (worker.stats.claimed, worker.stats.in_hand, worker.stats.completed) == (340, 0, 340)


async def test_a_second_run_starts_from_zero_and_the_last_figures_stay_until_then(given: Given) -> None:
    given.handler()
    await given.batch(commands=10)
    worker = given.worker()
    await worker.drain()
    assert worker.stats.completed == worker.stats.settlement.items == 10
    assert worker.stats.settlement.rate == worker.stats.settlement.rate > 0
    await given.batch(commands=3)
    await worker.drain()
    assert worker.stats.completed == worker.stats.settlement.items == 3


async def test_what_is_handed_back_at_the_stop_is_counted(given: Given, database: Database) -> None:
    started = asyncio.Event()

    async def hang(command: Command, ctx: HandlerContext) -> None:
        started.set()
        await asyncio.Event().wait()

    given.handler("Debit", hang)
    await given.batch(commands=8)
    async with given.running(concurrency=8, settings=replace(given.settings, grace=timedelta(0))) as worker:
        await started.wait()
    assert (worker.stats.claimed, worker.stats.handed_back, worker.stats.finished) == (8, 8, 0)
    assert database.value("SELECT sum(hi - lo + 1) FROM busload.queue") == 8


async def test_what_has_no_handler_here_is_handed_back_and_counted(given: Given) -> None:
    given.handler()
    await given.batch(commands=4, command_type="Strange")
    worker = given.worker()
    await worker.drain()
    assert (worker.stats.claimed, worker.stats.handed_back, worker.stats.settled) == (4, 4, 0)


async def test_what_waits_too_long_for_a_slot_is_handed_back_counted_and_does_not_set_the_pace(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    """Prefetch is bounded by the lease; what was not run here says nothing about how fast this worker is."""
    caplog.set_level(logging.INFO, "busload")
    go = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await go.wait()

    given.handler("Wait", wait)
    given.handler()
    await given.batch(commands=300, priority=1)
    await given.batch(commands=400, command_type="Wait")
    async with given.running(concurrency=5, settings=replace(given.settings, lease_for=timedelta(seconds=4))) as worker:
        await eventually(lambda: worker.stats.handed_back and not worker.stats.prefetch)
        await eventually(lambda: worker.stats.claimed == 300 + 5 + worker.stats.handed_back)  # load by load
        stats = worker.stats
        assert caplog.text.count("Handing back") == 1
        assert (stats.in_hand, stats.in_line, stats.claimed) == (5, 0, 300 + 5 + stats.handed_back)
        go.set()
        await eventually(lambda: worker.stats.completed == 700)


async def test_a_lost_lease_and_its_late_results_are_counted(
    given: Given, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """As refused, and never as settled: in the figures, the metrics and the log."""
    caplog.set_level(logging.DEBUG, "busload")
    started, go = asyncio.Event(), asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        started.set()
        await go.wait()

    given.handler("Debit", wait)
    await given.batch(commands=3)
    settings = replace(given.settings, lease_for=timedelta(seconds=1.2))
    async with given.running(settings=settings) as worker:
        await started.wait()
        database.rows("DELETE FROM busload.lease")
        await eventually(lambda: worker.stats.lost_leases == 1)
        go.set()
        await eventually(lambda: worker.stats.settlement.taken == 3)
        stats = worker.stats
        assert (stats.late, stats.settled, stats.finished) == (3, 0, 3)
        assert (stats.settlement.items, stats.settlement.refused) == (0, 3)
        text = metrics_text(stats, worker="w")
        assert 'busload_settlement_results_total{worker="w"} 0\n' in text
        assert 'busload_settlement_refused_total{worker="w"} 3\n' in text
    assert re.search(r"The settlement flushed \d items? in \d+\.\d ms and wrote 0", caplog.text)
    assert re.search(r"In this run 0 results were settled in .*, 3 results refused", caplog.text)


async def test_a_worker_that_was_declared_dead_has_lost_what_others_have_begun(given: Given, dsn: str) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        started.set()
        await go.wait()

    given.handler("Debit", wait)
    await given.sent()
    await given.sent()
    settings = replace(given.settings, lease_for=timedelta(seconds=1.2))
    async with given.running(settings=settings, concurrency=2) as worker:
        await eventually(lambda: worker.stats.in_hand == 2)
        with psycopg.connect(dsn) as conn:  # in one transaction: it would take up again what nobody else has
            conn.execute("UPDATE busload.worker SET stopped_at = now(), lost = true")
            assert perform(conn, rescue.rescue()).commands == 2
            heir = perform(
                conn, rescue.register(name="heir", domains=[], concurrency=2, lease_for=timedelta(minutes=1))
            )
            assert len(perform(conn, claim.claim(worker=heir, domains=[DOMAIN], limit=2, suspects=True)).leased) == 1
        await eventually(lambda: worker.stats.lost_leases >= 1)
        go.set()


async def test_attempts_settled_by_their_own_transaction_are_counted_apart(given: Given, database: Database) -> None:
    async def write(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")

    given.handler("Debit", write)
    await given.batch(commands=6)
    worker = given.worker()
    assert await worker.drain() == 6
    assert (worker.stats.completed, worker.stats.in_transactions, worker.stats.settlement.items) == (6, 6, 0)
    assert worker.stats.finished == worker.stats.settled == 6


# The log


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "results were settled" in record.message]


LINE = re.compile(
    r"In the last minute (\d+) results were settled in (\d+) flushes of (\d+\.\d) on average, (\d+) by handlers' own "
    r"transactions; from result to commit p50 \d+\.\d ms, p95 \d+\.\d ms, p99 \d+\.\d ms; (\d+) % full, (\d+) flush "
    "repeated"
)


async def test_the_log_says_what_was_settled_in_the_last_minute_and_nothing_when_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "busload")
    coalescer = Coalescer(opened(failures=1), max_size=4, max_interval=NEVER, capacity=8)
    report = Report(lambda: WorkerStats(1, coalescer.stats.snapshot()))
    assert await report.once() == 60
    assert lines(caplog) == []
    for item in range(8):
        await coalescer.put(item)
    await eventually(lambda: coalescer.stats.items == 8)
    await report.once()
    [line] = lines(caplog)
    found = LINE.fullmatch(line)
    assert found is not None and found.groups() == ("8", "2", "4.0", "0", "0", "1")
    await report.once()
    assert len(lines(caplog)) == 1
    for item in range(4):
        await coalescer.put(item)
    await coalescer.close()
    await report.once()
    assert "In the last minute 4 results were settled in 1 flush of 4.0 on average" in lines(caplog)[1]
    report.finish()
    assert "In this run 12 results were settled in 3 flushes of 4.0 on average" in lines(caplog)[2]


async def test_a_worker_reports_while_it_works_and_when_it_stops(
    given: Given, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a minute of 20 ms."""
    caplog.set_level(logging.INFO, "busload")
    monkeypatch.setattr(stats_module, "REPORT_EVERY", 0.02)
    given.handler()
    async with given.running():
        await given.batch(commands=5)
        await eventually(lambda: any("In the last minute 5 results" in line for line in lines(caplog)))
    assert "In this run 5 results were settled" in lines(caplog)[-1]
    assert len(lines(caplog)) == 2


async def test_a_worker_that_had_nothing_to_do_says_nothing(given: Given, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "busload")
    given.handler()
    await given.drained()
    assert lines(caplog) == []


async def test_a_worker_whose_handlers_commit_themselves_reports_too(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busload")

    async def write(command: Command, ctx: HandlerContext) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("SELECT 1")

    given.handler("Debit", write)
    await given.sent()
    await given.drained()
    [line] = lines(caplog)
    assert "0 results were settled in 0 flushes of 0.0 on average, 1 by handlers' own transactions" in line


# The metrics


SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (NaN|-?[0-9.e+-]+)')
UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')


def exposed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read the exposition format as strictly as it is written down: HELP, TYPE, then the samples of the family."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    family = kind = ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, family, help = line.split(" ", 3)
            assert help and not any(name.startswith(family + "{") for name, _ in samples)
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2] == family
            kind = line.split(" ")[3]
            assert kind in ("counter", "gauge", "summary", "histogram")
            assert family.endswith("_total") == (kind == "counter")
        else:
            found = SAMPLE.fullmatch(line)
            assert found is not None, line
            name, labels = found[1], LABEL.findall(found[2])
            suffixes = {"summary": ("", "_sum", "_count"), "histogram": ("_bucket", "_sum", "_count")}.get(kind, ("",))
            assert name in [family + suffix for suffix in suffixes]
            key = name, frozenset((k, re.sub(r"\\.", lambda m: UNESCAPED[m[0]], v)) for k, v in labels)
            assert key not in samples
            samples[key] = float(found[3])
    return samples


def test_metrics_are_prometheus_text_whatever_the_worker_is_called() -> None:
    name = 'a "quoted" \\ back\\nslash\nand ünïcode'
    text = metrics_text(WorkerStats(7, CoalescerStats(500)), worker=name, about={"domains": 'a,"b"'})
    samples = exposed(text)
    assert samples["busload_worker_concurrency", frozenset({("worker", name)})] == 7
    assert samples["busload_worker_info", frozenset({("worker", name), ("domains", 'a,"b"')})] == 1
    assert all(("worker", name) in labels for _, labels in samples)
    median = samples["busload_settlement_latency_seconds", frozenset({("worker", name), ("quantile", "0.5")})]
    assert median != median  # nothing was measured: NaN, not a wonderful zero


async def test_metrics_are_the_stats(bus: CommandBus, given: Given) -> None:
    """As the metrics text."""
    given.handler()
    given.handler("Park", raising(PermanentCommandError("closed")))
    await given.batch(commands=50)
    await given.batch(commands=2, command_type="Park")
    worker = given.worker(name="one", domains=[DOMAIN])
    await worker.drain()
    stats, samples = worker.stats, exposed(worker.metrics())

    def value(name: str, **labels: str) -> float:
        return samples[f"busload_{name}", frozenset({"worker": "one", **labels}.items())]

    assert value("worker_info", domains=DOMAIN, settle="coalesced", prefetch="0.05") == 1
    assert value("worker_claimed_total") == value("worker_finished_total") == 52
    assert value("worker_claims_total") == stats.claims
    assert value("worker_empty_claims_total") == stats.empty_claims
    assert value("worker_settled_total", outcome="completed") == 50
    assert value("worker_settled_total", outcome="parked") == 2
    for outcome in ("failed", "canceled", "failed_attempt"):
        assert value("worker_settled_total", outcome=outcome) == 0
    for name in ("in_hand", "in_line"):
        assert value(f"worker_{name}") == 0
    assert value("worker_prefetch") == stats.prefetch
    for name in ("in_transactions", "late_results", "handed_back", "lost_leases"):
        assert value(f"worker_{name}_total") == 0
    settlement = stats.settlement
    assert value("settlement_results_total") == settlement.items == 52
    assert value("settlement_flushes_total") == settlement.flushes
    assert value("settlement_failures_total") == 0
    assert value("settlement_saved_transactions_total") == settlement.saved
    assert value("settlement_flush_seconds_total") == settlement.flush_seconds
    assert value("settlement_waiting") == value("settlement_waiting_bytes") == value("settlement_fullness_ratio") == 0
    assert value("settlement_capacity") == settlement.capacity == 5000
    for quantile in (0.5, 0.95, 0.99):
        assert value("settlement_latency_seconds", quantile=str(quantile)) == settlement.latency(100 * quantile)
    assert value("settlement_latency_seconds_sum") == settlement.measured_seconds
    assert value("settlement_latency_seconds_count") == settlement.measured


async def test_metrics_of_a_worker_that_never_ran_are_all_zero(given: Given) -> None:
    given.handler()
    samples = exposed(given.worker().metrics())
    assert samples
    told = ("busload_worker_info", "busload_worker_concurrency", "busload_settlement_capacity")
    assert not [key for key, value in samples.items() if value > 0 and key[0] not in told]

"""`Worker(bus)` over several databases: one process serves them all, counts exactly in each, and stops as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from busload import (
    BatchCommand,
    Command,
    CommandBus,
    HandlerContext,
    InvalidCommandError,
    Settings,
    SyncCommandBus,
    Worker,
    WorkerSettings,
)
from busload.errors import InvalidOperationError
from busload.health.health import HealthState
from busload.worker.sharded import ShardedWorker
from tests.given import WITHIN, Database, eventually
from tests.shards.conftest import Three

DOMAINS = ("payments", "orders", "crm")


@pytest.fixture
def runs(sharded: CommandBus) -> Counter[str]:
    """How often a handler of each domain has run."""
    return _handlers(sharded)


def _handlers(bus: CommandBus | SyncCommandBus) -> Counter[str]:
    runs: Counter[str] = Counter()

    async def do(command: Command, ctx: HandlerContext) -> None:
        runs[command.domain] += 1

    for domain in DOMAINS:
        bus.handler(domain, "Do")(do)
    return runs


@pytest.fixture
async def exact(three: Three) -> AsyncIterator[None]:
    """In the end the counters of every database are exact."""
    yield
    for dsn in (three.payments, three.orders, three.rest):
        with Database(dsn) as database:
            database.check_invariants()


@pytest.mark.usefixtures("exact")
async def test_one_worker_runs_the_commands_of_all_databases(
    sharded: CommandBus, runs: Counter[str], worker_settings: WorkerSettings
) -> None:
    sizes = {"payments": 300, "orders": 200, "crm": 100}
    batches = {
        domain: await sharded.create_batch(domain, [BatchCommand("Do") for _ in range(size)])
        for domain, size in sizes.items()
    }
    worker = Worker(sharded, settings=worker_settings)
    assert isinstance(worker, ShardedWorker)
    async with worker:
        for domain, batch_id in batches.items():
            batch = await sharded.wait_batch(domain, batch_id, timeout=WITHIN)
            assert batch.completed_count == batch.total_count == sizes[domain]
        known = await sharded.workers.list()
        assert {one.name for one in known} == {worker.name}
        assert sorted(domain for one in known for domain in one.domains) == sorted(DOMAINS)
        assert len({one.worker for one in known}) == 3
        for one in known:
            assert (await sharded.workers.get(one.worker)) is not None
            assert [each.worker for each in await sharded.workers.list(after=one.worker)] == sorted(
                (each.worker for each in known if each.worker < one.worker), reverse=True
            )
        assert worker.health().state is HealthState.HEALTHY
    assert runs == sizes
    stats = worker.stats
    assert (stats.completed, stats.settled, stats.finished) == (600, 600, 600)
    assert stats.concurrency == 3 * worker_settings.concurrency
    assert {one.domain: one.outcomes["completed"] for one in stats.handlers} == sizes
    assert 'busload_worker_settled_total{worker="' in worker.metrics()


@pytest.mark.usefixtures("exact")
async def test_a_server_that_goes_away_stops_only_its_own_domains(
    sharded: CommandBus, runs: Counter[str], three: Three, worker_settings: WorkerSettings
) -> None:
    async with Worker(sharded, settings=worker_settings) as worker:
        first = await sharded.create_batch("crm", [BatchCommand("Do") for _ in range(50)])
        await sharded.wait_batch("crm", first, timeout=WITHIN)
        three.third.stop()
        for domain in ("payments", "orders"):
            batch_id = await sharded.create_batch(domain, [BatchCommand("Do") for _ in range(100)])
            assert (await sharded.wait_batch(domain, batch_id, timeout=WITHIN)).completed_count == 100
        await eventually(lambda: worker.health().state is HealthState.DEGRADED)
        three.third.start()
        second = await sharded.create_batch("crm", [BatchCommand("Do") for _ in range(50)])
        assert (await sharded.wait_batch("crm", second, timeout=WITHIN)).completed_count == 50
        await eventually(lambda: worker.health().state is HealthState.HEALTHY)
    assert runs == {"payments": 100, "orders": 100, "crm": 100}


@pytest.mark.usefixtures("exact")
async def test_a_worker_starts_while_a_server_is_away_and_serves_it_when_it_is_back(
    sharded: CommandBus, runs: Counter[str], three: Three, worker_settings: WorkerSettings
) -> None:
    waiting = await sharded.create_batch("crm", [BatchCommand("Do") for _ in range(20)])
    three.third.stop()
    async with Worker(sharded, settings=worker_settings):
        batch_id = await sharded.create_batch("orders", [BatchCommand("Do") for _ in range(20)])
        await sharded.wait_batch("orders", batch_id, timeout=WITHIN)
        three.third.start()
        assert (await sharded.wait_batch("crm", waiting, timeout=WITHIN)).completed_count == 20
    assert runs == {"orders": 20, "crm": 20}


async def test_a_worker_that_stops_before_a_server_is_back_does_not_hang(
    sharded: CommandBus, runs: Counter[str], three: Three, worker_settings: WorkerSettings
) -> None:
    three.third.stop()
    async with Worker(sharded, settings=worker_settings) as worker:
        assert worker.health().state is HealthState.DEGRADED
    assert not runs


async def test_an_operator_stops_all_of_a_process_by_its_name(
    sharded: CommandBus, runs: Counter[str], worker_settings: WorkerSettings
) -> None:
    worker = Worker(sharded, settings=worker_settings, name="ours")
    running = asyncio.create_task(worker.run())
    await eventually(lambda: worker.health().state is HealthState.HEALTHY)
    assert await sharded.workers.stop("ours", operator="ada") == 3
    await asyncio.wait_for(running, WITHIN)
    assert worker.asked_to_stop
    with pytest.raises(InvalidOperationError, match="No worker 'ours' runs"):
        await sharded.workers.stop("ours")


async def test_a_worker_that_cannot_serve_one_database_ends_with_its_error(
    three: Three, server: object, second_server: object, settings: Settings, worker_settings: WorkerSettings
) -> None:
    with second_server.database(migrated=False) as empty:  # type: ignore[attr-defined]
        bus = CommandBus({"payments": three.payments, "*": empty}, settings=settings)
        _handlers(bus)
        with pytest.raises(Exception, match="schema"):
            await asyncio.wait_for(Worker(bus, settings=worker_settings).run(), WITHIN)
        with pytest.raises(Exception, match="schema"):
            async with Worker(bus, settings=worker_settings):
                pass


async def test_what_a_handler_sends_into_another_database_is_drained_too(
    sharded: CommandBus, worker_settings: WorkerSettings
) -> None:
    """By the bus of the application; `ctx.send`, which can join the completion, is of the database of the command."""
    refused: list[str] = []

    @sharded.handler("payments", "Pay")
    async def pay(command: Command, ctx: HandlerContext) -> None:
        try:
            await ctx.send("orders", "Ship")
        except InvalidCommandError as error:
            refused.append(error.problems[0].code)
        async with ctx.transaction():
            try:
                await ctx.send("orders", "Ship")
            except InvalidCommandError as error:
                refused.append(error.problems[0].code)
            await ctx.send("payments", "Note")
        await sharded.send("orders", "Ship")

    @sharded.handler("payments", "Note")
    @sharded.handler("orders", "Ship")
    async def done(command: Command, ctx: HandlerContext) -> None:
        return None

    await sharded.send("payments", "Pay")
    assert await Worker(sharded, settings=worker_settings).drain() == 3
    assert refused == ["OTHER_DATABASE", "OTHER_DATABASE"]


@pytest.mark.usefixtures("exact")
async def test_a_worker_of_a_sync_bus_serves_all_databases_and_handlers_in_threads(
    three: Three, settings: Settings, worker_settings: WorkerSettings
) -> None:
    bus = SyncCommandBus(three.mapping, settings=settings)
    seen: list[str] = []

    @bus.handler("payments", "Do")
    @bus.handler("crm", "Do")
    def do(command: Command, ctx: object) -> None:
        seen.append(command.domain)

    with bus:
        for domain in ("payments", "crm"):
            bus.create_batch(domain, [BatchCommand("Do") for _ in range(10)])
        assert await Worker(bus, settings=worker_settings).drain() == 20
    assert Counter(seen) == {"payments": 10, "crm": 10}


async def test_a_domain_without_a_database_is_refused_before_a_worker_starts(three: Three) -> None:
    bus = CommandBus({"payments": three.payments, "orders": three.orders})
    _handlers(bus)
    with pytest.raises(InvalidCommandError, match="found 'crm', but the databases are of 'payments', 'orders'"):
        Worker(bus)
    worker = Worker(bus, domains=["orders"])
    assert isinstance(worker, ShardedWorker)
    assert [one.domains for one in worker.workers] == [["orders"]]

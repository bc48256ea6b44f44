"""A message is a doorbell: the database decides what runs, and no message is forgotten before it is settled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from busload import BatchCommand, Command, CommandBus, HandlerContext, Settings, Worker, WorkerSettings
from busload.commands.claim import DeliveredClaim
from busload.commands.execution import Lease
from busload.commands.load import Load
from busload.dispatch import deliveries as receive
from busload.dispatch import envelope as message
from busload.dispatch.deliveries import Deliveries, prefetch_of
from busload.dispatch.envelope import Envelope
from busload.errors import TransportMisconfiguredError
from busload.postgres.plan import execute
from busload.transports.base import Delivery
from busload.transports.postgresql import SQL
from busload.worker.stats import BrokerStats
from tests.brokers.faulty import FaultyTransport
from tests.given import DOMAIN, Database, Given, counts, eventually

QUEUE = f"busload.{DOMAIN}"
HOUR = timedelta(hours=1)
KEY = "a secret"


@pytest.fixture
async def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture
async def bus(dsn: str, settings: Settings, transport: FaultyTransport) -> AsyncIterator[CommandBus]:
    signed = replace(settings, envelope_size=10, message_key=KEY)
    async with CommandBus(dsn, transport=transport, settings=signed) as bus:
        yield bus


@pytest.fixture
def by_message(worker_settings: WorkerSettings) -> WorkerSettings:
    """A worker that finds commands by messages only, for as long as they come."""
    return replace(worker_settings, broker_poll_every=HOUR)


async def connected(worker: Worker) -> BrokerStats:
    """Wait until it polls no more; then messages alone bring commands."""
    await eventually(lambda: worker.stats.broker and worker.stats.broker.connected)
    running = inside(worker)
    await eventually(lambda: _only_waits(running))
    return broker(worker)


def _only_waits(run: Any) -> bool:
    claimer = run._claimer
    return run.notifications.has_listened and not claimer._queue_wanted and claimer.sent_at is None


def inside(worker: Worker) -> Any:
    """The run of a worker that is running."""
    return worker._run


def broker(worker: Worker) -> BrokerStats:
    stats = worker.stats.broker
    assert stats is not None
    return stats


async def deliver(bus: CommandBus, *bodies: bytes) -> None:
    ids = [str(uuid4()) for _ in bodies]
    await bus.database.in_transaction(execute(SQL.publish, queues=[QUEUE] * len(bodies), ids=ids, bodies=list(bodies)))


def signed(*ranges: tuple[int, int], domain: str = DOMAIN, key: str | None = KEY) -> bytes:
    return message.write(Envelope(domain, tuple(Load(*ends) for ends in ranges)), None if key is None else key.encode())


def all_acked(database: Database) -> bool:
    return database.count("message") == 0


async def test_a_batch_runs_by_messages(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """Claimed in bulk, many messages per statement, and acknowledged once it is settled."""
    given.handler()
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        before = worker.stats.claims
        batch_id = await given.batch(500)
        await eventually(lambda: worker.stats.completed == 500)
        await eventually(lambda: all_acked(database))
        stats = broker(worker)
        assert (stats.received, stats.claimed, stats.duplicates, stats.refused_messages) == (50, 500, 0, 0)
        assert worker.stats.claims - before < 50
    assert counts(await given.batch_now(batch_id)) == (500, 500, 0, 0, 0)
    assert database.is_at_rest()
    database.check_invariants()


async def test_a_message_is_acknowledged_only_after_the_settlement(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """A worker that dies before it has settled leaves the message to others, who find its commands."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        entered.set()
        await leave.wait()

    given.handler(function=wait)
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        await given.batch(10)
        await eventually(entered.is_set)
        await eventually(lambda: worker.stats.in_hand == 10)
        assert database.count("message") == 1
        leave.set()
        await eventually(lambda: all_acked(database))
        assert worker.stats.completed == 10  # known before the message was forgotten
    assert database.is_at_rest()


async def test_a_stopping_worker_gives_its_messages_back_at_once(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """While what it runs still finishes."""
    leave = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await leave.wait()

    seen = given.handler(function=wait)
    visible = "SELECT count(*) FROM busload.message WHERE visible_at <= now()"
    async with given.running(settings=by_message, concurrency=5) as worker:
        await connected(worker)
        await given.batch(40)
        await eventually(lambda: len(seen) == 5)
        await eventually(lambda: database.value(visible) == 0)
        worker.stop()
        await eventually(lambda: database.value(visible) == 4)
        assert worker.stats.completed == 0
        leave.set()
    assert worker.stats.completed == 5
    assert await given.drained() == 35
    async with given.running(settings=by_message) as worker:
        await eventually(lambda: all_acked(database))
    assert len(seen) == 40
    database.check_invariants()


async def test_a_storm_of_repetitions_costs_looks_and_nothing_else(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """Every message a hundred times."""
    seen = given.handler()
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        await given.batch(50)
        await eventually(lambda: worker.stats.completed == 50)
        [(lo, hi)] = database.rows("SELECT min(id), max(id) FROM busload.command")
        claims = worker.stats.claims
        bodies = [signed((n, n + 9)) for n in range(lo, hi, 10)]
        await deliver(bus, *bodies * 100)
        await eventually(lambda: broker(worker).duplicates == 500)
        await eventually(lambda: all_acked(database))
        assert worker.stats.claims - claims <= 250
    assert len(seen) == 50
    assert database.count("execution") == 50
    database.check_invariants()


async def test_what_is_not_a_message_of_ours_has_no_effect(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings, transport: FaultyTransport
) -> None:
    """Malformed, oversize, unsigned, signed by others, about another domain, about nothing that exists."""
    seen = given.handler()
    transport.pull()
    await given.sent()
    [(id,)] = database.rows("SELECT id FROM busload.command")
    transport.mend()
    bad = [
        b"",
        b"\xff\xfe",
        b"{" * 5000,
        json.dumps({"v": 1, "domain": DOMAIN, "loads": [[id, id]] * 2000}).encode(),
        signed((id, id), key=None),
        signed((id, id), key="guessed"),
        signed((id, id), domain="salaries"),
    ]
    await deliver(bus, *bad, signed((2**62, 2**62)))
    before = receive.EARLY
    receive.EARLY = 0.2
    try:
        async with given.running(settings=by_message) as worker:
            await connected(worker)
            await eventually(lambda: broker(worker).refused_messages == len(bad))
            await eventually(lambda: broker(worker).unknown == 1)
            await eventually(lambda: all_acked(database))
            await eventually(lambda: worker.stats.completed == 1)
            text = worker.metrics()
            assert f'busload_receive_refused_total{{worker="{worker.name}"}} {len(bad)}\n' in text
    finally:
        receive.EARLY = before
    assert len(seen) == 1
    database.check_invariants()


async def test_a_message_that_comes_before_its_commands_is_looked_at_again(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings, conn: psycopg.AsyncConnection
) -> None:
    """Not dropped, though nobody has heard of them yet."""
    given.handler()
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        async with conn.transaction():
            await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(10)], conn=conn)
            cursor = await conn.execute("SELECT min(id), max(id) FROM busload.command")
            [(lo, hi)] = await cursor.fetchall()
            await conn.execute("UPDATE busload.outbox SET due_at = now() + interval '1 h', relay = gen_random_uuid()")
            claims = worker.stats.claims
            await deliver(bus, signed((lo, hi)))
            await eventually(lambda: worker.stats.claims > claims)
        await eventually(lambda: worker.stats.completed == 10)
        assert (broker(worker).unknown, broker(worker).claimed) == (0, 10)
        await eventually(lambda: all_acked(database))
    assert database.is_at_rest()
    database.check_invariants()


async def test_what_the_database_makes_ready_by_itself_needs_no_message(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """Retries and callbacks come by notification, though the worker would poll in an hour only."""
    tries: list[int] = []

    async def fail_once(command: Command, ctx: HandlerContext) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")

    given.handler(function=fail_once)
    done = given.handler("Done")
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        await given.batch(1, on_complete=BatchCommand("Done"))
        await eventually(lambda: worker.stats.failed_attempts == 1)
        given.make_due()
        await eventually(lambda: len(done) == 1)
        await eventually(lambda: all_acked(database))
    assert len(tries) == 2
    assert database.is_at_rest()


async def test_suspects_follow_each_other_without_a_message(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """One at a time, as soon as the one before has ended, though the worker would poll in an hour only."""
    given.handler()
    for _ in range(3):
        await given.batch(1)
    died = given.registered_worker()
    assert len(given.claimed(3, by=died)) == 3
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        given.died(died)
        await eventually(lambda: worker.stats.completed == 3)
        await eventually(lambda: all_acked(database))
    assert database.is_at_rest()
    database.check_invariants()


async def test_what_others_have_locked_does_not_hold_up_a_worker(
    bus: CommandBus,
    given: Given,
    database: Database,
    by_message: WorkerSettings,
    conn: psycopg.AsyncConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody's open transaction keeps its own commands waiting, and no others."""
    monkeypatch.setattr(receive, "EARLY", 60.0)
    given.handler()
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        async with conn.transaction():
            locked = await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(10)], conn=conn)
            await conn.execute("UPDATE busload.outbox SET due_at = now() + interval '1 h', relay = gen_random_uuid()")
        [(lo, hi)] = database.rows("SELECT lo, hi FROM busload.outbox WHERE batch_id = %s", locked)
        async with conn.transaction():
            await conn.execute("SELECT FROM busload.outbox WHERE batch_id = %s FOR UPDATE", [locked])
            await deliver(bus, signed((lo, hi)))
            await eventually(lambda: broker(worker).received == 1)
            await given.batch(20)
            await eventually(lambda: worker.stats.completed == 20)
        await eventually(lambda: worker.stats.completed == 30)
        await eventually(lambda: all_acked(database))
    database.check_invariants()


async def test_a_lost_message_is_made_up_for_by_a_look_from_time_to_time(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings, conn: psycopg.AsyncConnection
) -> None:
    """Confirmed, then lost by the broker."""
    given.handler()
    often = replace(by_message, broker_poll_every=timedelta(milliseconds=100))
    async with given.running(settings=often) as worker:
        await eventually(lambda: worker.stats.broker and worker.stats.broker.connected)
        await conn.execute("CREATE FUNCTION drop_it() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        await conn.execute(
            "CREATE TRIGGER lose BEFORE INSERT ON busload.message FOR EACH ROW EXECUTE FUNCTION drop_it()"
        )
        await given.batch(30)
        await eventually(lambda: worker.stats.completed == 30)
        assert (broker(worker).received, broker(worker).claimed) == (0, 0)
    assert database.is_at_rest()


async def test_a_paused_domain_keeps_its_messages_on_loan(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """Nothing starts, nothing is lost, and it goes on when it is resumed."""
    seen = given.handler()
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        await bus.domains.pause(DOMAIN, reason="a look")
        await eventually(lambda: inside(worker)._pauses.paused)
        await given.batch(50)
        await eventually(lambda: broker(worker).received == 5)
        claims = worker.stats.claims
        assert (worker.stats.claims, len(seen), database.count("message")) == (claims, 0, 5)
        assert inside(worker)._claimer._pause(inside(worker)._broker, {DOMAIN}) > 1  # it does not spin
        await bus.domains.resume(DOMAIN)
        await eventually(lambda: worker.stats.completed == 50)
        await eventually(lambda: all_acked(database))
    assert database.is_at_rest()
    database.check_invariants()


async def test_what_the_broker_took_back_from_a_paused_worker_comes_again_once(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings, transport: FaultyTransport
) -> None:
    given.handler()
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        await bus.domains.pause(DOMAIN)
        await eventually(lambda: inside(worker)._pauses.paused)
        await given.batch(50)
        await eventually(lambda: broker(worker).received == 5)
        transport.pull()
        await eventually(lambda: not broker(worker).connected)
        transport.mend()
        await eventually(lambda: broker(worker).received == 10)
        assert len(inside(worker)._broker.deliveries._waiting[DOMAIN]) == 5
        await bus.domains.resume(DOMAIN)
        await eventually(lambda: worker.stats.completed == 50)
        await eventually(lambda: all_acked(database))


async def test_what_became_ready_during_a_pause_is_found_after_it(
    dsn: str, bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """Its notification came when nothing could be claimed."""
    given.handler()
    async with given.running(settings=by_message) as worker:
        await connected(worker)
        await bus.domains.pause(DOMAIN)
        await eventually(lambda: inside(worker)._pauses.paused and not inside(worker)._claimer._queue_wanted)
        looked = inside(worker)._claimer._polled_at
        async with CommandBus(dsn) as without_broker:
            await without_broker.send(DOMAIN, "Debit")
        await eventually(lambda: inside(worker)._claimer._polled_at > looked)
        await bus.domains.resume(DOMAIN)
        await eventually(lambda: worker.stats.completed == 1)
    assert database.is_at_rest()


async def test_a_worker_starts_though_the_broker_is_away_and_catches_up(
    bus: CommandBus,
    given: Given,
    database: Database,
    worker_settings: WorkerSettings,
    transport: FaultyTransport,
    caplog: pytest.LogCaptureFixture,
    conn: psycopg.AsyncConnection,
) -> None:
    """Said once; meanwhile it polls, as without a broker."""
    given.handler()
    transport.pull()
    await given.batch(30)
    far = replace(worker_settings, broker_poll_every=HOUR)
    async with given.running(settings=far) as worker:
        await eventually(lambda: broker_or_none(worker) and broker(worker).failed_rounds)
        assert not broker(worker).connected
        assert inside(worker)._broker.poll_every == far.poll_every.total_seconds()
        quiet = "INSERT INTO busload.queue (lo, hi, domain, batch_id) SELECT lo, hi, domain, batch_id FROM gone"
        await conn.execute(f"WITH gone AS (DELETE FROM busload.outbox RETURNING *) {quiet}")  # nobody notifies
        await eventually(lambda: worker.stats.completed == 30)
        await given.batch(20)
        transport.mend()
        await eventually(lambda: worker.stats.completed == 50)
        await eventually(lambda: broker(worker).connected)
    said = [record.message for record in caplog.records if "does not deliver" in record.message]
    assert len(said) == 1
    database.check_invariants()
    assert database.is_at_rest()


def broker_or_none(worker: Worker) -> BrokerStats | None:
    return worker.stats.broker


async def test_an_outage_in_the_middle_costs_nothing_but_time(
    bus: CommandBus,
    given: Given,
    database: Database,
    worker_settings: WorkerSettings,
    transport: FaultyTransport,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was on loan comes again, what was sent meanwhile is published afterwards."""
    seen = given.handler()
    async with given.running(settings=replace(worker_settings, broker_poll_every=HOUR)) as worker:
        await connected(worker)
        for _ in range(3):
            await given.batch(100)
            transport.pull()
            await eventually(lambda: not broker(worker).connected)
            await given.batch(50)
            transport.mend()
            await eventually(lambda: broker(worker).connected)
        await eventually(lambda: worker.stats.completed == 450)
        await eventually(lambda: all_acked(database))
    assert len(seen) == 450
    assert len([one for one in caplog.records if "does not deliver" in one.message]) == 3
    assert database.is_at_rest()
    database.check_invariants()


async def test_two_workers_share_the_messages(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    seen = given.handler()
    async with given.running(settings=by_message) as one, given.running(settings=by_message) as other:
        await connected(one)
        await connected(other)
        for _ in range(5):
            await given.batch(100)
        await eventually(lambda: one.stats.completed + other.stats.completed == 500)
        await eventually(lambda: all_acked(database))
        assert broker(one).claimed + broker(other).claimed == 500
    assert len(seen) == 500
    database.check_invariants()


async def test_messages_reach_bulk_handlers_as_well(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    sizes: list[int] = []

    @bus.bulk_handler(DOMAIN, "Many", size=50, max_wait=timedelta(milliseconds=20))
    async def many(commands: list[Command], ctx: Any) -> None:
        sizes.append(len(commands))

    async with given.running(settings=by_message) as worker:
        await connected(worker)
        await given.batch(120, "Many")
        await eventually(lambda: sum(sizes) == 120)
        await eventually(lambda: all_acked(database))
        assert broker(worker).claimed == 120
    assert database.is_at_rest()


async def test_a_message_per_command_runs_each_once(
    dsn: str, transport: FaultyTransport, database: Database, by_message: WorkerSettings
) -> None:
    async with CommandBus(dsn, transport=transport, settings=Settings(message_per_command=True)) as bus:
        given = Given(bus, database, by_message)
        seen = given.handler()
        async with given.running() as worker:
            await connected(worker)
            await given.batch(300)
            await eventually(lambda: worker.stats.completed == 300)
            await eventually(lambda: all_acked(database))
            assert broker(worker).received == 300
    assert len(seen) == 300
    database.check_invariants()


@pytest.mark.parametrize(("concurrency", "expected"), [(1, 2), (100, 100), (10_000, 200)])
def test_enough_messages_are_on_loan_for_what_runs(concurrency: int, expected: int) -> None:
    assert prefetch_of(concurrency) == expected


async def test_messages_about_single_commands_fill_all_slots(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings, conn: psycopg.AsyncConnection
) -> None:
    """Though one may be about many."""
    leave = asyncio.Event()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        await leave.wait()

    seen = given.handler(function=wait)
    async with given.running(settings=by_message, concurrency=20) as worker:
        await connected(worker)
        async with conn.transaction():
            await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(20)], conn=conn)
            await conn.execute("UPDATE busload.outbox SET due_at = now() + interval '1 h', relay = gen_random_uuid()")
        [(lo, hi)] = database.rows("SELECT lo, hi FROM busload.outbox")
        await deliver(bus, *(signed((id, id)) for id in range(lo, hi + 1)))
        await eventually(lambda: len(seen) == 20)
        leave.set()
        await eventually(lambda: all_acked(database))
    assert database.is_at_rest()


async def test_what_is_on_loan_to_one_worker_runs_on_another_that_has_time(
    bus: CommandBus, given: Given, database: Database, by_message: WorkerSettings
) -> None:
    """One that finds as much as it can take by a look looks again at once, until there is no more."""
    leave = asyncio.Event()
    slow: set[int] = set()

    async def wait(command: Command, ctx: HandlerContext) -> None:
        if len(slow) < 5:
            slow.add(len(slow))
            await leave.wait()

    given.handler(function=wait)
    async with given.running(settings=by_message, concurrency=5) as stuck:
        await connected(stuck)
        await given.batch(50)
        await eventually(lambda: len(slow) == 5)
        await eventually(lambda: broker(stuck).received == 5)
        async with given.running(settings=by_message, concurrency=5) as free:
            await eventually(lambda: free.stats.completed + stuck.stats.in_hand == 50)
            assert free.stats.completed >= 25
            leave.set()
            await eventually(lambda: free.stats.completed + stuck.stats.completed == 50)
    database.check_invariants()


async def test_each_domain_that_gets_no_messages_is_named(
    bus: CommandBus,
    given: Given,
    worker_settings: WorkerSettings,
    transport: FaultyTransport,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that fails must not keep quiet about the other, nor deny that the other is back."""
    caplog.set_level("INFO", "busload")
    monkeypatch.setattr(receive, "SLOW_PAUSE", 0.05)
    away = {"salaries", DOMAIN}

    def unusable(queue: str) -> Exception | None:
        is_away = queue.removeprefix("busload.") in away
        return TransportMisconfiguredError(f"no right to {queue}") if is_away else None

    def lines(text: str) -> list[str]:
        return sorted(record.message for record in caplog.records if text in record.message)

    transport.unusable = unusable
    given.handler()
    given.bus.handler("salaries", "Pay")(lambda command, ctx: None)
    async with given.running(settings=worker_settings, domains=[DOMAIN, "salaries"]):
        await eventually(lambda: len(lines("does not deliver")) == 2)
        assert [("salaries" in line, DOMAIN in line) for line in lines("does not deliver")].count((True, True)) == 0
        away.discard(DOMAIN)
        await eventually(lambda: len(lines("delivers")) == 1)
        assert DOMAIN in lines("delivers")[0]
        away.clear()
        await eventually(lambda: len(lines("delivers")) == 2)
    assert len(lines("does not deliver")) == 2


# Deliveries by themselves


class Doorbell(Delivery):
    def __init__(self) -> None:
        self.queue, self.body = QUEUE, b""

    async def ack(self) -> None: ...

    async def reject(self, reason: str) -> None: ...


class Hall:
    """Deliveries, and which of them may be acknowledged."""

    def __init__(self) -> None:
        self.deliveries = Deliveries()

    @property
    def acked(self) -> list[Delivery]:
        return self.deliveries.settled

    def delivered(self, *ranges: tuple[int, int], domain: str = DOMAIN) -> Delivery:
        delivery = Doorbell()
        self.deliveries.add(delivery, Envelope(domain, tuple(Load(*ends) for ends in ranges)))
        return delivery

    def look(self, leases: list[Lease], limit: int = 1000, passed_over: frozenset[int] = frozenset()) -> dict[int, int]:
        wanted = self.deliveries.wanted([DOMAIN], limit)
        leased: list[Any] = [None] * sum(lease.unsettled for lease in leases)
        self.deliveries.answer(wanted, DeliveredClaim(leases, leased, contended=False, passed_over=passed_over))
        return wanted


def lease(lo: int, hi: int) -> Lease:
    size = hi - lo + 1
    return Lease(uuid4(), Load(lo, hi), DOMAIN, None, 0, 1, 0, 0, None, size, size)  # type: ignore[arg-type]


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Hall:
    monkeypatch.setattr(receive, "LOOK_AGAIN", 0.0)
    return Hall()


def test_a_lease_that_several_deliveries_share_holds_them_all(hall: Hall) -> None:
    first, second, third = hall.delivered((0, 9)), hall.delivered((10, 19)), hall.delivered((20, 29))
    shared, rest = lease(0, 14), lease(15, 29)
    assert hall.look([shared, rest]) == {0: 30}
    hall.deliveries.gone(shared)
    assert hall.acked == [first]
    hall.deliveries.gone(rest)
    assert hall.acked == [first, second, third]
    hall.deliveries.gone(rest)
    assert hall.deliveries.duplicates == 0


def test_a_delivery_is_open_until_nothing_more_of_it_is_to_be_claimed(hall: Hall) -> None:
    only = hall.delivered((0, 9), (1024, 1033))
    part = lease(0, 4)
    assert hall.look([part], limit=5) == {0: 5}
    hall.deliveries.gone(part)
    assert hall.acked == []
    others = [lease(5, 9), lease(1024, 1033)]
    assert hall.look(others) == {0: 5, 1: 10}
    for one in others:
        hall.deliveries.gone(one)
    assert hall.acked == [only]


def test_a_delivery_that_finds_nothing_is_looked_at_twice(hall: Hall) -> None:
    only = hall.delivered((0, 9))
    hall.look([])
    assert hall.acked == []
    hall.look([])
    assert (hall.acked, hall.deliveries.duplicates) == ([only], 1)
    assert hall.look([]) == {}


def test_what_others_hold_is_looked_at_again_and_left_to_the_poll_in_the_end(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = hall.delivered((0, 9))
    for _ in range(5):
        hall.look([], passed_over=frozenset([0]))
    assert hall.acked == []
    monkeypatch.setattr(receive, "EARLY", 0.0)
    for _ in range(2):
        hall.look([], passed_over=frozenset([0]))
    assert (hall.acked, hall.deliveries.unknown) == ([only], 0)


def test_one_look_answers_all_deliveries_about_a_load(hall: Hall) -> None:
    for _ in range(300):
        hall.delivered((0, 9))
    assert hall.look([], limit=20) == {0: 20}
    hall.look([], limit=20)
    assert len(hall.acked) == hall.deliveries.duplicates == 300


def test_a_dead_worker_has_not_looked(hall: Hall) -> None:
    hall.delivered((0, 9))
    for _ in range(5):
        wanted = hall.deliveries.wanted([DOMAIN], 100)
        hall.deliveries.answer(wanted, DeliveredClaim([], [], contended=False, refused=True))
    assert (wanted, hall.acked) == ({0: 10}, [])


def test_what_came_while_a_look_was_under_way_is_not_answered_by_it(hall: Hall) -> None:
    first = hall.delivered((0, 9))
    for _ in range(2):
        wanted = hall.deliveries.wanted([DOMAIN], 100)
        late = hall.delivered((0, 9))
        hall.deliveries.answer(wanted, DeliveredClaim([], [], contended=False))
    assert hall.acked == [first]
    assert late not in hall.acked


def test_the_domains_take_turns(hall: Hall) -> None:
    for n in range(10):
        hall.delivered((n * 1024, n * 1024), domain="a")
        hall.delivered(((100 + n) * 1024, (100 + n) * 1024), domain="b")
    firsts = {min(hall.deliveries.wanted(["a", "b"], 5)) >= 100 for _ in range(2)}
    assert firsts == {True, False}


def test_what_the_broker_took_back_is_not_claimed_for(hall: Hall) -> None:
    hall.delivered((0, 9))
    claimed = hall.delivered((1024, 1033))
    held = lease(1024, 1033)
    hall.deliveries.answer({1: 10}, DeliveredClaim([held], [], contended=False))
    hall.deliveries.forget(DOMAIN)
    assert hall.deliveries.wanted([DOMAIN], 100) == {}
    assert hall.deliveries.next_look([DOMAIN]) is None
    hall.deliveries.gone(held)
    assert hall.acked == [claimed]


def test_a_forged_delivery_asks_for_no_more_than_a_load_can_hold(hall: Hall) -> None:
    hall.delivered(*[(0, 1023)] * 1000)
    assert hall.deliveries.wanted([DOMAIN], 100_000) == {0: 1024}

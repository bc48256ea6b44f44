"""The relay and the recovery sweep: everything written is published in the end, whatever the broker does meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from busload import BatchCommand, CommandBus, Settings, SyncCommandBus, Worker, WorkerSettings
from busload.dispatch import envelope as message
from busload.dispatch.publish import Publisher
from busload.dispatch.relay import Recovery, Relay, recover
from busload.errors import Refusal, RefusalReason
from busload.postgres.plan import Plan
from busload.transports import Message
from tests.brokers.faulty import AWAY, FaultyTransport, forget_unresponsive
from tests.given import DOMAIN, LISTENERS, Database, Given, eventually, short_and_long

POLL = timedelta(milliseconds=50)


@pytest.fixture
async def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture
async def bus(dsn: str, settings: Settings, transport: FaultyTransport) -> AsyncIterator[CommandBus]:
    async with CommandBus(dsn, transport=transport, settings=replace(settings, envelope_size=10)) as bus:
        yield bus


@pytest.fixture
def publisher(bus: CommandBus) -> Publisher:
    return bus.publisher


@pytest.fixture
def relay(bus: CommandBus, publisher: Publisher) -> Relay:
    return Relay(publisher, bus.database.in_transaction, POLL)


async def written(bus: CommandBus, conn: psycopg.AsyncConnection, commands: int = 10) -> UUID:
    """A batch that waits in the outbox: inside somebody's transaction nothing is published."""
    async with conn.transaction():
        return await bus.create_batch(DOMAIN, [BatchCommand("Debit") for _ in range(commands)], conn=conn)


def told(messages: list[Message]) -> Counter[int]:
    """How often each command was published."""
    loads = (load for each in messages for load in message.read(each.body).loads)
    return Counter(id for load in loads for id in load.ids)


def waiting(database: Database) -> int:
    return int(database.value("SELECT coalesce(sum(hi - lo + 1), 0) FROM busload.outbox"))


def make_due(database: Database) -> None:
    database.rows("UPDATE busload.outbox SET due_at = now()")


async def test_what_was_written_is_published_once(
    bus: CommandBus, conn: psycopg.AsyncConnection, relay: Relay, transport: FaultyTransport, database: Database
) -> None:
    await written(bus, conn, 250)
    assert await relay.publish_due() == 250
    assert sorted(told(transport.confirmed).values()) == [1] * 250
    assert database.rows("SELECT DISTINCT transport, publications FROM busload.queue") == [("postgresql", 1)]
    assert await relay.publish_due() == 0
    assert (waiting(database), relay.rounds, relay.failed_rounds, relay.relayed) == (0, 1, 0, 250)
    database.check_invariants()


async def test_relays_at_once_publish_each_load_once(
    bus: CommandBus, conn: psycopg.AsyncConnection, publisher: Publisher, transport: FaultyTransport
) -> None:
    for _ in range(30):
        await written(bus, conn, 3)
    relays = [Relay(publisher, bus.database.in_transaction, POLL) for _ in range(4)]
    assert sum(await asyncio.gather(*(relay.publish_due() for relay in relays))) == 90
    assert sorted(told(transport.confirmed).values()) == [1] * 90


@short_and_long("step", (9,), (1,))
async def test_only_what_was_not_confirmed_is_published_again(
    dsn: str, conn: psycopg.AsyncConnection, transport: FaultyTransport, database: Database, step: int
) -> None:
    """A failure at the first message of 100, at the last and between, or at every one."""
    async with CommandBus(dsn, transport=transport, settings=Settings(envelope_size=1)) as bus:
        relay = Relay(bus.publisher, bus.database.in_transaction, POLL)
        for k in range(0, 100, step):
            batch_id = await written(bus, conn, 100)
            transport.confirmed.clear()
            transport.refuses = lambda index, message, k=k: (  # type: ignore[misc]
                Refusal(RefusalReason.REFUSED, "no") if index == k else None
            )
            assert (await relay.publish_page()).again == 1, k
            transport.refuses = lambda index, message: None
            make_due(database)
            transport.tried.clear()
            assert await relay.publish_due() == 1, k
            assert len(transport.tried) == 1, k
            assert set(told(transport.confirmed).values()) == {1}, k
            assert len(told(transport.confirmed)) == 100, k
            database.rows("DELETE FROM busload.queue WHERE batch_id = %s", batch_id)


async def test_an_outage_of_any_length_loses_nothing_and_ends_fast(
    bus: CommandBus,
    conn: psycopg.AsyncConnection,
    relay: Relay,
    transport: FaultyTransport,
    database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A page per round while it lasts; what waited is due with the first success, said once each."""
    caplog.set_level(logging.INFO, "busload")
    for _ in range(3):
        await written(bus, conn, 20)
    transport.pull()
    for _ in range(4):
        relay._resume_at = 0.0
        assert await relay.once() > 0
        make_due(database)
    assert await relay.once() > 0  # it pauses, whoever wakes it
    assert (relay.failed_rounds, waiting(database), transport.confirmed) == (4, 60, [])
    database.rows("UPDATE busload.outbox SET since = since - interval '31 minutes', due_at = now() + interval '4 min'")
    database.rows("UPDATE busload.command SET created_at = created_at - interval '31 minutes'")
    await written(bus, conn, 1)

    transport.mend()
    relay._resume_at = 0.0
    while waiting(database):
        await relay.once()

    assert sorted(told(transport.confirmed).values()) == [1] * 61
    said = [record.message for record in caplog.records]
    assert len([line for line in said if "Could not reach the broker" in line]) == 1
    assert (
        len([line for line in said if "does not confirm messages about 60 commands or more (UNREACHABLE)" in line]) == 1
    )
    assert len([line for line in said if "can be reached again" in line]) == 1
    database.check_invariants()


async def test_during_an_outage_a_round_takes_one_page(
    bus: CommandBus,
    relay: Relay,
    transport: FaultyTransport,
    database: Database,
) -> None:
    for _ in range(150):
        await bus.send(DOMAIN, "Debit")
    transport.pull()
    assert await relay.publish_due() == 0
    assert database.value("SELECT count(*) FROM busload.outbox WHERE rounds > 0") == 100


@pytest.mark.parametrize(("asked", "rest"), [(120.0, 10.0), (4.0, 4.0), (None, 0.25)])
async def test_a_broker_that_asks_for_time_gets_it(
    bus: CommandBus,
    conn: psycopg.AsyncConnection,
    relay: Relay,
    transport: FaultyTransport,
    database: Database,
    asked: float | None,
    rest: float,
) -> None:
    """Throttling backs off: its loads for as long as it asks, others for ten seconds at most."""
    await written(bus, conn, 10)
    transport.refuses = lambda index, message: Refusal(RefusalReason.THROTTLED, "slow down", asked)
    pause = await relay.once()
    assert 0.9 * rest < pause + 0.2 <= rest + 0.2
    relay._resume_at += 60
    await bus.send(DOMAIN, "Debit")
    assert await relay.once() > 30
    assert (transport.publishes, relay.failed_rounds) == (1, 1)
    assert database.value("SELECT max(due_at) > now() + interval '1 s' * %s FROM busload.outbox", (asked or 1) * 0.5)


async def test_a_queue_that_is_too_busy_does_not_hold_up_the_others(
    bus: CommandBus, relay: Relay, transport: FaultyTransport
) -> None:
    """One domain is throttled, the relay goes on with the next."""
    transport.refuses = lambda index, message: (
        Refusal(RefusalReason.THROTTLED, "slow down", 120.0) if message.queue.endswith("busy") else None
    )
    await bus.send("busy", "Debit")
    await bus.send(DOMAIN, "Debit")
    assert await relay.once() == 0
    await bus.send(DOMAIN, "Debit")
    assert await relay.publish_due() == 1
    assert len(told(transport.confirmed)) == 2


async def test_a_queue_that_does_not_answer_does_not_hold_up_the_others(
    bus: CommandBus,
    relay: Relay,
    publisher: Publisher,
    transport: FaultyTransport,
    database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The broker is not away, whatever the order in which the two are tried; the silent one's pauses hold."""
    caplog.set_level(logging.INFO, "busload")
    transport.refuses = lambda index, message: AWAY if message.queue.endswith("bad") else None
    pauses = "SELECT rounds, due_at > now() + interval '0.5 s' FROM busload.outbox"
    await bus.send("bad", "Debit")
    assert await relay.once() > 0  # nobody has answered yet
    relay._resume_at = 0.0
    await bus.send(DOMAIN, "Debit")
    assert await relay.once() == 0
    for rounds in range(2, 6):
        make_due(database)
        forget_unresponsive(publisher)
        assert await relay.once() == 0  # it alone
        assert database.rows(pauses) == [(rounds, True)]
        await bus.send(DOMAIN, "Debit")
        assert await relay.publish_due() == 1
        assert database.rows(pauses) == [(rounds, True)]
    make_due(database)
    await bus.send(DOMAIN, "Debit")
    assert await relay.once() == 0  # the other one
    assert database.value("SELECT rounds FROM busload.outbox") == 5
    said = [record.message for record in caplog.records]
    assert len([line for line in said if "Could not reach the broker" in line]) == 1
    assert len([line for line in said if "can be reached again" in line]) == 1
    assert len([line for line in said if "does not confirm messages about 1 command or more" in line]) == 1
    assert relay.failed_rounds == 1


async def test_what_waits_for_a_queue_that_is_left_alone_is_not_touched_and_is_due_when_it_answers(
    bus: CommandBus, relay: Relay, publisher: Publisher, transport: FaultyTransport, database: Database
) -> None:
    """Nobody takes it to find that it is not to be tried, not even after another consumer has connected."""
    transport.refuses = lambda index, message: AWAY if message.queue.endswith("bad") else None
    for domain in ("bad", DOMAIN, "bad"):
        await bus.send(domain, "Debit")
    assert await relay.once() == 0
    await bus.send("bad", "Debit")
    relay.broker_is_back()
    before = database.rows("SELECT hi, rounds FROM busload.outbox ORDER BY hi")
    tried = len(transport.tried)
    assert await relay.once() > 0
    assert len(before) == 3 and len(transport.tried) == tried
    assert database.rows("SELECT hi, rounds FROM busload.outbox ORDER BY hi") == before

    transport.mend()
    forget_unresponsive(publisher)
    database.rows("UPDATE busload.outbox SET due_at = now() + interval '5 minutes' WHERE rounds > 0")
    assert await relay.once() == 0  # the one that was not tried yet
    assert database.count("outbox") == 2
    assert await relay.once() == 0
    assert database.count("outbox") == 0


async def test_a_broker_that_was_too_slow_for_all_of_a_page_is_not_away(
    bus: CommandBus,
    conn: psycopg.AsyncConnection,
    relay: Relay,
    transport: FaultyTransport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has confirmed some of it: the relay goes on."""
    monkeypatch.setattr("busload.dispatch.publish.MOST_MESSAGES", 1)
    transport.refuses = lambda index, message: AWAY if len(transport.confirmed) == 2 else None
    await written(bus, conn, 50)
    assert await relay.once() == 0
    assert (relay.relayed, relay.failed_rounds) == (20, 0)
    assert "Could not reach the broker" not in caplog.text


async def test_a_relay_that_publishes_each_command_takes_fewer_loads(
    dsn: str, transport: FaultyTransport, database: Database
) -> None:
    """What is left when its time is over would count as a failed round; more are taken where they are small."""
    async with CommandBus(dsn, transport=transport, settings=Settings(message_per_command=True)) as bus:
        relay = Relay(bus.publisher, bus.database.in_transaction, POLL)
        for _ in range(230):
            await bus.send(DOMAIN, "Debit")
        assert [len((await relay.publish_page()).loads) for _ in range(3)] == [20, 200, 10]


@pytest.mark.parametrize("reason", [RefusalReason.UNROUTABLE, RefusalReason.TOO_LARGE, RefusalReason.REFUSED])
async def test_what_a_person_must_mend_is_an_error_in_the_log_once(
    bus: CommandBus,
    conn: psycopg.AsyncConnection,
    relay: Relay,
    transport: FaultyTransport,
    database: Database,
    caplog: pytest.LogCaptureFixture,
    reason: RefusalReason,
) -> None:
    """The others are published all the same."""
    await written(bus, conn, 20)
    transport.refuses = lambda index, message: Refusal(reason, "no such right") if index == 0 else None
    for _ in range(3):
        await relay.publish_due()
        make_due(database)
    assert waiting(database) == 10
    [record] = [record for record in caplog.records if "does not confirm" in record.message]
    assert record.levelno == logging.ERROR
    assert reason in record.message
    assert "no such right" in record.message
    transport.refuses = lambda index, message: None
    assert await relay.publish_due() == 10


async def test_a_reason_is_not_said_again_while_something_waits_for_it(
    bus: CommandBus,
    relay: Relay,
    transport: FaultyTransport,
    database: Database,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is confirmed in between; once it was gone for a while, it is news."""
    monkeypatch.setattr("busload.dispatch.relay.LAG_EVERY", 0.0)

    def said() -> int:
        return len([record for record in caplog.records if "does not confirm" in record.message])

    async def a_bad_one_then_a_good_one() -> None:
        for domain in ("bad", DOMAIN):
            await bus.send(domain, "Debit")
            await relay.once()
            await relay.once()

    refusal = Refusal(RefusalReason.REFUSED, "no such right")
    transport.refuses = lambda index, message: refusal if message.queue.endswith("bad") else None
    monkeypatch.setattr("busload.dispatch.relay.REPORT_AGAIN", 0.0)
    for _ in range(4):
        await a_bad_one_then_a_good_one()
    assert said() == 1
    for again_after, expected in [(60.0, 1), (0.0, 2)]:
        monkeypatch.setattr("busload.dispatch.relay.REPORT_AGAIN", again_after)
        database.rows("DELETE FROM busload.outbox")
        await relay.once()
        await a_bad_one_then_a_good_one()
        assert said() == expected


async def test_a_mark_that_the_database_does_not_hear_is_said_again(
    bus: CommandBus,
    conn: psycopg.AsyncConnection,
    publisher: Publisher,
    transport: FaultyTransport,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it is never heard, the hold ends, and another relay publishes again."""
    monkeypatch.setattr("busload.dispatch.relay.MARK_AGAIN", (0.001, 0.001))
    deaf = 2

    async def perform(plan: Plan[Any]) -> Any:
        nonlocal deaf
        if getattr(plan, "__name__", "") == "mark" and deaf:
            deaf -= 1
            plan.close()
            raise psycopg.OperationalError("gone")
        return await bus.database.in_transaction(plan)

    await written(bus, conn, 10)
    assert await Relay(publisher, perform, POLL).publish_due() == 10
    assert deaf == 0
    assert sorted(told(transport.confirmed).values()) == [1] * 10

    deaf = 1000
    await written(bus, conn, 10)
    with pytest.raises(psycopg.OperationalError):
        await Relay(publisher, perform, POLL).publish_due()
    assert (await Relay(publisher, bus.database.in_transaction, POLL).publish_page()).ready == 0
    make_due(database)
    assert (await Relay(publisher, bus.database.in_transaction, POLL).publish_page()).ready == 10
    assert max(told(transport.confirmed).values()) == 2
    database.check_invariants()


async def test_drain_publishes_what_is_due_and_runs_it(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection, transport: FaultyTransport, database: Database
) -> None:
    given.handler()
    await written(bus, conn, 250)
    await given.sent()
    assert await given.drained() == 251
    assert database.is_at_rest()
    assert len(told(transport.confirmed)) == 251
    database.check_invariants()


async def test_drain_ends_though_the_broker_is_away(
    bus: CommandBus, given: Given, transport: FaultyTransport, database: Database
) -> None:
    given.handler()
    transport.pull()
    for _ in range(150):
        await given.sent()
    assert await given.drained() == 0
    assert waiting(database) == 150
    transport.mend()
    make_due(database)
    assert await given.drained() == 150
    database.check_invariants()


async def test_what_a_handler_sends_is_published_before_drain_ends(given: Given, database: Database) -> None:
    async def pass_on(command: Any, ctx: Any) -> None:
        await given.bus.send(DOMAIN, "Debit")

    seen = given.handler()
    given.handler("Pass", pass_on)
    await given.sent("Pass")
    assert await given.drained() == 2
    assert len(seen) == 1
    assert database.is_at_rest()


async def test_what_a_handler_in_a_thread_sends_is_published_too(
    given: Given, transport: FaultyTransport, database: Database
) -> None:
    def pass_on(command: Any, ctx: Any) -> None:
        ctx.send(DOMAIN, "Debit")

    seen = given.handler()
    given.bus.handler(DOMAIN, "Pass")(pass_on)
    await given.sent("Pass")
    assert await given.drained() == 2
    assert len(seen) == 1
    assert told(transport.confirmed).total() == 2
    assert database.is_at_rest()


async def test_a_sync_bus_with_a_transport_can_have_a_worker(
    dsn: str, database: Database, worker_settings: WorkerSettings
) -> None:
    with SyncCommandBus(dsn, transport=dsn) as bus:
        seen: list[Any] = []
        bus.handler(DOMAIN, "Debit")(lambda command, ctx: seen.append(command))
        bus.send(DOMAIN, "Debit")
        assert await Worker(bus, settings=worker_settings).drain() == 1
        assert len(seen) == 1
        assert database.is_at_rest()


async def test_the_sweep_puts_right_what_crashes_left(
    bus: CommandBus, conn: psycopg.AsyncConnection, publisher: Publisher, transport: FaultyTransport, database: Database
) -> None:
    """Unpublished leftovers, confirmed messages that were lost, reports that were not closed."""
    lost = await written(bus, conn, 20)
    await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    before = {each.id for each in transport.confirmed}
    transport.confirmed.clear()
    database.rows("DELETE FROM busload.message")
    database.rows("UPDATE busload.queue SET published_at = published_at - interval '6 minutes'")
    left = await written(bus, conn, 30)
    closed = await written(bus, conn, 7)
    database.rows("DELETE FROM busload.outbox WHERE batch_id = %s", closed)  # other hands

    found = await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))

    assert (found.relayed, found.published_again) == (30, 20)
    assert found.closed == 1
    assert len(told(transport.confirmed)) == 50
    assert before.isdisjoint(each.id for each in transport.confirmed)  # or a broker takes it for the same message
    assert database.value("SELECT count(*) FROM busload.message") == 5
    again = await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    assert (again.relayed, again.published_again, again.closed) == (0, 0, 0)
    for batch_id in (lost, left):
        assert database.value("SELECT status FROM busload.dispatch WHERE batch_id = %s", batch_id) == "success"


async def test_sweepers_at_once_are_safe(
    bus: CommandBus, conn: psycopg.AsyncConnection, publisher: Publisher, transport: FaultyTransport, database: Database
) -> None:
    for _ in range(10):
        await written(bus, conn, 10)
    found = await asyncio.gather(
        *(recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5)) for _ in range(4))
    )
    assert sum(one.relayed for one in found) == 100
    assert sorted(told(transport.confirmed).values()) == [1] * 100
    database.check_invariants()


async def test_one_groups_failure_does_not_stop_the_next(
    bus: CommandBus, conn: psycopg.AsyncConnection, publisher: Publisher, transport: FaultyTransport, database: Database
) -> None:
    bad = await written(bus, conn, 10)
    good = await written(bus, conn, 10)
    [(lo,)] = database.rows("SELECT lo FROM busload.outbox WHERE batch_id = %s", bad)
    transport.refuses = lambda index, each: (
        Refusal(RefusalReason.TOO_LARGE, "no") if message.read(each.body).loads[0].lo == lo else None
    )
    found = await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    assert found.relayed == 10
    assert database.rows("SELECT batch_id FROM busload.outbox") == [(bad,)]
    assert database.rows("SELECT batch_id FROM busload.queue") == [(good,)]


async def test_a_sweep_leaves_a_broker_that_is_away_alone(
    bus: CommandBus, conn: psycopg.AsyncConnection, publisher: Publisher, transport: FaultyTransport, database: Database
) -> None:
    """A ring that cannot be heard is not used up."""
    await written(bus, conn, 10)
    await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    database.rows("UPDATE busload.queue SET published_at = published_at - interval '6 minutes'")
    await written(bus, conn, 10)
    transport.pull()
    found = await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    assert (found.relayed, found.published_again, waiting(database)) == (0, 0, 10)
    assert database.rows("SELECT publications FROM busload.queue") == [(1,)]


async def test_a_sweep_goes_on_though_one_queue_does_not_answer(
    bus: CommandBus, conn: psycopg.AsyncConnection, publisher: Publisher, transport: FaultyTransport, database: Database
) -> None:
    """What is written is published, and what nobody came for is rung for."""
    await written(bus, conn, 10)
    await bus.send("bad", "Debit")
    await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    database.rows("UPDATE busload.queue SET published_at = published_at - interval '6 minutes'")
    await written(bus, conn, 7)
    await bus.send("bad", "Debit")
    transport.refuses = lambda index, message: AWAY if message.queue.endswith("bad") else None
    found = await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    assert (found.relayed, found.published_again, waiting(database)) == (7, 10, 1)


async def test_the_first_sweep_is_at_a_random_point(
    bus: CommandBus, publisher: Publisher, conn: psycopg.AsyncConnection, database: Database
) -> None:
    await written(bus, conn, 10)
    every = timedelta(minutes=5)
    pauses = [await Recovery(publisher, bus.database.in_transaction, every, every).once() for _ in range(20)]
    assert all(0 <= pause <= 300 for pause in pauses)
    assert len(set(pauses)) > 1
    assert waiting(database) == 10
    recovery = Recovery(publisher, bus.database.in_transaction, every, every)
    await recovery.once()
    assert await recovery.once() == 300
    assert waiting(database) == 0


async def test_a_running_worker_publishes_what_it_hears_of(
    bus: CommandBus, given: Given, worker_settings: WorkerSettings, database: Database
) -> None:
    """By the notification, however long it would wait otherwise."""
    given.handler()
    patient = replace(worker_settings, poll_every=timedelta(seconds=3600), broker_poll_every=timedelta(seconds=3600))
    async with given.running(settings=patient) as worker:
        await eventually(lambda: worker.stats.broker is not None and worker.stats.broker.connected)
        await eventually(lambda: database.value(LISTENERS))
        await given.sent()
        await eventually(lambda: worker.stats.completed == 1)
        assert worker.stats.broker is not None
        assert (worker.stats.broker.relayed + worker.stats.broker.claimed) >= 1
    assert database.is_at_rest()


async def test_a_running_worker_recovers_by_itself(
    bus: CommandBus, given: Given, worker_settings: WorkerSettings, transport: FaultyTransport, database: Database
) -> None:
    """Also for domains that it does not serve: what nobody claimed for five minutes is published again."""
    bus.handler("mail", "Send")(lambda command, ctx: None)
    await given.batch(commands=10)
    assert sorted(told(transport.confirmed).values()) == [1] * 10
    database.rows("UPDATE busload.queue SET published_at = published_at - interval '6 minutes'")
    async with given.running(domains=["mail"], settings=replace(worker_settings, recover_every=POLL)):
        await eventually(lambda: sorted(told(transport.confirmed).values()) == [2] * 10)


async def test_the_figures_say_what_waits_and_why(
    bus: CommandBus, given: Given, conn: psycopg.AsyncConnection, transport: FaultyTransport, monkeypatch: Any
) -> None:
    monkeypatch.setattr("busload.dispatch.relay.LAG_EVERY", 0.0)
    given.handler()
    transport.pull()
    await written(bus, conn, 30)
    async with given.running() as worker:
        await eventually(lambda: worker.stats.broker and worker.stats.broker.failed_rounds)
        await eventually(lambda: worker.stats.broker and any(one.failed for one in worker.stats.broker.outbox))
        assert worker.stats.broker is not None
        [waits] = worker.stats.broker.outbox
        assert (waits.transport, waits.commands, waits.failed) == ("postgresql", 30, 30)
        assert not worker.stats.broker.connected
        text = worker.metrics()
        for name, value in [("broker_connected", 0), ("outbox_commands", 30), ("outbox_failed", 30)]:
            assert f'busload_{name}{{worker="{worker.name}",transport="postgresql"}} {value}\n' in text
        assert (
            f'busload_broker_messages_total{{worker="{worker.name}",transport="postgresql",result="unreachable"}}'
            in text
        )
        transport.mend()
        await eventually(lambda: worker.stats.completed == 30)
        await eventually(lambda: worker.stats.broker and worker.stats.broker.connected)
        await eventually(lambda: worker.stats.broker and not worker.stats.broker.outbox)
        assert worker.stats.broker.confirmed >= 3


async def test_a_worker_without_a_broker_says_nothing_about_one(
    dsn: str, database: Database, worker_settings: Any
) -> None:
    async with CommandBus(dsn) as bus:
        given = Given(bus, database, worker_settings)
        given.handler()
        await given.sent()
        worker = given.worker()
        assert await worker.drain() == 1
        assert worker.stats.broker is None
        assert "broker" not in worker.metrics()


async def test_what_is_due_but_locked_is_looked_at_again_in_a_while(
    bus: CommandBus, relay: Relay, conn: psycopg.AsyncConnection
) -> None:
    """Not every millisecond, for as long as somebody holds the row."""
    await written(bus, conn)
    async with conn.transaction():
        await conn.execute("SELECT FROM busload.outbox FOR UPDATE")
        assert await relay.once() == POLL.total_seconds()  # the shorter of the two here
        assert await Relay(bus.publisher, bus.database.in_transaction, timedelta(seconds=9)).once() == 0.25
    assert await relay.once() == 0


async def test_a_sweep_leaves_a_broker_alone_that_has_no_time(
    bus: CommandBus, transport: FaultyTransport, publisher: Publisher, conn: psycopg.AsyncConnection
) -> None:
    """Otherwise one sweep would throw the whole outbox at it."""
    transport.refuses = lambda index, message: Refusal(RefusalReason.THROTTLED, "busy", after=30)
    for _ in range(120):
        await written(bus, conn, 1)
    await recover(publisher, bus.database.in_transaction, publish_again_after=timedelta(minutes=5))
    assert transport.publishes == 1


async def test_commands_of_a_transport_that_nobody_serves_are_reported(
    bus: CommandBus, relay: Relay, conn: psycopg.AsyncConnection, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await written(bus, conn, 7)
    database.rows("UPDATE busload.outbox SET transport = 'pigeon', since = now() - interval '2 minutes'")
    await relay.once()
    [told] = [record.getMessage() for record in caplog.records if "pigeon" in record.getMessage()]
    assert "7 commands" in told and "busload outbox reroute --all" in told

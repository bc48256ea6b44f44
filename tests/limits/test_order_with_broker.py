"""Order with a broker: a message is only a reason to look, so lost, doubled and refused ones change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest

from busload import BatchCommand, CommandBus, ConcurrencyLimit, Settings, WorkerSettings
from busload.errors import Refusal, RefusalReason
from busload.explain import Explanation, Reason
from busload.limits import order
from busload.transports import Message, Transport, find_transport
from tests.brokers.faulty import FaultyTransport
from tests.given import DOMAIN, Database, Given, eventually
from tests.limits.test_order import Ledger

IN_ORDER = ConcurrencyLimit(1, by="key", ordered=True)
REFUSED = Refusal(RefusalReason.REFUSED, "the queue is full")


def careless(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Let the broker lose each third message after it has confirmed it, and deliver the others twice; the lost ones."""
    numbers, lost, publish = count(), list[Message](), transport.publish

    async def publish_some(messages: Sequence[Message]) -> None:
        kept = [(each, next(numbers) % 3) for each in messages]
        lost.extend(each for each, n in kept if n == 0)
        twice = [replace(each, id=str(uuid4())) for each, n in kept if n]  # another id, or some brokers drop it
        await publish([each for each, n in kept if n] + twice[::-1])

    monkeypatch.setattr(transport, "publish", publish_some)
    return lost


@pytest.mark.parametrize("broker", ["redis", "nats"])
async def test_with_a_broker_that_loses_and_doubles_messages_commands_of_a_key_run_in_order(
    dsn: str,
    settings: Settings,
    database: Database,
    worker_settings: WorkerSettings,
    broker: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = find_transport(request.getfixturevalue(f"{broker}_url"))
    lost = careless(transport, monkeypatch)
    ledger, domain = Ledger(), f"ordered-{uuid4().hex[:8]}"
    often = replace(worker_settings, broker_poll_every=timedelta(milliseconds=200))
    async with CommandBus(dsn, transport=transport, settings=replace(settings, envelope_size=5)) as bus:
        bus.handler(domain, "Debit", concurrency_limit=IN_ORDER)(ledger.call)
        given = Given(bus, database, often)
        async with running(given, domain, 3):
            for first in range(0, 120, 30):  # as batches and one by one, while workers run
                data = [{"key": n % 4, "n": n} for n in range(first, first + 30)]
                await bus.create_batch(domain, [BatchCommand("Debit", data=each) for each in data[:20]])
                for each in data[20:]:
                    await bus.send(domain, "Debit", data=each)
            await eventually(lambda: ledger.all_ran == 120)
            await eventually(database.is_at_rest)
    assert ledger.in_order and lost
    assert sorted(n for ran in ledger.ran.values() for n in ran) == list(range(120))
    database.check_invariants()


@asynccontextmanager
async def running(given: Given, domain: str, workers: int) -> AsyncIterator[None]:
    if not workers:
        yield
        return
    async with given.running(domains=[domain], concurrency=10), running(given, domain, workers - 1):
        yield


# -- what is stuck in the outbox ---------------------------------------------------------------------------------------


@pytest.fixture
async def transport(dsn: str) -> FaultyTransport:
    return FaultyTransport(dsn)


@pytest.fixture
async def bus(dsn: str, settings: Settings, transport: FaultyTransport) -> AsyncIterator[CommandBus]:
    async with CommandBus(dsn, transport=transport, settings=settings) as bus:
        yield bus


async def debit(bus: CommandBus, n: int, key: int = 0) -> UUID:
    return await bus.create_batch(DOMAIN, [BatchCommand("Debit", data={"key": key, "n": n})])


async def test_one_message_that_the_broker_refuses_does_not_stop_the_domain(
    bus: CommandBus, transport: FaultyTransport, given: Given, database: Database
) -> None:
    """The broker never takes the message about the first command; the others are published and wait behind it."""
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER)
    transport.refuse(REFUSED, 0)
    first = await debit(bus, 0)
    assert database.rows("SELECT rounds FROM busload.outbox") == [(1,)]
    transport.refuses = lambda index, message: REFUSED if message.id == transport.tried[0].id else None
    for n in range(1, 6):
        await debit(bus, n, key=n % 2)
    assert (database.count("outbox"), database.count("queue")) == (1, 5)
    async with given.running(concurrency=5):
        await eventually(lambda: ledger.all_ran == 6)
        await eventually(database.is_at_rest)
    assert ledger.ran == {"0": [0, 2, 4], "1": [1, 3, 5]} and ledger.in_order
    rerouted = "SELECT batch_id, operator, details ->> 'last_error' FROM busload.event WHERE type = 'REROUTED'"
    assert database.rows(rerouted) == [(first, None, "the queue is full")]
    report = await bus.get_dispatch(DOMAIN, first)
    assert report is not None and report.published_at is not None
    database.check_invariants()


async def in_the_outbox(bus: CommandBus, database: Database, **columns: Any) -> UUID:
    """An older command in the outbox, for so long, and a batch of two that is ready behind it; the batch."""
    stuck, batch_id = await debit(bus, 0), uuid4()
    commands = [BatchCommand("Debit", data={"key": 1, "n": n}) for n in (1, 2)]
    await bus.create_batch(DOMAIN, commands, batch_id=batch_id)
    back_into_the_outbox(database, stuck, **columns)
    return batch_id


def back_into_the_outbox(database: Database, batch_id: UUID, **columns: Any) -> None:
    values = {"since": timedelta(0), "rounds": 0, "error": None} | columns
    database.rows(
        "WITH gone AS (DELETE FROM busload.queue WHERE batch_id = %s RETURNING *)"
        " INSERT INTO busload.outbox (lo, hi, domain, batch_id, fair, transport, relay, due_at, since, rounds, error)"
        " SELECT lo, hi, domain, batch_id, fair, transport, gen_random_uuid(), now() + interval '1 h',"
        "        now() - %s::interval, %s, %s FROM gone",
        batch_id,
        *values.values(),
    )


@pytest.mark.parametrize(
    ("columns", "ran"),
    [
        ({}, []),
        ({"since": timedelta(seconds=9)}, []),
        ({"since": timedelta(seconds=11)}, [1, 2]),
        ({"rounds": 1}, [1, 2]),
    ],
)
async def test_what_is_being_published_is_waited_for_and_what_is_stuck_goes_without_the_broker(
    bus: CommandBus, given: Given, database: Database, columns: dict[str, Any], ran: list[int]
) -> None:
    ledger = Ledger()
    given.handler(function=ledger.call, concurrency_limit=IN_ORDER)
    await in_the_outbox(bus, database, **columns)
    await given.drained()
    assert ledger.ran["1"] == ran
    assert database.count("outbox") == (0 if ran else 1)


async def explained(bus: CommandBus, batch_id: UUID, what: str) -> Explanation:
    if what == "batch":
        return await bus.explain_batch(DOMAIN, batch_id)
    commands = await bus.list_batch_commands(DOMAIN, batch_id)
    return await bus.explain_command(DOMAIN, commands[-1].command_id)


def behind(explanation: Explanation) -> list[Reason]:
    return [reason for reason in explanation.reasons if reason.code == "BEHIND_UNPUBLISHED"]


@pytest.mark.parametrize(("what", "number"), [("batch", "2 commands are"), ("command", "1 command is")])
async def test_explain_says_what_stops_an_ordered_domain(
    bus: CommandBus, database: Database, what: str, number: str
) -> None:
    database.perform(order.register_domain(DOMAIN))
    batch_id = await in_the_outbox(bus, database, since=timedelta(minutes=3), rounds=2, error="the queue is full")
    oldest = database.value("SELECT command_id FROM busload.command ORDER BY id LIMIT 1")
    [reason] = behind(await explained(bus, batch_id, what))
    assert reason.count == int(number[0])
    assert reason.since == database.value("SELECT since FROM busload.outbox")
    assert reason.message == (
        f"{number} ready, but domain 'payments' runs in the order of sending, and an older command, {oldest}, is in "
        "the outbox since 3 min: 2 rounds of publishing failed, the queue is full."
    )
    assert "`busload outbox reroute --domain payments --all`" in reason.advice
    assert reason.details == {
        "domain": DOMAIN, "command_id": oldest, "transport": "postgresql", "rounds": 2, "error": "the queue is full",
    }  # fmt: skip


async def test_explain_says_so_only_where_the_order_counts_and_only_of_what_waits_for_long(
    bus: CommandBus, database: Database
) -> None:
    batch_id = await in_the_outbox(bus, database, since=timedelta(minutes=3))
    assert behind(await bus.explain_batch(DOMAIN, batch_id)) == []  # nobody runs this domain in order
    database.perform(order.register_domain(DOMAIN))
    assert len(behind(await bus.explain_batch(DOMAIN, batch_id))) == 1
    database.rows("UPDATE busload.outbox SET since = now() + interval '1 min'")
    assert behind(await bus.explain_batch(DOMAIN, batch_id)) == []  # it is being published right now
    await bus.outbox.reroute(failed_only=False)
    back_into_the_outbox(database, await debit(bus, 3), since=timedelta(minutes=3))
    assert behind(await bus.explain_batch(DOMAIN, batch_id)) == []  # it was sent later


async def test_explain_does_not_speak_of_priorities_where_they_do_not_count(
    bus: CommandBus, given: Given, database: Database
) -> None:
    batch_id = await debit(bus, 0)
    await bus.create_batch(DOMAIN, [BatchCommand("Debit", priority=5)])
    given.registered_worker()
    assert [reason.code for reason in (await bus.explain_batch(DOMAIN, batch_id)).reasons] == ["BEHIND_PRIORITY"]
    database.perform(order.register_domain(DOMAIN))
    assert (await bus.explain_batch(DOMAIN, batch_id)).reasons == ()

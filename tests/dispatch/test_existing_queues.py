"""A domain may use a queue that others have made, under the name that it has: on every broker, in both faces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import aiormq
import nats
import psycopg
import pytest
from redis.asyncio import Redis

from busload import BatchCommand, Command, CommandBus, HandlerContext, Settings, SyncCommandBus, Worker, WorkerSettings
from busload.errors import TransportMisconfiguredError
from busload.testing.messages import connected, messages, receiving
from busload.transports import Transport, find_transport
from busload.worker.stats import BrokerStats
from tests.brokers.lookalike import ServiceBus
from tests.faces import FACES, bus_of
from tests.given import WITHIN, Database, eventually

DOMAIN, OTHER = "tiles", "mail"
NOWHERE = "postgresql://ada@127.0.0.1:1/nowhere"
WRONG: list[tuple[Any, str]] = [
    (7, "queues must be a dict of domains"),
    ([("tiles", "sb-tasks")], "queues must be a dict of domains"),
    ({"no name": "sb-tasks"}, "domains as its keys, found 'no name'"),
    ({1: "sb-tasks"}, "domains as its keys, found 1"),
    ({"tiles": ""}, "The queue of 'tiles' must be .* found ''"),
    ({"tiles": None}, "found None"),
    ({"tiles": "sb tasks"}, "found 'sb tasks'"),
    ({"tiles": "a" * 241}, "The queue of 'tiles' must be"),
    ({"tiles": "sb-tasks", "mail": "sb-tasks"}, "given to two domains, 'tiles' and 'mail'"),
    ({"tiles": "busload.mail"}, "given to two domains, 'mail' and 'tiles'"),
]


@dataclass
class Existing:
    """A broker, the name of a queue that was made there by its own means, and how many messages the queue holds."""

    url: str
    queue: str
    missing: str


async def _rabbitmq(request: pytest.FixtureRequest) -> Existing:
    """Of the classic type, which busload would not make."""
    url, queue = request.getfixturevalue("rabbitmq_url"), f"sb-tasks-{uuid4().hex}"
    connection = await aiormq.connect(url)
    await (await connection.channel()).queue_declare(queue, durable=True)
    await connection.close()
    return Existing(url, queue, f"{queue}-not")


async def _nats(request: pytest.FixtureRequest) -> Existing:
    url, queue = request.getfixturevalue("nats_url"), f"sb-tasks-{uuid4().hex}"
    client = await nats.connect(url)
    await client.jetstream().add_stream(name=queue, subjects=[queue], retention="workqueue", description="ours")
    await client.close()
    return Existing(url, queue, f"{queue}-not")


async def _redis(request: pytest.FixtureRequest) -> Existing:
    url, queue = request.getfixturevalue("redis_url"), f"sb-tasks-{uuid4().hex}"
    async with Redis.from_url(url) as redis:
        await redis.xgroup_create(queue, "others", mkstream=True)
    return Existing(url, queue, f"{queue}-not")


async def _servicebus(request: pytest.FixtureRequest) -> Existing:
    """With capitals, which busload would spell otherwise."""
    broker: ServiceBus = request.getfixturevalue("servicebus")
    queue = broker.create(f"SB-Tasks-{uuid4().hex}")
    return Existing(broker.url, queue, f"{queue}-not")


async def _pgmq(request: pytest.FixtureRequest) -> Existing:
    """Under a name that does not begin with busload."""
    url, queue = request.getfixturevalue("pgmq_url"), f"sb_tasks_{uuid4().hex[:20]}"
    with psycopg.connect(url.replace("pgmq:", "postgresql:"), autocommit=True) as conn:
        conn.execute("SELECT pgmq.create(%s)", [queue])
    return Existing(url, queue, f"{queue}_not")


BROKERS: dict[str, Callable[[pytest.FixtureRequest], Awaitable[Existing]]] = {
    "rabbitmq": _rabbitmq,
    "nats": _nats,
    "redis": _redis,
    "servicebus": _servicebus,
    "pgmq": _pgmq,
}


@pytest.fixture(params=BROKERS)
async def existing(request: pytest.FixtureRequest) -> Existing:
    return await BROKERS[request.param](request)


async def depth(transport: Transport, queue: str) -> int:
    """As the broker tells it or, if it does not, by looking."""
    found = await transport.depth(queue)
    return len(await transport.peek(queue, limit=100) or []) if found is None else found


async def test_a_domain_is_published_to_its_queue_and_served_from_it(
    existing: Existing, dsn: str, database: Database, worker_settings: WorkerSettings
) -> None:
    """The worker hears of it by a message: it would poll in ten minutes."""
    queues, slowly = {DOMAIN: existing.queue}, timedelta(minutes=10)
    polling = replace(worker_settings, poll_every=slowly, broker_poll_every=slowly)
    async with CommandBus(dsn, transport=existing.url, queues=queues) as bus, connected(existing.url) as broker:
        broker.existing = frozenset([existing.queue])

        @bus.handler(DOMAIN, "Debit")
        async def debit(command: Command, ctx: HandlerContext) -> None:
            pass

        await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3)
        assert await depth(broker, existing.queue) == 1
        async with Worker(bus, settings=polling) as worker:

            def told() -> BrokerStats:
                stats = worker.stats.broker
                assert stats is not None
                return stats

            await eventually(lambda: told().connected and told().received)
            before = told().received
            batch_id = await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 3)
            await bus.wait_batch(DOMAIN, batch_id, timeout=WITHIN)
            await eventually(lambda: told().received > before)
            async with asyncio.timeout(WITHIN):  # its messages are acknowledged
                while await depth(broker, existing.queue):
                    await asyncio.sleep(0.02)
        compared = {each.domain: each.queue for each in await bus.outbox.reconcile()}
        assert compared == {DOMAIN: existing.queue}
    database.check_invariants()


async def test_a_queue_that_should_exist_is_not_made(existing: Existing, dsn: str) -> None:
    """Its commands wait in the outbox, with what to do about it; those of other domains are published."""
    async with connected(existing.url) as broker:
        broker.existing = frozenset([existing.missing])
        with pytest.raises(TransportMisconfiguredError, match=existing.missing):
            await broker.declare([existing.missing])
    queues = {DOMAIN: existing.missing, OTHER: existing.queue}
    async with CommandBus(dsn, transport=existing.url, queues=queues) as bus:
        await bus.create_batch(DOMAIN, [BatchCommand("Debit")] * 2)
        await bus.create_batch(OTHER, [BatchCommand("Debit")])
        [waiting] = await bus.outbox.list()
        assert (waiting.domain, waiting.commands) == (DOMAIN, 2)
        assert waiting.error is not None and existing.missing in waiting.error


@pytest.mark.parametrize("face", FACES)
async def test_the_environment_and_settings_name_queues_too(
    dsn: str, rabbitmq_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, face: str
) -> None:
    existing = await _rabbitmq(request)
    monkeypatch.setenv("BUSLOAD_QUEUES", f"{DOMAIN}={existing.queue}, {OTHER} = elsewhere")
    assert Settings().queues == {DOMAIN: existing.queue, OTHER: "elsewhere"}
    async with bus_of(face, dsn, transport=rabbitmq_url) as bus:
        await bus.send(DOMAIN, "Debit")
        await bus.recover()
    async with connected(rabbitmq_url) as broker, receiving(broker, existing.queue) as receiver:
        [delivery] = await receiver.take(1)
        await delivery.ack()
    for wrong in ("tiles", "tiles=a,tiles=b"):
        monkeypatch.setenv("BUSLOAD_QUEUES", wrong)
        with pytest.raises(ValueError, match="BUSLOAD_QUEUES must be domain=queue pairs"):
            Settings()


async def test_what_nobody_can_read_goes_where_the_dead_letters_of_the_queue_go(
    rabbitmq_url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    existing = await _rabbitmq(request)
    async with connected(rabbitmq_url) as broker:
        broker.existing = frozenset([existing.queue])
        await broker.declare([existing.queue])
        await broker.publish(messages(existing.queue, [b"gibberish"]))
        async with receiving(broker, existing.queue) as receiver:
            [delivery] = await receiver.take(1)
            await delivery.reject("It is no JSON")
        assert "as its dead letters are: It is no JSON" in caplog.text


@pytest.mark.parametrize("face", [CommandBus, SyncCommandBus])
@pytest.mark.parametrize(("queues", "why"), WRONG)
def test_a_wrong_mapping_is_refused(face: type[CommandBus] | type[SyncCommandBus], queues: Any, why: str) -> None:
    with pytest.raises(TransportMisconfiguredError, match=why):
        face(NOWHERE, transport=NOWHERE, queues=queues)
    with pytest.raises(TransportMisconfiguredError, match=why):
        face(NOWHERE, transport=NOWHERE, settings=Settings(queues=queues))
    with pytest.raises(ValueError, match="needs a transport"):
        face(NOWHERE, queues={"tiles": "sb-tasks"})


def test_a_transport_of_ones_own_is_told_too() -> None:
    transport = find_transport(NOWHERE)
    CommandBus(NOWHERE, transport=transport, queues={"tiles": "sb-tasks"})
    SyncCommandBus(NOWHERE, transport=transport, queues={"mail": "sb-mail"})
    assert transport.existing == {"sb-tasks", "sb-mail"}

"""Commands in the database and at a broker: created, published and drained, on each transport and without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.brokers import told_url
from bench.case import Case, Measured
from bench.clock import timed
from bench.ours import DOMAIN, commands, expect, expect_completed, nothing, our_case
from busload import CommandBus, Settings, Worker, WorkerSettings
from busload.dispatch.strategy import DispatchName
from busload.transports import Delivery, Message, Transport, find_transport

NONE = "none"
TRANSPORTS = {
    NONE: "no broker",
    "postgresql": "PostgreSQL as a broker",
    "pgmq": "PGMQ",
    "rabbitmq": "RabbitMQ",
    "nats": "NATS JetStream",
    "redis": "Redis Streams",
    "servicebus": "Service Bus, look-alike",
}
INSIDE = (NONE, "postgresql", "pgmq")
"""Those that are in the database of the commands, and need no server beside it."""

CREATIONS: dict[str, DispatchName] = {"two-phase": "two_phase", "checkpoint": "checkpoint", "optimistic": "optimistic"}
"""The ways to create, as they stand in the names of cases, and as the bus calls them."""

CELERY = {"rabbitmq": "celery-rabbitmq", "redis": "celery"}
"""Who is measured on the same broker."""

CONNECTED_WITHIN = 60.0
"""Seconds after the start of a worker within which it takes commands by messages."""

FORGOTTEN_WITHIN = 30.0
"""Seconds after the last settlement within which the broker has no message left."""


def prefix_of(dsn: str) -> str:
    """Each database has queues of its own: a broker outlives it, and keeps what nobody took."""
    return f"bench-{conninfo_to_dict(dsn)['dbname']}"


def queue_of(dsn: str) -> str:
    return f"{prefix_of(dsn)}.{DOMAIN}"


def url_of(dsn: str, transport: str) -> str:
    inside = {"postgresql": dsn, "pgmq": dsn.replace("postgresql:", "pgmq:", 1)}
    return inside[transport] if transport in inside else told_url()


@asynccontextmanager
async def connected(dsn: str, transport: str, **settings: Any) -> AsyncIterator[CommandBus]:
    """A bus with the schema checked and, if it has a broker, its queue there."""
    url = None if transport == NONE else url_of(dsn, transport)
    async with CommandBus(dsn, transport=url, settings=Settings(queue_prefix=prefix_of(dsn), **settings)) as bus:
        await bus.list_batches(DOMAIN)
        if bus.transport is not None:
            await bus.transport.declare([queue_of(dsn)])
        yield bus


async def install_pgmq(dsn: str, size: int) -> None:
    from pgmq.install import get_embedded_install_sql

    with psycopg.connect(dsn) as conn:
        conn.execute(get_embedded_install_sql())


async def fill_outbox(dsn: str, size: int) -> None:
    async with connected(dsn, "rabbitmq") as bus:
        await bus.create_batch(DOMAIN, commands(size), dispatch="relay")


async def create(dsn: str, size: int, *, transport: str, strategy: DispatchName | None) -> Measured:
    """From the call until it returns: everything is committed, confirmed by the broker, and marked as ready."""
    batch = commands(size)
    async with connected(dsn, transport) as bus:
        await bus.create_batch(DOMAIN, commands(1), dispatch=strategy)
        before = await depth(bus, dsn)
        with timed(dsn) as lap:
            await bus.create_batch(DOMAIN, batch, dispatch=strategy)
        facts = new_messages(before, await depth(bus, dsn))
    expect(dsn, "SELECT count(*) FROM busload.command", size + 1)
    expect_published(dsn, size + 1)
    return lap.measured(size, facts=facts)


async def relay(dsn: str, size: int, *, message_per_command: bool) -> Measured:
    """What waits in the outbox for RabbitMQ, published and marked as a worker's relay does it."""
    async with connected(dsn, "rabbitmq", message_per_command=message_per_command) as bus:
        await bus.create_batch(DOMAIN, commands(1), dispatch="two_phase")
        before = await depth(bus, dsn)
        with timed(dsn) as lap:
            recovered = await bus.recover()
        facts = new_messages(before, await depth(bus, dsn))
    assert recovered.relayed == size, f"relayed {recovered.relayed} of {size}"
    expect_published(dsn, size + 1)
    return lap.measured(size, facts=facts)


class Gate(Transport):
    """A transport that publishes nothing while it is closed."""

    def __init__(self, behind: Transport) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        self.opened.set()
        self.name, self.max_bytes = behind.name, behind.max_bytes  # type: ignore[misc]
        self._behind = behind

    async def declare(self, queues: Sequence[str]) -> None:
        await self._behind.declare(queues)

    async def publish(self, messages: Sequence[Message]) -> None:
        if not self.opened.is_set():
            self.reached.set()
            await self.opened.wait()
        await self._behind.publish(messages)

    def deliveries(self, queue: str, *, prefetch: int) -> AsyncIterator[Delivery]:
        return self._behind.deliveries(queue, prefetch=prefetch)

    async def aclose(self) -> None:
        await self._behind.aclose()

    def __repr__(self) -> str:
        return repr(self._behind)


async def drain(dsn: str, size: int, *, transport: str) -> Measured:
    """From the first message until all is settled, with a worker that was idle. All commands come by messages.

    A worker that starts while commands wait takes most of them from the database, whatever the broker does. So they are
    written while it runs, and held where it cannot see them until the clock does.
    """
    gate = Gate(find_transport(url_of(dsn, transport)))
    async with (
        connected(dsn, transport) as bus,
        CommandBus(dsn, transport=gate, settings=bus.settings) as creator,
        _working(bus) as worker,
    ):
        warm = await deliver(creator, worker)
        gate.opened.clear()
        batch_id = uuid4()
        creation = creator.create_batch(DOMAIN, commands(size), batch_id=batch_id, dispatch="two_phase")
        creating = asyncio.create_task(creation)
        await gate.reached.wait()
        warm += await deliver(bus, worker)  # some look the rarer, the longer they found nothing
        before = delivered(worker)
        with timed(dsn) as lap:
            gate.opened.set()
            await bus.wait_batch(DOMAIN, batch_id, timeout=120)
        await creating
        facts = {"delivered": delivered(worker) - before}
        await forgotten(bus, dsn)
    expect_drained(dsn, size + warm)
    return lap.measured(size, facts=facts)


async def deliver(bus: CommandBus, worker: Worker) -> int:
    """Create single commands until the worker has taken one by its message, so all are connected; says how many."""
    before, sent = delivered(worker), 0
    async with asyncio.timeout(CONNECTED_WITHIN):
        while delivered(worker) == before:
            batch_id = await bus.create_batch(DOMAIN, commands(1), dispatch="two_phase")
            await bus.wait_batch(DOMAIN, batch_id)
            sent += 1
    return sent


def delivered(worker: Worker) -> int:
    """How many commands a worker has claimed for messages."""
    broker = worker.stats.broker
    return 0 if broker is None else broker.claimed


async def drain_alone(dsn: str, size: int) -> Measured:
    """The same without a broker: from the commit, until which the worker sees nothing."""
    async with connected(dsn, NONE) as bus, _working(bus):
        first = await bus.create_batch(DOMAIN, commands(1))
        await bus.wait_batch(DOMAIN, first, timeout=60)
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            batch_id = await bus.create_batch(DOMAIN, commands(size), conn=conn)
            with timed(dsn) as lap:
                await conn.commit()
                await bus.wait_batch(DOMAIN, batch_id, timeout=120)
    expect_drained(dsn, size + 1)
    return lap.measured(size)


@asynccontextmanager
async def _working(bus: CommandBus) -> AsyncIterator[Worker]:
    """A worker that, where there is a broker, looks into the database only when that calls."""
    bus.handler(DOMAIN, "Nothing")(nothing)
    worker = Worker(bus, settings=WorkerSettings(broker_poll_every=timedelta(hours=1)))
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await running


async def depth(bus: CommandBus, dsn: str) -> dict[str, float]:
    """How many messages are at the broker, where it tells that."""
    found = None if bus.transport is None else await bus.transport.depth(queue_of(dsn))
    return {} if found is None else {"messages": found}


def new_messages(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: count - before[name] for name, count in after.items()}


async def forgotten(bus: CommandBus, dsn: str) -> None:
    async with asyncio.timeout(FORGOTTEN_WITHIN):
        while (await depth(bus, dsn)).get("messages"):
            await asyncio.sleep(0.02)


def expect_published(dsn: str, size: int) -> None:
    expect(dsn, "SELECT count(*) FROM busload.outbox", 0)
    expect(dsn, "SELECT coalesce(sum(hi - lo + 1), 0)::bigint FROM busload.queue", size)


def expect_drained(dsn: str, size: int) -> None:
    expect_completed(dsn)
    expect(dsn, "SELECT count(*) FROM busload.execution WHERE outcome = 'COMPLETED'", size)


def metric(transport: str, what: str) -> str:
    return f"dispatch-{transport}-{what}"


BASE = {"create": metric(NONE, "create"), "drain": metric(NONE, "drain")}
"""What is measured without a broker, for all others to be seen beside."""


def _case(transport: str, what: str, title: str, measure: Any) -> Case:
    return our_case(
        metric(transport, what),
        title,
        partial(measure, transport=transport),
        prepare=install_pgmq if transport == "pgmq" else None,
        extent="batch",
        broker=None if transport in INSIDE else transport,
    )


def _creation(transport: str, what: str, strategy: DispatchName) -> Case:
    title = f"created and published on {TRANSPORTS[transport]}, {what}"
    return _case(transport, what, title, partial(create, strategy=strategy))


def _relay(what: str, title: str, *, message_per_command: bool) -> Case:
    return our_case(
        metric("relay", what),
        title,
        partial(relay, message_per_command=message_per_command),
        prepare=fill_outbox,
        extent="batch",
        broker="rabbitmq",
    )


CASES = [
    _case(NONE, "create", "created without a broker", partial(create, strategy=None)),
    *(
        _creation(transport, what, strategy)
        for transport in TRANSPORTS
        if transport != NONE
        for what, strategy in CREATIONS.items()
    ),
    our_case(metric(NONE, "drain"), "drained without a broker", drain_alone, extent="batch"),
    *(
        _case(transport, "drain", f"drained through {title}", drain)
        for transport, title in TRANSPORTS.items()
        if transport != NONE
    ),
    _relay("envelopes", "relay to RabbitMQ in envelopes", message_per_command=False),
    _relay("singles", "relay to RabbitMQ, a message per command", message_per_command=True),
]
BESIDE: dict[str, list[str]] = {
    metric(transport, what): [f"busload/{base}", *([f"{CELERY[transport]}/{kind}"] if transport in CELERY else [])]
    for transport in TRANSPORTS
    if transport != NONE
    for kind, base in BASE.items()
    for what in (CREATIONS if kind == "create" else ["drain"])
}
"""The keys that a metric of ours is to be seen beside: no broker, and Celery on the same broker."""

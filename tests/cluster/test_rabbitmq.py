"""Three nodes of RabbitMQ with quorum queues, under load: the one that leads, and is connected to, is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import pytest

from busload import WorkerSettings
from busload.errors import PublishError
from busload.transports import Message, Transport, find_transport
from examples.cluster.app import LEDGER
from tests.brokers.cluster import Node, heard
from tests.brokers.rabbitmq_cluster import cluster_url, queue_leader, run_rabbitmq_cluster
from tests.cluster.story import LONGEST, QUEUE, WITHIN, Hosts, each_was_run_once, under_way
from tests.given import Database, eventually
from tests.servers import shared_server

PUBLISHERS = 4


@pytest.fixture
def nodes() -> list[Node]:
    return heard(shared_server("rabbitmq-cluster", run_rabbitmq_cluster))


@pytest.mark.timeout(LONGEST)
async def test_a_node_dies_and_all_commands_are_run_once(
    nodes: list[Node], dsn: str, database: Database, worker_settings: WorkerSettings
) -> None:
    """Workers hardly poll here: what is done after the kill was delivered by those that are left."""
    database.rows(LEDGER)
    url = cluster_url(nodes)
    hosts = Hosts(dsn, url, replace(worker_settings, broker_poll_every=timedelta(minutes=1)))
    async with hosts.running(), publishers(url) as others:
        await eventually(hosts.connected, within=WITHIN)
        victim, survivor, _ = nodes
        assert await asyncio.to_thread(queue_leader, victim, QUEUE) == victim.name
        sending = asyncio.create_task(hosts.send())
        await under_way(database)
        victim.kill()
        before = hosts.claimed()
        await all_can_publish(others)
        batch_ids = await sending
        await each_was_run_once(database, batch_ids)
        assert hosts.claimed() > before
        await hosts.nothing_is_left()
        assert await asyncio.to_thread(queue_leader, survivor, QUEUE) != victim.name


@asynccontextmanager
async def publishers(url: str) -> AsyncIterator[Sequence[Transport]]:
    """Each with a queue that is led by the node they are connected to."""
    transports = [find_transport(url) for _ in range(PUBLISHERS)]
    try:
        await transports[0].declare([other_queue(number) for number in range(PUBLISHERS)])
        yield transports
    finally:
        for transport in transports:
            await transport.aclose()


async def all_can_publish(transports: Sequence[Transport]) -> None:
    """At once after the kill, when nobody leads: that must not harm what is published later."""

    async def publish(number: int) -> None:
        while True:
            try:
                return await transports[number].publish([Message(other_queue(number), "1-1-0", b"x")])
            except PublishError:
                await asyncio.sleep(0.02)

    async with asyncio.timeout(WITHIN):
        await asyncio.gather(*(publish(number) for number in range(len(transports))))


def other_queue(number: int) -> str:
    return f"busload.other-{number}"
